"""What a field of a message may hold. A bound is part of its field: `index: Annotated[int, Between(0, 9)]`.

`wire.fields` derives from type and bound how a field is written, read and checked. `Recent` bounds what is remembered
of others. Standard library only.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

K = TypeVar("K")
V = TypeVar("V")

MAX_INDEXES = 1 << 16
"""Microbatch indexes of a step are below this: a set of them takes at most 8 KiB."""

MAX_MEMBERS = 10_000
"""Members of one stage. A round of so many takes 0.9 MB, below what a message may have (`wire.convert`)."""

LARGE_BYTES = 1 << 20
"""More bytes than this are hashed, copied and coded on threads: on the event loop they would hold up others."""

MAX_COMMITS = 1024
"""Commits in one message: one of each stage."""

LARGEST_LOSS, LARGEST_NORM = 1e29, 1e200
"""Of a sum that can be applied: its loss, and its squared norm, are below."""

LARGEST_TOKEN_LOSS = 1e4
"""No token costs a model more, which gives it a probability of e^-10000 then: a microbatch that does is discarded."""


def is_loss(loss_sum: float, num_tokens: int) -> bool:
    """Can that be the cross entropy of so many tokens, in all?"""
    return 0.0 <= loss_sum <= LARGEST_TOKEN_LOSS * num_tokens


@dataclass(frozen=True, slots=True)
class Between:
    """A finite number from `low` to `high`, both included."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Size:
    """Characters of a text, or bytes."""

    most: int
    least: int = 0
    cut: bool = False
    """Words for a person: the writer cuts what is too long, and replaces what is no Unicode."""
    printable: bool = False
    """Printable ASCII characters only: a terminal shows them as they are."""


@dataclass(frozen=True, slots=True)
class Outside:
    """The field is not in the message: it has its default after reading, and the reader fills it in."""


@dataclass(frozen=True, slots=True)
class Proto:
    """How protobuf declares a field, where its type and its position among the fields do not say it."""

    number: int = 0
    """The field's number; 0: its position, from 1 on. A new field comes last, or has a number that none ever had."""
    type: Literal["", "bytes", "fixed64", "sint64"] = ""
    names: tuple[str, ...] = ()
    """Of the members of a tuple; of a mapping, of its keys and of the members of its values."""


AS_KEY = Proto(type="bytes")
"""A peer by its Ed25519 key, not by its id."""


@dataclass(frozen=True, slots=True)
class Entries:
    """Entries of a tuple."""

    most: int
    """In any run."""
    of: Literal["", "num_stages", "members"] = ""
    """Which number of a run (`Bounds`) limits them further."""
    times: int = 1
    """That number's."""
    distinct: bool = False
    """Each names another peer."""
    packed: bool = False
    """Peers, as their keys one after the other: 32 bytes each."""
    disjoint: bool = False
    """No index is in the sets of two entries: they are written as one owner for each index."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The numbers of a run that limit its messages."""

    num_stages: int = MAX_COMMITS
    microbatches: int = MAX_INDEXES
    members: int = MAX_MEMBERS
    """Of one stage."""


ANY_RUN = Bounds()


def one_less(counts: Counter[K], key: K) -> None:
    """Count down. A table that others fill keeps no zeros."""
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


class Recent(OrderedDict[K, V]):
    """A table that others fill: of more than `most` entries, the one that was set longest ago is forgotten."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self.most:
            self.popitem(last=False)

    def drop(self, is_old: Callable[[K, V], bool]) -> None:
        """Forget the entries of which that is true."""
        for key in [key for key, value in self.items() if is_old(key, value)]:
            del self[key]
