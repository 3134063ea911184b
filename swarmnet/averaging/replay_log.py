"""What a replica has summed and applied lately, kept for those who are on the way with an older copy of the state.

A state takes longer to travel than a step may take. Whoever has fetched version v goes on from there by the sums of
steps v, v + 1, ... and catches up as long as a sum travels faster than a step takes. Sums are kept only while somebody
is on the way, the newest of them, within a cap, packed as they travel. The last one lies in the sum buffer. While
the next step is computed it is packed, at the latest before another one takes its place.

A sum of the open step that this replica has signed, and sets aside for another round, is kept as well: with that vote
it may still become the stage's commit, and then somebody must have it. Knows no peers and no rounds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from swarmnet.ids import RoundId
from swarmnet.messages import Commit, Finished, Packed, Part, PartData, Stamp, TrailStep
from swarmnet.stage.seams import Summation

KEEP_S = 60.0
"""How long after the last sign of a joiner sums are kept."""

MOST_STEPS = 64

_BYTES_PER_ELEMENT, _LEAST_BYTES = 24, 64 << 20
"""The cap: two copies of weights and moments, or 24 to 40 sums under a small codec. Those set aside come first."""


@dataclass(slots=True)
class _Kept:
    """An aggregate. commits: of the step that it was applied in; None: it was set aside in the open step. data: its
    pieces, as far as they are packed. whole: all of them are, and the sum buffer may hold another one."""

    finished: Finished
    commits: tuple[Commit, ...] | None
    data: dict[tuple[int, int], Packed] = field(default_factory=dict)
    whole: bool = False
    packing: asyncio.Task[None] | None = None


class ReplayLog:
    """The last steps of one (peer, stage). cut(): the pieces that the sum in the sum buffer travels in."""

    def __init__(
        self,
        sums: Summation,
        cut: Callable[[], list[tuple[int, int]]],
        *,
        most_steps: int = MOST_STEPS,
        most_bytes: int | None = None,
    ) -> None:
        self._sums, self._pieces, self.most_steps = sums, cut, most_steps
        self._most_bytes = most_bytes or max(_LEAST_BYTES, _BYTES_PER_ELEMENT * sums.num_elements)
        self._kept: dict[tuple[Stamp, RoundId], _Kept] = {}  # the oldest first
        self._until = -1.0

    def wanted(self) -> None:
        """A peer is on the way: keep sums for a while from now on."""
        self._until = asyncio.get_running_loop().time() + KEEP_S
        for kept in self._kept.values():
            self._pack(kept)

    def forget(self) -> None:
        """The run has gone back: these steps are of a past that was given up."""
        for kept in self._kept.values():
            if kept.packing is not None:
                kept.packing.cancel()
        self._kept.clear()

    def applied(self, stamp: Stamp, finished: Finished, commits: tuple[Commit, ...]) -> None:
        """The step of `stamp` is over; its sum is in the sum buffer until `save`."""
        self._keep(lambda kept: kept.whole and kept.commits is not None)
        self._kept[stamp, finished.id] = kept = _Kept(finished, commits)
        if self._is_wanted:
            self._pack(kept)

    async def set_aside(self, stamp: Stamp, finished: Finished) -> None:
        """Another sum of the same step takes the buffer: keep this one until the step is over."""
        aside = _Kept(finished, None)
        await self._packed(aside)
        self._kept[stamp, finished.id] = aside
        self._shrink()

    def aside(self, stamp: Stamp, round_id: RoundId) -> tuple[Finished, list[Packed]] | None:
        """A sum that was set aside, in pieces from the first element to the last."""
        kept = self._kept.get((stamp, round_id))
        if kept is None or kept.commits is not None:
            return None
        # The newest: while it goes back into the buffer it is nowhere else.
        self._kept[stamp, round_id] = self._kept.pop((stamp, round_id))
        return kept.finished, [packed for _, packed in sorted(kept.data.items())]

    def drop_aside(self, stamp: Stamp, round_id: RoundId) -> None:
        """Forget a sum that was set aside: it is in the sum buffer again."""
        if self.aside(stamp, round_id) is not None:
            del self._kept[stamp, round_id]

    async def save(self, stamp: Stamp, round_id: RoundId) -> None:
        """Another sum takes the buffer: pack the one of that round, if it was applied and a peer may want it."""
        last = self._kept.get((stamp, round_id))
        if last is None:
            # A sum that was not applied here: what waited in the buffer before it is gone.
            self._keep(lambda kept: kept.whole)
            return
        # Nobody is on the way, so no sum is worth its memory.
        if not last.whole and not self._is_wanted:
            self._keep(lambda kept: kept.commits is None)
            return
        # Whoever waits here may give up; the packing goes on.
        if (packing := self._pack(last)) is not None:
            await asyncio.wait([packing])
            packing.result()
        self._shrink()

    def step(self, stamp: Stamp) -> TrailStep | None:
        """What happened on that version, if it is remembered."""
        kept = next((kept for (at, _), kept in self._kept.items() if at == stamp and kept.commits is not None), None)
        return None if kept is None else TrailStep(kept.finished, kept.commits or ())

    def piece(self, request: Part) -> PartData | None:
        """A piece of a kept sum; None if it is not kept, or not packed yet: then it is still in the sum buffer."""
        kept = self._kept.get((request.stamp, request.id))
        packed = None if kept is None else kept.data.get((request.start, request.stop))
        return None if kept is None or packed is None else PartData((packed,), finished=kept.finished)

    @property
    def _is_wanted(self) -> bool:
        return asyncio.get_running_loop().time() <= self._until

    def _keep(self, wanted: Callable[[_Kept], bool]) -> None:
        self._kept = {at: kept for at, kept in self._kept.items() if wanted(kept)}

    def _pack(self, kept: _Kept) -> asyncio.Task[None] | None:
        """Have it packed beside whatever else is done; None if it is."""
        if not kept.whole and (kept.packing is None or kept.packing.done()):
            kept.packing = asyncio.create_task(self._packed(kept))
        return None if kept.whole else kept.packing

    async def _packed(self, kept: _Kept) -> None:
        for piece in self._pieces():
            if piece not in kept.data:
                kept.data[piece] = await self._sums.finished_sum(*piece)
        kept.whole = True

    def _shrink(self) -> None:
        """Forget what is over the cap: the oldest steps, and then the oldest sums that were set aside, but two."""
        size = sum(packed.num_bytes for kept in self._kept.values() for packed in kept.data.values())
        aside = [at for at, kept in self._kept.items() if kept.commits is None]
        steps = [at for at in self._kept if at not in aside]
        # Of what one voter has signed in a step its last two votes count (`step.membership`).
        for number, at in enumerate([*steps, *aside[:-2]]):
            if size > self._most_bytes or number < len(steps) - self.most_steps:
                size -= sum(packed.num_bytes for packed in self._kept.pop(at).data.values())
