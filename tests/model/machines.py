"""Production machines of the step as values: each local state has a number, and each event leads to another number.

A local state is one replica's `Member` and what its driver would hold. What an event does to a machine depends on
nothing but that state, the event and the time, so it is computed once, however many interleavings meet it: a global
state is a few numbers, and a search looks at a hundred thousand of them where a few thousand machines are copied.
Machines are copied and compared as they are, field by field: what they are made of may change. Only `Node.facts` and
`Surroundings` know what a machine is asked and what it asks for.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from types import FunctionType, MethodType
from typing import Any, NamedTuple

from swarmnet.bounds import Recent
from swarmnet.ids import Chain, Generation, PeerId, RoundId
from swarmnet.manifest.timers import Timers
from swarmnet.messages import Commit, Committed, Finished, Round, StepControl
from swarmnet.step.commits import evidence
from swarmnet.step.drift import DriftRules
from swarmnet.step.gate import Shape
from swarmnet.step.member import Member

# ---------------------------------------------------------------- copies and names of machines


@functools.cache
def _is_value(kind: type) -> bool:
    """Does nothing of that kind ever change?"""
    frozen = is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    return kind in _PLAIN or kind is frozenset or frozen or issubclass(kind, enum.Enum | type | FunctionType)


@functools.cache
def _declared(kind: type) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind)) if is_dataclass(kind) else ()


def _attributes(value: object) -> Iterable[str]:
    declared, own = _declared(type(value)), getattr(value, "__dict__", None)
    return declared if not own else own if not declared else dict.fromkeys([*declared, *own])


def copy_of(value: Any, memo: dict[int, object]) -> Any:
    """A copy that changes by itself: what can change is copied, what is frozen is shared."""
    kind = type(value)
    if _is_value(kind):
        return value
    known = memo.get(id(value))
    if known is not None:
        return known
    if isinstance(value, dict):
        result = memo[id(value)] = Recent(value.most) if isinstance(value, Recent) else kind()
        for key, each in value.items():
            result[key] = each if type(each) in _PLAIN else copy_of(each, memo)
        return result
    if isinstance(value, list | set | deque):
        result = memo[id(value)] = kind(copy_of(each, memo) for each in value)
        return result
    if kind is tuple:
        return tuple([each if type(each) in _PLAIN else copy_of(each, memo) for each in value])
    if kind is itertools.count:
        result = memo[id(value)] = itertools.count(int(repr(value)[6:-1]))
        return result
    if kind is MethodType:
        result = memo[id(value)] = MethodType(value.__func__, copy_of(value.__self__, memo))
        return result
    result = memo[id(value)] = object.__new__(kind)
    for name in _attributes(value):
        each = getattr(value, name)
        object.__setattr__(result, name, each if type(each) in _PLAIN else copy_of(each, memo))
    return result


_words: dict[int, tuple[object, str]] = {}


def _words_of(value: object) -> str:
    """The `repr` of what never changes; made once, for many machines hold the same."""
    known = _words.get(id(value))
    if known is None:
        known = _words[id(value)] = value, repr(value)
    return known[1]


def name_of(value: Any, seen: dict[int, int]) -> object:
    """The same for equal machines, and for no others. Order in sets and mappings does not count.

    seen: objects named before, in order: many parts of a machine hold the same one.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind in _CONSTANT:
        return None
    if kind is frozenset or kind is set:
        return "(", *sorted([repr(name_of(each, seen)) for each in value])
    if kind is tuple or kind is list or kind is deque:
        return tuple([each if type(each) in _PLAIN else name_of(each, seen) for each in value])
    if _is_value(kind):
        return _words_of(value)
    if kind is itertools.count:
        return repr(value)
    if kind is MethodType:  # a new object each time that it is looked up
        return value.__name__, name_of(value.__self__, seen)
    known = seen.get(id(value))
    if known is not None:
        return known
    seen[id(value)] = len(seen)
    if isinstance(value, Mapping):
        return "{", *sorted([(repr(name_of(key, seen)), repr(name_of(each, seen))) for key, each in value.items()])
    named = [getattr(value, name) for name in _attributes(value)]
    return kind.__name__, *[each if type(each) in _PLAIN else name_of(each, seen) for each in named]


_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_CONSTANT = frozenset({Shape, Timers, DriftRules})
"""What no machine changes and all of a setup share."""


# ---------------------------------------------------------------- one replica


@dataclass(slots=True)
class Node:
    """A replica: its machine, and what its driver would hold. accumulated: the indexes in its accumulator.

    aggregation: the round that it takes part in. fetch: the aggregate that it fetches. due: indexes whose gradients it
    may accumulate. kept: complete aggregates of the step that are here, superseded ones included. applied: the digest
    of the one that it has applied. signed: digests of those that it has signed. resyncs: it gives up its state for that
    of another replica.
    """

    member: Member
    accumulated: tuple[int, ...] = ()
    aggregation: Round | None = None
    fetch: tuple[Round, bytes] | None = None
    due: frozenset[int] = frozenset()
    kept: frozenset[Finished] = frozenset()
    applies: bool = False
    applied: bytes | None = None
    signed: frozenset[bytes] = frozenset()
    resyncs: bool = False

    def copy(self) -> Node:
        """One that changes by itself."""
        return replace(self, member=copy_of(self.member, {}))

    def name(self) -> bytes:
        """The same for equal nodes."""
        return hashlib.blake2b(repr(name_of(self, {})).encode(), digest_size=16).digest()

    def facts(self) -> Facts:
        """What invariants are about, of the step that is searched."""
        member, claims = self.member, self.member.oldest.claims
        done = self.applied is not None
        commit = member.last_commits[member.stage] if done else member.oldest.barrier.of(member.stage)
        held = member.last_finished if done else member.oldest.finished
        return Facts(
            commit.digest if commit is not None else None,
            evidence((commit,)) if commit is not None else None,
            self.applied,
            self.signed,
            held.contributions if held is not None else (),
            self.accumulated,
            frozenset(self.accumulated) <= claims.assigned or done,
            len(set(self.accumulated)) == len(self.accumulated),
            done or self.resyncs,
        )


class Facts(NamedTuple):
    """Of one replica. evidence: what the next chain takes of the commit. assigned: it accumulated only what it was
    assigned. once: and each index once.
    """

    committed: bytes | None
    evidence: bytes | None
    applied: bytes | None
    signed: frozenset[bytes]
    contributions: tuple[tuple[PeerId, Any, frozenset[int]], ...]
    accumulated: tuple[int, ...]
    assigned: bool
    once: bool
    done: bool


class Effects(NamedTuple):
    """What an event made a node do. sent: (receiver, number of the message)."""

    sent: tuple[tuple[PeerId, int], ...] = ()
    shares: tuple[Share, ...] = ()


class Share(NamedTuple):
    """What a replica hands to the others for an aggregate. declared: as the round names it. holds: what it is."""

    round: RoundId
    peer: PeerId
    declared: tuple[Generation, frozenset[int]]
    holds: tuple[int, ...]


Event = tuple[Any, ...]
"""("hear", sender, message number), ("gone", sender), ("add", index), ("apply",), ("aggregate", finished),
("beats", ((sender, message number), ...), peers): a heartbeat's time has passed, and these peers answered mine,
("wait",): time has passed without any."""


class Surroundings:
    """The host of a node's machine. What a machine says to itself comes after what it asked for before."""

    def __init__(self, node: Node, number: Callable[[Any], int], now: float) -> None:
        self.node, self._number, self._now = node, number, now
        self.sent: list[tuple[PeerId, int]] = []
        self.shares: list[Share] = []

    def send(self, peer: PeerId, message: StepControl) -> None:
        if peer == self.node.member.me:
            self.node.member.receive(peer, message, now=self._now)
        else:
            self.sent.append((peer, self._number(message)))

    def beat(self) -> None:
        self._tell_all(self.node.member.heartbeat())

    def publish(self, committed: Committed) -> None:
        self._tell_all(committed)
        self.node.member.receive(self.node.member.me, committed, now=self._now)

    def _tell_all(self, message: StepControl) -> None:
        self.sent.extend((to, self._number(message)) for to in sorted(self.node.member.view.everyone()))

    def contribute(self, step: int, index: int) -> None:
        if index not in self.node.accumulated:
            self.node.due |= {index}

    def redirect(self, step: int, index: int, assignee: PeerId) -> None:
        """Callers are no part of the search."""

    def discard(self, step: int) -> None:
        self.node.accumulated, self.node.due = (), frozenset()

    def aggregate(self, attempt: Round) -> None:
        self.node.aggregation = attempt
        self.shares.extend(
            Share(attempt.id, peer, (generation, indexes), tuple(sorted(self.node.accumulated)))
            for peer, generation, indexes in attempt.contributions
            if peer == self.node.member.me
        )

    def fetch(self, attempt: Round, digest: bytes) -> None:
        self.node.fetch = attempt, digest

    def stop(self) -> None:
        self.node.aggregation = self.node.fetch = None

    def execute(self, step: int, index: int) -> None:
        self.node.member.claim(step, index, now=self._now)

    def apply(self, commits: tuple[Commit, ...]) -> None:
        self.node.applies = True

    def resync(self, sources: tuple[PeerId, ...]) -> None:
        self.node.resyncs, self.node.member.synced = True, False

    def measure(self, version: int, chain: Chain, term_chain: Chain) -> None:
        """Weights are no part of the search."""

    def orphan(self) -> None:
        self.node.resyncs = True

    def log(self, event: str, **fields: Any) -> None:
        """Nobody reads it."""


class Machines:
    """All local states that were met, and where events lead from them."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.facts: list[Facts] = []
        self.messages: list[Any] = []
        self._numbers: dict[bytes, int] = {}
        self._message_numbers: dict[str, int] = {}
        self._after: dict[tuple[int, Event, float], tuple[int, Effects]] = {}
        self._beats: dict[int, int] = {}

    def number(self, node: Node) -> int:
        """The number of a local state; the node must not change any more."""
        name = node.name()
        found = self._numbers.get(name)
        if found is None:
            found = self._numbers[name] = len(self.nodes)
            self.nodes.append(node)
            self.facts.append(node.facts())
        return found

    def message(self, message: Any) -> int:
        """The number of a message. Commits are equal whose votes differ, but they are not the same message."""
        words = repr(message)
        found = self._message_numbers.get(words)
        if found is None:
            found = self._message_numbers[words] = len(self.messages)
            self.messages.append(message)
        return found

    def beat(self, number: int) -> int:
        """The heartbeat of a node, as a message number."""
        found = self._beats.get(number)
        if found is None:
            found = self._beats[number] = self.message(self.nodes[number].copy().member.heartbeat())
        return found

    def after(self, number: int, event: Event, now: float) -> tuple[int, Effects]:
        """The node after an event at that time, and what it did."""
        key = number, event, now
        found = self._after.get(key)
        if found is None:
            node = self.nodes[number].copy()
            self._happens(node, event, now)
            found = self._after[key] = self.begin(node, now)
        return found

    def begin(self, node: Node, now: float) -> tuple[int, Effects]:
        """The node, once all that its machine asked for is done."""
        host = Surroundings(node, self.message, now)
        node.member.calls.make(host)
        if node.member.oldest.finished is not None:
            node.signed |= {node.member.oldest.finished.digest}
        return self.number(node), Effects(tuple(host.sent), tuple(host.shares))

    def _happens(self, node: Node, event: Event, now: float) -> None:
        member = node.member
        match event:
            case ("hear", sender, message):
                member.receive(sender, self.messages[message], now=now)
            case ("gone", sender):
                member.gone(sender, definite=True, now=now)
            case ("add", index):
                node.due -= {index}
                node.accumulated += (index,)
                member.add(member.version, index)
            case ("apply",):
                assert member.oldest.finished is not None
                node.applies, node.applied = False, member.oldest.finished.digest
                node.accumulated, node.due = (), frozenset()
                member.applied(now=now)
            case ("aggregate", finished):
                node.aggregation = node.fetch = None
                node.kept |= {finished}
                member.oldest.sum_whole(finished, now=now)
            case ("lack", round_id, holders):
                node.fetch = None
                member.oldest.sum_failed(round_id, holders)
            case ("beats", beats, answered):
                for peer, beat in beats:
                    member.receive(peer, self.messages[beat], now=now)
                for peer in answered:
                    member.view.echo(peer, now=now)
                member.tick(now=now)
            case ("wait",):
                member.tick(now=now)
            case _:
                raise AssertionError(event)

    def held(self, number: int, wanted: RoundId, digest: bytes) -> Finished | None:
        """The aggregate that a node serves under that round and digest."""
        kept = self.nodes[number].kept
        return next((each for each in kept if (each.id, each.digest) == (wanted, digest)), None)
