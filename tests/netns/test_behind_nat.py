"""Homes with no open port train together and speak directly: the bits of one process, a killed relay or not."""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from benchmark_modules import load

sys.path.append(str(Path(__file__).parents[1] / "swarm"))

from network import ALONE, all_made_the_same, contributes, go_on, no_long_pause, nobody_goes_back
from running import Running
from tiny_run import write_tiny_run

from swarmnet.data.source import load_tokens
from swarmnet.manifest.file import load as load_manifest
from swarmnet.testing.reference import run_reference

routers = load("routers")

pytestmark = pytest.mark.netns

STEPS = 8
"""Before the relay is killed, and after."""

SLOW = 4.0
"""Times the usual: a step that waited for somebody."""


@pytest.fixture
def world() -> Iterator[object]:
    try:
        with routers.internet() as net:
            yield net
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(str(error))


def test_homes_find_holes_and_a_killed_relay_costs_one_step_at_most(world, tmp_path: Path) -> None:
    manifest = write_tiny_run(tmp_path, steps=100_000, microbatches=4)
    run = ("--manifest", str(manifest))
    peer = ("peer", *run, "--stage", "0", "--device", "cpu", *ALONE)
    shared = world.router("address")
    places = {
        "one": shared.host(),
        "other": shared.host(),
        "twice": world.router("full", carrier=True).router("port").host(),
    }
    with ExitStack() as stack:

        def start(name: str, host, *words: str) -> Running:
            running = Running(tmp_path / name, *words, module=("in_namespace", host.namespace), host=host.address)
            return stack.enter_context(running)

        members = [start("m0", world.host(), *peer)]
        known = ("--bootstrap", members[0].says("listening")["dht"][0])
        members.append(start("m1", world.host(), *peer, *known))
        for member in members:
            member.says("synced")
        homes = {name: start(name, host, *peer, *known) for name, host in places.items()}
        for home in homes.values():
            home.says("synced")
            assert home.so_far("hidden"), "somebody could dial it"
        # Now that all are there: whoever takes part does so from the first step on.
        start("trainer", world.host(), "trainer", *run, *known)
        began = members[0].says("applied")["t"]
        for home in homes.values():
            contributes(home, seen_by=home, since=began)
            home.says("applied")
        ids = {name: home.says("listening")["peer"] for name, home in homes.items()}
        for one, other in itertools.permutations(homes, 2):
            homes[one].says("punched", peer=ids[other])
        go_on(members[0], *homes.values(), steps=STEPS)

        first, relay = members
        killed = time.time()
        relay.process.kill()
        for home in homes.values():
            contributes(home, seen_by=first, since=killed + 1.0)
        go_on(first, *homes.values(), steps=STEPS)
        no_long_pause(first, *homes.values(), since=killed)
        nobody_goes_back(first, *homes.values())
        all_made_the_same(first, *homes.values())
        # Not even the streams of homes to each other broke. While all start, one may be lost at once, and is made anew.
        for home in homes.values():
            for lost in home.so_far("hole_lost"):
                again = [event["t"] for event in home.so_far("punched") if event["peer"] == lost["peer"]]
                assert lost["t"] < max(again) < killed, lost
        losses = {event["step"]: event["loss_sum"] / event["num_tokens"] for event in first.so_far("committed")}
        times = [event["t"] for event in first.so_far("applied")]
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    usual = statistics.median(pauses)
    slow = [pause for pause, ended in zip(pauses, times[1:], strict=True) if ended > killed and pause > SLOW * usual]
    assert len(slow) <= 1, f"{slow} s, where {usual} s are usual"
    reference = run_reference(load_manifest(manifest), load_tokens("corpus:small"), steps=1 + max(losses))
    assert [losses[step] for step in range(1 + max(losses))] == reference.losses
