"""Homes behind real routers join a run with no open port: who reaches whom directly, and how soon each counts. Root.

    python benchmarks/nat.py [--nats KIND ...] [--json FILE]

For each kind of NAT, in network namespaces of this machine: two members that can be dialled and a trainer make steps;
then homes of that kind join the same stage, each with one command, at once. Prints per kind how many pairs of homes
came to speak directly, how many go on through a relay, and the longest time from a home's start until a committed step
in which it took part. Interpreters start anew, so some seconds of it are imports. Beside the kinds of
benchmarks/routers.py:

    one-router    homes behind one router
    carrier       each home behind a router behind another carrier
    one-carrier   homes behind routers of their own behind one carrier, which lets nobody back in
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from harness import Benchmark, write

sys.path.insert(0, str(Path(__file__).parent))

import routers

from swarmnet.local.prepare import with_data
from swarmnet.manifest.file import to_toml
from swarmnet.manifest.schema import Cut, Data, Manifest, Model, Training
from swarmnet.telemetry.events import EventReader

CONES = ("full", "address", "port", "firewall", "one-router", "carrier")
NATS = (*CONES, "symmetric", "one-carrier")
HOMES = 3
PATIENCE_S = 120.0
PUNCH_WITHIN_S = 20.0
"""From the last home's first step on: whoever has not found a hole by then is relayed."""

PAUSE_S = 0.1
"""Before each microbatch: a swarm that makes steps as fast as it can keeps all cores busy, and shows no more."""


class Started:
    """One `swarmnet` command at a host, and what it says."""

    def __init__(self, host: Any, directory: Path, *words: str) -> None:
        directory.mkdir()
        self.began = time.time()
        self._log = directory / "log.txt"
        events = directory / "events.jsonl"
        self._reader, self._events = EventReader(events), list[dict[str, Any]]()
        where = ("--dir", str(directory), "--host", host.address, "--events", str(events))
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with routers.inside(host.namespace), self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, __file__, "--run", *words, *where],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=environment,
            )

    def so_far(self, *names: str) -> list[dict[str, Any]]:
        self._events += self._reader.read()
        return [event for event in self._events if event["event"] in names]

    def until(self, name: str, holds: Callable[[dict[str, Any]], bool] = lambda _: True) -> dict[str, Any]:
        """The first such event. Raises RuntimeError with the log if none comes."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and self.process.poll() is None:
            for event in self.so_far(name):
                if holds(event):
                    return event
            time.sleep(0.1)
        raise RuntimeError(f"no event {name}:\n{self._log.read_text()[-4000:]}")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def homes_of(world: Any, nat: str) -> list[Any]:
    """Hosts that nobody can dial."""
    if nat == "one-router":
        home = world.router("port")
        return [home.host() for _ in range(HOMES)]
    if nat == "one-carrier":
        carrier = world.router("port", carrier=True)
        return [carrier.router("port").host() for _ in range(HOMES)]
    if nat == "carrier":
        return [world.router("port", carrier=True).router("port").host() for _ in range(HOMES)]
    return [world.router(nat).host() for _ in range(HOMES)]


def write_run(directory: Path) -> Path:
    """A run of one small stage."""
    model = Model(
        vocab_size=256, hidden_size=16, intermediate_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8
    )
    training = Training(total_steps=100_000, microbatches=8, microbatch_size=1, sequence_length=16, eval_every=0)
    path = directory / "run.toml"
    manifest = Manifest(model=model, cut=Cut(stages=1), data=Data(source="corpus:small"), training=training)
    path.write_text(to_toml(with_data(manifest, base=Path())), encoding="utf-8")
    return path


def scene(nat: str, directory: Path) -> dict[str, Any]:
    """One row."""
    with ExitStack() as end, routers.internet() as world:

        def start(name: str, host: Any, *words: str) -> Started:
            started = Started(host, directory / name, *words)
            end.callback(started.stop)
            return started

        run = ("--manifest", str(write_run(directory)))
        peer = ("peer", *run, "--stage", "0", "--device", "cpu")
        first = start("first", world.host(), *peer)
        known = ("--bootstrap", first.until("listening")["dht"][0])
        second = start("second", world.host(), *peer, *known)
        second.until("synced")
        start("trainer", world.host(), "trainer", *run, *known)
        second.until("committed")
        homes = [start(f"home{number}", host, *peer, *known) for number, host in enumerate(homes_of(world, nat))]
        names = {home.until("listening")["peer"]: home for home in homes}
        counted_s = []
        for name, home in names.items():
            took_part = home.until("committed", lambda event, name=name: name in dict(event["contributions"]))
            counted_s.append(took_part["t"] - home.began)
        direct = pairs_direct(names, until=time.monotonic() + PUNCH_WITHIN_S)
        punched_s = [event["seconds"] for home in homes for event in home.so_far("punched")]
    pairs = len(homes) * (len(homes) - 1) // 2
    return {
        "nat": nat,
        "direct": direct,
        "relayed": pairs - direct,
        "seconds_to_count": round(max(counted_s), 1),
        "seconds_to_punch": round(max(punched_s), 2) if punched_s else None,
    }


def pairs_direct(names: dict[str, Started], *, until: float) -> int:
    """How many pairs have a connection of their own, once all have or the time is over."""
    while True:
        direct = 0
        for (one, at_one), (other, at_other) in itertools.combinations(names.items(), 2):
            direct += _direct(at_one, other) and _direct(at_other, one)
        if direct == len(names) * (len(names) - 1) // 2 or time.monotonic() > until:
            return direct
        time.sleep(0.2)


def _direct(home: Started, peer: str) -> bool:
    events = [event for event in home.so_far("punched", "hole_lost") if event["peer"] == peer]
    return bool(events) and events[-1]["event"] == "punched"


def run_command(words: list[str]) -> None:
    """`swarmnet WORDS` in this process; a trainer takes its time."""
    from swarmnet.cli import main as swarmnet
    from swarmnet.pipeline import router

    if words[0] == "trainer":
        quickly = router.least_time

        def slowly(candidates: Any) -> Any:
            time.sleep(PAUSE_S)
            return quickly(candidates)

        router.least_time = slowly
    sys.argv = ["swarmnet", *words]
    swarmnet()


def main() -> int:
    """Run, print, and write JSON if asked. 1 if fewer than 95 % of the cone pairs speak directly."""
    parser = Benchmark(__doc__)
    parser.add_argument("--nats", nargs="+", choices=NATS, default=NATS, metavar="KIND")
    arguments = parser.asked()
    if reason := routers.why_not():
        parser.error(reason)
    rows = []
    for nat in arguments.nats:
        with tempfile.TemporaryDirectory() as directory:
            rows.append(scene(nat, Path(directory)))
        print(
            "{nat:12} direct {direct} relayed {relayed}  counts after {seconds_to_count} s, a hole takes "
            "{seconds_to_punch} s".format(**rows[-1]),
            file=sys.stderr,
        )
    cones = [row for row in rows if row["nat"] in CONES]
    direct = sum(row["direct"] for row in cones)
    share = direct / max(sum(row["direct"] + row["relayed"] for row in cones), 1)
    found = {"rows": rows, "cone_pairs_direct": round(share, 4), "load": os.getloadavg()[0]}
    print(json.dumps(found, indent=1))
    write(arguments.json, found)
    return 0 if share >= 0.95 or not cones else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        run_command(sys.argv[2:])
    else:
        sys.exit(main())
