"""Who is alive, who may be evicted, who keeps: rule 12 and 13's arithmetic."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.ids import Chain, PeerId
from swarmnet.manifest.timers import Timers
from swarmnet.messages import Heartbeat, Stamp
from swarmnet.step.graph import keeper_rank
from swarmnet.step.view import View

TIMERS = Timers()
ME, B, C, D, E = (PeerId(name) for name in "ABCDE")
CHAIN = Chain("0" * 64)


def beat(*, stage=0, version=0, incarnation=1, synced=True, **more):
    return Heartbeat(Stamp(version, stage, CHAIN), incarnation, synced, None, **more)


def view_of(*mates: PeerId, at: float = 0.0) -> View:
    view = View(ME, 0, TIMERS)
    for mate in mates:
        view.hear(mate, beat(), now=at)
    return view


def keep_hearing(view: View, *mates: PeerId, until: float) -> None:
    now = 0.0
    while now < until:
        now += 0.5
        for mate in mates:
            view.hear(mate, beat(), now=now)


def test_hear_says_who_is_new_revived_or_reborn():
    view = view_of()
    assert view.hear(B, beat(), now=0.0)
    assert not view.hear(B, beat(), now=0.5)
    assert view.hear(B, beat(incarnation=2), now=1.0)
    view.gone(B, now=1.2)
    assert view.hear(B, beat(incarnation=3), now=1.5)


def test_last_words_do_not_revive_the_dead_but_a_wrong_verdict_is_undone():
    view = view_of(B)
    view.gone(B, now=1.0)
    assert not view.hear(B, beat(), now=1.1) and not view.alive(B, now=1.1)
    assert view.hear(B, beat(), now=4.1) and view.alive(B, now=4.1)


def test_silence_beyond_the_limit_is_suspicion_and_a_word_ends_it():
    view = view_of(B)
    assert view.alive(B, now=3.0) and not view.alive(B, now=3.1)
    view.touch(B, now=3.2)
    assert view.alive(B, now=3.3)


def test_the_limit_follows_the_longest_pause_and_is_bounded():
    view = view_of(B)
    view.hear(B, beat(), now=2.0)
    assert view.silence_limit(view.get(B)) == pytest.approx(8.0)
    view.hear(B, beat(), now=14.0)
    assert view.silence_limit(view.get(B)) == TIMERS.long_silence_s


def test_the_longest_pause_fades():
    view = view_of(B)
    view.hear(B, beat(), now=2.0)
    for number in range(60):
        view.hear(B, beat(), now=2.5 + number / 2)
    assert view.silence_limit(view.get(B)) == TIMERS.suspect_s


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=30))
def test_the_limit_is_always_between_its_bounds(pauses):
    view, now = view_of(B), 0.0
    for pause in pauses:
        now += pause
        view.hear(B, beat(), now=now)
        assert TIMERS.suspect_s <= view.silence_limit(view.get(B)) <= TIMERS.long_silence_s


def test_with_two_replicas_silence_is_not_death_until_long_silence():
    view = view_of(B)
    assert not view.lost(B, 0, now=14.9)
    assert view.lost(B, 0, now=15.1)


def test_a_majority_that_still_hears_each_other_evicts_the_silent_one():
    view = view_of(B, C)
    keep_hearing(view, C, until=3.5)
    assert view.lost(B, 0, now=3.6)
    assert not view.lost(C, 0, now=3.6)


def test_half_of_four_is_no_majority():
    view = view_of(B, C, D)
    keep_hearing(view, D, until=4.0)
    assert not view.lost(B, 0, now=4.1) and not view.lost(C, 0, now=4.1)
    assert view.lost(B, 0, now=15.1)


def test_silent_strangers_do_not_outnumber_the_voters_that_are_heard():
    strangers = [PeerId(f"stranger {number}") for number in range(9)]
    view = view_of(B, C, *strangers)
    keep_hearing(view, C, until=3.5)
    assert not view.lost(B, 0, now=3.6), "before the first commit all replicas in sync have a vote"
    view.voters = {ME, B, C}
    assert view.lost(B, 0, now=3.6) and view.lost(strangers[0], 0, now=3.6)


def test_definite_death_needs_no_waiting():
    view = view_of(B)
    assert view.gone(B, now=0.1) and not view.gone(B, now=0.2)
    assert view.lost(B, 0, now=0.2)


def test_who_is_unknown_is_lost():
    assert view_of().lost(B, 0, now=0.0)


def test_live_lists_synced_replicas_of_a_stage_without_me_in_mine():
    view = view_of(C, B)
    view.hear(ME, beat(), now=0.0)
    view.hear(D, beat(synced=False), now=0.0)
    view.hear(ME, beat(stage=1), now=0.0)
    assert view.live(0, now=0.1) == [B, C]
    assert view.live(1, now=0.1) == [ME]


def test_everybody_computes_the_same_order_of_keepers():
    orders = []
    for me in (ME, B, C):
        view = View(me, 0, TIMERS)
        for mate in {ME, B, C} - {me}:
            view.hear(mate, beat(), now=0.0)
        orders.append(view.keeper_order(CHAIN, now=0.1))
    assert orders[0] == orders[1] == orders[2] == sorted("ABC", key=lambda p: keeper_rank(CHAIN, 0, p))


def test_the_order_changes_with_the_chain():
    firsts = {min((ME, B, C, D), key=lambda p: keeper_rank(Chain(f"{n:064d}"), 0, p)) for n in range(40)}
    assert firsts == {ME, B, C, D}


def test_a_peer_with_two_stages_is_heard_in_both_until_it_begins_anew():
    view = view_of()

    def versions() -> list[int]:
        return sorted(seen.version for seen in view.lives(B))

    assert versions() == []
    view.hear(B, beat(stage=0, version=1), now=0.0)
    view.hear(B, beat(stage=3, version=2), now=0.1)
    assert versions() == [1, 2]
    view.hear(B, beat(stage=1, version=3, incarnation=2), now=0.3)
    assert versions() == [3], "it serves the other stages no more"
    view.gone(B, now=0.5)
    assert versions() == [], "who died begins anew"


def test_what_was_silent_for_long_is_forgotten():
    view = view_of(B)
    view.forget_silent(now=150.0)
    assert view.get(B) is not None
    view.forget_silent(now=150.1)
    assert view.get(B) is None
    assert view.hear(B, beat(), now=151.0)


def test_who_answers_my_dialling_is_reached_whatever_it_says_and_ages():
    view = view_of()
    assert view.reach_age(B, now=1.0) == math.inf and view.reach_age(ME, now=1.0) == 0.0
    view.hear(B, beat(), now=1.0)
    assert view.reach_age(B, now=1.0) == math.inf, "to be heard is not to be reached"
    view.reached(B, now=2.0)
    assert view.reach_age(B, now=3.5) == 1.5
    view.forget_all()
    assert view.reach_age(B, now=3.5) == 1.5, "a restart of the run breaks no line"
    view.gone(B, now=4.0)
    assert view.reach_age(B, now=4.0) == math.inf


def test_a_mate_that_is_heard_and_never_answers_is_unreached():
    view = view_of(B, C)
    keep_hearing(view, B, C, until=1.5)
    assert view.unreached(now=1.5) == (), "it may still answer"
    view.reached(B, now=1.5)
    keep_hearing(view, B, C, until=2.0)
    assert view.unreached(now=2.0) == (C,)
    view.reached(C, now=2.1)
    assert view.unreached(now=2.2) == ()
    assert view.unreached(now=30.0) == (B, C), "both are silent, and may live"
    view.gone(C, now=30.0)
    assert view.unreached(now=30.0) == (B,), "the dead have no line"


def test_in_a_stage_that_has_grown_large_who_is_not_called_any_more_is_not_unreached():
    view = view_of(B, C)
    for peer in (B, C):
        view.reached(peer, now=0.0)
    view.sparse, view.beat_s = frozenset({0}), 2.5
    view.hear_only([B], now=0.0)
    keep_hearing(view, B, C, until=3.5)
    assert view.unreached(now=3.5) == (B,)


def test_with_quick_heartbeats_not_each_asks_for_an_answer():
    view = View(ME, 0, Timers(suspect_s=1.8))
    view.hear(B, beat(), now=0.0)
    view.reached(B, now=0.0)
    view.hear(B, beat(), now=0.6)
    assert view.unreached(now=0.85) == () and view.unreached(now=0.95) == (B,)


def test_who_was_reached_is_forgotten_in_the_end_and_identities_cost_no_memory():
    view = view_of()
    view.reached(B, now=0.0)
    view.forget_silent(now=150.0)
    assert view.reach_age(B, now=150.0) == 150.0
    view.forget_silent(now=150.1)
    assert view.reach_age(B, now=150.1) == math.inf
    view.reached(C, now=151.0)
    view.reached(D, now=151.0)
    view.reached(C, now=152.0)
    for number in range(4095):
        view.reached(PeerId(f"stranger {number}"), now=153.0)
    assert view.reach_age(D, now=153.0) == math.inf and view.reach_age(C, now=153.0) == 1.0


def test_whom_most_others_two_at_least_go_on_without_is_shunned():
    view = view_of(B, C, D)
    view.hear(B, beat(sitting=(D,)), now=0.0)
    assert view.shunned(now=0.0) == frozenset(), "one voice of two"
    view.hear(C, beat(sitting=(D,)), now=0.0)
    assert view.shunned(now=0.0) == {D}
    view.hear(D, beat(sitting=(B, C, D)), now=0.0)
    assert view.shunned(now=0.0) == {D}, "its own voice counts nothing for it, and alone not against others"
    assert view_of(B).shunned(now=0.0) == frozenset()
    view.gone(C, now=0.0)
    assert view.shunned(now=0.0) == frozenset(), "one voice is left"


@pytest.mark.parametrize("heard", [True, False])
def test_whom_half_of_the_others_cannot_reach_is_not_shunned_whether_i_hear_it_or_not(heard: bool):
    """Who hears it and who does not must find the same, or each follows another keeper."""
    view = view_of(B, C, D, E)
    for peer in (B, C, D):
        view.reached(peer, now=5.0)
    others = (B, C, D) if heard else (B, C)
    for named in range(len(others) + 1):
        for peer in (B, C, D):
            view.hear(peer, beat(unreached=(E,) if peer in others[:named] else ()), now=5.0)
        if heard:
            view.hear(E, beat(unreached=(B,)), now=5.0)
            view.reached(E, now=5.0)
        assert view.unreached(now=5.0) == (() if heard else (E,))
        assert (E in view.shunned(now=5.0)) == (named + (not heard) > 2)
