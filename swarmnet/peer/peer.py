"""A peer on the network: its replicas, what it knows of others, and how it starts.

The same class runs over gRPC and the DHT in production and over memory in the simulator. It parses no configuration.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import statistics
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Set
from dataclasses import replace
from functools import partial
from typing import Any

from swarmnet.audit.auditor import AuditLog, Auditor
from swarmnet.audit.health import ban_notice
from swarmnet.averaging.exchange import Meeting
from swarmnet.clock import loop_time, set_within
from swarmnet.directory import MAX_TAINTED, DisputedWork, Estimate, Record, Role, StageStatus, TaintedStep
from swarmnet.errors import BadMessage, Refused, RejectCode
from swarmnet.ids import NO_RESTART, PeerId
from swarmnet.manifest.file import to_toml
from swarmnet.manifest.schema import Manifest
from swarmnet.messages import (
    Answer,
    AuditControl,
    AuditRequest,
    Committed,
    Control,
    DialBack,
    Fetch,
    Heartbeat,
    HistoryRequest,
    ManifestData,
    ManifestRequest,
    Packed,
    Part,
    Process,
    Rejected,
    Request,
    SnapshotRequest,
    Stamp,
    TrailRequest,
)
from swarmnet.net.address import operator_of
from swarmnet.net.history import HistoryBook
from swarmnet.net.nat.dial_back import Asking, DialBacks
from swarmnet.net.peer_host import PeerHost
from swarmnet.net.records import unserved, waiting_for_stages
from swarmnet.peer import proofs
from swarmnet.peer.extending import Extending
from swarmnet.peer.leaving import drain, hold
from swarmnet.peer.rates import Rates
from swarmnet.peer.rebalance import Intent
from swarmnet.peer.replica import Replica, ReplicaLimits, crossing_bytes
from swarmnet.peer.stall_reports import StallReports
from swarmnet.peer.state_supply import StateSupply
from swarmnet.pipeline.inputs import Windows
from swarmnet.stage.canonical import rate_of
from swarmnet.stage.interfaces import Engine
from swarmnet.state.disk import Disk
from swarmnet.state.rollback import newest_on_disk
from swarmnet.step.commits import gradient_norm
from swarmnet.telemetry.figures import StepFigures
from swarmnet.telemetry.kinds import OnEvent, kind_of
from swarmnet.telemetry.run_state import RunState, step_s, tokens_per_second
from swarmnet.telemetry.spans import SpanBook
from swarmnet.telemetry.text import short
from swarmnet.transport import ReadPayload, Service, Transport, layout_of

Tokens = Callable[[int, int], tuple[Packed, ...] | None]

_RENEW_S = 8.0
"""How long a peer publishes nothing if nothing changes: records are kept for `net.records.TTL_S`."""

_MOST_STRANGERS = 4
"""Unknown callers that are looked for at a time."""


class Loopback:
    """A Transport that hands calls to `me` straight to my own service, all else to the network."""

    def __init__(self, me: PeerId, service: Service, network: Transport) -> None:
        self._me, self._service, self._network = me, service, network

    def tell(self, peer: PeerId, message: Control) -> None:
        # My own stages must not depend on the network.
        if peer == self._me:
            self._service.on_tell(self._me, message)
        else:
            self._network.tell(peer, message)

    async def call(
        self, peer: PeerId, request: Request, payload: tuple[Packed, ...] = (), *, deadline: float
    ) -> AsyncGenerator[Answer, None]:
        if peer != self._me:
            answers = self._network.call(peer, request, payload, deadline=deadline)
        else:
            answers = self._call_me(request, payload)
        async with contextlib.aclosing(answers):
            async for answer in answers:
                yield answer

    async def dial(self, peer: PeerId, address: str, *, deadline: float) -> None:
        await self._network.dial(peer, address, deadline=deadline)

    def relayed(self, peer: PeerId) -> bool:
        return self._network.relayed(peer)

    def carries(self, bytes_per_s: int) -> None:
        self._network.carries(bytes_per_s)

    async def _call_me(self, request: Request, payload: tuple[Packed, ...]) -> AsyncGenerator[Answer, None]:
        async def read() -> tuple[Packed, ...]:
            return payload

        try:
            async for answer in self._service.on_call(self._me, request, ReadPayload(layout_of(payload), read)):
                yield answer
        except (BadMessage, Refused) as error:
            yield Rejected(error.code, error.reason)


class Peer:
    """One identity with its replicas. Implements Service and Listener.

    Args:
        transport: what it speaks through.
        tokens: by (step, index): this peer's own, with their proof.
        windows: tells whether others' tokens are the run's.
        numerics: what it shares with peers that make the same weights of the same sums (`peer.devices.NumericsClass`).
        audit_log: keeps receipts and evidence.
        carried: the version of its stage's state that it has put on disk to move here; None: it has not moved.
        meeting: makes the sums of a simulation of many peers, without streams between them.
        state: what came before; None: nothing did.
    """

    def __init__(
        self,
        host: PeerHost,
        transport: Transport,
        manifest: Manifest,
        engines: Mapping[int, Engine],
        *,
        tokens: Tokens,
        windows: Windows,
        disk: Disk,
        on_event: OnEvent,
        limits: ReplicaLimits,
        numerics: str = "",
        audit_log: AuditLog,
        carried: int | None = None,
        meeting: Meeting | None = None,
        state: RunState | None = None,
    ) -> None:
        self.meeting, self._host = meeting, host
        self.me, self.run_id, self.manifest, self.incarnation = host.me, host.run, manifest, host.incarnation
        self.limits, self.numerics, self.signer, self.disk = limits, numerics, host.signer, disk
        self.tokens, self.windows, self.computes, self.audit_log = tokens, windows, host.numerics, audit_log
        self.timers = manifest.protocol.timers
        self.transport = Loopback(self.me, self, transport)
        self._engines, self._directory = engines, host.directory
        self._directory.serves = self.counts_in
        self._tell = on_event
        self.state = state or RunState()
        self._admissions, self.notices = host.admissions, host.notices
        self.replicas: dict[int, Replica] = {}
        self.records: dict[PeerId, Record] = {}
        """The records of all others, as last read."""
        self.named = NO_RESTART
        """The highest restart that one of them names."""
        self._read: tuple[Record, ...] = ()
        self._announced: dict[int, dict[PeerId, Record]] = {}  # of the stages near mine, once a peer has asked
        self._complaints: dict[int, StallReports] = {}
        self._rates = {stage: Rates(self.me) for stage in engines}
        self._look, self.news, self._moved = asyncio.Event(), asyncio.Event(), asyncio.Event()
        # Peers that are not known here, and the stage that each is said to serve, if it is none near mine.
        self._strangers: dict[PeerId, set[int]] = {}
        self._looked = asyncio.Event()  # the next time that records were read
        self.spans = SpanBook()
        self._history = HistoryBook(self.spans)
        self._dial_backs = DialBacks(transport, lambda: self.records, self._look.set)
        self.dialled_back = Asking(
            host.record, transport, lambda: self.records, self.say, hide=host.hide, proofs=host.proofs
        )
        self._supply = StateSupply(self)
        self._extending = Extending(self, self._supply.rollbacks)
        self._group: asyncio.TaskGroup | None = None
        self._missing: tuple[int, ...] = ()
        self.finished, self.goes_on = asyncio.Event(), asyncio.Event()
        self.banned, self.ban_notice = asyncio.Event(), ""  # of what this peer is, and what its operator can do
        self._done_stages: set[int] = set()
        self._left = self.paused = False
        self.carried, self.may_move, self.intent = carried, False, Intent()

    async def run(self) -> None:
        """Serve until cancelled. Raises UsageError, in a group, if others cannot connect to this peer."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            for stage, engine in self._engines.items():
                here = self.state.serve(stage, now=loop_time())
                self._complaints[stage] = StallReports(self.timers, here, partial(self.on_event, stage))
                self.replicas[stage] = Replica(stage, engine, self)
            await self.refresh(whole=True)
            group.create_task(self._looking())
            group.create_task(self._publishing())
            group.create_task(self._ticking())
            for replica in self.replicas.values():
                group.create_task(replica.state.checkpoints.run())
            self._supply.begin()
            if self._host.hides:
                group.create_task(self.dialled_back.watch())

    @functools.cached_property
    def _manifest_toml(self) -> str:
        return to_toml(self.manifest)

    async def drain(self, drain_s: float) -> str:
        """Begin nothing new and finish what is here; returns, with the reason, once this peer may go."""
        self.news.set()
        return await drain(self, drain_s)

    async def hold(self) -> None:
        """Pause, until cancelled: take no new microbatches, and follow the state."""
        await hold(self)

    def limit(self, *, slots: int, disk_bytes: int, line_bytes_per_s: int) -> None:
        """What the operator lends from now on: microbatches in flight from the next step on, bytes of checkpoints and
        of the line; 0: no limit of those."""
        self.limits = replace(self.limits, slots=slots)
        for replica in self.replicas.values():
            replica.execution.limit(slots)
            replica.state.checkpoints.most_bytes = disk_bytes // len(self.replicas)
            replica.exchange.meter.lent = line_bytes_per_s
        self.news.set()

    async def leave(self) -> None:
        """Hear nothing any more, and say for the last time what is here, if that is quick. Then cancel `run`."""
        self._left = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.timers.settle_s):
                await self._directory.publish(self.status())

    # ------------------------------------------------------------ Service: what others ask

    def on_tell(self, caller: PeerId, message: Control) -> None:
        if self._left:
            return
        # An unknown peer may be a new one with a record that is not read yet.
        if caller != self.me and caller not in self.records:
            self.look_for(caller)
        if not self.admitted(caller, "stage"):
            return
        if isinstance(message, Heartbeat):
            self._supply.hear(caller)
            self._extending.hear(caller, message.notices)
        # A heartbeat makes its sender known; all else needs a known sender.
        if isinstance(message, Heartbeat) or self._takes_part(caller):
            self._dispatch(caller, message)

    def admitted(self, peer: PeerId, role: Role | None = None) -> bool:
        """May `peer` take part as `role`, now? Any peer may in an open run."""
        return peer == self.me or self._admissions.admitted(peer, role, now=self._host.wall())

    def operator(self, peer: PeerId) -> str:
        """The operator of that peer, as far as it can be told: the other holders of the same invitation or, in an open
        run, the peers of the same network; no other peer, if neither is known."""
        if (guest := self._admissions.guest(peer)) is not None:
            return guest
        record = self._host.record() if peer == self.me else self.records.get(peer)
        # Where it is, before where it says that it is.
        return operator_of(peer, record.addresses if record else (), self._host.proofs.network_of(peer))

    def _takes_part(self, caller: PeerId) -> bool:
        """Does the caller serve a stage, by its own heartbeats or its record? Only such peers take part in a step."""
        if caller == self.me:
            return True
        record = self.records.get(caller)
        return bool(record and record.stages) or any(
            caller in replica.member.view.everyone() for replica in self.replicas.values()
        )

    async def on_call(self, caller: PeerId, request: Request, payload: ReadPayload) -> AsyncGenerator[Answer, None]:
        if isinstance(request, ManifestRequest):
            yield ManifestData(self._manifest_toml, self.notices.known)
            return
        if self._left:
            raise Refused(RejectCode.NOT_SERVED, "this peer has left")
        # An observer is no member.
        if isinstance(request, HistoryRequest):
            async for answer in self._history.serve(request):
                yield answer
            return
        if caller != self.me:
            self._admissions.check(caller, request, now=self._host.wall())
        answers = self._answers(caller, request, payload)
        async with contextlib.aclosing(answers):
            async for answer in answers:
                yield answer

    def on_reached(self, peer: PeerId) -> None:
        if self._left:
            return
        for replica in self.replicas.values():
            replica.driver.reached(peer)

    def on_gone(self, peer: PeerId, *, definite: bool) -> None:
        if self._left:
            return
        for replica in self.replicas.values():
            replica.gone(peer, definite=definite)

    def _answers(self, caller: PeerId, request: Request, payload: ReadPayload) -> AsyncGenerator[Answer, None]:
        training = self.manifest.training
        match request:
            case Process():
                # Checked before a replica reserves anything for it.
                evaluates = request.purpose == "eval"
                most = training.eval_microbatches if evaluates else training.microbatches
                if not 0 <= request.index < most:
                    raise Refused(RejectCode.MALFORMED, f"index {request.index} of {most}")
                replica = self._serving(request.stage)
                last = self.notices.last(replica.member.horizon)
                beyond = 1 + self.manifest.averaging.delay.ahead(last) if evaluates else 0
                if request.step >= last + beyond:
                    raise Refused(RejectCode.FINISHED, f"the run ends after step {last - 1}")
                return replica.execution.process(caller, request, payload)
            case Fetch():
                if not 0 <= request.index < training.microbatches:
                    raise Refused(RejectCode.MALFORMED, f"index {request.index} of {training.microbatches}")
                return self._serving(max(request.stage, 0)).execution.fetch(request)
            case AuditRequest():
                return proofs.answered(self, self._serving(request.stage), caller, request)
            case Part():
                return self._serving(request.stamp.stage).exchange.serve(request, caller)
            case SnapshotRequest():
                return self._serving(request.stage).state.snapshot(request)
            case TrailRequest():
                return self._serving(request.stamp.stage).state.replay(request)
            case DialBack():
                return self._dial_backs.serve(caller)
            case _:
                raise Refused(RejectCode.MALFORMED, "not a request")

    def _auditors(self) -> list[Auditor]:
        return [replica.auditor for replica in self.replicas.values() if replica.auditor is not None]

    def known(self, stage: int, other: int) -> list[PeerId]:
        """The other replicas of any stage, as far as my replica of `stage` knows them."""
        return [peer for peer in sorted(self.near(stage).get(other) or self.serving(other)) if peer != self.me]

    def ban(self, peer: PeerId, stamp: Stamp, reason: str, *, at: str) -> None:
        """It is proven that `peer` has done wrong in that step: it is shut out, and all my replicas know.

        at: the file of evidence; "": there is none.
        """
        if peer == self.me:
            if not self.banned.is_set():
                self.ban_notice = ban_notice(stamp.stage, reason, at)
                fields = {"step": stamp.step, "stage": stamp.stage, "reason": reason, "evidence": at}
                self.say("convicted_here", fields)
            self.banned.set()
            return
        self._admissions.ban_faulty(peer)
        for replica in self.replicas.values():
            replica.ban(peer, stamp.step, reason)
        self.news.set()

    def taint(self, stamp: Stamp, peer: PeerId, *, applied: bool) -> None:
        """That peer is banned for its work of that step. applied: is it known that its aggregate was applied here?"""
        self._supply.taint(stamp, peer, applied=applied)

    def look(self) -> None:
        """Look around, and tell the others, as soon as may be."""
        self._look.set()
        self.news.set()

    def _serving(self, stage: int) -> Replica:
        replica = self.replicas.get(stage)
        if replica is None:
            raise Refused(RejectCode.NOT_SERVED, f"stage {stage} is not served here")
        return replica

    def _dispatch(self, caller: PeerId, message: Control) -> None:
        if isinstance(message, AuditControl):
            for auditor in self._auditors():
                auditor.hear(caller, message)
            return
        # These concern every stage, also those of others.
        if isinstance(message, Heartbeat | Committed):
            for stage, replica in self.replicas.items():
                mine = isinstance(message, Heartbeat) and caller == self.me and message.stamp.stage == stage
                if not mine:
                    replica.driver.receive(caller, message)
            return
        concerned = self.replicas.get(message.stamp.stage)
        if concerned is not None:
            concerned.driver.receive(caller, message)

    # ------------------------------------------------------------ Listener: what my replicas say

    def on_event(self, stage: int, event: str, fields: dict[str, object]) -> None:
        here = self.state.stages[stage]
        steps = here.steps
        self.say(event, {"stage": stage, **fields})
        if "version" not in kind_of(event).marks:
            return
        replica = self.replicas[stage]
        self._extending.moved(stage)
        replica.state.checkpoints.reached()
        # A step was applied.
        if here.steps > steps:
            self._moved.set()
            if line := replica.exchange.meter.line.bytes_per_s:
                self.transport.carries(line)
                replica.compute.carries(line)
            self._count(replica)
            self._remember(replica)
        if replica.member.done:
            self._done_stages.add(stage)
            if len(self._done_stages) == len(self.replicas):
                self.finished.set()
                self.goes_on.clear()

    def _remember(self, replica: Replica) -> None:
        """What came of the step that was just applied."""
        commits = {commit.stage: commit for commit in replica.member.last_commits}
        last = commits.get(self.manifest.cut.stages - 1)
        if last is None:
            return
        step, num_tokens = last.step, last.num_tokens
        rate = rate_of(self.manifest.optimizer, step, replica.member.horizon)
        figures = StepFigures(step, last.loss_sum, num_tokens, gradient_norm(commits.values()), rate, loop_time())
        self._history.applied(figures)
        loss = last.loss_sum / num_tokens if num_tokens else 0.0
        fields = {"loss": loss, "num_tokens": num_tokens, "grad_norm": figures.grad_norm, "learning_rate": rate}
        self.say("figures", {"step": step, **fields})

    def _count(self, replica: Replica) -> None:
        """After each step: training forwards so far, and how many indexes this replica has contributed to sums."""
        stage, finished = replica.stage, replica.member.last_finished
        counted = self.state.stages[stage].contributed
        if finished is not None:
            counts = {peer: len(indexes) for peer, _, indexes in finished.contributions}
            counted += counts.get(self.me, 0)
            here = replica.member.view.live(stage, now=loop_time())
            self._rates[stage].step(counts, here, computed=replica.execution.computed)
        executions = replica.execution.executions
        self.say("executed", {"stage": stage, "executions": executions, "counted": counted})

    def say(self, event: str, fields: dict[str, object]) -> None:
        """Take an event into the run state, and log it; the table of kinds says what else it brings about."""
        marks = kind_of(event).marks
        # The run is computed again from an older version, or goes on.
        if "reopens" in marks and not fields.get("kept"):
            self.finished.clear()
            self.goes_on.set()
            self._done_stages.clear()
        self.state.on(event, fields, now=loop_time())
        self._tell(event, fields)
        # Others wait for this news: it is not left to the next renewal.
        if "renews" in marks:
            self.news.set()

    def on_resync(self, stage: int, donors: tuple[PeerId, ...]) -> None:
        self._supply.lags(stage, donors)

    def on_orphaned(self, stage: int) -> None:
        self._supply.orphaned(stage)

    def on_local(self, message: Control) -> None:
        self._dispatch(self.me, message)

    def near(self, stage: int) -> Mapping[int, Set[PeerId]]:
        view, now = self.replicas[stage].member.view, loop_time()
        beside = {stage - 1, stage, stage + 1} & set(range(self.manifest.cut.stages))
        found = {other: set(view.live(other, now=now)) for other in sorted(beside)}
        for other, peers in found.items():
            records = self.serving(other)
            peers.update(records)
            # Its record outlives a process that has ended.
            for peer, incarnation in view.ended(other):
                if peer in records and records[peer].incarnation == incarnation:
                    peers.discard(peer)
        for other in found.keys() & self.replicas.keys() - {stage}:
            found[other].add(self.me)  # my other stages have views of their own
        return found

    def serving(self, stage: int) -> dict[PeerId, Record]:
        """Those that serve a stage."""
        if stage not in self._announced:
            self._announced[stage] = {
                peer: record
                for peer, record in self.records.items()
                if any(status.stage == stage for status in record.stages)
            }
        return self._announced[stage]

    def have_state(self, stage: int) -> frozenset[PeerId]:
        """The others that announce state of this stage, and are not known to have ended."""
        return frozenset(
            peer
            for peer, record in self.serving(stage).items()
            if any(status.stage == stage and status.synced for status in record.stages) and not self.is_dead(record)
        )

    def expects(self, peer: PeerId, stage: int) -> bool:
        """Should I hear that replica of a stage, if it lives? Of a large one only some."""
        beside = (replica.member for mine, replica in self.replicas.items() if abs(stage - mine) <= 1)
        return any(stage not in of.view.sparse or peer in of.heartbeats.graph.chosen for of in beside)

    def look_for(self, peer: PeerId, *stages: int) -> None:
        """Read the record of a peer that I do not know. stages: that it is said to serve, if that is known."""
        self._look.set()
        if len(self._strangers) < _MOST_STRANGERS:
            self._strangers[peer] = {*stages} - self._near

    async def looked(self) -> None:
        """Return once records have been read again, or `settle_s` later."""
        await set_within(self._looked, self.timers.settle_s)

    def on_every_disk(self) -> int | None:
        """The newest version that every stage is known to have on some disk."""
        return newest_on_disk(self._supply.holdings(), self.manifest.cut.stages)

    def voters(self) -> Iterable[PeerId]:
        """Peers that have contributed to commits of any stage, the latest last."""
        return self._supply.rollbacks.voters

    def is_dead(self, record: Record) -> bool:
        """Is the process behind this record known to have ended?"""
        return self._supply.dead(record)

    def everyone(self) -> Iterable[PeerId]:
        found = {peer for peer, record in self.records.items() if record.stages}
        for replica in self.replicas.values():
            found.update(replica.member.view.everyone())
        return sorted(found)

    # ------------------------------------------------------------ tasks

    def counts_in(self, peer: PeerId) -> set[int]:
        """The stages in which a peer counts: its record is looked for there when commits are told to it."""
        rosters = [replica.member.membership.roster for replica in self.replicas.values()]
        return {stage for stage in range(self.manifest.cut.stages) for of in rosters if peer in of(stage)}

    def token_holders(self) -> list[PeerId]:
        """Who may have tokens: trainers first, then other stage-0 peers."""
        trainers = sorted(peer for peer, record in self.records.items() if record.feeds)
        return trainers + sorted(
            peer for peer, record in self.records.items() if any(status.stage == 0 for status in record.stages)
        )

    async def _ticking(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            for replica in self.replicas.values():
                replica.driver.tick()
            for auditor in self._auditors():
                auditor.tick()
            due = max(due + self.timers.beat_s, loop.time())
            await asyncio.sleep(due - loop.time())

    async def _looking(self) -> None:
        """Look into the directory: regularly, and when a stranger spoke or something is wrong."""
        while True:
            stranger = await set_within(self._look, self.timers.settle_s)
            self._look.clear()
            strangers, self._strangers = self._strangers, {}
            # Unlike the stages near mine, those far away are not read with every look, and in a large run no stage is
            # read as a whole.
            for peer, far in strangers.items():
                if stages := far if self.sees_all else far | self._near:
                    await self._directory.find(peer, stages)
            await self.refresh(whole=self._is_astray(), at_once=stranger or bool(self._adjacent_without_peer()))
            self._looked.set()
            self._looked = asyncio.Event()
            self._extending.consider()
            self._supply.consider()
            self._say_who_is_missing()
            await asyncio.sleep(0.1 * self.timers.settle_s)

    def _adjacent_without_peer(self) -> set[int]:
        """The adjacent stages without a known peer."""
        return {stage for stage in self._near - self.replicas.keys() if not self.serving(stage)}

    def _is_astray(self) -> bool:
        """May the run have to go back, or have gone back? Then what peers of all stages say matters."""
        supply = self._supply
        return (
            supply.rollbacks.wanted is not None
            or supply.rollbacks.spoilt is not None
            or any(not replica.member.synced or self._still_s(replica) for replica in self.replicas.values())
            or self.named > supply.rollbacks.current
        )

    def _say_who_is_missing(self) -> None:
        """Report once, and again when it changes: the stages that no peer serves, so that no step can finish."""
        # Who has not read all stages lately cannot know.
        if not self._directory.complete():
            return
        now = loop_time()
        there = (record for record in self.records.values() if self._supply.in_touch(record, now=now))
        missing = unserved(there, num_stages=self.manifest.cut.stages, mine=self.replicas)
        if self.finished.is_set():  # no peer is needed any more
            missing = ()
        # Said once, until it changes.
        if missing == self._missing:
            return
        self._missing = missing
        if missing:
            stranger_to = self.run_id if self._host.told_of_others and not self.records else ""
            self.say("waiting", waiting_for_stages(missing, stranger_to=stranger_to))
        else:
            self.say("complete", {"num_peers": len(self.records) + 1})

    async def refresh(self, *, whole: bool = False, at_once: bool = False) -> None:
        """Read the records of the stages near mine, if it is time; whole: at once and of all, within bounds."""
        near = None if whole else self._near
        found = await self._directory.records(near, at_once=at_once or whole)
        # Mostly it was not time to read.
        if found is self._read:
            return
        self._read = found
        self.records = {record.peer: record for record in found if record.peer != self.me}
        self._announced.clear()
        self.named = max((max(each.restart, each.wants) for each in self.records.values()), default=NO_RESTART)

    @property
    def sees_all(self) -> bool:
        """Does it know what peers of all stages announced a moment ago?"""
        return self._directory.complete()

    @property
    def _near(self) -> set[int]:
        """My stages and those adjacent to them."""
        beside = {stage + step for stage in self.replicas for step in (-1, 0, 1)}
        return beside & set(range(self.manifest.cut.stages))

    async def _publishing(self) -> None:
        await self._supply.opened.wait()  # a record that did not say what is on disk would mislead
        while True:
            self.news.clear()
            self._moved.clear()
            await self._directory.publish(self.status())
            if not await set_within(self.news, 2 * self.timers.settle_s) and not self._moved.is_set():
                waits = [asyncio.ensure_future(event.wait()) for event in (self.news, self._moved)]
                try:
                    await asyncio.wait(waits, timeout=_RENEW_S, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for each in waits:
                        each.cancel()

    def _serves(self, replica: Replica) -> bool:
        member = replica.member
        return member.synced and not self._left and member.restart == self._supply.rollbacks.current

    def _still_s(self, replica: Replica) -> int:
        over = replica.member.done or self.state.halted is not None or not self._serves(replica)
        return 0 if over else self._complaints[replica.stage].still_s(now=loop_time())

    def status(self) -> Record:
        """What this peer announces: the short form of its run state, which has it from now on."""
        stages = tuple(
            StageStatus(
                stage,
                replica.member.version,
                replica.member.chain,
                self._serves(replica),
                replica.execution.queue,
                replica.execution.slots,
                disk=replica.state.checkpoints.on_disk,
                draining=replica.member.view.draining,
                executions=self.state.stages[stage].executed,
                counted=self.state.stages[stage].contributed,
                drift=replica.member.drift.compared_at,
                stray=replica.member.drift.strays(self.me),
                still_s=self._still_s(replica),
            )
            for stage, replica in self.replicas.items()
        )
        last = self.state.points
        disputed = [DisputedWork(stage, *work) for stage, of in self._complaints.items() if (work := of.disputed)]
        self.state.record = replace(
            self._host.record(),
            stages=stages,
            loss=(last[-1].step, last[-1].loss) if last else None,
            tokens_per_second=round(tokens_per_second(last) or 0.0, 1),
            step_s=round(step_s(last) or 0.0, 6),
            finished=self.finished.is_set(),
            halted=self.state.halted,
            steps=self._extending.last,
            restart=self._supply.rollbacks.current,
            wants=self._supply.rollbacks.wanted or NO_RESTART,
            tainted=tuple(TaintedStep(*of) for of in self._supply.rollbacks.tainted[-MAX_TAINTED:]),
            num_tainted=len(self._supply.rollbacks.tainted),
            goes_back=bool(self._supply.rollbacks.tainted) and self.manifest.audit.on_late == "rollback",
            disputed=max(disputed, key=lambda each: each.step, default=None),
            num_disputed=sum(of.num_disputed for of in self._complaints.values()),
            paused=self.paused,
            complaints=tuple(
                complaint
                for stage, replica in self.replicas.items()
                for complaint in self._complaints[stage].of(replica.member, replica.exchange.trouble, now=loop_time())
            ),
            estimates=self._estimates(),
            may_move=self.may_move,
            going=self.intent.to,
            surely=self.intent.surely,
        )
        return self.state.record

    def _estimates(self) -> tuple[Estimate, ...]:
        # Stages of one machine share it: neither has a rate of its own.
        if len(self.replicas) != 1:
            return ()
        (replica,) = self.replicas.values()
        line = replica.exchange.meter.line.bytes_per_s
        crossing = crossing_bytes(self.manifest, replica.stage, line)
        return self._rates[replica.stage].estimates(line / crossing if line and crossing else math.inf)

    def step_s(self) -> float:
        """How long a step takes, as the others measure it; 0 if none has."""
        paces = [record.tokens_per_second for record in self.records.values() if record.tokens_per_second]
        training = self.manifest.training
        num_tokens = training.microbatches * training.microbatch_size * training.sequence_length
        return num_tokens / statistics.median(paces) if paces else 0.0

    @property
    def label(self) -> str:
        """For a person who looks at traces of several peers."""
        return f"{short(self.me)} stage {','.join(map(str, self._engines))}"

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        assert self._group is not None
        return self._group.create_task(work)
