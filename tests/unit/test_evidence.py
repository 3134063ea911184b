"""Evidence in a file: what is proven stays proven, and nothing that was changed proves anything."""

from __future__ import annotations

import hashlib
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnet.audit.case import recheck
from swarmnet.audit.evidence import MAX_LINE_BYTES, Evidence, from_line, to_line
from swarmnet.bounds import ANY_RUN
from swarmnet.cli.frame import run as swarmnet
from swarmnet.ids import Ballot, Chain, Generation, Restart, RoundId, RunId, first_chain
from swarmnet.messages import Case, Pledge, Sent, Stamp, WorkRecord
from swarmnet.net.identity import Identity, verify
from swarmnet.pledge import DEPTH, leaf, path_of, proves, root_of, shares_of
from swarmnet.statement import SignedMessage, signed_statement, statement
from swarmnet.wire import signed as signing
from swarmnet.wire.fields import struct_of

RUN = RunId("ab" * 32)
NUMERICS = "cpu AVX2/torch-2"
PEERS = [Identity.from_seed(bytes([at + 1]) * 32) for at in range(6)]
LIAR, *JURY = PEERS[:5]
STRANGER = PEERS[5]


def d(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


SHARES = tuple((one.peer, Generation(0, 0), frozenset({at, at + 10})) for at, one in enumerate(PEERS[:5]))
STAMP = Stamp(7, 2, Chain("11" * 32), Restart(1, 4))
WORKS = {index: WorkRecord(index, d(f"in {index}"), d("out"), d("g"), d("a"), 2.5, 96) for index in (0, 10)}
LEAVES = {index: leaf(work) for index, work in WORKS.items()}


def signed_pledge(by: Identity = LIAR, **changes) -> Pledge:
    round_id = RoundId(Ballot(3, PEERS[1].peer), 4)
    pledge = Pledge(STAMP, round_id, d("sum"), shares_of(SHARES, frozenset({40})), by.peer, 5, root_of(LEAVES))
    pledge = replace(pledge, **changes)
    return replace(pledge, signature=by.sign(statement(pledge)))


PLEDGE = signed_pledge()


def rechecked(case: Case, judges, found: bytes) -> Case:
    return replace(case, rechecks=tuple(recheck(case, found, one, one.peer) for one in judges))


def evidence_of(judges=JURY[:3], *, pledge: Pledge = PLEDGE, index: int = 10, found: bytes = d("right")) -> Evidence:
    work, path = (WORKS[index], path_of(LEAVES, index)) if index >= 0 else (None, b"")
    case = Case(pledge, work, path, numerics=NUMERICS, contributions=SHARES, discarded=frozenset({40}))
    return Evidence(RUN, rechecked(case, judges, found))


def signed_text(kind: str, payload: bytes, by: Identity = STRANGER) -> str:
    """Well signed by its writer, whatever is in it."""
    signature = by.sign(signed_statement(kind, payload, by.peer, 0))
    return signing.to_text(SignedMessage(kind, payload, by.peer, 0, signature, None), most=MAX_LINE_BYTES)


def with_case(evidence: Evidence, **changes: object) -> Evidence:
    return replace(evidence, case=replace(evidence.case, **changes))


def text_of(evidence: Evidence, by: Identity = STRANGER) -> str:
    return to_line(evidence, by.peer, by.sign)


GOOD = evidence_of()


def test_three_of_five_name_the_liar() -> None:
    assert GOOD.refusal(verify) == "" and GOOD.at_fault == {LIAR.peer}
    assert from_line(text_of(GOOD), Evidence, verify) == GOOD
    whole = evidence_of(index=-1)
    assert whole.refusal(verify) == "" and whole.at_fault == {LIAR.peer}
    assert from_line(text_of(whole), Evidence, verify) == whole


def test_a_false_accuser_is_named_by_its_own_finding() -> None:
    false, true = (
        rechecked(GOOD.case, judges, found).rechecks
        for judges, found in ((JURY[:1], d("lie")), (JURY[1:3], leaf(WORKS[10])))
    )
    evidence = with_case(GOOD, rechecks=(*false, *true))
    assert evidence.refusal(verify) == "" and evidence.at_fault == {JURY[0].peer}


def test_two_pledges_of_one_sum_name_their_peer() -> None:
    pair = Evidence(RUN, Case(PLEDGE, other=signed_pledge(work_root=d("other"))))
    assert pair.refusal(verify) == "" and pair.at_fault == {LIAR.peer}
    assert from_line(text_of(pair), Evidence, verify) == pair
    other_round = signed_pledge(work_root=d("other"), id=RoundId(Ballot(3, PEERS[1].peer), 5))
    another = signed_pledge(by=JURY[0], work_root=d("other"))
    # A peer that was started again does not know what the process before it has signed.
    restarted = signed_pledge(work_root=d("other"), incarnation=7)
    for other in (PLEDGE, other_round, another, restarted):
        assert with_case(pair, other=other).refusal(verify)


def missent(by: Identity = LIAR, *, work: WorkRecord = WORKS[10], pledge: Pledge | None = None, **says) -> Evidence:
    """`by` has counted that work, and has sent another answer."""
    sent = replace(Sent(STAMP, 10, "answer", d("other"), by.peer, d("in"), d("gradient")), **says)
    sent = replace(sent, signature=by.sign(statement(sent)))
    leaves = LEAVES | {work.index: leaf(work)}
    pledge = pledge or signed_pledge(by, work_root=root_of(leaves))
    return Evidence(RUN, Case(pledge, work, path_of(leaves, work.index), sent))


SENT_OTHER = missent()


def test_what_was_counted_and_what_was_sent_name_their_peer() -> None:
    assert SENT_OTHER.refusal(verify) == "" and SENT_OTHER.at_fault == {LIAR.peer}
    assert from_line(text_of(SENT_OTHER), Evidence, verify) == SENT_OTHER
    assert missent(kind="output").refusal(verify) == "", "that is not its output either"


def judged(judges=JURY[:3], *, by: Identity = STRANGER, found: bytes = d("out"), **says) -> Evidence:
    """`by` has sent another output of what the pledge's peer counted, and these say so."""
    sent = replace(Sent(STAMP, 10, "output", d("false"), by.peer, WORKS[10].input, bytes(32)), **says)
    sent = replace(sent, signature=by.sign(statement(sent)))
    case = Case(PLEDGE, WORKS[10], path_of(LEAVES, 10), sent, numerics=NUMERICS)
    return Evidence(RUN, rechecked(replace(case, contributions=SHARES, discarded=frozenset({40})), judges, found))


def test_what_was_sent_of_anothers_work_is_judged_by_its_stage() -> None:
    good = judged([*JURY[:3], LIAR])
    assert good.refusal(verify) == "" and good.at_fault == {STRANGER.peer} and good.count == (4, 6)
    assert from_line(text_of(good), Evidence, verify) == good
    for false in (
        judged(),  # three of six
        judged([*JURY[:3], LIAR], input=d("another")),
        judged([*JURY[:3], LIAR], index=0),
        judged([*JURY[:3], LIAR], stamp=replace(STAMP, step=8)),
        judged([*JURY[:3], LIAR], digest=d("out")),
        judged([*JURY[:3], LIAR], kind="answer"),
    ):
        assert false.refusal(verify)


PROVES_NOTHING = {
    "it is the same": missent(digest=d("a")),
    "it is the same output": missent(kind="output", digest=d("out")),
    "another index": missent(index=0),
    "another step": missent(stamp=replace(STAMP, step=8)),
    "another past": missent(stamp=replace(STAMP, chain=Chain("12" * 32))),
    "after the run went back": missent(stamp=replace(STAMP, restart=Restart(2, 4))),
    "it has said so": missent(again=True),
    "its work says so": missent(work=replace(WORKS[10], resent=True)),
    "somebody else's pledge": missent(pledge=signed_pledge(JURY[0])),
    "a pledge of other works": missent(pledge=signed_pledge(work_root=d("other"))),
    "sent by somebody else": with_case(SENT_OTHER, sent=missent(JURY[0]).case.sent),
}


@pytest.mark.parametrize("name", PROVES_NOTHING)
def test_what_an_honest_peer_may_have_signed_proves_nothing(name: str) -> None:
    assert PROVES_NOTHING[name].refusal(verify)


REFUSED = {
    "too few": evidence_of(JURY[:2]),
    "nobody": evidence_of([]),
    "a stranger in place of a juror": evidence_of([*JURY[:2], STRANGER]),
    "one of them twice": evidence_of([*JURY[:2], JURY[1]]),
    "the accused against itself": evidence_of([*JURY[:2], LIAR]),
    "all agree": evidence_of(found=leaf(WORKS[10])),
    "other contributors": with_case(GOOD, contributions=SHARES[:3]),
    "other indexes": with_case(GOOD, contributions=(*SHARES[:4], (SHARES[4][0], SHARES[4][1], frozenset({4})))),
    "others discarded": with_case(GOOD, discarded=frozenset()),
    "a pledge of a replica that contributed nothing": evidence_of(JURY, pledge=signed_pledge(STRANGER), index=-1),
    "another class": with_case(GOOD, numerics="cuda"),
    "another work": with_case(GOOD, work=WORKS[0]),
    "the work left out": with_case(GOOD, work=None),
    "another path": with_case(GOOD, path=path_of(LEAVES, 0)),
    "no path": with_case(GOOD, path=b""),
    "another pledge under the findings": with_case(GOOD, pledge=signed_pledge(product=6)),
    "a jury that the suspect never named": with_case(
        GOOD, contributions=(SHARES[0], *((one.peer, Generation(0, 0), frozenset({9})) for one in (STRANGER,)))
    ),
    "a case of another": with_case(GOOD, rechecks=evidence_of(index=0).case.rechecks),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_prove_it_is_refused(name: str) -> None:
    assert REFUSED[name].refusal(verify)


@settings(max_examples=150, deadline=None)
@given(st.data())
@pytest.mark.parametrize("good", [GOOD, SENT_OTHER], ids=["rechecked", "signed"])
def test_no_changed_byte_is_believed(good: Evidence, data: st.DataObject) -> None:
    payload = bytearray(struct_of(Evidence, ANY_RUN).written(good))
    payload[data.draw(st.integers(70, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        changed = from_line(signed_text("Evidence", bytes(payload)), Evidence, verify)
    except ValueError:
        return
    # Two signatures need no verifiers: then the list of contributors proves nothing.
    assert changed.refusal(verify) or replace(changed.case, contributions=(), discarded=frozenset()) == replace(
        good.case, contributions=(), discarded=frozenset()
    )


def test_no_changed_field_is_believed() -> None:
    """Every field of everything that is signed."""
    case = GOOD.case
    other = {bytes: lambda b: bytes([b[0] ^ 1]) + b[1:], int: lambda n: n + 1, float: lambda x: x + 1.0}

    def changes(value):
        for field in fields(value):
            old = getattr(value, field.name)
            if change := other.get(type(old)):
                yield replace(value, **{field.name: change(old)})

    other[bool] = lambda flag: not flag
    lie = SENT_OTHER.case
    false = [replace(lie, pledge=pledge) for pledge in changes(lie.pledge)]
    false += [replace(lie, work=work) for work in changes(lie.work)]
    false += [replace(lie, sent=sent) for sent in (*changes(lie.sent), replace(lie.sent, kind="output"))]
    false += [replace(lie, path=bytes(len(lie.path)))]
    assert len(false) > 14 and all(replace(SENT_OTHER, case=one).refusal(verify) for one in false)
    changed = [replace(case, pledge=pledge) for pledge in changes(case.pledge)]
    stamps = [*changes(STAMP), replace(STAMP, restart=Restart(2, 4)), replace(STAMP, chain=Chain("12" * 32))]
    changed += [replace(case, pledge=replace(case.pledge, stamp=stamp)) for stamp in stamps]
    changed += [replace(case, pledge=replace(case.pledge, peer=JURY[0].peer))]
    changed += [replace(case, work=work) for work in changes(case.work)]
    first, *rest = case.rechecks
    for one in (*changes(first), replace(first, peer=JURY[3].peer)):
        changed.append(replace(case, rechecks=(one, *rest)))
    assert len(changed) > 20
    assert all(replace(GOOD, case=one).refusal(verify) for one in changed)


# ---------------------------------------------------------------- the tree


@given(st.sets(st.integers(0, 65535), min_size=1, max_size=8), st.data())
def test_a_path_proves_its_work_alone(indexes: set[int], data: st.DataObject) -> None:
    works = {index: replace(WORKS[0], index=index) for index in indexes}
    leaves = {index: leaf(work) for index, work in works.items()}
    root, index = root_of(leaves), data.draw(st.sampled_from(sorted(indexes)))
    path = path_of(leaves, index)
    assert proves(path, works[index], root) and len(path) == 32 * DEPTH
    assert not proves(path, replace(works[index], index=(index + 1) % 65536), root)
    assert not proves(path, replace(works[index], loss_sum=9.0), root)
    assert not proves(path[32:], works[index], root)
    at = data.draw(st.integers(0, len(path) - 1))
    assert not proves(path[:at] + bytes([path[at] ^ 1]) + path[at + 1 :], works[index], root)


# ---------------------------------------------------------------- swarmnet audit verify


UNPROVEN = f"a run that the file calls {RUN[:12]} (which nothing in it proves)"


def test_verify_says_who_did_what(tmp_path, capsys) -> None:
    file, bad = tmp_path / "good.proof", tmp_path / "bad.proof"
    file.write_text(text_of(GOOD))
    assert swarmnet(["audit", "verify", str(file)]) == 0
    said = capsys.readouterr().out
    assert said == (
        f"{file}: {LIAR.peer} lied in step 7 of stage 2 of {UNPROVEN}, about microbatch 10: "
        "3 of 5 verifiers found otherwise\n"
    )
    file.write_text(text_of(SENT_OTHER))
    assert swarmnet(["audit", "verify", str(file)]) == 0
    said = capsys.readouterr().out
    assert said == (
        f"{file}: {LIAR.peer} lied in step 7 of stage 2 of {UNPROVEN}: "
        "it counted the answer of microbatch 10, and sent another one\n"
    )
    bad.write_text(text_of(evidence_of(JURY[:2])))
    assert swarmnet(["audit", "verify", str(file), str(bad)]) == 1
    assert (
        "this file proves nothing: no more than half of the verifiers found the same value" in capsys.readouterr().out
    )
    bad.write_text("{}")
    assert swarmnet(["audit", "verify", str(bad)]) == 1
    assert swarmnet(["audit", "verify", str(tmp_path / "none.proof")]) == 2


def test_the_run_is_proven_by_the_first_chain_alone(tmp_path, capsys) -> None:
    file, stamp = tmp_path / "first.proof", Stamp(0, 2, first_chain(RUN, 2))
    first = evidence_of(pledge=signed_pledge(stamp=stamp))
    file.write_text(text_of(first))
    assert swarmnet(["audit", "verify", str(file)]) == 0
    assert f"lied in step 0 of stage 2 of run {RUN[:12]}, about" in capsys.readouterr().out
    file.write_text(text_of(replace(first, run="cd" * 32)))
    assert swarmnet(["audit", "verify", str(file)]) == 1
    assert "proves nothing: its commitment was signed in another run than the one that the file names" in (
        capsys.readouterr().out
    )
    file.write_text(text_of(replace(GOOD, run="cd" * 32)))
    assert swarmnet(["audit", "verify", str(file)]) == 0
    assert "of a run that the file calls cdcdcdcdcdcd (which nothing in it proves), about" in capsys.readouterr().out


def test_verify_says_whose_word_a_jury_is_that_the_accused_has_not_signed(tmp_path, capsys) -> None:
    file = tmp_path / "sent.proof"
    file.write_text(text_of(judged([*JURY[:3], LIAR])))
    assert swarmnet(["audit", "verify", str(file)]) == 0
    said = capsys.readouterr().out
    assert f"The list of verifiers was signed by {LIAR.peer}, not by the suspect" in said and "believe it if" in said
