"""`small`: exact for every int64, total, and about as short as the numbers allow."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from swarmnet.errors import BadMessage
from swarmnet.messages import Packed
from swarmnet.wire import codecs

EDGES = [0, 1, -1, 2**31, -(2**31), 2**62, -(2**62), 2**63 - 1, -(2**63)]
NUMBERS = st.sampled_from(EDGES) | st.integers(-40, 40) | st.integers(-(2**63), 2**63 - 1)
VECTORS = (st.integers(0, 400) | st.sampled_from([63, 64, 65, 128])).flatmap(
    lambda n: hnp.arrays("int64", n, elements=NUMBERS, fill=st.integers(-3, 3))
)


@settings(deadline=None)
@given(VECTORS)
def test_every_number_comes_back_and_sizes_are_as_declared(x):
    packed = codecs.encode("small", torch.from_numpy(x))
    shortest, longest = codecs.encoded_sizes("small", x.shape)
    assert shortest <= packed.num_bytes <= longest
    assert np.array_equal(codecs.decode(packed).numpy(), x)


@settings(deadline=None)
@given(VECTORS, st.data())
def test_any_bytes_decode_or_are_refused_and_a_refused_sum_is_left_alone(x, data):
    blob = bytearray(bytes(codecs.encode("small", torch.from_numpy(x)).data))
    for place in data.draw(st.lists(st.integers(0, max(len(blob) - 1, 0)), max_size=3)) if blob else ():
        blob[place] = data.draw(st.integers(0, 255))
    cut = bytes(blob[: len(blob) - data.draw(st.integers(0, 9))])
    packed, total = Packed("small", x.shape, cut), torch.zeros(x.size, dtype=torch.int64)
    try:
        codecs.check_values(packed)
    except BadMessage:
        with pytest.raises(BadMessage):
            codecs.decode(packed)
        with pytest.raises(BadMessage):
            codecs.decode_integers(total, packed, add=True)
        assert not total.any()
    else:
        codecs.decode_integers(total, packed, add=True)
        assert torch.equal(total, codecs.decode(packed))


@pytest.mark.parametrize("spread", [2.8, 4.0, 11.3])
def test_normal_numbers_take_six_tenths_of_a_bit_more_than_their_entropy(spread):
    x = (torch.randn(1 << 17, generator=torch.Generator().manual_seed(1)) * spread).round().to(torch.int64)
    shares = [count / x.numel() for count in torch.bincount(x - x.min()).tolist() if count]
    entropy = -sum(share * math.log2(share) for share in shares)
    assert 8 * codecs.encode("small", x).num_bytes / x.numel() < entropy + 0.62


def test_zeros_take_a_byte_for_64_and_a_lone_large_number_spoils_its_block_alone():
    x = torch.zeros(64 * 100, dtype=torch.int64)
    assert codecs.encode("small", x).num_bytes == 100
    x[700] = 2000
    assert codecs.encode("small", x).num_bytes <= 100 + 3 * 2 + 9 * 8
