"""Words: of how many things, and what strangers wrote as text that does nothing. Pure."""

from __future__ import annotations

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
