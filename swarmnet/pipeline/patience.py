"""How long a caller bears with a replica: a multiple of the tail it has seen, never a constant.

It knows no peers and no clock, and counts two things. *Silences* are the waits between two signs of life of one call:
whether an answer takes long because the rest of the pipeline is deep does not matter as long as `Running` keeps coming.
But `Running` is only a word, so *whole calls* have a limit, too, far above what calls have taken.
The tail follows the observed quantile, and doubling after a wrong guess is TCP's retransmission timer (RFC 6298).
"""

from __future__ import annotations

import collections
import math

from swarmnet.manifest.schema import Protocol

_QUANTILE, _WINDOW = 0.95, 128
_OF_SILENCES, _OF_CALLS = 4.0, 8.0
_UNOBSERVED_SILENCE, _UNOBSERVED_CALL = 5.0, 5.0
"""Multiples of the tail, and of the floor before anything was observed."""
_LONGEST_CALL_S = 3600.0


class _Limit:
    """A multiple of the 95th percentile of the last 128 samples, within [floor_s, ceiling_s]."""

    def __init__(self, multiple: float, unobserved: float, *, floor_s: float, ceiling_s: float) -> None:
        self._multiple, self._unobserved = multiple, unobserved
        self._floor_s, self._ceiling_s = floor_s, ceiling_s
        self._samples: collections.deque[float] = collections.deque(maxlen=_WINDOW)
        self._doubled = 1.0

    @property
    def seconds(self) -> float:
        return min(max(self._tail(), self._floor_s) * self._doubled, self._ceiling_s)

    def add(self, sample: float) -> None:
        self._samples.append(sample)
        self._doubled = 1.0

    def expired(self) -> None:
        self._doubled = min(2.0 * self._doubled, self._ceiling_s / self._floor_s)

    def _tail(self) -> float:
        if not self._samples:
            return self._unobserved * self._floor_s
        ordered = sorted(self._samples)
        return self._multiple * ordered[math.ceil(_QUANTILE * len(ordered)) - 1]


class AdaptiveTimeout:
    """How long a caller waits. Silences: floor_s to ceiling_s. Whole calls: at least call_floor_s, an hour at most."""

    def __init__(self, *, floor_s: float = 2.0, ceiling_s: float = 30.0, call_floor_s: float = 60.0) -> None:
        if not 0.0 < floor_s <= ceiling_s < math.inf:
            raise ValueError(f"patience needs 0 < floor_s <= ceiling_s, got {floor_s} and {ceiling_s}")
        self._silence = _Limit(_OF_SILENCES, _UNOBSERVED_SILENCE, floor_s=floor_s, ceiling_s=ceiling_s)
        self._call = _Limit(
            _OF_CALLS, _UNOBSERVED_CALL, floor_s=min(call_floor_s, _LONGEST_CALL_S), ceiling_s=_LONGEST_CALL_S
        )

    @classmethod
    def of(cls, protocol: Protocol, *, stages: int) -> AdaptiveTimeout:
        """By a run's timers: no shorter than others wait before they suspect, twice as long as they bear at most.

        stages: how many the call goes through. Who calls the first of them waits for longer than who calls the last,
        who is then the first to leave a replica that never answers.
        """
        suspect_s = protocol.suspect_s
        return cls(floor_s=suspect_s, ceiling_s=2 * protocol.long_silence_s, call_floor_s=2 * stages * suspect_s)

    @property
    def seconds(self) -> float:
        """Silence to bear now; 5 x `floor_s` before anything was observed."""
        return self._silence.seconds

    @property
    def call_s(self) -> float:
        """What a whole call may take now, whatever is said meanwhile."""
        return self._call.seconds

    def heard(self, silence_s: float, call_s: float = 0.0) -> None:
        """A call was answered after all: its longest silence, and how long all of it took."""
        self._silence.add(silence_s)
        self._call.add(call_s)

    def expired(self, *, over: bool = False) -> None:
        """The limit ran out, of silence or (over) of a call that showed life. It doubles until anybody answers: if
        everybody became slower, somebody still will."""
        (self._call if over else self._silence).expired()
