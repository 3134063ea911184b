"""Codecs: the laws of `wire.codec_contract` for every float codec of ours, and what is particular to some."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from swarmnet.errors import BadMessage, Overflow, RejectCode
from swarmnet.messages import Packed
from swarmnet.wire import codecs
from swarmnet.wire.codec import is_finite
from swarmnet.wire.codec_contract import LAWS

SIZES = (0, 1, 63, 64, 255, 256, 257, 1000)
FLOATS = (*(name for name in codecs.NAMES if codecs.find(name).dtype == "float32"), *("sparse:0.01", "sparse:0.25"))
NAMES = ("int64", "int32", "uint8", *FLOATS)
INTEGERS = {"int64": torch.int64, "int32": torch.int32, "uint8": torch.uint8}
MAX32 = torch.finfo(torch.float32).max
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def floats():
    """fp32 vectors: often a repeated fill with a few odd elements, as activations with outliers are."""
    sizes = st.sampled_from(SIZES) | st.integers(0, 600)
    return sizes.flatmap(lambda n: hnp.arrays("float32", n, elements=finite, fill=finite)).map(torch.from_numpy)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("name", FLOATS)
def test_the_laws_of_codecs_hold(name, law):
    law(name)


@given(x=floats())
def test_the_bounds_of_the_oldest_codecs_are_those_of_the_page(x):
    size = x.double().abs()
    blocks = torch.nn.functional.pad(size, (0, -size.numel() % 256)).view(-1, 256)
    scale = blocks.amax(1, keepdim=True).expand_as(blocks).reshape(-1)[: size.numel()]
    stated = {
        "fp32": torch.zeros_like(size),
        "bf16": size * 2**-8 + 2**-134,
        "int8": ((size * scale).sqrt() / 127 + scale / 254**2) * (1 + 1e-5) + 2**-110 * (scale <= 2**-110),
    }
    for name, bound in stated.items():
        assert bool(((codecs.decode(codecs.encode(name, x)).double() - x.double()).abs() <= bound).all())


@pytest.mark.parametrize("name", FLOATS)
@settings(deadline=None)
@given(x=floats())
def test_encoding_a_decoded_tensor_changes_nothing(name, x):
    once = codecs.encode(name, x)
    assert bytes(codecs.encode(name, codecs.decode(once)).data) == bytes(once.data)


@pytest.mark.parametrize("name", INTEGERS)
@given(data=st.data())
def test_integers_survive_exactly(name, data):
    n = data.draw(st.sampled_from(SIZES))
    x = torch.from_numpy(data.draw(hnp.arrays(str(INTEGERS[name]).removeprefix("torch."), n)))
    packed = codecs.encode(name, x)
    y = codecs.decode(packed, expect_shape=(n,))
    assert y.dtype == x.dtype and torch.equal(x, y) and packed.num_bytes == codecs.encoded_bytes(name, (n,))


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, -1e-40, 2.0**-110, 2.0**-109, 1.0, -MAX32, MAX32])
def test_the_largest_element_of_a_block_comes_back_exactly_unless_tiny(value):
    x = torch.full((300,), value)
    expected = x if abs(value) > 2.0**-110 else torch.zeros(300)
    assert torch.equal(codecs.decode(codecs.encode("int8", x)), expected)


def test_values_beyond_bf16_become_its_largest():
    y = codecs.decode(codecs.encode("bf16", torch.tensor([MAX32, -MAX32, 1.0])))
    assert y.tolist() == [torch.finfo(torch.bfloat16).max, -torch.finfo(torch.bfloat16).max, 1.0]


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (2, 0), (3, 5, 7), (1,) * 8])
def test_shapes_survive(name, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    assert codecs.decode(codecs.encode(name, x), expect_shape=shape).shape == x.shape


def test_known_bytes():
    """The format itself: scale 2.0, then round(127 sqrt(|x| / 2)) with signs."""
    packed = codecs.encode("int8", torch.tensor([2.0, -0.5, 0.0, 1e-3]))
    assert bytes(packed.data) == bytes.fromhex("00000040") + bytes([127, 256 - 64, 0, 3])
    assert codecs.decode(packed).tolist() == pytest.approx([2.0, -2 * (64 / 127) ** 2, 0.0, 2 * (3 / 127) ** 2])
    assert bytes(codecs.encode("bf16", torch.tensor([1.0])).data) == b"\x80\x3f"
    assert bytes(codecs.encode("int64", torch.tensor([-2])).data) == b"\xfe" + b"\xff" * 7


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("name", ("fp32", "bf16", "int64", "int32", "uint8"))
def test_encoding_is_a_view_and_decoding_owns_its_memory(name):
    dtype = INTEGERS.get(name) or {"fp32": torch.float32, "bf16": torch.bfloat16}[name]
    x = torch.ones(4, dtype=dtype)
    packed = codecs.encode(name, x)
    decoded = codecs.decode(packed)
    x[0] = 2
    assert codecs.decode(packed)[0] == 2 and decoded[0] == 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wrap", [bytes, bytearray, lambda d: memoryview(bytes(3) + bytes(d))[3:]])
@pytest.mark.filterwarnings("error")
def test_any_buffer_at_any_alignment_decodes(name, wrap):
    x = torch.arange(300) % 100
    packed = codecs.encode(name, x.to(INTEGERS.get(name, torch.float32)))
    expected = codecs.decode(packed)
    assert torch.equal(codecs.decode(Packed(name, packed.shape, wrap(packed.data))), expected)


def test_decode_integers_fills_and_checks_the_target():
    packed = codecs.encode("small", torch.ones(300, dtype=torch.int64))
    out = torch.zeros(3, 100, dtype=torch.int64)
    assert codecs.decode_integers(out, packed, add=False) == 1 and bool((out == 1).all())
    with pytest.raises(BadMessage) as caught:
        codecs.decode_integers(out[:2], packed, add=False)
    assert caught.value.code is RejectCode.BAD_SHAPE
    with pytest.raises(TypeError):
        codecs.decode_integers(torch.zeros(300), packed, add=False)


def test_sizes_need_no_torch():
    code = "from swarmnet.wire import codecs; print(codecs.encoded_bytes('int8', (3,)), 'torch' in codecs.sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split() == ["7", "False"]


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("name", "shape", "code"),
    [
        ("fp8", (1,), RejectCode.MALFORMED),
        ("", (1,), RejectCode.MALFORMED),
        ("fp32", (-1,), RejectCode.BAD_SHAPE),
        ("fp32", (-1, -1), RejectCode.BAD_SHAPE),
        ("fp32", (1.0,), RejectCode.BAD_SHAPE),
        ("fp32", (True,), RejectCode.BAD_SHAPE),
        ("fp32", (1,) * 9, RejectCode.BAD_SHAPE),
        ("fp32", (1 << 41,), RejectCode.TOO_LARGE),
        ("fp32", (0, 1 << 41), RejectCode.TOO_LARGE),
        ("fp32", (1 << 31, 1 << 31), RejectCode.TOO_LARGE),
    ],
)
def test_impossible_sizes_are_refused(name, shape, code):
    with pytest.raises(BadMessage) as caught:
        codecs.encoded_bytes(name, shape)
    assert caught.value.code is code
    with pytest.raises(BadMessage) as caught:
        codecs.decode(Packed(name, shape, b""))
    assert caught.value.code is code


def test_an_unexpected_shape_is_refused():
    with pytest.raises(BadMessage) as caught:
        codecs.decode(codecs.encode("fp32", torch.zeros(2, 3)), expect_shape=(3, 2))
    assert caught.value.code is RejectCode.BAD_SHAPE


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_numbers_are_refused_on_the_way_in(name, bad):
    data = bytearray(codecs.encode(name, torch.ones(600)).data)
    stored = torch.bfloat16 if name == "bf16" else torch.float32
    place = {"fp16": 0, "sparse": 2}.get(name.partition(":")[0], 1)  # a scale, or the second number
    torch.frombuffer(data, dtype=stored, count=place + 1)[place] = bad
    with pytest.raises(BadMessage) as caught:
        codecs.decode(Packed(name, (600,), data))
    assert caught.value.code is RejectCode.NON_FINITE


@pytest.mark.parametrize(("offset", "byte", "code"), [(3, 0xBF, RejectCode.NON_FINITE), (5, 128, RejectCode.MALFORMED)])
def test_bytes_no_int8_encoder_writes_are_refused(offset, byte, code):
    data = bytearray(codecs.encode("int8", torch.ones(20)).data)
    data[offset] = byte
    for attempt in (
        lambda: codecs.decode(Packed("int8", (20,), data)),
        lambda: codecs.find("int8").check(np.frombuffer(data, np.uint8), 20),
    ):
        with pytest.raises(BadMessage) as caught:
            attempt()
        assert caught.value.code is code


@settings(deadline=None)
@given(
    st.sampled_from((*INTEGERS, "fp32", "nf3", "sparse:0.010")),
    st.lists(st.integers(-1, 9), max_size=3).map(tuple),
    st.data(),
)
def test_any_bytes_decode_to_finite_numbers_or_are_refused(name, shape, data):
    try:
        shortest, right = codecs.encoded_sizes(name, shape)
    except BadMessage:
        shortest, right = 4, 4
    blob = data.draw(st.binary(min_size=right, max_size=right) | st.binary(max_size=64))
    try:
        tensor = codecs.decode(Packed(name, shape, blob))
    except BadMessage as refusal:
        assert isinstance(refusal.code, RejectCode)
    else:
        assert shortest <= len(blob) <= right and tensor.shape == shape
        assert torch.isfinite(tensor.double()).all()


@pytest.mark.parametrize("delta", [-1, 1])
@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_length_is_refused(name, delta):
    x = torch.zeros(257, dtype=INTEGERS.get(name, torch.float32))
    data = bytes(codecs.encode(name, x).data)
    with pytest.raises(BadMessage) as caught:
        codecs.decode(Packed(name, (257,), (data + b"\0")[: len(data) + delta]))
    assert caught.value.code is RejectCode.MALFORMED


def test_a_wrong_dtype_is_our_own_bug():
    long = torch.ones(2, dtype=torch.int64)
    for name, tensor in (("fp32", long), ("int8", long), ("int64", torch.ones(2)), ("int32", long)):
        with pytest.raises(TypeError):
            codecs.encode(name, tensor)


# ---------------------------------------------------------------- fixed point


@pytest.mark.parametrize("extreme", [(1 << 63) - 1, -(1 << 63)])
def test_an_int64_sum_that_would_wrap_is_refused_and_leaves_the_sum_alone(extreme):
    total = torch.zeros(300_000, dtype=torch.int64)
    total[-1] = extreme
    before = total.clone()
    step = torch.zeros_like(total)
    step[-1] = 1 if extreme > 0 else -1
    step[0] = -step[-1]
    with pytest.raises(Overflow):
        codecs.decode_integers(total, codecs.encode("small", step), add=True)
    assert torch.equal(total, before)
    step[-1] = -step[-1]  # the ranges still touch, the elements do not
    codecs.decode_integers(total, codecs.encode("small", step), add=True)
    assert torch.equal(total, before + step)


@given(x=floats())
def test_finiteness_is_judged_by_elements_not_by_their_sum(x):
    assert is_finite(x) and is_finite(x.double())
    assert is_finite(torch.full((10,), MAX32))
    assert not is_finite(torch.tensor([float("inf"), float("-inf")]))
