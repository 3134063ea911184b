"""What to change when a stage does not fit: the cheapest change that makes it fit, found by trying. Pure.

What a change comes to is asked of the caller, who plans it. One change alone is tried before two together.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Option:
    """One thing that could be changed. kind: of one kind only one can be chosen. words: what to type or to write. cost:
    how little one would want to. of_run: it changes the manifest, so all peers have to agree. change: what the caller
    makes of it.
    """

    kind: str
    words: str
    cost: int
    of_run: bool
    change: Any


@dataclass(frozen=True, slots=True)
class Advice:
    """Options that together bring the need down to `need` bytes."""

    options: tuple[Option, ...]
    need: int

    @property
    def words(self) -> str:
        """What to do, in a line."""
        return " and ".join(option.words for option in self.options)

    @property
    def cost(self) -> int:
        """How little one would want to."""
        return _cost(self.options)


def advise(
    options: Sequence[Option],
    need: Callable[[tuple[Option, ...]], int | None],
    *,
    room: int,
    most: int = 5,
    deepest: int = 3,
) -> list[Advice]:
    """Up to `most` changes that fit in `room` bytes, the cheapest first; of as few options together as it takes.

    need: what those options together come to, None if they cannot be. Empty if nothing of up to `deepest` options fits.
    """
    for depth in range(1, deepest + 1):
        sets = [
            chosen
            for chosen in itertools.combinations(options, depth)
            if len({option.kind for option in chosen}) == depth
        ]
        sets.sort(key=_cost)
        found: list[Advice] = []
        for chosen in sets:
            if any(set(chosen) > set(other.options) for other in found):
                continue
            comes_to = need(chosen)
            if comes_to is not None and comes_to <= room:
                found.append(Advice(chosen, comes_to))
                if len(found) == most:
                    break
        if found:
            return found
    return []


def _cost(options: tuple[Option, ...]) -> int:
    return sum(option.cost for option in options)
