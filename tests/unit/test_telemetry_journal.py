"""What a person reads of a process's events."""

import logging
from pathlib import Path

import pytest

from swarmnet import telemetry
from swarmnet.telemetry.events import EventLog, EventReader
from swarmnet.telemetry.journal import Journal, loopback_last, offered

LAN, LOOPBACK, LOOPBACK6 = (f"/{host}/tcp/31337/p2p/12D3KooW" for host in ("ip4/10.0.0.7", "ip4/127.0.0.1", "ip6/::1"))


def test_the_links_to_hand_out_stand_on_lines_of_their_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fields: dict[str, object] = {
        "invited": True,
        "peer": "12D3KooW",
        "dht": [LOOPBACK, LAN],
        "addresses": ["/ip4/10.0.0.7/tcp/1"],
        "incarnation": 7,
        "links": [f"swarm:ab@{LAN}", f"swarm:ab@{LOOPBACK}"],
    }
    with EventLog(tmp_path / "events.jsonl") as events, caplog.at_level(logging.INFO, "swarmnet"):
        Journal(events, telemetry.get("swarmnet.test"))("listening", dict(fields))
    assert [record.getMessage() for record in caplog.records] == [
        "listening",
        f"others join with: swarmnet join swarm:ab@{LAN} --invitation FILE",
    ]
    (written,) = EventReader(tmp_path / "events.jsonl").read()
    assert {key: written[key] for key in fields} == fields


def test_an_address_that_only_this_machine_reaches_comes_last() -> None:
    assert loopback_last((LOOPBACK6, LAN, LOOPBACK)) == [LAN, LOOPBACK6, LOOPBACK]


def test_an_address_that_only_this_machine_reaches_is_offered_only_where_there_is_no_other() -> None:
    assert offered((LOOPBACK6, LAN, LOOPBACK)) == [LAN]
    assert offered((LOOPBACK, LOOPBACK6)) == [LOOPBACK, LOOPBACK6]
    assert offered([f"swarm:ab@{LOOPBACK}", f"swarm:ab@{LAN}"]) == [f"swarm:ab@{LAN}"]


def test_what_comes_with_every_step_is_told_once_a_second_and_written_always(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    with EventLog(tmp_path / "events.jsonl") as events, caplog.at_level(logging.INFO, "swarmnet"):
        journal = Journal(events, telemetry.get("swarmnet.test"), clock=lambda: now)
        for step in range(16):  # a quarter of a second each
            now = step / 4
            for stage in (0, 1):
                journal("applied", {"stage": stage, "step": step})
            journal("resync", {"step": step})  # not one of those
    told = [vars(record)["swarmnet_fields"] for record in caplog.records if record.getMessage() == "applied"]
    assert [fields for fields in told if fields["stage"] == 0] == [
        {"stage": 0, "step": 0},
        {"stage": 0, "step": 4, "untold": 3},
        {"stage": 0, "step": 8, "untold": 3},
        {"stage": 0, "step": 12, "untold": 3},
    ]
    assert len(told) == 8 and len(caplog.records) == 8 + 16
    written = EventReader(tmp_path / "events.jsonl").read()
    assert sum(event["event"] == "applied" for event in written) == 32
