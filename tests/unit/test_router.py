"""The router's laws: shares follow speed, nobody starves or is flooded, refunds are exact, replays are equal."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.errors import NoReplica
from swarmnet.ids import PeerId
from swarmnet.manifest.timers import Timers
from swarmnet.pipeline.router import Pick, Router

TIMERS = Timers()

SIZE = 1 << 20
speeds = st.lists(st.floats(0.01, 1.0), min_size=2, max_size=6)  # seconds of compute per microbatch


def names(count: int) -> list[PeerId]:
    return [PeerId(f"peer{i}") for i in range(count)]


def router_over(count: int) -> Router:
    router = Router(TIMERS)
    router.update(dict.fromkeys(names(count), 0))
    return router


def answer(router: Router, pick: Pick, compute_s: float, *, rest_s: float = 0.5, now: float = 0.0) -> None:
    router.done(pick, seconds=compute_s + rest_s, compute_s=compute_s, silence_s=0.1, now=now)


def drive(router: Router, costs: dict[PeerId, float], picks: int, *, window: int = 1) -> list[PeerId]:
    """Pick and answer in order with `window` calls open; returns whom it picked."""
    taken: list[PeerId] = []
    opened: collections.deque[Pick] = collections.deque()
    for _ in range(picks):
        if len(opened) == window:
            oldest = opened.popleft()
            answer(router, oldest, costs[oldest.peer])
        opened.append(router.pick(num_bytes=SIZE, now=0.0))
        taken.append(opened[-1].peer)
    for pick in opened:
        answer(router, pick, costs[pick.peer])
    return taken


def costs_of(seconds: Sequence[float]) -> dict[PeerId, float]:
    return dict(zip(names(len(seconds)), seconds, strict=True))


# ---------------------------------------------------------------- shares


@given(speeds, st.integers(1, 8))
def test_shares_follow_speed(seconds: list[float], window: int) -> None:
    costs = costs_of(seconds)
    taken = collections.Counter(drive(router_over(len(seconds)), costs, 1000, window=window))
    whole = sum(1 / cost for cost in costs.values())
    for peer, cost in costs.items():
        assert taken[peer] == pytest.approx(1000 / cost / whole, rel=0.05, abs=3 + window)


@pytest.mark.parametrize(
    ("seconds", "rest_s", "share"),
    [
        ([0.1, 1.0], [20.0, 20.0], 1 / 11),  # what all wait for flattens no share
        ([0.1, 0.1, 0.1], [0.5, 0.5, 0.8], 1 / 9),  # a slow link: 0.1 + 0.3 against 0.1
    ],
)
def test_a_share_follows_what_a_replica_takes_longer_than_others(
    seconds: list[float], rest_s: list[float], share: float
) -> None:
    router, costs, taken = router_over(len(seconds)), costs_of(seconds), collections.Counter[PeerId]()
    for _ in range(1000):
        pick = router.pick(num_bytes=SIZE, now=0.0)
        taken[pick.peer] += 1
        answer(router, pick, costs[pick.peer], rest_s=rest_s[names(len(seconds)).index(pick.peer)])
    assert taken[names(len(seconds))[-1]] == pytest.approx(1000 * share, abs=5)


@pytest.mark.parametrize("claimed_s", [0.0, 0.1, 50.0, -1.0, math.inf])
def test_nobody_can_talk_itself_cheap(claimed_s: float) -> None:
    """A slow replica of three that lies about its compute gets no more than its true speed deserves."""
    router, taken = router_over(3), collections.Counter[PeerId]()
    for _ in range(1050):
        pick = router.pick(num_bytes=SIZE, now=0.0)
        taken[pick.peer] += 1
        true_s, claim_s = (0.1, 0.1) if pick.peer != "peer2" else (1.0, claimed_s)
        router.done(pick, seconds=true_s + 0.5, compute_s=claim_s, silence_s=0.1, now=0.0)
    assert taken[PeerId("peer2")] <= 55


@given(speeds)
def test_nobody_starves(seconds: list[float]) -> None:
    costs = costs_of(seconds)
    taken = drive(router_over(len(seconds)), costs, 1000)
    for peer, cost in costs.items():
        bound = sum(cost / other + 2 for other in costs.values()) + len(seconds)
        turns = [-1, *(i for i, who in enumerate(taken) if who == peer), 1000]
        assert max(b - a for a, b in itertools.pairwise(turns)) <= bound


def test_one_outlier_leaves_no_trace() -> None:
    costs = costs_of([0.1, 0.1])
    calm, shaken = router_over(2), router_over(2)
    drive(calm, costs, 50)
    drive(shaken, costs, 49)
    answer(shaken, shaken.pick(num_bytes=SIZE, now=0.0), 100.0)
    assert drive(shaken, costs, 50) == drive(calm, costs, 50)


def test_a_lasting_change_is_followed() -> None:
    router = router_over(2)
    drive(router, costs_of([0.1, 0.1]), 100)
    changed = costs_of([0.1, 0.9])
    drive(router, changed, 200)
    assert collections.Counter(drive(router, changed, 1000))[PeerId("peer1")] == pytest.approx(100, abs=3)


def test_virtual_time_does_not_drift() -> None:
    """After 20,000 picks the pattern still repeats exactly."""
    router, costs = router_over(3), costs_of([0.1, 0.1, 0.2])
    drive(router, costs, 100)
    taken = drive(router, costs, 20_000)
    assert taken[-5:] == taken[:5] and set(taken[:5]) == set(costs)


@given(st.integers(0, 5))
def test_an_advertised_queue_delays_but_does_not_rob(queue: int) -> None:
    costs = costs_of([0.1, 0.1])
    router = router_over(2)
    drive(router, costs, 10)
    router.update({PeerId("peer0"): queue, PeerId("peer1"): 0})
    taken = drive(router, costs, 1000)
    assert set(taken[1:queue]) <= {"peer1"}
    assert taken.count(PeerId("peer0")) == pytest.approx(500, abs=queue)


# ---------------------------------------------------------------- coming and going


@given(speeds, st.integers(0, 200))
def test_a_new_replica_is_not_flooded(seconds: list[float], before: int) -> None:
    """Until it answers it gets no more than the dearest known replica does."""
    router, costs = router_over(len(seconds)), costs_of(seconds)
    drive(router, costs, len(seconds) + before)
    router.update(dict.fromkeys([*costs, PeerId("new")], 0))
    taken = collections.Counter[PeerId]()
    for _ in range(200):
        pick = router.pick(num_bytes=SIZE, now=0.0)
        taken[pick.peer] += 1
        if pick.peer != "new":
            answer(router, pick, costs[pick.peer])
    assert taken[PeerId("new")] <= taken[max(costs, key=lambda peer: costs[peer])] + 1


def test_a_new_replica_gets_its_share_once_known() -> None:
    router, costs = router_over(3), costs_of([0.1, 0.1, 0.1])
    drive(router, costs, 300)
    costs[PeerId("new")] = 0.1
    router.update(dict.fromkeys(costs, 0))
    assert drive(router, costs, 400).count(PeerId("new")) == pytest.approx(100, abs=2)


@pytest.mark.parametrize("by_update", [True, False])
def test_a_returning_peer_owes_nothing_and_is_not_banned(by_update: bool) -> None:
    router = router_over(1)
    old, late = router.pick(num_bytes=SIZE, now=0.0), router.pick(num_bytes=SIZE, now=0.0)
    router.failed(old, now=1.0, hung=True)
    router.update({}) if by_update else router.gone(PeerId("peer0"))
    router.update({PeerId("peer0"): 0})
    router.failed(late, now=1.0, hung=False)  # an echo of the old incarnation bans nobody
    assert router.pick(num_bytes=SIZE, now=1.0).peer == "peer0"


def test_no_replica_says_why() -> None:
    router = router_over(3)
    router.failed(router.pick(num_bytes=SIZE, now=0.0), now=0.0, hung=False)
    router.busy(router.pick(num_bytes=SIZE, now=0.0), retry_after_s=0.25, now=0.0)
    with pytest.raises(NoReplica) as caught:
        router.pick(num_bytes=SIZE, now=0.0, exclude=frozenset({PeerId("peer2"), PeerId("stranger")}))
    assert caught.value.facts == {"known": 3, "banned": 1, "busy": 1, "excluded": 1}


# ---------------------------------------------------------------- busy, moved, cancelled


@given(speeds, st.lists(st.booleans(), min_size=1, max_size=60))
def test_refunds_are_exact(seconds: list[float], given_back: list[bool]) -> None:
    """Calls that were given back leave the same future as calls that never were."""
    plain, costs = router_over(len(seconds)), costs_of(seconds)
    disturbed, now = router_over(len(seconds)), 0.0
    for by_busy in given_back:
        pick = disturbed.pick(num_bytes=SIZE, now=now)
        if by_busy:
            disturbed.busy(pick, retry_after_s=1.0, now=now)
        else:
            disturbed.cancelled(pick)
        now += 1.0
        picks = [router.pick(num_bytes=SIZE, now=now) for router in (plain, disturbed)]
        assert picks[0].peer == picks[1].peer
        for router, pick in zip((plain, disturbed), picks, strict=True):
            answer(router, pick, costs[pick.peer])


def test_busy_never_bans() -> None:
    router, now = router_over(1), 0.0
    for _ in range(100):
        router.busy(router.pick(num_bytes=SIZE, now=now), retry_after_s=0.5, now=now)
        with pytest.raises(NoReplica):
            router.pick(num_bytes=SIZE, now=now + 0.25)
        now = router.next_chance(now)
        assert router.next_chance(now) == now + 1.0  # nothing is pending then


def test_time_spent_busy_is_no_credit() -> None:
    router, costs = router_over(2), costs_of([0.1, 0.1])
    drive(router, costs, 20)
    pick = router.pick(num_bytes=SIZE, now=0.0)
    router.busy(pick, retry_after_s=1.0, now=0.0)
    assert pick.peer not in drive(router, costs, 100)
    taken = [router.pick(num_bytes=SIZE, now=1.0).peer for _ in range(20)]
    assert taken[0] == pick.peer and 10 <= taken.count(pick.peer) <= 11


# ---------------------------------------------------------------- anything at all

KINDS = ("done", "busy", "cancelled", "fail", "hang", "gone", "leave", "come")
operations = st.lists(
    st.tuples(st.sampled_from(("pick", "pick", "pick", *KINDS)), st.integers(0, 30), st.floats(0.0, 3.0)), max_size=80
)


def replay(script: list[tuple[str, int, float]]) -> list[str]:
    """Run any script against a router; check every decision against what a caller may rely on."""
    router, now, listed = router_over(4), 0.0, set(names(4))
    opened: list[Pick] = []
    echoes: set[Pick] = set()  # open when the ban of their peer began
    dead: set[Pick] = set()  # of an incarnation that left
    busy_until: dict[PeerId, float] = {}
    banned_until: dict[PeerId, float] = {}  # at least
    trace: list[str] = []
    for kind, choice, seconds in script:
        now += seconds / 3
        if kind == "pick":
            exclude = frozenset(peer for i, peer in enumerate(names(4)) if choice >> i & 1)
            allowed = {p for p in listed - exclude if max(busy_until.get(p, now), banned_until.get(p, now)) <= now}
            try:
                pick = router.pick(num_bytes=SIZE, now=now, exclude=exclude)
            except NoReplica as error:
                assert now < router.next_chance(now) <= now + 1.0
                trace.append(str(error))
                continue
            assert pick.peer in allowed
            opened.append(pick)
            trace.append(pick.peer)
        elif kind in ("gone", "leave", "come"):
            peer = names(4)[choice % 4]
            if kind == "gone":
                router.gone(peer)
            listed = listed | {peer} if kind == "come" else listed - {peer}
            router.update(dict.fromkeys(sorted(listed), choice % 3))
            if kind != "come":
                busy_until.pop(peer, None)
                banned_until.pop(peer, None)
                dead |= {pick for pick in opened if pick.peer == peer}
        elif opened:
            pick = opened.pop(choice % len(opened))
            if kind == "done":
                router.done(pick, seconds=seconds + 0.1, compute_s=seconds, silence_s=0.1, now=now)
                if pick not in dead:
                    banned_until.pop(pick.peer, None)
            elif kind == "busy":
                router.busy(pick, retry_after_s=seconds, now=now)
                if pick not in dead:
                    busy_until[pick.peer] = now + seconds
            elif kind == "cancelled":
                router.cancelled(pick)
            else:
                router.failed(pick, now=now, hung=kind == "hang")
                if pick not in echoes | dead:
                    banned_until[pick.peer] = now + 4.0
                    echoes |= {other for other in opened if other.peer == pick.peer}
    return trace


@given(operations)
def test_any_script_is_safe_and_replays_equal(script: list[tuple[str, int, float]]) -> None:
    assert replay(script) == replay(script)
