"""Tokens: a digest of the ids alone, sequences as tensors, and a refusal that says what differs."""

from __future__ import annotations

import dataclasses
import hashlib
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.data.tokens import Tokens, verify
from swarmnet.errors import UsageError
from swarmnet.manifest.schema import Data


def make(ids, dtype=np.uint16) -> Tokens:
    return Tokens(np.array(ids, dtype=dtype), vocab_size=1 << 16, source="here.txt", tokenizer_sha256="e" * 64)


@given(ids=st.lists(st.integers(0, 255), min_size=1, max_size=50))
def test_the_digest_depends_on_the_ids_and_not_on_their_array(ids):
    digests = {make(ids, dtype).sha256 for dtype in (np.uint8, np.uint16, np.uint32)}
    assert digests == {hashlib.sha256(b"".join(i.to_bytes(4, "little") for i in ids)).hexdigest()}
    assert make([*ids, 0]).sha256 not in digests


def test_a_long_stream_is_digested_in_pieces():
    ids = np.arange(600_001, dtype=np.uint32) % 70_000
    assert make(ids, np.uint32).sha256 == hashlib.sha256(ids.astype("<u4").tobytes()).hexdigest()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_a_microbatch_holds_inputs_and_labels(dtype):
    tokens = make(range(100), dtype)
    batch = tokens.microbatch((0, 96, 7), 3)
    assert batch.dtype == torch.int32 and batch.is_contiguous()
    assert batch.tolist() == [[0, 1, 2, 3], [96, 97, 98, 99], [7, 8, 9, 10]]


@pytest.mark.parametrize("start", [-1, 97, 10**9])
def test_a_microbatch_never_leaves_the_stream(start):
    with pytest.raises(ValueError, match="leave the stream"):
        make(range(100)).microbatch((0, start), 3)


def manifest_data(tokens: Tokens, **changes: object) -> Data:
    return Data(
        **{
            "source": tokens.source,
            "num_tokens": tokens.num_tokens,
            "tokens_sha256": tokens.sha256,
            "tokenizer_sha256": tokens.tokenizer_sha256,
            **changes,
        }
    )


def test_the_right_stream_passes_wherever_it_lies():
    tokens = make(range(9))
    verify(tokens, manifest_data(tokens, source="elsewhere"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_tokens": 8}, "9 tokens here, 8 in the manifest"),
        ({"tokens_sha256": "ab" * 32}, "digest [0-9a-f]{12} here, abababababab in the manifest"),
        ({"tokenizer_sha256": "cd" * 32, "tokenizer": "x.json"}, "tokenizer is not the one.*author's 'x.json'"),
        ({"tokens_sha256": ""}, "swarmnet init"),
        ({"tokenizer_sha256": ""}, "swarmnet init"),
    ],
)
def test_another_stream_is_refused_with_what_differs(changes, message):
    tokens = make(range(9))
    with pytest.raises(UsageError, match=message):
        verify(tokens, manifest_data(tokens, **changes))


def test_another_standard_library_is_called_by_its_name():
    tokens = dataclasses.replace(make(range(9)), source="stdlib")
    with pytest.raises(UsageError, match=r"differs between Python versions \(this is \d+\.\d+\.\d+.*join without data"):
        verify(tokens, manifest_data(tokens, num_tokens=5))


def test_loading_tokens_needs_no_torch():
    code = "import sys, swarmnet.data.source as s; s.load_tokens('corpus:small').sha256; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "numpy" in loaded and "torch" not in loaded
