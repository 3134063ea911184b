"""Who owns unfinished work and does nothing about it, by the members' own counts of compute jobs (rule 12). Pure."""

from __future__ import annotations

from swarmnet.ids import PeerId
from swarmnet.messages import Report


class Progress:
    """Of one keeper's members."""

    def __init__(self) -> None:
        self._moved: dict[PeerId, tuple[int, float]] = {}

    def hear(self, peer: PeerId, report: Report, *, now: float) -> None:
        """A member's count; who has summed what it owns need not move."""
        before = self._moved.get(peer)
        if before is None or before[0] != report.progress or report.owned <= report.summed:
            self._moved[peer] = (report.progress, now)

    def forget(self, peer: PeerId) -> None:
        """That member is another now: it has the whole time again to show some."""
        self._moved.pop(peer, None)

    def still_s(self, peer: PeerId, *, now: float) -> float:
        """For how long its counter has stood still; 0 if nothing was heard."""
        moved = self._moved.get(peer)
        return now - moved[1] if moved is not None else 0.0
