"""The reduction of one part: everybody's encoded contributions in, the whole sum encoded again.

Either the plain sum, in the accumulator's dtype, or one of the rules of `stage.robust`. Under a rule a contribution
that is no gradient (it does not decode, is not finite, or has elements beyond any gradient's) is left out, its weight
shared among the others, and reported as kept to 0; the plain sum refuses the whole part instead, since without it
it would be another sum. Knows no rounds: who contributes, and with which weight, is the step machine's word.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from swarmnet.errors import BadMessage, Overflow, RejectCode
from swarmnet.manifest.codec_names import travels_as
from swarmnet.manifest.schema import Manifest
from swarmnet.messages import Packed
from swarmnet.stage.accumulator import MAX_MAGNITUDE, MAX_SUM, check_fixed_point, largest_magnitude, sum_dtype
from swarmnet.stage.engine import Clipped, Contribution
from swarmnet.stage.robust import rule_of
from swarmnet.wire import codecs


class PartReducer:
    """Reduces parts of one run. On the CPU: contributions come from the network and return to it.

    codec: of contributions, where it is not the run's averaging codec.
    """

    def __init__(self, manifest: Manifest, *, codec: str = "") -> None:
        self._codec, self._rule = travels_as(codec or manifest.averaging.codec), rule_of(manifest.averaging)
        self._reduced = codecs.use(self._codec).reduced
        self._dtype = sum_dtype(manifest.numerics)
        self._fixed_point = manifest.numerics.mode == "deterministic"
        self.needs_center = self._rule is not None and self._rule.needs_center

    def __call__(
        self, contributions: Sequence[Contribution], num_elements: int, center: Tensor | None = None, *, hop: int = 0
    ) -> tuple[Tensor, tuple[Clipped, ...]]:
        """The sum [num_elements] in the accumulator's dtype, and whom the rule clipped.

        hop: after the first one contributions are reduced pieces, under a reduced piece's codec. center: fp32
        [num_elements], see `stage.robust`. Raises BadMessage, which names the peer, and Overflow.
        """
        for contribution in contributions:
            if contribution.num_microbatches < 1:
                raise BadMessage(RejectCode.MALFORMED, "a contribution without microbatches", peer=contribution.peer)
        if not contributions:
            return torch.zeros(num_elements, dtype=self._dtype), ()
        codec = self._reduced if hop else self._codec
        if self._rule is None:
            return self._sum(contributions, num_elements, codec), ()
        good: list[Contribution] = []
        sums: list[Tensor] = []
        clipped: list[Clipped] = []
        for contribution in contributions:
            try:
                sums.append(self._decode(contribution, num_elements, codec))
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
            Clipped(contribution.peer, kept)
            for contribution, kept in zip(good, outcome.kept, strict=True)
            if kept < self._rule.noted_below
        ]
        return outcome.total, tuple(clipped)

    def _sum(self, contributions: Sequence[Contribution], num_elements: int, codec: str) -> Tensor:
        total, bound = self._open(contributions[0], num_elements, codec), 0.0  # decoded into memory of its own
        if not self._fixed_point:
            for contribution in contributions[1:]:
                with _named(contribution):
                    codecs.add_decoded(total, self._checked(contribution, num_elements, codec))
            if not largest_magnitude([total]) <= MAX_MAGNITUDE:  # NaN, too: two infinities against each other
                self._find_too_large(contributions, num_elements, codec)
            return total
        for place, contribution in enumerate(contributions):
            piece = self._open(contribution, num_elements, codec) if place else total
            bound += self._largest(contribution, piece)
            total = total.add_(piece) if place else total
            if bound > MAX_SUM and largest_magnitude([total]) > MAX_SUM:  # the second only where the first touches
                raise Overflow("contributions exceed what a step's microbatches can sum to")
        return total

    def _find_too_large(self, contributions: Sequence[Contribution], num_elements: int, codec: str) -> None:
        """Raises BadMessage for the first member whose microbatches cannot have summed to what it sent."""
        for contribution in contributions:
            largest = largest_magnitude([self._open(contribution, num_elements, codec)])
            if largest > MAX_MAGNITUDE * contribution.num_microbatches:
                raise BadMessage(RejectCode.MALFORMED, "larger than any gradient", peer=contribution.peer)

    def _decode(self, contribution: Contribution, num_elements: int, codec: str) -> Tensor:
        """Under a rule: a gradient of the accumulator's size, with elements that its arithmetic can hold."""
        piece = self._open(contribution, num_elements, codec)
        if largest_magnitude([piece]) > MAX_MAGNITUDE:
            raise BadMessage(RejectCode.MALFORMED, "larger than any gradient", peer=contribution.peer)
        return piece

    def _open(self, contribution: Contribution, num_elements: int, codec: str) -> Tensor:
        with _named(contribution):
            return codecs.decode(self._checked(contribution, num_elements, codec))

    @staticmethod
    def _checked(contribution: Contribution, num_elements: int, codec: str) -> Packed:
        packed = contribution.packed
        if packed.codec != codec:
            raise BadMessage(RejectCode.MALFORMED, f"not the run's codec: {packed.codec[:32]}")
        codecs.check_packed(packed, expect_shape=(num_elements,))
        return packed

    @staticmethod
    def _largest(contribution: Contribution, piece: Tensor) -> float:
        with _named(contribution):
            return check_fixed_point(piece)


@contextlib.contextmanager
def _named(contribution: Contribution) -> Iterator[None]:
    """What is wrong with a contribution is said with its sender's name."""
    try:
        yield
    except BadMessage as error:
        raise BadMessage(error.code, error.reason, peer=contribution.peer) from error
