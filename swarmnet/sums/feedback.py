"""Error feedback: what a codec could not send of a vector is owed, and sent with a later one (arXiv:1809.07599).

    send   = what the codec makes of (vector + residual)
    owed   = vector + residual - send

`owed` becomes the residual only when the sum of that very round is applied. A round that is abandoned leaves the
residual as it was. Another replica may have finished that round all the same, and this one may hear of it only in the
next round, so `owed` is remembered for two rounds.

A reducer loses something too, when it encodes the sum of its part. It adds that to its own residual: over all replicas,
what is applied and what is left in residuals always add up to what was computed and what was left before. So it does
not matter who reduces which part in which round.

The residual belongs to one replica: others need it neither to verify a sum nor to follow. Knows no codecs and no
peers. Compute thread only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from swarmnet.errors import BadMessage, RejectCode
from swarmnet.ids import RoundId

RESIDUAL = "averaging.residual"
"""Its name where a replica saves it."""


@dataclass(slots=True)
class _RoundResidual:
    """In one round. own: of my contribution, instead of the residual. reduced: of sums I encoded, by hop, on top."""

    round_id: RoundId | None = None
    own: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    reduced: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)


class Feedback:
    """The residual of one replica: fp32 [num_elements], zeros at first."""

    def __init__(self, num_elements: int, *, device: torch.device) -> None:
        self.residual = torch.zeros(num_elements, device=device)
        self._now = _RoundResidual()
        self._before = _RoundResidual()  # of the last round before, in which anything was sent

    def begin(self, round_id: RoundId) -> None:
        """Open that round: everything sent later belongs to it."""
        now = self._now
        # The same round, tried again, goes on with what it has.
        if round_id != now.round_id:
            # A round in which nothing was sent leaves nothing to remember.
            self._before = now if now.own or now.reduced else self._before
            self._now = _RoundResidual(round_id)

    def forget(self) -> None:
        """Drop the residual and all that was sent in this round."""
        self.residual.zero_()
        self._end()

    def corrected(self, piece: Tensor, start: int) -> Tensor:
        """What should be sent of these elements, the first at `start`: fresh memory."""
        return piece + self.residual[start : start + piece.numel()]

    def contributed(self, corrected: Tensor, sent: Tensor, start: int) -> None:
        """Others decode `sent` for `corrected`. A second call for the same elements replaces the first."""
        self._now.own[start, start + corrected.numel()] = corrected - sent

    def reduced(self, total: Tensor, sent: Tensor, start: int, *, hop: int = 0) -> None:
        """Everybody installs `sent`, or sums it further, for a part's sum `total`."""
        self._now.reduced[hop, start, start + total.numel()] = (total - sent).to(self.residual.device)

    def applied(self, round_id: RoundId | None) -> None:
        """The sum of that round has been applied, whether it was mine or another. None: the step ended without one."""
        # The sum of any other round has nothing of mine in it.
        rounds = (self._now, self._before) if round_id is not None else ()
        found = next((each for each in rounds if each.round_id == round_id), _RoundResidual())
        for (start, stop), owed in found.own.items():
            # What my own contribution left is the residual now; what my reducing lost comes on top.
            self.residual[start:stop] = owed
        for (_, start, stop), lost in found.reduced.items():
            self.residual[start:stop] += lost
        self._end()

    def take_over(self, residual: Tensor) -> None:
        """Go on from a residual that was saved. Raises BadMessage: BAD_SHAPE, NON_FINITE; unchanged then."""
        if residual.shape != self.residual.shape or residual.dtype != torch.float32:
            raise BadMessage(RejectCode.BAD_SHAPE, "not this stage's residual", shape=tuple(residual.shape))
        if residual.numel() and not math.isfinite(residual.abs().max().item()):
            raise BadMessage(RejectCode.NON_FINITE, "NaN or infinity in a residual")
        self._end()
        self.residual.copy_(residual)

    def _end(self) -> None:
        self._now, self._before = _RoundResidual(), _RoundResidual()
