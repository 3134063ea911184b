"""The bytes of the newer codecs, what they refuse, and how they stand beside the originals they follow."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from swarmnet.errors import BadMessage, RejectCode
from swarmnet.messages import Packed
from swarmnet.wire import codecs
from swarmnet.wire.codec_blocks import BNB8, NF4, dynamic_map
from swarmnet.wire.codec_sparse import BLOCK

MAX32 = torch.finfo(torch.float32).max


def random(size: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def refusal(packed: Packed) -> RejectCode | None:
    """What decoding and adding say; they say the same, and a refused sum is untouched."""
    total = torch.ones(packed.shape)
    with pytest.raises(BadMessage) as added:
        codecs.add_decoded(total, packed)
    with pytest.raises(BadMessage) as decoded:
        codecs.decode(packed)
    assert torch.equal(total, torch.ones(packed.shape)) and added.value.code is decoded.value.code
    return decoded.value.code


# ---------------------------------------------------------------- fp16


def test_fp16_bytes() -> None:
    """3.0 lies in [2^14, 2^15) after 2^13: a scale of 2^-13, and halves of 24576, -4096 and 0."""
    packed = codecs.encode("fp16", torch.tensor([3.0, -0.5, 0.0]))
    assert bytes(packed.data) == struct.pack("<f3e", 2.0**-13, 24576.0, -4096.0, 0.0)
    assert codecs.decode(packed).tolist() == [3.0, -0.5, 0.0]


@pytest.mark.parametrize("value", [1e-20, 1.0, 65504.0, 1e6, 1e30, MAX32, 2.0**-80, 2.0**-80 * (1 - 2**-13)])
def test_fp16_has_no_range_of_its_own(value: float) -> None:
    decoded = codecs.decode(codecs.encode("fp16", torch.tensor([value, -value, value / 3])))
    assert torch.allclose(decoded.double(), torch.tensor([value, -value, value / 3]).double(), rtol=2**-11, atol=0)


def test_fp16_halves_agree_with_torchs_where_it_has_range() -> None:
    x = random(5000)
    assert torch.equal(codecs.decode(codecs.encode("fp16", x)), x.half().float()) or bool(
        ((codecs.decode(codecs.encode("fp16", x)) - x).abs() <= (x.half().float() - x).abs()).all()
    )  # halves below 2^-14 are coarser; ours are not


@pytest.mark.parametrize(
    ("scale", "code", "expected"),
    [
        (3.0, 0, RejectCode.MALFORMED),
        (-1.0, 0, RejectCode.MALFORMED),
        (0.0, 0, RejectCode.MALFORMED),
        (2.0**-95, 0, RejectCode.MALFORMED),
        (2.0**114, 0, RejectCode.MALFORMED),
        (float("inf"), 0, RejectCode.NON_FINITE),
        (float("nan"), 0, RejectCode.NON_FINITE),
        (1.0, 0x7C00, RejectCode.NON_FINITE),
        (1.0, 0xFE01, RejectCode.NON_FINITE),
        (1.0, 0x7800, RejectCode.MALFORMED),
        (1.0, 0xF800, RejectCode.MALFORMED),
    ],
)
def test_fp16_refuses_what_no_encoder_writes(scale: float, code: int, expected: RejectCode) -> None:
    assert refusal(Packed("fp16", (1,), struct.pack("<fH", scale, code))) is expected


def test_the_largest_fp16_numbers_decode_to_finite_ones() -> None:
    packed = Packed("fp16", (2,), struct.pack("<f2H", 2.0**113, 0x77FF, 0xF7FF))
    assert codecs.decode(packed).tolist() == [2.0**128 - 2.0**117, -(2.0**128 - 2.0**117)]


# ---------------------------------------------------------------- bnb8, nf4


def test_our_tables_are_those_of_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    assert torch.allclose(torch.tensor(dynamic_map()), functional.create_dynamic_map(), rtol=1e-6, atol=1e-9)
    _, state = functional.quantize_4bit(torch.ones(64), blocksize=64, quant_type="nf4")
    assert state.code.tolist() == torch.tensor(NF4.numbers).tolist()


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e5])
def test_8_bits_are_as_close_as_bitsandbytes_own(scale: float) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    x = random(100_000) * scale
    ours = codecs.decode(codecs.encode("bnb8", x))
    theirs = functional.dequantize_blockwise(*functional.quantize_blockwise(x, blocksize=256))
    assert (ours - x).norm() <= 1.002 * (theirs - x).norm()


def test_4_bits_are_as_close_as_bitsandbytes_own() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    x = random(100_000)
    ours = codecs.decode(codecs.encode("nf4", x))
    codes, state = functional.quantize_4bit(x, blocksize=64, quant_type="nf4")
    theirs = functional.dequantize_4bit(codes, state)
    assert (ours - x).norm() <= 1.002 * (theirs - x).norm()
    assert float((ours == theirs).float().mean()) > 0.998  # the rest are ties of fp16


def test_4_bit_bytes() -> None:
    packed = codecs.encode("nf4", torch.tensor([2.0, -2.0, 0.0]))
    assert bytes(packed.data) == struct.pack("<f", 2.0) + bytes([15 << 4 | 0, 7 << 4])
    assert codecs.decode(packed).tolist() == [2.0, -2.0, 0.0]


def test_8_bit_scales_have_the_sign_of_the_largest() -> None:
    packed = codecs.encode("bnb8", torch.tensor([-2.0, 1.9, 0.0]))
    assert struct.unpack("<f", bytes(packed.data[:4])) == (-2.0,)
    assert codecs.decode(packed).tolist() == pytest.approx([-2.0, 1.9, 0.0], abs=0.03)
    assert codecs.decode(packed)[0] == -2.0 and codecs.decode(packed)[2] == 0.0


@given(st.sampled_from([BNB8, NF4]), st.data())
def test_the_nearest_number_of_the_table_is_taken(codec, data) -> None:
    x = data.draw(st.floats(-1, 1, width=32))
    decoded = codecs.decode(codecs.encode(codec.name, torch.tensor([1.0, x])))[1].item()
    nearest = min(abs(number - x) for number in codec.numbers)
    assert abs(decoded - x) <= nearest + abs(x) * 2**-11 + 2**-24


@pytest.mark.parametrize("name", ["bnb8", "nf4"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_scale_that_is_not_finite_is_refused(name: str, bad: float) -> None:
    data = bytearray(codecs.encode(name, random(300)).data)
    data[4:8] = struct.pack("<f", bad)
    assert refusal(Packed(name, (300,), data)) is RejectCode.NON_FINITE


def test_half_a_byte_that_is_left_over_is_zero() -> None:
    data = bytearray(codecs.encode("nf4", random(3)).data)
    data[-1] |= 1
    assert refusal(Packed("nf4", (3,), data)) is RejectCode.MALFORMED


# ---------------------------------------------------------------- sparse, topk


vectors = (
    st.integers(0, 300)
    .flatmap(
        lambda n: hnp.arrays(
            "float32", n, elements=st.sampled_from([0.0, 1.0, -1.0, 2.5, -1e-40, MAX32]), fill=st.just(np.float32(0.0))
        )
    )
    .map(torch.from_numpy)
)


@given(vectors)
def test_sparse_is_exact(x: torch.Tensor) -> None:
    packed = codecs.encode("sparse", x)
    assert torch.equal(codecs.decode(packed), x)
    count = int((x != 0).sum())
    assert packed.num_bytes == (4 + 4 * count + min(2 * count, -(-x.numel() // 8)) if x.numel() else 0)


@settings(deadline=None)
@given(vectors, st.sampled_from([0.01, 0.1, 0.25]))
def test_topk_keeps_the_largest_and_the_earlier_of_equals(x: torch.Tensor, kept: float) -> None:
    order = sorted(range(x.numel()), key=lambda at: (-abs(x[at].item()), at))
    expected = torch.zeros_like(x)
    for at in order[: int(np.ceil(kept * x.numel()))]:
        expected[at] = x[at]
    assert torch.equal(codecs.decode(codecs.encode(f"topk:{kept}", x)), expected)


@pytest.mark.parametrize("kind", ["normal", "rising", "rare", "equal"])
@pytest.mark.parametrize("size", [BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 777])
def test_topk_of_large_tensors_keeps_the_largest_of_each_block(kind: str, size: int) -> None:
    x = {
        "normal": random(size),
        "rising": torch.arange(1.0, size + 1),
        "equal": torch.ones(size),
        "rare": torch.where(random(size, 2) > 2.5, random(size), 0.0),
    }[kind]
    y = codecs.decode(codecs.encode("topk:0.01", x))
    for start in range(0, size, BLOCK):
        block, sent = x[start : start + BLOCK], y[start : start + BLOCK]
        most = -(-block.numel() // 100)
        assert int((sent != 0).sum()) == min(most, int((block != 0).sum()))
        assert torch.equal(sent[sent != 0], block[sent != 0])
        least = sent[sent != 0].abs().amin(0) if sent.any() else 0.0
        assert bool((block[sent == 0].abs() <= least).all())


def test_topk_errors_never_exceed_the_share_that_is_left() -> None:
    """|x' - x|^2 <= (1 - k / n) |x|^2: what error feedback's convergence rests on (arXiv:1809.07599)."""
    for seed in range(20):
        x = random(2000, seed) * random(2000, seed + 100).exp()
        y = codecs.decode(codecs.encode("topk:0.1", x))
        assert (x - y).double().square().sum() <= 0.9 * x.double().square().sum()


def sparse(counts: list[int], values: list[float], places: bytes, size: int, name: str = "sparse") -> Packed:
    return Packed(name, (size,), struct.pack(f"<{len(counts)}I{len(values)}f", *counts, *values) + places)


def test_sparse_bytes() -> None:
    x = torch.zeros(64)
    x[3], x[9] = 1.0, -2.0
    assert codecs.encode("sparse", x).data == sparse([2], [1.0, -2.0], struct.pack("<2H", 3, 9), 64).data
    x[:9] = 1.0
    assert codecs.encode("sparse", x).data == sparse([10], [1.0] * 9 + [-2.0], b"\xff\x03" + bytes(6), 64).data


@pytest.mark.parametrize(
    ("packed", "code"),
    [
        (sparse([2], [1.0, 2.0], struct.pack("<2H", 9, 3), 64), RejectCode.MALFORMED),  # falling
        (sparse([2], [1.0, 2.0], struct.pack("<2H", 3, 3), 64), RejectCode.MALFORMED),  # twice
        (sparse([2], [1.0, 2.0], struct.pack("<2H", 3, 64), 64), RejectCode.MALFORMED),  # outside
        (sparse([2], [1.0], struct.pack("<2H", 3, 4), 64), RejectCode.MALFORMED),  # values lack
        (sparse([1], [1.0, 2.0], struct.pack("<H", 3), 64), RejectCode.MALFORMED),
        (sparse([2], [1.0, float("nan")], struct.pack("<2H", 3, 4), 64), RejectCode.NON_FINITE),
        (sparse([65], [1.0] * 65, b"\xff" * 8, 64), RejectCode.MALFORMED),  # more than there are
        (sparse([5], [1.0] * 5, b"\x0f" + bytes(7), 64), RejectCode.MALFORMED),  # fewer bits
        (sparse([5], [1.0] * 5, b"\x1f" + bytes(7), 63), None),
        (sparse([5], [1.0] * 5, b"\x0f" + bytes(6) + b"\x80", 63), RejectCode.MALFORMED),  # after the last
        (sparse([1 << 31], [1.0], b"", 64), RejectCode.MALFORMED),
        (sparse([8], [1.0] * 8, b"\xff" + bytes(7), 64, "topk:0.1"), RejectCode.MALFORMED),  # more than topk sends
        (sparse([7], [1.0] * 7, b"\x7f" + bytes(7), 64, "topk:0.1"), None),
    ],
)
def test_sparse_refuses_what_no_encoder_writes(packed: Packed, code: RejectCode | None) -> None:
    if code is None:
        assert codecs.decode(packed).sum() == len(codecs.decode(packed).nonzero())
    else:
        assert refusal(packed) is code
