"""Evidence and receipts that somebody has changed: refused in words, with no other error."""

from __future__ import annotations

import base64
import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_evidence import GOOD, SENT_OTHER, judged
from test_receipts import receipts_of

from swarmnet.audit.evidence import Evidence
from swarmnet.audit.histories import account
from swarmnet.audit.receipts import Receipt
from swarmnet.cli.frame import run as swarmnet
from swarmnet.messages import Verdict
from swarmnet.net.identity import verify
from swarmnet.peer.auditor import PaperFiles
from swarmnet.step.commits import evidence
from swarmnet.wire.convert import write_control

SURROGATE = "\ud800"
RECEIPTS = receipts_of(3, stages=2)
PAPERS = {"verdict": GOOD, "missent": SENT_OTHER, "sent": judged()}

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
    if isinstance(found.proof, Verdict):
        write_control(replace(found.proof, contributions=found.contributions, voided=found.voided))


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
        evidence_with(contributions={SURROGATE: "01"}),
        evidence_with(contributions={"1" * 52: "01"}),
        evidence_with(contributions={peer: "01" for peer, _, _ in GOOD.contributions}),
        evidence_with(run=SURROGATE * 64),
        evidence_with(run="AB" * 32),
        evidence_with(voided=SURROGATE),
        evidence_with(verdict={"numerics": SURROGATE}),
        "[" * 100_000,
        "\ud800",
    ],
)
def test_a_peer_starts_with_whatever_is_among_its_evidence(tmp_path, capsys, text: str) -> None:
    folder = tmp_path / "evidence"
    folder.mkdir()
    (folder / "bad.json").write_text(text, encoding="utf-8", errors="surrogatepass")
    (folder / "good.json").write_text(GOOD.to_json())
    assert PaperFiles(tmp_path, pytest.fail).kept() == [GOOD]
    assert swarmnet(["verify", str(folder / "bad.json")]) == 1
    assert "proves nothing: " in capsys.readouterr().out


@pytest.mark.parametrize("run", [SURROGATE * 64, "ab" * 31, "AB" * 32, "", None, 7, ["ab" * 32]])
def test_a_receipt_of_no_run_is_refused(tmp_path, capsys, run: object) -> None:
    path = tmp_path / "receipts-stage-0.jsonl"
    path.write_text(json.dumps(json.loads(RECEIPTS[0].to_line()) | {"run": run}) + "\n")
    assert swarmnet(["receipts", str(path)]) == 2
    assert "its run is not 64 hex digits" in capsys.readouterr().err
