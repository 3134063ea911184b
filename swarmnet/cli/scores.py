"""What `swarmnet eval` is asked to score, and how it says what came of it. Knows neither swarm nor model."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnet.cli.join import BUILT_IN
from swarmnet.data.heldout import HeldOutText, Tally, any_text, held_out
from swarmnet.data.source import load_tokens, tokenizer_of
from swarmnet.data.tokenizer import Tokenizer
from swarmnet.data.tokens import verify
from swarmnet.errors import SwarmError, UsageError
from swarmnet.manifest.canonical import run_id
from swarmnet.manifest.schema import Manifest

if TYPE_CHECKING:
    import torch

NO_FILE = ("bytes", "ids")
"""Tokenizers that are no files."""

MOST_LISTED = 4
"""Versions that people are told the share of, one by one."""


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """data: a source, None: what the run has held out. tokenizer: the run's, None: where its manifest says."""

    data: str | None
    tokenizer: Path | None
    microbatches: int | None

    def of(self, manifest: Manifest, base: Path) -> Scores:
        """By a manifest that lies in `base`. Raises UsageError: the data or the tokenizer are not here, or others."""
        tokenizer = manifest.data.tokenizer
        if self.tokenizer is not None:
            tokenizer = str(self.tokenizer.resolve())
        elif tokenizer not in NO_FILE:
            tokenizer = str((base / Path(tokenizer).expanduser()).resolve())
        return self._scores(manifest, tokenizer, base)

    def of_strangers(self, manifest: Manifest) -> Scores:
        """By a manifest that came from the network: it opens no files here. Raises UsageError as `of`."""
        agreed = manifest.data
        if self.tokenizer is None and agreed.tokenizer not in NO_FILE:
            raise UsageError(
                f"the run's tokenizer is {agreed.tokenizer!r} where it was made, and a manifest from the "
                "network opens no files here: name your copy of it with --tokenizer FILE"
            )
        if self.data is None and agreed.source not in BUILT_IN:
            raise UsageError(
                f"the run's text is {agreed.source!r} where it was made, and a manifest from the network "
                "opens no files here: name a text with --data, or take the manifest's file instead of "
                "the link, with --bootstrap"
            )
        tokenizer = agreed.tokenizer if self.tokenizer is None else str(self.tokenizer.resolve())
        return self._scores(manifest, tokenizer, Path())

    def _scores(self, manifest: Manifest, tokenizer: str, base: Path) -> Scores:
        if self.data is None:
            tokens = load_tokens(manifest.data.source, tokenizer, base=base)
            verify(tokens, manifest.data)
            text = held_out(tokens, manifest.training, at_most=self.microbatches)
        else:
            tokens = load_tokens(self.data, tokenizer)
            if tokenizer != "ids" and tokens.tokenizer_sha256 != manifest.data.tokenizer_sha256 != "":
                raise UsageError(
                    f"{tokenizer} is not the tokenizer the run was made with (digest "
                    f"{tokens.tokenizer_sha256[:12]} here, {manifest.data.tokenizer_sha256[:12]} in the "
                    "manifest)"
                )
            text = any_text(tokens, manifest.training, at_most=self.microbatches)
        if tokens.vocab_size > manifest.model.vocab_size:
            raise UsageError(
                f"{tokens.source!r} holds token ids up to {tokens.vocab_size - 1}, and the model knows "
                f"{manifest.model.vocab_size}"
            )
        encoder = None if tokenizer == "ids" else tokenizer_of(tokenizer, None)
        return Scores(manifest, text, encoder)


@dataclass(slots=True)
class Scores:
    """An evaluation of `text` and what it has come to. interrupted, failure: why it may not be all of it."""

    manifest: Manifest
    text: HeldOutText
    tokenizer: Tokenizer | None
    tally: Tally = field(default_factory=Tally)
    interrupted: bool = False
    failure: SwarmError | None = None

    @property
    def complete(self) -> bool:
        """Was all scored that was to be?"""
        return self.tally.num_microbatches == self.text.num_microbatches

    def microbatch(self, number: int) -> torch.Tensor:
        """Tokens of microbatch `number`, int32 [B, T + 1]."""
        return self.text.tokens.microbatch(self.text.positions(number), self.text.sequence_length)

    def num_bytes(self, number: int) -> int | None:
        return self.text.num_bytes(number, self.tokenizer)

    def so_far(self, waiting: str = "") -> str:
        """One line for whoever waits."""
        tally = self.tally
        loss = f", loss {tally.loss:.4f}" if tally.num_tokens else ""
        return f"{tally.num_microbatches} of {self.text.num_microbatches} microbatches{loss}{waiting}"

    def as_text(self) -> str:
        """For people."""
        tally = self.tally
        bits = tally.bits_per_byte
        lines = [
            f"loss {tally.loss:.6f} nats per token, perplexity {tally.perplexity:.4f}"
            f"{'' if bits is None else f', {bits:.4f} bits per byte'}"
            f"{'' if self.complete else ' (partial)'}",
            f"over {tally.num_tokens:,} tokens of {self.text.tokens.source}, {tally.num_microbatches} of "
            f"{self.text.in_all} microbatches"
            f"{f'; {self.text.left_out:,} tokens more are in none' if self.text.left_out else ''}",
            f"by the weights of {self._versions()}",
        ]
        if self.manifest.averaging.sync == "local":
            lines.append("which are each replica's own between outer steps: those of whoever answered")
        return "\n".join(lines)

    def as_json(self) -> str:
        """For programs: what cannot be known is null."""
        tally, some = self.tally, bool(self.tally.num_tokens)
        perplexity = tally.perplexity if some else math.inf
        return json.dumps(
            {
                "run": run_id(self.manifest),
                "data": self.text.tokens.source,
                "loss": tally.loss if some else None,
                "perplexity": perplexity if math.isfinite(perplexity) else None,
                "bits_per_byte": tally.bits_per_byte,
                "tokens": tally.num_tokens,
                "bytes": tally.num_bytes if some else None,
                "microbatches": tally.num_microbatches,
                "of_microbatches": self.text.in_all,
                "tokens_left_out": self.text.left_out,
                "versions": {str(version): count for version, count in sorted(tally.versions.items())},
                "partial": not self.complete,
            }
        )

    def _versions(self) -> str:
        versions = sorted(self.tally.versions.items())
        if len(versions) == 1:
            return f"step {versions[0][0]}"
        if len(versions) > MOST_LISTED:
            first, last = versions[0][0], versions[-1][0]
            return f"{len(versions)} steps from {first} to {last}: they moved on (--json lists them)"
        return f"steps {', '.join(f'{version} ({count:,} tokens)' for version, count in versions)}: they moved on"
