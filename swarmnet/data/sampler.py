"""Which tokens microbatch number `index` of a run holds: a pure function of the seed and the index.

The token stream is cut into windows of `sequence_length + 1` tokens at stride `sequence_length` (the last token of a
window is only a label, and the first input of the next). An epoch visits every window once, in an order that differs by
epoch: a keyed permutation, so that any index is found at once and nothing is stored. The end of the stream, 1 % and at
least one window, is kept for evaluation; no training window reaches into it.

The permutation is a Feistel network (Luby and Rackoff 1988) over the next power of four, walked until it falls inside
the range again (Black and Rogaway 2002). Knows no tokens and no files.
"""

from __future__ import annotations

import hashlib

from swarmnet.errors import UsageError

_ROUNDS = 6


class Sampler:
    """Start offsets of the sequences of every microbatch of a run."""

    def __init__(self, seed: int, num_tokens: int, sequence_length: int, microbatch_size: int) -> None:
        """Raises UsageError if the stream is too short for one training microbatch and one evaluation window."""
        self.sequence_length, self.microbatch_size = sequence_length, microbatch_size
        # At least one window, however short the text is.
        reserved = max(-(-num_tokens // 100), sequence_length + 1)
        self.eval_start = num_tokens - reserved
        self.num_windows = max(0, self.eval_start - 1) // sequence_length
        self.num_eval_windows = (reserved - 1) // sequence_length
        # A microbatch may not hold one window twice.
        if self.num_windows < microbatch_size:
            raise UsageError(
                f"the data holds {num_tokens} tokens, too few for a microbatch of {microbatch_size} sequences of"
                f" {sequence_length} tokens in addition to the part kept for evaluation: use more text, or lower"
                " training.sequence_length or training.microbatch_size"
            )
        self._seed = seed

    def positions(self, index: int) -> tuple[int, ...]:
        """Start offsets of the sequences of training microbatch `index` = step * microbatches + i, from 0 on."""
        return tuple(self.sequence_length * number for number in self.windows(index))

    def windows(self, index: int) -> tuple[int, ...]:
        """Which windows those are: number w of the stream starts at w * sequence_length.

        Sequence number n = index * microbatch_size + b of the run is number n mod num_windows of its epoch.
        """
        return tuple(
            permute(position, self.num_windows, self._key(f"train/{epoch}"))
            for epoch, position in self._places(index, self.num_windows)
        )

    def eval_positions(self, index: int) -> tuple[int, ...]:
        """Start offsets of the sequences of evaluation microbatch `index`, from 0 on: the same at every evaluation.

        One fixed order over the part kept for evaluation; past its end it starts again.
        """
        return tuple(
            self.eval_start + self.sequence_length * permute(position, self.num_eval_windows, self._key("eval"))
            for _, position in self._places(index, self.num_eval_windows)
        )

    def _places(self, index: int, num_windows: int) -> list[tuple[int, int]]:
        if index < 0:
            raise ValueError(f"microbatch index {index} is negative")
        first = index * self.microbatch_size
        return [divmod(first + b, num_windows) for b in range(self.microbatch_size)]

    def _key(self, purpose: str) -> bytes:
        return hashlib.sha256(f"{self._seed}/{purpose}".encode()).digest()


def permute(position: int, size: int, key: bytes) -> int:
    """The image of `position` under a permutation of range(size), chosen by `key` (at most 64 bytes). size <= 2^62."""
    half = (max(size - 1, 1).bit_length() + 1) // 2
    while True:
        position = _feistel(position, half, key)
        # Outside the range: go on. The walk always comes back, as a permutation has no dead ends.
        if position < size:
            return position


def _feistel(position: int, half: int, key: bytes) -> int:
    """A permutation of range(4 ** half): each round adds a keyed hash of one half to the other and swaps them."""
    mask = (1 << half) - 1
    left, right = position >> half, position & mask
    for number in range(_ROUNDS):
        mixed = hashlib.blake2b(right.to_bytes(4, "little"), key=key, salt=bytes([number]), digest_size=4)
        left, right = right, left ^ (int.from_bytes(mixed.digest(), "little") & mask)
    return left << half | right
