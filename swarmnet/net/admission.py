"""Who may take part in a run by invitation: what its owner signs, what a peer shows for it, and who is admitted. Pure.

    invitation  peer:RUN:GUEST:ROLES:NOT_AFTER:SIGNATURE           GUEST is the peer that the owner invites
                bearer:RUN:GUEST:ROLES:NOT_AFTER:SIGNATURE:SEED    whoever holds SEED, the private half of key GUEST
    pass        the same, but a bearer's ends in GUEST's signature over the peer that shows it, never in the SEED

The owner is the key in the manifest (`admission.key`). A pass is public: it is worth nothing to another identity. Who
holds a bearer invitation may make passes for as many identities as it likes: nobody counts them, but a ban of GUEST
bans them all. Knows no clock (`now`: Unix seconds) and no cryptography (`verify`, `sign` are handed in).
"""

from __future__ import annotations

import base64
import binascii
import datetime
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated

from swarmnet.bounds import Entries, Recent
from swarmnet.directory import Record, Role
from swarmnet.errors import Refused, RejectCode
from swarmnet.ids import Number, PeerId, RunId
from swarmnet.messages import AuditRequest, Part, Process, Request, TrailRequest
from swarmnet.statement import SignedMessage, Verify

Sign = Callable[[bytes], bytes]

ROLES: tuple[Role, ...] = ("stage", "trainer")
KINDS = ("peer", "bearer")
BANNED = "banned by the run's owner"
CONVICTED = "convicted of wrong work by the members of its stage"

MAX_CHARS = 512
"""Of an invitation or a pass; they have about 200 and 300."""
MAX_BANNED = 128
"""In one list: it fits into one entry of the DHT."""
MAX_PEERS = 1 << 14
"""Admitted identities that are remembered, and as many refused ones: 1 KB each."""
FORGET_S = 3600.0
"""When there are too many, those that have shown nothing for so long make room."""

_RUN_DIGITS = 12
_MAX_NOT_AFTER = 253_402_300_799  # the year 9999
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,15}")
_HEX = re.compile(r"[0-9a-f]+")
_INVITATION, _BEARER = b"swarmnet invitation 1\0", b"swarmnet bearer 1\0"


@dataclass(frozen=True, slots=True)
class Terms:
    """What an invitation says. run: first digits of its id. guest: a peer or, of a bearer's, a key made for it alone.

    not_after: Unix seconds.
    """

    bearer: bool
    run: str
    guest: PeerId
    roles: tuple[Role, ...]
    not_after: int

    @property
    def text(self) -> str:
        """The fields before the signature."""
        kind = KINDS[self.bearer]
        return f"{kind}:{self.run}:{self.guest}:{','.join(self.roles)}:{self.not_after}"

    def signed(self, run: RunId) -> bytes:
        """What the owner of `run` signs: the whole run id stands in for its first digits."""
        return _INVITATION + run.encode() + b"\0" + self.text.encode()

    def countersigned(self, run: RunId, peer: PeerId) -> bytes:
        """What a bearer's key signs to pass the invitation on to `peer`."""
        return _BEARER + run.encode() + b"\0" + self.text.encode() + b"\0" + peer.encode()


@dataclass(frozen=True, slots=True)
class Invitation:
    """What the owner gives to a guest. seed: a bearer's secret; else empty."""

    terms: Terms
    signature: bytes
    seed: bytes = b""

    @property
    def text(self) -> str:
        """As it is printed and pasted; of a bearer's a secret."""
        return _joined(self.terms, self.signature, self.seed)

    @classmethod
    def parse(cls, text: str) -> Invitation:
        """Read what was pasted. The signature is not looked at. Raises ValueError, in words."""
        return cls(*_parsed(text.strip(), bearer_bytes=32))


@dataclass(frozen=True, slots=True)
class Pass:
    """What an invited peer shows. countersignature: a bearer's, over the peer; else empty."""

    terms: Terms
    signature: bytes
    countersignature: bytes = b""

    @property
    def text(self) -> str:
        """As it is in a Hello and in records: public."""
        return _joined(self.terms, self.signature, self.countersignature)

    @classmethod
    def parse(cls, text: str) -> Pass:
        """Read what a peer shows. No signature is looked at. Raises ValueError, in words."""
        return cls(*_parsed(text, bearer_bytes=64))


@dataclass(frozen=True, slots=True)
class Bans:
    """The peers, and keys of bearer invitations, that the owner shuts out. The list with the highest number counts."""

    run: RunId
    number: Number
    peers: Annotated[tuple[PeerId, ...], Entries(MAX_BANNED, distinct=True, packed=True)]


def invite(
    run: RunId, guest: PeerId, roles: Iterable[Role], not_after: int, sign: Sign, *, seed: bytes = b""
) -> Invitation:
    """An invitation signed by the owner. seed: private half of `guest`, which then is a bearer's key."""
    wanted = frozenset(roles)
    terms = Terms(bool(seed), run[:_RUN_DIGITS], guest, tuple(each for each in ROLES if each in wanted), not_after)
    return Invitation(terms, sign(terms.signed(run)), seed)


def pass_of(invitation: Invitation, run: RunId, me: PeerId, sign_by_seed: Sign) -> Pass:
    """What `me` shows for an invitation. sign_by_seed: by the private key that a bearer's seed is."""
    terms = invitation.terms
    second = sign_by_seed(terms.countersigned(run, me)) if terms.bearer else b""
    return Pass(terms, invitation.signature, second)


def role_for(request: Request) -> Role | None:
    """The role that a caller needs to ask for this; None: any."""
    match request:
        case Process(stage=0):
            return None  # a trainer feeds it, or a mate that repairs
        case Process() | Part() | TrailRequest() | AuditRequest():
            return "stage"
        case _:
            return None


def advised(reason: str, peer: PeerId | None, role: Role | None, *, owned: str = "") -> str:
    """Why `peer` is not admitted, and what it can do about it. None: an identity that lives for one command.

    owned: the manifest as one types it, if the owner's key is beside it: then the reader is the owner.
    """
    if peer is not None and reason == BANNED:
        return f"{reason}, who alone can lift that (`swarmnet owner ban --lift`)"
    if reason == CONVICTED:
        return f"{reason}; they hold the evidence, which `swarmnet audit verify` checks again"
    then = "and start again with --invitation"
    if peer is None:
        then = "and put what it prints at the end of the link: LINK+invite=..."
    roles = f" --roles {role}" if role else ""
    whose = f"with the owner's key, which is here, run `swarmnet owner invite {owned}"
    if not owned:
        whose = "ask the run's owner for `swarmnet owner invite run.toml"
    return f"{reason}: {whose} {peer or '--bearer'}{roles}`, {then}"


@dataclass(slots=True)
class _Shown:
    """A good pass of a peer, and when it was last shown."""

    text: str
    terms: Terms
    at: float


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
        """owner: whose invitations count; None: an open run. tolerance_s: how much clocks may differ."""
        self.run, self.owner = run, owner
        self.bans: SignedMessage[Bans] | None = None
        self._verify, self._tolerance_s = verify, tolerance_s
        self._shown: dict[PeerId, _Shown] = {}
        self._refused: Recent[PeerId, tuple[str, str]] = Recent(MAX_PEERS)  # peer -> what it showed, why it is not good
        self._banned: frozenset[PeerId] = frozenset()
        self._convicts: set[PeerId] = set()

    # ------------------------------------------------------------ who is admitted

    def admitted(self, peer: PeerId, role: Role | None = None, *, now: float) -> bool:
        """May `peer` take part as `role` (None: as any)? Cheap: nothing is verified here."""
        return not self.why_not(peer, role, now=now)

    def why_not(self, peer: PeerId, role: Role | None = None, *, now: float) -> str:
        """Why `peer` is not admitted, in words; "" if it is."""
        if peer in self._convicts:
            return CONVICTED
        if self.owner is None:
            return ""
        shown = self._shown.get(peer)
        # A ban of a bearer's key shuts out all that it let in.
        if peer in self._banned or (shown is not None and shown.terms.guest in self._banned):
            return BANNED
        if shown is None:
            return self._refused.get(peer, ("", "it has shown no invitation to this run"))[1]
        if lapsed := self._lapsed(shown.terms, now):
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

    def show(self, peer: PeerId, text: str, *, now: float) -> str:
        """`peer` shows a pass, over a connection or in a record that proves it to be `peer`. Returns why it is not
        good; "" if it is (then it replaces what the peer showed before), or if nothing is shown."""
        if self.owner is None or not text:
            return ""
        held = self._shown.get(peer)
        # The same pass comes with every record and greeting: it was verified once.
        if held is not None and held.text == text:
            held.at = now
            return ""
        try:
            shown = Pass.parse(text)
        except ValueError as error:
            return self._refuse(peer, text, str(error))
        if reason := self._unfit(peer, shown.terms, now):
            return self._refuse(peer, text, reason)
        if (known := self._refused.get(peer)) is not None and known[0] == text:
            return known[1]  # a forged one is verified once, not at every record
        if reason := self._forged(peer, shown):
            return self._refuse(peer, text, reason)
        if held is None and not self._room(now):
            return "too many peers are admitted for this one to be remembered"
        self._refused.pop(peer, None)
        self._shown[peer] = _Shown(text, shown.terms, now)
        return ""

    def _unfit(self, peer: PeerId, terms: Terms, now: float) -> str:
        if terms.run != self.run[:_RUN_DIGITS]:
            return f"its invitation is to run {terms.run}, not to {self.run[:_RUN_DIGITS]}"
        # A pass is public: it is worth nothing to another identity.
        if not terms.bearer and terms.guest != peer:
            return f"its invitation is made out to {terms.guest}"
        return self._lapsed(terms, now)

    def _forged(self, peer: PeerId, shown: Pass) -> str:
        terms, owner = shown.terms, self.owner
        assert owner is not None, "in an open run nothing is verified"
        # Last of all checks: it is the one that costs.
        if not self._verify(owner, terms.signed(self.run), shown.signature):
            return "its invitation is not signed by the run's owner"
        if terms.bearer and not self._verify(terms.guest, terms.countersigned(self.run, peer), shown.countersignature):
            return "its bearer invitation is not passed on to it by who holds that"
        return ""

    def _refuse(self, peer: PeerId, text: str, reason: str) -> str:
        """Remember why, for `why_not`."""
        self._refused[peer] = text, reason
        return reason

    def _lapsed(self, terms: Terms, now: float) -> str:
        """A peer whose clock is behind within the run's tolerance still calls it valid: so do we."""
        return f"its invitation ended {in_words(terms.not_after)}" if now > terms.not_after + self._tolerance_s else ""

    def _room(self, now: float) -> bool:
        if len(self._shown) >= MAX_PEERS:
            self._shown = {
                peer: shown
                for peer, shown in self._shown.items()
                if now - shown.at < FORGET_S and not self._lapsed(shown.terms, now)
            }
        return len(self._shown) < MAX_PEERS

    # ------------------------------------------------------------ bans

    def convict(self, peer: PeerId) -> None:
        """The members of its stage have proven that `peer` works wrongly (`audit.cases`): out, for the whole run."""
        self._convicts.add(peer)

    def learn(self, bans: SignedMessage[Bans]) -> bool:
        """Take in a list. Returns whether it is this run's owner's, and newer than the one known."""
        # An older list, sent again, must not lift what a newer one bans.
        if not self.accepts(bans) or (self.bans is not None and bans.value.number <= self.bans.value.number):
            return False
        self.bans, self._banned = bans, frozenset(bans.value.peers)
        return True

    def accepts(self, bans: SignedMessage[Bans]) -> bool:
        """Is it this run's owner's, and not older than the one known?"""
        # It is renewed all the time, and was verified once.
        if bans == self.bans:
            return True
        old = self.bans is not None and bans.value.number < self.bans.value.number
        ours = bans.key == self.owner and bans.value.run == self.run
        return ours and not old and bans.is_genuine(self._verify)


def in_words(moment: float) -> str:
    """A moment (Unix seconds) as a person reads it."""
    return datetime.datetime.fromtimestamp(moment, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


# ---------------------------------------------------------------- text


def _joined(terms: Terms, signature: bytes, second: bytes) -> str:
    return ":".join((terms.text, _base64(signature), *((_base64(second),) if terms.bearer else ())))


def _parsed(text: str, *, bearer_bytes: int) -> tuple[Terms, bytes, bytes]:
    # A stranger sends this: it is bounded before it is split.
    if len(text) > MAX_CHARS:
        raise ValueError("not an invitation: it is too long")
    kind, *fields = text.split(":")
    if kind not in KINDS or len(fields) != 5 + (kind == "bearer"):
        raise ValueError("not an invitation: `swarmnet owner invite` prints one as peer:... or bearer:..., on one line")
    run, guest, listed, not_after, signature, *second = fields
    roles = tuple(each for each in ROLES if each in listed.split(","))
    if len(run) != _RUN_DIGITS or not _HEX.fullmatch(run) or not _NAME.fullmatch(guest):
        raise ValueError("not an invitation: it names no run or no peer")
    # One spelling only: what is signed is the text.
    if not roles or ",".join(roles) != listed:
        raise ValueError(f"not an invitation: roles are {','.join(ROLES)}, or one of them")
    if not _NUMBER.fullmatch(not_after) or int(not_after) > _MAX_NOT_AFTER:
        raise ValueError("not an invitation: it names no end")
    last = _bytes(second[0]) if second else b""
    if second and len(last) != bearer_bytes:
        raise ValueError(
            "a bearer invitation ends in its secret (32 bytes), a pass in a signature (64): take care "
            "which of the two is wanted here"
        )
    return Terms(kind == "bearer", run, PeerId(guest), roles, int(not_after)), _bytes(signature), last


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _bytes(text: str) -> bytes:
    """The inverse; of several spellings of the same bytes only one is taken."""
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        data = b""
    if not data or _base64(data) != text:
        raise ValueError("not an invitation: its signature is damaged; copy all of it")
    return data


def admits(admissions: Admissions, record: Record, *, now: float) -> bool:
    """Is the record's peer admitted as all that the record says it is, by what it or an earlier one shows?"""
    if admissions.owner is None:
        return True
    admissions.show(record.peer, record.invitation, now=now)
    # Who is invited as a trainer must not serve a stage on the side.
    return all(admissions.admitted(record.peer, role, now=now) for role in record.roles)
