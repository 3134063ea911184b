"""The reduction of one part: everybody's encoded contributions in, the whole sum encoded again.

Either the plain sum, in the accumulator's dtype, or one of the rules of `stage.robust`. Under a rule a contribution
that is no gradient (it does not decode, is not finite, or has elements beyond any gradient's) is left out, its weight
shared among the others, and reported as kept to 0; the plain sum refuses the whole part instead, since without it
it would be another sum. Knows no rounds: who contributes, and with which weight, is the step machine's word.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swarmnet.errors import BadMessage, Overflow, RejectCode
from swarmnet.manifest.schema import Manifest
from swarmnet.messages import Packed
from swarmnet.stage.accumulator import MAX_SUM, largest_magnitude, sum_dtype
from swarmnet.stage.engine import Clipped, Contribution
from swarmnet.stage.robust import MAX_MAGNITUDE, rule_of
from swarmnet.wire import codecs


class PartReducer:
    """Reduces parts of one run. On the CPU: contributions come from the network and return to it."""

    def __init__(self, manifest: Manifest) -> None:
        self._codec, self._rule = manifest.averaging.codec, rule_of(manifest.averaging)
        self._dtype = sum_dtype(manifest.numerics)
        self._fixed_point = manifest.numerics.mode == "deterministic"
        self.needs_center = manifest.averaging.reducer == "centered_clip"

    def __call__(
        self, contributions: Sequence[Contribution], num_elements: int, center: Tensor | None = None
    ) -> tuple[Tensor, tuple[Clipped, ...]]:
        """The sum [num_elements] in the accumulator's dtype, and whom the rule clipped.

        center: fp32 [num_elements], see `stage.robust`. Raises BadMessage, which names the peer, and Overflow.
        """
        for contribution in contributions:
            if contribution.num_microbatches < 1:
                raise BadMessage(RejectCode.MALFORMED, "a contribution without microbatches", peer=contribution.peer)
        if not contributions:
            return torch.zeros(num_elements, dtype=self._dtype), ()
        if self._rule is None:
            return self._sum(contributions, num_elements), ()
        good: list[Contribution] = []
        sums: list[Tensor] = []
        clipped: list[Clipped] = []
        for contribution in contributions:
            try:
                sums.append(self._decode(contribution, num_elements))
                good.append(contribution)
            except BadMessage:
                clipped.append(Clipped(contribution.peer, 0.0))
        if not good:
            raise BadMessage(RejectCode.MALFORMED, "nobody has sent a gradient", peers=len(contributions))
        weights = [contribution.num_microbatches for contribution in good]
        outcome = self._rule(sums, weights, center)
        whole = sum(contribution.num_microbatches for contribution in contributions)
        if len(good) < len(contributions):
            outcome.total.mul_(whole / sum(weights))
        clipped += [
            Clipped(contribution.peer, kept) for contribution, kept in zip(good, outcome.kept, strict=True)
            if kept < self._rule.noted_below
        ]
        return outcome.total, tuple(clipped)

    def check_range(self, piece: Tensor) -> float:
        """The largest magnitude of a piece of a fixed-point sum; 0 in fp32 mode, where decoding has checked enough.

        Raises BadMessage where no step of this run can have summed that.
        """
        largest = largest_magnitude([piece]) if self._fixed_point else 0.0
        if largest > MAX_SUM:
            raise BadMessage(RejectCode.MALFORMED, "a fixed-point sum outside its range")
        return largest

    def _sum(self, contributions: Sequence[Contribution], num_elements: int) -> Tensor:
        total, bound = torch.zeros(0, dtype=self._dtype), 0.0
        for place, contribution in enumerate(contributions):
            piece = self._open(contribution, num_elements)
            bound += self.check_range(piece)
            total = total.add_(piece) if place else piece        # decoded into memory of its own
            if bound > MAX_SUM and largest_magnitude([total]) > MAX_SUM:     # the second only where the first touches
                raise Overflow("contributions exceed what a step's microbatches can sum to")
        return total

    def _decode(self, contribution: Contribution, num_elements: int) -> Tensor:
        piece = self._open(contribution, num_elements)
        if largest_magnitude([piece]) > MAX_MAGNITUDE:
            raise BadMessage(RejectCode.MALFORMED, "larger than any gradient", peer=contribution.peer)
        return piece

    def _open(self, contribution: Contribution, num_elements: int) -> Tensor:
        try:
            return _decode(contribution.packed, self._codec, num_elements)
        except BadMessage as error:
            raise BadMessage(error.code, error.reason, peer=contribution.peer) from error


def _decode(packed: Packed, codec: str, num_elements: int) -> Tensor:
    if packed.codec != codec:
        raise BadMessage(RejectCode.MALFORMED, "not the run's codec", found=packed.codec[:32], expected=codec)
    return codecs.decode(packed, expect_shape=(num_elements,))
