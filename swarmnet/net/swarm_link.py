"""The line by which one person invites another: which run, and where one of its DHT nodes listens.

    swarm:<run id>@<multiaddr>        swarm:3f0a9c...e1@/ip4/203.0.113.7/tcp/31337/p2p/12D3Koo...

The run id is the manifest's hash, so the link alone is enough to know a genuine manifest from a false one. It may be
shortened to its first digits, which then have to be unambiguous among the runs that are announced. Text only: asks
nobody.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from swarmnet.errors import UsageError
from swarmnet.ids import RunId
from swarmnet.net.address import Address

SCHEME = "swarm:"
MIN_DIGITS = 12
"""Fewer would leave the choice of the run to whoever makes manifests until one fits."""

_EXAMPLE = "swarm:RUN_ID@/ip4/203.0.113.7/tcp/31337/p2p/12D3Koo..."
_RUN = re.compile(rf"[0-9a-f]{{{MIN_DIGITS},64}}")


@dataclass(frozen=True, slots=True)
class SwarmLink:
    """An invitation. run: 64 hex digits, or the first `MIN_DIGITS` or more. address: multiaddr of a DHT node."""

    run: str
    address: str

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
        run, at, address = text.removeprefix(SCHEME).partition("@")
        if not at or not address:
            raise UsageError(f"{_shown(text)}: the link ends before its @ADDRESS; copy all of it: {_EXAMPLE}")
        if not names_run(run):
            raise UsageError(
                f"{_shown(text)}: {_shown(run)} is not a run id: 64 hex digits, or the first {MIN_DIGITS} or more"
            )
        if Address.parse(address).peer is None:
            raise UsageError(f"{_shown(text)}: the address must end in /p2p/12D3Koo..., the peer that answers there")
        return cls(run.lower(), address)

    def __str__(self) -> str:
        return f"{SCHEME}{self.run}@{self.address}"


def names_run(text: str) -> bool:
    """Is it a run id, or `MIN_DIGITS` or more of its first digits?"""
    return _RUN.fullmatch(text.lower()) is not None


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
