"""Homes behind real routers take part: through a relay to each other, by themselves to those who can be dialled."""

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
from swarmnet.local.oracle import run_oracle
from swarmnet.manifest import file

routers = load("routers")

pytestmark = pytest.mark.netns


STEPS = 120
"""More than are made here: the oracle of one process makes them in seconds."""


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


def test_two_hidden_homes_count_change_no_bit_and_a_killed_relay_costs_no_long_pause(
    world, start, tmp_path: Path
) -> None:
    manifest = write_tiny_run(tmp_path, steps=STEPS, microbatches=4)
    run = ("--manifest", str(manifest), "--device", "cpu")
    first = start("first", world.host(), "peer", *run, "--stage", "0", *ALONE)
    known = ("--bootstrap", first.says("listening")["dht"][0])
    second = start("second", world.host(), "peer", *run, "--stage", "0", *known, *ALONE)
    for each in (first, second):
        each.says("synced")
    # It relays, too.
    trainer = start("trainer", world.host(), "trainer", "--manifest", str(manifest), *known)
    first.says("applied")
    homes = [
        start(name, world.router(kind).host(), "peer", *run, "--stage", "0", *known, *ALONE)
        for name, kind in (("one", "port"), ("two", "symmetric"))
    ]
    for home in homes:
        hidden = home.says("hidden")
        assert hidden["could_not"] and home.says("listening")["peer"] not in hidden["could_not"]
        home.says("synced")
        contributes(home, seen_by=first, since=hidden["t"])

    # Both have a place at the peer that is killed, or at the trainer and the other.
    lost = second.says("listening")["peer"]
    began = time.time()
    second.process.kill()
    go_on(first, *homes, steps=5, until=began + 1.0)
    held = [home for home in homes if lost in [event["relay"] for event in home.so_far("relay_reserved")]]
    for home in held:
        home.says("relay_lost", relay=lost)
    no_long_pause(first, since=began)
    nobody_goes_back(first, *homes)
    all_made_the_same(first, *homes)
    losses = run_oracle(file.load(manifest), load_tokens("corpus:small")).losses
    for event in first.so_far("committed"):
        assert event["loss_sum"] / event["num_tokens"] == losses[event["step"]]
    assert trainer.process.poll() is None
