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
    """One replica's announcement about one stage. queue: microbatches in flight; slots: how many it takes.

    disk: the checkpoints it holds, verified, oldest first. draining: it is about to leave. executions, counted:
    training forwards of this process up to the newest version, and how many indexes it has contributed to sums. drift:
    the version at which its weights were last compared with its mates', None if never; stray: they were not theirs.
    still_s: for how long it has made no step, if that is much longer than usual.
    """

    stage: StageNumber
    version: Number
    chain: Chain
    synced: bool
    queue: Amount = 0
    slots: Amount = 0
    disk: Annotated[tuple[OnDisk, ...], Entries(MAX_ON_DISK)] = ()
    draining: bool = False
    executions: Number = 0
    counted: Number = 0
    drift: Number | None = None
    stray: bool = False
    still_s: Amount = 0


Grounds = Literal["waited_for", "unreached", "sits_out", "left_out"]


@dataclass(frozen=True, slots=True)
class Complaint:
    """What a replica of a stage holds against a mate.

    how: the step waits for it; it is heard and cannot be connected to; a step does not wait for it, for `seconds` more;
    a step went on without it `seconds` ago. reason: in words for a person.
    """

    stage: StageNumber
    peer: PeerId
    how: Grounds
    reason: Annotated[str, Size(MAX_REASON)]
    seconds: Amount = 0


@dataclass(frozen=True, slots=True)
class Record:
    """What a peer says of itself. Signed by the peer's identity key; `addresses` are multiaddrs of its gRPC port.

    incarnation: random per process start. numerics: the numerics class ("cpu/torch-2.13/1"). loss: (step, mean loss)
    of the newest commit of the last stage this peer has seen. tokens_per_second: of the whole run, measured.
    halted: the step at which too many microbatches gave no finite gradient, if that stopped the run. restart: the
    restart of the run it is under. wants: the one it would go under if most did, none if it sees no need. invitation:
    the pass it shows in a run by invitation. complaints: what matters most first.
    """

    run: RunId
    peer: PeerId
    incarnation: Incarnation
    addresses: Addresses
    stages: Annotated[tuple[StageStatus, ...], Entries(MAX_STAGES_PER_PEER)]
    trainer: bool = False
    numerics: Annotated[str, Size(256)] = ""
    loss: Loss | None = None
    eval_loss: Loss | None = None
    tokens_per_second: Annotated[float, Between(0.0, 1e15)] = 0.0
    finished: bool = False
    halted: Number | None = None
    restart: Restart = NO_RESTART
    wants: Restart = NO_RESTART
    invitation: Annotated[str, Size(512)] = ""
    complaints: Annotated[tuple[Complaint, ...], Entries(MAX_COMPLAINTS)] = ()

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
