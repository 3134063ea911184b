"""What hypothesis draws for a message: from the hint of each field whatever `wire.fields` says that it may hold."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass, replace
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from swarmnet.bounds import MAX_INDEXES, Between, Entries, Outside, Size
from swarmnet.ids import Chain, Generation, PeerId, RunId
from swarmnet.messages import Commit, Finished, MemberState, Part, Round, SnapshotRequest, StagePlan, roll_of
from swarmnet.statement import SignedMessage
from swarmnet.wire.fields import _parts
from swarmnet.wire.peer_ids import peer_id_from_public_bytes

Strategy = st.SearchStrategy[Any]

SOME = 3
"""Entries of a tuple at most: what a run of three stages may need of any kind."""

peers: Strategy = st.binary(min_size=32, max_size=32).map(peer_id_from_public_bytes)
hex32: Strategy = st.binary(min_size=32, max_size=32).map(bytes.hex)
indexes: Strategy = st.frozensets(st.integers(0, 300), max_size=20)


@st.composite
def contributions(draw: st.DrawFn) -> tuple[tuple[PeerId, Generation, frozenset[int]], ...]:
    """Disjoint, and every peer once."""
    everyone = draw(st.lists(peers, max_size=SOME, unique=True))
    owner = draw(st.dictionaries(st.integers(0, 300), st.integers(0, len(everyone)), max_size=20))
    return tuple(
        (peer, draw(of(Generation)), frozenset(index for index, at in owner.items() if at == place))
        for place, peer in enumerate(everyone)
    )


def _peer_of(entry: Any) -> Any:
    return entry[0] if type(entry) is tuple else getattr(entry, "peer", entry)


def _not_contributed(of: Any) -> frozenset[int]:
    return of.discarded.difference(*(held for _, _, held in of.contributions))


AGREED: dict[type, Callable[[Any], Any]] = {
    Commit: lambda of: replace(
        of, roll=roll_of(of.contributors) if of.contributors else of.roll, seats=frozenset(range(len(of.signatures)))
    ),
    Finished: lambda of: replace(of, discarded=_not_contributed(of)),
    Round: lambda of: replace(of, discarded=_not_contributed(of), bandwidths=len(of.receivers) * of.bandwidths[:1]),
    MemberState: lambda of: replace(of, whole=True) if of.contradiction() else of,
    StagePlan: lambda of: replace(of, generation=Generation(1, 2)) if of.contradiction() else of,
    Part: lambda of: replace(of, start=min(of.start, of.stop), stop=max(of.start, of.stop)),
    SnapshotRequest: lambda of: replace(of, piece=max(of.piece, 0) if of.content else -1),
}
"""A message whose parts do not contradict each other, from one whose parts were drawn one by one."""


@functools.cache
def of(hint: Any) -> Strategy:
    """Whatever a field of that hint may hold, or a message of that class."""
    plain, bound, _ = _parts(hint)
    inner, origin = get_args(plain), get_origin(plain)
    if origin in (Union, UnionType):
        return st.none() | of(inner[0])
    match bound:
        case Entries(disjoint=True):
            return contributions()
        case Entries(most=most, distinct=distinct):
            key = _peer_of if distinct else None
            most = 0 if of(inner[0]).is_empty else min(most, SOME)
            return st.lists(of(inner[0]), max_size=most, unique_by=key).map(tuple)
        case Between(low=low, high=high) if plain is int:
            return st.integers(int(low), int(high))
        case Between(low=low, high=high):
            return st.floats(low, high, allow_infinity=False)
        case Size(most=most, printable=printable) if plain is str:
            letters = st.characters(min_codepoint=32, max_codepoint=126) if printable else st.characters(codec="utf-8")
            return st.text(letters, max_size=min(most, 20))
        case Size(most=most, least=least):
            return st.binary(min_size=least, max_size=min(most, max(least, 64)))
    if origin is Literal:
        return st.sampled_from(inner)
    if origin is tuple:
        return st.tuples(*map(of, inner))
    if origin is Mapping:
        return st.dictionaries(st.integers(0, MAX_INDEXES - 1), of(inner[1]), max_size=5)
    if plain == frozenset[int]:
        return indexes
    if is_dataclass(plain):
        hints = get_type_hints(plain, include_extras=True).items()
        drawn = {name: of(hint) for name, hint in hints if not isinstance(_parts(hint)[1], Outside)}
        return st.builds(plain, **drawn).map(AGREED.get(plain, lambda message: message))
    if origin is SignedMessage:
        return st.nothing()  # that takes a key: tests of who signs have their own
    known: dict[Any, Strategy] = {bool: st.booleans(), PeerId: peers, Chain: hex32, RunId: hex32}
    known[float] = st.floats(allow_nan=False, allow_infinity=False)
    return known[plain] if plain in known else st.sampled_from(plain)
