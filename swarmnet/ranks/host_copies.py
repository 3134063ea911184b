"""The copies of a stage's state in host memory, which stay when all ranks are lost.

`HostCopies` holds the state of several ranks (`stage.state.StateHolder`): two copies of weights and moments, whole and
in canonical order, in memory that ranks share. One is the state; in an update ranks write the next version to the other
one, and then that is the state. So whenever ranks die, a whole copy is there, and ranks that are started again make the
update again. Snapshots and digests are read here; no device ever has all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from swarmnet.ranks.supervisor import RankSupervisor
from swarmnet.stage import snapshot
from swarmnet.stage.canonical import Canonical
from swarmnet.stage.interfaces import KEPT_WEIGHTS

SUMS = ("finished", "reading")
"""The shared memory of flat sums: of a round's result, and of a sum that is read."""

COPIES = ("copy0", "copy1")
"""The shared memory of the copies."""

PASTS = tuple(f"past{place}" for place in range(KEPT_WEIGHTS))
"""The shared memory of the weights of past steps."""


def copied(canonical: Canonical) -> snapshot.Layout:
    """The offset of each tensor in a copy of the state, the same in the peer process and on every rank."""
    outer = {*map(snapshot.slow_name, canonical.shapes), *map(snapshot.outer_momentum_name, canonical.shapes)}
    apart = outer | canonical.scale_shapes.keys()
    shapes = {name: shape for name, shape in canonical.state_shapes.items() if name not in apart}
    return snapshot.Layout(shapes, stage=canonical.stage)


class HostCopies:
    """Two copies of the state of ranks. memory: what ranks share, by name: `COPIES`, and `SUMS`, which a sum for
    `update` is in."""

    def __init__(self, canonical: Canonical, ranks: RankSupervisor, memory: Mapping[str, Tensor]) -> None:
        self._names, self._ranks, self._memory = list(canonical.shapes), ranks, memory
        self._late = bool(canonical.spec.averaging.delay.most)
        self._views = {name: copied(canonical).views(memory[name]) for name in COPIES}
        self._version, (self._now, self._other) = 0, COPIES

    def load(self) -> Mapping[str, Any]:
        """Where ranks read the newest state."""
        return {"version": self._version, "copy": self._now}

    def update(self, version: int, total: Tensor, *, scale: float, rate: float) -> None:
        """From `version` to the next. Raises Refused(NOT_READY) if the ranks are given up."""
        # Ranks have no other memory of ours.
        (name,) = (name for name in SUMS if self._memory[name].data_ptr() == total.data_ptr())
        update: dict[str, Any] = {"version": version, "total": name, "scale": scale, "rate": rate}
        with self._ranks.lock:
            # An update that a death broke off begins again: its finished sum and the old state are still here.
            self._ranks.order("update", repeat=True, finishes=True, copy=self._other, **update)
            self._version, self._now, self._other = version + 1, self._other, self._now

    @property
    def _state(self) -> dict[str, Tensor]:
        return self._views[self._now]

    def weights(self, version: int) -> list[Tensor]:
        return [self._state[name] for name in self._names]

    def weights_of(self, step: int) -> list[Tensor]:
        """At version `step`: the weights that this step was computed on, in canonical order."""
        return [self._state[snapshot.previous_name(name) if self._late else name] for name in self._names]

    @property
    def scratch(self) -> tuple[str, Tensor]:
        """The copy that is not the state, by name, and its memory: free until the next update."""
        return self._other, self._memory[self._other]

    def take(self, version: int) -> None:
        self._version = version
        self._ranks.reload()

    def reset(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._memory[self._now].zero_()
        for name, tensor in weights:
            self._state[name].copy_(tensor)
            if self._late:
                self._state[snapshot.previous_name(name)].copy_(tensor)
        self.take(0)

    def read_state(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        for name, place in self._state.items():
            place.copy_(tensors[name])
        self.take(version)

    def write_state(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        for name, held in self._state.items():
            tensors[name].copy_(held)
