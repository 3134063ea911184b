"""What the robust rules promise, by property: how far a minority can move a result, and what never enters it."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarmnet.errors import BadMessage, RejectCode
from swarmnet.ids import PeerId
from swarmnet.manifest.schema import Averaging
from swarmnet.messages import Packed
from swarmnet.stage.interfaces import Clipped, Contribution
from swarmnet.stage.rounding import MAX_MAGNITUDE
from swarmnet.sums.reducer import (
    CenteredClip,
    NormClip,
    Rule,
    allowances,
    coordinate_median,
    float_sum,
    lower_median,
    pull,
    rule_of,
)
from swarmnet.wire import codecs

RULES: dict[str, Rule] = {"norm_clip": NormClip(2.0), "centered_clip": CenteredClip(1.0, 5)}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)

values = st.floats(-1e3, 1e3, width=32)
wild = st.floats(-(2.0**66), 2.0**66, width=32)


@st.composite
def groups(draw: st.DrawFn, *, least: int = 1, liars: bool = False) -> tuple[list[Tensor], list[int], int]:
    """(means, weights, liars): the first `liars` members have less than a quarter of the weight and no restraint."""
    size, count = draw(st.integers(1, 6)), draw(st.integers(least, 9))
    weights = [draw(st.integers(1, 16)) for _ in range(count)]
    allowed = 0
    if liars:
        while allowed < count and 4 * sum(weights[: allowed + 1]) < sum(weights):
            allowed += 1
    means = [
        torch.tensor([draw(wild if place < allowed else values) for _ in range(size)], dtype=torch.float32)
        for place in range(count)
    ]
    return means, weights, allowed


def reduce(rule: Rule, means: Sequence[Tensor], weights: Sequence[int], center: Tensor | None = None) -> Tensor:
    """The mean that `rule` finds."""
    sums = [mean * weight for mean, weight in zip(means, weights, strict=True)]
    return rule(sums, weights, center).total / sum(weights)


def close(one: Tensor, other: Tensor, scale: float) -> bool:
    return bool((one - other).abs().max() <= 1e-5 * scale + 1e-30)


def largest(means: Sequence[Tensor]) -> float:
    return max(float(mean.abs().max()) for mean in means)


# ---------------------------------------------------------------- what holds for every rule


@every_rule
@given(groups())
def test_members_that_agree_are_believed(rule: Rule, group: tuple[list[Tensor], list[int], int]) -> None:
    """Wherever the walk of centred clip begins: they are all at one distance, and all of it is walked at once."""
    means, weights, _ = group
    for center in (None, means[-1]):
        outcome = rule([means[0] * weight for weight in weights], weights, center)
        assert close(outcome.total / sum(weights), means[0], largest(means))
        assert center is not None or set(outcome.kept) == {1.0}


@every_rule
@given(groups(), st.randoms(use_true_random=False))
def test_the_order_of_members_does_not_matter(rule: Rule, group: tuple[list[Tensor], list[int], int], rng) -> None:
    means, weights, _ = group
    order = list(range(len(means)))
    rng.shuffle(order)
    one = reduce(rule, means, weights)
    other = reduce(rule, [means[at] for at in order], [weights[at] for at in order])
    assert close(one, other, largest(means) * len(means))


@given(groups())
def test_a_member_of_weight_two_is_two_members(group: tuple[list[Tensor], list[int], int]) -> None:
    """Not to norm_clip, which allows for how few microbatches a mean is of."""
    rule, (means, _, _) = RULES["centered_clip"], group
    twice = [2] + [1] * (len(means) - 1)
    assert close(
        reduce(rule, means, twice),
        reduce(rule, [means[0], *means], [1] * (len(means) + 1)),
        largest(means) * len(means),
    )


@every_rule
@given(groups())
def test_what_counted_is_a_share(rule: Rule, group: tuple[list[Tensor], list[int], int]) -> None:
    means, weights, _ = group
    kept = rule([mean * weight for mean, weight in zip(means, weights, strict=True)], weights, None).kept
    assert len(kept) == len(means) and all(0.0 <= share <= 1.0 for share in kept)
    assert 0.0 < rule.noted_below <= 1.0


# ---------------------------------------------------------------- bounded influence


@given(groups(liars=True))
def test_no_member_is_longer_than_the_honest_allow(group: tuple[list[Tensor], list[int], int]) -> None:
    """norm_clip: the result moves by no more than the liars' weight times their limits, which honest lengths set."""
    means, weights, liars = group
    rule = NormClip(2.0)
    limit = rule.factor * lower_median([float(mean.double().norm()) for mean in means], weights)
    assert limit <= rule.factor * max(float(mean.double().norm()) for mean in means[liars:]) * (1 + 1e-6)
    limits = [limit * more for more in allowances(weights)]
    silent = [torch.zeros_like(mean) for mean in means[:liars]]
    clipped = [
        mean * min(1.0, most / max(float(mean.double().norm()), 1e-300))
        for mean, most in zip(means[liars:], limits[liars:], strict=True)
    ]
    without = sum(mean.double() * weight for mean, weight in zip([*silent, *clipped], weights, strict=True))
    moved = float((reduce(rule, means, weights).double() - without / sum(weights)).norm())
    most = sum(weight * bound for weight, bound in zip(weights[:liars], limits[:liars], strict=True)) / sum(weights)
    assert moved <= most * (1 + 1e-5) + 1e-5 * largest(means[liars:])


def test_who_has_counted_few_microbatches_may_be_noisy_and_may_not_lie() -> None:
    """Gradients of which nothing agrees are the longest that honest members have, beside means of more of them."""
    rule, noise = NormClip(2.0), torch.randn(6, 1000, generator=torch.Generator().manual_seed(1))
    sums, weights = [noise[:5].sum(0), noise[5]], [5, 1]
    assert float(sums[1].norm()) > 2.0 * float((sums[0] / 5).norm()), "longer than twice the median"
    outcome = rule([each.clone() for each in sums], weights, None)
    assert outcome.kept == (1.0, 1.0) and torch.equal(outcome.total, sums[0] + sums[1])
    lie = rule([sums[0].clone(), 10 * sums[1]], weights, None).kept
    assert lie[0] == 1.0 and lie[1] < 0.25
    assert max(allowances([1000, *[1] * 999])) == 4.0, "or many of one each could make up for their weight"


@given(groups(liars=True))
def test_no_coordinate_of_the_median_leaves_the_range_of_the_honest(group: tuple[list[Tensor], list[int], int]) -> None:
    means, weights, liars = group
    honest = torch.stack(means[liars:])
    found, slack = coordinate_median(means, weights), 1e-5 * largest(means[liars:]) + 1e-30
    assert bool((found >= honest.min(0).values - slack).all() and (found <= honest.max(0).values + slack).all())


@given(groups(liars=True), st.floats(0.25, 2.0))
def test_a_step_of_centered_clip_moves_by_the_liars_share_of_the_limit(
    group: tuple[list[Tensor], list[int], int], factor: float
) -> None:
    """Whatever they send, and the limit is no more than an honest distance allows."""
    means, weights, liars = group
    centre, whole = means[-1], sum(weights)
    limit = factor * lower_median([float((mean - centre).double().norm()) for mean in means], weights)
    assert limit <= factor * max(float((mean - centre).double().norm()) for mean in means[liars:]) * (1 + 1e-6)
    without = centre.double()
    for mean, weight in zip(means[liars:], weights[liars:], strict=True):
        away = mean.double() - centre.double()
        without = without + weight / whole * away * min(1.0, limit / max(float(away.norm()), 1e-300))
    moved = float((reduce(CenteredClip(factor, 1), means, weights, centre).double() - without).norm())
    assert moved <= sum(weights[:liars]) / whole * limit * (1 + 1e-5) + 1e-5 * largest(means[liars:]) * len(means)


@given(groups(least=2), st.floats(0.1, 3.0))
def test_a_pull_is_not_expansive(group: tuple[list[Tensor], list[int], int], limit: float) -> None:
    """Two walks with the same company do not drift apart, so that liars' steps add up and do not multiply."""
    means, weights, _ = group
    ends = []
    for start in (means[0].double(), means[1].double()):
        at, distances = start.clone(), [float((mean.double() - start).norm()) for mean in means]
        pull(
            at,
            [mean.double() for mean in means],
            [
                weight / sum(weights) * min(1.0, limit / max(distance, 1e-300))
                for weight, distance in zip(weights, distances, strict=True)
            ],
        )
        ends.append(at)
    assert float((ends[0] - ends[1]).norm()) <= float((means[0] - means[1]).double().norm()) * (1 + 1e-9) + 1e-9


@settings(max_examples=50)
@given(groups(least=5, liars=True), st.booleans())
def test_centered_clip_ends_near_the_honest_wherever_the_liars_are(
    group: tuple[list[Tensor], list[int], int], remembered: bool
) -> None:
    means, weights, liars = group
    honest = torch.stack(means[liars:]).double()
    centre = means[-1] if remembered else None
    spread = max(float((one - other).norm()) for one, other in itertools.product(honest, honest))
    found = reduce(CenteredClip(1.0, 8), means, weights, centre).double()
    nearest = min(float((found - mean).norm()) for mean in honest)
    assert nearest <= (1 + math.sqrt(honest.shape[1])) * spread + 1e-3


def test_the_plain_mean_is_carried_away() -> None:
    """What the rules are for: the same liar, with and without them."""
    honest = [torch.tensor([1.0, -2.0, 3.0]) + 0.1 * place for place in range(-3, 4)]
    means, weights = [torch.full((3,), -1e6), *honest], [1] * 8
    plain = sum(means) / len(means)
    assert float((plain - honest[3]).norm()) > 1e5
    for name, rule in RULES.items():
        error = float((reduce(rule, means, weights) - honest[3]).norm())
        assert error < (0.5 if name != "norm_clip" else 3.0), (name, error)


@given(groups())
def test_norm_clip_that_clips_nobody_is_the_sum_bit_by_bit(group: tuple[list[Tensor], list[int], int]) -> None:
    means, weights, _ = group
    sums = [mean * weight for mean, weight in zip(means, weights, strict=True)]
    plain = sums[0].clone()
    for each in sums[1:]:
        plain.add_(each)
    outcome = NormClip(1e9)([each.clone() for each in sums], weights, None)
    if set(outcome.kept) == {1.0}:
        assert torch.equal(outcome.total, plain)
    else:
        assert min(float(mean.double().norm()) for mean in means) < 1e-3


# ---------------------------------------------------------------- arithmetic inside


@pytest.mark.parametrize(
    ("weights", "expected"),
    [([1, 1, 2], 2.0), ([1, 1, 1], 2.0), ([1, 1, 1, 1], 1.5), ([3, 1, 1], 1.0), ([2, 1, 1], 1.5)],
)
def test_the_median_is_in_the_middle_of_the_weight(weights: list[int], expected: float) -> None:
    means = [torch.tensor([each, -each]) for each in (1.0, 11.0, 2.0, 1.0)[: len(weights)]]
    assert coordinate_median(means, weights).tolist() == [expected, -expected]


@given(st.lists(st.tuples(values, st.integers(1, 9)), min_size=1, max_size=9))
def test_the_lower_median_is_the_smallest_value_that_half_of_the_weight_reaches(pairs: list[tuple[float, int]]) -> None:
    def reached(value: float) -> bool:
        return 2 * sum(weight for other, weight in pairs if other <= value) >= sum(weight for _, weight in pairs)

    found = lower_median([value for value, _ in pairs], [weight for _, weight in pairs])
    assert found == min(value for value, _ in pairs if reached(value))


def test_the_rules_clip_at_a_factor_of_the_lower_median() -> None:
    """Of means of 1, 2, 3 and 40 on one axis; 2 is the lower median of their lengths."""
    means = [torch.tensor([length]) for length in (1.0, 2.0, 3.0, 40.0)]
    kept = NormClip(1.5)([mean.clone() for mean in means], [1] * 4, None).kept
    assert kept == pytest.approx((1.0, 1.0, 1.0, 3.0 / 40.0))
    # They pull a centre of 0 by 1, 2, 2 and 2; it moves by the mean.
    assert float(reduce(CenteredClip(1.0, 1), means, [1] * 4, torch.zeros(1))) == pytest.approx(7.0 / 4)


# ---------------------------------------------------------------- whole parts, encoded


def reducer(name: str, codec: str = "fp32", **fields: float) -> Callable[..., tuple[Tensor, tuple[Clipped, ...]]]:
    return functools.partial(float_sum, rule_of(Averaging(codec=codec, reducer=name, **fields)), codec=codec)


def packed(tensor: Tensor, codec: str = "fp32") -> Packed:
    """Bytes as a liar would send them: `encode` refuses NaN."""
    if codec == "fp32":
        return Packed(codec, tuple(tensor.shape), tensor.numpy().tobytes())
    return codecs.encode(codec, tensor)


def members(tensors: Sequence[Tensor], codec: str = "fp32") -> list[Contribution]:
    return [Contribution(PeerId(f"p{place}"), 1, packed(each, codec)) for place, each in enumerate(tensors)]


HONEST = [torch.tensor([1.0, -2.0, 3.0]) + 0.01 * place for place in range(7)]
BAD = {
    "NaN": packed(torch.tensor([1.0, math.nan, 3.0])),
    "infinity": packed(torch.tensor([1.0, math.inf, 3.0])),
    "beyond gradients": packed(torch.full((3,), 2 * MAX_MAGNITUDE)),
    "wrong part": packed(torch.ones(4)),
    "wrong codec": packed(torch.ones(3), "bf16"),
    "wrong length": Packed("fp32", (3,), bytes(11)),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_what_is_no_gradient_is_left_out_and_named(name: str, bad: Packed) -> None:
    total, clipped = reducer(name)([Contribution(PeerId("liar"), 1, bad), *members(HONEST)], 3)
    assert Clipped(PeerId("liar"), 0.0) in clipped and [each.peer for each in clipped] == ["liar"]
    assert close(total / 8, sum(HONEST) / 7, 300.0)


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_the_plain_sum_refuses_it_and_says_whose_it_is(bad: Packed) -> None:
    with pytest.raises(BadMessage) as caught:
        reducer("sum")([*members(HONEST), Contribution(PeerId("liar"), 1, bad)], 3)
    assert caught.value.facts["peer"] == "liar"


@pytest.mark.parametrize("signs", [(1, 1), (1, 1, -1, -1)])
def test_of_several_that_are_finite_and_whose_sum_is_not_the_first_is_named(signs: tuple[int, ...]) -> None:
    liars = [
        Contribution(PeerId(f"liar{place}"), 1, packed(torch.full((3,), sign * 3e38)))
        for place, sign in enumerate(signs)
    ]
    with pytest.raises(BadMessage, match="larger than any") as caught:
        reducer("sum")([*members(HONEST), *liars], 3)
    assert caught.value.facts["peer"] == "liar0"


def test_as_many_microbatches_may_sum_to_more_than_one() -> None:
    two = Contribution(PeerId("busy"), 2, packed(torch.full((3,), 1.5 * MAX_MAGNITUDE)))
    assert float(reducer("sum")([two, *members(HONEST)], 3)[0].max()) == 1.5 * MAX_MAGNITUDE


@pytest.mark.parametrize("name", ["sum", *RULES])
@pytest.mark.parametrize("weight", [0, -1])
def test_a_weight_below_one_is_refused(name: str, weight: int) -> None:
    with pytest.raises(BadMessage) as caught:
        reducer(name)([*members(HONEST), Contribution(PeerId("liar"), weight, packed(torch.ones(3)))], 3)
    assert caught.value.code is RejectCode.MALFORMED and caught.value.facts["peer"] == "liar"


@pytest.mark.parametrize("name", RULES)
def test_where_nobody_sent_a_gradient_nothing_is_reduced(name: str) -> None:
    with pytest.raises(BadMessage, match="no member"):
        reducer(name)([Contribution(PeerId("liar"), 1, BAD["NaN"])], 3)


@pytest.mark.parametrize("name", ["sum", *RULES])
@pytest.mark.parametrize("codec", ["fp32", "fp16", "int8"])
def test_one_member_and_no_member(name: str, codec: str) -> None:
    reduce_part = reducer(name, codec)
    total, clipped = reduce_part(members([HONEST[0]], codec), 3)
    assert torch.equal(total, codecs.decode(packed(HONEST[0], codec))) and not clipped
    assert torch.equal(reduce_part([], 3)[0], torch.zeros(3))
    assert reduce_part([Contribution(PeerId("p"), 1, packed(torch.empty(0), codec))], 0)[0].shape == (0,)


@pytest.mark.parametrize("name", RULES)
def test_a_sum_counts_as_many_microbatches_as_the_round_gives(name: str) -> None:
    """A member cannot weigh more by sending more: the same mean under a larger weight is a larger sum."""
    weights = [1, 2, 3, 4, 5, 6, 7]
    contributions = [
        Contribution(PeerId(f"p{weight}"), weight, packed(each * weight))
        for each, weight in zip(HONEST, weights, strict=True)
    ]
    total, clipped = reducer(name)(contributions, 3, HONEST[3])
    assert not [each for each in clipped if each.factor < 0.1]
    assert close(total / sum(weights), HONEST[4], 3e4 * 0.02)


def test_every_word_of_the_manifest_is_a_rule() -> None:
    assert rule_of(Averaging(reducer="sum")) is None
    for name, rule in RULES.items():
        assert type(rule_of(Averaging(reducer=name))) is type(rule)
    assert rule_of(Averaging(reducer="centered_clip", clip_radius=1.5, clip_iterations=3)) == CenteredClip(1.5, 3)
    assert rule_of(Averaging(reducer="norm_clip", norm_factor=1.5)) == NormClip(1.5)
