"""How `swarmnet status` looks: a line for each replica, within 80 columns. tests/data/status.txt shows it.

After an intended change, read the difference, and write it again: `STATUS=write pytest THIS_FILE`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

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
LOOKS = Path(__file__).parents[1] / "data/status.txt"


def looks(shown: Shown) -> Iterator[tuple[str, list[str]]]:
    yield "a replica is a line, and what all have is said once", shown()
    yield "a lost stage may have its version on a disk that is not seen", shown(RECORDS[:1])
    fresh = [replace(each, stages=(replace(each.stages[0], disk=()),)) for each in RECORDS]
    yield "no checkpoint yet", shown(fresh)
    links = tuple(f"swarm:{'ab' * 32}@/ip4/203.0.113.{number}/tcp/31337/p2p/12D3KooWpeer" for number in range(3))
    yield "links to join by stand whole on lines of their own", shown(links=links)
    finished = [replace(each, finished=True, tokens_per_second=1720.0) for each in RECORDS]
    yield "a complete run says what to do, and no pace or link", shown(finished, columns=200, links=links)
    timed = [
        replace(each, steps=2899, step_s=2.0, estimates=(Estimate(mark(each.peer), 1500),), tokens_per_second=64.0)
        for each in RECORDS
    ]
    yield "pace and speeds", shown(timed)
    yield (
        "what replicas differ in is a line with their names",
        shown([replace(RECORDS[0], region="eu-west"), RECORDS[1]]),
    )
    hostile = replace(RECORDS[0], region="\\[/b]", software="\\[link=http://x.example]\x1b]y")
    yield "what strangers say is text", shown([hostile, RECORDS[1]])


def test_it_looks_as_it_did(shown: Shown) -> None:
    lines = [line.rstrip() for name, look in looks(shown) for line in (f"== {name}", *look, "")]
    if os.environ.get("STATUS") == "write":
        LOOKS.write_text("\n".join(lines), encoding="utf-8")
    assert lines == LOOKS.read_text(encoding="utf-8").split("\n")


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
