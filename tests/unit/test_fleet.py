"""Fleet files: what is drawn from them, and one line for what cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmnet.cli.frame import BAD_INPUT, run
from swarmnet.config.check import layer
from swarmnet.config.fleet import read_fleet
from swarmnet.errors import UsageError
from swarmnet.simulate.fleet import Fleet, FleetFile, read
from swarmnet.testing.fault import Join, Kill, stage_of

ROOT = Path(__file__).parents[2]


def fleet(text: str, tmp_path: Path, **flags: object) -> Fleet:
    path = tmp_path / "fleet.toml"
    path.write_text(text, encoding="utf-8")
    return read(path, [layer(f"--{name}", ("run", name), value) for name, value in flags.items()])


def rates(found: Fleet) -> list[float]:
    speeds = [0.0] * found.plan.stages
    for name, machine in found.machines.items():
        speeds[stage_of(name) or 0] += machine.speed
    return speeds


def test_stages_are_equally_fast_and_nobody_is_left_out(tmp_path: Path) -> None:
    found = fleet("peers = 60\n[run]\nstages = 5\n[machine]\nspeed = [0.2, 4.0]", tmp_path)
    assert len(found.machines) == 60 and max(rates(found)) < 1.2 * min(rates(found))
    assert all(0.2 <= machine.speed <= 4.0 for machine in found.machines.values())
    assert [(stage_of(name),) for name in found.machines] == list(found.plan.served or ())


def test_a_stage_has_a_replica_before_another_has_two(tmp_path: Path) -> None:
    assert len(fleet("peers = 7\n[run]\nstages = 7\n[machine]\nspeed = [0.01, 100]", tmp_path).machines) == 7


def test_kinds_are_as_described_and_the_rest_is_drawn(tmp_path: Path) -> None:
    text = """
        peers = 40
        [machine]
        speed = [1.0]
        up_mbit = [80]
        [[machines]]
        count = 10
        tflops = 240.0
        gpu_gib = 24.0
        mbit = 160.0
        region = "b"
        [regions]
        names = ["a", "b"]
        rtt_ms = [[6, 90], [90, 12]]
    """
    found = fleet(text, tmp_path)
    large = [machine for machine in found.machines.values() if machine.speed == pytest.approx(8)]
    assert len(large) == 10 and {machine.region for machine in large} == {1}
    assert {(each.up_bytes_per_s, each.down_bytes_per_s, each.memory_bytes) for each in large} == {(2e7, 2e7, 24 << 30)}
    others = [machine for machine in found.machines.values() if machine not in large]
    assert len(others) == 30 and all(machine.up_bytes_per_s == pytest.approx(1e7) for machine in others)
    assert found.latencies_s == ((0.002, 0.03), (0.03, 0.004))


def test_machines_alone_are_all_peers_and_enough_memory_takes_every_microbatch(tmp_path: Path) -> None:
    found = fleet("[run]\nmicrobatches = 7\n[[machines]]\ncount = 5\ngpus = 2", tmp_path)
    assert len(found.machines) == 5
    assert {(machine.speed, machine.slots) for machine in found.machines.values()} == {(2.0, 7)}


def test_plan_and_simulate_read_one_file() -> None:
    """Machines that `simulate` draws are one kind to `plan`, in the middle of what is drawn."""
    found, members = read(ROOT / "docs/fleet.toml"), read_fleet(ROOT / "docs/fleet.toml", FleetFile).members("")
    lab, drawn = members.machines
    assert members.count == len(found.machines) == 24 and (lab.name, lab.count, drawn.count) == ("lab", 3, 21)
    assert drawn.flops_per_s == pytest.approx(30e12 * 0.75**0.5) and drawn.mbit == 100
    assert drawn.device_bytes == pytest.approx((8e9 * 24e9) ** 0.5, rel=1e-3)
    assert members.regions.seconds("eu", "us") == 0.09
    assert sum(1 for machine in found.machines.values() if machine.speed == 4) == 3


def test_the_seed_draws_everything(tmp_path: Path) -> None:
    text = "[churn]\nlife_s = 30"
    assert fleet(text, tmp_path) == fleet(text, tmp_path)
    assert fleet(text, tmp_path, seed=2).machines != fleet(text, tmp_path).machines
    assert fleet(text, tmp_path).faults and fleet(text, tmp_path, seed=2).faults != fleet(text, tmp_path).faults


def test_lives_end_as_often_as_they_should(tmp_path: Path) -> None:
    text = "peers = 50\n[run]\nseconds = 1000\n[churn]\nlife_s = 100\nback_s = 1"
    kills = [each for each in fleet(text, tmp_path).faults if isinstance(each, Kill)]
    assert 400 < len(kills) < 600 and all(0 <= (each.at_s or 0) < 1000 for each in kills)


def test_a_trace_is_a_chaos_file(tmp_path: Path) -> None:
    trace = tmp_path / "trace.toml"
    trace.write_text('[[kill]]\npeer = "s1-r0"\nat_s = 5.0\n[[join]]\nat_s = 9.0\n', encoding="utf-8")
    kinds = [type(each) for each in fleet(f'[churn]\nchaos = "{trace}"', tmp_path).faults]
    assert kinds == [Kill, Join]


def test_all_bytes_are_divided_alike(tmp_path: Path) -> None:
    found = fleet("[run]\nactivation_bytes = 2.56e6\nparameter_bytes = 4e6\nstate_bytes = 8e6", tmp_path)
    assert found.scale == 10_000 and found.plan.boundary_elements * 4 == 256
    assert found.plan.padding * 8 == 400 and found.plan.state_bytes == 800


def test_a_fault_that_needs_processes_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "trace.toml"
    trace.write_text('[[kill]]\nstage = 1\nstep = 2\nphase = "backward"\n', encoding="utf-8")
    with pytest.raises(UsageError, match="a phase needs `swarmnet local --chaos`"):
        fleet(f'[churn]\nchaos = "{trace}"', tmp_path)


@pytest.mark.parametrize("words", ["--plot nowhere/run.png", "--json nowhere/run.json", "--peers x", "nowhere.toml"])
def test_what_is_typed_wrong_is_said_before_the_work(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", *words.split()]) == BAD_INPUT
    assert capsys.readouterr().err.count("\n") == 1


def test_the_example_is_a_fleet() -> None:
    found = read(ROOT / "docs/fleet.toml")
    assert len(found.machines) == 24 and found.regions == ("eu", "us", "asia")
