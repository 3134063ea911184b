"""The events file: nothing whole is ever lost, nothing torn is ever read."""

import errno
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.errors import UsageError
from swarmnet.telemetry.events import EventLog, EventReader
from swarmnet.telemetry.log import encode, plain


def test_events_are_read_as_they_are_written(tmp_path: Path) -> None:
    path, times = tmp_path / "events.jsonl", iter([1.5, 2.5, 3.5])
    reader = EventReader(path)
    assert reader.read() == []
    with EventLog(path, clock=lambda: next(times)) as events:
        events.emit("begun", stage=0)
        events.emit("round_done", members=["a", "b"], loss=float("nan"))
        assert reader.read() == [
            {"t": 1.5, "event": "begun", "stage": 0},
            {"t": 2.5, "event": "round_done", "members": ["a", "b"], "loss": "nan"},
        ]
        assert reader.read() == []
        events.emit("done")
    events.emit("after close")
    assert [event["event"] for event in reader.read()] == ["done"]
    assert [event["event"] for event in EventReader(path).read()] == ["begun", "round_done", "done"]


def test_no_path_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with EventLog(None) as events:
        events.emit("x")
    assert not list(tmp_path.iterdir())


def test_the_files_own_keys_are_not_fields(tmp_path: Path) -> None:
    with EventLog(tmp_path / "e") as events, pytest.raises(AssertionError, match="own"):
        events.emit("x", t=1)


def test_a_place_that_cannot_be_written_is_the_operators_error(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "mistyped" / "events.jsonl"):
        with pytest.raises(UsageError, match="events cannot be written there"):
            EventLog(place)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a full disk is had for free on Linux only")
def test_a_full_disk_costs_the_events_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"), EventLog(Path("/dev/full")) as events:
        for number in range(5):
            events.emit("x", number=number)
    assert [record.getMessage() for record in caplog.records].count("events_not_written") == 1
    assert len(caplog.records) == 1


def test_what_comes_after_a_full_disk_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk is full in the middle of a line: that line is written again, and what came after it."""
    path, real, room = tmp_path / "e", os.write, [10**6]

    def write(file: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = real(file, data[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(os, "write", write)
    with caplog.at_level("WARNING"), EventLog(path) as events:
        events.emit("before")
        room[0] = 10
        events.emit("torn")
        events.emit("waits")
        room[0] = 10**6
        events.emit("after")
        events.emit("last")
    reader = EventReader(path)
    assert [event["event"] for event in reader.read()] == ["before", "torn", "waits", "after", "last"]
    assert [record.getMessage() for record in caplog.records] == ["events_not_written", "events_written_again"]


def test_a_disk_that_is_full_when_a_process_starts_is_borne(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real, full = tmp_path / "e", os.open, [True]

    def opened(*args: object, **more: object) -> int:
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", opened)
    with EventLog(path) as events:
        events.emit("waits")
        full[0] = False
        events.emit("kept")
    assert [event["event"] for event in EventReader(path).read()] == ["waits", "kept"]


def test_of_more_events_than_can_wait_the_oldest_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("swarmnet.telemetry.events._MOST_WAITING", 100)
    with caplog.at_level("WARNING"), EventLog(tmp_path / "e", clock=lambda: 0.0) as events:
        with monkeypatch.context() as full:
            full.setattr(os, "write", failing)
            for number in range(9):
                events.emit("x", number=number)
        events.emit("last")
    read = EventReader(tmp_path / "e").read()
    assert [event.get("number") for event in read] == [7, 8, None]
    assert [record.getMessage() for record in caplog.records] == ["events_not_written", "events_written_again"]


@given(data=st.data())
def test_a_reader_sees_every_whole_line_however_the_bytes_arrive(data: st.DataObject, tmp_path_factory) -> None:
    path = tmp_path_factory.mktemp("events") / "e"
    whole = b"".join((encode({"t": 0, "event": f"e{n}"}) + "\n").encode() for n in range(4))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=5)))
    reader, seen = EventReader(path), []
    for start, stop in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        with path.open("ab") as file:
            file.write(whole[start:stop])
        seen += reader.read()
    assert [event["event"] for event in seen] == ["e0", "e1", "e2", "e3"]


@given(cut=st.integers(1, 30))
def test_a_writer_that_was_killed_in_a_line_costs_that_line(cut: int, tmp_path_factory) -> None:
    path = tmp_path_factory.mktemp("events") / "e"
    line = (encode({"t": 0, "event": "whole", "x": "y" * 20}) + "\n").encode()
    path.write_bytes(line + line[:-cut])
    with EventLog(path) as events:
        events.emit("next")
    reader = EventReader(path)
    names = [event["event"] for event in reader.read()]
    assert names == (["whole", "whole", "next"] if cut == 1 else ["whole", "next"])


def test_a_file_begun_anew_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "e"
    reader = EventReader(path)
    path.write_text('{"event":"a"}\n{"event":"b"}\n')
    assert len(reader.read()) == 2
    path.write_text('{"event":"c"}\n[1]\n\n')
    assert reader.read() == [{"event": "c"}]


def test_sigkill_loses_no_line_that_was_written(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from swarmnet.telemetry.events import EventLog\n"
        "events = EventLog(Path(sys.argv[1]))\n"
        "for n in range(100): events.emit('n', n=n)\n"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "e")], check=False)
    assert done.returncode == -9
    assert [event["n"] for event in EventReader(tmp_path / "e").read()] == list(range(100))


def test_each_event_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, data: sizes.append(len(data)) or real(file, data))
    with EventLog(tmp_path / "e") as events:
        events.emit("x", blob="y" * 100_000)
    assert len(sizes) == 1 and sizes[0] > 100_000


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.frozensets(st.integers()),
    lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), values))
def test_anything_is_one_line_of_strict_json(fields: dict[str, object]) -> None:
    line = encode(fields)
    assert "\n" not in line and line.isascii() and line.isprintable()

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    assert json.loads(line, parse_constant=refuse) == plain(fields)


def test_what_json_has_no_word_for() -> None:
    assert plain({"a": math.inf, "b": b"\x01", "c": frozenset({3, 1}), "d": Path("x"), "e": (1,), 5: None}) == {
        "a": "inf",
        "b": "01",
        "c": [1, 3],
        "d": "x",
        "e": [1],
        "5": None,
    }
