"""What partners agreed on when they last met, and how their vectors travel as differences to it.

Partners send weights, which a codec of few bits would spoil. But where all of a group hold the same *reference*, what
they agreed on last, the difference to it is small, and int8 or nf4 is enough for it. A reference is the result of the
last round with the same draw (`averaging.grid`): the partners of a draw meet again in it. In the first cycle of draws
it is the initial weights, which every replica of step 0 holds. Its origin does not matter: equal digests are equal
bits.

A replica that has none (a joiner, a restarted peer), or another one (it missed the end of a round), shows that by its
digest: then the group's vectors of that round travel whole, in `FULL`, and their result is the reference of the next
round.
Held in bf16: a base need not be exact, only equal. Knows no rounds and no peers. Averaging thread only.
"""

from __future__ import annotations

import torch
from blake3 import blake3
from torch import Tensor

from swarmnet.engine.payloads import check_codec
from swarmnet.errors import BadMessage, RejectCode
from swarmnet.manifest.codec_names import DIFFERENCES
from swarmnet.messages import Packed
from swarmnet.wire import codecs

FULL = "fp16"
"""How a vector travels whole in a run with a codec for differences."""

TURNS = 4
"""Draws of partners until the first comes again, and so references that a replica holds. Even."""

Range = tuple[int, int]


class References:
    """What one replica remembers of its partners. codec: of the run; without loss of note it needs no reference."""

    def __init__(self, codec: str) -> None:
        self._codec, self._full = codec, FULL if codec in DIFFERENCES else codec
        self._first: Tensor | None = None  # the weights that all replicas began with
        self._agreed: dict[tuple[int, Range], Tensor] = {}  # (turn, elements) -> what was agreed on in its last round
        self._base: Tensor | None = None
        self.digest = b""
        """Of the reference of this round; empty: there is none."""

    def begin(self, weights: Tensor) -> None:
        """These are the first weights of the run: the reference of each turn's first time."""
        if self._codec in DIFFERENCES:
            self._first = weights.to("cpu", torch.bfloat16)

    def forget(self) -> None:
        """My state is another: what was agreed on led to the old one."""
        self._first, self._base, self.digest = None, None, b""
        self._agreed.clear()

    def open(self, turn: int, due: Range, *, first: bool) -> None:
        """A round of these elements begins, in that turn of the draw. first: it is the first cycle of turns."""
        # Later the first weights are far away.
        if not first:
            self._first = None
        began = None if self._first is None else self._first[slice(*due)]
        self._base = self._agreed.get((turn, due), began)
        self.digest = b"" if self._base is None else _digest(self._base)

    def agreed(self, turn: int, due: Range, mean: Tensor) -> None:
        """All partners hold this mean now."""
        if self._codec in DIFFERENCES:
            self._agreed[turn, due] = mean.to("cpu", torch.bfloat16)

    def encode(self, vector: Tensor, start: int, *, whole: bool) -> Packed:
        """Elements from `start` of the round on, or their difference to the reference. Raises NON_FINITE."""
        if whole or self._base is None:
            return codecs.encode(self._full, vector, apart=True)
        return codecs.encode(self._codec, vector - self._base[start : start + vector.numel()])

    def is_whole(self, packed: Packed) -> bool:
        """Does it say that it is no difference?"""
        return packed.codec == self._full

    def decode(self, packed: Packed, start: int, size: int) -> Tensor:
        """The `size` elements themselves: fp32, fresh memory. Raises BadMessage."""
        check_codec(packed, self._full, self._codec)
        vector = codecs.decode(packed, expect_shape=(size,))
        if self.is_whole(packed):
            return vector
        if self._base is None:
            raise BadMessage(RejectCode.MALFORMED, "a difference to what is not here")
        return vector.add_(self._base[start : start + size])


def _digest(base: Tensor) -> bytes:
    return blake3(base.view(torch.uint8).numpy().data).digest()
