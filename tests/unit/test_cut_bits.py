"""What a vector decodes to does not depend on how a round cut it: bandwidths change who sends what, and no bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnet.averaging.parts import LEAST_CHUNK, chunks, parts
from swarmnet.sums.sum_codec import SumCodec
from swarmnet.wire import codecs

TOTAL = 236_361
VECTOR = torch.randn(TOTAL, generator=torch.Generator().manual_seed(7)) * torch.linspace(0.001, 9, TOTAL)
CODECS = ["fp32", "fp16", "int8", "nf4"]


def decoded(codec: SumCodec, cut: list[tuple[int, int]], *, reduced: bool) -> torch.Tensor:
    pieces = []
    for start, stop in cut:
        piece = VECTOR[start:stop].clone()
        packed = codec.sum(piece, start) if reduced else codec.contribution(VECTOR, start, stop)
        pieces.append(codecs.decode(packed))
    return torch.cat(pieces)


@pytest.mark.parametrize("name", CODECS)
@settings(deadline=None, max_examples=8, derandomize=True)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=6))
def test_no_bit_depends_on_the_cut(name: str, bandwidths: list[int]) -> None:
    codec = SumCodec(name, TOTAL, device=torch.device("cpu"))
    cut = [
        chunk
        for start, stop in parts(TOTAL, bandwidths, block=codecs.find(name).block)
        if start < stop
        for chunk in chunks(start, stop, LEAST_CHUNK)
    ]
    for reduced in (False, True):
        assert torch.equal(decoded(codec, cut, reduced=reduced), decoded(codec, [(0, TOTAL)], reduced=reduced))
