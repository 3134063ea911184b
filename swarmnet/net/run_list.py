"""A signed list of public runs, which anybody may host: what `swarmnet join runs:...` shows and joins from.

    runs:<signer>@<file or https address>[#name]        runs:12D3Koo...@https://example.org/public.runs#books

A list is text, a line each: what it is, who signed it and when, the runs, and the signature of all lines before it. The
host can withhold a list or give an older one, and change nothing in it. Whoever is asked for a run of the list is still
checked by the run's id.
"""

from __future__ import annotations

import re
import time
import tomllib
import urllib.error
import urllib.request
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

from swarmnet.clock import boot_time
from swarmnet.errors import UsageError
from swarmnet.ids import PeerId
from swarmnet.net.identity import verify
from swarmnet.net.swarm_link import SwarmLink
from swarmnet.telemetry.text import typed

SCHEME, ENDING = "runs:", ".runs"

MAX_CHARS, MAX_RUNS, MAX_ABOUT = 65_536, 256, 200
FETCH_S = 15.0

_LAST = 1 << 37
"""Unix seconds: any later and no calendar has it."""

_HEAD = "swarmnet public runs 1"
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class ListedRun:
    """A run of a list. about: a line for people."""

    name: str
    link: SwarmLink
    about: str

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UsageError(f"{self.name!r} is no name of a run: up to 64 of a-z, 0-9, dot, dash, underscore")
        if len(self.about) > MAX_ABOUT or not self.about.isprintable():
            raise UsageError(f"{self.name}: about: at most {MAX_ABOUT} printable characters in one line")
        # An invitation is a secret of one guest, or of those whom the owner tells.
        if self.link.invitation or self.link.whole_run is None:
            raise UsageError(f"{self.name}: a public list takes links with the whole run id and without an invitation")


@dataclass(frozen=True, slots=True)
class RunList:
    """issued: Unix seconds, by the signer's clock."""

    signer: PeerId
    issued: int
    runs: tuple[ListedRun, ...]

    @property
    def signed(self) -> str:
        """What the signer signs."""
        runs = (f"run\t{run.name}\t{run.link}\t{run.about}\n" for run in self.runs)
        return f"{_HEAD}\nsigner\t{self.signer}\nissued\t{self.issued}\n{''.join(runs)}"

    def text(self, sign: Callable[[bytes], bytes]) -> str:
        """The whole file."""
        return f"{self.signed}signature\t{b64encode(sign(self.signed.encode())).decode()}\n"

    @classmethod
    def parse(cls, text: str, signer: PeerId) -> RunList:
        """Read a list that `signer` signed. Raises UsageError."""
        signed, mark, signature = text.rpartition("signature\t")
        try:
            head, name, issued, *rows = signed.splitlines()
            found = cls(
                PeerId(name.removeprefix("signer\t")),
                min(int(issued.removeprefix("issued\t")), _LAST),
                tuple(_run(row) for row in rows[: MAX_RUNS + 1]),
            )
            genuine = mark and len(text) <= MAX_CHARS and head == _HEAD and found.signed == signed
            proof = b64decode(signature.strip(), validate=True)
        except ValueError:
            genuine = False
        if not genuine or len(found.runs) > MAX_RUNS:
            raise UsageError("it is no list of runs: `swarmnet publish` writes one")
        if found.signer != signer or not verify(signer, signed.encode(), proof):
            raise UsageError(f"the list is not signed by {signer}: ask for its address again")
        return found

    def named(self, name: str) -> ListedRun:
        """The run of that name. Raises UsageError."""
        for run in self.runs:
            if run.name == name:
                return run
        raise UsageError(f"the list has no run {name!r}; it has {', '.join(run.name for run in self.runs) or 'none'}")


def _run(row: str) -> ListedRun:
    kind, name, link, about = row.split("\t")
    if kind != "run":
        raise ValueError(kind)
    return ListedRun(name, SwarmLink.parse(link), about)


def read_runs(path: Path) -> tuple[ListedRun, ...]:
    """The runs that a TOML file names, [[runs]] with name, link and about. Raises UsageError."""
    try:
        rows = tomllib.loads(path.read_text(encoding="utf-8"))["runs"]
        if unknown := {key for row in rows for key in row} - {"name", "link", "about"}:
            raise UsageError(f"there is no {min(unknown)!r}: a run has name, link and about")
        runs = tuple(ListedRun(row["name"], SwarmLink.parse(row["link"]), row.get("about", "")) for row in rows)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{path}: write [[runs]] with name, link and about for each run ({error})") from error
    if len(runs) > MAX_RUNS or len({run.name for run in runs}) < len(runs):
        raise UsageError(f"{path}: at most {MAX_RUNS} runs, each with a name of its own")
    return runs


def fetch(text: str) -> tuple[RunList, str]:
    """The list at an address as it was pasted, and the name behind its #, or "". Raises UsageError."""
    signer, at, where = text.strip().removeprefix(SCHEME).partition("@")
    where, _, name = where.partition("#")
    if not at or not where:
        raise UsageError(f"{text}: a list of runs is runs:SIGNER@FILE, or runs:SIGNER@https://...")
    try:
        if where.startswith(("https://", "http://")):
            # Signed, so the host's certificate adds only that nobody sees which list is read.
            data = _fetched(where)
        else:
            with Path(where).expanduser().open("rb") as file:
                data = file.read(MAX_CHARS + 1)
        content = data.decode()
    except (OSError, ValueError, RuntimeError, HTTPException) as error:
        why = error.reason if isinstance(error, urllib.error.URLError) else error
        raise UsageError(f"{where}: the list cannot be read ({ascii(str(why))[1:-1]})") from error
    try:
        return RunList.parse(content, PeerId(signer)), name
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The address is the signer's word for where its list is; a host could lead to one on this machine."""

    def redirect_request(self, *_: Any) -> None:
        """None is followed."""


def _fetched(url: str) -> bytes:
    """What is there, at most as much as a list may have. Raises OSError, HTTPException."""
    deadline, data = boot_time() + FETCH_S, b""
    with urllib.request.build_opener(_NoRedirect).open(url, timeout=FETCH_S) as answer:
        while len(data) <= MAX_CHARS and (more := answer.read1(MAX_CHARS + 1 - len(data))):
            data += more
            if boot_time() > deadline:
                raise TimeoutError(f"it takes more than {FETCH_S:.0f} s")
    return data


def shown(found: RunList, address: str, *, now: float) -> list[str]:
    """Lines for a person. address: as it was pasted."""
    days = max(now - found.issued, 0) / 86_400
    age = f"{days:.0f} days ago" if days >= 2 else time.strftime("on %Y-%m-%d", time.gmtime(found.issued))
    width = max((len(run.name) for run in found.runs), default=0)
    lines = [line for run in found.runs for line in (f"{run.name:<{width}}  {run.about}", f"{'':{width}}  {run.link}")]
    if not lines:
        return [f"no public run is listed, signed {age}"]
    base = address.strip().partition("#")[0]
    return [
        *lines,
        f"signed {age} by {found.signer}",
        f"join one with: swarmnet join {typed(f'{base}#{found.runs[0].name}')}",
    ]
