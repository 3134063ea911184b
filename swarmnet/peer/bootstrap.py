"""A DHT node without a stage: an address that newcomers can be given. Nothing depends on it once they have joined.

It stores and hands out genuine records of any run; it has no run, no data plane, and computes nothing.
"""

from __future__ import annotations

import asyncio
import signal

from swarmnet.config.peer import PeerConfig
from swarmnet.net.dht import DhtDirectory
from swarmnet.net.own_dir import own_identity
from swarmnet.telemetry.events import EventLog
from swarmnet.telemetry.journal import loopback_last


def run_bootstrap(config: PeerConfig) -> int:
    """Run a bootstrap node until Ctrl+C or SIGTERM; print its multiaddrs, one per line, those that only
    this machine reaches last. Returns the exit code.

    Emits `listening` with `peer` and `dht` (multiaddrs) to the events file. Raises UsageError.
    """
    return asyncio.run(_serve(config))


async def _serve(config: PeerConfig) -> int:
    with own_identity(config.dir) as identity, EventLog(config.events) as events:
        directory = await DhtDirectory.start(
            identity, None, num_stages=0, host=config.host, port=config.dht_port, bootstrap=config.bootstrap,
            state_dir=config.dir, announce=config.announce,
        )
        try:
            for address in loopback_last(directory.maddrs):
                print(address, flush=True)
            events.emit("listening", peer=identity.peer, dht=directory.maddrs)
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(directory.run())
                await _asked_to_stop()
                running.cancel()
        finally:
            await directory.close()
    return 0


async def _asked_to_stop() -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()
