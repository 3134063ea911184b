"""`swarmnet status` on a busy machine: it says what it waits for, and makes do with what it has."""

from __future__ import annotations

import asyncio
import threading

import pytest

from swarmnet.directory import Record, StageStatus
from swarmnet.errors import PeerTimeout
from swarmnet.ids import PeerId, RunId, first_chain
from swarmnet.net import dht
from swarmnet.peer import status
from swarmnet.peer.status import Waiting, run_status

RUN = RunId("ab" * 32)
SEEN = Record(RUN, PeerId("p"), 1, ("memory",), (StageStatus(0, 7, first_chain(RUN, 0), True),))


class Directory:
    """Starts, and answers, as often as told; else it never does."""

    starts = answers = True
    num_stages = 1
    closed = 0

    def __init__(self, *_: object, **__: object) -> None:
        pass

    async def __aenter__(self) -> Directory:
        if not self.starts:
            await asyncio.Event().wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        type(self).closed += 1

    async def records(self) -> tuple[Record, ...]:
        if not self.answers:
            await asyncio.Event().wait()
        return self.known()

    def dht_addresses(self, peer: PeerId) -> tuple[str, ...]:
        return ()

    def known(self) -> tuple[Record, ...]:
        return (SEEN,)


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> type[Directory]:
    fresh = type("Fresh", (Directory,), {})
    monkeypatch.setattr(dht, "DhtDirectory", fresh)
    monkeypatch.setattr(status, "GIVEN_UP_AFTER_S", 0.1)
    return fresh


def ask(capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = run_status(RUN, ("/ip4/203.0.113.7/tcp/1/p2p/x",))
    return code, *capsys.readouterr()


def test_an_answer_in_time_comes_without_words(directory: type[Directory], capsys) -> None:
    code, out, err = ask(capsys)
    assert (code, err, directory.closed) == (0, "", 1) and "version 7" in out


def test_records_that_do_not_come_leave_what_is_known(directory: type[Directory], capsys) -> None:
    directory.answers = False
    code, out, err = ask(capsys)
    assert code == 0 and "version 7" in out and directory.closed == 1
    assert "gave up waiting for records of the run from the DHT" in err and err.count("\n") == 1


def test_without_a_way_into_the_network_it_ends_in_words(directory: type[Directory]) -> None:
    directory.starts = False
    with pytest.raises(PeerTimeout, match=r"libp2p daemon, and for an answer from /ip4/203.0.113.7.*try again"):
        run_status(RUN, ("/ip4/203.0.113.7/tcp/1/p2p/x",))


def test_what_it_waits_for_is_said_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "SAY_AFTER_S", 0.0)
    monkeypatch.setattr(status, "SAY_EVERY_S", 3600.0)
    said, heard = [], threading.Event()
    with Waiting(lambda line: (said.append(line), heard.set())) as waiting:  # type: ignore[arg-type, func-returns-value]
        assert heard.wait(10.0)
        waiting.over()
    assert len(said) == 1 and said[0].startswith("swarmnet status: waiting for Python to load")
