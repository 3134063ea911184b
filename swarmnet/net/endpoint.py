"""One identity on the network: its DHT node and its gRPC port, opened and closed together.

Peers and trainers stand on it. It knows the run's id and nothing of what is said.

`Wrap` is what a test bench puts between a process and the network: `swarmnet local --chaos` does (testing/injector.py),
production passes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from swarmnet import SOFTWARE
from swarmnet.clock import wall_time
from swarmnet.config.peer import NetworkSettings
from swarmnet.directory import Record, Role
from swarmnet.ids import PeerId
from swarmnet.manifest.extension import Notices
from swarmnet.manifest.terms import RunTerms
from swarmnet.net.address import Address, announced_at
from swarmnet.net.admission import Admissions
from swarmnet.net.admission_files import OwnPass, admissions_of, notices_of
from swarmnet.net.away import other_runs
from swarmnet.net.background import running
from swarmnet.net.dht import DhtDirectory
from swarmnet.net.dht_daemon import Listen
from swarmnet.net.greeting import Greeter
from swarmnet.net.grpc_options import GrpcConfig
from swarmnet.net.grpc_transport import GrpcTransport
from swarmnet.net.identity import IDENTITY_FILE, Identity, own_identity
from swarmnet.net.nat.dial_back import Say
from swarmnet.net.nat.kinds import at_home
from swarmnet.net.nat.port_mapping import Outside, mapped_ports
from swarmnet.net.nat.relay_book import RelayCaps
from swarmnet.net.ports import LastPorts
from swarmnet.net.records import Announcement
from swarmnet.net.swarm_link import SwarmLink
from swarmnet.net.twins import ASK_S, Twins, new_boot_id
from swarmnet.telemetry.journal import loopback_last
from swarmnet.telemetry.log import get
from swarmnet.transport import Service, Transport


async def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Wrap:
    """transport: what the process sends through. service: wraps the local service. background: runs until the process
    ends."""

    transport: Callable[[Transport], Transport] = lambda transport: transport
    service: Callable[[Service], Service] = lambda service: service
    background: Callable[[], Coroutine[Any, Any, None]] = _nothing


NOTHING_BETWEEN = Wrap()


BETWEEN_READS_S = 2.0
"""A lookup of all records costs every holder of a key CPU and line."""

LOOK_S = 5.0
"""How often a peer looks whether it is still admitted, and alone under its identity."""

log = get(__name__)


@dataclass(frozen=True)
class JoinedRun:
    """A process in the DHT of a run: who it is, and what admits it. One endpoint is opened on it."""

    identity: Identity
    directory: DhtDirectory
    terms: RunTerms
    network: NetworkSettings
    admissions: Admissions
    notices: Notices
    own_pass: OwnPass
    boot_id: int

    def restarted(self) -> JoinedRun:
        """The same as a process that has just started, as far as others can tell."""
        return replace(self, boot_id=new_boot_id())

    @functools.cached_property
    def greeter(self) -> Greeter:
        """How this process greets others."""
        terms = self.terms
        return Greeter(
            terms.run,
            terms.max_clock_offset_s,
            admissions=self.admissions,
            invitation=lambda: self.own_pass.shown,
            completed=terms.completed,
            filled_in=terms.filled_in,
            boot_id=self.boot_id,
        )

    @functools.cached_property
    def endpoint(self) -> Endpoint:
        """The one that is opened on it, which can be asked and does not listen yet. Raises UsageError."""
        identity, directory, network, terms = self.identity, self.directory, self.network, self.terms
        announced = announced_at(network.announce, identity.peer, port=network.port, dht_port=network.dht_port)
        twins = Twins(self.boot_id, network.dir / IDENTITY_FILE)
        transport = GrpcTransport(
            identity,
            terms.run,
            addresses=directory.addresses,
            find=directory.look_up,
            host=network.host,
            port=network.port,
            first_port=LastPorts.read(network.dir).port,
            bulk_port=network.bulk_port,
            announce=announced["port"],
            config=GrpcConfig.of(terms),
            greeter=self.greeter,
            relay_caps=RelayCaps(network.caps.relay_peers),
            relay_bytes_per_s=network.caps.relay_mbit * 1e6 / 8,
            on_twin=lambda hello, host, clocks_agree: twins.met(hello.boot_id, host, clocks_agree=clocks_agree),
        )
        directory.believes = transport.believes
        return Endpoint(self, transport, twins)


class Endpoint:
    """An endpoint. `serve` must be entered before any message arrives or leaves. numerics: of its record."""

    hides: ClassVar[bool] = True
    numerics = ""

    def __init__(self, joined: JoinedRun, transport: GrpcTransport, twins: Twins) -> None:
        self.joined, self.transport, self.twins = joined, transport, twins
        self.directory, self.run, self.incarnation = joined.directory, joined.terms.run, joined.boot_id
        self.me, self.signer, self.proofs = joined.identity.peer, joined.identity, transport
        self.admissions, self.notices = joined.admissions, joined.notices

    @property
    def told_of_others(self) -> bool:
        """Was it told where others are, so that there should be some?"""
        return bool(self.joined.network.bootstrap)

    def wall(self) -> float:
        """Unix seconds, by which invitations end."""
        return wall_time()

    @property
    def links(self) -> tuple[str, ...]:
        """What to give to others who would join the run through me; those of this machine alone come last."""
        return tuple(str(SwarmLink(self.run, address)) for address in loopback_last(self.directory.maddrs))

    def record(self) -> Record:
        """What I announce, without stages. Call it after `serve` has bound the port."""
        return Record(
            run=self.run,
            peer=self.me,
            incarnation=self.incarnation,
            addresses=self.transport.addresses,
            stages=(),
            numerics=self.numerics,
            invitation=self.joined.own_pass.shown,
            software=SOFTWARE,
            region=self.joined.network.region,
            nickname=self.joined.network.nickname,
        )

    def whereabouts(self) -> dict[str, object]:
        """The fields of the event `listening`. Call it after `serve` has bound the port."""
        return {
            "peer": self.me,
            "dht": list(self.directory.maddrs),
            "addresses": list(self.transport.addresses),
            "incarnation": self.incarnation,
            "links": list(self.links),
            "invited": bool(self.joined.own_pass.shown),
        }

    async def hide(self, say: Say) -> dict[str, object] | None:
        """This peer is unreachable: from now on callers reach it through relays, and the DHT does not count on it.

        say: is told of relays that are found and lost. Returns what to log; None: no peer relays for it.
        """

        def members() -> list[PeerId]:
            known = self.directory.known()
            return [each.peer for each in known if each.addresses and not each.hidden and (each.stages or each.feeds)]

        if not await self.transport.hide(members, say):
            return None
        self.directory.hide()
        relays = self.transport.network.relays
        links = [str(SwarmLink(self.run, at)) for relay in relays for at in self.directory.dht_addresses(relay)]
        return {"relays": list(relays), "links": loopback_last(links)}

    @contextlib.asynccontextmanager
    async def serve(self, service: Service) -> AsyncGenerator[None, None]:
        """Answer others as `service`, and announce this peer in the DHT."""
        self.transport.service = service
        async with self.transport, self._mapped_ports() as outside:
            self.transport.forwarded(outside)
            await self.directory.serve(BETWEEN_READS_S)
            # Before anything is announced: until now no other peer has taken notice of this process.
            await self.refuse_twin()
            LastPorts(self.transport.port, self.directory.port, self.transport.bulk.port).keep(self.joined.network.dir)
            # Only now: what it announces needs the port that was bound.
            async with running(self.directory.run(), self._while_admitted()):
                yield

    async def refuse_twin(self) -> None:
        """Raises UsageError if another process under this identity answers, and started earlier."""
        await self._ask_twin(await self.directory.look_for_myself(), starting=True)
        self.twins.check()

    def _mapped_ports(self) -> AbstractAsyncContextManager[Outside]:
        """Ports of our router's, if we are at home behind one."""
        host = Address.parse(self.transport.addresses[0]).host
        network = self.joined.network
        if network.map_port and not network.announce and at_home(host):
            # What moves since is in the record when that is published next.
            return mapped_ports(host, self.transport.ports, self.me, changed=self.transport.forwarded)
        return contextlib.nullcontext({})

    async def _while_admitted(self) -> None:
        """Raises UsageError when this peer is banned, or its invitation has ended and is not renewed, or a process that
        started earlier has its identity."""
        asked = self.directory.elsewhere
        while True:
            await asyncio.sleep(LOOK_S)
            self.joined.own_pass.check(now=wall_time())
            # A twin that started at the same moment found no record of mine, and I none of its.
            if asked is not self.directory.elsewhere:
                asked = self.directory.elsewhere
                await self._ask_twin(asked)
            self.twins.check()

    async def _ask_twin(self, found: Announcement | None, *, starting: bool = False) -> None:
        """Does the process that signed this still run under my identity? Its addresses are asked at the same time."""
        addresses = found.record.addresses if found is not None else ()
        answers = await asyncio.gather(*(self.transport.answers_as_me(at, limit_s=ASK_S) for at in addresses))
        for at, answer in zip(addresses, answers, strict=True):
            if answer is not None:
                where = at.removesuffix(f"/p2p/{self.me}")
                self.twins.met(answer[0], where, clocks_agree=answer[1], starting=starting)


_ANOTHER_RUN = (
    "this --dir was in other runs, and a manifest that was changed in one word is another run: start with the one of "
    "before to go on with its run"
)


@contextlib.asynccontextmanager
async def join_run(
    terms: RunTerms, network: NetworkSettings, *, role: Role = "stage"
) -> AsyncGenerator[JoinedRun, None]:
    """Take the identity in `network.dir`, which no other process may use meanwhile, and join the DHT.

    Raises UsageError, with what to do.
    """
    with own_identity(network.dir) as identity:
        if others := other_runs(network.dir, terms.run):
            log.warning("another_run", run=terms.run[:12], was_in=others, reason=_ANOTHER_RUN)
        admissions, notices = admissions_of(terms), notices_of(terms)
        own_pass = own_pass_of(admissions, identity, role, network)
        async with DhtDirectory(
            identity,
            terms.run,
            num_stages=terms.num_stages,
            listen=listen_as(identity, network),
            bootstrap=network.bootstrap,
            state_dir=network.dir,
            admissions=admissions,
            notices=notices,
            manifest=network.manifest,
            between_reads_s=BETWEEN_READS_S,
        ) as directory:
            if directory.by_memory:
                log.warning("bootstrap_silent", tried=network.bootstrap, action="joined by peers that were met before")
            own_pass.check(now=wall_time())  # now that the owner's bans were read
            yield JoinedRun(identity, directory, terms, network, admissions, notices, own_pass, new_boot_id())


def listen_as(identity: Identity, network: NetworkSettings) -> Listen:
    """Where the DHT node of that process listens. Raises UsageError for an address that it cannot announce."""
    announced = announced_at(network.announce, identity.peer, port=network.port, dht_port=network.dht_port)
    last = LastPorts.read(network.dir)
    # The operator may have given the last DHT port to the data plane.
    first = 0 if last.dht_port == network.port else last.dht_port
    return Listen(network.host, network.dht_port, first, tuple(map(str, announced["dht_port"])))


def own_pass_of(
    admissions: Admissions, identity: Identity, role: Role | None, network: NetworkSettings, *, transient: bool = False
) -> OwnPass:
    """What admits that process to the run. transient: its identity is for one command. Raises UsageError if it is not
    admitted."""
    if network.invitation and admissions.owner is None:
        log.warning("invitation_unused", reason="the run is open: it needs no invitation")
    return OwnPass(
        admissions,
        identity,
        role,
        network.dir,
        given=network.invitation,
        now=wall_time(),
        transient=transient,
        manifest=network.manifest,
    )


@contextlib.asynccontextmanager
async def open_endpoint(
    terms: RunTerms, network: NetworkSettings, *, numerics: str, role: Role = "stage"
) -> AsyncGenerator[Endpoint, None]:
    """`join_run`, and an endpoint on it."""
    async with join_run(terms, network, role=role) as joined:
        joined.endpoint.numerics = numerics
        yield joined.endpoint
