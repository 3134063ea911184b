"""Evidence in a file: what is proven stays proven, and nothing that was changed proves anything."""

from __future__ import annotations

import hashlib
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnet.audit.evidence import Evidence
from swarmnet.audit.pledge import DEPTH, finding_statement, leaf, path_of, proves, root_of, shares_of
from swarmnet.cli.frame import run as swarmnet
from swarmnet.ids import Ballot, Chain, Generation, Restart, RoundId, RunId, first_chain
from swarmnet.messages import Case, Finding, Missent, Pair, Pledge, Sent, Stamp, Verdict, WorkRecord
from swarmnet.net.identity import Identity, verify
from swarmnet.statement import statement

RUN = "ab" * 32
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
    pledge = Pledge(
        STAMP, round_id, d("sum"), shares_of(SHARES, frozenset({40})), by.peer, 5, d("pieces"), root_of(LEAVES)
    )
    pledge = replace(pledge, **changes)
    return replace(pledge, signature=by.sign(statement(pledge)))


def signed_finding(by: Identity, pledge: Pledge, index: int, found: bytes, numerics: str = NUMERICS) -> Finding:
    finding = Finding(Case(pledge.stamp, pledge.peer, index), found, by.peer)
    return replace(finding, signature=by.sign(finding_statement(finding, pledge, numerics)))


PLEDGE = signed_pledge()


def evidence_of(judges=JURY[:3], *, pledge: Pledge = PLEDGE, index: int = 10, found: bytes = d("right")) -> Evidence:
    findings = tuple(signed_finding(one, pledge, index, found) for one in judges)
    work, path = (WORKS[index], path_of(LEAVES, index)) if index >= 0 else (None, b"")
    return Evidence(RUN, SHARES, frozenset({40}), Verdict(pledge, work, path, findings, NUMERICS))


GOOD = evidence_of()


def test_three_of_five_name_the_liar() -> None:
    assert GOOD.refusal(verify) == "" and GOOD.odd == {LIAR.peer}
    assert Evidence.from_json(GOOD.to_json()) == GOOD
    whole = evidence_of(index=-1)
    assert whole.refusal(verify) == "" and whole.odd == {LIAR.peer}
    assert Evidence.from_json(whole.to_json()) == whole


def test_a_false_accuser_is_named_by_its_own_finding() -> None:
    true = leaf(WORKS[10])
    findings = (
        signed_finding(JURY[0], PLEDGE, 10, d("lie")),
        *(signed_finding(one, PLEDGE, 10, true) for one in JURY[1:3]),
    )
    evidence = replace(GOOD, proof=replace(GOOD.proof, findings=findings))
    assert evidence.refusal(verify) == "" and evidence.odd == {JURY[0].peer}


def test_two_pledges_of_one_sum_name_their_peer() -> None:
    pair = Evidence(RUN, SHARES, frozenset({40}), Pair(PLEDGE, signed_pledge(work_root=d("other"))))
    assert pair.refusal(verify) == "" and pair.odd == {LIAR.peer}
    assert Evidence.from_json(pair.to_json()) == pair
    assert replace(pair, proof=Pair(PLEDGE, PLEDGE)).refusal(verify)
    other_round = signed_pledge(work_root=d("other"), id=RoundId(Ballot(3, PEERS[1].peer), 5))
    assert replace(pair, proof=Pair(PLEDGE, other_round)).refusal(verify)
    assert replace(pair, proof=Pair(PLEDGE, signed_pledge(by=JURY[0], work_root=d("other")))).refusal(verify)
    # Who was started again does not know what the process before it has signed.
    assert replace(pair, proof=Pair(PLEDGE, signed_pledge(work_root=d("other"), incarnation=7))).refusal(verify)


def missent(by: Identity = LIAR, *, work: WorkRecord = WORKS[10], pledge: Pledge | None = None, **says) -> Evidence:
    """`by` has counted that work, and has sent another answer."""
    sent = replace(Sent(STAMP, 10, "answer", d("other"), by.peer, d("in"), d("gradient")), **says)
    sent = replace(sent, signature=by.sign(statement(sent)))
    leaves = LEAVES | {work.index: leaf(work)}
    pledge = pledge or signed_pledge(by, work_root=root_of(leaves))
    return Evidence(RUN, (), frozenset(), Missent(pledge, work, path_of(leaves, work.index), sent))


SENT_OTHER = missent()


def test_what_was_counted_and_what_was_sent_name_their_peer() -> None:
    assert SENT_OTHER.refusal(verify) == "" and SENT_OTHER.odd == {LIAR.peer}
    assert Evidence.from_json(SENT_OTHER.to_json()) == SENT_OTHER
    assert missent(kind="output").refusal(verify) == "", "that is not its output either"


def judged(judges=JURY[:3], *, by: Identity = STRANGER, found: bytes = d("out"), **says) -> Evidence:
    """`by` has sent another output of what the pledge's peer counted, and these say so."""
    sent = replace(Sent(STAMP, 10, "output", d("false"), by.peer, WORKS[10].input, bytes(32)), **says)
    sent = replace(sent, signature=by.sign(statement(sent)))
    findings = []
    for one in judges:
        finding = Finding(Case(STAMP, by.peer, 10), found, one.peer)
        signature = one.sign(finding_statement(finding, PLEDGE, NUMERICS, sent))
        findings.append(replace(finding, signature=signature))
    verdict = Verdict(PLEDGE, WORKS[10], path_of(LEAVES, 10), tuple(findings), NUMERICS, sent=sent)
    return Evidence(RUN, SHARES, frozenset({40}), verdict)


def test_what_was_sent_of_anothers_work_is_judged_by_its_stage() -> None:
    good = judged([*JURY[:3], LIAR])
    assert good.refusal(verify) == "" and good.odd == {STRANGER.peer} and good.count[1:] == (4, 6)
    assert Evidence.from_json(good.to_json()) == good
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
    "sent by somebody else": replace(SENT_OTHER, proof=replace(SENT_OTHER.proof, sent=missent(JURY[0]).proof.sent)),
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
    "other contributors": replace(GOOD, contributions=SHARES[:3]),
    "other indexes": replace(GOOD, contributions=(*SHARES[:4], (SHARES[4][0], SHARES[4][1], frozenset({4})))),
    "others voided": replace(GOOD, voided=frozenset()),
    "another class": replace(GOOD, proof=replace(GOOD.proof, numerics="cuda")),
    "another work": replace(GOOD, proof=replace(GOOD.proof, work=WORKS[0])),
    "the work left out": replace(GOOD, proof=replace(GOOD.proof, work=None)),
    "another path": replace(GOOD, proof=replace(GOOD.proof, path=path_of(LEAVES, 0))),
    "no path": replace(GOOD, proof=replace(GOOD.proof, path=b"")),
    "another pledge under the findings": replace(GOOD, proof=replace(GOOD.proof, pledge=signed_pledge(product=6))),
    "a jury that the accused never named": replace(
        GOOD, contributions=(SHARES[0], *((one.peer, Generation(0, 0), frozenset({9})) for one in (STRANGER,)))
    ),
    "a case of another": replace(
        GOOD, proof=replace(GOOD.proof, findings=tuple(signed_finding(one, PLEDGE, 0, d("right")) for one in JURY[:3]))
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_prove_it_is_refused(name: str) -> None:
    assert REFUSED[name].refusal(verify)


@settings(max_examples=150, deadline=None)
@given(st.data())
@pytest.mark.parametrize("good", [GOOD, SENT_OTHER], ids=["verdict", "missent"])
def test_no_changed_byte_is_believed(good: Evidence, data: st.DataObject) -> None:
    text = good.to_json()
    at = data.draw(st.integers(text.index("contributions"), len(text) - 2))
    to = data.draw(st.sampled_from('abcdefABCDEF0123456789+/="{}[],: \n'))
    try:
        changed = Evidence.from_json(text[:at] + to + text[at + 1 :])
    except ValueError:
        return
    # A missent needs no jury: its contributions are those of nobody.
    assert changed.refusal(verify) or changed.proof == good.proof


def test_no_changed_field_is_believed() -> None:
    """Every field of everything that is signed."""
    proof = GOOD.proof
    assert isinstance(proof, Verdict)
    other = {bytes: lambda b: bytes([b[0] ^ 1]) + b[1:], int: lambda n: n + 1, float: lambda x: x + 1.0}

    def changes(value):
        for field in fields(value):
            old = getattr(value, field.name)
            if change := other.get(type(old)):
                yield replace(value, **{field.name: change(old)})

    other[bool] = lambda flag: not flag
    lie = SENT_OTHER.proof
    assert isinstance(lie, Missent)
    false = [replace(lie, pledge=pledge) for pledge in changes(lie.pledge)]
    false += [replace(lie, work=work) for work in changes(lie.work)]
    false += [replace(lie, sent=sent) for sent in (*changes(lie.sent), replace(lie.sent, kind="output"))]
    false += [replace(lie, path=bytes(len(lie.path)))]
    assert len(false) > 14 and all(replace(SENT_OTHER, proof=one).refusal(verify) for one in false)
    changed = [replace(proof, pledge=pledge) for pledge in changes(proof.pledge)]
    stamps = [*changes(STAMP), replace(STAMP, restart=Restart(2, 4)), replace(STAMP, chain=Chain("12" * 32))]
    changed += [replace(proof, pledge=replace(proof.pledge, stamp=stamp)) for stamp in stamps]
    changed += [replace(proof, pledge=replace(proof.pledge, peer=JURY[0].peer))]
    changed += [replace(proof, work=work) for work in changes(proof.work)]
    first, *rest = proof.findings
    for finding in (*changes(first), replace(first, peer=JURY[3].peer), replace(first, case=Case(STAMP, LIAR.peer, 0))):
        changed.append(replace(proof, findings=(finding, *rest)))
    assert len(changed) > 20
    assert all(replace(GOOD, proof=one).refusal(verify) for one in changed)


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


# ---------------------------------------------------------------- swarmnet verify


UNPROVEN = f"a run that the file calls {RUN[:12]} (which nothing in it proves)"


def test_verify_says_who_did_what(tmp_path, capsys) -> None:
    file, bad = tmp_path / "good.json", tmp_path / "bad.json"
    file.write_text(GOOD.to_json())
    assert swarmnet(["verify", str(file)]) == 0
    said = capsys.readouterr().out
    assert said == (
        f"{file}: {LIAR.peer} lied in step 7 of stage 2 of {UNPROVEN}, about microbatch 10: "
        "3 of a jury of 5 found otherwise\n"
    )
    file.write_text(SENT_OTHER.to_json())
    assert swarmnet(["verify", str(file)]) == 0
    said = capsys.readouterr().out
    assert said == (
        f"{file}: {LIAR.peer} lied in step 7 of stage 2 of {UNPROVEN}: "
        "it counted the answer of microbatch 10, and sent another one\n"
    )
    bad.write_text(evidence_of(JURY[:2]).to_json())
    assert swarmnet(["verify", str(file), str(bad)]) == 1
    assert "this file proves nothing: no more than half of those who judge found the same" in capsys.readouterr().out
    bad.write_text("{}")
    assert swarmnet(["verify", str(bad)]) == 1
    assert swarmnet(["verify", str(tmp_path / "none.json")]) == 2


def test_the_run_is_proven_by_the_first_chain_alone(tmp_path, capsys) -> None:
    file, stamp = tmp_path / "first.json", Stamp(0, 2, first_chain(RunId(RUN), 2))
    first = evidence_of(pledge=signed_pledge(stamp=stamp))
    file.write_text(first.to_json())
    assert swarmnet(["verify", str(file)]) == 0
    assert f"lied in step 0 of stage 2 of run {RUN[:12]}, about" in capsys.readouterr().out
    file.write_text(replace(first, run="cd" * 32).to_json())
    assert swarmnet(["verify", str(file)]) == 1
    assert "proves nothing: its pledge was signed in another run than the one that the file names" in (
        capsys.readouterr().out
    )
    file.write_text(replace(GOOD, run="cd" * 32).to_json())
    assert swarmnet(["verify", str(file)]) == 0
    assert "of a run that the file calls cdcdcdcdcdcd (which nothing in it proves), about" in capsys.readouterr().out


def test_verify_says_whose_word_a_jury_is_that_the_accused_has_not_signed(tmp_path, capsys) -> None:
    file = tmp_path / "sent.json"
    file.write_text(judged([*JURY[:3], LIAR]).to_json())
    assert swarmnet(["verify", str(file)]) == 0
    said = capsys.readouterr().out
    assert f"Who judges was signed by {LIAR.peer}, not by the accused" in said and "believe it if" in said
