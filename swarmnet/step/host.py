"""What the step machines ask of the peer that they run in. They do nothing themselves. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from swarmnet.ids import Chain, PeerId
from swarmnet.messages import Commit, Committed, Round, StepControl


class StepHost(Protocol):
    """The surroundings of one replica's machine. step: the open step that a call is about."""

    def send(self, peer: PeerId, message: StepControl) -> None:
        """Send to one peer (possibly this one)."""

    def beat(self) -> None:
        """Send a heartbeat to the neighbours: the machine has news."""

    def publish(self, committed: Committed) -> None:
        """Tell the replicas of all stages, this one included."""

    def contribute(self, step: int, index: int) -> None:
        """The index is assigned here: accumulate its weight gradient, unless `discard` comes first (rule 5)."""

    def redirect(self, step: int, index: int, assignee: PeerId) -> None:
        """Another replica contributes the index (rule 3): before forward, send callers there; later, input gradient
        only."""

    def discard(self, step: int) -> None:
        """Empty the step's accumulator (rule 11)."""

    def aggregate(self, attempt: Round) -> None:
        """Take part: contribute (if this replica is named), reduce, collect the complete aggregate (rule 15)."""

    def fetch(self, attempt: Round, digest: bytes) -> None:
        """Fetch the aggregate that the stage has committed from one of the holders; pass over other bits (rule 16)."""

    def stop(self) -> None:
        """Abandon `aggregate` or `fetch`; the accumulator stays as it is."""

    def execute(self, step: int, index: int) -> None:
        """Execute an idle index: input from the stage before, gradient from the stage after (rule 6)."""

    def apply(self, commits: tuple[Commit, ...]) -> None:
        """Every stage has committed: one optimizer step with these commits, in stage order (rule 17)."""

    def resync(self, sources: tuple[PeerId, ...]) -> None:
        """This replica is behind or diverged: fetch a snapshot from one of these (rules 18, 19)."""

    def measure(self, version: int, chain: Chain, term_chain: Chain) -> None:
        """Measure the weights of the version that has just begun; the chains are those of `drift.Drift.measured`."""

    def orphan(self) -> None:
        """Other stages have applied a step that this one cannot end: this state can no longer catch up."""

    def log(self, event: str, **fields: Any) -> None:
        """Something worth a line in the log."""


class Call(NamedTuple):
    """One call of a host."""

    name: str
    args: tuple[Any, ...]
    fields: dict[str, Any]


class Deferred:
    """Calls of a host, until an event is handled. What one of them causes comes after all others, never inside."""

    def __init__(self) -> None:
        self.calls = deque[Call]()
        self._busy = False

    def __getattr__(self, name: str) -> Callable[..., None]:
        def defer(*args: Any, **fields: Any) -> None:
            self.calls.append(Call(name, args, fields))

        return defer

    def make(self, host: StepHost) -> None:
        """Make them in order."""
        if self._busy:
            return  # a call has caused an event
        self._busy = True
        try:
            while self.calls:
                name, args, fields = self.calls.popleft()
                getattr(host, name)(*args, **fields)
        finally:
            self._busy = False
