"""A report says what has changed, and refers to that afterwards; the leader asks for what it lacks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_table import CHAIN, TIMERS, Table, has, kind, wants

from swarmnet.ids import Ballot, Generation, PeerId, RoundId
from swarmnet.messages import MAX_COUNTING, Commit, Committed, Finished, MemberState, StagePlan, Stamp, Vote
from swarmnet.step.commits import commit_of, counting, statement
from swarmnet.step.host import Deferred
from swarmnet.step.member import Member
from swarmnet.step.membership import Membership
from swarmnet.step.view import View
from swarmnet.testing.virtual_swarm import SimulatedSigner


def reports(table: Table, sender: str) -> list[MemberState]:
    return [message for _, _, message in table.take(lambda s, _, m: s == sender and isinstance(m, MemberState))]


def next_report(table: Table, sender: str) -> MemberState:
    """What a member says on its next tick."""
    table.now += 0.5
    table.members[sender].tick(now=table.now)
    table.do(sender)
    (report,) = reports(table, sender)
    return report


def at_work() -> Table:
    """K keeps; A has summed index 0 and reported that."""
    table = Table("A", "B", "K", microbatches=9)
    table.execute("A", 0)
    table.tick()
    return table


def test_what_has_not_changed_is_not_said_again() -> None:
    table = at_work()
    report = next_report(table, "A")
    assert not report.whole and not report.owned and report.ack is None and report.line is None
    table.execute("A", 1)
    report = next_report(table, "A")
    assert report.whole and report.owned == report.summed == {0, 1}
    assert not next_report(table, "A").whole


def test_a_whole_report_that_is_lost_is_asked_for() -> None:
    table = at_work()
    table.claim("A", 1)
    table.settle()
    table.add("A", 1)
    lost = next_report(table, "A")
    assert lost.whole
    report = next_report(table, "A")
    table.wire.append((PeerId("A"), PeerId("K"), report))
    table.settle(kind(MemberState))
    asked = [message for _, receiver, message in table.wire if receiver == "A" and isinstance(message, StagePlan)]
    assert [plan.whole for plan in asked] == [True]
    table.settle()
    leader = table.members["K"].oldest.leader
    assert leader is not None and leader.ledger.of(PeerId("A")) == {0, 1}
    assert leader._followers[PeerId("A")].state.summed == {0, 1}
    assert not next_report(table, "A").whole


def test_a_whole_report_is_asked_for_once_for_all_that_refer_to_it() -> None:
    table = at_work()
    table.execute("A", 1)
    next_report(table, "A")  # lost
    report = next_report(table, "A")
    for wanted in (1, 1, 2):
        table.put([(PeerId("A"), PeerId("K"), report)])
        asked = [plan for _, to, plan in table.wire if to == "A" and isinstance(plan, StagePlan) and plan.whole]
        assert len(asked) == wanted
        table.now += TIMERS.ask_s / 2


def test_what_is_asked_for_has_the_revision_that_it_had() -> None:
    table = at_work()
    before = next_report(table, "A")
    table.put([(PeerId("K"), PeerId("A"), StagePlan(before.stamp, before.ballot, whole=True))])
    (again,) = reports(table, "A")
    assert again.whole and again.revision == before.revision and again.owned == {0} and again.line is not None


def test_a_whole_report_that_was_overtaken_changes_nothing() -> None:
    table = at_work()
    old = next_report(table, "A")
    table.put([(PeerId("K"), PeerId("A"), StagePlan(old.stamp, old.ballot, whole=True))])
    (old,) = reports(table, "A")
    table.execute("A", 1)
    table.tick()
    table.put([(PeerId("A"), PeerId("K"), old)])
    leader = table.members["K"].oldest.leader
    assert leader is not None and leader._followers[PeerId("A")].state.owned == {0, 1}


def test_a_new_leader_and_a_new_generation_get_a_whole_report() -> None:
    table = at_work()
    table.members["A"].sums_lost()
    table.do("A")
    (report,) = reports(table, "A")
    assert report.whole and not report.owned
    table.tick()
    table.kill("K")
    table.take(kind(MemberState))
    table.settle(kind(StagePlan))
    said = [message for _, receiver, message in table.wire if isinstance(message, MemberState) and receiver != "K"]
    assert {report.stamp.step for report in said} == {0} and all(report.whole and report.line for report in said)


def plans_of_a_tick(table: Table, leader: Member) -> list[tuple[PeerId, StagePlan]]:
    leader.tick(now=table.now)
    sent = [call.args for call in table.do(leader.me) if call.name == "send"]
    return [(peer, message) for peer, message in sent if isinstance(message, StagePlan)]


def test_what_the_leader_owns_is_told_to_the_next_in_order() -> None:
    """What others own they say themselves."""
    table = Table(*"ABCDEFGK", microbatches=9)
    leader = table.members[table.leader]
    table.execute("A", 0)
    table.execute(leader.me, 1)
    table.now += 0.5
    given_to = [peer for peer, plan in plans_of_a_tick(table, leader) if plan.given]
    order = leader.view.leader_order(leader.term_chain, now=table.now)
    heirs = {leader.me, *[peer for peer in order if peer != leader.me][:3]}
    assert set(given_to) == heirs - {leader.me}
    table.settle()
    table.execute("A", 2)
    table.now += 0.5
    assert {peer for peer, _ in plans_of_a_tick(table, leader)} <= {leader.me}


def test_a_round_is_said_again_to_those_alone_that_do_not_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table("A", "B", "K")
    table.execute("A", 0)
    table.claim("K", 1)
    table.settle(lambda *entry: wants(*entry) or has("assigned")(*entry))
    (lost,) = (entry for entry in table.take(has("attempt")) if entry[1] == "B")
    table.settle()
    said: list[PeerId] = []
    put = table.put
    monkeypatch.setattr(
        table,
        "put",
        lambda came: (said.extend(to for *_, to, message in came if has("attempt")("", to, message)), put(came)),
    )
    table.tick(3.0)
    assert sorted(set(said)) == ["A", "B", "K"] and len(said) == 3, "each once more"
    assert lost[2].attempt == table.members["B"].oldest.part.round


@settings(max_examples=60)
@given(st.data())
def test_whatever_is_lost_doubled_or_late_the_leader_knows_what_is_held_in_the_end(data: st.DataObject) -> None:
    table = Table("A", "K", microbatches=6)
    late: list[tuple[PeerId, PeerId, object]] = []
    for index in range(5):
        table.claim("A", index)
        table.settle(lambda *entry: not isinstance(entry[2], MemberState) or entry[0] == "K")
        # A third new accumulator costs the step; one begins with what is added and was not assigned.
        claims = table.members["A"].oldest.claims
        if data.draw(st.booleans()) and (index in claims.assigned or claims.generation.number < 3):
            table.add("A", index)
        if data.draw(st.integers(0, 5)) == 0 and claims.generation.number < 3:
            table.members["A"].sums_lost()
            table.do("A")
        said = table.take(lambda s, r, m: {s, r} == {"A", "K"} and isinstance(m, MemberState | StagePlan))
        for entry in said:
            fate = data.draw(st.sampled_from(["comes", "lost", "doubled", "late"]))
            late += [entry] if fate in ("late", "doubled") else []
            table.put([entry] if fate in ("comes", "doubled") else [])
        if late and data.draw(st.booleans()):
            table.put([late.pop(data.draw(st.integers(0, len(late) - 1)))])  # type: ignore[list-item]
        table.now += 0.5
        for name in ("A", "K"):
            table.members[name].tick(now=table.now)
            table.do(name)
    for _ in range(4):
        table.tick()
    member, leader = table.members["A"], table.members["K"].oldest.leader
    assert leader is not None and leader.members[PeerId("A")] == member.oldest.claims.generation
    known = leader._followers[PeerId("A")].state
    assert (known.owned, known.summed) == (member.oldest.claims.assigned, member.oldest.claims.accumulated)
    assert leader.ledger.of(PeerId("A")) == member.oldest.claims.assigned


# ---------------------------------------------------------------- who contributed


EVERYONE = tuple(sorted(PeerId(f"P{number:02}") for number in range(40)))


def sum_of(step: int, *contributors: PeerId) -> Commit:
    parts = tuple((peer, Generation(1, 1), frozenset({at})) for at, peer in enumerate(contributors))
    finished = Finished(RoundId(Ballot(0, EVERYONE[0]), step), b"d", 9, 0.0, 1.0, parts)
    return commit_of(Stamp(step, 1, CHAIN), finished)


def known_after(step: int, *contributors: PeerId) -> Membership:
    me = PeerId("me")
    membership = Membership(me, 0, View(me, 0, TIMERS), SimulatedSigner(me), Deferred())
    membership.applied([sum_of(step, *contributors)])
    return membership


def signed(commit: Commit) -> Commit:
    """Everybody named has signed it, by seat."""
    said = statement(commit, Committed(commit).restart)
    signatures = tuple(SimulatedSigner(peer).sign(said) for peer in commit.contributors[:16])
    return replace(commit, seats=frozenset(range(len(signatures))), signatures=signatures)


def test_contributors_are_named_when_they_are_others_and_every_eighth_step() -> None:
    known = known_after(2, *EVERYONE)
    assert known.brief(sum_of(3, *EVERYONE)).contributors == ()
    assert len(known.brief(sum_of(8, *EVERYONE)).contributors) == MAX_COUNTING
    others = sum_of(3, *EVERYONE[:5])
    assert known.brief(others).contributors == EVERYONE[:5] == counting_of(others)


def counting_of(commit: Commit) -> tuple[PeerId, ...]:
    parts = tuple((peer, Generation(1, 1), frozenset({at})) for at, peer in enumerate(commit.contributors))
    return counting(Finished(commit.id, b"d", 9, 0.0, 1.0, parts))


def test_a_commit_that_does_not_name_its_contributors_is_a_certificate_for_who_knows_them() -> None:
    told = replace(signed(sum_of(3, *EVERYONE)), contributors=())
    known = known_after(2, *EVERYONE)
    assert known.hear(told, now=0.0) and known.certified(told, now=0.0)
    assert known.with_votes(told).contributors == sum_of(3, *EVERYONE).contributors


def test_seats_of_contributors_that_are_not_known_are_passed_over() -> None:
    told = replace(signed(sum_of(3, *EVERYONE)), contributors=())
    known = known_after(2, *EVERYONE[:20])
    assert known.hear(told, now=0.0), "nothing is wrong with it"
    assert not known.certified(told, now=0.0)
    known.applied([told])
    assert known.roster(1) == set(EVERYONE[:20]), "what is not known changes nobody's place"
    named = signed(sum_of(4, *EVERYONE))
    assert known.hear(named, now=0.0) and known.certified(named, now=0.0)


def test_a_seat_that_does_not_exist_is_a_bad_vote() -> None:
    commit = signed(sum_of(3, *EVERYONE[:3]))
    known = known_after(2, *EVERYONE[:3])
    assert not known.hear(replace(commit, seats=frozenset({0, 1, 7})), now=0.0)


def test_who_counts_in_a_large_stage_is_the_same_by_commits_and_by_sums() -> None:
    named = sum_of(3, *EVERYONE)
    assert len(named.contributors) == MAX_COUNTING
    assert known_after(3, *EVERYONE).roster(1) == set(named.contributors)


def test_named_votes_and_seats_count_alike() -> None:
    commit = sum_of(3, *EVERYONE[:4])
    said = statement(commit, Committed(commit).restart)
    mixed = replace(
        commit,
        votes=tuple(Vote(peer, SimulatedSigner(peer).sign(said)) for peer in EVERYONE[:2]),
        seats=frozenset({3}),
        signatures=(SimulatedSigner(EVERYONE[3]).sign(said),),
    )
    known = known_after(2, *EVERYONE[:4])
    assert known.hear(mixed, now=0.0) and known.certified(mixed, now=0.0)
