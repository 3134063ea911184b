"""A DHT node without a stage: an address that newcomers can be given. Nothing depends on it once they have joined.

It stores and hands out genuine records of any run; it has no run, no data plane, and computes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from pathlib import Path

from swarmnet import telemetry
from swarmnet.clock import run_loop
from swarmnet.config.peer import PeerConfig
from swarmnet.errors import SwarmError
from swarmnet.net.address import announced_at
from swarmnet.net.dht import DhtDirectory
from swarmnet.net.dht_daemon import Listen
from swarmnet.net.endpoint import LOOK_S
from swarmnet.net.greeting import Greeter
from swarmnet.net.grpc_transport import dial
from swarmnet.net.identity import IDENTITY_FILE, Identity, own_identity
from swarmnet.net.ports import LastPorts
from swarmnet.net.stop import stopped_by_signal, unless_stopped
from swarmnet.net.tls import Leaf
from swarmnet.net.twins import ASK_S, LATEST, Twins, new_boot_id
from swarmnet.telemetry.events import EventLog
from swarmnet.telemetry.journal import offered

log = telemetry.get(__name__)


def run_bootstrap(config: PeerConfig) -> int:
    """Run a bootstrap node until Ctrl+C or SIGTERM; print the multiaddrs at which others reach it, one per line.

    Where only this machine reaches it, those of this machine are printed. Returns the exit code.

    Emits `listening` with `peer` and `dht` (multiaddrs) to the events file. Raises UsageError.
    """
    return run_loop(_serve(config))


async def _serve(config: PeerConfig) -> int:
    with stopped_by_signal() as stop, own_identity(config.dir) as identity, EventLog(config.events) as events:
        announced = announced_at(config.announce, identity.peer, dht_port=config.dht_port)["dht_port"]
        listen = Listen(config.host, config.dht_port, LastPorts.read(config.dir).dht_port, tuple(map(str, announced)))
        joining = DhtDirectory(identity, None, listen=listen, bootstrap=config.bootstrap, state_dir=config.dir)
        async with contextlib.AsyncExitStack() as stack:
            directory = await unless_stopped(stop, stack.enter_async_context(joining))
            if directory is None:
                return 0
            LastPorts(dht_port=directory.port).keep(config.dir)
            for address in offered(directory.maddrs):
                print(address, flush=True)
                log.event(f"others join a run with: swarmnet join swarm:RUN_ID@{address}")
            events.emit("listening", peer=identity.peer, dht=directory.maddrs)
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(directory.run())
                watching = tasks.create_task(_watch_for_twins(directory, identity, config.dir / IDENTITY_FILE))
                await stop.wait()
                running.cancel()
                watching.cancel()
    return 0


async def _watch_for_twins(directory: DhtDirectory, identity: Identity, key_file: Path) -> None:
    """Log, until cancelled, that a peer or a trainer runs with the key of this node. The node goes on: it holds no part
    of a run."""
    twins, asked = Twins(new_boot_id(), key_file), None
    while True:
        await asyncio.sleep(LOOK_S)
        if (found := directory.elsewhere) is None or found is asked:
            continue
        # As the latest start of all: the process that is asked must not give way to a node that only asks.
        asked, greeter = found, Greeter(found.record.run, math.inf, boot_id=LATEST)
        for address in found.record.addresses:
            # This node has no gRPC port: a process that answers there under its key is another one.
            with contextlib.suppress(SwarmError):
                deadline = asyncio.get_running_loop().time() + ASK_S
                await dial(identity.peer, address, Leaf(identity), greeter, deadline=deadline)
                twins.met(LATEST, address, clocks_agree=False)
