"""Tokens that come with a proof: a peer with the run's data hands them out, and a peer without it can check them.

The manifest and (step, index) alone say which windows the rows of a microbatch are. So training tokens are either the
run's own for that very microbatch or refused, from any sender. The proof travels on with the tokens, and each stage
checks it for itself. docs/data.md has the tree.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarmnet import telemetry
from swarmnet.data.sampler import Sampler
from swarmnet.data.tokens import Tokens, verify
from swarmnet.data.windows import HASH_BYTES, WindowRoot, WindowTree
from swarmnet.errors import BadMessage, RejectCode, UsageError
from swarmnet.manifest.schema import Data, Training
from swarmnet.messages import Packed
from swarmnet.wire.codecs import encode

log = telemetry.get(__name__)

_MANY = 1_000_000
"""So many windows take seconds to hash, which is worth a line in the log."""


def sampler_of(data: Data, training: Training) -> Sampler:
    """Which windows the microbatches of the run hold. Raises UsageError if the run has too few tokens."""
    return Sampler(training.seed, data.num_tokens, training.sequence_length, training.microbatch_size)


@dataclass(frozen=True, slots=True)
class ProvenWindows:
    """Implements Windows (`pipeline.inputs`) with nothing but the run's manifest."""

    known: WindowRoot
    sampler: Sampler
    microbatches: int

    @staticmethod
    def of(data: Data, training: Training) -> ProvenWindows:
        """The windows of this run. Raises UsageError if the manifest does not name their root."""
        if not data.tokens_root:
            raise UsageError(
                "the manifest names no data.tokens_root, so no peer can check that tokens are the run's: "
                "write it with `swarmnet init`"
            )
        sampler = sampler_of(data, training)
        root = bytes.fromhex(data.tokens_root)
        known = WindowRoot(root, sampler.num_windows, sampler.sequence_length)
        return ProvenWindows(known, sampler, training.microbatches)

    @property
    def layout(self) -> tuple[str, tuple[int, ...]]:
        """A path for each row."""
        return "uint8", (self.sampler.microbatch_size, self.known.depth, HASH_BYTES)

    def check(self, step: int, index: int, tokens: Packed, proof: Packed) -> None:
        """Raise BadMessage(MALFORMED) unless each row is the window that it has to be. Both are laid out already."""
        rows, paths = bytes(tokens.data), bytes(proof.data)
        width, length = len(rows) // self.sampler.microbatch_size, self.known.depth * HASH_BYTES
        for row, number in enumerate(self.sampler.windows(step * self.microbatches + index)):
            window, path = rows[row * width : (row + 1) * width], paths[row * length : (row + 1) * length]
            if not self.known.proves(number, window, path):
                raise BadMessage(RejectCode.MALFORMED, f"row {row} is not proven to be window {number} of the data")


class OwnTokens:
    """The run's data on this machine, and the tree over its windows: built here, once."""

    def __init__(self, tokens: Tokens, data: Data, training: Training) -> None:
        """Raises UsageError unless these are the tokens that the manifest names."""
        verify(tokens, data)
        self._tokens, self._sampler = tokens, sampler_of(data, training)
        num_windows, length = self._sampler.num_windows, self._sampler.sequence_length
        if num_windows >= _MANY:
            log.info("hashing_windows", windows=num_windows)
        self._tree = WindowTree(tokens, length, num_windows)
        if self._tree.root != data.tokens_root:
            raise UsageError(
                f"data.tokens_root is not that of the data in windows of training.sequence_length = {length} "
                f"({data.tokens_root[:12]!r} in the manifest, {self._tree.root[:12]!r} here): was one of them "
                "changed since? Write the manifest with `swarmnet init`"
            )

    def training(self, number: int) -> tuple[Packed, ...]:
        """(tokens, proof) of training microbatch `number` = step * microbatches + index."""
        windows = self._sampler.windows(number)
        paths = b"".join(map(self._tree.path, windows))
        proof = Packed("uint8", (len(windows), self._tree.proven.depth, HASH_BYTES), paths)
        return *self._pack(self._sampler.positions(number)), proof

    def evaluation(self, number: int) -> tuple[Packed, ...]:
        """(tokens,) of held-out microbatch `number`: these windows have no proof."""
        return self._pack(self._sampler.eval_positions(number))

    def _pack(self, positions: tuple[int, ...]) -> tuple[Packed, ...]:
        return (encode("int32", self._tokens.microbatch(positions, self._sampler.sequence_length)),)
