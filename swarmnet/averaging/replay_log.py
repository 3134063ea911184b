"""The aggregates of one replica: the one in its sum buffer, those that it has signed and set aside, and those that it
has applied lately, for joiners.

| an aggregate is | from | until |
|---|---|---|
| held: in the sum buffer | `hold` | another one takes the buffer (`leave`) |
| set aside, packed: of the open step, it may still be committed | `leave` | a step is applied, or it is held again |
| applied | `applied` | no joiner has asked for `KEEP_S`, or the cap is reached |

A state takes longer to travel than a step may take. A joiner that has fetched version v goes on from there by the
aggregates of steps v, v + 1, ... and catches up as long as one travels faster than a step takes. They are stored only
while there is a joiner, packed as they travel: the last one while the next step is computed, at the latest before
another one takes the buffer. Knows no peers and no rounds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from swarmnet.ids import RoundId
from swarmnet.messages import Commit, Finished, Packed, Part, PartData, Stamp, TrailStep
from swarmnet.stage.interfaces import Summation

KEEP_S = 60.0
"""How long after the last sign of a joiner sums are kept."""

MOST_STEPS = 64

_BYTES_PER_ELEMENT, _LEAST_BYTES = 24, 64 << 20
"""The cap: two copies of weights and moments, or 24 to 40 sums under a small codec. Those set aside come first."""


@dataclass(slots=True)
class _Kept:
    """An aggregate. cut: the pieces in which it travels. commits: of the step that it was applied in; (): of an open
    step. data: its pieces, as far as they are packed. Invariant: all of them are, unless it is held."""

    stamp: Stamp
    finished: Finished
    cut: Sequence[tuple[int, int]]
    commits: tuple[Commit, ...] = ()
    data: dict[tuple[int, int], Packed] = field(default_factory=dict)
    packing: asyncio.Task[None] | None = None


class ReplayLog:
    """The aggregates of one (peer, stage)."""

    def __init__(self, sums: Summation, *, most_steps: int = MOST_STEPS, most_bytes: int | None = None) -> None:
        self._sums, self.most_steps = sums, most_steps
        self._most_bytes = most_bytes or max(_LEAST_BYTES, _BYTES_PER_ELEMENT * sums.num_elements)
        self._kept: dict[tuple[Stamp, RoundId], _Kept] = {}  # the oldest first
        self._held: _Kept | None = None
        self._until = -1.0

    def wanted(self) -> None:
        """A peer is on the way: keep aggregates for a while from now on."""
        self._until = asyncio.get_running_loop().time() + KEEP_S
        if self._held is not None and self._held.commits:
            self._pack(self._held)

    def forget(self) -> None:
        """The run has gone back: these steps are of a past that was given up."""
        for kept in self._kept.values():
            if kept.packing is not None:
                kept.packing.cancel()
        self._kept.clear()
        self._held = None

    def hold(self, stamp: Stamp, finished: Finished, cut: Sequence[tuple[int, int]]) -> None:
        """The aggregate is in the sum buffer, complete."""
        self._kept.pop((stamp, finished.id), None)
        self._held = self._kept[stamp, finished.id] = _Kept(stamp, finished, cut)

    def held(self, stamp: Stamp, round_id: RoundId) -> Finished | None:
        """What is in the sum buffer, if it is the aggregate of that round."""
        held = self._held
        return held.finished if held is not None and (held.stamp, held.finished.id) == (stamp, round_id) else None

    def applied(self, commits: tuple[Commit, ...]) -> None:
        """The held aggregate is applied, and its step is over."""
        # The run may have gone back while the step was applied.
        if self._held is None:
            return
        self._held.commits = commits
        self._kept = {at: kept for at, kept in self._kept.items() if kept.commits}
        if self._is_wanted:
            self._pack(self._held)

    async def leave(self, stamp: Stamp) -> None:
        """Another aggregate of that step takes the buffer. The held one stays if others may need it."""
        if (kept := self._held) is None:
            return
        packed = len(kept.data) == len(kept.cut)
        if (packed or self._is_wanted) if kept.commits else kept.stamp == stamp:
            # The caller may give up; the packing goes on.
            packing = self._pack(kept)
            await asyncio.wait([packing])
            packing.result()
            self._shrink()
        elif kept.commits:
            # There is no joiner, so no applied aggregate is worth its memory.
            self._kept = {at: each for at, each in self._kept.items() if not each.commits}
        else:
            del self._kept[kept.stamp, kept.finished.id]
        self._held = None

    def aside(self, stamp: Stamp, round_id: RoundId) -> tuple[Finished, list[Packed]] | None:
        """An aggregate that was set aside, in pieces from the first element to the last."""
        kept = self._kept.get((stamp, round_id))
        if kept is None or kept.commits:
            return None
        # The newest: while it goes back into the buffer it is nowhere else.
        self._kept[stamp, round_id] = self._kept.pop((stamp, round_id))
        return kept.finished, [packed for _, packed in sorted(kept.data.items())]

    def step(self, stamp: Stamp) -> TrailStep | None:
        """What happened on that version, if it is remembered."""
        kept = next((kept for kept in self._kept.values() if kept.stamp == stamp and kept.commits), None)
        return None if kept is None else TrailStep(kept.finished, kept.commits)

    def piece(self, request: Part) -> PartData | None:
        """A piece of an aggregate; None if it is not kept, or not packed yet: then it is still in the sum buffer."""
        kept = self._kept.get((request.stamp, request.id))
        packed = None if kept is None else kept.data.get((request.start, request.stop))
        return None if kept is None or packed is None else PartData((packed,), finished=kept.finished)

    @property
    def _is_wanted(self) -> bool:
        return asyncio.get_running_loop().time() <= self._until

    def _pack(self, kept: _Kept) -> asyncio.Task[None]:
        """Have it packed concurrently with other work."""
        if kept.packing is None or (kept.packing.done() and len(kept.data) < len(kept.cut)):
            kept.packing = asyncio.create_task(self._packed(kept))
        return kept.packing

    async def _packed(self, kept: _Kept) -> None:
        for piece in kept.cut:
            if piece not in kept.data:
                kept.data[piece] = await self._sums.finished_sum(*piece)

    def _shrink(self) -> None:
        """Forget what is over the cap: the oldest steps, and then the oldest sums that were set aside, but two."""
        size = sum(packed.num_bytes for kept in self._kept.values() for packed in kept.data.values())
        aside = [at for at, kept in self._kept.items() if not kept.commits]
        steps = [at for at in self._kept if at not in aside]
        # Of what one voter has signed in a step its last two votes count (`step.membership`).
        for number, at in enumerate([*steps, *aside[:-2]]):
            if size > self._most_bytes or number < len(steps) - self.most_steps:
                size -= sum(packed.num_bytes for packed in self._kept.pop(at).data.values())
