"""The state of one replica: where it comes from, when it may be served, and what others are handed of it.

A replica begins with the weights of version 0, with a checkpoint from its own disk, or with a snapshot of the other
replicas' state. Decides neither when state is needed nor which peers might have it: that is `state_supply`.

A snapshot has grown old on its way. For every version the sources are asked for the step that followed: its aggregate
and its commits. A commit is followed if it is a quorum certificate. Once a certificate of every stage is known, the
aggregate is fetched, checked against the own stage's commit and applied, as every replica did. In sync with the others,
the joining replica is a member from the open step on (docs/protocol.md, rule 18).
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from swarmnet.clock import loop_time
from swarmnet.errors import (
    BadCheckpoint,
    BadMessage,
    NoReplica,
    PeerGone,
    PeerTimeout,
    Refused,
    RejectCode,
    SwarmError,
    UsageError,
)
from swarmnet.fetch.driver import GRACE_S, expect, first_answers
from swarmnet.ids import PeerId, Restart, first_chain, next_chain
from swarmnet.manifest.extension import Horizon
from swarmnet.messages import (
    Answer,
    Commit,
    Finished,
    Rejected,
    Round,
    Snapshot,
    SnapshotRequest,
    Stamp,
    StateHeader,
    TrailRequest,
    TrailStep,
)
from swarmnet.peer.witnesses import Witnesses
from swarmnet.state.catch_up import WITHIN, InSync, line_needed, next_stamp, rate_needed, steps_until_in_sync
from swarmnet.state.checkpoints import Checkpointer, CheckpointSchedule
from swarmnet.state.disk import Written
from swarmnet.state.snapshot_fetch import SnapshotFetch, Sources
from swarmnet.state.snapshot_source import SnapshotSource
from swarmnet.step.commits import evidence
from swarmnet.step.gate import Shape

if TYPE_CHECKING:
    from swarmnet.peer.peer import Peer
    from swarmnet.peer.replica import Replica

_BANNED_WITHIN = 3
"""Steps from the decision of a case to the commit that bans the peer, by which other stages learn where to go back."""

_ATTEMPTS, _PAUSE_S = 10, 0.5
"""How often one step is asked for while no source answers."""


class ReplayLogEnds(SwarmError):
    """No source remembers the step that comes next: a newer snapshot is needed."""


class Restorer:
    """Gives one replica its state, keeps it on disk, and hands it to other replicas."""

    def __init__(self, replica: Replica, peer: Peer, shape: Shape) -> None:
        self._engine, self._member, self._driver = replica.compute, replica.member, replica.driver
        self._exchange, self._event, self._shape = replica.exchange, replica.event, shape
        self._stage, self._equal_bits = replica.stage, peer.manifest.averaging.equal_bits
        stage = self._stage
        self.no_initial_weights = peer.limits.no_initial_weights
        """Why this peer has no weights of version 0 and takes them from other replicas, in words for a person."""
        self._first_chain = first_chain(peer.run_id, stage)
        training, for_bans = peer.manifest.training, 0
        if peer.manifest.audit.on_late == "rollback" and training.checkpoint_every:
            for_bans = math.ceil(_BANNED_WITHIN / training.checkpoint_every)
        self.checkpoints = Checkpointer(
            stage,
            self._engine,
            self.header,
            peer.disk,
            CheckpointSchedule(every=training.checkpoint_every, last=training.total_steps),
            keep=peer.limits.keep_checkpoints + for_bans,
            on_event=self._event,
            common=peer.on_every_disk,
            voters=peer.voters,
            check_notices=shape.notices.horizon,
        )
        self.source = SnapshotSource(
            stage,
            self._engine,
            self.header,
            leads_on=self._leads_on,
            on_disk=lambda: self.checkpoints.versions,
            load=self.checkpoints.load,
            piece_bytes=peer.limits.piece_bytes,
            kept=peer.limits.bases.get(stage),
        )
        self._fetch = SnapshotFetch(
            peer.transport,
            stage,
            max_bytes=self._engine.snapshot_bytes(stage),
            failed=self.say_failed,
            progress=self._say_progress,
            unfit=self.unfit,
            witnesses=self.witnesses(stage),
        )
        self._serving, self._step_s, self._carried = peer.have_state, peer.step_s, peer.carried
        self._whole = False  # is the state in the engine one that may be served?
        self._touched = False  # does the engine hold other weights than it was built with?
        self._restoring = False
        self._still = False  # no longer served, and nothing changes it: it may still be written
        self._began = self._collected = 0.0  # when what is under way began, and the bytes of aggregates before
        self._sources = 0
        self._too_slow = False
        self._proven: dict[Commit, Commit] = {}  # the certificates among the commits that were told last
        self._said: set[tuple[object, ...]] = set()

    @property
    def held(self) -> int | None:
        """Version of the weights in the engine, None while there are none that could be served."""
        return self._member.version if self._whole else None

    async def start_from_seed(self) -> bool:
        """Serve the weights of version 0, which every engine is built with. False: this peer has them no longer."""
        if self._touched or self._member.version:
            self._whole = False
            try:
                await self._engine.reset_to_seed()
            except UsageError as error:  # the checkpoint that the run began with was moved, or is another one now
                self.no_initial_weights = str(error)
                return False
        self._serve(InSync(StateHeader(0, self._first_chain, self._first_chain, self._first_chain)))
        self._say_synced("seed", began=loop_time(), num_bytes=0)
        return True

    def stay(self) -> None:
        """Go on with the weights that are here: no replica hands over newer ones, or the run goes on from these."""
        self._serve(InSync(self._member.header))

    async def load(self, version: int, *, becomes: int) -> bool:
        """Serve this peer's checkpoint of `version` as version `becomes`. False if it cannot be used.

        A later `becomes` drops what the stage has learned in between: the run allows it (training.allow_drop).
        """
        began = loop_time()
        if (found := await self.checkpoints.load(version)) is None:
            return False
        header, data = found
        self._touch()
        try:
            await self._engine.restore(data, version=version, becomes=becomes)
        except BadMessage as error:
            path = self.checkpoints.path(version)
            self.checkpoints.forget(version, BadCheckpoint(path, f"not this stage's state: {error.reason}"))
            return False
        notices = self._shape.notices
        if becomes != version:
            dropped = (becomes - version) * self._shape.num_microbatches
            reason = "no peer had newer state of this stage (training.allow_drop)"
            self._event("dropped", {"from": version, "to": becomes, "microbatches": dropped, "reason": reason})
            # The state is not that of one process any more: it stands on a chain of its own.
            own = next_chain(header.chain, f"dropped/{becomes}".encode())
            # What was signed for the steps that are left out is taken to be in force, as it is in the other stages.
            held = Horizon(self._shape.total_steps, header.notices)
            held = notices.foreseen(version, held, before=becomes)
            header = StateHeader(becomes, own, own, own, notices=held.notices, exclusions=header.exclusions)
        self._serve(InSync(header))
        self._say_synced("checkpoint", began=began, num_bytes=len(data), path=self.checkpoints.path(version))
        return True

    def _serve(self, reached: InSync) -> None:
        self._whole = True
        self.checkpoints.stand_under(self._member.restart)
        self._driver.restored(reached.header, reached.finished, reached.commits, reached.last_commits)
        self.checkpoints.ends_at(self._member.horizon.last)

    def _say_synced(self, how: str, *, began: float, num_bytes: int, **more: object) -> None:
        seconds = round(loop_time() - began, 3)
        self._event(
            "synced", {"version": self._member.version, "how": how, **more, "seconds": seconds, "bytes": num_bytes}
        )

    async def restore_from(self, donors: Sequence[PeerId], *, version: int = -1) -> bool:
        """Take over the state of `version` (-1: the newest) from all who have it, catch up by replay, and serve.

        False if no replica hands it over.
        """
        # One copy at a time: two would overwrite each other.
        if self._restoring:
            return False
        self._restoring = True
        began, view = loop_time(), self._member.view
        self._driver.suspend()
        try:
            reached, num_bytes = await self.join(
                lambda: self._sound(
                    [*donors, *(peer for peer, seen in view.mates() if seen.synced and not view.refused(peer))]
                ),
                version=version,
                first=await self._brought() if version < 0 else None,
            )
        except SwarmError as error:
            self.say_given_up(error)
            return False
        finally:
            self._restoring = False
        self._serve(reached)
        self._say_synced("snapshot", began=began, num_bytes=num_bytes)
        return True

    async def _brought(self) -> tuple[StateHeader, memoryview] | None:
        """What this peer has put on its disk to move here, once."""
        version, self._carried = self._carried, None
        found = None if version is None else await self.checkpoints.load(version)
        return found if found is not None and found[0].restart == self._member.restart else None

    def _sound(self, donors: Sequence[PeerId]) -> Sequence[PeerId]:
        """Those of them with weights that have not drifted, if there are such."""
        return [donor for donor in donors if not self._member.drift.strays(donor)] or donors

    async def put_by(self, restart: Restart) -> None:
        """Before the run goes back: write my newer version. If no other peer follows, the run may return to it."""
        # Nothing is lost by going back.
        if not self._member.synced or self._member.version <= restart.version:
            return
        await self._driver.settled()
        self._driver.suspend()
        self._still = True
        try:
            await self.checkpoints.write_now()
        finally:
            self._still = False

    def forget_past(self) -> None:
        """The run goes on from elsewhere: hand out nothing that was summed, copied or fetched by halves before."""
        self._exchange.forget()
        self.source.forget()
        self._fetch.forget()

    async def write_last(self) -> Written | None:
        """Write the newest whole version, as nothing can be computed here any more. None: there is none.

        Also one that could not be led on from. Lets a running apply end first.
        """
        await self._driver.settled()
        self._still = True
        return await self.checkpoints.write_now()

    def header(self) -> StateHeader | None:
        member = self._member
        stands = self._still and self._whole and self._driver.is_settled  # also after an apply that failed
        if not stands and (not member.synced or member.oldest.applying):
            return None
        return member.header

    def _leads_on(self, header: StateHeader) -> bool:
        """Can a replica that has that state be told what came next?"""
        stamp = next_stamp(header, self._member.stage, self._engine.delay)
        return stamp == self._member.oldest.stamp or self._exchange.replay_log.step(stamp) is not None

    def snapshot(self, request: SnapshotRequest) -> AsyncGenerator[Answer, None]:
        """Answer one `SnapshotRequest`; see SnapshotSource.serve."""
        self._exchange.replay_log.wanted()
        return self.source.serve(request)

    async def replay(self, request: TrailRequest) -> AsyncGenerator[Answer, None]:
        """Answer one `TrailRequest`."""
        member = self._member
        here = member.oldest.stamp if member.synced else None
        yield self._exchange.follow(
            request, here, TrailStep(member.oldest.finished, member.oldest.barrier.known, member.last_commits)
        )

    # ------------------------------------------------------------ from other replicas

    async def join(
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
            self._touch()
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

    def _touch(self) -> None:
        """From now on the weights may not be served: a restore runs on in the compute thread even if cancelled."""
        self._touched, self._whole = True, False

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

    def witnesses(self, stage: int) -> Witnesses:
        """Who is believed about states of that stage, as far as this replica knows."""
        return Witnesses(stage, self._member, equal_bits=self._equal_bits)

    def say_failed(self, source: PeerId, error: SwarmError) -> None:
        """Once per source and kind of failure until a join succeeds: it is tried again at every heartbeat."""
        self._say({"donor": source, "reason": str(error)}, source, type(error), error.facts.get("code"))

    def say_given_up(self, error: SwarmError) -> None:
        """No source has delivered. Once per reason until a join succeeds."""
        self._say({"reason": str(error)}, type(error), error.message)

    # ------------------------------------------------------------ catching up

    async def _catch_up(self, header: StateHeader, sources: Sources) -> InSync:
        """From `header`, where the engine stands, step by step along quorum certificates. A step whose
        signers have all left is taken as most sources tell it.

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
        wanted = Round(stamp, finished.id, (), (), tuple(holders))
        # Of several that sent wrong bits between them each is tried alone.
        for group in [list(holders), *([holder] for holder in holders if len(holders) > 1)]:
            try:
                if await self._exchange.collect_from(wanted, finished.digest, *group, kind="replay") == finished:
                    return
            except (BadMessage, Refused) as failure:
                error = failure
            if len(group) == 1:
                self._fetch.calls.failed(group[0], error)
        raise error

    async def _ask(self, stamp: Stamp, sources: Sequence[PeerId]) -> tuple[dict[PeerId, TrailStep], bool]:
        """The step as each source tells it, with certificates, else as most do; and whether one has forgotten it."""
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
        self._touch()
        self._member.stand(header)

    def _say_followed(self, version: int) -> None:
        collected, since_s = self._exchange.collected_bytes - self._collected, loop_time() - self._began
        level_in = self._in_sync_in(version, 0, collected / max(since_s, 1e-9))
        self._event("following", {"version": version, "newest": self._newest(version), "level_in": level_in})

    def _newest(self, version: int) -> int:
        """The version that the other replicas have reached, as far as heartbeats tell; at least that one."""
        return max([version, *(seen.version for _, seen in self._member.view.mates() if seen.synced)])

    def _say(self, fields: dict[str, object], *known: object) -> None:
        if known not in self._said:
            self._said.add(known)
            self._event("join_failed", fields)

    def _say_progress(self, snapshot: Snapshot, done_bytes: int, sources: int, bytes_per_s: float) -> None:
        version, total, self._sources = snapshot.header.version, snapshot.content.num_bytes, sources
        level_in = self._in_sync_in(version, total - done_bytes, bytes_per_s)
        self._event(
            "fetching",
            {
                "version": version,
                "bytes": done_bytes,
                "total": total,
                "donors": sources,
                "seconds_left": round((total - done_bytes) / bytes_per_s, 1) if bytes_per_s else None,
                "level_in": level_in,
            },
        )

    def _in_sync_in(self, version: int, state_bytes: int, bytes_per_s: float) -> float | None:
        """In how many steps, at this rate. If never, or after the run's end, it says so once, after two steps' time."""
        if not (step_s := self._step_s()) or not bytes_per_s:
            return None
        newest = self._newest(version)
        sum_bytes, last = self._exchange.sum_bytes, self._shape.furthest - newest
        to_come = state_bytes + (newest - version) * sum_bytes
        steps = steps_until_in_sync(to_come, sum_bytes, step_s, bytes_per_s)
        # A rate over less than two steps says little: links rest in one part of each.
        never = last > 0 and (steps is None or steps > last)
        if never and not self._too_slow and loop_time() - self._began > 2 * step_s:
            self._too_slow = True
            needs = rate_needed(to_come, sum_bytes, step_s, min(WITHIN, last))
            self._event(
                "too_slow",
                {
                    "bytes_per_s": round(bytes_per_s),
                    "sum_bytes": round(sum_bytes),
                    "step_s": round(step_s, 1),
                    "within": min(WITHIN, last),
                    "needs": round(needs),
                    "donors": self._sources,
                    "needs_each": round(line_needed(needs, max(self._sources, 1))),
                },
            )
        return None if steps is None else round(steps, 1)
