"""Every window once an epoch, in a new order each time; tokens with their proof, whoever sends them."""

from __future__ import annotations

import itertools
import struct
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from swarmnet.data.sampler import Sampler, permute
from swarmnet.data.tokens import Tokens
from swarmnet.data.windows import WindowTree
from swarmnet.errors import BadMessage, RejectCode, UsageError
from swarmnet.manifest.schema import Data, Manifest, Training
from swarmnet.messages import Fetch, Packed, Process
from swarmnet.peer.replica import input_check_of
from swarmnet.pipeline.windows import OwnTokens, ProvenWindows

sizes = st.tuples(st.integers(0, 2**64), st.integers(2, 4000), st.integers(1, 70), st.integers(1, 6))


def make(sizes: tuple[int, int, int, int]) -> Sampler:
    try:
        return Sampler(*sizes)
    except UsageError:
        assume(False)
        raise


@given(size=st.integers(1, 300), key=st.binary(min_size=1, max_size=64))
def test_a_permutation_hits_every_place_once(size, key):
    assert sorted(permute(place, size, key) for place in range(size)) == list(range(size))


@given(size=st.integers(1, 2**62), place=st.integers(0, 2**62), key=st.binary(min_size=1, max_size=64))
def test_a_permutation_of_a_huge_range_stays_inside(size, place, key):
    assert 0 <= permute(place % size, size, key) < size


@given(sizes=sizes, epoch=st.integers(0, 3))
def test_an_epoch_visits_every_training_window_once(sizes, epoch):
    sampler = make(sizes)
    length, width, count = sampler.sequence_length, sampler.microbatch_size, sampler.num_windows
    first = epoch * count
    starts = itertools.chain.from_iterable(
        sampler.positions(index) for index in range(first // width, (first + count - 1) // width + 1)
    )
    epoch_starts = list(itertools.islice(starts, first % width, first % width + count))
    assert sorted(epoch_starts) == [window * length for window in range(count)]


@given(sizes=sizes, index=st.integers(0, 10**12))
def test_training_and_evaluation_share_no_token(sizes, index):
    sampler = make(sizes)
    length = sampler.sequence_length
    training, held_out = sampler.positions(index), sampler.eval_positions(index)
    assert len(training) == len(held_out) == sampler.microbatch_size
    assert all(start >= 0 and start + length + 1 <= sampler.eval_start for start in training)
    assert all(sampler.eval_start <= start and start + length + 1 <= sizes[1] for start in held_out)


@given(sizes=sizes)
def test_the_reserved_part_is_one_percent_or_one_window_and_almost_no_token_is_wasted(sizes):
    sampler = make(sizes)
    _, num_tokens, length, _ = sizes
    assert num_tokens - sampler.eval_start == max(-(-num_tokens // 100), length + 1)
    assert sampler.eval_start - (sampler.num_windows * length + 1) < length
    assert sampler.num_eval_windows >= 1


def test_these_positions_never_change():
    """Runs in progress and golden curves depend on them."""
    sampler = Sampler(0, 100_000, 64, 4)
    assert sampler.eval_start == 99_000
    assert [sampler.positions(i) for i in (0, 1, 10**9)] == [
        (92416, 58496, 21568, 55680),
        (42496, 88064, 18176, 23872),
        (88576, 78656, 48000, 39552),
    ]
    assert sampler.eval_positions(0) == (99064, 99896, 99448, 99512)


def test_too_little_data_is_refused_with_advice_and_the_smallest_does() -> None:
    for num_tokens in (0, 1, 64, 65, 130, 193 + 63):
        with pytest.raises(UsageError, match="use more text, or lower training"):
            Sampler(0, num_tokens, 64, 3)
    sampler = Sampler(0, 3 * 64 + 1 + 65, 64, 3)
    assert sorted(sampler.positions(5)) == [0, 64, 128] and set(sampler.eval_positions(5)) == {193}
    with pytest.raises(ValueError, match="negative"):
        sampler.positions(-1)


@given(sizes=sizes, index=st.integers(0, 10**6))
def test_the_order_is_the_one_that_the_docs_tell(sizes, index):
    page = (Path(__file__).parents[2] / "docs/data.md").read_text(encoding="utf-8")
    told: dict[str, object] = {}
    exec(next(part for part in page.split("```python\n") if "def window(" in part).partition("```")[0], told)
    sampler, seed = make(sizes), sizes[0]
    places = [divmod(index * sampler.microbatch_size + b, sampler.num_windows) for b in range(sampler.microbatch_size)]
    assert sampler.windows(index) == tuple(
        told["window"](seed, epoch, place, sampler.num_windows) for epoch, place in places
    )


# ---------------------------------------------------------------- tokens with their proof


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


def test_one_window_needs_no_hash_to_be_proven() -> None:
    tokens, training = (
        Tokens(np.arange(20, dtype=np.uint8), 99, "", "e" * 64),
        Training(microbatch_size=1, sequence_length=9),
    )
    root = WindowTree(tokens, 9, 1).root
    data = DATA.model_copy(update={"num_tokens": 20, "tokens_sha256": tokens.sha256, "tokens_root": root})
    payload, windows = OwnTokens(tokens, data, training).training(3), ProvenWindows.of(data, training)
    assert windows.layout == ("uint8", (1, 0, 32)) and payload[1].data == b""
    input_check_of(Manifest(data=data, training=training), 0, windows)(Process(0, 0, 3), payload)


def test_a_holder_whose_windows_are_others_and_a_manifest_without_a_root_are_refused_in_words() -> None:
    training = MANIFEST.training
    longer = training.model_copy(update={"sequence_length": 9})
    with pytest.raises(UsageError, match=r"windows of training\.sequence_length = 9 .*: was one of them changed since"):
        OwnTokens(TOKENS, DATA, longer)
    for made, field, value, words in (
        (partial(OwnTokens, TOKENS), "tokens_root", "ab" * 32, "tokens_root is not that of the data"),
        (partial(OwnTokens, TOKENS), "tokens_sha256", "ab" * 32, "is not what the run was made with"),
        (ProvenWindows.of, "tokens_root", "", r"names no data\.tokens_root.* write it with `swarmnet init`"),
    ):
        with pytest.raises(UsageError, match=words):
            made(DATA.model_copy(update={field: value}), training)
