"""Which text an evaluation scores, as microbatches of the run's fixed shape, and how many bytes that text is.

A microbatch is [B, T + 1] like every other of the run, so what does not fill the last one is left out, and counted.
Knows no model and no network.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from swarmnet.data.sampler import Sampler
from swarmnet.data.tokenizer import Bytes, Tokenizer
from swarmnet.data.tokens import Tokens
from swarmnet.errors import UsageError
from swarmnet.manifest.schema import Training


@dataclass(frozen=True, slots=True)
class HeldOutText:
    """What is to be scored: `num_microbatches` of B x T tokens each, of the `in_all` that there are.

    positions(number) are the starts of the sequences of microbatch `number`. left_out: tokens that could be scored and
    are in no microbatch, because they do not fill one.
    """

    tokens: Tokens
    sequence_length: int
    num_microbatches: int
    in_all: int
    left_out: int
    positions: Callable[[int], tuple[int, ...]]

    def num_bytes(self, number: int, tokenizer: Tokenizer | None) -> int | None:
        """Bytes of the text that the labels of microbatch `number` stand for; None: for ids without a text it is
        unknown.

        Where a sequence ends inside a character, that character counts for what replaces it.
        """
        if tokenizer is None:
            return None
        labels = [
            self.tokens.ids[start + 1 : start + 1 + self.sequence_length].tolist() for start in self.positions(number)
        ]
        if isinstance(tokenizer, Bytes):  # a document's end is no byte of it
            return sum(sum(1 for each in row if each) for row in labels)
        return sum(len(tokenizer.decode(row).encode()) for row in labels)


def held_out(tokens: Tokens, training: Training, *, at_most: int | None = None) -> HeldOutText:
    """The part of the run's own stream that no training microbatch reaches into, in the order of its evaluations.

    All of it once, unless `at_most` microbatches are asked for: as many as `training.eval_microbatches` are what the
    run's trainers measure.
    """
    length, size = training.sequence_length, training.microbatch_size
    sampler = Sampler(training.seed, tokens.num_tokens, length, size)
    whole = max(sampler.num_eval_windows // size, 1)  # a split that fills none is gone through again, as in training
    count = whole if at_most is None else at_most
    # What does not fill the last microbatch.
    left_out = max(sampler.num_eval_windows - whole * size, 0) * length
    return HeldOutText(tokens, length, count, max(whole, count), left_out, sampler.eval_positions)


def any_text(tokens: Tokens, training: Training, *, at_most: int | None = None) -> HeldOutText:
    """All of `tokens` from the beginning. Raises UsageError if they fill no microbatch."""
    length, size = training.sequence_length, training.microbatch_size
    # The last token is a label only.
    scored = max(tokens.num_tokens - 1, 0)
    whole = scored // (length * size)
    if not whole:
        raise UsageError(
            f"{tokens.source!r} holds {tokens.num_tokens} tokens, too few for one microbatch of {size} sequences of "
            f"{length} tokens: it takes {length * size + 1}"
        )
    count = whole if at_most is None else min(at_most, whole)

    def positions(number: int) -> tuple[int, ...]:
        return tuple((number * size + row) * length for row in range(size))

    return HeldOutText(tokens, length, count, whole, scored - whole * length * size, positions)


@dataclass(slots=True)
class Tally:
    """Sums over the microbatches that were scored; divide once."""

    loss_sum: float = 0.0
    num_tokens: int = 0
    num_bytes: int | None = 0
    num_microbatches: int = 0

    def add(self, loss_sum: float, num_tokens: int, num_bytes: int | None) -> None:
        """Count one microbatch. loss_sum: nats."""
        self.loss_sum += loss_sum
        self.num_tokens += num_tokens
        # One microbatch of unknown length makes the sum unknown.
        self.num_bytes = None if self.num_bytes is None or num_bytes is None else self.num_bytes + num_bytes
        self.num_microbatches += 1

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.loss_sum / self.num_tokens

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite beyond what a float holds."""
        return math.exp(self.loss) if self.loss < 709.0 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Comparable between tokenizers; None where it is not known how many bytes the tokens are."""
        return self.loss_sum / math.log(2) / self.num_bytes if self.num_bytes else None
