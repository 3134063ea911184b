"""A trace is what viewers read, whatever became of its writer."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from swarmnet.errors import UsageError
from swarmnet.telemetry.spans import Span
from swarmnet.telemetry.trace import TraceFile, check_trace, merge


def forward(step: int, index: int = 0, began: float = 1.0, ended: float = 2.0) -> Span:
    return Span("forward", 0, step, index, began, ended)


def events(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_bytes())
    return found


def steps(path: Path) -> list[int]:
    return [event["args"]["step"] for event in events(path) if event["ph"] == "X"]


def test_what_is_done_alone_has_a_row_and_what_is_waited_for_together_is_asynchronous(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "t.json", "peer", "mine")
    file.write([forward(7, 3), Span("call", 1, 7, 3, 1.0, 1.5), Span("reduce_scatter", 1, 7, 0, 1.5, 2.0)])
    file.write([Span("averaging", 1, 7, -1, 1.0, 2.0)])
    file.close()
    found = events(tmp_path / "t.json")
    names = {event["tid"]: event["args"]["name"] for event in found if event["name"] == "thread_name"}
    whole = {event["name"]: event for event in found if event["ph"] == "X"}
    assert {names[event["tid"]] for event in whole.values()} == {"stage 0 forward", "stage 1 averaging"}
    assert whole["forward"]["args"] == {"stage": 0, "step": 7, "index": 3} and whole["forward"]["dur"] == 1_000_000
    assert whole["averaging"]["args"] == {"stage": 1, "step": 7}
    begun = {event["name"]: event for event in found if event["ph"] == "b"}
    ended = {event["name"]: event for event in found if event["ph"] == "e"}
    assert begun["reduce_scatter"]["args"]["hop"] == 0 and begun["call"]["args"]["index"] == 3
    assert begun["call"]["id2"] == ended["call"]["id2"] != ended["reduce_scatter"]["id2"]
    assert ended["call"]["ts"] - begun["call"]["ts"] == 500_000
    assert len({event["pid"] for event in found}) == 1


@pytest.mark.parametrize("torn", ["", '{"name":"forw', '{"name":"x","ph":"X"}'])
def test_a_writer_that_is_killed_loses_what_it_was_writing_and_the_next_one_goes_on(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "t.json"
    TraceFile(path, "peer", "mine").write([forward(1)])
    with path.open("a") as file:
        file.write(torn)
    # As viewers do with a trace without an end.
    if not torn:
        assert json.loads(path.read_text().rstrip().rstrip(",") + "]")
    again = TraceFile(path, "peer", "mine")
    again.write([forward(2)])
    again.close()
    assert steps(path) == [1, 2]
    once_more = TraceFile(path, "peer", "mine")
    once_more.write([])
    once_more.close()
    assert steps(path) == [1, 2]


def test_a_file_that_became_too_large_loses_its_older_half_and_no_names(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    file = TraceFile(path, "peer", "mine", most_bytes=4000)
    for step in range(1000):
        file.write([forward(step)])
        assert path.stat().st_size < 4500
    file.close()
    found = steps(path)
    assert found == list(range(found[0], 1000)) and len(found) > 10
    assert {event["name"] for event in events(path) if event["ph"] == "M"} >= {"process_name", "thread_name"}


def test_a_full_disk_costs_spans_and_no_line_is_torn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.json"
    file, write, room = TraceFile(path, "peer", "mine"), os.pwrite, [20]

    def full(descriptor: int, data: bytes, at: int) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        written = write(descriptor, data[: room[0]], at)
        room[0] -= written
        return written

    file.write([forward(1)])
    with monkeypatch.context() as patched:
        patched.setattr("swarmnet.telemetry.trace.os.pwrite", full)
        file.write([forward(2)])
    file.write([forward(3)])
    file.close()
    assert steps(path) == [1, 3]


def test_what_is_no_trace_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "thesis.txt"
    path.write_text("years of work")
    with pytest.raises(UsageError, match="no trace: name another file"):
        check_trace(path)
    with pytest.raises(UsageError, match="no trace"):
        merge({}, path)
    assert path.read_text() == "years of work"
    with pytest.raises(UsageError, match="no regular file"):
        check_trace(tmp_path)
    with pytest.raises(UsageError, match="cannot be written there"):
        check_trace(path / "t.json")


def test_traces_are_merged_by_name_whatever_became_of_their_writers(tmp_path: Path) -> None:
    for name, step in (("a", 1), ("b", 2)):
        file = TraceFile(tmp_path / name, f"peer {name}", "...")
        file.write([forward(step)])
        if name == "a":
            file.close()
    into = tmp_path / "all.json"
    for _ in range(2):
        merge({"s0-r0": tmp_path / "a", "s1-r0": tmp_path / "b", "never started": tmp_path / "c"}, into)
        found = events(into)
        names = {event["pid"]: event["args"]["name"] for event in found if event["name"] == "process_name"}
        by = {names[event["pid"]]: event["args"]["step"] for event in found if event["ph"] == "X"}
        assert by == {"s0-r0": 1, "s1-r0": 2}
    merge({}, into)
    assert events(into) == []
