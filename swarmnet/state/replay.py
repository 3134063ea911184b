"""Follow the others, step by step, from a copy of the state that has grown old on its way.

For every version the donors are asked what was summed and committed on it. Once a commit of every stage is known the
sum is fetched, checked against the own stage's commit and applied, as every member did. Level with the others, the
joiner is a member from the step that is open (docs/protocol.md, rule 18). Of donors that tell different stories the
larger group is believed; of equal ones, the one whose story has led nowhere less often. Nobody is waited for long: a
second after the first story, of a step that is over or of the open one, it goes on with what has been told. Knows no
rounds: how sums are fetched, which commits can be true and what follows from them is handed in.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from swarmnet.errors import BadMessage, NoReplica, PeerGone, PeerTimeout, Refused, RejectCode, SwarmError
from swarmnet.ids import PeerId
from swarmnet.messages import Commit, Finished, Rejected, Stamp, TrailRequest, TrailStep
from swarmnet.stage.seams import Compute
from swarmnet.state.header import StateHeader, loop_time
from swarmnet.state.snapshot_fetch import first_answers
from swarmnet.transport import Transport, ask

_ATTEMPTS, _PAUSE_S = 10, 0.5
"""How often one step is asked for while nobody answers."""

GRACE_S = 1.0
"""How long after the first story of a step those of others are waited for."""

Collect = Callable[[Stamp, Finished, Sequence[PeerId]], Coroutine[Any, Any, None]]
After = Callable[[StateHeader, tuple[Commit, ...]], StateHeader]
Refusal = Callable[[Commit], str | None]


class Failed(Protocol):
    """Hears of every donor that did not help."""

    def __call__(self, donor: PeerId, error: SwarmError, *, after_s: float = 0.0) -> None:
        """after_s: how long it was waited for."""


class ReplayLogEnds(SwarmError):
    """No donor remembers the step that comes next: a newer copy is needed."""


@dataclass(frozen=True, slots=True)
class Level:
    """Where a joiner is: `finished`, in the engine's buffer, and `commits` are of the open step, `last_commits`
    of the one before."""

    header: StateHeader
    finished: Finished | None = None
    commits: tuple[Commit, ...] = ()
    last_commits: tuple[Commit, ...] = ()


class Replay:
    """Brings one engine level with the replicas of its stage.

    collect(stamp, finished, holders): fetch that sum into the engine's buffer; raises Refused, BadMessage, PeerGone,
    PeerTimeout.
    after(header, commits): where a replica stands that applied on them. moved(header): the engine is there.
    failed(donor, error, after_s=...): a donor told something that cannot be, or nothing for so long.
    refusal(commit): why no run has such a commit.
    """

    def __init__(
        self,
        transport: Transport,
        engine: Compute,
        stage: int,
        num_stages: int,
        *,
        collect: Collect,
        after: After,
        moved: Callable[[StateHeader], None],
        failed: Failed,
        refusal: Refusal = lambda commit: None,
    ) -> None:
        self._transport, self._engine = transport, engine
        self._stage, self._num_stages = stage, num_stages
        self._collect, self._after, self._moved, self._failed = collect, after, moved, failed
        self._refusal = refusal

    async def run(self, header: StateHeader, donors: Callable[[], Sequence[PeerId]]) -> Level:
        """Follow from `header`, where the engine stands. Raises ReplayLogEnds, or NoReplica if nobody answers."""
        attempts = 0
        failures: Counter[PeerId] = Counter()  # how often what somebody told has led nowhere
        while True:
            stamp = header.oldest(self._stage, self._engine.delay)
            told, past = await self._told(stamp, donors())
            if not told:
                # All who answer have forgotten this step: only a newer copy helps.
                if past:
                    raise ReplayLogEnds("the donors' trail does not reach back", version=header.version)
                attempts += 1
                # It is given up only after several seconds of silence.
                if attempts >= _ATTEMPTS:
                    raise NoReplica("nobody says what came next", stage=self._stage, version=header.version)
                await asyncio.sleep(_PAUSE_S)
                continue
            story = self._believed(header, told, failures)
            try:
                arrived = await self._follow(header, stamp, story)
            # That story led nowhere: next time another one comes first.
            except (BadMessage, Refused, PeerGone, PeerTimeout):
                failures.update(story.keys())
                attempts += 1
                if attempts >= _ATTEMPTS:
                    raise
                await asyncio.sleep(_PAUSE_S)
                continue
            if isinstance(arrived, Level):
                return arrived
            header, attempts = arrived, 0
            self._moved(header)

    def _believed(
        self, header: StateHeader, told: dict[PeerId, TrailStep], failures: Counter[PeerId]
    ) -> dict[PeerId, TrailStep]:
        """The story that is followed, by who tells it, the one who knows most of it first. One of a step that is over
        comes before one of an open step, unless it has led nowhere more often."""
        over = {peer: step for peer, step in sorted(told.items()) if self._is_over(step)}
        opened = [failures[peer] for peer in told if peer not in over]
        # Nobody tells of a step that is over, or those who do have misled us more often.
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

    async def _follow(self, header: StateHeader, stamp: Stamp, story: dict[PeerId, TrailStep]) -> StateHeader | Level:
        """One step further, or level."""
        step = next(iter(story.values()))
        finished = next((each.finished for each in story.values() if each.finished is not None), None)
        # The engine needs the sum itself, not only the word about it.
        if finished is not None:
            await self._collect(stamp, finished, [peer for peer, each in story.items() if each.finished == finished])
        # The step is still open for those who told of it: here we are level.
        if finished is None or not self._is_over(step):
            before = next((each.last_commits for each in story.values() if each.last_commits), ())
            return Level(header, finished, step.commits, before)  # a member fetches what its stage has committed
        after = self._after(header, step.commits)
        self._engine.lengthen(after.extensions)
        await self._engine.apply(step.commits)
        return after

    def _is_over(self, step: TrailStep) -> bool:
        return len(step.commits) == self._num_stages

    async def _told(self, stamp: Stamp, donors: Sequence[PeerId]) -> tuple[dict[PeerId, TrailStep], bool]:
        """What the donors say of a step, and whether any of them says that it is past remembering."""
        asked = {donor: self._ask(donor, stamp) for donor in dict.fromkeys(donors)}
        answers, late = await first_answers(asked, grace_s=GRACE_S, counts=lambda told: isinstance(told, TrailStep))
        # Whoever is silent while others answer is asked later next time.
        for donor in late:
            self._failed(donor, PeerTimeout("says nothing", peer=donor), after_s=GRACE_S)
        told = {donor: step for donor in donors if isinstance(step := answers.get(donor), TrailStep)}
        return told, RejectCode.NOT_FOUND in answers.values()

    async def _ask(self, donor: PeerId, stamp: Stamp) -> TrailStep | RejectCode | None:
        began = loop_time()
        try:
            match answer := await ask(self._transport, donor, TrailRequest(stamp)):
                case Rejected():
                    return answer.code
                case TrailStep():
                    self._check(answer, stamp, donor)
                    return answer
                case _:
                    raise BadMessage(RejectCode.MALFORMED, "not an answer to TrailRequest", peer=donor)
        except (BadMessage, PeerGone, PeerTimeout) as error:
            self._failed(donor, error, after_s=loop_time() - began)
            return None

    def _check(self, step: TrailStep, stamp: Stamp, donor: PeerId) -> None:
        """Commits of distinct stages of this step, in order, and a sum that is the one the own stage committed."""
        stages = [commit.stage for commit in step.commits]
        in_order = stages == sorted(set(stages)) and all(stage < self._num_stages for stage in stages)
        if not in_order or any(commit.step != stamp.step for commit in step.commits):
            raise BadMessage(RejectCode.MALFORMED, "commits of other steps or stages", step=stamp.step, peer=donor)
        before = [(commit.stage, commit.step) for commit in step.last_commits]
        # A joiner stands on these: all stages, or none.
        if before and before != [(stage, stamp.step - 1) for stage in range(self._num_stages)]:
            raise BadMessage(RejectCode.MALFORMED, "commits of other steps or stages", step=stamp.step, peer=donor)
        refusal = next(filter(None, map(self._refusal, (*step.commits, *step.last_commits))), None)
        if refusal is not None:
            raise BadMessage(RejectCode.MALFORMED, refusal, step=stamp.step, peer=donor)
        mine = next((commit for commit in step.commits if commit.stage == self._stage), None)
        # Nothing is committed yet that the sum could be compared with.
        if mine is None or step.finished is None or len(step.commits) < self._num_stages:
            return
        found, committed = (
            (each.id, each.digest, each.num_tokens, each.loss_sum, each.grad_sq_norm, each.voided)
            for each in (step.finished, mine)
        )
        # Every member has applied the committed sum: another one would lead to other weights.
        if found != committed or mine.chain != stamp.chain:
            raise BadMessage(RejectCode.MALFORMED, "a sum that is not the committed one", step=stamp.step, peer=donor)
