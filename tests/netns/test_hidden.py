"""Homes behind real routers that find no hole: relays carry what they say to each other, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from benchmark_modules import load

sys.path.append(str(Path(__file__).parents[1] / "swarm"))

from network import ALONE, all_made_the_same, contributes, go_on, no_long_pause, nobody_goes_back
from running import Running
from tiny_run import write_tiny_run

from swarmnet.data.source import load_tokens
from swarmnet.manifest import file
from swarmnet.testing.reference import run_reference

routers = load("routers")

pytestmark = pytest.mark.netns


@pytest.fixture
def world() -> Iterator[object]:
    try:
        with routers.internet() as net:
            yield net
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(str(error))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """`swarmnet WORDS` at a host, in a directory of that name."""
    with ExitStack() as stack:

        def begin(name: str, host, *words: str) -> Running:
            running = Running(tmp_path / name, *words, module=("in_namespace", host.namespace), host=host.address)
            return stack.enter_context(running)

        yield begin


def test_homes_that_find_no_hole_count_and_a_killed_relay_costs_no_long_pause(world, start, tmp_path: Path) -> None:
    """Routers that take another port for every connection; the trainer is behind one, too."""
    manifest = write_tiny_run(tmp_path, steps=100_000, microbatches=4)
    run = ("--manifest", str(manifest))
    peer = ("peer", *run, "--stage", "0", "--device", "cpu", *ALONE)
    first = start("first", world.host(), *peer)
    known = ("--bootstrap", first.says("listening")["dht"][0])
    second = start("second", world.host(), *peer, *known)
    for each in (first, second):
        each.says("synced")
    shared, own = world.router("symmetric"), world.router("symmetric")
    homes = [start("one", shared.host(), *peer, *known), start("two", own.host(), *peer, *known)]
    for home in homes:
        home.says("synced")
        assert home.so_far("hidden"), "somebody could dial it"
    trainer = start("trainer", shared.host(), "trainer", *run, *known)
    for home in homes:
        contributes(home, seen_by=first, since=0.0)
    relays = {event["relay"] for home in homes for event in home.so_far("relay_reserved")}
    assert relays == {each.says("listening")["peer"] for each in (first, second)}
    trainer.says("hidden")

    began = time.time()
    second.process.kill()
    for home in homes:
        home.says("relay_lost", relay=second.says("listening")["peer"])
    go_on(first, *homes, steps=5, until=began + 1.0)
    # The trainer, at home with the first, is not in its router's way.
    assert not homes[1].so_far("punched")
    no_long_pause(first, since=began)
    nobody_goes_back(first, *homes)
    all_made_the_same(first, *homes)
    losses = {event["step"]: event["loss_sum"] / event["num_tokens"] for event in first.so_far("committed")}
    reference = run_reference(file.load(manifest), load_tokens("corpus:small"), steps=1 + max(losses))
    assert [losses[step] for step in range(1 + max(losses))] == reference.losses
    assert trainer.process.poll() is None
