"""Brings a joining replica in sync with its stage: fetches a snapshot, loads it and catches up from there.

The snapshot has grown old on its way. For every version the sources are asked for the step that followed: its aggregate
and its commits. A commit is followed if it is a quorum certificate. Once a certificate of every stage is known, the
aggregate is fetched, checked against the own stage's commit and applied, as every replica did. In sync with the others,
the joining replica is a member from the open step on (docs/protocol.md, rule 18).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence, Set
from dataclasses import replace
from typing import Any

from swarmnet.averaging.exchange import Exchange
from swarmnet.clock import loop_time
from swarmnet.errors import BadMessage, NoReplica, PeerGone, PeerTimeout, Refused, RejectCode, SwarmError
from swarmnet.fetch.driver import GRACE_S, expect, first_answers
from swarmnet.ids import PeerId, next_chain
from swarmnet.messages import (
    Answer,
    Commit,
    Finished,
    Rejected,
    Round,
    Snapshot,
    Stamp,
    StateHeader,
    TrailRequest,
    TrailStep,
)
from swarmnet.stage.seams import Compute
from swarmnet.state.catch_up import WITHIN, Ahead, InSync, line_needed, next_stamp, sums_arrive
from swarmnet.state.snapshot_fetch import SnapshotFetch, Sources, TransferProgress
from swarmnet.step.commits import evidence
from swarmnet.step.gate import Shape
from swarmnet.step.member import Member
from swarmnet.transport import Transport

_ATTEMPTS, _PAUSE_S = 10, 0.5
"""How often one step is asked for while no source answers."""


class ReplayLogEnds(SwarmError):
    """No source remembers the step that comes next: a newer snapshot is needed."""


class Joiner:
    """Brings one (peer, stage) in sync. Decides neither when state is needed nor which peers might have it.

    Args:
        serving: tells who serves a stage, as records say.
        step_s: tells how long a step takes the others; 0 if nothing is known.
        event: `fetching`, `following` and `fetching_again` say how far it is, `too_slow` that it will never be in sync,
            `join_failed` which source did not deliver.
    """

    def __init__(
        self,
        transport: Transport,
        engine: Compute,
        exchange: Exchange,
        member: Member,
        *,
        stage: int,
        shape: Shape,
        serving: Callable[[int], Set[PeerId]],
        step_s: Callable[[], float],
        event: Callable[[str, dict[str, object]], None],
    ) -> None:
        self._engine, self._exchange, self._member, self._shape = engine, exchange, member, shape
        self._stage, self._serving, self._step_s, self._event = stage, serving, step_s, event
        self.whole = False
        """Is the state in the engine one that may be served?"""
        self.touched = False
        """Does the engine hold other weights than it was built with?"""
        self._began = self._collected = 0.0  # when what is under way began, and the bytes of aggregates before
        self._copy_rate = 0.0  # bytes per second of the last snapshot; 0: there was none
        self._sources = 0
        self._too_slow = False
        self._proven: dict[Commit, Commit] = {}  # the certificates among the commits that were told last
        self._said: set[tuple[object, ...]] = set()
        self._fetch = SnapshotFetch(
            transport,
            stage,
            max_bytes=engine.snapshot_bytes(stage),
            failed=self.say_failed,
            progress=self._say_progress,
            unfit=self.unfit,
        )

    async def run(
        self, sources: Sources, *, version: int = -1, first: tuple[StateHeader, memoryview] | None = None
    ) -> tuple[InSync, int]:
        """Fetch and catch up; returns where the engine stands then, and the bytes of the snapshot.

        first: a snapshot that is here already, to begin with. sources() is asked again and again. Raises NoReplica if
        they hand nothing over, or what the last of them raised; the engine may then stand at an older version.
        """
        self._too_slow = False
        while True:
            self._began = loop_time()
            if first is not None:
                (header, data), first = first, None
            else:
                snapshot, data = await self._fetch.fetch(sources, version=version)
                # A checkpoint of another replica may be older than the restart that goes on from it.
                header = replace(snapshot.header, restart=self._member.restart)
            num_bytes = len(data)
            self.touch()
            try:
                await self._engine.restore(data, version=header.version)
            except BadMessage as error:
                self._fetch.useless(error)
                continue
            del data
            self._stand(header)
            self._engine.lengthen(header.notices)
            self._began, self._collected = loop_time(), self._exchange.collected_bytes
            try:
                reached = await self._catch_up(header, sources)
            # The others have moved on by more than they remember.
            except ReplayLogEnds as error:
                self._event("fetching_again", {"version": header.version, "reason": str(error)})
                continue
            self._said.clear()
            return reached, num_bytes

    def forget(self) -> None:
        """The run has gone back: pieces of a past that was given up are of no use."""
        self._fetch.forget()

    def touch(self) -> None:
        """From now on the weights may not be served: a restore runs on in the compute thread even if cancelled."""
        self.touched, self.whole = True, False

    def unfit(self, snapshot: Snapshot, version: int) -> Refused | BadMessage | None:
        """Why a described snapshot is of no use. One asked for by its version may come from a disk, and is then as good
        as any up to where the run has last gone back to; the newest one is of the present, or of no use."""
        at, restart = snapshot.header, self._member.restart
        try:
            self._shape.notices.horizon(at.notices)
        except ValueError as error:
            return BadMessage(RejectCode.MALFORMED, str(error), version=at.version)
        if at.version > self._shape.furthest:
            return BadMessage(RejectCode.MALFORMED, "a copy of a step after the last", version=at.version)
        if at.restart == restart or (version >= 0 and at.version <= restart.version):
            return None
        return Refused(RejectCode.STALE, "a copy from before the run went back", version=at.version)

    def say_failed(self, source: PeerId, error: SwarmError) -> None:
        """Once per source and kind of failure until a join succeeds: it is tried again at every heartbeat."""
        self._say({"donor": source, "reason": str(error)}, source, type(error), error.facts.get("code"))

    def say_given_up(self, error: SwarmError) -> None:
        """No source has delivered. Once per reason until a join succeeds."""
        self._say({"reason": str(error)}, type(error), error.message)

    # ------------------------------------------------------------ catching up

    async def _catch_up(self, header: StateHeader, sources: Sources) -> InSync:
        """From `header`, where the engine stands, step by step along quorum certificates: no source has to be believed.

        Raises ReplayLogEnds, or NoReplica if no source answers.
        """
        attempts = 0
        while True:
            stamp = next_stamp(header, self._stage, self._engine.delay)
            steps, forgotten = await self._ask(stamp, self._fetch.calls.usable(sources()))
            try:
                if steps:
                    arrived = await self._follow(header, stamp, steps)
                # All sources that answer have forgotten this step: only a newer snapshot helps.
                elif forgotten:
                    raise ReplayLogEnds("the sources do not remember the next step", version=header.version)
                else:
                    raise NoReplica("no source tells the next step", stage=self._stage, version=header.version)
            except (NoReplica, BadMessage, Refused, PeerGone, PeerTimeout):
                attempts += 1
                if attempts >= _ATTEMPTS:
                    raise
                await asyncio.sleep(_PAUSE_S)
                continue
            if isinstance(arrived, InSync):
                return arrived
            header, attempts = arrived, 0

    async def _follow(self, header: StateHeader, stamp: Stamp, steps: dict[PeerId, TrailStep]) -> StateHeader | InSync:
        """One step further, or in sync."""
        commits = max((steps[source].commits for source in sorted(steps)), key=len)
        finished, holders = self._holders(commits, steps)
        # The engine needs the aggregate itself, not only its description.
        if finished is not None:
            await self._collect(stamp, finished, holders)
        # The step is still open for those who told of it. A member fetches what its stage has committed.
        if finished is None or len(commits) < self._shape.num_stages:
            proven = tuple(commit for commit in commits if commit in self._proven)
            return InSync(header, finished, proven, self._last_commits(steps))
        after = self._member.after(commits)
        self._engine.lengthen(after.notices)
        await self._engine.apply(commits)
        self._stand(after)
        if all(commit in self._proven for commit in commits):
            self._member.membership.followed(commits)
        self._say_followed(after.version)
        return after

    def _last_commits(self, steps: dict[PeerId, TrailStep]) -> tuple[Commit, ...]:
        """The commits of the step before: they name the voters, and whom the next steps do not wait for.

        What they commit must lead to the chain that is here. The chain does not hold who contributed: of a stage's
        commits a certificate wins, then the one that most of those who serve the stage have signed, then what most
        sources tell.
        """
        member = self._member
        told = [step.last_commits for _, step in sorted(steps.items()) if step.last_commits]
        told = [last for last in told if next_chain(member.before, evidence(last)) == member.chain]

        def rank(commit: Commit, count: int) -> tuple[bool, int, int]:
            signers = member.membership.signers(commit, self._serving(commit.stage))
            return commit in self._proven, len(signers), count

        last = []
        for of_stage in zip(*told, strict=True):
            counts = Counter(of_stage)
            # Mostly all sources tell the same, and signatures take long to check.
            best = of_stage[0] if len(counts) == 1 else max(of_stage, key=lambda each: rank(each, counts[each]))
            last.append(self._proven.get(best, best))
        return tuple(last)

    def _holders(
        self, commits: Sequence[Commit], steps: dict[PeerId, TrailStep]
    ) -> tuple[Finished | None, list[PeerId]]:
        """The aggregate that the own stage has committed, and which sources describe it, most of them alike."""
        own = next((commit for commit in commits if commit.stage == self._stage), None)
        holders: dict[Finished, list[PeerId]] = {}
        for source, step in sorted(steps.items()):
            if own is not None and step.finished is not None and own.says(step.finished):
                holders.setdefault(step.finished, []).append(source)
        return max(holders.items(), key=lambda held: len(held[1]), default=(None, []))

    async def _collect(self, stamp: Stamp, finished: Finished, holders: Sequence[PeerId]) -> None:
        """Fetch that aggregate into the engine's buffer. Raises BadMessage, Refused, PeerGone, PeerTimeout."""
        error: SwarmError = BadMessage(RejectCode.MALFORMED, "not the sum its holders describe", step=stamp.step)
        # Of several that sent wrong bits between them each is tried alone.
        for group in [list(holders), *([holder] for holder in holders if len(holders) > 1)]:
            wanted = Round(stamp, finished.id, (), (), tuple(group))
            try:
                if await self._exchange.collect_from(wanted, finished.digest, *group, kind="replay") == finished:
                    return
            except (BadMessage, Refused) as failure:
                error = failure
            if len(group) == 1:
                self._fetch.calls.failed(group[0], error)
        raise error

    async def _ask(self, stamp: Stamp, sources: Sequence[PeerId]) -> tuple[dict[PeerId, TrailStep], bool]:
        """The step as each source tells it, with no commit but certificates; and whether one has forgotten it."""
        unproven: dict[PeerId, TrailStep] = {}
        proven = self._proven = {}  # signatures take long to check, and most sources tell the same

        def certified(commits: Sequence[Commit]) -> tuple[Commit, ...]:
            """Those that are certificates, with the votes that prove it."""
            for commit in commits:
                serving, now = self._serving(commit.stage), loop_time()
                if commit not in proven and self._member.membership.proven(commit, serving, now=now):
                    proven[commit] = commit
            return tuple(proven[commit] for commit in commits if commit in proven)

        def ask(source: PeerId) -> Coroutine[Any, Any, TrailStep | RejectCode | None]:
            def take(answer: Answer) -> TrailStep | RejectCode:
                if isinstance(answer, Rejected):
                    return answer.code
                step = expect(answer, TrailStep, source)
                if not self._fits(step, stamp):
                    raise BadMessage(RejectCode.MALFORMED, "no history of that step", step=stamp.step, peer=source)
                certified(step.last_commits)
                commits = certified(step.commits)
                if len(commits) < len(step.commits) == self._shape.num_stages:
                    unproven[source] = step
                    raise Refused(RejectCode.NOT_READY, "a commit without a certificate", step=stamp.step, peer=source)
                return replace(step, commits=commits)

            return self._fetch.calls.ask(source, TrailRequest(stamp), take)

        asked = {source: ask(source) for source in sources}
        answers, late = await first_answers(asked, counts=lambda answer: isinstance(answer, TrailStep))
        # A source that is silent while others answer is asked later next time.
        for source in late:
            self._fetch.calls.failed(source, PeerTimeout("says nothing", peer=source), after_s=GRACE_S)
        steps = {source: step for source in sources if isinstance(step := answers.get(source), TrailStep)}
        # All who signed it have left since, so it cannot be proven: what most sources tell is followed.
        if not steps and unproven:
            (most, _), *_ = Counter(step.commits for _, step in sorted(unproven.items())).most_common(1)
            steps = {source: step for source, step in unproven.items() if step.commits == most}
        return steps, RejectCode.NOT_FOUND in answers.values()

    def _fits(self, step: TrailStep, stamp: Stamp) -> bool:
        """Is it about that step, with commits of the step before of all stages, or none?"""
        stages = [commit.stage for commit in step.commits]
        in_order = stages == sorted(set(stages)) and all(stage < self._shape.num_stages for stage in stages)
        before = [(commit.stage, commit.step) for commit in step.last_commits]
        all_or_none = not before or before == [(stage, stamp.step - 1) for stage in range(self._shape.num_stages)]
        own = next((commit for commit in step.commits if commit.stage == self._stage), None)
        same = own is None or own.chain == stamp.chain
        # Every replica has applied the committed aggregate: another one would lead to other weights.
        if own is not None and step.finished is not None and len(stages) == self._shape.num_stages:
            same = same and own.says(step.finished)
        return in_order and all_or_none and same and all(commit.step == stamp.step for commit in step.commits)

    # ------------------------------------------------------------ inside

    def _stand(self, header: StateHeader) -> None:
        """The engine holds this version now; not to be served before it has caught up with the others."""
        self.touch()
        self._member.stand(header)

    def _say_followed(self, version: int) -> None:
        collected, since_s = self._exchange.collected_bytes - self._collected, loop_time() - self._began
        rate = sums_arrive(collected, since_s, copy=self._copy_rate, step_s=self._step_s())
        level_in = self._in_sync_in(version, 0, rate)
        self._event("following", {"version": version, "newest": self._newest(version), "level_in": level_in})

    def _newest(self, version: int) -> int:
        """The version that the other replicas have reached, as far as heartbeats tell; at least that one."""
        return max([version, *(seen.version for _, seen in self._member.view.mates() if seen.synced)])

    def _say(self, fields: dict[str, object], *known: object) -> None:
        if known not in self._said:
            self._said.add(known)
            self._event("join_failed", fields)

    def _say_progress(self, progress: TransferProgress) -> None:
        left, self._sources, self._copy_rate = progress.seconds_left, progress.sources, progress.bytes_per_s
        level_in = self._in_sync_in(progress.version, progress.total_bytes - progress.done_bytes, progress.bytes_per_s)
        self._event(
            "fetching",
            {
                "version": progress.version,
                "bytes": progress.done_bytes,
                "total": progress.total_bytes,
                "donors": progress.sources,
                "seconds_left": None if left is None else round(left, 1),
                "level_in": level_in,
            },
        )

    def _in_sync_in(self, version: int, state_bytes: int, bytes_per_s: float) -> float | None:
        """In how many steps, at this rate. If never, or after the run's end, it says so once, after two steps' time."""
        if not (step_s := self._step_s()) or not bytes_per_s:
            return None
        newest = self._newest(version)
        ahead = Ahead(state_bytes, newest - version, self._exchange.sum_bytes, step_s)
        steps, last = ahead.steps(bytes_per_s), self._shape.furthest - newest
        # A rate over less than two steps says little: links rest in one part of each.
        never = last > 0 and (steps is None or steps > last)
        if never and not self._too_slow and loop_time() - self._began > 2 * step_s:
            self._too_slow = True
            needs = ahead.needs(min(WITHIN, last))
            self._event(
                "too_slow",
                {
                    "bytes_per_s": round(bytes_per_s),
                    "sum_bytes": round(ahead.sum_bytes),
                    "step_s": round(step_s, 1),
                    "within": min(WITHIN, last),
                    "needs": round(needs),
                    "donors": self._sources,
                    "needs_each": round(line_needed(needs, max(self._sources, 1))),
                },
            )
        return None if steps is None else round(steps, 1)
