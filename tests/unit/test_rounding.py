"""The small grid: unbiased, the same for everybody, and as its page says."""

import math
import weakref
import zlib

import numpy as np
import pytest
import torch

from swarmnet.errors import BadMessage
from swarmnet.ids import PeerId
from swarmnet.manifest.schema import Averaging, Numerics
from swarmnet.stage import rounding
from swarmnet.stage.interfaces import Contribution
from swarmnet.stage.rounding import FINENESS, LIMIT, FineRounding, Rectangle, SmallRounding, first_scales, next_scales
from swarmnet.sums.reducer import integer_sum
from swarmnet.wire import codecs

PARAMETERS = [("embed.weight", (40, 16)), ("norm.weight", (24,)), ("layer.weight", (12, 33))]
SHAPES = [shape for _, shape in PARAMETERS]
BITS = 32


def dither(step, index, name, num_elements):
    found = torch.zeros(num_elements)
    rounding._add_run(found, rounding._dither(index, torch.device("cpu")), rounding._offset(step, name))
    return found


def gradients(seed, scale=1e-3):
    rng = torch.Generator().manual_seed(seed)
    found = []
    for _, shape in PARAMETERS:
        rows = torch.logspace(-1, 1, shape[0]).view(-1, *[1] * (len(shape) - 1))
        found.append((torch.randn(shape, generator=rng) * rows * scale).reshape(-1))
    return found


def summed(grid, microbatches):
    totals = [torch.zeros(math.prod(shape), dtype=torch.int64) for shape in SHAPES]
    for index in microbatches:
        for place, gradient in enumerate(gradients(index)):
            grid.add(totals[place], gradient, place, index=index)
    return totals


def grid_of(scales, step=1):
    return SmallRounding([Rectangle.whole(name, shape) for name, shape in PARAMETERS], scales, step=step)


FIRST = first_scales(summed(FineRounding(BITS, 8), range(8)), SHAPES, counted=8, bits=BITS)


def by_hand(total, shape, a_used, b_used, a_newest, b_newest, counted):
    """The page's formulas, element by element."""
    rows, columns = (shape[0], shape[1]) if len(shape) > 1 else (1, shape[0])
    s = [[int(total[i * columns + j]) ** 2 for j in range(columns)] for i in range(rows)]
    unit = counted * FINENESS**2
    r = [sum(row) / unit / columns for row in s]
    k = [sum(s[i][j] for i in range(rows)) / unit / rows for j in range(columns)]
    t = math.fsum(sum(row) / unit for row in s) / (rows * columns)
    a = [(float(a_newest[i]) ** 2 + r[i] * float(a_used[i]) ** 2) / 2 for i in range(rows)]
    b = [(float(b_newest[j]) ** 2 + k[j] / t * float(b_used[j]) ** 2) / 2 for j in range(columns)]
    if len(shape) == 1:
        b = [1.0] * columns
    return [np.float32(math.sqrt(max(x, math.fsum(found) / len(found) / 256))) for found in (a, b) for x in found]


def murmur(x):
    x = ((x ^ x >> 16) * 0x85EBCA6B) % 2**32
    x = ((x ^ x >> 13) * 0xC2B2AE35) % 2**32
    return x ^ x >> 16


def test_a_gradient_is_rounded_as_the_page_says():
    gradient, f = gradients(3)[0], np.float32
    total = torch.zeros(640, dtype=torch.int64)
    grid_of(FIRST, step=7).add(total, gradient, 0, index=5)
    u = dither(7, 5, "embed.weight", 640).numpy()
    for e in range(640):
        a, b = (f(1 / float(scale)) for scale in (FIRST[0][e // 16], FIRST[1][e % 16]))
        assert int(total[e]) == max(-2047, min(2047, math.floor(f(f(f(gradient[e]) * a) * b) + u[e])))


def test_the_sum_is_the_same_in_any_order_and_grouping():
    grid = grid_of(FIRST)
    whole = summed(grid, range(8))
    parts = [summed(grid, some) for some in ((7, 2), (0, 5, 1), (6,), (4, 3))]
    for place, total in enumerate(whole):
        assert torch.equal(total, sum(part[place] for part in parts))


def test_a_microbatch_is_about_two_grid_steps_long_and_its_mean_error_is_none():
    grid, scale = grid_of(FIRST), []
    one = summed(grid, [3])
    for total in one:
        scale.append(float(total.double().square().mean().sqrt()))
    assert all(1.0 < each < 4.0 for each in scale)
    # The same gradient many times: what is rounded up in one microbatch is rounded down in another.
    gradient, total = gradients(3)[0], torch.zeros(640, dtype=torch.int64)
    for index in range(64):
        grid.add(total, gradient, 0, index=index)
    (values,) = grid.values(total, 0, scale=1 / 64)
    steps = (values - gradient).view(40, 16) / (FIRST[0][:, None] * FIRST[1])
    assert float(steps.abs().max()) < 0.05


def test_scales_follow_the_formulas_of_the_page():
    totals = summed(grid_of(FIRST), range(8))
    newest = tuple(scale * 1.5 for scale in FIRST)
    found = next_scales(totals, SHAPES, FIRST, newest, counted=8)
    for place, (total, shape) in enumerate(zip(totals, SHAPES, strict=True)):
        at = slice(2 * place, 2 * place + 2)
        if len(shape) == 1:
            newest_b = FIRST[at][1]
            expected = by_hand(total, shape, *FIRST[at], newest[at][0], newest_b, 8)
            got = torch.cat(next_scales(totals, SHAPES, FIRST, (*newest[:3], newest_b, *newest[4:]), counted=8)[at])
        else:
            expected = by_hand(total, shape, *FIRST[at], *newest[at], 8)
            got = torch.cat(found[at])
        assert torch.allclose(got, torch.tensor(np.array(expected)), rtol=1e-6)


def test_after_the_first_step_the_grid_fits_its_gradients():
    for place, shape in enumerate(SHAPES):
        total = summed(FineRounding(BITS, 8), range(8))[place].double().view(shape) * 2.0**-BITS
        a, b = FIRST[2 * place], FIRST[2 * place + 1]
        steps = total / (a[:, None] * b if len(shape) > 1 else a * b)
        assert 0.7 < float(steps.square().mean()) / (8 * FINENESS**2) < 1.4


def test_a_row_without_gradients_keeps_a_step_that_a_later_gradient_fits():
    gradient = gradients(0)[0].view(40, 16).clone()
    gradient[7] = 0
    total = torch.zeros(640, dtype=torch.int64)
    FineRounding(BITS, 1).add(total, gradient.view(-1), 0, index=0)
    rows, _ = first_scales([total], [SHAPES[0]], counted=1, bits=BITS)
    assert float(rows[7]) >= 0.99 * float(rows.double().square().mean().sqrt()) / 16


def test_a_gradient_beyond_the_limit_is_cut_off_and_one_that_is_not_finite_refused():
    grid, total = grid_of(FIRST), torch.zeros(640, dtype=torch.int64)
    grid.add(total, torch.full((640,), 1e20), 0, index=0)
    assert bool((total == LIMIT).all())
    with pytest.raises(BadMessage):
        grid.check(math.nan, 0)


def test_after_a_burst_the_grid_fits_within_two_steps():
    scales = FIRST

    def burst(grid):
        totals = [torch.zeros(math.prod(shape), dtype=torch.int64) for shape in SHAPES]
        for index in range(8):
            for place, gradient in enumerate(gradients(index, scale=1.0)):
                grid.add(totals[place], gradient, place, index=index)
        return totals

    assert max(int(total.abs().max()) for total in burst(grid_of(scales))) > LIMIT, "a thousand times longer"
    for _ in range(2):
        scales = next_scales(burst(grid_of(scales)), SHAPES, scales, scales, counted=8)
    for total in burst(grid_of(scales)):
        assert 0.5 < float(total.double().square().mean().sqrt()) / (8**0.5 * FINENESS) < 3


def test_what_clipping_throws_away_makes_the_grid_no_coarser():
    """One member sends the largest sums that are taken, for thirty steps. Then the others' gradients fit again."""
    scales, clip = FIRST, norm_of(FIRST, summed(grid_of(FIRST), range(8)))
    largest = [torch.full((math.prod(shape),), 8 * LIMIT, dtype=torch.int64) for shape in SHAPES]
    for _ in range(30):
        clipped = min(1.0, clip / norm_of(scales, largest))
        scales = next_scales(largest, SHAPES, scales, scales, counted=8, clipped=clipped)
    assert all(float((now / first).max()) < 64 for now, first in zip(scales[::2], FIRST[::2], strict=True))
    for _ in range(16):
        scales = next_scales(summed(grid_of(scales), range(8)), SHAPES, scales, scales, counted=8)
    steps = summed(grid_of(scales), [1])
    assert all(0.5 < float(total.double().square().mean().sqrt()) < 6 for total in steps)


def norm_of(scales, totals) -> float:
    grid = grid_of(scales)
    lengths = [sum(float(v.square().sum()) for v in grid.values(total, at)) for at, total in enumerate(totals)]
    return math.sqrt(sum(lengths))


def test_nobody_adds_more_than_its_microbatches_can():
    sums = torch.tensor([3, -2 * LIMIT, 0]), torch.tensor([1, 2 * LIMIT + 1, 0])
    honest, liar = (
        Contribution(PeerId(name), 2, codecs.encode("small", total)) for name, total in zip("hl", sums, strict=True)
    )
    most = grid_of(FIRST).most
    assert integer_sum([honest, honest], 3, most=most).tolist() == [6, -4 * LIMIT, 0]
    with pytest.raises(BadMessage) as refused:
        integer_sum([honest, liar], 3, most=most)
    assert refused.value.facts["peer"] == "l"


def test_no_gradient_at_all_leaves_a_grid_that_later_ones_can_use():
    zeros = [torch.zeros(math.prod(shape), dtype=torch.int64) for shape in SHAPES]
    scales = first_scales(zeros, SHAPES, counted=8, bits=BITS)
    for _ in range(50):
        scales = next_scales(zeros, SHAPES, scales, scales, counted=8)
    assert all(bool((scale > 0).all()) for scale in scales)
    for _ in range(60):  # then they come, and the grid follows
        scales = next_scales(summed(grid_of(scales), range(8)), SHAPES, scales, scales, counted=8)
    steps = summed(grid_of(scales), [1])
    assert all(0.5 < float(total.double().square().mean().sqrt()) < 6 for total in steps)


def test_chunks_change_no_bit(monkeypatch):
    def everything():
        totals = summed(grid_of(FIRST), range(3))
        values = [torch.cat(list(grid_of(FIRST).values(total, at, scale=0.3))) for at, total in enumerate(totals)]
        return [*totals, *values, *next_scales(totals, SHAPES, FIRST, FIRST, counted=3)]

    whole = everything()
    monkeypatch.setattr(rounding, "_CPU_CHUNK", 50)
    for one, other in zip(whole, everything(), strict=True):
        assert torch.equal(one, other)


def test_dither_is_the_same_everywhere_and_spreads_evenly():
    offset = murmur(zlib.crc32(b"embed.weight") + 5)
    by_hand = [(murmur((offset + e) % 2**16) + 4 * 10368890) % 2**24 for e in range(9)]
    assert [round(float(each) * 2**24) for each in dither(5, 3, "embed.weight", 9)] == by_hand
    once = dither(5, 3, "embed.weight", 1 << 16)
    assert abs(float(once.double().mean()) - 0.5) < 0.01 and float(once.max()) < 1
    over = torch.stack([dither(5, index, "x", 8) for index in range(34)])
    # A golden ratio apart: no two microbatches of 34 are closer than that in any element.
    gaps = over.sort(dim=0).values.diff(dim=0)
    assert float(gaps.min()) > 0.5 / 34


@pytest.mark.parametrize("late", [0, 1])
def test_whoever_only_reads_the_scales_keeps_the_grids_of_open_steps_alone(late: int) -> None:
    averaging = Averaging(codec="small", sync="overlap" if late else "exact")
    shapes = dict(PARAMETERS)
    memory = torch.ones(1 + averaging.delay.most, rounding.num_scales(averaging, shapes))
    grids = rounding.Roundings(Numerics(), averaging, shapes, terms=8, memory=memory)
    made = [weakref.ref(grids.of(step)) for step in range(20)]
    assert sum(grid() is not None for grid in made) == len(memory)
    assert grids.of(19) is made[19](), "an open step has one grid"
