"""What a message of the step protocol must be before a machine looks at it. Pure.

The wire has checked types and ranges; here every value is held against the run: stages and indexes that exist, ballots
that their own leader sends, rounds that can be summed, commits that can be applied. What does not fit is dropped and
costs its sender only. Well-formed false messages pass (docs/protocol.md, Not proven). A notice of the run's owner is
believed and kept, whichever peer brings it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from swarmnet.bounds import LARGEST_LOSS, LARGEST_NORM
from swarmnet.ids import Ballot, PeerId
from swarmnet.manifest.extension import Notice, Notices
from swarmnet.manifest.schema import NO_DELAY, Delay
from swarmnet.messages import Commit, Committed, Heartbeat, Indexes, MemberState, StagePlan, StepControl
from swarmnet.step.rounds import round_refusal

MAX_BALLOT_AHEAD = 1024
"""Leaders take over one after the other: a number far ahead of the promised one is no next one."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers of the manifest that the step machines need. delay: which version's weights a step is computed on.
    group_size: members that exchange directly in a round (`averaging.grid`)."""

    num_stages: int
    num_microbatches: int
    total_steps: int
    max_discarded: int = 0
    delay: Delay = NO_DELAY
    group_size: int = 16
    notices: Notices = field(default_factory=Notices, compare=False)
    """What the run's owner has signed to extend it, as far as it is known here: it grows."""

    @property
    def furthest(self) -> int:
        """No version is after this one, as far as is known."""
        return max(self.total_steps, self.notices.furthest)


def refusal(
    sender: PeerId, message: StepControl, shape: Shape, promised: Ballot | None, highest: Callable[[], int]
) -> str | None:
    """Why a message is not looked at, or None. highest: of a ballot that two replicas of my stage at least follow."""
    if isinstance(message, Heartbeat):
        return _heartbeat(message, shape)
    if isinstance(message, Committed):
        return commit_refusal(message.commit, shape)
    if not 0 <= message.stamp.stage < shape.num_stages:
        return "no such stage"
    if isinstance(message, StagePlan) and message.ballot.peer != sender:
        return "a ballot of another peer"
    ahead = message.ballot.number - (promised.number if promised is not None else 0)
    # A Byzantine leader may have led some far ahead: the others follow, or they would refuse each other for ever.
    if ahead > MAX_BALLOT_AHEAD and message.ballot.number - highest() > MAX_BALLOT_AHEAD:
        return "a ballot far ahead of all others"
    for indexes in _indexes(message):
        if indexes and not 0 <= min(indexes) <= max(indexes) < shape.num_microbatches:
            return "no such microbatch"
    if isinstance(message, StagePlan) and message.attempt is not None:
        attempt = message.attempt
        if (attempt.stamp, attempt.id.ballot) != (message.stamp, message.ballot):
            return "a round of another term"
        notice = _notice(attempt.notice, attempt.stamp.step, shape) if attempt.notice else None
        return notice or round_refusal(attempt, shape.num_microbatches, shape.max_discarded)
    return None


def _heartbeat(beat: Heartbeat, shape: Shape) -> str | None:
    if not 0 <= beat.stamp.stage < shape.num_stages:
        return "no such stage"
    if not (0 <= beat.stamp.step <= shape.furthest and 0 <= beat.stamp.restart.version <= shape.furthest):
        return "no such step"
    if beat.measure is not None and beat.measure.version > beat.stamp.step:
        return "a measure of weights that are not there yet"
    if any(int.from_bytes(stages, "little") >> shape.num_stages for stages in (beat.known, beat.wants)):
        return "a stage that is none of this run"
    if len(beat.commits) > shape.num_stages or len(beat.last_commits) > shape.num_stages:
        return "more commits than stages"
    return next(filter(None, (commit_refusal(commit, shape) for commit in (*beat.commits, *beat.last_commits))), None)


def commit_refusal(commit: Commit, shape: Shape) -> str | None:
    """Why no run of this shape has such a commit, or None."""
    # Learnt first: the step may be one of those that it adds to the run.
    if commit.notice and (reason := _notice(commit.notice, commit.step, shape)):
        return reason
    if not (0 <= commit.stage < shape.num_stages and 0 <= commit.step < shape.furthest):
        return "a commit of no stage or step of this run"
    if any(not 0 <= index < shape.num_microbatches for index in commit.discarded):
        return "a commit that skips an index outside this run"
    sane = abs(commit.loss_sum) < LARGEST_LOSS and 0.0 <= commit.grad_sq_norm < LARGEST_NORM
    if commit.num_tokens < 1 or not sane:
        return "a commit that cannot be applied"
    return None


def _notice(notice: Notice, step: int, shape: Shape) -> str | None:
    try:
        shape.notices.learn(notice)
    except ValueError as error:
        return str(error)
    return None if notice.value.since == step else "a notice that begins at another step"


def _indexes(message: StagePlan | MemberState) -> tuple[Indexes, ...]:
    """All sets of microbatches in a message."""
    if isinstance(message, MemberState):
        return message.wants, message.returns, message.owned, message.summed, message.non_finite
    found = (message.assigned, message.execute, message.given, frozenset(index for index, _ in message.moved))
    if message.attempt is None:
        return found
    return *found, message.attempt.discarded, *(indexes for _, _, indexes in message.attempt.contributions)
