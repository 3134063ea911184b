"""How `swarmnet status` looks: a line for each replica, within 80 columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

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


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """The lines for records, on a terminal so wide."""

    def show(records: list[Record] = RECORDS, columns: int = 80, links: tuple[str, ...] = ()) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        status._show(replace(assess(records[0].run, records, 2), links=links))
        return capsys.readouterr().out.splitlines()

    return show


Shown = Callable[..., list[str]]


def test_a_replica_is_a_line_and_what_all_have_is_said_once(shown: Shown) -> None:
    lines = shown()
    assert [line.split() for line in lines if "WXYZ" in line] == [
        [str(stage), f"...eer{stage}WXYZ", "2839", "synced", "0/4", "2800", "+2", "2830"] for stage in (0, 1)
    ]
    assert f"numerics: {NUMERICS}" in lines


def test_a_lost_stage_may_have_its_version_on_a_disk_that_is_not_seen(shown: Shown) -> None:
    assert "on disk: version 2800" in "\n".join(shown())
    assert "on disk: no version of all stages at the peers that are up" in "\n".join(shown(RECORDS[:1]))
    fresh = [replace(each, stages=(replace(each.stages[0], disk=()),)) for each in RECORDS]
    assert "on disk: no version of all stages yet" in "\n".join(shown(fresh))


def test_links_to_join_by_stand_whole_on_lines_of_their_own(shown: Shown) -> None:
    links = tuple(f"swarm:{'ab' * 32}@/ip4/203.0.113.{number}/tcp/31337/p2p/12D3KooWpeer" for number in range(3))
    assert [line for line in shown(links=links) if "swarm:" in line] == [
        f"join: swarmnet join {at}" for at in links[:2]
    ]
    assert not any("swarm:" in line for line in shown([replace(each, finished=True) for each in RECORDS], links=links))


def test_a_complete_run_says_what_to_do_and_no_pace(shown: Shown) -> None:
    lines = shown([replace(each, finished=True, tokens_per_second=1720.0) for each in RECORDS], columns=200)
    assert any("the run is complete: `swarmnet export`" in line for line in lines)
    assert not any("tokens/s" in line for line in lines)


def test_nothing_is_wider_than_the_terminal(shown: Shown) -> None:
    """Everything at its widest: a version of a long run, a region, two kinds of software, a sentence of advice."""
    status_of = replace(RECORDS[0].stages[0], version=10**7, queue=64, slots=64, stray=True, drift=10**7)
    wide = [
        replace(
            each,
            stages=(replace(status_of, stage=stage),),
            region="eu-west-and-then-some-24",
            software=f"swarmnet 0.{stage}.0, protocol 2.0",
            loss=(10**7, 2.0),
            eval_loss=(10**7, 2.0),
            tokens_per_second=123456.0,
            estimates=(Estimate(mark(each.peer), 123456),),
        )
        for stage, each in enumerate(RECORDS)
    ]
    assert max(map(len, shown(wide))) <= 80 and max(map(len, shown())) <= 80
    assert any(line.startswith("warning: ") and len(line) > 80 for line in shown(wide, columns=400))
    assert all("WXYZ" in line for line in shown(wide, columns=60) if " synced " in line)


def test_pace_and_speeds_are_shown(shown: Shown) -> None:
    timed = [
        replace(each, steps=2899, step_s=2.0, estimates=(Estimate(mark(each.peer), 1500),), tokens_per_second=64.0)
        for each in RECORDS
    ]
    text = "\n".join(shown(timed))
    assert "version 2839 of 2899" in text and ", 64 tokens/s, ETA 2:00" in text
    assert len([line for line in text.splitlines() if "WXYZ" in line and " 1.5/s " in line]) == 2


def test_what_replicas_differ_in_is_a_line_with_their_names(shown: Shown) -> None:
    assert not [line for line in shown() if line.startswith(("region", "software"))]
    lines = shown([replace(RECORDS[0], region="eu-west"), RECORDS[1]])
    assert "region: eu-west (...eer0WXYZ)" in lines


def test_what_strangers_say_is_text(shown: Shown) -> None:
    lines = shown([replace(RECORDS[0], region="\\[/b]", software="\\[link=http://x.example]\x1b]y"), RECORDS[1]])
    assert "region: \\[/b] (...eer0WXYZ)" in lines
    assert "software: \\[link=http://x.example]\\x1b]y (...eer0WXYZ)" in lines
