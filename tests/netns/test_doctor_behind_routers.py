"""`swarmnet doctor` where volunteers are: in the open, behind a firewall, a home router, a carrier's NAT."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmark_modules import load

sys.path.append(str(Path(__file__).parents[1] / "swarm"))

from network import ALONE
from running import Forked, Running
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


def test_the_doctor_names_what_is_in_the_way(world, tmp_path: Path) -> None:
    manifest = write_tiny_run(tmp_path, steps=100_000, microbatches=4)
    peer = ("peer", "--manifest", str(manifest), "--device", "cpu", "--stage", "0", *ALONE)

    def member(name: str, *known: str) -> Running:
        host = world.host()
        return Running(tmp_path / name, *peer, *known, module=("in_namespace", host.namespace), host=host.address)

    with member("first") as first:
        listening = first.says("listening")
        with member("second", "--bootstrap", listening["dht"][0]) as second:
            for each in (first, second):
                each.says("synced")
            places = {
                "public": world.host(),
                "firewall": world.router("firewall").host(),
                "port": world.router("port").host(),
                "symmetric": world.router("symmetric").host(),
                "carrier": world.router("symmetric", carrier=True).router("port").host(),
            }
            doctors = {}
            for name, host in places.items():
                (tmp_path / name).mkdir()
                said, where = tmp_path / f"{name}.json", ("--dir", str(tmp_path / name), "--host", host.address)
                words = ("doctor", listening["links"][0], "--device", "cpu", "--json", *where)
                doctors[name] = said, Forked("-m", "in_namespace", host.namespace, *words, log=said)
            found = {name: (process.wait(), row_of(said)) for name, (said, process) in doctors.items()}

    for name, (code, rows) in found.items():
        assert code == 0, (name, rows)
        how = rows["reached"]["facts"]["how"]
        assert how == ("direct" if name == "public" else "relay"), (name, rows["reached"])
        assert (rows["reached"]["problem"] == "relayed") == (name != "public")
        assert bool(rows["bulk port"]["facts"]["came"]) == (name == "public"), (name, rows["bulk port"])
        nat, way = rows["nat"]["facts"], rows["nat"]["problem"]
        assert (nat["kind"], way) == {
            "public": ("none", ""),
            "firewall": ("none", "firewall"),
            "port": ("cone", "router"),
            "symmetric": ("symmetric", "symmetric"),
            "carrier": ("symmetric", "symmetric"),
        }[name], (name, rows["nat"])
        assert rows["line"]["facts"]["round_trip_s"] > 0 and abs(rows["clock"]["facts"]["offset_s"]) < 5


def row_of(said: Path) -> dict[str, Any]:
    text = said.read_text()
    return {row["name"]: row for row in json.loads(text[text.index("{\n") :])["rows"]}
