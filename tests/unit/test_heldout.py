"""What an evaluation scores and what it comes to: every label once, sums divided once."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.cli.weights import Scores, scores_of
from swarmnet.data.heldout import Tally, any_text, held_out
from swarmnet.data.sampler import Sampler
from swarmnet.data.source import load_tokens
from swarmnet.data.tokenizer import Bytes
from swarmnet.data.tokens import Tokens
from swarmnet.errors import UsageError
from swarmnet.manifest.schema import Data, Manifest, Training

SMALL = Training(sequence_length=8, microbatch_size=2)


def tokens(count: int) -> Tokens:
    return Tokens(np.arange(count, dtype=np.uint32), vocab_size=max(count, 1), source="text", tokenizer_sha256="")


@given(count=st.integers(0, 400), length=st.integers(1, 9), size=st.integers(1, 4), asked=st.integers(1, 30))
def test_every_label_of_a_text_is_scored_once_or_counted_as_left_out(
    count: int, length: int, size: int, asked: int
) -> None:
    training = SMALL.model_copy(update={"sequence_length": length, "microbatch_size": size})
    if count - 1 < length * size:
        with pytest.raises(UsageError, match=f"it takes {length * size + 1}"):
            any_text(tokens(count), training)
        return
    text = any_text(tokens(count), training, at_most=asked)
    assert text.num_microbatches == min(asked, (count - 1) // (length * size))
    labels = [
        label
        for number in range(text.num_microbatches)
        for label in text.tokens.microbatch(text.positions(number), length)[:, 1:].flatten().tolist()
    ]
    assert labels == list(range(1, len(labels) + 1))
    assert text.in_all * length * size + text.left_out == count - 1 and text.left_out < length * size


@given(count=st.integers(600, 4000), size=st.integers(1, 4))
def test_what_is_held_out_is_scored_once_in_the_order_of_the_run(count: int, size: int) -> None:
    training = SMALL.model_copy(update={"microbatch_size": size})
    text, sampler = held_out(tokens(count), training), Sampler(training.seed, count, 8, size)
    starts = [start for number in range(text.num_microbatches) for start in text.positions(number)]
    assert starts == [start for number in range(text.num_microbatches) for start in sampler.eval_positions(number)]
    assert min(starts) >= sampler.eval_start
    if sampler.num_eval_windows >= size:
        assert len(set(starts)) == len(starts) == sampler.num_eval_windows - text.left_out // 8
    two = held_out(tokens(count), training, at_most=2)
    assert (two.num_microbatches, two.in_all, two.left_out) == (2, max(text.in_all, 2), text.left_out)


def test_sums_are_divided_once() -> None:
    tally = Tally()
    tally.add(3.0, 2, 4)
    tally.add(9.0, 4, 5)
    assert (tally.loss, tally.perplexity, tally.num_tokens) == (2.0, math.exp(2.0), 6)
    assert tally.bits_per_byte == pytest.approx(12.0 / math.log(2) / 9)
    tally.add(1.0, 1, None)
    assert tally.bits_per_byte is None and tally.num_microbatches == 3
    tally.add(1e6, 1, None)
    assert tally.perplexity == math.inf


def test_a_documents_end_is_no_byte_of_it() -> None:
    stream = Tokens(np.array(list(b"abcdefg\0ijklmnopq"), dtype=np.uint8), 256, "text", Bytes.sha256)
    text = any_text(stream, SMALL)
    assert (text.num_bytes(0, Bytes()), text.num_bytes(0, None)) == (15, None)


def test_bytes_of_a_tokenizers_text(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE

    tokenizer = Tokenizer(BPE({"a": 0, "é": 1, "aa": 2}, [("a", "a")]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text").write_text("aaé" * 12)
    stream = load_tokens(str(tmp_path / "text"), str(tmp_path / "tokenizer.json"))
    manifest = Manifest(training=SMALL, data=Data(tokenizer_sha256=stream.tokenizer_sha256))
    scores = scores_of(manifest, tmp_path, str(tmp_path / "text"), tmp_path / "tokenizer.json", None)
    assert stream.num_tokens == 24 and scores.text.num_bytes(0, scores.tokenizer) == 16 * 2


def test_what_was_not_asked_for_is_in_microbatches_all_the_same() -> None:
    scores = Scores(Manifest(training=SMALL), any_text(tokens(60), SMALL, at_most=1), None, Tally())
    assert scores.so_far == "0 of 1 microbatches"
    scores.tally.add(32.0, 16, None)
    assert "over 16 tokens of text, 1 of 3 microbatches; 11 tokens more are in none\n" in scores.as_text()
    assert "partial" not in scores.as_text() and scores.complete
    assert {"microbatches": 1, "of_microbatches": 3, "tokens_left_out": 11, "partial": False}.items() <= json.loads(
        scores.as_json()
    ).items()


def test_it_says_what_it_knows() -> None:
    scores = Scores(Manifest(training=SMALL), any_text(tokens(60), SMALL), None, Tally(), version=4)
    assert json.loads(scores.as_json())["loss"] is None and not scores.complete
    scores.tally.add(32.0, 16, None)
    assert scores.as_text() == (
        "loss 2.000000 nats per token, perplexity 7.3891 (partial)\n"
        "over 16 tokens of text, 1 of 3 microbatches; 11 tokens more are in none\nby the weights of step 4"
    )
    for _ in range(2):
        scores.tally.add(32.0, 16, None)
    found = json.loads(scores.as_json())
    assert {"loss": 2.0, "version": 4, "partial": False}.items() <= found.items()
    assert found["bits_per_byte"] is None
