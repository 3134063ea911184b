"""The state of a stage on one device or on several, and the weights of the last steps.

`State` leads from version to version; a holder has the tensors: one rank that is alone (`ranks.stage`), or the host
copies of several (`ranks.host_copies`). `PastSteps` keeps the weights of the last steps: of each a copy in host memory,
so that audits can compute its microbatches again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from swarmnet.messages import Commit
from swarmnet.stage.canonical import Canonical, Initial
from swarmnet.stage.outer import Outer
from swarmnet.stage.rounding import Roundings


class StateHolder(Protocol):
    """Who has the tensors of a state: weights and moments, whole or as far as one rank has them."""

    def weights(self, version: int) -> list[Tensor]:
        """The live weights of `version`, in canonical order."""

    def update(self, version: int, total: Tensor, *, scale: float, rate: float) -> None:
        """From `version` to the next, with the flat sum `total` times `scale`."""

    def take(self, version: int) -> None:
        """The weights that rest here are those of `version`, and may have changed, though not by an update."""

    def reset(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Become version 0 with these whole weights, in canonical order."""

    def read_state(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Become `version`, with the whole state in `tensors`, by the names of `stage.snapshot`."""

    def write_state(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Write the state of `version` over `tensors`."""


class State:
    """Weights and moments of a version, and the update to the next. The outer optimizer's tensors (`sync = "local"`)
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
        """Step to the next version with the flat sum `total` (see `Canonical.update`)."""
        square = self.square_norm(total) if own_tokens is not None else 0.0
        update = self.canonical.update(self.version, commits, own_tokens=own_tokens, own_square=square)
        # An outer step has changed the weights.
        if self.outer is not None and self.outer.steps != self._outer_steps:
            self._outer_steps = self.outer.steps
            self._holder.take(self.version)
        # It may raise, and the version is what it was.
        self._holder.update(self.version, total, scale=update.scale, rate=update.rate)
        counted = self.canonical.spec.training.microbatches - len(commits[self.canonical.stage].discarded)
        self._roundings.applied(self.version, self.canonical.pieces(total), counted=counted, clipped=update.clipped)
        self._become(self.version + 1)

    def most(self, num_microbatches: int) -> int:
        """The largest magnitude that so many microbatches can have in an integer sum of that step."""
        return self._roundings.of(self.version).most(num_microbatches)

    def square_norm(self, total: Tensor) -> float:
        """Squared L2 norm of a flat sum of the step that is applied next."""
        return self.canonical.square_norm(total, self._roundings.of(self.version))

    def stay(self, commits: Sequence[Commit]) -> None:
        """On to the next version with the same weights: there was no gradient for them (`sync = "local"`)."""
        self.canonical.check(self.version, commits)
        self._become(self.version + 1)
        self._holder.take(self.version)

    def reset_to_seed(self) -> None:
        """Back to version 0; where two versions are held, both are that one."""
        # Raises before anything has changed if the checkpoint is gone.
        weights = self.canonical.initial(self._initial)
        self._become(0)
        self._roundings.reset()
        self._holder.reset(weights)
        if self.outer is not None:
            self.outer.reset()

    def copy(self, memory: Tensor) -> int:
        """Copy all of it into `canonical.layout.memory()`; returns its version. `layout.seal` makes it a snapshot."""
        places = self.canonical.layout.views(memory)
        self._holder.write_state(self.version, places)
        for name, tensor in (self._outer_tensors() | self._roundings.tensors(self.version)).items():
            places[name].copy_(tensor)
        return self.version

    def take_over(self, tensors: Mapping[str, Tensor], *, version: int) -> None:
        """Become what `Canonical.unpack` has read."""
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

    def _outer_tensors(self) -> dict[str, Tensor]:
        return {} if self.outer is None else self.outer.tensors(list(self.canonical.shapes))


# ---------------------------------------------------------------- steps that are over


@dataclass(frozen=True, slots=True)
class PastWeights:
    """The weights of a step that is over, in host memory: whole, flat, in canonical order, and then its scales.

    number: equal for equal weights only. place: the number of the memory block.
    """

    step: int
    number: int
    place: int
    memory: Tensor


class PastSteps:
    """Weights of the last steps that are over. Compute thread only, but for `keep`.

    Args:
        allot: memory block `place`, fp32, for the weights and scales of one step. Taken once and written over from then
        on,
            because pinning takes longer than a copy.
        read: the weights that a step was computed on, in canonical order, and then its scales.
    """

    def __init__(self, *, allot: Callable[[int], Tensor], read: Callable[[int], Iterable[Tensor]]) -> None:
        self._allot, self._read = allot, read
        self._steps = self._number = 0
        self._memory: list[Tensor] = []
        self._kept: dict[int, PastWeights] = {}  # by memory block: step s is in block s % steps

    def keep(self, steps: int) -> None:
        """Of so many steps; of none at first. Once, before any is over."""
        self._steps = steps

    @torch.no_grad()
    def note(self, step: int) -> None:
        """The update of `step` comes next: keep what it was computed on."""
        if not self._steps:
            return
        place, start = step % self._steps, 0
        while len(self._memory) <= place:
            self._memory.append(self._allot(len(self._memory)))
        memory = self._memory[place]
        for tensor in self._read(step):
            memory[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)
            start += tensor.numel()
        self._number += 1
        self._kept[place] = PastWeights(step, self._number, place, memory)

    def forget(self) -> None:
        """The run went another way, or other weights come."""
        self._kept.clear()

    def get(self, step: int) -> PastWeights | None:
        """Its weights, valid until the next `note`. None: they are not kept."""
        kept = self._kept.get(step % self._steps) if self._steps else None
        return kept if kept is not None and kept.step == step else None
