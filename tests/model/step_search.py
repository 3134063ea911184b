"""Every interleaving of one step of production step machines: `swarmnet.step.Member`s, and the messages between them.

A state is the machines, what is on the way (in order, per sender and receiver), what each has computed, and the parts
of rounds that were sent. From a state, any first message may arrive; any weight pass, exchange, collection or optimizer
step that is due may end; once nothing else can happen, time passes by a heartbeat. A budget of crashes, and of silences
(time passes for one machine while messages wait). States are told apart by all that is in the machines.

It drives machines as their driver does and looks into none of them: what they are made of may change.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from types import MethodType

from swarmnet.ids import Chain, PeerId, RoundId
from swarmnet.manifest.timers import Timers
from swarmnet.messages import Committed, Control, Finished, Heartbeat, Round
from swarmnet.simulate.swarm import SimulatedSigner
from swarmnet.step import actions as act
from swarmnet.step.actions import Action, Broadcast, Send
from swarmnet.step.drift import DriftRules
from swarmnet.step.gate import Shape
from swarmnet.step.member import Member

TIMERS = Timers(idle_s=1.0)
CHAINS = tuple(Chain(str(stage + 1) * 64) for stage in range(4))
MOST_TICKS = 80


# ---------------------------------------------------------------- copies and names of machines


@functools.cache
def _is_frozen(kind: type) -> bool:
    return is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]


@functools.cache
def _declared(kind: type) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind)) if is_dataclass(kind) else ()


def _attributes(value: object) -> list[str]:
    declared = _declared(type(value))
    return [*declared, *(name for name in getattr(value, "__dict__", ()) if name not in declared)]


def copy_of(value: object, memo: dict[int, object]) -> object:
    """A machine that goes its own way: what can change is copied, what is frozen is shared."""
    kind = type(value)
    if kind in _PLAIN or kind is frozenset or _is_frozen(kind) or isinstance(value, enum.Enum | type):
        return value
    known = memo.get(id(value))
    if known is not None:
        return known
    result: object
    if isinstance(value, dict):
        result = memo[id(value)] = type(value)()
        assert isinstance(result, dict)
        result.update((key, copy_of(each, memo)) for key, each in value.items())
    elif isinstance(value, list | set | deque):
        result = memo[id(value)] = type(value)(copy_of(each, memo) for each in value)
    elif isinstance(value, tuple):
        result = tuple(copy_of(each, memo) for each in value)
    elif isinstance(value, itertools.count):
        result = memo[id(value)] = itertools.count(int(repr(value)[6:-1]))
    elif isinstance(value, MethodType):
        result = memo[id(value)] = MethodType(value.__func__, copy_of(value.__self__, memo))
    elif callable(value) and not hasattr(value, "__dict__"):
        return value
    else:
        result = memo[id(value)] = object.__new__(type(value))
        for name in _attributes(value):
            object.__setattr__(result, name, copy_of(getattr(value, name), memo))
    return result


def name_of(value: object, seen: dict[int, int]) -> object:
    """The same for equal machines, and for no others. Order in sets and mappings does not count.

    seen: objects named before, in order: many parts of a machine hold the same one.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind in _CONSTANT:
        return None
    if kind is frozenset or kind is set:
        return "(", *sorted(repr(name_of(each, seen)) for each in value)  # type: ignore[attr-defined]
    if kind is tuple or kind is list or kind is deque:
        return tuple([name_of(each, seen) for each in value])  # type: ignore[attr-defined]
    if _is_frozen(kind) or kind is itertools.count or isinstance(value, enum.Enum | type):
        return repr(value)
    if kind is MethodType:  # a new object each time that it is looked up
        return value.__name__, name_of(value.__self__, seen)  # type: ignore[attr-defined]
    known = seen.get(id(value))
    if known is not None:
        return known
    seen[id(value)] = len(seen)
    if isinstance(value, Mapping):
        return "{", *sorted([(repr(name_of(key, seen)), repr(name_of(each, seen))) for key, each in value.items()])
    return kind.__name__, *[name_of(getattr(value, name), seen) for name in _attributes(value)]


_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_CONSTANT = frozenset({Shape, Timers, DriftRules})
"""What no machine changes and all of a setup share."""


# ---------------------------------------------------------------- states


@dataclass(frozen=True, slots=True)
class Gone:
    """In a channel: the process that sent what came before is no more."""


@dataclass(slots=True)
class Node:
    """A replica: its machine, and what its driver would hold. added: the accumulator. sum: being exchanged."""

    member: Member
    added: tuple[int, ...] = ()
    sum: Round | None = None
    collect: tuple[Round, bytes] | None = None
    due: frozenset[int] = frozenset()
    applies: bool = False
    applied: bytes | None = None
    resyncs: bool = False

    def copy(self) -> Node:
        """One that goes its own way."""
        member = copy_of(self.member, {})
        assert isinstance(member, Member)
        return replace(self, member=member)


Channel = tuple[Control | Gone, ...]
Part = tuple[RoundId, PeerId, tuple[int, ...]]


@dataclass(slots=True)
class State:
    """Nodes are shared between states: change a copy."""

    now: float
    nodes: dict[PeerId, Node]
    wire: dict[tuple[PeerId, PeerId], Channel]
    parts: frozenset[Part]
    crashes: int
    silences: int
    ticks: int = 0
    faulty: bool = False

    def name(self, names: dict[int, tuple[Node, bytes]]) -> bytes:
        """names: of nodes named before, by identity."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(repr((self.now, self.crashes, self.silences, sorted(map(repr, self.parts)))).encode())
        for peer, node in sorted(self.nodes.items()):
            known = names.get(id(node))
            if known is None or known[0] is not node:
                rest = node.added, node.sum, node.collect, sorted(node.due), node.applies, node.applied, node.resyncs
                own = repr((name_of(node.member, {}), rest))
                known = names[id(node)] = node, hashlib.blake2b(own.encode(), digest_size=16).digest()
            digest.update(peer.encode() + known[1])
        for pair, channel in sorted(self.wire.items()):
            digest.update(repr((pair, channel)).encode())
        return digest.digest()


class Broken(AssertionError):
    """Something happened that must not; with the story."""


@dataclass(slots=True)
class Setup:
    """stages x replicas machines. claims: who begins work on which index, at the start. together: all have heard of
    each other when they begin; else each begins alone."""

    stages: int = 1
    replicas: int = 2
    microbatches: int = 2
    crashes: int = 0
    silences: int = 0
    together: bool = True
    claims: tuple[tuple[int, int], ...] = ((0, 0), (1, 1), (1, 0))
    shape: Shape = field(init=False)

    def __post_init__(self) -> None:
        self.shape = Shape(self.stages, self.microbatches, 1)

    def stage_of(self, peer: PeerId) -> int:
        """Names tell."""
        return int(peer[0])

    def start(self) -> State:
        """Everybody at version 0."""
        members = {}
        for stage in range(self.stages):
            for place in range(self.replicas):
                peer = PeerId(f"{stage}{'ABCD'[place]}")
                members[peer] = Member(
                    peer,
                    stage,
                    self.shape,
                    TIMERS,
                    incarnation=1,
                    chain=CHAINS[stage],
                    now=0.0,
                    signer=SimulatedSigner(peer),
                )
        state = State(
            0.0, {peer: Node(member) for peer, member in members.items()}, {}, frozenset(), self.crashes, self.silences
        )
        if self.together:
            for peer, member in members.items():
                beat = replace(member.heartbeat(), synced=True)
                for other in members:
                    if other != peer:
                        members[other].receive(peer, beat, now=0.0)
        for peer, member in members.items():
            chain = CHAINS[member.stage]
            begin(self, state, peer, member.restored(0, chain, chain, chain, None, (), now=0.0))
        for peer, member in members.items():
            for place, index in self.claims:
                if peer[1] == "ABCD"[place]:
                    begin(self, state, peer, member.claim(0, index, now=0.0))
        return state


def begin(setup: Setup, state: State, peer: PeerId, actions: list[Action]) -> None:
    """Perform a machine's actions, in a state of its own."""
    node = state.nodes[peer]
    for action in actions:
        match action:
            case Send(to, message):
                _post(state, peer, to, message)
            case Broadcast(message):
                for other in state.nodes:
                    if other != peer or isinstance(message, Committed):
                        _post(state, peer, other, message)
            case act.Void():
                node.added, node.due = (), frozenset()
            case act.CountHere(_, index):
                node.due |= {index}
            case act.Sum(current):
                node.sum = current
                if any(each == peer for each, _, _ in current.contributions):
                    state.parts |= {(current.id, peer, tuple(sorted(node.added)))}
            case act.CollectSum(current, digest):
                node.collect = current, digest
            case act.StopSum():
                node.sum = node.collect = None
            case act.Apply():
                node.applies = True
            case act.TakeIndex(step, index):
                begin(setup, state, peer, node.member.claim(step, index, now=state.now))
            case act.Resync() | act.Orphaned():
                node.resyncs = True


def _post(state: State, sender: PeerId, to: PeerId, message: Control) -> None:
    if to in state.nodes:
        channel = state.wire.get((sender, to), ())
        # All of them may come twice, and say the same then; but equal commits may carry other votes.
        if not any(each == message and repr(each) == repr(message) for each in channel):
            state.wire[sender, to] = (*channel, message)


# ---------------------------------------------------------------- what may happen


def moves(setup: Setup, state: State) -> Iterator[tuple[str, State, bool]]:
    """(what, the state after it, is it a fault) of all that may happen next."""
    quiet = True
    for pair, channel in sorted(state.wire.items()):
        if channel:
            quiet = False
            yield f"{pair[0]}>{pair[1]} {type(channel[0]).__name__}", _deliver(setup, state, pair), False
    for peer, node in sorted(state.nodes.items()):
        for what in _own(setup, state, peer, node):
            quiet = False
            yield f"{peer} {what}", _act(setup, state, peer, what), False
    if quiet and state.ticks < MOST_TICKS and not ended(state):
        yield "tick", _tick(setup, state), False
    for peer in sorted(state.nodes):
        if state.crashes and _may_crash(setup, state, peer):
            yield f"{peer} dies", _crash(state, peer), True
        if state.silences and not quiet:
            yield f"{peer} hears nothing for long", _silence(setup, state, peer), True


def ended(state: State) -> bool:
    """All that live have applied the step."""
    return all(node.applied is not None or node.resyncs for node in state.nodes.values())


def _branch(state: State, *changed: PeerId) -> State:
    nodes = {peer: node.copy() if peer in changed else node for peer, node in state.nodes.items()}
    return replace(state, nodes=nodes, wire=dict(state.wire))


def _deliver(setup: Setup, state: State, pair: tuple[PeerId, PeerId]) -> State:
    sender, to = pair
    after = _branch(state, to)
    message, *rest = after.wire.pop(pair)
    if rest:
        after.wire[pair] = tuple(rest)
    member = after.nodes[to].member
    if isinstance(message, Gone):
        begin(setup, after, to, member.gone(sender, definite=True, now=after.now))
    else:
        begin(setup, after, to, member.receive(sender, message, now=after.now))
    return after


def _own(setup: Setup, state: State, peer: PeerId, node: Node) -> Iterator[str]:
    for index in sorted(node.due):
        yield f"adds {index}"
    if node.applies:
        yield "applies"
    if node.sum is not None:
        sent = {each for round_id, each, _ in state.parts if round_id == node.sum.id}
        if {each for each, _, _ in node.sum.contributions} <= sent:
            yield "has the sum"
    if node.collect is not None:
        yield from (f"collects from {x}" for x in sorted(state.nodes) if _served(state, x, node.collect) is not None)


def _served(state: State, holder: PeerId, wanted: tuple[Round, bytes]) -> Finished | None:
    current, digest = wanted
    if holder not in current.holders:
        return None
    found = state.nodes[holder].member.sum_of(current.stamp, current.id)
    return found if found is not None and found.digest == digest else None  # who describes another sum is passed over


def _act(setup: Setup, state: State, peer: PeerId, what: str) -> State:
    after = _branch(state, peer)
    node, verb, last = after.nodes[peer], what.split()[0], what.split()[-1]
    member = node.member
    if verb == "adds":
        node.due -= {int(last)}
        node.added += (int(last),)
        begin(setup, after, peer, member.add(0, int(last)))
    elif verb == "applies":
        assert member.finished is not None
        node.applies, node.applied = False, member.finished.digest
        begin(setup, after, peer, member.applied(now=after.now))
    elif verb == "has":
        assert node.sum is not None
        finished = _summed(setup, after, node.sum)
        node.sum = None
        begin(setup, after, peer, member.sum_whole(finished, now=after.now))
    else:
        assert node.collect is not None
        found = _served(state, PeerId(last), node.collect)
        assert found is not None
        node.collect = None
        begin(setup, after, peer, member.sum_whole(found, now=after.now))
    return after


def _summed(setup: Setup, state: State, current: Round) -> Finished:
    """What the parts make. A sum's bits depend on who summed what, so its digest does."""
    named = {peer: indexes for peer, _, indexes in current.contributions}
    parts = sorted((peer, part) for round_id, peer, part in state.parts if round_id == current.id and peer in named)
    counted = sorted(index for _, part in parts for index in part)
    if counted != list(range(setup.microbatches)):
        raise Broken(f"a sum of {counted}: {parts} in round {current.id}")
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return Finished(current.id, digest, len(counted), 0.0, 1.0, current.contributions)


def _tick(setup: Setup, state: State) -> State:
    """A heartbeat's time: all hear each other's heartbeats, then say again what is not answered."""
    after = _branch(state, *state.nodes)
    after.now, after.ticks = state.now + TIMERS.beat_s, state.ticks + 1
    beats: dict[PeerId, Heartbeat] = {peer: node.member.heartbeat() for peer, node in after.nodes.items()}
    for peer, beat in beats.items():
        for other, node in after.nodes.items():
            if other != peer:
                begin(setup, after, other, node.member.receive(peer, beat, now=after.now))
    for peer, node in after.nodes.items():
        begin(setup, after, peer, node.member.tick(now=after.now))
    return after


def _silence(setup: Setup, state: State, peer: PeerId) -> State:
    """Time passes while messages wait; this machine alone notices."""
    after = _branch(state, peer)
    after.now, after.silences, after.faulty = state.now + 2 * TIMERS.suspect_s, state.silences - 1, True
    begin(setup, after, peer, after.nodes[peer].member.tick(now=after.now))
    return after


def _may_crash(setup: Setup, state: State, peer: PeerId) -> bool:
    """Each stage keeps one that lives, and with it the sum, once somebody goes by its commit."""
    stage = setup.stage_of(peer)
    mates = [node for other, node in state.nodes.items() if other != peer and setup.stage_of(other) == stage]
    known = any(commit.stage == stage for node in state.nodes.values() for commit in node.member.barrier.known)
    past = any(node.applied is not None for node in state.nodes.values())
    if known or past:
        return any(node.member.finished is not None or node.applied is not None for node in mates)
    return bool(mates)


def _crash(state: State, peer: PeerId) -> State:
    after = _branch(state)
    after.crashes, after.faulty = state.crashes - 1, True
    del after.nodes[peer]
    after.wire = {pair: channel for pair, channel in after.wire.items() if pair[1] != peer}
    for other in after.nodes:
        after.wire[peer, other] = (*after.wire.get((peer, other), ()), Gone())
    return after


# ---------------------------------------------------------------- the search


@dataclass(slots=True)
class Searched:
    """states: found. open: those whose moves were not looked at, for the cap. ends: in which all have applied.
    stuck: states with no way to an end that holds no further fault; only counted where nothing is open.
    forks: states in which two mates that live applied different sums, after a fault."""

    states: int = 0
    open: int = 0
    ends: int = 0
    stuck: int = 0
    forks: int = 0
    unfinished: int = 0
    followed: int = 0
    story: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        whole = "all" if not self.open else f"{self.open} left open by the cap"
        return (
            f"{self.states} states ({whole}), {self.ends} ends, {self.forks} with a fork after a fault, "
            f"{self.stuck} stuck, {self.followed} followed to the end"
        )


def search(setup: Setup, *, cap: int, follow: int = 50) -> Searched:
    """Look at every interleaving, breadth first, up to `cap` states.

    follow: so many of the states left open are run on by one fair schedule, which has to reach an end.

    Raises:
        Broken: a wrong sum; two sums of one stage without a fault; a fair schedule without end.
    """
    found, names = Searched(), dict[int, tuple[Node, bytes]]()
    first = setup.start()
    root = first.name(names)
    parents: dict[bytes, tuple[bytes, str] | None] = {root: None}
    before: dict[bytes, list[bytes]] = {}
    queue: deque[tuple[bytes, State]] = deque([(root, first)])
    ends: list[bytes] = []
    left: list[tuple[bytes, State]] = []

    def story(name: bytes) -> list[str]:
        told = []
        while (step := parents[name]) is not None:
            name, what = step
            told.append(what)
        return told[::-1]

    while queue:
        name, state = queue.popleft()
        if _forked(setup, state):
            if not state.faulty:
                raise Broken("two sums of one stage applied: " + "; ".join(story(name)))
            found.forks += 1
        if ended(state):
            ends.append(name)
            continue
        if len(parents) >= cap:
            left.append((name, state))
            continue
        try:
            for what, after, fault in moves(setup, state):
                other = after.name(names)
                if not fault:
                    before.setdefault(other, []).append(name)
                if other not in parents:
                    parents[other] = name, what
                    queue.append((other, after))
        except Broken as broken:
            raise Broken(f"{broken}: " + "; ".join(story(name))) from None
        if len(names) > 200_000:
            names.clear()
    found.states, found.open, found.ends = len(parents), len(left), len(ends)
    if not left:
        good, stack = set(ends), list(ends)
        while stack:
            for name in before.get(stack.pop(), ()):
                if name not in good:
                    good.add(name)
                    stack.append(name)
        bad = [name for name in parents if name not in good]
        found.stuck = len(bad)
        if bad:
            found.story = min((story(name) for name in bad), key=len)
    for name, state in left[:: max(1, len(left) // follow)] if left else ():
        found.followed += 1
        if not _fair(setup, state):
            raise Broken("a fair schedule does not end: " + "; ".join(story(name)))
    return found


def _forked(setup: Setup, state: State) -> bool:
    sums = {(setup.stage_of(peer), node.applied) for peer, node in state.nodes.items() if node.applied is not None}
    return len(sums) > len({stage for stage, _ in sums})


def _fair(setup: Setup, state: State, most: int = 4000) -> bool:
    """Everything happens in turn, oldest sender first, and no further fault: does the step end?"""
    turn = 0
    while not ended(state) and turn < most:
        options = [(what, after) for what, after, fault in moves(setup, state) if not fault]
        if not options:
            return False
        state = options[turn % len(options)][1]
        if _forked(setup, state) and not state.faulty:
            raise Broken("two sums of one stage applied")
        turn += 1
    return ended(state)
