"""How fast replicas are, as their mates measure it: shares of counts tell, and a liar is outvoted."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.directory import MAX_ESTIMATES, MAX_RATE, Estimate
from swarmnet.ids import PeerId
from swarmnet.peer.rates import Rates, mark, measured


def stage_of(speeds: dict[str, float], steps: int = 30, work: int = 64) -> dict[PeerId, tuple[Estimate, ...]]:
    """What replicas of these speeds (microbatches per second) announce after steps of `work` microbatches a speed."""
    peers = {PeerId(name): speed for name, speed in speeds.items()}
    rates = {peer: Rates(peer) for peer in peers}
    computed = dict.fromkeys(peers, (0, 0.0))
    for _ in range(steps):
        counted = {peer: round(work * speed / max(peers.values())) for peer, speed in peers.items()}
        for peer, found in rates.items():
            before, before_s = computed[peer]
            computed[peer] = before + counted[peer], before_s + counted[peer] / peers[peer]
            found.step(counted, peers, computed=computed[peer])
    return {peer: found.estimates(math.inf) for peer, found in rates.items()}


@pytest.mark.parametrize("speeds", [{"a": 4.0, "b": 2.0, "c": 1.0}, {"a": 2.5}])
def test_shares_of_what_is_counted_tell_how_fast_mates_are_and_a_lonely_one_is_believed(speeds: dict) -> None:
    assert {peer: round(rate, 1) for peer, rate in measured(stage_of(speeds)).items()} == speeds


def test_who_is_there_and_counts_nothing_is_slow() -> None:
    idle, busy = PeerId("idle"), PeerId("busy")
    rates = Rates(busy)
    for step in range(1, 30):
        rates.step({busy: 32}, [busy, idle], computed=(32 * step, 8.0 * step))
    said = {busy: rates.estimates(math.inf), idle: (Estimate(mark(idle), MAX_RATE), Estimate(mark(busy), 1))}
    assert measured(said)[idle] < 0.05


def test_a_narrow_line_bounds_the_rate() -> None:
    me = PeerId("me")
    rates = Rates(me)
    rates.step({me: 8}, [me], computed=(8, 2.0))
    rates.step({me: 8}, [me], computed=(16, 4.0))
    assert measured({me: rates.estimates(math.inf)}) == {me: 4.0}
    assert measured({me: rates.estimates(1.5)}) == {me: 1.5}


def test_who_has_computed_nothing_says_nothing() -> None:
    rates, other = Rates(PeerId("new")), PeerId("other")
    rates.step({other: 8}, [other], computed=(0, 0.0))
    assert rates.estimates(math.inf) == () and measured({PeerId("new"): ()}) == {}


def test_of_many_mates_a_record_names_a_bounded_number_and_all_together_name_everybody() -> None:
    said = stage_of({f"peer-{number}": 2.0 for number in range(60)}, steps=5)
    assert {len(estimates) for estimates in said.values()} == {MAX_ESTIMATES}
    assert measured(said).keys() == said.keys()


@given(st.lists(st.floats(0.5, 8.0), min_size=3, max_size=7), st.data())
def test_a_liar_among_many_changes_no_rate_by_much(speeds: list[float], data: st.DataObject) -> None:
    """It says anything of itself and of others; what its mates measured bounds it."""
    said = stage_of({f"peer-{number}": speed for number, speed in enumerate(speeds)}, steps=12)
    liar = data.draw(st.sampled_from(sorted(said)))
    lies = tuple(Estimate(mark(peer), data.draw(st.integers(0, MAX_RATE))) for peer in said)
    found = measured(said | {liar: lies})
    for peer in said:
        honest = [said[other] for other in said if other not in (peer, liar)]
        words = [each.rate / 1000 for estimates in honest for each in estimates if each.mark == mark(peer)]
        assert min(words) / 1.5 <= found[peer] * 1.001 and found[peer] <= max(words) * 1.501


@given(st.floats(0.5, 8.0), st.floats(0.5, 8.0), st.data())
def test_of_two_a_liar_only_makes_the_stage_look_slower(honest: float, lying: float, data: st.DataObject) -> None:
    said = stage_of({"honest": honest, "liar": lying}, steps=12)
    (own,), (word,) = ([e.rate / 1000 for e in said[PeerId("honest")] if e.mark == mark(peer)] for peer in said)
    lies = tuple(Estimate(mark(peer), data.draw(st.integers(0, MAX_RATE))) for peer in said)
    found = measured(said | {PeerId("liar"): lies})
    assert found[PeerId("honest")] <= own and found[PeerId("liar")] <= word * 1.501


def test_a_step_that_somebody_came_into_says_nothing_of_it() -> None:
    me, late = PeerId("me"), PeerId("late")
    rates = Rates(me)
    rates.step({me: 8}, [me], computed=(8, 4.0))
    rates.step({me: 7, late: 1}, [me, late], computed=(15, 7.5))
    assert [each.mark for each in rates.estimates(math.inf)] == [mark(me)]
    for step in range(1, 20):
        rates.step({me: 4, late: 4}, [me, late], computed=(15 + 4 * step, 7.5 + 2 * step))
    assert {each.rate for each in rates.estimates(math.inf)} == {2000}


def test_coarse_counts_do_not_make_equal_replicas_unequal() -> None:
    counted = {PeerId("a"): 3, PeerId("b"): 3, PeerId("c"): 2}
    rates = {peer: Rates(peer) for peer in counted}
    for step in range(1, 20):
        for peer, found in rates.items():
            found.step(counted, counted, computed=(step * counted[peer], step * counted[peer] / 2.0))
    assert measured({peer: found.estimates(math.inf) for peer, found in rates.items()}) == dict.fromkeys(counted, 2.0)
