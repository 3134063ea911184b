"""Catch up with the replicas of a stage, step by step, from a snapshot that has grown old on its way.

For every version the sources are asked for their history of it: the aggregate and the commits. Once a commit of every
stage is known, the aggregate is fetched, checked against the own stage's commit and applied, as every replica did. In
sync with the others, the joining replica is a member from the open step on (docs/protocol.md, rule 18). If the sources
tell different histories, the larger group is believed; of equal groups the one whose history has led nowhere less
often. A second after the first history it goes on with what was told. It knows no rounds: how an aggregate is fetched,
which commits can be true and what follows from them is handed in.

`Ahead` forecasts when that ends. While the snapshot travels the others make steps, and the aggregate of each has to
come, too. S bytes of the snapshot and b aggregates are to come, of g bytes each; r bytes a second arrive; a step takes
T seconds. The replica is in sync after t more steps:

    r T t = S + (b + t) g        t = (S + b g) / (r T - g)

and never if a step brings no more bytes than its own aggregate has.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from swarmnet.errors import BadMessage, NoReplica, PeerGone, PeerTimeout, Refused, RejectCode, SwarmError
from swarmnet.fetch.driver import GRACE_S, HolderCalls, expect, first_answers
from swarmnet.ids import PeerId
from swarmnet.manifest.schema import Delay
from swarmnet.messages import Answer, Commit, Finished, Rejected, Stamp, StateHeader, TrailRequest, TrailStep
from swarmnet.net.traffic import STATE_SHARE
from swarmnet.stage.seams import Compute

_ATTEMPTS, _PAUSE_S = 10, 0.5
"""How often one step is asked for while no source answers."""

Collect = Callable[[Stamp, Finished, Sequence[PeerId]], Coroutine[Any, Any, None]]
After = Callable[[StateHeader, tuple[Commit, ...]], StateHeader]
Refusal = Callable[[Commit], str | None]


class ReplayLogEnds(SwarmError):
    """No source remembers the step that comes next: a newer snapshot is needed."""


@dataclass(frozen=True, slots=True)
class InSync:
    """Where a joining replica is: `finished`, in the engine's buffer, and `commits` are of the open step,
    `last_commits` of the one before."""

    header: StateHeader
    finished: Finished | None = None
    commits: tuple[Commit, ...] = ()
    last_commits: tuple[Commit, ...] = ()


def next_stamp(header: StateHeader, stage: int, delay: Delay) -> Stamp:
    """The stamp of the step that is applied next: it carries the chain of the weights it is computed on."""
    chain = header.before if delay.behind(header.version) else header.chain
    return Stamp(header.version, stage, chain, header.restart)


class CatchUp:
    """Brings one engine to the open step of its stage.

    Args:
        calls: asks the sources, and names those that tell something impossible, or nothing.
        collect: fetches that aggregate from its holders into the engine's buffer. Raises Refused, BadMessage, PeerGone,
            PeerTimeout.
        after: the header of a replica that has applied on these commits.
        moved: is told where the engine stands.
        refusal: why no run has such a commit.
    """

    def __init__(
        self,
        calls: HolderCalls,
        engine: Compute,
        stage: int,
        num_stages: int,
        *,
        collect: Collect,
        after: After,
        moved: Callable[[StateHeader], None],
        refusal: Refusal = lambda commit: None,
    ) -> None:
        self._calls, self._engine = calls, engine
        self._stage, self._num_stages = stage, num_stages
        self._collect, self._after, self._moved, self._refusal = collect, after, moved, refusal

    async def run(self, header: StateHeader, sources: Callable[[], Sequence[PeerId]]) -> InSync:
        """Catch up from `header`, where the engine stands. Raises ReplayLogEnds, or NoReplica if no source answers."""
        attempts = 0
        failures: Counter[PeerId] = Counter()  # how often the history of a source has led nowhere
        while True:
            stamp = next_stamp(header, self._stage, self._engine.delay)
            told, forgotten = await self._histories(stamp, self._calls.usable(sources()))
            believed: dict[PeerId, TrailStep] = {}
            try:
                if told:
                    believed = self._believed(header, told, failures)
                    arrived = await self._follow(header, stamp, believed)
                # All sources that answer have forgotten this step: only a newer snapshot helps.
                elif forgotten:
                    raise ReplayLogEnds("the donors' trail does not reach back", version=header.version)
                else:
                    raise NoReplica("nobody says what came next", stage=self._stage, version=header.version)
            # Next time another history comes first. It is given up only after several seconds.
            except (NoReplica, BadMessage, Refused, PeerGone, PeerTimeout):
                failures.update(believed.keys())
                attempts += 1
                if attempts >= _ATTEMPTS:
                    raise
                await asyncio.sleep(_PAUSE_S)
                continue
            if isinstance(arrived, InSync):
                return arrived
            header, attempts = arrived, 0
            self._moved(header)

    def _believed(
        self, header: StateHeader, told: dict[PeerId, TrailStep], failures: Counter[PeerId]
    ) -> dict[PeerId, TrailStep]:
        """The history that is followed, by source, the one that knows most of it first. A step that is over comes
        before an open step, unless its history has led nowhere more often."""
        over = {peer: step for peer, step in sorted(told.items()) if self._is_over(step)}
        opened = [failures[peer] for peer in told if peer not in over]
        if not over or (opened and min(opened) < min(failures[peer] for peer in over)):
            best = max(
                told, key=lambda peer: (-failures[peer], told[peer].finished is not None, len(told[peer].commits))
            )
            same = {peer: step for peer, step in told.items() if step.finished == told[best].finished}
            return {best: told[best]} | same
        groups: dict[StateHeader, dict[PeerId, TrailStep]] = {}
        for peer, step in over.items():
            groups.setdefault(self._after(header, step.commits), {})[peer] = step
        return max(
            groups.values(),
            key=lambda group: (
                len(group),
                -min(failures[peer] for peer in group),
                any(step.finished is not None for step in group.values()),
                sorted(group),
            ),
        )

    async def _follow(self, header: StateHeader, stamp: Stamp, told: dict[PeerId, TrailStep]) -> StateHeader | InSync:
        """One step further, or in sync."""
        step = next(iter(told.values()))
        finished = next((each.finished for each in told.values() if each.finished is not None), None)
        # The engine needs the aggregate itself, not only its description.
        if finished is not None:
            await self._collect(stamp, finished, [peer for peer, each in told.items() if each.finished == finished])
        # The step is still open for those who told of it. A member fetches what its stage has committed.
        if finished is None or not self._is_over(step):
            before = next((each.last_commits for each in told.values() if each.last_commits), ())
            return InSync(header, finished, step.commits, before)
        after = self._after(header, step.commits)
        self._engine.lengthen(after.extensions)
        await self._engine.apply(step.commits)
        return after

    def _is_over(self, step: TrailStep) -> bool:
        return len(step.commits) == self._num_stages

    async def _histories(self, stamp: Stamp, sources: Sequence[PeerId]) -> tuple[dict[PeerId, TrailStep], bool]:
        """What the sources tell of a step, and whether one of them has forgotten it."""

        def ask(source: PeerId) -> Coroutine[Any, Any, TrailStep | RejectCode | None]:
            def take(answer: Answer) -> TrailStep | RejectCode:
                if isinstance(answer, Rejected):
                    return answer.code
                step = expect(answer, TrailStep, source)
                if why := self._contradiction(step, stamp):
                    raise BadMessage(RejectCode.MALFORMED, why, step=stamp.step, peer=source)
                return step

            return self._calls.ask(source, TrailRequest(stamp), take)

        asked = {source: ask(source) for source in sources}
        answers, late = await first_answers(asked, counts=lambda told: isinstance(told, TrailStep))
        # A source that is silent while others answer is asked later next time.
        for source in late:
            self._calls.failed(source, PeerTimeout("says nothing", peer=source), after_s=GRACE_S)
        told = {source: step for source in sources if isinstance(step := answers.get(source), TrailStep)}
        return told, RejectCode.NOT_FOUND in answers.values()

    def _contradiction(self, step: TrailStep, stamp: Stamp) -> str:
        """What in this history cannot be, in words; "" if nothing."""
        stages = [commit.stage for commit in step.commits]
        in_order = stages == sorted(set(stages)) and all(stage < self._num_stages for stage in stages)
        before = [(commit.stage, commit.step) for commit in step.last_commits]
        # A joining replica stands on the commits of the step before: of all stages, or none.
        all_or_none = not before or before == [(stage, stamp.step - 1) for stage in range(self._num_stages)]
        if not (in_order and all_or_none) or any(commit.step != stamp.step for commit in step.commits):
            return "commits of other steps or stages"
        for commit in (*step.commits, *step.last_commits):
            if refusal := self._refusal(commit):
                return refusal
        mine = next((commit for commit in step.commits if commit.stage == self._stage), None)
        # As long as the step is open, nothing is committed that the aggregate could be compared with.
        if mine is None or step.finished is None or not self._is_over(step):
            return ""
        found, committed = (
            (each.id, each.digest, each.num_tokens, each.loss_sum, each.grad_sq_norm, each.voided)
            for each in (step.finished, mine)
        )
        # Every replica has applied the committed aggregate: another one would lead to other weights.
        same = found == committed and mine.chain == stamp.chain
        return "" if same else "a sum that is not the committed one"


# ---------------------------------------------------------------- when it ends

WITHIN = 30
"""Steps in which a joining replica should be in sync."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """What a joining replica still has to fetch."""

    state_bytes: float
    """Of the snapshot."""
    sums: float
    """Of the steps that the others have made since it was taken."""
    sum_bytes: float
    """Of each."""
    step_s: float
    """How long a step takes the others."""

    @property
    def num_bytes(self) -> float:
        return self.state_bytes + self.sums * self.sum_bytes

    def steps(self, bytes_per_s: float) -> float | None:
        """How many more steps the others make until the replica is in sync, at that rate; None: it never is."""
        gained = bytes_per_s * self.step_s - self.sum_bytes
        return self.num_bytes / gained if gained > 0.0 else None

    def needs(self, within: float) -> float:
        """Bytes per second with which the replica is in sync after so many steps."""
        return (self.num_bytes / within + self.sum_bytes) / self.step_s


def sums_arrive(num_bytes: float, seconds: float, *, copy: float, step_s: float) -> float:
    """Bytes per second in which aggregates arrive, of which so many have come in so long.

    copy: the rate of the snapshot before them; 0: there was none. Links rest in one part of each step, so the first
    aggregates say little: as much as a step of `step_s` brought of the snapshot is counted with them.
    """
    before_s = step_s if copy else 0.0
    return (num_bytes + copy * before_s) / max(seconds + before_s, 1e-9)


def line_needed(bytes_per_s: float, sources: int) -> float:
    """The bandwidth that each source needs if all of them are busy all the time."""
    return bytes_per_s / (STATE_SHARE * sources)
