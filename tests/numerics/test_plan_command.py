"""`swarmnet plan`: whose memory is meant, which stages have to fit together, and what it says of what it ignores."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from test_plan import GPU, RUN

from swarmnet.cli import plan as cli_plan
from swarmnet.cli.frame import run
from swarmnet.manifest.file import to_toml
from swarmnet.manifest.schema import StageSpec
from swarmnet.peer import memory_fit
from swarmnet.peer.memory_fit import judge, slots_that_fit
from swarmnet.plan import measure as plan_measure
from swarmnet.plan.memory import MIB, Setup
from swarmnet.ranks.layout import MeshLayout
from swarmnet.stage.passes import MemoryPolicy

pytestmark = pytest.mark.usefixtures("one_thread")

Plan = Callable[[str], tuple[int, str, str]]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Plan:
    """(exit code, output, errors) of `swarmnet plan`, on a machine without a GPU."""
    monkeypatch.setattr(cli_plan, "_gpus_here", lambda: 0)
    (tmp_path / "run.toml").write_text(to_toml(RUN), encoding="utf-8")

    def call(line: str) -> tuple[int, str, str]:
        code = run(["plan", f"{tmp_path}/run.toml", *line.split()])
        return code, *capsys.readouterr()

    return call


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--memory 2GiB", "of the machine's 2.00 GiB"),
        ("--ranks 2 --memory 2GiB", "of the machine's 2.00 GiB"),
        ("--device cpu --memory 2GiB", "of the machine's 2.00 GiB"),
        ("--gpus 1 --memory 2GiB", "of each device's 2.00 GiB"),
        ("--device cuda --memory 2GiB", "of each device's 2.00 GiB"),
        ("--gpus 1 --memory 2GiB --compile", "what the compiler takes and saves is not modelled"),
    ],
)
def test_whose_memory_it_is(line: str, words: str, plan: Plan) -> None:
    code, out, _ = plan(f"--slots 4 --stage 1 {line}")
    assert code == 0 and words in out and ("not modelled" in out) == ("--compile" in line)


def test_what_is_here_is_what_the_container_leaves(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_fit, "available_memory", lambda: 300 * MIB)
    code, out, _ = plan("--stage 1 --slots 4")
    assert code == 1 and "stage 1 does not fit" in out and "of the machine, and may use 300 MiB" in out


def test_stages_of_one_peer_have_to_fit_together(plan: Plan) -> None:
    setup = Setup(RUN.specs, RUN.wire, GPU)
    alone, both = (max(judge(setup, stages, None).need for stages in sets) for sets in (([1], [2]), ([1, 2],)))
    room = f"--slots 4 --gpus 1 --memory {both - 1}B"
    code, out, err = plan(f"--stage 1,2 {room}")
    assert code == 1 and not err
    assert "stage 1 fits" in out and "stage 2 fits" in out and "one peer with stages 1,2 does not fit" in out
    assert ": 1 B are missing" in out and "what takes less: fewer --slots" in out
    code, out, err = plan(f"--stage 1,2 {room} --json")
    found = json.loads(out)
    assert code == 1 and [each["fits"] for each in found["stages"]] == [True, True]
    assert max(each["need"] for each in found["stages"]) == alone
    assert {"stages": [1, 2], "fits": False, "need": both, "room": both - 1, "missing": 1}.items() <= found[
        "peer"
    ].items()
    code, out, err = plan(f"--slots 4 --stage 1,2 --gpus 1 --memory {both}B")
    assert code == 0 and "one peer with stages 1,2 fits" in out
    for every in ("", "--stage all "):
        code, out, err = plan(every + room)
        assert code == 0 and "each is for a peer of its own: --stage 0,1 plans one peer with both" in out
        assert "one peer with stages" not in out and json.loads(plan(f"{every}{room} --json")[1])["peer"] is None


def test_the_stages_of_the_config_are_planned(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "peer.toml").write_text("stages = [1, 2]\n", encoding="utf-8")

    def stages(line: str) -> list[int]:
        return [each["stage"] for each in json.loads(plan(f"--gpus 1 --memory 2GiB --json {line}")[1])["stages"]]

    config = f"--config {tmp_path}/peer.toml"
    assert stages(config) == [1, 2]
    assert stages(f"{config} --stage 0") == [0]
    assert stages(f"{config} --stage all") == stages("") == [0, 1, 2]
    monkeypatch.setenv("SWARMNET_STAGE", "2")
    assert stages(config) == [2]


def test_slots_are_chosen_as_the_peer_chooses_them(plan: Plan) -> None:
    for layout, line, share in ((GPU, "--gpus 1", 1), (MeshLayout(), "--device cpu", 2)):
        setup = Setup(RUN.specs, RUN.wire, layout, output_cache_bytes=MIB, audited=RUN.audited)
        room = share * judge(replace(setup, slots=5), [1, 2], None).need
        code, out, _ = plan(f"--stage 1,2 --slots 0 {line} --memory {room}B --set caps.output_cache_bytes={MIB} --json")
        assert code == 0 and {each["in_flight"] for each in json.loads(out)["stages"]} == {5}
        assert slots_that_fit(replace(setup, slots=0), [1, 2], room // share) == 5
    assert "leaves half of the machine's free memory" in plan("--slots 0 --device cpu --memory 8GiB --stage 1")[1]


def test_what_is_ignored_is_said(plan: Plan) -> None:
    code, _, err = plan("--gpus 1 --memory 2GiB --stage 1 --shard zero3 --sequence-parallel")
    assert code == 0
    assert err == "ignored: --shard zero3 and --sequence-parallel (one rank shares its stages with no other)\n"
    assert plan("--gpus 1 --memory 2GiB --stage 1")[2] == ""
    assert plan("--gpus 2 --memory 2GiB --stage 1 --shard zero3")[2] == ""


def test_with_a_line_it_says_where_the_time_goes(plan: Plan) -> None:
    code, out, err = plan("--stage 1 --gpus 1 --memory 80GiB --mbit 200 --rtt 80 --replicas 3")
    assert code == 0 and not err
    assert "a step on 200 Mbit/s each way, 80 ms, 30 TFLOP/s (cuda), 3 replicas: " in out and "tokens a day" in out
    assert "what limits it most: the " in out and "ZeRO-3" in out
    found = json.loads(plan("--stage 1 --gpus 1 --memory 80GiB --mbit 200 --rtt 80 --replicas 3 --json")[1])["time"]
    assert sum(found["terms_s"].values()) == pytest.approx(found["step_s"])
    assert found["site"]["round_trip_s"] == 0.08 and found["load"]["replicas"] == 3


FLEET = """
[[machines]]
name = "desk"
count = 4
device = "cpu"
host_gib = 4.0
mbit = 100.0

[[machines]]
name = "small"
count = 2
device = "cpu"
host_gib = 0.1
"""


def test_a_fleet_is_given_to_stages_and_nothing_where_it_does_not_fit(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(FLEET, encoding="utf-8")
    code, out, err = plan(f"--fleet {file}")
    assert code == 0 and not err
    assert "4 x desk" in out and "2 x small" in out and "a step on fleet.toml: 4 x desk, 2 x small" in out
    found = json.loads(plan(f"--fleet {file} --json")[1])
    assert [each[1] for each in found["time"]["counts"]] == [0, 0, 0], "small machines hold nothing"
    assert sum(each[0] for each in found["time"]["counts"]) == 4
    assert all(fit["slots"] >= 1 for fit in (place[0] for place in found["fits"]))
    file.write_text(FLEET.replace("host_gib = 4.0", "host_gib = 0.1"), encoding="utf-8")
    code, out, _ = plan(f"--fleet {file}")
    assert code == 1 and "of a device for stage 0, which fits no machine" in out


def test_a_search_proposes_the_best_few_that_fit(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(FLEET, encoding="utf-8")
    code, out, err = plan(f"--fleet {file} --search")
    assert code == 0 and not err
    assert "limited by" in out and "2 x small do nothing: no stage fits them" in out
    found = json.loads(plan(f"--fleet {file} --search --json")[1])
    assert 1 <= len(found["compared"]) <= 5 and sum(each["chosen"] for each in found["compared"]) == 1
    for each in found["compared"]:
        for counts, fits in zip(each["counts"], each["fits"], strict=True):
            assert all(not n or fit["slots"] for n, fit in zip(counts, fits, strict=True))


BOTH = """
[[machines]]
name = "home"
count = 3
gpu_gib = 2.2
mbit = 50.0

[[machines]]
name = "lab"
count = 2
gpu_gib = 8.0
mbit = 200.0
tflops = 60.0
"""


@pytest.mark.parametrize("sync", ["exact", "overlap", "local"])
def test_init_and_plan_say_one_figure_of_a_fleet(
    sync: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Memory leaves the home machines fewer slots than keep them busy."""
    monkeypatch.chdir(tmp_path)
    Path("fleet.toml").write_text(BOTH, encoding="utf-8")
    size = "--set model.hidden_size=256 --set model.num_layers=8 --set training.sequence_length=1024"
    said = f"--steps 2000 --sync {sync} --set training.microbatches=32 {size}"
    assert run(f"init run.toml --data corpus:small --fleet fleet.toml --json {said}".split()) == 0
    asked = json.loads(capsys.readouterr().out)
    (best,) = (each for each in asked["compared"] if each["chosen"])
    assert run(["plan", "run.toml", "--fleet", "fleet.toml", "--json"]) == 0
    step = json.loads(capsys.readouterr().out)["time"]
    assert best["averaging.sync"] == sync and best["way"]["slots"] < step["slots_enough"]
    assert (step["step_s"], step["way"]) == (pytest.approx(best["cost"]["step_s"]), best["way"])
    assert (step["counts"], step["stages_per_peer"]) == (best["counts"], best["stages_per_peer"])
    slots = {tomllib.loads(file.read_text("utf-8"))["slots"] for file in Path().glob("run.*.peer.toml")}
    assert min(slots) == step["way"]["slots"], "what peers are told to take"


def test_slots_of_a_step_are_those_that_fit(plan: Plan) -> None:
    setup = replace(Setup(RUN.specs, RUN.wire, GPU), slots=0, output_cache_bytes=MIB, audited=RUN.audited)
    room = judge(replace(setup, slots=2), [1], None).need
    line = f"--stage 1 --gpus 1 --memory {room}B --set caps.output_cache_bytes={MIB} --mbit 200 --rtt 80"
    found = json.loads(plan(f"{line} --json")[1])
    assert found["stages"][0]["in_flight"] == found["time"]["way"]["slots"] == 2 < found["time"]["slots_enough"]
    assert "slots: 2, as many as fit; " in plan(line)[1]


def test_machines_that_do_nothing_are_told_what_they_lack(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(FLEET, encoding="utf-8")
    for line in ("", "--search"):
        out = plan(f"--fleet {file} {line}")[1]
        assert (
            "2 x small do nothing: no stage fits them; the smallest needs " in out
            and " of 102 MiB; what takes less: " in out
        )


def test_what_differs_between_stages_is_a_layer_an_embedding_or_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(spec: StageSpec, device: str, memory: MemoryPolicy) -> tuple[float, float]:
        first, last = spec.stage == 0, spec.stage == spec.cut.stages - 1
        return 0.5 + 2.0 * spec.model.num_layers + 3.0 * first + 7.0 * last, 1e-9

    monkeypatch.setattr(plan_measure, "_run", timed)
    times = plan_measure.measure(RUN.of_stage(0), device="cpu", memory=MemoryPolicy(), progress=lambda words: None)
    assert (times.layer_s, times.embedding_s, times.head_s, times.call_s) == pytest.approx((2.0, 3.0, 7.0, 0.5))
    assert times.stages_s((1, 2)) == pytest.approx([0.5 + 2 + 3, 0.5 + 4 + 7]) and times.update_s == 1e-9


def test_what_was_measured_is_kept_and_used(plan: Plan, tmp_path: Path) -> None:
    code, out, err = plan("--measure --device cpu")
    assert code == 0 and "measuring one layer" in err and "ms a layer" in out and "slowest stage of the cut [" in out
    kept = json.loads((tmp_path / "run.measured.json").read_text("utf-8"))
    assert kept["times"]["layer_s"] > 0
    assert "by measured layer times" in plan("--stage 1 --device cpu --mbit 100")[1]
    assert json.loads(plan("--stage 1 --device cpu --mbit 100 --json")[1])["time"]["measured"]
    other = RUN.model_copy(update={"training": RUN.training.model_copy(update={"microbatch_size": 1})})
    (tmp_path / "run.toml").write_text(to_toml(other), encoding="utf-8")
    code, out, err = plan("--stage 1 --device cpu --mbit 100")
    assert code == 0 and "is of another model or microbatch" in err and "by FLOPs" in out
    (tmp_path / "run.measured.json").write_text("{}", encoding="utf-8")
    code, _, err = plan("--stage 1 --device cpu --mbit 100")
    assert code == 2 and "measure again with --measure" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--search", "--search needs machines: add --fleet FILE, or --mbit N"),
        ("--fleet none.toml", "none.toml: no such file"),
        ("--fleet fleet.toml --mbit 10", "--mbit and --fleet exclude each other"),
        ("--fleet fleet.toml --memory 4GiB", "--memory and --fleet exclude each other"),
        ("--fleet fleet.toml --stage 1", "--stage and --fleet exclude each other"),
        ("--measure --ranks 2", "--measure times one device that is here"),
        ("--rtt 80", "--rtt describes members: add --mbit, such as --mbit 200"),
        ("--replicas 3", "--replicas describes members: add --mbit"),
        ("--mbit 0", "--mbit 0: must be a number above 0"),
        ("--mbit fast", "--mbit fast: must be a number above 0"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(
    line: str, words: str, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fleet.toml").write_text(FLEET, encoding="utf-8")
    code, _, err = plan(line)
    assert code == 2 and words in err and err.count("\n") == 1
