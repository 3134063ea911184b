"""The files of docs/deploy say what the command line takes; with --long the compose file's commands run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from swarmnet.cli.frame import swarmnet
from swarmnet.telemetry.events import EventReader

yaml = pytest.importorskip("yaml", reason="comes with transformers")

DEPLOY = Path(__file__).parents[2] / "docs" / "deploy"
BIN = Path(sys.executable).parent


def services() -> dict[str, dict[str, Any]]:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]


def commands() -> list[list[str]]:
    """What is typed after `swarmnet`."""
    found = []
    for service in services().values():
        words = service["command"]
        text = words[-1].split() if words[0] == "sh" else words
        found.append(text[text.index("swarmnet") + 1 :])
    unit = (DEPLOY / "swarmnet.service").read_text()
    (line,) = (line for line in unit.splitlines() if line.startswith("ExecStart="))
    return [*found, line.replace("$SWARM_LINK", "swarm:x@/ip4/203.0.113.7/tcp/31337").split()[1:]]


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_command_is_one_that_the_command_line_takes(words: list[str]) -> None:
    context = swarmnet.make_context("swarmnet", list(words))
    name, command, rest = swarmnet.resolve_command(context, [*words])
    assert command is not None and command.make_context(name, rest, parent=context).args == []


def test_the_unit_is_a_unit(tmp_path: Path) -> None:
    if not (verify := shutil.which("systemd-analyze")):
        pytest.skip("needs systemd-analyze")
    unit = tmp_path / "swarmnet.service"
    text = (DEPLOY / "swarmnet.service").read_text()
    unit.write_text(text.replace("/opt/swarmnet/bin/swarmnet", sys.executable))
    told = subprocess.run([verify, "verify", str(unit)], capture_output=True, text=True, timeout=60, check=False)
    assert told.returncode == 0 and "swarmnet.service" not in told.stderr, told.stderr


def test_who_waits_for_the_bootstrap_node_takes_its_last_address(tmp_path: Path) -> None:
    events = tmp_path / "bootstrap.jsonl"
    said = [
        {"t": 1.0, "event": "listening", "dht": [f"/ip4/10.0.0.{n}/tcp/31337/p2p/Qm{n}"], "peer": "x"} for n in (1, 2)
    ]
    events.write_text("".join(json.dumps(each) + "\n" for each in [*said, {"t": 2.0, "event": "traffic"}]))
    words = [str(DEPLOY / "by-bootstrap"), str(events), "echo", "peer", "--stage", "0"]
    told = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True)
    assert told.stdout == "peer --stage 0 --bootstrap /ip4/10.0.0.2/tcp/31337/p2p/Qm2\n"


def test_the_shell_completes_commands_and_flags() -> None:
    for words, at, found in (("swarmnet pl", 1, "plain,plan"), ("swarmnet join --dev", 2, "plain,--device")):
        asked = {"COMP_WORDS": words, "COMP_CWORD": str(at), "_SWARMNET_COMPLETE": "bash_complete"}
        command = [sys.executable, "-P", "-c", "from swarmnet.cli.frame import run; run()"]
        told = subprocess.run(command, env=os.environ | asked, capture_output=True, text=True, timeout=60, check=False)
        assert told.stdout.split() == [found]


@pytest.mark.long
def test_the_composed_swarm_trains(tmp_path: Path) -> None:
    shared, running = tmp_path / "shared", []
    shared.mkdir()
    path = f"{DEPLOY}{os.pathsep}{BIN}{os.pathsep}{os.environ['PATH']}"
    settings = {"PATH": path, "SWARMNET_HOST": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    try:
        for name, service in services().items():
            words = [word.replace("/shared", str(shared)) for word in service["command"]]
            env = os.environ | settings | {"SWARMNET_DIR": str(tmp_path / name)}
            if name != "bootstrap":
                env["SWARMNET_EVENTS"] = str(tmp_path / f"{name}.jsonl")
            with (tmp_path / f"{name}.txt").open("w") as log:
                process = subprocess.Popen(words, env=env, stdout=log, stderr=log)
            if name == "init":
                assert process.wait(120) == 0, (tmp_path / "init.txt").read_text()
            else:
                running.append(process)
        deadline = time.monotonic() + 240
        last = EventReader(tmp_path / "stage-2.jsonl")
        while not any(event["event"] == "applied" for event in last.read()):
            assert time.monotonic() < deadline and all(each.poll() is None for each in running)
            time.sleep(0.2)  # a poll of a file: there is no event to wait for
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait()
