"""What peers say to each other, as frozen values. Standard library only; `wire` turns them into bytes and back.

Three kinds: `Control` messages are one-way and idempotent (re-sent until the state they report has changed), a
`Request` opens a call, an `Answer` comes back on it. Index sets are frozensets here, bitmaps or runs on the wire. The
bound of a field is what every reader insists on (`wire.fields`); a plain float is any finite number.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from swarmnet import ids
from swarmnet.bounds import MAX_COMMITS, MAX_INDEXES, MAX_MEMBERS, Between, Entries, Outside, Proto, Size
from swarmnet.errors import RejectCode
from swarmnet.ids import NO_CHAIN, NO_RESTART, Ballot, Chain, Generation, Incarnation, Number, PeerId, Restart, RoundId
from swarmnet.manifest.extension import MARK_BYTES, MAX_NOTICES, Notice
from swarmnet.telemetry.figures import MAX_EVALUATIONS, MAX_FIGURES, Evaluation, StepFigures
from swarmnet.telemetry.spans import MAX_STEP_TIMES, StepTimes

Indexes = frozenset[int]
"""Microbatch indexes. A run has fewer than `MAX_INDEXES`, mostly far fewer."""
NONE: Indexes = frozenset()

MAX_STAGES = 1 << 16

Step = Number
Version = Annotated[int, Between(-1, 1 << 53)]
"""-1: whatever the other side has."""
Stage = Annotated[int, Between(0, MAX_STAGES - 1)]
Index = Annotated[int, Between(0, MAX_INDEXES - 1)]
Count = Annotated[int, Between(0, (1 << 63) - 1)]
Extent = Annotated[int, Between(0, 1 << 48)]
"""Elements or bytes."""
NotNegative = Annotated[float, Between(0.0, math.inf)]
Digest = Annotated[bytes, Size(64, least=1)]
Sha256 = Annotated[bytes, Size(32, least=32)]
PartKind = Literal["contribution", "reduced", "sum", "replay", "pledges"]
Reason = Annotated[str, Size(1000, cut=True)]
NoticeList = Annotated[tuple[Notice, ...], Entries(MAX_NOTICES)]
"""What the run's owner has signed to extend it (`manifest.extension`)."""
Roll = Annotated[bytes, Size(16, least=16)]
"""Digest of a commit's contributors."""
Members = Annotated[tuple[PeerId, ...], Entries(MAX_MEMBERS, "members", packed=True)]
MAX_LATE = 16
LatePeers = Annotated[tuple[PeerId, ...], Entries(MAX_LATE)]
"""Peers that were late in a step, sorted."""


@dataclass(frozen=True, slots=True)
class Ban:
    """A peer is at fault. step: the one with its false work in the aggregate, or -1. case:
    `audit.case.subject_of`, or zeros."""

    peer: PeerId
    step: Annotated[Version, Proto(type="sint64")]
    case: Sha256


MAX_BANS = 8
BannedPeers = Annotated[tuple[Ban, ...], Entries(MAX_BANS, distinct=True)]
Contributions = Annotated[
    tuple[tuple[PeerId, Generation, Indexes], ...], Entries(MAX_MEMBERS, "members", distinct=True, disjoint=True)
]


# ---------------------------------------------------------------- tensors in transit


@dataclass(frozen=True, slots=True)
class Packed:
    """One encoded tensor: `data` holds `shape` under `codec` (see `wire.codecs`). Nothing decoded, nothing trusted."""

    codec: str
    shape: tuple[int, ...]
    data: bytes | bytearray | memoryview

    @property
    def num_bytes(self) -> int:
        """Length of the encoded data."""
        return len(self.data)


Payload = Annotated[tuple[Packed, ...], Outside()]
"""The tensors that travel behind an answer, as raw bytes (`wire.framing`)."""


# ---------------------------------------------------------------- the step protocol (docs/protocol.md)


@dataclass(frozen=True, slots=True)
class Finished:
    """A whole, digest-checked sum of one stage and step (`R` in the protocol), without its data."""

    id: RoundId
    digest: Digest
    num_tokens: Count
    loss_sum: float
    """Nats, summed in index order in fp64; 0 except in the last stage."""
    grad_sq_norm: NotNegative
    """Squared L2 norm of the *sum*, fp64, in canonical parameter order."""
    contributions: Contributions
    """Who added which indexes under which generation: disjoint, and with the skipped ones exactly 0..M-1."""
    discarded: Indexes = NONE
    notice: Notice | None = None
    """As in the round."""
    late: LatePeers = ()
    """As in the round."""
    bans: BannedPeers = ()
    """As in the round."""

    def contradiction(self) -> str:
        """What in it cannot be, in words; "" if nothing."""
        return _discarded_but_contributed(self)


MAX_VOTES = 16
"""Votes that a commit carries: as many as the largest majority that is needed (`step.membership`)."""

MAX_COUNTING = 2 * MAX_VOTES - 1
"""Replicas of a stage that count at a time: a commit may hold the votes of more than half of them."""

Signature = Annotated[bytes, Size(64, least=1)]


def roll_of(contributors: tuple[PeerId, ...]) -> bytes:
    """The digest by which a commit refers to its contributors."""
    return hashlib.sha256("\0".join(contributors).encode()).digest()[:16]


NOBODY = roll_of(())


def first_of(peers: Set[PeerId]) -> frozenset[PeerId]:
    """These peers; if they are too many, the same selection at every replica."""
    return frozenset(peers if len(peers) <= MAX_COUNTING else sorted(peers, key=ids.mark_of)[:MAX_COUNTING])


@dataclass(frozen=True, slots=True)
class Vote:
    """A replica's signature under a commit: it holds that sum."""

    peer: PeerId
    signature: Signature


@dataclass(frozen=True, slots=True)
class Commit:
    """The sum of (stage, step) that the stage settles on.

    Commits are equal that differ only in their votes, or in whether they name the contributors or only their digest.
    """

    stage: Stage
    step: Step
    chain: Chain
    """The stage's chain before it."""
    id: RoundId
    digest: Digest
    num_tokens: Count
    loss_sum: float
    grad_sq_norm: NotNegative
    discarded: Indexes = NONE
    roll: Annotated[Roll, Proto(13)] = NOBODY
    """Digest of the contributors: `roll_of`."""
    contributors: Annotated[tuple[PeerId, ...], Entries(MAX_COUNTING, packed=True), Proto(10)] = field(
        default=(), compare=False
    )
    """The replicas with gradients in it, sorted; of more than MAX_COUNTING those that may count. (): those with the
    digest `roll`, which the receiver has from the step before."""
    votes: Annotated[tuple[Vote, ...], Entries(MAX_VOTES), Proto(11)] = field(default=(), compare=False)
    """Signatures of replicas that hold the sum and are no contributors. With those of more than half of the voters the
    commit is a certificate (`step.membership`)."""
    seats: Annotated[Indexes, Proto(14)] = field(default=NONE, compare=False)
    """The contributors that have signed, by their places."""
    signatures: Annotated[tuple[Signature, ...], Entries(MAX_VOTES), Proto(15)] = field(default=(), compare=False)
    """Theirs, in order."""
    notice: Annotated[Notice | None, Proto(12)] = None
    """The run is longer from this step on."""
    late: Annotated[LatePeers, Proto(16)] = ()
    """Peers of the stage that were late: the next steps do not wait for them (`step.exclusion`)."""
    bans: Annotated[BannedPeers, Proto(17)] = ()
    """Peers that the stage bans from the run: a vote vouches for each of these."""
    table: Annotated[bytes, Size(16), Proto(18)] = b""
    """Of the stage's exclusions before it (`step.commits.digest_of`): so the chain stands for them, too."""

    def __post_init__(self) -> None:
        # What is signed, and the chain, are of bits: equal commits must have equal ones, and -0.0 == 0.0.
        object.__setattr__(self, "loss_sum", self.loss_sum + 0.0)
        object.__setattr__(self, "grad_sq_norm", self.grad_sq_norm + 0.0)

    def __hash__(self) -> int:
        # Of all fields it would take longer than most of what it is needed for.
        return hash((self.stage, self.step, self.digest))

    def contradiction(self) -> str:
        """What in it cannot be, in words; "" if nothing."""
        if self.contributors and roll_of(self.contributors) != self.roll:
            return "names other contributors than its digest says"
        if len(self.seats) != len(self.signatures):
            return "has not one signature for each seat"
        return ""

    def says(self, finished: Finished) -> bool:
        """Is `finished` the committed sum, bit by bit, whichever round made it?"""
        # Rounds may differ: the same contributions, summed again, are the same sum.
        return _bits_of(self) == _bits_of(finished)


_bits_of = operator.attrgetter("digest", "num_tokens", "loss_sum", "grad_sq_norm", "discarded")


Commits = Annotated[tuple[Commit, ...], Entries(MAX_COMMITS, "num_stages")]


@dataclass(frozen=True, slots=True)
class Stamp:
    """What every message of the step protocol is about; another chain means a fork."""

    step: Step
    stage: Stage
    chain: Chain
    """Of the version that the step is computed on, one earlier where steps overlap; in a heartbeat, of the newest."""
    restart: Restart = NO_RESTART
    """The rollback that the sender's state descends from. Messages with another one are ignored."""


# ---------------------------------------------------------------- what members answer for (docs/trust.md)

PRIME = (1 << 61) - 1
"""Inner products of sums are taken modulo this."""

MAX_PATH = 17
"""Hashes on the way from a work to its root: a run has at most 2^17 microbatches."""


@dataclass(frozen=True, slots=True)
class Pledge:
    """What a contributor to a round stands for, under its name; said once the whole sum is known to it."""

    stamp: Stamp
    id: RoundId
    digest: Digest
    """Of the whole sum."""
    shares: Sha256
    """Of who contributed which indexes to it (`pledge`)."""
    peer: PeerId
    product: Annotated[int, Between(0, PRIME - 1)]
    """Of its contribution with the vector that `digest` draws (`sums.linear`): another contribution has another one."""
    work_root: Sha256
    """Of its works: the Merkle tree over the indexes that it counted."""
    signature: Signature = b"\0"
    incarnation: Annotated[Incarnation, Proto(type="fixed64")] = 0
    """Of the process that has signed: one that is started again does not know what the one before has pledged."""


@dataclass(frozen=True, slots=True)
class WorkRecord:
    """One microbatch in one stage: digests of what went in and what came out, as it travels."""

    index: Index
    input: Sha256
    output: Sha256
    gradient: Sha256
    """Of the output, as it came back; in the last stage of nothing."""
    answer: Sha256
    """The gradient of the input; in the first stage of nothing."""
    loss_sum: float
    num_tokens: Count
    resent: bool = False
    """Its peer may have sent something else for it before (`pipeline.transfers`)."""


@dataclass(frozen=True, slots=True)
class Sent:
    """What a replica stands for, under its name, of a payload that it hands to a neighbour stage."""

    stamp: Stamp
    """As in its commitment."""
    index: Index
    kind: Literal["output", "answer"]
    """As in a `WorkRecord`."""
    digest: Sha256
    """As in a `WorkRecord`."""
    peer: PeerId
    input: Annotated[Sha256, Proto(8)]
    """What it was made of, as in a `WorkRecord`."""
    gradient: Annotated[Sha256, Proto(9)]
    """The same, of an answer; of an output nothing."""
    again: Annotated[bool, Proto(6)] = False
    """It may have counted something else before."""
    signature: Annotated[Signature, Proto(7)] = b"\0"


Sents = Annotated[tuple[Sent, ...], Entries(8 * MAX_COMMITS, "num_stages", times=8)]
"""Of one payload, by who hands it out; then of all that it was made of, down to the tokens (`pipeline.transfers`): two
of each stage, and more where stages were fed by several."""


@dataclass(frozen=True, slots=True)
class Recheck:
    """What a replica found when it computed the work of a case again."""

    peer: PeerId
    found: Sha256
    """As it should be: of the work, of the contribution, or of what was sent."""
    signature: Signature = b"\0"


@dataclass(frozen=True, slots=True)
class Case:
    """Disputed work, and the rechecks of it that the sender knows (`audit.case`).

    A replica tells its case to the other replicas of its stage. With enough rechecks the case is a proof for anyone.
    """

    pledge: Pledge
    """Of the suspect; if the case is about `sent`, of the peer that contributed the microbatch."""
    work: WorkRecord | None = None
    """The work that was pledged. None: the case is about the whole contribution, or about `other`."""
    path: Annotated[bytes, Size(32 * MAX_PATH)] = b""
    """From the work to the commitment's root."""
    sent: Sent | None = None
    """The case is about this transfer: its signer is the suspect."""
    other: Pledge | None = None
    """A second commitment of the same peer for the same aggregate."""
    numerics: Annotated[str, Size(256)] = ""
    """The numerics class of all rechecks."""
    rechecks: Annotated[tuple[Recheck, ...], Entries(MAX_COUNTING)] = ()
    contributions: Contributions = ()
    """Who contributed what to the aggregate: `shares` of the commitment stand for it. Empty in the stage."""
    discarded: Indexes = NONE


@dataclass(frozen=True, slots=True)
class Measure:
    """What a replica's weights were like at `version`, after the commits of `chain` (docs/trust.md)."""

    version: Step
    chain: Chain
    digest: Annotated[bytes, Size(32)]
    """BLAKE3 of their bits."""
    # Number 4 was a sketch of the weights: a field that is added has another one.


Waits = Literal["", "stage", "leader"]
"""Nothing is left to do in a replica: all that it has yet to accumulate is with the next stage, or all is computed and
waits for the leader's word on what it counts."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """To replicas of my stage and of the neighbour stages: where I stand, and commits that the receiver asked for."""

    stamp: Stamp
    incarnation: Incarnation
    synced: bool
    leader: Ballot | None
    """The ballot that I follow in the open step, or followed in the last one."""
    commits: Commits = ()
    """Commits of step `stamp.step` (= my version) that the receiver has asked for."""
    last_commits: Commits = ()
    """Commits of the step before that the receiver has asked for."""
    queue: Count = 0
    """Microbatches in flight."""
    draining: bool = False
    numerics: Annotated[str, Size(256), Proto(10)] = ""
    """Replicas that say the same make the same weights of the same sum."""
    measure: Annotated[Measure | None, Proto(11)] = None
    """The newest measure of my weights; only sent to replicas of my stage."""
    before: Annotated[Chain, Proto(9)] = NO_CHAIN
    """My chain one version earlier; at version 0 the first chain."""
    late: LatePeers = ()
    """Replicas of my stage that were late, as I have observed it: for my leader."""
    unreached: Annotated[tuple[PeerId, ...], Entries(MAX_UNREACHED)] = ()
    """Replicas of my stage that I am out of touch with, or cannot call."""
    new: bool = False
    """I have still to contribute before I count, for the first time or since I came back."""
    asks: bool = True
    """I have chosen the receiver to hear from it, so it is to send me heartbeats too (`step.graph`)."""
    known: Annotated[bytes, Size(MAX_STAGES // 8)] = b""
    """The stages of which I know the commit of step `stamp.step`: bit i of byte i / 8 (lowest first) is stage i."""
    digest: Annotated[bytes, Size(16)] = b""
    """Of those commits (`step.membership`)."""
    wants: Annotated[bytes, Size(MAX_STAGES // 8), Proto(19)] = b""
    """The stages of which I lack the commit of step `stamp.step` and ask the receiver for it; bits as in `known`."""
    notices: Annotated[bytes, Size(MARK_BYTES), Proto(18)] = b""
    """Stands for the notices that I know; another one than yours: ask me for them (`ManifestRequest`)."""
    waits: Annotated[Waits, Proto(20)] = ""
    """For whom all that is here waits. stage: for the next one, which has it. leader: all is computed, for its word."""


MAX_UNREACHED = 16
"""Replicas that a heartbeat can name as not reached."""


MAX_MATES = 64
"""Round trips that a replica reports: to the replicas that it exchanged with last."""

MAX_BYTES_PER_S = 10**12
RoundTrip = Annotated[tuple[PeerId, Annotated[int, Between(1, 3600 * 10**6)]], Proto(names=("peer", "microseconds"))]


@dataclass(frozen=True, slots=True)
class LineQuality:
    """What a replica has measured of its own line (`averaging.watch`)."""

    bytes_per_s: Annotated[int, Between(0, MAX_BYTES_PER_S)] = 0
    """What it carries, the lower of both directions; 0: not known yet."""
    round_trips: Annotated[tuple[RoundTrip, ...], Entries(MAX_MATES, distinct=True)] = ()
    """Replicas and how far away they are; each once."""
    relayed: bool = False
    """Are some replicas reached through a relay alone?"""
    busy: bool = False
    """Did the last two rounds wait for this line? If not, the rate may be that of a machine slow to feed it."""


UNMEASURED = LineQuality()


@dataclass(frozen=True, slots=True)
class Late:
    """A member with an overdue chunk."""

    peer: PeerId
    owes: bool
    """The missing chunk is of its own contribution, which depends on no other member."""
    allowed_s: Annotated[float, Between(0.0, 1e6)]
    """The line's speed explains a pause of this many seconds; the stream has stood still for longer."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """What holds a member up in round `id`."""

    id: RoundId
    late: Annotated[tuple[Late, ...], Entries(MAX_MATES, distinct=True)] = ()
    """Who is late."""
    refused: Annotated[tuple[PeerId, ...], Entries(MAX_MATES, distinct=True)] = ()
    """Members that sent chunks that it had to refuse."""


@dataclass(frozen=True, slots=True)
class MemberState:
    """Member to leader: its observed state of the step (rules 3, 9, 10).

    Sent on every heartbeat, when work on an index begins or is dropped, when an aggregate is complete, when an
    accumulator epoch ends, and whenever the leader asks. A state that is not whole says that what its *revision* held
    has not changed, and leaves that out: `owned`, `summed`, `ack`, `vote`, `commit` and `non_finite`. A leader that
    lacks the revision asks for it. Of revision 0 it says only what it `wants` or `returns`, between heartbeats.
    """

    stamp: Stamp
    ballot: Ballot
    """The term that the member follows."""
    generation: Generation
    """Of the member's accumulator."""
    owned: Indexes = NONE
    """Assigned or summed."""
    summed: Indexes = NONE
    """In the accumulator."""
    ack: Commit | None = None
    """The complete aggregate that is here, as the stage would commit it; without its contributors."""
    commit: Commit | None = None
    progress: Count = 0
    """Counts accumulated weight gradients, also those of the step before."""
    non_finite: Indexes = NONE
    line: LineQuality | None = UNMEASURED
    """None: as in the last one that had it."""
    trouble: Trouble | None = None
    """In the open round."""
    vote: Annotated[bytes, Size(64)] = b""
    """My signature under `ack`."""
    whole: bool = True
    revision: Count = 0
    """Grows from 1 with every change of what is left out of a state that is not whole."""
    round: Annotated[int, Between(-1, 1 << 53), Proto(type="sint64")] = -1
    """The number of the round that I was told last under this ballot; -1: of none."""
    wants: Indexes = NONE
    """Indexes under work that the leader has not assigned yet."""
    returns: Indexes = NONE
    """Indexes that are not held: their work was dropped, or a round names them wrongly."""
    awaits: LatePeers = ()
    """Members with streams of the open round that are later than their lines explain."""

    def contradiction(self) -> str:
        """What in it cannot be, in words; "" if nothing."""
        # What is left out must not look as if it was read.
        said = self.owned or self.summed or self.ack or self.commit or self.non_finite or self.vote
        return "" if self.whole or not said else "is not whole and says what it holds"

    def unchanged(self, **news: Any) -> MemberState:
        """The state that says that this whole one still holds, and what is new beyond it."""
        told = {"revision": self.revision, **news}
        return MemberState(self.stamp, self.ballot, self.generation, line=None, whole=False, **told)


@dataclass(frozen=True, slots=True)
class Round:
    """An attempt at the step: members sum these contributions (rule 15).

    A replica also gives itself one, never sent, to fetch the sum that its stage has committed (rule 16)."""

    stamp: Stamp
    id: RoundId
    contributions: Contributions
    """Empty only where a replica tells itself to fetch a sum."""
    receivers: Members
    """The members that must end up holding the aggregate."""
    holders: Members
    """The peers that hold the finished sum. A leader always sends (): only a replica's order to itself names some."""
    discarded: Indexes = NONE
    bandwidths: Annotated[tuple[Annotated[int, Between(1, MAX_BYTES_PER_S)], ...], Entries(MAX_MEMBERS, "members")] = ()
    """Bytes per second of each receiver, by which the vector is cut in parts; (): it is cut evenly."""
    rows: Annotated[tuple[Annotated[int, Between(1, MAX_MEMBERS)], ...], Entries(MAX_MEMBERS, "members")] = ()
    """How many of the receivers, in their order, stand in each row of a grid (`averaging.grid`); (): all are one
    group."""
    notice: Notice | None = None
    """The notice that begins at this step, if the leader knows one: the commit will name it."""
    late: LatePeers = ()
    """Peers that were late in this step or the last ones, as the leader saw it: the commit will name them."""
    bans: BannedPeers = ()
    """The peers that the commit will ban."""

    def contradiction(self) -> str:
        """What in it cannot be, in words; "" if nothing."""
        # One of each receiver, in their order, or none.
        if self.bandwidths and len(self.bandwidths) != len(self.receivers):
            return "has bandwidths of others than the receivers"
        return _discarded_but_contributed(self)


MAX_MOVED = 64
"""Microbatches of which a plan names another assignee. A member asks again for what is not answered."""


@dataclass(slots=True)
class StagePlan:
    """Leader to member: the desired state of the step, as far as the member's states do not show it.

    Sent when it changes, in answer to a state that it differs from, and again on every heartbeat until a state shows
    it, so that nothing depends on one message. Every plan says: follow me (rule 13). In a large stage, where not all
    hear the leader's heartbeats, all members get one on every heartbeat. The leader adds to a plan until it is sent.
    """

    stamp: Stamp
    ballot: Ballot
    """The leader's term."""
    generation: Generation | None = None
    """The member's accumulator that the next three fields are about."""
    assigned: Indexes = NONE
    """Indexes that the member wants, and that are its own to contribute (rule 3)."""
    moved: Annotated[
        tuple[Annotated[tuple[Index, PeerId], Proto(names=("index", "assignee"))], ...], Entries(MAX_MOVED)
    ] = ()
    """Indexes that the member wants, and who contributes them instead. (A callee tells its caller so by `MovedTo`.)"""
    evicted: Literal["", "closed", "discard"] = ""
    """closed: the accumulator ends, and its content is offered again. discard: the content is to be dropped, too (rules
    10 and 11)."""
    execute: Indexes = NONE
    """Indexes that have no assignee: the member is to work on them (rule 8)."""
    attempt: Round | None = None
    """The open round, until the member's state names it (rule 15)."""
    given: Indexes = NONE
    """The indexes that have or had an assignee; only the next leaders in order are told. If this leader dies, its
    successor has those executed that have lost their assignee, without the idle timeout."""
    whole: bool = False
    """The leader lacks the member's last whole state (rule 9)."""
    awaits: LatePeers = ()
    """The members that the leader waits for: for their states, or their signatures."""

    def contradiction(self) -> str:
        """What in it cannot be, in words; "" if nothing."""
        about = self.assigned or self.moved or self.evicted
        return "is about an accumulator that it does not name" if about and self.generation is None else ""


def contributors_of(of: Finished | Round) -> frozenset[PeerId]:
    """The replicas with gradients in it."""
    return frozenset(peer for peer, _, indexes in of.contributions if indexes)


def _discarded_but_contributed(of: Finished | Round) -> str:
    # What is left out of the step cannot be in its sum.
    both = any(indexes & of.discarded for _, _, indexes in of.contributions)
    return "has a skipped index that is contributed" if both else ""


@dataclass(frozen=True, slots=True)
class Committed:
    """A commit, pushed by the leader to its members and to the other stages (rule 16)."""

    commit: Commit
    restart: Restart = NO_RESTART
    """The rollback that the commit descends from, as in a `Stamp`."""


StepControl = Heartbeat | StagePlan | MemberState | Committed
"""What the step machine receives."""

AuditControl = Case | Sent
Control = StepControl | AuditControl


# ---------------------------------------------------------------- calls

MAX_HOPS = 16
"""Hops of a round: more than the largest stage needs with groups of two."""

MAX_AVOIDED = 128
"""Peers that an evaluation can ask to go around: two routes through 64 stages."""

MAX_PIECES = 1 << 13
"""Pieces of one content: their digests take at most 256 KiB."""


@dataclass(frozen=True, slots=True)
class Process:
    """Run microbatch `index` of `step` through `stage` and everything after it; answer the input gradient.

    Payload: (tokens, proof) for stage 0, (tokens, hidden, proof) otherwise. tokens: int32 [B, T + 1], they are the
    labels too; hidden: [B, T, D] under the run's activation codec; proof: uint8 [B, depth, 32], that each row is the
    window of the data that belongs there (docs/data.md), left out of an evaluation.
    """

    step: Step
    stage: Stage
    index: Index
    purpose: Literal["train", "eval"] = "train"
    """"eval": forward only, claims nothing."""
    hedge: bool = False
    """Compute it, in any case: the caller believes that the assignee hangs. Wins over `repair`."""
    repair: bool = False
    """Another call has begun this microbatch before: wait for the claim's answer before computing, since an assignee
    with a finished answer may exist."""
    avoid: Annotated[tuple[PeerId, ...], Entries(MAX_AVOIDED, packed=True)] = ()
    """Of an evaluation: peers that are not to compute it in later stages, where others can."""
    sents: Sents = ()
    """By the caller, of tokens and hidden: in training, if the run has audits."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Hand out what a microbatch left behind. Payload: none."""

    step: Step
    stage: Annotated[int, Between(-1, MAX_STAGES - 1)]
    """-1 asks a trainer, or a peer of stage 0, for (tokens, proof)."""
    index: Index
    kind: Literal["input", "gradient"]
    """"input": what `stage` sends to the next one, (tokens, hidden, proof). "gradient": the input gradient that
    `stage` answered, (gradient,), or () for stage 0."""
    cached: bool
    """Only if memoised; otherwise the callee recomputes a missing input (uncounted, rule 6)."""


@dataclass(frozen=True, slots=True)
class Part:
    """Averaging: elements [start, stop) of a round."""

    stamp: Stamp
    id: RoundId
    kind: PartKind
    """"contribution": the callee's input to the sum of hop `hop`; in hop 0 its accumulator, in a later hop the sum that
    it made in the hop before. "reduced": the sum over all contributors, for elements that the callee reduced in that
    hop. "sum": elements of the finished sum `id`. "replay": the same, of a step that a joiner catches up with.
    "pledges": what the callee, and those that have answered it, stand for in the sum with digest `reference`; of its
    whole row, once that has answered, if `hop` is 1; of a range, what contributors have signed of that to its reducer,
    the callee, in that hop."""
    start: Extent
    stop: Extent
    hop: Annotated[int, Between(0, MAX_HOPS - 1)] = 0
    reference: Annotated[bytes, Size(32)] = b""
    """Among partners: digest of what the caller takes differences to (`sums.references`); empty: it has none. With
    "pledges": the digest of the whole sum, as the caller has it."""

    def contradiction(self) -> str:
        """What in it cannot be, in words; "" if nothing."""
        # A range that runs backwards would have a negative length.
        return "starts after its stop" if self.start > self.stop else ""


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """The state of `stage`, in pieces that are smaller than any payload limit."""

    stage: Stage
    version: Version = -1
    """-1: where the callee stands. It takes a copy of that version if need be."""
    content: Annotated[bytes, Size(32)] = b""
    """The address of the content that is asked for: of a snapshot, or of frozen weights; empty: of none yet."""
    piece: Annotated[int, Between(-1, MAX_PIECES - 1)] = -1
    """Number of the piece; -1: describe the content, or a snapshot."""

    def contradiction(self) -> str:
        """What in it cannot be, in words; "" if nothing."""
        return "a piece without its content could be of any version" if self.piece >= 0 and not self.content else ""


@dataclass(frozen=True, slots=True)
class TrailRequest:
    """The replay log's entry of this version: a joiner with a copy of the version applies it and goes on."""

    stamp: Stamp


@dataclass(frozen=True, slots=True)
class AuditRequest:
    """What went into a microbatch that `peer` counted, and its work."""

    step: Step
    stage: Stage
    index: Index
    peer: PeerId
    bare: bool = False
    """The work alone, without what went into it."""
    made: bool = False
    """The work with what it made, not with what went into it: its peer computes that again."""


@dataclass(frozen=True, slots=True)
class DialBack:
    """Open a new connection to me at the address in my record, and say whether that worked."""


@dataclass(frozen=True, slots=True)
class ManifestRequest:
    """The run's manifest, as canonical bytes, and what its owner has signed since."""


@dataclass(frozen=True, slots=True)
class HistoryRequest:
    """What came of the run's steps? Any peer may ask."""

    since: Step = 0
    """The first step that is wanted. Of one that no run comes to, the answer has `times` alone."""


Request = (
    Process | Fetch | AuditRequest | Part | SnapshotRequest | TrailRequest | ManifestRequest | DialBack | HistoryRequest
)

STRANGERS_ASK = (ManifestRequest, HistoryRequest)
"""What is answered to who has not greeted: one without a run yet, or who only looks on."""


def gives_way(request: Request) -> bool:
    """Is it state for a joiner that is asked for? It waits for what steps need."""
    return isinstance(request, SnapshotRequest) or (isinstance(request, Part) and request.kind == "replay")


@dataclass(frozen=True, slots=True)
class Accepted:
    """The microbatch has a slot (or was there already): send the payload, wait."""


@dataclass(frozen=True, slots=True)
class Running:
    """Still at it: resets the caller's patience."""


@dataclass(frozen=True, slots=True)
class Busy:
    """Back-pressure, never a ban."""

    retry_after_s: Annotated[float, Between(0.0, 3600.0)]
    version: Version
    """The version of the callee's weights. If it is below the requested step, the callee is merely behind."""


@dataclass(frozen=True, slots=True)
class MovedTo:
    """Callee to caller: the index has another assignee, attach there. (To a member: `StagePlan.moved`.)"""

    owner: PeerId


@dataclass(frozen=True, slots=True)
class Rejected:
    """Refused for good."""

    code: RejectCode
    reason: Reason = ""
    version: Version = -1


@dataclass(frozen=True, slots=True)
class Gradient:
    """The answer to `Process`. Payload: (gradient,) under the run's gradient codec, or () for stage 0 and eval."""

    loss_sum: float
    """Nats, from the last stage, as `num_tokens`."""
    num_tokens: Count
    compute_s: NotNegative = 0.0
    """Seconds of compute in the callee alone."""
    payload: Payload = ()
    route: Annotated[tuple[PeerId, ...], Entries(MAX_COMMITS, "num_stages", packed=True)] = ()
    """Of an evaluation: who computed it in each stage after the callee's, as their callers say."""
    sents: Sents = ()
    """By the callee, of the payload: in training, if the run has audits."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """The answer to `Fetch`."""

    payload: Payload = ()
    loss_sum: float = 0.0
    num_tokens: Count = 0
    sents: Sents = ()
    """By the callee, of the payload without its proof, if the run has audits."""


Losses = Annotated[Mapping[int, tuple[float, Count]], Proto(names=("indexes", "loss_sum", "num_tokens"))]


@dataclass(frozen=True, slots=True)
class PartData:
    """The answer to `Part`."""

    payload: Payload = ()
    losses: Losses = field(default_factory=dict)
    """index -> (loss_sum, num_tokens) of the indexes that were summed: one contributor's, or all of them for
    "reduced"."""
    finished: Finished | None = None
    """Only for "sum" and "replay"."""
    pledges: Annotated[tuple[Pledge, ...], Entries(MAX_MEMBERS, "members")] = ()
    """For "pledges" what was asked for. With the last chunk of a contributor's part: what the callee has signed of
    that part (`averaging.round_check`), if members commit."""


@dataclass(frozen=True, slots=True)
class AuditData:
    """The answer to `AuditRequest`. Payload: what went in, then the gradient of the output, none in the last stage; for
    what was made of that the output, none in the last stage, then the answer, none in the first; for a bare request
    nothing."""

    work: WorkRecord
    path: Annotated[bytes, Size(32 * MAX_PATH)]
    """From it to the root that its peer pledged."""
    payload: Payload = ()
    sents: Sents = ()
    """Of what went in, and of the gradient; not if the request is bare."""


MAX_LEVEL = 3
FOR_EVER = (1 << 53) - 1
"""The end of a banned peer's exclusion."""


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Steps of a stage do not wait for a peer that was late or is banned (`step.exclusion`)."""

    peer: PeerId
    until_step: Step
    """The first step that waits for it again."""
    level: Annotated[int, Between(1, MAX_LEVEL)]
    """The back-off grows with it."""


MAX_EXCLUSIONS = 1024
ExclusionTable = Annotated[tuple[Exclusion, ...], Entries(MAX_EXCLUSIONS, distinct=True)]


@dataclass(frozen=True, slots=True)
class StateHeader:
    """Which state of a stage: its version and the commits that led to it, without its bytes."""

    version: Step
    chain: Chain
    before: Chain
    """The chain of one version earlier; of version 0, its own."""
    term_chain: Chain
    """The chain at the start of the leader's term."""
    restart: Restart = NO_RESTART
    """What the state descends from."""
    notices: NoticeList = ()
    """Those in force at this version."""
    exclusions: ExclusionTable = ()
    """The stage's table, as of this version."""
    exclusions_before: ExclusionTable = ()
    """One version earlier: its digest is in the stage's last commit, from which the table follows."""


@dataclass(frozen=True, slots=True)
class Content:
    """Some bytes, by the SHA-256 of each of their pieces (`fetch.plan`)."""

    num_bytes: Extent
    piece_bytes: Annotated[int, Between(1, 1 << 48)]
    """Length of every piece but the last, which may be shorter."""
    digests: Annotated[bytes, Size(32 * MAX_PIECES)]
    """SHA-256 of every piece, one after the other."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state that the callee keeps in memory as long as it is fetched."""

    stage: Stage
    header: StateHeader
    content: Content


@dataclass(frozen=True, slots=True)
class SnapshotPiece:
    """Bytes of a content. Payload: one raw tensor, uint8."""

    payload: Payload = ()


@dataclass(frozen=True, slots=True)
class TrailStep:
    """The answer to `TrailRequest`: the step's finished sum and its commits, as far as the callee knows them.

    With a commit of every stage the step is over; the aggregate itself is fetched by `Part(kind="replay")`.
    """

    finished: Finished | None
    commits: Commits
    last_commits: Commits = ()
    """The commits of the step before, all or none: a joiner can tell them to a stage that is a step behind."""


@dataclass(frozen=True, slots=True)
class ManifestData:
    """The answer to `ManifestRequest`: UTF-8 TOML; the caller checks its canonical hash."""

    toml: Annotated[str, Size(1 << 18)]
    # Number 2 was the notices as text.
    notices: Annotated[NoticeList, Proto(3)] = ()
    """All that the callee knows."""


@dataclass(frozen=True, slots=True)
class History:
    """The answer to `HistoryRequest`: what the callee remembers, oldest first. Of many steps it has the first ones:
    ask again for those after them."""

    figures: Annotated[tuple[StepFigures, ...], Entries(MAX_FIGURES)] = ()
    """Of a replica."""
    evaluations: Annotated[tuple[Evaluation, ...], Entries(MAX_EVALUATIONS)] = ()
    """Of a trainer."""
    times: Annotated[tuple[StepTimes, ...], Entries(MAX_STEP_TIMES)] = ()
    """Of a replica's last whole step, by stage."""


@dataclass(frozen=True, slots=True)
class DialledBack:
    """The answer to `DialBack`."""

    reached: bool
    reason: Reason = ""
    """What stood in the way, in words for a person."""


Answer = (
    Accepted
    | Running
    | Busy
    | MovedTo
    | Rejected
    | Gradient
    | Fetched
    | PartData
    | AuditData
    | Snapshot
    | Content
    | SnapshotPiece
    | TrailStep
    | ManifestData
    | DialledBack
    | History
)
