"""The reservations at this relay, the waiting callers and the open circuits: all within limits.

A *reservation* is a hidden peer's (`places`): callers reach it through here. A *call* is a caller that waits for the
peer to connect back; once it has come, the two are a *circuit*. Identities cost nothing in an open run, so the totals
bound the memory, and what one identity may hold is a small part of them.

Pure: told what happens, asked with `now`; the reason why something may not be is a text, and "" is yes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from swarmnet.ids import PeerId

IDLE_S, IDLE_BYTES = 300.0, 16 << 10
"""A circuit that carries less within that time is closed. A connection's own signs of life are a fraction of it."""


@dataclass(frozen=True, slots=True)
class RelayCaps:
    """What this machine does for unreachable peers."""

    peers: int = 16
    """Places."""
    circuits: int = 128
    """And calls that wait, of all together."""
    of_caller: int = 24
    of_peer: int = 48
    of_pair: int = 6
    """Of one caller to one peer: a connection for messages and four for tensors, and a broken one."""
    waiting_of_caller: int = 6

    @property
    def of_home(self) -> int:
        """Places for peers that call from one address: of one home, or of one who makes up identities."""
        return max(self.peers // 2, 1)

    @property
    def circuits_of_home(self) -> int:
        """Circuits of callers that call from one address."""
        return max(self.circuits // 4, 1)


@dataclass(slots=True)
class _Waiting:
    caller: PeerId
    peer: PeerId
    home: str
    joined: bool = False
    counted_since: float = 0.0
    num_bytes: int = 0


@dataclass(slots=True)
class RelayBook:
    """One relay's."""

    caps: RelayCaps
    places: dict[PeerId, str] = field(default_factory=dict)
    """Peers with a reservation, and the subnets that they call from."""
    _calls: dict[tuple[PeerId, bytes], _Waiting] = field(default_factory=dict)
    """By whom they are for, and their ids."""

    def reserve(self, peer: PeerId, home: str) -> str:
        """Give the peer a reservation; it keeps one that it has."""
        others = Counter(at for who, at in self.places.items() if who != peer)
        if others.total() >= self.caps.peers:
            return f"all {self.caps.peers} reservations are taken" if self.caps.peers else "this peer does not relay"
        if home and others[home] >= self.caps.of_home:
            return f"{self.caps.of_home} reservations are taken from that address"
        self.places[peer] = home
        return ""

    def leave(self, peer: PeerId) -> None:
        """End its reservation. Circuits to it end by themselves."""
        self.places.pop(peer, None)

    def call(self, caller: PeerId, peer: PeerId, ident: bytes, now: float, *, home: str = "") -> str:
        """The caller waits for the peer, under an id of its choice. home: where it calls from."""
        if peer not in self.places:
            return "no reservation here"
        if (peer, ident) in self._calls:
            return "the id is taken"
        calls, caps = self._calls.values(), self.caps
        mine = [each for each in calls if each.caller == caller]
        if len(calls) >= caps.circuits or len(mine) >= caps.of_caller:
            return "too many circuits"
        if home and sum(each.home == home for each in calls) >= caps.circuits_of_home:
            return "too many circuits from that address"
        if _count(calls, peer) >= caps.of_peer or _count(mine, peer) >= caps.of_pair:
            return "too many circuits to that peer"
        if sum(not each.joined for each in mine) >= caps.waiting_of_caller:
            return "too many callers wait"
        self._calls[peer, ident] = _Waiting(caller, peer, home, counted_since=now)
        return ""

    def arrive(self, peer: PeerId, ident: bytes, now: float) -> bool:
        """The peer connected back to the caller with this id. False: no caller waits for it under that id."""
        found = self._calls.get((peer, ident))
        if found is None or found.joined:
            return False
        found.joined, found.counted_since = True, now
        return True

    def end(self, peer: PeerId, ident: bytes) -> None:
        """The caller has left, or the circuit is over."""
        self._calls.pop((peer, ident), None)

    def carried(self, peer: PeerId, ident: bytes, num_bytes: int) -> None:
        """So many bytes more went through that circuit."""
        if found := self._calls.get((peer, ident)):
            found.num_bytes += num_bytes

    def idle(self, peer: PeerId, ident: bytes, now: float) -> bool:
        """Has the circuit carried next to nothing for `IDLE_S`? Asked at least that often."""
        found = self._calls.get((peer, ident))
        if found is None or now - found.counted_since < IDLE_S:
            return False
        idle = found.num_bytes < IDLE_BYTES
        found.counted_since, found.num_bytes = now, 0
        return idle

    def __len__(self) -> int:
        return len(self._calls)


MOST_COMING, COMING_FROM_ADDRESS, COMING_OF_CALLER = 256, 64, 6
"""Streams that lead to a hidden peer, in all; from one relay or one caller's address; of one caller, from there."""


def too_many(coming: Collection[tuple[str, PeerId]], one: tuple[str, PeerId]) -> str:
    """Why a hidden peer does not come for one more stream, given those that it has come for; "": it comes. Each is the
    address where it leads from, and the caller.
    """
    if len(coming) >= MOST_COMING:
        return f"{MOST_COMING} streams lead here"
    if sum(home == one[0] for home, _ in coming) >= COMING_FROM_ADDRESS:
        return f"{COMING_FROM_ADDRESS} streams lead here from that address"
    # Together with the address: a relay may name callers that have not called.
    if sum(each == one for each in coming) >= COMING_OF_CALLER:
        return f"{COMING_OF_CALLER} streams of that caller lead here"
    return ""


def _count(calls: Iterable[_Waiting], peer: PeerId) -> int:
    return sum(each.peer == peer for each in calls)
