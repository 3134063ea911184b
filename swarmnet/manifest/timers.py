"""How long a replica waits, and for what. Two numbers come from the manifest; every other wait is derived here. Pure.

| timer | value | default | what ends with it |
|---|---|---|---|
| `beat_s` | suspect / 6 | 0.5 s | the pause before state is sent again: heartbeats, reports, orders |
| `ask_s` | beat / 2 | 0.25 s | the pause before a question is asked again, or of another replica |
| `settle_s` | 2 beats | 1 s | a message that was sent has been acted on, if it arrived |
| `suspect_s` | manifest | 3 s | the first silence of a replica; a lock on a signed aggregate |
| `idle_s` | long silence / 3 | 5 s | the wait for a claim before the leader orders free indexes, at first |
| `long_silence_s` | manifest | 15 s | the silence after which a replica is given up that cannot be outvoted |
| `lease_s` | 2 long silences | 30 s | the wait for peers that could still help |
| `forget_s` | 10 long silences | 150 s | what is remembered of a silent replica |
| `Pace.patience_s` | max(2 usual steps, 2 suspect) | 6 s | the wait for a replica in touch; the lease at first |
| `Pace.idle_s` | 4 pauses between claims | | the same as `idle_s`, once the pace of claims is known |

A usual step is the lower quartile of the last 16: a mean would follow steps that a fault has made slow, and the wait
for the next fault would grow.
"""

from __future__ import annotations

from dataclasses import dataclass

TERM_STEPS = 16
"""Steps until the order of leaders is drawn again."""


@dataclass(frozen=True, slots=True)
class Timers:
    """Seconds; the timers of the manifest, and what follows from them.

    Invariant: beat < suspect <= long_silence.
    """

    suspect_s: float = 3.0
    long_silence_s: float = 15.0

    @property
    def beat_s(self) -> float:
        return self.suspect_s / 6

    @property
    def ask_s(self) -> float:
        return self.beat_s / 2

    @property
    def settle_s(self) -> float:
        return 2 * self.beat_s

    @property
    def idle_s(self) -> float:
        return self.long_silence_s / 3

    @property
    def lease_s(self) -> float:
        return 2 * self.long_silence_s

    @property
    def forget_s(self) -> float:
        return 10 * self.long_silence_s
