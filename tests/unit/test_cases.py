"""Which peers are banned, and that no correct one ever is, whatever a Byzantine minority says in any order."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from audit_stage import LATER, PER_MEMBER, STEP, Notary, Stage, digest_of, finished_of, stamp_of
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnet.audit.case import claimed, reason_of, refusal
from swarmnet.audit.cases import AGAIN_S, KEEP_STEPS, MOST_CASES, SHOWN_TO, is_drawn, own_rate, part_of, seed_of
from swarmnet.directory import MAX_REASON
from swarmnet.ids import PeerId
from swarmnet.messages import Case, Sent
from swarmnet.pledge import WHOLE
from swarmnet.statement import statement

SEEDS = st.integers(0, 2**32)


@st.composite
def stages(draw: st.DrawFn, least: int = 2) -> tuple[int, int]:
    """(members, Byzantine ones): fewer than half of them."""
    size = draw(st.integers(least, 9))
    return size, draw(st.integers(0, (size - 1) // 2))


@settings(max_examples=60, deadline=None)
@given(
    stages(),
    SEEDS,
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([0.0, 1.0]),
    st.booleans(),
)
def test_no_correct_peer_is_ever_banned(
    size: tuple[int, int], seed: int, lost: float, doubled: float, false: float, two_faced: bool
) -> None:
    stage = Stage(*size, seed, false=false, two_faced=two_faced)
    stage.begin()
    stage.run(lost=lost, doubled=doubled, lies=20)
    for peer in stage.correct:
        member = stage.members[peer]
        assert not member.bans.keys() & stage.correct
        # What was lost is told again. Who signs one recheck for one member and another for the next can keep a case
        # open, until it is forgotten.
        assert two_faced or not member.cases.open_cases
        assert not stage.correct & {ban.peer for ban in member.vouched}


@settings(max_examples=60, deadline=None)
@given(stages(least=3), SEEDS, st.sampled_from([0.0, 0.3]))
def test_false_work_that_a_correct_replica_sampled_is_banned_by_all(
    size: tuple[int, int], seed: int, doubled: float
) -> None:
    stage = Stage(*size, seed, false=0.5)
    stage.begin()
    stage.run(doubled=doubled, lies=10)
    suspects = {
        check.case.pledge.peer
        for peer in stage.correct
        for check in stage.members[peer].checks
        if check.told_by is None and stage.is_false(check)
    }
    assert all(suspects <= stage.members[peer].bans.keys() for peer in stage.correct)


def quiet(size: int = 5, seed: int = 1, *, byzantine: int = 0, false: float = 0.0) -> Stage:
    """Nothing is sampled; all are correct, but for so many whose works are false."""
    stage = Stage(size, byzantine, seed, rate=0.0, false=false)
    stage.begin()
    return stage


def case_of(stage: Stage, peer: PeerId, index: int | None = None) -> Case:
    pledge = next(pledge for pledge in stage.pledges if pledge.peer == peer)
    return stage.case(pledge, min(stage.members[peer].works[pledge]) if index is None else index)


def signed_by(stage: Stage, case: Case, peers, found: bytes) -> Case:
    more = tuple(stage.signed(peer, case, found) for peer in peers)
    return replace(case, rechecks=(*case.rechecks, *more))


@pytest.mark.parametrize("index", [None, WHOLE])
def test_a_false_recheck_bans_its_signer(index: int | None) -> None:
    stage = quiet()
    suspect, liar, *others = stage.names
    stage.tell(liar, signed_by(stage, case_of(stage, suspect, index), [liar], digest_of("lie")))
    stage.run()
    assert all(stage.members[peer].bans.keys() == {liar} for peer in others)


def test_a_stage_of_two_reports_a_dispute_and_bans_none() -> None:
    stage = Stage(2, 1, 3)
    stage.begin()
    stage.run()
    (peer,) = stage.correct
    assert not stage.members[peer].bans and stage.members[peer].suspended
    (told,) = [case for case in stage.members[peer].told if case.work is None]
    assert told in stage.members[peer].disputed


def test_a_recheck_of_one_pledge_proves_nothing_about_another() -> None:
    """The suspect computed a microbatch again in another round, of other inputs: both pledges are true."""
    stage = quiet()
    suspect, *others = stage.names
    case = case_of(stage, suspect)
    second = stage.case(stage.pledge(suspect, 0.0, number=1), case.work.index)
    found = signed_by(stage, second, others, claimed(second)).rechecks
    assert refusal(replace(case, rechecks=found), stage.voters, Notary.verify) == "a recheck is not signed by its peer"


@pytest.mark.parametrize("of_another_class", [True, False])
def test_a_case_of_another_class_or_in_which_no_recheck_differs_costs_no_compute(of_another_class: bool) -> None:
    stage = quiet()
    suspect, me, other, *_ = stage.names
    case = case_of(stage, suspect)
    case, found = (replace(case, numerics="cuda"), digest_of("x")) if of_another_class else (case, claimed(case))
    stage.members[me].cases.hear(signed_by(stage, case, [other], found), other)
    assert not stage.members[me].checks and not stage.members[me].told


def test_one_replica_opens_a_few_cases_of_a_step_at_a_time() -> None:
    stage = quiet(size=9)
    me, liar, *others = stage.names
    stage.members[me].idle = True
    for suspect in others:
        stage.members[me].cases.hear(signed_by(stage, case_of(stage, suspect), [liar], digest_of("x")), liar)
    assert len(stage.members[me].cases.open_cases) == len(stage.members[me].checks) == MOST_CASES < len(others)


def test_a_case_is_told_again_until_it_is_decided() -> None:
    stage = quiet()
    suspect, me, *others = stage.names
    member, case = stage.members[me], case_of(stage, suspect)
    member.cases.found(case, digest_of("x"), now=1.0)
    member.cases.tick(1.0 + AGAIN_S / 2)
    assert len(member.told) == 1
    member.cases.tick(1.0 + AGAIN_S)
    assert len(member.told) == 2
    member.cases.hear(signed_by(stage, case, others[:2], digest_of("x")), others[0])
    (ban,) = member.vouched
    member.commit(ban)
    assert member.bans.keys() == {suspect} and refusal(member.bans[suspect], stage.voters, Notary.verify) == ""
    member.cases.tick(100.0)
    assert len(member.told) == 2


def test_an_open_case_that_is_forgotten_is_a_dispute() -> None:
    stage = quiet()
    suspect, me, *_ = stage.names
    member = stage.members[me]
    member.cases.found(case_of(stage, suspect), digest_of("x"), now=1.0)
    for step in range(STEP + 2, STEP + KEEP_STEPS + 1):
        member.cases.applied(stamp_of(step), finished_of(step, stage.names), (), LATER, stage.voters)
    assert not member.cases.open_cases and len(member.disputed) == 1


# ---------------------------------------------------------------- transfers


def sent_by(peer: PeerId, case: Case, digest: bytes, **says: object) -> Sent:
    sent = Sent(case.pledge.stamp, case.work.index, "output", digest, peer, case.work.input, case.work.gradient)
    sent = replace(sent, **says)
    return replace(sent, signature=Notary(peer).sign(statement(sent)))


def test_two_signatures_of_one_peer_ban_it_in_a_stage_of_two_too() -> None:
    stage = quiet(2)
    suspect, me = stage.names
    case = case_of(stage, suspect)
    stage.members[me].cases.hear_sent(sent_by(suspect, case, digest_of("other")), PeerId("receiver"))
    assert stage.members[me].bans.keys() == {suspect}
    assert refusal(stage.members[me].bans[suspect], frozenset(), Notary.verify) == ""
    (ban,) = stage.members[me].vouched
    assert (ban.peer, ban.step) == (suspect, -1)


def test_two_pledges_of_a_stranger_ban_no_other_peer() -> None:
    """It puts a transfer that it has not signed, of its victim, into a case of two pledges of its own."""
    stage = quiet()
    stranger, victim, me, *_ = stage.names
    case = case_of(stage, victim)
    first = next(pledge for pledge in stage.pledges if pledge.peer == stranger)
    second = replace(first, work_root=digest_of("other"))
    second = replace(second, signature=Notary(stranger).sign(statement(second)))
    sent = replace(sent_by(victim, case, digest_of("x")), signature=b"x")
    for more in ({"sent": sent}, {"sent": sent, "work": case.work}, {"work": case.work, "path": case.path}):
        forged = Case(first, other=second, **more)
        assert refusal(forged, frozenset(), Notary.verify)
        stage.members[me].cases.hear(forged, PeerId("stranger"))
        assert not stage.members[me].bans
    stage.members[me].cases.hear(Case(first, other=second), PeerId("stranger"))
    assert stage.members[me].bans.keys() == {stranger}


def test_a_false_transfer_of_anothers_work_is_decided_by_rechecks() -> None:
    stage = quiet()
    owner, sender, *others = stage.names
    for peer in stage.names:
        stage.members[peer].cases.hear_sent(sent_by(sender, case_of(stage, owner), digest_of("x")), PeerId("receiver"))
    stage.run()
    assert all(stage.members[peer].bans.keys() == {sender} for peer in (owner, *others))
    case = stage.members[owner].bans[sender]
    for sent in (None, replace(case.sent, signature=b"x"), sent_by(sender, case, case.work.output)):
        assert refusal(replace(case, sent=sent), stage.voters, Notary.verify)


def test_transfers_that_prove_nothing_are_let_be() -> None:
    stage = quiet()
    owner, sender, me, *_ = stage.names
    case, cases = case_of(stage, owner), stage.members[me].cases
    cases.hear_sent(sent_by(sender, case, case.work.output), PeerId("receiver"))  # the same
    cases.hear_sent(sent_by(sender, case, digest_of("x"), input=digest_of("y")), PeerId("receiver"))
    cases.hear_sent(sent_by(PeerId("stranger"), case, digest_of("x")), PeerId("receiver"))
    cases.hear_sent(replace(sent_by(sender, case, digest_of("x")), signature=b"x"), PeerId("receiver"))
    cases._classes[sender] = (cases._numerics(sender), STEP)  # it came back on another machine
    cases.hear_sent(sent_by(sender, case, digest_of("z")), PeerId("receiver"))
    assert not stage.members[me].checks and not stage.members[me].bans


def test_what_one_peer_has_sent_in_a_step_is_checked_twice_at_most() -> None:
    stage = quiet()
    owner, sender, me, *_ = stage.names
    member, case = stage.members[me], case_of(stage, owner)
    member.idle = True
    for number in range(4):
        member.cases.hear_sent(sent_by(sender, case, digest_of("x", number)), PeerId("receiver"))
    assert len(member.checks) == 4, "each time what was sent, and what its input was made of"


def test_what_a_neighbour_has_sent_is_shown_to_a_few_of_its_stage() -> None:
    stage = Stage(3, 0, 1, rate=0.5)
    me, other, *_ = stage.names
    member, case, feeder = stage.members[me], case_of(stage, other), PeerId("feeder")
    sents = [sent_by(feeder, case, bytes(32), index=index) for index in range(64)]
    member.cases.received(STEP, [*sents, sent_by(me, case, bytes(32))], LATER)
    assert 16 < len(member.shown) < 48 and set(member.shown) <= set(sents)
    mates = [PeerId(f"mate{number}") for number in range(40)] + [feeder, me]
    chosen = [frozenset(member.cases.shown_to(sent, mates)) for sent in member.shown]
    assert all(len(few) == SHOWN_TO and not few & {me, feeder} for few in chosen) and len(set(chosen)) > 10


# ---------------------------------------------------------------- decided cases


def test_the_voters_decide_whoever_contributed() -> None:
    """Two of three contributors are Byzantine, and two more voted lately: they ban no correct peer."""
    stage = quiet(3)
    suspect, *liars = stage.names
    case = signed_by(stage, case_of(stage, suspect), liars, digest_of("false"))
    assert refusal(case, stage.voters, Notary.verify) == "", "in a file two of three contributors are enough"
    stage.voters |= {PeerId("d"), PeerId("e")}
    member = stage.members[PeerId("d")] = type(stage.members[suspect])(stage, PeerId("d"))
    member.cases.applied(stamp_of(STEP), stage.finished, stage.pledges, LATER, stage.voters)
    member.cases.hear(case, liars[0])
    assert not member.vouched
    member.cases.hear(signed_by(stage, case, [PeerId("e")], claimed(case)), PeerId("e"))
    member.cases.found(case, claimed(case), now=0.0)
    assert {ban.peer for ban in member.vouched} == set(liars), "two voters and the suspect agree"


def test_of_several_aggregates_with_false_work_the_first_is_named() -> None:
    stage = Stage(3, 1, 3)
    (liar,), (me, other) = stage.byzantine, sorted(stage.correct)
    cases = stage.members[me].cases
    for step in (STEP, STEP + 1):
        finished = finished_of(step, stage.names)
        stage.finished = finished
        pledge = replace(stage.pledge(liar, 1.0), stamp=stamp_of(step), digest=finished.digest, signature=b"\0")
        pledge = replace(pledge, signature=Notary(liar).sign(statement(pledge)))
        stage.members[liar].works[pledge] = next(reversed(stage.members[liar].works.values()))
        cases.applied(stamp_of(step), finished, [pledge], LATER, frozenset())
        case = stage.case(pledge, min(stage.members[liar].works[pledge]))
        cases.found(case, digest_of("right"), now=0.0)
        cases.hear(signed_by(stage, case, [other], digest_of("right")), other)
    (ban,) = cases.to_name()
    assert (ban.peer, ban.step) == (liar, STEP) and {ban.step for ban in stage.members[me].vouched} == {STEP, STEP + 1}


def test_a_proof_of_an_earlier_process_is_believed() -> None:
    stage = quiet(3)
    suspect, me, other = stage.names
    case = signed_by(stage, case_of(stage, suspect), [me, other], digest_of("false"))
    stage.members[me].cases.learn(replace(case, rechecks=case.rechecks[:1], contributions=stage.finished.contributions))
    assert not stage.members[me].bans
    stage.members[me].cases.learn(replace(case, contributions=stage.finished.contributions))
    assert stage.members[me].bans.keys() == {suspect} == {ban.peer for ban in stage.members[me].vouched}


def test_a_forged_case_costs_three_signatures_at_most() -> None:
    """True pledges and rechecks are at hand, and false ones about correct contributors cost nothing to write."""
    stage, looked = quiet(size=31), []

    def counted(*signed: object) -> bool:
        looked.append(signed)
        return Notary.verify(*signed)

    suspect, other, *others = stage.names
    case = case_of(stage, suspect)
    true = signed_by(stage, case, others, claimed(case)).rechecks
    forged = replace(stage.signed(other, case, digest_of("x")), signature=b"x")
    assert refusal(replace(case, rechecks=(*true, forged)), stage.voters, counted)
    false = tuple(replace(each, found=digest_of("x")) for each in true)
    assert refusal(replace(case, rechecks=false), stage.voters, counted)
    assert len(looked) <= 2 * 3


def test_identities_that_took_no_part_are_not_banned() -> None:
    stage = quiet()
    suspect, *others = stage.names
    case = signed_by(stage, case_of(stage, suspect), others, claimed(case_of(stage, suspect)))
    stranger = signed_by(stage, case, [PeerId("stranger")], digest_of("x"))
    assert refusal(stranger, stage.voters, Notary.verify)


def test_a_contributor_that_leaves_others_no_work_is_checked_all_the_same() -> None:
    """Two voters decide no case: a replica that finds false work suspends its peer."""
    stage = quiet(3, byzantine=1, false=1.0)
    (suspect,), me = stage.byzantine, PeerId("d")
    stage.rate, stage.finished = 1.0, finished_of(STEP, [suspect])
    member = stage.members[me] = type(stage.members[suspect])(stage, me)
    pledge = stage.pledge(suspect, 1.0)
    stage.voters = live = frozenset({suspect, me})
    member.cases.applied(stamp_of(STEP), stage.finished, [pledge], LATER, live)
    member.cases.applied(stamp_of(STEP + 1), finished_of(STEP + 1, [suspect]), (), LATER, live)
    assert [check.index for check in member.checks] == [WHOLE, *range(PER_MEMBER)]
    assert set(member.suspended) == {suspect} and member.disputed and not member.vouched


def test_a_reason_is_short_and_says_how_many_found_otherwise() -> None:
    stage = Stage(3, 1, 3)
    stage.begin()
    stage.run()
    (liar,), (other, *_) = stage.byzantine, sorted(stage.correct)
    case = stage.members[other].bans[liar]
    reason = reason_of(case, liar, stage.voters)
    assert reason.startswith(f"step {STEP}: false result for ") and reason.endswith("2 of 3 verifiers found otherwise")
    far = replace(case, pledge=replace(case.pledge, stamp=replace(case.pledge.stamp, step=999_999)))
    assert len(reason_of(far, other, stage.voters)) <= MAX_REASON


# ---------------------------------------------------------------- the draw


@pytest.mark.parametrize("parts", [(0.2,) * 5, (0.7, 0.15, 0.1, 0.05), (1.0,)])
def test_the_share_that_somebody_draws_is_the_rate(parts: tuple[float, ...]) -> None:
    seeds = [seed_of(1, 0, LATER, bytes([member])) for member in range(len(parts))]

    def drawn(rate: float) -> list[int]:
        by = [
            [is_drawn(seed, PeerId("a"), index, own_rate(rate, part)) for index in range(10_000)]
            for seed, part in draws
        ]
        return [sum(map(any, zip(*by, strict=True))), *map(sum, by)]

    draws = [*zip(seeds, parts, strict=True)]
    some, *each = drawn(0.1)
    assert 900 < some < 1100
    # Whoever computes more looks at more.
    assert all(found == pytest.approx(1050 * part, abs=90) for found, part in zip(each, parts, strict=True))
    assert (drawn(0.0)[0], drawn(1.0)[0]) == (0, 10_000)


def test_at_a_rate_of_one_every_other_member_checks_each_work() -> None:
    stage = Stage(6, 0, 4)
    stage.begin()
    checks = Counter((check.case.pledge, check.index) for peer in stage.names for check in stage.members[peer].checks)
    assert len(checks) == 6 * (2 + 1) and set(checks.values()) == {5}


@st.composite
def members(draw: st.DrawFn) -> tuple[dict[PeerId, int], frozenset[PeerId]]:
    """Those who may look at one member's works, by what they have computed, and those of its operator."""
    weights = draw(st.dictionaries(st.text("abc", min_size=1, max_size=3).map(PeerId), st.integers(1, 99), min_size=1))
    return weights, frozenset(draw(st.sets(st.sampled_from(sorted(weights)))))


@given(members())
def test_those_of_other_operators_share_all_looks_if_they_are_half(
    of: tuple[dict[PeerId, int], frozenset[PeerId]],
) -> None:
    weights, kin = of
    parts = {peer: part_of(peer, weights, kin) for peer in weights}
    others = sum(part for peer, part in parts.items() if peer not in kin)
    share = sum(weight for peer, weight in weights.items() if peer not in kin) / sum(weights.values())
    assert others == pytest.approx(min(1.0, 2 * share))
    assert sum(parts.values()) <= 1.5 + 1e-9, "half as many looks again, at most"


@given(members(), st.data())
def test_whatever_a_member_says_of_its_operator_nobody_looks_less(
    of: tuple[dict[PeerId, int], frozenset[PeerId]], data: st.DataObject
) -> None:
    weights, kin = of
    me = data.draw(st.sampled_from(sorted(weights)))
    part, usual = part_of(me, weights, kin), part_of(me, weights, frozenset())
    assert usual == part_of(me, weights, weights.keys()) == weights[me] / sum(weights.values()), "all of one operator"
    assert usual <= part <= min(1.0, 2 * usual) * (1 + 1e-12) and (me not in kin or part == usual)


def sampled(stage: Stage, peer: PeerId) -> set[tuple[PeerId, int]]:
    return {(check.case.pledge.peer, check.index) for check in stage.members[peer].checks if check.told_by is None}


def test_what_one_operators_members_do_the_others_sample_more_often() -> None:
    more = 0
    for seed in range(20):
        apart, together = (Stage(5, 2, seed, false=0.0, rate=0.3, together=one) for one in (False, True))
        for stage in (apart, together):
            stage.begin()
        for peer in together.correct:
            before, now = sampled(apart, peer), sampled(together, peer)
            assert before <= now and {suspect for suspect, _ in now - before} <= together.byzantine
            more += len(now - before)
    assert more > 5
