"""Who is convicted, and who never is, whatever less than half of a stage says in whatever order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest
from court_room import LATER, PER_MEMBER, STAGE, STEP, Notary, Stage, digest_of, finished_of, right, stamp_of
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnet.audit.court import (
    AGAIN_S,
    KEEP_STEPS,
    MAX_OPEN,
    SHOWN_TO,
    AskWork,
    Convict,
    Court,
    Dispute,
    Recompute,
    SayFinding,
    ShowSent,
    StrikePeer,
    TellVerdict,
    reason,
)
from swarmnet.audit.draw import chance_named, is_drawn, own_rate, part_of, seed_of
from swarmnet.audit.pledge import WHOLE, case_of, finding_statement, leaf, path_of, root_of, shares_of
from swarmnet.audit.proof import refusal
from swarmnet.directory import MAX_REASON
from swarmnet.ids import PeerId
from swarmnet.messages import Case, Finding, Missent, Pair, Pledge, Sent, Verdict, WorkRecord
from swarmnet.statement import statement

SEEDS = st.integers(0, 2**32)


@st.composite
def stages(draw: st.DrawFn, least: int = 2) -> tuple[int, int]:
    """(members, liars): less than half of them."""
    size = draw(st.integers(least, 9))
    return size, draw(st.integers(0, (size - 1) // 2))


@settings(max_examples=60, deadline=None)
@given(
    stages(),
    SEEDS,
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.booleans(),
)
def test_no_honest_peer_is_ever_convicted(
    stage: tuple[int, int], seed: int, lost: float, doubled: float, false: float, two_faced: bool
) -> None:
    room = Stage(*stage, seed, false=false, two_faced=two_faced)
    room.begin()
    room.run(lost=lost, doubled=doubled, lies=20)
    for peer in room.honest:
        assert not room.members[peer].court.convicted & room.honest
        # Whatever was lost was said again: somebody is named. A liar that finds one thing for one mate
        # and another for the next can keep a case open at one of them, until it is forgotten.
        assert two_faced or room.members[peer].court.open_cases == 0
        for action in room.actions[peer]:
            if isinstance(action, Convict):
                assert refusal(action.proof, frozenset(room.names), Notary.verify) == ""


@settings(max_examples=60, deadline=None)
@given(stages(least=3), SEEDS, st.sampled_from([0.0, 0.3]))
def test_a_false_work_that_an_honest_auditor_looked_at_is_named(
    stage: tuple[int, int], seed: int, doubled: float
) -> None:
    room = Stage(*stage, seed, false=0.5)
    room.begin()
    accused = {
        action.case.accused
        for peer in room.honest
        for action in room.actions[peer]
        if isinstance(action, Recompute) and room.is_false(action.pledge, action.case.index)
    }
    room.run(lost=0.0, doubled=doubled, lies=10)
    for peer in room.honest:
        assert accused <= room.members[peer].court.convicted


@settings(max_examples=25, deadline=None)
@given(st.integers(3, 9), SEEDS)
def test_who_accuses_falsely_is_named_itself(size: int, seed: int) -> None:
    room = Stage(size, 1, seed, false=0.0, rate=0.0)
    room.begin()
    (liar,) = room.liars
    accused = room.random.choice(sorted(room.honest))
    pledge = next(pledge for pledge in room.pledges if pledge.peer == accused)
    index = room.random.choice([WHOLE, *room.members[accused].works[pledge]])
    finding = said(liar, pledge, index, digest_of("lie"))
    room.said.append((finding, pledge))
    room.tell(liar, finding)
    room.run(lost=0.0, doubled=0.0, lies=0)
    for peer in room.honest - {accused}:
        assert room.members[peer].court.convicted == {liar}


def test_two_replicas_dispute_and_name_nobody() -> None:
    room = Stage(2, 1, 3)
    room.begin()
    room.run(lost=0.0, doubled=0.0, lies=0)
    (peer,) = room.honest
    assert not room.members[peer].court.convicted
    assert any(isinstance(action, Dispute) for action in room.actions[peer])


def said(peer, pledge, index: int, found: bytes, numerics: str = "cpu") -> Finding:
    finding = Finding(Case(pledge.stamp, pledge.peer, index), found, peer)
    return replace(finding, signature=Notary(peer).sign(finding_statement(finding, pledge, numerics)))


def quiet(size: int = 5, seed: int = 1, *, liars: int = 0, false: float = 0.0) -> Stage:
    """Nothing drawn; all honest, but for so many whose works are false."""
    room = Stage(size, liars, seed, rate=0.0, false=false)
    room.begin()
    return room


def of(room: Stage, peer) -> tuple:
    pledge = next(pledge for pledge in room.pledges if pledge.peer == peer)
    index, works = min(room.members[peer].works[pledge]), room.members[peer].works[pledge]
    return pledge, works[index], path_of({at: leaf(work) for at, work in works.items()}, index)


def test_what_another_class_finds_is_no_finding_here() -> None:
    room = quiet()
    a, b, c, *_ = room.names
    pledge, work, _ = of(room, a)
    assert room.members[b].court.hear(said(c, pledge, work.index, digest_of("x"), "cuda")) == []


def test_a_finding_of_one_pledge_proves_nothing_about_another() -> None:
    """The accused computed a microbatch again in another round, of other inputs: both pledges are true."""
    room = quiet()
    a, *others = room.names
    pledge, work, path = of(room, a)
    second = room.pledge(a, 0.0, number=1)
    found = room.found(second, work.index)
    findings = tuple(said(peer, second, work.index, found) for peer in others)
    forged = Verdict(pledge, work, path, findings, "cpu")
    assert refusal(forged, frozenset(room.names), Notary.verify) == "a finding is not signed by its peer"
    assert room.members[others[0]].court.hear_verdict(forged, frozenset(room.names)) == []


def test_whose_finding_is_what_was_pledged_costs_nobody_compute() -> None:
    room = quiet()
    a, b, c, d, _ = room.names
    pledge, work, path = of(room, a)
    court = room.members[b].court
    (asked,) = court.hear(said(c, pledge, work.index, leaf(work)))
    assert isinstance(asked, Recompute) and asked.accuser == c
    assert not court.served(pledge, work, path)
    assert court.open_cases == 0
    # Who then says otherwise has accused.
    assert court.hear(said(d, pledge, work.index, digest_of("x"))) == [Recompute(asked.case, pledge, d)]
    assert court.served(pledge, work, path)


def test_an_accuser_has_one_open_case_of_a_step() -> None:
    room = quiet()
    a, b, c, d, _ = room.names
    court = room.members[b].court
    (first, work, _), (second, other, _) = of(room, a), of(room, c)
    assert court.hear(said(d, first, work.index, digest_of("x")))
    assert court.hear(said(d, second, other.index, digest_of("x"))) == []
    assert court.open_cases == 1 <= MAX_OPEN


def test_cases_nobody_serves_make_room() -> None:
    room = quiet(size=MAX_OPEN + 2)
    me, *accusers = room.names
    court = room.members[me].court
    for at, peer in enumerate(accusers):
        # Each accuses another one, and nobody hands anything out.
        target, its, _ = of(room, accusers[at - 1])
        assert court.hear(said(peer, target, its.index, digest_of("x")))
    assert court.open_cases == MAX_OPEN


def test_a_finding_is_said_again_until_the_case_is_settled() -> None:
    room = quiet()
    a, b, *others = room.names
    pledge, work, path = of(room, a)
    court = room.members[b].court
    court.found(pledge, digest_of("x"), work, path, now=1.0)
    assert court.tick(1.0 + AGAIN_S / 2) == []
    (again,) = court.tick(1.0 + AGAIN_S)
    assert isinstance(again, SayFinding) and again.finding.peer == b
    for peer in others[:2]:
        court.hear(said(peer, pledge, work.index, digest_of("x")))
    assert court.convicted == {a}
    assert court.tick(100.0) == []
    # Who says it again has not heard of the verdict.
    (told,) = court.hear(said(others[0], pledge, work.index, digest_of("x")))
    assert isinstance(told, TellVerdict) and told.peer == others[0]


def test_who_accuses_before_one_alone_is_shown_to_all() -> None:
    room = quiet()
    a, b, c, *_ = room.names
    pledge, work, path = of(room, a)
    court = room.members[b].court
    court.hear(said(c, pledge, work.index, digest_of("x")))
    assert court.served(pledge, work, path)
    actions = court.found(pledge, leaf(work), work, path, now=0.0)
    assert [action.finding.peer for action in actions if isinstance(action, SayFinding)] == [c, b]


def test_old_cases_are_forgotten_and_those_without_an_end_are_told() -> None:
    room = quiet()
    a, b, *_ = room.names
    pledge, work, path = of(room, a)
    court = room.members[b].court
    court.found(pledge, digest_of("x"), work, path, now=1.0)
    actions = []
    for step in range(STEP + 2, STEP + KEEP_STEPS + 1):
        actions += court.applied(stamp_of(step), finished_of(step, room.names), (), LATER, frozenset(room.names))
    (dispute,) = actions
    assert isinstance(dispute, Dispute) and dispute.case.accused == a
    assert court.open_cases == 0
    assert court.hear(said(b, pledge, work.index, digest_of("x"))) == []


def test_two_pledges_for_one_sum_convict() -> None:
    room = quiet()
    a, b, *_ = room.names
    pledge, _, _ = of(room, a)
    twin = replace(pledge, product=1)
    twin = replace(twin, signature=Notary(a).sign(statement(twin)))
    court = room.members[b].court
    (convict,) = court.hear_pledge(twin)
    assert convict.peer == a
    other = Stage(5, 0, 2).members[b].court
    assert [action.peer for action in other.hear_proof(convict.proof)] == [a]
    unsigned = Pair(pledge, replace(pledge, product=1))
    assert Stage(5, 0, 2).members[b].court.hear_proof(unsigned) == []


# ---------------------------------------------------------------- what was sent


TELLER = PeerId("who received it")


def sent_by(peer: PeerId, index: int, what: bytes, **says) -> Sent:
    sent = replace(Sent(stamp_of(STEP), index, "output", what, peer, digest_of("made of"), bytes(32)), **says)
    return replace(sent, signature=Notary(peer).sign(statement(sent)))


def test_who_counts_one_thing_and_sends_another_is_named_by_whoever_hears_of_it() -> None:
    room = quiet()
    a, b, c, *_ = room.names
    _, work, path = of(room, a)
    court, sent = room.members[b].court, sent_by(a, work.index, digest_of("other"))
    (asked,) = court.hear_sent(sent, TELLER)
    assert isinstance(asked, AskWork) and asked.case == Case(stamp_of(STEP), a, work.index)
    assert court.hear_sent(sent, TELLER) == [], "once"
    (convict,) = court.compared(sent, work, path)
    assert convict.peer == a and isinstance(convict.proof, Missent)
    assert [action.peer for action in room.members[c].court.hear_proof(convict.proof)] == [a]
    assert court.hear_sent(sent_by(a, work.index, digest_of("third")), TELLER) == [], "it is out already"


def test_who_tells_more_than_a_whole_step_of_what_was_sent_is_heard_no_more_and_others_are() -> None:
    room = quiet()
    a, b, *_ = room.names
    _, work, _ = of(room, a)
    court = room.members[b].court
    junk = [sent_by(a, work.index, digest_of("junk", number)) for number in range(1000)]
    heard = sum(bool(court.hear_sent(sent, TELLER)) for sent in junk)
    assert len(room.members) < heard < 500 and not court.hear_sent(sent_by(a, work.index, digest_of("more")), TELLER)
    assert court.hear_sent(sent_by(a, work.index, digest_of("other")), PeerId("somebody else"))


def test_what_agrees_or_is_not_shown_names_nobody() -> None:
    room = quiet()
    a, b, *_ = room.names
    _, work, path = of(room, a)
    court = room.members[b].court
    assert court.compared(sent_by(a, work.index, work.output), work, path) == []
    other = sent_by(a, work.index, digest_of("other"))
    assert court.compared(other, replace(work, output=other.digest), path) is None, "it is not what was pledged"
    assert court.compared(other, replace(work, resent=True), path) is None
    assert not court.convicted


def test_only_what_its_peer_has_counted_and_signed_is_asked_about() -> None:
    room = quiet()
    a, b, *_ = room.names
    _, work, _ = of(room, a)
    court, what = room.members[b].court, digest_of("other")
    assert court.hear_sent(sent_by(a, 60, what), TELLER) == [], "counted by nobody"
    assert court.hear_sent(sent_by(a, work.index, what, stamp=stamp_of(STEP + 1)), TELLER) == [], (
        "of a sum not known here"
    )
    assert court.hear_sent(sent_by(a, work.index, what, stamp=replace(stamp_of(STEP), stage=0)), TELLER) == []
    assert court.hear_sent(replace(sent_by(a, work.index, what), signature=b"x"), TELLER) == []
    _, mine, _ = of(room, b)
    assert court.hear_sent(sent_by(b, mine.index, what), TELLER) == [], "my own"


def test_who_says_that_it_sent_something_else_too_is_left_alone() -> None:
    """Whoever feeds it two inputs makes an honest peer say so."""
    room = quiet()
    a, b, *_ = room.names
    pledge, work, _ = of(room, a)
    court, leaves = room.members[b].court, {work.index: leaf(replace(work, resent=True))}
    second = replace(pledge, id=replace(pledge.id, number=99), work_root=root_of(leaves))
    assert court.hear_pledge(replace(second, signature=Notary(a).sign(statement(second)))) == []
    shown = sent_by(a, work.index, digest_of("other")), replace(work, resent=True), path_of(leaves, work.index)
    assert court.compared(*shown) == [] and not court.convicted


# ---------------------------------------------------------------- what is sent of what another has counted


def told(room: Stage, sent: Sent, to: Iterable[PeerId]) -> None:
    """A neighbour has shown it to these."""
    room.queue += [(PeerId("neighbour"), peer, sent) for peer in to]
    room.run(lost=0.0, doubled=0.0, lies=0)


def convicted(room: Stage, *but: PeerId) -> list[set[PeerId]]:
    """By each other member."""
    return [set(room.members[peer].court.convicted) for peer in room.names if peer not in but]


@pytest.mark.parametrize("stranger", [False, True])
def test_whoever_sends_another_thing_made_of_the_same_is_tried_and_named(stranger: bool) -> None:
    room = quiet()
    a, b, c, *_ = room.names
    liar = PeerId("fed and counted nothing") if stranger else c
    _, work, _ = of(room, a)
    false = sent_by(liar, work.index, digest_of("other"), input=work.input)
    if stranger:
        told(room, false, [b])
        assert not any(convicted(room)), "its name costs nothing"
        for peer in room.names:
            room.members[peer].court._live |= {liar}
            room.members[peer].court._changed[liar] = STEP - 1
    told(room, false, [b])
    assert convicted(room, liar) == [{liar}] * (5 if stranger else 4)
    proof = room.members[a].court.proofs[liar]
    assert isinstance(proof, Verdict) and proof.sent is not None and proof.pledge.peer == a


def test_whoever_sends_the_right_thing_where_another_has_counted_a_false_one_names_that() -> None:
    room = quiet(liars=1, false=1.0)
    (liar,) = room.liars
    b, c, *_ = sorted(room.honest)
    _, work, _ = of(room, liar)
    told(room, sent_by(c, work.index, right(work).output, input=work.input), [b])
    assert convicted(room, liar) == [{liar}] * 4


@pytest.mark.parametrize("says", [{}, {"gradient": digest_of("another")}])
def test_who_was_fed_something_else_has_not_lied(says: dict) -> None:
    room = quiet()
    a, b, c, *_ = room.names
    _, work, _ = of(room, a)
    told(room, sent_by(c, work.index, digest_of("other"), **says), [b])
    told(room, sent_by(c, work.index, digest_of("other"), kind="answer", input=work.input, gradient=bytes(3)), [b])
    assert not any(convicted(room)) and all(not room.members[peer].court.open_cases for peer in room.names)


def test_nobody_is_tried_for_what_it_has_not_signed_or_in_another_class() -> None:
    room = quiet()
    a, b, c, *_ = room.names
    _, work, _ = of(room, a)
    false = sent_by(c, work.index, digest_of("other"), input=work.input)
    told(room, replace(false, signature=b"x"), [b])
    for peer in room.names:
        room.members[peer].court._numerics = lambda peer: "gpu" if peer == c else "cpu"
    told(room, false, room.names)
    assert not any(convicted(room))


def test_whoever_accuses_of_what_was_rightly_sent_is_heard_by_nobody() -> None:
    room = quiet(liars=1)
    (liar,) = room.liars
    a, b, *_ = sorted(room.honest)
    pledge, work, _ = of(room, a)
    true = sent_by(b, work.index, right(work).output, input=work.input)
    finding = Finding(case_of(pledge, work, true), digest_of("lie"), liar)
    word = finding_statement(finding, pledge, "cpu", true)
    room.queue += [(liar, to, replace(finding, signature=Notary(liar).sign(word))) for to in sorted(room.honest)]
    told(room, true, room.honest)
    assert not any(found - {liar} for found in convicted(room))


def test_a_verdict_on_what_was_sent_is_about_that_word_alone() -> None:
    room = quiet()
    a, b, c, *_ = room.names
    _, work, _ = of(room, a)
    told(room, sent_by(c, work.index, digest_of("other"), input=work.input), [b])
    proof = room.members[a].court.proofs[c]
    assert isinstance(proof, Verdict) and refusal(proof, frozenset(room.names), Notary.verify) == ""
    assert proof.work is not None and proof.sent is not None
    for sent in (
        replace(proof.sent, digest=proof.work.output),
        replace(proof.sent, input=digest_of("another")),
        replace(proof.sent, index=proof.work.index + 1),
        replace(proof.sent, stamp=stamp_of(STEP + 1)),
        replace(proof.sent, peer=b),
    ):
        signed = replace(sent, signature=Notary(sent.peer).sign(statement(sent)))
        for false in (sent, signed):
            assert refusal(replace(proof, sent=false), frozenset(room.names), Notary.verify), false
    for false in (None, replace(proof.sent, signature=b"x")):
        assert refusal(replace(proof, sent=false), frozenset(room.names), Notary.verify)


def test_what_a_neighbour_has_sent_is_shown_to_a_few_of_its_mates() -> None:
    room = Stage(3, 0, 1, rate=0.5)
    me, *_ = room.names
    court = room.members[me].court
    sents = [sent_by(PeerId("feeder"), index, bytes(32), stamp=replace(stamp_of(STEP), stage=0)) for index in range(64)]
    drawn = court.received(STEP, [*sents, sent_by(me, 70, bytes(32))], LATER)
    assert 16 < len(drawn) < 48 and all(isinstance(action, ShowSent) and action.sent in sents for action in drawn)
    mates = [PeerId(f"mate{number}") for number in range(40)] + [PeerId("feeder"), me]
    chosen = [frozenset(court.shown_to(action.sent, mates)) for action in drawn]
    assert all(len(few) == SHOWN_TO and not few & {me, "feeder"} for few in chosen) and len(set(chosen)) > 10
    assert not Stage(3, 0, 1, rate=0.0).members[me].court.received(STEP, sents, LATER)


def test_a_verdict_without_known_contributors_is_no_verdict() -> None:
    room = quiet()
    a, b, *others = room.names
    pledge, work, path = of(room, a)
    findings = tuple(said(peer, pledge, work.index, digest_of("x")) for peer in others)
    verdict = Verdict(pledge, work, path, findings, "cpu")
    court = room.members[b].court
    assert court.hear_verdict(verdict, frozenset()) == []
    (convict,) = court.hear_verdict(verdict, frozenset(room.names))
    assert convict.peer == a and f"microbatch {work.index}" in convict.reason
    assert court.hear_verdict(verdict, frozenset(room.names)) == []


def test_a_forged_verdict_costs_three_signatures_at_most() -> None:
    """True pledges and findings are at hand, and false ones about honest contributors cost nothing to write."""
    room, checks = quiet(size=31), []

    def counted(*signed: object) -> bool:
        checks.append(signed)
        return Notary.verify(*signed)

    contributors = frozenset(room.names)
    a, b, *others = room.names
    pledge, work, path = of(room, a)
    true = tuple(said(peer, pledge, work.index, leaf(work)) for peer in others)
    forged = replace(said(b, pledge, work.index, digest_of("x")), signature=b"x")
    assert refusal(Verdict(pledge, work, path, (*true, forged), "cpu"), contributors, counted)
    false = tuple(replace(finding, found=digest_of("x")) for finding in true)
    assert refusal(Verdict(pledge, work, path, false, "cpu"), contributors, counted)
    assert refusal(Verdict(replace(pledge, signature=b"x"), work, path, false, "cpu"), contributors, counted)
    assert len(checks) <= 3 * 3


def test_who_did_not_contribute_is_not_convicted_either() -> None:
    """Of identities that sign something false in a case of others there is no end."""
    room = quiet()
    a, b, *others = room.names
    pledge, work, path = of(room, a)
    true = tuple(said(peer, pledge, work.index, leaf(work)) for peer in others)
    court = room.members[b].court
    for number in range(3):
        nobody = said(f"nobody {number}", pledge, work.index, digest_of("x"))
        forged = Verdict(pledge, work, path, (*true, nobody), "cpu")
        assert refusal(forged, frozenset(room.names), Notary.verify)
        assert court.hear_verdict(forged, frozenset(room.names)) == []
    assert not court.convicted


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


def test_at_a_rate_of_one_every_other_member_looks_at_each_case() -> None:
    room = Stage(6, 0, 4)
    room.begin()
    drawn = Counter(
        action.case for peer in room.names for action in room.actions[peer] if isinstance(action, Recompute)
    )
    assert len(drawn) == 6 * (2 + 1) and set(drawn.values()) == {5}


def test_nobody_draws_what_another_does() -> None:
    room = Stage(6, 0, 4, rate=0.5)
    room.begin()
    drawn = [frozenset(a.case for a in room.actions[peer] if isinstance(a, Recompute)) for peer in room.names]
    assert len(set(drawn)) > 1


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


def test_what_one_operators_members_do_the_others_draw_more_often() -> None:
    more = 0
    for seed in range(20):
        apart, together = (Stage(5, 2, seed, false=0.0, rate=0.3, kin=kin) for kin in (False, True))
        for room in (apart, together):
            room.begin()
        for peer in together.honest:
            before, now = (
                {a.case for a in room.actions[peer] if isinstance(a, Recompute)} for room in (apart, together)
            )
            assert before <= now and all(case.accused in together.liars for case in now - before)
            more += len(now - before)
    assert more > 5


def test_the_chance_of_being_named() -> None:
    rates = {"microbatches": 0.01, "contributions": 0.0, "members": 10}
    assert chance_named(460.6, false=1.0, per_step=8, liars=1, **rates) == pytest.approx(0.99, abs=3e-4)
    assert chance_named(460.6, false=1.0, per_step=8, liars=5, **rates) == 0.0
    assert chance_named(4606, false=0.1, per_step=8, liars=1, **rates) == pytest.approx(0.99, abs=3e-4)
    assert chance_named(460.6, false=1.0, per_step=8, liars=2, **rates) < 0.985
    # Whom the liar's operator runs covers for nobody, but for its vote in the jury.
    assert chance_named(460.6, false=1.0, per_step=8, liars=4, kin=4, **rates) == pytest.approx(0.99, abs=3e-4)
    assert chance_named(460.6, false=1.0, per_step=8, liars=4, kin=2, **rates) < 0.975
    assert chance_named(460.6, false=1.0, per_step=8, liars=5, kin=5, **rates) == 0.0


class TwoOfThree:
    """Of three contributors to a sum two lie, of an honest third; two more contributed to the sum before."""

    def __init__(self) -> None:
        self.room = quiet(3)
        self.accused, *liars = self.room.names
        self.contributors = frozenset(self.room.names)
        self.everybody = [*self.room.names, PeerId("d"), PeerId("e")]
        self.pledge, self.work, self.path = of(self.room, self.accused)
        self.wrong = tuple(said(peer, self.pledge, self.work.index, digest_of("false")) for peer in liars)
        self.verdict = Verdict(self.pledge, self.work, self.path, self.wrong, "cpu")

    @staticmethod
    def court(peer: str, stage: int = STAGE) -> Court:
        rates = {"microbatches": 0.0, "contributions": 0.0}
        return Court(PeerId(peer), stage, Notary(PeerId(peer)), numerics=lambda _: "cpu", operator=str, **rates)

    def mate(self, *, since: int = 0, live: int = 5) -> Court:
        """Of one that has seen the sum of the three, and those before from `since` on; so many are there."""
        court, here = self.court("d"), frozenset(self.everybody[:live])
        for step in {since, STEP} - {STEP}:
            court.applied(stamp_of(step), finished_of(step, self.everybody), (), LATER, here)
        court.applied(stamp_of(STEP), self.room.finished, self.room.pledges, LATER, here)
        return court

    def convicted_by(self, court: Court) -> bool:
        """By what the two say, as a verdict and each for itself."""
        if court.hear_verdict(self.verdict, self.contributors):
            return True
        assert court.served(self.pledge, self.work, self.path)
        return any(isinstance(each, Convict) for finding in self.wrong for each in court.hear(finding))


def test_most_of_a_few_contributors_convict_nobody() -> None:
    two = TwoOfThree()
    assert refusal(two.verdict, two.contributors, Notary.verify) == "", "offline two of three are enough"
    assert not two.convicted_by(two.mate())
    # Of another stage it counts who contributes there.
    far = two.court("z", STAGE + 1)
    assert far.hear_verdict(two.verdict, two.contributors, two.contributors) == [], "it has seen no sum yet"
    far.applied(replace(stamp_of(0), stage=STAGE + 1), finished_of(0, two.everybody), (), LATER, frozenset())
    assert far.hear_verdict(two.verdict, two.contributors, frozenset(two.everybody)) == []
    (convict,) = far.hear_verdict(two.verdict, two.contributors, two.contributors)
    assert isinstance(convict, Convict) and convict.peer == two.accused


def test_two_who_collude_convict_nobody_where_a_mate_is_new_or_others_are_away() -> None:
    """They are most of the three that are left when two are away, and most of what a newcomer has seen."""
    two = TwoOfThree()
    assert not two.convicted_by(two.mate(live=2))
    assert not two.convicted_by(new := two.mate(since=STEP))
    # What it has believed in an earlier life it believes.
    assert new.hear_verdict(two.verdict, two.contributors, two.contributors, kept=True)
    # Four are left for good: two are half of them, and no more.
    mate, four = two.mate(live=4), two.everybody[:4]
    for step in range(STEP + 1, STEP + KEEP_STEPS):
        mate.applied(stamp_of(step), finished_of(step, four), (), LATER, frozenset(four))
    assert not mate.hear_verdict(two.verdict, two.contributors, frozenset(four))


def test_whoever_leaves_others_nothing_to_do_is_looked_at_by_them_all_the_same() -> None:
    """Of one contributor nobody can name a liar: who finds it out strikes it."""
    room = quiet(3)
    a, d = room.names[0], PeerId("d")
    alone = finished_of(STEP, [a])
    work = WorkRecord(0, digest_of("in"), digest_of("out"), digest_of("gradient"), digest_of("answer"), 0.0, 0)
    shares = shares_of(alone.contributions, alone.voided)
    said_of = Pledge(stamp_of(STEP), alone.id, alone.digest, shares, a, 1, bytes(32), root_of({0: leaf(work)}))
    pledge = replace(said_of, signature=Notary(a).sign(statement(said_of)))
    rates = {"microbatches": 1.0, "contributions": 0.0}
    court = Court(d, STAGE, Notary(d), numerics=lambda _: "cpu", operator=lambda peer: peer, **rates)
    live = frozenset({a, d})
    court.applied(stamp_of(STEP), alone, [pledge], LATER, live)
    drawn = court.applied(stamp_of(STEP + 1), finished_of(STEP + 1, [a]), (), LATER, live)
    assert [action.case.index for action in drawn if isinstance(action, Recompute)] == [*range(PER_MEMBER)]
    assert court.found(pledge, leaf(work), work, now=0.0) == []
    (strike,) = court.found(pledge, digest_of("other"), work, now=0.0)
    assert isinstance(strike, StrikePeer) and strike.peer == a and not court.open_cases


def test_nobody_is_held_to_the_bits_of_another_class_of_its_own() -> None:
    """It sent something, and came back on another machine."""
    room = quiet()
    a, b, c, *_ = room.names
    _, work, _ = of(room, a)
    for peer in room.names:
        room.members[peer].court._changed[c] = STEP
    told(room, sent_by(c, work.index, digest_of("other"), input=work.input), [b])
    assert not any(convicted(room))


def test_what_one_peer_has_sent_in_a_step_is_tried_twice_at_most() -> None:
    """Each costs all mates a microbatch."""
    room = quiet()
    a, b, c, *_ = room.names
    _, work, path = of(room, a)
    court = room.members[b].court
    falses = [sent_by(c, work.index, digest_of("other", number), input=work.input) for number in range(4)]
    tried = [court.compared(false, work, path) for false in falses]
    assert [len(actions or ()) for actions in tried] == [2, 2, 0, 0]


def test_a_reason_is_short_and_says_how_many_found_otherwise() -> None:
    room = Stage(3, 1, 3, false=1.0, rate=1.0)
    room.begin()
    room.run(lost=0.0, doubled=0.0, lies=0)
    (liar,) = room.liars
    told = {action.reason for peer in room.honest for action in room.actions[peer] if isinstance(action, Convict)}
    assert told and all(
        re.fullmatch(
            rf"step {STEP}: lied about (its contribution|microbatch \d+): 2 of a jury of 3 found otherwise", each
        )
        for each in told
    )
    proof = next(a.proof for p in room.honest for a in room.actions[p] if isinstance(a, Convict))
    (other, *_) = room.honest
    words = reason(proof, other, frozenset(room.names))
    assert words.startswith(f"step {STEP}: lied about work of ...{liar[-8:]}: ")
    far = replace(proof, pledge=replace(proof.pledge, stamp=replace(proof.pledge.stamp, step=999_999)))
    assert len(reason(far, other, frozenset(room.names))) <= MAX_REASON
