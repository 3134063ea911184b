"""Moments in 8 bits: what a snapshot brings back, how small they are, what they cost."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarmnet.manifest.schema import Optimizer
from swarmnet.stage.optimizer import StageOptimizer
from swarmnet.stage.optimizer_8bit import BLOCK, LEAST, PackedMoments

TABLE = Optimizer(state="8bit", learning_rate=1e-2)


def moments(count: int, seed: int, scale: float, spread: float) -> tuple[Tensor, Tensor]:
    """First and second moments as Adam has them, of gradients of very different sizes, some of them 0."""
    generator = torch.Generator().manual_seed(seed)
    sizes = scale * torch.exp(spread * torch.randn(count, generator=generator))
    first, second = (torch.randn(count, generator=generator) * sizes for _ in range(2))
    second = torch.maximum(second.abs(), first.abs() / 1.2).square_()
    gone = torch.rand(count, generator=generator) < 0.1
    return first.masked_fill_(gone, 0), second.masked_fill_(gone, 0)


@settings(max_examples=80, deadline=None)
@given(
    count=st.integers(1, 3 * BLOCK + 5),
    seed=st.integers(0, 2**32),
    power=st.integers(-38, 15),
    spread=st.floats(0, 6),
    all_zero=st.booleans(),
)
def test_what_was_rounded_once_comes_back_by_bits(
    count: int, seed: int, power: int, spread: float, all_zero: bool
) -> None:
    packed, again = PackedMoments(torch.empty(count)), PackedMoments(torch.empty(count))
    first, second = moments(count, seed, 0.0 if all_zero else 10.0**power, spread)
    packed.write(first, second.clamp(max=1e38))
    read = packed.read()
    assert all(bool(each.isfinite().all()) for each in read) and bool((read[1] >= 0).all())
    again.write(*read)
    for one, two in zip(read, again.read(), strict=True):
        assert torch.equal(one, two) and torch.equal(one.signbit(), two.signbit())
    for name in ("_codes", "_root_codes", "_largest", "_largest_root"):
        assert torch.equal(getattr(packed, name), getattr(again, name)), name


@given(seed=st.integers(0, 2**32), spread=st.floats(0, 3))
@settings(max_examples=50, deadline=None)
def test_rounding_is_bounded_and_no_second_moment_becomes_zero(seed: int, spread: float) -> None:
    packed = PackedMoments(torch.empty(4 * BLOCK))
    first, second = moments(4 * BLOCK, seed, 1e-3, spread)
    packed.write(first, second)
    m, v = packed.read()
    largest = first.view(-1, BLOCK).abs().amax(1).repeat_interleave(BLOCK)
    root = second.view(-1, BLOCK).amax(1).sqrt().repeat_interleave(BLOCK)
    # a code is off by a half at most: (c + 1/2)^2 - c^2 = c + 1/4 steps of the square
    assert bool(((m - first).abs() <= (largest * first.abs()).sqrt() / 127 + largest / 127**2).all())
    assert bool(((v.sqrt() - second.sqrt()).abs() <= (root * second.sqrt()).sqrt() / 255 + root / 255**2).all())
    assert torch.equal(v > 0, second > 0)


def test_state_is_a_quarter_and_vectors_stay_in_fp32() -> None:
    weights = [torch.zeros(512, 128), torch.zeros(LEAST - 1), torch.zeros(LEAST), torch.zeros(512, 512)]
    bytes_of = {}
    for state in ("fp32", "8bit"):
        optimizer = StageOptimizer(weights, TABLE.model_copy(update={"state": state}))
        bytes_of[state] = sum(each.num_bytes for each in optimizer.moments)
    assert bytes_of["8bit"] <= 0.3 * bytes_of["fp32"]
    kinds = [type(each).__name__ for each in StageOptimizer(weights, TABLE).moments]
    assert kinds == ["PackedMoments", "WholeMoments", "PackedMoments", "PackedMoments"]


def test_a_part_of_a_parameter_is_packed_as_the_whole_is() -> None:
    parts = [torch.zeros(1, 64), torch.zeros(0, 64), torch.zeros(64, 64)]  # of a matrix, none of one, of a vector
    table = TABLE.model_copy(update={"state": "8bit", "lead": 2.5})
    optimizer = StageOptimizer(parts, table, whole=[LEAST, LEAST, LEAST - 1])
    assert [type(each).__name__ for each in optimizer.moments] == ["PackedMoments", "PackedMoments", "WholeMoments"]
    for _ in range(2):
        optimizer.step([torch.ones_like(part) for part in parts], learning_rate=0.1)
    snapshot = [moments.read() for moments in optimizer.moments]
    assert [first.shape for first, _ in snapshot] == [part.shape for part in parts]
    for moments, (first, second) in zip(optimizer.moments, snapshot, strict=True):
        moments.write(first, second)
    assert float(parts[0].max()) < 0 and not parts[1].numel()


@pytest.mark.parametrize("lead", [0.0, 2.5])
def test_replicas_keep_equal_bits_over_a_restored_snapshot(lead: float) -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = [(70, 1001), (50,), (16, 256)]  # blocks that end early, several pieces of a chunk
    table = TABLE.model_copy(update={"lead": lead})
    start = [torch.randn(shape, generator=generator) for shape in shapes]
    one, two = ([each.clone() for each in start] for _ in range(2))
    trained, restored = StageOptimizer(one, table), StageOptimizer(two, table)
    for step in range(6):
        gradients = [torch.randn(shape, generator=generator) for shape in shapes]
        trained.step(gradients, learning_rate=0.1)
        restored.step(gradients, learning_rate=0.1)
        fresh = StageOptimizer(two, table)  # as a joiner: everything from fp32
        for mine, theirs in zip(fresh.moments, restored.moments, strict=True):
            mine.write(*(each.clone() for each in theirs.read()))
        fresh.set_num_steps(step + 1)
        restored = fresh
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_a_block_is_rounded_as_if_it_were_alone() -> None:
    first, second = moments(4 * BLOCK, 3, 1.0, 2.0)
    whole, half = PackedMoments(torch.empty(4 * BLOCK)), PackedMoments(torch.empty(2 * BLOCK))
    whole.write(first, second)
    half.write(first[: 2 * BLOCK], second[: 2 * BLOCK])
    assert all(torch.equal(a[: 2 * BLOCK], b) for a, b in zip(whole.read(), half.read(), strict=True))


@pytest.mark.parametrize("lead", [0.0, 2.5])
def test_it_learns_what_fp32_learns(lead: float) -> None:
    """A matrix is fitted through noise; the error that is left is the noise's."""
    generator = torch.Generator().manual_seed(2)
    target, inputs = torch.randn(96, 64, generator=generator), torch.randn(400, 64, generator=generator)
    outputs = inputs @ target.t() + 0.1 * torch.randn(400, 96, generator=generator)
    ends = {}
    for state in ("fp32", "8bit"):
        weight = torch.zeros(96, 64)
        optimizer = StageOptimizer([weight], Optimizer(state=state, lead=lead, weight_decay=0.0))
        for step in range(300):
            rows = torch.randperm(400, generator=torch.Generator().manual_seed(step))[:64]
            x, y = inputs[rows], outputs[rows]
            gradient = (x @ weight.t() - y).t() @ x / len(rows)
            optimizer.step([gradient], learning_rate=0.05 * math.cos(step / 300 * math.pi / 2))
        ends[state] = float((inputs @ weight.t() - outputs).square().mean())
    assert ends["8bit"] == pytest.approx(ends["fp32"], rel=0.01)
