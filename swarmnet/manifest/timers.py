"""How long a replica waits, and for what: two numbers of the manifest, and what follows from them. Pure.

docs/protocol.md prints the table. Two more waits follow the pace of a run (`step.pace`): the patience with a replica
in touch is the longer of two usual steps and 2 x `suspect_s`; free indexes are ordered after four usual pauses between
claims, once they are known. A usual step is the lower quartile of the last 16, and a usual pause that of the longest in
each: a mean would follow steps that a fault has made slow, and the wait for the next fault would grow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

TERM_STEPS = 16
"""Steps until the order of leaders is drawn again."""

DERIVED: Mapping[str, tuple[Fraction, str, str]] = {
    "beat_s": (Fraction(1, 6), "suspect_s", "before state is sent again: heartbeats, states, plans"),
    "ask_s": (Fraction(1, 2), "beat_s", "before a question is asked again, or of another replica"),
    "settle_s": (Fraction(2), "beat_s", "until a message that was sent has been acted on, if it arrived"),
    "idle_s": (Fraction(1, 3), "long_silence_s", "for a claim, before the leader orders free indexes, at first"),
    "lease_s": (Fraction(2), "long_silence_s", "for peers that could still help"),
    "forget_s": (Fraction(10), "long_silence_s", "until what a silent replica said is forgotten"),
    "slot_s": (Fraction(1, 2), "suspect_s", "for a free slot, or for an input that was announced"),
    "grant_s": (Fraction(2), "suspect_s", "for the grant of a computed microbatch, until its activations are dropped"),
    "ban_s": (Fraction(1, 4), "long_silence_s", "before a replica that failed is called again, at first"),
    "serve_s": (Fraction(2), "lease_s", "for one peer to hand over one payload, while others may have it"),
    "probe_s": (Fraction(4), "forget_s", "at most before a replica that never answers, or is always late, is tried"),
}
"""Timer -> (so many times, which timer of the manifest or above, what is waited for)."""


@dataclass(frozen=True, slots=True)
class Timers:
    """Seconds; those of the manifest, and those of `DERIVED`. Invariant: beat < suspect <= long_silence."""

    suspect_s: float = 3.0
    """The first silence of a replica; the lock on a signed aggregate."""
    long_silence_s: float = 15.0
    """The silence after which a replica is given up that cannot be outvoted."""
    beat_s: float = field(init=False)
    ask_s: float = field(init=False)
    settle_s: float = field(init=False)
    idle_s: float = field(init=False)
    lease_s: float = field(init=False)
    forget_s: float = field(init=False)
    slot_s: float = field(init=False)
    grant_s: float = field(init=False)
    ban_s: float = field(init=False)
    serve_s: float = field(init=False)
    probe_s: float = field(init=False)

    def __post_init__(self) -> None:
        for name, (times, of, _) in DERIVED.items():
            object.__setattr__(self, name, getattr(self, of) * times.numerator / times.denominator)
