"""Whether and when a peer process that has ended is started again: after a crash, later each time, or not. Pure.

It does not know what a peer is: exit codes and seconds in, a decision out.
"""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass

FINAL = frozenset({0, 2})
"""Exit codes after which nothing is started again: all went well; the operator's input was wrong and still is."""


@dataclass(frozen=True, slots=True)
class Pauses:
    """first_s doubles with each crash up to longest_s; a process that ran for healthy_s begins anew."""

    first_s: float = 1.0
    longest_s: float = 60.0
    healthy_s: float = 600.0


@dataclass(frozen=True, slots=True)
class StartAgain:
    """Start it again `after_s` seconds from now. words: what happened, for one line."""

    after_s: float
    words: str


@dataclass(frozen=True, slots=True)
class Over:
    """End with this exit code."""

    code: int


class Revivals:
    """The crashes of one peer, in a row."""

    def __init__(self, pauses: Pauses, rng: random.Random) -> None:
        self._pauses, self._rng = pauses, rng
        self._in_a_row = 0

    def ended(self, code: int, *, ran_s: float, asked: bool) -> StartAgain | Over:
        """The process ended. code: negative for a signal. asked: the operator wanted it to end."""
        if asked or code in FINAL:
            return Over(code if code >= 0 else 128 - code)
        self._in_a_row = 1 if ran_s >= self._pauses.healthy_s else self._in_a_row + 1
        # A tenth more or less, so that machines that crashed together do not come back together.
        doubled = self._pauses.first_s * 2.0 ** min(self._in_a_row - 1, 32)
        after_s = min(doubled, self._pauses.longest_s) * self._rng.uniform(0.9, 1.1)
        how = f"ended with exit code {code}" if code >= 0 else f"was ended by {_name(-code)}"
        row = f", the {_ordinal(self._in_a_row)} time in a row" if self._in_a_row > 1 else ""
        return StartAgain(after_s, f"the peer {how} after {ran_s:.0f} s{row}; it starts again in {after_s:.1f} s")


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
