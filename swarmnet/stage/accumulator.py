"""The sum of a step's gradients in one replica, and what may enter it.

Each microbatch's gradient is rounded as the step says (`stage.rounding`), and enters whole or not at all: it is
checked before the first element is added.

Nobody can subtract one gradient from a sum, so `void` discards the whole sum (docs/protocol.md, I3 and rule 5). The
content carries the (step, void count) that it belongs to. `void` only increases the count; the next reader or writer
that finds content of another count clears it. So voiding never waits for an addition, and an addition that a void has
overtaken adds to nothing.

The averaging thread may read while the compute thread adds. A lock ensures that only one of them clears the sum.

A sum on the small grid is held in int32, in the first half of its memory, while it is added to: half of the memory
passes by. It becomes int64 when it is read.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from swarmnet.errors import BadMessage, Refused, RejectCode
from swarmnet.manifest.schema import Numerics
from swarmnet.stage.rounding import Rounding
from swarmnet.wire import kernels


class Accumulator:
    """A flat sum over microbatches. `void`, `voids` and `read` from any thread, `add` from the compute thread."""

    def __init__(self, num_elements: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._sum = torch.zeros(num_elements, dtype=dtype, device=device)
        half = self._sum.view(torch.int32)[:num_elements] if dtype == torch.int64 else self._sum
        self._narrow, self._is_narrow = half, False
        self._lock = threading.Lock()  # of the void count: held for a moment
        self._content = threading.RLock()  # of the sum: held while one gradient is added
        self.voids = 0
        """How often the sum has been voided."""
        self.torn = False
        """Was it lost, by an addition that broke off in its middle, and not voided since?"""
        self._epoch = (-1, -1)
        self._indexes: set[int] = set()

    def void(self) -> None:
        """Make the sum empty. An addition now running adds to nothing and returns False."""
        with self._lock:
            self.voids += 1
            self.torn = False

    def lose(self) -> None:
        """Make it `torn`: what was counted in it is not in it any more."""
        with self._lock:
            self.voids += 1
            self.torn = True

    def follow(self, voids: int) -> None:
        """The void count is kept elsewhere (ranks of a mesh: by their peer), and is this now."""
        with self._lock:
            self.voids = voids

    def add(
        self,
        gradients: Sequence[Tensor],
        rounding: Rounding,
        *,
        step: int,
        index: int,
        voids: int,
        largest: float | None = None,
    ) -> bool:
        """Add one microbatch's gradients: fp32, contiguous, in canonical order, sums over tokens.

        rounding: of the step. voids: the void count when this replica was granted the microbatch. False if it has moved
        since, or if `index` is in the sum already. largest: the largest magnitude over all ranks, where each rank has a
        part of the gradient and all must decide alike. Raises BadMessage(NON_FINITE) or Overflow; the sum is unchanged
        then. A device without memory for it leaves the sum `torn`.
        """
        # Voided since the grant: the gradient would not count.
        if voids != self.voids:
            return False
        # The whole gradient is checked before its first element is added.
        rounding.check(largest_magnitude(gradients) if largest is None else largest, index)
        size = sum(gradient.numel() for gradient in gradients)
        if size != self._sum.numel():
            raise ValueError(f"gradients have {size} elements, the sum has {self._sum.numel()}")
        with self._content:
            self._enter(step, voids, fits_int32=rounding.fits_int32)
            # A weight pass asked for again adds nothing.
            if index in self._indexes:
                return False
            self._indexes.add(index)
            held = self._narrow if self._is_narrow else self._sum
            start = 0
            try:
                for place, gradient in enumerate(gradients):
                    total = held[start : start + gradient.numel()]
                    rounding.add(total, gradient.view(-1), place, index=index)
                    start += gradient.numel()
            except torch.OutOfMemoryError:
                # A part of the gradient is in: what others have added cannot be told from it.
                self.lose()
                raise
        # A void may have come while this was adding: then it added to nothing.
        return voids == self.voids

    def read(self, step: int) -> Tensor:
        """The flat sum of `step`: zeros if nothing was added. Valid until the next `add`; do not change it.

        Raises Refused(NOT_READY) if it is torn.
        """
        if self.torn:
            raise Refused(RejectCode.NOT_READY, "the sum was lost, as the device was full", step=step)
        with self._content:
            self._enter(step, self.voids)
            self._widen()
        return self._sum

    def indexes(self, step: int) -> frozenset[int]:
        """The microbatches whose gradients the sum of `step` holds."""
        self._enter(step, self.voids)
        return frozenset(self._indexes)

    def _enter(self, step: int, voids: int, *, fits_int32: bool = False) -> None:
        """fits_int32: of the grid of what comes, see Rounding."""
        with self._content:
            # Content of another step or void count is worth nothing.
            if self._epoch != (step, voids):
                self._is_narrow = fits_int32
                (self._narrow if self._is_narrow else self._sum).zero_()
                self._indexes.clear()
                self._epoch = (step, voids)

    def _widen(self) -> None:
        """Hold it in int64."""
        stop = self._sum.numel() if self._is_narrow else 0
        self._is_narrow = False
        # From the end: the upper half of what is left goes where nothing lies that is still to be read.
        while stop > 1:
            start = (stop + 1) // 2
            self._sum[start:stop] = self._narrow[start:stop]
            stop = start
        if stop:
            self._sum[0] = self._narrow[0].item()


def sum_dtype(numerics: Numerics) -> torch.dtype:
    """The dtype sums travel and rest in."""
    return torch.int64 if numerics.integers else torch.float32


def check_fixed_point(largest: float, *, most: int) -> None:
    """Raise BadMessage if no microbatches give that magnitude in somebody's int64 sum."""
    if largest > most:
        raise BadMessage(RejectCode.MALFORMED, "larger than what so many microbatches can sum to")


def largest_magnitude(tensors: Sequence[Tensor]) -> float:
    """The largest absolute value of all; NaN or infinity if there is one. One pass, one synchronisation."""
    floats = all(each.dtype == torch.float32 for each in tensors)
    if floats and (native := kernels.of("grid", *tensors)) is not None:
        return native.largest(tensors)
    extremes = [torch.stack(torch.aminmax(tensor)) for tensor in tensors if tensor.numel()]
    # There are only empty tensors.
    if not extremes:
        return 0.0
    low, high = torch.stack(extremes).unbind(1)
    return max(high.max().item(), -low.min().item())  # Python's numbers: -(-2^63) is not an int64
