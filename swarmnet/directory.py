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
"""Complaints in one record, about all stages together."""
MAX_REASON = 80
MAX_ESTIMATES = 24
"""Replicas of its stage of which a peer says how fast they are."""
MAX_RATE = (1 << 31) - 1
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
class Estimate:
    """How fast a replica of the stage is, as a mate has measured it (`peer.rates`)."""

    mark: Annotated[int, Between(0, (1 << 32) - 1)]
    """Of which peer: the first digits of a hash of its id."""
    rate: Annotated[int, Between(0, MAX_RATE)]
    """Microbatches per 1000 s."""


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
    """Microbatches that it takes at once."""
    disk: Annotated[tuple[OnDisk, ...], Entries(MAX_ON_DISK)] = ()
    """The checkpoints that it holds, verified, oldest first."""
    draining: bool = False
    """Is the replica about to leave?"""
    executions: Number = 0
    """Training forwards of this process up to the newest version."""
    counted: Number = 0
    """How many indexes it has contributed to sums."""
    drift: Number | None = None
    """The version at which its weights were last compared with its mates'; None: never."""
    stray: bool = False
    """Did its weights differ from theirs then?"""
    still_s: Amount = 0
    """Seconds since its last step, if that is much longer than usual; else 0."""


Grounds = Literal["waited_for", "unreached", "sits_out", "left_out"]


@dataclass(frozen=True, slots=True)
class Complaint:
    """What a replica of a stage holds against a mate."""

    stage: StageNumber
    peer: PeerId
    how: Grounds
    """waited_for: the step waits for it. unreached: it is heard but cannot be called. sits_out: steps do not wait for
    it for `seconds` more. left_out: a step went on without it `seconds` ago."""
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
    """Multiaddrs of its gRPC port; or of circuits to it, if nobody can dial it."""
    stages: Annotated[tuple[StageStatus, ...], Entries(MAX_STAGES_PER_PEER)]
    trainer: bool = False
    numerics: Annotated[str, Size(256)] = ""
    """The numerics class, such as "cpu AVX512/torch-2.13.0/1/fp32/eager/bdac02c7"."""
    loss: Loss | None = None
    """The loss in the newest commit of the last stage that this peer has seen."""
    eval_loss: Loss | None = None
    tokens_per_second: Annotated[float, Between(0.0, 1e15)] = 0.0
    """Measured speed of the whole run."""
    finished: bool = False
    halted: Number | None = None
    """The step at which too many microbatches gave no finite gradient, if that stopped the run."""
    restart: Restart = NO_RESTART
    """The restart that this peer follows."""
    wants: Restart = NO_RESTART
    """The restart that it would follow if most peers did; NO_RESTART if it sees no need."""
    invitation: Annotated[str, Size(512)] = ""
    """The pass that it shows in a run by invitation."""
    complaints: Annotated[tuple[Complaint, ...], Entries(MAX_COMPLAINTS)] = ()
    """The most important one first."""
    estimates: Annotated[tuple[Estimate, ...], Entries(MAX_ESTIMATES)] = ()
    """How fast it finds its mates, and itself; of a peer with one stage."""
    may_move: bool = False
    """Does it move where it is needed?"""
    going: StageNumber | None = None
    """The stage to which it would move, or is on its way."""
    surely: bool = False
    """Is it on its way there?"""
    paused: bool = False
    """Does it follow its stages' state and want no microbatches? Its stages then say `draining`, and it stays."""

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles in which it must be admitted."""
        # A peer may be both; who is neither serves the DHT alone.
        return (*(("stage",) if self.stages else ()), *(("trainer",) if self.trainer else ()))

    @property
    def hidden(self) -> bool:
        """Can nobody dial this peer? Others reach it through relays, or have it dial them."""
        return bool(self.addresses) and all("/p2p-circuit/" in address for address in self.addresses)

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
