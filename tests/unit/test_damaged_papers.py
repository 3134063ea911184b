"""Evidence and receipts that somebody has changed: refused in words, with no other error."""

from __future__ import annotations

import base64
import json
import math
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_evidence import GOOD, SENT_OTHER, judged
from test_receipts import receipts_of

from swarmnet.audit.evidence import Evidence
from swarmnet.audit.histories import account
from swarmnet.audit.receipts import Receipt
from swarmnet.cli.frame import run as swarmnet
from swarmnet.net.identity import verify
from swarmnet.peer.auditor import AuditLog
from swarmnet.step.commits import evidence
from swarmnet.wire.convert import write_control

SURROGATE = "\ud800"
RECEIPTS = receipts_of(3, stages=2)
PAPERS = {"rechecked": GOOD, "signed": SENT_OTHER, "sent": judged()}

NUMBERS = [0, 0.5, -1, 10**30, -(2**63), 2**64, math.nan, math.inf, -math.inf]
TEXTS = ["", "zz", "ff" * 40, "NaN", "\0", "ü", SURROGATE, SURROGATE * 52, SURROGATE * 64]
junk = st.sampled_from([None, True, *NUMBERS, *TEXTS, [], [[]], {}, {SURROGATE: ""}])


def changed(data: st.DataObject, value):
    """Somewhere in it something else: of any type, nested, left out, under another name."""
    if isinstance(value, dict | list) and value and data.draw(st.integers(0, 5)):
        places = list(value) if isinstance(value, dict) else list(range(len(value)))
        at = data.draw(st.sampled_from(places))
        how = data.draw(st.sampled_from(["inside", "inside", "inside", "gone", "twice"]))
        copied = value.copy()
        if how == "inside":
            copied[at] = changed(data, value[at])
        elif how == "gone":
            del copied[at]
        elif isinstance(copied, list):
            copied.append(copied[at])
        else:
            copied[data.draw(st.sampled_from(["", "run", "stamp", SURROGATE, "1" * 52]))] = copied.pop(at)
        return copied
    if isinstance(value, str) and value and data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(value) - 1))
        return value[:at] + data.draw(st.sampled_from("0Az/=-\n ü\0" + SURROGATE)) + value[at + 1 :]
    return data.draw(st.sampled_from([[value], {"": value}]) | junk)


def in_words(error: ValueError) -> bool:
    """Ours: no error of a codec or a parser that nobody has caught."""
    return type(error) is ValueError and bool(str(error)) and str(error).isprintable()


@settings(max_examples=300, deadline=None)
@given(st.data(), st.sampled_from(sorted(PAPERS)))
def test_changed_evidence_is_refused_in_words(data: st.DataObject, name: str) -> None:
    table = changed(data, json.loads(PAPERS[name].to_json()))
    try:
        found = Evidence.from_json(json.dumps(table))
    except ValueError as error:
        assert in_words(error)
        return
    assert isinstance(found.refusal(verify), str)
    found.to_json().encode()
    # As a peer tells it on.
    write_control(found.case)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_changed_receipts_are_refused_in_words(data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(RECEIPTS) - 1))
    table = json.loads(RECEIPTS[at].to_line())
    if data.draw(st.booleans()):
        name = data.draw(st.sampled_from(["sum", "commits"]))
        inside = bytearray(base64.b64decode(table[name]))
        inside[data.draw(st.integers(0, len(inside) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        table[name] = base64.b64encode(inside).decode()
    else:
        table = changed(data, table)
    try:
        receipt = Receipt.from_line(json.dumps(table) + "\n")
    except ValueError as error:
        assert in_words(error)
        return
    # As good as they are: of whatever it tells now, the honest history is still there.
    told = [("file", one) for one in (*RECEIPTS[:at], receipt, *RECEIPTS[at + 1 :])]
    found = account(told, verify, evidence)
    assert found.histories and all(isinstance(why, str) for why in found.refused)
    receipt.to_line().encode()


def evidence_with(**changes: object) -> str:
    return json.dumps(json.loads(GOOD.to_json()) | changes)


@pytest.mark.parametrize(
    "text",
    [
        evidence_with(case={"contributions": {"peers": "AA=="}}),
        evidence_with(run=SURROGATE * 64),
        evidence_with(run="AB" * 32),
        evidence_with(case={"voided": SURROGATE}),
        evidence_with(case={"numerics": SURROGATE}),
        "[" * 100_000,
        "\ud800",
    ],
)
def test_a_peer_starts_with_whatever_is_among_its_evidence(tmp_path, capsys, text: str) -> None:
    folder = tmp_path / "evidence"
    folder.mkdir()
    (folder / "bad.json").write_text(text, encoding="utf-8", errors="surrogatepass")
    (folder / "good.json").write_text(GOOD.to_json())
    assert AuditLog(tmp_path, pytest.fail).kept() == [GOOD]
    assert swarmnet(["audit", "verify", str(folder / "bad.json")]) == 1
    assert "proves nothing: " in capsys.readouterr().out


@pytest.mark.parametrize("run", [SURROGATE * 64, "ab" * 31, "AB" * 32, "", None, 7, ["ab" * 32]])
def test_a_receipt_of_no_run_is_refused(tmp_path, capsys, run: object) -> None:
    path = tmp_path / "receipts-stage-0.jsonl"
    path.write_text(json.dumps(json.loads(RECEIPTS[0].to_line()) | {"run": run}) + "\n")
    assert swarmnet(["audit", "receipts", str(path)]) == 1
    assert "its run is not 64 hex digits" in capsys.readouterr().err


# ---------------------------------------------------------------- the commands go on with the others


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (evidence_with(case={"voided": 7}), "its case has fields that are damaged"),
        (evidence_with(case=7), "its case has fields that are damaged"),
        ("9" * 5000, "text or numbers that JSON may not have"),
        (json.dumps(json.loads(GOOD.to_json()) | {"sent": {}}), "not one case"),
        (b"\x80", "it is not text"),
    ],
)
def test_verify_goes_on_after_what_is_damaged_and_says_it_in_words(
    tmp_path, capsys, text: str | bytes, why: str
) -> None:
    (tmp_path / "a.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    (tmp_path / "b.json").write_text(GOOD.to_json())
    assert swarmnet(["audit", "verify", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{tmp_path}/a.json: this file proves nothing: ") and why in first
    assert (
        not any(word in first for word in ("object", "codec", "fromhex", "Traceback")) and " lied in step 7" in second
    )


def test_verify_takes_directories(tmp_path, capsys) -> None:
    deep = tmp_path / "peers" / "one" / "evidence"
    deep.mkdir(parents=True)
    (deep / "a.json").write_text(GOOD.to_json())
    (tmp_path / "sent.json").write_text(SENT_OTHER.to_json())
    (tmp_path / "contributed.json").write_text("{}")
    assert swarmnet(["audit", "verify", str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert [line.partition(":")[0] for line in told.out.splitlines()] == [f"{deep}/a.json", f"{tmp_path}/sent.json"]
    assert told.err == f"{tmp_path}: left out, being no evidence: contributed.json\n"
    # In `evidence` nothing is left out.
    (deep / "b.json").write_text("{}")
    assert swarmnet(["audit", "verify", str(deep)]) == 1
    (tmp_path / "empty").mkdir()
    capsys.readouterr()
    assert swarmnet(["audit", "verify", str(tmp_path / "empty")]) == 0
    assert capsys.readouterr().out == f"no evidence in {tmp_path}/empty\n"


@pytest.mark.parametrize("command", ["verify", "receipts"])
def test_a_pipe_is_refused(tmp_path, capsys, command: str) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    assert swarmnet(["audit", command, str(pipe)]) == {"verify": 1, "receipts": 2}[command]
    told = capsys.readouterr()
    assert "it is not a regular file" in told.out + told.err and (told.out + told.err).count("\n") == 1


def test_damaged_lines_are_named_and_the_others_counted(tmp_path, capsys) -> None:
    lines = [one.to_line() for one in RECEIPTS]
    (tmp_path / "receipts-a.jsonl").write_text("".join([*lines[:2], "x\n", *lines[2:4], "{}\n"]))
    (tmp_path / "receipts-b.jsonl").write_text("y\n" * 20 + "".join(lines[4:]))
    assert swarmnet(["audit", "receipts", str(tmp_path)]) == 1
    told = capsys.readouterr()
    assert "stage 0: 3 steps, 2 of them proven by the chain;" in told.out
    said = told.err.splitlines()
    assert said[0] == f"{tmp_path}/receipts-a.jsonl: line 3 is no receipt: it is not JSON"
    assert said[1] == f"{tmp_path}/receipts-a.jsonl: line 6 is no receipt: its fields are damaged"
    assert said[-1] == f"{tmp_path}/receipts-b.jsonl: 12 more lines like these" and len(said) == 11
