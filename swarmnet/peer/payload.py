"""What a microbatch's tensors must look like on the wire, checked before anything is decoded or queued."""

from __future__ import annotations

from dataclasses import dataclass

from swarmnet.errors import BadMessage, RejectCode
from swarmnet.manifest.schema import Manifest
from swarmnet.messages import Packed


@dataclass(frozen=True, slots=True)
class InputCheck:
    """Checks the input of one stage: (tokens,) for stage 0, (tokens, hidden) otherwise."""

    tokens_shape: tuple[int, ...]
    hidden_shape: tuple[int, ...] | None
    hidden_codec: str

    @staticmethod
    def of(manifest: Manifest, stage: int) -> InputCheck:
        """The check for `stage` of this run."""
        batch, length = manifest.training.microbatch_size, manifest.training.sequence_length
        hidden = (batch, length, manifest.model.hidden_size) if stage > 0 else None
        return InputCheck((batch, length + 1), hidden, manifest.wire.activations)

    def __call__(self, payload: tuple[Packed, ...]) -> None:
        """Raise BadMessage(BAD_SHAPE) unless codecs and shapes are those of the run."""
        expected = [("int32", self.tokens_shape)]
        if self.hidden_shape is not None:
            expected.append((self.hidden_codec, self.hidden_shape))
        found = [(packed.codec, tuple(packed.shape)) for packed in payload]
        if found != expected:
            raise BadMessage(RejectCode.BAD_SHAPE, f"expected {expected}, got {found}"[:500])
