"""The sum of a step's gradients in one replica, and what may enter it.

Each microbatch's gradient is rounded as the step says (`stage.rounding`), and enters whole or not at all: it is
checked before the first element is added.

A gradient cannot be subtracted from a sum exactly, so `discard` empties it (docs/protocol.md, I3 and rule 5).
The content carries the (step, discard count) that it belongs to. `discard` only increases the count; the next reader or
writer that finds content of another count clears it. So `discard` never waits for an addition, and an addition that a
`discard` has overtaken adds nothing.

The averaging thread may read while the compute thread adds. A lock ensures that only one of them clears the sum.
`GradientSum` counts what a sum holds; the elements are here (`Accumulator`) or on ranks (`ranks.backend.RankSum`).

A sum on the small grid is held in int32, in the first half of its memory, while it is added to: half of the memory
passes by. It becomes int64 when it is read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from swarmnet.errors import BadMessage, Refused, RejectCode
from swarmnet.manifest.schema import Numerics
from swarmnet.stage.rounding import Rounding
from swarmnet.wire import kernels


class SumContent(NamedTuple):
    """The microbatches in a sum: of `step`, since the sum was discarded for the `discards`th time."""

    step: int
    discards: int
    indexes: frozenset[int]


class GradientSum:
    """The sum of one open step's gradients, wherever it is held. Additions are of the compute thread; the rest is of
    any thread. busy: held while a gradient is added or the sum is read."""

    def __init__(self, busy: threading.RLock) -> None:
        self._busy = busy
        self._lock = threading.Lock()  # of the discard count: held for a moment
        self.discards = 0
        """How often the sum has been discarded."""
        self._lost: int | None = None  # the step whose sum is gone, and not discarded since
        self._content = SumContent(-1, -1, frozenset())  # replaced by the thread that has `busy`, never changed

    @property
    def lost(self) -> bool:
        """Was a part of what it counts lost, and has it not been discarded since?"""
        return self._lost is not None

    def discard(self) -> None:
        """Make the sum empty. An addition now running adds to nothing and returns False."""
        with self._lock:
            self.discards += 1
            self._lost = None

    def lose(self) -> None:
        """What was counted in it is gone. An addition now running returns False."""
        with self._lock:
            self.discards += 1
            self._lost = self._content.step if self._content.indexes else self._lost

    def read(self, step: int) -> Tensor:
        """The flat sum of `step` in canonical order: zeros if nothing was added. Valid until the next `add`; read-only.

        Raises Refused(NOT_READY) if it was lost, and not discarded since.
        """
        with self._busy:
            with self._lock:
                discards, lost = self.discards, self._lost
            if lost == step:
                raise Refused(RejectCode.NOT_READY, "the sum was lost with the device that held it", step=step)
            return self._read(self._entered(step, discards))

    def indexes(self, step: int) -> frozenset[int]:
        """The microbatches in the sum of `step`."""
        with self._busy:
            return self._entered(step, self.discards).indexes

    def count(self, add: Callable[[], object], *, step: int, index: int, discards: int) -> bool:
        """Count microbatch `index` once `add` added its gradient (`Accumulator.add`). If it raises, none is added."""
        with self._busy:
            # Discarded since the grant: the gradient would not count.
            if discards != self.discards:
                return False
            content = self._entered(step, discards)
            # A weight pass asked for again adds nothing.
            if index in content.indexes:
                return False
            add()
            self._content = content._replace(indexes=content.indexes | {index})
        # A discard may have come while this was adding: then it added to nothing.
        return discards == self.discards

    def _entered(self, step: int, discards: int) -> SumContent:
        # SumContent of another step or discard count is worth nothing.
        if self._content[:2] != (step, discards):
            self._content = SumContent(step, discards, frozenset())
        return self._content

    def _read(self, content: SumContent) -> Tensor:
        raise NotImplementedError


class Accumulator(GradientSum):
    """A sum in memory of this process.

    Integer counts of a microbatch that are no gradient (the tokens of each expert) belong behind the last parameter's
    elements, in int64: contributions, aggregates, their checks and audits then have them like all other elements, exact
    in any order. Their bound is their own: `Rounding.most` is one of gradients.
    """

    def __init__(self, num_elements: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(threading.RLock())
        self._sum = torch.zeros(num_elements, dtype=dtype, device=device)
        half = self._sum.view(torch.int32)[:num_elements] if dtype == torch.int64 else self._sum
        self._narrow, self._is_narrow = half, False

    def follow(self, discards: int) -> None:
        """The discard count is kept elsewhere (ranks of a mesh: by their peer), and is this now."""
        with self._lock:
            self.discards = discards

    def add(
        self,
        gradients: Sequence[Tensor],
        rounding: Rounding,
        *,
        step: int,
        index: int,
        discards: int,
        largest: float | None = None,
    ) -> bool:
        """Add one microbatch's gradients: fp32, contiguous, in canonical order, sums over tokens.

        rounding: of the step. discards: the discard count when this replica was granted the microbatch. False if it has
        moved since, or if `index` is in the sum already. largest: the largest magnitude over all ranks, where each rank
        has a part of the gradient and all must decide alike. Raises BadMessage(NON_FINITE) or Overflow; the sum is
        unchanged then. A device without memory for it loses the sum.
        """

        def add() -> None:
            # The whole gradient is checked before its first element is added.
            rounding.check(largest_magnitude(gradients) if largest is None else largest, index)
            size = sum(gradient.numel() for gradient in gradients)
            if size != self._sum.numel():
                raise ValueError(f"gradients have {size} elements, the sum has {self._sum.numel()}")
            if not self._content.indexes:
                self._clear(fits_int32=rounding.fits_int32)
            held, start = self._narrow if self._is_narrow else self._sum, 0
            try:
                for place, gradient in enumerate(gradients):
                    rounding.add(held[start : start + gradient.numel()], gradient.view(-1), place, index=index)
                    start += gradient.numel()
            except torch.OutOfMemoryError:
                # A part of the gradient is in: what others have added cannot be told from it.
                self._content = SumContent(step, discards, self._content.indexes | {index})
                self.lose()
                raise

        return self.count(add, step=step, index=index, discards=discards)

    def _read(self, content: SumContent) -> Tensor:
        if not content.indexes:
            self._clear()
        self._widen()
        return self._sum

    def _clear(self, *, fits_int32: bool = False) -> None:
        """The content is of another step, or discarded. fits_int32: of the grid of what comes, see Rounding."""
        self._is_narrow = fits_int32
        (self._narrow if fits_int32 else self._sum).zero_()

    def _widen(self) -> None:
        """Hold it in int64."""
        stop = self._sum.numel() if self._is_narrow else 0
        self._is_narrow = False
        # From the end: the upper half of what is left goes where there is nothing left to be read.
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
    """Raise BadMessage if no microbatches give that magnitude in an int64 sum."""
    if largest > most:
        raise BadMessage(RejectCode.MALFORMED, "larger than what so many microbatches can sum to")


def largest_magnitude(tensors: Sequence[Tensor]) -> float:
    """The largest absolute value of all; NaN or infinity if there is one. One pass, one synchronisation."""
    floats = all(each.dtype == torch.float32 for each in tensors)
    if floats and (native := kernels.of(*tensors)) is not None:
        return native.largest(tensors)
    extremes = [torch.stack(torch.aminmax(tensor)) for tensor in tensors if tensor.numel()]
    # There are only empty tensors.
    if not extremes:
        return 0.0
    low, high = torch.stack(extremes).unbind(1)
    return max(high.max().item(), -low.min().item())  # Python's numbers: -(-2^63) is not an int64
