"""The line by which one person brings another: which run, and where one of its DHT nodes listens.

    swarm:<run id>@<multiaddr>        swarm:3f0a9c...e1@/ip4/203.0.113.7/tcp/31337/p2p/12D3Koo...
    swarm:<run id>@<multiaddr>+invite=<invitation>           in a run by invitation (docs/admission.md)

The run id is the manifest's hash, so the link alone is enough to know a genuine manifest from a false one. It may be
shortened to its first digits, which then have to be unambiguous among the runs that are announced. Text only: no
network access.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from swarmnet.errors import UsageError
from swarmnet.ids import RunId
from swarmnet.net.address import Address, check_addresses, peer_in

SCHEME = "swarm:"
INVITE = "+invite="
"""No character in it means anything to a shell."""

MIN_DIGITS = 12
"""With fewer digits an attacker could make manifests until one has the same digits."""

_EXAMPLE = "swarm:RUN_ID@/ip4/203.0.113.7/tcp/31337/p2p/12D3Koo..."
_RUN = re.compile(rf"[0-9a-f]{{{MIN_DIGITS},64}}")


@dataclass(frozen=True, slots=True)
class SwarmLink:
    """run: 64 hex digits, or the first `MIN_DIGITS` or more. address: multiaddr of a DHT node.

    invitation: as `swarmnet owner invite` prints it, which may be a secret; "" without one.
    """

    run: str
    address: str
    invitation: str = ""

    @property
    def whole_run(self) -> RunId | None:
        """The run id, if the link has all of it."""
        return RunId(self.run) if len(self.run) == 64 else None

    @classmethod
    def parse(cls, text: str) -> SwarmLink:
        """Read a link as it was pasted. Raises UsageError: what is wrong, and what to do."""
        text = text.strip()
        if not text.startswith(SCHEME):
            raise UsageError(f"{_shown(text)} is not a link like {_EXAMPLE}")
        if any(char.isspace() for char in text):
            raise UsageError("the link has blanks or line breaks in it: paste it as one line")
        text, plus, invitation = text.partition(INVITE)
        run, at, address = text.removeprefix(SCHEME).partition("@")
        # A link is long: terminals and messengers cut it in two.
        if not at or not address:
            raise UsageError(f"{_shown(text)}: the link ends before its @ADDRESS; copy all of it: {_EXAMPLE}")
        if not names_run(run):
            raise UsageError(
                f"{_shown(text)}: {_shown(run)} is not a run id: 64 hex digits, or the first {MIN_DIGITS} or more"
            )
        # One that is no address says itself what is wrong.
        if Address.parse(address).relay:
            raise UsageError(
                f"{_shown(text)}: it leads through a relay: ask for the link of a peer that can be dialled"
            )
        # Without the id any process at that address could answer for it.
        if peer_in(address) is None:
            raise UsageError(f"{_shown(text)}: the address must end in /p2p/12D3Koo..., the peer that answers there")
        if plus:
            _check_invitation(invitation, run.lower())
        return cls(run.lower(), address, invitation)

    @property
    def public(self) -> SwarmLink:
        """The link without its invitation, for the log."""
        return replace(self, invitation="")

    def __str__(self) -> str:
        return f"{SCHEME}{self.run}@{self.address}{INVITE if self.invitation else ''}{self.invitation}"


def find_run(text: str, bootstrap: tuple[str, ...], command: str = "status") -> tuple[Path | str, tuple[str, ...]]:
    """Which run is meant by a link, a manifest's path or a run id, and whom to ask for it. command: that wants to know.

    Returns: the manifest's path, or (the first digits of) the run id; and addresses, the link's before `bootstrap`.

    Raises: UsageError if it is none of the three, or there is no peer to ask.
    """
    named: Path | str = text.lower()
    # A link is told by its scheme, so a file may have any name.
    if text.strip().startswith(SCHEME):
        link = SwarmLink.parse(text)
        named, bootstrap = link.run, (link.address, *bootstrap)
    elif Path(text).expanduser().is_file():
        named = Path(text).expanduser()
    elif not names_run(text):
        raise UsageError(
            f"{text}: no such file, and neither a link (swarm:RUN_ID@ADDRESS) nor a run id (64 hex digits, "
            "or the first 12 or more)"
        )
    if not bootstrap:
        raise UsageError(f"{command} needs to know a peer: give its link, or --bootstrap with the address it printed")
    check_addresses(bootstrap)
    return named, bootstrap


def names_run(text: str) -> bool:
    """Is it a run id, or `MIN_DIGITS` or more of its first digits?"""
    return _RUN.fullmatch(text.lower()) is not None


def _check_invitation(text: str, run: str) -> None:
    from swarmnet.net.admission_files import Token  # imports cryptography, which most commands do without

    try:
        terms = Token.parse(text).invitation.value
    except ValueError as error:
        raise UsageError(f"the link's invitation, after {INVITE}: {error}") from error
    # Pasted together from two messages.
    if not terms.run.startswith(run):
        raise UsageError(
            f"the link is to run {run[:MIN_DIGITS]}, its invitation to run {terms.run[:MIN_DIGITS]}: paste the one "
            "that belongs to it"
        )


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
