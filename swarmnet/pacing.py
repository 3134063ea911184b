"""How often something is done: a token bucket, one bucket for each host or peer, and pauses after failures.

Pure: `now` is in seconds of any clock, and nothing here sleeps. A caller waits for the seconds that it is told.
"""

from __future__ import annotations

import math
import random
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from swarmnet.bounds import Recent

MOST_BUCKETS = 1 << 14
_ROUNDING_S = 1e-6

K = TypeVar("K", bound=Hashable)


class Rate(NamedTuple):
    """`per_s` tokens a second in the long run, and at most `burst_s` seconds of them at once."""

    per_s: float
    burst_s: float

    @classmethod
    def every(cls, seconds: float, at_once: int = 1) -> Rate:
        """One token every so many seconds, and at most so many at once."""
        return cls(1 / seconds, at_once * seconds)

    def bucket(self) -> TokenBucket:
        """A full one."""
        return TokenBucket(self.per_s, self.burst_s)


@dataclass(slots=True)
class TokenBucket:
    """A bucket of `Rate(per_s, burst_s)`. It begins full."""

    per_s: float
    burst_s: float = 0.0
    full_at: float = -math.inf
    """When all tokens are back."""

    def wait_s(self, now: float, tokens: float = 1.0) -> float:
        """Seconds until so many tokens are there; 0: they are. Takes none."""
        early_s = max(self.full_at - now, 0.0) + tokens / self.per_s - self.burst_s
        return early_s if early_s > _ROUNDING_S else 0.0

    def take(self, now: float, tokens: float = 1.0) -> float:
        """Take tokens, in advance if they are not there. Returns the seconds until they would have been."""
        self.full_at = max(self.full_at, now) + tokens / self.per_s
        return self.wait_s(now, 0.0)

    def ask(self, now: float, tokens: float = 1.0) -> float:
        """Take tokens if they are there. Returns the seconds until they are; 0: they are taken."""
        # A refusal takes nothing: else a caller that asks without end in another's name would keep that one out.
        if not (wait_s := self.wait_s(now, tokens)):
            self.take(now, tokens)
        return wait_s

    def give_back(self, tokens: float = 1.0) -> None:
        """Tokens that were taken are not used."""
        self.full_at -= tokens / self.per_s

    def set_rate(self, per_s: float, now: float) -> None:
        """From now on so many tokens a second; tokens that were taken in advance stay owed."""
        owed_s = max(self.full_at - now, 0.0)
        self.full_at = now + (owed_s * self.per_s / per_s if owed_s else 0.0)
        self.per_s = per_s


class Budgets(Generic[K]):
    """A token bucket for each host, peer or subnet. Of too many the bucket that was not used for longest is forgotten.

    To forget a bucket fills it. It was not used for longer than all others, so that costs next to nothing.
    """

    def __init__(self, rate: Rate, most: int = MOST_BUCKETS) -> None:
        self._rate = rate
        self._buckets: Recent[K, TokenBucket] = Recent(most)

    def of(self, key: K) -> TokenBucket:
        """The bucket of this key."""
        self._buckets[key] = bucket = self._buckets.get(key) or self._rate.bucket()
        return bucket

    def __len__(self) -> int:
        return len(self._buckets)


def doubled_s(first_s: float, times: int, longest_s: float = math.inf) -> float:
    """`first_s`, doubled so many times, and no longer than `longest_s`."""
    # The exponent has a bound, because 2.0 ** 1024 is none.
    return min(first_s * 2.0 ** min(times, 64), longest_s)


_RNG = random.Random()


@dataclass(slots=True)
class Backoff:
    """Pauses between attempts that fail: `first_s`, then twice as long each time, up to `longest_s`.

    jitter: each pause is shorter at random, by up to this share, so that those that failed together come back apart.
    """

    first_s: float
    longest_s: float
    jitter: float = 0.0
    rng: random.Random = _RNG
    failures: int = 0
    """In a row."""
    until: float = -math.inf

    def failed(self, now: float, *, longest_s: float | None = None) -> float:
        """An attempt has failed. Returns the seconds to wait; longest_s: the longest pause this time."""
        self.failures += 1
        pause_s = doubled_s(self.first_s, self.failures - 1, self.longest_s if longest_s is None else longest_s)
        pause_s *= self.rng.uniform(1.0 - self.jitter, 1.0)
        self.until = now + pause_s
        return pause_s

    def wait_s(self, now: float) -> float:
        """Seconds that are left of the last pause."""
        return max(self.until - now, 0.0)

    def reset(self) -> None:
        """An attempt has succeeded: the next failure is the first in a row. A pause that has begun goes on."""
        self.failures = 0
