"""Tokens with their proof: those of a microbatch and no others, whoever sends them and wherever they came from."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest

from swarmnet.data.sampler import Sampler
from swarmnet.data.tokens import Tokens
from swarmnet.data.windows import WindowTree
from swarmnet.errors import BadMessage, RejectCode, UsageError
from swarmnet.manifest.schema import Data, Manifest, Training
from swarmnet.messages import Fetch, Packed, Process
from swarmnet.peer.replica import input_check_of
from swarmnet.pipeline.windows import OwnTokens, ProvenWindows

B, T, M = 3, 8, 4
TOKENS = Tokens(np.random.default_rng(0).integers(0, 99, 999).astype(np.uint8), 99, "here.txt", "e" * 64)
TREE = WindowTree(TOKENS, T, Sampler(0, 999, T, B).num_windows)
DATA = Data(num_tokens=999, tokens_sha256=TOKENS.sha256, tokens_root=TREE.root, tokenizer_sha256="e" * 64)
MANIFEST = Manifest(data=DATA, training=Training(microbatches=M, microbatch_size=B, sequence_length=T, total_steps=99))
OWN = OwnTokens(TOKENS, MANIFEST.data, MANIFEST.training)
WINDOWS = ProvenWindows.of(MANIFEST.data, MANIFEST.training)
CHECK = input_check_of(MANIFEST, 0, WINDOWS)


def refused(step: int, index: int, payload: tuple[Packed, ...]) -> tuple[RejectCode, str]:
    with pytest.raises(BadMessage) as caught:
        CHECK(Process(step, 0, index), payload)
    return caught.value.code, caught.value.reason


def test_what_a_holder_hands_out_passes_for_its_microbatch_and_for_no_other() -> None:
    for number in range(0, 3 * TREE.proven.num_windows // B, 7):  # three epochs
        step, index = divmod(number, M)
        payload = OWN.training(number)
        assert payload[0].shape == (B, T + 1) and (payload[1].codec, payload[1].shape) == WINDOWS.layout
        CHECK(Process(step, 0, index), payload)
        CHECK(Fetch(step, -1, index, "input", cached=True), payload)
        assert refused(step, (index + 1) % M, payload)[0] is RejectCode.MALFORMED
        assert refused(step + 1, index, payload)[0] is RejectCode.MALFORMED


def flipped(packed: Packed, at: int) -> Packed:
    data = bytearray(packed.data)
    data[at] ^= 1
    return replace(packed, data=bytes(data))


def test_every_row_counts_tokens_and_path() -> None:
    tokens, proof = OWN.training(5)
    width, length = 4 * (T + 1), 32 * TREE.proven.depth
    for row, window in enumerate(Sampler(0, 999, T, B).windows(5)):
        line = RejectCode.MALFORMED, f"row {row} is not proven to be window {window} of the data"
        assert refused(1, 1, (flipped(tokens, row * width + width - 4), proof)) == line
        assert refused(1, 1, (tokens, flipped(proof, row * length))) == line
    rows = [bytes(tokens.data)[at : at + width] for at in range(0, B * width, width)]
    paths = [bytes(proof.data)[at : at + length] for at in range(0, B * length, length)]
    swapped = replace(tokens, data=b"".join(reversed(rows))), replace(proof, data=b"".join(reversed(paths)))
    assert refused(1, 1, swapped)[0] is RejectCode.MALFORMED


def test_a_proof_has_the_shape_that_the_manifest_says() -> None:
    tokens, proof = OWN.training(5)
    for shape in ((B, TREE.proven.depth + 1, 32), (B, TREE.proven.depth - 1, 32), (1 << 30, 1 << 20, 32)):
        assert refused(1, 1, (tokens, replace(proof, shape=shape)))[0] is RejectCode.BAD_SHAPE
    assert refused(1, 1, (tokens, replace(proof, data=bytes(proof.data)[:-1])))[0] is RejectCode.MALFORMED
    assert refused(1, 1, (tokens,))[0] is RejectCode.BAD_SHAPE


def test_an_evaluation_may_be_of_anything() -> None:
    anything = Packed("int32", (B, T + 1), struct.pack("<27i", *range(27)))
    CHECK(Process(0, 0, 0, purpose="eval"), (anything,))
    CHECK(Process(0, 0, 0, purpose="eval"), OWN.evaluation(0))
    assert refused(0, 0, (anything,))[0] is RejectCode.BAD_SHAPE
    assert refused(0, 0, (OWN.evaluation(0)[0], OWN.training(0)[1]))[0] is RejectCode.MALFORMED


def test_later_stages_look_for_themselves() -> None:
    hidden = Packed("fp32", (B, T, MANIFEST.model.hidden_size), bytes(4 * B * T * MANIFEST.model.hidden_size))
    later = input_check_of(MANIFEST, 2, WINDOWS)
    tokens, proof = OWN.training(5)
    later(Process(1, 2, 1), (tokens, hidden, proof))
    with pytest.raises(BadMessage, match="row 0 is not proven"):
        later(Process(1, 2, 1), (flipped(tokens, 0), hidden, proof))


def test_one_window_needs_no_hash_to_be_proven() -> None:
    tokens = Tokens(np.arange(20, dtype=np.uint8), 99, "", "e" * 64)
    training = Training(microbatch_size=1, sequence_length=9)
    data = Data(
        num_tokens=20, tokens_sha256=tokens.sha256, tokenizer_sha256="e" * 64, tokens_root=WindowTree(tokens, 9, 1).root
    )
    manifest = Manifest(data=data, training=training)
    payload, windows = OwnTokens(tokens, data, training).training(3), ProvenWindows.of(data, training)
    assert windows.layout == ("uint8", (1, 0, 32)) and payload[1].data == b""
    input_check_of(manifest, 0, windows)(Process(0, 0, 3), payload)


def changed(**fields: object) -> tuple[Data, Training]:
    return DATA.model_copy(update=fields), MANIFEST.training


def test_a_manifest_without_a_root_is_refused_in_words() -> None:
    with pytest.raises(UsageError, match=r"names no data\.tokens_root.* write it with `swarmnet init`"):
        ProvenWindows.of(*changed(tokens_root=""))


def test_a_holder_whose_windows_are_others_is_told_so() -> None:
    longer = MANIFEST.training.model_copy(update={"sequence_length": 9})
    with pytest.raises(UsageError, match=r"windows of training\.sequence_length = 9 .*: was one of them changed since"):
        OwnTokens(TOKENS, DATA, longer)
    with pytest.raises(UsageError, match=r"tokens_root is not that of the data"):
        OwnTokens(TOKENS, *changed(tokens_root="ab" * 32))
    with pytest.raises(UsageError, match="is not what the run was made with"):
        OwnTokens(TOKENS, *changed(tokens_sha256="ab" * 32))
