"""`swarmnet simulate`: whole fleets, whose sums and weights are those of one process, or the run would end at once."""

from __future__ import annotations

import json
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swarmnet.cli.frame import run
from swarmnet.cli.simulate import _until_interrupted, text_of
from swarmnet.config.check import layer
from swarmnet.simulate.fleet import Fleet, calm, read
from swarmnet.simulate.fleet_run import FleetSimulation
from swarmnet.testing.fault import KINDS, kill_every

ROOT = Path(__file__).parents[2]
SMALL = ["--peers", "9", "--stages", "3", "--microbatches", "18", "--steps", "4"]
FIELDS = {
    *("peers", "stages", "regions", "microbatches", "steps", "speed", "slots", "seed", "virtual_s", "wall_s"),
    *("steps_done", "steps_s", "step_s", "of_a_step", "throughput", "optimal", "of_optimal", "utilisation"),
    *("executed", "repairs", "moves", "faults", "alive", "control_bytes_per_peer_s", "control_bytes", "messages"),
    *("losses", "interrupted", "abstract"),
}


def small(**run: object) -> Fleet:
    said = {"stages": 3, "microbatches": 18, "steps": 5} | run
    return read(None, [layer("--peers", ("peers",), 9), *(layer(name, ("run", name), of) for name, of in said.items())])


def test_the_page_shows_what_this_version_prints(capsys) -> None:
    page = (ROOT / "docs/simulate.md").read_text(encoding="utf-8")
    shown = page.split("With `--no-twin`:\n\n```\n")[1].split("```")[0]
    assert run(["simulate", str(ROOT / "docs/fleet.toml"), "--no-twin"]) == 0
    printed, here = capsys.readouterr().out, r"\(\d+(\.\d+)? s here\)"
    assert re.sub(here, "", printed) == re.sub(here, "", shown)


def test_a_fleet_under_churn_has_the_losses_of_one_process(tmp_path: Path) -> None:
    trace = tmp_path / "trace.toml"
    trace.write_text(
        '[[kill]]\nstage = 0\nat_s = 3.0\nback_s = 2.0\n[[kill]]\npeer = "s1-r1"\nstep = 1\nback = false\n'
        "[[join]]\nstage = 1\nat_s = 6.0\n[[drain]]\nstage = 2\nstep = 2\n[[stop]]\nstage = 0\nstep = 2\nfor_s = 1.0\n"
        '[[slow]]\npeers = ["s2"]\nat_s = 8.0\nfor_s = 2.0\nlatency_s = 0.2\nbytes_per_s = 1e6\n'
        '[[partition]]\nat_s = 11.0\nfor_s = 1.0\nbetween = [["s0-r0"], ["s0-r1"]]\n'
        '[[one_way_cut]]\nat_s = 12.5\nfor_s = 1.0\nsenders = ["s1-r0"]\nreceivers = ["s2"]\n',
        encoding="utf-8",
    )
    words = [*SMALL, "--steps", "6", "--kill-every", "0", "--chaos", str(trace), "--json", str(tmp_path / "found.json")]
    assert run(["simulate", *words]) == 0
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert found["faults"] == dict.fromkeys(KINDS.keys() - {"kill_rank", "disk_full", "clock_change"}, 1) | {"kill": 2}
    assert found["steps_done"] == 6 and len(found["losses"]) == 6 and found["alive"] == 8
    assert found["executed"] == 6 * 18 * 3 + found["repairs"] and 0 < found["goodput"] < 1.1
    # Without faults it is the same fleet, and its curve.
    alone = FleetSimulation(calm(small(steps=6)))
    assert alone.run()
    assert alone.report()["losses"] == found["losses"] and not alone.report()["faults"]


def test_the_same_seed_gives_the_same_figures() -> None:
    def figures(seed: int) -> dict[str, object]:
        simulation = FleetSimulation(small(steps=3, seed=seed))
        assert simulation.run()
        return {name: value for name, value in simulation.report().items() if name != "wall_s"}

    assert figures(1) == figures(1) != figures(2)


def test_abstract_or_not_a_run_has_the_losses_of_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    def found(abstract: str) -> dict[str, Any]:
        simulation = FleetSimulation(small(steps=3, abstract=abstract))
        assert simulation.run()
        return simulation.report()

    whole, cheap = found("off"), found("on")
    assert cheap["losses"] == whole["losses"] and cheap["abstract"] and not whole["abstract"]
    assert "Part" in whole["messages"] and "Part" not in cheap["messages"], "nobody streams a sum"
    assert "abstract     rounds meet" in text_of(cheap) and "abstract" not in text_of(whole)


def test_an_abstract_fleet_loses_nothing_to_kills() -> None:
    simulation = FleetSimulation(replace(small(steps=4, abstract="on"), faults=kill_every(4.0)))
    assert simulation.run() and simulation.done["kill"] > 1


def test_json_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    words = ["--json", str(tmp_path / "found.json"), "--plot", str(tmp_path / "found.png"), "--no-twin"]
    assert run(["simulate", *SMALL, *words]) == 0
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert found.keys() == FIELDS and (tmp_path / "found.png").read_bytes()[1:4] == b"PNG"
    assert sum(found["of_a_step"].values()) == pytest.approx(1) and 0 < found["of_optimal"] < 1
    assert text_of(found) + "\n" == capsys.readouterr().out


def test_lines_and_distance_cost_time() -> None:
    def step_s(*more: object) -> float:
        simulation = FleetSimulation(calm(read(None, [layer("--set", *each) for each in more])))  # type: ignore[misc]
        assert simulation.run()
        return float(simulation.report()["step_s"])

    small_run = [(("peers",), 6), (("run", "stages"), 2), (("run", "microbatches"), 12), (("run", "steps"), 3)]
    usual = step_s(*small_run)
    assert step_s(*small_run, (("regions", "far_ms"), [1000.0])) > usual + 2
    assert step_s(*small_run, (("machine", "up_mbit"), [20.0])) > usual + 2
    assert step_s(*small_run, (("run", "activation_bytes"), 2e7)) > usual + 2


def test_ctrl_c_says_what_there_is() -> None:
    simulation = FleetSimulation(small(steps=1000))
    pressed: list[str] = []

    def press(peer: str, event: str, fields: dict[str, object]) -> None:
        if event == "applied" and fields["version"] == 2 and not pressed:
            pressed.append(peer)
            os.kill(os.getpid(), signal.SIGINT)

    simulation.swarm.hooks.append(press)
    before = signal.getsignal(signal.SIGINT)
    assert _until_interrupted(simulation) and signal.getsignal(signal.SIGINT) is before
    assert 1 <= simulation.report()["steps_done"] < 10


def test_it_ends_when_its_time_is_over() -> None:
    simulation = FleetSimulation(small(steps=1000, seconds=8.0))
    assert not simulation.run()
    found = simulation.report()
    assert 8 <= found["virtual_s"] < 9 and found["repairs"] >= 0
