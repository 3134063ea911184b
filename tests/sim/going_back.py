"""What must hold when a run goes back, watched beside a simulated swarm.

Under a restart every version above its own has to be executed again before anybody serves it; only a side that adopted
the restart's number and kept its state may be further. Who went back, from where and to what is kept for the tests.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from swarmnet.ids import PeerId, Restart
from swarmnet.testing.virtual_swarm import Broken, VirtualSwarm


@dataclass(frozen=True, slots=True)
class Move:
    """A peer came under a restart. served: stage -> version it served until then."""

    at: float
    peer: PeerId
    restart: Restart
    kept: bool
    served: dict[int, int]


class GoingBack:
    """Watches a swarm from its start; raises Broken where a past that was given up is served."""

    def __init__(self, swarm: VirtualSwarm) -> None:
        self._swarm = swarm
        self.moves: list[Move] = []
        self._reach: dict[tuple[Restart, int], int] = {}
        swarm.hooks.append(self._look)

    @property
    def restarts(self) -> set[Restart]:
        """All restarts that anybody was under."""
        return {move.restart for move in self.moves}

    @property
    def versions(self) -> set[int]:
        """The versions the run went back to."""
        return {restart.version for restart in self.restarts}

    def went_back(self, *peers: PeerId) -> list[Move]:
        """Moves in which one of these peers gave up state that it served."""
        return [move for move in self.moves if move.peer in peers and move.served and not move.kept]

    def twice(self, *peers: PeerId) -> set[tuple[int, int]]:
        """(stage, step) that one of these peers committed more than once."""
        seen = Counter(
            (peer, fields["stage"], fields["step"])
            for _, peer, event, fields in self._swarm.events
            if event == "committed" and peer in peers
        )
        return {(int(str(stage)), int(str(step))) for (_, stage, step), times in seen.items() if times > 1}

    def _look(self, peer: PeerId, event: str, fields: dict[str, object]) -> None:
        node = next((node for node in self._swarm.nodes if node.up and node.peer_id == peer), None)
        if node is None:
            return
        members = {stage: replica.member for stage, replica in node.peer.replicas.items()}
        if event == "restart":
            restart = Restart(int(str(fields["number"])), int(str(fields["version"])))
            served = {stage: member.version for stage, member in members.items() if member.synced}
            self.moves.append(Move(self._swarm.loop.time(), peer, restart, bool(fields["kept"]), served))
            if fields["kept"]:
                for stage, version in served.items():
                    self._reached(restart, stage, version + members[stage].oldest.applying)
            return
        if event == "applied":
            stage, version = int(str(fields["stage"])), int(str(fields["version"]))
            restart = members[stage].restart
            self._check(peer, restart, stage, version - 1)
            self._reached(restart, stage, version)
        for stage, member in members.items():
            if member.synced:
                self._check(peer, member.restart, stage, member.version)

    def _reached(self, restart: Restart, stage: int, version: int) -> None:
        self._reach[restart, stage] = max(self._reach.get((restart, stage), restart.version), version)

    def _check(self, peer: PeerId, restart: Restart, stage: int, version: int) -> None:
        reach = self._reach.get((restart, stage), restart.version)
        if restart.number and version > reach:
            raise Broken(
                f"{peer} serves version {version} of stage {stage}: under {restart} nobody has executed more "
                f"than {reach}"
            )
