"""The sum of one open step's gradients where ranks hold it, as the peer process knows it: what is in it, and its bits.

Ranks add (`stage.rank_stage`); whose gradients were added, and which additions a void has overtaken, is counted here.
A sum that is lost with its ranks is refused until somebody has voided it: whoever takes part in a round must not take
zeros for what it counted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import Tensor

from swarmnet.errors import Refused, RejectCode
from swarmnet.stage.ranks import Ranks


class Reading:
    """The flat memory that sums are written to, and which one it holds now: (step, voids, how many were added)."""

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat
        self.holds: tuple[int, int, int] | None = None


class RankSum:
    """`stage.body.GradientSum`. write(step, voids): has the ranks of now write that sum to the reading's memory, and no
    others; it raises Refused if they are lost."""

    def __init__(self, ranks: Ranks, reading: Reading, write: Callable[[int, int], None]) -> None:
        self._ranks, self._reading, self._write = ranks, reading, write
        self._lock = threading.Lock()                    # of the void count: held for a moment
        self._voids = 0
        self._lost: int | None = None                    # the step whose sum is gone, and not voided since
        self._epoch = (-1, -1)
        self._indexes: set[int] = set()

    @property
    def voids(self) -> int:
        """How often it has been voided, or lost."""
        with self._lock:
            return self._voids

    def void(self) -> None:
        """See GradientSum."""
        with self._lock:
            self._voids += 1
            self._lost = None

    def lose(self) -> None:
        """What ranks held is gone. Whoever has the ranks' lock."""
        with self._lock:
            self._voids += 1
            self._lost = self._epoch[0] if self._indexes else self._lost

    def add(self, add: Callable[[], object], *, step: int, index: int, voids: int) -> bool:
        """Have ranks `add` the gradient of that microbatch; see `Accumulator.add`. It may raise: nothing is added."""
        with self._ranks.lock:
            if voids != self.voids:
                return False
            self._enter(step, voids)
            if index in self._indexes:
                return False
            add()
            self._indexes.add(index)
        return voids == self.voids

    def read(self, step: int) -> Tensor:
        """See GradientSum. Valid until the next reading."""
        with self._ranks.lock:
            with self._lock:
                voids, lost = self._voids, self._lost
            if lost == step:
                raise Refused(RejectCode.NOT_READY, "the sum was lost with the ranks that held it", step=step)
            self._enter(step, voids)
            wanted = step, voids, len(self._indexes)
            if self._reading.holds != wanted:
                self._reading.holds = None
                if self._indexes:
                    self._write(step, voids)
                else:
                    self._reading.flat.zero_()
                self._reading.holds = wanted
            return self._reading.flat

    def indexes(self, step: int) -> frozenset[int]:
        """See GradientSum."""
        with self._ranks.lock:
            self._enter(step, self.voids)
            return frozenset(self._indexes)

    def _enter(self, step: int, voids: int) -> None:
        if self._epoch != (step, voids):
            self._epoch = step, voids
            self._indexes.clear()
