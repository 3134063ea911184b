"""Where a newcomer goes, and which members move: never the last of a stage, a bounded number, all by one matching."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from benchmark_modules import printed_by
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnet.ids import PeerId
from swarmnet.peer.placement import Choice, Serving, choose
from swarmnet.peer.rebalance import Picture, Promises, Rebalancer, RecentMoves, Rules

RULES = Rules()


def replica(name: str, stage: int, **more) -> Serving:
    return Serving(PeerId(name), stage, **{"has_state": True, "may_move": True, **more})


def counts(num_stages: int, serving: Iterable[Serving]) -> list[int]:
    """Replicas of each stage that serve it and do not leave."""
    found = Counter(each.stage for each in serving if each.synced and not each.leaving)
    return [found[stage] for stage in range(num_stages)]


@st.composite
def swarms(draw: st.DrawFn, *, moving: bool = False) -> tuple[int, list[Serving]]:
    """Stages, and who serves them; moving: some are measured, and announce that they go elsewhere."""
    stages = draw(st.integers(1 + moving, 6 - moving))
    anywhere = st.integers(0, stages - 1)

    def fields() -> dict[str, object]:
        if not moving:
            return {"has_state": draw(st.booleans()), "leaving": draw(st.booleans()), "load": draw(st.floats(0, 4))}
        return {
            "rate": draw(st.none() | st.floats(0.1, 10.0)),
            "going": (going := draw(st.none() | anywhere)),
            "surely": going is not None and draw(st.booleans()),
            "synced": draw(st.sampled_from([True, True, True, False])),
            "leaving": draw(st.sampled_from([False, False, False, True])),
            "may_move": draw(st.sampled_from([True, True, False])),
        }

    many = range(draw(st.integers(int(moving), 30)))
    return stages, [replica(f"p{number}", draw(anywhere), **fields()) for number in many]


# ---------------------------------------------------------------- newcomers

peers = st.integers(0, 10**6).map(lambda number: PeerId(f"peer-{number}"))
newcomers = st.lists(peers, min_size=1, max_size=20, unique=True)


@given(swarms(), peers)
def test_a_newcomer_goes_where_the_fewest_are(swarm: tuple[int, list[Serving]], me: PeerId) -> None:
    num_stages, serving = swarm
    chosen = choose(me, range(num_stages), serving)
    assert counts(num_stages, serving)[chosen.stage] == min(counts(num_stages, serving))
    assert chosen.reason and chosen == choose(me, range(num_stages), serving[::-1])
    for choosing in (True, False):  # what I announced before does not count
        mine = [Serving(me, stage, has_state=True, choosing=choosing) for stage in range(num_stages)]
        assert choose(me, range(num_stages), [*mine, *serving]) == chosen


@given(swarms(), newcomers)
def test_newcomers_even_out_one_after_the_other_and_at_the_same_moment(
    swarm: tuple[int, list[Serving]], joining: list[PeerId]
) -> None:
    num_stages, serving = swarm
    in_turn = list(serving)
    for me in joining:
        before = counts(num_stages, in_turn)
        in_turn.append(Serving(me, choose(me, range(num_stages), in_turn).stage, has_state=False))
        after = counts(num_stages, in_turn)
        assert min(after) > min(before) or before.count(min(before)) > after.count(min(after))
    # All see each other choosing, nobody hears what the others took: as even as one after the other.
    at_once = [*serving, *(Serving(me, 0, has_state=False, choosing=True) for me in joining)]
    taken = [Serving(me, choose(me, range(num_stages), at_once).stage, has_state=False) for me in joining]
    assert sorted(counts(num_stages, [*serving, *taken])) == sorted(counts(num_stages, in_turn))


@given(swarms(), peers, st.sets(st.integers(0, 5)))
def test_the_only_copy_of_a_state_goes_where_it_belongs(
    swarm: tuple[int, list[Serving]], me: PeerId, held: set[int]
) -> None:
    num_stages, serving = swarm
    held = {stage for stage in held if stage < num_stages}
    lost = held - {each.stage for each in serving if each.has_state}
    chosen = choose(me, range(num_stages), serving, held=held).stage
    assert chosen in lost if lost else counts(num_stages, serving)[chosen] == min(counts(num_stages, serving))


@given(st.integers(2, 6), peers)
def test_many_lots_fall_on_every_stage(num_stages: int, me: PeerId) -> None:
    drawn = {choose(PeerId(f"{me}-{number}"), range(num_stages), []).stage for number in range(200)}
    assert drawn == set(range(num_stages))


A, B = replica("a", 0), replica("b", 1)


@pytest.mark.parametrize(
    ("there", "held", "choice"),
    [
        ([A], (), Choice(1, "no peer serves stage 1")),
        ([A, B, replica("c", 0)], (), Choice(1, "stage 1 has the fewest replicas, 1")),
        (
            [A, replica("b", 1, load=2.0)],
            (),
            Choice(1, "no stage has fewer replicas than its 1, and it has most to do"),
        ),
        ([A, B], {0}, Choice(0, "its checkpoint is here, and no stage has fewer replicas than its 1")),
        (
            [A, replica("b", 0, has_state=False)],
            {1},
            Choice(1, "its checkpoint is here, and no other peer has the state of stage 1"),
        ),
        ([replica("a", 0, leaving=True), B], (), Choice(0, "no peer serves stage 0")),
        ([A, B], (), "drawn from 2 stages with 1 replica each"),
    ],
)
def test_the_reasons(there: list[Serving], held: set[int], choice: Choice | str) -> None:
    found = choose(PeerId("me"), range(2), there, held=held)
    assert choice in (found, found.reason)
    assert choose(PeerId("me"), range(1), [A]) == Choice(0, "the only stage")


def test_rates_count_and_not_heads() -> None:
    """Two slow replicas are less than one fast one; of whom nothing is measured the stage's median is believed."""
    slow = [replica("a", 0, rate=0.5), replica("b", 0, rate=0.5)]
    fast = [replica("c", 1, rate=4.0)]
    assert choose(PeerId("me"), range(2), [*slow, *fast]).stage == 0
    assert choose(PeerId("me"), range(2), [*slow, replica("d", 0), *fast]).stage == 0
    assert choose(PeerId("me"), range(2), [replica("a", 0, rate=4.0), replica("d", 0), *fast]).stage == 1


def test_who_is_on_the_way_counts_where_it_goes() -> None:
    there = [replica("a", 0), replica("b", 0, going=1, surely=True), replica("c", 2)]
    assert choose(PeerId("me"), range(3), [*there, replica("d", 2)]).stage in (0, 1)
    assert choose(PeerId("me"), range(3), [*there, replica("d", 0)]).stage in (1, 2)


def test_a_stage_that_does_not_fit_is_not_taken_however_much_it_is_missed() -> None:
    there = [replica("a", 1), replica("b", 1), replica("c", 2)]
    assert choose(PeerId("me"), [1, 2], there) == Choice(2, "stage 2 has the fewest replicas, 1")
    assert choose(PeerId("me"), [1], there, held={0}).stage == 1
    moving = replica("d", 0, going=2, surely=True)
    assert choose(PeerId("me"), [1, 2], [*there, moving, replica("e", 2)]).stage == 1


# ---------------------------------------------------------------- moves


def swarm(*heads: int) -> list[Serving]:
    return [replica(f"p{stage}.{number}", stage) for stage, count in enumerate(heads) for number in range(count)]


@settings(max_examples=150)
@given(swarms(moving=True), st.randoms())
def test_everybody_computes_the_same_matching_and_it_empties_no_stage(
    drawn: tuple[int, list[Serving]], rng: st.Random
) -> None:
    stages, serving = drawn
    picture = Picture(stages, serving, RULES)
    shuffled = list(serving)
    rng.shuffle(shuffled)
    assert Picture(stages, shuffled, RULES).winners == picture.winners
    assert Picture(stages, shuffled, RULES).worth == picture.worth
    by = {each.peer: each for each in serving}
    left = Counter(by[peer].stage for peer in picture.winners)
    for peer, to in picture.winners.items():
        mover = by[peer]
        # Only who serves, may move and has announced just that.
        assert mover.synced and mover.may_move and not mover.leaving and not mover.surely
        assert mover.going == to != mover.stage
    for stage, count in left.items():
        there = [each for each in serving if each.stage == stage and each.synced]
        staying = [each for each in there if not each.leaving and not (each.surely and each.going is not None)]
        assert len(staying) - count >= 1
    moving = sum(each.surely and each.going is not None for each in serving)
    assert len(picture.winners) + moving <= max(1, moving, int(RULES.share * len(serving)))


@given(swarms(moving=True))
def test_a_wish_helps_the_slowest_stage_and_fits(drawn: tuple[int, list[Serving]]) -> None:
    stages, serving = drawn
    picture = Picture(stages, serving, RULES)
    for peer, (stage, rate) in picture.may.items():
        to = picture.wish(peer, range(stages))
        assert picture.wish(peer, ()) is None
        if to is not None:
            assert picture.rates[to] == min(picture.rates) < picture.rates[stage] - rate


Measured = Callable[[int, int], float]
"""The rate of a replica of a stage, by how many replicas that has."""


class Room:
    """Rebalancers that hear each other after `late` seconds, and arrive `fetch_s` after they have won."""

    def __init__(
        self, serving: list[Serving], stages: int, *, late: int = 2, fetch_s: int = 10, measured: Measured | None = None
    ) -> None:
        self.measured = measured
        self.stages, self.late, self.fetch_s = stages, late, fetch_s
        self.now, self.moves = 0, 0
        self.serving = {each.peer: each for each in serving}
        self.seen: list[dict[PeerId, Serving]] = [dict(self.serving)] * (late + 1)
        self.recent_moves = {each.peer: RecentMoves() for each in serving}
        self.members = {each.peer: self.newly(each.peer) for each in serving if each.may_move}
        self.promises = {peer: Promises(RULES) for peer in self.members}
        self.arrive: dict[PeerId, int] = {}

    def newly(self, peer: PeerId) -> Rebalancer:
        return Rebalancer(peer, RULES, now=float(self.now), recent_moves=self.recent_moves[peer])

    def lose(self, *peers: PeerId) -> None:
        for peer in peers:
            self.members.pop(peer, None)
            del self.serving[peer]

    def counts(self) -> list[int]:
        return counts(self.stages, self.serving.values())

    def play(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1
            self.seen = [*self.seen[1:], dict(self.serving)]
            heard = [each for peer, each in self.seen[0].items() if peer in self.serving]
            if self.measured is not None:
                there, measured = Counter(each.stage for each in heard), self.measured
                heard = [replace(each, rate=measured(each.stage, there[each.stage])) for each in heard]
            for peer, member in self.members.items():
                picture = Picture(self.stages, self.promises[peer].believed(heard, self.now), RULES)
                intent = member.decide(picture, range(self.stages), now=float(self.now))
                if peer in self.arrive:
                    if self.now >= self.arrive[peer]:
                        assert intent.to is not None
                        self.serving[peer] = replica(peer, intent.to)
                        self.members[peer] = self.newly(peer)
                        del self.arrive[peer]
                        self.moves += 1
                    continue
                self.serving[peer] = replace(self.serving[peer], going=intent.to, surely=intent.surely)
                if intent.surely:
                    self.arrive[peer] = self.now + self.fetch_s


def test_a_stage_that_lost_nearly_all_is_helped_within_a_minute() -> None:
    room = Room(swarm(6, 6, 6, 6), 4)
    room.play(70)
    assert room.moves == 0 and room.counts() == [6, 6, 6, 6]
    room.lose(*(PeerId(f"p1.{number}") for number in range(5)))
    room.play(40)
    assert room.counts()[1] >= 3
    room.play(200)
    assert sorted(room.counts()) == [4, 5, 5, 5] and room.moves <= 5


def test_replicas_do_not_go_to_and_fro_where_rates_depend_on_how_many_there_are() -> None:
    """Of 3 and 2 replicas the smaller stage always looks slower, also after a move."""
    room = Room(swarm(3, 2), 2, measured=lambda stage, count: float(count))
    room.play(600)
    assert room.moves == 1
    # A loss is made up for all the same.
    fuller = room.counts().index(3)
    room.lose(*[peer for peer, each in room.serving.items() if each.stage != fuller][:1])
    room.play(120)
    assert room.counts() == [2, 2]


def test_a_cycle_of_stages_is_ended_as_well() -> None:
    slow = itertools.cycle(range(3))
    room = Room(swarm(3, 3, 3), 3, measured=lambda stage, count: 1.0)
    for _ in range(5):
        slowest = next(slow)
        room.measured = lambda stage, count, slowest=slowest: 0.4 if stage == slowest else 1.0
        room.play(180)
    assert room.moves <= 4


def test_a_move_is_remembered_for_a_while() -> None:
    recent_moves, one, other = RecentMoves(), PeerId("a"), PeerId("b")
    assert not recent_moves.since({one: 0, other: 1}, 0.0, 100.0)
    assert not recent_moves.since({other: 1}, 10.0, 100.0)  # it is on its way
    assert recent_moves.since({one: 2, other: 1}, 20.0, 100.0) == {2}
    assert recent_moves.since({one: 2}, 119.0, 100.0) == {2}
    assert not recent_moves.since({one: 2}, 120.0, 100.0)


def test_liars_that_go_for_ever_block_no_rescue() -> None:
    """Five say that they go to the stage that lost nearly all; three say that they have gone and fetch its state."""
    liars = [replica(f"liar{number}", 0, going=1, surely=number % 2 == 0, may_move=True) for number in range(5)]
    liars += [replica(f"thief{number}", 1, synced=False, has_state=False) for number in range(3)]
    room = Room([*swarm(8, 8, 8), *liars], 3)
    for liar in liars:
        room.members.pop(liar.peer)
    room.lose(*(PeerId(f"p1.{number}") for number in range(8)))
    room.play(60 + int(RULES.promise_s))
    honest = [each for each in room.serving.values() if each.stage == 1 and each.peer.startswith("p") and each.synced]
    assert len(honest) >= 3
    # They are not believed a second time before long.
    room.play(200)
    assert room.counts()[1] >= 5


def test_a_promise_counts_for_a_while_and_not_again_soon() -> None:
    promises, serves = Promises(RULES), replica("a", 0)
    says = replace(serves, going=1, surely=True)
    assert promises.believed([says], 0.0) == [says]
    assert promises.believed([says], RULES.promise_s) == [says]
    assert promises.believed([says], RULES.promise_s + 1) == [serves]
    assert promises.believed([replace(says, going=2)], RULES.promise_s + 2) == [serves]
    later = RULES.promise_s + RULES.forget_periods * RULES.period_s + 1
    assert promises.believed([says], later) == [says]


def test_a_promise_that_came_true_costs_nothing() -> None:
    promises = Promises(RULES)
    for begin in range(0, 1000, 100):
        says = replica("a", begin // 100 % 2, going=1 - begin // 100 % 2, surely=True)
        assert promises.believed([says], begin) == [says] and promises.believed([says], begin + 90) == [says]
        there = replica("a", 1 - begin // 100 % 2)
        assert promises.believed([there], begin + 95) == [there]


def test_a_move_that_gains_little_for_long_fetching_is_not_made() -> None:
    few = swarm(3, 2)
    assert Picture(2, [*few, replica("x", 0)], RULES).worth
    slow = replace(RULES, fetch_s=2 * RULES.stay_s)
    assert not Picture(2, [*few, replica("x", 0)], slow).worth


def test_who_is_paused_neither_counts_nor_moves_nor_holds_others_up() -> None:
    idle = [replica(f"idle.{number}", stage, leaving=True, paused=True) for number in range(3) for stage in (0, 1)]
    with_idle = Picture(2, [*swarm(4, 1), *idle], RULES)
    assert with_idle.worth == Picture(2, swarm(4, 1), RULES).worth and with_idle.worth
    assert with_idle.rates == Picture(2, swarm(4, 1), RULES).rates


def test_a_move_that_failed_is_not_tried_at_once() -> None:
    member = Rebalancer(PeerId("p0.0"), RULES, now=0.0)
    picture = Picture(2, swarm(3, 1), RULES)
    assert member.decide(picture, range(2), now=RULES.period_s).to == 1
    member.stay(now=RULES.period_s)
    assert member.decide(picture, range(2), now=2 * RULES.period_s - 1).to is None
    assert member.decide(picture, range(2), now=2 * RULES.period_s).to == 1


# ---------------------------------------------------------------- the benchmark


def test_every_rule_plays_the_trace_and_what_others_read_is_written(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    out = printed_by("rebalance", "--hours 1 --peers 20 --stages 2 --json", file)
    found = json.loads(file.read_text("utf-8"))
    assert {"overall", "last_hour", "swarm_t60", "swarm_t300", "gwtf", "moves_per_peer_hour", "back_s"} == found.keys()
    assert 0 < found["overall"] <= 1.001 and "gwtf" in out
