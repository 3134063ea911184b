"""Who may take part in a run by invitation: who is admitted by what it shows, and who is banned. Pure.

The owner is the key in the manifest (`admission.key`). It signs an `Invitation`, for a peer or for a key made for it
alone (a bearer's). A peer shows the first as it is. Of the second it shows a `BearerPass`: its own id and the
invitation, signed by that key. A pass is public: it is worth nothing to another identity. A ban of a bearer's key bans
all whom it let in. Knows no clock (`now`: Unix seconds) and no cryptography (`verify` is handed in).
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Annotated, cast

from swarmnet.bounds import Entries, Recent
from swarmnet.directory import BearerPass, Invitation, Pass, Record, Role
from swarmnet.errors import Refused, RejectCode
from swarmnet.ids import Number, PeerId, RunId
from swarmnet.messages import AuditRequest, Part, Process, Request, TrailRequest
from swarmnet.statement import SignedMessage, Verify

ROLES: tuple[Role, ...] = ("stage", "trainer")
BANNED = "banned by the run's owner"
FAULTY = "banned for proven faulty work by a quorum of its stage"

MAX_BANNED = 128
"""In one list: it fits into one entry of the DHT."""
MAX_PEERS = 1 << 14
"""Admitted identities that are remembered, and as many refused ones: 1 KB each."""
FORGET_S = 3600.0
"""Above the limit on invitations, or on the uses of a bearer invitation, peers that were silent for so long are
forgotten."""


@dataclass(frozen=True, slots=True)
class Bans:
    """The peers, and keys of bearer invitations, that the owner shuts out. The list with the highest number counts."""

    run: RunId
    number: Number
    peers: Annotated[tuple[PeerId, ...], Entries(MAX_BANNED, distinct=True, packed=True)]


def invitation_in(shown: Pass) -> SignedMessage[Invitation]:
    """The owner's part of a pass."""
    if isinstance(shown.value, BearerPass):
        return shown.value.invitation
    return cast(SignedMessage[Invitation], shown)


def role_for(request: Request) -> Role | None:
    """The role that a caller needs to ask for this; None: any."""
    match request:
        case Process(stage=0):
            return None  # a trainer sends it, or a replica that retries it
        case Process() | Part() | TrailRequest() | AuditRequest():
            return "stage"
        case _:
            return None


def advised(reason: str, peer: PeerId | None, role: Role | None, *, owned: str = "") -> str:
    """Why `peer` is not admitted, and what it can do about it. None: an identity that lives for one command.

    owned: the manifest's path as a command takes it, if the owner's key is in its directory: then the reader is the
     owner.
    """
    if peer is not None and reason == BANNED:
        return f"{reason}, who alone can lift that (`swarmnet owner ban --lift`)"
    if reason == FAULTY:
        return f"{reason}; its members have the proofs, which `swarmnet audit verify` checks"
    then = "and start again with --invitation"
    if peer is None:
        then = "and put what it prints at the end of the link: LINK+invite=..."
    roles = f" --roles {role}" if role else ""
    advice = f"with the owner's key, which is here, run `swarmnet owner invite {owned}"
    if not owned:
        advice = "ask the run's owner for `swarmnet owner invite run.toml"
    return f"{reason}: {advice} {peer or '--bearer'}{roles}`, {then}"


@dataclass(slots=True)
class _Shown:
    """The invitation that admitted a peer, and the time of its last message."""

    invitation: SignedMessage[Invitation]
    at: float

    @property
    def terms(self) -> Invitation:
        return self.invitation.value


_FORGED = "its invitation is not signed by the run's owner, or not passed on by its key"


class Admissions:
    """Who is admitted to one run. Signatures are checked when a pass is shown, each pass once."""

    def __init__(
        self,
        run: RunId,
        owner: PeerId | None = None,
        verify: Verify = lambda peer, data, signature: False,
        *,
        tolerance_s: float = 0.0,
    ) -> None:
        """owner: signs the valid invitations; None: an open run. tolerance_s: how much clocks may differ."""
        self.run, self.owner = run, owner
        self.bans: SignedMessage[Bans] | None = None
        self._verify, self._tolerance_s = verify, tolerance_s
        self._shown: dict[PeerId, _Shown] = {}
        self._refused: Recent[PeerId, tuple[Pass | None, str]] = Recent(MAX_PEERS)  # what it showed, why it is bad
        self._banned: frozenset[PeerId] = frozenset()
        self._faulty: set[PeerId] = set()

    # ------------------------------------------------------------ who is admitted

    def admitted(self, peer: PeerId, role: Role | None = None, *, now: float) -> bool:
        """May `peer` take part as `role` (None: as any)? Cheap: nothing is verified here."""
        return not self.why_not(peer, role, now=now)

    def why_not(self, peer: PeerId, role: Role | None = None, *, now: float) -> str:
        """Why `peer` is not admitted, in words; "" if it is."""
        if peer in self._faulty:
            return FAULTY
        if self.owner is None:
            return ""
        shown = self._shown.get(peer)
        # A ban of a bearer's key shuts out all that it let in.
        if peer in self._banned or (shown is not None and shown.terms.guest in self._banned):
            return BANNED
        if shown is None:
            return self._refused.get(peer, (None, "it has shown no invitation to this run"))[1]
        if lapsed := self._lapsed(shown.invitation, now):
            return lapsed
        invited = shown.terms.roles
        return "" if role is None or role in invited else f"it is invited as {' and '.join(invited)}, not as {role}"

    def guest(self, peer: PeerId) -> PeerId | None:
        """Whom its invitation is made out to: itself, or the key of all who hold the same bearer invitation. None: it
        has shown none, as in an open run."""
        shown = self._shown.get(peer)
        return None if shown is None else shown.terms.guest

    def check(self, caller: PeerId, request: Request, *, now: float) -> None:
        """Raises Refused, with advice, unless `caller` is admitted in the role that `request` needs."""
        role = role_for(request)
        if reason := self.why_not(caller, role, now=now):
            raise Refused(RejectCode.NOT_ADMITTED, advised(reason, caller, role))
        if held := self._shown.get(caller):
            held.at = now

    def show(self, peer: PeerId, shown: Pass | None, *, now: float) -> str:
        """`peer` shows a pass, over a connection or in a record that proves it to be `peer`. Returns why it is not
        good; "" if it is (then it replaces what the peer showed before), or if nothing is shown."""
        if self.owner is None or shown is None:
            return ""
        held, invitation = self._shown.get(peer), invitation_in(shown)
        # A pass comes with every record and greeting, and a bearer can sign any number: one of them is verified.
        if held is not None and held.invitation == invitation:
            held.at = now
            return ""
        if reason := self._unfit(peer, shown, invitation, now):
            return self._refuse(peer, shown, reason)
        if (known := self._refused.get(peer)) is not None and known[0] == shown and known[1] == _FORGED:
            return _FORGED  # a forged one is verified once, not at every record
        # Last of all checks: it is the one that costs.
        if not (invitation.is_genuine(self._verify) and (shown.key == self.owner or shown.is_genuine(self._verify))):
            return self._refuse(peer, shown, _FORGED)
        if len(self._shown) >= MAX_PEERS:
            self._forget_idle(now)
        if held is None and len(self._shown) >= MAX_PEERS:
            return "too many peers are admitted for this one to be remembered"
        self._refused.pop(peer, None)
        self._shown[peer] = _Shown(invitation, now)
        return ""

    def _unfit(self, peer: PeerId, shown: Pass, invitation: SignedMessage[Invitation], now: float) -> str:
        terms = invitation.value
        if terms.run != self.run:
            return f"its invitation is to run {terms.run[:12]}, not to {self.run[:12]}"
        if invitation.key != self.owner:
            return "its invitation is not signed by the run's owner"
        if terms.bearer != isinstance(shown.value, BearerPass):
            return "it shows a bearer's invitation, and not that it holds its key, or the other way round"
        # A pass is public: it is worth nothing to another identity.
        if isinstance(shown.value, BearerPass) and (shown.value.peer, shown.key) != (peer, terms.guest):
            return "its bearer invitation is not passed on to it by who holds that"
        if not terms.bearer and terms.guest != peer:
            return f"its invitation is made out to {terms.guest}"
        # Each peer counts whom it has seen: two peers may count others where more come than are invited.
        if terms.uses and self._others(peer, terms.guest) >= terms.uses:
            self._forget_idle(now)
        if terms.uses and self._others(peer, terms.guest) >= terms.uses:
            return f"its bearer invitation has let in {terms.uses} already, which is all that it is for"
        return self._lapsed(invitation, now)

    def _others(self, peer: PeerId, guest: PeerId) -> int:
        return sum(each != peer and held.terms.guest == guest for each, held in self._shown.items())

    def _refuse(self, peer: PeerId, shown: Pass, reason: str) -> str:
        """Remember why, for `why_not`."""
        self._refused[peer] = shown, reason
        return reason

    def _lapsed(self, invitation: SignedMessage[Invitation], now: float) -> str:
        """Has it ended? A peer with a slow clock, within the run's tolerance, still accepts it, so this one does,
        too."""
        ended = now > invitation.end_s + self._tolerance_s
        return f"its invitation ended {in_words(invitation.end_s)}" if ended else ""

    def _forget_idle(self, now: float) -> None:
        def stays(peer: PeerId, held: _Shown) -> bool:
            # A ban must not give a bearer the use back.
            banned = held.terms.uses > 0 and (peer in self._banned or peer in self._faulty)
            return (banned or now - held.at < FORGET_S) and not self._lapsed(held.invitation, now)

        self._shown = {peer: held for peer, held in self._shown.items() if stays(peer, held)}

    # ------------------------------------------------------------ bans

    def ban_faulty(self, peer: PeerId) -> None:
        """The members of its stage have proven that `peer` works wrongly (`audit.cases`): out, for the whole run."""
        self._faulty.add(peer)

    @property
    def known(self) -> tuple[SignedMessage[Bans], ...]:
        """The list that counts, if there is one."""
        return (self.bans,) if self.bans is not None else ()

    def learn(self, bans: SignedMessage[Bans]) -> bool:
        """Take in a list. Returns whether it is this run's owner's, and newer than the one known."""
        # An older list, sent again, must not lift what a newer one bans.
        newer = self.bans is None or bans.value.number > self.bans.value.number
        ours = newer and bans.key == self.owner and bans.value.run == self.run
        if not (ours and bans.is_genuine(self._verify)):
            return False
        self.bans, self._banned = bans, frozenset(bans.value.peers)
        return True


def in_words(moment: float) -> str:
    """A moment (Unix seconds) as a person reads it."""
    return datetime.datetime.fromtimestamp(moment, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def admits(admissions: Admissions, record: Record, *, now: float) -> bool:
    """Is the record's peer admitted as all that the record says it is, by what it or an earlier one shows?"""
    if admissions.owner is None:
        return True
    admissions.show(record.peer, record.invitation, now=now)
    # Who is invited as a trainer must not serve a stage on the side.
    return all(admissions.admitted(record.peer, role, now=now) for role in record.roles)
