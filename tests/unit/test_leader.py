"""One term of a leader: what it grants, evicts, opens and commits. Traces as named in docs/protocol.md."""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction

from stage_table import CHAIN, TIMERS, calls_of

from swarmnet.averaging.parts import shares
from swarmnet.ids import NO_RESTART, Ballot, Generation, PeerId, RoundId, mark_of
from swarmnet.messages import (
    MAX_MOVED,
    NONE,
    Commit,
    Exclusion,
    Finished,
    Heartbeat,
    Late,
    LineQuality,
    MemberState,
    Round,
    StagePlan,
    Stamp,
    Trouble,
)
from swarmnet.step.commits import commit_of, statement
from swarmnet.step.election import Election
from swarmnet.step.gate import Shape
from swarmnet.step.graph import leader_rank
from swarmnet.step.host import Call, Deferred
from swarmnet.step.idle import NonFinite
from swarmnet.step.leader import Leader
from swarmnet.step.ledger import Ledger
from swarmnet.step.lines import BrokenLines
from swarmnet.step.member import Member
from swarmnet.step.rounds import RoundBuilder
from swarmnet.step.view import View
from swarmnet.testing.virtual_swarm import SimulatedSigner

ME, B, C, D, E = (PeerId(name) for name in "ABCDE")
STAMP = Stamp(3, 0, CHAIN)
BALLOT = Ballot(1, ME)


def gen(number: int, incarnation: int = 1) -> Generation:
    return Generation(incarnation, number)


class Office:
    """A leader with members that have reported nothing yet."""

    def __init__(
        self,
        *mates: PeerId,
        microbatches: int = 2,
        lines: BrokenLines | None = None,
        excluded: tuple[PeerId, ...] = (),
        stages: int = 1,
    ) -> None:
        signer, shape = SimulatedSigner(ME), Shape(stages, microbatches, 100, max_discarded=1)
        member = Member(ME, 0, shape, TIMERS, incarnation=1, chain=CHAIN, now=0.0, signer=signer)
        self.host, self.view, self.membership = member.calls, member.view, member.membership
        self.lateness = member.lateness
        for mate in mates:
            self.beat(mate, 0.0)
        member.lines = lines or member.lines
        self.membership.restored((), tuple(Exclusion(peer, STAMP.step + 1, 1) for peer in excluded))
        order = Election(member, step=STAMP.step, now=0.0).order
        self.leader = Leader(STAMP, BALLOT, member, order, now=0.0)

    def advance(self, now: float, *, resend: bool = False) -> list[Call]:
        calls_of(self.host)
        self.leader.advance(now=now, resend=resend)
        return calls_of(self.host)

    def beat(self, mate: PeerId, now: float, incarnation: int = 1) -> None:
        self.view.hear(mate, Heartbeat(STAMP, incarnation, True, None), now=now)
        self.view.echo(mate, now=now)

    def report(
        self,
        peer: PeerId,
        owned=(),
        summed=(),
        *,
        generation=None,
        finished=None,
        commit=None,
        now=0.1,
        progress=0,
        bandwidth=0,
        trouble=None,
        revision=0,
        awaits=(),
    ) -> list[Call]:
        message = MemberState(
            STAMP,
            BALLOT,
            generation or gen(0),
            frozenset(owned) | frozenset(summed),
            frozenset(summed),
            commit_of(STAMP, finished, named=False) if finished is not None else None,
            commit,
            progress,
            line=LineQuality(bandwidth, busy=True),
            trouble=trouble,
            vote=vote_of(peer, finished),
            revision=revision,
            awaits=awaits,
        )
        calls_of(self.host)
        self.leader.on_state(peer, message, now=now)
        self.leader.advance(now=now, resend=False)
        return calls_of(self.host)

    def brief(self, generation=None, ballot=BALLOT, *, wants=None, returns=None) -> MemberState:
        """What a member says between heartbeats; else, that its last whole state holds."""
        some = [NONE if index is None else frozenset({index}) for index in (wants, returns)]
        if any(some):
            whole = MemberState(STAMP, ballot, generation or gen(0))
            return whole.unchanged(wants=some[0], returns=some[1])
        return MemberState(STAMP, ballot, gen(0), revision=1).unchanged()

    def complain(self, peer: PeerId, of: Round, *, late=None, refused=None, summed=(), now: float) -> list[Call]:
        for mate in self.leader.members:
            self.beat(mate, now)
        names = ((Late(late, True, 10.0),) if late else ()), ((refused,) if refused else ())
        return self.report(peer, summed=summed, now=now, trouble=Trouble(of.id, *names))

    def claim(self, peer: PeerId, index: int, *, generation=None, ballot=BALLOT, now=0.2) -> list[Call]:
        calls_of(self.host)
        self.leader.on_state(peer, self.brief(generation or gen(0), ballot, wants=index), now=now)
        return calls_of(self.host)

    def gives_back(self, peer: PeerId, index: int, *, now: float) -> list[Call]:
        calls_of(self.host)
        self.leader.on_state(peer, self.brief(gen(0), returns=index), now=now)
        return calls_of(self.host)

    def everybody_reports(self, *mates: PeerId) -> None:
        for peer in (ME, *mates):
            self.report(peer)


def vote_of(peer: PeerId, finished: Finished | None) -> bytes:
    """What a member that holds this sum signs."""
    if finished is None:
        return b""
    return SimulatedSigner(peer).sign(statement(commit_of(STAMP, finished), NO_RESTART))


def plans(calls: list[Call], peer: PeerId | None = None) -> list[StagePlan]:
    sent = [call.args for call in calls if call.name == "send"]
    return [message for to, message in sent if isinstance(message, StagePlan) and peer in (None, to)]


def logged(calls: list[Call], event: str) -> list[dict[str, object]]:
    return [call.fields for call in calls if (call.name, call.args) == ("log", (event,))]


def committed(calls: list[Call]) -> list[Commit]:
    return [call.args[0].commit for call in calls if call.name == "publish"]


def assigned(calls: list[Call], peer: PeerId | None = None) -> list[int]:
    return [index for plan in plans(calls, peer) for index in sorted(plan.assigned)]


def moved(calls: list[Call], peer: PeerId | None = None) -> list[tuple[int, PeerId]]:
    return [pair for plan in plans(calls, peer) for pair in plan.moved]


def ordered(calls: list[Call], peer: PeerId | None = None) -> list[int]:
    return [index for plan in plans(calls, peer) for index in sorted(plan.execute)]


def evicted(calls: list[Call], peer: PeerId | None = None) -> list[tuple[Generation | None, str]]:
    return [(plan.generation, plan.evicted) for plan in plans(calls, peer) if plan.evicted]


def attempts(calls: list[Call], peer: PeerId | None = None) -> list[Round]:
    return [plan.attempt for plan in plans(calls, peer) if plan.attempt is not None]


def sum_of(round_: Round, digest: bytes = b"d") -> Finished:
    return Finished(round_.id, digest, 2, 0.0, 1.0, round_.contributions)


def opened(office: Office) -> Round:
    assert office.leader.round is not None
    return office.leader.round


def test_nothing_is_granted_before_everybody_has_reported_and_then_at_once():
    office = Office(B)
    office.report(ME)
    assert office.claim(ME, 0) == []
    (plan,) = plans(office.report(B), ME)
    assert (plan.generation, plan.assigned) == (gen(0), {0})


def waits_for(office: Office, mate: PeerId, *spans: tuple[float, float]) -> list[tuple[float, str]]:
    """Let the leader look every half second, and hear `mate` in these spans only. When it said who was late."""
    struck, now = [], 0.0
    while now < spans[-1][1]:
        if any(start <= now <= stop for start, stop in spans):
            office.beat(mate, now)
        calls = office.advance(now=now, resend=True)
        struck += [(now, late["reason"]) for late in logged(calls, "late")]
        now += 0.5
    return struck


def test_who_is_heard_and_does_not_report_is_late_once_after_the_long_silence():
    office = Office(B)
    office.report(ME)
    ((at, reason),) = waits_for(office, B, (0.0, 60.0))
    assert at == 15.5 and reason == "does not report"
    assert assigned(office.report(ME, now=60.0)) == [] and assigned(office.claim(ME, 0, now=60.0))


def test_who_was_cut_off_is_waited_for_again_when_it_is_back():
    office = Office(B)
    office.report(ME)
    ((at, _),) = waits_for(office, B, (0.0, 1.0), (20.0, 60.0))
    assert 30.0 < at < 35.5, "it was waited for only while it was heard"


def test_who_is_silent_now_and_then_is_late_all_the_same():
    office = Office(B)
    office.report(ME)
    (struck,) = waits_for(office, B, *((4.5 * number, 4.5 * number) for number in range(14)))
    assert struck[0] < 30.0


def test_what_a_claim_or_a_report_costs_does_not_grow_with_the_members_while_indexes_are_claimed(monkeypatch):
    mates = [PeerId(f"m{number}") for number in range(30)]
    office = Office(*mates, microbatches=200)
    office.everybody_reports(*mates)
    assert not office.leader.looks, "nobody has to look at what follows"
    looks: list[PeerId] = []
    every = View.mates
    monkeypatch.setattr(View, "mates", lambda self: looks.append(self.me) or every(self))
    for index in range(100):
        assert assigned(office.claim(mates[index % 30], index))
    owned = frozenset(index for index in range(100) if index % 30 == 0)
    message = MemberState(STAMP, BALLOT, gen(0), owned, owned, None, None, 1)
    office.leader.on_state(mates[0], message, now=0.3)
    assert not office.host.calls and not office.leader.looks
    assert looks == []


def test_while_indexes_are_claimed_whatever_has_consequences_is_looked_at():
    def at_work() -> Office:
        office = Office(B, C, microbatches=3)
        office.everybody_reports(B, C)
        office.claim(B, 0)
        assert not office.leader.looks
        return office

    office = at_work()
    office.claim(B, 1)
    office.claim(B, 2)
    assert office.leader.looks, "the round may be opened"
    office = at_work()
    office.leader.on_state(B, office.brief(gen(0), returns=0), now=0.3)
    assert office.leader.looks, "what is free is to be executed at once"
    office = at_work()
    found = MemberState(STAMP, BALLOT, gen(0), frozenset(), frozenset(), None, None, 0, non_finite=frozenset({1}))
    office.leader.on_state(C, found, now=0.3)
    assert office.leader.looks, "an index may be discarded"
    office = at_work()
    office.leader.on_state(C, replace(found, generation=gen(0, 2), non_finite=frozenset()), now=0.3)
    assert office.leader.looks, "a member that was another before"
    office = at_work()
    office.view.refuse(C, now=0.3)
    office.advance(now=0.3, resend=False)
    office.beat(C, 0.4, incarnation=2)
    office.advance(now=0.4, resend=False)
    assert office.claim(B, 1) == [], "somebody has not reported"


def test_more_than_half_of_the_members_leave_a_microbatch_out():
    found, ledger = NonFinite(0, Deferred(), max_discarded=1), Ledger(2)
    report = MemberState(STAMP, BALLOT, gen(0), frozenset(), frozenset(), None, None, 0, non_finite=frozenset({1}))
    left_out = []
    for peer in (PeerId("no member"), B, C, ME):
        found.hear(peer, report)
        found.discard(ledger, {ME, B, C, PeerId("another")})
        left_out.append(set(ledger.discarded))
    assert left_out == [set(), set(), set(), {1}]


def test_beside_voters_no_newcomer_leaves_a_microbatch_out():
    office = Office(B, C)
    office.everybody_reports(B, C)
    assert office.leader._voting_members() == {ME, B, C}, "while there are no voters"
    office.membership._rosters[0] = frozenset({ME})
    assert office.leader._voting_members() == {ME}


def test_a_claim_is_granted_once_and_again_to_the_same_owner_and_moved_to_others():
    office = Office(B)
    office.everybody_reports(B)
    assert (
        plans(office.claim(B, 0), B)
        == plans(office.claim(B, 0), B)
        == [StagePlan(STAMP, BALLOT, gen(0), frozenset({0}))]
    )
    assert plans(office.claim(ME, 0), ME) == [StagePlan(STAMP, BALLOT, gen(0), moved=((0, B),))]


def test_claims_under_another_ballot_or_generation_are_not_heard():
    office = Office(B)
    office.everybody_reports(B)
    assert office.claim(B, 0, ballot=Ballot(0, B)) == []
    answers = office.claim(B, 0, generation=gen(1))
    assert not assigned(answers) and not moved(answers)
    assert office.leader.ledger.owners == [None, None]


def test_a_dead_owner_loses_its_indexes_and_they_are_ordered_at_once():
    office = Office(B)
    office.everybody_reports(B)
    office.claim(B, 0)
    office.view.refuse(B, now=0.5)
    calls = office.advance(now=0.5, resend=False)
    assert ordered(calls, ME) == [0]


def test_what_a_process_owned_that_was_started_again_is_ordered_at_once_though_it_has_no_state_yet():
    office = Office(B)
    office.everybody_reports(B)
    office.claim(B, 0)
    office.view.hear(B, Heartbeat(STAMP, 2, False, None), now=0.5)
    calls = office.advance(now=0.5, resend=True)
    assert ordered(calls, ME) == [0] and not logged(calls, "late"), "a crash is no lateness"


def test_what_a_dead_owner_leaves_goes_to_those_who_have_least_left_to_do():
    """B has summed much and has time, A has all of its own still to do."""
    office = Office(B, C, microbatches=7)
    for peer in (ME, B, C):
        office.report(peer)
    office.report(ME, owned=(0, 1))
    office.report(B, summed=(2, 3, 4))
    office.report(C, owned=(5, 6))
    office.view.refuse(C, now=0.3)
    calls = office.advance(now=0.3, resend=False)
    assert ordered(calls, B) == [5, 6] and not ordered(calls, ME)


def test_what_nobody_sends_is_ordered_when_nothing_flows():
    office = Office(B)
    office.everybody_reports(B)
    assert ordered(office.advance(now=4.9, resend=True)) == []
    office.beat(B, 5.0)
    assert ordered(office.advance(now=5.2, resend=True)) == [0, 1]


def test_a_leader_orders_eight_microbatches_of_each_member_at_a_time():
    office = Office(B, microbatches=100)
    office.everybody_reports(B)
    office.beat(B, 5.0)
    orders = ordered(office.advance(now=5.2, resend=True))
    assert sorted(orders) == list(range(16))
    assert ordered(office.advance(now=5.3, resend=True)) == []


def test_h12_a_restart_under_the_same_name_loses_what_its_predecessor_had():
    office = Office(B)
    office.everybody_reports(B)
    office.claim(B, 0)
    office.report(B, summed={0})
    calls = office.report(B, generation=gen(0, incarnation=2))
    assert office.leader.ledger.owners == [None, None]
    assert ordered(calls) == [0]
    stale = office.report(B, summed={0})  # a report of the old process, late
    assert evicted(stale, B) and office.leader.ledger.owners[0] is None


def test_a2_an_evicted_generation_never_owns_again():
    office = Office(B)
    office.everybody_reports(B)
    office.claim(B, 0)
    office.view.refuse(B, now=0.5)
    office.advance(now=0.5, resend=False)
    office.beat(B, 4.0)  # the death was an error
    calls = office.report(B, summed={0}, now=4.1)
    assert evicted(calls, B) == [(gen(0), "closed")]
    assert office.leader.ledger.owners[0] is None and B not in office.leader.members
    office.report(B, summed={0}, generation=gen(1), now=4.1)  # the same work, offered again
    assert office.leader.ledger.owners[0] == (B, gen(1))


def test_h2_overlap_discards_whoever_reports_later():
    office = Office(B)
    office.everybody_reports(B)
    office.claim(ME, 0)
    calls = office.report(B, summed={0, 1})
    assert evicted(calls, B) == [(gen(0), "discard")]
    assert office.leader.ledger.owners == [(ME, gen(0)), None]


def test_a_complete_ledger_opens_a_round_with_disjoint_sets_for_everybody():
    office = Office(B)
    office.everybody_reports(B)
    office.claim(ME, 0)
    office.claim(B, 1)
    calls = office.advance(now=0.3, resend=False)
    assert opened(office).contributions == ((ME, gen(0), frozenset({0})), (B, gen(0), frozenset({1})))
    assert opened(office).receivers == (ME, B)
    assert attempts(calls, ME) == attempts(calls, B) == [opened(office)]


def complete(office: Office) -> Round:
    office.everybody_reports(B)
    office.claim(ME, 0)
    office.claim(B, 1)
    office.advance(now=0.3, resend=False)
    return opened(office)


def test_a1_release_frees_the_index_and_ends_the_round():
    office = Office(B)
    first = complete(office)
    office.leader.on_state(B, office.brief(gen(0), returns=1), now=0.4)
    calls = office.advance(now=0.4, resend=False)
    assert office.leader.round is None and ordered(calls) == [1]
    office.claim(ME, 1)
    office.advance(now=0.5, resend=False)
    assert opened(office).id == RoundId(BALLOT, first.id.number + 1)


def test_release_of_another_generation_or_of_somebody_elses_index_changes_nothing():
    office = Office(B)
    first = complete(office)
    office.leader.on_state(B, office.brief(gen(1), returns=1), now=0.4)
    office.leader.on_state(B, office.brief(gen(0), returns=0), now=0.4)
    assert opened(office) == first


def test_commit_needs_the_ack_of_every_member():
    office = Office(B)
    first = complete(office)
    office.report(ME, summed={0}, finished=sum_of(first))
    assert office.leader.commit is None
    calls = office.report(B, summed={1}, finished=sum_of(first))
    (commit,) = committed(calls)
    assert (commit.id, commit.digest, commit.step) == (first.id, b"d", 3)


def test_reports_of_a_peer_known_dead_are_its_last_words_and_change_nothing():
    """A peer falsely believed dead was evicted at every report, generation after generation."""
    office = Office(B)
    office.everybody_reports(B)
    office.view.refuse(B, now=0.5)
    office.advance(now=0.5, resend=False)
    for number in range(5):
        office.beat(B, 0.6)
        assert not evicted(office.report(B, summed={0}, generation=gen(number), now=0.6))
    assert office.leader.ledger.closed == {(B, gen(0))} and B not in office.leader.members


def test_of_differing_digests_neither_is_committed_between_two_while_both_are_alive():
    office = Office(B)
    first = complete(office)
    office.report(ME, summed={0}, finished=sum_of(first))
    office.report(B, summed={1}, finished=sum_of(first, b"e"))
    for now in range(1, 60):
        office.beat(B, now)
        office.advance(now=now, resend=True)
    assert office.leader.commit is None, "two who differ have no majority, and none of them goes on alone"
    office.view.refuse(B, now=60.0)
    office.advance(now=60.0, resend=True)
    assert office.leader.commit is not None and office.leader.commit.digest == b"d"


def test_of_differing_digests_the_one_that_most_hold_stands_against_the_leaders_own():
    office = Office(B, C)
    office.everybody_reports(B, C)
    office.claim(ME, 0)
    office.claim(B, 1)
    office.report(ME, summed={0})
    office.report(B, summed={1})
    first = opened(office)
    for peer, owned, digest in ((ME, {0}, b"d"), (B, {1}, b"e"), (C, set(), b"e")):
        office.report(peer, summed=owned, finished=sum_of(first, digest))
    assert office.leader.commit is not None and office.leader.commit.digest == b"e"


def test_before_the_first_ack_death_of_a_contributor_costs_its_indexes_only():
    office = Office(B)
    complete(office)
    office.view.refuse(B, now=0.5)
    office.advance(now=0.5, resend=False)
    assert office.leader.round is None and office.leader.ledger.owners == [(ME, gen(0)), None]


def of_three() -> tuple[Office, Round]:
    """A round of three, of whom A and B contribute."""
    office = Office(B, C)
    office.everybody_reports(B, C)
    office.claim(ME, 0)
    office.claim(B, 1)
    office.advance(now=0.3, resend=False)
    return office, opened(office)


def test_below_a_certificate_a_round_that_loses_a_member_is_given_up_when_who_has_signed_is_free_again():
    office, first = of_three()
    office.report(ME, summed={0}, finished=sum_of(first), now=0.4)
    office.view.refuse(B, now=0.5)
    calls = office.advance(now=0.5, resend=True)
    assert opened(office) == first and attempts(calls) == [], "A may not contribute yet, so C is told nothing"
    office.beat(C, 3.8)
    office.advance(now=3.8, resend=True)
    assert opened(office) == first
    calls = office.advance(now=4.0, resend=True)
    assert office.leader.round is None and ordered(calls) == [1]
    office.claim(C, 1)
    office.report(C, summed={1}, now=4.1)
    assert opened(office).id > first.id and opened(office).receivers == (ME, C)
    for peer, index in ((ME, 0), (C, 1)):
        office.report(peer, summed={index}, finished=sum_of(opened(office), b"e"), now=4.5)
    assert office.leader.commit is not None and office.leader.commit.digest == b"e"


def test_below_a_certificate_who_lives_may_still_end_up_with_the_sum_of_a_round_that_has_lost_a_member():
    office, first = of_three()
    office.report(ME, summed={0}, finished=sum_of(first), now=0.4)
    office.view.refuse(B, now=0.5)
    office.advance(now=0.5, resend=True)
    office.report(C, finished=sum_of(first), now=0.6)
    assert office.leader.commit is not None and office.leader.commit.id == first.id


def test_above_a_certificate_a_round_is_never_given_up():
    office, first = of_three()
    office.report(ME, summed={0}, finished=sum_of(first), now=0.4)
    office.report(C, finished=sum_of(first), now=0.5)
    assert office.leader.commit is None and opened(office) == first, "B is nearly there"
    assert office.gives_back(B, 1, now=0.6) == []
    calls = office.advance(now=1.6, resend=True)
    assert attempts(calls, B) == [first] and not ordered(calls)
    office.view.refuse(B, now=0.7)
    office.advance(now=0.7, resend=True)
    assert office.leader.commit is not None and office.leader.commit.id == first.id
    commit = office.leader.commit
    assert [commit.contributors[seat] for seat in commit.seats] == [ME] and [of.peer for of in commit.votes] == [C]


def test_a_sum_that_its_holder_has_not_signed_is_none():
    office, first = of_three()
    for peer in (B, C):
        unsigned = MemberState(
            STAMP, BALLOT, gen(0), frozenset(), frozenset(), commit_of(STAMP, sum_of(first)), None, 0, vote=b"B's word"
        )
        office.leader.on_state(peer, unsigned, now=0.4)
    office.advance(now=0.4, resend=True)
    office.report(ME, summed={0}, finished=sum_of(first), now=0.4)
    assert office.leader.acks.keys() == {ME} and office.leader.commit is None


def test_a_late_state_of_an_earlier_life_ends_no_later_one():
    office = Office(B)
    office.everybody_reports(B)
    office.claim(B, 1)
    office.report(B, generation=gen(0, incarnation=2), now=0.3)
    assert office.leader.members[B] == gen(0, incarnation=2)
    office.report(B, summed={1}, now=0.4)
    assert office.leader.members[B] == gen(0, incarnation=2)


def test_who_signs_two_sums_of_one_round_has_no_say_any_more():
    office, first = of_three()
    office.report(B, summed={1}, finished=sum_of(first), now=0.4)
    calls = office.report(B, summed={1}, finished=sum_of(first, b"e"), now=0.5)
    assert not office.leader.acks and [fields["peer"] for fields in logged(calls, "convicted")] == [B]
    office.report(ME, summed={0}, finished=sum_of(first), now=0.6)
    assert office.leader.commit is None, "one of the two that are left"


def test_a5_a_sum_of_another_round_without_a_certificate_changes_nothing():
    """Nobody fetches what one replica alone says it holds: the sum is made again."""
    office = Office(B)
    mine = complete(office)
    older = Finished(RoundId(Ballot(0, B), 0), b"d", 2, 0.0, 1.0, mine.contributions)
    office.report(B, summed={1}, finished=older)
    assert opened(office) == mine
    calls = office.advance(now=1.5, resend=True)
    assert attempts(calls, ME) == attempts(calls, B) == [mine]
    office.report(B, summed={1}, finished=sum_of(mine), now=4.0)
    office.report(ME, summed={0}, finished=sum_of(mine), now=4.0)
    assert office.leader.commit is not None and office.leader.commit.id == mine.id


def test_a5_a_sum_of_another_round_with_a_certificate_beats_the_round_this_leader_has_just_opened():
    office, mine = of_three()
    older = Finished(RoundId(Ballot(0, B), 0), b"d", 2, 0.0, 1.0, mine.contributions)
    office.report(B, summed={1}, finished=older, now=0.4)
    office.report(C, finished=older, now=0.5)
    assert office.leader.commit is None, "A may be nearly there"
    for mate in (B, C):
        office.beat(mate, 3.6)
    office.advance(now=3.6, resend=True)
    assert office.leader.commit is not None and office.leader.commit.id == older.id


def test_of_two_sums_that_one_replica_each_holds_none_is_taken_and_the_step_is_summed_again():
    office = Office(B, C)
    low = Finished(RoundId(Ballot(0, B), 0), b"d", 2, 0.0, 1.0, ())
    high = Finished(RoundId(Ballot(0, C), 0), b"e", 2, 0.0, 1.0, ())
    office.report(ME)
    office.report(B, finished=high)
    office.report(C, finished=low)
    assert office.leader.round is None and assigned(office.claim(ME, 0)) and assigned(office.claim(ME, 1))
    office.report(ME, summed={0, 1})
    assert opened(office).receivers == (ME, B, C)
    commit = Commit(0, 3, CHAIN, low.id, b"d", 2, 0.0, 1.0)
    office.report(C, finished=low, commit=commit)
    assert office.leader.commit is None, "a commit is worth the votes that are under it"


def test_a6_a_sum_counts_for_as_long_as_its_holder_lives():
    office = Office(B)
    sum_ = Finished(RoundId(Ballot(0, B), 0), b"d", 2, 0.0, 1.0, ())
    office.report(ME)
    office.report(B, finished=sum_)
    assert office.leader.acks.keys() == {B}
    office.view.refuse(B, now=0.5)
    calls = office.advance(now=0.5, resend=True)
    assert not office.leader.acks and not plans(calls, ME), "ME has said a state of this term"
    assert assigned(office.claim(ME, 0), ME)


def test_a8_after_a_commit_nothing_is_opened_again():
    office = Office(B)
    first = complete(office)
    office.report(ME, summed={0}, finished=sum_of(first))
    office.report(B, summed={1}, finished=sum_of(first))
    office.view.refuse(B, now=0.5)
    calls = office.advance(now=1.0, resend=True)
    assert not ordered(calls) and not attempts(calls)
    assert office.leader.commit is not None and office.leader.commit.id == first.id


def test_silence_of_one_of_two_evicts_after_the_long_limit_only():
    office = Office(B)
    office.everybody_reports(B)
    office.claim(B, 0)
    office.advance(now=14.9, resend=True)
    assert office.leader.ledger.owners[0] == (B, gen(0))
    office.advance(now=15.2, resend=True)
    assert office.leader.ledger.owners[0] is None


def test_no_member_is_stalled_while_a_stage_has_no_replica_and_its_time_begins_when_one_is_back():
    office, alone = Office(B, stages=2), 60.0
    office.everybody_reports(B)
    office.claim(B, 0)
    gone: list[tuple[float, str]] = []
    for second in range(1, 120):
        now = float(second)
        office.beat(B, now)
        if now > alone:
            office.view.hear(D, Heartbeat(replace(STAMP, stage=1), 1, True, None), now=now)
        calls = office.report(B, owned=[0], now=now) + office.advance(now=now, resend=True)
        gone += [(now, event["reason"]) for event in logged(calls, "evicted")]
    assert [reason for _, reason in gone[:1]] == ["stalled"]
    assert gone[0][0] > alone + TIMERS.long_silence_s, "the time in which it waited for stage 1 is not its own"


def test_of_stages_that_are_not_adjacent_nothing_is_heard_and_a_member_that_hangs_is_stalled_all_the_same():
    office = Office(B, stages=3)
    office.everybody_reports(B)
    office.claim(B, 0)
    gone: list[str] = []
    for second in range(1, 60):
        now = float(second)
        office.beat(B, now)
        office.view.hear(D, Heartbeat(replace(STAMP, stage=1), 1, True, None), now=now)
        calls = office.report(B, owned=[0], now=now) + office.advance(now=now, resend=True)
        gone += [event["reason"] for event in logged(calls, "evicted")]
    assert gone[:1] == ["stalled"]


def test_a_round_is_cut_by_what_its_receivers_have_measured():
    office = Office(B, C)
    office.report(B)
    office.report(ME, bandwidth=200)
    office.report(C, bandwidth=700)
    office.claim(ME, 0)
    office.claim(C, 1)
    office.report(C, summed={1}, bandwidth=700)
    assert opened(office).receivers == (ME, B, C)
    assert opened(office).bandwidths == (200, 200, 700), "a stranger's is taken to be no better than others'"


def test_a_round_is_cut_evenly_while_nobody_has_measured_anything():
    office = Office(B)
    office.everybody_reports(B)
    office.claim(ME, 0)
    office.claim(ME, 1)
    office.report(ME, summed={0, 1})
    assert opened(office).bandwidths == ()


def test_a_member_that_holds_up_a_round_is_left_out_of_the_step_and_its_work_is_ordered():
    office = Office(B, C)
    office.everybody_reports(B, C)
    office.claim(B, 0)
    office.claim(C, 1)
    office.report(C, summed={1})
    first = opened(office)
    assert not evicted(office.complain(ME, first, late=C, now=11.0))
    assert not evicted(office.complain(B, first, late=C, now=11.5, summed={0})), "who is named may be heard"
    calls = office.complain(B, first, late=C, now=14.5, summed={0})
    assert evicted(calls, C) == [(gen(0), "discard")]
    assert ordered(calls) == [1], "what it had counted is executed again"
    office.report(C, generation=gen(1), now=14.6)
    assert assigned(office.claim(C, 1, generation=gen(1))) == [], "it takes no part before the next step"
    assert assigned(office.claim(B, 1), B)
    office.report(B, summed={0, 1}, now=15.0)
    assert opened(office).id != first.id and opened(office).receivers == (ME, B)
    for peer in (ME, B):
        calls = office.report(peer, finished=sum_of(opened(office)), now=15.5, summed={0, 1} if peer == B else ())
    assert committed(calls)


def test_a_mate_that_was_late_in_another_step_is_needed_again_when_this_step_leaves_one_out():
    """Of four voters two are no quorum: the step would stand still, although the third is in touch and at work."""
    office = Office(B, C, D)
    office.lateness.observe(D, "slows the steps down", now=0.0)
    office.everybody_reports(B, C, D)
    assert office.leader.members.keys() == {ME, B, C} and office.leader.passed_over == {D}
    office.claim(B, 0)
    office.claim(C, 1)
    office.report(C, summed={1})
    first = opened(office)
    office.complain(ME, first, late=C, now=11.0)
    for now in (11.0, 14.5):
        office.beat(D, now)
        office.complain(B, first, late=C, now=now, summed={0})
    office.advance(now=14.6)
    assert D not in office.leader.passed_over
    for peer in (C, D):
        office.report(peer, now=14.7)
    assert office.leader.members.keys() == {ME, B, D}, "the member that is left out stays out"


def test_a_mate_that_was_late_in_another_step_or_is_excluded_is_needed_again_when_a_voter_dies():
    for excluded in ((), (D,)):
        office = Office(B, C, D, excluded=excluded)
        has_committed(office, ME, B, C, D)
        office.lateness.observe(D, "slows the steps down", now=0.0)
        office.everybody_reports(B, C, D)
        assert office.leader.members.keys() == {ME, B, C}
        office.view.refuse(C, now=0.5)
        office.advance(now=0.6)
        office.report(D, now=0.7)
        assert office.leader.members.keys() == {ME, B, D}


def test_a_mate_that_is_excluded_is_needed_again_when_a_voter_in_touch_does_not_come_to_the_step():
    """Two that collude stay behind, as they fetch no aggregate, and beat: the others were no quorum, without end."""
    office = Office(B, C, D, excluded=(D,))
    has_committed(office, ME, B, C, D)
    for now in (0.0, 2.0, TIMERS.suspect_s + 0.5):
        for mate in (B, C, D):
            office.beat(mate, now)
        behind = replace(STAMP, step=STAMP.step - 1)
        office.view.hear(C, Heartbeat(behind, 1, True, None), now=now)
        for mate in (ME, B, D):
            office.report(mate, now=now)
        assert (D in office.leader.members) == (now > TIMERS.suspect_s)


def test_a_leader_whose_own_stream_stands_still_lets_the_others_sum_and_fetches_it():
    office = Office(B, C)
    office.everybody_reports(B, C)
    office.claim(ME, 0)
    office.claim(B, 1)
    office.report(B, summed={1})
    office.report(ME, summed={0})
    first = opened(office)
    office.complain(C, first, late=ME, now=11.0)
    office.complain(B, first, late=ME, now=11.0, summed={1})
    calls = office.complain(B, first, late=ME, now=14.5, summed={1})
    assert evicted(calls, ME)
    assert assigned(office.claim(C, 0), C)
    office.report(C, summed={0}, now=15.0)
    assert opened(office).receivers == (B, C)
    done = sum_of(opened(office))
    office.report(B, finished=done, summed={1}, now=16.0)
    calls = office.report(C, finished=done, summed={0}, now=16.0)
    assert committed(calls)


def test_one_voice_of_three_makes_somebody_else_reduce():
    office = Office(B, C)
    office.everybody_reports(B, C)
    office.claim(ME, 0)
    office.claim(C, 1)
    office.report(C, summed={1}, bandwidth=500)
    first = opened(office)
    office.complain(ME, first, refused=C, now=1.0)
    office.complain(ME, first, refused=C, now=5.0)
    second = opened(office)
    assert second.id != first.id and second.contributions == first.contributions
    assert second.receivers == (B, C, ME) and second.bandwidths == (500, 500, 500)


def test_s1_a_member_that_has_contributed_to_no_commit_is_not_waited_for():
    office = Office(B, C)
    earlier = Commit(0, 2, CHAIN, RoundId(BALLOT, 0), b"e", 2, 0.0, 1.0, contributors=(ME, B))
    office.membership.applied([earlier])
    office.everybody_reports(B, C)
    office.claim(ME, 0)
    office.claim(B, 1)
    office.report(ME, summed={0}, bandwidth=300)
    office.report(B, summed={1}, bandwidth=300)
    current = opened(office)
    parts = dict(zip(current.receivers, shares(current.bandwidths), strict=True))
    assert parts[C] == 0 < parts[ME], "C reduces nothing: the others would wait for what it reduces"
    done = sum_of(current)
    office.report(ME, summed={0}, finished=done)
    calls = office.report(B, summed={1}, finished=done)
    assert committed(calls)


def test_a_broken_line_between_two_of_four_costs_one_step_and_not_the_next():
    lines, d = BrokenLines(), PeerId("D")
    for step in range(2):
        office = Office(B, C, d, microbatches=4, lines=lines)
        for place, peer in enumerate((ME, B, C, d)):
            office.report(peer, summed={place})
        current = opened(office)
        cut = dict(zip(current.receivers, shares(current.bandwidths or (0,) * 4), strict=True))
        if step:
            assert cut[C] == cut[d] == 0, "they do not exchange with each other: no complaint can be true"
            return
        assert cut[C] == cut[d] != 0
        for now in (11.0, 14.5, 18.0, 30.0, 33.5, 37.0):
            for place, peer in enumerate((ME, B)):
                office.report(peer, summed={place}, now=now)
            for place, (peer, other) in ((2, (C, d)), (3, (d, C))):
                if peer in office.leader.members and office.leader.round is not None:
                    office.complain(peer, opened(office), late=other, summed={place}, now=now)
        assert office.leader._left_out == {C}


def test_whoever_lacks_a_sum_for_long_is_not_waited_for_and_keeps_what_it_has_counted():
    _, calls = one_lacks_the_sum()
    (late,) = logged(calls, "late")
    assert late == {"peer": C, "reason": "does not end up with the aggregate"}


def test_who_lacks_a_sum_and_waits_for_one_that_has_it_may_have_a_broken_line():
    """One that withholds its chunks from one member at a time has more of them than that member."""
    for before, awaits, late in (
        ((), (B,), []),
        ((), (D,), [C]),
        ((), (ME, B), [C]),
        (((B, D),), (B,), [B]),
        (((C, D),), (B,), [C]),
        (((C, B),), (B,), [C]),  # the two are kept apart: nothing flows between them
    ):
        lines = BrokenLines()
        for pair in before:
            lines.broken(pair[0], pair[1:], step=STAMP.step - 1)
        office, calls = one_lacks_the_sum(awaits, lines)
        assert [each["peer"] for each in logged(calls, "late")] == late, (before, awaits)
        assert (C in lines.ends(STAMP.step)) == (awaits != (D,) or (C, D) in before)
    office, _ = one_lacks_the_sum((B,), until=10.0)
    assert office.leader.waits() == {C: "has not got the sum"} and not office.leader.late()
    calls = office.advance(10.1, resend=True)
    assert [plan.awaits for plan in plans(calls, B)] == [(C,)], "members do not take that for the leader's own delay"


def one_lacks_the_sum(
    awaits: tuple[PeerId, ...] = (), lines: BrokenLines | None = None, *, until: float = 13.0
) -> tuple[Office, list[Call]]:
    """B and I hold a certified sum, and C waits for it until then, for these."""
    office = Office(B, C, lines=lines)
    office.everybody_reports(B, C)
    office.claim(ME, 0)
    office.claim(C, 1)
    office.report(C, summed={1}, now=1.0)
    done = sum_of(opened(office))
    office.report(ME, finished=done, summed={0}, now=2.0)
    calls = office.report(B, finished=done, now=3.0)
    assert not evicted(calls) and office.leader.commit is None
    for mate in (B, C):
        office.beat(mate, 10.9)
    office.report(C, summed={1}, awaits=awaits, now=10.9)
    office.report(B, finished=done, now=10.9)
    assert office.leader.commit is None, "four times as long as the sum took to make"
    if until < 12.0:
        return office, office.report(C, summed={1}, awaits=awaits, now=until)
    for mate in (B, C):
        office.beat(mate, 12.0)
    calls = office.report(B, finished=done, now=13.0)
    assert not evicted(calls), "its generation is in the sum"
    assert office.leader.commit is not None and office.leader.commit.contributors == (ME, C)
    return office, calls


def test_a_leader_that_sums_alone_says_so():
    office = Office()
    office.view.hear(B, Heartbeat(Stamp(2, 0, CHAIN), 1, True, None), now=0.0)
    office.report(ME)
    office.claim(ME, 0)
    office.claim(ME, 1)
    calls = office.report(ME, summed={0, 1})
    alone = logged(calls, "averaged_alone")
    assert alone == [{"step": 3, "reason": f"{B} is at version 2"}]


def test_a_certified_sum_of_a_round_before_this_leader_waits_for_nobody():
    """Who lacks it fetches it; it has held up no round of this leader, so it is not late."""
    office = Office(B, C)
    whole = Finished(RoundId(Ballot(0, C), 7), b"d", 2, 0.0, 1.0, ((ME, gen(0), frozenset({0, 1})),))
    office.report(ME, summed={0, 1}, finished=whole)
    office.report(B, finished=whole)
    assert office.leader.commit is None, "nothing is said before everybody has reported"
    calls = office.report(C)
    assert office.leader.commit is not None and office.leader.commit.id == whole.id
    assert not logged(calls, "late")


def test_who_is_excluded_counts_nothing_and_hears_who_owns_what_it_asks_for():
    office = Office(B, C, excluded=(C,))
    office.report(ME)
    office.report(B)
    assert office.leader.members.keys() == {ME, B}, "its report is not waited for"
    calls = office.claim(C, 1)
    ((index, owner),) = moved(calls, C)
    assert ordered(calls, owner) == [1] == [index] and owner in (ME, B)
    assert evicted(office.report(C, owned={1}), C) == [(gen(0), "discard")]


def test_an_order_that_a_member_did_not_take_is_no_work_once_it_has_reported_that_nothing_changed():
    office = Office(B, C, D, excluded=(D,))
    for peer in (ME, B, C):
        office.report(peer, revision=1)
    (ordered,) = [call.args[0] for call in office.claim(D, 1) if call.name == "send" and call.args[0] != D]
    taker = next(peer for peer in (ME, B, C) if peer != ordered)
    office.claim(taker, 1)
    office.leader.on_state(ordered, office.brief(), now=0.3)
    assert office.leader._work.at_work[ordered] == 0


def test_nobody_is_passed_over_if_the_others_would_be_too_few():
    office = Office(B, excluded=(B,))
    office.report(ME)
    assert office.leader.members.keys() == {ME} and office.claim(ME, 0) == [], "the report of B is waited for"


def test_now_and_then_a_round_is_cut_evenly_so_that_lines_show_what_they_carry():
    """By the slowest line, not by none: how long a member may stand still follows from it."""
    ledger = Ledger(1)
    ledger.claim((ME, gen(0)), 0)
    for step, cut in ((7, (100, 100, 700)), (8, (100, 100, 100))):
        opening = RoundBuilder(replace(STAMP, step=step), BALLOT, 16, itertools.count())
        opening.measured(ME, LineQuality(100))
        opening.measured(C, LineQuality(700, busy=True))
        assert opening.open([ME, B, C], ledger).bandwidths == cut
    assert set(shares(cut)) == {Fraction(1, 3)}


def test_a_round_that_no_line_keeps_waiting_is_cut_evenly():
    """However differently fast machines were for a moment: bytes are the same for all."""
    ledger = Ledger(1)
    ledger.claim((ME, gen(0)), 0)
    for busy, cut in ((False, (100, 100, 100)), (True, (100, 100, 700))):
        opening = RoundBuilder(replace(STAMP, step=7), BALLOT, 16, itertools.count())
        opening.measured(ME, LineQuality(100, busy=busy))
        opening.measured(C, LineQuality(700))
        assert opening.open([ME, B, C], ledger).bandwidths == cut


def test_a_leader_that_left_the_step_to_others_takes_it_up_again_when_they_die():
    office = Office(B)
    office.everybody_reports(B)
    office.claim(ME, 0)
    office.claim(B, 1)
    office.report(B, summed={1})
    first = opened(office)
    office.report(ME, summed={0})
    office.complain(B, first, late=ME, now=11.0, summed={1})
    assert evicted(office.complain(B, first, late=ME, now=14.5, summed={1}), ME)
    office.view.refuse(B, now=15.0)
    office.advance(now=15.0, resend=True)
    office.report(ME, generation=gen(1), now=15.5)
    assert all(assigned(office.claim(ME, index, generation=gen(1)), ME) for index in (0, 1))
    office.report(ME, generation=gen(1), summed={0, 1}, now=16.0)
    assert opened(office).receivers == (ME,)


def test_who_reports_what_others_own_under_three_generations_is_left_out_and_late():
    office = Office(B, C)
    office.everybody_reports(B, C)
    office.claim(B, 0)
    office.claim(B, 1)
    office.report(C, generation=gen(1), owned={0})
    office.report(C, generation=gen(1), owned={0})
    office.report(C, generation=gen(2), owned={0})
    assert C not in office.leader.passed_over
    calls = office.report(C, generation=gen(3), owned={0}, now=2.9)
    (late,) = logged(calls, "late")
    assert late["peer"] == C and late["reason"] == "reports what others own"
    office.report(B, summed={0, 1}, now=3.0)
    assert {peer for peer, _, _ in opened(office).contributions} == {B}, "the round waits for it no more"


def test_a_member_with_a_third_new_accumulator_in_a_step_is_left_out_and_late():
    office = Office(B, C)
    office.everybody_reports(B, C)
    for number in (1, 2):
        office.report(C, generation=gen(number))
    assert C in office.leader.members, "a peer may restart once or twice"
    calls = office.report(C, generation=gen(3), now=1.0)
    assert logged(calls, "late")[0]["peer"] == C and C not in office.leader.members
    office.report(C, generation=gen(4), now=1.1)
    assert C not in office.leader.members, "not in this step"


def test_a_member_that_discards_what_it_was_told_to_discard_does_not_offend():
    office = Office(B, C)
    has_committed(office, ME, B)
    office.everybody_reports(B, C)
    office.lateness.observe(C, "was late in another step", now=0.5)
    office.advance(now=0.5, resend=True)
    assert C in office.leader.passed_over
    assert evicted(office.report(C, owned={0}, now=0.6), C) == [(gen(0), "discard")]
    assert not logged(office.report(C, generation=gen(1), now=0.7), "evicted")


def has_committed(office: Office, *contributors: PeerId) -> None:
    named = tuple(sorted(contributors))
    office.membership.applied([Commit(0, 2, CHAIN, RoundId(BALLOT, 0), b"d", 2, 0.0, 1.0, contributors=named)])


def test_a_correct_member_that_is_no_voter_is_not_left_out_for_a_state_that_crossed_a_new_ballot():
    office = Office(B, C)
    has_committed(office, ME, B)
    office.everybody_reports(B, C)
    office.claim(B, 0)
    calls = office.report(C, generation=gen(1), owned={0})
    assert evicted(calls, C) and not logged(calls, "late")
    calls = office.report(C, generation=gen(2))
    assert C in office.leader.members, "it has counted nothing under that one"
    assert logged(office.report(C, generation=gen(3)), "late"), "identities are free: one new accumulator is its last"


def test_a_member_of_a_large_stage_that_contributes_may_begin_again_also_if_it_has_no_vote():
    crowd = [PeerId(f"crowd-{number}") for number in range(40)]
    for contributes in (True, False):
        member = max(crowd, key=mark_of)
        office = Office(B, member)
        has_committed(office, ME, B, *(peer for peer in crowd if contributes or peer != member))
        assert member not in office.membership.roster(0)
        office.everybody_reports(B, member)
        assert bool(logged(office.report(member, generation=gen(1)), "late")) != contributes


def test_nobody_is_ordered_to_execute_a_discarded_index_for_an_excluded_peer():
    office = Office(B, C, D)
    has_committed(office, ME, B, C, D)
    office.membership.restored((), (Exclusion(D, STAMP.step + 9, 1),))
    office.everybody_reports(B, C)
    office.leader.ledger.discard(0)
    assert not ordered(office.claim(D, 0)), "it is left out of the step"
    assert ordered(office.claim(D, 1)) == [1]


def test_those_who_lead_next_are_told_what_the_leader_owns_three_beside_it_and_no_passed_over_one():
    mates = tuple(PeerId(name) for name in "BCDEF")
    office = Office(*mates)
    has_committed(office, ME, *mates)
    out = min(mates, key=lambda peer: leader_rank(CHAIN, 0, peer))
    office.membership.restored((), (Exclusion(out, STAMP.step + 9, 1),))
    office.everybody_reports(*(peer for peer in mates if peer != out))
    office.claim(ME, 0)
    calls = office.advance(now=0.3, resend=True)
    told = {peer for peer in mates for plan in plans(calls, peer) if plan.given}
    assert told == {*sorted({*mates} - {out}, key=lambda peer: leader_rank(CHAIN, 0, peer))[:3]}


def test_an_attempt_that_lost_a_member_ends_with_the_last_holder_of_its_aggregate():
    office, first = of_three()
    office.report(ME, summed={0}, finished=sum_of(first), now=0.4)
    office.report(B, generation=gen(1), now=0.5)
    assert office.leader.current_id == first.id, "others may hold it, and join no other attempt so soon"
    office.report(ME, summed={0}, now=0.6)
    assert office.leader.current_id is None


def test_a_report_of_who_is_no_member_does_not_end_the_open_round():
    office = Office(B)
    office.everybody_reports(B)
    office.claim(ME, 0)
    office.claim(ME, 1)
    office.report(ME, summed={0, 1}, now=0.3)
    before = opened(office).id
    office.beat(C, 0.4)
    office.report(C, owned={0}, now=0.4)
    assert opened(office).id == before


def test_a_release_is_not_heard_once_the_leader_holds_the_rounds_sum():
    office = Office(B)
    office.everybody_reports(B)
    office.claim(ME, 0)
    office.claim(B, 1)
    office.report(ME, summed={0}, now=0.3)
    office.report(B, summed={1}, now=0.3)
    round_ = opened(office)
    office.report(ME, summed={0}, finished=sum_of(round_), now=0.4)
    assert office.gives_back(B, 1, now=0.5) == []
    assert opened(office).id == round_.id


def test_a_release_that_two_holders_of_the_sum_refute_is_not_heard():
    for holders, released in (((C,), True), ((C, D), False)):
        office = Office(B, C, D)
        office.everybody_reports(B, C, D)
        office.claim(ME, 0)
        office.claim(B, 1)
        office.report(ME, summed={0}, now=0.3)
        office.report(B, summed={1}, now=0.3)
        first = opened(office)
        for peer in holders:
            office.report(peer, finished=sum_of(first), now=0.4)
        calls = office.gives_back(B, 1, now=0.5)
        assert len(logged(calls, "released")) == released
        assert (office.leader.round is None) == released


def test_a_report_of_an_older_generation_changes_nothing():
    office = Office(B)
    office.everybody_reports(B)
    office.report(B, generation=gen(1), summed={1}, now=0.2)
    office.report(B, generation=gen(0), summed={0}, now=0.3)  # the network delivers it late
    assert office.leader.members[B] == gen(1) and office.leader.ledger.owners == [None, (B, gen(1))]


def test_who_gives_back_what_rounds_name_again_and_again_is_late():
    office, struck, now = Office(B), [], 0.3
    office.everybody_reports(B)
    office.claim(ME, 0)
    office.report(ME, summed={0}, now=now)
    for _ in range(8):
        office.beat(B, now)
        office.claim(B, 1, now=now)
        struck += logged(office.report(B, summed={1}, now=now), "late")
        assert office.leader.round is not None
        now += 1.0
        office.leader.on_state(B, office.brief(gen(0), returns=1), now=now)
    assert struck and struck[0]["reason"] == "gives back what it was granted"


def test_what_was_ordered_assigned_and_given_back_is_ordered_again_at_once():
    office, now = Office(B, C), 2 * TIMERS.long_silence_s
    office.everybody_reports(B, C)
    for mate in (B, C):
        office.beat(mate, now)
    first = office.advance(now=now, resend=True)
    peer = next(peer for peer in (ME, B, C) if ordered(first, peer))
    (index,) = ordered(first, peer)
    office.claim(peer, index, now=now + 0.1)
    office.leader.on_state(peer, office.brief(returns=index), now=now + 0.2)
    again = office.advance(now=now + 0.3, resend=False)
    assert index in ordered(again) and index not in ordered(again, peer)


def test_a_leader_that_holds_a_sum_from_before_hears_the_others_before_it_opens_another_round():
    given = ((ME, gen(0), frozenset({0})), (B, gen(0), frozenset({1})), (C, gen(0), frozenset()))
    held = Finished(RoundId(Ballot(0, B), 0), b"d", 2, 0.0, 1.0, given)
    for others_hold_it in (False, True):
        office = Office(B, C)
        office.report(ME, summed={0}, finished=held)
        office.report(C)
        office.report(B, summed={1})
        assert office.leader.round is None, "all is summed, and the sum may have been signed by most"
        if others_hold_it:
            for mate in (B, C):
                office.report(mate, summed={1} if mate == B else (), finished=held, now=1.0)
            assert office.leader.commit is not None and office.leader.commit.id == held.id
        else:
            for mate in (B, C):
                office.beat(mate, TIMERS.suspect_s + 0.1)
            office.advance(now=TIMERS.suspect_s + 0.1, resend=True)
            assert office.leader.round is not None, "it is summed again"


def test_a_leader_that_makes_an_aggregate_again_names_the_late_peers_of_the_one_that_may_be_committed():
    """The last leader and E died once they had signed, with B, that C was late; this leader has seen nothing of C."""
    given = ((ME, gen(0), frozenset({0})), (B, gen(0), frozenset({1})))
    for dead, late in (((D, E), (C,)), ((E,), ())):
        office = Office(*{B, C, D, E}.difference(dead))
        has_committed(office, ME, B, C, D, E)
        held = Finished(RoundId(Ballot(0, D), 0), b"d", 2, 0.0, 1.0, given, late=(C,))
        office.report(B, summed={1}, finished=held)
        for peer in sorted({C, D}.difference(dead)):
            office.report(peer)
        office.report(ME, summed={0})
        assert opened(office).late == late


def test_a_leader_names_an_excluded_peer_again_only_if_another_leader_or_most_have_found_the_same():
    for named_by, most, again in ((None, False, ()), (ME, False, ()), (B, False, (D,)), (ME, True, (D,))):
        office = Office(B, C, D)
        has_committed(office, ME, B, C, D)
        office.membership.restored((), (Exclusion(D, STAMP.step, 1),))  # it has ended
        if named_by is not None:
            office.lateness.committed((D,), {D}, named_by, now=0.0)
        office.lateness.observe(D, "does not report", now=0.1)
        office.view.late = (D,)
        for mate in (B, C, D):
            beat = Heartbeat(STAMP, 1, True, None, late=(D,) if most and mate == B else ())
            office.view.hear(mate, beat, now=0.1)
        office.report(ME, summed={0})
        office.report(B, summed={1})
        office.report(C)
        assert opened(office).late == again, (named_by, most)


def test_who_wants_everything_is_answered_about_as_many_indexes_as_an_answer_names():
    office = Office(B, microbatches=4 * MAX_MOVED)
    office.everybody_reports(B)
    office.leader.on_state(
        B, MemberState(STAMP, BALLOT, gen(0)).unchanged(wants=frozenset(range(4 * MAX_MOVED))), now=0.2
    )
    assert sorted(index for index, owner in enumerate(office.leader.ledger.owners) if owner) == list(range(MAX_MOVED))
