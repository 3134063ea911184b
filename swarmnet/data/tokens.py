"""A stream of token ids: its digest, slices of it as tensors, and whether it is the stream a run was made with.

Knows no files and no tokenizers (`source` and `tokenizer` make a Tokens) and no order (`sampler` picks positions).
"""

from __future__ import annotations

import functools
import hashlib
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from swarmnet.errors import UsageError
from swarmnet.manifest.schema import Data

if TYPE_CHECKING:
    import torch

_CHUNK = 1 << 18


@dataclass(frozen=True, eq=False)
class Tokens:
    """Token ids and what they mean.

    ids: one-dimensional uint8, uint16 or uint32, all below `vocab_size` <= 2^31; may be a memory map.
    source: as the operator named it; tokenizer_sha256: of the tokenizer's file (see `tokenizer`). notes: what a person
    should know about the ids, such as what ends a document; none if they were read as ids.
    """

    ids: np.ndarray
    vocab_size: int
    source: str
    tokenizer_sha256: str
    notes: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Length of the stream."""
        return len(self.ids)

    @functools.cached_property
    def sha256(self) -> str:
        """SHA-256 of all ids as little-endian uint32, whatever array holds them. Read once, then remembered."""
        digest = hashlib.sha256()
        for start in range(0, len(self.ids), _CHUNK):
            # As uint32 whatever the array is: the same ids have one digest.
            digest.update(self.ids[start : start + _CHUNK].astype("<u4").data)
        return digest.hexdigest()

    def microbatch(self, positions: Sequence[int], sequence_length: int) -> torch.Tensor:
        """The sequences that start at `positions`: int32 [B, T + 1], inputs and, one further, labels."""
        import torch

        width = sequence_length + 1
        # numpy would wrap around, or hand back fewer.
        if any(start < 0 or start + width > self.num_tokens for start in positions):
            raise ValueError(f"positions {tuple(positions)} leave the stream of {self.num_tokens} tokens")
        tokens_BT = np.empty((len(positions), width), dtype=np.int32)
        for row, start in enumerate(positions):
            tokens_BT[row] = self.ids[start : start + width]
        return torch.from_numpy(tokens_BT)


def verify(tokens: Tokens, data: Data) -> None:
    """Raise UsageError, naming what differs and what to do, unless `tokens` is the stream the manifest fixed."""
    # A manifest written by hand.
    if not data.tokens_sha256 or not data.tokenizer_sha256:
        raise UsageError(
            "the manifest names no data.tokens_sha256 or no data.tokenizer_sha256, so two peers cannot check that they"
            " train on the same text: write it with `swarmnet init`"
        )
    if tokens.tokenizer_sha256 != data.tokenizer_sha256:
        raise UsageError(
            f"the tokenizer is not the one the run was made with (digest {tokens.tokenizer_sha256[:12]} here,"
            f" {data.tokenizer_sha256[:12]} in the manifest): get the author's {data.tokenizer!r}"
        )
    # The length first: hashing reads all of it.
    if tokens.num_tokens == data.num_tokens and tokens.sha256 == data.tokens_sha256:
        return
    differs = f"digest {tokens.sha256[:12]} here, {data.tokens_sha256[:12]} in the manifest"
    if tokens.num_tokens != data.num_tokens:
        differs = f"{tokens.num_tokens} tokens here, {data.num_tokens} in the manifest"
    hint = "get the same files as the run's author"
    # The manifest fixes the ids and not what decides them: files in the tokenizer's folder, and our release.
    if tokens.notes and data.tokenizer != "bytes":
        differs += f"; here {'; '.join(tokens.notes)}"
        hint += (
            ", those in the tokenizer's folder, too; of a run that an earlier swarmnet made, `swarmnet tokenize "
            "--end-token NAME --special-tokens` writes the ids as they were"
        )
    if tokens.source == "stdlib":
        hint = (
            f"the standard library differs between Python versions (this is {platform.python_version()}): use the"
            " version the run was made with"
        )
    raise UsageError(
        f"the data in {tokens.source!r} is not what the run was made with ({differs}): {hint}, or join without data;"
        " trainers and peers of stage 0 that hold it hand it out"
    )
