"""What peers say to each other, as frozen values. Standard library only; `wire` turns them into bytes and back.

Three kinds: `Control` messages are one-way and idempotent (re-sent until the state they report has changed), a
`Request` opens a call, an `Answer` comes back on it. Index sets are frozensets here and bitmaps on the wire. The bound
beside a field is what every reader insists on (`wire.fields`); a plain float is any finite number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from swarmnet.bounds import MAX_INDEXES, MAX_MEMBERS, Between, Entries, Size
from swarmnet.errors import RejectCode
from swarmnet.ids import NO_CHAIN, NO_RESTART, Ballot, Chain, Generation, Incarnation, Number, PeerId, Restart, RoundId

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
PartKind = Literal["contribution", "reduced", "sum"]
Reason = Annotated[str, Size(1000, cut=True)]
Members = Annotated[tuple[PeerId, ...], Entries(MAX_MEMBERS, "members")]
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
    """Who added which indexes under which generation: disjoint, and with `voided` exactly 0..M-1."""
    voided: Indexes = NONE

    def contradiction(self) -> str:
        """What in it cannot be, in words; "" if nothing."""
        return _voided_but_contributed(self)


MAX_VOTES = 31
"""Votes that a commit carries: more than any majority that is needed (`step.membership`)."""


@dataclass(frozen=True, slots=True)
class Vote:
    """A replica's signature under a commit: it holds that sum."""

    peer: PeerId
    signature: Annotated[bytes, Size(64, least=1)]


@dataclass(frozen=True, slots=True)
class Commit:
    """The sum of (stage, step) that its stage stands by. Two commits with other votes are one commit."""

    stage: Stage
    step: Step
    chain: Chain
    """The stage's chain before it."""
    id: RoundId
    digest: Digest
    num_tokens: Count
    loss_sum: float
    grad_sq_norm: NotNegative
    voided: Indexes = NONE
    contributors: Members = ()
    """Whose gradients are in it, sorted."""
    votes: Annotated[tuple[Vote, ...], Entries(MAX_VOTES)] = field(default=(), compare=False)
    """Of those who hold it. More than half of those who count in the stage make it a certificate
    (`step.membership`)."""

    def says(self, finished: Finished) -> bool:
        """Is that the sum, bit by bit, whichever round made it?"""
        return (self.digest, self.num_tokens, self.loss_sum, self.grad_sq_norm, self.voided) == (
            finished.digest,
            finished.num_tokens,
            finished.loss_sum,
            finished.grad_sq_norm,
            finished.voided,
        )


Commits = Annotated[tuple[Commit, ...], Entries(MAX_MEMBERS, "num_stages")]


@dataclass(frozen=True, slots=True)
class Stamp:
    """What every message of the step protocol is about; another chain means a fork."""

    step: Step
    stage: Stage
    chain: Chain
    restart: Restart = NO_RESTART
    """What the sender's state descends from. A lower one has no say in this run."""


@dataclass(frozen=True, slots=True)
class Measure:
    """What a replica's weights were like at `version`, after the commits of `chain` (docs/drift.md)."""

    version: Step
    chain: Chain
    digest: Annotated[bytes, Size(32)]
    """SHA-256 of their bits."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """To replicas of my stage and of the neighbour stages: where I stand and which commits I know."""

    stamp: Stamp
    incarnation: Incarnation
    synced: bool
    keeper: Ballot | None
    """Whom I go by in the open step, or went by in the last."""
    commits: Commits = ()
    """Of step `stamp.step` (= my version), as far as known."""
    last_commits: Commits = ()
    """All P of the step before; only sent to a peer that is known to be behind."""
    queue: Count = 0
    """Microbatches in flight."""
    draining: bool = False
    numerics: Annotated[str, Size(256)] = ""
    """The numerics class of my weights."""
    measure: Measure | None = None
    """The newest one of them; only sent to replicas of my stage."""
    before: Chain = NO_CHAIN
    """The chain of one version earlier; of version 0 its own."""
    sitting: Annotated[tuple[PeerId, ...], Entries(MAX_SITTING)] = ()
    """Mates that my step goes on without."""


MAX_SITTING = 16
"""Mates that a heartbeat says sit out."""


@dataclass(frozen=True, slots=True)
class Prepare:
    """Keeper to members: follow me (rule 13). Repeated as the keeper's heartbeat."""

    stamp: Stamp
    ballot: Ballot
    given: Indexes = NONE
    """What has an owner, or had one and must be executed again: a successor need not wait to find out."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Member to keeper: may I count `index`? (rule 3)"""

    stamp: Stamp
    ballot: Ballot
    generation: Generation
    index: Index


@dataclass(frozen=True, slots=True)
class Granted:
    """Keeper to member: `index` is yours to count under this ballot and generation."""

    stamp: Stamp
    ballot: Ballot
    generation: Generation
    index: Index


@dataclass(frozen=True, slots=True)
class Moved:
    """Keeper to member: `index` is owned by `owner`."""

    stamp: Stamp
    ballot: Ballot
    generation: Generation
    index: Index
    owner: PeerId


MAX_MATES = 64
"""Mates whose distance a replica reports: those it has exchanged with last."""

MAX_BYTES_PER_S = 10**12
Microseconds = Annotated[int, Between(1, 3600 * 10**6)]


@dataclass(frozen=True, slots=True)
class LinkQuality:
    """What a replica has measured of its own line (`averaging.meter`)."""

    bytes_per_s: Annotated[int, Between(0, MAX_BYTES_PER_S)] = 0
    """What it carries, the lower of both directions; 0: not known yet."""
    round_trips: Annotated[tuple[tuple[PeerId, Microseconds], ...], Entries(MAX_MATES, distinct=True)] = ()
    """Mates and how far away they are; each once."""


UNMEASURED = LinkQuality()


@dataclass(frozen=True, slots=True)
class Late:
    """A member whose next chunk is overdue."""

    peer: PeerId
    owes: bool
    """It is its own contribution that is waited for, which hangs on nobody else."""
    allowed_s: Annotated[float, Between(0.0, 1e6)]
    """It stood still for longer than this, which its line explains."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """What holds a member up in round `id`."""

    id: RoundId
    late: Annotated[tuple[Late, ...], Entries(MAX_MATES, distinct=True)] = ()
    """Who is late."""
    refused: Annotated[tuple[PeerId, ...], Entries(MAX_MATES, distinct=True)] = ()
    """Whose chunks it had to refuse."""


@dataclass(frozen=True, slots=True)
class Report:
    """Member to keeper, every heartbeat and on change (rule 9). `finished` doubles as the Ack of a round."""

    stamp: Stamp
    ballot: Ballot
    generation: Generation
    owned: Indexes
    """Granted or summed."""
    summed: Indexes
    """In the accumulator."""
    finished: Finished | None
    commit: Commit | None
    progress: Count
    """Counts finished compute jobs."""
    non_finite: Indexes = NONE
    line: LinkQuality = UNMEASURED
    trouble: Trouble | None = None
    """In the open round."""
    vote: Annotated[bytes, Size(64)] = b""
    """My signature under the commit of `finished`."""


@dataclass(frozen=True, slots=True)
class Evicted:
    """Keeper to member: `generation` is closed."""

    stamp: Stamp
    ballot: Ballot
    generation: Generation
    void: bool
    """Empty the accumulator too (rule 11)."""


@dataclass(frozen=True, slots=True)
class Release:
    """Member to keeper: the round names `indexes` under my name that I do not hold (rule 10)."""

    stamp: Stamp
    ballot: Ballot
    generation: Generation
    indexes: Indexes


@dataclass(frozen=True, slots=True)
class Round:
    """Keeper to members: sum these contributions (rule 15), or fetch the finished sum `id` from `holders` (rule
    14)."""

    stamp: Stamp
    ballot: Ballot
    id: RoundId
    contributions: Contributions
    """Empty for a sum that was adopted."""
    receivers: Members
    """Everybody who must end up holding the sum."""
    holders: Members
    voided: Indexes = NONE
    bandwidths: Annotated[tuple[Annotated[int, Between(1, MAX_BYTES_PER_S)], ...], Entries(MAX_MEMBERS, "members")] = ()
    """Of the receivers, in their order, by which the vector is cut in parts; (): cut it evenly."""
    rows: Annotated[tuple[Annotated[int, Between(1, MAX_MEMBERS)], ...], Entries(MAX_MEMBERS, "members")] = ()
    """How many of the receivers, in their order, stand in each row of a grid (`averaging.grid`); (): all are one
    group."""
    columns: Annotated[int, Between(0, MAX_MEMBERS)] = 0
    """In how many parts each row cuts the vector; 0: all are one group."""

    def contradiction(self) -> str:
        """What in it cannot be, in words; "" if nothing."""
        if self.bandwidths and len(self.bandwidths) != len(self.receivers):
            return "has bandwidths of others than the receivers"
        return _voided_but_contributed(self)


def _voided_but_contributed(of: Finished | Round) -> str:
    both = any(indexes & of.voided for _, _, indexes in of.contributions)
    return "has a voided index that is contributed" if both else ""


@dataclass(frozen=True, slots=True)
class Committed:
    """A commit, pushed by the keeper to its members and to the other stages (rule 16)."""

    commit: Commit
    restart: Restart = NO_RESTART
    """See `Stamp`."""


@dataclass(frozen=True, slots=True)
class Execute:
    """Keeper to member: this index is idle; take it (rule 8)."""

    stamp: Stamp
    ballot: Ballot
    index: Index


Control = Heartbeat | Prepare | Claim | Granted | Moved | Report | Evicted | Release | Round | Committed | Execute


# ---------------------------------------------------------------- calls

MAX_HOPS = 16
"""Hops of a round: more than the most members have in groups of two."""

MAX_PIECES = 1 << 13
"""Pieces of one copy of a state: their digests take at most 256 KiB."""


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
    """Compute, whoever owns it: the caller believes that the owner hung."""
    repair: bool = False
    """Somebody has begun this microbatch before: wait for the claim's answer before computing, since an owner with a
    finished answer may exist."""


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
    """"contribution": what the callee adds to a sum of hop `hop`, its own accumulator in hop 0, later the sum it made
    in the hop before. "reduced": of what the callee reduced in that hop, the sum over all contributors. "sum": from a
    finished sum `id`."""
    start: Extent
    stop: Extent
    hop: Annotated[int, Between(0, MAX_HOPS - 1)] = 0

    def contradiction(self) -> str:
        """What in it cannot be, in words; "" if nothing."""
        return "starts after its stop" if self.start > self.stop else ""


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """State of `stage`, in pieces that no payload limit minds."""

    stage: Stage
    version: Version = -1
    """-1: where the callee stands. It takes a copy of that version if need be."""
    root: Annotated[bytes, Size(32)] = b""
    """Which copy; empty: describe one of `version`."""
    piece: Annotated[int, Between(-1, MAX_PIECES - 1)] = -1
    """Number of a piece of that copy; -1: its description again."""

    def contradiction(self) -> str:
        """What in it cannot be, in words; "" if nothing."""
        return "asks for a piece of no copy" if self.piece >= 0 and not self.root else ""


@dataclass(frozen=True, slots=True)
class TrailRequest:
    """What was summed and committed on this version, so that somebody with a copy of it can follow."""

    stamp: Stamp


@dataclass(frozen=True, slots=True)
class DialBack:
    """Open a new connection to me, where my record says that I listen, and say whether it came about."""


@dataclass(frozen=True, slots=True)
class ManifestRequest:
    """The run's manifest, as canonical bytes."""


Request = Process | Fetch | Part | SnapshotRequest | TrailRequest | ManifestRequest | DialBack


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
    """Of the callee's weights; below the asked step it is merely behind."""


@dataclass(frozen=True, slots=True)
class MovedTo:
    """Somebody else owns this index: attach there."""

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
    payload: tuple[Packed, ...] = ()


@dataclass(frozen=True, slots=True)
class Fetched:
    """The answer to `Fetch`."""

    payload: tuple[Packed, ...] = ()
    loss_sum: float = 0.0
    num_tokens: Count = 0


@dataclass(frozen=True, slots=True)
class PartData:
    """The answer to `Part`."""

    payload: tuple[Packed, ...] = ()
    losses: Mapping[int, tuple[float, Count]] = field(default_factory=dict)
    """index -> (loss_sum, num_tokens) of the indexes that were summed: one contributor's, or everybody's for
    "reduced" and "sum"."""
    finished: Finished | None = None
    """Only for "sum"."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy that the callee keeps for as long as it is fetched, as its donor describes and signs it
    (`state.snapshot_index`)."""

    stage: Stage
    version: Step
    chain: Chain
    before: Chain
    """The chain of a version earlier."""
    term_chain: Chain
    """The chain at the start of the keeper's term."""
    restart: Restart
    """What the state descends from."""
    num_bytes: Extent
    piece_bytes: Annotated[int, Between(1, 1 << 48)]
    """Of every piece but the last, which may be shorter."""
    digests: Annotated[bytes, Size(32 * MAX_PIECES)]
    """SHA-256 of every piece, one after the other."""
    root: Sha256
    """The hash that stands for them."""
    signature: Annotated[bytes, Size(128)]


@dataclass(frozen=True, slots=True)
class SnapshotPiece:
    """Bytes of a copy. Payload: one raw tensor, uint8."""

    payload: tuple[Packed, ...] = ()


@dataclass(frozen=True, slots=True)
class TrailStep:
    """The answer to `TrailRequest`: the step's finished sum and its commits, as far as the callee knows them.

    With a commit of every stage the step is over; the sum itself is fetched by `Part(kind="sum")`.
    """

    finished: Finished | None
    commits: Commits
    last_commits: Commits = ()
    """Of the step before, all or none: whoever is level then can tell them to a stage that is a step behind."""


@dataclass(frozen=True, slots=True)
class ManifestData:
    """The answer to `ManifestRequest`: UTF-8 TOML whose canonical hash the caller checks."""

    toml: Annotated[str, Size(1 << 18)]


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
    | Snapshot
    | SnapshotPiece
    | TrailStep
    | ManifestData
    | DialledBack
)
