"""When may a peer that was asked to leave go? What it holds is finished or safe elsewhere, or nobody stays. Pure.

Rule 18 (docs/protocol.md): a draining replica stays until another member of its stage has its state. It does not know
how anything is finished: it is told where its replicas stand and answers with a verdict and its reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SETTLE_S = 1.0
"""When everybody leaves: how long a replica that holds a step's sum waits to apply it, as others may have already.
Checkpoints of stages that stand at different versions are worth little."""


@dataclass(frozen=True, slots=True)
class Standing:
    """One replica of the leaving peer, now.

    idle: nobody needs it (it has no state, or the run is over). heirs: other replicas of the stage that have its state
    and stay. followers: others that stay and have older state, or none yet. microbatches: at work here. applying: the
    optimizer is at it. As long as no heir has applied the step: counted, microbatches in this replica's own sum; whole,
    is the sum of all replicas here?
    """

    stage: int
    step: int
    idle: bool = False
    heirs: int = 0
    followers: int = 0
    microbatches: int = 0
    counted: int = 0
    whole: bool = False
    applying: bool = False

    @property
    def refusing(self) -> bool:
        """New microbatches go to the heirs. Without one it serves on: the run must not stand still for a farewell."""
        return self.heirs > 0 or self.idle

    @property
    def free(self) -> bool:
        """Nothing is lost, and nothing executed again, if it goes now."""
        if self.idle:
            return True
        return bool(self.heirs) and not (self.microbatches or self.counted or self.whole or self.applying)


@dataclass(frozen=True, slots=True)
class LeaveDecision:
    """Go now, or stay; why, in words for the operator."""

    go: bool
    words: str


class Leaving:
    """One farewell, begun at `now`. Times are seconds of one clock; it never lasts longer than `drain_s`."""

    def __init__(self, *, now: float, drain_s: float) -> None:
        self._began_at, self._drain_s = now, drain_s
        self._deserted_at: float | None = None

    def decide(self, standings: Sequence[Standing], *, deserted: bool, now: float) -> LeaveDecision:
        """deserted: every other live peer of the run is leaving too, so nobody will go on with what is here."""
        waiting = [standing for standing in standings if not standing.free]
        if not waiting:
            return LeaveDecision(True, "nothing here is needed any more")
        if now - self._began_at >= self._drain_s:
            return LeaveDecision(True, f"{self._drain_s:g} s have passed, going all the same: {self._what(waiting)}")
        if not deserted:
            self._deserted_at = None
            return LeaveDecision(False, self._what(waiting))
        if self._deserted_at is None:
            self._deserted_at = now
        unsettled = any(standing.applying or standing.whole for standing in waiting)
        if unsettled and now - self._deserted_at < SETTLE_S:
            return LeaveDecision(False, "everybody leaves; applying the last step")
        return LeaveDecision(True, "everybody leaves")

    def _what(self, waiting: Sequence[Standing]) -> str:
        return "; ".join(self._of(standing) for standing in waiting)

    def _of(self, standing: Standing) -> str:
        if not standing.heirs and standing.followers:
            return f"no other replica of stage {standing.stage} is at version {standing.step} yet"
        if not standing.heirs:
            return (
                f"no other replica has the state of stage {standing.stage}: waiting for one, "
                f"{self._drain_s:g} s at most"
            )
        if standing.microbatches:
            plural = "" if standing.microbatches == 1 else "es"
            return f"{standing.microbatches} microbatch{plural} left, step {standing.step}"
        if standing.applying:
            return f"applying step {standing.step}"
        if standing.whole:
            return f"step {standing.step} waits for other stages, or for another replica to have its sum"
        return f"step {standing.step} is not committed yet, {standing.counted} of its microbatches are counted here"
