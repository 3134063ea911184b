"""How the float vectors of local sync travel: under which codec, and with what memory of what was lost.

Stands between a flat vector and a `Packed`, which is one piece under one codec. Knows no rounds but their ids and no
peers. Averaging thread only.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from swarmnet.ids import RoundId
from swarmnet.messages import Packed
from swarmnet.sums.feedback import RESIDUAL, Feedback
from swarmnet.wire import codecs


class SumCodec:
    """reduced: the codec of a reduced piece. feedback: None if the codec loses too little to send it later.

    codec: of contributions. device: where what is owed is kept. Raises UsageError if no installed distribution brings
    the codec.
    """

    def __init__(self, codec: str, num_elements: int, *, device: torch.device) -> None:
        found = codecs.use(codec)
        self._contributed, self.reduced, self._device = codec, found.reduced, device
        self.feedback = Feedback(num_elements, device=device) if found.feedback else None

    def begin(self, round_id: RoundId) -> None:
        """A round begins: what is encoded from now on belongs to it."""
        if self.feedback is not None:
            self.feedback.begin(round_id)

    def contribution(self, total: Tensor, start: int, stop: int) -> Packed:
        """Elements [start, stop) of `total`, and what is still owed of them. Raises NON_FINITE."""
        piece = total[start:stop]
        if self.feedback is None:
            return codecs.encode(self._contributed, piece, apart=True)  # the vector moves on
        corrected = self.feedback.corrected(piece.to(self._device), start)
        packed = codecs.encode(self._contributed, corrected)
        # What others decode is what was sent.
        self.feedback.contributed(corrected, codecs.decode(packed, device=corrected.device), start)
        return packed

    def sum(self, total: Tensor, start: int, *, hop: int = 0) -> Packed:
        """A piece reduced in that hop, on the CPU; do not change `total` afterwards. Raises NON_FINITE."""
        packed = codecs.encode(self.reduced, total)
        # The reducer owes what encoding its sum has lost.
        if self.feedback is not None:
            self.feedback.reduced(total, codecs.decode(packed), start, hop=hop)
        return packed

    def applied(self, round_id: RoundId | None) -> None:
        """The sum of that round has been applied; None: the step has ended without one."""
        if self.feedback is not None:
            self.feedback.applied(round_id)

    def forget(self) -> None:
        """What is owed was owed by another state."""
        if self.feedback is not None:
            self.feedback.forget()

    @property
    def memory(self) -> dict[str, Tensor]:
        """What the codec remembers from step to step, by name; live tensors."""
        return {} if self.feedback is None else {RESIDUAL: self.feedback.residual}

    def recall(self, memory: Mapping[str, Tensor]) -> None:
        """Go on from a saved `memory`. Raises BadMessage; unchanged then."""
        if self.feedback is not None:
            self.feedback.take_over(memory[RESIDUAL])
