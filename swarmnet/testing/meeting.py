"""Rounds of a simulation of many peers: members meet, and all have the sum after the time that it would take.

Between 100 members a butterfly is hundreds of streams; here it is one sum. Who is in a round, when it opens and what
becomes of it the step machines decide as ever. A member that does not come holds the others up until its leader leaves
it out; and the leader cannot tell which it is (`averaging.watch` sees no streams).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from swarmnet.ids import PeerId, RoundId
from swarmnet.messages import Packed, Round, Stamp
from swarmnet.stage.interfaces import Contribution, Summation

Losses = dict[int, tuple[float, int]]

_KEPT = 4
"""Rounds of one stage that are remembered."""


@dataclass(slots=True)
class _Met:
    """One round. parts: what each has brought."""

    parts: dict[PeerId, tuple[Packed, Losses]] = field(default_factory=dict)
    whole: asyncio.Future[tuple[Packed, Losses]] | None = None


class RoundMeeting:
    """A `Meeting`. takes_s: how long a round of these members takes once all have come, by their lines."""

    def __init__(self, takes_s: Callable[[tuple[PeerId, ...]], float]) -> None:
        self._takes_s = takes_s
        self._rounds: dict[int, dict[tuple[Stamp, RoundId], _Met]] = {}

    async def sum(self, me: PeerId, sums: Summation, current: Round, losses: Mapping[int, tuple[float, int]]) -> Losses:
        rounds, of = self._rounds.setdefault(current.stamp.stage, {}), (current.stamp, current.id)
        if of not in rounds:
            rounds[of] = _Met()
            for oldest in list(rounds)[:-_KEPT]:
                del rounds[oldest]
        met = rounds[of]
        if met.whole is None:
            met.whole = asyncio.get_running_loop().create_future()
        met.parts[me] = await sums.contribution(0, sums.num_elements), dict(losses)
        try:
            if met.parts.keys() >= set(current.receivers) and not met.whole.done():
                met.whole.set_result(await self._whole(sums, current, met))
            # A member that is called off must not take the sum from the others.
            total, told = await asyncio.shield(met.whole)
        except asyncio.CancelledError:
            met.parts.pop(me, None)
            raise
        await asyncio.sleep(self._takes_s(current.receivers))
        await sums.put(0, total)
        return told

    async def _whole(self, sums: Summation, current: Round, met: _Met) -> tuple[Packed, Losses]:
        told: Losses = {}
        for peer, _, indexes in current.contributions:
            told |= {index: met.parts[peer][1][index] for index in indexes}
        adding = [
            Contribution(peer, len(indexes), met.parts[peer][0])
            for peer, _, indexes in current.contributions
            if indexes
        ]
        reduced = await sums.reduce(adding, 0, sums.num_elements)
        return reduced.packed, told
