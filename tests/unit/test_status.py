"""How `swarmnet status` looks, and what it does while it waits. tests/data/status.txt has each look.

After an intended change, read the difference, and write it again: `STATUS=write pytest THIS_FILE`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from swarmnet.directory import Estimate, Record, StageStatus
from swarmnet.errors import PeerTimeout
from swarmnet.ids import Chain, OnDisk, PeerId, RunId, first_chain
from swarmnet.net import dht
from swarmnet.peer import status
from swarmnet.peer.rates import mark
from swarmnet.peer.status import Waiting, run_status
from swarmnet.peer.swarm_health import assess

NUMERICS = "cpuAVX512/torch-2.13.0/tp2/fp32/eager/bdac02c7"
DISK = tuple(map(OnDisk, (2700, 2750, 2800)))
STAGES = [StageStatus(stage, 2839, Chain("c"), synced=True, slots=4, disk=DISK, drift=2830) for stage in (0, 1)]
RECORDS = [
    Record(RunId("ab" * 32), PeerId(f"12D3KooWpeer{each.stage}WXYZ"), 1, (), (each,), numerics=NUMERICS)
    for each in STAGES
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
    other = replace(RECORDS[0], region="eu-west")
    yield "what replicas differ in is a line with their names", shown([other, RECORDS[1]])
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


# ---------------------------------------------------------------- on a busy machine


SEEN_RUN = RunId("ab" * 32)
SEEN = Record(SEEN_RUN, PeerId("p"), 1, ("memory",), (StageStatus(0, 7, first_chain(SEEN_RUN, 0), True),))


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the directory does: it starts and answers, or never does; and how often it was closed."""
    does = SimpleNamespace(starts=True, answers=True, closed=0)

    async def records() -> tuple[Record, ...]:
        return (SEEN,) if does.answers else await asyncio.Event().wait()

    @contextlib.asynccontextmanager
    async def opened(*_: object, **__: object) -> AsyncGenerator[SimpleNamespace]:
        if not does.starts:
            await asyncio.Event().wait()
        try:
            known = lambda: (SEEN,)  # noqa: E731
            yield SimpleNamespace(num_stages=1, known=known, records=records, dht_addresses=lambda peer: ())
        finally:
            does.closed += 1

    monkeypatch.setattr(dht, "DhtDirectory", opened)
    monkeypatch.setattr(status, "GIVEN_UP_AFTER_S", 0.1)
    return does


@pytest.mark.parametrize("answers", [True, False])
def test_an_answer_in_time_comes_without_words_and_else_what_is_known_is_shown(
    directory: SimpleNamespace, answers: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    directory.answers = answers
    code = run_status(SEEN_RUN, ("/ip4/203.0.113.7/tcp/1/p2p/x",))
    out, err = capsys.readouterr()
    assert code == 0 and "version 7" in out and directory.closed == 1
    assert err.count("\n") == (not answers)
    assert answers or "gave up waiting for records of the run from the DHT" in err


def test_without_a_way_into_the_network_it_ends_in_words(directory: SimpleNamespace) -> None:
    directory.starts = False
    with pytest.raises(PeerTimeout, match=r"libp2p daemon, and for an answer from /ip4/203.0.113.7.*try again"):
        run_status(SEEN_RUN, ("/ip4/203.0.113.7/tcp/1/p2p/x",))


def test_what_it_waits_for_is_said_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "SAY_AFTER_S", 0.0)
    monkeypatch.setattr(status, "SAY_EVERY_S", 3600.0)
    said, heard = [], threading.Event()
    with Waiting(lambda line: (said.append(line), heard.set())) as waiting:  # type: ignore[arg-type, func-returns-value]
        assert heard.wait(10.0)
        waiting.over()
    assert len(said) == 1 and said[0].startswith("swarmnet status: waiting for Python to load")
