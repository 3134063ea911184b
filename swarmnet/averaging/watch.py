"""What one replica observes of a round's streams: the bandwidth of its link, late members, and members that sent chunks
which it refused. It reports them to its leader in states (`step.suspects` decides what follows).

Events and `now` in, numbers and a report out. Pure; knows no assignments.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence

from swarmnet.ids import PeerId, RoundId
from swarmnet.messages import MAX_MATES, Late, LineQuality, Trouble
from swarmnet.quorum import quorum

# ---------------------------------------------------------------- what a link carries
#
# The bandwidth of this peer's link, measured on the averaging streams that cross it anyway; and the distance of the
# other replicas.
#
# A link is busy only while a peer sends on it, so a round's average says little. The measure is the busiest stretch of
# a round that is long enough for buffers not to matter; the lower of the two directions counts, since a round moves as
# much up as down. The best of the last rounds counts, since other load on a machine or its peers, and a small part in a
# round, make a link look narrower than it is; one of the last rounds is always cut evenly (`step.rounds`). A peer
# does not report small changes, because the parts of a round follow the reported bandwidths (`averaging.parts`) and
# should not follow noise. Where no link keeps a round waiting, the measurement shows how fast machines fill their
# links: then parts are even (`step.rounds`). Events and `now` in, numbers out.

LEAST_BYTES, LEAST_STRETCH_S = 1 << 18, 0.05
"""Less than that in a stretch says nothing about a line."""

_STRETCH, _BUFFERED = 1 / 4, 4 << 20
"""The share of a round's bytes in a stretch, and the least bytes: more than buffers hold and hand over at once."""

_BUSY = 0.8
"""The share of a round in which its bytes keep a line busy that it waits for; of two rounds, since one may be luck."""

_ROUNDS = 9
_PINGS = 8
_NOISE = 1.2

_LEAST_TRANSFER_S = 1e-3

Transfer = tuple[float, float, int]
"""(began, ended, bytes)"""


class Meter:
    """One replica's line. Rounds follow each other: `begin`, `received` and `sent`, `end`; pings at any time."""

    def __init__(self) -> None:
        self._down: list[Transfer] = []
        self._up: list[Transfer] = []
        self._open = False
        self._rates: deque[float] = deque(maxlen=_ROUNDS)
        self._said = 0
        self._busy: deque[bool] = deque(maxlen=2)
        self.lent = 0
        """Bytes per second that the operator lends at most, either way; 0: all of the line."""
        self._round_trips: dict[PeerId, deque[float]] = {}

    @property
    def line(self) -> LineQuality:
        """What has been found so far."""
        return LineQuality(
            min(self._said, self.lent) if self.lent else self._said,
            tuple(sorted((peer, max(round(min(seconds) * 1e6), 1)) for peer, seconds in self._round_trips.items())),
            busy=self._busy.count(True) == 2 or 0 < self.lent < self._said,
        )

    def begin(self) -> None:
        """A round begins."""
        self.end()
        self._open = True

    def received(self, num_bytes: int, *, since: float, now: float) -> None:
        """Bytes of a round have come; the sign of life before them, on the same stream, came at `since`."""
        if self._open:  # else a member is late with a round that is over
            self._down.append((since, now, num_bytes))

    def sent(self, num_bytes: int, *, since: float, now: float) -> None:
        """Bytes of a round that the transport was given at `since` have been taken."""
        if self._open:
            self._up.append((since, now, num_bytes))

    def end(self) -> None:
        """The round is over, whether it came to its end or not. Again: nothing more."""
        self._open = False
        found = [rate for transfers in (self._down, self._up) if (rate := busiest(so_far(transfers))) is not None]
        moved = max(sum(num_bytes for *_, num_bytes in transfers) for transfers in (self._down, self._up))
        took_s = span_s([*self._down, *self._up])
        self._down, self._up = [], []
        if not found:
            return
        self._rates.append(min(found))
        # Other load only ever makes a line look narrower, so the best round is believed.
        rate = max(self._rates)
        self._busy.append(moved >= _BUSY * rate * took_s)
        # Parts follow what is said here, and should not follow noise.
        if not self._said or not self._said / _NOISE <= rate <= self._said * _NOISE:
            self._said = max(round(rate), 1)

    def ping(self, peer: PeerId, seconds: float) -> None:
        """Another replica answered an empty call after so long. The least of the last few counts: the rest is
        queueing."""
        heard = self._round_trips.pop(peer, None) or deque(maxlen=_PINGS)
        heard.append(seconds)
        self._round_trips[peer] = heard  # the latest measured is the last to be forgotten
        while len(self._round_trips) > MAX_MATES:
            self._round_trips.pop(next(iter(self._round_trips)))


def span_s(transfers: Sequence[Transfer]) -> float:
    """From the first one's begin to the last one's end."""
    if not transfers:
        return 0.0
    return max(ended for _, ended, _ in transfers) - min(began for began, _, _ in transfers)


def so_far(transfers: Sequence[Transfer]) -> list[tuple[float, float]]:
    """(when, bytes so far), rising, wherever a transfer began or ended: each passes evenly between its two ends."""
    changes: defaultdict[float, float] = defaultdict(float)
    for began, ended, num_bytes in transfers:
        began = min(began, ended - _LEAST_TRANSFER_S)
        changes[began] += num_bytes / (ended - began)
        changes[ended] -= num_bytes / (ended - began)
    moments: list[tuple[float, float]] = []
    rate = passed = 0.0
    for when in sorted(changes):
        passed += rate * (when - moments[-1][0]) if moments else 0.0
        moments.append((when, passed))
        rate += changes[when]
    return moments


def busiest(moments: Sequence[tuple[float, float]]) -> float | None:
    """Bytes per second of the fastest stretch that has a quarter of the bytes; None: too few, or too soon, to tell.

    moments: (when, bytes so far), rising in both. Looked at are the shortest such stretch up to each moment, and all.
    """
    if not moments:
        return None
    whole = moments[-1][1] - moments[0][1]
    enough = max(min(whole, max(whole * _STRETCH, _BUFFERED)), LEAST_BYTES)

    def reaches(start: int, when: float, passed: float) -> bool:
        return passed - moments[start][1] >= enough and when - moments[start][0] >= LEAST_STRETCH_S

    stretches = [(moments[0], moments[-1])] if reaches(0, *moments[-1]) else []
    start = 0
    for when, passed in moments:
        while reaches(start + 1, when, passed):
            start += 1
        if reaches(start, when, passed):
            stretches.append((moments[start], (when, passed)))
    return max(((after - before) / (end - begin) for (begin, before), (end, after) in stretches), default=None)


# ---------------------------------------------------------------- members that keep this one waiting
#
# A stream stalls while the next chunk is wanted and does not come. How long it may stall is computed from its sender's
# bandwidth and from what the sender may be sending at once, with a margin, and from the slowest chunk that has come in
# the round. So a slow link is never taken for a dead one as long as chunks come, and a hung stream is detected in a
# minute or two however large the vector is. `Running` answers do not count: a member that waits for others sends them,
# too.
#
# A member owes its contribution unconditionally, and an aggregate only once it has all contributions. So members that
# owe their contribution are reported, and a reducer only if there are none.

LEAST_S = 6.0
"""A stream may always stand still for so long."""

_MARGIN = 3.0
"""Times the seconds that a sender's line needs."""

_SLOW_LINE = 1 << 20
"""Bytes per second that a line is taken to carry, with margin, unless it was measured to carry less."""

_SLACK_S = 15.0
"""On top of what a line needs: others compute, too."""

_AGAIN_S = 3.0
"""A stream that breaks is asked for again at once. If its last break is longer ago than this, it was answered."""

_LONGEST_S, _LONGEST_MEASURED_S = 120.0, 600.0
"""The longest stall allowed on a link without a measurement; and on any link, whatever bandwidth its member reports."""


def allowance_s(num_bytes: float, bandwidth: int, at_once: float) -> float:
    """How long a stream of a member may stand still that moves so many bytes each way in the round. bandwidth 0:
    unmeasured. at_once: bytes of the chunks that it may be sending at a time, of which the next one is the last."""
    longest_s = _LONGEST_MEASURED_S if bandwidth else _LONGEST_S
    enough_s = _SLACK_S + max(_MARGIN * needs_s(bandwidth, at_once) if bandwidth else 0.0, at_once / _SLOW_LINE)
    return max(LEAST_S, min(_MARGIN * num_bytes / (bandwidth or _SLOW_LINE), enough_s, longest_s))


def needs_s(bandwidth: int, at_once: float) -> float:
    """How long the next chunk of a member takes on its line while it sends as many as it may."""
    return at_once / (bandwidth or _SLOW_LINE)


class StreamWait:
    """One stream: `since` when its next chunk has been wanted, None while none is asked for."""

    def __init__(self, peer: PeerId, owes: bool, now: float) -> None:
        self.peer, self.owes, self._owes, self.waits = peer, owes, owes, False
        self.since: float | None = now
        self.slowest_s = 0.0
        self._breaks, self._broke_at = 0, now  # since its last chunk

    def wanted(self, *, now: float) -> None:
        """The next chunk may come."""
        self.since, self.owes, self.waits = now, self._owes, False

    def excused(self) -> None:
        """The sender says that it waits for others itself, so it owes me nothing yet."""
        self.owes, self.waits = False, True

    def came(self, *, now: float) -> None:
        """The chunk has come; the next one is not wanted yet."""
        if self.since is not None:
            self.slowest_s = max(self.slowest_s, now - self.since)
        self.since, self._breaks = None, 0

    def broke(self, *, now: float) -> None:
        """The call that carried it ended before its time; it is asked for again."""
        self._breaks += 1
        self._broke_at = now

    def is_broken(self, *, now: float) -> bool:
        """Did it break twice in a row? Once may be a lost connection."""
        return self._breaks > 1 and now - self._broke_at <= _AGAIN_S


class Watch:
    """One replica's streams in the round it takes part in. `begin` each round, `end` when it is left."""

    def __init__(self) -> None:
        self._round: RoundId | None = None
        self._allowed: Mapping[PeerId, float] = {}
        self._needs: Mapping[PeerId, float] = {}
        self._waits: list[StreamWait] = []
        self._slowest_s = 0.0  # of chunks of streams that have ended in this round
        self._refused: set[PeerId] = set()
        self.overdue: set[PeerId] = set()
        """Members that were late with a chunk in a round of this step: they may not hand over its aggregate either."""

    def begin(
        self, round_id: RoundId, allowed: Mapping[PeerId, float], needs: Mapping[PeerId, float] | None = None
    ) -> None:
        """Streams are of this round from now on. allowed, needs: `allowance_s` and `needs_s` of its members.

        The same round again: it was restarted after a chunk was refused; its sender stays refused.
        """
        if round_id != self._round:
            self._refused = set()
        self._round, self._allowed, self._needs, self._slowest_s = round_id, allowed, needs or {}, 0.0

    def end(self) -> None:
        """The round is over here, whole or given up; refusals are remembered until another round begins."""
        self._waits = []

    def forget(self) -> None:
        """The step is over, and with it everything of its rounds."""
        self.end()
        self._round, self._refused, self.overdue = None, set(), set()

    @contextlib.contextmanager
    def stream(self, peer: PeerId, *, owes: bool, now: float) -> Iterator[StreamWait]:
        """A stream from that member is read. owes: its next chunk depends on no other member."""
        wait = StreamWait(peer, owes, now)
        self._waits.append(wait)
        try:
            yield wait
        finally:
            if wait in self._waits:
                self._waits.remove(wait)
                self._slowest_s = max(self._slowest_s, wait.slowest_s)

    @property
    def allowed(self) -> Mapping[PeerId, float]:
        """Seconds for which each member's stream may stand still in the last round."""
        return self._allowed

    def waits(self, *, now: float) -> dict[PeerId, bool]:
        """Members that I wait for. True: the stream breaks each time that I request it."""
        found: dict[PeerId, bool] = {}
        for wait in self._waits:
            if wait.since is not None:
                found[wait.peer] = wait.is_broken(now=now) or found.get(wait.peer, False)
        return found

    def awaited(self, *, now: float) -> frozenset[PeerId]:
        """Members with a next chunk that is later than their links explain. Those that owe their own contribution, if
        there are such; else all. A member that answers that it waits for others is not among them."""
        wanted = [(wait, now - wait.since) for wait in self._waits if wait.since is not None and not wait.waits]
        # If a member owes its own contribution, others may be waiting for it, too.
        wanted = [(wait, still_s) for wait, still_s in wanted if wait.owes] or wanted
        return frozenset(wait.peer for wait, still_s in wanted if still_s > self._needs.get(wait.peer, 0.0))

    def refused(self, peer: PeerId) -> None:
        """What that member sent could not be taken."""
        self._refused.add(peer)

    def trouble(self, *, now: float) -> Trouble | None:
        """What the leader should know, or None."""
        if self._round is None:
            return None
        found: dict[bool, dict[PeerId, float]] = {True: {}, False: {}}
        slowest = max((wait.slowest_s for wait in self._waits), default=0.0)
        seen = _MARGIN * max(slowest, self._slowest_s)
        longest = max(self._allowed.values(), default=LEAST_S)
        for wait in self._waits:
            # What hangs on others comes no sooner than from the slowest of them.
            allowed = self._allowed.get(wait.peer, LEAST_S) if wait.owes else longest
            allowed = max(allowed, min(seen, _MARGIN * allowed))
            if wait.since is not None and now - wait.since > allowed:
                found[wait.owes][wait.peer] = allowed
        owes = bool(found[True])
        late = tuple(Late(peer, owes, allowed) for peer, allowed in sorted(found[owes].items()))
        self.overdue.update(found[owes])
        if not late and not self._refused:
            return None
        return Trouble(self._round, late[:MAX_MATES], tuple(sorted(self._refused))[:MAX_MATES])


def odd_ones(told: Sequence[tuple[PeerId, object]]) -> list[PeerId]:
    """The reducers that tell something else than most do; none if there is no majority."""
    for _, most in told:
        odd = [peer for peer, others in told if others != most]
        if len(told) - len(odd) >= quorum(told):
            return odd
    return []
