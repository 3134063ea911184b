"""When a replica must take its state from another one: it fell behind, lost a fork, or its stage lost a sum. Pure.

Rules 18 and 19 of docs/protocol.md. It decides whom to ask and how often; fetching is the driver's.
"""

from __future__ import annotations

from swarmnet.ids import Chain, PeerId
from swarmnet.step.actions import Action, Note, Resync
from swarmnet.step.view import View


class Lag:
    """Watches how far one replica is behind its mates."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._asked_at = -1e9
        self._behind_since: float | None = None
        self._orphaned_since: float | None = None

    def caught_up(self) -> None:
        """The replica has moved on."""
        self._behind_since = self._orphaned_since = None

    def behind(self, version: int, *, now: float) -> list[Action]:
        """A mate is ahead (rule 18): by one step the sum may still be fetched; by more, or for long, the state must."""
        if self._behind_since is None:
            self._behind_since = now
        ahead = {peer: seen.version for peer, seen in self._view.mates()
                 if seen.version > version and seen.synced and not seen.dead}
        newest = max(ahead.values(), default=version)
        if newest > version + 1 or now - self._behind_since > 2 * self._view.timers.suspect_s:
            return self.resync(tuple(sorted(ahead)), "behind", version, now=now)
        return []

    def orphaned(self, version: int, *, now: float) -> bool:
        """Have others gone past a step that this replica cannot end, and no mate either?

        They applied it on its commits; whoever held the sum behind one, or could tell them, is gone. It cannot be made
        again, since nobody has the other stages' weights of that step. Two long silences, so that somebody may still
        be heard.
        """
        view = self._view
        passed = any(seen.version > version and seen.synced and not seen.dead for _, _, seen in view.known())
        mate = any(seen.version > version and seen.synced and not seen.dead for _, seen in view.mates())
        if mate or not passed:
            self._orphaned_since = None
            return False
        if self._orphaned_since is None:
            self._orphaned_since = now
        return now - self._orphaned_since > 2 * view.timers.long_silence_s

    def resync(self, donors: tuple[PeerId, ...], reason: str, version: int, *, now: float) -> list[Action]:
        """Fetch a snapshot from one of these; asked for at most once per silence limit."""
        if not donors or now - self._asked_at < self._view.timers.suspect_s:
            return []
        self._asked_at = now
        return [Resync(donors, reason), Note("resync", {"reason": reason, "version": version})]


def yields(*, mine: tuple[bool, Chain], theirs: tuple[bool, Chain]) -> bool:
    """Rule 19: of two forks of one version, (has a commit, chain), does mine give way?

    One that holds a commit never yields to one that has none.
    """
    return theirs > mine
