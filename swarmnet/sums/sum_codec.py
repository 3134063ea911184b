"""How the float vectors of local sync travel: under which codec, and with what memory of what was lost.

Error feedback: what a codec could not send of a vector is owed, and sent with a later one (arXiv:1809.07599).

    send   = what the codec makes of (vector + residual)
    owed   = vector + residual - send

`owed` becomes the residual only when the sum of that very round is applied. A round that is abandoned leaves the
residual as it was. Another replica may have finished that round all the same, and this one may hear of it only in the
next round, so `owed` is remembered for two rounds.

A reducer loses something too, when it encodes the sum of its part. It adds that to its own residual: over all replicas,
what is applied and what is left in residuals always add up to what was computed and what was left before. So it does
not matter who reduces which part in which round.

The residual belongs to one replica: others need it neither to verify a sum nor to follow. Knows no rounds but their ids
and no peers. Averaging thread only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from swarmnet.ids import RoundId
from swarmnet.messages import Packed
from swarmnet.wire import codecs


@dataclass(slots=True)
class _Owed:
    """In one round. own: of my contribution, instead of the residual. reduced: of sums I encoded, by hop, on top."""

    round_id: RoundId | None = None
    own: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    reduced: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)


class SumCodec:
    """contributed, reduced: the codecs of a contribution and of a reduced piece. residual: fp32 [num_elements], zeros
    at first; None if the codec loses too little to send it later.

    codec: of contributions. device: where what is owed is kept. Raises UsageError if no installed distribution brings
    the codec.
    """

    def __init__(self, codec: str, num_elements: int, *, device: torch.device) -> None:
        found = codecs.use(codec)
        self.contributed, self.reduced = codec, found.reduced
        self.residual = torch.zeros(num_elements, device=device) if found.feedback else None
        self._now = _Owed()
        self._before = _Owed()  # of the last round before, in which anything was sent

    def begin(self, round_id: RoundId) -> None:
        """A round begins: what is encoded from now on belongs to it."""
        now = self._now
        # The same round, tried again, goes on with what it has.
        if round_id != now.round_id:
            # A round in which nothing was sent leaves nothing to remember.
            self._before = now if now.own or now.reduced else self._before
            self._now = _Owed(round_id)

    def contribution(self, total: Tensor, start: int, stop: int) -> Packed:
        """Elements [start, stop) of `total`, and what is still owed of them. Again: the same. Raises NON_FINITE."""
        piece = total[start:stop]
        if self.residual is None:
            return codecs.encode(self.contributed, piece, apart=True)  # the vector moves on
        corrected = piece.to(self.residual.device) + self.residual[start:stop]
        packed = codecs.encode(self.contributed, corrected)
        # What others decode is what was sent.
        self._now.own[start, stop] = corrected - codecs.decode(packed, device=corrected.device)
        return packed

    def sum(self, total: Tensor, start: int, *, hop: int = 0) -> Packed:
        """A piece reduced in that hop, on the CPU; do not change `total` afterwards. Raises NON_FINITE."""
        packed = codecs.encode(self.reduced, total)
        # The reducer owes what encoding its sum has lost.
        if self.residual is not None:
            lost = total - codecs.decode(packed)
            self._now.reduced[hop, start, start + total.numel()] = lost.to(self.residual.device)
        return packed

    def applied(self, round_id: RoundId | None) -> None:
        """The sum of that round has been applied, whether it was mine or another; None: the step has ended without."""
        # The sum of any other round has nothing of mine in it.
        rounds = (self._now, self._before) if round_id is not None else ()
        found = next((each for each in rounds if each.round_id == round_id), _Owed())
        if self.residual is not None:
            for (start, stop), owed in found.own.items():
                # What my own contribution left is the residual now; what my reducing lost comes on top.
                self.residual[start:stop] = owed
            for (_, start, stop), lost in found.reduced.items():
                self.residual[start:stop] += lost
        self._now, self._before = _Owed(), _Owed()

    def forget(self) -> None:
        """What is owed was owed by another state."""
        if self.residual is not None:
            self.residual.zero_()
        self._now, self._before = _Owed(), _Owed()
