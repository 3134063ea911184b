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


def test_shares_of_what_is_counted_tell_how_fast_mates_are() -> None:
    found = measured(stage_of({"a": 4.0, "b": 2.0, "c": 1.0}))
    assert {peer: round(rate, 1) for peer, rate in found.items()} == {"a": 4.0, "b": 2.0, "c": 1.0}


def test_a_lonely_replica_is_believed() -> None:
    assert measured(stage_of({"a": 2.5})) == {"a": 2.5}


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
    assert measured({me: rates.estimates(math.inf)}) == {me: 4.0}
    assert measured({me: rates.estimates(1.5)}) == {me: 1.5}


def test_who_has_computed_nothing_says_nothing() -> None:
    rates = Rates(PeerId("new"))
    assert rates.estimates(math.inf) == ()
    rates.step({PeerId("other"): 8}, [PeerId("other")], computed=(0, 0.0))
    assert rates.estimates(math.inf) == () and measured({PeerId("new"): ()}) == {}


def test_of_many_mates_a_record_names_a_bounded_number_and_all_together_name_everybody() -> None:
    said = stage_of({f"peer-{number}": 2.0 for number in range(60)}, steps=5)
    assert {len(estimates) for estimates in said.values()} == {MAX_ESTIMATES}
    assert measured(said).keys() == said.keys()


@given(st.lists(st.floats(0.5, 8.0), min_size=3, max_size=7), st.data())
def test_one_liar_among_three_or_more_changes_no_rate_by_much(speeds: list[float], data: st.DataObject) -> None:
    """It says anything of itself and of others: of nobody but the others' median counts."""
    said = stage_of({f"peer-{number}": speed for number, speed in enumerate(speeds)}, steps=12)
    honest = measured(said)
    liar = data.draw(st.sampled_from(sorted(said)))
    lies = tuple(Estimate(mark(peer), data.draw(st.integers(0, MAX_RATE))) for peer in said)
    found = measured(said | {liar: lies})
    assert found[liar] == pytest.approx(honest[liar])
    for peer in said:
        words = [
            each.rate / 1000
            for by, es in said.items()
            if by not in (peer, liar)
            for each in es
            if each.mark == mark(peer)
        ]
        # Of three one hears two, so the lie moves the median; of more it does not leave what honest mates say.
        if len(said) > 3:
            assert min(words) <= found[peer] <= max(words)
