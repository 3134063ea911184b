"""`swarmnet join` from the command line to what it calls: what is an invitation, and who supervises whom."""

from pathlib import Path
from typing import Any

import pytest

from swarmnet import telemetry
from swarmnet.cli import serve
from swarmnet.cli.frame import run
from swarmnet.config import PeerConfig
from swarmnet.manifest.file import run_id, to_toml
from swarmnet.manifest.schema import Manifest
from swarmnet.net.identity import Identity
from swarmnet.net.swarm_link import SwarmLink

ADDRESS = f"/ip4/203.0.113.7/tcp/31337/p2p/{Identity.generate().peer}"
LINK = f"swarm:{run_id(Manifest())}@{ADDRESS}"


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[PeerConfig, Any]]:
    """With what would have been joined, instead of joining; in an empty directory with a manifest."""
    made: list[tuple[PeerConfig, Any]] = []
    monkeypatch.setattr(serve, "_join", lambda config, invited, *, plain: made.append((config, invited)) or 0)
    monkeypatch.setattr(telemetry, "setup", lambda *args, **kwargs: None)
    for name in [name for name in __import__("os").environ if name.startswith("SWARMNET_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", "/home/you")
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(to_toml(Manifest()), encoding="utf-8")
    Path("corpus.txt").write_text("Once upon a time", encoding="utf-8")
    return made


def test_a_link_needs_nothing_else(joined) -> None:
    assert run(["join", "--no-restart", LINK]) == 0
    config, invited = joined.pop()
    assert invited == SwarmLink.parse(LINK)
    assert (config.stages, config.bootstrap, config.device) == ((), (), "auto")
    assert config.dir == Path("/home/you/.swarmnet/peer") and config.manifest is None


def test_flags_arrive(joined) -> None:
    flags = ["--stage", "2", "--dir", "d", "--slots", "3", "--bootstrap", ADDRESS, "--nickname", "Anna's <b>box</b>"]
    assert run(["join", "--no-restart", LINK, *flags]) == 0
    config, _ = joined.pop()
    assert config.network.nickname == "Anna's <b>box</b>"
    assert (config.stages, config.dir, config.slots, config.bootstrap) == ((2,), Path("d"), 3, (ADDRESS,))


def test_memory_is_spent_as_a_peer_spends_it(joined, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(["join", "--no-restart", LINK, "--activations", "recompute_layers", "--compile"]) == 0
    config, _ = joined.pop()
    assert (config.memory.activations, config.memory.compile) == ("recompute_layers", True)
    monkeypatch.setenv("SWARMNET_ACTIVATIONS", "selective")
    assert run(["join", "--no-restart", LINK]) == 0
    assert joined.pop()[0].memory.activations == "selective"


def test_a_manifest_needs_somebody_to_ask(joined) -> None:
    assert run(["join", "--no-restart", "run.toml", "--bootstrap", ADDRESS]) == 0
    config, invited = joined.pop()
    assert invited == Manifest() and config.manifest == Path("run.toml") and config.bootstrap == (ADDRESS,)


def test_it_is_started_again_after_a_crash(joined, monkeypatch: pytest.MonkeyPatch) -> None:
    for code in (0, 130):
        monkeypatch.setattr("swarmnet.peer.supervise.supervise", lambda code=code: code)
        assert run(["join", LINK, "--slots", "3"]) == code and not joined, "this process only starts another one"
    monkeypatch.setattr("swarmnet.peer.supervise.supervise", lambda: None)
    assert run(["join", LINK, "--slots", "3"]) == 0
    ((config, _),) = joined
    assert config.slots == 3
