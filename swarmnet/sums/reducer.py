"""The reduction of one part: the encoded contributions of all members in, the complete sum out.

Integers are added (`integer_sum`). Float vectors, with `averaging.sync = "local"`, are added too, or reduced by a rule
that a minority of wrong contributions cannot carry away (`float_sum`):

    norm_clip       no mean gradient longer than a multiple of the median length (arXiv:1911.07963)
    centered_clip   a few steps towards the members' mean, each of bounded length (arXiv:2012.10333, arXiv:2106.11257)

Under a rule a contribution that is no gradient (it does not decode, is not finite, or has elements larger than any
gradient's) is left out, its weight is shared among the others, and it is reported with a factor of 0. The plain sum
refuses the whole part instead: without one contribution it would be another sum than the round names.

A contribution is a sum over microbatches; its weight is their number in the *assignments*. Rules compare means and
return a sum over all weights. "Median" is weighted throughout: every bound holds while wrong members have less than
half of the weight. A rule sees one part and never the whole gradient, as in BTARD's butterfly: lengths are those of
parts. Given the same order of members the bits are the same; other orders differ by rounding. Knows no rounds: the step
machine decides who contributes, and with which weight.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from swarmnet.config import plug_in
from swarmnet.errors import BadMessage, Overflow, RejectCode, UsageError
from swarmnet.manifest.schema import Averaging
from swarmnet.messages import Packed
from swarmnet.stage.accumulator import check_fixed_point, largest_magnitude
from swarmnet.stage.interfaces import Clipped, Contribution
from swarmnet.stage.rounding import MAX_MAGNITUDE, MAX_SUM, chunk_elements
from swarmnet.wire import codecs

INTEGERS = "small"
"""How integers travel, of the fine grid as well: no encoding of them is shorter."""

_BLOCK = 1 << 14
"""Coordinates sorted at a time: a group's rows should fit a core's cache."""

_MOST_ALLOWED = 4.0
"""What a mean of few microbatches may be longer by: as noise is of a sixteenth of them."""

_ROUNDING = 2.0**-20
"""Lengths that differ by less than this part of them are one length: the means were divided, and added, in fp32."""


@dataclass(frozen=True, slots=True)
class RobustTotal:
    """total: fp32 [K], the sum over all weights. kept: per contribution, how much of it counted, in [0, 1]."""

    total: Tensor
    kept: tuple[float, ...]


class Rule(Protocol):
    """One way to reduce a part."""

    @property
    def noted_below(self) -> float:
        """A member is reported as clipped if its contribution was scaled by less than this. In (0, 1]."""

    @property
    def needs_center(self) -> bool:
        """Is the mean of the step before to be remembered, 4 bytes an element?"""

    def __call__(self, sums: Sequence[Tensor], weights: Sequence[int], center: Tensor | None) -> RobustTotal:
        """Reduce. Consumes `sums`.

        sums: at least one, fp32 [K] each, finite, |x| <= MAX_MAGNITUDE, a sum over weights[i] >= 1 microbatches.
        center: fp32 [K], the mean per microbatch of the step before; None where no replica remembers it.
        """


def rule_of(averaging: Averaging) -> Rule | None:
    """The run's rule; None for the plain sum, which needs no more than one contribution in memory at a time.

    Raises: UsageError if another distribution should bring it and none does.
    """
    match averaging.reducer:
        case "sum":
            return None
        case "norm_clip":
            return NormClip(averaging.norm_factor)
        case "centered_clip":
            return CenteredClip(averaging.clip_radius, averaging.clip_iterations)
        case foreign:
            return _load(foreign)


@dataclass(frozen=True, slots=True)
class NormClip:
    """Shorten every mean gradient to at most `factor` times the median length; one of few microbatches to more, since
    it has more noise. Where no member is shortened the result is the plain sum, bit by bit."""

    factor: float
    noted_below: float = 1.0
    needs_center: bool = False

    def __call__(self, sums: Sequence[Tensor], weights: Sequence[int], center: Tensor | None) -> RobustTotal:
        """The bound is |total| <= factor * (median length) * (sum of weights * allowances)."""
        lengths = [_length(each) / weight for each, weight in zip(sums, weights, strict=True)]
        limit, allowed = self.factor * lower_median(lengths, weights), allowances(weights)
        excess = [length / more for length, more in zip(lengths, allowed, strict=True)]
        kept = _shares(excess, limit, noise=_ROUNDING * limit)
        total = sums[0].mul_(kept[0])
        for each, share in zip(sums[1:], kept[1:], strict=True):
            total.add_(each, alpha=share)
        return RobustTotal(total, tuple(kept))


@dataclass(frozen=True, slots=True)
class CenteredClip:
    """From the mean of the step before go `iterations` times towards the weighted mean of all members, where each pulls
    at most `radius` times the median distance. Without a step before, start from the median of each coordinate."""

    radius: float
    iterations: int
    needs_center: bool = True

    @property
    def noted_below(self) -> float:
        """Half of all members are beyond the median; more than twice as far is worth a word."""
        return min(1.0, self.radius / 2)

    def __call__(self, sums: Sequence[Tensor], weights: Sequence[int], center: Tensor | None) -> RobustTotal:
        """In one iteration wrong members of share s move the result by at most s * radius * (median
        distance), wherever they are."""
        whole = sum(weights)
        means = [each.div_(weight) for each, weight in zip(sums, weights, strict=True)]
        # A Byzantine member chooses where the plain mean starts; no coordinate of the median is beyond those of correct
        # ones.
        start = coordinate_median(means, weights) if center is None else center.clone()
        limit, kept = math.inf, [1.0] * len(means)
        for _ in range(self.iterations):
            distances = [_distance(mean, start) for mean in means]
            # The bound never grows, so that a member gains nothing by staying far away.
            limit = min(limit, self.radius * lower_median(distances, weights))
            kept = _shares(distances, limit, noise=_ROUNDING * _length(start))
            pull(start, means, [weight * share / whole for weight, share in zip(weights, kept, strict=True)])
        return RobustTotal(start.mul_(whole), tuple(kept))


def allowances(weights: Sequence[int]) -> list[float]:
    """By how much longer than the median a mean over so many microbatches may be.

    Where there is nothing but noise, a correct mean of n is as long as noise / sqrt(n). At most `_MOST_ALLOWED`, or
    Byzantine peers would split their weight among many members of one microbatch each.
    """
    middle = lower_median(weights, weights)
    return [min(max(math.sqrt(middle / weight), 1.0), _MOST_ALLOWED) for weight in weights]


def pull(start: Tensor, means: Sequence[Tensor], shares: Sequence[float]) -> None:
    """start += sum over i of shares[i] * (means[i] - start), in place. shares: >= 0, at most 1 together."""
    start.mul_(max(1.0 - math.fsum(shares), 0.0))
    for mean, share in zip(means, shares, strict=True):
        start.add_(mean, alpha=share)


def lower_median(values: Sequence[float], weights: Sequence[int]) -> float:
    """The smallest of `values` that has half of the weight at or below it.

    While wrong members have less than half, some right one has a value at most this, and some right one at least this.
    """
    reached, whole = 0, sum(weights)
    for value, weight in sorted(zip(values, weights, strict=True)):
        reached += weight
        if 2 * reached >= whole:
            return value
    raise ValueError("the median of nothing")


def coordinate_median(means: Sequence[Tensor], weights: Sequence[int]) -> Tensor:
    """Per coordinate the value in the middle of the weight, or the mean of those that meet there. fp32 [K]."""
    half, weighed = sum(weights) / 2, torch.tensor(weights, dtype=torch.float32)  # counts: exact in fp32
    result = torch.empty_like(means[0])
    for block, *rows in zip(*(torch.split(each, _BLOCK) for each in (result, *means)), strict=True):
        values, order = torch.stack(rows).sort(dim=0)
        upto = weighed[order].cumsum(0)
        middle = (upto - weighed[order] <= half) & (upto >= half)
        torch.div((values * middle).sum(0), middle.sum(0), out=block)
    return result


# ---------------------------------------------------------------- inside


def _load(name: str) -> Rule:
    rule: Rule
    rule, where = plug_in.load(
        "reducer", name, field="averaging.reducer", needs=("noted_below", "needs_center", "__call__")
    )
    if not 0.0 < rule.noted_below <= 1.0:
        raise UsageError(f"{where} notes who kept less than {rule.noted_below!r}: not in (0, 1]")
    return rule


def _shares(lengths: Sequence[float], limit: float, *, noise: float) -> list[float]:
    """What is left of each length under `limit`, as a share of it. Lengths of `noise` and less are not limited."""
    return [1.0 if length <= limit + noise else (limit + noise) / length for length in lengths]


def _length(flat: Tensor) -> float:
    """The L2 norm, in fp64: squares of large and small numbers must stay numbers."""
    return float(torch.linalg.vector_norm(flat, dtype=torch.float64).item())


def _distance(one: Tensor, other: Tensor) -> float:
    size = chunk_elements(one.device)
    return math.sqrt(
        math.fsum(
            _length(left - right) ** 2
            for left, right in zip(torch.split(one, size), torch.split(other, size), strict=True)
        )
    )


def float_sum(
    rule: Rule | None,
    contributions: Sequence[Contribution],
    num_elements: int,
    center: Tensor | None = None,
    *,
    codec: str,
) -> tuple[Tensor, tuple[Clipped, ...]]:
    """The sum of one part by the run's rule, fp32 [num_elements] on the CPU, and the members that the rule clipped.

    center: fp32 [num_elements], the mean of the step before. codec: of contributions. Raises BadMessage, which names
    the peer.
    """
    _check_weights(contributions)
    if not contributions:
        return torch.zeros(num_elements), ()
    if rule is None:
        # The plain sum needs two contributions in memory at a time.
        each = (_opened(found, num_elements, codec, found.num_microbatches) for found in contributions)
        return functools.reduce(Tensor.add_, each), ()
    good: list[Contribution] = []
    sums: list[Tensor] = []
    clipped: list[Clipped] = []
    for contribution in contributions:
        try:
            sums.append(_opened(contribution, num_elements, codec, 1))
            good.append(contribution)
        # Under a rule a bad contribution has no weight, and does not stop the round.
        except BadMessage:
            clipped.append(Clipped(contribution.peer, 0.0))
    if not good:
        raise BadMessage(RejectCode.MALFORMED, "no member has sent a gradient", peers=len(contributions))
    weights = [contribution.num_microbatches for contribution in good]
    outcome = rule(sums, weights, center)
    # The others take over the weight of those that were left out.
    if len(good) < len(contributions):
        whole = sum(contribution.num_microbatches for contribution in contributions)
        outcome.total.mul_(whole / sum(weights))
    clipped += [
        Clipped(contribution.peer, kept)
        for contribution, kept in zip(good, outcome.kept, strict=True)
        if kept < rule.noted_below
    ]
    return outcome.total, tuple(clipped)


def integer_sum(contributions: Sequence[Contribution], num_elements: int, *, most: Callable[[int], int]) -> Tensor:
    """The sum of one part: int64 [num_elements].

    most: the largest magnitude that so many microbatches can have in a sum. Raises BadMessage, which names the peer,
    and Overflow.
    """
    _check_weights(contributions)
    # The first contribution is written over what is there.
    total, bound = (torch.empty if contributions else torch.zeros)(num_elements, dtype=torch.int64), 0
    for place, contribution in enumerate(contributions):
        with _named(contribution):
            packed = _checked(contribution, num_elements, INTEGERS)
            largest = codecs.decode_integers(total, packed, add=place > 0)
            check_fixed_point(largest, most=most(contribution.num_microbatches))
        bound += largest
        if bound > MAX_SUM and largest_magnitude([total]) > MAX_SUM:  # the second only where the first touches
            raise Overflow("contributions exceed what a step's microbatches can sum to")
    return total


def _check_weights(contributions: Sequence[Contribution]) -> None:
    for contribution in contributions:
        if contribution.num_microbatches < 1:
            raise BadMessage(RejectCode.MALFORMED, "a contribution without microbatches", peer=contribution.peer)


def _opened(contribution: Contribution, num_elements: int, codec: str, num_gradients: int) -> Tensor:
    """The vector itself. Raises BadMessage, which names the peer, for what so many gradients cannot sum to: a rule's
    arithmetic cannot hold larger numbers, and two infinities would cancel to no number."""
    with _named(contribution):
        piece = codecs.decode(_checked(contribution, num_elements, codec))
        if largest_magnitude([piece]) > MAX_MAGNITUDE * num_gradients:
            raise BadMessage(RejectCode.MALFORMED, "larger than any gradient")
    return piece


def _checked(contribution: Contribution, num_elements: int, codec: str) -> Packed:
    packed = contribution.packed
    if packed.codec != codec:
        raise BadMessage(RejectCode.MALFORMED, f"not the run's codec: {packed.codec[:32]}")
    codecs.check_packed(packed, expect_shape=(num_elements,))
    return packed


@contextlib.contextmanager
def _named(contribution: Contribution) -> Iterator[None]:
    """Name the sender in an error about its contribution."""
    try:
        yield
    except BadMessage as error:
        raise BadMessage(error.code, error.reason, peer=contribution.peer) from error
