"""Receipts: who counted what, proven offline; and the sum over members is the run's."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest

from swarmnet.audit.case import recheck
from swarmnet.audit.evidence import Evidence, from_line, to_line
from swarmnet.audit.histories import Account, NamedFault, StageHistory, account, faults_of
from swarmnet.audit.receipts import Receipt, append, read
from swarmnet.cli.frame import run as swarmnet
from swarmnet.ids import NO_RESTART, Ballot, Chain, Generation, Restart, RoundId, RunId, first_chain, next_chain
from swarmnet.messages import Case, Commit, Finished, Pledge, Sent, Stamp, WorkRecord
from swarmnet.net.identity import Identity, verify
from swarmnet.pledge import leaf, path_of, root_of, shares_of
from swarmnet.statement import statement
from swarmnet.step.commits import commit_of, evidence

RUN = RunId("cd" * 32)
MEMBERS = [Identity.from_seed(bytes([at + 1]) * 32) for at in range(3)]
BATCH, TOKENS = 6, 64


def d(*parts: object) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()


def finished_of(stage: int, step: int, who: int = 3, salt: str = "") -> Finished:
    """BATCH microbatches, shared by the first `who` members."""
    shares = tuple(
        (one.peer, Generation(1, step), frozenset(range(at, BATCH, who))) for at, one in enumerate(MEMBERS[:who])
    )
    round_id = RoundId(Ballot(1, MEMBERS[0].peer), step)
    return Finished(round_id, d(stage, step, salt), BATCH * TOKENS, 1.0, 2.0, shares)


def signed(by: Identity, stamp: Stamp, finished: Finished) -> Pledge:
    shares = shares_of(finished.contributions, finished.discarded)
    pledge = Pledge(stamp, finished.id, finished.digest, shares, by.peer, 0, d("works"))
    return replace(pledge, signature=by.sign(statement(pledge)))


def receipts_of(steps: int, *, stages: int = 2, who: int = 3, overlap: int | None = None) -> list[Receipt]:
    """What the replicas of all stages have kept. overlap: the first step that overlaps the one before it."""
    chains = [[first_chain(RUN, stage)] for stage in range(stages)]
    kept = []
    for step in range(steps):
        sums = [finished_of(stage, step, who) for stage in range(stages)]
        behind = overlap is not None and step >= max(overlap, 1)
        stamps = [Stamp(step, stage, chains[stage][step - behind]) for stage in range(stages)]
        commits: tuple[Commit, ...] = tuple(map(commit_of, stamps, sums))
        for stage in range(stages):
            pledges = tuple(signed(one, stamps[stage], sums[stage]) for one in MEMBERS[:who])
            kept.append(Receipt(RUN, stamps[stage], sums[stage], dict.fromkeys(range(BATCH), TOKENS), pledges, commits))
            chains[stage].append(next_chain(chains[stage][-1], evidence(commits)))
    return kept


def line_of(proof: Receipt | Evidence, by: Identity = MEMBERS[0]) -> str:
    return to_line(proof, by.peer, by.sign)


def proven(receipts) -> Account:
    return account([("file", receipt) for receipt in receipts], verify, evidence)


def history(receipts, stage: int = 0) -> StageHistory:
    """The only one of a stage, of receipts that are all proven."""
    found = proven(receipts)
    assert not found.refused and not found.contested
    return next(one for one in found.histories if one.stage == stage)


@pytest.mark.parametrize("overlap", [None, 0, 2])
@pytest.mark.parametrize("joined", [0, 1, 2, 3])
def test_the_sum_over_members_is_the_run(overlap: int | None, joined: int) -> None:
    """joined: the first step that the writer was there."""
    kept = [receipt for receipt in receipts_of(6, overlap=overlap) if receipt.stamp.step >= joined]
    for stage in (0, 1):
        found = history(kept, stage)
        assert found.tokens == (6 - joined) * BATCH * TOKENS == sum(t.tokens for t in found.tallies.values())
        assert (found.steps, found.linked, found.missing) == (6 - joined, 5 - joined, 0)
        assert found.tallies[MEMBERS[0].peer].microbatches == 2 * (6 - joined)
        assert found.own.signers == {one.peer for one in MEMBERS}


def test_receipts_of_several_replicas_count_once() -> None:
    kept = receipts_of(3)
    assert history(kept + kept).tokens == history(kept).tokens


def test_a_missing_step_is_said() -> None:
    kept = [receipt for receipt in receipts_of(5, stages=1) if receipt.stamp.step != 2]
    found = history(kept)
    assert (found.steps, found.missing, found.linked) == (4, 1, 2)


def test_a_line_is_read_as_it_was_written() -> None:
    (receipt,) = receipts_of(1, stages=1)
    assert from_line(line_of(receipt), Receipt, verify) == receipt


def with_pledges(receipt: Receipt, signers) -> Receipt:
    return replace(receipt, pledges=tuple(signed(one, receipt.stamp, receipt.finished) for one in signers))


def test_what_is_not_proven_is_not_counted() -> None:
    first, second = receipts_of(2, stages=1)
    stranger = Identity.from_seed(b"s" * 32)
    other = replace(first.finished, num_tokens=1)
    for bad, why in (
        (with_pledges(first, MEMBERS[:1]), "no more than half"),
        (with_pledges(first, [MEMBERS[0], stranger]), "no more than half"),
        (with_pledges(first, [MEMBERS[0], MEMBERS[0]]), "no more than half"),
        (replace(first, pledges=(*first.pledges[:2], replace(first.pledges[2], product=1))), "not signed"),
        (replace(first, pledges=second.pledges), "another aggregate"),
        (replace(first, finished=finished_of(0, 0, 2)), "another aggregate"),
        (replace(first, finished=other), "another aggregate"),
        (replace(first, commits=second.commits), "another step"),
        (replace(first, tokens={0: BATCH * TOKENS}), "tokens"),
        (replace(first, tokens=dict.fromkeys(range(BATCH), TOKENS + 1)), "tokens"),
        (replace(first, run="ef" * 32), "another run"),
    ):
        assert why in bad.refusal(verify)
        assert proven([bad]).refused and not proven([bad]).histories


def test_more_tokens_than_the_chain_has_are_found_out() -> None:
    """The writer alone made up a commit: the next step's contributors signed another chain."""
    first, second = receipts_of(2, stages=1)
    more = replace(first.finished, num_tokens=2 * BATCH * TOKENS)
    forged = replace(
        first, finished=more, tokens=dict.fromkeys(range(BATCH), 2 * TOKENS), commits=(commit_of(first.stamp, more),)
    )
    assert forged.refusal(verify) == ""
    # Alone it is another history; beside the true one it is found out, for the same peers signed what follows.
    assert proven([forged, second]).contested == [0]
    for told in ([forged, first, second], [second, first, forged]):
        found = proven(told)
        assert found.refused == ["file: stage 0 step 0: its signers went on from other commits or tokens"]
        assert [one.tokens for one in found.histories] == [2 * BATCH * TOKENS]


# ---------------------------------------------------------------- histories


def after(receipts: list[Receipt], restart: Restart, who=tuple(MEMBERS), *, at: int | None = None) -> list[Receipt]:
    """What `who` count instead, from step `at` (the restart's version) on; those before it are as they were."""
    at = restart.version if at is None else at
    kept, chain = receipts[:at], receipts[at].stamp.chain
    for old in receipts[at:]:
        stamp = replace(old.stamp, chain=chain, restart=restart)
        shares = tuple(
            (one.peer, Generation(9, 9), frozenset(range(at, BATCH, len(who)))) for at, one in enumerate(who)
        )
        finished = replace(old.finished, contributions=shares, digest=d(old.finished.digest, "again"))
        commits = (commit_of(stamp, finished),)
        kept.append(with_pledges(Receipt(RUN, stamp, finished, old.tokens, old.pledges, commits), who))
        chain = next_chain(chain, evidence(commits))
    return kept


FORGER = Identity.from_seed(b"f" * 32)
HONEST = receipts_of(6, stages=1)


@pytest.mark.parametrize("number", [0, 9])
@pytest.mark.parametrize("branch", [0, 3, 5])
@pytest.mark.parametrize("first", [True, False])
def test_an_invented_history_stands_beside_the_honest_one(number: int, branch: int, first: bool) -> None:
    """Whatever it branches from, and whichever file is read first."""
    forged = after(HONEST, Restart(number, branch) if number else NO_RESTART, (FORGER,), at=branch)
    files = [("theirs", one) for one in forged], [("ours", one) for one in HONEST]
    found = account([*files[not first], *files[first]], verify, evidence)
    assert found.contested == [0] and not found.refused
    honest, other = found.histories
    assert honest.steps == other.steps == 6 and not honest.given_up and not other.given_up
    assert honest.tokens == 6 * BATCH * TOKENS and FORGER.peer not in honest.tallies
    assert (honest.own.first, honest.own.steps, honest.own.signers) == (branch, 6 - branch, {m.peer for m in MEMBERS})
    assert (other.own.first, other.own.steps, other.own.signers) == (branch, 6 - branch, {FORGER.peer})
    assert (honest.files, other.files) == (["ours"], ["theirs"])


@pytest.mark.parametrize("steps", [range(6), range(2, 3), range(2, 6), range(5, 6)])
@pytest.mark.parametrize("signs_too", [True, False])
def test_who_takes_the_contributions_of_others_to_one_sum_is_another_history(steps: range, signs_too: bool) -> None:
    """The chain does not say who contributed: on the same one, somebody alone says that all was its own."""
    honest, forged = HONEST, []
    if signs_too:
        honest = [with_pledges(one, MEMBERS) for one in HONEST]
        honest = [replace(one, pledges=(*one.pledges, signed(FORGER, one.stamp, one.finished))) for one in honest]
    for one in (HONEST[step] for step in steps):
        mine = replace(one.finished, contributions=((FORGER.peer, Generation(1, 1), frozenset(range(BATCH))),))
        forged.append(with_pledges(replace(one, finished=mine), [FORGER]))
    for told in ([*forged, *honest], [*honest, *forged]):
        found = proven(told)
        assert found.contested == [0] and not found.refused
        assert found.histories[0].steps == 6 and FORGER.peer not in found.histories[0].tallies
        assert FORGER.peer not in found.histories[0].own.signers
        assert found.histories[1].own.signers == {FORGER.peer} and found.histories[1].own.steps == len(steps)


def test_missing_steps_are_bridged_by_who_signed_on_both_sides() -> None:
    early, late = HONEST[:2], HONEST[4:]
    assert history([*late, *early]).missing == 2
    found = proven([*early, *after(HONEST, NO_RESTART, (FORGER,))[4:]])
    assert found.contested == [0] and [one.missing for one in found.histories] == [0, 0]
    # Steps between that lead elsewhere.
    found = proven([*early, *after(HONEST, NO_RESTART, at=2)[2:4], *late])
    assert found.contested == [0] and not any(one.missing for one in found.histories)


def given_up(found: StageHistory) -> list[tuple[int, int]]:
    return [(part.first, part.steps) for part in found.given_up]


def test_after_going_back_the_newer_steps_stand() -> None:
    newer = after(HONEST, Restart(1, 2))
    for told in ([*HONEST, *newer], [*newer, *HONEST]):
        found = history(told)
        assert found.steps == 6 and found.tokens == 6 * BATCH * TOKENS and found.linked == 5
        assert given_up(found) == [(2, 4)]
    # Steps 3 to 5 were given up, and have not come again.
    found = history([*HONEST, newer[2]])
    assert found.steps == 3 and given_up(found) == [(2, 4)]
    # The writer was away when the run went on.
    found = history([*HONEST, *newer[3:]])
    assert (found.steps, found.missing) == (5, 1) and given_up(found) == [(2, 4)]
    # Twice.
    twice = after(newer, Restart(2, 4))
    found = history([*HONEST, *newer, *twice])
    assert found.steps == 6 and given_up(found) == [(2, 4), (4, 2)]
    found = history([*HONEST, *newer, *after(newer, Restart(2, 1))])
    assert found.steps == 6 and given_up(found) == [(2, 4), (1, 5)]
    # Back to the beginning.
    found = history([*HONEST, *after(HONEST, Restart(1, 0))])
    assert found.steps == 6 and given_up(found) == [(0, 6)]


def test_who_leaves_may_be_less_than_half_of_a_restart() -> None:
    assert history([*HONEST, *after(HONEST, Restart(1, 2), (*MEMBERS[:2], FORGER))]).given_up
    assert proven([*HONEST, *after(HONEST, Restart(1, 2), (MEMBERS[0], FORGER))]).contested == [0]


def test_a_restart_without_what_it_branched_from_is_another_history() -> None:
    newer = after(after(HONEST, NO_RESTART), Restart(1, 2))
    found = proven([*HONEST, *newer[2:]])
    assert found.contested == [0] and sorted(one.steps for one in found.histories) == [4, 6]


def test_the_command_names_the_signers_of_each_history(tmp_path, capsys) -> None:
    ours, theirs = tmp_path / "receipts-ours.txt", tmp_path / "receipts-theirs.txt"
    for path, receipts in ((theirs, after(HONEST, Restart(9, 0), (FORGER,))), (ours, HONEST)):
        for receipt in receipts:
            append(path, line_of(receipt))
    assert swarmnet(["audit", "receipts", str(theirs)]) == 0
    assert f"signed by 1 peer: ...{FORGER.peer[-8:]}\n" in capsys.readouterr().out
    assert swarmnet(["audit", "receipts", str(theirs), str(ours)]) == 1
    said = capsys.readouterr()
    assert "stage 0, history 1: 6 steps" in said.out and "stage 0, history 2: 6 steps" in said.out
    assert f"signed by 1 peer: ...{FORGER.peer[-8:]}; told by {theirs}" in said.out
    assert "signed by 3 peers" in said.out and f"told by {ours}" in said.out
    assert said.err.count("\n") == 1 and "ask more peers of the run for their receipts" in said.err
    assert swarmnet(["audit", "receipts", str(tmp_path), "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)[RUN]["histories"]
    assert [one["own"]["signers"] for one in facts][1] == [FORGER.peer]


def test_the_command_shows_and_proves(tmp_path, capsys) -> None:
    kept = receipts_of(3)
    place = tmp_path / "peer" / "receipts.stage0.txt"
    place.parent.mkdir()
    for receipt in kept:
        append(place, line_of(receipt))
    with place.open("a") as file:
        file.write("receipt:cut sho")  # the process was killed
    assert len(list(read(place, [], verify))) == 6
    assert swarmnet(["audit", "receipts", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "stage 1: 3 steps, 2 of them proven by the chain; 1,152 tokens" in shown
    assert swarmnet(["audit", "receipts", str(place), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)[RUN]["histories"]
    assert [one["stage"] for one in facts] == [0, 1]
    assert sum(one["tokens"] for one in facts[0]["members"]) == facts[0]["tokens"] == 1152
    append(other := tmp_path / "receipts.txt", line_of(replace(kept[0], tokens={0: 1})))
    assert swarmnet(["audit", "receipts", str(other)]) == 1
    assert swarmnet(["audit", "receipts", str(tmp_path / "peer" / "none")]) == 2
    other.write_text("nonsense\n")
    assert swarmnet(["audit", "receipts", str(other)]) == 1


def test_a_cut_line_is_said_and_a_damaged_one_refused_in_words(tmp_path, capsys) -> None:
    path = tmp_path / "receipts-stage-0.txt"
    lines = [line_of(receipt) for receipt in receipts_of(2, stages=1)]
    path.write_text(lines[0] + lines[1][:-9])
    assert swarmnet(["audit", "receipts", str(path)]) == 0
    told = capsys.readouterr()
    assert "1 step" in told.out and "cut short" in told.err
    path.write_text(lines[0])
    assert swarmnet(["audit", "receipts", str(path)]) == 0 and not capsys.readouterr().err
    earlier = '{"run": "' + RUN + '"}\n'
    for bad, why in (
        ("# übrig\n", "line 1 is no receipt, or a damaged one"),
        (lines[0][:40] + lines[0][44:], "line 1 is no receipt, or a damaged one"),
        (to_line(HONEST[0], MEMBERS[1].peer, MEMBERS[0].sign), "line 1 is not signed by its writer"),
        (earlier * 9, "line 1 is of an earlier version, which only that reads"),
    ):
        path.write_text(bad, encoding="utf-8")
        assert swarmnet(["audit", "receipts", str(path)]) == 1
        assert why in (said := capsys.readouterr().err) and len(said.strip().splitlines()) == 1


def test_what_follows_a_cut_line_stands_on_one_of_its_own(tmp_path) -> None:
    """A peer was killed while it wrote, and goes on."""
    path, (first, second) = tmp_path / "receipts-stage-0.txt", receipts_of(2, stages=1)
    path.write_text(line_of(first) + line_of(second)[:-9])
    append(path, line_of(second))
    assert list(read(path, [], verify)) == [first, second]


def test_chains_are_of_the_run() -> None:
    (receipt,) = receipts_of(1, stages=1)
    assert receipt.stamp.chain == first_chain(RUN, 0) != Chain("")


def written(path, receipts: list[Receipt]) -> list[str]:
    for receipt in receipts:
        append(path, line_of(receipt))
    return ["audit", "receipts", str(path.parent)]


def test_a_history_without_its_first_step_may_be_of_any_run(tmp_path, capsys) -> None:
    """What is of step 0 cannot be taken for another run's; what comes later can."""
    words = written(tmp_path / "receipts.txt", [replace(one, run="ef" * 32) for one in HONEST[1:]])
    assert swarmnet(words) == 1
    told = capsys.readouterr()
    assert told.out.startswith(
        "run efefefefefef as the file says\n  stage 0 of run efefefefefef as the file says: 5 steps"
    )
    assert told.err.startswith("stage 0: run efefefefefef as the file says: ") and told.err.count("\n") == 1
    assert swarmnet([*words, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ef" * 32]["histories"][0]["run_proven"] is False
    assert not history(HONEST[1:]).run_proven and history(HONEST).run_proven
    # Where steps overlap, the step after the first one names the first chain, too.
    assert history(receipts_of(6, stages=1, overlap=0)[1:]).run_proven


def test_missing_steps_and_a_single_one_are_said_in_words(tmp_path, capsys) -> None:
    assert swarmnet(written(tmp_path / "receipts.txt", [HONEST[0], *HONEST[4:]])) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[1] == "  stage 0: 3 steps, 1 of them proven by the chain; 1,152 tokens"
    assert said[3].startswith("    3 steps missing in between: ") and "add receipts of peers" in said[3]
    (tmp_path / "one").mkdir()
    assert swarmnet(written(tmp_path / "one" / "receipts.txt", HONEST[:1])) == 0
    said = capsys.readouterr().out
    assert "2 microbatches in        1 step," in said and "1 steps" not in said and "index" not in said


LIAR = MEMBERS[0]


def lied_twice(receipt: Receipt, run: str = RUN) -> Evidence:
    """LIAR has signed two pledges of that sum."""
    first = signed(LIAR, receipt.stamp, receipt.finished)
    second = replace(first, work_root=d("other"))
    second = replace(second, signature=LIAR.sign(statement(second)))
    return Evidence(run, Case(first, other=second))


def sent_falsely(receipt: Receipt, judges: list[Identity]) -> Evidence:
    """LIAR has sent what these find false; the first of them has pledged that all of them contributed."""
    shares = tuple((one.peer, Generation(0, 0), frozenset({at})) for at, one in enumerate(judges))
    if {one.peer for one in judges} == {one.peer for one in MEMBERS}:
        shares = receipt.finished.contributions
    work = WorkRecord(0, d("in"), d("out"), d("g"), d("a"), 2.5, 96)
    leaves = {0: leaf(work)}
    pledge = signed(judges[0], receipt.stamp, replace(receipt.finished, contributions=shares))
    pledge = replace(pledge, work_root=root_of(leaves))
    pledge = replace(pledge, signature=judges[0].sign(statement(pledge)))
    sent = Sent(receipt.stamp, 0, "output", d("false"), LIAR.peer, work.input, bytes(32))
    sent = replace(sent, signature=LIAR.sign(statement(sent)))
    case = Case(pledge, work, path_of(leaves, 0), sent, numerics="cpu", contributions=shares)
    rechecks = tuple(recheck(case, work.output, one, one.peer) for one in judges if one is not LIAR)
    return Evidence(RUN, replace(case, rechecks=rechecks))


def test_a_convict_is_marked_by_what_is_about_its_history() -> None:
    kept = history(HONEST)
    early, late = lied_twice(HONEST[2]), lied_twice(HONEST[4])
    assert not early.refusal(verify)
    assert faults_of(kept, RUN, [late, early]) == {LIAR.peer: NamedFault(0, 2, proven=True)}
    # Whatever run the file names; what is of neither names nobody.
    assert faults_of(kept, RUN, [replace(early, run="ef" * 32)]) == {LIAR.peer: NamedFault(0, 2, proven=True)}
    elsewhere = lied_twice(after(HONEST, Restart(1, 1))[2])
    assert faults_of(kept, RUN, [elsewhere]) == {LIAR.peer: NamedFault(0, 2, proven=False)}
    assert faults_of(kept, RUN, [elsewhere, late]) == {LIAR.peer: NamedFault(0, 4, proven=True)}
    assert not faults_of(kept, RUN, [replace(elsewhere, run="ef" * 32)])


def test_strangers_that_nobody_knows_as_a_jury_prove_nothing_of_a_history() -> None:
    kept, strangers = history(HONEST), [Identity.from_seed(bytes([at]) * 32) for at in range(90, 94)]
    theirs, ours = sent_falsely(HONEST[2], strangers), sent_falsely(HONEST[2], [*MEMBERS[1:], LIAR])
    assert not theirs.refusal(verify) and not ours.refusal(verify)
    assert faults_of(kept, RUN, [theirs]) == {LIAR.peer: NamedFault(0, 2, proven=False)}
    assert faults_of(kept, RUN, [ours]) == {LIAR.peer: NamedFault(0, 2, proven=True)}


def test_the_command_marks_convicts(tmp_path, capsys) -> None:
    words = written(tmp_path / "receipts.txt", HONEST)
    (tmp_path / "evidence").mkdir()
    (tmp_path / "evidence" / "good.proof").write_text(line_of(lied_twice(HONEST[2])))
    (tmp_path / "evidence" / "bad.proof").write_text("{}")
    assert swarmnet(words) == 0
    told = capsys.readouterr()
    marked = [line for line in told.out.splitlines() if "banned" in line]
    assert len(marked) == 1 and LIAR.peer in marked[0] and marked[0].endswith(" tokens (banned: step 2)")
    assert told.err.startswith(f"{tmp_path}/evidence/bad.proof: this file proves nothing: ")
    assert swarmnet([*words, "--json"]) == 0
    members = json.loads(capsys.readouterr().out)[RUN]["histories"][0]["members"]
    assert {one["peer"]: one["convicted"] for one in members if one["convicted"]} == {
        LIAR.peer: {"stage": 0, "step": 2, "proven": True}
    }
