"""Who is in the run, as far as the DHT knows: signed, expiring records. Never the proof that a peer is alive.

Two implementations: hivemind's DHT (`net.dht`) and memory (`simulate`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

from swarmnet.bounds import Between, Entries, Size
from swarmnet.ids import NO_RESTART, Chain, Incarnation, Number, OnDisk, PeerId, Restart, RunId

MAX_STAGES_PER_PEER = 16
MAX_ADDRESSES = 8
MAX_ON_DISK = 8
"""Checkpoints of one stage that are announced: the newest."""
MAX_COMPLAINTS = 8
"""Of all stages together."""
MAX_REASON = 80
MAX_NUM_STAGES = 1024

Amount = Annotated[int, Between(0, 1 << 31)]
StageNumber = Annotated[int, Between(0, MAX_NUM_STAGES - 1)]
Loss = tuple[Number, Annotated[float, Between(-1e30, 1e30)]]
"""(step, mean loss)"""
Addresses = Annotated[tuple[Annotated[str, Size(256)], ...], Entries(MAX_ADDRESSES)]
"""Multiaddrs."""

Role = Literal["stage", "trainer"]
"""What a peer is in a run, and what a run by invitation admits it as."""


@dataclass(frozen=True, slots=True)
class StageStatus:
    """One replica's announcement about one stage."""

    stage: StageNumber
    version: Number
    chain: Chain
    synced: bool
    queue: Amount = 0
    """Microbatches in flight."""
    slots: Amount = 0
    """How many it takes."""
    disk: Annotated[tuple[OnDisk, ...], Entries(MAX_ON_DISK)] = ()
    """The checkpoints that it holds, verified, oldest first."""
    draining: bool = False
    """It is about to leave."""
    executions: Number = 0
    """Training forwards of this process up to the newest version."""
    counted: Number = 0
    """How many indexes it has contributed to sums."""
    drift: Number | None = None
    """The version at which its weights were last compared with its mates'; None: never."""
    stray: bool = False
    """They were not theirs."""
    still_s: Amount = 0
    """For how long it has made no step, if that is much longer than usual."""


Grounds = Literal["waited_for", "unreached", "sits_out", "left_out"]


@dataclass(frozen=True, slots=True)
class Complaint:
    """What a replica of a stage holds against a mate."""

    stage: StageNumber
    peer: PeerId
    how: Grounds
    """The step waits for it; it is heard and cannot be connected to; a step does not wait for it, for `seconds` more;
    a step went on without it `seconds` ago."""
    reason: Annotated[str, Size(MAX_REASON)]
    """In words for a person."""
    seconds: Amount = 0


@dataclass(frozen=True, slots=True)
class Record:
    """What a peer says of itself. Signed by the peer's identity key."""

    run: RunId
    peer: PeerId
    incarnation: Incarnation
    """Random per process start."""
    addresses: Addresses
    """Multiaddrs of its gRPC port."""
    stages: Annotated[tuple[StageStatus, ...], Entries(MAX_STAGES_PER_PEER)]
    trainer: bool = False
    numerics: Annotated[str, Size(256)] = ""
    """The numerics class, such as "cpu/torch-2.13/1"."""
    loss: Loss | None = None
    """Of the newest commit of the last stage that this peer has seen."""
    eval_loss: Loss | None = None
    tokens_per_second: Annotated[float, Between(0.0, 1e15)] = 0.0
    """Of the whole run, measured."""
    finished: bool = False
    halted: Number | None = None
    """The step at which too many microbatches gave no finite gradient, if that stopped the run."""
    restart: Restart = NO_RESTART
    """The restart of the run that it is under."""
    wants: Restart = NO_RESTART
    """The one it would go under if most did; none if it sees no need."""
    invitation: Annotated[str, Size(512)] = ""
    """The pass that it shows in a run by invitation."""
    complaints: Annotated[tuple[Complaint, ...], Entries(MAX_COMPLAINTS)] = ()
    """What matters most first."""

    @property
    def roles(self) -> tuple[Role, ...]:
        """What it has to be admitted as."""
        return (*(("stage",) if self.stages else ()), *(("trainer",) if self.trainer else ()))

    @property
    def feeds(self) -> bool:
        """Is this a trainer that has not left? Its last record says `finished`."""
        return self.trainer and not self.finished


class Directory(Protocol):
    """Publish my record, read everybody's. Reads have a deadline and degrade to what was known."""

    async def publish(self, record: Record) -> None:
        """Store my record under every stage I serve (and under trainers if I am one). Renew it before it expires."""
        ...

    async def records(self) -> tuple[Record, ...]:
        """Fresh, verified records of admitted peers of this run, newest per peer. Never raises for network trouble."""
        ...
