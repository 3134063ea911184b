"""Every interleaving of one step of the step protocol, between production machines (`swarmnet.step.Member`).

Try a change of the protocol here first: `pytest tests/model -s` takes seconds, `--long` the rest.

- State: the replicas' machines, what each has accumulated, the messages on the way (in order for each pair), the shares
  of aggregates handed out, the time, and which faults may still happen.
- Events: the first message of a pair arrives; a gradient is accumulated; an aggregate is complete, or fetched; the
  optimizer step is done. When nothing else is left, a heartbeat's time passes and all heartbeats arrive.
- Faults (`Faults`): each so many times, at any moment.
- Invariants (`Setup.violation`), in every state: correct replicas know one commit of the step; a microbatch contributes
  at most once to an aggregate; accumulated is a subset of assigned. How many states have a replica that has signed two
  values is counted: a value is locked for `suspect_s` only.
- Liveness (`Ways`), from every state: without further faults and with messages delivered in order, the step is applied.

Where a state was reached before, by whatever way, it is not looked at again. Replicas are not interchanged: the order
of leaders follows from their names. A message to oneself arrives at once, as the driver has it.

A failing search prints the shortest way to the state as a conversation (`Search.tell`): time, who did or heard what,
and what it said then. Fields that say nothing are left out; digests are cut to four digits.

    0.0 s  0B hears MemberState(wants={1}) from 0A
                says to 0A: StagePlan(generation=..., assigned={1})
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from machines import Effects, Event, Machines, Node, Share

from swarmnet.ids import Chain, PeerId
from swarmnet.manifest.timers import Timers
from swarmnet.messages import (
    FOR_EVER,
    MAX_LEVEL,
    NONE,
    Committed,
    Exclusion,
    Finished,
    MemberState,
    Round,
    StagePlan,
    StateHeader,
)
from swarmnet.step.commits import statement
from swarmnet.step.gate import Shape
from swarmnet.step.member import Member
from swarmnet.testing.virtual_swarm import SimulatedSigner


@dataclass(frozen=True, slots=True)
class Impatient(Timers):
    """Free indexes are ordered soon: less to search."""

    def __post_init__(self) -> None:
        Timers.__post_init__(self)
        object.__setattr__(self, "idle_s", 1.0)


PLACES = "ABCDE"
"""Replicas of a stage."""

TIMERS = Impatient()

CHAINS = tuple(Chain(str(stage + 1) * 64) for stage in range(4))
DEAD, AWAY = -1, -2
"""In the place of a node: it does not come back; it starts again."""
GONE = -1
"""In the place of a message: the process that sent what came before is no more."""
MOST_S = 120.0
"""A step that takes longer stands still."""
MOST_ROUNDS = 4000


class Faults(NamedTuple):
    """How often each may happen.

    crashes: a machine ends for good. restarts: it ends, and begins again with the state of another. suspicions: one
    takes another for dead that lives. silences: time passes for one, as if it heard nothing. losses: a message does not
    come. lies: the leader says something else than its machine does, to one replica (`lies_of`). mutes: one of
    `Setup.worked` sends heartbeats alone from then on.

    A crash or restart spares the last replica of a stage that holds what the stage has committed.
    """

    crashes: int = 0
    restarts: int = 0
    suspicions: int = 0
    silences: int = 0
    losses: int = 0
    lies: int = 0
    mutes: int = 0


NO_FAULTS = Faults()
Channel = tuple[int, ...]
Pair = tuple[PeerId, PeerId]
Move = tuple[Any, ...]


class State(NamedTuple):
    """nodes: their numbers (`Machines`), in the order of `Setup.peers`. wire: by `Setup.pairs`, numbers of messages.
    mute: who sends heartbeats alone."""

    now: float
    nodes: tuple[int, ...]
    wire: tuple[Channel, ...]
    shares: frozenset[Share]
    left: Faults
    mute: frozenset[PeerId] = frozenset()


class Broken(AssertionError):
    """An invariant does not hold; with the conversation."""


@dataclass
class Setup:
    """stages x replicas machines at one step, after `steps_before` undisturbed ones.

    claims: (place in the stage, index) of the work that begins at once. observed: (place, place): the first has
    observed the second to be late, in all stages. made_up: (place, place): the first has taken its state over, with a
    table that bans the second. worked: (place, contributions so far); of all others they are many. together: in the
    first step all have heard of each other; else each begins alone. classes: aggregates of the same microbatches have
    other bits if others have summed them. silence_s: how long a silence is. spares: crashes spare the last holder.
    horizon_s: the search looks no further in time.
    """

    stages: int = 1
    replicas: int = 2
    microbatches: int = 2
    faults: Faults = NO_FAULTS
    claims: tuple[tuple[int, int], ...] = ((0, 0), (1, 1))
    observed: tuple[tuple[int, int], ...] = ()
    made_up: tuple[tuple[int, int], ...] = ()
    worked: tuple[tuple[int, int], ...] = ()
    together: bool = True
    steps_before: int = 0
    classes: bool = True
    silence_s: float = 2 * TIMERS.suspect_s
    spares: bool = True
    horizon_s: float = MOST_S
    machines: Machines = field(default_factory=Machines, repr=False)

    def __post_init__(self) -> None:
        self.shape = Shape(self.stages, self.microbatches, 1 + self.steps_before)
        self.peers = tuple(
            PeerId(f"{stage}{PLACES[place]}") for stage in range(self.stages) for place in range(self.replicas)
        )
        self.pairs: tuple[Pair, ...] = tuple((a, b) for a in self.peers for b in self.peers if a != b)
        self.place = {peer: number for number, peer in enumerate(self.peers)}
        self.pair = {pair: number for number, pair in enumerate(self.pairs)}
        self.liar: PeerId | None = None

    def __repr__(self) -> str:
        of = [each.name for each in fields(self) if each.repr and getattr(self, each.name) != each.default]
        said = [f"{name}={getattr(self, name)}" for name in of if name != "faults"]
        return " ".join([*said, *(f"{n} {name}" for name, n in self.faults._asdict().items() if n)]) or "undisturbed"

    def member(self, peer: PeerId, incarnation: int, now: float) -> Member:
        """A machine that has no state yet."""
        stage = int(peer[0])
        return Member(
            peer,
            stage,
            self.shape,
            TIMERS,
            incarnation=incarnation,
            chain=CHAINS[stage],
            now=now,
            signer=SimulatedSigner(peer),
        )

    def start(self) -> State:
        """The state in which the search begins."""
        members = {peer: self.member(peer, 1, 0.0) for peer in self.peers}
        if self.together:
            for peer, member in members.items():
                beat = replace(member.heartbeat(), synced=True)
                for other in members:
                    if other != peer:
                        members[other].receive(peer, beat, now=0.0)
        state = State(0.0, (DEAD,) * len(self.peers), ((),) * len(self.pairs), frozenset(), Faults())
        for peer, member in members.items():
            chain = CHAINS[member.stage]
            member.restored(StateHeader(0, chain, chain, chain), None, (), now=0.0)
            state = self._begin(state, peer, Node(member))
        for _ in range(self.steps_before):
            state = self._next_step(Ways(self).end(self._claimed(state)))
        if self.worked:
            state = self._worked(state)
        for place, late in self.observed:
            for peer, other in self.pairs:
                if (peer[0], peer[1], other[1]) == (other[0], PLACES[place], PLACES[late]):
                    state = self._observed(state, peer, other)
        for place, banned in self.made_up:
            state = self._told_table(state, self.peers[place], self.peers[banned])
        state = self._claimed(state)
        if self.faults.lies:
            leads = [node.member.me for node in map(self.node, self.peers) if node.member.oldest.leader is not None]
            self.liar = leads[0] if leads else self.peers[0]
        return state._replace(left=self.faults)

    def node(self, peer: PeerId) -> Node:
        """As it was met last; only in `start`."""
        return next(node for node in reversed(self.machines.nodes) if node.member.me == peer)

    def _worked(self, state: State) -> State:
        """All know how often each has contributed."""
        worked = {PLACES[place]: contributions for place, contributions in self.worked}
        for peer in self.peers:
            node = self._copy(state, peer)
            membership = node.member.membership
            for counting in membership._counting.values():
                for mate, contributed in counting._of.items():
                    if mate[1] in worked:
                        counting._of[mate] = replace(contributed, times=worked[mate[1]])
            membership._rosters.clear()
            node.member.tick(now=state.now)
            state = self._begin(state, peer, node)
        return state

    def _told_table(self, state: State, peer: PeerId, banned: PeerId) -> State:
        """`peer` has taken its state over, with a table of exclusions that is made up."""
        node, table = self._copy(state, peer), (Exclusion(banned, FOR_EVER, MAX_LEVEL),)
        node.member.stand(replace(node.member.header, exclusions=table))
        node.member.membership.restored((), table)
        return self._begin(state, peer, node)

    def _observed(self, state: State, peer: PeerId, other: PeerId) -> State:
        """`peer` has observed `other` to be late, and its heartbeat has said so."""
        node = self._copy(state, peer)
        node.member.lateness.observe(other, "observed", now=state.now)
        node.member.tick(now=state.now)
        beat = replace(node.member.heartbeat(), synced=True)
        state = self._begin(state, peer, node)
        for hears in self.peers:
            if hears != peer:
                node = self._copy(state, hears)
                node.member.receive(peer, beat, now=state.now)
                state = self._begin(state, hears, node)
        return state

    def _copy(self, state: State, peer: PeerId) -> Node:
        return self.machines.nodes[state.nodes[self.place[peer]]].copy()

    def _begin(self, state: State, peer: PeerId, node: Node) -> State:
        number, effects = self.machines.begin(node, state.now)
        return self._put(state, peer, number, effects)

    def _claimed(self, state: State) -> State:
        for peer in self.peers:
            for place, index in self.claims:
                if peer[1] == PLACES[place]:
                    node = self.machines.nodes[state.nodes[self.place[peer]]].copy()
                    node.member.claim(node.member.version, index, now=state.now)
                    state = self._begin(state, peer, node)
        return state

    def _next_step(self, state: State) -> State:
        """All have applied a step: nothing of it is left."""
        for peer in self.peers:
            node = self.machines.nodes[state.nodes[self.place[peer]]].copy()
            state = self._begin(state, peer, Node(node.member))
        return state._replace(shares=frozenset())

    # ------------------------------------------------------------ what follows

    def _put(self, state: State, peer: PeerId, number: int, effects: Effects) -> State:
        """The node is in that state, and what it sent is on the way."""
        place, wire = self.place[peer], state.wire
        nodes = (*state.nodes[:place], number, *state.nodes[place + 1 :])
        if peer in state.mute:
            return state._replace(nodes=nodes)
        if effects.sent:
            channels = list(wire)
            for to, message in effects.sent:
                if to in self.place and nodes[self.place[to]] >= 0:
                    pair = self.pair[peer, to]
                    # All of them may come twice, and say the same then.
                    if message not in channels[pair]:
                        channels[pair] = (*channels[pair], message)
            wire = tuple(channels)
        shares = state.shares.union(effects.shares) if effects.shares else state.shares
        return state._replace(nodes=nodes, wire=wire, shares=shares)

    def _event(self, state: State, peer: PeerId, event: Event) -> State:
        return self._put(state, peer, *self.machines.after(state.nodes[self.place[peer]], event, state.now))

    def after(self, state: State, move: Move) -> State:
        """The state after a move.

        Raises:
            Broken: an aggregate does not hold each microbatch once.
        """
        match move:
            case ("hear", sender, to) | ("hear", sender, to, _):
                message, state = self._take(state, sender, to)
                if len(move) == 4:
                    message, state = move[3], self._spend(state, "lies")
                return self._event(state, to, ("gone", sender) if message == GONE else ("hear", sender, message))
            case ("own", peer, event):
                return self._event(state, peer, event)
            case ("own", peer, event, _):
                return self._event(self._spend(state, "lies"), peer, event)
            case ("tick",):
                return self._tick(state)
            case ("returns", peer, donor):
                return self._return(state, peer, donor)
            case ("dies", peer):
                return self._end(self._spend(state, "crashes"), peer, DEAD)
            case ("restarts", peer):
                return self._end(self._spend(state, "restarts"), peer, AWAY)
            case ("suspects", peer, other):
                return self._event(self._spend(state, "suspicions"), peer, ("gone", other))
            case ("waits", peer):
                later = self._spend(state, "silences")._replace(now=state.now + self.silence_s)
                return self._event(later, peer, ("wait",))
            case ("loses", sender, to):
                return self._take(self._spend(state, "losses"), sender, to)[1]
            case ("mutes", peer):
                return self._spend(state, "mutes")._replace(mute=state.mute | {peer})
        raise AssertionError(move)

    @staticmethod
    def _spend(state: State, fault: str) -> State:
        return state._replace(left=state.left._replace(**{fault: getattr(state.left, fault) - 1}))

    def _take(self, state: State, sender: PeerId, to: PeerId) -> tuple[int, State]:
        pair = self.pair[sender, to]
        message, *rest = state.wire[pair]
        wire = (*state.wire[:pair], tuple(rest), *state.wire[pair + 1 :])
        return message, state._replace(wire=wire)

    def _tick(self, state: State) -> State:
        """A heartbeat's time: all hear each other's heartbeats, then say again what is not answered."""
        after = state._replace(now=state.now + TIMERS.beat_s)
        live = [peer for peer in self.peers if state.nodes[self.place[peer]] >= 0]
        beats = [(peer, self.machines.beat(state.nodes[self.place[peer]])) for peer in live]
        for peer in live:
            heard = tuple(each for each in beats if each[0] != peer)
            after = self._event(after, peer, ("beats", heard, tuple(other for other, _ in heard)))
        return after

    def _end(self, state: State, peer: PeerId, becomes: int) -> State:
        nodes = tuple(becomes if other == peer else state.nodes[self.place[other]] for other in self.peers)
        wire = tuple(
            () if to == peer else (*channel, GONE) if sender == peer and nodes[self.place[to]] >= 0 else channel
            for (sender, to), channel in zip(self.pairs, state.wire, strict=True)
        )
        return state._replace(nodes=nodes, wire=wire)

    def _return(self, state: State, peer: PeerId, donor: PeerId) -> State:
        """It begins again, with the state of that replica."""
        source = self.machines.nodes[state.nodes[self.place[donor]]]
        of = source.member
        member = self.member(peer, 2, state.now)
        member.restored(of.header, of.oldest.finished, of.oldest.barrier.known, of.last_commits, now=state.now)
        kept = frozenset({member.oldest.finished} if member.oldest.finished is not None else ())
        return self._begin(state, peer, Node(member, kept=kept, applied=source.applied))

    # ------------------------------------------------------------ what may happen

    def moves(self, state: State) -> list[Move]:
        """All that may happen next but faults."""
        found: list[Move] = [("hear", *pair) for pair, channel in zip(self.pairs, state.wire, strict=True) if channel]
        for peer, number in zip(self.peers, state.nodes, strict=True):
            if number >= 0:
                found += (("own", peer, event) for event in self._own(state, self.machines.nodes[number]))
            elif number == AWAY:
                found += (("returns", peer, donor) for donor in self._donors(state, peer))
        if not found and state.now < self.horizon_s and not self.ended(state):
            found.append(("tick",))
        return found

    def faulty(self, state: State) -> Iterator[Move]:
        """All faults that may happen next."""
        left = state.left
        if not any(left):
            return
        live = [peer for peer, number in zip(self.peers, state.nodes, strict=True) if number >= 0]
        for peer in live:
            if (left.crashes or left.restarts) and self._may_end(state, peer):
                if left.crashes:
                    yield "dies", peer
                if left.restarts:
                    yield "restarts", peer
            if left.suspicions:
                yield from (("suspects", peer, other) for other in live if other != peer)
            if left.silences and any(state.wire):
                yield "waits", peer
            if left.mutes and peer[1] in {PLACES[place] for place, _ in self.worked} and peer not in state.mute:
                yield "mutes", peer
        for (sender, to), channel in zip(self.pairs, state.wire, strict=True):
            if channel and channel[0] != GONE:
                if left.losses:
                    yield "loses", sender, to
                if left.lies and sender == self.liar:
                    message = self.machines.messages[channel[0]]
                    for lie in lies_of(message, sender, self):
                        yield "hear", sender, to, self.machines.message(lie)
        if left.lies:
            for peer in live:
                node = self.machines.nodes[state.nodes[self.place[peer]]]
                of = node.aggregation
                if of is not None and peer != self.liar and self.liar in of.receivers:
                    for event in self._own(state, node):
                        if event[0] == "aggregate":
                            yield "own", peer, (event[0], replace(event[1], digest=FORGED)), "lie"

    def ended(self, state: State) -> bool:
        """All that live and speak have applied the step, or take over the state of another replica."""
        return all(
            number == DEAD or peer in state.mute or (number >= 0 and self.machines.facts[number].done)
            for peer, number in zip(self.peers, state.nodes, strict=True)
        ) and not any(number == AWAY for number in state.nodes)

    def _own(self, state: State, node: Node) -> Iterator[Event]:
        for index in sorted(node.due):
            yield "add", index
        if node.applies:
            yield ("apply",)
        if node.aggregation is not None:
            finished = self._aggregate(state, node.aggregation)
            if finished is not None:
                yield "aggregate", finished
        if node.fetch is not None:
            wanted, digest = node.fetch
            numbers = (state.nodes[self.place[peer]] for peer in (node.member.me, *wanted.holders))
            held = (self.machines.held(number, wanted.id, digest) for number in numbers if number >= 0)
            if (found := next(filter(None, held), None)) is not None:
                yield "aggregate", found
            else:
                live = tuple(peer for peer in wanted.holders if state.nodes[self.place[peer]] >= 0)
                if live and node.member.oldest.part.lacking != frozenset(live):
                    yield "lack", wanted.id, live

    def _aggregate(self, state: State, current: Round) -> Finished | None:
        """What the shares of that round make, once all are there."""
        found = []
        for peer, generation, indexes in current.contributions:
            share = next(
                (
                    each
                    for each in state.shares
                    if (each.round, each.peer, each.declared) == (current.id, peer, (generation, indexes))
                ),
                None,
            )
            if share is None:
                return None
            found.append((peer, share.holds))
        counted = sorted(index for _, holds in found for index in holds)
        if counted != list(range(self.microbatches)):
            raise Broken(f"an aggregate of microbatches {counted}")
        bits = repr(sorted(found) if self.classes else counted).encode()
        digest = hashlib.sha256(bits).digest()
        return Finished(current.id, digest, len(counted), 0.0, 1.0, current.contributions, late=current.late)

    def _donors(self, state: State, peer: PeerId) -> list[PeerId]:
        """Replicas of its stage whose state it may take over."""
        return [
            other
            for other, number in zip(self.peers, state.nodes, strict=True)
            if other[0] == peer[0] and number >= 0 and not self.machines.nodes[number].member.oldest.applying
        ]

    def _may_end(self, state: State, peer: PeerId) -> bool:
        mates = [
            self.machines.facts[number]
            for other, number in zip(self.peers, state.nodes, strict=True)
            if other != peer and other[0] == peer[0] and number >= 0
        ]
        if not self.spares:
            return bool(mates)
        facts = [self.machines.facts[number] for number in state.nodes if number >= 0]
        known = any(each.committed is not None or each.done for each in facts)
        return any(each.contributions or each.done for each in mates) if known else bool(mates)

    # ------------------------------------------------------------ invariants

    def violation(self, state: State) -> str:
        """What does not hold, of correct replicas; empty: everything holds."""
        committed: dict[str, bytes] = {}
        chains: dict[str, bytes] = {}
        for peer, number in zip(self.peers, state.nodes, strict=True):
            if number < 0 or peer == self.liar:
                continue
            facts = self.machines.facts[number]
            if not facts.assigned:
                return f"{peer} has accumulated what it was not assigned"
            if not facts.once:
                return f"{peer} has accumulated a microbatch twice"
            indexes = [index for _, _, part in facts.contributions for index in part]
            if len(set(indexes)) != len(indexes):
                return f"a microbatch contributes twice to the aggregate of {peer}"
            for digest in (facts.committed, facts.applied):
                if digest is not None and committed.setdefault(peer[0], digest) != digest:
                    return f"two commits of one step in stage {peer[0]}"
            if facts.evidence is not None and chains.setdefault(peer[0], facts.evidence) != facts.evidence:
                return f"two chains in stage {peer[0]}: its commits name different peers late"
        return ""

    def resigned(self, state: State) -> bool:
        """Has a correct replica signed two values?"""
        return any(
            number >= 0 and peer != self.liar and len(self.machines.facts[number].signed) > 1
            for peer, number in zip(self.peers, state.nodes, strict=True)
        )


# ---------------------------------------------------------------- what a lying leader says

FORGED = b"forged" + bytes(26)


def lies_of(message: Any, liar: PeerId, setup: Setup) -> Iterator[Any]:
    """What a leader may say to one replica instead of this message."""
    others = [peer for peer in setup.peers if peer[0] == liar[0]]
    match message:
        case StagePlan():
            if message.assigned:
                for owner in others:
                    yield replace(message, assigned=NONE, moved=tuple((index, owner) for index in message.assigned))
            if message.moved:
                yield replace(message, assigned=frozenset(index for index, _ in message.moved), moved=())
            if message.generation is None:
                higher = replace(message.ballot, number=message.ballot.number + 1)
                yield replace(message, ballot=higher, attempt=None)
                yield replace(message, generation=setup.node(liar).member.oldest.claims.generation, evicted="discard")
            if message.attempt is not None:
                for attempt in _attempts_of(message.attempt, setup):
                    yield replace(message, attempt=attempt)
        case Committed():
            forged = replace(message.commit, digest=FORGED, votes=(), seats=frozenset(), signatures=())
            yield replace(message, commit=forged)
        case MemberState() if message.ack is not None and message.whole:
            ack = replace(message.ack, digest=FORGED)
            vote = SimulatedSigner(liar).sign(statement(ack, message.stamp.restart))
            yield replace(message, ack=ack, vote=vote)


def _attempts_of(opened: Round, setup: Setup) -> Iterator[Round]:
    sets, every = opened.contributions, frozenset(range(setup.microbatches))
    for peer, generation, _ in sets:
        yield replace(opened, contributions=((peer, generation, every),))
        yield replace(opened, contributions=((peer, generation, every),), receivers=(peer,))
    if len(sets) > 1:
        turned = [(a[0], a[1], b[2]) for a, b in zip(sets, (*sets[1:], sets[0]), strict=True)]
        yield replace(opened, contributions=tuple(turned))


# ---------------------------------------------------------------- without further faults


class Ways:
    """Where each state leads if no further fault happens and messages are delivered in order."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._left_s: dict[State, float] = {}

    def next(self, state: State) -> State:
        """One message of each pair arrives, and what is due at each replica happens; or else time passes."""
        setup, moved = self.setup, False
        state = state._replace(left=Faults())
        for pair in setup.pairs:
            if state.wire[setup.pair[pair]]:
                state, moved = setup.after(state, ("hear", *pair)), True
        for peer in setup.peers:
            own = [move for move in setup.moves(state) if move[0] in ("own", "returns") and move[1] == peer]
            if own:
                state, moved = setup.after(state, own[0]), True
        return state if moved or setup.ended(state) else setup.after(state, ("tick",))

    def seconds(self, state: State) -> float:
        """Until the step is applied everywhere; infinite: it is not."""
        way, began = [state], state.now
        while not self.setup.ended(way[-1]) and way[-1] not in self._left_s:
            if len(way) > MOST_ROUNDS or way[-1].now - began > MOST_S:
                break
            way.append(self.next(way[-1]))
        last = way[-1]
        end = last.now + self._left_s.get(last, 0.0 if self.setup.ended(last) else float("inf"))
        for each in way:
            self._left_s[each] = end - each.now
        return end - began

    def end(self, state: State) -> State:
        """The state in which the step is applied everywhere."""
        assert self.seconds(state) < float("inf")
        while not self.setup.ended(state):
            state = self.next(state)
        return state


# ---------------------------------------------------------------- the search


@dataclass
class Search:
    """What a search has found. complete: every interleaving was looked at. resigned: states in which a replica has
    signed two values. longest_s: from a state until the step is applied, without further faults. runs: at random."""

    setup: Setup
    states: int = 0
    complete: bool = True
    ends: int = 0
    resigned: int = 0
    longest_s: float = 0.0
    runs: int = 0
    parents: dict[State, tuple[State, Move] | None] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        return (
            f"{self.setup!r}: {self.states} states ({'all' if self.complete else 'cut'}), of "
            f"{len(self.setup.machines.nodes)} of machines, {self.ends} ends, {self.resigned} with two values signed, "
            f"the longest {self.longest_s:.1f} s to the end, {self.runs} runs at random"
        )

    def way(self, state: State) -> list[Move]:
        """The moves that lead there."""
        moves = []
        while (step := self.parents[state]) is not None:
            state, move = step
            moves.append(move)
        return moves[::-1]

    def tell(self, moves: list[Move]) -> str:
        """These moves as a conversation."""
        state, lines = self.setup.start(), list[str]()
        for move in moves:
            try:
                after = self.setup.after(state, move)
            except Broken as broken:
                return "\n".join([*lines, f"{state.now:5.1f} s  {_words(self.setup, state, move)}: {broken}"])
            lines.append(f"{after.now:5.1f} s  {_words(self.setup, state, move)}")
            for (sender, to), was, is_ in zip(self.setup.pairs, state.wire, after.wire, strict=True):
                for number in is_[len(was) - (move[0] in ("hear", "loses") and move[1:3] == (sender, to)) :]:
                    lines.append(f"             {sender} says to {to}: {describe(self.setup, number)}")
            state = after
        return "\n".join(lines)


def _words(setup: Setup, state: State, move: Move) -> str:
    match move:
        case ("hear", sender, to):
            return f"{to} hears {describe(setup, state.wire[setup.pair[sender, to]][0])} from {sender}"
        case ("hear", sender, to, lie):
            return f"{to} hears {describe(setup, lie)} from {sender}, A LIE"
        case ("loses", sender, to):
            return f"LOST: {describe(setup, state.wire[setup.pair[sender, to]][0])} from {sender} to {to}"
        case ("own", peer, event, *lie):
            what = f"aggregate {event[1].digest.hex()[:4]}" if event[0] == "aggregate" else " ".join(map(str, event))
            return f"{peer}: {what}{', A LIE' if lie else ''}"
        case ("tick",):
            return "a heartbeat's time passes"
    fault, peer, *others = move
    return " ".join([peer, fault.upper(), *others])


def describe(setup: Setup, number: int) -> str:
    """A message, without what says nothing."""
    if number == GONE:
        return "that its connection is gone"
    return _short(setup.machines.messages[number])


def _short(value: Any) -> str:
    if isinstance(value, bytes):
        return value.hex()[:4]
    if isinstance(value, frozenset | set | tuple | list):
        return "{" + " ".join(sorted(map(_short, value))) + "}"
    if not hasattr(value, "__dataclass_fields__"):
        return str(value)[:8] if isinstance(value, str) else str(value)
    said = [
        f"{each.name}={_short(getattr(value, each.name))}"
        for each in fields(value)
        if each.name not in _UNSAID and getattr(value, each.name) not in (None, (), frozenset(), b"", "", 0, False)
    ]
    return f"{type(value).__name__}({', '.join(said)})"


_UNSAID = frozenset(
    ["stamp", "chain", "before", "numerics", "line", "incarnation", "vote", "votes", "signatures", "roll"]
)


def search(setup: Setup, *, cap: int, runs: int = 0, seed: int = 0) -> Search:
    """Look at every interleaving, breadth first, up to `cap` states; then at `runs` that are drawn, each to its end.

    Raises:
        Broken: an invariant does not hold, or a state leads to no end.
    """
    found, ways, first = Search(setup), Ways(setup), setup.start()
    found.parents[first] = None
    queue = deque([first])
    while queue:
        state = queue.popleft()
        _look(found, ways, state, lambda state=state: found.way(state))
        if setup.ended(state):
            found.ends += 1
            continue
        if len(found.parents) >= cap:
            found.complete = False
            continue
        for move in (*setup.moves(state), *setup.faulty(state)):
            try:
                after = setup.after(state, move)
            except Broken as broken:
                raise Broken(f"{broken}\n{found.tell([*found.way(state), move])}") from None
            if after not in found.parents:
                found.parents[after] = state, move
                queue.append(after)
    found.states = len(found.parents)
    for number in range(runs):
        _walk(found, ways, first, random.Random(f"{seed}.{number}"))
    return found


def _look(found: Search, ways: Ways, state: State, way: Any) -> None:
    """Hold a state against all invariants."""
    setup = found.setup
    found.resigned += setup.resigned(state)
    reason = setup.violation(state)
    # Two correct replicas outvote a lying leader. One cannot: then the run waits (docs/protocol.md).
    if not reason and not (setup.faults.lies and setup.replicas < 3):
        try:
            seconds = ways.seconds(state._replace(left=Faults()))
        except Broken as broken:
            reason = f"{broken}, without a further fault"
        else:
            reason = "the step stands still" if seconds > MOST_S else ""
            found.longest_s = max(found.longest_s, seconds)
    if reason:
        raise Broken(f"{reason}\n{found.tell(way())}")


def _walk(found: Search, ways: Ways, state: State, random_: random.Random) -> None:
    """One run at random; faults happen in any of its first hundred moves."""
    setup, way = found.setup, list[Move]()
    when = sorted(random_.randrange(100) for _ in range(sum(setup.faults)))
    while may := setup.moves(state):
        faults = list(setup.faulty(state)) if when and len(way) >= when[0] else []
        if faults:
            when.pop(0)
        way.append(random_.choice(faults or may))
        try:
            state = setup.after(state, way[-1])
        except Broken as broken:
            raise Broken(f"{broken}\n{found.tell(way)}") from None
        _look(found, ways, state, lambda: way)
    found.runs += 1
