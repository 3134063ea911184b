"""How long a caller bears silence before it calls a replica hung: a multiple of the tail it has seen, never a constant.

It knows no peers and no clock. What it counts are *silences*, the waits between two signs of life of one call: whether
an answer takes long because the rest of the pipeline is deep does not matter as long as `Running` keeps coming.
The tail follows the observed quantile, and doubling after a wrong guess is TCP's retransmission timer (RFC 6298).
"""

from __future__ import annotations

import collections
import math

from swarmnet.manifest.schema import Protocol

_MULTIPLE, _QUANTILE, _WINDOW = 4.0, 0.95, 128


class Patience:
    """4 x the 95th percentile of the last 128 silences, within [floor_s, ceiling_s]."""

    def __init__(self, *, floor_s: float = 2.0, ceiling_s: float = 30.0) -> None:
        if not 0.0 < floor_s <= ceiling_s < math.inf:
            raise ValueError(f"patience needs 0 < floor_s <= ceiling_s, got {floor_s} and {ceiling_s}")
        self.floor_s, self.ceiling_s = floor_s, ceiling_s
        self._silences: collections.deque[float] = collections.deque(maxlen=_WINDOW)
        self._doubled = 1.0

    @classmethod
    def of(cls, protocol: Protocol) -> Patience:
        """By a run's timers: no shorter than others wait before they suspect, twice as long as they bear at most."""
        return cls(floor_s=protocol.suspect_s, ceiling_s=2 * protocol.long_silence_s)

    @property
    def seconds(self) -> float:
        """Silence to bear now; 5 x `floor_s` before anything was observed."""
        return min(max(self._tail(), self.floor_s) * self._doubled, self.ceiling_s)

    def heard(self, silence_s: float) -> None:
        """Count the longest silence of a call that was answered after all."""
        self._silences.append(silence_s)
        self._doubled = 1.0

    def expired(self) -> None:
        """Patience ran out. It doubles until anybody answers: if everybody became slower, somebody still will."""
        self._doubled = min(2.0 * self._doubled, self.ceiling_s / self.floor_s)

    def _tail(self) -> float:
        if not self._silences:
            return 5.0 * self.floor_s
        ordered = sorted(self._silences)
        return _MULTIPLE * ordered[math.ceil(_QUANTILE * len(ordered)) - 1]
