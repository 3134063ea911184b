"""How `swarmnet status` looks: whole in a pipe, and with whole peers on a narrow terminal."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from swarmnet.directory import Estimate, Record, StageStatus
from swarmnet.ids import Chain, OnDisk, PeerId, RunId
from swarmnet.peer import status
from swarmnet.peer.rates import mark
from swarmnet.peer.swarm_health import assess

NUMERICS = "cpuAVX512/torch-2.13.0/tp2/fp32/eager/bdac02c7"
RECORDS = [
    Record(
        RunId("ab" * 32),
        PeerId(f"12D3KooWpeer{stage}WXYZ"),
        1,
        (),
        (
            StageStatus(
                stage, 2839, Chain("c"), synced=True, slots=4, disk=tuple(map(OnDisk, (2700, 2750, 2800))), drift=2830
            ),
        ),
        numerics=NUMERICS,
    )
    for stage in (0, 1)
]


def shown(monkeypatch: pytest.MonkeyPatch, **console: object) -> str:
    file = io.StringIO()
    plain = Console
    monkeypatch.setattr("rich.console.Console", lambda **named: plain(file=file, **named, **console))
    status._show(assess(RECORDS[0].run, RECORDS, 2))
    return file.getvalue()


def test_in_a_pipe_a_replica_is_a_line_and_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(monkeypatch).splitlines()
    assert [line.split() for line in lines if "WXYZ" in line] == [
        [
            str(stage),
            f"...eer{stage}WXYZ",
            "2839",
            "synced",
            "0/4",
            "2700,",
            "2750,",
            "2800",
            "none",
            "at",
            "2830",
            NUMERICS,
        ]
        for stage in (0, 1)
    ]
    assert not any(char in "".join(lines) for char in "│┃━…")


@pytest.mark.parametrize("width", [80, 60])
def test_a_narrow_terminal_shows_eight_characters_of_a_peer(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    text = shown(monkeypatch, force_terminal=True, color_system=None, width=width)
    assert all(f"...eer{stage}WXYZ" in text for stage in (0, 1)) and "…" not in text


def test_pace_and_speeds_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = [
        replace(each, steps=2899, step_s=2.0, estimates=(Estimate(mark(each.peer), 1500),), tokens_per_second=64.0)
        for each in RECORDS
    ]
    monkeypatch.setattr(f"{__name__}.RECORDS", timed)
    text = shown(monkeypatch)
    assert "version 2839 of 2899" in text and ", 64 tokens/s, ETA 2:00" in text
    assert len([line for line in text.splitlines() if "WXYZ" in line and " 1.5/s " in line]) == 2


def test_where_somebody_says_its_region_there_is_a_column(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "region" not in shown(monkeypatch)
    monkeypatch.setattr(f"{__name__}.RECORDS", [replace(RECORDS[0], region="eu-west"), RECORDS[1]])
    lines = shown(monkeypatch).splitlines()
    assert next(line for line in lines if "numerics" in line).split()[-2:] == ["region", "software"]
    assert next(line for line in lines if "0WXYZ" in line).split()[-1] == "eu-west"


def test_what_strangers_say_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = replace(RECORDS[0], region="\\[/b]", software="\\[link=http://x.example]y")
    monkeypatch.setattr(f"{__name__}.RECORDS", [hostile, RECORDS[1]])
    assert "\\[/b]" in shown(monkeypatch) and "[link=" in shown(monkeypatch)
