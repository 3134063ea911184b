"""Receipts: who counted what, proven offline; and the sum over members is the run's."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest

from swarmnet.audit.pledge import shares_of, statement
from swarmnet.audit.receipts import Account, Receipt, account, append, read
from swarmnet.cli.frame import run as swarmnet
from swarmnet.ids import Ballot, Chain, Generation, Restart, RoundId, RunId, first_chain, next_chain
from swarmnet.messages import Commit, Finished, Pledge, Stamp
from swarmnet.net.identity import Identity, verify
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
    shares = shares_of(finished.contributions, finished.voided)
    pledge = Pledge(stamp, finished.id, finished.digest, shares, by.peer, 0, d("pieces"), d("works"))
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


def proven(receipts) -> Account:
    return account(receipts, verify, evidence)


@pytest.mark.parametrize("overlap", [None, 0, 2])
def test_the_sum_over_members_is_the_run(overlap: int | None) -> None:
    found = proven(receipts_of(5, overlap=overlap))
    assert not found.refused and not +found.missing
    for stage in (0, 1):
        assert found.tokens[stage] == 5 * BATCH * TOKENS
        assert sum(t.tokens for (of, _), t in found.tallies.items() if of == stage) == found.tokens[stage]
        assert found.steps[stage] == 5 and found.linked[stage] == 4
    assert found.tallies[0, MEMBERS[0].peer].indexes == 10


def test_receipts_of_several_replicas_count_once() -> None:
    kept = receipts_of(3)
    assert proven(kept + kept).tokens == proven(kept).tokens


def test_a_missing_step_is_said() -> None:
    kept = [receipt for receipt in receipts_of(5, stages=1) if receipt.stamp.step != 2]
    found = proven(kept)
    assert found.missing[0] == 1 and found.linked[0] == 2 and not found.refused


def test_a_line_is_read_as_it_was_written() -> None:
    (receipt,) = receipts_of(1, stages=1)
    assert Receipt.from_line(receipt.to_line()) == receipt


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
        (replace(first, pledges=second.pledges), "another sum"),
        (replace(first, finished=finished_of(0, 0, 2)), "another sum"),
        (replace(first, finished=other), "another sum"),
        (replace(first, commits=second.commits), "another step"),
        (replace(first, tokens={0: BATCH * TOKENS}), "tokens"),
        (replace(first, tokens=dict.fromkeys(range(BATCH), TOKENS + 1)), "tokens"),
        (replace(first, run="ef" * 32), "another run"),
    ):
        assert why in bad.refusal(verify)
        assert proven([bad]).refused and not proven([bad]).tallies


def test_more_tokens_than_the_chain_has_are_found_out() -> None:
    """The writer alone made up a commit: the next step's contributors signed another chain."""
    first, second = receipts_of(2, stages=1)
    more = replace(first.finished, num_tokens=2 * BATCH * TOKENS)
    forged = replace(
        first, finished=more, tokens=dict.fromkeys(range(BATCH), 2 * TOKENS), commits=(commit_of(first.stamp, more),)
    )
    assert forged.refusal(verify) == ""
    assert proven([forged, second]).refused == ["stage 0 step 0: the next one's chain does not follow"]


def test_after_going_back_the_newer_steps_stand() -> None:
    kept = receipts_of(4, stages=1)
    restart = Restart(1, 2)

    def again(receipt: Receipt) -> Receipt:
        stamp = replace(receipt.stamp, restart=restart)
        return with_pledges(replace(receipt, stamp=stamp), MEMBERS)

    found = proven([*kept, again(kept[2])])
    # Step 3 was given up, and has not come again.
    assert found.steps[0] == 3 and not found.refused
    assert found.tokens[0] == 3 * BATCH * TOKENS


def test_the_command_shows_and_proves(tmp_path, capsys) -> None:
    kept = receipts_of(3)
    place = tmp_path / "peer" / "receipts.stage0.jsonl"
    place.parent.mkdir()
    for receipt in kept:
        append(place, receipt)
    with place.open("a") as file:
        file.write('{"run": "cut sho')  # the process was killed
    assert len(list(read(place))) == 6
    assert swarmnet(["receipts", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "stage 1: 3 steps, 2 of them with the chain; 1,152 tokens" in shown
    assert swarmnet(["receipts", str(place), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)[RUN]
    assert sum(one["tokens"] for one in facts["members"] if one["stage"] == 0) == facts["stages"][0]["tokens"]
    append(other := tmp_path / "receipts.jsonl", replace(kept[0], tokens={0: 1}))
    assert swarmnet(["receipts", str(other)]) == 1
    assert swarmnet(["receipts", str(tmp_path / "peer" / "none")]) == 2
    other.write_text("nonsense\n")
    assert swarmnet(["receipts", str(other)]) == 2


def test_a_cut_line_is_said_and_a_damaged_one_refused_in_words(tmp_path, capsys) -> None:
    path = tmp_path / "receipts-stage-0.jsonl"
    lines = [receipt.to_line() for receipt in receipts_of(2, stages=1)]
    path.write_text(lines[0] + lines[1][:-9])
    assert swarmnet(["receipts", str(path)]) == 0
    told = capsys.readouterr()
    assert "1 step" in told.out and "cut short" in told.err
    path.write_text(lines[0])
    assert swarmnet(["receipts", str(path)]) == 0 and not capsys.readouterr().err
    for bad, why in (("# übrig\n", "not JSON"), (lines[0].replace('"sum": "', '"sum": "AAAA'), "damaged")):
        path.write_text(bad, encoding="utf-8")
        assert swarmnet(["receipts", str(path)]) == 2
        assert why in (said := capsys.readouterr().err) and len(said.strip().splitlines()) == 1


def test_what_follows_a_cut_line_stands_on_one_of_its_own(tmp_path) -> None:
    """A peer was killed while it wrote, and goes on."""
    path, (first, second) = tmp_path / "receipts-stage-0.jsonl", receipts_of(2, stages=1)
    path.write_text(first.to_line() + second.to_line()[:-9])
    append(path, second)
    assert list(read(path)) == [first, second]


def test_chains_are_of_the_run() -> None:
    (receipt,) = receipts_of(1, stages=1)
    assert receipt.stamp.chain == first_chain(RUN, 0) != Chain("")
