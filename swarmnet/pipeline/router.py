"""Which replica of the next stage gets a microbatch: interleaved weighted round robin on measured cost.

The rule is that of SWARM Parallelism (ICML 2023, arXiv:2301.11913): take the replica with the least accumulated virtual
time, charge it up front, correct the charge by what was measured. A peer's config may name another rule
(`RoutingRule`). One router per caller and next stage. It does not know clocks, connections, steps or other callers.
docs/routing.md has the formulas and their reasons.

Virtual time is in integer nanoseconds: refunds are exact, nothing drifts, nothing overflows.
"""

from __future__ import annotations

import collections
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from swarmnet.config import plug_in
from swarmnet.errors import NoReplica
from swarmnet.ids import PeerId
from swarmnet.manifest.timers import Timers

_NEVER = -math.inf
_TRIES_OVER = 16.0
"""The ban after a call that showed life and had no answer, as a multiple of the call's length."""
_LOOK_AGAIN = 16.0
"""A replica that is always late is asked again after so many times its compute, then after twice as long."""
_SLOW, _MARGIN = 1.5, 1.25
"""At the end of a step a replica may be late if it computes for so many times what the cheapest costs; it is expected
to be done after so many times what its compute says, which knows neither the weight pass nor the optimizer step."""


@dataclass(frozen=True, slots=True)
class Pick:
    """One decision. Report its outcome once, by exactly one of `done`, `busy`, `cancelled`, `failed`."""

    peer: PeerId
    number: int
    num_bytes: int
    at: float
    probe: bool = False
    """A copy for an unproven replica: a proven one has the microbatch, too."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that may get the payload: it is neither banned, nor busy, nor excluded."""

    peer: PeerId
    cost_ns: int
    """What the payload is expected to take there; of a replica that was never measured, as much as of the dearest."""
    time_ns: int
    """Virtual time: the sum of what it was charged so far. A newcomer starts equal to the most loaded."""
    queue: int
    """Microbatches in its queue, as it announced seconds ago."""
    in_flight: int
    """Calls of this caller that it has not answered."""
    measured: bool
    """Has it answered this caller yet?"""
    probe: bool = False
    """It has never answered, or not since a call to it failed: a call to it may fail."""
    late: bool = False
    """Others could finish all that is left of the step before this one would finish the payload. Never for a probe."""


RoutingRule = Callable[[Sequence[Candidate]], PeerId]
"""Chooses one of at least one candidate. One rule object per caller, so it may remember what it chose."""


def least_time(candidates: Sequence[Candidate]) -> PeerId:
    """Who has the least virtual time, if its queue were worked off first; of those in time, if that one is late.

    Ties go to the lower peer id. A probe is made when its turn comes, and never because others are late.
    """

    def first(among: Sequence[Candidate]) -> Candidate:
        return min(among, key=lambda each: (each.time_ns + each.queue * each.cost_ns, each.peer))

    found = first(candidates)
    in_time = [each for each in candidates if not each.late and not each.probe]
    return (first(in_time) if found.late and in_time else found).peer


def routing_rule(name: str) -> RoutingRule:
    """A fresh rule by its name in a peer's config. Raises UsageError if no installed distribution brings it."""
    if name == "least_time":
        return least_time
    rule: RoutingRule = plug_in.load("routing rule", name, field="routing")[0]
    return rule


class _Estimate:
    """Exponential average of the median of the last three samples: one outlier leaves no trace."""

    __slots__ = ("_recent", "value")

    def __init__(self) -> None:
        self._recent: collections.deque[float] = collections.deque(maxlen=3)
        self.value = 0.0

    def add(self, sample: float) -> None:
        young = len(self._recent) < 3  # too young to average: a slow first call would be remembered for long
        self._recent.append(sample)
        middle = statistics.median_low(self._recent)
        self.value = middle if young else self.value + 0.2 * (middle - self.value)

    def renew(self) -> None:
        """What was seen is old: the next sample replaces it."""
        self._recent.clear()


@dataclass(slots=True)
class _Replica:
    peer: PeerId
    time_ns: int  # accumulated virtual time
    queue: int  # as advertised
    compute: _Estimate = field(default_factory=_Estimate)  # seconds per byte, in the callee alone
    rest: _Estimate = field(default_factory=_Estimate)  # seconds per byte, everything else of the call
    measured: bool = False
    contributes: bool = False  # to the commits of its stage
    look_s: float = 0.0  # how long it was not asked, the last time that it was asked although always late
    look_at: float = _NEVER  # when it may be asked so again
    charges: dict[int, int] = field(default_factory=dict)  # number of an open pick -> nanoseconds charged
    busy_until: float = _NEVER  # _NEVER again once it is readmitted
    busy_since: float = math.inf  # when it was first busy after its last answer
    banned_until: float = _NEVER
    ban_s: float = 0.0  # length of the last ban; above zero: on probation, one probe at a time
    incident: int = -1  # picks with a lower number belong to the failure already punished

    @property
    def proven(self) -> bool:
        return self.measured or self.contributes

    @property
    def probe(self) -> bool:
        return not self.measured or self.ban_s > 0.0

    def compute_ns(self, num_bytes: int) -> int:
        return round(1e9 * max(num_bytes, 1) * self.compute.value)

    def wait_ns(self, num_bytes: int, now: float) -> int:
        """How long until it has done what it was given. Who has been busy for so long will be for as long again."""
        busy_s = max(self.busy_until - now, 0.0) + max(now - self.busy_since, 0.0)
        return max(len(self.charges) * self.compute_ns(num_bytes), round(1e9 * busy_s))

    @property
    def skipped_until(self) -> float:
        return max(self.busy_until, self.banned_until)

    def free(self, now: float) -> bool:
        return self.skipped_until <= now and not (self.ban_s and self.charges)


class Router:
    """Shares microbatches among the replicas of one stage in proportion to their speed.

    stages: how many stages a call goes through. A caller with more of them ahead waits longer, so the caller next to a
    replica that never answers is the first to leave it.
    """

    def __init__(self, timers: Timers, *, stages: int = 1, rule: RoutingRule = least_time) -> None:
        self.timers, self._rule = timers, rule
        self.silence = TailLimit(4.0, floor_s=timers.suspect_s, ceiling_s=timers.lease_s)
        self.call = TailLimit(8.0, floor_s=min(stages * timers.grant_s, _LONGEST_CALL_S), ceiling_s=_LONGEST_CALL_S)
        self._replicas: dict[PeerId, _Replica] = {}
        self._numbers = itertools.count()
        self._call_failed = False  # a call to a replica that is not proven
        self._level_ns = 0  # the least virtual time among the free at the last pick

    # ------------------------------------------------------------ who is there

    def update(self, replicas: Mapping[PeerId, int], contributors: Set[PeerId] = frozenset()) -> None:
        """Take the live candidates and their advertised queue lengths, and the peers that contribute to their stage.

        A missing replica is forgotten, with its debts and bans. A new one starts at the virtual time of the most
        loaded.
        """
        for peer in self._replicas.keys() - replicas.keys():
            del self._replicas[peer]
        level = max((replica.time_ns for replica in self._replicas.values()), default=0)
        for peer, queue in replicas.items():
            replica = self._replicas.setdefault(peer, _Replica(peer, level, queue))
            replica.queue, replica.contributes = queue, peer in contributors

    def proven(self) -> frozenset[PeerId]:
        """The peers that have answered this caller or contribute to their stage, and have not failed since."""
        return frozenset(peer for peer, replica in self._replicas.items() if replica.proven and not replica.ban_s)

    def gone(self, peer: PeerId) -> None:
        """Forget a peer that is definitely dead. If `update` lists it again, it is another incarnation."""
        self._replicas.pop(peer, None)

    # ------------------------------------------------------------ choose

    def pick(
        self,
        *,
        num_bytes: int,
        now: float,
        exclude: frozenset[PeerId] = frozenset(),
        left: int | None = None,
        opens: bool = False,
    ) -> Pick:
        """Choose a replica for a payload of `num_bytes` by the rule, and charge it.

        left: microbatches of the step that the caller has yet to give in addition to this one; None: no end is near.
        opens: this is the first one of the step, of all callers: it may go to a replica that has been late for long.

        Raises NoReplica with the counts of `known, banned, busy, excluded` if no replica is free, or if the free one
        that the rule chose would be later than a busy one; and ValueError if the rule names none of the candidates.
        """
        self._readmit(now)
        known = self._replicas.values()
        free = [replica for replica in known if replica.free(now)]
        eligible = [replica for replica in free if replica.peer not in exclude]
        if self._has_proven(exclude, now):
            eligible = [replica for replica in eligible if replica.proven]
        costs = self._costs_ns(num_bytes)
        late = self._late(eligible, costs, num_bytes=num_bytes, now=now, exclude=exclude, left=left)
        # One that is never asked is never measured. At the beginning of a step that costs least.
        overdue = {each.peer for each in eligible if each.peer in late and opens and each.look_at <= now}
        late -= overdue
        best = self._chosen(eligible, costs, late) if eligible else None
        # Only where a busy one is better are all late. It is asked again when it is not busy, so this ends.
        if best is None or (best.peer in late and all(each.peer in late or each.probe for each in eligible)):
            raise NoReplica(
                known=len(known),
                banned=sum(replica.ban_s > 0.0 and not replica.free(now) for replica in known),
                busy=sum(replica.busy_until > now for replica in known),
                excluded=len(self._replicas.keys() & exclude),
            )
        # To be passed over is no credit.
        for each in eligible:
            if each.peer in late:
                each.time_ns = max(each.time_ns, best.time_ns)
        if best.peer in overdue:
            look_s = max(2 * best.look_s, _LOOK_AGAIN * best.compute.value * max(num_bytes, 1))
            best.look_s = min(look_s, self.timers.probe_s)
            best.compute.renew()
            best.rest.renew()
        else:
            best.look_s = 0.0
        self._level_ns = min(replica.time_ns for replica in free)
        return self._charge(best, costs[best.peer], num_bytes, now)

    def probe(self, *, num_bytes: int, now: float, exclude: Set[PeerId] = frozenset()) -> Pick | None:
        """Choose an unproven replica for a copy of a microbatch that a proven one has; None: no probe is due.

        One probe runs at a time, because identities cost nothing. First come, first tried; failed ones come last.
        """
        self._readmit(now)
        unproven = [replica for replica in self._replicas.values() if not replica.proven]
        free = [replica for replica in unproven if replica.free(now) and replica.peer not in exclude]
        if not free or any(replica.charges for replica in unproven) or not self._has_proven(exclude, now):
            return None
        chosen = min(free, key=lambda replica: replica.ban_s)
        return self._charge(chosen, self._costs_ns(num_bytes)[chosen.peer], num_bytes, now, probe=True)

    def next_chance(self, now: float) -> float:
        """When to ask again after NoReplica: the end of a ban or busy time, or soon: `update` may bring others."""
        ends = (replica.skipped_until for replica in self._replicas.values())
        return min([now + self.timers.settle_s, *(end for end in ends if end > now)])

    def patience_s(self) -> float:
        """Silence since the last sign of life after which a call counts as hung."""
        return self.silence.seconds

    def call_s(self) -> float:
        """Seconds after which a whole call counts as hung, whatever the callee says meanwhile."""
        return self.call.seconds

    def pause_s(self, retry_after_s: float) -> float:
        """How long to leave a busy peer alone: as it asks, but at most as long as the longest ban."""
        return min(max(retry_after_s, 0.0), self.timers.lease_s)

    # ------------------------------------------------------------ outcomes

    def done(self, pick: Pick, *, seconds: float, compute_s: float, silence_s: float, now: float) -> None:
        """The answer came. Correct the charge, lift ban and probation.

        seconds: the whole call. compute_s: the callee's own part, by its word (never believed above `seconds`).
        silence_s: the longest wait for a sign of life (Accepted, Running, the answer) within this call.
        """
        self.silence.add(silence_s)
        self.call.add(seconds)
        replica, charged_ns = self._close(pick)
        if replica is None:
            return
        compute_s = min(max(compute_s, 0.0), seconds)
        size = max(pick.num_bytes, 1)
        replica.compute.add(compute_s / size)
        replica.rest.add((seconds - compute_s) / size)
        replica.measured, replica.busy_since = True, math.inf
        cost_ns = self._costs_ns(pick.num_bytes)[pick.peer]
        replica.time_ns += cost_ns - charged_ns
        replica.look_at = now + max(replica.look_s, min(_LOOK_AGAIN * compute_s, self.timers.probe_s))
        if replica.ban_s:
            replica.banned_until, replica.ban_s = now, 0.0  # readmitted by the next pick

    def busy(self, pick: Pick, *, retry_after_s: float, now: float) -> None:
        """Back-pressure: refund, and skip the replica until then (see `pause_s`). Never a ban."""
        replica, charged_ns = self._close(pick)
        if replica is not None:
            replica.time_ns -= charged_ns
            replica.busy_until = now + self.pause_s(retry_after_s)
            replica.busy_since = min(replica.busy_since, now)

    def cancelled(self, pick: Pick) -> None:
        """The callee did not do it and is not to blame (`MovedTo`, stale, the caller lost interest): refund."""
        replica, charged_ns = self._close(pick)
        if replica is not None:
            replica.time_ns -= charged_ns

    def failed(self, pick: Pick, *, now: float, hung: bool, over: bool = False) -> None:
        """The call broke, or (`hung`) patience ran out. The charge stays and the replica is banned, each time twice
        as long until it answers. Calls that were open when the ban began belong to the same incident.

        over: it showed signs of life all the while. Every probe of such a replica costs a whole call's limit, so its
        bans are in proportion to that limit and may grow longer; but only while others give results, because otherwise
        it might just be slow.
        """
        replica, _ = self._close(pick)
        # Also if it left without a word: under its next name it would be tried at once.
        self._call_failed = self._call_failed or (hung if replica is None else not replica.proven)
        if replica is None:
            return
        if hung:
            replica.rest.add((now - pick.at) / max(pick.num_bytes, 1))
        if pick.number < replica.incident:
            return
        replica.incident = next(self._numbers)
        others = any(other.measured and not other.ban_s for other in self._replicas.values() if other is not replica)
        odd = over and others  # not all have become slower
        longest_s = self.timers.probe_s if odd else self.timers.lease_s
        least_s = max(_TRIES_OVER * (now - pick.at) if odd else 0.0, self.timers.ban_s)
        replica.ban_s = min(max(2.0 * replica.ban_s, least_s), longest_s)
        replica.banned_until = now + replica.ban_s
        # A probe tells nothing about the others' silences.
        if hung and not odd and not pick.probe:
            (self.call if over else self.silence).expired()

    # ------------------------------------------------------------ inside

    def _late(
        self,
        eligible: Sequence[_Replica],
        costs_ns: Mapping[PeerId, int],
        *,
        num_bytes: int,
        now: float,
        exclude: frozenset[PeerId],
        left: int | None,
    ) -> set[PeerId]:
        """Who is slow, and would finish the payload only after others could have finished it and all that is left.

        The others are all replicas that may be asked, now or when they are not busy, except unproven ones. A replica is
        late by its compute alone; the others' time counts beyond theirs. So neither doubt nor a Byzantine replica makes
        another late.
        """
        if left is None:
            return set()
        sound = [replica for replica in self._replicas.values() if not replica.probe and replica.peer not in exclude]
        waits = {each.peer: each.wait_ns(num_bytes, now) for each in sound}
        slow_ns = _SLOW * min((costs_ns[each.peer] for each in sound), default=0)
        late = set[PeerId]()
        for each in eligible:
            if each.probe or each.compute_ns(num_bytes) < slow_ns:
                continue
            end_ns = round(_MARGIN * (waits[each.peer] + each.compute_ns(num_bytes)))
            by_others = sum(
                max(end_ns - wait, 0) // costs_ns[other] for other, wait in waits.items() if other != each.peer
            )
            if by_others > left:
                late.add(each.peer)
        return late

    def _chosen(self, eligible: Sequence[_Replica], costs_ns: Mapping[PeerId, int], late: Set[PeerId]) -> _Replica:
        candidates = [
            Candidate(
                each.peer,
                costs_ns[each.peer],
                each.time_ns,
                each.queue,
                len(each.charges),
                each.measured,
                each.probe,
                each.peer in late,
            )
            for each in eligible
        ]
        chosen = self._rule(candidates)
        if chosen not in {each.peer for each in eligible}:
            raise ValueError(f"the routing rule chose {chosen!r}, which is none of its candidates")
        return self._replicas[chosen]

    def _close(self, pick: Pick) -> tuple[_Replica | None, int]:
        """Find whom an open pick was charged to; (None, 0) if that incarnation has left or it was reported before."""
        replica = self._replicas.get(pick.peer)
        if replica is None or pick.number not in replica.charges:
            return None, 0
        return replica, replica.charges.pop(pick.number)

    def _has_proven(self, exclude: Set[PeerId], now: float) -> bool:
        """Is there a replica that has answered or contributes, and did a call to an unproven one fail?

        Before that all are alike, or the first replica to answer at the start of a run would get all work.
        """
        return self._call_failed and any(
            replica.proven and replica.banned_until <= now and replica.peer not in exclude
            for replica in self._replicas.values()
        )

    def _charge(self, replica: _Replica, cost_ns: int, num_bytes: int, now: float, *, probe: bool = False) -> Pick:
        pick = Pick(replica.peer, next(self._numbers), num_bytes, now, probe)
        replica.charges[pick.number] = cost_ns
        replica.time_ns += cost_ns
        return pick

    def _readmit(self, now: float) -> None:
        """Skipped time is no credit: the replica starts again at the virtual time of the least loaded."""
        for replica in self._replicas.values():
            if _NEVER < replica.skipped_until <= now:
                replica.time_ns = max(replica.time_ns, self._level_ns)
                replica.busy_until = replica.banned_until = _NEVER

    def _costs_ns(self, num_bytes: int) -> dict[PeerId, int]:
        """Compute time, plus what link and queue take beyond the typical replica. An unmeasured one costs as the
        dearest.

        `rest` holds the remaining pipeline too. That part is common to all replicas, so subtracting the typical
        `rest` leaves what is particular to one.
        """
        measured = [replica for replica in self._replicas.values() if replica.measured]
        typical = statistics.median_low(replica.rest.value for replica in measured) if measured else 0.0
        per_byte = {r.peer: r.compute.value + max(r.rest.value - typical, 0.0) for r in measured}
        dearest = max(per_byte.values(), default=0.0)
        scale = 1e9 * max(num_bytes, 1)
        return {peer: max(round(scale * per_byte.get(peer, dearest)), 1) for peer in self._replicas}


# ---------------------------------------------------------------- how long a caller waits
#
# A multiple of the tail that it has seen, never a constant. It counts two things. *Silences* are the waits between two
# signs of life of one call: whether an answer takes long because the rest of the pipeline is deep does not matter as
# long as `Running` keeps coming. But `Running` is only a word, so *whole calls* have a limit, too, far above what
# calls have taken. The tail follows the observed quantile, and doubling after a wrong guess is TCP's retransmission
# timer (RFC 6298).

_QUANTILE, _WINDOW = 0.95, 128
_UNOBSERVED = 5.0
_LONGEST_CALL_S = 3600.0


class TailLimit:
    """A multiple of the 95th percentile of the last 128 samples, within [floor_s, ceiling_s], in seconds.

    Five times floor_s before anything was observed.
    """

    def __init__(self, multiple: float, *, floor_s: float, ceiling_s: float) -> None:
        self._multiple, self._floor_s, self._ceiling_s = multiple, floor_s, ceiling_s
        self._samples: collections.deque[float] = collections.deque(maxlen=_WINDOW)
        self._doubled = 1.0

    @property
    def seconds(self) -> float:
        """To wait now."""
        tail_s = _UNOBSERVED * self._floor_s
        if self._samples:
            tail_s = self._multiple * sorted(self._samples)[math.ceil(_QUANTILE * len(self._samples)) - 1]
        return min(max(tail_s, self._floor_s) * self._doubled, self._ceiling_s)

    def add(self, sample: float) -> None:
        """It was answered after all, after so long."""
        self._samples.append(sample)
        self._doubled = 1.0

    def expired(self) -> None:
        """It ran out. It doubles until a replica answers: if all became slower, one still will."""
        self._doubled = min(2.0 * self._doubled, self._ceiling_s / self._floor_s)
