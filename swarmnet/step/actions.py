"""What the step machines ask their driver to do. Values only. step: the open step that an action is about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from swarmnet.ids import Chain, PeerId
from swarmnet.messages import Commit, Committed, Heartbeat, Round, StepControl


@dataclass(frozen=True, slots=True)
class Send:
    """Tell one peer (possibly myself)."""

    peer: PeerId
    message: StepControl


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Tell all replicas of all stages that my peer knows, myself included.

    A heartbeat goes only to the replicas of my stage and of the stages beside it, and not to me.
    """

    message: Heartbeat | Committed


@dataclass(frozen=True, slots=True)
class CountHere:
    """The index is mine to count: add its weight gradient, fenced by the void counter as it is now (rule 5)."""

    step: int
    index: int


@dataclass(frozen=True, slots=True)
class OwnedElsewhere:
    """Somebody else counts the index (rule 3): before forward, send callers there; later, input gradient only."""

    step: int
    index: int
    owner: PeerId


@dataclass(frozen=True, slots=True)
class Void:
    """Empty the step's accumulator (rule 11)."""

    step: int


@dataclass(frozen=True, slots=True)
class Sum:
    """Take part in this round: contribute (if I am named in it), reduce, collect the whole sum (rule 15)."""

    round: Round


@dataclass(frozen=True, slots=True)
class CollectSum:
    """Fetch the sum of this round that the stage has committed from one of the round's holders (rules 14, 16)."""

    round: Round
    digest: bytes
    """The digest that the certificate names: a holder of other bits is passed over."""


@dataclass(frozen=True, slots=True)
class StopSum:
    """Abandon the running exchange; the accumulator stays as it is."""


@dataclass(frozen=True, slots=True)
class TakeIndex:
    """Take an idle index: input from the stage before, gradient from the stage after (rule 6)."""

    step: int
    index: int


@dataclass(frozen=True, slots=True)
class Apply:
    """Every stage has committed: one optimizer step with these commits, in stage order (rule 17)."""

    commits: tuple[Commit, ...]


@dataclass(frozen=True, slots=True)
class Resync:
    """I am behind or on the losing side of a fork: fetch a snapshot from one of these (rules 18, 19)."""

    donors: tuple[PeerId, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class MeasureWeights:
    """Measure the weights of `version`, the one that has just begun, after the commits of `chain`.

    term_chain: as it is then (`drift.Drift.measured`)."""

    version: int
    chain: Chain
    term_chain: Chain


@dataclass(frozen=True, slots=True)
class Orphaned:
    """Other stages have applied a step that mine cannot end: my state can no longer catch up."""


@dataclass(frozen=True, slots=True)
class Note:
    """Something worth a line in the log."""

    event: str
    fields: Mapping[str, object]


def note(event: str, **fields: object) -> Note:
    """A `Note` of these fields."""
    return Note(event, fields)


Action = (
    Send
    | Broadcast
    | CountHere
    | OwnedElsewhere
    | Void
    | Sum
    | CollectSum
    | StopSum
    | TakeIndex
    | Apply
    | Resync
    | MeasureWeights
    | Orphaned
    | Note
)
