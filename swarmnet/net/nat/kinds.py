"""The kind of NAT in front of a peer, and which addresses it dials how often: the decisions of hole punching.

Two peers behind routers can connect if each dials at the same moment from a port with a public mapping that the other
knows: each one's first packet makes its own router expect the other's. Routers that give every connection another
outside port (symmetric ones) make the mapping unpredictable. The asking peer names the addresses that are
dialled, so what is dialled is bounded here: few addresses, public ones or such as two peers behind one router have, and
seldom.

Pure: `now` in seconds of any clock.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from swarmnet.bounds import Recent
from swarmnet.ids import PeerId
from swarmnet.net.limits import HOST_PUNCHES, PUNCH_AGAIN
from swarmnet.pacing import Backoff, Budgets

MOST_DIALLED = 4
"""Addresses, by one punch."""

BUSY_S = 1.0
LASTED_S = 60.0
"""A connection that lasted for so long was a good one: the next punch follows soon."""
AT_ONCE = 8

_CARRIERS = ipaddress.IPv4Network("100.64.0.0/10")
_REMEMBERED = 4096

NatKind = Literal["none", "cone", "symmetric", "carrier", "unknown"]
"""none: others see the address that the peer has. cone: the same outside port for all destinations. symmetric: another
for every connection. carrier: a carrier's, and no router at home. unknown: fewer than two members outside this network
said what they saw.
"""


Endpoint = tuple[str, int]
"""A TCP port: its host's number, and its own."""


@dataclass(frozen=True, slots=True)
class Sight:
    """One port of a peer: as its own machine has it, and as members saw it whom it called from there."""

    inside: Endpoint
    outside: tuple[Endpoint, ...]

    def kind(self) -> NatKind:
        """What two members saw. One on this machine, or in its network, says nothing of what is further out."""
        beyond = [place for place in self.outside if place != self.inside and not _of_this_machine(place[0])]
        # A port of its own for each: whatever else is in between, others cannot know which is theirs.
        if len(set(beyond)) > 1:
            return "symmetric"
        if self.inside in self.outside and not beyond:
            return "none"
        if (ip := _ip(self.inside[0])) is not None and ip in _CARRIERS:
            return "carrier"
        return "cone" if len(beyond) > 1 else "unknown"


def dialled(mine: Sight, theirs: Sight) -> list[Endpoint]:
    """The addresses of the other peer that this one dials; none in a network of a third party."""
    ours = {host for host, _ in mine.outside}
    # Neither can know where the other's next connection comes from.
    if mine.kind() == theirs.kind() == "symmetric":
        return []
    outside = [place for place in theirs.outside if (ip := _ip(place[0])) is not None and ip.is_global]
    # Behind one router the way outside and back in is often closed, and the way inside is short.
    together = any(host in ours for host, _ in outside) and at_home(theirs.inside[0])
    found = dict.fromkeys((*([theirs.inside] if together else []), *outside))
    return [place for place in found if place[0] != mine.inside[0]][:MOST_DIALLED]


@dataclass(slots=True)
class Punches:
    """When to punch, and how often others may have us dial. What others ask for takes nothing from what I ask for."""

    _hosts: Budgets[tuple[str, bool]] = field(default_factory=lambda: Budgets(HOST_PUNCHES, _REMEMBERED))
    under_way: set[tuple[PeerId, bool]] = field(default_factory=set)
    """Each with a peer, which asks for it or is asked."""
    _pauses: Recent[tuple[PeerId, bool], Backoff] = field(default_factory=lambda: Recent(_REMEMBERED))

    def wait_s(self, peer: PeerId, now: float, *, asks: bool = False) -> float:
        """Seconds until a punch with this peer may begin, which I ask for or it `asks` for; 0: now."""
        alike = {each for each, asked in self.under_way if asked == asks}
        if peer in alike or len(alike) >= AT_ONCE:
            return BUSY_S
        pause = self._pauses.get((peer, asks))
        return pause.wait_s(now) if pause else 0.0

    def take(self, places: Sequence[Endpoint], now: float, *, asks: bool = False) -> list[Endpoint]:
        """Those of the addresses that may be dialled now."""
        waits_s = {host: self._hosts.of((host, asks)).ask(now) for host in dict.fromkeys(host for host, _ in places)}
        return [place for place in places if not waits_s[place[0]]]

    def failed(self, peer: PeerId, now: float, *, asks: bool = False) -> None:
        """No connection came of it."""
        self._pauses[peer, asks] = pause = self._pauses.get((peer, asks)) or PUNCH_AGAIN()
        pause.failed(now)

    def ended(self, peer: PeerId, now: float, *, lasted_s: float) -> None:
        """The connection that I asked for is over."""
        # One that breaks at once is no better than none.
        if lasted_s >= LASTED_S:
            self._pauses.pop((peer, False), None)
        else:
            self.failed(peer, now)


def at_home(host: str) -> bool:
    """Is that a private address, of a machine and not of this one alone?"""
    ip = _ip(host)
    if not isinstance(ip, ipaddress.IPv4Address) or not ip.is_private:
        return False
    return not (ip.is_loopback or ip.is_link_local or ip.is_unspecified or ip.is_multicast or ip.is_reserved)


def _of_this_machine(host: str) -> bool:
    return (ip := _ip(host)) is not None and ip.is_loopback


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
