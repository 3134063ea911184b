"""Every error swarmnet raises on purpose. The class says what happened; facts are keyword arguments.

The caller decides whether to try again: it knows what it asked for.

SwarmError
├── UsageError          the person at the keyboard: what, where, what to do (exit code 2)
├── NoReplica           no live peer serves the stage
├── PeerTimeout         a peer said nothing for too long
├── PeerGone            the connection was refused or broke
├── Refused             the other side answered `Rejected(code, reason)`
├── BadMessage          what a peer sent is malformed, oversized or non-finite
├── BadCheckpoint       a checkpoint on disk cannot be used
├── RankLost            a rank of this peer's mesh has ended or hangs; all of them are gone now
├── MeshFailed          ranks were lost again and again: the peer ends
├── DeviceFull          a device of this peer has no memory left for what it was asked
└── Overflow            a fixed-point sum would leave int64
"""

from __future__ import annotations

import enum
import errno
from collections.abc import Iterator
from typing import TypeVar

_Error = TypeVar("_Error", bound=BaseException)


class SwarmError(Exception):
    """Base of all named errors."""

    def __init__(self, message: str = "", **facts: object) -> None:
        # repr: a peer's text must not pass for ours.
        shown = " ".join(f"{key}={value!r}" for key, value in facts.items())
        super().__init__(" ".join(part for part in (message, shown) if part) or type(self).__name__)
        self.message = message
        self.facts = facts


class UsageError(SwarmError):
    """Bad input from the person at the keyboard: one line that says what, where and what to do."""


def unwritable(path: object, error: Exception) -> UsageError:
    """What to raise where a file that a person asked for cannot be written."""
    reason = getattr(error, "strerror", None) or error
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
    advice = "; free some space, or name a path on another disk" if full else ""
    return UsageError(f"{path}: cannot be written: {reason}{advice}")


class NoReplica(SwarmError):
    """No live, unbanned replica of a stage is known."""


class PeerTimeout(SwarmError):
    """A peer let a deadline pass."""


class PeerGone(SwarmError):
    """A connection was refused or broke. `definite` facts (refused: no process listens there) prove death."""

    def __init__(self, message: str = "", *, definite: bool = False, **facts: object) -> None:
        super().__init__(message, definite=definite, **facts)
        self.definite = definite


class RejectCode(enum.Enum):
    """Why a call was refused; one word on the wire."""

    STALE = "stale"  # the step is already applied
    WRONG_RUN = "wrong_run"
    WRONG_VERSION = "wrong_version"  # protocol major version
    NOT_SERVED = "not_served"  # this peer does not serve that stage (any more)
    NOT_READY = "not_ready"  # still fetching its snapshot
    NOT_FOUND = "not_found"  # nothing memoised under that key
    BAD_SHAPE = "bad_shape"
    NON_FINITE = "non_finite"  # what was sent
    OVERFLOWED = "overflowed"  # the result is not finite although all inputs were: nobody is to blame
    TOO_LARGE = "too_large"
    MALFORMED = "malformed"
    UNKNOWN_IDENTITY = "unknown_identity"
    NOT_A_FEEDER = "not_a_feeder"  # whoever calls may not bring microbatches to this stage
    NOT_ADMITTED = "not_admitted"  # the run is by invitation, and the caller shows none that counts
    TOO_OFTEN = "too_often"  # one mate is shown a work so many times and no more
    CLOCK = "clock"  # clocks differ by more than 60 s
    FINISHED = "finished"  # the run has reached its last step


class Coded(SwarmError):
    """Base of errors that are a refusal, or are answered with one."""

    def __init__(self, code: RejectCode, reason: str = "", **facts: object) -> None:
        super().__init__(reason, code=code.value, **facts)
        self.code, self.reason = code, reason


class Refused(Coded):
    """The other side answered `Rejected`."""


class BadMessage(Coded):
    """A peer sent something malformed. The request is dropped and answered with `code`; the peer is scored down."""


class BadCheckpoint(SwarmError):
    """A checkpoint is torn, altered or not ours: which file, and what is wrong with it. Another one may be whole."""

    def __init__(self, path: object, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path, self.reason = str(path), reason


class RankLost(SwarmError):
    """The ranks of this peer's mesh have been ended, because of one of them or (None) of all together."""

    def __init__(self, rank: int | None, reason: str) -> None:
        super().__init__(reason)
        self.rank, self.reason = rank, reason


class MeshFailed(SwarmError):
    """The ranks of this peer's mesh were lost too often, and are given up: nothing computes here any more."""


class DeviceFull(SwarmError):
    """A device of this peer had no memory for a job. What the job was to change is as it was, or known to be lost."""


class Overflow(SwarmError):
    """A fixed-point gradient does not fit; the manifest's `grid_bits` or learning rate is wrong."""


def leaves(group: BaseExceptionGroup[_Error]) -> Iterator[_Error]:
    """The errors of a group, with the groups inside it unfolded."""
    for error in group.exceptions:
        # Task groups nest.
        if isinstance(error, BaseExceptionGroup):
            yield from leaves(error)
        else:
            yield error
