"""Who is alive, who may be evicted, who keeps: rule 12 and 13's arithmetic."""

from __future__ import annotations

from collections.abc import Set

import pytest

from swarmnet.ids import Chain, PeerId
from swarmnet.manifest.timers import Timers
from swarmnet.messages import Heartbeat, Stamp
from swarmnet.step.graph import leader_rank
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


def test_hear_says_who_is_new_revived_or_reborn():
    view = view_of()
    assert view.hear(B, beat(), now=0.0)
    assert not view.hear(B, beat(), now=0.5)
    assert view.hear(B, beat(incarnation=2), now=1.0)
    view.refuse(B, now=1.2)
    assert view.hear(B, beat(incarnation=3), now=1.5)


def test_last_words_do_not_revive_the_dead_but_a_wrong_verdict_is_undone():
    view = view_of(B)
    view.refuse(B, now=1.0)
    assert not view.hear(B, beat(), now=1.1) and not view.in_touch(B, now=1.1)
    assert view.hear(B, beat(), now=4.1) and view.in_touch(B, now=4.1)


def test_silence_beyond_the_limit_is_suspicion_and_a_word_ends_it():
    view = view_of(B)
    assert view.in_touch(B, now=3.0) and not view.in_touch(B, now=3.1)
    assert view.in_touch(B, now=15.0, within=15.0)
    view.touch(B, now=3.2)
    assert view.in_touch(B, now=3.3)


def ticking(view: View, *mates: PeerId, until: float, deaf: Set[PeerId] = frozenset()) -> None:
    """So long all these are heard, and answer unless they are deaf."""
    now = 0.0
    while now < until:
        now += 0.5
        for mate in mates:
            view.hear(mate, beat(), now=now)
            if mate not in deaf:
                view.echo(mate, now=now)
        view.review(now=now)


def test_one_that_is_heard_and_never_answers_is_out_of_touch():
    view = view_of(B, C)
    ticking(view, B, C, until=3.5, deaf={B})
    assert view.in_touch(B, now=3.5), "its first answer takes a moment"
    ticking(view, B, C, until=4.0, deaf={B})
    assert not view.in_touch(B, now=4.0) and view.in_touch(C, now=4.0)
    assert view.out_of_touch == {B: 4.0} and view.given_up(0, now=4.0) == {B}
    view.echo(B, now=4.1)
    assert view.in_touch(B, now=4.1)


def test_what_serves_another_stage_only_has_to_be_heard():
    view = view_of()
    for tenth in range(100):
        view.hear(B, beat(stage=1), now=tenth / 10)
        view.review(now=tenth / 10)
    assert view.in_touch(B, now=9.9, stage=1) and not view.out_of_touch


def test_a_process_that_was_stopped_does_not_miss_the_answers_of_that_time():
    view = view_of(B)
    ticking(view, B, until=2.0)
    view.hear(B, beat(), now=20.0)
    assert view.in_touch(B, now=20.0)
    view.review(now=20.0)
    assert view.in_touch(B, now=20.0)


def test_with_two_replicas_silence_is_not_death_until_long_silence():
    view = view_of(B)
    assert not view.given_up(0, now=14.9)
    assert view.given_up(0, now=15.1) == {B}


def test_a_majority_in_touch_gives_up_the_silent_one():
    view = view_of(B, C)
    ticking(view, C, until=3.5)
    assert view.given_up(0, now=3.6) == {B}


def test_half_of_four_is_no_majority():
    view = view_of(B, C, D)
    ticking(view, D, until=4.0)
    assert not view.given_up(0, now=4.1)
    assert view.given_up(0, now=15.1) == {B, C}


def test_silent_strangers_do_not_outnumber_the_voters_in_touch():
    strangers = [PeerId(f"stranger {number}") for number in range(9)]
    view = view_of(B, C, *strangers)
    ticking(view, C, until=3.5)
    assert not view.given_up(0, now=3.6), "before the first commit all replicas in sync have a vote"
    view.voters = {ME, B, C}
    assert view.given_up(0, now=3.6) == {B, *strangers}


def test_a_refused_connection_needs_no_waiting():
    view = view_of(B)
    assert view.refuse(B, now=0.1) and not view.refuse(B, now=0.2)
    assert view.given_up(0, now=0.2) == {B} and not view.out_of_touch


def test_live_lists_synced_replicas_of_a_stage_without_me_in_mine():
    view = view_of(C, B)
    view.hear(ME, beat(), now=0.0)
    view.hear(D, beat(synced=False), now=0.0)
    view.hear(ME, beat(stage=1), now=0.0)
    assert view.live(0, now=0.1) == [B, C]
    assert view.live(1, now=0.1) == [ME]


def test_everybody_computes_the_same_order_of_leaders():
    orders = []
    for me in (ME, B, C):
        view = View(me, 0, TIMERS)
        for mate in {ME, B, C} - {me}:
            view.hear(mate, beat(), now=0.0)
        orders.append(view.leader_order(CHAIN, now=0.1))
    assert orders[0] == orders[1] == orders[2] == sorted("ABC", key=lambda p: leader_rank(CHAIN, 0, p))


def test_the_order_changes_with_the_chain():
    firsts = {min((ME, B, C, D), key=lambda p: leader_rank(Chain(f"{n:064d}"), 0, p)) for n in range(40)}
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
    view.refuse(B, now=0.5)
    assert versions() == [], "who died begins anew"


def test_what_was_silent_for_long_is_forgotten():
    view = view_of(B)
    view.review(now=150.0)
    assert view.get(B) is not None
    view.review(now=150.1)
    assert view.get(B) is None
    assert view.hear(B, beat(), now=151.0)


def test_in_a_stage_that_has_grown_large_one_that_is_not_called_any_more_is_not_missed():
    view = view_of(B, C)
    view.sparse, view.beat_s = frozenset({0}), 2.5
    view.hear_only([B], now=0.0)
    ticking(view, B, C, until=6.0, deaf={B, C})
    assert view.out_of_touch.keys() == {B}


def test_identities_cost_no_memory():
    view = view_of()
    view.sparse = frozenset({0})
    for number in range(4097):
        view.refuse(PeerId(f"stranger {number}"), now=0.0)
    assert view.may_live(PeerId("stranger 0"), now=0.0) and not view.may_live(PeerId("stranger 1"), now=0.0)
    view.review(now=151.0)
    assert view.may_live(PeerId("stranger 1"), now=151.0)


def test_a_replica_is_cut_off_that_most_others_two_at_least_do_not_reach():
    view = view_of(B, C, D)
    view.hear(B, beat(unreached=(D,)), now=0.0)
    assert view.cut_off(0, now=0.0) == frozenset(), "one voice of two"
    view.hear(C, beat(unreached=(D,)), now=0.0)
    assert view.cut_off(0, now=0.0) == {D}
    view.hear(D, beat(unreached=(B, C, D)), now=0.0)
    assert view.cut_off(0, now=0.0) == {D}, "its own voice counts nothing for it, and alone not against others"
    assert view_of(B).cut_off(0, now=0.0) == frozenset()
    view.refuse(C, now=0.0)
    assert view.cut_off(0, now=0.0) == frozenset(), "one voice is left"


@pytest.mark.parametrize("heard", [True, False])
def test_one_that_half_of_the_others_are_out_of_touch_with_is_not_cut_off_whether_i_hear_it_or_not(heard: bool):
    """A replica that hears it and one that does not must find the same, or each follows another leader."""
    view = view_of(B, C, D, E)
    ticking(view, B, C, D, *[E] * heard, until=5.0)
    others = (B, C, D) if heard else (B, C)
    for named in range(len(others) + 1):
        for peer in (B, C, D):
            view.hear(peer, beat(unreached=(E,) if peer in others[:named] else ()), now=5.0)
        if heard:
            view.hear(E, beat(unreached=(B,)), now=5.0)
        assert view.out_of_touch.keys() == (set() if heard else {E})
        assert (E in view.cut_off(0, now=5.0)) == (named + (not heard) > 2)


def test_a_replica_is_observed_late_if_most_others_two_at_least_say_so():
    view = view_of(B, C, D)
    view.hear(B, beat(late=(D,)), now=0.0)
    assert view.observed_late(now=0.0) == frozenset(), "one voice"
    view.late = (D,)
    assert view.observed_late(now=0.0) == {D}
    view.hear(D, beat(late=(B,)), now=0.0)
    assert view.observed_late(now=0.0) == {D}


def test_beside_voters_others_have_no_say_in_who_is_late_or_cut_off():
    """Identities cost nothing: three strangers could have every voter passed over."""
    view = view_of(B, C, D, E)
    view.voters = {B}
    for stranger in (C, D, E):
        view.hear(stranger, beat(late=(B,), unreached=(B,)), now=0.0)
    assert view.observed_late(now=0.0) == view.cut_off(0, now=0.0) == frozenset()


def test_of_many_strangers_the_silent_ones_give_way_and_who_has_contributed_never():
    view = view_of(B, C)
    view.voters = frozenset({B})
    for number in range(1000):
        view.hear(PeerId(f"stranger {number:03}"), beat(), now=1.0 + number / 100)
        view.hear(C, beat(), now=1.0 + number / 100)
    known = {peer for peer, _ in view.mates()}
    assert {B, C, PeerId("stranger 999")} < known and len(known) <= 1 + 512, "and a newcomer that beats is known"
