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
    """What decoding says."""
    with pytest.raises(BadMessage) as decoded:
        codecs.decode(packed)
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


@pytest.mark.parametrize(("codec", "scale"), [("bnb8", 1e-6), ("bnb8", 1.0), ("bnb8", 1e5), ("nf4", 1.0)])
def test_blocks_are_as_close_as_bitsandbytes_own(codec: str, scale: float) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    x = random(100_000) * scale
    ours = codecs.decode(codecs.encode(codec, x))
    if codec == "bnb8":
        theirs = functional.dequantize_blockwise(*functional.quantize_blockwise(x, blocksize=256))
    else:
        theirs = functional.dequantize_4bit(*functional.quantize_4bit(x, blocksize=64, quant_type="nf4"))
        assert float((ours == theirs).float().mean()) > 0.998  # the rest are ties of fp16
    assert (ours - x).norm() <= 1.002 * (theirs - x).norm()


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


def test_half_a_byte_that_is_left_over_is_zero() -> None:
    data = bytearray(codecs.encode("nf4", random(3)).data)
    data[-1] |= 1
    assert refusal(Packed("nf4", (3,), data)) is RejectCode.MALFORMED


# ---------------------------------------------------------------- sparse


vectors = (
    st.integers(0, 300)
    .flatmap(
        lambda n: hnp.arrays(
            "float32", n, elements=st.sampled_from([0.0, 1.0, -1.0, 2.5, -1e-40, MAX32]), fill=st.just(np.float32(0.0))
        )
    )
    .map(torch.from_numpy)
)


@settings(deadline=None)
@given(vectors, st.sampled_from(["sparse", "sparse:0.01", "sparse:0.1", "sparse:0.25"]))
def test_sparse_sends_the_largest_and_the_earlier_of_equals(x: torch.Tensor, name: str) -> None:
    kept = float(name.partition(":")[2] or 1)
    order = sorted(range(x.numel()), key=lambda at: (-abs(x[at].item()), at))[: int(np.ceil(kept * x.numel()))]
    largest = x.abs().max().item() if x.numel() else 0.0
    sent = {at for at in order if abs(x[at].item()) > largest / 196 > 2.0**-117}
    packed = codecs.encode(name, x)
    y = codecs.decode(packed)
    assert {*y.nonzero().view(-1).tolist()} == sent
    assert all(abs(y[at] - x[at]) <= (abs(x[at]) * largest) ** 0.5 / 6.99 + largest / 195 for at in sent)
    assert codecs.encode(name, y).data == packed.data


@pytest.mark.parametrize("kind", ["normal", "rising", "rare", "equal"])
@pytest.mark.parametrize("size", [BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 777])
def test_sparse_sends_the_largest_of_each_block(kind: str, size: int) -> None:
    x = {
        "normal": random(size),
        "rising": torch.arange(1.0, size + 1),
        "equal": torch.ones(size),
        "rare": torch.where(random(size, 2) > 3.5, random(size).sign(), 0.0),
    }[kind]
    y = codecs.decode(codecs.encode("sparse:0.01", x))
    for start in range(0, size, BLOCK):
        block, sent = x[start : start + BLOCK], y[start : start + BLOCK]
        assert int((sent != 0).sum()) == min(-(-block.numel() // 100), int((block != 0).sum()))
        assert not sent.any() or bool((block[sent == 0].abs() <= block[sent != 0].abs().amin()).all())


def test_what_sparse_drops_is_at_most_the_share_that_is_left() -> None:
    for seed in range(20):
        x = random(2000, seed) * random(2000, seed + 100).exp()
        y = codecs.decode(codecs.encode("sparse:0.1", x))
        assert (x - y).double().square().sum() <= 0.9 * x.double().square().sum()


def sparse(codes: str, positions: str, size: int, *, width: int, scale: float = 1.0, name: str = "sparse") -> Packed:
    """codes: a hexadecimal digit each, plus 7. positions: bytes in hexadecimal digits."""
    pairs = [codes[at : at + 2].ljust(2, "f") for at in range(0, len(codes), 2)]
    data = struct.pack("<Qf", len(codes) << 8 | width, scale) + bytes(int(pair[::-1], 16) for pair in pairs)
    return Packed(name, (size,), data + bytes.fromhex(positions))


def test_sparse_bytes() -> None:
    x = torch.zeros(4000)
    x[3], x[4], x[1034] = 0.5, -2.0, 2.0
    assert codecs.encode("sparse", x).data == sparse("a0e", "03 00 ff ff ff ff 09", 4000, width=8, scale=2.0).data
    x = torch.zeros(40)
    x[3], x[20], x[23], x[26] = 1.0, 1.0, 1.0, 1.0  # gaps of 3; 15 and 1; 2; 2
    assert codecs.encode("sparse", x).data == sparse("eeee", "f3 21 f2", 40, width=4).data
    assert codecs.encode("sparse", torch.ones(9)).data == sparse("e" * 9, "00 fe", 9, width=1).data
    assert codecs.encode("sparse", torch.zeros(9)).data == sparse("", "", 9, width=8, scale=0.0).data


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0.0), (0.01, 0.02), (0.05, 0.08), (0.2, 0.21), (1.0, 0.63)])
def test_sparse_takes_few_bits_for_each_element_sent(share: float, expected: float) -> None:
    x = torch.where(torch.rand(16 * BLOCK, generator=torch.Generator().manual_seed(0)) < share, 1.0, 0.0)
    size = codecs.encode("sparse", x).num_bytes / x.numel()
    assert expected - 0.02 <= size <= expected + 0.002
    assert size <= codecs.encoded_bytes("sparse", (x.numel(),)) / x.numel() < 0.63


@pytest.mark.parametrize(
    ("packed", "code"),
    [
        (sparse("e8", "03 05", 64, width=8), None),
        (sparse("e7", "03 05", 64, width=8), None),  # a zero, which no encoder sends
        (sparse("e8", "03 3c", 64, width=8), RejectCode.MALFORMED),  # outside
        (sparse("e8", "03", 64, width=8), RejectCode.MALFORMED),
        (sparse("e8", "03 04 05", 64, width=8), RejectCode.MALFORMED),
        (sparse("e8", "03 ff", 64, width=8), RejectCode.MALFORMED),  # skips, and then nothing
        (sparse("ef", "03 04", 64, width=8), RejectCode.MALFORMED),
        (sparse("e8", "03 04", 64, width=3), RejectCode.MALFORMED),
        (sparse("e", "03", 64, width=8, scale=-1.0), RejectCode.NON_FINITE),
        (sparse("e", "03", 64, width=8, scale=float("nan")), RejectCode.NON_FINITE),
        (sparse("e" * 65, "00" * 8, 64, width=1), RejectCode.MALFORMED),  # more than there are
        (sparse("e" * 9, "00" * 8, 64, width=1), RejectCode.MALFORMED),
        (sparse("e" * 9, "00 fe", 64, width=1), None),
        (Packed("sparse", (64,), struct.pack("<Qf", 1 << 63 | 8, 1.0)), RejectCode.MALFORMED),
        (sparse("e" * 8, "", 64, width=8, name="sparse:0.1"), RejectCode.MALFORMED),  # more than it sends
        (sparse("e" * 7, "80 ff", 64, width=1, name="sparse:0.1"), None),
    ],
)
def test_sparse_refuses_what_no_encoder_writes(packed: Packed, code: RejectCode | None) -> None:
    if code is None:
        assert codecs.decode(packed).abs().amax() == 1.0
    else:
        assert refusal(packed) is code
