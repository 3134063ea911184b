"""Who counts in a stage and for how long, whose votes count, and which commits are certificates."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stage_table import CHAIN, TIMERS

from swarmnet import statement as signing
from swarmnet.ids import NO_RESTART, Ballot, Generation, PeerId, Restart, RoundId
from swarmnet.messages import MAX_VOTES, Ban, Commit, Finished, Heartbeat, Stamp, StateHeader, Vote, roll_of
from swarmnet.step.commits import commit_of, evidence, statement
from swarmnet.step.gate import Shape
from swarmnet.step.host import Deferred
from swarmnet.step.member import Member
from swarmnet.step.membership import Membership
from swarmnet.step.view import View
from swarmnet.testing.virtual_swarm import SimulatedSigner

ME, B, C, D, E = (PeerId(name) for name in "ABCDE")
LONG_S = TIMERS.long_silence_s


class Known:
    """What one replica of stage 0 knows."""

    def __init__(self, *mates: PeerId, roster: tuple[PeerId, ...] = (), neighbours: tuple[PeerId, ...] = ()) -> None:
        self.view = View(ME, 0, TIMERS)
        self.host = Deferred()
        self.of = Membership(ME, 0, self.view, SimulatedSigner(ME), self.host)
        for stage, peers in ((0, mates), (1, neighbours)):
            for peer in peers:
                self.beat(peer, stage=stage)
        if roster:
            self.of.applied([commit(2, contributors=roster)])

    def beat(self, peer: PeerId, *, stage: int = 0, now: float = 0.0, synced: bool = True) -> None:
        self.view.hear(peer, Heartbeat(Stamp(3, stage, CHAIN), 1, synced, None), now=now)

    def vote(self, of: Commit, *peers: PeerId, now: float = 0.0) -> list[bool]:
        return [self.of.hear_vote(of, peer, signed(peer, of), now=now) for peer in peers]

    def certified(self, of: Commit, now: float = 0.0) -> bool:
        return self.of.certified(of, now=now)


def commit(
    step: int = 3,
    *,
    stage: int = 0,
    number: int = 0,
    digest: bytes = b"d",
    contributors: tuple[PeerId, ...] = (),
    norm: float = 1.0,
    tokens: int = 2,
) -> Commit:
    round_id = RoundId(Ballot(0, B), number)
    roll = roll_of(contributors)
    return Commit(stage, step, CHAIN, round_id, digest, tokens, 0.0, norm, roll=roll, contributors=contributors)


def signed(peer: PeerId, of: Commit, restart: Restart = NO_RESTART) -> bytes:
    return SimulatedSigner(peer).sign(statement(of, restart))


def with_votes(of: Commit, *peers: PeerId) -> Commit:
    return replace(of, votes=tuple(Vote(peer, signed(peer, of)) for peer in peers))


def votes_of(of: Commit) -> dict[PeerId, bytes]:
    """By name or by seat."""
    seated = {of.contributors[seat]: said for seat, said in zip(sorted(of.seats), of.signatures, strict=True)}
    return seated | {vote.peer: vote.signature for vote in of.votes}


# ---------------------------------------------------------------- what is signed


def test_a_replica_of_another_stage_that_has_just_taken_state_over_need_not_sign():
    """It may have woken from a hang: until it contributes again, the other one of its stage commits without it."""
    known = Known(neighbours=(D, E))
    known.of.applied([commit(2, stage=1, contributors=(D, E))])
    made = commit(3, stage=1)
    known.vote(made, D)
    assert not known.certified(made)
    known.view.hear(E, Heartbeat(Stamp(3, 1, CHAIN), 1, True, None, new=True), now=0.0)
    assert known.certified(made)


def test_of_too_many_excluded_voters_those_that_were_named_last_are_out():
    """So a leader that has named correct peers again and again does not keep the others from naming it."""
    known = Known(roster=(ME, B, C, D))
    for step, late in enumerate((B, B, C, D), 3):
        known.of.applied([replace(commit(step), late=(late,))])
    assert known.of.excluded(0, 7) == [D] and known.of.may_not_lead(7) == [D]
    last = 7 + 32 + 128
    assert known.of.may_not_lead(last - 1) == [D] != known.of.may_not_lead(last), "it is forgotten"


def test_late_peers_that_are_no_voters_do_not_free_an_excluded_voter():
    known = Known(roster=(ME, B, C, D))
    for step, late in enumerate((B, "x", "y"), 3):
        known.of.applied([replace(commit(step), late=(PeerId(late),))])
    assert known.of.excluded(0, 6) == ["y", "x", B]


def test_a_sum_is_committed_with_whoever_contributed_to_it():
    given_away = (
        (C, Generation(1, 0), frozenset({1})),
        (ME, Generation(1, 0), frozenset({0})),
        (D, Generation(1, 0), frozenset[int]()),
    )
    finished = Finished(RoundId(Ballot(0, B), 4), b"d", 2, 0.5, 1.0, given_away, frozenset({2}))
    found = commit_of(Stamp(3, 0, CHAIN), finished)
    assert found.says(finished) and found.contributors == (ME, C), "who has summed nothing has contributed nothing"
    assert (found.stage, found.step, found.chain, found.id) == (0, 3, CHAIN, finished.id)


@pytest.mark.parametrize(
    "other",
    [
        replace(commit(), stage=1),
        replace(commit(), step=4),
        replace(commit(), digest=b"e"),
        replace(commit(), num_tokens=3),
        replace(commit(), loss_sum=0.5),
        replace(commit(), grad_sq_norm=2.0),
        replace(commit(), discarded=frozenset({1})),
        commit(contributors=(ME,)),
        replace(commit(), chain=type(CHAIN)("2" * 64)),
        replace(commit(), id=RoundId(Ballot(1, B), 0)),
        replace(commit(), id=RoundId(Ballot(0, C), 0)),
        replace(commit(), id=RoundId(Ballot(0, B), 1)),
    ],
    ids=[
        "stage",
        "step",
        "digest",
        "tokens",
        "loss",
        "norm",
        "discarded",
        "contributors",
        "chain",
        "ballot",
        "leader",
        "round",
    ],
)
def test_a_vote_is_for_all_that_a_commit_says(other: Commit):
    known = Known(B, neighbours=(B,))
    assert not known.of.hear_vote(other, B, signed(B, commit()), now=0.0)
    assert known.of.hear_vote(commit(), B, signed(B, commit()), now=0.0)


def test_a_vote_is_not_for_another_restart_of_the_run():
    known = Known(B)
    known.of.follow(Restart(1, 2))
    assert not known.of.hear_vote(commit(), B, signed(B, commit()), now=0.0)
    assert known.of.hear_vote(commit(), B, signed(B, commit(), Restart(1, 2)), now=0.0)
    assert known.of.sign(commit()) == signed(ME, commit(), Restart(1, 2))


# ---------------------------------------------------------------- who counts, and for how long


def test_before_the_first_commit_all_replicas_in_touch_are_the_live_ones():
    known = Known(B, C, D)
    known.beat(D, synced=False)
    assert known.of.roster(0) == frozenset() and known.of.live(0, now=0.0) == {ME, B, C}
    assert not known.of.is_new(B), "all are"
    for second in range(5):
        for peer in (B, C):
            known.beat(peer, now=second)
        known.view.echo(B, now=second)
        known.view.review(now=second)
    assert known.of.live(0, now=4.0) == {ME, B}


def test_a_mate_counts_from_the_first_committed_sum_that_it_has_contributed_to():
    known = Known(B, C, D, roster=(ME, B))
    assert known.of.roster(0) == known.of.live(0, now=0.0) == {ME, B}
    assert known.of.is_new(C) and not known.of.is_new(B)
    known.vote(commit(), C)
    known.of.applied([with_votes(commit(contributors=(ME, B, D)), ME, B, C)])
    assert known.of.roster(0) == {ME, B, D}, "to be heard and to sign makes nobody count"


def test_whoever_signed_the_first_commit_that_is_known_counts_too():
    known = Known(B, C)
    known.vote(commit(contributors=(B,)), C)
    known.of.applied([commit(contributors=(B,))])
    assert known.of.roster(0) == {B, C}


def test_names_under_a_commit_that_came_with_state_count_if_they_have_signed_it():
    shape = Shape(1, 2, 10)
    finished = Finished(RoundId(Ballot(0, B), 0), b"d", 2, 0.0, 1.0, ((C, Generation(1, 0), frozenset({0, 1})),))
    committed = commit_of(Stamp(3, 0, CHAIN), finished)
    forged = tuple(Vote(PeerId(f"S{number}"), b"x") for number in range(9))
    member = Member(ME, 0, shape, TIMERS, incarnation=1, chain=CHAIN, now=0.0, signer=SimulatedSigner(ME))
    for peer in (B, *(vote.peer for vote in forged)):
        member.view.hear(peer, Heartbeat(Stamp(3, 0, CHAIN), 1, True, None), now=0.0)
    given = replace(committed, votes=(*with_votes(committed, B).votes, *forged))
    member.restored(StateHeader(3, CHAIN, CHAIN, CHAIN), finished, (given,), now=0.0)
    assert member.oldest.applying
    member.applied(now=0.0)
    assert member.membership.roster(0) == {ME, B, C}


def test_a_replica_without_state_is_not_led_by_whom_it_hears_first():
    """Of those that serve it has heard one, which has signed alone."""
    for known in (Known(B), Known(B, roster=(ME, B, C))):
        alone, both = with_votes(commit(), B), with_votes(commit(), B, C)
        assert not known.of.proven(alone, frozenset({B, C}), now=0.0)
        assert known.of.proven(alone, frozenset({B}), now=0.0), "the other is gone"
        assert known.of.proven(both, frozenset({B, C, D} if not known.of.roster(0) else {B, C}), now=0.0)
        assert not known.of.proven(replace(both, digest=b"x"), frozenset({B, C}), now=0.0), "nobody has signed that"


def test_a_commit_that_bans_a_peer_is_proven_by_most_of_all_voters_alone():
    known = Known(B, C, roster=(ME, B, C, D, E))
    for bans, proven in (((), True), ((Ban(E, 1, bytes(32)),), False)):
        of = replace(commit(), bans=bans)
        assert known.of.proven(with_votes(of, B, C), frozenset({B, C}), now=0.0) == proven, "three others are away"
        assert known.of.proven(with_votes(of, B, C, D), frozenset({B, C}), now=0.0)


def run(known: Known, steps: range, contributors: tuple[PeerId, ...], signers: tuple[PeerId, ...] = ()) -> None:
    for step in steps:
        now = commit(step, contributors=contributors)
        known.vote(now, *signers)
        known.of.applied([now])


def test_who_neither_contributes_nor_signs_for_long_counts_no_more():
    known = Known(B, C, D, roster=(ME, B, C, D))
    run(known, range(3, 35), (ME, B), signers=(ME, B, C))
    assert known.of.roster(0) == {ME, B, C, D}
    run(known, range(35, 36), (ME, B), signers=(ME, B, C))
    assert known.of.roster(0) == {ME, B, C}, "a signature is enough to stay"


def test_an_excluded_peer_keeps_its_vote_until_it_could_have_contributed_again():
    """It may contribute nothing: else whoever has others excluded would choose the voters."""
    known = Known(B, C, roster=(ME, B, C))
    known.of.applied([replace(commit(3, contributors=(ME, B)), late=(C,))])
    run(known, range(4, 4 + 32 + 32 + 1), (ME, B))
    assert known.of.roster(0) == {ME, B, C}
    run(known, range(69, 70), (ME, B))
    assert known.of.roster(0) == {ME, B}


def contribute(known: Known, steps: range, *peers: PeerId, late: tuple[PeerId, ...] = ()) -> None:
    for step in steps:
        known.of.applied([replace(commit(step, contributors=peers), late=late)])


def test_in_an_old_run_a_mate_votes_after_32_contributions():
    known = Known(D, roster=(ME, B, C))
    contribute(known, range(3, 200), ME, B, C)
    contribute(known, range(200, 207), ME, B, C, D)
    assert known.of.is_new(D) and known.of.leads_last(D), "nobody waits for it"
    contribute(known, range(207, 231), ME, B, C, D)
    assert not known.of.is_new(D) and known.of.leads_last(D) and known.of.roster(0) == {ME, B, C}
    contribute(known, range(231, 232), ME, B, C, D)
    assert known.of.roster(0) == known.of.voters(0) == {ME, B, C, D} and not known.of.leads_last(D)


@pytest.mark.parametrize(("step", "needed"), [(3, 1), (7, 1), (12, 3), (40, 10), (127, 31), (500, 32)])
def test_in_a_young_run_fewer_are_enough(step: int, needed: int):
    known = Known(D, roster=(ME, B))
    contribute(known, range(3, step), ME, B)
    contribute(known, range(step, step + needed - 1), ME, B, D)
    assert D not in known.of.roster(0)
    # Meanwhile the run has grown older, and a step or two more may be needed.
    contribute(known, range(step + needed - 1, step + needed + needed // 3 + 1), ME, B, D)
    assert D in known.of.roster(0)


def test_lateness_costs_a_vote_that_is_not_older_than_32_contributions():
    known = Known(D, roster=(ME, B, C))
    contribute(known, range(3, 200), ME, B, C)
    contribute(known, range(200, 240), ME, B, C, D)
    contribute(known, range(240, 241), ME, B, late=(C, D))
    assert known.of.roster(0) == {ME, B, C} and known.of.is_new(D) and not known.of.is_new(C)


def test_a_leader_takes_fewer_than_half_of_the_votes_at_a_time():
    known = Known(B, C, D)
    known.of.applied([commit(200, contributors=(ME, B, C, D))])  # state was taken over: what was before is not known
    assert known.of.roster(0) == {ME, B, C, D}
    for step, late in enumerate((B, C, D), 201):
        contribute(known, range(step, step + 1), ME, late=(late,))
    assert known.of.roster(0) == {ME, C, D}


def test_if_no_voter_is_left_those_that_have_contributed_are_the_live_ones():
    known = Known(D, E, roster=(B, C))
    contribute(known, range(3, 200), B, C)
    contribute(known, range(200, 201), B, C, D)
    assert known.of.roster(0) == {B, C} and known.of.live(0, now=0.0) == {D}, "E has contributed nothing"


def test_less_than_half_are_dropped_at_once():
    """Whoever commits alone for long does not become the whole roster in one step."""
    known = Known(roster=(ME, B, C, D, E))
    run(known, range(3, 35), (ME,))
    sizes = []
    for step in range(35, 39):
        run(known, range(step, step + 1), (ME,))
        sizes.append(len(known.of.roster(0)))
    assert sizes == [3, 2, 2, 2], "of two none is dropped, or one that is cut off would go on alone"


def test_who_is_not_lost_is_live():
    known = Known(B, C, D, roster=(ME, B, C, D, E))
    assert known.of.live(0, now=LONG_S) == {ME, B, C, D}, "E was never heard"
    known.view.refuse(B, now=1.0)
    known.beat(C, synced=False, now=1.0)
    assert known.of.live(0, now=1.0) == {ME, D}
    assert known.of.live(0, now=LONG_S) == {ME, C, D}, "it may have state again, for I do not hear it"
    assert known.of.live(0, now=LONG_S + 2) == {ME}


def test_if_all_who_count_are_lost_those_that_are_heard_are_the_live_ones():
    known = Known(D, roster=(B, C))
    assert known.of.live(0, now=0.0) == {ME, D}
    assert known.of.live(1, now=0.0) == frozenset()


def test_each_stage_has_its_own():
    known = Known(B, neighbours=(C,))
    known.of.applied([commit(contributors=(ME, B)), commit(stage=1, contributors=(C, D))])
    assert (known.of.roster(0), known.of.roster(1)) == ({ME, B}, {C, D})
    assert known.of.live(1, now=0.0) == {C}


def test_after_a_restart_of_the_run_nobody_counts_and_nothing_is_signed():
    known = Known(B, roster=(ME, B))
    known.vote(commit(), ME, B)
    known.of.follow(Restart(1, 0))
    assert known.of.roster(0) == frozenset() and not known.certified(commit())


# ---------------------------------------------------------------- votes


def test_a_forged_vote_is_refused_and_counts_nothing():
    known = Known(B, C, roster=(ME, B, C))
    assert not known.of.hear_vote(commit(), B, signed(C, commit()), now=0.0)
    assert not known.of.hear_vote(commit(), B, b"", now=0.0)
    known.vote(commit(), ME)
    assert not known.certified(commit())
    assert known.vote(commit(), B) == [True] and known.certified(commit()), "it may say so itself later"


def test_after_a_forged_vote_no_other_of_that_commit_is_looked_at():
    known = Known(B, C, D, roster=(ME, B, C, D))
    forged = replace(commit(), votes=(Vote(B, b"x"), Vote(C, signed(C, commit())), Vote(D, signed(D, commit()))))
    assert not known.of.hear(forged, now=0.0)
    known.vote(commit(), ME)
    assert votes_of(known.of.with_votes(commit())) == {ME: signed(ME, commit())}


def test_a_vote_that_is_heard_twice_counts_once():
    known = Known(B, C, roster=(ME, B, C))
    doubled = replace(commit(), votes=(Vote(B, signed(B, commit())),) * 3)
    assert known.of.hear(doubled, now=0.0) and known.of.hear(doubled, now=0.0)
    assert not known.certified(commit())


def test_votes_of_those_who_have_no_say_are_not_even_checked():
    known = Known(B, roster=(ME, B))
    strangers = [PeerId(f"S{number}") for number in range(20)]
    assert known.of.hear(replace(commit(), votes=tuple(Vote(peer, b"x") for peer in strangers)), now=0.0)
    assert known.of.with_votes(commit()).votes == () and not known.certified(commit())


def test_two_sums_of_one_round_convict():
    known = Known(B, C, D, roster=(ME, B, C, D))
    assert known.vote(commit(digest=b"d"), ME, C, B) == [True] * 3 and known.certified(commit(digest=b"d"))
    assert known.vote(commit(digest=b"e"), B) == [False]
    (call,) = known.host.calls
    assert (call.args, call.fields["peer"]) == (("convicted",), B)
    assert known.of.roster(0) == {ME, C, D}, "it counts no more"
    assert known.certified(commit(digest=b"d")), "two of the three who do"
    assert known.vote(commit(4), B) == [False]
    known.of.applied([commit(contributors=(B, C))])
    assert known.of.roster(0) == {ME, C, D}, "and does not come back"


def test_a_vote_of_the_convicted_does_not_discredit_who_passes_it_on():
    """It has told others one thing and me another: they go on saying what they heard."""
    known = Known(B, C, D, roster=(ME, B, C, D))
    known.vote(commit(digest=b"e"), B)
    passed_on = with_votes(commit(), B, C, D)
    assert known.of.hear(passed_on, now=0.0) and known.of.roster(0) == {ME, C, D}
    assert known.of.hear(passed_on, now=0.0) and known.certified(commit())


def test_who_sums_again_in_another_round_may_sign_that_sum_too():
    known = Known(B, C, roster=(ME, B, C))
    first, second = commit(number=1), commit(number=2, digest=b"e")
    known.vote(first, B)
    known.vote(second, B, C)
    assert not known.host.calls and known.certified(second)


def test_of_one_voters_sums_the_last_two_count():
    known = Known(B, C, roster=(ME, B, C))
    sums = [commit(number=number) for number in range(4)]
    for each in sums:
        known.vote(each, B)
    known.vote(sums[1], ME)
    known.vote(sums[3], ME)
    assert not known.certified(sums[1]) and known.certified(sums[3])


def test_a_leader_that_makes_an_aggregate_again_has_not_chosen_whom_it_names_late() -> None:
    known = Known(B, C, D)
    first = replace(commit(number=0), late=(D,))
    again = replace(first, id=RoundId(Ballot(1, C), 0))
    assert known.of.named_by(again) == C, "of what I have not signed I know its own leader only"
    known.of.sign(first)
    known.of.sign(again)
    assert known.of.named_by(again) == B and known.of.named_by(replace(again, late=(E,))) == C


def test_my_own_vote_is_one_as_well_and_of_one_round_i_sign_one_sum():
    """A sum with other bits than most of my stage's is fetched again: I hold it then, and do not sign it."""
    known = Known(B, C, roster=(ME, B, C))
    known.of.hear_vote(commit(), ME, known.of.sign(commit()), now=0.0)
    assert known.of.sign(commit()) == signed(ME, commit())
    assert known.of.sign(commit(digest=b"e")) == b""
    assert known.of.sign(commit(number=1)) == signed(ME, commit(number=1))
    assert not known.host.calls and known.of.roster(0) == {ME, B, C}


# ---------------------------------------------------------------- certificates


def test_more_than_half_of_the_roster_certify_also_if_not_all_of_them_are_live():
    known = Known(B, roster=(ME, B, C, D, E))
    known.vote(commit(), C, D)
    assert not known.certified(commit())
    known.vote(commit(), E)
    assert known.certified(commit()), "three of five, of whom none is heard"


def test_more_than_half_of_the_live_roster_certify():
    known = Known(B, C, roster=(ME, B, C, D, E))
    known.vote(commit(), ME)
    assert not known.certified(commit())
    known.vote(commit(), B)
    assert known.certified(commit()), "two of the three who live"
    known.beat(D)
    assert not known.certified(commit()), "two of four"


def test_one_that_is_alone_certifies_its_own():
    known = Known()
    assert not known.certified(commit())
    known.vote(commit(), ME)
    assert known.certified(commit())


def test_fresh_identities_certify_nothing_where_somebody_counts():
    strangers = tuple(PeerId(f"S{number}") for number in range(9))
    known = Known(*strangers, B, C, roster=(ME, B, C))
    known.vote(commit(), *strangers, B)
    assert not known.certified(commit())


def test_of_two_one_is_enough_when_the_other_has_signed_nothing_for_a_long_silence():
    known = Known(B, roster=(ME, B))
    known.vote(commit(), ME, now=1.0)
    for now in (1.0, 8.0, 1.0 + LONG_S):
        known.beat(B, now=now)
        assert not known.certified(commit(), now=now)
    assert known.certified(commit(), now=1.5 + LONG_S)


def test_of_three_one_is_never_enough():
    known = Known(B, C, roster=(ME, B, C))
    known.vote(commit(), ME)
    for now in range(100):
        for mate in (B, C):
            known.beat(mate, now=float(now))
        assert not known.certified(commit(), now=float(now))


def test_of_two_that_differ_in_my_stage_neither_is_certified_for_as_long_as_both_live():
    known = Known(B, roster=(ME, B))
    mine, theirs = commit(), commit(digest=b"e")
    known.vote(mine, ME)
    known.vote(theirs, B)
    for now in range(100):
        known.beat(B, now=float(now))
        assert not known.certified(mine, now=float(now)) and not known.certified(theirs, now=float(now))
    known.view.refuse(B, now=100.0)
    assert known.certified(mine, now=100.0) and not known.certified(theirs, now=100.0)


@pytest.mark.parametrize(
    ("other", "stands"),
    [
        (commit(stage=1, number=1, digest=b"e", norm=1.01), True),
        (commit(stage=1, number=1, digest=b"e", norm=1.03), False),
        (commit(stage=1, number=1, digest=b"e", tokens=3), False),
        (replace(commit(stage=1, number=1, digest=b"e"), discarded=frozenset({1})), False),
    ],
    ids=["rounded differently", "another norm", "other tokens", "other microbatches"],
)
def test_of_two_alike_in_another_stage_that_of_the_lower_round_stands(other: Commit, stands: bool):
    known = Known(neighbours=(C, D))
    lower = commit(stage=1)
    known.vote(lower, C)
    known.vote(other, D)
    assert known.certified(lower) is stands and not known.certified(other)
    assert not known.certified(other, now=1.0), "no time makes it stand"


# ---------------------------------------------------------------- believed


def test_of_another_stage_that_is_believed_by_which_most_of_my_mates_go():
    """Its signers may have died since, or I hear none of them."""
    known = Known(B, C, roster=(ME, B, C), neighbours=(D,))
    foreign = commit(stage=1)
    known.of.lists(B, 0, [foreign])
    assert not known.of.believed(foreign, now=0.0)
    known.of.lists(C, 0, [foreign])
    assert known.of.believed(foreign, now=0.0) and known.of.candidates(1, 3) == [foreign]
    known.of.lists(C, 0, [])
    assert not known.of.believed(foreign, now=0.0), "what a replica said before is not what it says"


def test_of_another_stage_that_is_believed_by_which_most_of_a_third_one_go():
    known = Known(roster=(ME,))
    foreign = commit(stage=1)
    for peer in (B, C, D):
        known.beat(peer, stage=2)
    known.of.lists(B, 2, [foreign])
    assert not known.of.believed(foreign, now=0.0)
    known.of.lists(C, 2, [foreign])
    assert known.of.believed(foreign, now=0.0)


def test_a_stage_is_not_believed_about_itself_nor_are_mates_about_my_own_without_votes():
    known = Known(B, C, roster=(ME, B, C), neighbours=(D,))
    known.of.lists(D, 1, [commit(stage=1)])
    assert not known.of.believed(commit(stage=1), now=0.0)
    for mate in (B, C):
        known.of.lists(mate, 0, [commit()])
    assert not known.of.believed(commit(), now=0.0)


def test_my_own_stages_commit_is_believed_if_my_neighbours_go_by_it():
    """They had its certificate, and whoever has signed it may be gone by now."""
    known = Known(B, C, roster=(ME, B, C), neighbours=(D, E))
    known.of.lists(D, 1, [commit()])
    assert not known.of.believed(commit(), now=0.0)
    known.of.lists(E, 1, [commit()])
    assert known.of.believed(commit(), now=0.0)


# ---------------------------------------------------------------- memory


def test_votes_are_forgotten_a_step_after_theirs():
    known = Known(B, roster=(ME, B))
    known.vote(commit(3), ME, B)
    known.of.applied([commit(3, contributors=(ME, B))])
    assert len(votes_of(known.of.with_votes(commit(3)))) == 2, "others may still need to hear them"
    known.of.applied([commit(4, contributors=(ME, B))])
    assert not votes_of(known.of.with_votes(commit(3))) and known.of.candidates(0, 3) == []


def test_one_voter_cannot_fill_my_memory():
    known = Known(B, C, roster=(ME, B, C))
    for number in range(500):
        known.vote(commit(number=number), B)
    assert len(known.of.candidates(0, 3)) == 2


def test_who_is_not_heard_of_any_more_is_not_remembered():
    known = Known(B, roster=(ME, B))
    for number in range(500):
        known.of.lists(PeerId(f"S{number}"), 1, [commit(number=number)])
    assert known.of.candidates(0, 3) == [], "the view has no room for them, or has never heard them"
    known.of.lists(B, 0, [commit(4)])
    known.view.forget(B)
    known.of.applied([commit(3)])
    assert known.of.candidates(0, 4) == []


def test_a_commit_carries_as_many_votes_as_are_needed_first_of_those_who_count():
    counting = tuple(PeerId(f"Z{number:02}") for number in range(10))
    others = tuple(PeerId(f"B{number:02}") for number in range(20))
    known = Known(*counting, *others)
    known.vote(commit(), *counting, *others)
    known.of.applied([commit(2, contributors=counting)])
    carried = votes_of(known.of.with_votes(commit()))
    assert len(carried) == MAX_VOTES and set(counting) <= set(carried)


def test_of_a_stage_with_more_replicas_than_a_commit_has_votes_for_the_same_ones_count_everywhere():
    mates = tuple(PeerId(f"M{number:03}") for number in range(2 * MAX_VOTES + 40))
    first, second = Known(*mates), Known(*mates[::-1])
    for roster in ((), (ME, *mates)):
        for known in (first, second):
            if roster:
                known.of.applied([commit(2, contributors=roster)])
            known.vote(commit(), *mates)
        live = first.of.live(0, now=0.0)
        assert live == second.of.live(0, now=0.0) and len(live) == 2 * MAX_VOTES - 1
        told = Known(*mates, roster=roster)
        assert told.of.hear(first.of.with_votes(commit()), now=0.0) and told.certified(commit())
    assert len(first.of.roster(0)) == 2 * MAX_VOTES - 1
    assert not any(first.of.is_new(mate) for mate in mates), "whoever has contributed is waited for"


# ---------------------------------------------------------------- laws

PEERS = [PeerId(name) for name in "ABCDEFG"]
SUMS = [commit(number=number, digest=digest) for number in (0, 1) for digest in (b"d", b"e")]


@given(
    roster=st.sets(st.sampled_from(PEERS)),
    heard=st.sets(st.sampled_from(PEERS[1:])),
    votes=st.lists(st.tuples(st.sampled_from(PEERS), st.sampled_from(SUMS), st.booleans()), max_size=30),
    now=st.sampled_from([0.0, 5.0, LONG_S, LONG_S + 1, 3 * LONG_S]),
)
def test_without_more_than_half_of_the_roster_or_of_the_live_roster_nothing_is_certified(roster, heard, votes, now):
    known = Known(*heard, roster=tuple(roster))
    said: dict[Commit, set[PeerId]] = {}
    for peer, of, honest in votes:
        known.of.hear_vote(of, peer, signed(peer, of) if honest else b"forged", now=0.0)
        if honest:
            said.setdefault(of, set()).add(peer)
    for mate in heard:
        known.beat(mate, now=now)
    counting, live = known.of.roster(0), known.of.live(0, now=now)
    assert live <= heard | {ME} and (not counting or live <= counting or not counting & (heard | {ME}))
    certified = [of for of in SUMS if known.certified(of, now=now)]
    for of in certified:
        signers = said[of]
        most = 2 * len(signers & counting) > len(counting) > 0 or 2 * len(signers & live) > len(live)
        of_two = len(live) == 2 and bool(signers & live) and now > LONG_S
        assert most or of_two
    for of in certified:
        others = [other for other in certified if other.id == of.id and other != of]
        assert not others or counting - live, "of one round two only if the roster and who lives disagree"


@given(
    peers=st.lists(st.sampled_from(PEERS), min_size=1, max_size=7, unique=True),
    liars=st.sets(st.sampled_from(PEERS), max_size=3),
)
def test_a_minority_of_liars_certifies_no_sum_of_its_own_and_no_second_one_of_a_round(peers, liars):
    """Everybody lives and counts. The honest sign one sum; the liars sign another, and that one as well."""
    liars &= set(peers)
    if 2 * len(liars) >= len(peers) or ME in liars:
        return
    known = Known(*peers, roster=tuple(peers))
    known.vote(SUMS[1], *sorted(liars))
    assert not known.certified(SUMS[1])
    known.vote(SUMS[0], *peers)
    assert known.certified(SUMS[0]) and not known.certified(SUMS[1])


@given(steps=st.lists(st.sets(st.sampled_from(PEERS)), min_size=1, max_size=120))
def test_whoever_counts_has_contributed_and_most_of_those_who_counted_stay(steps):
    known = Known()
    contributed: set[PeerId] = set()
    for number, contributors in enumerate(steps):
        before = known.of.roster(0)
        known.of.applied([commit(number, contributors=tuple(sorted(contributors)))])
        contributed |= contributors
        now = known.of.roster(0)
        assert contributors <= now <= contributed
        assert not before or 2 * len(before & now) > len(before) or len(before) == 1


@given(order=st.permutations(PEERS), roster=st.sets(st.sampled_from(PEERS), min_size=1))
def test_votes_mean_the_same_in_whatever_order_they_come(order, roster):
    one, other = (Known(*PEERS[1:], roster=tuple(roster)) for _ in range(2))
    for peer, again in zip(PEERS, order, strict=True):
        one.vote(SUMS[0], peer)
        other.vote(SUMS[0], again)
    assert one.of.with_votes(SUMS[0]).votes == other.of.with_votes(SUMS[0]).votes
    assert one.certified(SUMS[0]) and other.certified(SUMS[0])


def test_who_goes_by_another_commit_than_the_one_that_was_made_is_named_once():
    known = Known(B, C, neighbours=(D,))
    forged = commit(digest=b"f")
    for _ in range(2):
        known.of.lists(D, 1, (forged,))
        known.of.lists(C, 0, (commit(contributors=(ME, B)),))
        known.of.applied([commit(contributors=(ME, B))])
    assert [call.fields["peer"] for call in known.host.calls if call.args == ("other_commit",)] == [D]


def test_equal_commits_are_signed_alike_whatever_the_wire_brought() -> None:
    """-0.0 == 0.0: one member could have votes for the one counted for the other, or kept for it."""
    zero = replace(commit(), loss_sum=0.0, grad_sq_norm=0.0)
    minus = replace(zero, loss_sum=-0.0, grad_sq_norm=-0.0)
    signing.statement.cache_clear()
    said, chained = statement(minus, NO_RESTART), evidence([minus])
    signing.statement.cache_clear()
    assert zero == minus and said == statement(zero, NO_RESTART) and chained == evidence([zero])
