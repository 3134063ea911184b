"""What a microbatch's tensors must look like on the wire, both ways, checked before anything is computed with them.

Whoever sends what does not pass is to blame, so it is checked where the sender is still known: at the upload, at the
answer. What passes is used without further suspicion, and a value that is not finite from then on is nobody's fault.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarmnet.errors import BadMessage, RejectCode
from swarmnet.manifest.schema import Manifest
from swarmnet.messages import Fetched, Gradient, Packed, Process
from swarmnet.wire.values import check_range, check_values

Expected = tuple[tuple[str, tuple[int, ...]], ...]
"""(codec, shape) of each tensor."""


def _check_layout(payload: tuple[Packed, ...], expected: Expected) -> None:
    found = tuple((packed.codec, tuple(packed.shape)) for packed in payload)
    if found != expected:
        raise BadMessage(RejectCode.BAD_SHAPE, f"expected {expected}, got {found}"[:500])


@dataclass(frozen=True, slots=True)
class InputCheck:
    """Checks the input of one stage: (tokens,) for stage 0, (tokens, hidden) otherwise."""

    expected: Expected
    vocab_size: int

    @staticmethod
    def of(manifest: Manifest, stage: int) -> InputCheck:
        """The check for `stage` of this run."""
        batch, length = manifest.training.microbatch_size, manifest.training.sequence_length
        tokens = ("int32", (batch, length + 1))
        hidden = (manifest.wire.activations, (batch, length, manifest.model.hidden_size))
        return InputCheck((tokens, hidden) if stage > 0 else (tokens,), manifest.model.vocab_size)

    def __call__(self, payload: tuple[Packed, ...]) -> None:
        """Raise BadMessage unless codecs and shapes are those of the run (BAD_SHAPE), tokens are words (MALFORMED)
        and everything is finite (NON_FINITE)."""
        _check_layout(payload, self.expected)
        for packed in payload:
            check_values(packed)
        check_range(payload[0], below=self.vocab_size)


@dataclass(frozen=True, slots=True)
class AnswerCheck:
    """Checks what one stage answers: (gradient,) of its input, () from stage 0 and to an evaluation."""

    expected: Expected
    num_tokens: int

    @staticmethod
    def of(manifest: Manifest, stage: int) -> AnswerCheck:
        """The check of answers of `stage` in this run."""
        batch, length = manifest.training.microbatch_size, manifest.training.sequence_length
        gradient = (manifest.wire.gradients, (batch, length, manifest.model.hidden_size))
        return AnswerCheck((gradient,) if stage > 0 else (), batch * length)

    def __call__(self, request: Process, answer: Gradient) -> None:
        """Raise BadMessage unless `answer` can be an answer to `request`: BAD_SHAPE, MALFORMED, NON_FINITE."""
        _check_layout(answer.payload, self.expected if request.purpose == "train" else ())
        self._check(answer)

    def remembered(self, answer: Fetched) -> None:
        """The same for a memoised answer to training."""
        _check_layout(answer.payload, self.expected)
        self._check(answer)

    def _check(self, answer: Gradient | Fetched) -> None:
        if answer.num_tokens != self.num_tokens:
            raise BadMessage(RejectCode.MALFORMED, "not the microbatch's tokens", num_tokens=answer.num_tokens)
        for packed in answer.payload:
            check_values(packed)
