"""The router near the end of a step: nobody slow is given what others would have finished before, and nobody waits for
ever for that."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.errors import NoReplica
from swarmnet.ids import PeerId
from swarmnet.manifest.timers import Timers
from swarmnet.pipeline.router import Pick, Router

TIMERS = Timers(suspect_s=2.0)

SIZE = 1 << 20
FAST, OTHER, SLOW = PeerId("fast"), PeerId("other"), PeerId("slow")
SECONDS = {FAST: 1.0, OTHER: 1.0, SLOW: 8.0}


def known(seconds: dict[PeerId, float] = SECONDS) -> Router:
    """All have shared a long stream, which ended at time 0."""
    router = Router(TIMERS)
    router.update(dict.fromkeys(seconds, 0))
    for _ in range(170):
        answer(router, router.pick(num_bytes=SIZE, now=0.0), seconds, now=0.0)
    return router


def answer(router: Router, pick: Pick, seconds: dict[PeerId, float], *, now: float) -> None:
    took = seconds[pick.peer]
    router.done(pick, seconds=took + 0.5, compute_s=took, silence_s=0.1, now=now)


def test_a_slow_replica_gets_what_it_can_finish_in_time_and_nothing_at_the_end() -> None:
    router = known()
    taken = [router.pick(num_bytes=SIZE, now=0.0, left=31 - number).peer for number in range(32)]
    assert taken.count(SLOW) == 1 and taken.index(SLOW) < 16, "8 of 16 seconds"
    assert abs(taken.count(FAST) - taken.count(OTHER)) <= 1


def test_who_is_passed_over_earns_no_credit() -> None:
    router = known()
    for _ in range(170):
        pick = router.pick(num_bytes=SIZE, now=0.0, left=0)
        assert pick.peer != SLOW
        answer(router, pick, SECONDS, now=0.0)
    taken = [router.pick(num_bytes=SIZE, now=0.0).peer for _ in range(17)]
    assert taken.count(SLOW) <= 2


def test_a_busy_fast_replica_is_waited_for_and_one_that_is_always_busy_is_not() -> None:
    router, now = known({FAST: 1.0, SLOW: 8.0}), 0.0
    router.busy(router.pick(num_bytes=SIZE, now=now, left=0), retry_after_s=0.05, now=now)
    for _ in range(1000):
        try:
            pick = router.pick(num_bytes=SIZE, now=now, left=0)
        except NoReplica:
            assert router.next_chance(now) > now  # type: ignore[operator]
            now = router.next_chance(now)  # type: ignore[assignment]
            continue
        if pick.peer == SLOW:
            break
        router.busy(pick, retry_after_s=0.05, now=now)
    assert pick.peer == SLOW and 8.0 <= now <= 10.0, "once it has been busy for as long as the slow one takes"


def test_a_replica_that_failed_is_tried_in_its_turn_and_not_because_others_are_late() -> None:
    router, now = known(), 0.0
    router.failed(router.pick(num_bytes=SIZE, now=now, exclude=frozenset({OTHER, SLOW})), now=now, hung=False)
    now = 4.0
    opened = [router.pick(num_bytes=SIZE, now=now, left=0) for _ in range(6)]
    assert [pick.peer for pick in opened].count(FAST) <= 1, "one call, whatever is free"
    assert SLOW not in {pick.peer for pick in opened}


def test_who_is_always_late_is_measured_again_at_the_beginning_of_a_step_and_more_and_more_rarely() -> None:
    router, asked, now = known({FAST: 1.0, SLOW: 30.0}), list[float](), 0.0
    while now < 3000.0:
        pick = router.pick(num_bytes=SIZE, now=now, left=3, opens=True)
        if pick.peer == SLOW:
            asked.append(now)
        answer(router, pick, {FAST: 1.0, SLOW: 30.0}, now=now)
        now += 4.0
    waits = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert asked[0] >= 480.0 and len(asked) >= 3 and waits == sorted(waits)


def test_one_that_has_become_fast_is_found_out_by_one_call() -> None:
    router = known()
    while (first := router.pick(num_bytes=SIZE, now=200.0, left=0, opens=True)).peer != SLOW:
        answer(router, first, SECONDS, now=200.0)
    answer(router, first, {SLOW: 1.0}, now=201.0)
    assert SLOW in {router.pick(num_bytes=SIZE, now=201.0, left=0).peer for _ in range(3)}


def test_who_claims_to_compute_nothing_makes_nobody_else_late() -> None:
    router = Router(TIMERS)
    router.update({FAST: 0, SLOW: 0})
    for _ in range(20):
        pick = router.pick(num_bytes=SIZE, now=0.0)
        took = SECONDS[pick.peer]
        router.done(pick, seconds=took + 0.5, compute_s=0.0 if pick.peer == SLOW else took, silence_s=0.1, now=0.0)
    taken = [router.pick(num_bytes=SIZE, now=0.0, left=3 - number).peer for number in range(4)]
    assert FAST in taken


events = st.lists(
    st.tuples(st.sampled_from(["pick", "done", "busy", "failed", "hung", "cancelled", "later"]), st.integers(0, 7)),
    max_size=60,
)


@given(events, st.lists(st.floats(0.01, 20.0), min_size=1, max_size=5), st.integers(0, 40))
def test_asking_again_when_told_to_ends_with_somebody(
    story: list[tuple[str, int]], seconds: list[float], left: int
) -> None:
    """Whatever has happened, and whether all are late or not: every wait is for a later time, and there are few."""
    peers = {PeerId(f"peer{number}"): cost for number, cost in enumerate(seconds)}
    router, now, opened = Router(TIMERS), 0.0, list[Pick]()
    router.update(dict.fromkeys(peers, 0))
    for word, number in story:
        pick = opened.pop(number % len(opened)) if opened and word not in ("pick", "later") else None
        match word:
            case "later":
                now += number
            case "pick":
                try:
                    opened.append(router.pick(num_bytes=SIZE, now=now, left=number, opens=not number))
                except NoReplica:
                    assert router.next_chance(now) > now  # type: ignore[operator]
            case _ if pick is None:
                pass
            case "done":
                answer(router, pick, peers, now=now)
            case "busy":
                router.busy(pick, retry_after_s=number / 4, now=now)
            case "cancelled":
                router.cancelled(pick)
            case _:
                router.failed(pick, now=now, hung=word == "hung")
    for pick in opened:
        router.cancelled(pick)
    for _ in range(80):
        try:
            router.pick(num_bytes=SIZE, now=now, left=left)
            return
        except NoReplica:
            assert router.next_chance(now) > now  # type: ignore[operator]
            now = router.next_chance(now)  # type: ignore[assignment]
    pytest.fail("nobody in all that time, and bans last 30 seconds")
