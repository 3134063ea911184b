"""The kernels of averaging have the reference's bits, and are used only where they do."""

from __future__ import annotations

import ctypes
import functools
import math
import platform
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from swarmnet.errors import BadMessage, Overflow
from swarmnet.manifest.schema import Optimizer
from swarmnet.messages import PRIME, Packed
from swarmnet.stage import optimizer
from swarmnet.stage.accumulator import largest_magnitude
from swarmnet.stage.rounding import LIMIT, FineRounding, Rectangle, SmallRounding, first_scales, next_scales
from swarmnet.stage.same_bits import squares
from swarmnet.sums import linear
from swarmnet.sums.sum_buffer import BLOCK_ELEMENTS, SumBuffer
from swarmnet.wire import codecs, kernel_build, kernel_check, kernels
from swarmnet.wire.kernels import Kernels

pytestmark = pytest.mark.skipif(kernel_build.compiler() is None, reason="there is no C++ compiler")

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
EDGES = st.sampled_from([0, -1, 2**31, 2**62, -(2**62), 2**63 - 1, -(2**63)])
SIZES = st.integers(0, 700) | st.sampled_from([64, 128, 256, 512, 1024, 1025])
PLACES = st.integers(0, 3)
"""Of the first element in its memory: no vector register's edge."""


WITHOUT = ("", "-mno-avx512f", "-mno-avx2") if platform.machine() == "x86_64" else ("",)
"""Processors of fewer instructions than this one: planes and products are written for each kind. Pieces for threads are
cut by code that all share."""


@pytest.fixture(scope="module", params=WITHOUT)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernels]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_build, "FLAGS", (*kernel_build.FLAGS, *request.param.split()))
        yield kernels.load(str(made(tmp_path_factory.mktemp("kernels"))), threads=1)


@pytest.fixture
def found(request: pytest.FixtureRequest, loaded: Kernels, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """With one thread under the first instruction set, and with two under the others."""
    monkeypatch.setattr(kernels, "_WORTH_A_THREAD", 32)  # so that short vectors are cut, too
    first = request.node.callspec.params["loaded"] == "" and len(WITHOUT) > 1
    return kernels.load(loaded.library._name, threads=1 if first else 2)


@pytest.mark.parametrize("value", [-(2**63), 2**63 - 1, -(2**31), -(2**63) + 2**31, 2**32 - 1])
def test_products_of_the_largest_numbers_fit_their_accumulators(found: Kernels, value: int) -> None:
    """A row and all columns of the largest residue, over more rows than are added up before a remainder is taken."""
    largest, size = PRIME - 1, 70 * 1024
    rows, columns = (torch.full((count,), largest, dtype=torch.int64) for count in (71, 1024))
    made = found.linear(torch.full((size,), value, dtype=torch.int64), 0, rows, columns)
    assert made == value * largest * largest * size % PRIME


def test_difficult_numbers_have_the_digest_that_is_asked_for(found: Kernels) -> None:
    assert kernel_check.digest(found) == kernel_check.DIGEST


def made(folder: Path) -> Path:
    compiler = kernel_build.compiler()
    assert compiler is not None
    return kernel_build.built(compiler, folder)


def vectors(dtype: str, numbers: st.SearchStrategy, fill: st.SearchStrategy) -> st.SearchStrategy[torch.Tensor]:
    arrays = SIZES.flatmap(lambda size: hnp.arrays(dtype, size, elements=numbers, fill=fill))
    return st.tuples(arrays, PLACES).map(lambda drawn: torch.from_numpy(drawn[0])[drawn[1] :])


def results(codec: str, x: torch.Tensor, found: Kernels | None) -> list[bytes]:
    """What encoding, decoding, of integers adding, and refusing damaged bytes give, with kernels or the reference."""

    def outcome(call: Callable[[], bytes]) -> bytes:
        try:
            return call()
        except (BadMessage, Overflow) as error:
            return repr(error).encode()

    def added(total: torch.Tensor, packed: Packed) -> bytes:
        return str(codecs.decode_integers(total, packed, add=True)).encode()

    with kernels.tried(found):
        told = [encoded := outcome(lambda: bytes(codecs.encode(codec, x).data))]
        for place, value in ((0, None), (0, 0xFF), (3, 0x80), (3, 0x7F), (len(encoded) // 2, 0x80), (-1, 0x80)):
            data = bytearray(encoded)
            if value is not None and place < len(data):
                data[place : place + 1 or None] = bytes([value])
            packed, total = Packed(codec, (x.numel(),), bytes(data)), x.flip(0)
            told.append(outcome(lambda packed=packed: codecs.decode(packed).numpy().tobytes()))
            if codec == "small":
                told.append(outcome(functools.partial(added, total, packed)))
                told.append(total.numpy().tobytes())  # as it was, if it was refused
    return told


def test_int8_is_equal_bit_by_bit(found: Kernels) -> None:
    @given(vectors("float32", FLOATS | st.sampled_from([np.nan, np.inf]), FLOATS))
    def law(x: torch.Tensor) -> None:
        assert results("int8", x, found) == results("int8", x, None)

    law()


def test_integers_are_equal_bit_by_bit(found: Kernels) -> None:
    numbers = EDGES | st.integers(-40, 40) | st.integers(-(2**63), 2**63 - 1)

    @given(vectors("int64", numbers, st.integers(-300, 300)))
    def law(x: torch.Tensor) -> None:
        assert results("small", x, found) == results("small", x, None)

    law()


@pytest.mark.parametrize("edge", [2**15 - 1, 2**15, -(2**15), -(2**15) - 1, 2**62, -(2**63)])
def test_a_sum_has_one_digest(found: Kernels, edge: int) -> None:
    """Whether a block is hashed in 16 bits follows from its numbers alone."""
    sum_buffer = SumBuffer(torch.arange(BLOCK_ELEMENTS + 100) % 1000 - 500)
    sum_buffer.flat[-7] = edge

    def digest(native: Kernels | None) -> bytes:
        sum_buffer.open()
        with kernels.tried(native):
            sum_buffer.written(0, sum_buffer.flat.numel())
            return sum_buffer.seal()

    assert digest(found) == digest(None)


def test_products_are_equal(found: Kernels) -> None:
    numbers = EDGES | st.integers(-40, 40) | st.integers(-(2**63), 2**63 - 1)

    @given(vectors("int64", numbers, st.integers(-300, 300)), st.integers(0, 3000), st.binary(max_size=2))
    def law(x: torch.Tensor, start: int, seed: bytes) -> None:
        vector = linear.drawn(seed, start + x.numel())
        with kernels.tried(None):
            expected = vector.product(x, start)
        with kernels.tried(found):
            assert vector.product(x, start) == expected

    law()


def test_squares_are_equal_bit_by_bit(found: Kernels) -> None:
    @given(vectors("float32", FLOATS, FLOATS))
    def law(x: torch.Tensor) -> None:
        for values, unit in ((x, 1.0), (x.double() / 3, 1.0), (x.view(-1).view(torch.int32).long() << 20, 2.0**-32)):
            with kernels.tried(found):
                told = squares(values, unit)
            assert np.float64(told).tobytes() == np.float64(squares(values, unit)).tobytes()

    law()


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_gradients_are_summed_and_sums_read_with_equal_bits(found: Kernels, data: st.DataObject) -> None:
    """On both grids, of a whole parameter and of a rank's block of it."""
    shape = rows, columns = data.draw(st.tuples(st.integers(1, 20), st.integers(1, 90)))
    some_rows, some_columns = (range(*sorted(data.draw(st.tuples(*2 * [st.integers(0, n)])))) for n in shape)
    block = Rectangle("w", columns, some_rows or range(rows), some_columns or range(columns))
    seed, index, step = data.draw(st.integers(0, 2**31)), data.draw(st.integers(0, 3)), data.draw(st.integers(0, 99))
    generator = torch.Generator().manual_seed(seed)
    size = len(block.rows) * len(block.columns)
    gradient = torch.randn(size, generator=generator) * 2.0 ** data.draw(st.integers(-140, 20))
    before = torch.randint(-(2**40), 2**40, (size,), generator=generator)
    scales = [torch.rand(n, generator=generator) + 2.0**-20 for n in shape]

    def told(native: Kernels | None) -> list[bytes]:
        with kernels.tried(native):
            made = [np.float64(largest_magnitude([gradient, -gradient[:3]])).tobytes()]
            for rounding in (FineRounding(32, 4), SmallRounding([block], scales, step=step)):
                total = before.clone()
                rounding.add(total, gradient, 0, index=index)
                made += [total.numpy().tobytes()]
                made += [piece.numpy().tobytes() for piece in rounding.values(total >> 20, 0, scale=1 / 3)]
            for each in (first_scales([before], [(size,)], counted=3, bits=32), _next(before)):
                made += [scale.numpy().tobytes() for scale in each]
        return made

    def _next(total: torch.Tensor) -> list[torch.Tensor]:
        used = [torch.ones(len(block.rows)), torch.ones(len(block.columns))]
        return next_scales([total >> 22], [(len(block.rows), len(block.columns))], used, used, counted=2)

    assert told(found) == told(None)


def test_a_dither_longer_than_a_row_begins_again(found: Kernels) -> None:
    columns = 2 * (1 << 16) + 3
    small = SmallRounding([Rectangle.whole("v", (columns,))], [torch.ones(1), torch.ones(columns)], step=1)
    totals = [torch.zeros(columns, dtype=torch.int64) for _ in range(2)]
    for native, total in zip((found, None), totals, strict=True):
        with kernels.tried(native):
            small.add(total, torch.linspace(-3000, 3000, columns), 0, index=1)
    assert torch.equal(*totals) and int(totals[0].max()) == LIMIT


@pytest.mark.parametrize("lead", [0.0, 1.5])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_an_update_is_equal_bit_by_bit(found: Kernels, lead: float, decay: float) -> None:
    @given(st.lists(vectors("float32", FLOATS, FLOATS), min_size=1, max_size=1), st.integers(1, 5))
    def law(drawn: list[torch.Tensor], step: int) -> None:
        gradient = drawn[0]
        ends = []
        for native in (found, None):
            state = [gradient.flip(0), gradient.roll(1), gradient.roll(2).abs()]
            with kernels.tried(native):
                optimizer.adamw(
                    *([each] for each in (state[0], gradient, *state[1:])),
                    step=step,
                    beta1=0.9,
                    beta1_product=0.9**step,
                    learning_rate=1e-3,
                    weight_decay=decay,
                    table=Optimizer(lead=lead),
                )
            ends.append([each.numpy() for each in state])
        assert all(np.array_equal(*pair, equal_nan=True) for pair in zip(*ends, strict=True))

    law()


def test_an_update_takes_as_many_threads_as_torch_has(loaded: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ranks.stage` gives torch this rank's share of all cores for an update in host memory."""
    asked: list[int] = []
    library = SimpleNamespace(adamw=lambda *arguments: asked.append(arguments[-1]))
    monkeypatch.setattr(kernels, "_WORTH_A_THREAD", 32)
    tensors = [torch.ones(320) for _ in range(4)]
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            replace(loaded, library=library).adamw(tensors[0], tensors[1], tensors[2], tensors[3], [0.0] * 9)
    finally:
        torch.set_num_threads(before)
    assert asked == [1, 3]


def test_who_keeps_a_cast_of_a_weight_is_told_of_an_update(found: Kernels) -> None:
    weight = torch.ones(70)
    state, before = [torch.zeros(70) for _ in range(3)], weight._version
    with kernels.tried(found):
        optimizer.adamw(
            [weight[:64]],
            *([each[:64]] for each in state),
            step=1,
            beta1=0.9,
            beta1_product=0.9,
            learning_rate=1e-3,
            weight_decay=0.1,
            table=Optimizer(),
        )
    assert weight._version > before


def test_a_gradient_that_is_not_finite_is_seen(found: Kernels) -> None:
    with kernels.tried(found):
        assert largest_magnitude([torch.tensor([1.0, -3.0]), torch.tensor([2.0])]) == 3.0
        assert math.isnan(largest_magnitude([torch.tensor([1.0, math.nan]), torch.tensor([math.inf])]))
        assert largest_magnitude([torch.tensor([-math.inf])]) == math.inf
        assert largest_magnitude([]) == largest_magnitude([torch.zeros(0)]) == 0.0


def test_lengths_that_fit_only_in_sum_are_refused(found: Kernels) -> None:
    """A block with three sparse planes of none, beside one with three planes: read as they say, it would be a crash."""
    packed = Packed("small", (128,), bytes([0xC0, 3, 0, 0, 0]))
    with kernels.tried(found), pytest.raises(BadMessage):
        codecs.decode(packed)


def test_the_largest_magnitude_decoded_is_told(found: Kernels) -> None:
    x = torch.tensor([3, -(2**63), 7] + [0] * 500)
    with kernels.tried(found):
        assert codecs.decode_integers(torch.zeros_like(x), codecs.encode("small", x), add=False) == 2**63
        total = torch.full_like(x, -1)
        with pytest.raises(Overflow):
            codecs.decode_integers(total, codecs.encode("small", x), add=True)
    assert bool((total == -1).all())


ROUNDED = (
    "template <int number> double rounded(double x) { return wrong == number ? std::round(x) : std::nearbyint(x); }"
)
WRONG = (
    ("std::nearbyint(std::sqrt(", "rounded<{}>(std::sqrt("),
    ("std::nearbyint(x[k] * per_unit)", "rounded<{}>(x[k] * per_unit)"),
    ("before + number", "before + number + (wrong == {} && number == 7)"),
    (">= SPARSE_BELOW", ">= (wrong == {} ? 5 : SPARSE_BELOW)"),
    ("shifted >> 16", "shifted >> (wrong == {} ? 17 : 16)"),
    ("i64 half = (n + 1) / 2;", "i64 half = wrong == {} ? n / 2 + 1 : (n + 1) / 2;"),
    ("(at + row * apart) % PERIOD", "(wrong == {} ? at : at + row * apart) % PERIOD"),
    ("first * u.ahead_kept", "(wrong == {} ? first : first * u.ahead_kept)"),
    ("static_cast<i128>(found) * rows[row]", "static_cast<i128>(found) * rows[wrong == {} ? 0 : row]"),
)
"""What is right, and what it becomes in kernels that are wrong in one place: at that number, from 1 on."""


def test_kernels_with_other_bits_have_another_digest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = kernel_build._SOURCE.read_text()
    for number, (right, other) in enumerate(WRONG, start=1):
        assert source.count(right) == 1
        source = source.replace(right, other.format(number))
    switch = f'#include <cmath>\nextern "C" {{ int wrong = 0; }}\n{ROUNDED}\n'
    unoptimised(switch + source, tmp_path, monkeypatch)
    found = kernels.load(str(made(tmp_path)), threads=1)
    digests = []
    for number in range(1 + len(WRONG)):
        ctypes.c_int.in_dll(found.library, "wrong").value = number
        digests.append(kernel_check.digest(found))
    assert digests[0] == kernel_check.DIGEST and digests.count(kernel_check.DIGEST) == 1


def unoptimised(source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are built of this."""
    (folder / "wrong.cpp").write_text(source)
    monkeypatch.setattr(kernel_build, "_SOURCE", folder / "wrong.cpp")
    monkeypatch.setattr(kernel_build, "_NICE", ())  # what waits for it is this test
    monkeypatch.setattr(kernel_build, "FLAGS", tuple(flag for flag in kernel_build.FLAGS if flag != "-O3"))


def test_kernels_with_another_digest_are_not_used(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unoptimised(kernel_build._SOURCE.read_text().replace("before + number", "before"), home, monkeypatch)
    for _ in range(2):  # as it was found before
        kernel_build.prepare(threads=1).join()
        (library,) = kernel_build.cache().glob("*.so")
        assert kernels._used is None and not library.stat().st_size


def test_what_is_not_contiguous_goes_to_the_reference(loaded: Kernels) -> None:
    with kernels.tried(loaded):
        assert kernels.of(torch.zeros(8)) is loaded
        assert kernels.of(torch.zeros(8)[::2]) is None


# ---------------------------------------------------------------- compiled once, and only by this user


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernels, "_used", None)
    return tmp_path


def test_it_is_compiled_once_and_then_used(home: Path, loaded: Kernels) -> None:
    folder = kernel_build.cache()
    place = folder / Path(loaded.library._name).name
    place.write_bytes(Path(loaded.library._name).read_bytes())
    place.chmod(0o700)
    kernel_build.prepare(threads=3).join()
    assert kernels._used is not None and kernels._used.threads == 3
    assert kernels._used.library._name == str(place)  # a name that follows from source, flags, compiler and processor
    assert folder.stat().st_mode & 0o777 == 0o700
    assert sorted(each.name for each in folder.iterdir()) == [place.name, "lock"]


@pytest.mark.parametrize("what", ["folder", "file"])
def test_nothing_is_loaded_that_another_user_could_have_written(home: Path, loaded: Kernels, what: str) -> None:
    folder = kernel_build.cache()
    place = folder / Path(loaded.library._name).name
    place.write_bytes(Path(loaded.library._name).read_bytes())
    place.chmod(0o700)
    (folder if what == "folder" else place).chmod(0o770)
    kernel_build.prepare(threads=1).join()
    assert kernels._used is None


def test_without_a_compiler_that_works_the_reference_stays(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("false", "no-such-compiler"):
        monkeypatch.setattr(kernel_build, "COMPILERS", (name,))
        kernel_build.prepare(threads=1).join()
        assert kernels._used is None
    assert codecs.encode("int8", torch.ones(3)).num_bytes == 7


def test_a_compiler_that_takes_too_long_leaves_no_process_behind(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes that it had started went on for minutes, and what it had written stayed."""
    slow, child = tmp_path / "slow-c++", tmp_path / "child"
    slow.write_text(f"#!/bin/sh\n[ $1 = --version ] && exit\nsleep 1000 & echo $! > {child}\nwait\n")
    slow.chmod(0o700)
    monkeypatch.setattr(kernel_build, "COMPILERS", (str(slow),))
    monkeypatch.setattr(kernel_build, "_COMPILE_S", 2.0)
    kernel_build.prepare(threads=1).join()
    state = Path(f"/proc/{int(child.read_text())}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"
    assert kernels._used is None and [each.name for each in kernel_build.cache().iterdir()] == ["lock"]


def test_a_refusal_is_the_references(loaded: Kernels) -> None:
    with kernels.tried(loaded), pytest.raises(BadMessage, match="NaN or infinity"):
        codecs.encode("int8", torch.tensor([1.0, float("nan")]))
