"""A hung replica: it loses its share after one failure, comes back by one probe, and costs little meanwhile."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable

import pytest

from swarmnet.errors import NoReplica
from swarmnet.ids import PeerId
from swarmnet.manifest.timers import Timers
from swarmnet.pipeline.router import Pick, Router

TIMERS = Timers(suspect_s=2.0)

PEERS = [PeerId(f"peer{i}") for i in range(4)]
HUNG = PEERS[2]


def warm_router() -> Router:
    router = Router(TIMERS)
    router.update(dict.fromkeys(PEERS, 0))
    for _ in range(40):
        finish(router, router.pick(num_bytes=1, now=0.0), now=0.0)
    return router


def finish(router: Router, pick: Pick, *, now: float) -> None:
    router.done(pick, seconds=1.0, compute_s=0.2, silence_s=0.3, now=now)


def hang(router: Router, *, now: float, calls: int = 1) -> None:
    others = frozenset(PEERS) - {HUNG}
    for pick in [router.pick(num_bytes=1, now=now, exclude=others) for _ in range(calls)]:
        router.failed(pick, now=now, hung=True)


def test_one_failure_takes_its_share_and_one_probe_returns_it() -> None:
    router = warm_router()
    hang(router, now=0.0)
    taken = []
    for i in range(375):
        pick = router.pick(num_bytes=1, now=i / 100)
        taken.append(pick.peer)
        finish(router, pick, now=i / 100)
    assert HUNG not in taken  # while the first ban lasts
    window = [router.pick(num_bytes=1, now=4.0) for _ in range(40)]
    probes = [pick for pick in window if pick.peer == HUNG]
    assert len(probes) == 1
    for pick in window:
        finish(router, pick, now=5.0)
    for start in range(5):  # no flood afterwards
        taken = []
        for _ in range(20):
            pick = router.pick(num_bytes=1, now=5.0 + start)
            taken.append(pick.peer)
            finish(router, pick, now=5.0 + start)
        assert 1 <= taken.count(HUNG) <= 6


def test_a_long_probe_earns_no_credit() -> None:
    router = warm_router()
    hang(router, now=0.0)
    probe = next(pick for _ in range(8) if (pick := router.pick(num_bytes=1, now=4.0)).peer == HUNG)
    for _ in range(300):
        finish(router, router.pick(num_bytes=1, now=5.0), now=5.0)
    finish(router, probe, now=6.0)
    window = [router.pick(num_bytes=1, now=6.0).peer for _ in range(40)]
    assert window.count(HUNG) <= 11


def ban_length(router: Router, now: float, others: frozenset[PeerId] = frozenset(PEERS) - {HUNG}) -> float:
    """Ask until the hung one is free again; nobody else may be asked."""
    begun = now
    while True:
        try:
            router.cancelled(router.pick(num_bytes=1, now=now, exclude=others))
            return now - begun
        except NoReplica:
            now = router.next_chance(now)


def test_bans_double_up_to_a_cap_and_success_resets() -> None:
    router, now, lengths = warm_router(), 0.0, []
    for _ in range(5):
        hang(router, now=now)
        lengths.append(ban_length(router, now))
        now += lengths[-1]
    assert lengths == [3.75, 7.5, 15.0, 30.0, 30.0]
    finish(router, router.pick(num_bytes=1, now=now, exclude=frozenset(PEERS) - {HUNG}), now=now)
    hang(router, now=now)
    assert ban_length(router, now) == TIMERS.ban_s


def test_calls_that_hang_together_are_one_incident() -> None:
    router = warm_router()
    hang(router, now=0.0, calls=8)
    assert ban_length(router, 0.0) == TIMERS.ban_s
    assert router.patience_s() == 4.0  # doubled once, from the floor
    finish(router, router.pick(num_bytes=1, now=5.0), now=5.0)
    assert router.patience_s() == 2.0


def test_a_late_answer_lifts_the_ban() -> None:
    router = warm_router()
    others = frozenset(PEERS) - {HUNG}
    slow, stuck = (router.pick(num_bytes=1, now=0.0, exclude=others) for _ in range(2))
    router.failed(stuck, now=1.0, hung=True)
    finish(router, slow, now=1.5)
    assert router.pick(num_bytes=1, now=1.5, exclude=others).peer == HUNG


# ---------------------------------------------------------------- a small swarm on virtual time


class VirtualSwarm:
    """One caller with `window` microbatches open, four replicas that serve in order; `HUNG` stops at `hang_at`.

    answered: (when first sent, when answered) of each microbatch; a failed or refused one is sent again.
    """

    def __init__(self, seed: int, *, window: int, hang_at: float, slots: int = 8) -> None:
        self.router = Router(TIMERS)
        self.router.update(dict.fromkeys(PEERS, 0))
        self.rng, self.hang_at, self.slots = random.Random(seed), hang_at, slots
        self.serve_s = dict.fromkeys(PEERS, 0.2)
        self.free_at = dict.fromkeys(PEERS, 0.0)
        self.held = dict.fromkeys(PEERS, 0)
        self.answered: list[tuple[float, float]] = []
        self.asked: list[tuple[float, PeerId]] = []
        self.expired: list[float] = []
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        for _ in range(window):
            self.at(0.0, lambda now: self.send(now, now))

    def at(self, when: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def run(self, until: float) -> None:
        while self._events[0][0] <= until:
            now, _, event = heapq.heappop(self._events)
            event(now)

    def send(self, now: float, first: float) -> None:
        try:
            pick = self.router.pick(num_bytes=1000, now=now)
        except NoReplica:
            self.at(self.router.next_chance(now), lambda then: self.send(then, first))
            return
        self.asked.append((now, pick.peer))
        self.at(now + 0.01, lambda then: self.arrive(then, pick, first))

    def arrive(self, now: float, pick: Pick, first: float) -> None:
        peer, serve_s = pick.peer, self.rng.uniform(0.5, 1.5) * self.serve_s[pick.peer]
        if peer == HUNG and now >= self.hang_at:
            self.at(pick.at + self.router.patience_s(), lambda then: self.expire(then, pick, first))
        elif self.held[peer] == self.slots:
            self.at(now + 0.01, lambda then: self.refuse(then, pick, first))
        else:
            self.held[peer] += 1
            self.free_at[peer] = end = max(self.free_at[peer], now) + serve_s
            if peer == HUNG and end >= self.hang_at:
                self.at(self.hang_at + self.router.patience_s(), lambda then: self.expire(then, pick, first))
            else:
                self.at(end, lambda then: self.answer(then, pick, first, serve_s))

    def refuse(self, now: float, pick: Pick, first: float) -> None:
        self.router.busy(pick, retry_after_s=0.1, now=now)
        self.send(now, first)

    def expire(self, now: float, pick: Pick, first: float) -> None:
        self.router.failed(pick, now=now, hung=True)
        self.expired.append(now)
        self.send(now, first)

    def answer(self, now: float, pick: Pick, first: float, serve_s: float) -> None:
        self.held[pick.peer] -= 1
        self.router.done(pick, seconds=now - pick.at, compute_s=serve_s, silence_s=min(now - pick.at, 0.4), now=now)
        self.answered.append((first, now))
        self.send(now, now)

    def throughput(self, start: float, stop: float) -> float:
        return sum(start <= now < stop for _, now in self.answered) / (stop - start)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("window", [8, 16])
def test_a_hung_replica_of_four_costs_little(seed: int, window: int) -> None:
    swarm = VirtualSwarm(seed, window=window, hang_at=10.0)
    swarm.run(130.0)
    assert swarm.throughput(10.0, 130.0) >= 0.7 * swarm.throughput(0.0, 10.0)
    waits = [now - max(first, 10.0) for first, now in swarm.answered if first < 13.0 and now >= 10.0]
    assert max(waits) < 5.0  # routed around
    asked = [now for now, peer in swarm.asked if peer == HUNG and now > swarm.expired[0]]
    assert len(asked) <= 6  # probes, further and further apart


def test_uneven_replicas_are_used_in_full() -> None:
    swarm = VirtualSwarm(0, window=24, hang_at=1e9)
    swarm.serve_s = dict(zip(PEERS, (0.1, 0.2, 0.4, 0.8), strict=True))
    swarm.run(200.0)
    assert swarm.throughput(20.0, 200.0) >= 0.93 * sum(1 / s for s in swarm.serve_s.values())


@pytest.mark.parametrize(
    ("over", "alone", "first_s", "longest_s"),
    [
        (False, False, TIMERS.ban_s, TIMERS.lease_s),
        (True, False, 16 * 15.0, TIMERS.probe_s),
        (True, True, TIMERS.ban_s, TIMERS.lease_s),
    ],
)
def test_a_probe_that_costs_a_whole_call_comes_ever_more_rarely(
    over: bool, alone: bool, first_s: float, longest_s: float
) -> None:
    """Each call lasts fifteen seconds. Who showed life all the while has cost that much: bans begin at 16 times it.

    If nobody else gives results it may just be slow, and is asked again soon.
    """
    router, now = Router(TIMERS), 0.0
    others = frozenset() if alone else frozenset(PEERS) - {HUNG}
    router.update(dict.fromkeys({HUNG, *others}, 0))
    for _ in {HUNG, *others}:
        finish(router, router.pick(num_bytes=1, now=now), now=now)
    bans = []
    for _ in range(12):
        pick = router.pick(num_bytes=1, now=now, exclude=others)
        now += 15.0
        router.failed(pick, now=now, hung=True, over=over)
        bans.append(round(ban_length(router, now, others), 6))
        now += bans[-1]
    assert bans[:2] == [first_s, 2 * first_s] and bans == sorted(bans) and bans[-1] == longest_s


def test_records_of_nobody_cost_a_tenth_of_the_time() -> None:
    """Two replicas that answer within a second, and a hundred names: each call to one hangs for fifteen seconds."""
    honest, bogus = PEERS[:2], [PeerId(f"bogus{number}") for number in range(100)]
    router, now, lost, answered = Router(TIMERS), 0.0, 0.0, 0
    router.update(dict.fromkeys(honest, 0))
    finish(router, router.pick(num_bytes=1, now=now), now=now)
    router.update(dict.fromkeys([*honest, *bogus], 0))
    while now < 3000.0:
        pick = router.pick(num_bytes=1, now=now)
        if pick.peer in honest:
            now += 1.0
            finish(router, pick, now=now)
            answered += 1
        else:
            now += 15.0
            lost += 15.0
            router.failed(pick, now=now, hung=True)
    assert lost <= 0.11 * now and answered >= 0.85 * now
    assert lost > 0.0, "some day a newcomer is tried all the same"


def test_of_two_that_begin_together_neither_gets_all_the_work() -> None:
    router = Router(TIMERS)
    router.update(dict.fromkeys(PEERS[:2], 0))
    finish(router, router.pick(num_bytes=1, now=0.0), now=1.0)
    picks = Counter(router.pick(num_bytes=1, now=1.0).peer for _ in range(8))
    assert picks == dict.fromkeys(PEERS[:2], 4)


def test_after_a_call_in_vain_newcomers_get_copies_one_at_a_time_while_others_answer() -> None:
    router = warm_router()
    newcomers = [PeerId(f"new{number}") for number in range(3)]
    router.update(dict.fromkeys([*PEERS, PeerId("dead")], 0))
    while (pick := router.pick(num_bytes=1, now=1.0)).peer != "dead":
        pass
    router.failed(pick, now=1.0, hung=False)
    router.update(dict.fromkeys([*PEERS, *newcomers], 0))
    assert {router.pick(num_bytes=1, now=1.0).peer for _ in range(40)} == set(PEERS)
    probe = router.probe(num_bytes=1, now=1.0)
    assert probe is not None and probe.peer == newcomers[0]
    assert router.probe(num_bytes=1, now=1.0) is None
    patience_s = router.patience_s()
    router.failed(probe, now=2.0, hung=True)
    assert router.patience_s() == patience_s
    second = router.probe(num_bytes=1, now=2.0)
    assert second is not None and second.peer == newcomers[1]
    finish(router, second, now=3.0)
    picked = {router.pick(num_bytes=1, now=3.0).peer for _ in range(60)}
    assert picked == {*PEERS, newcomers[1]}, "a newcomer that has answered is one of them"


def test_a_contributor_needs_no_trial() -> None:
    router = warm_router()
    new = PeerId("new")
    router.update(dict.fromkeys([*PEERS, PeerId("dead")], 0))
    while (pick := router.pick(num_bytes=1, now=1.0)).peer != "dead":
        pass
    router.failed(pick, now=1.0, hung=True)
    router.update(dict.fromkeys([*PEERS, new], 0), contributors={new})
    assert new in {router.pick(num_bytes=1, now=1.0).peer for _ in range(40)}
    assert router.probe(num_bytes=1, now=1.0) is None


def test_where_nobody_who_answers_is_left_everybody_is_tried() -> None:
    router = warm_router()
    router.update(dict.fromkeys([*PEERS, PeerId("new")], 0))
    assert router.pick(num_bytes=1, now=1.0, exclude=frozenset(PEERS)).peer == "new"
    assert router.pick(num_bytes=1, now=1.0, exclude=frozenset(PEERS)).peer == "new"
