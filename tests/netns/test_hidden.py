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


def test_two_hidden_homes_take_part_and_a_killed_relay_costs_no_long_pause(world, start, tmp_path: Path) -> None:
    manifest = write_tiny_run(tmp_path, steps=100_000, microbatches=4)
    run = ("--manifest", str(manifest), "--device", "cpu")
    first = start("first", world.host(), "peer", *run, "--stage", "0", *ALONE)
    known = ("--bootstrap", first.says("listening")["dht"][0])
    others = [start(name, world.host(), "peer", *run, "--stage", "0", *known, *ALONE) for name in ("second", "third")]
    for each in (first, *others):
        each.says("synced")
    trainer = start("trainer", world.host(), "trainer", "--manifest", str(manifest), *known)
    first.says("applied")
    homes = [
        start(name, world.router(kind).host(), "peer", *run, "--stage", "0", *known, *ALONE)
        for name, kind in (("one", "port"), ("two", "symmetric"))
    ]
    for home in homes:
        hidden = home.says("hidden")
        assert len(hidden["could_not"]) == 3 and home.says("listening")["peer"] not in hidden["could_not"]
        home.says("synced")
        contributes(home, seen_by=first, since=hidden["t"])
    go_on(first, *homes, steps=10)

    relays = [event["relay"] for event in homes[0].so_far("relay_reserved")]
    members = {each.says("listening")["peer"]: each for each in (first, *others)}
    lost = members.pop(relays[0])
    began = time.time()
    lost.process.kill()
    left = list(members.values())
    for home in homes:
        contributes(home, seen_by=left[0], since=began + 1.0)
    go_on(*left, *homes, steps=10)
    homes[0].says("relay_lost", relay=relays[0])
    no_long_pause(*left, since=began)
    nobody_goes_back(*left, *homes)
    all_made_the_same(*left, *homes)
    assert trainer.process.poll() is None
