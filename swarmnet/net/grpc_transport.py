"""The gRPC transport: listens on one port and reaches every other peer over TLS pinned to its peer id.

Composes the callee's side (`grpc_callee`), the channels to each peer (`grpc_channels`), calls (`grpc_caller`) and
links (`grpc_link`). Knows who is calling (proved) and nothing of what is said. A context manager.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import grpc

from swarmnet import telemetry
from swarmnet.clock import loop_time
from swarmnet.directory import Record
from swarmnet.errors import PeerGone, PeerTimeout, SwarmError, UsageError
from swarmnet.ids import PeerId, RunId
from swarmnet.messages import Answer, Control, Heartbeat, Packed, Request
from swarmnet.net.address import Address, ip_of
from swarmnet.net.background import BackgroundTasks
from swarmnet.net.bulk.pool import BulkListener
from swarmnet.net.descriptors import DescriptorWatch, raise_limit
from swarmnet.net.dials import Dials
from swarmnet.net.greeting import HELLO, Greeter
from swarmnet.net.grpc_callee import Callee
from swarmnet.net.grpc_caller import call_peer
from swarmnet.net.grpc_channels import Dialling, PeerChannels, tcp_probe
from swarmnet.net.grpc_link import Link, MessageWriter
from swarmnet.net.grpc_options import CHANNEL_OPTIONS, GrpcConfig, listener_options, tune_allocator
from swarmnet.net.identity import Identity
from swarmnet.net.nat.dial_back import Proofs, Say, public_home
from swarmnet.net.nat.relay_book import RelayCaps
from swarmnet.net.network import Network, addresses_of
from swarmnet.net.ports import check_free
from swarmnet.net.tls import Leaf
from swarmnet.net.traffic import Traffic
from swarmnet.transport import Service
from swarmnet.wire.convert import Hello, write_hello

log = telemetry.get(__name__)

_LOOKS_PER_FORGET = 4


class GrpcTransport(Proofs):
    """`transport.Transport` over gRPC.

    run: None for a process that has no manifest yet and can only ask for one. addresses: where a peer listens
    (multiaddrs), asked at every dial. find: reads the record of a peer with unknown addresses. on_twin: another process
    greets this one under the same identity. announce: addresses to publish instead of the bound one. `service` must be
    set before entering, unless `listens` is False.
    listens: False for a process that only calls, and then has no port. first_port: tried first where `port` is 0.
    bulk_port: where bulk connections are taken, 0 for any port; None: none are.
    """

    def __init__(
        self,
        identity: Identity,
        run: RunId | None,
        *,
        addresses: Callable[[PeerId], Sequence[str]],
        service: Service | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        announce: Sequence[Address] = (),
        listens: bool = True,
        first_port: int = 0,
        bulk_port: int | None = 0,
        config: GrpcConfig = GrpcConfig(),  # noqa: B008
        greeter: Greeter | None = None,
        relay_caps: RelayCaps = RelayCaps(),  # noqa: B008
        relay_bytes_per_s: float = 0.0,
        find: Callable[[PeerId], Awaitable[None]] | None = None,
        on_twin: Callable[[Hello, str, bool], None] = lambda hello, host, clocks_agree: None,
    ) -> None:
        self.peer = identity.peer
        self.service = service
        self.traffic = Traffic()
        self._host, self._announce = host, tuple(announce)
        self.port = port
        """The port bound; before that the one to bind, 0 if any will do."""
        self.mapped: Address | None = None
        """Where a router forwards our port, once one does."""
        self._first_port = 0 if port else first_port
        self._config = config
        self._leaf = Leaf(identity)
        greeter = greeter or Greeter(run, config.max_clock_offset_s)
        self.network = Network(
            self._leaf,
            self._channels_to,
            addresses,
            greeter,
            self.traffic,
            relay_caps,
            relay_bytes_per_s,
            listens=listens,
            welcome=lambda peer: self._callee.knows(peer),
        )
        self._dialling = Dialling(
            self._leaf,
            greeter,
            config,
            self.network.addresses,
            self.network.connect,
            self.network.dials,
            self._tell_gone,
            find=find,
            on_twin=on_twin,
        )
        self.bulk, self._bulk_port = BulkListener(self.peer, run, stall_s=config.stall_s), bulk_port
        self._written = MessageWriter()
        self._callee = Callee(
            self._dialling,
            self._the_service,
            self._link_ended,
            self.traffic,
            self._written,
            self.bulk,
            {**self.network.methods, **self.bulk.methods(lambda peer: self._callee.knows(peer))},
        )
        self._channels: dict[PeerId, PeerChannels] = {}
        self._links: dict[PeerId, tuple[Link, asyncio.Task[object]]] = {}
        self._unknown_since: dict[PeerId, float] = {}
        self._tasks = BackgroundTasks()
        self._group = asyncio.TaskGroup()
        self._listener: grpc.aio.Server | None = None
        self._listens, self._started, self._closing = listens, False, False

    # ------------------------------------------------------------ life

    async def __aenter__(self) -> GrpcTransport:
        """Bind the port and answer calls. Raises UsageError if the port cannot be bound."""
        assert self.service is not None or not self._listens, "set the service before starting"
        tune_allocator()
        descriptors = DescriptorWatch(raise_limit())
        if self._listens:
            self._listener = await self._listen()
        await self._group.__aenter__()
        self._started = True
        self._tasks.spawn(self._forgetting(), self._group)
        self._tasks.spawn(descriptors.run(), self._group)
        return self

    async def _listen(self) -> grpc.aio.Server:
        listener = grpc.aio.server(options=listener_options(self._config))
        listener.add_generic_rpc_handlers((self._callee,))
        first = 0
        if self._first_port:
            with contextlib.suppress(UsageError, RuntimeError):  # taken, or taken meanwhile: any free one will do
                check_free(self._host, self._first_port, flag="--port")  # gRPC would complain on standard error
                first = self._bind(listener, self._first_port)
        listener.add_secure_port(f"unix:{self.network.open_local_socket()}", self._leaf.listener_credentials())
        try:
            self.port = first or self._bind(listener, self.port)
        except RuntimeError as error:
            raise UsageError(
                f"cannot listen on {self._at(self.port)}: choose another with --port, or --port 0 for a free one"
            ) from error
        if self._bulk_port is not None:
            self.bulk.listen(self._host, self._bulk_port)
        await listener.start()
        return listener

    def _bind(self, listener: grpc.aio.Server, port: int) -> int:
        bound: int = listener.add_secure_port(self._at(port), self._leaf.listener_credentials())
        return bound

    def _at(self, port: int) -> str:
        return f"[{self._host}]:{port}" if ":" in self._host else f"{self._host}:{port}"

    async def __aexit__(self, *raised: Any) -> None:
        """Break all links and calls, both ways. Idempotent."""
        if self._closing or not self._started:
            return
        self._closing = True
        self._tasks.cancel()
        if self._listener is not None:
            await self._listener.stop(grace=None)
        await self.bulk.close()
        self.network.holes.close()
        # While one is being closed, what ends with it may look up another.
        for channels in tuple(self._channels.values()):
            await channels.close()
        await self._group.__aexit__(*raised)
        self.network.remove()

    @property
    def ports(self) -> tuple[int, ...]:
        """Those bound: `port`, and the one of bulk connections if they are taken."""
        return tuple(filter(None, (self.port, self.bulk.port)))

    def forwarded(self, outside: Mapping[int, Address]) -> None:
        """A router forwards these ports of ours, from those addresses; or none any more."""
        self.mapped = outside.get(self.port)
        at = outside.get(self.bulk.port)
        self.bulk.outside_port = at.port if at is not None else 0 if outside else None

    @property
    def addresses(self) -> tuple[str, ...]:
        """Multiaddrs of this peer, once the port is bound; circuits, if it is unreachable."""
        if self.network.places is not None:
            return tuple(str(Address.circuit(relay, self.peer)) for relay in self.network.relays)
        return tuple(map(str, self._listening_at()))

    def _listening_at(self) -> Sequence[Address]:
        # Behind one router others may not get in through its outside: our own address stays, and comes last.
        own = [Address.of(host, self.port, self.peer) for host in outbound_hosts(self._host)]
        return self._announce or ([self.mapped, *own] if self.mapped else own)

    def came_from(self) -> frozenset[str]:
        inside = {"", *(public_home(address.host) for address in self._listening_at())}
        return frozenset(map(public_home, self._dialling.dials.callers)) - inside

    def network_of(self, peer: PeerId) -> str:
        hosts = [*self.network.verified_hosts(peer), self.network.dials.called_from(peer)]
        return next(filter(None, map(public_home, hosts)), "")

    async def hide(self, candidates: Callable[[], Sequence[PeerId]], say: Say) -> bool:
        """This peer is unreachable: from now on callers reach it through relays (`Network.hide`)."""
        return await self.network.hide(candidates, say, lambda work: self._tasks.spawn(work, self._group))

    # ------------------------------------------------------------ Transport

    def tell(self, peer: PeerId, message: Control) -> None:
        """Put the message into the peer's link. One that breaks the wire's own bounds is a bug and asserts."""
        # After the end nothing is said; senders need not know.
        if self._closing or not self._started:
            return
        # The first message opens the link.
        if peer not in self._links:
            channels, callee = self._channels_to(peer), self._callee
            link = Link(channels, self._written, self._tell_reached, callee.told, self.traffic.up)
            self._links[peer] = link, self._tasks.spawn(link.run(), self._group)
        link, _ = self._links[peer]
        # An old connection may still lead to a peer that hides since: it is no way for what comes.
        if isinstance(message, Heartbeat) and self.relayed(peer):
            self.network.holes.want(peer)
        # A peer that we cannot connect to may be connected to us. Our own link is tried all the same, now and then.
        if link.is_open or not self._callee.tell_back(peer, message):
            link.outbox.put(message)
        # One heartbeat waits at our own link, which is how it is tried again.
        elif isinstance(message, Heartbeat):
            link.outbox.clear()
            link.outbox.put(message)

    def call(
        self, peer: PeerId, request: Request, payload: tuple[Packed, ...] = (), *, deadline: float
    ) -> AsyncGenerator[Answer, None]:
        flow = self.traffic.flow(peer, type(request))
        return call_peer(self._channels_to(peer), request, payload, deadline=deadline, flow=flow)

    def relayed(self, peer: PeerId) -> bool:
        return self.network.relayed(peer)

    def carries(self, bytes_per_s: int) -> None:
        """Joiners get their share of this."""
        self.traffic.priority.bytes_per_s = bytes_per_s

    async def dial(self, peer: PeerId, address: str, *, deadline: float) -> None:
        await dial(peer, address, self._leaf, self._dialling.greeter, deadline=deadline)
        # It learns in the same way whether its other port can be connected to.
        self._tasks.spawn(self._open_bulk(peer, deadline), self._group)

    async def _open_bulk(self, peer: PeerId, deadline: float) -> None:
        channels = self._channels_to(peer)
        with contextlib.suppress(SwarmError):
            if await channels.greet(deadline=deadline) is None:
                channels.bulk.grow()

    def clock_offset_s(self, peer: PeerId) -> float | None:
        """By how much the peer's clock is ahead of mine; None: it has not greeted me."""
        return self._channels_to(peer).clock_offset_s

    def believes(self, record: Record) -> bool:
        """False for a record of a peer if messages of another process of it arrive: that process stays the valid
        one."""
        now = loop_time()
        return not self._dialling.lives.another(record.peer, record.incarnation, now)

    async def answers_as_me(self, address: str, *, limit_s: float) -> tuple[int, bool] | None:
        """The boot id of the process that answers there under my own identity, and whether our clocks agree; None if no
        such process answers in time. That may be this process itself."""
        # Only for this question: what I announce of myself leads here.
        alone = replace(
            self._dialling,
            addresses=lambda peer: addresses_of(peer, [address]),
            on_gone=lambda peer, definite: None,
            dials=Dials(),
            find=None,
        )
        channels = PeerChannels(self.peer, alone)
        try:
            async with asyncio.timeout(limit_s):
                refusal = await channels.greet(deadline=loop_time() + limit_s)
        except (SwarmError, TimeoutError) as error:
            log.debug("no_twin", address=address, error=error)
            return None
        finally:
            await channels.close()
        # A refusal without a greeting is one that speaks another protocol.
        return (channels.boot_id, refusal is None) if refusal is None or channels.boot_id else (0, False)

    # ------------------------------------------------------------ inside

    def _channels_to(self, peer: PeerId) -> PeerChannels:
        channels = self._channels.get(peer)
        if channels is None:
            channels = self._channels[peer] = PeerChannels(peer, self._dialling)
        return channels

    def _the_service(self) -> Service:
        assert self.service is not None, "the service was taken away"
        return self.service

    def _tell_gone(self, peer: PeerId, definite: bool) -> None:
        log.info("peer_gone", peer=peer, definite=definite)
        self._dialling.lives.ended(peer, self._channels_to(peer).boot_id)
        if self.service is not None:
            self.service.on_gone(peer, definite=definite)

    def _tell_reached(self, peer: PeerId) -> None:
        self._dialling.lives.seen(peer, self._channels_to(peer).boot_id, loop_time())
        if not self._closing and self.service is not None:
            self.service.on_reached(peer)

    def _link_ended(self, peer: PeerId, boot_id: int) -> None:
        """A peer's link to us ended: it closed, or its connection broke. boot_id: of the process that opened it."""
        self._dialling.lives.ended(peer, boot_id)
        # Its link is often the first to notice that a process died. Of strangers nothing can be dialled. What takes a
        # shortcut has not died.
        if not self._closing and not self.network.holes.joins(peer) and self.network.addresses(peer):
            self._tasks.spawn(self._channels_to(peer).broke(None), self._group)

    async def _forgetting(self) -> None:
        """Close the channels to peers that have left the directory; those that still talk keep theirs."""
        while True:
            await asyncio.sleep(self._config.forget_s / _LOOKS_PER_FORGET)
            now = loop_time()
            self.bulk.drop(self._dialling.greeter.unwelcome)
            for peer, channels in self._channels.items():
                channels.bulk.close_idle(welcome=self._dialling.greeter.unwelcome(peer) is None)
            # A peer that is in use stays, whatever the directory says: records are lost more easily than lines.
            unknown = {
                peer for peer, channels in self._channels.items() if not channels.in_use and not channels.addresses()
            }
            self._unknown_since = {peer: self._unknown_since.get(peer, now) for peer in sorted(unknown)}
            for peer, since in self._unknown_since.items():
                # A record that is late for a moment costs no connection.
                if now - since >= self._config.forget_s:
                    await self._forget(peer)

    async def _forget(self, peer: PeerId) -> None:
        channels = self._channels[peer]
        if channels.in_use:  # since we looked
            return
        log.debug("peer_forgotten", peer=peer)
        del self._channels[peer]
        if peer in self._links:
            _, running = self._links.pop(peer)
            running.cancel()
        await channels.close()


def outbound_hosts(host: str) -> list[str]:
    """What to publish for a bound host: a wildcard becomes the addresses this machine sends from; :: stands for IPv4,
    too."""
    ip = ip_of(host)
    # A fixed address, or a name, is published as it is.
    if ip is None or not ip.is_unspecified:
        return [host]
    if ip.version == 4:
        return [_outbound(socket.AF_INET) or "127.0.0.1"]
    return [found for family in (socket.AF_INET6, socket.AF_INET) if (found := _outbound(family))] or ["::1"]


def _outbound(family: socket.AddressFamily) -> str:
    """The address that this machine sends from; "" if it has no way to others."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # UDP: chooses a route, sends nothing.
            probe.connect(("192.0.2.1" if family == socket.AF_INET else "2001:db8::1", 9))
            return str(probe.getsockname()[0])
    except OSError:
        return ""


SILENCE_S = 3.5
"""A TCP dial that is not answered for so long is dropped on the way: lost packets were sent again after 1 and 3 s."""


_HELLO_S = 1.0


async def dial(peer: PeerId, text: str, leaf: Leaf, greeter: Greeter, *, deadline: float) -> None:
    """Open one new connection to find out whether `peer` can be connected to there, and close it again.

    A plain TCP dial first: only it can tell silence (a firewall) from a refusal. Then TLS, which proves who answers.
    Then Hello, by which the peer itself learns that a caller reached it; no answer is needed, since a peer with a busy
    event loop can be connected to all the same. Raises PeerGone, PeerTimeout.
    """
    try:
        address = Address.parse(text)
    except UsageError as error:
        raise PeerGone("no TCP address", peer=peer, address=text) from error
    if not address.direct:
        raise PeerGone("a circuit, which cannot be dialled from here", peer=peer, address=text)
    # Our TLS would fail anyway; this says it in words.
    if address.peer not in (None, peer):
        raise PeerGone("the address of another peer", peer=peer, address=text)
    if reason := await tcp_probe(address, limit_s=min(deadline - loop_time(), SILENCE_S)):
        raise PeerGone(reason, peer=peer)
    channel = grpc.aio.secure_channel(address.target, leaf.channel_credentials(peer), options=CHANNEL_OPTIONS)
    try:
        async with asyncio.timeout_at(deadline):
            await _prove(peer, channel)
    except TimeoutError as error:
        raise PeerTimeout("something answers, and does not say in time who it is", peer=peer) from error
    else:
        with contextlib.suppress(grpc.aio.AioRpcError, TimeoutError):
            async with asyncio.timeout(_HELLO_S):
                await channel.unary_unary(HELLO)(write_hello(greeter.hello()))
    finally:
        await channel.close()


async def _prove(peer: PeerId, channel: grpc.aio.Channel) -> None:
    while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
        # TCP was open a moment ago, so it is the TLS proof that failed.
        if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
            raise PeerGone("another peer answers there", peer=peer)
        await channel.wait_for_state_change(state)
