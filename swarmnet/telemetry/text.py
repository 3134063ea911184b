"""Words: of how many things, how large and how long, and what strangers wrote as text that does nothing. Pure."""

from __future__ import annotations

import math
import shlex


def printable(text: str) -> str:
    """No character of it does anything to a terminal, or to the text around it."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def typed(word: object) -> str:
    """A word of a command that a person copies into a shell: a name with spaces stays one word, and no option."""
    text = str(word)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


def counted(number: int, noun: str) -> str:
    """1 peer, 2 peers, 1,000 batches."""
    more = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{more}"


def short(peer: str) -> str:
    """The end of a peer's id, by which people tell peers apart."""
    return f"...{peer[-8:]}"


def duration(seconds: float | None) -> str:
    """3:07, 1:02:45, or a dash."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def size(num_bytes: float) -> str:
    """1.4 GB, 12 kB: decimal, as disks and links are measured."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"
