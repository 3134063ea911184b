"""The committed corpus is what its generator writes, and golden curves may rely on its bytes."""

from __future__ import annotations

import runpy
from pathlib import Path

from swarmnet.data.source import load_tokens


def test_the_committed_corpus_is_the_generated_one():
    generated = runpy.run_path(str(Path(__file__).parents[1] / "data" / "make_corpus.py"))["corpus"]()
    tokens = load_tokens("corpus:small")
    assert tokens.ids.tobytes() == generated.encode() + b"\0"


def test_the_corpus_never_changes():
    tokens = load_tokens("corpus:small")
    assert tokens.num_tokens == 134082
    assert tokens.sha256 == "6b47492cf0eb43b755daf1eb9350e5c35c9aa7a65b426c9153806639ef393f54"
