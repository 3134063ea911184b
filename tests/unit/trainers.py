"""A trainer in front of a directory and replicas that answer by script, on virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from swarmnet.directory import Record, StageStatus
from swarmnet.ids import PeerId, RunId, first_chain
from swarmnet.manifest.extension import Notices
from swarmnet.manifest.schema import Manifest
from swarmnet.messages import Packed
from swarmnet.net.admission import Admissions
from swarmnet.simulate.swarm import SimulatedHost
from swarmnet.testing.doubles import FakeDirectory, FakeTransport, Script, run_virtual
from swarmnet.trainer.trainer import Trainer

RUN, ME, REPLICA = RunId("00" * 32), PeerId("trainer"), PeerId("replica")
TOKENS = (Packed("int32", (1,), b"\0" * 4),)


class SameTokens:
    """Implements TokenSource."""

    def training(self, number: int) -> tuple[Packed, ...]:
        return TOKENS

    evaluation = training


class Feeding(NamedTuple):
    """What came of it. events: (seconds, event, fields)."""

    events: list[tuple[float, str, dict[str, Any]]]
    transport: FakeTransport
    directory: FakeDirectory
    trainer: Trainer
    took_s: float

    @property
    def names(self) -> list[str]:
        return [event for _, event, _ in self.events]


def replica(stage: int = 0, version: int = 0, *, synced: bool = True, slots: int = 4, name: str = REPLICA) -> Record:
    """What a replica announces."""
    return Record(
        RUN, PeerId(name), 1, (), (StageStatus(stage, version, first_chain(RUN, stage), synced, slots=slots),)
    )


def fed(
    manifest: Manifest,
    records: Callable[[], Iterable[Record]],
    answer: Callable[[PeerId, Any], Script] = lambda peer, request: None,
    *,
    until_s: float = 1e6,
) -> Feeding:
    """Run a trainer that joins now, to its end or for so long."""
    events: list[tuple[float, str, dict[str, Any]]] = []
    transport, directory, record = FakeTransport(answer), FakeDirectory(records), Record(RUN, ME, 2, (), ())

    async def story() -> Feeding:
        loop: Any = asyncio.get_running_loop()
        trainer = Trainer(
            SimulatedHost(record, directory, Admissions(RUN), Notices(), loop),
            manifest,
            transport=transport,
            tokens=SameTokens(),
            on_event=lambda event, fields: events.append((loop.time(), event, fields)),
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(until_s):
                await trainer.run()
        return Feeding(events, transport, directory, trainer, loop.time())

    return run_virtual(story())
