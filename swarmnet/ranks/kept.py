"""Which steps' weights stay once their update has come, and in which memory. `ranks.past`, `ranks.mesh_past`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

M = TypeVar("M")

KEPT_WEIGHTS = 4
"""Weights of so many steps stay: a case is drawn two steps later, and others judge it after that."""


class KeptSteps(Generic[M]):
    """memory: of one step's weights. Taken once and written over from then on: pinning takes longer than a copy."""

    def __init__(self, memory: Callable[[], M]) -> None:
        self._memory, self._steps, self._number = memory, 0, 0
        self._kept: dict[int, tuple[int, M]] = {}
        self._free: list[M] = []

    @property
    def taken(self) -> list[M]:
        """All memory, used or not."""
        return [*self._free, *(memory for _, memory in self._kept.values())]

    def keep(self, steps: int) -> None:
        """Of the last `steps` steps; of none at first."""
        self._steps = steps

    def room(self, step: int) -> M | None:
        """Memory for the weights of `step`, which are kept from now on; None: nothing is kept."""
        if not self._steps:
            return None
        for other in [other for other in self._kept if not step - self._steps < other < step]:
            self._free.append(self._kept.pop(other)[1])
        memory = self._free.pop() if self._free else self._memory()
        self._number += 1
        self._kept[step] = self._number, memory
        return memory

    def get(self, step: int) -> tuple[int, M] | None:
        """A number that no other weights have had, and the memory of these."""
        return self._kept.get(step)

    def forget(self) -> None:
        """Steps have their numbers again, and other weights."""
        self._free = self.taken
        self._kept.clear()
