"""A run that goes on for longer than its manifest says: what its owner signs, and which of it is in force. Pure.

Such a *notice* says: from step SINCE on the run has STEPS steps. When a peer learns of it does not matter: it takes
effect if, and only if, a commit of step SINCE of any stage names it. All peers that apply that step hold the same
commits, and so finds the same (`Horizon.after`). Of several notices named in one step the highest number counts.

The owner is the key in the manifest (`admission.key`). Knows no clock and no cryptography (`verify` is handed in).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated

from swarmnet.bounds import Between
from swarmnet.ids import Number, PeerId, RunId
from swarmnet.statement import SignedMessage, Verify

MAX_NOTICE_CHARS = 512
"""Of one notice as text; it has about 230."""
MAX_NOTICES = 64
"""Notices of one run, in all."""
MARK_BYTES = 8
"""Of what stands for all notices that a peer knows."""

FirstStep = Annotated[int, Between(1, 1 << 53)]


@dataclass(frozen=True, slots=True)
class Extension:
    """From step `since` on `run` has `total_steps` steps. number: 1 for a run's first one."""

    run: RunId
    number: FirstStep
    since: FirstStep
    total_steps: Number


Notice = SignedMessage[Extension]


@dataclass(frozen=True, slots=True)
class Horizon:
    """How many steps a run has at some version: total_steps of the manifest, and the notices that are in force."""

    total_steps: int
    notices: tuple[Notice, ...] = ()
    """Oldest first; each has more steps than the one before."""

    @property
    def last(self) -> int:
        """The run's last version, as far as is decided."""
        return self.notices[-1].value.total_steps if self.notices else self.total_steps

    def takes(self, notice: Notice, step: int) -> bool:
        """Would that notice take force with step `step`, if a commit of it names the notice?"""
        return notice.value.since == step <= self.last < notice.value.total_steps

    def after(self, step: int, named: Iterable[Notice]) -> Horizon:
        """What holds from step `step` on, that step included, if its commits name these notices."""
        fit = [each for each in named if self.takes(each, step)]
        if not fit or len(self.notices) == MAX_NOTICES:
            return self
        return replace(self, notices=(*self.notices, max(fit, key=rank)))

    def before(self, step: int) -> Horizon:
        """What held as step `step` began."""
        return replace(self, notices=tuple(each for each in self.notices if each.value.since < step))


def rank(notice: Notice) -> tuple[int, bytes, bytes]:
    """Of several notices of one step the highest counts."""
    return notice.value.number, notice.payload, notice.signature


class Notices:
    """The notices of one run that are known here: all are signed by its owner."""

    def __init__(
        self,
        total_steps: int = 0,
        run: RunId | None = None,
        owner: PeerId | None = None,
        verify: Verify = lambda peer, data, signature: False,
    ) -> None:
        """total_steps: of the manifest. owner: who may extend the run; None: the run cannot be extended."""
        self.run, self.owner, self._verify = run, owner, verify
        self._manifests = total_steps
        self._known: set[Notice] = set()

    @property
    def mark(self) -> bytes:
        """Stands for all that are known; empty: none is."""
        signatures = b"".join(each.signature for each in self.known)
        return hashlib.sha256(signatures).digest()[:MARK_BYTES] if signatures else b""

    @property
    def known(self) -> tuple[Notice, ...]:
        """All of them, by number."""
        return tuple(sorted(self._known, key=rank))

    @property
    def newest(self) -> Notice | None:
        """The one with the highest number."""
        return max(self._known, key=rank, default=None)

    @property
    def furthest(self) -> int:
        """No step of the run is at or after this one, as far as is known."""
        return max([self._manifests, *(each.value.total_steps for each in self._known)])

    @property
    def end(self) -> int:
        """The run's last version, once all that are known are in force."""
        return self.foreseen(0, Horizon(self._manifests)).last

    def learn(self, notice: Notice) -> Notice:
        """Take in one notice. Raises ValueError, in words: it is not this run's owner's."""
        # It comes with every message about its step, and was verified once.
        if notice in self._known:
            return notice
        run, total_steps = notice.value.run, notice.value.total_steps
        if run != self.run:
            raise ValueError(f"a notice of run {run[:12]}, not of {(self.run or 'none')[:12]}")
        if self.owner is None:
            raise ValueError("this run cannot be extended: its manifest names no owner (admission.key)")
        if notice.key != self.owner:
            raise ValueError(f"a notice of {notice.key}, who does not own this run")
        if total_steps <= self._manifests:
            raise ValueError(f"a notice of {total_steps} steps, no more than the {self._manifests} of the manifest")
        if len(self._known) >= MAX_NOTICES:
            raise ValueError(f"more than {MAX_NOTICES} notices of one run")
        # Last of all checks: it is the one that costs.
        if not notice.is_genuine(self._verify):
            raise ValueError("a notice that is not signed by the run's owner")
        self._known.add(notice)
        return notice

    def learn_all(self, notices: Iterable[Notice]) -> list[str]:
        """Take in several; returns why some are refused, in words."""
        refused = []
        for notice in notices:
            try:
                self.learn(notice)
            except ValueError as error:
                refused.append(str(error))
        return refused

    def due(self, step: int, horizon: Horizon) -> Notice | None:
        """The notice that a commit of step `step` should name, with `horizon` in force before it."""
        fit = [each for each in self._known if horizon.takes(each, step)]
        return max(fit, key=rank, default=None)

    def last(self, horizon: Horizon) -> int:
        """The run's last version as far as can be foreseen: a notice that begins at its end keeps it open."""
        due = self.due(horizon.last, horizon)
        return horizon.last if due is None else due.value.total_steps

    def foreseen(self, version: int, horizon: Horizon, *, before: int = 1 << 53) -> Horizon:
        """With all in force that begin from `version` on (and before step `before`)."""
        for step in sorted({each.value.since for each in self._known if version <= each.value.since < before}):
            horizon = horizon.after(step, self._known)
        return horizon

    def horizon(self, notices: Iterable[Notice]) -> Horizon:
        """With these notices in force. Raises ValueError: one is not the owner's, or they are in no order."""
        found = Horizon(self._manifests)
        for notice in map(self.learn, notices):
            since = notice.value.since
            longer = found.after(since, [notice])
            if longer == found or (found.notices and since <= found.notices[-1].value.since):
                raise ValueError("notices that cannot all be in force")
            found = longer
        return found
