"""What reaches one stage over the wire and leaves it, checked: codec, shape, range, finite values.

An invalid payload of another peer raises BadMessage. Our own result that cannot be sent is OVERFLOWED: no peer is
to blame for the value of a pure function.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from swarmnet.errors import BadMessage, Refused, RejectCode
from swarmnet.manifest.schema import StageSpec, Wire
from swarmnet.messages import Packed
from swarmnet.wire import codecs
from swarmnet.wire.codecs import MAX_VALUE


class Payloads:
    """The run's codecs and shapes at a stage. device: where activations are decoded to.

    What is sent is in `wire.slow` while the own link is slow (`carries`), and a gradient also if the activation came in
    it: then the caller's link is slow. Both formats are accepted from every peer.
    """

    def __init__(self, spec: StageSpec, wire: Wire, *, device: torch.device) -> None:
        self._stage, self._wire, self._device = spec.stage, wire, device
        self._on_slow_line = False
        self.first, self.last = spec.first, spec.last
        rows, length = spec.training.microbatch_size, spec.training.sequence_length
        self._tokens, self._hidden = (rows, length + 1), (rows, length, spec.model.hidden_size)
        self._vocab_size = spec.model.vocab_size

    @property
    def num_bytes(self) -> int:
        """Of an activation in fp32."""
        return 4 * math.prod(self._hidden)

    def carries(self, bytes_per_s: int) -> None:
        """What the own line carries, as measured. Any thread."""
        self._on_slow_line = self._wire.is_slow(bytes_per_s)

    def input(self, payload: Sequence[Packed]) -> tuple[Tensor, Tensor | None]:
        """tokens [B, T + 1] int32 on the CPU; hidden [B, T, D] on the device, None in stage 0."""
        _expect(payload, 1 if self.first else 2)
        check_codec(payload[0], "int32")
        tokens = codecs.decode(payload[0], expect_shape=self._tokens)
        low, high = (int(extreme) for extreme in torch.aminmax(tokens))
        # Such an id would index outside the embedding.
        if low < 0 or high >= self._vocab_size:
            raise BadMessage(RejectCode.MALFORMED, "a token id outside the vocabulary", low=low, high=high)
        return tokens, None if self.first else self._activation(payload[1], self._wire.activations)

    def output(self, tokens: Tensor, hidden: Tensor) -> tuple[Packed, Packed]:
        """What the next stage gets of a forward."""
        return codecs.encode("int32", tokens), self._encode(self._sent_in(self._wire.activations), hidden)

    def gradient(self, payload: Sequence[Packed]) -> Tensor | None:
        """The gradient [B, T, D] of what `output` sent; the last stage is sent none."""
        _expect(payload, 0 if self.last else 1)
        return None if self.last else self._activation(payload[0], self._wire.gradients)

    def asked_slow(self, payload: Sequence[Packed]) -> bool:
        """Did this input come in the codec of slow lines?"""
        return not self.first and payload[1].codec == self._wire.slow

    def input_gradient(self, own: Tensor | None, *, asked_slow: bool) -> tuple[Packed, ...]:
        """What the stage before gets of a backward; stage 0 sends nothing."""
        codec = self._sent_in(self._wire.gradients, slow=asked_slow)
        return () if own is None else (self._encode(codec, own),)

    def _sent_in(self, codec: str, *, slow: bool = False) -> str:
        return self._wire.slow if slow or self._on_slow_line else codec

    def _activation(self, packed: Packed, codec: str) -> Tensor:
        """[B, T, D], fp32, finite, fresh memory on the device."""
        check_codec(packed, codec, *filter(None, (self._wire.slow,)))
        return codecs.decode(packed, expect_shape=self._hidden, device=self._device)

    def _encode(self, codec: str, own: Tensor) -> Packed:
        # Beyond that the next stage refuses it. NaN and infinity stay what they are, and are discarded.
        if MAX_VALUE < own.abs().amax() < math.inf:
            own = own.clamp(-MAX_VALUE, MAX_VALUE)
        with blameless(self._stage):
            return codecs.encode(codec, own)


def _expect(payload: Sequence[Packed], count: int) -> None:
    if len(payload) != count:
        raise BadMessage(RejectCode.BAD_SHAPE, "wrong number of tensors", found=len(payload), expected=count)


@contextlib.contextmanager
def blameless(stage: int) -> Iterator[None]:
    """Encoding our own result: if it is refused, no peer is to blame, and the microbatch is OVERFLOWED."""
    try:
        yield
    except BadMessage as error:
        raise Refused(RejectCode.OVERFLOWED, "our own result is not finite", stage=stage) from error


def check_codec(packed: Packed, *allowed: str) -> None:
    """Raises BadMessage if it travels as anything else."""
    if packed.codec not in allowed:
        raise BadMessage(RejectCode.MALFORMED, "not the run's codec", found=packed.codec[:32], expected=allowed)
