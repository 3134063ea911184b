"""What a peer and a trainer need of the process that they are."""

from __future__ import annotations

from typing import Protocol

from swarmnet.directory import Directory, Record
from swarmnet.ids import PeerId, RunId, Signer
from swarmnet.manifest.extension import Notices
from swarmnet.net.admission import Admissions
from swarmnet.net.nat.dial_back import Proofs, Say


class PeerHost(Protocol):
    """The process of a peer or a trainer: its identity, and what connects it to others (`net.endpoint.Endpoint`)."""

    @property
    def me(self) -> PeerId:
        """Its peer id."""

    @property
    def run(self) -> RunId:
        """The run that it is in."""

    @property
    def incarnation(self) -> int:
        """Tells this start of the process from others under its identity."""

    @property
    def signer(self) -> Signer:
        """Signs for it."""

    @property
    def directory(self) -> Directory:
        """Where peers announce themselves."""

    @property
    def admissions(self) -> Admissions:
        """Who takes part in the run."""

    @property
    def notices(self) -> Notices:
        """What the run's owner has signed to extend it."""

    @property
    def proofs(self) -> Proofs:
        """What connections have shown of this process and of others."""

    @property
    def numerics(self) -> str:
        """The numerics class in which it computes, as its record says."""

    @property
    def told_of_others(self) -> bool:
        """Was it told where others are, so that there should be some?"""

    @property
    def hides(self) -> bool:
        """Is the peer to be reached through relays if it is unreachable?"""

    def wall(self) -> float:
        """Unix seconds, by which invitations end."""

    def record(self) -> Record:
        """What it announces of itself, without stages; asked once the port is bound."""

    async def hide(self, say: Say) -> dict[str, object] | None:
        """Have it be reached through relays (`dial_back.Hide`). Returns what to say of it; None: there are none."""
