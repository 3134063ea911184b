"""The state of a stage, and its copies in host memory.

`StageState` is the state of one rank in this process as of several: a holder has the tensors. A rank that is alone
(`ranks.stage`) is its own holder. Several ranks have `HostCopies`, which stay when all ranks are lost: two copies of
weights and moments, whole and in canonical order, in memory that ranks share. Number version % 2 is `version`. Ranks
write the next version to the other one, while they compute the microbatches that follow the update. Until all have
written it, the copy of the version before and the sum of the update stay, and ranks that are started meanwhile make the
update again. Snapshots and digests are read here; no device ever has all of it.

`PastSteps` keeps the weights of the last steps: of each a copy in host memory, so that audits can compute its
microbatches again. It serves both backends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from swarmnet.messages import Commit
from swarmnet.ranks.supervisor import RankSupervisor
from swarmnet.stage import snapshot
from swarmnet.stage.backend import PastWeights
from swarmnet.stage.canonical import Canonical, Initial
from swarmnet.stage.optimizer import MOMENTS
from swarmnet.stage.outer import Outer
from swarmnet.stage.rounding import Roundings

KEPT_WEIGHTS = 4
"""Weights of so many steps stay: a case is drawn two steps later, and others judge it after that."""


def copied(canonical: Canonical) -> snapshot.Layout:
    """Where each tensor lies in a copy of the state: in the peer process and on every rank alike."""
    outer = {*map(snapshot.slow_name, canonical.shapes), *map(snapshot.outer_momentum_name, canonical.shapes)}
    apart = outer | canonical.scale_shapes.keys()
    shapes = {name: shape for name, shape in canonical.state_shapes.items() if name not in apart}
    return snapshot.Layout(shapes, stage=canonical.stage)


def copy_name(version: int) -> str:
    """The shared memory that holds `version`."""
    return f"copy{version % 2}"


class StateHolder(Protocol):
    """Who has the tensors of a state: weights and moments, whole or as far as one rank has them."""

    def weights(self, version: int) -> list[Tensor]:
        """The live weights of `version`, in canonical order."""

    def update(self, version: int, total: Tensor, *, scale: float, rate: float) -> None:
        """From `version` to the next, with the flat sum `total` times `scale`."""

    def settle(self) -> None:
        """Return once nothing needs the sum of the last update any more."""

    def take(self, version: int) -> None:
        """The weights of `version` have changed where they rest, and not by an update."""

    def stay(self, version: int) -> None:
        """The version after `version` has the same weights and moments."""

    def reset(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Become version 0 with these whole weights, in canonical order."""

    def read_state(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Become `version`, whose whole state is in `tensors`, by the names of `stage.snapshot`."""

    def write_state(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Write the state of `version` over `tensors`."""


class StageState:
    """`stage.backend.State`: the version, and what leads on from it. The outer optimizer's tensors (`sync = "local"`)
    are here, and no holder's concern. scales: memory of `Roundings`, which the holder reads, too."""

    def __init__(
        self, canonical: Canonical, holder: StateHolder, scales: Tensor, initial: Initial | None = None
    ) -> None:
        self.canonical, self.version, self._holder, self._initial = canonical, 0, holder, initial
        spec = canonical.spec
        self._roundings = Roundings(
            spec.numerics, spec.averaging, canonical.shapes, terms=spec.training.microbatches, memory=scales
        )
        self.outer = Outer.of(canonical.spec.averaging, self.newest)
        self._outer_steps = 0  # that the holder knows of

    @property
    def newest(self) -> list[Tensor]:
        """The weights of `version`."""
        return self._holder.weights(self.version)

    def apply(self, total: Tensor, commits: Sequence[Commit], *, own_tokens: int | None = None) -> None:
        square = self.square_norm(total) if own_tokens is not None else 0.0
        update = self.canonical.update(self.version, commits, own_tokens=own_tokens, own_square=square)
        # An outer step has changed the weights.
        if self.outer is not None and self.outer.steps != self._outer_steps:
            self._outer_steps = self.outer.steps
            self._holder.take(self.version)
        # It may raise, and the version is what it was.
        self._holder.update(self.version, total, scale=update.scale, rate=update.rate)
        counted = self.canonical.spec.training.microbatches - len(commits[self.canonical.stage].voided)
        self._roundings.applied(self.version, self.canonical.pieces(total), counted=counted, clipped=update.clipped)
        self._become(self.version + 1)

    def settle(self) -> None:
        self._holder.settle()

    def most(self, num_microbatches: int) -> int:
        return self._roundings.of(self.version).most(num_microbatches)

    def square_norm(self, total: Tensor) -> float:
        return self.canonical.square_norm(total, self._roundings.of(self.version))

    def stay(self, commits: Sequence[Commit]) -> None:
        self.canonical.check(self.version, commits)
        self._roundings.stayed(self.version)
        self._become(self.version + 1)
        self._holder.stay(self.version - 1)

    def reset_to_seed(self) -> None:
        # Raises before anything has changed if the checkpoint is gone.
        weights = self.canonical.initial(self._initial)
        self._become(0)
        self._roundings.reset()
        self._holder.reset(weights)
        if self.outer is not None:
            self.outer.reset()

    def copy(self, memory: Tensor) -> int:
        places = self.canonical.layout.views(memory)
        self._holder.write_state(self.version, places)
        for name, tensor in self._own_tensors().items():
            places[name].copy_(tensor)
        return self.version

    def take_over(self, tensors: Mapping[str, Tensor], *, version: int) -> None:
        self._become(version)
        # The holder finds the scales when it is told to read.
        for name, tensor in self._roundings.tensors(version).items():
            tensor.copy_(tensors[name])
        self._roundings.changed()
        self._holder.read_state(version, tensors)
        for name, tensor in self._outer_tensors().items():
            tensor.copy_(tensors[name])

    def _become(self, version: int) -> None:
        self.version = version
        # The weights of another version may rest elsewhere.
        if self.outer is not None:
            self.outer.follow(self.newest)

    def _own_tensors(self) -> dict[str, Tensor]:
        return self._outer_tensors() | self._roundings.tensors(self.version)

    def _outer_tensors(self) -> dict[str, Tensor]:
        return {} if self.outer is None else self.outer.tensors(list(self.canonical.shapes))


class HostCopies:
    """Two copies of the state of ranks.

    Args:
        memory: of each, of `copied(canonical).num_bytes`.
        sums: by name, the memory that a sum for `update` may be in.
        scales: of open steps, and as they were before the last update.
    """

    def __init__(
        self,
        canonical: Canonical,
        ranks: RankSupervisor,
        memory: Sequence[Tensor],
        *,
        sums: Mapping[str, Tensor],
        scales: tuple[Tensor, Tensor],
    ) -> None:
        self._names, self._ranks, self._memory = list(canonical.shapes), ranks, list(memory)
        self._sums, self._scales, self._version = sums, scales, 0
        self._late = bool(canonical.spec.averaging.delay.most)
        layout = copied(canonical)
        self._views = [layout.views(copy) for copy in memory]
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
        names = [name for name, flat in self._sums.items() if flat.data_ptr() == total.data_ptr()]
        if not names:  # ranks have no other memory of ours
            raise ValueError("a sum that ranks cannot read")
        with self._ranks.lock:
            # an update that a death broke off begins again: its finished sum and the old state are still here
            update: dict[str, Any] = {"version": version, "total": names[0], "scale": scale, "rate": rate, "scales": ""}
            self._ranks.order("update", repeat=True, **update)
            scales, before = self._scales
            before.copy_(scales)
            self.unwritten, self._version = update, version + 1
            self._ranks.finished()
            # The next reading of a sum overwrites that memory.
            if names[0] == "reading":
                self.settle()

    def settle(self) -> None:
        """Have what the last update made written to its copy. Raises Refused(NOT_READY) if the ranks are given up."""
        self._settle(wait=True)

    def look(self) -> None:
        """Note if what the last update made is written."""
        self._settle(wait=False)

    def _settle(self, *, wait: bool) -> None:
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
        return copy_name(version + 1), self._memory[(version + 1) % 2]

    def take(self, version: int) -> None:
        self._version = version
        self._ranks.reload()

    def stay(self, version: int) -> None:
        self.settle()
        # Ranks write only what an update changes, and there is none: carry all of it over.
        self._memory[(version + 1) % 2].copy_(self._memory[version % 2])
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


# ---------------------------------------------------------------- steps that are over


class PastSteps:
    """`stage.backend.Past`.

    Args:
        num_elements: of the weights.
        allot: memory number `place`, fp32, of the weights and scales of one step. Taken once and written over from then
            on, because pinning takes longer than a copy.
        read: the weights that a step was computed on, in canonical order, and then its scales.
    """

    def __init__(
        self, num_elements: int, *, allot: Callable[[int], Tensor], read: Callable[[int], Iterable[Tensor]]
    ) -> None:
        self._num_elements, self._allot, self._read = num_elements, allot, read
        self._steps = self._number = 0
        self._memory: list[Tensor] = []
        self._free: list[int] = []
        self._kept: dict[int, PastWeights] = {}

    @property
    def kept_bytes(self) -> int:
        """Of host memory."""
        return sum(memory[: self._num_elements].nbytes for memory in self._memory)

    def keep(self, steps: int) -> None:
        self._steps = steps

    @torch.no_grad()
    def note(self, step: int) -> None:
        if not self._steps:
            return
        for other in [other for other in self._kept if not step - self._steps < other < step]:
            self._free.append(self._kept.pop(other).place)
        if not self._free:
            self._free.append(len(self._memory))
            self._memory.append(self._allot(len(self._memory)))
        place, start = self._free.pop(), 0
        memory = self._memory[place]
        for tensor in self._read(step):
            memory[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)
            start += tensor.numel()
        self._number += 1
        self._kept[step] = PastWeights(step, self._number, place, memory)

    def forget(self) -> None:
        self._free = list(range(len(self._memory)))
        self._kept.clear()

    def get(self, step: int) -> PastWeights | None:
        return self._kept.get(step)
