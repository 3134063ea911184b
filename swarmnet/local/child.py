"""A peer or trainer with faults below it, as a process: `python -m swarmnet.local.child PEER.toml ORDERS`.

The same `run_peer` and `run_trainer` as `swarmnet peer` and `swarmnet trainer`, which know nothing of orders.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from swarmnet import telemetry
from swarmnet.config import toml
from swarmnet.config.check import check
from swarmnet.config.peer import PeerConfig
from swarmnet.errors import UsageError
from swarmnet.local.interpose import FaultyService, FaultyTransport, Interposed, held_engine
from swarmnet.manifest.file import load
from swarmnet.net.endpoint import Wrap
from swarmnet.peer.run import run_peer
from swarmnet.telemetry.events import EventLog, EventReader
from swarmnet.trainer.run import run_trainer

POLL_S = 0.01


def main(argv: list[str]) -> int:
    """The exit code of the peer or trainer; 2 and a line when its config or manifest is wrong."""
    path, orders = Path(argv[0]), EventReader(Path(argv[1]))
    try:
        config = check(PeerConfig, toml.read(path), origin=lambda _: str(path))
        telemetry.setup(config.log.level, format=config.log.format)
        assert config.manifest is not None
        manifest = load(config.manifest)
        with EventLog(config.events) as events:
            between = Interposed(events.emit)
            wrap = Wrap(
                transport=lambda transport: FaultyTransport(transport, between),
                service=lambda service: FaultyService(service, between),
                beside=lambda: follow(orders, between),
            )
            # What holds from the start is there before the first message.
            _read(orders, between)
            if "trainer" in config.roles:
                return run_trainer(config, manifest, wrap=wrap)
            return run_peer(config, manifest, wrap=wrap, wrap_engine=lambda engine: held_engine(engine, between))
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2


async def follow(orders: EventReader, between: Interposed) -> None:
    """Carry out what is written, as it is written. Never returns."""
    while True:
        _read(orders, between)
        await asyncio.sleep(POLL_S)


def _read(orders: EventReader, between: Interposed) -> None:
    for order in orders.read():
        between.take(order)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
