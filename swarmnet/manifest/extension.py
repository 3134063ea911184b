"""A run that goes on for longer than its manifest says: what its owner signs, and which of it is in force. Pure.

    extension:RUN:OWNER:NUMBER:SINCE:STEPS:SIGNATURE

Such a *notice* says: from step SINCE on the run has STEPS steps. Who has heard of it when does not matter: it takes
force if, and only if, a commit of step SINCE of any stage names it. Everybody who applies that step holds the same
commits, and so finds the same (`Horizon.after`). Of several notices named in one step the highest number counts.

The owner is the key in the manifest (`admission.key`). Knows no clock and no cryptography (`sign`, `verify` are handed
in).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from swarmnet.ids import PeerId, RunId

Sign = Callable[[bytes], bytes]
Verify = Callable[[PeerId, bytes, bytes], bool]
"""(who, what, signature): did they sign it?"""

EXTENSION = "extension:"
MAX_NOTICE_CHARS = 512
"""Of one notice; it has about 300."""
MAX_NOTICES = 64
"""Notices of one run, in all."""
MAX_NOTICES_CHARS = MAX_NOTICES * (MAX_NOTICE_CHARS + 1)
MARK_BYTES = 8
"""Of what stands for all notices that a peer knows."""

_DOMAIN = b"swarmnet extension 1\0"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,14}")
_HEX_64, _HEX = re.compile(r"[0-9a-f]{64}"), re.compile(r"([0-9a-f]{2}){1,64}")


@dataclass(frozen=True, slots=True)
class Extension:
    """A notice: from step `since` on `run` has `total_steps` steps. number: 1 for a run's first one."""

    run: RunId
    owner: PeerId
    number: int
    since: int
    total_steps: int
    signature: bytes = b""

    @property
    def text(self) -> str:
        """As it is in files, messages and the DHT."""
        return f"{self._head}:{self.signature.hex()}"

    @property
    def signed(self) -> bytes:
        """What the owner signs."""
        return _DOMAIN + self._head.encode()

    @property
    def _head(self) -> str:
        return f"{EXTENSION}{self.run}:{self.owner}:{self.number}:{self.since}:{self.total_steps}"

    @classmethod
    def parse(cls, text: str) -> Extension:
        """Read a notice. The signature is not looked at. Raises ValueError."""
        fields = text.strip().split(":") if len(text) <= MAX_NOTICE_CHARS else []
        if not (
            len(fields) == 7
            and f"{fields[0]}:" == EXTENSION
            and _HEX_64.fullmatch(fields[1])
            and _NAME.fullmatch(fields[2])
            and all(map(_NUMBER.fullmatch, fields[3:6]))
            and _HEX.fullmatch(fields[6])
        ):
            raise ValueError("not a notice that extends a run")
        _, run, owner, number, since, total_steps, signature = fields
        return cls(RunId(run), PeerId(owner), int(number), int(since), int(total_steps), bytes.fromhex(signature))


def extend(run: RunId, owner: PeerId, number: int, since: int, total_steps: int, sign: Sign) -> Extension:
    """A notice signed by the owner."""
    unsigned = Extension(run, owner, number, since, total_steps)
    return replace(unsigned, signature=sign(unsigned.signed))


@dataclass(frozen=True, slots=True)
class Horizon:
    """How many steps a run has at some version: total_steps of the manifest, and the notices that are in force."""

    total_steps: int
    extensions: tuple[Extension, ...] = ()
    """Oldest first; each has more steps than the one before."""

    @property
    def last(self) -> int:
        """The run's last version, as far as is decided."""
        return self.extensions[-1].total_steps if self.extensions else self.total_steps

    @property
    def texts(self) -> tuple[str, ...]:
        """The notices in force, as they are written down."""
        return tuple(each.text for each in self.extensions)

    def takes(self, extension: Extension, step: int) -> bool:
        """Would that notice take force with step `step`, if a commit of it names the notice?"""
        return extension.since == step <= self.last < extension.total_steps

    def after(self, step: int, named: Iterable[Extension]) -> Horizon:
        """What holds from step `step` on, that step included, whose commits name these notices."""
        fit = [each for each in named if self.takes(each, step)]
        if not fit or len(self.extensions) == MAX_NOTICES:
            return self
        return replace(self, extensions=(*self.extensions, max(fit, key=rank)))

    def before(self, step: int) -> Horizon:
        """What held as step `step` began."""
        return replace(self, extensions=tuple(each for each in self.extensions if each.since < step))


def rank(extension: Extension) -> tuple[int, str]:
    """Of several notices of one step the highest counts."""
    return extension.number, extension.text


class Notices:
    """The notices of one run that are known here: all are signed by its owner."""

    def __init__(
        self,
        total_steps: int = 0,
        run: RunId | None = None,
        owner: PeerId | None = None,
        verify: Verify = lambda peer, data, signature: False,
    ) -> None:
        """total_steps: of the manifest. owner: who may extend the run; None: nobody."""
        self.run, self.owner, self._verify = run, owner, verify
        self._manifests = total_steps
        self._known: dict[str, Extension] = {}

    @property
    def mark(self) -> bytes:
        """Stands for all that are known; empty: none is."""
        return hashlib.sha256(self.text.encode()).digest()[:MARK_BYTES] if self._known else b""

    @property
    def known(self) -> list[Extension]:
        """All of them, by number."""
        return sorted(self._known.values(), key=rank)

    @property
    def newest(self) -> Extension | None:
        """The one with the highest number."""
        return max(self._known.values(), key=rank, default=None)

    @property
    def furthest(self) -> int:
        """No step of the run is at or after this one, as far as is known."""
        return max([self._manifests, *(each.total_steps for each in self._known.values())])

    @property
    def text(self) -> str:
        """All of them, a line each."""
        return "\n".join(sorted(self._known))

    def learn(self, text: str) -> Extension:
        """Take in one notice. Raises ValueError, in words: it is not this run's owner's."""
        # It comes with every message about its step, and was verified once.
        if text in self._known:
            return self._known[text]
        found = Extension.parse(text)
        if found.run != self.run:
            raise ValueError(f"a notice of run {found.run[:12]}, not of {(self.run or 'none')[:12]}")
        if self.owner is None:
            raise ValueError("nobody may extend this run: its manifest names no owner (admission.key)")
        if found.owner != self.owner:
            raise ValueError(f"a notice of {found.owner}, who does not own this run")
        if found.total_steps <= self._manifests:
            raise ValueError(
                f"a notice of {found.total_steps} steps, no more than the {self._manifests} of the manifest"
            )
        if found.number < 1 or found.since < 1:
            raise ValueError("a notice that begins before step 1, or has no number")
        if len(self._known) >= MAX_NOTICES:
            raise ValueError(f"more than {MAX_NOTICES} notices of one run")
        # Last of all checks: it is the one that costs.
        if not self._verify(found.owner, found.signed, found.signature):
            raise ValueError("a notice that is not signed by the run's owner")
        # One spelling only: known ones are compared as text.
        self._known[found.text] = found
        return found

    def learn_all(self, texts: Iterable[str]) -> list[str]:
        """Take in several; returns why some are refused, in words."""
        refused = []
        for text in texts:
            try:
                self.learn(text)
            except ValueError as error:
                refused.append(str(error))
        return refused

    def due(self, step: int, horizon: Horizon) -> Extension | None:
        """The notice that a commit of step `step` should name, with `horizon` in force before it."""
        fit = [each for each in self._known.values() if horizon.takes(each, step)]
        return max(fit, key=rank, default=None)

    def last(self, horizon: Horizon) -> int:
        """The run's last version as far as can be foreseen: a notice that begins at its end keeps it open."""
        due = self.due(horizon.last, horizon)
        return horizon.last if due is None else due.total_steps

    def foreseen(self, version: int, horizon: Horizon, *, before: int = 1 << 53) -> Horizon:
        """With all in force that begin from `version` on (and before step `before`)."""
        for step in sorted({each.since for each in self._known.values() if version <= each.since < before}):
            horizon = horizon.after(step, self._known.values())
        return horizon

    def horizon(self, texts: Iterable[str]) -> Horizon:
        """With these notices in force. Raises ValueError: one is not the owner's, or they are in no order."""
        found = Horizon(self._manifests)
        for text in texts:
            extension = self.learn(text)
            longer = found.after(extension.since, [extension])
            if longer == found or (found.extensions and extension.since <= found.extensions[-1].since):
                raise ValueError("notices that cannot all be in force")
            found = longer
        return found
