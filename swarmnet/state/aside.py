"""Which donors are asked for nothing for a while: who has lied, and who could not be reached in time. Pure.

A liar is asked for nothing at all; who was only late is left out as long as somebody else is there, so that a peer
which cannot be called costs a joiner its patience once a minute, and not once a step.
"""

from __future__ import annotations

from collections.abc import Iterable

from swarmnet.ids import PeerId

ASIDE_S = 60.0
"""How long."""


class Aside:
    """The donors that one joiner has set aside."""

    def __init__(self) -> None:
        self._lied: dict[PeerId, float] = {}
        self._late: dict[PeerId, float] = {}

    def lied(self, donor: PeerId, *, now: float) -> None:
        """What it handed over was not what it described, or could not be true."""
        self._lied[donor] = now + ASIDE_S

    def late(self, donor: PeerId, *, now: float) -> None:
        """It has not answered in time."""
        self._late[donor] = now + ASIDE_S

    def answered(self, donor: PeerId) -> None:
        """It has answered: whatever kept it is over."""
        self._late.pop(donor, None)

    def asked(self, donors: Iterable[PeerId], *, now: float) -> list[PeerId]:
        """Whom of these to ask now, each once. Those who were late only if there is nobody else."""
        honest = [donor for donor in dict.fromkeys(donors) if self._lied.get(donor, now) <= now]
        return [donor for donor in honest if self._late.get(donor, now) <= now] or honest
