"""Ctrl+C before a process listens, and a libp2p daemon that does not answer: neither is waited for without end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from swarmnet.config import PeerConfig
from swarmnet.errors import UsageError
from swarmnet.manifest.file import run_id
from swarmnet.manifest.schema import Data, Manifest
from swarmnet.net import away, dht_node, endpoint
from swarmnet.net.dht_daemon import DaemonFailed, Listen
from swarmnet.net.dht_node import RecordGate
from swarmnet.net.endpoint import NOTHING_BETWEEN
from swarmnet.net.identity import Identity, own_identity
from swarmnet.pacing import Backoff
from swarmnet.peer import bootstrap
from swarmnet.peer import run as peer_run
from swarmnet.peer.memory_fit import Capacity
from swarmnet.peer.rebalance import RecentMoves
from swarmnet.peer.replica import ReplicaLimits
from swarmnet.telemetry.run_state import RunState
from swarmnet.trainer import run as trainer


class Unreachable:
    """A directory that never finds anybody; while it tries, somebody asks for the end."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    async def __aenter__(self) -> None:
        signal.raise_signal(signal.SIGINT)
        await asyncio.Event().wait()

    async def __aexit__(self, *_: object) -> None:
        pass


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_bootstrap_node_that_is_joining_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "DhtDirectory", Unreachable)
    assert bootstrap.run_bootstrap(PeerConfig(dir=tmp_path, roles=("bootstrap",))) == 0


def test_a_trainer_that_is_joining_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "DhtDirectory", Unreachable)
    monkeypatch.setattr(trainer, "load_tokens", lambda *_, **__: None)
    monkeypatch.setattr(trainer, "OwnTokens", lambda *_: SimpleNamespace(training=None, evaluation=None))
    config = PeerConfig(dir=tmp_path, roles=("trainer",), events=tmp_path / "events.jsonl")
    assert trainer.run_trainer(config, Manifest()) == 0
    assert "asked to stop before it had joined" in (tmp_path / "events.jsonl").read_text()
    with own_identity(tmp_path) as identity:  # the directory is free again
        assert identity.peer


@pytest.mark.parametrize("was_there", [True, False])
def test_a_peer_that_comes_back_without_a_network_waits_for_it(
    was_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that never was in the run ends with one line; the other waits, and ends when it is asked to."""
    told: list[tuple[str, dict[str, object]]] = []

    class Away:
        tries = 0

        def __init__(self, *_: object, **__: object) -> None:
            pass

        async def __aenter__(self) -> None:
            Away.tries += 1
            if Away.tries == 2:
                signal.raise_signal(signal.SIGINT)
            raise dht_node.NoPeerAnswered("nobody answers at X")

        async def __aexit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(endpoint, "DhtDirectory", Away)
    monkeypatch.setattr(away, "BOOTSTRAP_AGAIN", partial(Backoff, 0.01, 30.0))
    manifest = Manifest(data=Data(num_tokens=10**6, tokens_root="00" * 32))
    if was_there:
        away.remember(tmp_path, run_id(manifest))
    config = PeerConfig(dir=tmp_path, stages=(0,))
    serving = peer_run._serve(
        config,
        manifest,
        None,
        {},
        [],
        peer_run.no_tokens,
        lambda *event: told.append(event),
        "",
        NOTHING_BETWEEN,
        Capacity(config, manifest),
        ReplicaLimits(1, 0),
        carried=None,
        recent_moves=RecentMoves(),
        state=RunState(),
        see=lambda state, now: None,
    )
    if not was_there:
        with pytest.raises(UsageError, match="nobody answers at X"):
            asyncio.run(serving)
        assert Away.tries == 1 and not told
        return
    assert asyncio.run(serving) is None  # it goes on nowhere
    assert [event for event, _ in told] == ["away", "stopped"] and Away.tries == 2
    assert "it tries again" in str(told[0][1]["reason"]).lower()


def test_a_daemon_that_does_not_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    async def start(*_: object) -> SimpleNamespace:
        return SimpleNamespace(control=tmp_path / "control.sock", kill=lambda: ended.append("killed"))

    async def story() -> None:
        mute = await asyncio.start_unix_server(lambda reader, writer: None, tmp_path / "control.sock")
        async with mute:
            await dht_node.DhtNode.open(
                Identity.load_or_create(tmp_path / "key"), RecordGate(lambda found: None), Listen(), own_keys=()
            )

    monkeypatch.setattr(dht_node.Daemon, "start", start)
    monkeypatch.setattr(dht_node, "OPEN_TIMEOUT_S", 0.2)
    with pytest.raises(DaemonFailed, match="does not answer"):
        asyncio.run(story())
    assert ended == ["killed"]
