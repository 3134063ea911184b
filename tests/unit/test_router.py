"""The router's laws: shares follow speed, nobody starves or is flooded, refunds are exact, replays are equal.

A hung replica loses its share after one failure and comes back by one probe; near the end of a step nobody slow is
given what others would have finished before; the timeout follows the observed tail.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.errors import NoReplica
from swarmnet.ids import PeerId
from swarmnet.manifest.timers import Timers
from swarmnet.pipeline.router import Pick, Router, TailLimit

TIMERS = Timers(suspect_s=2.0)
speeds = st.lists(st.floats(0.01, 1.0), min_size=2, max_size=6)  # seconds of compute per microbatch
FAST, OTHER, SLOW, NEW, DEAD = (PeerId(name) for name in ("fast", "other", "slow", "new", "dead"))
SECONDS = {FAST: 1.0, OTHER: 1.0, SLOW: 8.0}


def names(count: int) -> list[PeerId]:
    return [PeerId(f"peer{number}") for number in range(count)]


PEERS = names(4)
HUNG = PEERS[2]
OTHERS = frozenset(PEERS) - {HUNG}


class Stage(Router):
    """A router over replicas that compute for so long; its clock is moved by hand."""

    def __init__(self, seconds: dict[PeerId, float] | list[float], *, calls: int = 0) -> None:
        """calls: how many of an even stream have been answered before."""
        super().__init__(TIMERS)
        self.costs = seconds if isinstance(seconds, dict) else dict(zip(names(len(seconds)), seconds, strict=True))
        self.now = 0.0
        self.list()
        self.drive(calls)

    def list(self, *newcomers: PeerId, contributors: frozenset[PeerId] = frozenset()) -> None:
        self.update(dict.fromkeys([*self.costs, *newcomers], 0), contributors)

    def take(self, exclude: frozenset[PeerId] = frozenset(), left: int | None = None, opens: bool = False) -> Pick:
        return self.pick(num_bytes=1 << 20, now=self.now, exclude=exclude, left=left, opens=opens)

    def answer(self, pick: Pick, compute_s: float | None = None, *, rest_s: float = 0.5) -> None:
        took = self.costs[pick.peer] if compute_s is None else compute_s
        self.done(pick, seconds=took + rest_s, compute_s=took, silence_s=0.1, now=self.now)

    def drive(self, calls: int, *, window: int = 1) -> list[PeerId]:
        """Pick and answer in order with `window` calls open; returns which it picked."""
        taken, opened = list[PeerId](), deque[Pick]()
        for _ in range(calls):
            if len(opened) == window:
                self.answer(opened.popleft())
            opened.append(self.take())
            taken.append(opened[-1].peer)
        for pick in opened:
            self.answer(pick)
        return taken

    def hang(self, *, calls: int = 1) -> None:
        """Calls to HUNG that were open at once have no answer."""
        for pick in [self.take(OTHERS) for _ in range(calls)]:
            self.failed(pick, now=self.now, hung=True)

    def ban_s(self, others: frozenset[PeerId] = OTHERS, left: int | None = None) -> float:
        """Ask until one may be asked that is none of the others. Returns how long that took."""
        begun = self.now
        while True:
            try:
                self.cancelled(self.take(others, left))
                return self.now - begun
            except NoReplica:
                assert self.next_chance(self.now) > self.now
                self.now = self.next_chance(self.now)


def even() -> Stage:
    return Stage(dict.fromkeys(PEERS, 0.2), calls=40)


# ---------------------------------------------------------------- shares


@given(speeds, st.integers(1, 8))
def test_shares_follow_speed_and_nobody_starves(seconds: list[float], window: int) -> None:
    stage = Stage(seconds)
    taken = stage.drive(1000, window=window)
    whole = sum(1 / cost for cost in stage.costs.values())
    for peer, cost in stage.costs.items():
        assert taken.count(peer) == pytest.approx(1000 / cost / whole, rel=0.05, abs=3 + window)
        turns = [-1, *(i for i, who in enumerate(taken) if who == peer), 1000]
        bound = sum(cost / other + 2 for other in stage.costs.values()) + len(seconds)
        assert window > 1 or max(b - a for a, b in itertools.pairwise(turns)) <= bound


@pytest.mark.parametrize(
    ("seconds", "claimed_s", "rest_s", "share", "off"),
    [
        ([0.1, 1.0], 1.0, [20.0, 20.0], 1 / 11, 5),  # what all wait for flattens no share
        ([0.1, 0.1, 0.1], 0.1, [0.5, 0.5, 0.8], 1 / 9, 5),  # a slow link: 0.1 + 0.3 against 0.1
        # A slow replica of three that lies about its compute gets no more than its true speed deserves.
        *(([0.1, 0.1, 1.0], claimed_s, [0.5] * 3, 0.0, 52) for claimed_s in (0.0, 0.1, 50.0, -1.0, math.inf)),
    ],
)
def test_a_share_follows_what_a_replica_takes_longer_than_others(
    seconds: list[float], claimed_s: float, rest_s: list[float], share: float, off: float
) -> None:
    stage, taken = Stage(seconds), Counter[PeerId]()
    last = names(len(seconds))[-1]
    for _ in range(1000):
        pick = stage.take()
        taken[pick.peer] += 1
        true_s = stage.costs[pick.peer]
        took_s = true_s + rest_s[names(len(seconds)).index(pick.peer)]
        claim_s = claimed_s if pick.peer == last else true_s
        stage.done(pick, seconds=took_s, compute_s=claim_s, silence_s=0.1, now=0.0)
    assert taken[last] == pytest.approx(1000 * share, abs=off)


def test_one_outlier_leaves_no_trace_and_a_lasting_change_is_followed() -> None:
    calm, shaken = Stage([0.1, 0.1], calls=50), Stage([0.1, 0.1], calls=49)
    shaken.answer(shaken.take(), 100.0)
    assert shaken.drive(50) == calm.drive(50)
    for pick in [shaken.take() for _ in range(4)]:  # two of the last three are no outliers
        shaken.answer(pick, 1.0 if pick.peer == PEERS[1] else 0.1)
    assert shaken.drive(50) != calm.drive(4 + 50)[4:]
    calm.costs[PEERS[1]] = 0.9
    calm.drive(200)
    assert calm.drive(1000).count(PEERS[1]) == pytest.approx(100, abs=3)


@given(st.integers(0, 5))
def test_an_advertised_queue_delays_but_does_not_rob(queue: int) -> None:
    stage = Stage([0.1, 0.1], calls=10)
    stage.update({PEERS[0]: queue, PEERS[1]: 0})
    taken = stage.drive(1000)
    assert set(taken[1:queue]) <= {PEERS[1]}
    assert taken.count(PEERS[0]) == pytest.approx(500, abs=queue)


# ---------------------------------------------------------------- coming and going


@given(speeds, st.integers(0, 200))
def test_a_new_replica_is_not_flooded(seconds: list[float], before: int) -> None:
    """Until it answers it gets no more than the dearest known replica does."""
    stage = Stage(seconds, calls=len(seconds) + before)
    dearest = max(stage.costs, key=lambda peer: stage.costs[peer])
    stage.list(NEW)
    picks = [stage.take()]
    while len(picks) < 200:
        if picks[-1].peer != NEW:
            stage.answer(picks[-1])
        picks.append(stage.take())
    taken = Counter(pick.peer for pick in picks)
    assert taken[NEW] <= taken[dearest] + 1


@pytest.mark.parametrize("by_update", [True, False])
def test_a_returning_peer_owes_nothing_and_is_not_banned(by_update: bool) -> None:
    stage = Stage([0.1])
    old, late = stage.take(), stage.take()
    stage.failed(old, now=1.0, hung=True)
    stage.update({}) if by_update else stage.gone(old.peer)
    stage.list()
    stage.failed(late, now=1.0, hung=False)  # an echo of the old incarnation bans nobody
    assert stage.take().peer == old.peer


def test_no_replica_says_why() -> None:
    stage = Stage([0.1, 0.1, 0.1])
    stage.failed(stage.take(), now=0.0, hung=False)
    stage.busy(stage.take(), retry_after_s=0.25, now=0.0)
    with pytest.raises(NoReplica) as caught:
        stage.take(frozenset({PEERS[2], PeerId("stranger")}))
    assert caught.value.facts == {"known": 3, "banned": 1, "busy": 1, "excluded": 1}


# ---------------------------------------------------------------- busy, moved, cancelled


@given(speeds, st.lists(st.booleans(), min_size=1, max_size=60))
def test_refunds_are_exact(seconds: list[float], given_back: list[bool]) -> None:
    """Calls that were given back leave the same future as calls that never were."""
    plain, disturbed = Stage(seconds), Stage(seconds)
    for by_busy in given_back:
        pick = disturbed.take()
        if by_busy:
            disturbed.busy(pick, retry_after_s=1.0, now=disturbed.now)
        else:
            disturbed.cancelled(pick)
        plain.now = disturbed.now = plain.now + 1.0
        assert plain.drive(1) == disturbed.drive(1)


def test_busy_never_bans() -> None:
    stage = Stage([0.1])
    for _ in range(100):
        stage.busy(stage.take(), retry_after_s=0.5, now=stage.now)
        stage.now += 0.25
        with pytest.raises(NoReplica):
            stage.take()
        stage.now = stage.next_chance(stage.now)
        assert stage.next_chance(stage.now) == stage.now + TIMERS.settle_s  # nothing is pending then


def test_time_spent_busy_is_no_credit() -> None:
    stage = Stage([0.1, 0.1], calls=20)
    pick = stage.take()
    stage.busy(pick, retry_after_s=1.0, now=0.0)
    assert pick.peer not in stage.drive(100)
    stage.now = 1.0
    taken = [stage.take().peer for _ in range(20)]
    assert taken[0] == pick.peer and 10 <= taken.count(pick.peer) <= 11


# ---------------------------------------------------------------- a hung replica


def test_one_failure_takes_its_share_and_one_probe_returns_it() -> None:
    stage = even()
    stage.hang()
    for i in range(375):
        stage.now = i / 100
        assert stage.drive(1) != [HUNG]  # while the first ban lasts
    stage.now = 4.0
    (probe,) = [pick for _ in range(40) if (pick := stage.take()).peer == HUNG]
    stage.drive(300)
    for second in range(5, 10):  # no flood afterwards: however long a probe is, it earns no credit
        stage.now = second
        stage.answer(probe)
        assert 1 <= stage.drive(20).count(HUNG) <= 6


def test_bans_double_up_to_a_cap_and_success_resets() -> None:
    stage, lengths = even(), []
    for _ in range(5):
        stage.hang()
        lengths.append(stage.ban_s())
    assert lengths == [3.75, 7.5, 15.0, 30.0, 30.0]
    stage.answer(stage.take(OTHERS))
    stage.hang()
    assert stage.ban_s() == TIMERS.ban_s


def test_calls_that_hang_together_are_one_incident() -> None:
    stage = even()
    stage.hang(calls=8)
    assert stage.ban_s() == TIMERS.ban_s
    assert stage.patience_s() == 4.0  # doubled once, from the floor
    stage.drive(1)
    assert stage.patience_s() == 2.0


def test_a_call_that_fails_before_anything_was_measured_costs_next_to_nothing() -> None:
    stage = Stage([0.2, 0.2])
    stage.list(contributors=frozenset(stage.costs))
    first = stage.take()
    stage.failed(first, now=0.0, hung=False)
    stage.drive(10)
    stage.now = 4.0
    assert first.peer in stage.drive(20)


def test_calls_that_hang_count_as_slow_ones() -> None:
    stage = even()
    stage.now = 1.0
    for _ in range(2):
        pick = stage.take(OTHERS)
        stage.now += 10.0
        stage.failed(pick, now=stage.now, hung=True)
        stage.ban_s()
    stage.answer(stage.take(OTHERS))
    assert 1 <= stage.drive(240).count(HUNG) <= 20, "an even share is 60"


def test_a_late_answer_lifts_the_ban() -> None:
    stage = even()
    slow, stuck = stage.take(OTHERS), stage.take(OTHERS)
    stage.failed(stuck, now=1.0, hung=True)
    stage.now = 1.5
    stage.answer(slow)
    assert stage.take(OTHERS).peer == HUNG


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
    others = frozenset() if alone else OTHERS
    stage = Stage(dict.fromkeys({HUNG, *others}, 0.2), calls=len(others) + 1)
    bans = []
    for _ in range(12):
        pick = stage.take(others)
        stage.now += 15.0
        stage.failed(pick, now=stage.now, hung=True, over=over)
        bans.append(round(stage.ban_s(others), 6))
    assert bans[:2] == [first_s, 2 * first_s] and bans == sorted(bans) and bans[-1] == longest_s


# ---------------------------------------------------------------- who has never answered


def test_records_of_nobody_cost_a_tenth_of_the_time() -> None:
    """Two replicas that answer within a second, and a hundred names: each call to one hangs for fifteen seconds."""
    stage, lost = Stage(dict.fromkeys(PEERS[:2], 0.2), calls=1), 0.0
    stage.list(*(PeerId(f"bogus{number}") for number in range(100)))
    while stage.now < 3000.0:
        pick = stage.take()
        if pick.peer in stage.costs:
            stage.now += 1.0
            stage.answer(pick)
        else:
            stage.now += 15.0
            lost += 15.0
            stage.failed(pick, now=stage.now, hung=True)
    assert 0.0 < lost <= 0.11 * stage.now, "some day a newcomer is tried all the same"


def called_in_vain(*, hung: bool) -> Stage:
    """A call to a replica that never answered has failed."""
    stage = even()
    stage.list(DEAD)
    stage.now = 1.0
    while (pick := stage.take()).peer != DEAD:
        pass
    stage.failed(pick, now=1.0, hung=hung)
    return stage


def test_after_a_call_in_vain_newcomers_get_copies_one_at_a_time_while_others_answer() -> None:
    stage = called_in_vain(hung=False)
    newcomers = [PeerId(f"new{number}") for number in range(3)]
    stage.list(*newcomers)
    assert {stage.take().peer for _ in range(40)} == set(PEERS)
    probe = stage.probe(num_bytes=1, now=1.0)
    assert probe is not None and probe.peer == newcomers[0]
    assert stage.probe(num_bytes=1, now=1.0) is None
    patience_s = stage.patience_s()
    stage.failed(probe, now=2.0, hung=True)
    assert stage.patience_s() == patience_s
    second = stage.probe(num_bytes=1, now=2.0)
    assert second is not None and second.peer == newcomers[1]
    stage.answer(second, 0.2)
    stage.now = 3.0
    picked = {stage.take().peer for _ in range(60)}
    assert picked == {*PEERS, newcomers[1]}, "a newcomer that has answered is one of them"
    assert stage.take(frozenset(picked)).peer == newcomers[2], "where nobody who answers is left, all are tried"


def test_a_contributor_needs_no_trial() -> None:
    stage = called_in_vain(hung=True)
    stage.list(NEW, contributors=frozenset({NEW}))
    assert NEW in {stage.take().peer for _ in range(40)}
    assert stage.probe(num_bytes=1, now=1.0) is None


# ---------------------------------------------------------------- near the end of a step


def test_a_slow_replica_gets_what_it_can_finish_in_time_and_nothing_at_the_end() -> None:
    stage = Stage(SECONDS, calls=170)
    taken = [stage.take(left=left).peer for left in reversed(range(32))]
    assert taken.count(SLOW) == 1 and taken.index(SLOW) < 16, "8 of 16 seconds"
    assert abs(taken.count(FAST) - taken.count(OTHER)) <= 1


def test_who_is_passed_over_earns_no_credit() -> None:
    stage = Stage(SECONDS, calls=170)
    for _ in range(170):
        pick = stage.take(left=0)
        assert pick.peer != SLOW
        stage.answer(pick)
    assert [stage.take().peer for _ in range(17)].count(SLOW) <= 2


def test_a_busy_fast_replica_is_waited_for_and_one_that_is_always_busy_is_not() -> None:
    stage = Stage({FAST: 1.0, SLOW: 8.0}, calls=170)
    taken = FAST
    while taken != SLOW and stage.now < 20.0:
        stage.ban_s(frozenset(), left=0)
        pick = stage.take(left=0)
        taken = pick.peer
        stage.busy(pick, retry_after_s=0.05, now=stage.now)
    assert taken == SLOW and 8.0 <= stage.now <= 10.0, "once it has been busy for as long as the slow one takes"


def test_a_replica_that_failed_is_tried_in_its_turn_and_not_because_others_are_late() -> None:
    stage = Stage(SECONDS, calls=170)
    stage.failed(stage.take(frozenset({OTHER, SLOW})), now=0.0, hung=False)
    stage.now = 4.0
    taken = [stage.take(left=0).peer for _ in range(6)]
    assert taken.count(FAST) <= 1, "one call, whatever is free"
    assert SLOW not in taken


def test_who_is_always_late_is_measured_again_at_the_beginning_of_a_step_and_more_and_more_rarely() -> None:
    stage, asked = Stage({FAST: 1.0, SLOW: 30.0}, calls=170), list[float]()
    while stage.now < 3000.0:
        pick = stage.take(left=3, opens=True)
        if pick.peer == SLOW:
            asked.append(stage.now)
        stage.answer(pick)
        stage.now += 4.0
    waits = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert asked[0] >= 480.0 and len(asked) >= 3 and waits == sorted(waits)


def test_one_that_has_become_fast_is_found_out_by_one_call() -> None:
    stage = Stage(SECONDS, calls=170)
    stage.now = 200.0
    while (first := stage.take(left=0, opens=True)).peer != SLOW:
        stage.answer(first)
    stage.now = 201.0
    stage.answer(first, 1.0)
    assert SLOW in {stage.take(left=0).peer for _ in range(3)}


def test_who_claims_to_compute_nothing_makes_nobody_else_late() -> None:
    stage = Stage({FAST: 1.0, SLOW: 8.0})
    for _ in range(20):
        pick = stage.take()
        lies = pick.peer == SLOW
        stage.answer(pick, 0.0 if lies else 1.0, rest_s=8.5 if lies else 0.5)
    assert FAST in {stage.take(left=left).peer for left in reversed(range(4))}


# ---------------------------------------------------------------- timeouts


@given(st.lists(st.floats(0.0, 1000.0), max_size=300), st.integers(0, 2000))
def test_a_limit_stays_within_its_bounds(silences: list[float], expirations: int) -> None:
    limit = TailLimit(4.0, floor_s=1.0, ceiling_s=60.0)
    for silence_s in silences:
        limit.add(silence_s)
    for _ in range(expirations):
        limit.expired()
    assert 1.0 <= limit.seconds <= 60.0


@pytest.mark.parametrize(
    ("times", "floor_s", "ceiling_s", "silences", "seconds"),
    [
        (4.0, 1.0, 60.0, [], 5.0),  # before any observation it is generous
        (4.0, 1.0, 3.0, [], 3.0),
        (4.0, 1.0, 60.0, [i / 100 for i in range(1, 101)], 4 * 0.95),
        (4.0, 1.0, 60.0, [0.5] * 95 + [50.0] * 5, 2.0),  # a rare stall does not stretch it
        (4.0, 1.0, 60.0, [10.0] * 500 + [0.5] * 128, 2.0),  # the window slides
        (8.0, 15.0, 3600.0, [], 75.0),
        (8.0, 15.0, 3600.0, [4.0] * 122 + [500.0] * 6, 32.0),
        (8.0, 15.0, 3600.0, [0.5] * 128, 15.0),
    ],
)
def test_a_limit_is_so_many_times_the_tail_and_never_less_than_its_floor(
    times: float, floor_s: float, ceiling_s: float, silences: list[float], seconds: float
) -> None:
    limit = TailLimit(times, floor_s=floor_s, ceiling_s=ceiling_s)
    for silence_s in silences:
        limit.add(silence_s)
    assert limit.seconds == pytest.approx(seconds)


def test_a_limit_doubles_until_somebody_answers() -> None:
    limit = TailLimit(4.0, floor_s=1.0, ceiling_s=60.0)
    limit.add(0.5)
    seen = []
    for _ in range(6):
        limit.expired()
        seen.append(limit.seconds)
    assert seen == [4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    limit.add(0.5)
    assert limit.seconds == 2.0


def test_silences_and_calls_double_apart() -> None:
    router = Router(Timers(suspect_s=1.0), stages=8)
    router.silence.add(0.5)
    router.call.add(1.0)
    router.call.expired()
    assert (router.patience_s(), router.call_s()) == (2.0, 32.0)
    router.silence.expired()
    assert (router.patience_s(), router.call_s()) == (4.0, 32.0)


def test_who_calls_the_last_stage_leaves_it_first() -> None:
    limits = [Router(Timers(), stages=stages).call_s() for stages in (1, 2, 3)]
    assert limits == sorted(set(limits)) and limits[0] >= Timers().long_silence_s, "before anything was observed"


# ---------------------------------------------------------------- anything at all

KINDS = ("done", "busy", "cancelled", "fail", "hang", "gone", "leave", "come")
operations = st.lists(
    st.tuples(st.sampled_from(("pick", "pick", "pick", *KINDS)), st.integers(0, 30), st.floats(0.0, 3.0)), max_size=80
)


def replay(script: list[tuple[str, int, float]], seconds: list[float], left: int | None) -> list[str]:
    """Run any script against a router; check every decision against what a caller may rely on.

    left: of the step at each pick. With None, whoever may be asked is asked, so no pick fails while one is free.
    """
    stage = Stage(seconds)
    everybody = names(len(seconds))
    listed = set(everybody)
    opened, trace = list[Pick](), list[str]()
    echoes, dead = set[Pick](), set[Pick]()  # open when the ban of their peer began; of an incarnation that left
    busy_until, banned_until = dict[PeerId, float](), dict[PeerId, float]()  # at least
    for kind, choice, seconds_on in script:
        stage.now = now = stage.now + seconds_on / 3
        if kind == "pick":
            exclude = frozenset(peer for i, peer in enumerate(everybody) if choice >> i & 1)
            allowed = {p for p in listed - exclude if max(busy_until.get(p, now), banned_until.get(p, now)) <= now}
            try:
                pick = stage.take(exclude, left, opens=not choice)
            except NoReplica as error:
                assert now < stage.next_chance(now) <= now + TIMERS.settle_s
                trace.append(str(error))
                continue
            assert pick.peer in allowed
            opened.append(pick)
            trace.append(pick.peer)
        elif kind in ("gone", "leave", "come"):
            peer = everybody[choice % len(everybody)]
            if kind == "gone":
                stage.gone(peer)
            listed = listed | {peer} if kind == "come" else listed - {peer}
            stage.update(dict.fromkeys(sorted(listed), choice % 3))
            if kind != "come":
                busy_until.pop(peer, None)
                banned_until.pop(peer, None)
                dead |= {pick for pick in opened if pick.peer == peer}
        elif opened:
            pick = opened.pop(choice % len(opened))
            if kind == "done":
                stage.answer(pick)
                if pick not in dead:
                    banned_until.pop(pick.peer, None)
            elif kind == "busy":
                stage.busy(pick, retry_after_s=seconds_on, now=now)
                if pick not in dead:
                    busy_until[pick.peer] = now + seconds_on
            elif kind == "cancelled":
                stage.cancelled(pick)
            else:
                stage.failed(pick, now=now, hung=kind == "hang")
                if pick not in echoes | dead:
                    banned_until[pick.peer] = now + TIMERS.ban_s
                    echoes |= {other for other in opened if other.peer == pick.peer}
    for pick in opened:
        stage.cancelled(pick)
    if listed:
        assert stage.ban_s(frozenset(), left) <= 80.0, (
            "asking again when told to ends with one, whether all are late or not"
        )
    return trace


@given(operations, st.lists(st.floats(0.01, 20.0), min_size=1, max_size=5), st.none() | st.integers(0, 40))
def test_any_script_is_safe_and_replays_equal(
    script: list[tuple[str, int, float]], seconds: list[float], left: int | None
) -> None:
    assert replay(script, seconds, left) == replay(script, seconds, left)
