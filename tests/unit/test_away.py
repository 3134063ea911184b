"""A peer whose network is away when it comes back: it keeps trying if it was in the run before, and says so."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from swarmnet.clock import entered
from swarmnet.config.peer import PeerConfig
from swarmnet.errors import UsageError
from swarmnet.ids import RunId
from swarmnet.manifest.file import run_id
from swarmnet.manifest.schema import Manifest
from swarmnet.net.away import remember, until_answered, was_in
from swarmnet.net.dht_node import NoPeerAnswered
from swarmnet.net.identity import Identity
from swarmnet.net.limits import BOOTSTRAP_AGAIN, REPEATS
from swarmnet.net.swarm_link import SwarmLink
from swarmnet.peer import joining
from swarmnet.telemetry.events import EventLog
from swarmnet.testing.clock import VirtualLoop
from swarmnet.testing.doubles import run_virtual
from swarmnet.trainer import run as trainer

RUN = RunId("0123456789ab" + "c" * 52)

LONGEST_S = BOOTSTRAP_AGAIN().longest_s


class Network:
    def __init__(self, *, back_after_s: float) -> None:
        self.back_after_s = back_after_s
        self.tried_at: list[float] = []
        self.said: list[tuple[float, str, str]] = []

    async def attempt(self) -> str:
        now = asyncio.get_running_loop().time()
        self.tried_at.append(now)
        if now < self.back_after_s:
            raise NoPeerAnswered("nobody answers at X")
        return "in"

    def run(self) -> str:
        async def story() -> str:
            clock = asyncio.get_running_loop().time
            return await until_answered(
                self.attempt, say=lambda *said: self.said.append((clock(), *said)), rng=random.Random(1)
            )

        return run_virtual(story())


def test_it_tries_again_ever_more_slowly_and_says_so_now_and_then() -> None:
    network = Network(back_after_s=3000.0)
    assert network.run() == "in"
    gaps = [later - earlier for earlier, later in itertools.pairwise(network.tried_at)]
    assert gaps[0] <= 1.0 and 0.8 * LONGEST_S <= gaps[-1] <= LONGEST_S and gaps[:4] == sorted(gaps[:4])
    times = [at for at, _, _ in network.said]
    assert times[0] == 0.0 and len(times) == 6
    assert all(REPEATS.burst_s <= b - a <= REPEATS.burst_s + LONGEST_S for a, b in itertools.pairwise(times[:-1]))
    assert "was in the run before" in network.said[0][2] and "for 10 min" in network.said[1][2]
    assert [event for _, event, _ in network.said] == ["away"] * 5 + ["back"]
    assert network.said[-1][2].startswith("a peer answers again, after 30")


def test_nothing_is_said_where_somebody_answers_at_once() -> None:
    network = Network(back_after_s=0.0)
    assert network.run() == "in" and not network.said


def test_what_else_is_wrong_ends_it() -> None:
    async def attempt() -> None:
        raise UsageError("the port is taken")

    with pytest.raises(UsageError, match="taken"):
        asyncio.run(until_answered(attempt, say=lambda *_: None))


def test_a_directory_remembers_the_runs_its_peer_was_in(tmp_path: Path) -> None:
    assert not was_in(tmp_path, RUN)
    remember(tmp_path, RUN)
    assert was_in(tmp_path, RUN) and was_in(tmp_path, RUN[:12])
    assert not was_in(tmp_path, "f" * 64)
    remember(tmp_path / "gone", RUN)  # a directory that cannot be written


@pytest.mark.parametrize("digits", [12, 64])
def test_whoever_joins_again_waits_and_a_newcomer_does_not(
    digits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, told = Network(back_after_s=100.0), []

    @contextlib.asynccontextmanager
    async def reach(*_: object) -> AsyncGenerator[object, None]:
        yield await network.attempt()

    async def place(found: object, tell: object) -> object:
        return found

    monkeypatch.setattr(joining, "reach", reach)
    monkeypatch.setattr(joining, "_prepared", place)
    address = f"/ip4/203.0.113.7/tcp/31337/p2p/{Identity.generate().peer}"
    link = SwarmLink.parse(f"swarm:{RUN[:digits]}@{address}")

    def join() -> object:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            finding = joining.prepare_join(PeerConfig(dir=tmp_path), link, lambda *phase: told.append(phase))
            with entered(runner, finding) as place:
                return place

    with pytest.raises(NoPeerAnswered):
        join()
    remember(tmp_path, RUN)
    assert join() == "in"
    assert [name for name, _ in told].count("waiting") == 2


def test_a_trainer_that_was_in_the_run_waits_and_a_new_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, manifest = Network(back_after_s=100.0), Manifest()

    @contextlib.asynccontextmanager
    async def endpoint(*_: object, **__: object) -> AsyncGenerator[None, None]:
        await network.attempt()
        raise UsageError("the run answers")
        yield

    monkeypatch.setattr(trainer, "open_endpoint", endpoint)
    monkeypatch.setattr(trainer, "stopped_by_signal", lambda: contextlib.nullcontext(asyncio.Event()))

    def start() -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner, EventLog(None) as events:
            config = PeerConfig(dir=tmp_path)
            runner.run(trainer._feed(config, manifest, None, events, trainer.NOTHING_BETWEEN, None))

    with pytest.raises(NoPeerAnswered):
        start()
    remember(tmp_path, run_id(manifest))
    with pytest.raises(UsageError, match="the run answers"):
        start()
