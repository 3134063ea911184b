"""A whole swarm on virtual time, and what must hold in it.

Production peers, trainers, drivers and machines over memory. Invariants are checked whenever a replica commits or
applies: every index summed exactly once per stage and step, all replicas the same sum, and that sum the one a single
process would have.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import random
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from swarmnet.audit.auditor import AuditLog
from swarmnet.directory import Invitation, Pass, Record, Role
from swarmnet.errors import UsageError
from swarmnet.ids import Chain, PeerId, RunId
from swarmnet.manifest.extension import Extension, Horizon, Notice, Notices
from swarmnet.manifest.schema import Manifest
from swarmnet.manifest.terms import RunTerms
from swarmnet.messages import Packed
from swarmnet.net.admission import Admissions, Bans
from swarmnet.net.nat.dial_back import Proofs, Say
from swarmnet.peer.moving import Moving, NewStage
from swarmnet.peer.peer import Peer
from swarmnet.peer.rebalance import RecentMoves, Rules
from swarmnet.peer.replica import Replica, ReplicaLimits
from swarmnet.pipeline.router import routing_rule
from swarmnet.stage.interfaces import Engine
from swarmnet.statement import SignedMessage, in_envelope
from swarmnet.telemetry.kinds import KINDS, EventFold
from swarmnet.testing.clock import SimulatedProcess, VirtualLoop
from swarmnet.testing.directory import DirectoryAt, MemoryDirectory
from swarmnet.testing.fault import Fault, Group, OneWayCut, Slow, member_of
from swarmnet.testing.invariants import InvariantChecker
from swarmnet.testing.meeting import RoundMeeting
from swarmnet.testing.network import MemoryNetwork
from swarmnet.testing.plan import OWNER, Plan, manifest_of
from swarmnet.testing.virtual_device import Device
from swarmnet.testing.virtual_disk import SimulatedDisk
from swarmnet.testing.virtual_engine import (
    NUM_ELEMENTS,
    Arithmetic,
    SimulatedEngine,
    SimulatedTokens,
    SimulatedWindows,
    proven_tokens_of,
)
from swarmnet.testing.virtual_reference import SimulatedReference
from swarmnet.trainer.trainer import Trainer
from swarmnet.transport import Service, Transport
from swarmnet.wire.signed import sign

T = TypeVar("T")

DRAIN_S = 60.0
"""A peer that is told to leave goes after this, whatever it still holds."""


class SimulatedSigner:
    """A `Signer`."""

    def __init__(self, me: PeerId) -> None:
        self._me = me

    def sign(self, data: bytes) -> bytes:
        return _signature(self._me, data)

    def verify(self, peer: PeerId, data: bytes, signature: bytes) -> bool:
        return signature == _signature(peer, data)


@functools.lru_cache(maxsize=1 << 17)
def _signature(peer: PeerId, data: bytes) -> bytes:
    return hashlib.sha512(peer.encode() + b"\0" + data).digest()


def signed(value: T, *, not_after: int = 0) -> SignedMessage[T]:
    """What the owner signs. Names of simulated peers embed no keys, so its payload is no protobuf message."""
    return in_envelope(value, repr(value).encode(), OWNER, SimulatedSigner(OWNER).sign, not_after=not_after)


class Broken(AssertionError):
    """An invariant does not hold."""


class Enough(Exception):
    """A script raises it to end the run, however far it is."""


class Guise:
    """What wraps the messages between a peer and all others. The peer behind it is production code: correct with this
    base class, Byzantine with a subclass."""

    def transport(self, honest: Transport) -> Transport:
        """What it says and calls."""
        return honest

    def service(self, honest: Service) -> Service:
        """What others reach."""
        return honest

    def engine(self, honest: SimulatedEngine) -> SimulatedEngine:
        """What computes, of one of its stages."""
        return honest

    def manifest(self, honest: Manifest) -> Manifest:
        """What it goes by."""
        return honest


@dataclass(slots=True)
class SimulatedMemory:
    """Of a machine: `peer.moving.HostMemory`. free: bytes for a copy of a state; None: enough."""

    fits: Mapping[int, int] | None
    free: int | None

    def memory_for_copy(self) -> int | None:
        return self.free


@dataclass(frozen=True, slots=True)
class SimulatedHost:
    """Implements PeerHost. announced: what the peer announces of itself, without stages."""

    announced: Record
    directory: DirectoryAt
    admissions: Admissions
    notices: Notices
    wall: Callable[[], float]
    proofs: Proofs = Proofs()  # noqa: RUF009
    hides: bool = False
    told_of_others: bool = False

    @property
    def numerics(self) -> str:
        return self.announced.numerics

    @property
    def me(self) -> PeerId:
        return self.announced.peer

    @property
    def run(self) -> RunId:
        return self.announced.run

    @property
    def incarnation(self) -> int:
        return self.announced.incarnation

    @property
    def signer(self) -> SimulatedSigner:
        return SimulatedSigner(self.me)

    def record(self) -> Record:
        return self.announced

    async def hide(self, say: Say) -> None:
        return None


@dataclass(slots=True, eq=False)
class Node:
    """One simulated peer process."""

    peer_id: PeerId
    stages: tuple[int, ...]
    process: SimulatedProcess
    peer: Peer
    engines: dict[int, SimulatedEngine]
    began_at: float
    ended_at: float | None = None

    @property
    def up(self) -> bool:
        """Has it not been killed, and not gone by itself?"""
        return self.ended_at is None


def class_of(peer: PeerId, classes: int) -> int:
    """The numerics class of a simulated peer: by its number, or else by its name. classes: see `Plan`."""
    _, _, number = peer.rpartition(".")
    found = int(number) if number.isdecimal() else zlib.crc32(peer.encode())
    return found % (classes or 1 << 30)


class VirtualSwarm(EventFold):
    """Builds and runs the plan: a `testing.swarm.Swarm`."""

    def __init__(self, plan: Plan, seed: int, arithmetic: Callable[[int, Plan], Arithmetic] = Arithmetic) -> None:
        """arithmetic: of each stage."""
        self.plan, self.seed, self.arithmetic = plan, seed, arithmetic
        self.loop = VirtualLoop()
        self.rng = random.Random(seed)
        self.network = MemoryNetwork(self.loop, plan.links, seed + 1)
        self.directory = MemoryDirectory(self.loop)
        self.manifest = manifest_of(plan)
        self._terms = RunTerms.of(self.manifest)
        sum_bytes = 8.0 * NUM_ELEMENTS + plan.padding_bytes * plan.padding
        takes_s = functools.partial(self.network.lines.meeting_s, num_bytes=sum_bytes)
        self.meeting = RoundMeeting(takes_s) if plan.abstract else None
        self.reference = SimulatedReference(plan, arithmetic=arithmetic)
        self.nodes: list[Node] = []
        self.trainers: dict[PeerId, SimulatedProcess] = {}
        self.disks: dict[PeerId, SimulatedDisk] = {}
        self.events: list[tuple[float, PeerId, str, dict[str, Any]]] = []
        self.counts: Counter[str] = Counter()
        self.applied_at: dict[int, float] = {}
        """When the first replica had each version of the weights by its own update."""
        self.recent_moves: dict[PeerId, RecentMoves] = {}
        self.checker = InvariantChecker(plan.stages, plan.steps, plan.microbatches)
        self.bits: dict[tuple[int, Chain], int] = {}
        self.hooks: list[Callable[[PeerId, str, dict[str, Any]], None]] = []
        self.slowdown: dict[PeerId, float] = {}
        self.slots: dict[PeerId, int] = {}  # of machines that do not hold as many as the plan says
        self.names: dict[int, str] = {}  # of the first peers, by number; others are named by their stages
        self.detailed = True  # are all events and all jobs of all devices kept?
        self.classes: dict[PeerId, str] = {}
        self.operators: dict[PeerId, int] = {}  # by number; each other peer has its own
        self.free_bytes: dict[PeerId, int] = {}  # of memory, on machines that have little
        self.guises: dict[PeerId, Guise] = {}  # Byzantine: not waited for at the end, nothing holds in them
        self.exact = True  # false where a run may drop: sums and weights are then not those of one process
        self.over = False
        self.admissions: dict[PeerId, Admissions] = {}
        self.bans: SignedMessage[Bans] | None = None
        self.last: dict[PeerId, Node] = {}
        """The newest node of each name, dead or alive."""
        self.notices: dict[PeerId, Notices] = {}
        self.in_force: tuple[Notice, ...] = ()  # those that are to take force
        self.ids: dict[str, PeerId] = {}  # of those that go by other names
        self.clock_s: dict[PeerId, float] = {}  # how far a peer's wall clock is ahead
        self.on_start: Callable[[str], None] = lambda name: None  # of who joins or returns
        self.on_gone: Callable[[PeerId, bool], None] = lambda peer, back: None  # back: it may be started again
        self._limits: dict[PeerId, tuple[float | None, float | None]] = {}
        self._rules: list[Fault] = []  # the cuts and slow links that hold
        self._paced: set[PeerId] = set()  # whose bandwidth a slow link limits
        self._processes: list[SimulatedProcess] = []

    # ------------------------------------------------------------ building

    def add(
        self, stages: Iterable[int], name: str | None = None, *, invited: bool = True, carried: int | None = None
    ) -> Node:
        """Start a peer process that serves these stages; the same name is the same identity again, on what `classes`
        says its machine is. invited: in a run by invitation its owner has invited it. carried: see `Peer`."""
        plan, served = self.plan, tuple(stages)
        peer_id = PeerId(name or f"s{'-'.join(map(str, served))}.{len(self.nodes)}")
        process = SimulatedProcess(peer_id)
        self._processes.append(process)
        device = Device(plan.forward_s * self.slowdown.get(peer_id, 1.0), detailed=self.detailed)
        numerics = class_of(peer_id, plan.classes)
        engines = {
            stage: SimulatedEngine(stage, plan, device, self.arithmetic(stage, plan), numerics=numerics)
            for stage in served
        }

        def own_tokens(step: int, index: int) -> tuple[Packed, ...] | None:
            return proven_tokens_of(step * plan.microbatches + index) if plan.data_at_peers else None

        incarnation = self.rng.getrandbits(62)
        # What is on its disk is there again.
        self.notices.setdefault(peer_id, Notices(plan.steps, self.plan.run, OWNER, SimulatedSigner(peer_id).verify))
        admissions, shown = self._admit(peer_id, "stage", invited)
        guise = self.guises.get(peer_id, Guise())
        seen = {stage: guise.engine(engine) for stage, engine in engines.items()}
        computes = self.classes.get(peer_id, f"simulated {numerics}")
        # Nothing is dialled: addresses only say in which network a peer is.
        operator = self.operators.get(peer_id)
        where = f"memory/{peer_id}" if operator is None else f"/ip4/44.{operator}.0.{len(self.nodes) % 256}/tcp/1"
        record = Record(self.plan.run, peer_id, incarnation, (where,), (), numerics=computes, invitation=shown)
        directory = self._directory_at(peer_id, served, admissions)
        peer = Peer(
            SimulatedHost(record, directory, admissions, self.notices[peer_id], self._wall(peer_id)),
            guise.transport(self.network.transport(peer_id)),
            guise.manifest(self.manifest),
            {stage: Engine(engine, engine) for stage, engine in seen.items()},
            tokens=own_tokens,
            windows=SimulatedWindows(plan.microbatches),
            disk=self.disks.setdefault(peer_id, SimulatedDisk(self.plan.run)),
            on_event=lambda event, fields: self._on_event(peer_id, event, fields),
            limits=ReplicaLimits(
                self.slots.get(peer_id, plan.slots or plan.microbatches),
                plan.output_cache_bytes,
                piece_bytes=plan.piece_bytes,
                sum_piece=plan.sum_piece,
                no_initial_weights="no weights" if peer_id in plan.no_beginning else "",
                routing=plan.routing,
                fixed_slots=plan.slots > 0,
            ),
            numerics=self.classes.get(peer_id, ""),
            audit_log=AuditLog(),
            carried=carried,
            meeting=self.meeting,
        )
        node = self.last[peer_id] = Node(peer_id, served, process, peer, engines, self.loop.time())
        self.nodes.append(node)
        if self._rules:
            self._follow_rules()  # a newcomer may be of a stage that one of them names
        self.network.attach(peer_id, process, guise.service(peer))
        self.loop.start(process, self._guard(self._serve, node))
        if plan.rebalance is not None:
            self.loop.start(process, self._guard(self._move, node, plan.rebalance))
        return node

    async def _move(self, node: Node, rules: Rules) -> None:
        """As `swarmnet join`: where it is needed more it goes, as itself, with a new incarnation."""
        memory = SimulatedMemory(dict.fromkeys(range(self.plan.stages), 1), self.free_bytes.get(node.peer_id))
        recent_moves = self.recent_moves.setdefault(node.peer_id, RecentMoves())
        moved = await Moving(node.peer, rules, memory, recent_moves).run()
        await node.peer.leave()
        self.counts["moved"] += 1
        node.ended_at = self.loop.time()
        # Not from inside the process that ends with it.
        self.loop.call_soon(self._restart, node.peer_id, moved)

    def _restart(self, peer: PeerId, moved: NewStage) -> None:
        if not self.over:
            self.network.kill(peer)
            self.add((moved.stage,), peer, carried=moved.version)

    def _admit(self, peer: PeerId, role: Role, invited: bool) -> tuple[Admissions, Pass | None]:
        """Who is admitted, as this process knows it, and the pass that it shows."""
        terms, verify = self._terms, SimulatedSigner(peer).verify
        admissions = Admissions(self.plan.run, terms.owner, verify, tolerance_s=terms.max_clock_offset_s)
        self.admissions[peer] = admissions
        if not (self.plan.invite and invited):
            return admissions, None
        shown = signed(Invitation(self.plan.run, peer, (role,)), not_after=10**12)
        admissions.show(peer, shown, now=self.loop.time())
        if self.bans is not None:
            admissions.learn(self.bans)
        return admissions, shown

    def _directory_at(self, peer: PeerId, stages: Iterable[int], admissions: Admissions) -> DirectoryAt:
        plan = self.plan
        only = {stage + step for stage in stages for step in (-1, 0, 1)} & set(range(plan.stages))
        return DirectoryAt(
            peer, self.directory, self.network.lines, admissions, plan.between_reads_s, only if plan.abstract else None
        )

    def ban(self, *peers: Node | PeerId) -> None:
        """Every peer learns at the same moment that the owner bans exactly these."""
        number = 1 if self.bans is None else self.bans.value.number + 1
        self.bans = signed(Bans(self.plan.run, number, tuple(map(self.id_of, peers))))
        for admissions in self.admissions.values():
            admissions.learn(self.bans)

    def extend(self, since: int, steps: int, *told: Node, number: int | None = None, takes: bool = True) -> Notice:
        """The owner signs a notice, and these peers have it at once (none: all that are up). takes: it will take
        force."""
        number = len(self.in_force) + 1 if number is None else number
        notice = sign(Extension(self.plan.run, number, since, steps), OWNER, SimulatedSigner(OWNER).sign)
        if takes:
            self.in_force = (*self.in_force, notice)
            self.reference = SimulatedReference(self.plan, self.in_force, self.arithmetic)
        for node in told or [node for node in self.nodes if node.up]:
            self.notices[node.peer_id].learn(notice)
        return notice

    @property
    def steps(self) -> int:
        """Of the run, in the end."""
        return Horizon(self.plan.steps, self.in_force).last

    def add_trainer(self, name: str | None = None, *, invited: bool = True) -> PeerId:
        """Start a trainer process."""
        number = len(self.trainers)
        peer_id = PeerId(name) if name else self.ids.get(f"trainer-{number}", PeerId(f"trainer.{number}"))
        process = SimulatedProcess(peer_id)
        self._processes.append(process)
        admissions, shown = self._admit(peer_id, "trainer", invited)
        record = Record(self.plan.run, peer_id, self.rng.getrandbits(62), ("memory",), (), invitation=shown)
        directory = self._directory_at(peer_id, [0], admissions)
        trainer = Trainer(
            SimulatedHost(record, directory, admissions, Notices(self.plan.steps), self._wall(peer_id)),
            self.manifest,
            transport=self.network.transport(peer_id),
            tokens=SimulatedTokens(),
            on_event=lambda event, fields: self._on_event(peer_id, event, fields),
            rule=routing_rule(self.plan.routing),
            lots=random.Random(f"{self.seed} {peer_id}"),
        )
        self.trainers[peer_id] = process
        self.network.attach(peer_id, process, trainer)
        self.loop.start(process, self._guard(trainer.run))
        return peer_id

    async def _serve(self, node: Node) -> None:
        """An unreachable peer ends by itself."""
        try:
            await node.peer.run()
        except* UsageError:  # as `swarmnet peer` ends with a line
            await node.peer.leave()
            self.counts["given_up"] += 1
            self.loop.call_soon(functools.partial(self._end, node, back=False))

    async def _guard(self, work: Callable[..., Awaitable[None]], *args: object) -> None:
        try:
            # Made here: a task that is cancelled before its first step would never await a coroutine that it was given.
            await work(*args)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.loop.failure = self.loop.failure or error
            raise

    # ------------------------------------------------------------ faults

    def start(self, name: str, stage: int | None = None) -> None:
        self.on_start(name)
        peer = self.id_of(name)
        if stage is None and peer not in self.last:
            self.add_trainer(peer)
        else:
            self.add(self.last[peer].stages if stage is None else (stage,), peer)

    def kill(self, peer: Node | str) -> None:
        """SIGKILL. A peer that goes to another stage has no process for a moment."""
        if (killed := self.id_of(peer)) in self.trainers:
            self.trainers.pop(killed)
            self.network.kill(killed)
            return
        node = self._node(peer)
        self.counts["kills"] += node.up
        self._end(node)

    def _end(self, node: Node, *, back: bool = True) -> None:
        """Its process is gone, whatever ended it."""
        if node.up:
            node.ended_at = self.loop.time()
            self.network.kill(node.peer_id)
        self.on_gone(node.peer_id, back)

    def kill_rank(self, name: str, rank: int) -> None:
        """A peer's ranks die and come back at once; it is told a little later. No state is lost."""
        node = self._node(name)
        told_after_s = self.rng.choice((0.0, self.rng.uniform(0.0, 0.3)))
        node.engines[node.stages[rank % len(node.stages)]].lose_ranks(told_after_s=told_after_s)

    def kill_all(self, stage: int | None) -> None:
        for node in [node for node in self.nodes if node.up and (stage is None or stage in node.stages)]:
            self.kill(node)
        for trainer in sorted(self.trainers) if stage is None else ():
            self.kill(trainer)

    def stop(self, peer: Node | str) -> None:
        """SIGSTOP."""
        self.network.stop(self.id_of(peer))

    def resume(self, peer: Node | str) -> None:
        """SIGCONT, if it still runs."""
        if self._node(peer).up:
            self.network.resume(self.id_of(peer))

    def drain(self, name: str) -> None:
        """SIGTERM."""
        node = self._node(name)
        self.loop.start(node.process, self._drain(node))

    async def _drain(self, node: Node) -> None:
        await node.peer.drain(DRAIN_S)
        await node.peer.leave()
        # Not from inside the process that ends with it.
        self.loop.call_soon(self._end, node)

    def cut(self, rule: Fault) -> None:
        self.counts[rule.kind] += 1
        self._rules.append(rule)
        self._follow_rules()

    def heal(self, rule: Fault | None = None) -> None:
        """What this rule says of links holds no longer, what others say does; None: end every cut, by a rule or not."""
        if rule is None:
            self._rules = [each for each in self._rules if isinstance(each, Slow)]
            self.network.heal()
        else:
            self.network.heal(id(self._rules.pop(self._rules.index(rule))))
        self._follow_rules()
        if not self.network.lines.cuts:
            self.directory.unite()

    def _follow_rules(self) -> None:
        """Make links what all rules together say of those that are there now. Of several slow links the slowest counts,
        the peer's own included."""
        lines, rates = self.network.lines, {peer: list[float]() for peer in self._paced}
        lines.held_s.clear()
        for rule in self._rules:
            groups = [self._meant(group) for group in rule.groups]
            if not isinstance(rule, Slow):
                lines.cut(id(rule), groups, one_way=isinstance(rule, OneWayCut))
                continue
            for peer in groups[0]:
                lines.held_s[peer] = max(lines.held_s.get(peer, 0.0), rule.latency_s)
                rates.setdefault(peer, []).extend([rule.bytes_per_s] if rule.bytes_per_s else [])
        for peer, slow in rates.items():
            own = self._limits.get(peer, (None, None))
            lines.limit(
                peer, *(min((each for each in (rate, *slow) if each is not None), default=None) for rate in own)
            )
        self._paced = {peer for peer, slow in rates.items() if slow}

    def fill_disk(self, name: str, *, full: bool) -> None:
        self.disks[self.id_of(name)].full = full

    def turn_clock(self, name: str, by_s: float) -> None:
        peer = self.id_of(name)
        self.clock_s[peer] = self.clock_s.get(peer, 0.0) + by_s

    def hold(self, name: str, id: str, fault: Fault) -> None:
        raise UsageError(f"{fault}: a phase needs `swarmnet local --chaos`")

    def go_on(self, name: str, id: str) -> None:
        """No process holds."""

    def _wall(self, peer: PeerId) -> Callable[[], float]:
        return lambda: self.loop.time() + self.clock_s.get(peer, 0.0)

    def id_of(self, peer: Node | str) -> PeerId:
        """Of a peer or trainer that is meant by its name, in a chaos file too."""
        return peer.peer_id if isinstance(peer, Node) else self.ids.get(peer, PeerId(peer))

    def _node(self, peer: Node | str) -> Node:
        return peer if isinstance(peer, Node) else self.last[self.id_of(peer)]

    def _meant(self, group: Group) -> list[PeerId]:
        """Who is in a group of names and stages."""
        if self.ids:
            return [peer for name, peer in self.ids.items() if member_of((group,), name) is not None]
        # A name such as "s1.0" is no choice of a file's: whether it is of a stage, what it serves tells.
        served = {peer: {f"s{stage}" for stage in node.stages} for peer, node in self.last.items()}
        return [peer for peer in (*self.last, *self.trainers) if {peer, *served.get(peer, ())} & {*group}]

    def partition(self, *groups: Iterable[Node | PeerId], directory: bool = False) -> None:
        """Cut the groups off from each other; a peer in none reaches all. `directory`: records too."""
        self.counts["partition"] += 1
        self.network.lines.cut("partition", [[self.id_of(member) for member in group] for group in groups])
        if directory:
            self.directory.split()

    def deafen(self, sender: Node | PeerId, receiver: Node | PeerId) -> None:
        """What `sender` sends does not reach `receiver`."""
        self.counts["deafened"] += 1
        ends = self.id_of(sender), self.id_of(receiver)
        self.network.lines.cut(ends, ([end] for end in ends), one_way=True)

    def block_dial(self, sender: Node | PeerId, receiver: Node | PeerId) -> None:
        """`sender` cannot open connections to `receiver`; the other way works in full, answers included."""
        self.counts["undialled"] += 1
        self.network.lines.block_dial(self.id_of(sender), self.id_of(receiver))

    def limit(
        self, peer: Node | PeerId, *, up_bytes_per_s: float | None = None, down_bytes_per_s: float | None = None
    ) -> None:
        """Limit what a peer sends and receives in all."""
        self._limits[self.id_of(peer)] = up_bytes_per_s, down_bytes_per_s
        self._paced.add(self.id_of(peer))
        self._follow_rules()

    @property
    def honest(self) -> list[Node]:
        """Correct live peers."""
        return [node for node in self.nodes if node.up and node.peer_id not in self.guises]

    def replicas(self, stage: int) -> list[Node]:
        """Live peers that serve a stage."""
        return [node for node in self.nodes if node.up and stage in node.stages]

    def may_die(self, node: Node) -> bool:
        """Would every stage keep a replica that holds whatever this one holds? (docs/protocol.md, premise of I4)"""
        for stage in node.stages:
            mine = node.peer.replicas[stage].member if stage in node.peer.replicas else None
            others = [
                other.peer.replicas[stage].member
                for other in self.replicas(stage)
                if other is not node and stage in other.peer.replicas and not other.process.stopped
            ]
            # Who holds a finished sum that the others lack may not go either.
            if mine is None or not any(
                other.synced
                and (
                    other.version > mine.version
                    or (
                        other.version == mine.version
                        and (other.oldest.finished is not None or mine.oldest.finished is None)
                    )
                )
                for other in others
            ):
                return False
        return True

    # ------------------------------------------------------------ running

    def run(self, *, until_s: float = 600.0, script: Callable[[VirtualSwarm], Awaitable[None]] | None = None) -> bool:
        """Start everything, run the script in parallel, end when all live replicas are done. False if the script has
        had enough before. Raises Broken."""
        plan = self.plan
        served = plan.served or tuple((stage,) for stage in range(plan.stages) for _ in range(plan.replicas))
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(self._run(served, until_s, script))
            whole = True
        except Enough:
            whole = False
        finally:
            asyncio.set_event_loop(None)
            self._bury()
        if self.loop.failure is not None:
            raise self.loop.failure
        return whole

    async def _run(
        self, served: Sequence[Sequence[int]], until_s: float, script: Callable[[VirtualSwarm], Awaitable[None]] | None
    ) -> None:
        self.checker.bits = self.exact and self.plan.classes == 1
        for number, stages in enumerate(served):
            self.add(stages, self.names.get(number, f"s{'-'.join(map(str, stages))}.{number}"))
        for _ in range(self.plan.trainers):
            self.add_trainer()
        acting = asyncio.ensure_future(script(self)) if script else None
        while not (self.done and (acting is None or acting.done()) and self._met):
            await asyncio.sleep(0.25)
            if self.loop.failure is not None:
                raise self.loop.failure  # of any process: soon everything else would follow from it
            if acting is not None and acting.done():
                acting.result()  # a script that fails ends the run
            if self.loop.time() > until_s:
                raise Broken(f"no end after {until_s} virtual seconds\n{self.describe()}")
        if acting is not None:
            await acting
        self.check_end()

    @property
    def done(self) -> bool:
        """Every live replica has reached the last version."""
        return all(
            stage in node.peer.replicas and node.peer.replicas[stage].member.done
            for node in self.honest
            for stage in node.stages
        )

    def check_end(self) -> None:
        """All stages complete, weights equal to the single process's."""
        self.checker.steps = self.steps
        if self.exact and (problems := self.checker.report().problems):
            raise Broken("; ".join(problems))
        for node in self.honest:
            for stage, engine in node.engines.items():
                if self.exact and engine.weights != self.reference.weights[stage]:
                    raise Broken(f"{node.peer_id}: weights of stage {stage} differ from the single process")
        for stage in range(self.plan.stages):
            if (ends := self._num_chains(stage)) != 1:
                raise Broken(f"stage {stage}: {ends} chains at the end")

    def _num_chains(self, stage: int) -> int:
        return len({node.peer.replicas[stage].member.chain for node in self.honest if stage in node.stages})

    @property
    def _met(self) -> bool:
        """Have replicas that parted behind a cut met again? Where last digits differ they may part, and meet after it
        heals, be it after the last step."""
        return self.checker.bits or all(self._num_chains(stage) == 1 for stage in range(self.plan.stages))

    def _on_event(self, peer: PeerId, event: str, fields: dict[str, Any]) -> None:
        if self.over or peer in self.guises:
            return  # a Byzantine peer may report anything, and a dead one has nothing to report
        self.counts[event] += 1
        if self.detailed:
            self.events.append((self.loop.time(), peer, event, fields))
        try:
            if unknown := fields.keys() - KINDS[event].fields.keys():
                raise Broken(f"event {event} has fields that telemetry/kinds.py has not: {sorted(unknown)}")
            self.take(event, peer, fields)
            for hook in self.hooks:
                hook(peer, event, fields)
        except (Broken, AssertionError) as broken:  # ends the run, not the peer that happened to speak
            self.loop.failure = self.loop.failure or broken

    def on_applied(self, peer: PeerId, fields: dict[str, Any]) -> None:
        self.applied_at.setdefault(fields["version"], self.loop.time())
        self._check_weights(peer, fields)

    def on_synced(self, peer: PeerId, fields: dict[str, Any]) -> None:
        self._check_weights(peer, fields)

    def _check_weights(self, peer: PeerId, fields: dict[str, Any]) -> None:
        stage, version, node = fields["stage"], fields["version"], self.last[peer]
        if not node.up:
            return
        if self.exact and node.engines[stage].weights != self.reference.history[version][stage]:
            raise Broken(f"{peer}: weights {version} of stage {stage} are not those of the single process")
        # Where steps overlap it computes on the version before, which has to be right, too.
        late = self.exact and self.plan.delay.most
        if late and node.engines[stage].before != self.reference.history[max(version - 1, 0)][stage]:
            raise Broken(f"{peer}: weights {version - 1} of stage {stage} are not those of the single process")
        # The same commits in the same order have to lead to the same last digits.
        of = stage, node.peer.replicas[stage].member.chain
        if self.bits.setdefault(of, node.engines[stage].digits) != node.engines[stage].digits:
            raise Broken(f"{peer}: weights {version} of stage {stage} differ from others of the same chain")

    def on_committed(self, peer: PeerId, fields: dict[str, Any]) -> None:
        stage, step = fields["stage"], fields["step"]
        self.checker.on({"event": "committed", **fields}, by=peer)
        if wrong := self.checker.wrong(stage, step):
            raise Broken(wrong)
        # In every stage the same indexes are out.
        if fields["discarded"] != sorted(self.plan.discarded(step)):
            raise Broken(f"stage {stage} step {step}: discarded {fields['discarded']}")
        if self.exact and self.last[peer].engines[stage].exact_sum != self.reference.sums[step][stage]:
            raise Broken(f"stage {stage} step {step}: {peer} holds another sum than the single process")

    def check_now(self) -> None:
        """What must hold at any moment: no accumulator counts an index twice, memory is bounded."""
        for node in self.nodes:
            if not node.up:
                continue
            for stage, engine in node.engines.items():
                for accumulator in engine.accumulators:
                    if len(accumulator.added) != len(set(accumulator.added)):
                        raise Broken(f"{node.peer_id} stage {stage} added {accumulator.added}")
                replica = node.peer.replicas.get(stage)
                if replica is None:
                    continue
                for step, tasks in replica.execution.steps.items():
                    if tasks.queue > (self.plan.slots or self.plan.microbatches):
                        raise Broken(f"{node.peer_id} stage {stage} holds {tasks.queue} microbatches of step {step}")
                    if tasks.cache.num_bytes > self.plan.output_cache_bytes:
                        raise Broken(f"{node.peer_id} stage {stage} remembers {tasks.cache.num_bytes} bytes of {step}")
                    works = replica.execution.works.records(step)
                    if replica.auditor is not None and works.keys() != tasks.losses.keys():
                        raise Broken(f"{node.peer_id} stage {stage} answers for {set(works)} in {step}")

    def describe(self) -> str:
        """The state of all peers, for a failure's message."""
        lines = [f"seed {self.seed} at {self.loop.time():.2f}s"]
        for node in self.nodes:
            mark = "" if node.up else " DEAD"
            mark += " STOPPED" if node.process.stopped else ""
            lines += [f"{node.peer_id}{mark} {standing(replica)}" for replica in node.peer.replicas.values()]
        return "\n".join(lines)

    def _bury(self) -> None:
        """End what still runs, the dead included; nothing of it is recorded any more."""
        self.over = True
        self.network.cut_off()
        self.loop.set_exception_handler(lambda loop, context: None)
        for process in self._processes:
            self.loop.bury_process(process)
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        # A task may need several turns to end what it has begun.
        for _ in range(1000):
            if not asyncio.all_tasks(self.loop):
                break
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()
        self.loop.close()


def standing(replica: Replica) -> str:
    """Where the replica stands in its step, and its leader if it is one."""
    member, pipeline = replica.member, replica.execution
    account, part, leader = member.oldest.claims, member.oldest.part, member.oldest.leader
    works = {step: sorted(tasks.by_index) for step, tasks in pipeline.steps.items()}
    line = (
        f"stage {member.stage} v{member.version} synced={member.synced} promised={member.oldest.promised} "
        f"gen={account.generation.number} asked={sorted(account.asked)} assigned={sorted(account.assigned)} "
        f"accumulated={sorted(account.accumulated)} round={part.round and part.round.id} exchange={part.exchange} "
        f"R={part.finished and part.finished.id} commits={[commit.stage for commit in member.oldest.barrier.known]} "
        f"applying={member.oldest.applying} works={works} queue={pipeline.queue}"
    )
    if leader is None:
        return line
    return (
        f"{line} leader(members={sorted(leader.members)} owners={leader.ledger.owners} acks={sorted(leader.acks)} "
        f"commit={leader.commit is not None})"
    )
