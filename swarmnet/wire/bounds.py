"""How large a message of one run can be: the run's own numbers, which every table of fields is cut down to.

A kind of field knows the most bytes it takes (`most_bytes`), and how it looks in a run of these numbers (`within`). So
a message that no peer of the run could need is refused by its length, before it is parsed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MAX_INDEXES = 1 << 16
"""Microbatch indexes of a step are below this: a bitmap is at most 8 KiB."""

MAX_MEMBERS = 1024
"""Members of one stage, and commits in one message."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What limits the messages of a run. members: of one stage."""

    num_stages: int = MAX_MEMBERS
    microbatches: int = MAX_INDEXES
    members: int = MAX_MEMBERS


ANY_RUN = Bounds()


@dataclass(frozen=True, slots=True)
class PerRun:
    """How many entries a field may have: `most` in any run, fewer in most."""

    most: int
    of: Callable[[Bounds], int]


Limit = int | PerRun
"""How many entries a field may have."""


def most(limit: Limit) -> int:
    """In any run."""
    return limit.most if isinstance(limit, PerRun) else limit


def within(limit: Limit, bounds: Bounds) -> int:
    """In a run of these numbers."""
    return min(limit.most, limit.of(bounds)) if isinstance(limit, PerRun) else limit


STAGES = PerRun(MAX_MEMBERS, lambda bounds: bounds.num_stages)
MEMBERS = PerRun(MAX_MEMBERS, lambda bounds: bounds.members)
