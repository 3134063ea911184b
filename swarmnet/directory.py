"""Who is in the run, as far as the DHT knows: signed, expiring records. Never the proof that a peer is alive.

Two implementations: hivemind's DHT (`net.dht`) and memory (`testing.directory`). `ReadPace` says when to read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

from swarmnet.bounds import AS_KEY, Between, Entries, Proto, Size
from swarmnet.ids import NO_RESTART, Chain, Incarnation, Number, OnDisk, PeerId, Restart, RunId
from swarmnet.pacing import TokenBucket
from swarmnet.statement import SignedMessage

MAX_STAGES_PER_PEER = 16
MAX_ADDRESSES = 8
MAX_ON_DISK = 8
"""Checkpoints of one stage that are announced: the newest."""
MAX_COMPLAINTS = 8
"""Stall reports in one record, about all stages together."""
MAX_REASON = 80
MAX_NICKNAME = 32
MAX_TAINTED = 4
"""Steps with false work that one record names: the last ones."""
MAX_ESTIMATES = 24
"""Replicas of its stage of which a peer says how fast they are."""
MAX_RATE = (1 << 31) - 1
MAX_NUM_STAGES = 1024

Amount = Annotated[int, Between(0, 1 << 31)]
StageNumber = Annotated[int, Between(0, MAX_NUM_STAGES - 1)]
Loss = Annotated[tuple[Number, Annotated[float, Between(-1e30, 1e30)]], Proto(names=("step", "loss"))]
"""(step, mean loss)"""
Addresses = Annotated[tuple[Annotated[str, Size(256, printable=True)], ...], Entries(MAX_ADDRESSES)]
"""Multiaddrs."""

Role = Literal["stage", "trainer"]
"""What a peer is in a run, and what a run by invitation admits it as."""


@dataclass(frozen=True, slots=True)
class Invitation:
    """What the owner of a run signs for a guest; the end of its envelope is its end."""

    run: RunId
    guest: Annotated[PeerId, AS_KEY]
    """The peer; of a bearer's, a key made for it alone."""
    roles: Annotated[tuple[Role, ...], Entries(2)]
    bearer: bool = False
    """Is it good for any peer that holds the private half of `guest`?"""
    uses: Annotated[int, Between(0, 1 << 20)] = 0
    """Peers that a bearer's admits at most; 0: any number."""

    def contradiction(self) -> str:
        """What in it cannot be, in words; "" if nothing."""
        if self.uses and not self.bearer:
            return "is for one peer, and says for how many it is"
        return "" if self.roles else "names no role"


@dataclass(frozen=True, slots=True)
class BearerPass:
    """What a peer shows of a bearer's invitation: signed by the key of that, never the key itself."""

    peer: Annotated[PeerId, AS_KEY]
    invitation: SignedMessage[Invitation]


Pass = SignedMessage[Invitation | BearerPass]
"""What a peer shows in a run by invitation. It is public, and worth nothing to another identity."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """How fast a replica of the stage is, as another one has measured it (`peer.rates`)."""

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
    """The version at which its weights were last compared with those of other replicas; None: never."""
    stray: bool = False
    """Did its weights differ from theirs then?"""
    still_s: Amount = 0
    """Seconds since its last step, if that is much longer than usual; else 0."""


Grounds = Literal["waited_for", "unreached", "sits_out", "left_out", "convicted"]


@dataclass(frozen=True, slots=True)
class Complaint:
    """What a replica of a stage reports about another one."""

    stage: StageNumber
    peer: PeerId
    how: Grounds
    """waited_for: the step waits for it. unreached: its messages arrive but it cannot be called. sits_out: steps do not
    wait for it for `seconds` more. left_out: a step went on without it `seconds` ago. convicted: it is proven
    Byzantine, since `seconds`."""
    reason: Annotated[str, Size(MAX_REASON, printable=True)]
    """In words for a person."""
    seconds: Amount = 0


@dataclass(frozen=True, slots=True)
class TaintedStep:
    """A step of a stage with proven false work in its sum, which is in the weights (docs/trust.md)."""

    stage: StageNumber
    step: Number


@dataclass(frozen=True, slots=True)
class DisputedWork:
    """Work of a stage of which its members found different things, and no peer can be named (docs/trust.md)."""

    stage: StageNumber
    step: Number
    peer: PeerId
    """The peer that did the work; it may be right."""


@dataclass(frozen=True, slots=True)
class Record:
    """What a peer says of itself. Signed by the peer's identity key."""

    run: RunId
    peer: PeerId
    incarnation: Incarnation
    """Random per process start."""
    addresses: Addresses
    """Multiaddrs of its gRPC port; or of circuits to it, if it is unreachable."""
    stages: Annotated[tuple[StageStatus, ...], Entries(MAX_STAGES_PER_PEER)]
    trainer: bool = False
    numerics: Annotated[str, Size(256, printable=True)] = ""
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
    invitation: Pass | None = None
    """The pass that it shows in a run by invitation."""
    complaints: Annotated[tuple[Complaint, ...], Entries(MAX_COMPLAINTS)] = ()
    """The most important one first."""
    estimates: Annotated[tuple[Estimate, ...], Entries(MAX_ESTIMATES)] = ()
    """How fast it finds the other replicas, and itself; of a peer with one stage."""
    may_move: bool = False
    """Does it move where it is needed?"""
    going: StageNumber | None = None
    """The stage to which it would move, or is on its way."""
    surely: bool = False
    """Is it on its way there?"""
    paused: bool = False
    """Does it follow its stages' state and want no microbatches? Its stages then say `draining`, and it stays."""
    steps: Number = 0
    """How many steps the run has, as far as it can be foreseen there; 0: it does not say."""
    step_s: Annotated[float, Between(0.0, 1e9)] = 0.0
    """Seconds from one step to the next, over the last ones; 0: it does not say."""
    software: Annotated[str, Size(64, printable=True)] = ""
    """What runs there, such as "swarmnet 0.1.0, protocol 2.0"; empty: it does not say."""
    region: Annotated[str, Size(24, printable=True)] = ""
    """Where it is, as its operator says; empty: it does not say."""
    tainted: Annotated[tuple[TaintedStep, ...], Entries(MAX_TAINTED)] = ()
    """Of the tainted steps that it knows of, the last ones."""
    num_tainted: Number = 0
    """How many it knows of."""
    disputed: DisputedWork | None = None
    """The last that it knows of, without those of banned peers."""
    num_disputed: Number = 0
    """How many it has met with since its process began."""
    goes_back: bool = False
    """Does the run go back before tainted steps, if it can? Said where there are some."""
    nickname: Annotated[str, Size(MAX_NICKNAME, printable=True)] = ""
    """What its operator calls it; empty: nothing. It need not be unique: peers are told apart by their ids."""

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles in which it must be admitted."""
        # A peer may be both; who is neither serves the DHT alone.
        return (*(("stage",) if self.stages else ()), *(("trainer",) if self.trainer else ()))

    @property
    def hidden(self) -> bool:
        """Is this peer unreachable (behind NAT)? Others reach it through relays, or have it dial them."""
        return bool(self.addresses) and all("/p2p-circuit/" in address for address in self.addresses)

    @property
    def feeds(self) -> bool:
        """Is this a trainer that has not left? Its last record says `finished`."""
        return self.trainer and not self.finished


RECORD_BYTES = 750
"""Of an ordinary record on the wire."""

READ_BYTES_PER_S = 1500
"""What a peer reads of others' records in the long run, however many there are; in a large run half as much."""

BURST_BYTES = 4 << 20
"""What it may read beyond that at once, when something is missing."""

SMALL_RUN = 20
"""Records of a run that is always read as a whole."""

LONGEST_S = 60.0
"""From one look after the stages near me to the next, in the largest runs."""

_COMPLETE_S = 15.0


class ReadPace:
    """When one peer may read records again, so that it costs the same in runs of all sizes. Pure.

    least_s: from one read to the next, a quarter of it if something is missing; 0: no limit.
    """

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._last_at = self._whole_at = -math.inf
        self._near_again_at = self._whole_again_at = -math.inf
        self._bytes = TokenBucket(READ_BYTES_PER_S, BURST_BYTES / READ_BYTES_PER_S)
        self.near_s = 0.0
        """Between two reads of what is near."""

    def may_read(self, *, whole: bool, at_once: bool, records: int, now: float) -> bool:
        """Is it time? at_once: something is missing. records: how many this would read, about."""
        if not self._least_s:
            return True
        if now < self._last_at + (self._least_s / 4 if at_once else self._least_s):
            return False
        if now >= (self._whole_again_at if whole else self._near_again_at):
            return True
        return at_once and not self._bytes.wait_s(now, records * RECORD_BYTES)

    def has_read(self, *, whole: bool, records: int, jitter: float, now: float) -> None:
        """records: how many that was. jitter: about 1, by which readers do not come all at once."""
        num_bytes = records * RECORD_BYTES
        self._bytes.take(now, num_bytes)
        self._last_at = now
        again_s = max(self._least_s, num_bytes / READ_BYTES_PER_S * (1 if records <= SMALL_RUN else 2))
        self.near_s = min(again_s, LONGEST_S) if not whole or records <= SMALL_RUN else self.near_s
        if whole:
            self._whole_at, self._whole_again_at = now, now + jitter * again_s
        if not whole or records <= SMALL_RUN:
            self._near_again_at = now + jitter * min(again_s, LONGEST_S)

    def complete(self, now: float) -> bool:
        """Has the whole run been read so lately that who is not known is not there?"""
        return now - self._whole_at <= _COMPLETE_S


class Directory(Protocol):
    """Publish my record, read others'. Reads have a deadline and degrade to what was known."""

    serves: Callable[[PeerId], Collection[int]]
    """The stages in which a peer that is called by name may be found, in addition to those near me."""

    async def publish(self, record: Record) -> None:
        """Store my record under every stage I serve (and under trainers if I am one). Renew it before it expires."""
        ...

    async def records(self, near: Collection[int] | None = None, *, at_once: bool = False) -> tuple[Record, ...]:
        """All fresh, verified records of admitted peers of this run that are known, newest per peer, once those of the
        stages `near` have been read if it is time for that; None: of all. Never raises for network trouble.

        at_once: something is missing here, so it is time earlier, within bounds.
        """
        ...

    def complete(self) -> bool:
        """Was the whole run read lately? Else who is far away may only seem not to be there."""
        ...

    async def find(self, peer: PeerId, stages: Collection[int]) -> None:
        """Read the record of one peer of one of these stages."""
        ...
