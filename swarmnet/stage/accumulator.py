"""The sum of a step's gradients in one replica, and what may enter it.

Two modes. *deterministic*: each microbatch's gradient is rounded to the grid 2^-grid_bits and summed in int64, so the
sum does not depend on order or grouping. *fp32*: plain float sums. In both a gradient enters whole or not at all: it is
checked before the first element is added.

Nobody can subtract one gradient from a sum, so `void` discards the whole sum (docs/protocol.md, I3 and rule 5). The
content carries the (step, void count) that it belongs to. `void` only increases the count; the next reader or writer
that finds content of another count clears it. So voiding never waits for an addition, and an addition that a void has
overtaken adds to nothing.

The averaging thread may read while the compute thread adds. A lock ensures that only one of them clears the sum.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from swarmnet.errors import BadMessage, Overflow, RejectCode
from swarmnet.manifest.schema import Numerics

MAX_SUM = 1 << 62
"""No fixed-point sum of a whole step exceeds this in absolute value, whoever adds it in whatever grouping."""

MAX_MAGNITUDE = 2.0**96
"""No gradient has an element near this. Below it no float sum of a step overflows, and nothing in `sums.reducer`."""

_CPU_CHUNK, _DEVICE_CHUNK = 1 << 16, 1 << 24


def chunk_elements(device: torch.device) -> int:
    """How many elements to treat at once where temporaries arise: what fits a core's cache, or a launch's worth."""
    return _CPU_CHUNK if device.type == "cpu" else _DEVICE_CHUNK


class Accumulator:
    """A flat sum over microbatches. `void`, `voids` and `read` from any thread, `add` from the compute thread.

    max_microbatches: the most gradients that a step adds anywhere; with ranks, each may add one term per microbatch. In
    deterministic mode an element of one gradient may be MAX_SUM / max_microbatches at most. So replicas with equal
    meshes agree on whether a microbatch overflows, whatever else is in the sum; more ranks have a lower limit.
    """

    def __init__(self, num_elements: int, numerics: Numerics, *, max_microbatches: int, device: torch.device) -> None:
        self.fixed_point = numerics.mode == "deterministic"
        self._grid = 2.0**numerics.grid_bits
        self._limit = float(MAX_SUM // max_microbatches)
        self._sum = torch.zeros(num_elements, dtype=sum_dtype(numerics), device=device)
        self._lock = threading.Lock()  # of the void count: held for a moment
        self._content = threading.RLock()  # of the sum: held while one gradient is added
        self.voids = 0
        """How often the sum has been voided."""
        self.revoked = 0
        """How often a void took back gradients that counted: all voids but those after a loss."""
        self._epoch = (-1, -1)
        self._indexes: set[int] = set()

    def void(self, *, lost: bool = False) -> None:
        """Make the sum empty. An addition now running adds to nothing and returns False. lost: see GradientSum."""
        with self._lock:
            self.voids += 1
            self.revoked += not lost

    def follow(self, voids: int) -> None:
        """The void count is kept elsewhere (ranks of a mesh: by their peer), and is this now."""
        with self._lock:
            self.voids = voids

    def add(
        self, gradients: Sequence[Tensor], *, step: int, index: int, voids: int, largest: float | None = None
    ) -> bool:
        """Add one microbatch's gradients: fp32, contiguous, in canonical order, sums over tokens.

        voids: the void count when this replica was granted the microbatch. False if it has moved since, or if `index`
        is in the sum already. largest: the largest magnitude over all ranks, where each rank has a part of the gradient
        and all must decide alike. Raises BadMessage(NON_FINITE) or Overflow; the sum is unchanged then.
        """
        # Voided since the grant: the gradient would not count.
        if voids != self.voids:
            return False
        # The whole gradient is checked before its first element is added.
        self._check(largest_magnitude(gradients) if largest is None else largest, index)
        size = sum(gradient.numel() for gradient in gradients)
        if size != self._sum.numel():
            raise ValueError(f"gradients have {size} elements, the sum has {self._sum.numel()}")
        with self._content:
            self._enter(step, voids)
            # A weight pass asked for again adds nothing.
            if index in self._indexes:
                return False
            self._indexes.add(index)
            start = 0
            for gradient in gradients:
                self._add_flat(self._sum[start : start + gradient.numel()], gradient.view(-1))
                start += gradient.numel()
        # A void may have come while this was adding: then it added to nothing.
        return voids == self.voids

    def read(self, step: int) -> Tensor:
        """The flat sum of `step`: zeros if nothing was added. Valid until the next `add`; do not change it."""
        self._enter(step, self.voids)
        return self._sum

    def indexes(self, step: int) -> frozenset[int]:
        """The microbatches whose gradients the sum of `step` holds."""
        self._enter(step, self.voids)
        return frozenset(self._indexes)

    def _enter(self, step: int, voids: int) -> None:
        with self._content:
            # Content of another step or void count is worth nothing.
            if self._epoch != (step, voids):
                self._sum.zero_()
                self._indexes.clear()
                self._epoch = (step, voids)

    def _check(self, largest: float, index: int) -> None:
        if not math.isfinite(largest):
            raise BadMessage(RejectCode.NON_FINITE, "the gradient of a microbatch is not finite", index=index)
        # A float sum with such a term could overflow.
        if not self.fixed_point and largest > MAX_MAGNITUDE:
            raise BadMessage(RejectCode.NON_FINITE, "a gradient too large to be summed", index=index)
        # With so large a term from every microbatch the sum would leave int64.
        if self.fixed_point and largest * self._grid > self._limit:
            raise Overflow(
                "a gradient does not fit the grid: lower numerics.grid_bits or the learning rate",
                index=index,
                largest=largest,
            )

    def _add_flat(self, total: Tensor, gradient: Tensor) -> None:
        if not self.fixed_point:
            total.add_(gradient)
            return
        # In chunks: the product and its rounding are temporaries.
        size = chunk_elements(total.device)
        for part, piece in zip(torch.split(total, size), torch.split(gradient, size), strict=True):
            part.add_((piece * self._grid).round_().to(torch.int64))  # the product is exact: a power of two


def sum_dtype(numerics: Numerics) -> torch.dtype:
    """The dtype sums travel and rest in."""
    return torch.int64 if numerics.mode == "deterministic" else torch.float32


def check_fixed_point(piece: Tensor) -> float:
    """The largest magnitude of an int64 piece of somebody's sum. Raises BadMessage where no step can have summed it."""
    largest = largest_magnitude([piece])
    if largest > MAX_SUM:
        raise BadMessage(RejectCode.MALFORMED, "a fixed-point sum outside its range")
    return largest


def largest_magnitude(tensors: Sequence[Tensor]) -> float:
    """The largest absolute value of all; NaN or infinity if there is one. One pass, one synchronisation."""
    extremes = [torch.stack(torch.aminmax(tensor)) for tensor in tensors if tensor.numel()]
    # There are only empty tensors.
    if not extremes:
        return 0.0
    low, high = torch.stack(extremes).unbind(1)
    return max(high.max().item(), -low.min().item())  # Python's numbers: -(-2^63) is not an int64
