"""How this peer reaches another one: `Network.connect` opens a stream, and its users do not know of which kind.

A stream is direct, is hole-punched through both routers (`nat.punch`), comes from the peer itself, or crosses a relay.
It is where a gRPC channel dials: a TCP port, or a socket inside this machine from which the bytes go on. What a peer
needs so that others reach it, when it cannot be dialled, begins here as well (`Network.hide`).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from swarmnet import telemetry
from swarmnet.bounds import Recent
from swarmnet.clock import loop_time, set_within
from swarmnet.errors import PeerGone, PeerTimeout, UsageError
from swarmnet.ids import PeerId
from swarmnet.net.address import Address
from swarmnet.net.dials import Dials
from swarmnet.net.greeting import Greeter
from swarmnet.net.grpc_channels import PeerChannels
from swarmnet.net.limits import IN_VAIN
from swarmnet.net.nat.circuits import Arrivals, End, LocalSockets, Stream, Tunnel
from swarmnet.net.nat.dial_back import Say
from swarmnet.net.nat.hidden import ChannelsTo, Places, answer_of
from swarmnet.net.nat.punch import Holes
from swarmnet.net.nat.relay import COME_S, CONNECT, Relay
from swarmnet.net.nat.relay_book import RelayCaps
from swarmnet.net.tls import Leaf
from swarmnet.net.traffic import Traffic
from swarmnet.pacing import Budgets
from swarmnet.wire.relay import ID_BYTES, Connect, write_ask

FIND_RELAY_S = 20.0
"""How long a peer that cannot be dialled looks for its first relay."""

REVERSE_S = 3.0
"""A caller that can be dialled waits so long for the peer to come to it directly."""

log = telemetry.get(__name__)


def addresses_of(peer: PeerId, texts: Iterable[str]) -> list[Address]:
    """The addresses that a record names; malformed and foreign ones are left out."""
    found = []
    for text in texts:
        try:
            address = Address.parse(text)
        except UsageError as error:
            log.debug("bad_address", peer=peer, error=error)
            continue
        # A record cannot make us dial another peer in this one's name.
        if address.peer in (None, peer) and address.relay != peer:
            found.append(address)
    return list({(address.host, address.port): address for address in found}.values())


class Network:
    """Streams to other peers, and what others need for streams to this one.

    channels(peer): how a relay or a peer is called. lookup(peer): the addresses that its record names. listens: False:
    this peer has no port. welcome(peer): has it greeted, and is it admitted?
    """

    def __init__(
        self,
        leaf: Leaf,
        channels: ChannelsTo,
        lookup: Callable[[PeerId], Sequence[str]],
        greeter: Greeter,
        traffic: Traffic,
        caps: RelayCaps,
        relay_bytes_per_s: float,
        *,
        listens: bool,
        welcome: Callable[[PeerId], bool],
    ) -> None:
        self._me, self._channels, self._lookup, self._listens = leaf.peer, channels, lookup, listens
        self.dials = Dials()
        self._local_sockets, self._arrivals = LocalSockets(), Arrivals()
        self._local_socket = ""
        self.relay = Relay(
            leaf.peer, caps, self._arrivals, greeter, welcome, traffic, lambda: traffic.relays(relay_bytes_per_s)
        )
        self.holes = Holes(leaf, channels, self._local_sockets, welcome, lambda peer: channels(peer).leave_relays())
        self.places: Places | None = None
        """Where this peer is reached, if it cannot be dialled."""
        self.methods = {**self.relay.methods, **self.holes.methods}
        self._in_vain: Budgets[tuple[PeerId, PeerId]] = Budgets(IN_VAIN)
        """Of peers that did not connect back directly when a relay asked them to."""
        self._by_relay: Recent[PeerId, None] = Recent(4096)
        """Peers with a last stream through a relay."""

    def open_local_socket(self) -> str:
        """A path for the local socket at which this peer's own port listens: where streams to it end."""
        self._local_socket = self._local_sockets.path()
        return self._local_socket

    def remove(self) -> None:
        """Leave nothing in this machine. Idempotent."""
        self._local_sockets.remove()

    # ------------------------------------------------------------ how this peer is reached

    @property
    def hidden(self) -> bool:
        """Can this peer not be dialled?"""
        return self.places is not None or not self._listens

    @property
    def relays(self) -> tuple[PeerId, ...]:
        """Through which peers this one is reached now, if it cannot be dialled."""
        return tuple(self.places.relays) if self.places is not None else ()

    async def hide(
        self,
        candidates: Callable[[], Sequence[PeerId]],
        say: Say,
        spawn: Callable[[Coroutine[object, object, None]], asyncio.Task[None]],
    ) -> bool:
        """This peer cannot be dialled: from now on it is reached through relays, which it chooses among members that
        can be dialled. Returns whether one was found; if not, all is as before.
        """
        places = Places(self._me, self._channels, self.verified_hosts, candidates, self._local_socket, say)
        self.relay.close()
        keeping = spawn(places.run())
        await set_within(places.settled, FIND_RELAY_S)
        if not places.relays:
            self.relay.open = True
            keeping.cancel()
            return False

        def observers() -> list[PeerId]:
            return [*places.relays, *(peer for peer in candidates() if peer not in places.relays)]

        self.places = places
        self.holes.begin(self._local_socket, observers, say)
        return True

    # ------------------------------------------------------------ how others are reached

    def addresses(self, peer: PeerId) -> list[Address]:
        """Where the peer is said to be reached."""
        if self.holes.leads_to(peer):
            return [Address.circuit(peer, peer)]
        return addresses_of(peer, self._lookup(peer))

    def connect(self, peer: PeerId, address: Address) -> Stream:
        """A stream to the peer, at one of its addresses."""
        if address.direct:
            return Stream(address.target)
        if address.relay == peer:
            return self.holes.tunnel(peer)
        return Tunnel(self._local_sockets.path(), partial(self.open, peer, PeerId(address.host)))

    def verified_hosts(self, peer: PeerId) -> list[str]:
        """Hosts in the peer's record where it has answered, or from which it has called."""
        return [at.host for at in self.addresses(peer) if at.direct and self.dials.shown(peer, at)]

    def relayed(self, peer: PeerId) -> bool:
        """Do streams to this peer cross a relay now?"""
        known = self.addresses(peer)
        if self.holes.leads_to(peer) or not known or any(address.direct for address in known):
            return False
        return self.hidden or peer in self._by_relay

    def _may_come(self, peer: PeerId, relay: PeerId) -> bool:
        """Is it worth while to have the relay send the peer to us?"""
        # A twin cannot connect back: it would dial itself.
        return not (self.hidden or peer == self._me or self._in_vain.of((peer, relay)).wait_s(loop_time()))

    @asynccontextmanager
    async def open(self, peer: PeerId, relay: PeerId) -> AsyncGenerator[End, None]:
        """A byte stream to the peer: direct because it comes to us, or through `relay`. Raises SwarmError,
        TimeoutError."""
        async with AsyncExitStack() as stack:
            yield await self._way(stack, peer, relay)

    async def _way(self, stack: AsyncExitStack, peer: PeerId, relay: PeerId) -> End:
        if relay == self._me:
            if (came := await self._expect(stack, peer, self._request_connect_back)) is None:
                raise PeerTimeout("it does not come", peer=peer)
            return came
        channels = self._channels(relay)
        # Circuits do not lead through circuits.
        if not any(address.direct for address in channels.addresses()):
            raise PeerGone("its relay cannot be dialled", peer=peer, relay=relay)
        if self._may_come(peer, relay):
            if (came := await self._expect(stack, peer, partial(self._reverse, channels))) is not None:
                return came
            self._in_vain.of((peer, relay)).take(loop_time())
            log.debug("does_not_come", peer=peer, relay=relay)
        connect = Connect(peer, secrets.token_bytes(ID_BYTES))
        end = await stack.enter_async_context(channels.asked(CONNECT, write_ask(connect), limit_s=COME_S))
        await answer_of(end, channels)
        self._by_relay[peer] = None
        if peer != self._me:
            self.holes.want(peer)
        return end

    async def _expect(
        self, stack: AsyncExitStack, peer: PeerId, call: Callable[[PeerId, bytes], Coroutine[object, object, None]]
    ) -> End | None:
        """The peer's own stream to us, once it was called; None if it does not come. Raises what `call` does, and
        Refused."""
        ident = secrets.token_bytes(ID_BYTES)
        coming = stack.enter_context(self._arrivals.expect(peer, ident))
        # If the relay does not answer, that is no word about the peer.
        await call(peer, ident)
        try:
            async with asyncio.timeout(REVERSE_S):
                came = await coming
        except TimeoutError:
            return None
        if peer in self._by_relay:
            del self._by_relay[peer]
            self._channels(peer).leave_relays()
        return came

    async def _request_connect_back(self, peer: PeerId, ident: bytes) -> None:
        if self.relay.request_connect_back(self._me, peer, ident, reverse=False) > 0:
            raise PeerTimeout("it has no reservation here now, or was called too often", peer=peer)

    async def _reverse(self, channels: PeerChannels, peer: PeerId, ident: bytes) -> None:
        ask = Connect(peer, ident, reverse=True)
        async with channels.asked(CONNECT, write_ask(ask), limit_s=COME_S) as end:
            await answer_of(end, channels)
