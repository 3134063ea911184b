"""An update, bit by bit, against NumPy: the arithmetic of docs/numerics.md, written once more and without pieces."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from swarmnet.manifest.schema import NO_DELAY, Averaging, Delay, Numerics, Optimizer
from swarmnet.stage.optimizer import StageOptimizer, average, probe, square_norm
from swarmnet.stage.optimizer_8bit import BLOCK, LEAST
from swarmnet.stage.rounding import FineRounding, NoRounding, Rounding, Roundings
from swarmnet.stage.same_bits import cosine, power, summed

F = np.float32
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
HOSTILE = [0.0, -0.0, 2**-149, -(2**-149), 2**-127, 2**-126, 1e-30, -1e-20, 1e-8, 1 / 3, 1.0, -1.0 - 2**-23, 7e4, -3e18]
"""Subnormals, which must not become 0, the least normal number, and some whose square leaves the range below."""


def hostile(seed: int, size: int, largest: float = math.inf) -> np.ndarray:
    """Numbers of all sizes, `HOSTILE` ones among them."""
    rng = np.random.default_rng(seed)
    found = (rng.standard_normal(size) * np.exp2(rng.integers(-149, 50, size))).astype(F)
    found[rng.random(size) < 0.3] = rng.choice(np.array(HOSTILE, F))
    return np.clip(found, -largest, largest).astype(F)


def bits(values: np.ndarray | torch.Tensor) -> np.ndarray:
    """So that -0.0 is not 0.0."""
    array = values.cpu().numpy() if isinstance(values, torch.Tensor) else values
    return array.reshape(-1).view(f"u{array.itemsize}")


# ---------------------------------------------------------------- the reference


class Reference:
    """One parameter under AdamW. State is fp32, or what is left of it in blocks of 8 bits."""

    def __init__(self, weight: np.ndarray, table: Optimizer, delay: Delay) -> None:
        self.w, self.table, self.delay = weight.copy(), table, delay
        self.m, self.v = np.zeros_like(weight), np.zeros_like(weight)

    def step(self, g: np.ndarray, t: int, rate: float, decay: float) -> None:
        table, one = self.table, 1.0
        beta1, product = table.beta1, by_products(table.beta1, t)
        if self.delay.most and t > self.delay.since and table.lead:
            beta1 = 3.6 * beta1 / (one - beta1 + 3.6 * beta1)
            product = by_products(table.beta1, self.delay.since) * by_products(beta1, t - self.delay.since)
        bias, rooted = one - product, math.sqrt(one - by_products(table.beta2, t))
        self.m = self.m * F(beta1) + g * F(one - beta1)
        self.v = self.v * F(table.beta2) + g * g * F(one - table.beta2)
        ahead = 0.0
        if t > 1 and table.lead:
            ahead = table.lead * (one - beta1) / (beta1 - product)
        moved = self.m * F(one - ahead) + g * F(ahead * bias) if ahead else self.m
        moved = moved / (np.sqrt(self.v) + F(table.eps * rooted)) * F(rate * rooted / bias)
        self.w = (self.w * F(one - rate * decay) if decay else self.w) - moved
        if table.state == "8bit" and g.size >= LEAST:
            self.m = packed(self.m, 127, 2.0**-100)
            self.v = packed(np.sqrt(self.v), 255, 2.0**-46) ** 2


def packed(values: np.ndarray, codes: int, floor: float) -> np.ndarray:
    """What a block's codes bring back."""
    blocks = np.pad(values.reshape(-1), (0, -values.size % BLOCK)).reshape(-1, BLOCK)
    largest = np.maximum(np.abs(blocks).max(1, keepdims=True), F(floor))
    parts = blocks / largest
    code = np.copysign(np.rint(np.sqrt(np.abs(parts)) * F(codes)), parts)
    if codes == 255:  # of the second moment, which stays above zero
        code = np.maximum(code, (parts > 0).astype(F))
    code = code + F(0)  # an integer has no -0
    return (code * np.abs(code) / F(codes**2) * largest).reshape(-1)[: values.size].reshape(values.shape)


def by_products(base: float, exponent: int) -> float:
    found, square = 1.0, base
    for digit in reversed(bin(exponent)[2:]):
        found = found * square if digit == "1" else found
        square *= square
    return found


def halved(squares: np.ndarray) -> float:
    while len(squares) > 1:
        second = squares[(len(squares) + 1) // 2 :]
        first = squares[: (len(squares) + 1) // 2].copy()
        first[: len(second)] += second
        squares = first
    return float(squares[0])


# ---------------------------------------------------------------- updates


def compare(
    shape: tuple[int, ...], table: Optimizer, seed: int, *, device: str, first_step: int = 0, delay: Delay = NO_DELAY
) -> None:
    """Three steps of the product's optimizer and the reference's."""
    size = math.prod(shape)
    weight = hostile(seed, size).reshape(shape)
    reference, live = Reference(weight, table, delay), torch.from_numpy(weight.copy()).to(device)
    optimizer = StageOptimizer([live], table, delay=delay)
    optimizer.set_num_steps(first_step)
    with np.errstate(all="ignore"):
        for number in range(3):
            gradient = hostile(seed + 1 + number, size, 2.0**60).reshape(shape)
            rate = table.learning_rate / (number + 1)
            optimizer.step([torch.from_numpy(gradient.copy()).to(device)], learning_rate=rate)
            reference.step(gradient, first_step + number + 1, rate, table.weight_decay if len(shape) > 1 else 0.0)
            found = zip((live, *optimizer.moments[0].read()), (reference.w, reference.m, reference.v), strict=True)
            for ours, theirs in found:
                assert np.isfinite(theirs).all()
                np.testing.assert_array_equal(bits(ours), bits(theirs))


tables = st.builds(
    Optimizer,
    learning_rate=st.floats(1e-6, 0.3),
    beta1=st.floats(0.1, 0.999),
    beta2=st.floats(0.0, 0.9999),
    lead=st.sampled_from([0.0, 0.5, 2.5, 9.0]),
    eps=st.floats(1e-12, 1e-3),
    weight_decay=st.sampled_from([0.0, 0.1, 1.0]),
    state=st.sampled_from(["fp32", "8bit"]),
)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=25, deadline=None)
@given(
    shape=st.sampled_from([(1,), (7,), (129,), (3, 5), (33, 131), (5000,), (70, 1001)]),
    table=tables,
    seed=st.integers(0, 2**32),
    first_step=st.sampled_from([0, 1, 17, 100_000]),
    delay=st.sampled_from([NO_DELAY, Delay(1, 0), Delay(1, 2), Delay(1, 18)]),
)
@example(shape=(40, 1024), table=Optimizer(state="8bit", lead=2.5), seed=3, first_step=0, delay=Delay(1, 1))
def test_an_update_is_numpys_bit_by_bit(
    device: str, shape: tuple[int, ...], table: Optimizer, seed: int, first_step: int, delay: Delay
) -> None:
    compare(shape, table, seed, device=device, first_step=first_step, delay=delay)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=15, deadline=None)
@given(
    count=st.integers(1, 70_000), seed=st.integers(0, 2**32), scale=st.floats(1e-12, 1e3), bits_of=st.integers(8, 48)
)
def test_what_a_sum_stands_for_and_its_norm_are_numpys(
    device: str, count: int, seed: int, scale: float, bits_of: int
) -> None:
    rng = np.random.default_rng(seed)
    integers = rng.integers(-(2**62), 2**62, count) >> rng.integers(0, 62, count)
    floats = hostile(seed, count, 2.0**96)

    def found(total: np.ndarray, rounding: Rounding) -> tuple[torch.Tensor, float]:
        held, out = torch.from_numpy(total).to(device), torch.empty(count, device=device)
        average(held, out, scale=scale, rounding=rounding, place=0)
        # A round's sum rests in host memory, and its norm is taken there.
        return out, square_norm(held.cpu(), rounding=rounding, place=0)

    mean, norm = found(integers, FineRounding(bits_of, 1))
    np.testing.assert_array_equal(bits(mean), bits((integers.astype(float) * (scale * 2.0**-bits_of)).astype(F)))
    squares = (integers.astype(float) * 2.0**-bits_of) ** 2
    assert norm == sum(halved(squares[at : at + 65536]) for at in range(0, count, 65536))
    mean, norm = found(floats, NoRounding())
    np.testing.assert_array_equal(bits(mean), bits(floats * F(scale)))
    assert norm == sum(halved(floats[at : at + 65536].astype(float) ** 2) for at in range(0, count, 65536))


@pytest.mark.parametrize("device", DEVICES)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 40), columns=st.integers(1, 50), scale=st.floats(1e-9, 1e3))
@settings(max_examples=15, deadline=None)
def test_a_small_sum_stands_for_what_numpy_says(device: str, seed: int, rows: int, columns: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    shape = {"w": torch.Size((rows, columns))}
    a, b = (
        np.abs(rng.standard_normal(n) * np.exp2(rng.integers(-40, 3, n))).astype(F) + F(1e-30) for n in (rows, columns)
    )
    memory = torch.from_numpy(np.concatenate([a, b])[None].copy())
    grid = Roundings(Numerics(), Averaging(codec="small"), shape, terms=1, memory=memory).of(0)
    total = rng.integers(-(2**21), 2**21, (rows, columns))
    out = torch.empty(rows * columns, device=device)
    average(torch.from_numpy(total.reshape(-1)).to(device), out, scale=scale, rounding=grid, place=0)
    np.testing.assert_array_equal(bits(out), bits(total.astype(F) * a[:, None] * b * F(scale)))


# ---------------------------------------------------------------- numbers of the host


@given(st.floats(0, 1, exclude_max=True), st.integers(0, 10**6))
def test_powers_are_products_and_close(base: float, exponent: int) -> None:
    assert power(base, exponent) == by_products(base, exponent)
    assert power(base, exponent) == pytest.approx(base**exponent, rel=1e-9, abs=1e-300)


@given(st.floats(0, math.pi))
def test_a_cosine_is_close(angle: float) -> None:
    assert cosine(angle) == pytest.approx(math.cos(angle), abs=4e-15)
    assert cosine(0.0) == 1.0


@given(st.lists(st.floats(0, 1e200), max_size=70))
def test_a_sum_by_halves_is_a_sum(terms: list[float]) -> None:
    assert summed(torch.tensor(terms, dtype=torch.float64)) == pytest.approx(math.fsum(terms), rel=1e-14)


# ---------------------------------------------------------------- other processors

PROBES = {"fp32": "41d3c213", "8bit": "e8715d83"}
"""What every machine finds. Other digits mean other weights: replicas of two such releases cannot share a stage."""


@pytest.mark.parametrize("device", DEVICES)
def test_the_probes_digits_are_those_of_every_machine(device: str) -> None:
    for state, digits in PROBES.items():
        assert probe(Optimizer(state=state), torch.device(device)) == digits


def test_the_probe_tells_who_flushes_small_numbers() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush them")
    try:
        assert probe(Optimizer(), torch.device("cpu")) != PROBES["fp32"]
    finally:
        torch.set_flush_denormal(False)


def test_kernels_of_other_processors_have_the_same_bits() -> None:
    """torch has kernels for several widths of vectors, and takes them by the processor: here it is told which."""
    script = (
        "import torch\nfrom swarmnet.manifest.schema import Optimizer\nfrom swarmnet.stage.optimizer import probe\n"
        "print(torch.backends.cpu.get_cpu_capability())\n"
        "print({state: probe(Optimizer(state=state), torch.device('cpu')) for state in ('fp32', '8bit')})"
    )
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "default", "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == ["DEFAULT", str(PROBES)]
