"""Which peers sit out, because their stage has waited for them in vain. Pure; private to each replica.

While a replica sits out, nobody waits for it, it does not keep, and its keeper grants it nothing (`keeper`). It may
compute, answer and fetch the sum as always. It sits out in proportion to the time that it has cost, and longer with
each strike, so that one identity costs no more than a share of all time. Strikes fade.
"""

from __future__ import annotations

import math
from collections.abc import Set

from swarmnet.ids import PeerId
from swarmnet.manifest.timers import Timers
from swarmnet.quorum import minority, quorum
from swarmnet.step.actions import Note, note

_SHARE = 16.0
"""Seconds that a peer sits out for each second that it has cost."""

_MOST_LEVEL, _MOST_PEERS = 5, 4096

_LONGEST = 16.0
"""Nobody sits out for more than so many long silences."""

_FADES_AFTER = 4.0
"""A strike fades after so many times the time that the peer sat out for the last one."""


class Strikes:
    """What one replica holds against others; a peer that was never struck is not in it."""

    def __init__(self, timers: Timers) -> None:
        self._longest_s, self._worth_s = _LONGEST * timers.long_silence_s, 1.5 * timers.suspect_s
        self._now = 0.0
        self._owed: dict[PeerId, tuple[float, float]] = {}  # seconds, when they were counted
        self._struck: dict[PeerId, tuple[int, float, float]] = {}  # level, since, until; the latest last

    def strike(self, peer: PeerId, reason: str, *, cost_s: float, pardon: bool = False, now: float) -> list[Note]:
        """The stage waited in vain, for `cost_s` seconds: one strike for one wait. pardon: the first is free."""
        # It sits out already: nobody waited for it.
        if self.sits(peer, now=now):
            return []
        if pardon and peer not in self._struck:
            self._struck[peer] = 0, now, now
            return []
        level = min(self.level(peer, now=now) + 1, _MOST_LEVEL)
        sits_s = min(_SHARE * cost_s * 2 ** (level - 1), self._longest_s)
        self._struck.pop(peer, None)
        self._struck[peer] = level, now, now + sits_s
        while len(self._struck) > _MOST_PEERS:
            del self._struck[next(iter(self._struck))]
        return [
            note(
                "strike", peer=peer, reason=reason, cost_s=round(cost_s, 3), sits_out_s=round(sits_s, 3), strikes=level
            )
        ]

    def charge(self, peer: PeerId, reason: str, *, cost_s: float, now: float) -> list[Note]:
        """The peer came late and cost `cost_s` seconds. What exceeds a share of all time makes a strike."""
        owed_s, since = self._owed.pop(peer, (0.0, now))
        owed_s = max(owed_s - (now - since) / _SHARE, 0.0) + cost_s
        if owed_s > self._worth_s:
            return self.strike(peer, reason, cost_s=owed_s, now=now)
        self._owed[peer] = owed_s, now
        while len(self._owed) > _MOST_PEERS:
            del self._owed[next(iter(self._owed))]
        return []

    @property
    def sitting(self) -> list[PeerId]:
        """The peers that sat out when `sits` was last asked."""
        return [peer for peer, (_, since, until) in self._struck.items() if since <= self._now < until]

    def sits(self, peer: PeerId, *, now: float) -> bool:
        """Does it sit out now?"""
        self._now = max(now, self._now)
        return peer in self._struck and now < self._struck[peer][2]

    def ends(self, *, now: float) -> dict[PeerId, float]:
        """The peers that sit out now, and until when."""
        self._now = max(now, self._now)
        return {peer: until for peer, (_, _, until) in self._struck.items() if now < until}

    def level(self, peer: PeerId, *, now: float) -> int:
        """Strikes that have not faded."""
        if peer not in self._struck:
            return 0
        level, since, until = self._struck[peer]
        faded = int(max(0.0, now - until) / (_FADES_AFTER * max(until - since, 1e-9)))
        return max(level - faded, 0)


def sitting(
    mates: Set[PeerId],
    strikes: Strikes,
    shunned: Set[PeerId],
    live: Set[PeerId],
    *,
    vain: Strikes | None = None,
    now: float,
) -> frozenset[PeerId]:
    """Which of these mates sit out: those that I struck, and those that most others shun.

    Less than half of the live members sit out. If more deserve it, the worst do: first those that kept in vain (where a
    keeper is chosen, `vain`), then those that most shun, then those that sit out longest.
    """

    ends, in_vain = strikes.ends(now=now), vain.ends(now=now) if vain is not None else {}
    struck = mates & (ends.keys() | in_vain.keys() | shunned)
    sits = {
        peer: (in_vain.get(peer, -math.inf), math.inf if peer in shunned else ends.get(peer, -math.inf))
        for peer in struck
    }
    worst = sorted(struck & live, key=lambda peer: (*(-end for end in sits[peer]), peer))
    return frozenset(struck - live) | frozenset(worst[: minority(live)])


class Delays:
    """Which members one step has waited for, and how long: for reports, last gradients, streams, or signatures."""

    def __init__(self, timers: Timers, now: float) -> None:
        self._timers, self._began_at, self._noted_at = timers, now, now
        self._waits_for: frozenset[PeerId] = frozenset()
        self._late_s: dict[PeerId, float] = {}

    def note(self, waits_for: Set[PeerId], members: int, *, now: float) -> None:
        """The members that the step waits for from now on. Nobody is to blame unless most members are ready."""
        for peer in self._waits_for:
            self._late_s[peer] = self._late_s.get(peer, 0.0) + now - self._noted_at
        self._noted_at = now
        self._waits_for = frozenset(waits_for) if len(waits_for) < quorum(members) else frozenset()

    def late_s(self, *, without: PeerId | None) -> float:
        """The longest time that the step waited for one member other than `without`."""
        return max((late_s for peer, late_s in self._late_s.items() if peer != without), default=0.0)

    def charge(self, strikes: Strikes, me: PeerId, *, now: float) -> list[Note]:
        """The step is over. A member owes what it was late beyond half of the time that the others took."""
        self.note(frozenset(), 0, now=now)
        alone_s = now - self._began_at - max(self._late_s.values(), default=0.0)
        free_s = max(alone_s, 0.0) / 2 + self._timers.settle_s
        return [
            note
            for peer, late_s in sorted(self._late_s.items())
            if peer != me and late_s > free_s
            for note in strikes.charge(peer, "slows the steps down", cost_s=late_s - free_s, now=now)
        ]
