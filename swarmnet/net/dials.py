"""Which addresses may be dialled now: records that name a third party's address must not direct a flood at it.

A record proves who signed it, not that its addresses are the signer's. A peer has *shown* an address if it answered
there under its key, or if it has called from that host. Until then it is one of many who may name the address: of these
one dials at a time, and every failure makes the next one of any of them wait for longer. What a peer has shown is its
own: only its own failures make that wait, and not for long, since it may have restarted.

Other ports of a victim are other addresses, and one wildcard record makes any number of names lead to it. So all
dials of one host at unverified addresses are few a second, and all DNS names count as one host.

A relay lets us ask for few peers a second. So all peers that failed through it and were never reached there share one
small budget, which leaves most of it to peers that were reached, and to first dials.

Pure: told what was dialled and how it ended, asked with `now`.
"""

from __future__ import annotations

from collections.abc import Iterable

from swarmnet.bounds import Recent
from swarmnet.directory import MAX_ADDRESSES
from swarmnet.ids import PeerId
from swarmnet.net.address import Address
from swarmnet.net.limits import DIAL_AGAIN, DIAL_FIRST_S, DIAL_NAMED_S, DIAL_OF_ALL_AGAIN, DIAL_SHOWN_S, HOST_DIALS
from swarmnet.pacing import Backoff, Budgets, TokenBucket

_REMEMBERED = 8192
_NAMES = "names"
"""Stands for the host of every name: it may be the same one."""

Endpoint = tuple[str, int]


class Dials:
    """Bounded: of too many peers and addresses those unheard of for longest are forgotten."""

    def __init__(self) -> None:
        self._own: Recent[PeerId, Recent[Endpoint, Backoff]] = Recent(_REMEMBERED)
        self._of_all: Recent[Endpoint, Backoff] = Recent(_REMEMBERED)
        self._hosts: Budgets[str] = Budgets(HOST_DIALS, _REMEMBERED)
        self._under_way: set[Endpoint] = set()
        self._answered: Recent[tuple[PeerId, Endpoint], None] = Recent(_REMEMBERED)
        self._called_from: Recent[PeerId, str] = Recent(_REMEMBERED)
        self._refused: Recent[Endpoint, bool] = Recent(_REMEMBERED)

    def shown(self, peer: PeerId, address: Address) -> bool:
        """Did this peer answer at the address, or call from its host?"""
        return (peer, _at(address)) in self._answered or self._called_from.get(peer) == address.host

    def pause_s(self, peer: PeerId, address: Address, now: float) -> float:
        """For how long this peer is not to be dialled there. 0: dial, and say how it ended."""
        endpoint = _at(address)
        mine = own.get(endpoint) if (own := self._own.get(peer)) else None
        waits_s = [mine.wait_s(now)] if mine else [0.0]
        # One dial at a time for all who only name the address: it may be a victim's.
        if not self.shown(peer, address):
            if endpoint in self._under_way:
                return DIAL_FIRST_S
            # Made-up peers of a relay must not keep out a real one that still waits for its turn.
            if (not address.relay or mine) and (of_all := self._of_all.get(_shared(address))):
                waits_s.append(of_all.wait_s(now))
            if budget := self._budget(address):
                waits_s.append(budget.wait_s(now))
        return max(waits_s)

    def begin(self, peer: PeerId, address: Address, now: float) -> None:
        """A dial has begun; `answered`, `failed` or `left` ends it."""
        if not self.shown(peer, address):
            self._under_way.add(_at(address))
            if budget := self._budget(address):
                budget.take(now)

    def left(self, address: Address) -> None:
        """The dial was cancelled before its end."""
        self._under_way.discard(_at(address))

    def answered(self, peer: PeerId, address: Address) -> None:
        """The peer answered there, under its key."""
        endpoint = _at(address)
        if endpoint in self._under_way and (budget := self._budget(address)):
            budget.give_back()
        self._under_way.discard(endpoint)
        # It is alive: its other addresses are worth a try at once.
        self._own.pop(peer, None)
        self._answered[peer, endpoint] = None

    def failed(self, peer: PeerId, address: Address, *, refused: bool, now: float) -> None:
        """The connection was refused (`refused`), timed out, or another peer answered."""
        endpoint, shown = _at(address), self.shown(peer, address)
        self._under_way.discard(endpoint)
        self._refused[endpoint] = refused
        self._own[peer] = own = self._own.get(peer) or Recent(MAX_ADDRESSES)
        own[endpoint] = mine = own.get(endpoint) or DIAL_AGAIN()
        mine.failed(now, longest_s=DIAL_SHOWN_S if shown else DIAL_NAMED_S)
        # A verified address is its own: its failures delay no other peer.
        if not shown:
            shared = _shared(address)
            self._of_all[shared] = of_all = self._of_all.get(shared) or DIAL_OF_ALL_AGAIN()
            of_all.failed(now)

    def refused(self, address: Address) -> bool:
        """Was the connection refused when it was dialled last?"""
        return self._refused.get(_at(address), False)

    def called_from(self, peer: PeerId) -> str:
        """From which host the peer has called us last; "": it has not."""
        return self._called_from.get(peer, "")

    @property
    def callers(self) -> Iterable[str]:
        """From which hosts peers have called us."""
        return self._called_from.values()

    def called(self, peer: PeerId, host: str) -> None:
        """The peer called us from this host: it is alive, and what it names there is worth a dial at once."""
        self._called_from[peer] = host
        own = self._own.get(peer, Recent[Endpoint, Backoff](0))
        for endpoint in [endpoint for endpoint in own if endpoint[0] == host]:
            del own[endpoint]

    def _budget(self, address: Address) -> TokenBucket | None:
        """Of all dials of this host; None: it is spared otherwise, or this machine itself."""
        if address.relay or address.host in _MYSELF:
            return None
        return self._hosts.of(_NAMES if address.kind.startswith("dns") else address.host)


_MYSELF = frozenset({"127.0.0.1", "::1"})


def _at(address: Address) -> Endpoint:
    # Circuits of one relay lead to different peers.
    return (str(address), 0) if address.relay else _shared(address)


def _shared(address: Address) -> Endpoint:
    """What suffers from dials of all who name it; of a circuit that is its relay."""
    return address.host, address.port
