"""Two processes under one identity: a directory or a machine was copied with its key, and both copies run.

A *boot id* tells processes of one identity apart. Its upper bits are the time of the start, so that both processes
agree which of them started later: that one ends, and the other one logs a line. A record in the DHT alone proves
nothing, because it outlives its process: only an answer under the own key and another boot id is a twin.

Other peers serve the process that they hear until it is silent (`Lives`), because two that take turns stop the run.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from pathlib import Path

from swarmnet import telemetry
from swarmnet.bounds import Recent
from swarmnet.clock import boot_time, wall_time
from swarmnet.errors import RejectCode, UsageError
from swarmnet.ids import PeerId
from swarmnet.messages import Rejected
from swarmnet.net.limits import REPEATS

ASK_S = 3.0
"""A start waits so long for an answer from an address in its own record. A refused connection ends it sooner."""

SILENT_S = 3.0
"""A process that is silent for so long gives up its identity to another process of the same peer."""

_RANDOM_BITS = 28  # rounds are distinguished by these (`step.ledger`)

LATEST = (1 << 63) - 1
"""A boot id that is later than that of any start."""

TWIN_REFUSED = Rejected(
    RejectCode.NOT_READY,
    "another process with this identity is connected here: two processes use the same key, stop one of them",
)

log = telemetry.get(__name__)


def new_boot_id() -> int:
    """A boot id of a process that starts now."""
    return int(wall_time() * 4) << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)


def gives_way(mine: int, theirs: int, *, clocks_agree: bool, starting: bool) -> bool:
    """Must this process end, given that a process with another boot id answers under its identity?

    The later start ends. Where the clocks differ too much to tell, the process that is starting ends, because the
    other one may serve the run. theirs: 0 for a release without boot ids.
    """
    return theirs < mine if clocks_agree else starting


class Twins:
    """What this process knows of other processes under its identity. clock: seconds of any clock."""

    def __init__(
        self, boot_id: int, key_file: Path = Path("identity.key"), *, clock: Callable[[], float] = boot_time
    ) -> None:
        self.boot_id = boot_id
        self._key_file, self._clock, self._ends = key_file, clock, ""
        self._says = REPEATS.bucket()

    def met(self, theirs: int, at: str, *, clocks_agree: bool = True, starting: bool = False) -> None:
        """A process under my identity and with this boot id answers `at` an address, or has called from there."""
        if theirs == self.boot_id:  # it is this process: its port is bound again, or its router led back
            return
        if gives_way(self.boot_id, theirs, clocks_agree=clocks_agree, starting=starting):
            self._ends = (
                f"another process runs with this identity at {at or 'a relay'} and started earlier: choose another "
                f"--dir, or delete {self._key_file} to get a new identity"
            )
        else:
            self._say(at, "a second process runs with this identity and has to stop")

    def check(self) -> None:
        """Raises UsageError if this process has to end."""
        if self._ends:
            raise UsageError(self._ends)

    def _say(self, at: str, words: str) -> None:
        if not self._says.ask(self._clock()):
            log.warning("identity_in_use", at=at, reason=words, advice="give each process its own --dir")


class Lives:
    """The live process of each peer. `now`: seconds of any clock."""

    def __init__(self) -> None:
        self._seen: Recent[PeerId, tuple[int, float]] = Recent(1 << 14)

    def seen(self, peer: PeerId, boot_id: int, now: float) -> None:
        """This process of the peer is alive."""
        if boot_id and not self.another(peer, boot_id, now):
            self._seen[peer] = boot_id, now

    def another(self, peer: PeerId, boot_id: int, now: float) -> bool:
        """Is another process of this peer alive now? boot_id: 0 for one that has none."""
        first, at = self._seen.get(peer, (boot_id, -math.inf))
        return first != boot_id and now - at <= SILENT_S

    def ended(self, peer: PeerId, boot_id: int) -> None:
        """The connection to that process ended: if it was the live one, the next replaces it immediately.

        boot_id: 0 if it has not said which it is.
        """
        if boot_id in (0, self._seen.get(peer, (0, 0.0))[0]):
            self._seen.pop(peer, None)
