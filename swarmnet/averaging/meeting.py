"""The seam by which a simulation of many peers makes sums without streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from swarmnet.averaging.butterfly import Losses
from swarmnet.ids import PeerId
from swarmnet.messages import Round
from swarmnet.stage.seams import Summation


class Meeting(Protocol):
    """Where members of simulated rounds meet, instead of streams between them."""

    async def sum(self, me: PeerId, sums: Summation, current: Round, losses: Mapping[int, tuple[float, int]]) -> Losses:
        """Bring my contribution, and return once the whole sum is in my sum buffer: the losses of the round."""
        ...
