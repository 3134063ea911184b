"""The sum of one open step's gradients where ranks hold it, as the peer process knows it: what is in it, and its bits.

Ranks add (`stage.rank_stage`); whose gradients were added, and which additions a void has overtaken, is counted here.
A sum that is lost with its ranks is refused until somebody has voided it: whoever takes part in a round must not take
zeros for what it counted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from swarmnet.errors import Refused, RejectCode
from swarmnet.stage.ranks import Ranks


class SumReading:
    """The flat memory that sums are written to, and which one it holds now: (step, voids, how many were added)."""

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat
        self.holds: tuple[int, int, int] | None = None


class _Content(NamedTuple):
    """What ranks have added to the sum of `step`, since it was voided for the `voids`th time."""

    step: int
    voids: int
    indexes: frozenset[int]


class RankSum:
    """`stage.body.GradientSum`. write(step, voids): has the ranks that are up write that sum to the reading's memory;
    raises Refused if they are lost, for ranks started afterwards do not hold it."""

    def __init__(self, ranks: Ranks, reading: SumReading, write: Callable[[int, int], None]) -> None:
        self._ranks, self._reading, self._write = ranks, reading, write
        self._lock = threading.Lock()  # of the void count: held for a moment
        self._voids = self._revoked = 0
        self._lost: int | None = None  # the step whose sum is gone, and not voided since
        self._content = _Content(-1, -1, frozenset())  # replaced, by whoever has the ranks' lock, never changed

    @property
    def voids(self) -> int:
        """How often it has been voided, or lost."""
        with self._lock:
            return self._voids

    @property
    def revoked(self) -> int:
        with self._lock:
            return self._revoked

    def void(self, *, lost: bool = False) -> None:
        with self._lock:
            self._voids += 1
            self._revoked += not lost
            self._lost = None

    def lose(self) -> None:
        """What ranks held is gone. Whoever has the ranks' lock."""
        with self._lock:
            self._voids += 1
            self._lost = self._content.step if self._content.indexes else self._lost

    def add(self, add: Callable[[], object], *, step: int, index: int, voids: int) -> bool:
        """Have ranks `add` the gradient of that microbatch; see `Accumulator.add`. It may raise: nothing is added."""
        with self._ranks.lock:
            if voids != self.voids:
                return False
            content = self._entered(step, voids)
            if index in content.indexes:
                return False
            add()
            self._content = content._replace(indexes=content.indexes | {index})
        return voids == self.voids

    def read(self, step: int) -> Tensor:
        """The flat sum, valid until the next reading. It waits for ranks only if they have something to write."""
        written = self._written(step)
        if written is not None:
            return written
        with self._ranks.lock:
            with self._lock:
                voids, lost = self._voids, self._lost
            if lost == step:
                raise Refused(RejectCode.NOT_READY, "the sum was lost with the ranks that held it", step=step)
            wanted = _held(self._entered(step, voids))
            if self._reading.holds != wanted:
                self._reading.holds = None
                if self._content.indexes:
                    self._write(step, voids)
                else:
                    self._reading.flat.zero_()
                self._reading.holds = wanted
            return self._reading.flat

    def indexes(self, step: int) -> frozenset[int]:
        with self._ranks.lock:
            return self._entered(step, self.voids).indexes

    def _written(self, step: int) -> Tensor | None:
        """The flat sum if it lies there already. The ranks' lock is held for a whole order: nothing here asks for it.

        Void counts move before anything else does, so content of the count of now is neither lost nor voided.
        """
        with self._lock:
            content = self._content
            stands = self._lost != step and (content.step, content.voids) == (step, self._voids)
            return self._reading.flat if stands and self._reading.holds == _held(content) else None

    def _entered(self, step: int, voids: int) -> _Content:
        if self._content[:2] != (step, voids):
            self._content = _Content(step, voids, frozenset())
        return self._content


def _held(content: _Content) -> tuple[int, int, int]:
    return content.step, content.voids, len(content.indexes)
