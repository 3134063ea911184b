"""What the doctor says of numbers: each problem has its advice, and only problems change the exit code."""

from __future__ import annotations

import json
import string
from pathlib import Path

import pytest

from swarmnet.cli.frame import run
from swarmnet.ids import PeerId
from swarmnet.peer import checkup
from swarmnet.peer.checkup import ADVICE, GIB, Row

SOUND = {"torch": "2", "grpcio": "1", "hivemind": "1"}
COULD_NOT = {"could_not": {"12D3KooWone": "no answer"}}
PORTS = (31340, 31341)

ROWS: list[tuple[Row, str, str]] = [
    (checkup.software((3, 12, 0), SOUND), "ok", ""),
    (checkup.software((3, 10, 0), SOUND), "error", "software"),
    (checkup.software((3, 12, 0), SOUND | {"torch": ""}), "error", "software"),
    (checkup.compute("CPU", 0.1, gpu_unseen=False), "ok", ""),
    (checkup.compute("CPU", 0.1, gpu_unseen=True), "warning", "gpu_unused"),
    (checkup.compute("CPU", 0.1, gpu_unseen=False, gpu_missing=True), "error", "gpu_missing"),
    (checkup.compute("CPU", 0.1, gpu_unseen=True, gpu_missing=True), "error", "gpu_unused"),
    (checkup.kernels("/usr/bin/c++"), "ok", ""),
    (checkup.kernels(None), "note", "no_compiler"),
    (checkup.memory(None, []), "ok", ""),
    (checkup.memory(8 * GIB, [24 * GIB]), "ok", ""),
    (checkup.memory(8 * GIB, [24 * GIB, 2**20]), "warning", "memory"),
    (checkup.disk("/x", 2**20), "warning", "disk"),
    (checkup.descriptors(1024), "warning", "descriptors"),
    (checkup.tasks(None), "ok", ""),
    (checkup.tasks(4096), "ok", ""),
    (checkup.tasks(50), "warning", "tasks"),
    (checkup.shared_memory(64 * 2**20), "warning", "shared"),
    (checkup.shared_memory(8 * GIB), "ok", ""),
    (checkup.listening({"--port": 80}, own=()), "error", "port_taken"),
    (checkup.listening({"--port": 80}, own=(80, 81)), "ok", ""),
    (checkup.listening({"--port": 80, "--dht-port": 82}, own=(80, 81)), "error", "port_taken"),
    (checkup.swarm("ab" * 32, 3), "ok", ""),
    (checkup.swarm("ab" * 32, 0), "warning", "nobody"),
    (checkup.clock({}, 60.0), "ok", ""),
    (checkup.clock({PeerId("a"): 0.02, PeerId("b"): 300.0, PeerId("c"): -0.01}, 60.0), "ok", ""),
    (checkup.clock({PeerId("a"): 20.0}, 60.0), "warning", "clock"),
    (checkup.clock({PeerId("a"): -200.0}, 60.0), "error", "clock"),
    (checkup.line("12D3KooWsome", 0.02, 5e7), "ok", ""),
    (checkup.line("12D3KooWsome", 0.02, 0.0), "ok", ""),
    (checkup.line("12D3KooWsome", 0.02, 1e6), "note", "slow_line"),
    (checkup.no_line("12D3KooWsome", "silent"), "note", "silent"),
    (checkup.reached({"could": ["a", "b"], "could_not": {}, "not_asked": {}}, PORTS), "ok", ""),
    (checkup.reached(COULD_NOT | {"relays": ["r"]}, PORTS), "note", "relayed"),
    (checkup.reached(COULD_NOT, PORTS), "error", "unreachable"),
    (checkup.reached({}, PORTS), "ok", ""),
    (checkup.bulk("direct", 31342, {PeerId("a")}), "ok", ""),
    (checkup.bulk("direct", 31342, ()), "note", "bulk_closed"),
    (checkup.bulk("relay", 31342, ()), "ok", ""),
    (checkup.bulk("unknown", 31342, ()), "ok", ""),
    (checkup.nat("none", how="direct"), "ok", ""),
    (checkup.nat("none", how="relay"), "note", "firewall"),
    (checkup.nat("cone", how="direct"), "ok", ""),
    (checkup.nat("cone", how="relay"), "note", "router"),
    (checkup.nat("symmetric", how="none"), "note", "symmetric"),
    (checkup.nat("carrier", how="relay"), "note", "carrier"),
    (checkup.nat("unknown", how="relay"), "ok", ""),
]


@pytest.mark.parametrize(("row", "severity", "problem"), ROWS, ids=lambda value: getattr(value, "name", None))
def test_what_is_said(row: Row, severity: str, problem: str) -> None:
    assert (row.severity, row.problem) == (severity, problem)
    assert bool(row.advice) == bool(problem) and "{" not in row.advice and "\n" not in row.advice
    assert checkup.exit_code([row]) == (severity in ("warning", "error"))
    assert json.loads(json.dumps(row.record()))["advice"] == row.advice


def test_every_advice_is_given_by_somebody_and_names_ports_only() -> None:
    elsewhere = {"unreached"}  # said by `status`
    assert {problem for _, _, problem in ROWS if problem} | elsewhere == ADVICE.keys()
    named = {name for text in ADVICE.values() for _, name, _, _ in string.Formatter().parse(text) if name}
    assert named == {"port", "dht_port", "unreachable"}


def test_a_limit_of_a_container_is_named() -> None:
    row = checkup.memory(GIB // 2, [], limit=GIB)
    assert row.words == "0.5 GiB free within a limit of 1.0 GiB" and row.problem == "memory"


def test_the_ports_to_open_are_named() -> None:
    row = checkup.reached(COULD_NOT, PORTS)
    assert "open TCP ports 31340 and 31341" in row.advice and "(no answer)" in row.words
    assert checkup.lines([row])[1].strip() == f"-> {row.advice}"


def test_the_command_looks_at_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run(["doctor", "--dir", str(tmp_path), "--device", "cpu", "--json"])
    said = json.loads(capsys.readouterr().out)
    names = [row["name"] for row in said["rows"]]
    assert names == ["software", "compute", "kernels", "memory", "disk", "descriptors", "tasks", "ports"]
    assert code == (not said["well"]) and said["rows"][1]["facts"]["tflops"] > 0
    assert run(["doctor", "nonsense"]) == 2
    assert run(["doctor", "--announce", "/ip4/203.0.113.7/tcp/31340"]) == 2
    assert "--announce needs a fixed --port" in capsys.readouterr().err
