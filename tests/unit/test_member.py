"""Whole stages of step machines around a table: the traces of docs/protocol.md that killed earlier designs.

A is a member, K (the highest name) the leader, B and C bystanders.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import replace

import pytest
from stage_table import CHAIN, TIMERS, Table, calls_of, certified, has, kind, wants

from swarmnet.ids import NO_RESTART, Ballot, Chain, Generation, PeerId, RoundId
from swarmnet.messages import (
    FOR_EVER,
    UNMEASURED,
    Ban,
    Commit,
    Committed,
    Finished,
    Heartbeat,
    Late,
    MemberState,
    Round,
    StagePlan,
    Stamp,
    StateHeader,
    Trouble,
)
from swarmnet.step.commits import bits_of, commit_of, stages_in
from swarmnet.step.host import Deferred
from swarmnet.step.ledger import ClaimBook, Generations
from swarmnet.step.member import Member
from swarmnet.step.membership import Membership
from swarmnet.step.open_step import OpenStep, RoundPart
from swarmnet.testing.virtual_swarm import SimulatedSigner


def test_a_step_without_faults():
    table = Table("A", "K")
    table.execute("A", 0)
    table.execute("K", 1)
    assert table.leader == "K"
    table.finish_all()
    for member in table.members.values():
        member.applied(now=table.now)
        table.do(str(member.me))
    chains = {member.chain for member in table.members.values()}
    assert len(chains) == 1 and chains != {CHAIN}
    assert {member.version for member in table.members.values()} == {1}


def test_h1_a_late_addition_after_eviction_counts_nowhere():
    table = Table("A", "K")
    table.claim("A", 0)
    table.claim("A", 1)
    table.settle()
    table.add("A", 1)
    table.suspect("A", by="K")  # 0 and 1 are free again
    held = table.take(kind(StagePlan, to="A"))
    table.execute("K", 0)
    table.add("A", 0)  # the late weight pass ends now; A has heard of nothing
    table.put(held)
    table.settle()
    table.tick(4.0)
    table.work_until_summed()
    table.finish_all()


def test_nobody_contributes_before_all_that_was_granted_is_summed():
    table = Table("A", "K")
    table.claim("A", 0)
    table.execute("K", 1)
    assert table.members["A"].oldest.part.round is not None and table.rounds["A"] is None
    table.add("A", 0)
    assert table.rounds["A"] is not None


def test_h2_an_overlap_does_not_stay_for_ever():
    table = Table("A", "K")
    table.execute("A", 0)
    table.claim("A", 1)
    table.settle()
    table.tick(16.0, silent=("A",))
    table.execute("K", 0)  # while A holds it summed, beside 1
    table.tick(4.0)
    table.work_until_summed()
    assert "evicted_me" in table.notes()
    table.finish_all()


def test_h4_of_two_leaders_with_equal_numbers_one_stops_and_the_ledger_completes():
    table = fresh_pair_of_leaders()
    assert sum(member.oldest.leader is not None for member in table.members.values()) == 2
    table.settle(lambda sender, receiver, message: sender == receiver)  # each grants to itself only
    for name, index in (("A", 0), ("K", 0), ("K", 1)):
        table.claim(name, index)
    table.settle(lambda sender, receiver, message: sender == receiver)
    for name in ("A", "K"):
        for index in sorted(table.members[name].oldest.claims.assigned):
            table.add(name, index)
    table.settle()
    table.tick()
    assert table.leader == "K"
    table.work_until_summed()
    table.finish_all()


def fresh_pair_of_leaders() -> Table:
    table = Table()
    table.start("A")
    table.start("K")
    return table


def test_a1_a_grant_nobody_waits_for_is_released():
    table = Table("A", "K")
    table.claim("A", 0)
    table.settle(wants)
    table.members["A"].withdraw(0, 0)
    table.do("A")
    table.settle()
    table.execute("K", 1)
    assert table.members["A"].oldest.claims.assigned == set()
    table.work_until_summed()
    table.finish_all()


def test_a1_a_duplicate_claim_after_moved_does_not_hold_up_the_round():
    table = Table("A", "K")
    table.claim("A", 0)
    copies = [entry for entry in table.wire if wants(*entry)]
    table.settle()
    assert table.members["A"].oldest.claims.assigned == {0}
    table.members["A"].withdraw(0, 0)
    table.do("A")
    table.settle()
    table.put(copies)  # K grants 0 to A once more, who does not want it
    table.settle()
    table.execute("K", 1)
    table.work_until_summed()
    table.finish_all()


def test_a2_a_grant_under_an_evicted_generation_is_dead():
    table = Table("A", "K")
    table.claim("A", 0)
    table.settle(wants)
    late = table.take(has("assigned", to="A"))
    table.suspect("A", by="K")
    table.settle()
    everything, table.settle = (
        table.settle,
        lambda: everything(lambda *entry: not (wants(*entry) and entry[2].generation.number > 1)),
    )
    table.tick(4.0)  # A is believed alive again, its report is answered: a new generation; it asks once more
    table.settle = everything
    assert table.members["A"].oldest.claims.generation.number > 1
    table.put(late)
    assert table.members["A"].oldest.claims.assigned == set()
    table.work_until_summed()
    table.finish_all()


def test_a5_a_sum_that_too_few_hold_is_summed_again_by_the_next_leader():
    table = Table("A", "B", "K")
    table.execute("A", 0)
    table.execute("B", 1)
    first = table.finish("A")
    table.take(kind(MemberState))  # K never hears of it
    table.kill("K")
    table.work_until_summed()
    assert table.members["A"].oldest.finished is None and table.rounds["A"].id > first.id
    table.finish_all()
    assert len({member.oldest.finished for member in table.members.values()}) == 1


def test_a5_a_sum_that_most_have_signed_is_published_by_the_next_leader():
    table = Table("A", "B", "K")
    table.execute("A", 0)
    table.execute("B", 1)
    finished = table.finish("A")
    table.finish("B")
    table.take(kind(MemberState))  # K never hears of it
    table.kill("K")
    table.tick(4.0)
    assert not table.orders() and sorted(table.applies) == ["A", "B"]
    assert {member.oldest.finished for member in table.members.values()} == {finished}


def test_whoever_has_signed_a_sum_joins_no_other_round_for_a_while():
    """Where nobody else can be heard the sum may have become a certificate (M10)."""
    table = Table("A", "B", "K")
    table.execute("A", 0)
    table.execute("B", 1)
    finished = table.finish("A")
    ballot = Ballot(0, PeerId("K"))
    contributions = tuple(
        (PeerId(p), table.members[p].oldest.claims.generation, frozenset({i})) for i, p in enumerate("AK")
    )
    newer = Round(table.members["A"].oldest.stamp, RoundId(ballot, 9), contributions, (PeerId("A"), PeerId("K")), ())
    table.settle()
    table.put([(PeerId("K"), PeerId("A"), StagePlan(newer.stamp, ballot, attempt=newer))])
    table.tick(TIMERS.suspect_s)
    assert table.members["A"].oldest.finished == finished and table.members["A"].oldest.part.exchange is None
    table.tick(1.0)
    assert table.members["A"].oldest.finished is None and table.members["A"].oldest.part.exchange is not None


def test_a_sum_that_one_mate_alone_claims_to_hold_is_not_the_stages():
    """A liar signs what nobody has summed, and most do not believe it (M9)."""
    table = Table("A", "B", "K")
    table.execute("A", 0)
    liar, ballot = table.members["B"], Ballot(0, PeerId("K"))
    contributions = (
        (PeerId("A"), table.members["A"].oldest.claims.generation, frozenset({0})),
        (PeerId("B"), liar.oldest.claims.generation, frozenset({1})),
    )
    invented = Finished(RoundId(ballot, 9), b"invented", 2, 0.0, 1.0, contributions)
    liar.oldest.part.hear(Round(liar.oldest.stamp, invented.id, contributions, (), ()))
    liar.oldest.part.exchange = invented.id if liar.oldest.part.move("join") else None
    liar.oldest.sum_whole(invented, now=table.now)
    table.do("B")
    assert liar.oldest.finished == invented
    table.settle()
    table.tick(20.0)
    assert all(member.oldest.barrier.of(0) is None for member in table.members.values())
    table.execute("K", 1)
    table.work_until_summed()
    table.finish_all()


def test_a8_death_of_a_receiver_after_the_commit_opens_no_other_round():
    table = Table("A", "B", "K", stages=2)
    table.execute("A", 0)
    table.execute("B", 1)
    for name in ("A", "B", "K"):
        table.finish(name)
    table.settle()
    (commit,) = {member.oldest.barrier.of(0) for member in table.members.values()}
    table.kill("B")
    table.tick(5.0)
    assert not table.orders() and table.members["A"].oldest.barrier.of(0) == commit
    assert not table.applies  # the other stage has not committed (I4)
    table.neighbour("N")
    other = certified(Commit(1, 0, CHAIN, commit.id, b"d", 2, 0.0, 1.0), "N")
    for name in ("A", "K"):
        table.members[name].receive(PeerId("N"), Committed(other), now=table.now)
        table.do(name)
    assert sorted(table.applies) == ["A", "K"]


def test_a_member_whose_sum_has_other_bits_fetches_those_of_its_stage():
    """A broken memory or a nondeterministic kernel: before, the step never ended."""
    table = Table("A", "B", "K")
    table.execute("A", 0)
    table.execute("B", 1)
    for name in ("B", "K"):
        table.finish(name)
    current = table.rounds["A"]
    assert current is not None
    wrong = Finished(current.id, b"other bits", 2, 0.0, 1.0, current.contributions)
    table.members["A"].oldest.sum_whole(wrong, now=table.now)
    table.do("A")
    table.settle()
    assert "digest_differs" in table.notes() and table.members["A"].oldest.finished is None
    assert sorted(table.applies) == ["B", "K"]
    table.collect("A")
    assert sorted(table.applies) == ["A", "B", "K"]


def test_whoever_knows_what_its_stage_has_committed_sums_nothing_else():
    """A joiner that its mates cannot be fetched from: it keeps for itself, and made its own sum again and again, each
    time at once, for it was not the one that was wanted."""
    table = Table("K")
    table.execute("K", 0, 1)
    alone = table.members["K"]
    mine = table.rounds["K"]
    assert mine is not None
    ballot = Ballot(9, PeerId("M"))
    committed = certified(Commit(0, 0, CHAIN, RoundId(ballot, 1), b"theirs", 2, 0.0, 1.0), "M", "N")
    table.neighbour("N", stage=0)
    beat = Heartbeat(Stamp(0, 0, CHAIN), 1, True, ballot, (committed,), ())
    for _ in range(2):  # it is known now, and its votes count
        alone.receive(PeerId("M"), beat, now=table.now)
        table.do("K")
    wanted = table.collects["K"]
    assert wanted is not None and (wanted[0].id, wanted[1]) == (committed.id, committed.digest)
    summed = Finished(mine.id, b"mine", 2, 0.0, 1.0, mine.contributions)
    again: list[str] = []
    for _ in range(10):
        alone.oldest.sum_failed(committed.id)  # nobody hands it over
        alone.tick(now=table.now)
        alone.oldest.sum_whole(summed, now=table.now)
        again += [call.name for call in table.do("K") if call.name == "aggregate"]
        table.settle()
    assert not again and table.rounds["K"] is None


@pytest.mark.parametrize("lacking", [(), ("M",)])
def test_who_is_a_step_behind_takes_the_state_once_a_holder_has_moved_on(lacking: tuple[str, ...]):
    """A Byzantine holder promised the aggregate, and the others, a step ahead, had it no more: 30 s were lost."""
    table = Table("K")
    alone = table.members["K"]
    committed = certified(Commit(0, 0, CHAIN, RoundId(Ballot(9, PeerId("M")), 1), b"theirs", 2, 0.0, 1.0), "M", "N")
    table.neighbour("N", stage=0)

    def ahead(step: int, commits: tuple[Commit, ...] = ()) -> Heartbeat:
        chain = CHAIN if step == 0 else Chain("9" * 64)
        return Heartbeat(Stamp(step, 0, chain), 1, True, None, commits if step == 0 else (), commits if step else ())

    for step in (0, 0, 1):
        for mate in ("M", "N"):
            alone.receive(PeerId(mate), ahead(step, (committed,)), now=table.now)
        table.do("K")
    assert table.collects["K"] is not None, "it asks for the aggregate first"
    alone.oldest.sum_failed(committed.id, map(PeerId, lacking))
    alone.tick(now=table.now)
    table.do("K")
    later = table.now + 2 * alone.view.timers.suspect_s + 1.0
    alone.receive(PeerId("N"), ahead(1, (committed,)), now=later)
    assert any(call.name == "resync" for call in calls_of(alone.calls)) is bool(lacking)


@pytest.mark.parametrize("claimed", [2, 3])
def test_one_claim_of_a_far_version_takes_nobody_out_of_the_step_whose_sum_it_fetches(claimed: int):
    """A Byzantine replica that withheld the aggregate told its victim alone that it was two versions ahead."""
    table = Table("K")
    alone = table.members["K"]
    table.neighbour("N", stage=0)
    for mate, version in (("N", 1), ("M", claimed)):
        alone.receive(PeerId(mate), Heartbeat(Stamp(version, 0, Chain("9" * 64)), 1, True, None, (), ()), now=table.now)
    assert not [call for call in calls_of(alone.calls) if call.name == "resync"]
    alone.receive(PeerId("N"), Heartbeat(Stamp(2, 0, Chain("8" * 64)), 2, True, None, (), ()), now=table.now + 0.1)
    assert [call for call in calls_of(alone.calls) if call.name == "resync"], "most say so"


def test_the_successor_of_a_silent_leader_knows_what_was_given_away():
    """Found by stopping leaders: what only the stopped one owned waited until the step stood still."""
    table = Table("A", "B", "K", microbatches=4)
    table.execute("A", 0)
    table.execute("K", 1, 2)
    table.tick(1.0)  # the leader's heartbeat
    table.tick(4.0, silent=("K",))
    assert {index for _, index in table.orders()} == {1, 2}, "3 was nobody's"


def test_h12_a_restart_within_the_step_under_the_same_name():
    table = Table("A", "K")
    table.execute("A", 0)
    table.kill("A")
    table.start("A")
    table.settle()
    table.execute("K", 1)
    table.work_until_summed()
    assert table.sums["A"] + table.sums["K"] in ([0, 1], [1, 0])
    table.finish_all()


def test_h5_the_leader_dies_after_telling_one_member_of_the_commit():
    table = Table("A", "B", "K")
    table.execute("A", 0)
    table.execute("B", 1)
    for name in ("A", "B", "K"):
        table.finish(name)
    table.settle(kind(MemberState))
    told = table.take(kind(Committed))
    table.put([entry for entry in told if entry[1] == "A"])
    table.kill("K")
    table.tick(8.0)
    assert sorted(table.applies) == ["A", "B"]
    assert table.members["A"].oldest.barrier.of(0) == table.members["B"].oldest.barrier.of(0)


def test_the_successor_of_a_dead_leader_rebuilds_the_ledger_from_reports():
    table = Table("A", "B", "K")
    table.execute("A", 0)
    table.kill("K")
    table.tick(4.0)
    leader = table.members[table.leader].oldest.leader
    assert leader is not None and leader.ballot.number == 1
    assert leader.ledger.owners == [(PeerId("A"), table.members["A"].oldest.claims.generation), None]
    table.execute("B", 1)
    table.work_until_summed()
    table.finish_all()


def test_a_stopped_leader_that_comes_back_learns_that_it_keeps_no_more():
    table = Table("A", "B", "K")
    table.execute("A", 0)
    table.tick(12.0, silent=("K",))
    assert table.members["K"].oldest.leader is not None
    table.tick(1.0)
    assert table.members["K"].oldest.leader is None
    table.work_until_summed()
    table.finish_all()


def test_an_exchange_the_leader_gave_up_does_not_freeze_its_member():
    """Found by stopping replicas: it ignored every grant, and each new round freed its index again."""
    table = Table("A", "B", "K", microbatches=3)
    table.execute("A", 0)
    table.execute("B", 1)
    table.execute("K", 2)
    first = table.rounds["A"]
    assert first is not None
    table.kill("B")  # before any ack: 1 is free again and ordered from somebody who takes part in the dead round
    table.work_until_summed()
    assert all(table.rounds[name].id > first.id for name in ("A", "K"))
    table.finish_all()


def test_what_is_contributed_is_frozen_until_its_round_is_given_up():
    table = Table("A", "B", "K", microbatches=3)
    table.execute("A", 0)
    table.execute("B", 1)
    table.execute("K", 2)
    table.kill("B")
    table.take(has("attempt"))
    table.settle(has("execute"))
    orders = table.orders()
    assert [index for _, index in orders] == [1]
    for name, index in orders:
        table.claim(name, index)
        table.settle(lambda *entry: wants(*entry) or has("assigned")(*entry))
        assert index in table.members[name].oldest.claims.assigned
        assert table.rounds[name] is None, "it still contributes to the old round what it is about to change"
        table.add(name, index)
    table.settle()
    table.work_until_summed()
    table.finish_all()


def others_have_finished(*, after: int = 0) -> Table:
    """B and K hold the sum that A still exchanges. after: steps; from the first one on all three count."""
    table = Table("A", "B", "K")
    for _ in range(after):
        table.execute("A", 0)
        table.execute("B", 1)
        table.finish_all()
        table.apply()
    table.execute("A", 0)
    table.execute("B", 1)
    table.finish("B")
    table.finish("K")
    return table


def test_an_exchange_goes_on_though_others_have_finished():
    table = others_have_finished()
    table.tick(2.0)
    assert table.rounds["A"] is not None and table.collects["A"] is None and not table.applies
    table.tick(28.0)
    assert sorted(table.applies) == ["B", "K"], "most hold it: A is not waited for any longer"
    assert table.rounds["A"] is not None and table.collects["A"] is None
    table.finish("A")
    table.settle()
    assert sorted(table.applies) == ["A", "B", "K"]


STOPS = {
    "a stream that breaks whenever it is asked for": (None, {PeerId("B"): True}),
    "the watch's word": (Trouble(RoundId(Ballot(1, PeerId("K")), 0), (Late(PeerId("B"), False, 10.0),)), {}),
}


@pytest.mark.parametrize("why", STOPS)
def test_who_waits_for_a_contribution_that_is_discard_collects_what_was_committed(why):
    """Found under late messages: it waited for ever in a round that others had finished."""
    trouble, waits = STOPS[why]
    table = others_have_finished()
    table.members["A"].feel(UNMEASURED, trouble, {}, waits)
    table.tick(1.0)
    assert table.collects["A"] is None, "nothing is committed yet, so there is nothing to be fetched"
    table.tick(3.0)
    assert table.rounds["A"] is None
    table.collect("A")
    table.settle()
    assert sorted(table.applies) == ["A", "B", "K"]


@pytest.mark.parametrize("told", [True, False], ids=["refused", "silent"])
def test_who_waits_for_the_dead_collects_what_most_have_signed(told):
    table = others_have_finished(after=1)
    table.settle()
    table.members["A"].feel(UNMEASURED, None, {}, {PeerId("B"): False})
    if told:
        table.kill("B")
        table.settle()
        table.tick(0.5)
    else:
        table.tick(3.0, silent=("B",))
        assert table.collects["A"] is None, "not known to be dead yet"
        table.tick(1.0, silent=("B",))
    assert table.rounds["A"] is None and table.collects["A"] is not None
    table.collect("A")
    assert {"A", "K"} <= {*table.applies}


def test_a_sum_that_too_few_are_left_to_have_signed_is_summed_again():
    """Before the first step is over nobody counts, so what B has signed dies with it: A and K sum without it."""
    table = others_have_finished()
    first = table.members["K"].oldest.finished
    table.settle()
    table.members["A"].feel(UNMEASURED, None, {}, {PeerId("B"): False})
    table.kill("B")
    table.settle()
    assert table.members["K"].oldest.leader.round is not None, "what others may hold whole is not given up at once"
    table.tick(TIMERS.suspect_s + 1.0)
    table.work_until_summed()
    assert table.rounds["K"].id > first.id
    table.finish_all()


def test_before_anybody_holds_the_sum_an_exchange_that_is_stuck_is_not_given_up():
    table = Table("A", "B", "K")
    table.execute("A", 0)
    table.execute("B", 1)
    table.members["A"].feel(UNMEASURED, None, {}, {PeerId("B"): True})
    table.tick(2.0)
    assert table.rounds["A"] is not None and table.collects["A"] is None, "the leader must open another round"


def test_a_commit_does_not_end_an_exchange_that_can_end():
    table = others_have_finished()
    finished, member = table.members["K"].oldest.finished, table.members["A"]
    assert finished is not None
    commit = certified(commit_of(member.oldest.stamp, finished), "B", "K")
    member.receive(PeerId("K"), Committed(commit), now=table.now)
    table.do("A")
    assert member.oldest.barrier.of(0) == commit
    assert table.rounds["A"] is not None and table.collects["A"] is None
    member.feel(UNMEASURED, None, {}, {PeerId("B"): True})  # those who have applied serve no more
    table.tick(0.5)
    assert table.rounds["A"] is None and table.collects["A"] is not None


def test_a_replica_one_step_behind_fetches_the_aggregate_before_it_follows_a_leader():
    table, me = Table("A", "K"), PeerId("B")
    table.execute("A", 0)
    table.execute("K", 1)
    table.work_until_summed()
    table.finish_all()
    table.apply()
    joiner = Member(me, 0, table.shape, TIMERS, incarnation=9, chain=CHAIN, now=table.now, signer=SimulatedSigner(me))
    beats = [
        (other.me, replace(other.heartbeat(), last_commits=other.last_commits)) for other in table.members.values()
    ]
    for peer, beat in beats:
        joiner.receive(peer, beat, now=table.now)
    joiner.restored(StateHeader(0, CHAIN, CHAIN, CHAIN), None, (), now=table.now)
    calls_of(joiner.calls)
    for peer, beat in beats:
        joiner.receive(peer, beat, now=table.now)
    assert joiner.oldest.promised is None
    assert [sorted(call.args[0].holders) for call in joiner.calls.calls if call.name == "fetch"] == [["A", "K"]]


def fetched_from(me: PeerId, current: Round, holders: Iterable[PeerId]) -> tuple[PeerId, ...]:
    host = Deferred()
    RoundPart(me, host).collect(current, b"digest", holders)
    ((name, (attempt, _), _),) = host.calls
    assert name == "fetch"
    return attempt.holders


def test_collectors_begin_with_different_holders():
    names = [PeerId(name) for name in "ABCDEFGH"]
    current = Round(Stamp(0, 0, CHAIN), RoundId(Ballot(1, names[0]), 7), (), tuple(names), ())
    orders = []
    for me in names[2:]:
        holders = fetched_from(me, current, names[:2])
        assert sorted(holders) == names[:2]
        orders.append(holders[0])
    assert orders == [*names[:2]] * 3
    # Where nobody says who holds it, all others may.
    unsaid = replace(current, receivers=())
    first = [fetched_from(me, unsaid, {*names} - {me})[0] for me in names]
    assert len(set(first)) == len(names)


def test_a_round_id_repeats_from_step_to_step_and_names_another_sum_then():
    """Found by seed 1027 of tests/sim: a laggard was handed the next step's sum under the same round id."""
    table = Table("A", "K")
    table.execute("A", 0)
    table.execute("K", 1)
    stamp = table.members["A"].oldest.stamp
    finished = table.finish("A")
    table.finish("K")
    table.settle()
    member = table.members["A"]
    member.applied(now=table.now)
    table.do("A")
    assert member.sum_of(stamp, finished.id) == finished
    assert member.sum_of(member.oldest.stamp, finished.id) is None


def test_grants_of_an_old_ballot_or_of_another_step_change_nothing():
    table = Table("A", "K")
    table.claim("A", 0)
    table.take(wants)
    member = table.members["A"]
    for stamp, ballot, generation in (
        (member.oldest.stamp, Ballot(0, PeerId("A")), member.oldest.claims.generation),
        (member.oldest.stamp, Ballot(7, PeerId("K")), member.oldest.claims.generation),
        (member.oldest.stamp, member.oldest.promised, Generation(99, 1)),
        (Stamp(1, 0, CHAIN), member.oldest.promised, member.oldest.claims.generation),
    ):
        table.put([(PeerId("K"), PeerId("A"), StagePlan(stamp, ballot, generation, frozenset({0})))])
        table.put([(PeerId("K"), PeerId("A"), StagePlan(stamp, ballot, generation, evicted="discard"))])
    assert member.oldest.claims.assigned == set()


def test_a_doubled_eviction_moves_the_generation_once():
    table = Table("A", "K")
    table.execute("A", 0)
    member = table.members["A"]
    eviction = StagePlan(
        member.oldest.stamp, member.oldest.promised, member.oldest.claims.generation, evicted="discard"
    )
    table.put([(PeerId("K"), PeerId("A"), eviction)] * 2)
    assert member.oldest.claims.generation.number == 2 and table.sums["A"] == []


def test_a_plan_in_somebody_elses_name_is_refused():
    table = Table("A", "K")
    before = table.members["A"].oldest.promised
    forged = StagePlan(table.members["A"].oldest.stamp, Ballot(9, PeerId("K")))
    table.put([(PeerId("B"), PeerId("A"), forged)])
    assert table.members["A"].oldest.promised == before and "refused_message" in table.notes()


def test_the_highest_ballot_is_one_that_two_mates_have_promised():
    table = Table("A", "B", "K")
    member = table.members["A"]
    for mate, number in (("B", 5000), ("K", 7)):
        beat = Heartbeat(member.oldest.stamp, 1, True, Ballot(number, PeerId(mate)))
        table.put([(PeerId(mate), PeerId("A"), beat)])
    assert member._highest_ballot() == 7


def test_nobody_applies_before_every_stage_has_committed():
    table = Table("A", "K", stages=3)
    table.execute("A", 0)
    table.execute("K", 1)
    for name in ("A", "K"):
        table.finish(name)
    table.settle()
    mine = table.members["A"].oldest.barrier.of(0)
    for stage in (1, 2):
        assert not table.applies
        table.neighbour(f"N{stage}", stage=stage)
        commit = certified(Commit(stage, 0, CHAIN, mine.id, b"d", 2, 0.0, 1.0), f"N{stage}")
        table.put([(PeerId("N1"), PeerId("A"), Committed(commit))])
    assert table.applies == ["A"]


def test_of_another_stage_its_votes_tell_or_what_most_of_a_stage_go_by():
    """Those who have signed it may be gone by the time somebody cut off hears of it."""
    table = Table("A", "B", "K", stages=2)
    member = table.members["A"]
    for name in ("N", "O"):
        table.neighbour(name)
    ballot = Ballot(0, PeerId("N"))
    signed = certified(Commit(1, 0, CHAIN, RoundId(ballot, 1), b"d", 2, 0.0, 1.0), "X", "Y")
    made_up = certified(replace(signed, digest=b"made up"), "O")
    table.put([(PeerId("O"), PeerId("A"), Committed(made_up))])
    for name, told in (("O", made_up), ("K", signed), ("N", signed)):
        stage = 0 if name == "K" else 1
        beat = Heartbeat(Stamp(0, stage, CHAIN), 1, True, None, (told,), ())
        table.put([(PeerId(name), PeerId("A"), beat)])
        table.tick(0.5)
        assert member.oldest.barrier.of(1) is None, f"{name} is not most of a stage"
    table.put([(PeerId("B"), PeerId("A"), Heartbeat(Stamp(0, 0, CHAIN), 2, True, None, (signed,), ()))])
    table.put([(PeerId("K"), PeerId("A"), Heartbeat(Stamp(0, 0, CHAIN), 3, True, None, (signed,), ()))])
    member.tick(now=table.now)
    table.do("A")
    assert member.oldest.barrier.of(1) == signed


def test_a_second_commit_of_a_stage_does_not_replace_the_first():
    table = Table("A", "K", stages=2)
    member = table.members["A"]
    table.neighbour("N")
    ids = [RoundId(Ballot(0, PeerId("N")), number) for number in (1, 2)]
    commits = [certified(Commit(1, 0, CHAIN, of, str(of).encode(), 2, 0.0, 1.0), "N") for of in ids]
    for commit in commits:
        table.put([(PeerId("N"), PeerId("A"), Committed(commit))])
        assert member.oldest.barrier.of(1) == commits[0]
    # Nor if a state comes with both.
    member.restored(StateHeader(0, CHAIN, CHAIN, CHAIN), None, tuple(commits[::-1]), now=table.now)
    table.do("A")
    assert member.oldest.barrier.of(1) == commits[1]


def test_a_commit_with_a_vote_that_is_not_its_voters_changes_nothing():
    table = Table("A", "B", "K")
    member = table.members["A"]
    commit = certified(Commit(0, 0, CHAIN, RoundId(member.oldest.promised, 1), b"d", 2, 0.0, 1.0), "B", "K")
    forged = replace(commit, votes=tuple(replace(vote, signature=b"forged") for vote in commit.votes))
    table.put([(PeerId("B"), PeerId("A"), Committed(forged))])
    assert member.oldest.barrier.of(0) is None and "bad_vote" in table.notes()
    table.put([(PeerId("B"), PeerId("A"), Committed(commit))])
    assert member.oldest.barrier.of(0) == commit


def test_whoever_signs_two_sums_of_one_round_has_no_say_any_more():
    table = Table("A", "B", "K")
    member = table.members["A"]
    commit = Commit(0, 0, CHAIN, RoundId(member.oldest.promised, 1), b"d", 2, 0.0, 1.0)
    for digest in (b"d", b"e"):
        told = certified(replace(commit, digest=digest), "B")
        table.put([(PeerId("B"), PeerId("A"), Committed(told))])
    assert PeerId("B") not in member.membership.live(0, now=table.now)
    table.put([(PeerId("B"), PeerId("A"), Committed(certified(commit, "B", "K")))])
    assert member.oldest.barrier.of(0) is None
    for _ in range(2):
        member.tick(now=table.now)
        table.do("A")
    assert table.notes().count("convicted") == 1


def test_a_vote_of_a_convict_does_not_spoil_the_votes_of_others():
    """Whoever signs something else for one mate alone would keep the stage's commit from it."""
    table = Table("A", "B", "C", "K")
    member = table.members["A"]
    commit = Commit(0, 0, CHAIN, RoundId(member.oldest.promised, 1), b"d", 2, 0.0, 1.0)
    for digest in (b"e", b"d"):
        told = certified(replace(commit, digest=digest), "B")
        table.put([(PeerId("B"), PeerId("A"), Committed(told))])
    table.put([(PeerId("K"), PeerId("A"), Committed(certified(commit, "B", "C", "K")))])
    assert member.oldest.barrier.of(0) == commit


def test_a_heartbeat_of_the_next_version_lets_a_laggard_with_the_sum_apply():
    table = Table("A", "K", stages=2)
    table.execute("A", 0)
    table.execute("K", 1)
    for name in ("A", "K"):
        table.finish(name)
    table.settle()
    mine = table.members["A"].oldest.barrier.of(0)
    table.neighbour("N")
    other = certified(Commit(1, 0, CHAIN, mine.id, b"d", 2, 0.0, 1.0), "N")
    ahead = Heartbeat(Stamp(1, 0, CHAIN), 1, True, None, (), (mine, other))
    table.put([(PeerId("K"), PeerId("A"), ahead)])
    assert table.applies == ["A"]


def test_release_under_a_wrong_generation_frees_nothing():
    table = Table("A", "K")
    table.execute("A", 0)
    leader = table.members["K"].oldest.leader
    stamp, ballot = table.members["A"].oldest.stamp, leader.ballot
    state = MemberState(stamp, ballot, Generation(99, 0)).unchanged(returns=frozenset({0}))
    table.put([(PeerId("A"), PeerId("K"), state)])
    assert leader.ledger.owners[0] == (PeerId("A"), table.members["A"].oldest.claims.generation)


def summed_by_four() -> tuple[Table, OpenStep, Round]:
    """Four members with an open round; the step of one of them, and the round."""
    table = Table("A", "B", "C", "K", microbatches=4)
    for index, name in enumerate("ABCK"):
        table.execute(name, index)
    table.work_until_summed()
    return table, table.members["A"].oldest, table.members[table.leader].oldest.leader.round


def test_a_leader_names_fewer_than_half_of_the_voters_late():
    _, step, current = summed_by_four()
    assert step.attempt_refusal(replace(current, late=(PeerId("B"),))) is None
    assert step.attempt_refusal(replace(current, late=(PeerId("B"), PeerId("C")))) == "names too many peers as late"


def test_who_has_begun_again_counts_itself_when_a_leader_names_a_peer_late():
    """It knows the contributors of one step only, and for the others it is a voter still: without its signature, with
    one of three late, they could commit nothing."""
    _, step, current = summed_by_four()
    step._member.membership.follow(NO_RESTART)
    alone = {"contributions": (("K", Generation(0, 0), frozenset({0})),), "receivers": ("A", "K")}
    alone = replace(current, **alone)
    assert step.attempt_refusal(replace(alone, late=("B",))) is None
    assert step.attempt_refusal(replace(alone, late=("B", "C"))) == "names too many peers as late"


def test_a_leader_names_the_same_peers_late_in_all_attempts_of_a_step():
    """Else it could commit two aggregates of one step that differ in these names alone: the stage has two chains."""
    table, step, current = summed_by_four()
    table.finish("A")
    again = replace(current, id=RoundId(current.id.ballot, current.id.number + 1))
    assert step.attempt_refusal(again) is None
    assert "that I signed" in step.attempt_refusal(replace(again, late=(PeerId("B"),)))
    other = RoundId(Ballot(current.id.ballot.number + 1, PeerId("B")), 1)
    assert step.attempt_refusal(replace(again, id=other, late=(PeerId("C"),))) is None, "another leader saw others"


def test_a_member_moves_a_leader_to_a_made_up_ballot_of_its_own_once():
    table = Table("A", "K")
    leads = table.members[table.leader].oldest
    (member,) = {"A", "K"} - {table.leader}
    promised = [leads.promised]
    for number in (1000, 2000, 3000):
        ballot = Ballot(leads.promised.number + number, leads.promised.peer)
        state = MemberState(leads.stamp, ballot, Generation(99, 0)).unchanged(returns=frozenset({0}))
        table.put([(PeerId(member), leads.promised.peer, state)])
        promised.append(leads.promised)
    assert promised[0] < promised[1] and promised[2:] == promised[1:2] * 2


# ------------------------------------------------------------ each rule is needed: without it a trace above breaks


def test_without_the_comparison_of_sets_half_an_accumulator_is_contributed(monkeypatch):
    monkeypatch.setattr(RoundPart, "join", lambda self, account: self._host.aggregate(self.round))
    with pytest.raises(AssertionError):
        test_nobody_contributes_before_all_that_was_granted_is_summed()


def test_without_the_freeze_an_accumulator_changes_under_its_round(monkeypatch):
    from swarmnet.step.open_step import RoundPart

    monkeypatch.setattr(RoundPart, "drop", lambda self: [])
    with pytest.raises(AssertionError, match="about to change"):
        test_what_is_contributed_is_frozen_until_its_round_is_given_up()


def test_without_the_peer_in_the_ballot_h4_has_two_leaders_for_ever(monkeypatch):
    for name, compare in (("__lt__", operator.lt), ("__le__", operator.le), ("__gt__", operator.gt)):
        monkeypatch.setattr(Ballot, name, lambda self, other, compare=compare: compare(self.number, other.number))
    with pytest.raises((AssertionError, ValueError)):
        test_h4_of_two_leaders_with_equal_numbers_one_stops_and_the_ledger_completes()


def test_without_a_new_generation_a2_revives_a_dead_grant(monkeypatch):
    monkeypatch.setattr(Generation, "next", lambda self: self)
    with pytest.raises(AssertionError):
        test_a2_a_grant_under_an_evicted_generation_is_dead()


def test_without_release_a1_waits_for_ever(monkeypatch):
    from swarmnet.step.leader import Leader

    monkeypatch.setattr(Leader, "_release", lambda self, peer, state, now: [])
    with pytest.raises(AssertionError, match="no round"):
        test_a1_a_grant_nobody_waits_for_is_released()


def test_without_certificates_a_liar_has_its_sum_committed(monkeypatch):
    monkeypatch.setattr(Membership, "certified", lambda self, commit, **_: bool(self._votes_of(commit)))
    with pytest.raises(AssertionError):
        test_a_sum_that_one_mate_alone_claims_to_hold_is_not_the_stages()


def test_without_the_lock_a_signed_sum_is_given_up_at_once(monkeypatch):
    monkeypatch.setattr(RoundPart, "locked", property(lambda self: False, lambda self, locked: None), raising=False)
    with pytest.raises(AssertionError):
        test_whoever_has_signed_a_sum_joins_no_other_round_for_a_while()


def test_without_the_barrier_a_stage_applies_alone(monkeypatch):
    from swarmnet.step.commits import Barrier

    monkeypatch.setattr(Barrier, "complete", True)
    with pytest.raises(AssertionError):
        test_nobody_applies_before_every_stage_has_committed()


def test_a_sum_is_collected_from_others_when_all_first_holders_are_gone():
    """Whoever lacks the sum asks those who can have it by now, but leaves nobody who is still there."""
    ballot = Ballot(0, PeerId("K"))
    host = Deferred()
    part, wanted = RoundPart(PeerId("A"), host), Round(Stamp(0, 0, CHAIN), RoundId(ballot, 7), (), (), ())

    def asked(*holders: str) -> list[PeerId]:
        part.collect(wanted, b"digest", map(PeerId, holders))
        return [holder for call in calls_of(host) if call.name == "fetch" for holder in call.args[0].holders]

    assert asked("B") == ["B"]
    assert asked("B", "C") == []  # B is still among them: go on
    assert asked("C") == ["C"]


def test_a_sum_set_aside_is_taken_back_only_if_it_is_the_committed_one():
    ballot, me = Ballot(0, PeerId("K")), PeerId("A")
    first, second = RoundId(ballot, 7), RoundId(ballot, 8)
    host = Deferred()
    part = RoundPart(me, host, Finished(first, b"mine", 2, 0.0, 1.0, ()))
    share = ((PeerId("B"), Generation(1, 0), frozenset({0, 1})),)
    part.hear(Round(Stamp(0, 0, CHAIN), second, share, (me, PeerId("B")), ()))
    assert part.join(ClaimBook(Generations(1))) is None and part.finished is None
    assert [call.name for call in calls_of(host)] == ["aggregate"]
    wanted = Round(Stamp(0, 0, CHAIN), first, (), (), ())
    part.collect(wanted, b"theirs", ())
    assert not host.calls
    part.collect(wanted, b"mine", ())
    assert [call[:2] for call in host.calls] == [("stop", ()), ("fetch", (wanted, b"mine"))]


def test_who_begins_a_step_again_alone_takes_back_the_sum_that_it_signed():
    """Nobody delivered newer state, and it goes on with what is here: the sum, too."""
    table = Table("A", "K", stages=2)
    table.execute("A", 0)
    table.execute("K", 1)
    for name in ("A", "K"):
        table.finish(name)
    table.settle()
    member = table.members["A"]
    commit = member.oldest.barrier.of(0)
    assert commit is not None and not table.applies
    table.kill("K")
    member.restored(StateHeader(0, CHAIN, CHAIN, CHAIN), None, (commit,), now=table.now)
    table.do("A")
    wanted = table.collects["A"]
    assert wanted is not None and (wanted[0].id, wanted[0].holders, wanted[1]) == (commit.id, (), commit.digest)


def test_who_keeps_no_longer_says_so_to_those_who_wait_for_it():
    """K has promised a ballot whose leader died before it had told anybody else, and is not first in order; A is, and
    sees K alive."""
    table = Table("A", "K")
    ghost, leader = PeerId("Z"), table.members["K"]
    assert leader.view.leader_order(CHAIN, now=0.0)[0] == "A" and table.leader == "K"
    table.neighbour("Z", stage=0)
    leader.receive(ghost, StagePlan(leader.oldest.stamp, Ballot(0, ghost)), now=table.now)
    table.do("K")
    table.take(kind(MemberState, to="Z"))
    for name in ("A", "K"):
        table.suspect("Z", by=name)
    table.tick(5.0)
    assert table.leader == "A" and leader.oldest.promised == Ballot(1, PeerId("A"))


def test_a_commit_heard_before_its_step_is_open_stands_only_if_it_follows_my_chain():
    table = Table("A", "B", "K")
    table.execute("A", 0)
    table.execute("K", 1)
    member, mate = table.members["A"], PeerId("K")
    other = Commit(0, 1, Chain("e" * 64), RoundId(Ballot(0, mate), 99), b"other", 2, 0.0, 1.0)
    member.receive(mate, Committed(certified(other, "B", "K")), now=table.now)
    table.do("A")
    table.finish_all()
    member.applied(now=table.now)
    table.do("A")
    table.tick(0.5)
    assert member.version == 1 and member.oldest.barrier.of(0) is None
    mine = certified(replace(other, chain=member.chain, id=RoundId(Ballot(0, mate), 100), digest=b"mine"), "B", "K")
    member.receive(mate, Committed(mine), now=table.now)
    table.do("A")
    assert member.oldest.barrier.of(0) == mine
    member.restored(StateHeader(1, member.chain, CHAIN, CHAIN), None, (other, mine), now=table.now)
    table.do("A")
    assert member.oldest.barrier.of(0) == mine


def test_all_that_are_told_the_same_are_told_the_same_heartbeat():
    """It is written once for each kind of receiver, however many there are."""
    table = Table("A", "K", stages=2)
    member = table.members["K"]
    beside = [PeerId("n0"), PeerId("n1")]
    for peer in beside:
        beat = Heartbeat(Stamp(0, 1, CHAIN), 7, True, None)
        member.receive(peer, beat, now=table.now)
        table.do("K")
    beats = dict(member.heartbeats.to_each([PeerId("A"), *beside]))
    assert beats == {peer: member.heartbeat(peer) for peer in beats}
    assert beats[beside[0]] is beats[beside[1]]
    assert len({id(beat) for beat in beats.values()}) == 2, "a mate, and those of another stage"


def test_a_heartbeat_without_news_does_not_make_the_leader_look_at_everybody(monkeypatch):
    from swarmnet.step.leader import Leader

    table = Table("A", "B", "K")
    table.tick(1.0)
    looked: list[float] = []
    advance = Leader.advance
    monkeypatch.setattr(
        Leader, "advance", lambda self, *, now, resend: looked.append(now) or advance(self, now=now, resend=resend)
    )
    leader, beat = table.members["K"], table.members["A"].heartbeat()

    def hear(beat: Heartbeat, now: float) -> int:
        looked.clear()
        leader.receive(PeerId("A"), beat, now=now)
        table.do("K")
        return len(looked)

    assert [hear(beat, table.now + 0.1 * number) for number in range(10)] == [0] * 10
    assert hear(beat, table.now + 9.0) == 1, "it was silent for longer than it may"
    assert hear(replace(beat, incarnation=99), table.now + 9.1) == 1, "another process"
    assert hear(replace(beat, incarnation=99, draining=True), table.now + 9.2) == 1


def test_a_commit_is_told_to_who_asks_and_asked_of_one_at_a_time():
    table = Table("A", "K", stages=2)
    member = table.members["A"]
    for name in ("n0", "n1"):
        table.neighbour(name)
    theirs = certified(Commit(1, 0, CHAIN, RoundId(Ballot(0, PeerId("n0")), 1), b"sum", 2, 0.0, 1.0), "n0", "n1")

    def knows(name: str, **said: object) -> None:
        beat = Heartbeat(Stamp(0, 1, CHAIN), 1, True, None, known=bits_of({1}), digest=bytes(16), **said)
        member.receive(PeerId(name), beat, now=table.now)
        table.do("A")

    def asked() -> list[str]:
        found = table.take(lambda sender, _, message: sender == "A" and isinstance(message, Heartbeat))
        return [receiver for _, receiver, message in found if stages_in(message.wants) == {1}]

    knows("n0")
    knows("n1")
    assert asked() == ["n0"], "the other one is not asked beside"
    table.now += 0.5
    member.tick(now=table.now)
    table.do("A")
    assert asked() == ["n1"], "nothing came"
    knows("n1", commits=(theirs,))
    assert member.oldest.barrier.of(1) == theirs and not asked()
    # Who asks me is told, and nobody else is.
    assert member.heartbeat().commits == ()
    asks = Heartbeat(Stamp(0, 1, CHAIN), 1, True, None, wants=bits_of({0, 1}))
    member.receive(PeerId("n0"), asks, now=table.now)
    table.do("A")
    ((_, to, told),) = table.take(lambda sender, _, message: sender == "A" and bool(getattr(message, "commits", ())))
    assert to == "n0" and told.commits == (theirs,)


def test_a_stage_is_orphaned_once_another_one_was_ahead_for_two_long_silences_without_a_break():
    table = Table("A", "K", stages=2)
    member, ahead = table.members["A"], PeerId("n0")

    def orphaned(incarnation: int, seconds: float) -> bool:
        member.receive(ahead, Heartbeat(Stamp(1, 1, CHAIN), incarnation, True, None), now=table.now)
        table.tick(seconds)
        return any(call.name == "orphan" for name, call in table.did if name == "A")

    assert not orphaned(1, 1.0)
    member.gone(ahead, definite=True, now=table.now)
    table.tick(TIMERS.lease_s)
    assert not orphaned(2, TIMERS.lease_s)
    assert orphaned(2, 2.0)


def test_a_round_is_cut_again_once_for_a_broken_link_and_not_without_one():
    table = Table("A", "B", "C", "K", microbatches=4)
    for index, name in enumerate(table.members):
        table.execute(name, index)
    table.tick(2.0)

    def cut_again() -> int:
        return sum(call.args == ("cut_again",) for _, call in table.did)

    assert table.rounds[table.leader] is not None and cut_again() == 0
    table.members[table.leader].lines.broken(PeerId("A"), [PeerId("B")], step=0)
    table.tick(2.0)
    assert cut_again() == 1


def test_in_a_large_stage_who_never_answers_does_not_keep_others_from_being_asked():
    """However often it says that it knows a commit."""
    table = Table("A", "K", stages=2)
    member = table.members["A"]
    member.view.sparse = frozenset({0, 1})

    def knows(name: str) -> None:
        beat = Heartbeat(Stamp(0, 1, CHAIN), 1, True, None, known=bits_of({1}), digest=bytes(16))
        member.receive(PeerId(name), beat, now=table.now)
        table.do("A")

    def asked() -> list[str]:
        found = table.take(lambda sender, _, message: sender == "A" and isinstance(message, Heartbeat))
        return [receiver for _, receiver, message in found if stages_in(message.wants) == {1}]

    knows("mute")
    knows("honest")
    assert asked() == ["mute"]
    table.now += 0.5
    knows("mute")
    assert asked() == ["honest"]


def test_who_has_not_applied_yet_is_told_the_last_commits_if_it_asks():
    table = Table("A", "K")
    table.execute("A", 0)
    table.execute("K", 1)
    for name in ("A", "K"):
        table.finish(name)
    table.settle()
    table.apply()
    asks = Heartbeat(Stamp(0, 0, CHAIN), 99, True, None, wants=bits_of({0}))
    table.members["A"].receive(PeerId("late"), asks, now=table.now)
    table.do("A")
    told = [message for _, to, message in table.take(kind(Heartbeat, to="late")) if message.last_commits]
    assert [commit.contributors for each in told for commit in each.last_commits] == [("A", "K")], "with their names"


def test_nobodys_word_of_steps_that_are_far_away_is_kept() -> None:
    table = Table("A", "K", stages=2)
    mine, peer = table.members["A"], PeerId("K")
    mine.receive(peer, table.members["K"].heartbeat(PeerId("A")), now=table.now)
    made = Commit(1, 0, CHAIN, RoundId(Ballot(0, peer), 0), b"d", 1, 0.0, 0.0)
    for step in range(9):
        mine.receive(peer, Committed(replace(made, step=step), mine.restart), now=table.now)
    assert [step for step in range(9) if mine.membership.has_told(peer, 1, step)] == [0, 1]


def test_a_commit_bans_a_peer_if_the_voters_know_that_it_is_decided():
    table, ban = Table("A", "B", "C", "D", microbatches=4), Ban(PeerId("B"), 0, bytes(32))
    for last in (False, True):
        for index, name in enumerate(table.members):
            table.execute(name, index)
        table.work_until_summed()
        if last:
            assert {current.bans for current in table.rounds.values()} == {(ban,)}
        table.finish_all()
        table.apply()
        for member in table.members.values():
            member.bans, member.membership.vouched = (ban,), frozenset({ban})
    for member in table.members.values():
        assert member.last_commits[0].bans == (ban,)
        assert {row.peer for row in member.membership.exclusions if row.until_step == FOR_EVER} == {"B"}


def test_a_member_signs_no_ban_that_it_does_not_know_to_be_decided():
    table, step, current = summed_by_four()
    ban = Ban(PeerId("B"), 0, bytes(32))
    banning = replace(current, bans=(ban,))
    assert step.attempt_refusal(banning) == "names a ban that is not decided"
    assert not table.members["A"].membership.sign(replace(commit_of(step.stamp, table.finish("A")), bans=(ban,)))
    table.members["A"].membership.vouched = frozenset({ban})
    assert "that I signed" in step.attempt_refusal(banning), "as for late peers: the stage would have two chains"
    other = RoundId(Ballot(current.id.ballot.number + 1, PeerId("B")), 1)
    assert step.attempt_refusal(replace(banning, id=other)) is None


def test_a_leader_names_the_member_that_holds_up_its_own_exchange():
    table = Table("A", "B", "K", microbatches=3)
    for index, name in enumerate("ABK"):
        table.execute(name, index)
    leader = table.members[table.leader]
    slow = next(name for name in "ABK" if name != table.leader)
    leader.awaited = frozenset({PeerId(slow)})
    table.tick(12.0)
    assert leader.oldest.phase == "exchanging"
    table.finish_all()
    table.apply(table.leader)
    assert leader.lateness.late(now=table.now) == [slow]


def test_a_stranger_that_leaves_a_round_does_not_make_up_for_what_a_voter_was_late():
    """It could come and go in each step."""
    assert late_beside(PeerId("stranger")) and not late_beside(None), "a voter has left"


def late_beside(leaves: PeerId | None) -> list[PeerId]:
    """Whom a member finds late that waits for a mate for 12 s in a round which this peer leaves then; None: the leader
    of the step."""
    table = Table("A", "B", "K", microbatches=3)
    for index, name in enumerate("ABK"):
        table.execute(name, index)
    mine = next(member for name, member in table.members.items() if name != table.leader)
    slow = next(PeerId(name) for name in "ABK" if name not in (table.leader, mine.me))
    mine.membership.applied(
        [Commit(0, 0, CHAIN, RoundId(Ballot(0, slow), 0), b"d", 3, 0.0, 1.0, contributors=tuple(map(PeerId, "ABK")))]
    )
    attempt, stamp = mine.oldest.part.round, mine.oldest.stamp
    assert attempt is not None

    def attempts(*peers: PeerId) -> None:
        nonlocal attempt
        attempt = replace(attempt, id=RoundId(attempt.id.ballot, attempt.id.number + 1), receivers=peers)
        table.put([(PeerId(table.leader), mine.me, StagePlan(stamp, attempt.id.ballot, attempt=attempt))])
        table.settle()

    left = leaves or PeerId(table.leader)
    everybody = dict.fromkeys((*attempt.receivers, left))
    attempts(*everybody)
    mine.awaited = frozenset({slow})
    table.tick(12.0)
    attempts(*(peer for peer in everybody if peer != left))
    mine.oldest.applied(table.now)
    return mine.lateness.late(now=table.now)


def test_what_a_committed_stage_waits_for_another_one_is_not_its_leaders_fault():
    table = Table("A", "K", stages=2)
    table.execute("A", 0)
    table.execute("K", 1)
    for name in ("A", "K"):
        table.finish(name)
    table.settle()
    follower = table.members["A" if table.leader == "K" else "K"]
    table.tick(10.0)
    assert follower.oldest.phase == "committed"
    assert follower.oldest.led_s(now=table.now) == (0.0, 0.0)


def test_who_is_left_out_while_it_waits_for_one_member_says_that_their_line_may_be_broken():
    """No other leader has to find that out again."""
    for awaited, refused, said in (("", "", ""), ("L", "", "L"), ("LB", "", "BL"), ("LBK", "", ""), ("L", "L", "")):
        table = Table("A", "B", "K", "L", microbatches=4)
        for index, name in enumerate("ABKL"):
            table.execute(name, index)
        mine = next(table.members[name] for name in "AKBL" if name != table.leader and name not in awaited)
        table.tick()
        late = tuple(Late(PeerId(name), True, 6.0) for name in awaited)
        mine.trouble = Trouble(mine.oldest.part.round.id, late, tuple(map(PeerId, refused)))
        plan = StagePlan(mine.oldest.stamp, mine.oldest.promised, mine.oldest.claims.generation, evicted="closed")
        assert mine.oldest.phase == "exchanging" and mine.heartbeat().unreached == ()
        mine.receive(PeerId(table.leader), plan, now=table.now)
        mine.tick(now=table.now)
        assert set(mine.heartbeat().unreached) == set(map(PeerId, said))


def test_a_step_in_which_nobody_works_waits_for_its_leader_or_for_whom_that_one_names():
    for said, expected in (("", (2.5, 0.0)), ("mate", (0.0, 2.5)), ("me", (2.5, 0.0))):
        table = Table("A", "B", "K", microbatches=3)
        mine = next(member for name, member in table.members.items() if name != table.leader)
        other = next(PeerId(name) for name in "ABK" if name not in (table.leader, mine.me))
        table.execute(mine.me, 0)
        leader = PeerId(table.leader)
        assert mine.oldest.led_s(now=table.now) == (0.0, 0.0)
        told = {"mate": (other,), "me": (mine.me,)}.get(said, ())
        for _ in range(6):
            mine.receive(leader, StagePlan(mine.oldest.stamp, mine.oldest.promised, awaits=told), now=table.now)
            table.tick(0.5)
        assert mine.oldest.led_s(now=table.now) == pytest.approx(expected, abs=0.6), said
        again = StagePlan(mine.oldest.stamp, Ballot(mine.oldest.promised.number + 1, leader))
        mine.receive(leader, again, now=table.now)
        assert mine.oldest.promised == again.ballot
        assert mine.oldest.led_s(now=table.now) == pytest.approx(expected, abs=0.6), (
            "another ballot makes up for nothing"
        )
