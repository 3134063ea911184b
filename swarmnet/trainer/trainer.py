"""Feeds microbatches into stage 0 and holds no weights. Any number of trainers may run; none is needed for safety.

Keeps a window of microbatches in flight and measures the held-out loss in parallel when it is due. It is at most one
step ahead of those that are open: it begins a step when its share of the one before is back, or, where steps overlap,
when that is sent and the share of the one before that is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import statistics
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Mapping
from dataclasses import replace
from typing import Protocol

from swarmnet.audit.case import Verify, needs_no_recheck, refusal, suspect_of
from swarmnet.clock import loop_time
from swarmnet.directory import Directory, Record
from swarmnet.errors import Refused, RejectCode
from swarmnet.ids import NO_RESTART, PeerId, Restart
from swarmnet.manifest.extension import Horizon
from swarmnet.manifest.file import to_toml
from swarmnet.manifest.schema import Manifest
from swarmnet.messages import (
    Accepted,
    Answer,
    Case,
    Control,
    Fetch,
    Fetched,
    Gradient,
    HistoryRequest,
    ManifestData,
    ManifestRequest,
    Packed,
    Process,
    Rejected,
    Request,
)
from swarmnet.net.background import running
from swarmnet.net.history import HistoryBook
from swarmnet.net.nat.dial_back import Asking
from swarmnet.net.peer_host import PeerHost
from swarmnet.net.records import left_out, unserved, waiting_for_stages
from swarmnet.net.stop import unless_stopped
from swarmnet.pipeline.caller import Caller
from swarmnet.pipeline.inputs import AnswerCheck
from swarmnet.pipeline.router import Router, RoutingRule, least_time
from swarmnet.pipeline.slots import Slots
from swarmnet.quorum import reached_by_half, reached_by_most
from swarmnet.stage.canonical import rate_of
from swarmnet.state.rollback import MAX_RESTARTS_AHEAD
from swarmnet.telemetry.figures import Evaluation
from swarmnet.telemetry.kinds import OnEvent
from swarmnet.trainer.evaluations import Evaluations
from swarmnet.trainer.shares import FedShares, feeder
from swarmnet.transport import ReadPayload, Transport


class TokenSource(Protocol):
    """The run's data, by the number of a microbatch in its stream (`pipeline.windows.OwnTokens`)."""

    def training(self, number: int) -> tuple[Packed, ...]:
        """(tokens, proof) of training microbatch `number` = step * M + index; tokens are int32 [B, T + 1]."""
        ...

    def evaluation(self, number: int) -> tuple[Packed, ...]:
        """(tokens,) of a held-out microbatch."""
        ...


_PROGRESS_S = 10.0
"""How often a person is told where the run is."""


class FirstStage:
    """The replicas of stage 0, as the directory announces them and as they can be called.

    records: all but mine, as last read by `refresh`.
    """

    def __init__(
        self,
        me: PeerId,
        manifest: Manifest,
        transport: Transport,
        directory: Directory,
        on_event: OnEvent,
        rule: RoutingRule,
    ) -> None:
        self._me, self._manifest, self._directory, self._on_event = me, manifest, directory, on_event
        self._router = Router(manifest.protocol.timers, stages=manifest.cut.stages, rule=rule)
        self.records: dict[PeerId, Record] = {}
        self.unsent: Counter[int] = Counter()  # step -> microbatches of my share not sent
        self.restart = NO_RESTART
        self._shut_out: set[PeerId] = set()
        self._without: frozenset[PeerId] = frozenset()
        self._banned: frozenset[PeerId] = frozenset()
        self._dead: dict[PeerId, int] = {}  # peer -> the incarnation that is gone
        self.caller = Caller(
            transport,
            self._router,
            self,
            AnswerCheck(
                (),
                manifest.training.microbatch_size * manifest.training.sequence_length,
                further=manifest.cut.stages - 1,
            ),
        )

    async def refresh(self) -> bool:
        """Read all records. Returns True if the run goes on from another version (`restart`)."""
        found = await self._directory.records((0,), at_once=not self.candidates())
        self.records = {each.peer: each for each in found if each.peer not in (self._me, *self._shut_out)}
        self._without = left_out(self.records.values(), 0)
        before, self._banned = self._banned, left_out(self.records.values(), 0, banned=True)
        for peer in self._banned - before:
            self.caller.leave(peer)
        # In a large run it knows only those that it calls.
        stages = range(self._manifest.cut.stages if self._directory.complete() else 1)
        newest = min(self._newest_restart(stage) for stage in stages)
        # The steps under way stay valid.
        if newest <= self.restart:
            return False
        self.restart = newest
        return True

    def gone(self, peer: PeerId) -> None:
        """The peer is definitely dead."""
        if peer in self.records:
            self._dead[peer] = self.records[peer].incarnation
            self.caller.gone(peer)

    def hear(self, case: Case, verify: Verify) -> None:
        """Stop calling a peer if two signatures of its own prove its fault. The records tell other bans."""
        peer = suspect_of(case)
        if peer in self.records and needs_no_recheck(case) and not refusal(case, frozenset(), verify):
            self._shut_out.add(peer)
            del self.records[peer]
            self.caller.leave(peer)

    def candidates(self) -> Mapping[PeerId, int]:
        """Live replicas that have their state, and their queues."""
        found: dict[PeerId, int] = {}
        for peer, record in self.records.items():
            # A restarted process has another incarnation, and is called again.
            if self._dead.get(peer) == record.incarnation:
                continue
            for status in record.stages:
                if status.stage == 0 and status.synced:
                    found[peer] = status.queue
        # No replica would count what it computes; but without another replica the trainer would wait for none.
        return {peer: queue for peer, queue in found.items() if peer not in self._without} or found

    def lacks(self) -> dict[str, object] | None:
        """What no step can be done without and is not there, as fields of the event `waiting`; None if all is there."""
        missing = unserved(self.records.values(), num_stages=self._manifest.cut.stages)
        if missing and self._directory.complete():
            return waiting_for_stages(missing)
        return None if self.candidates() else {"reason": "no replica of stage 0 has its weights yet"}

    def _proven(self) -> list[Record]:
        """The records of the replicas that have answered, because a record costs nothing; all while there are none."""
        proven = self._router.proven()
        return [record for peer, record in self.records.items() if peer in proven] or list(self.records.values())

    def newest_version(self) -> int:
        """Of the weights, as half of those who serve the stage say: what one says is a word."""
        versions = [
            s.version
            for record in self._proven()
            if record.restart == self.restart
            for s in record.stages
            if s.stage == 0 and s.synced
        ]
        return reached_by_half(versions) if versions else self.restart.version

    @property
    def steps(self) -> int:
        """How many steps the run has, as half of those who serve the stage say; never fewer than the manifest."""
        said = [
            record.steps
            for record in self._proven()
            if record.restart == self.restart and any(s.stage == 0 and s.synced for s in record.stages)
        ]
        return max(self._manifest.training.total_steps, reached_by_half(said) if said else 0)

    def patience_s(self) -> float:
        """How long the trainer waits for a silent replica."""
        return self._router.patience_s()

    def in_flight_limit(self) -> int:
        """Microbatches in flight: the slots that stage 0 announces, and one waiting in front of each replica."""
        slots = [s.slots + 1 for record in self.records.values() for s in record.stages if s.stage == 0]
        return max(sum(slots), 2)

    def leaving(self) -> frozenset[PeerId]:
        return frozenset(
            peer
            for peer, record in self.records.items()
            for status in record.stages
            if status.stage == 0 and status.draining
        )

    def _newest_restart(self, stage: int) -> Restart:
        """The highest restart that most of this stage are under, or beyond. What one says moves no trainer."""
        restarts = [
            record.restart
            for record in (self._proven() if stage == 0 else self.records.values())
            if any(s.stage == stage for s in record.stages)
            and record.restart.version <= max(self._manifest.training.total_steps, record.steps)
            and record.restart.number <= self.restart.number + MAX_RESTARTS_AHEAD
        ]
        return reached_by_most(restarts) if restarts else NO_RESTART

    def contributors(self) -> frozenset[PeerId]:
        return frozenset()

    def left(self, step: int) -> int:
        return self.unsent[step]

    def rerouted(self, request: Process, peer: PeerId, reason: str) -> None:
        fields = {"stage": -1, "step": request.step, "index": request.index, "peer": peer, "reason": reason}
        self._on_event("rerouted", fields)


class Trainer:
    """One trainer. Implements Service: it hands out tokens to peers that have no data, and the run's manifest.

    rule: which replica of stage 0 gets a microbatch. lots: draws which microbatches of an evaluation are looked at
    twice.
    """

    def __init__(
        self,
        host: PeerHost,
        manifest: Manifest,
        *,
        transport: Transport,
        tokens: TokenSource,
        on_event: OnEvent,
        rule: RoutingRule = least_time,
        lots: random.Random = random.SystemRandom(),  # noqa: B008
    ) -> None:
        self._host, self._manifest, self._tokens, self.event = host, manifest, tokens, on_event
        self.me = me = host.me
        self._stage = FirstStage(me, manifest, transport, host.directory, on_event, rule)
        self._dialled_back = (
            Asking(host.record, transport, lambda: self._stage.records, on_event, host.hide, host.proofs)
            if host.hides
            else None
        )
        self._news = asyncio.Event()  # a record was read, or an answer came
        self._delay = manifest.averaging.delay
        self._away: Counter[int] = Counter()  # step -> microbatches sent and not answered
        self._answered = -1  # the newest step of which an answer came
        self._timers = manifest.protocol.timers
        self._shares = FedShares(me, self._timers)
        self._discard = (
            asyncio.Event()
        )  # what is in flight is of no use: the run is complete, or goes on from elsewhere
        self.step = 0
        self._eval_loss: tuple[int, float] | None = None
        self._history = HistoryBook()
        self._evaluations = Evaluations(
            manifest.training.eval_microbatches, self, equal_bits=manifest.numerics.deterministic, rng=lots
        )
        self._progress: tuple[int, float] = -1, -math.inf  # the step that was told last, and when
        self._left = False
        self._lacks: dict[str, object] | None = None  # what is not there,
        self._lacks_since = 0.0
        self._lacks_said: dict[str, object] | None = None  # and what was said of it

    async def run(self) -> None:
        """Feed until the last step is done and, if it falls to me, the last version evaluated."""
        works = [self._looking(), self._publishing()]
        # Peers without data fetch tokens from it.
        if self._dialled_back:
            works.append(self._dialled_back.watch())
        async with running(*works), asyncio.TaskGroup() as group:
            await self._refresh()
            self.step = self._stage.newest_version()
            while self.step < self._stage.steps:
                restart = self._stage.restart
                await unless_stopped(self._discard, self._feed(group))
                self._discard.clear()
                self.step = max(self.step, self._stage.newest_version())
                # The run goes on from another version: what was fed of this one is discarded.
                if restart != self._stage.restart:
                    self._evaluations.cancel()
                    self.step = self._stage.newest_version()
            total = self._stage.steps
            for version in range(total - self._delay.ahead(total - 1), total + 1):
                if self._to_evaluate(version):
                    self._evaluations.begin(version, group)
            # Replicas may leave now, and there is no next time for either.
            limit_s = self._timers.long_silence_s
            if await self._evaluations.end(limit_s):
                await self._publish_last(limit_s)
        self.event("done", {"step": total})

    async def leave(self) -> None:
        """Say, if that is quick, that others take my share from now on."""
        self._left = True
        await self._publish_last(self._timers.settle_s)

    # ------------------------------------------------------------ Service

    def on_tell(self, caller: PeerId, message: Control) -> None:
        """Trainers take no part in the step protocol, and call no banned peer."""
        if isinstance(message, Case):
            self._stage.hear(message, self._host.signer.verify)

    async def on_call(self, caller: PeerId, request: Request, payload: ReadPayload) -> AsyncGenerator[Answer, None]:
        """Hand out the tokens of a microbatch, and the manifest; everything else is not served here."""
        # Those who serve stages may all be hidden, and a newcomer cannot speak to them yet.
        if isinstance(request, ManifestRequest):
            yield ManifestData(to_toml(self._manifest), self._host.notices.known)
            return
        # An observer is no member.
        if isinstance(request, HistoryRequest):
            async for answer in self._history.serve(request):
                yield answer
            return
        training = self._manifest.training
        self._host.admissions.check(caller, request, now=self._host.wall())
        if not isinstance(request, Fetch) or request.kind != "input" or request.stage != -1:
            yield Rejected(RejectCode.NOT_SERVED, "a trainer serves tokens only")
        elif not (0 <= request.step < self._stage.steps and 0 <= request.index < training.microbatches):
            yield Rejected(RejectCode.MALFORMED, "no such microbatch")
        else:
            yield Accepted()
            yield Fetched(self._tokens.training(request.step * training.microbatches + request.index))

    def on_reached(self, peer: PeerId) -> None:
        """Trainers send no message when a peer becomes reachable."""

    def on_gone(self, peer: PeerId, *, definite: bool) -> None:
        if definite:
            self._stage.gone(peer)

    # ------------------------------------------------------------ step by step

    async def _feed(self, evaluating: asyncio.TaskGroup) -> None:
        """Send my share of step after step, from `step` on, until all are over."""
        training = self._manifest.training
        self._away, self._stage.unsent, self._answered = Counter(), Counter(), -1
        window, alone_since = Slots(self._stage.in_flight_limit()), None  # when a step began that I feed alone
        async with asyncio.TaskGroup() as group:
            while True:
                while not self._may_begin(self.step) and self._stage.newest_version() < self._stage.steps:
                    await self._news.wait()
                step = self.step = max(self.step, self._stage.newest_version())
                # Invariant: neither has an entry for a step of which all is answered.
                self._away, self._stage.unsent = +self._away, +self._stage.unsent
                # The group waits for what is in flight.
                if step >= self._stage.steps:
                    return
                begun = [
                    self._evaluations.begin(version, evaluating)
                    for version in (step - 1, step)
                    if version >= 0 and version + self._delay.ahead(version) == step and self._to_evaluate(version)
                ]
                trainers, now = self._trainers(), loop_time()
                mine = self._shares.of(trainers, step, training.microbatches, now=now)
                if alone_since is not None:
                    self._shares.brought((), took_s=now - alone_since)
                alone_since = now
                if others := self._shares.feeding(trainers, now=now)[1:]:
                    alone_since = None
                    rest = sorted(set(range(training.microbatches)).difference(mine))
                    group.create_task(self._make_up(step, rest, others, group))
                self._stage.unsent[step] = len(mine)
                for index in mine:
                    window.resize(self._stage.in_flight_limit())
                    await window.take()
                    # With the last one the step can end, and the weights that are measured are gone.
                    if index == mine[-1]:
                        await self._evaluations.answered(begun, self._stage.patience_s)
                    self._away[step] += 1
                    group.create_task(self._send(step, index, window))
                self.step += 1

    def _may_begin(self, step: int) -> bool:
        """Is my share of all steps that this one waits for back, and is this one open, as far as I know, or next?

        An answer of a step says that it was open then; a share may be empty, so what I see has a say, too.
        """
        newest = self._stage.newest_version()
        back = not any(count for fed, count in self._away.items() if fed < step - self._delay.behind(step))
        return back and step <= max(newest + self._delay.ahead(newest), self._answered + 1)

    def _trainers(self) -> list[PeerId]:
        return [peer for peer, record in self._stage.records.items() if record.feeds]

    async def _make_up(self, step: int, rest: list[int], others: Collection[PeerId], group: asyncio.TaskGroup) -> None:
        """Feed what others should have fed, when the step is late."""
        began, patience_s = loop_time(), self._shares.patience_s()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while step >= max(self._stage.newest_version(), self._answered):
                    await self._news.wait()
                return self._shares.brought(others, took_s=loop_time() - began)
        for peer in self._shares.missed(others, now=loop_time()):
            self.event("brings_nothing", {"step": step, "peer": peer})
        self._stage.unsent[step] += len(rest)
        for index in rest:
            self._away[step] += 1
            group.create_task(self._send(step, index))

    async def _send(self, step: int, index: int, window: Slots | None = None) -> None:
        """One microbatch; it ends on its loss or on STALE."""
        self._stage.unsent[step] -= 1
        tokens = self._tokens.training(step * self._manifest.training.microbatches + index)
        try:
            await self._stage.caller.process(Process(step, 0, index), tokens)
        except Refused as refused:
            # Stale only means that others have finished the step.
            if refused.code is not RejectCode.STALE:
                self.event(
                    "refused", {"step": step, "index": index, "code": refused.code.value, "reason": refused.reason}
                )
        self._away[step] -= 1
        self._answered = max(self._answered, step)
        if window is not None:
            window.give()
        self._tell_news()

    def _tell_news(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _to_evaluate(self, version: int) -> bool:
        """Versions 0, E, 2E, ... and the last one are measured, each by one trainer."""
        training = self._manifest.training
        # All trainers agree on who measures: no version is measured twice.
        if not training.eval_every or (version % training.eval_every and version < self._stage.steps):
            return False
        feeding = self._shares.feeding(self._trainers(), now=loop_time())
        return feeder(feeding, version, -1) == self.me

    # EvaluationHost

    async def evaluate(self, version: int, number: int, avoid: tuple[PeerId, ...] = ()) -> Gradient:
        """The loss of one microbatch by the weights of `version`, in every stage. Nothing is counted or kept.

        number: any. Replicas accept indexes below `training.eval_microbatches` and treat all alike, so it goes round.
        avoid: these compute it only if no other replica can. Raises Refused, as `process`: STALE when the weights
        have moved on.
        """
        step, index = version + self._delay.ahead(version), number % self._manifest.training.eval_microbatches
        request = Process(step, 0, index, purpose="eval", avoid=avoid)
        return await self._stage.caller.process(request, self._tokens.evaluation(number))

    def numerics(self, peer: PeerId) -> str:
        record = self._stage.records.get(peer)
        return record.numerics if record is not None else ""

    def scored(self, version: int, loss: float) -> None:
        self._eval_loss = (version, loss)
        self._history.evaluated(Evaluation(version, loss))

    # ------------------------------------------------------------ whom I know

    async def _looking(self) -> None:
        while True:
            await asyncio.sleep(self._timers.beat_s)
            await self._refresh()
            self._tell_news()
            self._say_what_lacks()
            self._say_progress()

    def _say_what_lacks(self) -> None:
        """Once, and again when it changes: why no step can be done. At the end replicas may leave."""
        now, lacks = loop_time(), self._stage.lacks()
        # Its time counts from the last change.
        if lacks != self._lacks:
            self._lacks, self._lacks_since = lacks, now
        over = self.step >= self._stage.steps
        if over or lacks == self._lacks_said or (lacks and now - self._lacks_since < self._timers.suspect_s):
            return
        self._lacks_said = lacks
        if lacks:
            self.event("waiting", lacks)
        else:
            self.event("complete", {"num_peers": len(self._stage.records) + 1})

    def _say_progress(self) -> None:
        """Now and then, where the run is, as its members say: what `swarmnet watch` shows, too."""
        now, (told, told_at) = loop_time(), self._progress
        records, steps = list(self._stage.records.values()), self._stage.steps
        step, loss = max((record.loss for record in records if record.loss), default=(-1, 0.0))
        if step == told or now - told_at < _PROGRESS_S or not 0 <= step < steps:
            return
        self._progress = step, now
        total = self._manifest.training.total_steps
        horizon = self._host.notices.foreseen(0, Horizon(total))
        step_s = statistics.median([record.step_s for record in records if record.step_s] or [0.0])
        pace = statistics.median([record.tokens_per_second for record in records if record.tokens_per_second] or [0.0])
        fields: dict[str, object] = {"step": step, "steps": steps, "loss": loss}
        if self._eval_loss is not None:
            fields["held_out"] = self._eval_loss[1]
        fields["learning_rate"] = rate_of(self._manifest.optimizer, step, horizon)
        # Before two steps are done there is no pace.
        if step_s:
            fields |= {"tokens_per_second": pace, "eta_s": round((steps - step - 1) * step_s)}
        self.event("progress", fields)

    async def _refresh(self) -> None:
        # Replicas that have failed are asked again after a while only, and their answer is not needed any more.
        if await self._stage.refresh() or self._stage.newest_version() >= self._stage.steps:
            self._discard.set()

    async def _publishing(self) -> None:
        while True:
            await self._publish()
            await asyncio.sleep(2 * self._timers.settle_s)

    async def _publish_last(self, limit_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._publish()

    async def _publish(self) -> None:
        """The directory handles network errors; a record that all would refuse (UsageError) ends the trainer."""
        await self._host.directory.publish(
            replace(self._host.record(), trainer=True, eval_loss=self._eval_loss, finished=self._left)
        )
