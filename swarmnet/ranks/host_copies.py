"""The copies of a stage's state in host memory, which stay when all ranks are lost.

`HostCopies` holds the state of several ranks (`stage.state.StateHolder`): two copies of weights and moments, whole and
in canonical order, in memory that ranks share. Number version % 2 is `version`. Ranks write the next version to the
other one, while they compute the microbatches that follow the update. Until all have written it, the copy of the
version before and the sum of the update stay, and ranks that are started meanwhile make the update again. Snapshots and
digests are read here; no device ever has all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from swarmnet.ranks.supervisor import RankSupervisor
from swarmnet.stage import snapshot
from swarmnet.stage.canonical import Canonical
from swarmnet.stage.optimizer import MOMENTS

KEPT_WEIGHTS = 4
"""Weights of so many steps stay: a case is drawn two steps later, and others judge it after that."""


SUMS = ("finished", "reading")
"""The shared memory of flat sums: of a round's result, and of a sum that is read."""


def copied(canonical: Canonical) -> snapshot.Layout:
    """Where each tensor lies in a copy of the state: in the peer process and on every rank alike."""
    outer = {*map(snapshot.slow_name, canonical.shapes), *map(snapshot.outer_momentum_name, canonical.shapes)}
    apart = outer | canonical.scale_shapes.keys()
    shapes = {name: shape for name, shape in canonical.state_shapes.items() if name not in apart}
    return snapshot.Layout(shapes, stage=canonical.stage)


def copy_name(version: int) -> str:
    """The shared memory that holds `version`."""
    return f"copy{version % 2}"


class HostCopies:
    """Two copies of the state of ranks.

    memory: what ranks share, by name: the copies, `SUMS`, which a sum for `update` is in, the scales of open steps, and
    those before the last update.
    """

    def __init__(self, canonical: Canonical, ranks: RankSupervisor, memory: Mapping[str, Tensor]) -> None:
        self._names, self._ranks, self._version = list(canonical.shapes), ranks, 0
        self._memory, self._copies = memory, [memory[copy_name(version)] for version in range(2)]
        self._late = bool(canonical.spec.averaging.delay.most)
        layout = copied(canonical)
        self._views = [layout.views(copy) for copy in self._copies]
        self.unwritten: dict[str, Any] = {}
        """The last update, until ranks have written the state that it made."""

    def load(self) -> list[tuple[str, Mapping[str, Any]]]:
        """The orders that bring ranks to the newest state."""
        # The copy of the newest state is not whole: the sum of the last update still leads there.
        if update := self.unwritten:
            load = {"version": update["version"], "scales": "scales_before"}
            return [("load", load), ("update", update | {"scales": "scales"})]
        return [("load", {"version": self._version, "scales": "scales"})]

    def update(self, version: int, total: Tensor, *, scale: float, rate: float) -> None:
        """From `version` to the next. Raises Refused(NOT_READY) if the ranks are given up."""
        names = [name for name in SUMS if self._memory[name].data_ptr() == total.data_ptr()]
        if not names:  # ranks have no other memory of ours
            raise ValueError("a sum that ranks cannot read")
        with self._ranks.lock:
            # an update that a death broke off begins again: its finished sum and the old state are still here
            update: dict[str, Any] = {"version": version, "total": names[0], "scale": scale, "rate": rate, "scales": ""}
            self._ranks.order("update", repeat=True, **update)
            self._memory["scales_before"].copy_(self._memory["scales"])
            self.unwritten, self._version = update, version + 1
            self._ranks.finished()
            # The next reading of a sum overwrites that memory.
            if names[0] == "reading":
                self.settle()

    def settle(self, *, wait: bool = True) -> None:
        """Have what the last update made written to its copy, or note if it is.

        Raises Refused(NOT_READY) if the ranks are given up.
        """
        with self._ranks.lock:
            if not self.unwritten:
                return
            if all(answer["written"] for answer in self._ranks.order("settle", repeat=wait, wait=wait)):
                self.unwritten = {}

    def weights(self, version: int) -> list[Tensor]:
        self.settle()
        return [self._views[version % 2][name] for name in self._names]

    def weights_of(self, step: int) -> list[Tensor]:
        """At version `step`: the weights that this step was computed on, in canonical order."""
        self.settle()
        views = self._views[step % 2]
        return [views[snapshot.previous_name(name) if self._late else name] for name in self._names]

    def scratch(self, version: int) -> tuple[str, Tensor]:
        """The copy that does not hold `version`, by name, and its memory: free until the next update."""
        self.settle()
        return copy_name(version + 1), self._copies[(version + 1) % 2]

    def take(self, version: int) -> None:
        self._version = version
        self._ranks.reload()

    def stay(self, version: int) -> None:
        self.settle()
        # Ranks write only what an update changes, and there is none: carry all of it over.
        self._copies[(version + 1) % 2].copy_(self._copies[version % 2])
        self.take(version + 1)

    def reset(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.settle()
        now = self._views[0]
        for name, tensor in weights:
            now[name].copy_(tensor)
            if self._late:
                now[snapshot.previous_name(name)].copy_(tensor)
            for moment in MOMENTS:
                now[snapshot.moment_name(moment, name)].zero_()
        self.take(0)

    def read_state(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        self.settle()
        for name, place in self._views[version % 2].items():
            place.copy_(tensors[name])
        self.take(version)

    def write_state(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        self.settle()
        for name, held in self._views[version % 2].items():
            tensors[name].copy_(held)
