"""Which peers a stage does not wait for: a table that follows from commits, and what one replica observes."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from stage_table import TIMERS

from swarmnet.ids import NO_CHAIN, Ballot, PeerId, RoundId
from swarmnet.messages import FOR_EVER, MAX_EXCLUSIONS, Ban, Commit, Exclusion
from swarmnet.step.commits import digest_of, evidence
from swarmnet.step.exclusion import CLEAN, Table, after, passed_over, remembered
from swarmnet.step.host import Deferred
from swarmnet.step.lateness import Delays, Lateness

A, B, C, D = (PeerId(name) for name in "ABCD")


def excluded(table: Table, step: int) -> list[PeerId]:
    return [each.peer for each in remembered(table, step) if step < each.until_step]


def commit(step: int, *late: PeerId) -> Commit:
    return Commit(0, step, NO_CHAIN, RoundId(Ballot(0, A), 0), b"d", 1, 0.0, 1.0, late=late)


def test_each_time_that_a_peer_is_late_its_exclusion_is_longer_up_to_128_steps():
    table, step = Table(), 10
    for back_off in (32, 64, 128, 128):
        table = after(table, commit(step, B))
        assert excluded(table, step + back_off) == [B] and excluded(table, step + back_off + 1) == []
        step += back_off + 1


def test_a_peer_that_is_named_again_while_it_is_excluded_keeps_its_level():
    """One lying leader would bring correct peers to the highest level in three steps."""
    table = Table()
    for step in range(5):
        table = after(table, commit(step, B))
    assert table == (Exclusion(B, 5 + 32, 1),)


def test_no_leader_lifts_a_ban_by_naming_the_peer_late():
    table = after((), commit(0), [Ban(B, 0, bytes(32))])
    assert after(table, commit(1, B)) == table == (Exclusion(B, FOR_EVER, 3),)


def test_a_level_falls_after_128_clean_steps_and_at_0_the_peer_is_forgotten():
    table = after(after((), commit(0, B)), commit(33, B))
    end = 34 + 64
    assert table == (Exclusion(B, end, 2),) and remembered(table, end) == [*table]
    assert after(table, commit(end + CLEAN - 1, B))[0].level == 2, "one level has fallen, and it is late again"
    assert after(table, commit(end + 2 * CLEAN - 1)) == () and remembered(table, end + 2 * CLEAN) == []


@given(st.lists(st.sets(st.sampled_from((A, B, C, D))), max_size=40))
def test_the_table_follows_from_the_commits_alone(late: list[set[PeerId]]):
    table = Table()
    for step, named in enumerate(late):
        table = after(table, commit(step, *sorted(named)))
        assert named <= set(excluded(table, step + 1)) and table == tuple(sorted(table, key=lambda each: each.peer))
        assert after(table, replace_id(commit(step + 1))) == after(table, commit(step + 1)), "whoever led"


def replace_id(of: Commit) -> Commit:
    return Commit(of.stage, of.step, of.chain, RoundId(Ballot(7, D), 7), of.digest, 1, 0.0, 1.0, late=of.late)


def test_bans_take_no_room_from_who_is_late_and_from_each_other_only_the_oldest():
    table = after((), commit(0, B), [Ban(C, 0, bytes(32))])
    for number in range(0, MAX_EXCLUSIONS, 8):
        some = [Ban(PeerId(f"a{each}"), 0, bytes(32)) for each in range(number, number + 8)]
        table = after(table, commit(1, B), some)
        assert B in excluded(table, 2) and len(table) <= MAX_EXCLUSIONS
        assert (C in excluded(table, 2)) == (number + 8 < MAX_EXCLUSIONS - 256)
    assert PeerId("a1023") in excluded(table, 10**6)


def test_the_chain_covers_who_was_late():
    assert evidence([commit(0, B)]) != evidence([commit(0)]) and evidence([commit(0, B)]) != evidence([commit(0, C)])


def test_the_chain_covers_the_table_before_a_commit():
    table = after((), commit(0, B))
    of_table, of_none = (replace(commit(1), table=digest_of(each)) for each in (table, ()))
    assert of_none == commit(1) and evidence([of_table]) != evidence([of_none])
    assert digest_of(table) != digest_of(after((), commit(0, C)))


def test_fewer_than_half_of_the_live_voters_are_passed_over_the_worst_first():
    live = {A, B, C}
    assert passed_over([C, B], live) == {C} and passed_over([D, B], live) == {D, B}, "D does not live"
    assert passed_over([A, B], {A, B}) == frozenset(), "of two none"


def test_what_was_observed_is_over_once_a_commit_names_the_peer_or_after_a_while():
    host = Deferred()
    lateness = Lateness(TIMERS, host)
    for now, reason in enumerate(("does not report", "leads")):
        lateness.observe(B, reason, now=now)
    assert [call.fields for call in host.calls] == [{"peer": B, "reason": "does not report"}]
    lateness.observe(C, "holds up the round", pardon=True, now=1.0)
    assert lateness.late(now=1.0) == [B]
    lateness.observe(C, "holds up the round", pardon=True, now=2.0)
    assert lateness.late(now=2.0) == [C, B]
    lateness.committed((B,), {B}, A, now=2.0)
    assert lateness.late(now=2.0) == [C] and not lateness.is_late(C, now=2.0 + TIMERS.lease_s)


def test_a_leader_that_alone_names_the_same_peer_late_again_is_late_itself():
    """One liar that leads a quarter of the terms kept correct peers excluded without end."""
    cases = (("nothing", [A]), ("leader D", []), ("most", []), ("most, long ago", [A]), ("I", []), ("forgotten", []))
    for between, found in cases:
        lateness = Lateness(TIMERS, Deferred())
        lateness.committed((B,), {B}, A, now=0.0)
        if between == "leader D":
            lateness.committed((B,), {B}, D, now=1.0)
        if between == "most":
            lateness.agree((B,), now=1.0)
        if between == "most, long ago":
            lateness.agree((B,), now=1.0 - TIMERS.lease_s)
            lateness.observe(B, "does not report", now=1.0 - TIMERS.lease_s)
            lateness.committed((), {B}, D, now=1.0)
        if between == "I":
            lateness.observe(B, "does not report", now=1.0)
        if between == "forgotten":
            lateness.committed((), (), A, now=1.0)
        lateness.committed((B, C), {B, C}, A, now=2.0)
        assert lateness.late(now=2.0) == found, between
        lateness.committed((C,), {B, C}, A, now=3.0)
        assert lateness.late(now=3.0) == [A], "it has named C before"


def test_a_member_is_late_that_costs_more_than_a_sixteenth_of_all_time():
    seldom, often, late = Lateness(TIMERS, Deferred()), Lateness(TIMERS, Deferred()), []
    for number in range(20):
        seldom.charge(B, "slow", cost_s=1.0, now=17.0 * number)
        assert not seldom.is_late(B, now=17.0 * number)
        often.charge(B, "slow", cost_s=1.0, now=4.0 * number)
        late += [number] if often.is_late(B, now=4.0 * number) else []
    assert late[0] == 5


def test_a_third_of_the_debt_is_enough_while_an_exclusion_is_remembered():
    lateness = Lateness(TIMERS, Deferred())
    lateness.committed((), {B}, A, now=0.0)
    for peer in (B, C):
        lateness.charge(peer, "slow", cost_s=2.0, now=1.0)
    assert lateness.late(now=1.0) == [B]
    lateness.committed((), (), A, now=2.0)
    lateness.charge(D, "slow", cost_s=2.0, now=2.0)
    assert not lateness.is_late(D, now=2.0), "it is forgotten"


def test_members_that_waited_for_the_one_that_is_left_out_owe_nothing_for_that_time():
    """And that one may have been kept by another member: one such step is no lateness."""
    for gone, found in ((C, []), (B, [B])):
        lateness = Lateness(TIMERS, Deferred())
        for began_at, late in ((0.0, []), (20.0, found)):
            delays = Delays(TIMERS, began_at)
            delays.opened({A, B, C, D}, now=began_at + 0.5)
            delays.note({B}, 4, now=began_at + 1.0)
            delays.note({C}, 4, now=began_at + 14.0)
            delays.opened({A, B, C, D} - {gone}, now=began_at + 19.0)
            delays.charge(lateness, A, (), now=began_at + 20.0)
            assert lateness.late(now=began_at + 20.0) == late


def test_a_leader_owes_what_its_steps_are_longer_than_usual_while_they_wait_for_it():
    def late(*steps: tuple[float, float, float], took_s: float = 10.0, voters: tuple[PeerId, ...] = ()) -> list[PeerId]:
        lateness = Lateness(TIMERS, Deferred())
        for number, (over_s, rest_s, waits_s) in enumerate(steps, start=1):
            now = took_s * number
            lateness.charge_leader(B, over_s=over_s, rest_s=rest_s, waits_s=waits_s, now=now)
            if voters:
                lateness.committed((C,), (), B, voters, now=now)
        return lateness.late(now=now)

    assert late((10.0, 10.0, 0.0)) == [], "what kept it once may not be known"
    assert late((10.0, 10.0, 0.0), (10.0, 10.0, 0.0)) == [B]
    assert late(*[(1.9, 1.9, 0.0)] * 6, took_s=2.4) == [B]
    assert late(*[(10.0, 0.5, 0.0)] * 50) == late(*[(0.0, 10.0, 0.0)] * 50) == [], "it was not waited for; as usual"
    assert late(*[(1.0, 1.0, 0.0)] * 50, took_s=9.0) == [], "one of sixteen seconds"
    assert late(*[(6.0, 0.0, 6.0)] * 2) == [], "it has those excluded that it waits for"
    assert late(*[(6.0, 0.0, 6.0)] * 6) == [B], "and if it does not, that is no excuse"
    assert late(*[(6.0, 0.0, 6.0)] * 6, voters=(A, C)) == []
    assert late(*[(6.0, 0.0, 6.0)] * 6, voters=(A,)) == [B], "it names a stranger"


def test_an_observation_lasts_for_its_step_however_long_that_is():
    lateness = Lateness(TIMERS, Deferred())
    lateness.observe(B, "does not report", now=0.0)
    assert lateness.late(now=10 * TIMERS.lease_s) == [B]
    lateness.committed((), (), A, now=10 * TIMERS.lease_s)
    assert lateness.late(now=10 * TIMERS.lease_s) == []


def test_a_step_that_waits_for_one_member_charges_that_one_and_never_the_observer():
    for me, found in ((A, [B]), (B, [])):
        lateness, delays = Lateness(TIMERS, Deferred()), Delays(TIMERS, 0.0)
        delays.note({B}, 3, now=2.0)
        delays.charge(lateness, me, (), now=12.0)
        assert lateness.late(now=12.0) == found
    two, lateness = Delays(TIMERS, 0.0), Lateness(TIMERS, Deferred())
    two.note({B, C}, 5, now=1.0)
    two.note({C}, 5, now=14.0)
    two.charge(lateness, A, (C,), now=20.0)
    assert lateness.late(now=20.0) == [B], "the commit names the latest: the next one pays"
    both, lateness = Delays(TIMERS, 0.0), Lateness(TIMERS, Deferred())
    both.note({B, C}, 3, now=2.0)
    both.charge(lateness, A, (), now=12.0)
    assert not lateness.late(now=12.0), "most are waited for: that is no fault of one"


def test_a_member_that_waits_for_the_next_stage_owes_nothing_until_it_has_done_so_for_long():
    lateness, late = Lateness(TIMERS, Deferred()), list[bool]()
    for number in range(5):
        delays = Delays(TIMERS, 10.0 * number)
        delays.note({B}, 3, away={B, C}, now=10.0 * number + 2.0)
        delays.charge(lateness, A, (), now=10.0 * number + 10.0)
        late.append(lateness.is_late(B, now=10.0 * number + 10.0))
    assert late == [False, False, True, True, True], "13.5 s of waiting, and then the debt of 4.5 s"


def test_members_that_waited_for_a_newcomer_that_is_left_out_are_excused_for_that_time():
    for newcomers, late in (({D}, []), (set(), [B])):
        lateness, delays = Lateness(TIMERS, Deferred()), Delays(TIMERS, 0.0)
        delays.opened({A, B, C}, newcomers, now=0.5)
        delays.note({B}, 4, now=1.0)
        delays.opened({A, B, C}, now=10.0)
        delays.charge(lateness, A, (), now=10.5)
        assert lateness.late(now=10.5) == late


def test_who_signs_each_sum_a_second_late_in_steps_of_half_a_second_is_late_after_some_steps():
    """A stream may be as late: its sender may still compute."""
    late_after: dict[bool, int | None] = {}
    for signatures in (True, False):
        lateness, late_after[signatures] = Lateness(TIMERS, Deferred()), None
        for number in range(16):
            began_at = 1.5 * number
            delays = Delays(TIMERS, began_at)
            delays.note({B}, 3, signatures=signatures, now=began_at + 0.5)
            delays.charge(lateness, A, (), now=began_at + 1.5)
            if lateness.is_late(B, now=began_at + 1.5):
                late_after[signatures] = number + 1
                break
    assert late_after == {True: 6, False: None}


def test_a_signature_may_be_late_by_a_quarter_of_the_time_that_the_others_take():
    for late_s, named in ((2.0, False), (3.0, True)):
        lateness, found = Lateness(TIMERS, Deferred()), False
        for number in range(30):
            began_at = (8.0 + late_s) * number
            delays = Delays(TIMERS, began_at)
            delays.note({B}, 3, signatures=True, now=began_at + 8.0)
            delays.charge(lateness, A, (), now=began_at + 8.0 + late_s)
            found |= lateness.is_late(B, now=began_at + 8.0 + late_s)
        assert found == named


def test_what_is_remembered_of_many_identities_is_bounded_and_the_oldest_goes_first():
    crowd = [PeerId(f"crowd-{number}") for number in range(4096)]
    for others, is_late in ((crowd[:-1], True), (crowd, False)):
        debts, observed = Lateness(TIMERS, Deferred()), Lateness(TIMERS, Deferred())
        for peer in (B, *others):
            debts.charge(peer, "slow", cost_s=3.0, now=0.0)
            observed.observe(peer, "slow", now=0.0)
        debts.charge(B, "slow", cost_s=3.0, now=0.0)
        assert debts.is_late(B, now=0.0) == observed.is_late(B, now=0.0) == is_late
