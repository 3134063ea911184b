"""What is known of a run: the newest genuine announcement of each peer, until it expires by its own clock.

Pure: told what was verified, asked with `now`. Bounded, so that a flood of fresh identities costs memory once. A full
table keeps those who were there first; only somebody admitted takes the place of the newest who is not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from swarmnet.ids import PeerId, RunId
from swarmnet.net.records import Announcement

MAX_PEERS = 4096


K = TypeVar("K")
V = TypeVar("V")


def gives_way(standing: Mapping[K, V], admits: Callable[[V], bool]) -> K | None:
    """Who leaves a full place for somebody admitted: the newest who is not, if anybody. standing: the first first."""
    return next((who for who in reversed(tuple(standing)) if not admits(standing[who])), None)


class RecordTable:
    """Announcements of one run by peer; the later expiry is the newer one. admits: may its peer take part now?"""

    def __init__(
        self,
        run: RunId | None,
        *,
        admits: Callable[[Announcement], bool] = lambda found: True,
        max_peers: int = MAX_PEERS,
    ) -> None:
        self._run, self._admits, self._max_peers = run, admits, max_peers
        self._newest: dict[PeerId, Announcement] = {}  # in the order in which they came

    def offer(self, found: Announcement, *, now: float) -> bool:
        """Take in a verified announcement. Returns whether it told something new; when full, newcomers have to wait."""
        peer = found.record.peer
        held = self._newest.get(peer)
        if found.record.run != self._run or (held is not None and held.expiry_ms >= found.expiry_ms):
            return False
        if held is None and len(self._newest) >= self._max_peers:
            self.fresh(now=now)
            if len(self._newest) >= self._max_peers:
                loser = gives_way(self._newest, self._admits) if self._admits(found) else None
                if loser is None:
                    return False
                del self._newest[loser]
        self._newest[peer] = found
        return held is None or held.record != found.record

    def get(self, peer: PeerId, *, now: float) -> Announcement | None:
        """This peer's, if it has not expired."""
        found = self._newest.get(peer)
        return found if found is not None and found.expiry_ms > now * 1000 else None

    def fresh(self, *, now: float) -> tuple[Announcement, ...]:
        """What has not expired, sorted by peer; forgets the rest."""
        self._newest = {peer: found for peer, found in self._newest.items() if found.expiry_ms > now * 1000}
        return tuple(found for _, found in sorted(self._newest.items()))


def agreed_num_stages(announcements: Iterable[Announcement]) -> int:
    """How many stages most peers say the run has (the smaller number on a tie); 0 if nobody said."""
    votes = Counter(found.num_stages for found in announcements)
    return min(votes, key=lambda number: (-votes[number], number), default=0)
