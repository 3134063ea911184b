"""Ctrl+C before a process listens, and a libp2p daemon that does not answer: neither is waited for without end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from swarmnet.config import PeerConfig
from swarmnet.manifest.schema import Manifest
from swarmnet.net import dht_node, endpoint
from swarmnet.net.dht_daemon import DaemonFailed, Listen
from swarmnet.net.dht_gate import RecordGate
from swarmnet.net.identity import Identity
from swarmnet.net.own_dir import own_identity
from swarmnet.peer import bootstrap
from swarmnet.trainer import run as trainer


class Unreachable:
    """A directory that never finds anybody; while it tries, somebody asks for the end."""

    @classmethod
    async def start(cls, *_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGINT)
        await asyncio.Event().wait()


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
    monkeypatch.setattr(trainer, "load_tokens", lambda *_, **__: SimpleNamespace(num_tokens=10**6))
    monkeypatch.setattr(trainer, "verify", lambda *_: None)
    config = PeerConfig(dir=tmp_path, roles=("trainer",), events=tmp_path / "events.jsonl")
    assert trainer.run_trainer(config, Manifest()) == 0
    assert "asked to stop before it had joined" in (tmp_path / "events.jsonl").read_text()
    with own_identity(tmp_path) as identity:             # the directory is free again
        assert identity.peer


def test_a_daemon_that_does_not_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    async def start(*_: object) -> SimpleNamespace:
        return SimpleNamespace(control=tmp_path / "control.sock", kill=lambda: ended.append("killed"))

    async def story() -> None:
        mute = await asyncio.start_unix_server(lambda reader, writer: None, tmp_path / "control.sock")
        async with mute:
            await dht_node.Node.open(Identity.load_or_create(tmp_path / "key"), RecordGate(lambda found: None),
                                     Listen(), own_keys=())

    monkeypatch.setattr(dht_node.Daemon, "start", start)
    monkeypatch.setattr(dht_node, "OPEN_TIMEOUT_S", 0.2)
    with pytest.raises(DaemonFailed, match="does not answer"):
        asyncio.run(story())
    assert ended == ["killed"]
