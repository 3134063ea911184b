"""A DHT node without a stage: an address that newcomers can be given. Nothing depends on it once they have joined.

It stores and hands out genuine records of any run; it has no run, no data plane, and computes nothing.
"""

from __future__ import annotations

import asyncio

from swarmnet import telemetry
from swarmnet.config.peer import PeerConfig
from swarmnet.net.address import announced_at
from swarmnet.net.dht import DhtDirectory
from swarmnet.net.identity import own_identity
from swarmnet.net.ports import LastPorts
from swarmnet.net.stop import stopped_by_signal, unless_stopped
from swarmnet.telemetry.events import EventLog
from swarmnet.telemetry.journal import offered

log = telemetry.get(__name__)


def run_bootstrap(config: PeerConfig) -> int:
    """Run a bootstrap node until Ctrl+C or SIGTERM; print the multiaddrs at which others reach it, one per line.

    Where only this machine reaches it, those of this machine are printed. Returns the exit code.

    Emits `listening` with `peer` and `dht` (multiaddrs) to the events file. Raises UsageError.
    """
    return asyncio.run(_serve(config))


async def _serve(config: PeerConfig) -> int:
    with stopped_by_signal() as stop, own_identity(config.dir) as identity, EventLog(config.events) as events:
        announced = announced_at(config.announce, identity.peer, dht_port=config.dht_port)
        directory = await unless_stopped(
            stop,
            DhtDirectory.start(
                identity,
                None,
                num_stages=0,
                host=config.host,
                port=config.dht_port,
                bootstrap=config.bootstrap,
                state_dir=config.dir,
                announce=[str(address) for address in announced["dht_port"]],
                first_port=LastPorts.read(config.dir).dht_port,
            ),
        )
        if directory is None:
            return 0
        try:
            LastPorts(dht_port=directory.port).keep(config.dir)
            for address in offered(directory.maddrs):
                print(address, flush=True)
                log.event(f"others join a run with: swarmnet join swarm:RUN_ID@{address}")
            events.emit("listening", peer=identity.peer, dht=directory.maddrs)
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(directory.run())
                await stop.wait()
                running.cancel()
        finally:
            await directory.close()
    return 0
