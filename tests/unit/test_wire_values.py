"""The check of packed bytes agrees with the decoder, for every codec and any bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.errors import BadMessage, RejectCode
from swarmnet.messages import Packed
from swarmnet.wire.codec import non_finite
from swarmnet.wire.codecs import (
    MAX_VALUE,
    NAMES,
    check_bounded,
    check_range,
    check_values,
    decode,
    encode,
    encoded_bytes,
)


def refusal(look, packed: Packed) -> RejectCode | None:
    try:
        look(packed)
    except BadMessage as error:
        return error.code
    return None


@st.composite
def sent(draw: st.DrawFn) -> Packed:
    codec, size = draw(st.sampled_from((*NAMES, "sparse:0.25"))), draw(st.integers(0, 300))
    length = encoded_bytes(codec, (size,)) + draw(st.sampled_from([0, 0, 0, 0, 1]))
    data = bytearray(length)
    for place in draw(st.lists(st.integers(0, max(length - 1, 0)), max_size=4)) if length else ():
        data[place] = draw(st.sampled_from([0x7F, 0x80, 0xFF, 0xC0, 0x3F]))
    return Packed(codec, (size,), bytes(data))


@given(sent())
def test_it_refuses_what_the_decoder_refuses(packed: Packed) -> None:
    assert refusal(check_values, packed) is refusal(decode, packed)


@given(sent())
def test_the_bound_refuses_that_and_what_is_beyond_it(packed: Packed) -> None:
    def bounded(packed: Packed) -> None:
        decoded = decode(packed)
        if decoded.dtype == torch.float32 and (decoded.abs() > MAX_VALUE).any():
            raise non_finite(packed.shape)

    assert refusal(check_bounded, packed) is refusal(bounded, packed)


@pytest.mark.parametrize("codec", ["fp32", "bf16"])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_bound_itself_may_be_sent(codec: str, sign: int) -> None:
    most = torch.tensor([0.0, sign * MAX_VALUE])
    assert refusal(check_bounded, encode(codec, most)) is None
    assert refusal(check_bounded, encode(codec, 2 * most)) is RejectCode.NON_FINITE


def test_numbers_in_a_range() -> None:
    def codes(*numbers: int) -> RejectCode | None:
        return refusal(lambda packed: check_range(packed, below=5), encode("int32", torch.tensor(numbers).int()))

    assert codes() is codes(0, 4) is None
    assert codes(0, 5) is codes(-1, 0) is codes(1 << 30) is RejectCode.MALFORMED
