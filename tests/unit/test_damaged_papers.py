"""Evidence and receipts that somebody has changed: refused in words, with no other error."""

from __future__ import annotations

import os
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_evidence import GOOD, PEERS, SENT_OTHER, judged, signed_text, text_of
from test_receipts import line_of, receipts_of

from swarmnet.audit.auditor import AuditLog
from swarmnet.audit.evidence import Evidence, from_line, to_line
from swarmnet.audit.histories import account
from swarmnet.audit.receipts import Receipt, read
from swarmnet.bounds import ANY_RUN
from swarmnet.cli.frame import run as swarmnet
from swarmnet.net.identity import verify
from swarmnet.step.commits import evidence
from swarmnet.wire.convert import write_control
from swarmnet.wire.fields import struct_of

RECEIPTS = receipts_of(3, stages=2)
PAPERS = {"rechecked": GOOD, "signed": SENT_OTHER, "sent": judged()}


def changed(data: st.DataObject, paper: Evidence | Receipt) -> str:
    """Its writer has signed it, with some bytes in it that are others, gone, or there twice."""
    payload = bytearray(struct_of(type(paper), ANY_RUN).written(paper))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(payload) - 1))
        length = data.draw(st.sampled_from([1, 1, 1, 4, 33]))
        twice = bytes(payload[at : at + length]) * 2
        payload[at : at + length] = data.draw(
            st.binary(min_size=length, max_size=length) | st.sampled_from([b"", twice])
        )
    return signed_text(type(paper).__name__, bytes(payload))


def in_words(error: ValueError) -> bool:
    """Ours: no error of a codec or a parser that nobody has caught."""
    return type(error) is ValueError and bool(str(error)) and str(error).isprintable()


@settings(max_examples=300, deadline=None)
@given(st.data(), st.sampled_from(sorted(PAPERS)))
def test_changed_evidence_is_refused_in_words(data: st.DataObject, name: str) -> None:
    try:
        found = from_line(changed(data, PAPERS[name]), Evidence, verify)
    except ValueError as error:
        assert in_words(error)
        return
    assert isinstance(found.refusal(verify), str)
    text_of(found).encode()
    # As a peer tells it on.
    write_control(found.case)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_changed_receipts_are_refused_in_words(data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(RECEIPTS) - 1))
    try:
        receipt = from_line(changed(data, RECEIPTS[at]), Receipt, verify)
    except ValueError as error:
        assert in_words(error)
        return
    # As good as they are: of whatever it tells now, the honest history is still there.
    told = [("file", one) for one in (*RECEIPTS[:at], receipt, *RECEIPTS[at + 1 :])]
    found = account(told, verify, evidence)
    assert found.histories and all(isinstance(why, str) for why in found.refused)
    line_of(receipt).encode()


@given(st.binary(max_size=200) | st.text(max_size=60).map(str.encode))
def test_whatever_stands_in_a_file_is_refused_in_words(text: bytes) -> None:
    for kind in (Evidence, Receipt):
        with pytest.raises(ValueError) as caught:
            from_line(f"{kind.__name__.lower()}:" + text.decode("ascii", "replace"), kind, verify)
        assert in_words(caught.value)


EARLIER = '{"format": "swarmnet evidence 5", "run": "ab"}\n'
DAMAGED = {
    EARLIER: "it is of an earlier version, which only that reads",
    text_of(GOOD)[:400] + text_of(GOOD)[404:]: "it is no evidence, or a damaged one",
    line_of(RECEIPTS[0]): "it is no evidence, or a damaged one",
    to_line(GOOD, PEERS[0].peer, PEERS[1].sign): "it is not signed by its writer",
    "evidence:" + "A" * (3 << 20): "it is no evidence, or a damaged one",
    b"\x80": "it is no evidence, or a damaged one",
}


@pytest.mark.parametrize("text", DAMAGED, ids=DAMAGED.values())
def test_a_peer_starts_with_whatever_is_among_its_evidence(tmp_path, capsys, text: str | bytes) -> None:
    """The command goes on with the other files, too."""
    folder = tmp_path / "evidence"
    folder.mkdir()
    (folder / "bad.proof").write_bytes(text if isinstance(text, bytes) else text.encode())
    (folder / "good.proof").write_text(text_of(GOOD))
    assert AuditLog(tmp_path, pytest.fail).kept(verify) == [GOOD]
    assert swarmnet(["audit", "verify", str(tmp_path)]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"{folder}/bad.proof: this file proves nothing: {DAMAGED[text]}" and " lied in step 7" in second


# ---------------------------------------------------------------- the commands go on with the others


def test_verify_takes_directories(tmp_path, capsys) -> None:
    deep = tmp_path / "peers" / "one" / "evidence"
    deep.mkdir(parents=True)
    (deep / "a.proof").write_text(text_of(GOOD))
    (tmp_path / "sent.proof").write_text(text_of(SENT_OTHER))
    (tmp_path / "contributed.json").write_text("{}")
    assert swarmnet(["audit", "verify", str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert [line.partition(":")[0] for line in told.out.splitlines()] == [f"{deep}/a.proof", f"{tmp_path}/sent.proof"]
    assert not told.err
    (deep / "earlier.json").write_text(EARLIER)
    assert swarmnet(["audit", "verify", str(tmp_path)]) == 1
    assert "earlier.json: this file proves nothing: it is of an earlier version" in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    assert swarmnet(["audit", "verify", str(tmp_path / "empty")]) == 0
    assert capsys.readouterr().out == f"no evidence in {tmp_path}/empty\n"


def test_no_more_is_read_of_a_file_than_a_line_may_have(tmp_path, capsys) -> None:
    for name in ("huge.proof", "receipts-huge.txt"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(1 << 33)
    tracemalloc.start()
    assert swarmnet(["audit", "verify", str(tmp_path / "huge.proof")]) == 1
    assert "no evidence, or a damaged one" in capsys.readouterr().out
    damaged: list[str] = []
    assert not list(read(tmp_path / "receipts-huge.txt", damaged, verify)) and "longer than any receipt" in damaged[0]
    assert tracemalloc.get_traced_memory()[1] < 32 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("command", ["verify", "receipts"])
def test_a_pipe_is_refused(tmp_path, capsys, command: str) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    assert swarmnet(["audit", command, str(pipe)]) == {"verify": 1, "receipts": 2}[command]
    told = capsys.readouterr()
    assert "it is not a regular file" in told.out + told.err and (told.out + told.err).count("\n") == 1


def test_damaged_lines_are_named_and_the_others_counted(tmp_path, capsys) -> None:
    lines = [line_of(one) for one in RECEIPTS]
    (tmp_path / "receipts-a.txt").write_text("".join([*lines[:2], "x\n", *lines[2:4], "receipt:\n"]))
    (tmp_path / "receipts-b.txt").write_text("y\n" * 20 + "".join(lines[4:]))
    assert swarmnet(["audit", "receipts", str(tmp_path)]) == 1
    told = capsys.readouterr()
    assert "stage 0: 3 steps, 2 of them proven by the chain;" in told.out
    said = told.err.splitlines()
    assert said[0] == f"{tmp_path}/receipts-a.txt: line 3 is no receipt, or a damaged one"
    assert said[1] == f"{tmp_path}/receipts-a.txt: line 6 is no receipt, or a damaged one"
    assert said[-1] == f"{tmp_path}/receipts-b.txt: 12 more lines like these" and len(said) == 11
