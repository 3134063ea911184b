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
from swarmnet.net.nat.dial_back import Proofs, Say
from swarmnet.testing.doubles import FakeDirectory, FakeTransport, Script, run_virtual
from swarmnet.testing.virtual_swarm import SimulatedSigner
from swarmnet.trainer.trainer import Trainer

RUN, ME, REPLICA = RunId("00" * 32), PeerId("trainer"), PeerId("replica")
TOKENS = (Packed("int32", (1,), b"\0" * 4),)


class SameTokens:
    """Implements TokenSource."""

    def training(self, number: int) -> tuple[Packed, ...]:
        return TOKENS

    evaluation = training


class Host:
    """Implements PeerHost: of an open run, and reached by everybody."""

    me, run, incarnation, signer, proofs = ME, RUN, 2, SimulatedSigner(ME), Proofs()
    numerics, hides, told_of_others = "trainer", False, False

    def __init__(self, directory: FakeDirectory) -> None:
        self.directory, self.admissions, self.notices = directory, Admissions(RUN), Notices()

    def wall(self) -> float:
        return 0.0

    def record(self) -> Record:
        return Record(RUN, ME, 2, (), ())

    async def hide(self, say: Say) -> None:
        return None


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
    transport, directory = FakeTransport(answer), FakeDirectory(records)

    async def story() -> Feeding:
        clock = asyncio.get_running_loop().time
        trainer = Trainer(
            Host(directory),
            manifest,
            transport=transport,
            tokens=SameTokens(),
            on_event=lambda event, fields: events.append((clock(), event, fields)),
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(until_s):
                await trainer.run()
        return Feeding(events, transport, directory, trainer, clock())

    return run_virtual(story())
