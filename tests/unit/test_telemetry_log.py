"""Logs: events with fields, short or JSON, and nobody else's chatter."""

import io
import json
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarmnet import telemetry
from swarmnet.telemetry import log as log_module


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """Where `setup` may write; whatever it changed in the process is put back."""
    root = logging.getLogger()
    names = ("swarmnet", "hivemind", "asyncio", "grpc", "grpc._cython", "torch", "py.warnings")
    kept = root.handlers[:], root.level, {name: logging.getLogger(name).level for name in names}
    monkeypatch.setattr(os, "environ", dict(os.environ))
    yield io.StringIO()
    logging.captureWarnings(False)
    root.handlers[:], levels = kept[0], kept[2]
    root.setLevel(kept[1])
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def test_a_line_is_short(stream: io.StringIO) -> None:
    telemetry.setup(stream=stream)
    log = telemetry.get("swarmnet.step.driver")
    log.event("round_done", round=3, members=5, seconds=0.123456)
    log.warning("peer_lost", peer="12D3Koo")
    log.debug("hidden")
    lines = stream.getvalue().splitlines()
    assert [line[9:] for line in lines] == ["round_done round=3 members=5 seconds=0.1235", "W peer_lost peer=12D3Koo"]


def test_json_keeps_every_field(stream: io.StringIO) -> None:
    telemetry.setup("debug", format="json", stream=stream)
    log = telemetry.get("swarmnet.x")
    log.debug("claim", index=3, indexes=frozenset({2, 1}))
    log.event("odd", level=2, msg="m", event="e", name="n")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first.pop("t") > 0
    assert first == {"level": "debug", "logger": "swarmnet.x", "event": "claim", "index": 3, "indexes": [1, 2]}
    assert (second["level"], second["level_"], second["event"], second["event_"]) == ("info", 2, "odd", "e")
    assert (second["msg"], second["name"]) == ("m", "n")


@pytest.mark.parametrize("format", ["text", "json"])
def test_a_peers_text_is_data(stream: io.StringIO, format) -> None:
    telemetry.setup(format=format, stream=stream)
    telemetry.get("swarmnet.x").warning("said", reason='\x1b[31mred\n12:00:00 fake_event "x"\u202e')
    line = stream.getvalue()
    assert line.count("\n") == 1 and line[:-1].isprintable()


def test_a_traceback_follows_its_event(stream: io.StringIO) -> None:
    log = telemetry.get("swarmnet.x")
    for format, lines in (("text", 3), ("json", 1)):
        stream.truncate(stream.seek(0))
        telemetry.setup(format=format, stream=stream)  # type: ignore[arg-type]
        try:
            raise ValueError("why")
        except ValueError:
            log.error("broke", exc_info=True, stage=2)
        text = stream.getvalue()
        assert "ValueError: why" in text and "stage" in text and len(text.splitlines()) >= lines
        assert format == "text" or len(text.splitlines()) == 1


def test_others_are_heard_only_when_it_matters(stream: io.StringIO) -> None:
    telemetry.setup(stream=stream)
    for name in ("hivemind.dht", "torch.distributed", "asyncio", "somebody"):
        logging.getLogger(name).warning("chatter")
    warnings.warn("chatter", UserWarning, stacklevel=1)
    assert stream.getvalue() == ""
    logging.getLogger("somebody").error("it is on fire")
    assert stream.getvalue().endswith("E somebody: it is on fire\n")
    telemetry.setup("debug", stream=stream)
    logging.getLogger("somebody").warning("chatter")
    assert stream.getvalue().endswith("W somebody: chatter\n")


def test_what_the_operator_set_for_others_stays(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "GRPC_VERBOSITY", "DEBUG")
    monkeypatch.delitem(os.environ, "HIVEMIND_LOGLEVEL", raising=False)
    telemetry.setup(stream=stream)
    assert os.environ["GRPC_VERBOSITY"] == "DEBUG" and os.environ["HIVEMIND_LOGLEVEL"] == "CRITICAL"


def test_a_log_goes_to_a_file_that_does_not_grow_without_end_and_back(
    stream: io.StringIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "FILE_BYTES", 200)
    log = telemetry.get("swarmnet.x")
    telemetry.setup(file=tmp_path / "peer.log")
    for number in range(9):
        log.event("told", number=number, peer="ä" * 9)
    telemetry.setup(stream=stream)
    log.event("told_again")
    kept = [(tmp_path / name).read_text() for name in ("peer.log.1", "peer.log")]
    assert "number=8" in kept[1] and len("".join(kept).encode()) <= 400 and len(list(tmp_path.iterdir())) == 2
    assert len(stream.getvalue().splitlines()) == 1


def test_a_log_file_on_a_full_disk_ends_nothing_and_prints_nothing(
    stream: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    telemetry.setup(file=Path("/dev/full"))
    telemetry.get("swarmnet.x").event("told")
    telemetry.setup(stream=stream)
    assert capsys.readouterr().err == ""
