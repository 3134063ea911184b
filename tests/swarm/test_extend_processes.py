"""A run is extended while it goes on, with kills, and again after everybody has gone home: real processes.

The losses are those of a single process that follows the same notices.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from running import Running
from tiny_run import write_tiny_run

from swarmnet.cli.frame import run
from swarmnet.data.source import load_tokens
from swarmnet.manifest.extension import Extension
from swarmnet.manifest.file import load, to_toml
from swarmnet.manifest.schema import Admission, Optimizer
from swarmnet.net.admission_files import new_owner, notices_file, read_signed, write_owner
from swarmnet.testing.reference import run_reference

Start = Callable[..., Running]

STEPS, LONGER, LONGEST = 60, 90, 94
PAUSE_S = 0.03  # before each microbatch: it makes no more steps than extend it, while peers start


def owned_run(folder: Path) -> Path:
    """A tiny run that somebody may extend."""
    path = write_tiny_run(folder, stages=2, steps=STEPS, microbatches=4)
    owner = new_owner(path)
    optimizer = Optimizer(schedule="wsd", warmup_steps=10, decay_steps=20)
    manifest = load(path).model_copy(update={"admission": Admission(key=owner.peer), "optimizer": optimizer})
    path.write_text(to_toml(manifest), encoding="utf-8")
    write_owner(path, owner)
    return path


def reached(peer: Running, version: int) -> None:
    peer.until(lambda event: event["event"] == "applied" and event["version"] >= version)


def test_it_is_extended_under_kills_and_after_its_end(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = owned_run(tmp_path)
    words = ("--manifest", str(path), "--device", "cpu", "--no-restart")

    def serve(name: str, bootstrap: str = "") -> Running:
        stage = ("--stage", name[1], *(("--bootstrap", bootstrap) if bootstrap else ()))
        return start(name, "peer", *words, *stage, again=True)

    def feed(bootstrap: str) -> Running:
        module = ("fed_slowly", str(PAUSE_S))
        words = ("trainer", "--manifest", str(path), "--bootstrap", bootstrap)
        return start("trainer", *words, module=module, again=True)

    first = serve("s0a")
    (address, *_) = first.says("listening")["dht"]
    peers = {name: serve(name, address) for name in ("s0b", "s1a", "s1b")} | {"s0a": first}
    feed(address)
    reached(first, 20)
    code = run(["owner", "extend", str(path), "--steps", str(LONGER), "--bootstrap", address])
    printed = capsys.readouterr()
    assert code == 0 and f"notice 1, {LONGER} steps" in printed.out, printed
    (notice,) = [signed.value for signed in read_signed(notices_file(path), Extension)]
    assert 20 < notice.since <= STEPS
    for victim, version in (("s1b", notice.since), ("s0b", notice.since + 20)):
        reached(first, version)
        peers[victim].process.send_signal(signal.SIGKILL)
        peers[victim].process.wait()
        peers[victim] = serve(victim, address)
    for peer in peers.values():
        peer.says("finished", version=LONGER)
        assert peer.says("extended")["since"] == notice.since

    # Everybody goes home. The owner signs more, and one of each stage comes back with the same --dir.
    for peer in peers.values():
        assert peer.stop() == 0
    assert run(["owner", "extend", str(path), "--steps", str(LONGEST)]) == 0
    seen = [event for peer in peers.values() for event in peer.so_far("applied")]
    first = serve("s0a")
    (address, *_) = first.says("listening")["dht"]
    peers = {"s0a": first, "s1b": serve("s1b", address)}
    feed(address)
    for peer in peers.values():
        peer.says("finished", version=LONGEST)
    assert run(["status", str(path), "--bootstrap", address]) == 0
    assert "finished" in capsys.readouterr().out
    for peer in peers.values():
        assert peer.stop() == 0

    seen += [event for peer in peers.values() for event in peer.so_far("applied")]
    notices = tuple(read_signed(notices_file(path), Extension))
    manifest = load(path)
    tokens = load_tokens(manifest.data.source, manifest.data.tokenizer)
    reference = run_reference(manifest, tokens, notices=notices)
    assert len(reference.losses) == LONGEST
    assert {event["step"] for event in seen} == set(range(LONGEST))
    assert all(event["loss"] == reference.losses[event["step"]] for event in seen)
