"""PowerSGD as two sums: what comes out is the same bits everywhere, and with what is owed it is what went in."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnet.errors import BadMessage, RejectCode
from swarmnet.sums.powersgd import LowRank, orthonormal

SHAPES = [
    ("embed.weight", (96, 64)),
    ("layer.norm.weight", (64,)),
    ("layer.up.weight", (160, 64)),
    ("layer.down.weight", (64, 160)),
    ("layer.small.weight", (16, 64)),
    ("layer.up.bias", (160,)),
]
NUM_ELEMENTS = sum(math.prod(shape) for _, shape in SHAPES)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def all_reduce(codecs: list[LowRank], gradients: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Both sums in memory: (what each replica gets, what each has sent of its own). They learn from it."""
    first = torch.stack([codec.first(gradient) for codec, gradient in zip(codecs, gradients, strict=True)]).sum(0)
    bases = [codec.basis(first) for codec in codecs]
    seconds = [codec.second(g, basis) for codec, g, basis in zip(codecs, gradients, bases, strict=True)]
    second = torch.stack(seconds).sum(0)
    wholes, sent = [], []
    for codec, gradient, basis, mine in zip(codecs, gradients, bases, seconds, strict=True):
        wholes.append(torch.full((NUM_ELEMENTS,), float("nan")))
        codec.whole(first, basis, second, wholes[-1])
        sent.append(torch.full((NUM_ELEMENTS,), float("nan")))
        codec.whole(codec.first(gradient), basis, mine, sent[-1])
        codec.learn(second)
    return wholes, sent


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_replicas_get_equal_bits_and_lose_nothing(rank: int) -> None:
    codecs = [LowRank(rank, SHAPES) for _ in range(3)]
    residuals = [torch.zeros(NUM_ELEMENTS) for _ in codecs]
    computed, applied = torch.zeros(NUM_ELEMENTS, dtype=torch.float64), torch.zeros(NUM_ELEMENTS, dtype=torch.float64)
    for step in range(8):
        gradients = [random(NUM_ELEMENTS, seed=3 * step + place) for place in range(3)]
        computed += sum(gradient.double() for gradient in gradients)
        corrected = [gradient + residual for gradient, residual in zip(gradients, residuals, strict=True)]
        wholes, sent = all_reduce(codecs, corrected)
        assert torch.equal(wholes[0], wholes[1]) and torch.equal(wholes[0], wholes[2])
        residuals = [before - gone for before, gone in zip(corrected, sent, strict=True)]
        applied += wholes[0].double()
        owed = sum(residual.double() for residual in residuals)
        assert (applied + owed - computed).norm() <= 1e-5 * computed.norm()
    assert owed.norm() > 0.1 * computed.norm()  # and it did drop something


def test_a_newcomer_with_another_look_loses_nothing_either() -> None:
    codecs = [LowRank(2, SHAPES) for _ in range(2)]
    all_reduce(codecs, [random(NUM_ELEMENTS, seed=place) for place in range(2)])
    codecs.append(LowRank(2, SHAPES))
    gradients = [random(NUM_ELEMENTS, seed=place) for place in range(3)]
    wholes, sent = all_reduce(codecs, gradients)
    assert all(torch.equal(whole, wholes[0]) for whole in wholes)
    assert (sum(s.double() for s in sent) - wholes[0].double()).norm() <= 1e-5 * wholes[0].norm()
    assert torch.equal(codecs[0].directions, codecs[2].directions)


@pytest.mark.parametrize("rank", [1, 3])
def test_a_matrix_of_that_rank_comes_out_whole(rank: int) -> None:
    codec = LowRank(rank, SHAPES)
    pieces = []
    for place, (_, shape) in enumerate(SHAPES):
        if len(shape) == 1:
            pieces.append(random(*shape, seed=place))
        else:
            pieces.append((random(shape[0], rank, seed=place) @ random(rank, shape[1], seed=place + 50)).reshape(-1))
    gradient = torch.cat(pieces)
    (whole,), _ = all_reduce([codec], [gradient])
    assert torch.allclose(whole, gradient, rtol=1e-3, atol=1e-4)


def test_repeated_sums_find_the_strongest_directions() -> None:
    """A power iteration: the error falls to that of the best approximation there is."""
    codec = LowRank(2, [("w.weight", (80, 60))])
    left, _ = torch.linalg.qr(random(80, 60))
    right, _ = torch.linalg.qr(random(60, 60, seed=1))
    values = torch.tensor([10.0, 5.0, *[1.0] * 58])
    matrix = (left * values) @ right.T
    whole = torch.empty(80 * 60)
    for _ in range(6):
        first = codec.first(matrix.reshape(-1))
        basis = codec.basis(first)
        second = codec.second(matrix.reshape(-1), basis)
        codec.whole(first, basis, second, whole)
        codec.learn(second)
    assert (whole.view(80, 60) - matrix).norm() <= 1.001 * math.sqrt(58)


def test_what_is_small_or_no_matrix_travels_as_it_is() -> None:
    codec = LowRank(2, SHAPES)
    gradient = random(NUM_ELEMENTS)
    (whole,), _ = all_reduce([codec], [gradient])
    edge = 0
    for name, shape in SHAPES:
        here = slice(edge, edge + math.prod(shape))
        exact = torch.equal(whole[here], gradient[here])
        assert exact == (len(shape) == 1 or "small" in name)
        edge = here.stop
    factors = 2 * (96 + 64 + 160 + 64 + 64 + 160)
    assert sum(codec.sizes) == factors + 64 + 16 * 64 + 160


@pytest.mark.parametrize("shapes", [[], [("norm.weight", (64,))], [("w.weight", (0, 64))], [("w.weight", (100, 100))]])
def test_stages_of_any_make(shapes: list) -> None:
    codec = LowRank(1, shapes)
    gradient = random(codec.num_elements)
    first = codec.first(gradient)
    basis = codec.basis(first)
    second = codec.second(gradient, basis)
    assert (first.numel(), second.numel()) == codec.sizes
    out = torch.full((codec.num_elements,), float("nan"))
    codec.whole(first, basis, second, out)
    codec.learn(second)
    assert bool(torch.isfinite(out).all()) and codec.directions.numel() == codec.sizes[1]


def test_nothing_is_summed_to_nothing() -> None:
    codec = LowRank(4, SHAPES)
    before = codec.directions
    (whole,), _ = all_reduce([codec], [torch.zeros(NUM_ELEMENTS)])
    assert not bool(whole.any()) and torch.equal(codec.directions, before)


@settings(deadline=None)
@given(
    rows=st.integers(1, 70),
    rank=st.integers(1, 6),
    seed=st.integers(0, 1000),
    scale=st.sampled_from([1e-18, 1.0, 1e18]),
)
def test_bases_are_orthonormal(rows: int, rank: int, seed: int, scale: float) -> None:
    columns = random(rows, rank, seed=seed) * scale
    if rank > 1:
        columns[:, -1] = columns[:, 0]  # one that adds nothing
    basis = orthonormal(columns).double()
    gram = basis.T @ basis
    kept = gram.diagonal() > 0.5
    assert torch.allclose(gram, torch.diag(kept.double()), atol=1e-6)
    assert int(kept.sum()) == min(rows, rank if rank == 1 else rank - 1)
    inside = basis @ (basis.T @ columns.double())
    assert (inside - columns.double()).norm() <= 1e-5 * columns.double().norm()


def test_bits_do_not_depend_on_threads() -> None:
    codec, before = LowRank(4, SHAPES), torch.get_num_threads()
    first, second = random(codec.sizes[0]), random(codec.sizes[1], seed=1)
    results = set()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            out = torch.empty(NUM_ELEMENTS)
            codec.whole(first, codec.basis(first), second, out)
            results.add(out.numpy().tobytes())
    finally:
        torch.set_num_threads(before)
    assert len(results) == 1


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (lambda saved: saved[:-1], RejectCode.BAD_SHAPE),
        (lambda saved: saved.double(), RejectCode.BAD_SHAPE),
        (lambda saved: saved * float("inf"), RejectCode.NON_FINITE),
    ],
)
def test_saved_directions_are_checked(spoil, code: RejectCode) -> None:
    codec, other = LowRank(2, SHAPES), LowRank(2, SHAPES)
    all_reduce([other], [random(NUM_ELEMENTS)])
    with pytest.raises(BadMessage) as caught:
        codec.take_over(spoil(other.directions))
    assert caught.value.code is code and torch.equal(codec.directions, LowRank(2, SHAPES).directions)
    codec.take_over(other.directions)
    assert torch.equal(codec.directions, other.directions)
