"""One identity on the network: its place in the DHT and its gRPC port, opened and closed together.

Peers and trainers stand on it. It knows the run's id and nothing of what is said.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path

from swarmnet.config.peer import PeerConfig
from swarmnet.ids import PeerId, RunId
from swarmnet.manifest.schema import Manifest
from swarmnet.net.announced import announced_at
from swarmnet.net.dht import DhtDirectory
from swarmnet.net.directory import Record
from swarmnet.net.grpc_options import GrpcConfig
from swarmnet.net.grpc_transport import GrpcTransport
from swarmnet.net.identity import Identity
from swarmnet.net.own_dir import own_identity
from swarmnet.net.ports import LastPorts
from swarmnet.net.swarm_link import SwarmLink
from swarmnet.net.tls import open_authority
from swarmnet.net.transport import Service
from swarmnet.telemetry.journal import loopback_last


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An open endpoint. `serve` must be entered before anything is heard or said."""

    identity: Identity
    directory: DhtDirectory
    transport: GrpcTransport
    incarnation: int
    numerics: str
    run: RunId
    dir: Path

    @property
    def me(self) -> PeerId:
        """Who I am."""
        return self.identity.peer

    @property
    def links(self) -> tuple[str, ...]:
        """What to give to others who would join the run through me; those of this machine alone come last."""
        return tuple(str(SwarmLink(self.run, address)) for address in loopback_last(self.directory.maddrs))

    def record(self) -> Record:
        """What I announce, stages apart. Call it after `serve` has bound the port."""
        return Record(
            run=self.run, peer=self.me, incarnation=self.incarnation, addresses=self.transport.addresses, stages=(),
            numerics=self.numerics,
        )

    def whereabouts(self) -> dict[str, object]:
        """The fields of the event `listening`. Call it after `serve` has bound the port."""
        return {
            "peer": self.me, "dht": list(self.directory.maddrs), "addresses": list(self.transport.addresses),
            "incarnation": self.incarnation, "links": list(self.links),
        }

    @contextlib.asynccontextmanager
    async def serve(self, service: Service) -> AsyncGenerator[None, None]:
        """Answer others as `service`, and keep my place in the DHT."""
        self.transport.service = service
        async with self.transport, asyncio.TaskGroup() as group:
            LastPorts(self.transport.port, self.directory.port).keep(self.dir)
            keeping = group.create_task(self.directory.run())
            try:
                yield
            finally:
                keeping.cancel()


@contextlib.asynccontextmanager
async def open_endpoint(
    config: PeerConfig, manifest: Manifest, run: RunId, *, numerics: str
) -> AsyncGenerator[Endpoint, None]:
    """Take the identity, which nobody else may be meanwhile, and join the DHT. Raises UsageError with what to do."""
    with own_identity(config.dir) as identity:
        announced = announced_at(config.announce, identity.peer, port=config.port, dht_port=config.dht_port)
        last = LastPorts.read(config.dir)
        directory = await DhtDirectory.start(
            identity, run, num_stages=manifest.cut.stages, host=config.host, port=config.dht_port,
            bootstrap=config.bootstrap, state_dir=config.dir,
            announce=[str(address) for address in announced["dht_port"]],
            first_port=0 if last.dht_port == config.port else last.dht_port,
        )
        try:
            def addresses(peer: PeerId) -> Sequence[str]:
                return next((record.addresses for record in directory.known() if record.peer == peer), ())

            transport = GrpcTransport(
                identity,
                run,
                admission=open_authority().admit(identity.peer),
                addresses=addresses,
                host=config.host,
                port=config.port,
                first_port=last.port,
                announce=announced["port"],
                numerics=numerics,
                config=GrpcConfig.of(manifest.limits),
            )
            yield Endpoint(identity, directory, transport, secrets.randbits(62), numerics, run, config.dir)
        finally:
            await directory.close()
