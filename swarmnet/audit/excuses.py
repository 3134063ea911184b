"""When a mate need not show what it pledged: another process of it had, which is gone. Pure."""

from __future__ import annotations

from swarmnet.bounds import Recent
from swarmnet.ids import PeerId

EVERY = 16
"""Versions in which one process of a peer is believed to have ended: heartbeats are its own word."""

_MOST_PEERS, _MOST_ENDS = 256, 4


class Excuses:
    """What one replica has excused of its mates."""

    def __init__(self) -> None:
        self._ends: Recent[PeerId, Recent[int, int]] = Recent(_MOST_PEERS)  # of processes: at which version

    def holds(self, peer: PeerId, life: int, step: int, version: int) -> bool:
        """Is `peer` excused? It names another process than the one, `life`, that has contributed to `step`.

        version: mine now. A process that has ended contributes to no later step.
        """
        ends = self._ends[peer] = self._ends.get(peer, Recent(_MOST_ENDS))
        if life not in ends and all(version - ended >= EVERY for ended in ends.values()):
            ends[life] = version
        return step <= ends.get(life, -1)
