"""Admission on disk: the owner's files next to the manifest, and a peer's files in its directory.

    run.toml, run.owner.key, run.bans, .notices  the owner's: the private key (mode 0600), and what it has signed
    DIR/run-<12 digits>.pass, .bans, .notices    a peer's: its pass, and the owner's statements that it received

What is signed, and who is admitted by it, is `net.admission`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from swarmnet.clock import wall_time
from swarmnet.directory import BearerPass, Invitation, Pass, Role
from swarmnet.errors import UsageError, unwritable
from swarmnet.ids import PeerId, RunId
from swarmnet.manifest.extension import MAX_NOTICE_CHARS, MAX_NOTICES, Extension, Notice, Notices
from swarmnet.manifest.terms import RunTerms
from swarmnet.net.admission import MAX_BANNED, ROLES, Admissions, Bans, advised, in_words, invitation_in
from swarmnet.net.identity import Identity, verify, write_whole
from swarmnet.net.records import bans_key, notice_key
from swarmnet.statement import SignedMessage
from swarmnet.telemetry.text import typed
from swarmnet.wire.signed import MAX_SIGNED_BYTES, from_text, sign, to_text

T = TypeVar("T")

_MAX_FILE_CHARS = max(2 * MAX_SIGNED_BYTES, MAX_NOTICES * (MAX_NOTICE_CHARS + 1))
"""Of a list of bans, or all notices of a run."""

_TOKENS = ("invitation:", "peer:", "bearer:")
"""How an invitation begins, and how those of earlier versions did."""
_SECRET = re.compile(r"[0-9a-f]{64}")

_LIFE_LEFT_S = 24 * 3600.0
"""A pass that ends sooner is read again, because the file may hold a new invitation by now."""


@dataclass(frozen=True, slots=True)
class Token:
    """An invitation as it is printed and pasted. seed: private half of a bearer's key, which makes it a secret."""

    invitation: SignedMessage[Invitation]
    seed: bytes = b""

    @property
    def text(self) -> str:
        """One word: invitation:BASE64, and of a bearer's :SECRET."""
        return to_text(self.invitation) + (f":{self.seed.hex()}" if self.seed else "")

    @classmethod
    def parse(cls, text: str) -> Token:
        """Read what was pasted. The signature is not looked at. Raises ValueError, in words."""
        head, _, secret = text.strip().rpartition(":") if text.count(":") == 2 else (text, "", "")
        invitation = from_text(head, Invitation)
        if bool(secret) != invitation.value.bearer or (secret and not _SECRET.fullmatch(secret)):
            raise ValueError("a damaged invitation: copy all of it, a bearer's with the secret at its end")
        return cls(invitation, bytes.fromhex(secret))

    def shown_by(self, me: Identity) -> Pass:
        """What a peer shows of it. Raises ValueError: the secret belongs to another one."""
        if not self.seed:
            return self.invitation
        # The secret stays here: others see a signature by it, over our id.
        key = Identity.from_seed(self.seed)
        if key.peer != self.invitation.value.guest:
            raise ValueError("its secret does not belong to it; copy all of it")
        return sign(BearerPass(me.peer, self.invitation), key.peer, key.sign)


# ---------------------------------------------------------------- the owner


def owner_key_file(manifest: Path) -> Path:
    """run.owner.key for run.toml, in the same directory."""
    return manifest.with_suffix(".owner.key")


def bans_file(manifest: Path) -> Path:
    """run.bans for run.toml, in the same directory."""
    return manifest.with_suffix(".bans")


def notices_file(manifest: Path) -> Path:
    """run.notices for run.toml, in the same directory."""
    return manifest.with_suffix(".notices")


def invitation_file(manifest: Path) -> Path:
    """run.invitation for run.toml, in the same directory: `swarmnet local` writes the invitation of its own peers
    there."""
    return manifest.with_suffix(".invitation")


def write_invitation(path: Path, terms: RunTerms, *, life_s: float) -> None:
    """Write an invitation for every process that can read the file. Raises UsageError, OSError."""
    token = Owner(path, terms).invite(None, ROLES, int(wall_time() + life_s))
    write_whole(invitation_file(path), f"{token.text}\n")


def new_owner(manifest: Path) -> Identity:
    """A fresh owner's key, for a file that is not there yet. Raises UsageError."""
    if owner_key_file(manifest).exists():
        raise _owner_exists(manifest)
    return Identity.generate()


def write_owner(manifest: Path, owner: Identity) -> None:
    """Write the key into the manifest's directory. Raises UsageError; it never overwrites one."""
    path = owner_key_file(manifest)
    try:
        written = owner.create(path)
    except OSError as error:
        raise unwritable(path, error) from error
    if not written:
        raise _owner_exists(manifest)


def _owner_exists(manifest: Path) -> UsageError:
    return UsageError(
        f"{owner_key_file(manifest)}: exists already, and without it its run can issue no invitations: move "
        "it away, or choose another name for the manifest"
    )


class Owner:
    """Who holds the private key of a run. Raises UsageError if the run has none, or it is not here."""

    def __init__(self, path: Path, terms: RunTerms, *, admits: bool = True) -> None:
        """path: the manifest's; the key is in the same directory. admits: it is wanted for invitations or bans."""
        self.run, self._path = terms.run, path
        if admits and terms.owner is None:
            raise UsageError(
                f'{path}: anyone may join this run (admission.policy = "open"), so it has no '
                "invitations and no bans: `swarmnet init --admission invite` writes another run"
            )
        if terms.key is None:
            raise UsageError(
                f"{path}: this run has no owner (admission.key is empty), so it cannot be extended: `swarmnet init "
                "--owner` writes another run, which its owner can extend"
            )
        self._total_steps = terms.total_steps
        key = owner_key_file(path)
        try:
            self._identity = Identity.load(key)
        except (OSError, ValueError) as error:
            why = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
            raise UsageError(
                f"{key}: cannot be used ({why}): only who has the key that `swarmnet init` wrote there can do that"
            ) from error
        # Its signatures would be worth nothing in this run.
        if self._identity.peer != terms.key:
            raise UsageError(f"{key}: is another run's key ({self._identity.peer}); {path} names {terms.key}")

    def invite(self, guest: PeerId | None, roles: Iterable[Role], not_after: int, *, uses: int = 0) -> Token:
        """An invitation of `guest`; None: a bearer invitation, for `uses` peers at most (0: any number). not_after:
        Unix seconds."""
        # A personal invitation needs no secret: the guest signs with its own key.
        key = Identity.generate() if guest is None else None
        named = guest if key is None else key.peer
        assert named is not None
        invitation = Invitation(self.run, named, tuple(roles), bearer=key is not None, uses=uses)
        signed = sign(invitation, self._identity.peer, self._identity.sign, not_after=not_after * 1000)
        return Token(signed, key.key.private_bytes_raw() if key else b"")

    def ban(self, peers: Iterable[PeerId], *, lift: bool, now: float) -> SignedMessage[Bans]:
        """Add `peers` to the signed list of bans, or lift their bans. The list's number is at least `now`, so that it
        also replaces a lost list."""
        path = bans_file(self._path)
        known = read_signed(path, Bans)
        before = known[-1].value.peers if known else ()
        banned = set(before) - set(peers) if lift else set(before) | set(peers)
        # A longer list fits into no entry of the DHT.
        if len(banned) > MAX_BANNED:
            raise UsageError(
                f"{path}: a run bans {MAX_BANNED} at most, and {len(before)} are banned: take some off "
                "with --lift; a peer with an expired invitation needs no ban"
            )
        number = max(int(now), known[-1].value.number + 1 if known else 0)
        bans = sign(Bans(self.run, number, tuple(sorted(banned))), self._identity.peer, self._identity.sign)
        self._write(path, [bans])
        return bans

    def notices(self) -> Notices:
        """The notices in the manifest's directory. Raises UsageError if one of them is not this owner's."""
        found = Notices(self._total_steps, self.run, self._identity.peer, verify)
        path = notices_file(self._path)
        if refused := found.learn_all(read_signed(path, Extension)):
            raise UsageError(f"{path}: {refused[0]}: take that line out")
        return found

    def extend(self, total_steps: int, since: int) -> Notice:
        """Sign that the run has `total_steps` steps from step `since` on, and write that into the manifest's
        directory."""
        known, path = self.notices(), notices_file(self._path)
        if len(known.known) >= MAX_NOTICES:
            raise UsageError(f"{path}: holds {MAX_NOTICES} notices, which is all that a run can have")
        number = known.newest.value.number + 1 if known.newest else 1
        extension = Extension(self.run, number, since, total_steps)
        notice = sign(extension, self._identity.peer, self._identity.sign)
        known.learn(notice)
        self._write(path, known.known)
        return notice

    def _write(self, path: Path, signed: Iterable[SignedMessage[Any]]) -> None:
        try:
            _write_signed(path, signed)
        except OSError as error:
            raise unwritable(path, error) from error


# ---------------------------------------------------------------- a peer


def admissions_of(terms: RunTerms) -> Admissions:
    """Who is admitted to a run."""
    return Admissions(terms.run, terms.owner, verify, tolerance_s=terms.max_clock_offset_s)


def notices_of(terms: RunTerms) -> Notices:
    """What the owner of a run has signed to extend it: nothing that is known yet."""
    return Notices(terms.total_steps, terms.run, terms.key, verify)


class OwnPass:
    """What this process shows in a run by invitation. `shown` is None in an open run.

    given: an invitation, or the file it is in; "": what was kept in `directory` counts.
    """

    def __init__(
        self,
        admissions: Admissions,
        identity: Identity,
        role: Role | None,
        directory: Path,
        *,
        given: str,
        now: float,
        transient: bool = False,
        manifest: Path | None = None,
    ) -> None:
        """Raises UsageError if I am not admitted, with what to do. transient: the identity is for one command.
        manifest: the run's file; the owner's key may be in its directory."""
        self.shown: Pass | None = None
        owns = manifest is not None and owner_key_file(manifest).is_file()
        self._owned = typed(manifest) if owns else ""
        self._admissions, self._identity, self._role, self._given = admissions, identity, role, given
        self._transient = transient
        self._file = directory / f"run-{admissions.run[:12]}.pass"
        if admissions.owner is None:
            return
        self._show(self._of_given() if given else self._kept(), now)
        self.check(now=now)
        # It is kept, so that the next start needs no --invitation.
        if given and self.shown is not None:
            try:
                _write_signed(self._file, [self.shown])
            except OSError as error:
                raise UsageError(
                    f"cannot keep the invitation in {self._file}: {error.strerror or error}; choose another --dir"
                ) from error

    def check(self, *, now: float) -> None:
        """Am I still admitted? Raises UsageError. An invitation that was renewed in its file is taken up."""
        me = self._identity.peer
        # Good for another day: the file need not be looked at.
        if self._admissions.owner is None or self._admissions.admitted(me, self._role, now=now + _LIFE_LEFT_S):
            return
        try:
            renewed = self._of_given() if self._given else self._kept()
        except UsageError:  # the file is gone: the invitation may still be good
            renewed = self.shown
        self._show(renewed, now)
        if reason := self._admissions.why_not(me, self._role, now=now):
            words = advised(reason, None if self._transient else me, self._role, owned=self._owned)
            run = self._admissions.run[:12]
            raise UsageError(f"run {run} is by invitation, and this peer is not admitted: {words}")

    @property
    def ends(self) -> str:
        """Until when it is good, in words; "" in an open run."""
        end_s = invitation_in(self.shown).end_s if self.shown else 0.0
        return "it is revoked" if end_s == math.inf else in_words(end_s) if end_s else ""

    def _show(self, shown: Pass | None, now: float) -> None:
        # A worse one does not replace what is good.
        if shown is not None and not self._admissions.show(self._identity.peer, shown, now=now):
            self.shown = shown

    def _kept(self) -> Pass | None:
        text = _read(self._file, _MAX_FILE_CHARS)
        try:
            return from_text(text, Invitation, BearerPass) if text else None
        except ValueError as error:
            raise UsageError(f"{self._file}: {error}; then start again with --invitation") from error

    def _of_given(self) -> Pass:
        try:
            return given_invitation(self._given).shown_by(self._identity)
        except ValueError as error:
            raise UsageError(f"--invitation: {error}") from error


def given_invitation(given: str) -> Token:
    """What was typed: an invitation, or the file it is in. Raises UsageError, ValueError."""
    text = given.strip()
    if not text.startswith(_TOKENS):
        path = Path(text).expanduser()
        if not path.is_file():
            raise UsageError(
                f"--invitation {_cut(text)}: no such file, and no invitation, which begins with invitation:"
            )
        text = _read(path, _MAX_FILE_CHARS)
    return Token.parse(text)


class OwnerStatements:
    """One kind of what the run's owner signs, bans or extensions: what is known of it, and its files.

    They are in this peer's directory and in the manifest's. known: holds what is known, the newest last."""

    def __init__(self, known: Admissions | Notices, directory: Path | None, manifest: Path | None) -> None:
        bans = isinstance(known, Admissions)
        self._kind, suffix, run = Bans if bans else Extension, ".bans" if bans else ".notices", known.run or RunId("")
        self._known, self.owner, self.key = known, known.owner, bans_key(run) if bans else notice_key(run)
        self._own = directory / f"run-{run[:12]}{suffix}" if directory else None
        self._beside = manifest.with_suffix(suffix) if manifest else None
        self._refused: set[str] = set()
        self._kept: tuple[SignedMessage[Any], ...] = ()
        self._has_read = False  # Invariant: what the files hold is known before they are written

    @property
    def newest(self) -> SignedMessage[Any] | None:
        """The one that counts."""
        return next(reversed(self._known.known), None)

    def learn(self, signed: SignedMessage[Any]) -> None:
        """Take one in, if it is the owner's. Raises ValueError."""
        self._known.learn(signed)

    def read(self) -> list[str]:
        """Take in what the files hold. Returns what is wrong, each once."""
        refused, self._has_read = [], True
        for path in (self._own, self._beside):
            for line in _read(path, _MAX_FILE_CHARS).splitlines() if path is not None else ():
                try:
                    self.learn(from_text(line, self._kind))
                except ValueError as error:
                    refused.append(f"{path}: {error}")
        fresh = [words for words in refused if words not in self._refused]
        self._refused.update(fresh)
        return fresh

    def keep(self) -> bool:
        """Write down what is known in this peer's directory, unless that is done or its files are not read yet. Raises
        OSError."""
        known = self._known.known
        if changed := self._has_read and known != self._kept:
            self._kept = known
            if self._own is not None:
                _write_signed(self._own, known)
        return changed


# ---------------------------------------------------------------- files


def read_signed(path: Path, kind: type[T]) -> list[SignedMessage[T]]:
    """One signed message a line; none: there is no such file. Raises UsageError."""
    try:
        return [from_text(line, kind) for line in _read(path, _MAX_FILE_CHARS).splitlines()]
    except ValueError as error:
        raise UsageError(f"{path}: {error}; move the file away and sign again") from error


def _write_signed(path: Path, signed: Iterable[SignedMessage[Any]]) -> None:
    write_whole(path, "".join(f"{to_text(each)}\n" for each in signed))


def _read(path: Path, limit: int) -> str:
    """Its text; "" if it cannot be read or is too long."""
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError:
        return ""
    return data.decode("ascii", "replace").strip() if len(data) <= limit else ""


def _cut(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:37]}...")
