"""Whose turn it is to keep, and what follows where somebody does not."""

from stage_table import CHAIN, TIMERS, Table, calls_of

from swarmnet.ids import Ballot, PeerId, RoundId
from swarmnet.messages import Ban, Exclusion, Heartbeat, Round, StagePlan, Stamp
from swarmnet.step.election import Election


def elections(table: Table) -> list[tuple[PeerId, Election]]:
    """Another beginning of the step for each member, whose views go on; first in order first."""
    found = {member.me: Election(member, step=0, now=table.now) for member in table.members.values()}
    order = next(iter(found.values())).order(table.now)
    return [(peer, found[peer]) for peer in order]


def late(election: Election, now: float) -> list[PeerId]:
    return election._lateness.late(now=now)


def test_who_does_not_keep_in_its_turn_is_late_for_all_who_follow_another() -> None:
    table = Table("A", "B", "C")
    (lazy, _), (second, stands), (_, follows) = elections(table)
    table.tick(3 * TIMERS.suspect_s)
    assert stands.due(leading=False, now=table.now) is None, "its turn is not over"
    table.tick(1.0)
    assert stands.due(leading=False, now=table.now) == Ballot(0, second) and late(stands, table.now) == [lazy]
    assert follows.promise(Ballot(0, second), now=table.now) and late(follows, table.now) == [lazy]


def test_who_follows_another_that_does_not_lead_in_its_turn_is_not_late() -> None:
    table = Table("A", "B", "C")
    (lazy, _), (second, _), (third, stands) = elections(table)
    follows = stands._view.get(second)
    assert follows is not None
    follows.leader = Ballot(0, lazy)
    table.tick(4 * TIMERS.suspect_s + 1.0)
    assert stands.due(leading=False, now=table.now) == Ballot(0, third) and late(stands, table.now) == [lazy]


def test_a_leader_that_stands_at_once_makes_no_peer_late() -> None:
    table = Table("A", "B", "C")
    (first, keeps), *_, (_, follows) = elections(table)
    assert keeps.due(leading=False, now=table.now) == Ballot(0, first)
    assert follows.promise(Ballot(0, first), now=table.now) and not late(follows, table.now)


def test_two_that_have_yielded_to_each_other_do_not_wait_for_each_other_for_ever() -> None:
    """One counted, and yielded to the higher ballot; the other did not yet, and yielded to one that counts."""
    table = Table("A", "K")
    (first, one), (second, other) = elections(table)
    for election, mate in ((one, second), (other, first)):
        election.promised, election._promised_at = Ballot(0, mate), table.now
        election._view.get(mate).leader = Ballot(0, election._view.me)
    assert one.due(leading=False, now=table.now) is None, "its heartbeats may be older"
    now = table.now + TIMERS.settle_s + 0.1
    assert one.due(leading=False, now=now) == Ballot(1, first) and other.due(leading=False, now=now) is None
    one._view.get(second).leader = None
    assert one.due(leading=False, now=now) is None


def test_a_leader_that_is_to_be_banned_is_not_followed() -> None:
    table = Table("A", "B", "C")
    (first, _), (second, stands), (_, follows) = elections(table)
    for election in (stands, follows):
        election._member.bans = (Ban(first, 0, bytes(32)),)
    assert not follows.promise(Ballot(0, first), now=table.now)
    assert stands.due(leading=False, now=table.now) == Ballot(0, second)
    assert follows.promise(Ballot(0, second), now=table.now)


def test_if_the_next_in_order_does_not_stand_for_a_dead_leader_another_does() -> None:
    table = Table("A", "B", "C")
    (first, _), (_, next_one), (last, waits) = elections(table)
    for election in (next_one, waits):
        assert election.promise(Ballot(0, first), now=table.now)
    table.kill(first)
    assert next_one.due(leading=False, now=table.now) == Ballot(1, next_one._view.me)
    assert waits.due(leading=False, now=table.now) is None
    table.tick(TIMERS.suspect_s + 1.0)
    assert waits.due(leading=False, now=table.now) == Ballot(1, last)


def test_a_leader_whose_round_is_refused_is_left_at_once_and_not_followed_again() -> None:
    table = Table("A", "B", "C")
    leader = next(member for member in table.members.values() if member.oldest.leader is not None)
    member = next(each for each in table.members.values() if each is not leader and each.oldest.promised is not None)
    ballot = member.oldest.promised
    assert ballot is not None and ballot.peer == leader.me
    # All microbatches are left out of the step, and the run tolerates none.
    every = frozenset(range(member.shape.num_microbatches))
    bad = Round(member.oldest.stamp, RoundId(ballot, 1), (), (leader.me,), (), discarded=every)
    member.receive(leader.me, StagePlan(bad.stamp, ballot, attempt=bad), now=table.now)
    assert [call.args for call in calls_of(member.calls) if call.name == "log"] == [("refused_message",), ("late",)]
    election = member.oldest.election
    assert not election.promise(Ballot(9, leader.me), now=table.now), "even if most follow it"
    places = [peer for peer in election.order(table.now) if peer != leader.me]
    due = election.due(leading=False, now=table.now + places.index(member.me) * TIMERS.suspect_s + 0.1)
    assert due == Ballot(ballot.number + 1, member.me)


def heard(
    election: Election, peer: PeerId, *, leader: Ballot | None, late: tuple[PeerId, ...] = (), now: float
) -> None:
    """That replica's heartbeat: whom it follows, and whom it has observed to be late."""
    seen = election._view.get(peer)
    assert seen is not None
    election._view.hear(peer, Heartbeat(Stamp(0, 0, CHAIN), seen.incarnation, True, leader, late=late), now=now)


def test_who_runs_for_leader_does_not_come_back_for_heartbeats_that_are_older() -> None:
    table = Table("A", "B", "C")
    (first, _), (second, runs), (third, _) = elections(table)
    old, now = Ballot(0, first), table.now
    for peer in (first, third):
        heard(runs, peer, leader=old, now=now)
    assert runs.promise(Ballot(1, second), now=now)
    assert not runs.promise(old, now=now + 0.1), "the others do not know yet that I run"
    later = now + TIMERS.settle_s + 0.1
    for peer in (first, third):
        heard(runs, peer, leader=old, now=later)
    assert runs.promise(old, now=later), "they know it, and stay with the leader"


def test_excluded_peers_lead_last_even_if_too_many_are_out_to_be_passed_over() -> None:
    table = Table("A", "B", "C")
    (first, _), (second, _), (third, sees) = elections(table)
    sees._membership.restored((), (Exclusion(first, 32, 1),))
    assert sees.order(table.now) == [second, third]
    sees._lateness.observe(second, "by me alone", now=table.now)
    assert sees.order(table.now) == [second, third], "the others would have another order"
    heard(sees, first, leader=None, late=(second,), now=table.now)
    sees._view.late = (second,)
    assert sees.order(table.now) == [third, first], "most have observed it; fewer than half are passed over"


def test_a_leaders_time_begins_anew_with_a_round_of_fewer_members_and_with_no_other() -> None:
    for second_round, is_late in ((("A", "B"), False), (("A", "B", "C"), True)):
        table = Table("A", "B", "C")
        (first, _), *_, (_, follows) = elections(table)
        ballot, began_at = Ballot(0, first), table.now
        assert follows.promise(ballot, now=began_at)
        term_s = 2 * table.members["A"].pace.patience_s
        for number, names in enumerate((("A", "B", "C"), second_round)):
            opened = Round(Stamp(0, 0, CHAIN), RoundId(ballot, number), (), tuple(PeerId(name) for name in names), ())
            follows.opened(opened, now=began_at + (number + 1) * 0.3 * term_s)
        follows.due(leading=False, now=began_at + 0.9 * term_s)
        assert not late(follows, began_at + 0.9 * term_s)
        follows.due(leading=False, now=began_at + 1.2 * term_s)
        assert late(follows, began_at + 1.2 * term_s) == ([first] if is_late else [])
