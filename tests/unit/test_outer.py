"""The laws of the outer step: what plain averaging would do, what stays equal, what is exchanged when."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from swarmnet.stage.outer import Outer, pull
from swarmnet.sums.local_sum import OuterPlan

SHAPES = ((3, 4), (5,), (), (2, 2, 2))
NAMES = ("matrix", "vector", "scalar", "cube")
SIZE = 26


def replica(*, gossip: int = 0, learning_rate: float = 0.7, momentum: float = 0.6) -> Outer:
    """At the same slow weights as all others, with nothing learned yet."""
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return Outer(parameters, gossip=gossip, learning_rate=learning_rate, momentum=momentum)


def weights(outer: Outer) -> Tensor:
    return torch.cat([parameter.reshape(-1) for parameter in outer._parameters])


def learn(outer: Outer, seed: int) -> None:
    """Whatever an inner optimizer does: another thing on every replica."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in outer._parameters:
        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


def exchange(group: Sequence[Outer], start: int = 0, stop: int = SIZE, *, plain: bool = False) -> None:
    mean = torch.stack([each.vector(start, stop, plain=plain) for each in group]).mean(0)
    for each in group:
        each.step(mean, start, plain=plain)


def test_with_rate_1_and_no_momentum_the_outer_step_is_the_plain_mean_of_the_weights() -> None:
    group = [replica(learning_rate=1.0, momentum=0.0) for _ in range(3)]
    for _ in range(4):
        for seed, outer in enumerate(group):
            learn(outer, seed)
        mean = torch.stack([weights(outer) for outer in group]).mean(0)
        exchange(group)
        for outer in group:
            torch.testing.assert_close(weights(outer), mean, rtol=0, atol=1e-6)
            torch.testing.assert_close(outer.slow, mean, rtol=0, atol=1e-6)


@pytest.mark.parametrize("gossip", [0, 2])
def test_a_plain_exchange_is_the_mean_of_the_weights_and_forgets_the_momentum(gossip: int) -> None:
    group = [replica(gossip=gossip) for _ in range(2)]
    for number, plain in enumerate((False, True, True)):
        for seed, outer in enumerate(group):
            learn(outer, 10 * number + seed)
        mean = torch.stack([weights(outer) for outer in group]).mean(0)
        exchange(group, plain=plain)
        for outer in group:
            assert torch.allclose(outer.slow, mean, rtol=0, atol=1e-6) == plain
            assert bool(outer.momentum.any()) != plain
            assert torch.equal(weights(outer), outer.slow)


def test_the_outer_step_is_torchs_nesterov() -> None:
    outer, reference = replica(), torch.nn.Parameter(replica().slow.clone())
    sgd = torch.optim.SGD([reference], lr=0.7, momentum=0.6, nesterov=True)
    for seed in range(5):
        learn(outer, seed)
        before = weights(outer)
        reference.grad = outer.slow - before
        sgd.step()
        moved = outer.step(outer.vector(0, SIZE), 0)
        assert moved == pytest.approx(float((weights(outer) - before).norm() / weights(outer).norm()), rel=1e-4)
        torch.testing.assert_close(outer.slow, reference.detach(), rtol=0, atol=1e-6)


def test_slow_weights_of_everybody_are_equal_bit_by_bit() -> None:
    group = [replica() for _ in range(4)]
    for number in range(6):
        for seed, outer in enumerate(group):
            learn(outer, 10 * number + seed)
        exchange(group, 0, SIZE if number % 2 else 11)
        for outer in group[1:]:
            assert torch.equal(outer.slow, group[0].slow) and torch.equal(outer.momentum, group[0].momentum)


def test_who_took_no_part_keeps_what_it_has_learned() -> None:
    first, second, absent = (replica() for _ in range(3))
    for seed, outer in enumerate((first, second, absent)):
        learn(outer, seed)
    learned = weights(absent) - absent.slow
    mean = torch.stack([first.vector(0, SIZE), second.vector(0, SIZE)]).mean(0)
    for outer in (first, second, absent):
        outer.step(mean, 0, mine=outer is not absent)
    assert torch.equal(absent.slow, first.slow), "the slow weights are those of all"
    torch.testing.assert_close(weights(absent) - absent.slow, learned, rtol=0, atol=1e-6)


def test_elements_that_are_not_exchanged_stay_as_they_are() -> None:
    group = [replica() for _ in range(2)]
    for seed, outer in enumerate(group):
        learn(outer, seed)
    before, slow = weights(group[0]), group[0].slow.clone()
    exchange(group, 7, 19)
    for start, stop in ((0, 7), (19, SIZE)):
        assert torch.equal(weights(group[0])[start:stop], before[start:stop])
        assert torch.equal(group[0].slow[start:stop], slow[start:stop])
    assert torch.equal(weights(group[0])[7:19], group[0].slow[7:19])


@given(st.integers(2, 6), st.floats(0.0, 0.95), st.integers(0, 99))
def test_gossip_in_pairs_moves_the_mean_of_all_as_one_group_would(pairs: int, momentum: float, seed: int) -> None:
    paired, whole = ([replica(gossip=2, momentum=momentum) for _ in range(2 * pairs)] for _ in range(2))
    order = torch.randperm(2 * pairs, generator=torch.Generator().manual_seed(seed)).tolist()
    drift = torch.Generator().manual_seed(seed)
    for number in range(2 * pairs):
        learned = torch.randn(SIZE, generator=drift)
        for outer in (paired[number], whole[number]):
            for start, piece in outer._pieces(0, SIZE):
                piece.add_(learned[start : start + piece.numel()])
    for one, other in zip(order[::2], order[1::2], strict=True):
        exchange([paired[one], paired[other]])
    exchange(whole)
    means = [torch.stack([outer.slow for outer in group]).mean(0) for group in (paired, whole)]
    torch.testing.assert_close(*means, rtol=0, atol=1e-5)


def test_gossip_keeps_slow_weights_together_that_began_apart() -> None:
    group = [replica(gossip=2, momentum=0.5) for _ in range(8)]
    for seed, outer in enumerate(group):
        outer.slow.add_(torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)))
        for start, piece in outer._pieces(0, SIZE):
            piece.copy_(outer.slow[start : start + piece.numel()])

    def apart() -> float:
        return torch.stack([outer.slow for outer in group]).std(0).mean().item()

    began = apart()
    for number in range(40):
        order = torch.randperm(8, generator=torch.Generator().manual_seed(number)).tolist()
        for one, other in zip(order[::2], order[1::2], strict=True):
            exchange([group[one], group[other]])
    assert apart() < 0.05 * began


@pytest.mark.parametrize(("group", "size"), [(2, 2), (3, 2), (4, 4), (5, 4), (16, 16), (31, 16)])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_the_pull_is_where_the_paper_wants_it(group: int, size: int, momentum: float) -> None:
    unit = (group / (2 * (group - 1))) ** 0.5
    assert unit * momentum < pull(momentum, size) < unit * (2 + momentum**2) ** 0.5


def test_the_state_has_the_parameters_names_and_shapes_and_is_live() -> None:
    outer = replica()
    tensors = outer.tensors(NAMES)
    shapes = dict(zip(NAMES, SHAPES, strict=True))
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {
        f"outer.{kind}.{name}": shapes[name] for kind in ("slow", "momentum") for name in NAMES
    }
    tensors["outer.slow.vector"].fill_(7.0)
    assert outer.slow[12:17].eq(7.0).all()


@given(st.integers(0, 99), st.integers(1, 40), st.integers(1, 40), st.integers(1, 30))
def test_every_element_is_exchanged_once_in_any_inner_steps_steps(
    size: int, inner: int, fragments: int, begin: int
) -> None:
    fragments = min(fragments, inner)
    plan = OuterPlan(size, inner, fragments, total_steps=begin + inner + 1)
    exchanged = [due for step in range(begin, begin + inner) if (due := plan.due(step)) is not None]
    assert len(exchanged) == fragments
    assert sorted(element for start, stop in exchanged for element in range(start, stop)) == list(range(size))


@given(st.integers(1, 40), st.integers(1, 40), st.integers(2, 200))
def test_the_last_step_exchanges_everything_and_the_first_nothing(inner: int, fragments: int, steps: int) -> None:
    plan = OuterPlan(17, inner, min(fragments, inner), total_steps=steps)
    assert plan.due(0) is None
    assert plan.due(steps - 1) == (0, 17)


def test_exchanges_are_plain_to_the_end_of_the_warm_up() -> None:
    plan = OuterPlan(12, 4, 1, total_steps=100, warmup_steps=8)
    assert [plan.plain(step) for step in (4, 8, 9, 12)] == [True, True, False, False]


def test_all_elements_are_sent_in_the_warm_up_and_in_the_last_step() -> None:
    plan = OuterPlan(100, 4, 1, 20, warmup_steps=8)
    assert [step for step in range(20) if plan.due(step) and plan.sends_all(step)] == [4, 8, 19]


def test_turns_are_spread_evenly() -> None:
    plan = OuterPlan(12, 12, 3, total_steps=100)
    assert [step for step in range(1, 25) if plan.due(step)] == [4, 8, 12, 16, 20, 24]
    assert [plan.due(step) for step in (12, 4, 8)] == [(0, 4), (4, 8), (8, 12)]


def test_more_fragments_than_inner_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="turns"):
        OuterPlan(10, 2, 3, total_steps=9)
