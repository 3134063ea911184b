"""The kernels of averaging have the reference's bits, and are used only where they do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from swarmnet.errors import BadMessage, Overflow
from swarmnet.stage.same_bits import squares
from swarmnet.wire import codecs, kernel_build, kernels
from swarmnet.wire.kernel_check import results
from swarmnet.wire.kernels import FAMILIES, Kernels

pytestmark = pytest.mark.skipif(kernel_build.compiler() is None, reason="there is no C++ compiler")

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
EDGES = st.sampled_from([0, -1, 2**31, 2**62, -(2**62), 2**63 - 1, -(2**63)])
SIZES = st.integers(0, 700) | st.sampled_from([64, 128, 256, 512, 1024, 1025])
PLACES = st.integers(0, 3)
"""Of the first element in its memory: no vector register's edge."""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    return kernels.load(str(made(tmp_path_factory.mktemp("kernels"))), frozenset(FAMILIES), threads=1)


@pytest.fixture(params=[1, 2], ids=lambda threads: f"{threads} threads")
def found(request: pytest.FixtureRequest, loaded: Kernels, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    monkeypatch.setattr(kernels, "_WORTH_A_THREAD", 32)  # so that short vectors are cut, too
    return kernels.load(loaded.library._name, loaded.families, threads=request.param)


def made(folder: Path) -> Path:
    compiler = kernel_build.compiler()
    assert compiler is not None
    return kernel_build.built(compiler, folder)


def vectors(dtype: str, numbers: st.SearchStrategy, fill: st.SearchStrategy) -> st.SearchStrategy[torch.Tensor]:
    arrays = SIZES.flatmap(lambda size: hnp.arrays(dtype, size, elements=numbers, fill=fill))
    return st.tuples(arrays, PLACES).map(lambda drawn: torch.from_numpy(drawn[0])[drawn[1] :])


def test_int8_is_equal_bit_by_bit(found: Kernels) -> None:
    @given(vectors("float32", FLOATS | st.sampled_from([np.nan, np.inf]), FLOATS))
    def law(x: torch.Tensor) -> None:
        assert results("int8", x, found) == results("int8", x, None)

    law()


@pytest.mark.parametrize("codec", ["int64", "small"])
def test_integers_are_equal_bit_by_bit(found: Kernels, codec: str) -> None:
    numbers = EDGES | st.integers(-40, 40) | st.integers(-(2**63), 2**63 - 1)

    @given(vectors("int64", numbers, st.integers(-300, 300)))
    def law(x: torch.Tensor) -> None:
        assert results(codec, x, found) == results(codec, x, None)

    law()


def test_squares_are_equal_bit_by_bit(found: Kernels) -> None:
    @given(vectors("float32", FLOATS, FLOATS))
    def law(x: torch.Tensor) -> None:
        for values in (x, x.double() / 3):
            with kernels.tried(found):
                told = squares(values)
            assert np.float64(told).tobytes() == np.float64(squares(values)).tobytes()

    law()


@pytest.mark.parametrize("codec", ["int64", "small"])
def test_the_largest_magnitude_decoded_is_told(found: Kernels, codec: str) -> None:
    x = torch.tensor([3, -(2**63), 7] + [0] * 500)
    with kernels.tried(found):
        assert codecs.decode_integers(torch.zeros_like(x), codecs.encode(codec, x), add=False) == 2**63
        total = torch.full_like(x, -1)
        with pytest.raises(Overflow):
            codecs.decode_integers(total, codecs.encode(codec, x), add=True)
    assert bool((total == -1).all())


def test_a_family_with_other_bits_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {
        "std::nearbyint(": "std::round(",
        "before + number": "before + number + (number == 7)",
        "SPARSE_BELOW = 6": "SPARSE_BELOW = 5",
        "i64 half = (n + 1) / 2;": "i64 half = n / 2 + 1;",
    }
    source = kernel_build._SOURCE.read_text()
    for right, other in wrong.items():
        assert right in source
        source = source.replace(right, other)
    (tmp_path / "wrong.cpp").write_text(source)
    monkeypatch.setattr(kernel_build, "_SOURCE", tmp_path / "wrong.cpp")
    monkeypatch.setattr(kernel_build, "FLAGS", tuple(flag for flag in kernel_build.FLAGS if flag != "-O3"))
    library = kernels.load(str(made(tmp_path)), frozenset(FAMILIES), threads=1)
    assert not kernel_build.checked(library).families


def test_what_is_not_contiguous_goes_to_the_reference(loaded: Kernels) -> None:
    with kernels.tried(loaded):
        assert kernels.of("int8", torch.zeros(8)) is loaded
        assert kernels.of("int8", torch.zeros(8)[::2]) is None


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
    assert kernels._used is not None and kernels._used.families == set(FAMILIES) and kernels._used.threads == 3
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


def test_a_refusal_is_the_references(loaded: Kernels) -> None:
    with kernels.tried(loaded), pytest.raises(BadMessage, match="NaN or infinity"):
        codecs.encode("int8", torch.tensor([1.0, float("nan")]))
