"""The supervisor with real processes: small scripts that write the events a peer would, and meet through files."""

from __future__ import annotations

import csv
import io
import json
import os
import pwd
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from swarmnet.config import toml
from swarmnet.config.peer import PeerConfig
from swarmnet.errors import UsageError
from swarmnet.local import LocalOptions, run_local
from swarmnet.local.prepare import Prepared, choose
from swarmnet.local.prepare import prepare as real_prepare
from swarmnet.local.report import UNCOMPARED
from swarmnet.local.supervisor import Kit, Timing
from swarmnet.manifest.file import run_id
from swarmnet.ranks.launcher import ChildProcess, Launcher, LauncherLost, child_environment
from swarmnet.telemetry.events import EventReader
from swarmnet.testing.fault import KillAll
from swarmnet.testing.process_swarm import ChildSpec, reference_command, stop, swarmnet_command

STAGES, REPLICAS, STEPS, M = 3, 2, 6, 4
FAST = Timing(poll_s=0.002, restart_s=0.01, stalled_s=5.0, give_up_s=30.0, settle_s=5.0, grace_s=2.0)

# A peer: steps once every stage has reached its version. At step `hold` it waits until somebody came back.
PEER = """
import json, os, pathlib, signal, subprocess, sys, time
name, stage, events, board, mode, hold, stages, replicas, steps, M = sys.argv[1:]
stage, hold, stages, replicas, steps, M = map(int, (stage, hold, stages, replicas, steps, M))
board = pathlib.Path(board)
def emit(event, **fields):
    with open(events, "a") as file:
        file.write(json.dumps({"t": time.time(), "event": event, **fields}) + "\\n")
def until(condition):
    while not condition():
        time.sleep(0.002)
def at(stage, version):
    return board / f"at-{stage}-{version}"
def crash():
    print("out of luck", file=sys.stderr)
    sys.exit(3)
def farewell(*_):
    emit("applied", stage=stage, step=4, version=5, chain="c", lr=0.1, grad_norm=1.0)
    sys.exit(0)
def start_ranks(epoch):
    ranks = [subprocess.Popen(["sleep", "600"]) for _ in range(2)] if mode == f"ranks:{name}" else []
    if ranks:
        emit("mesh_started", stage=stage, mesh="tp2", epoch=epoch, pids=[rank.pid for rank in ranks], seconds=0.5)
    return ranks
def await_loss(ranks):
    until(lambda: any(rank.poll() is not None for rank in ranks))
    emit("rank_lost", stage=stage, rank=[rank.poll() is not None for rank in ranks].index(True), reason="killed")
    end_ranks(ranks)
def end_ranks(ranks):
    for rank in ranks:
        rank.kill()
        rank.wait()
if mode == "farewell":
    signal.signal(signal.SIGTERM, farewell)
if mode == f"crash-at-start:{name}":
    crash()
starts = len(list(board.glob(f"start-{name}-*")))
(board / f"start-{name}-{os.getpid()}").touch()
emit("listening", peer=f"id-{name}", dht=[f"/dht/{name}"], addresses=[], incarnation=os.getpid())
until(lambda: len(list(board.glob("start-s*"))) >= stages * replicas)
if mode == f"late-ranks:{name}":
    until(lambda: all(at(s, steps).exists() for s in range(stages)))
    time.sleep(1.5)
    emit("mesh_started", stage=stage, mesh="tp2", epoch=1, pids=[], seconds=1.5)
    starts = 1
version = max(v for v in range(steps + 1) if v == 0 or at(stage, v).exists()) if starts else 0
ranks = start_ranks(1)
emit("synced", stage=stage, version=version, how="snapshot" if starts else "seed", seconds=0.0, bytes=0)
at(stage, version).touch()
if starts:
    (board / "back").touch()
while version < steps:
    until(lambda: all(at(s, version).exists() for s in range(stages)))
    if version == hold and mode.startswith("ranks"):
        if ranks:
            await_loss(ranks)
            ranks = start_ranks(2)
    elif version == hold:
        until((board / "back").exists)
    if version == 2 and mode == f"crash:{name}":
        crash()
    indexes = list(range(M))
    if mode == "double" and version == 2 and stage == 1:
        indexes.append(0)
    if mode == "lose" and version == 2 and stage == 1:
        indexes.pop()
    emit("executed", stage=stage, executions=version * 2)
    emit("committed", stage=stage, step=version, loss_sum=(3.0 - 0.1 * version) * 8, num_tokens=8,
         digest=f"{stage}-{version}", contributions=[["a", indexes], ["b", []]], discarded=[])
    version += 1
    emit("applied", stage=stage, step=version - 1, version=version, chain="c", lr=0.1, grad_norm=1.0)
    at(stage, version).touch()
weights = name if mode == f"split:{name}" else f"w{stage}"
end_ranks(ranks)
final = pathlib.Path(events).parent / "snapshots" / "run" / f"stage-{stage}-step-{version}.json"
full = {"problem": "No space left on device"} if mode == f"full-disk:{stage}" else {}
if not full:
    final.parent.mkdir(parents=True, exist_ok=True)
    final.touch()
emit("finished", stage=stage, version=version, weights_sha256=weights, path=str(final), **full)
signal.pause()
"""
TRAINER = """
import json, pathlib, sys, time
events, board, mode, stages, steps = sys.argv[1:]
with open(events, "a") as file:
    file.write(json.dumps({"t": 0, "event": "listening", "peer": "id-t", "dht": [], "addresses": []}) + "\\n")
    file.write(json.dumps({"t": 0, "event": "evaluated", "step": 0, "loss": 3.1, "num_tokens": 8}) + "\\n")
while not all((pathlib.Path(board) / f"at-{s}-{steps}").exists() for s in range(int(stages))):
    time.sleep(0.002)
"""
REFERENCE = """
import json, sys
events, slope = sys.argv[1:]
with open(events, "a") as file:
    for step in range(6):
        loss = (3.0 - float(slope) * step) * 8 / 8
        file.write(json.dumps({"t": 0, "event": "reference_step", "step": step, "loss": loss, "tokens": 8}) + "\\n")
"""


def kit(
    board: Path,
    *,
    mode: str = "",
    hold: int = -1,
    replicas: int = REPLICAS,
    slope: float = 0.1,
    console: Console | None = None,
    timing: Timing = FAST,
) -> Kit:
    board.mkdir(parents=True)

    def child(spec: ChildSpec) -> list[str]:
        numbers = [str(value) for value in (STAGES, replicas, STEPS, M)]
        python = ["-I", "-S", "-c"]
        stages = spec.config.stages
        if not stages:
            return [*python, TRAINER, str(spec.events), str(board), mode, str(STAGES), str(STEPS)]
        assert spec.config.bootstrap or (spec.name == "s0-r0" and not spec.events.exists())
        return [*python, PEER, spec.name, str(stages[0]), str(spec.events), str(board), mode, str(hold), *numbers]

    def reference(spec: ChildSpec) -> list[str]:
        return ["-I", "-S", "-c", REFERENCE, str(spec.events), str(slope)]

    def prepare(options: LocalOptions, directory: Path) -> Prepared:
        manifest = choose(options)
        return Prepared(manifest, run_id(manifest), directory / "run.toml")

    return Kit(
        child=child,
        reference=reference,
        launcher=lambda: Launcher(()),
        prepare=prepare,
        timing=timing,
        console=console or Console(file=io.StringIO(), width=500),
    )


def options(tmp_path: Path, **changes: object) -> LocalOptions:
    base: dict[str, object] = {
        "stages": STAGES,
        "replicas": REPLICAS,
        "steps": STEPS,
        "out": tmp_path / "out",
        "set": (f"training.microbatches={M}",),
    }
    return LocalOptions(**(base | changes))  # type: ignore[arg-type]


def said(kit: Kit) -> str:
    assert kit.console is not None and isinstance(kit.console.file, io.StringIO)
    return kit.console.file.getvalue()


def summary(tmp_path: Path) -> dict[str, object]:
    return json.loads((tmp_path / "out" / "summary.json").read_text())


def test_an_undisturbed_run_leaves_its_files_and_needs_no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    tools = kit(tmp_path / "board")
    assert run_local(options(tmp_path, verify=True), tools) == 0
    found = summary(tmp_path)
    assert found["steps"] == STEPS and found["final_loss"] == (3.0 - 0.1 * 5) * 8 / 8
    assert (found["lost"], found["doubled"], found["discarded"], found["kills"], found["postponed_kills"]) == (0,) * 5
    assert found["reference_max_difference"] == 0.0 and found["reference_bit_equal"] is True
    assert (found["eval_step"], found["eval_loss"]) == (0, 3.1) and found["ok"] is True
    assert {"run_id", "seed", "seconds", "tokens_per_second", "reroutes", "executions_per_index"} <= found.keys()
    with (tmp_path / "out" / "loss.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(STEPS))
    assert [float(row["loss"]) for row in rows] == [(3.0 - 0.1 * step) * 8 / 8 for step in range(STEPS)]
    assert {row["tokens"] for row in rows} == {"8"}
    merged = [json.loads(line) for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines()]
    assert sum(record["event"] == "committed" for record in merged) == STAGES * REPLICAS * STEPS
    assert {record["name"] for record in merged} == {
        "local",
        "trainer-0",
        *(f"s{stage}-r{number}" for stage in range(STAGES) for number in range(REPLICAS)),
    }
    assert "bit-equal" in said(tools) and "FAILED" not in said(tools)
    assert said(tools).splitlines()[-1] == f'next: swarmnet generate {tmp_path}/out/run.toml "def "'
    pytest.importorskip("matplotlib")
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_all_of_a_stage_may_be_killed_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmnet.local.run._faults", lambda swarm: (KillAll(stage=1, step=3),))
    tools = kit(tmp_path / "board", hold=3)
    assert run_local(options(tmp_path), tools) == 0, said(tools)
    assert "step 3: all of stage 1 is killed" in said(tools) and "from outside" not in said(tools)
    assert summary(tmp_path)["faults"] == {"kill_all": 1} and summary(tmp_path)["killed_all"] is None


def test_a_kill_in_the_middle_and_a_return_by_snapshot(tmp_path: Path) -> None:
    tools = kit(tmp_path / "board", hold=3)  # nobody gets past step 3 before someone came back
    assert run_local(options(tmp_path, kill=("1@3",)), tools) == 0
    assert summary(tmp_path)["kills"] == 1
    merged = [json.loads(line) for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines()]
    (killed,) = [record for record in merged if record["event"] == "killed"]
    assert killed["child"] in ("s1-r0", "s1-r1") and killed["by"] == "kill 1@3, step 3"
    returned = [record for record in merged if record.get("how") == "snapshot"]
    assert [(record["name"], record["version"]) for record in returned] == [(killed["child"], 3)]


def test_a_rank_is_killed_and_its_replica_stays(tmp_path: Path) -> None:
    tools = kit(tmp_path / "board", mode="ranks:s1-r0", hold=3, replicas=1, slope=0.1000001)
    fine = (f"training.microbatches={M}", "averaging.codec=int64")  # on a small grid the rounding of ranks shows
    changed = options(tmp_path, replicas=1, ranks=("1=2",), kill_rank=("1@3",), verify=True, set=fine)
    assert run_local(changed, tools) == 0
    found = summary(tmp_path)
    assert (found["ranks"], found["rank_restarts"], found["kills"], found["faults"]) == (
        {"s1-r0": 2},
        1,
        0,
        {"kill_rank": 1},
    )
    for words in (
        "ranks: s1 2 (tp2)",
        "of s1-r0 was killed (kill_rank 1@3, step 3)",
        "s1-r0 has lost rank",
        "s1-r0 has its 2 ranks (tp2) again, after 0.5 s",
        "ranks: s1-r0 2; restarted 1 time",
        "the first 20 steps equal within 1e-05",
    ):
        assert words in said(tools)


def test_a_mesh_that_is_still_starting_after_the_last_step_is_waited_for(tmp_path: Path) -> None:
    tools = kit(tmp_path / "board", mode="late-ranks:s1-r1", timing=replace(FAST, settle_s=0.5))
    assert run_local(options(tmp_path, ranks=("1.1=2",)), tools) == 0, said(tools)
    assert "did not reach the last version" not in said(tools)


def test_ranks_that_nobody_has_are_not_killed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"kill_rank 1@3: no replica of stage 1 has more than one rank"):
        run_local(options(tmp_path, ranks=("0=2",), kill_rank=("1@3",)), kit(tmp_path / "board"))
    assert not (tmp_path / "out").exists()


def test_a_kill_of_the_last_replica_is_postponed_and_reported(tmp_path: Path) -> None:
    tools = kit(tmp_path / "board", replicas=1)
    assert run_local(options(tmp_path, replicas=1, kill=("1@2",)), tools) == 0
    found = summary(tmp_path)
    assert (found["kills"], found["postponed_kills"], found["kills_not_done"]) == (0, 1, ["kill 1@2"])
    assert "kill 1@2 is postponed: 1 synced replica in stage 1" in said(tools)
    assert "not carried out: kill 1@2" in said(tools)


@pytest.mark.parametrize(
    ("mode", "problem"),
    [
        ("double", "1 microbatches counted twice"),
        ("lose", "1 microbatches lost"),
        ("split:s2-r1", "replicas ended with different weights in stage 2"),
    ],
)
def test_a_broken_promise_is_a_failure(tmp_path: Path, mode: str, problem: str) -> None:
    tools = kit(tmp_path / "board", mode=mode)
    assert run_local(options(tmp_path), tools) == 1
    assert f"FAILED: {problem}\n" in said(tools)
    assert summary(tmp_path)["problem"] == problem


def test_a_reference_that_disagrees_is_a_failure(tmp_path: Path) -> None:
    tools = kit(tmp_path / "board", slope=0.1000001)
    assert run_local(options(tmp_path, verify=True), tools) == 1
    assert "not bit-equal" in said(tools)


def test_a_child_that_fails_at_its_start_ends_the_run(tmp_path: Path) -> None:
    tools = kit(tmp_path / "board", mode="crash-at-start:s1-r1")
    assert run_local(options(tmp_path), tools) == 1
    assert "    out of luck\n" in said(tools)
    assert "FAILED: s1-r1 ended with exit code 3 before training began, see " in said(tools)


def test_a_child_that_fails_later_costs_the_green_light(tmp_path: Path) -> None:
    tools = kit(tmp_path / "board", mode="crash:s1-r1")
    assert run_local(options(tmp_path), tools) == 1
    assert "    out of luck\n" in said(tools) and "FAILED: s1-r1 ended with exit code 3\n" in said(tools)
    found = summary(tmp_path)
    assert (found["steps"], found["lost"], found["crashes"]) == (STEPS, 0, ["s1-r1 ended with exit code 3"])


def test_a_child_that_fails_as_the_last_of_its_stage_ends_the_run(tmp_path: Path) -> None:
    tools = kit(tmp_path / "board", mode="crash:s1-r0", replicas=1)
    assert run_local(options(tmp_path, replicas=1), tools) == 1
    assert "it was the last replica of stage 1" in said(tools)


class Tired(Launcher):
    """Starts `left` children, then is lost."""

    def __init__(self, left: int) -> None:
        super().__init__(())
        self.left = left

    def start(self, *args: Any, **named: Any) -> ChildProcess:
        self.left -= 1
        if self.left < 0:
            raise LauncherLost("no more children")
        return super().start(*args, **named)


@pytest.mark.parametrize(
    ("left", "problem"), [(3, "no more children"), (7, "the reference was not started: no more children")]
)
def test_when_nothing_can_be_started_any_more_the_run_ends_with_its_files(
    tmp_path: Path, left: int, problem: str
) -> None:
    tools = replace(kit(tmp_path / "board"), launcher=lambda: Tired(left))
    assert run_local(options(tmp_path, verify=True), tools) == 1
    assert summary(tmp_path)["problem"] == problem and (tmp_path / "out" / "loss.csv").exists()


class Asked(Launcher):
    """While the third child is started somebody asks for the end."""

    def __init__(self) -> None:
        super().__init__(())
        self.started = 0

    def start(self, *args: Any, **named: Any) -> ChildProcess:
        self.started += 1
        if self.started == 3:
            signal.raise_signal(signal.SIGTERM)
        return super().start(*args, **named)


def test_who_asks_for_the_end_does_not_wait_for_all_to_be_started(tmp_path: Path) -> None:
    launcher = Asked()
    assert run_local(options(tmp_path), replace(kit(tmp_path / "board"), launcher=lambda: launcher)) == 143
    assert launcher.started == 3 and summary(tmp_path)["problem"] == "interrupted"


class Deaf:
    """A child that ends by SIGKILL only."""

    def __init__(self, name: str, story: list[str]) -> None:
        self.name, self.story = name, story

    def returncode(self) -> int | None:
        return None

    def send(self, number: signal.Signals) -> None:
        self.story.append(f"{number.name} {self.name}")

    def wait(self) -> None:
        self.story.append(f"wait {self.name}")


def test_all_are_killed_before_any_is_waited_for() -> None:
    story: list[str] = []
    assert stop([Deaf("a", story), Deaf("b", story)], grace_s=0.0) == ["a", "b"]  # type: ignore[list-item]
    assert story == ["SIGTERM a", "SIGTERM b", "SIGKILL a", "SIGKILL b", "wait a", "wait b"]


def test_a_swarm_too_large_for_the_machine_and_layers_nobody_asked_for_are_remarked(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    tools = replace(kit(tmp_path / "board", replicas=8 * cores), launcher=lambda: Tired(0))
    assert run_local(options(tmp_path, stages=9, replicas=8 * cores), tools) == 1
    assert f"note: {72 * cores + 1} processes share {cores} core" in said(tools)
    assert "note: the model has 9 layers, not 6: each of 9 stages needs one" in said(tools)


@pytest.mark.parametrize(
    ("fields", "note"),
    [
        (("averaging.sync=local",), "note: no peer audits them: set shares in [audit], and averaging.sync"),
        (("numerics.mode=fast",), 'note: numerics.mode = "fast": audits suspend a peer, and prove nothing'),
        ((), ""),
    ],
)
def test_liars_that_no_audit_names_are_remarked(tmp_path: Path, fields: tuple[str, ...], note: str) -> None:
    tools = replace(kit(tmp_path / "board", replicas=3), launcher=lambda: Tired(0))
    chosen = (f"training.microbatches={M}", *fields)
    run_local(options(tmp_path, stages=1, replicas=3, liars="lazy:1", set=chosen), tools)
    told = said(tools)
    assert note in told and (bool(note) or "note: n" not in told)


def test_a_swarm_that_stands_still_says_what_it_waits_for(tmp_path: Path) -> None:
    timing = Timing(poll_s=0.002, stalled_s=0.3, give_up_s=1.0, grace_s=2.0)
    tools = kit(tmp_path / "board", hold=4, timing=timing)  # nobody is killed, so nobody moves on
    assert run_local(options(tmp_path), tools) == 1
    assert "waiting for stage 0, 1, 2 to apply step 4; logs are in" in said(tools)
    assert "FAILED: no progress for 1 s" in said(tools)


def test_a_directory_with_a_run_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out" / "peers").mkdir(parents=True)
    with pytest.raises(UsageError, match="already holds a run"):
        run_local(options(tmp_path), kit(tmp_path / "board"))


def test_what_children_are_told(tmp_path: Path) -> None:
    config = PeerConfig(manifest=tmp_path / "run.toml", stages=(1,), dir=tmp_path / "d", bootstrap=("/ip4/1/tcp/2",))
    spec = ChildSpec("s1-r0", config)
    file = str(tmp_path / "d" / "peer.toml")
    assert swarmnet_command(spec) == ["-m", "swarmnet", "peer", "--no-restart", "--config", file]
    assert toml.read(Path(file))["bootstrap"] == ["/ip4/1/tcp/2"]
    trainer = replace(spec, config=config.model_copy(update={"roles": ("trainer",), "stages": ()}))
    assert swarmnet_command(trainer) == ["-m", "swarmnet", "trainer", "--config", file]
    assert swarmnet_command(replace(spec, orders=Path("orders"))) == ["-m", "swarmnet.testing.injector", file, "orders"]
    assert child_environment({"SWARMNET_PORT": "1", "HOME": "/h", "OMP_NUM_THREADS": "8"}) == {
        "HOME": "/h",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
    }


def test_the_real_reference_child_writes_its_curve(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 500)
    tiny = (
        "model.hidden_size=16",
        "model.intermediate_size=16",
        "model.head_dim=8",
        "model.num_heads=2",
        "model.num_kv_heads=1",
        "training.microbatches=2",
        "training.sequence_length=8",
        "training.eval_every=0",
    )
    options = LocalOptions(steps=3, data=str(tmp_path / "text.txt"), set=tiny)
    prepared = real_prepare(options, tmp_path / "out")
    prepared.write()
    spec = ChildSpec("reference", PeerConfig(manifest=prepared.path, dir=tmp_path))
    done = subprocess.run(
        [sys.executable, *reference_command(spec)], env=child_environment(os.environ), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    records = EventReader(spec.events).read()
    *steps, last = records
    assert [(record["event"], record["step"], record["tokens"]) for record in steps] == [
        ("reference_step", step, 2 * 4 * 8) for step in range(3)
    ]
    assert all(0 < record["loss"] < 6 for record in steps)
    assert last["event"] == "reference_weights" and "embed" in " ".join(last["sha256"])


# ---------------------------------------------------------------- the supervisor itself is interrupted or dies

WHOLE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from dataclasses import replace
from rich.console import Console
from test_local_supervisor import kit, options
from swarmnet.local import run_local
place, hold, mode, *kills = Path(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]
tools = kit(place / "board", hold=hold, mode=mode, console=Console())
sys.exit(run_local(options(place, kill=tuple(kills)), tools))
"""


def interrupted(
    tmp_path: Path,
    end: Callable[[subprocess.Popen[str]], None],
    *,
    hold: int = 4,
    mode: str = "",
    kill: tuple[str, ...] = (),
) -> tuple[int, str, list[int]]:
    """Start a swarm that stands still at step `hold`, then do `end` to its supervisor. Returns exit code, output and
    pids of the children, once the supervisor and these children are gone."""
    argv = [sys.executable, "-c", WHOLE, str(Path(__file__).parent), str(tmp_path), str(hold), mode, *kill]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    output = ""
    for line in process.stdout:
        output += line
        if f"step    {hold - 1}" in line:
            break
    started = [
        json.loads(line)
        for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines()
        if '"event":"started"' in line
    ]
    handles = [os.pidfd_open(record["pid"]) for record in started]
    end(process)
    output += process.stdout.read()
    code = process.wait(timeout=30)
    for handle in handles:
        assert select.select([handle], [], [], 30)[0], "a child outlived its supervisor"
        os.close(handle)
    return code, output, [record["pid"] for record in started]


def test_ctrl_c_ends_everything_and_writes_the_files(tmp_path: Path) -> None:
    code, output, pids = interrupted(tmp_path, lambda process: process.send_signal(signal.SIGINT))
    assert code == 130 and len(pids) == STAGES * REPLICAS + 1
    found = summary(tmp_path)
    assert (found["steps"], found["problem"]) == (4, "interrupted")
    assert "interrupted\n" in output and "FAILED" not in output
    assert "--resume" not in output  # no checkpoint: nothing to go on from


def test_a_terminal_that_goes_is_one_request_to_stop(tmp_path: Path) -> None:
    def hang_up(process: subprocess.Popen[str]) -> None:
        for _ in range(3):
            process.send_signal(signal.SIGHUP)

    code, output, _ = interrupted(tmp_path, hang_up)
    assert code == 128 + signal.SIGHUP and summary(tmp_path)["problem"] == "interrupted" and "killed" not in output


def test_what_children_say_while_they_are_stopped_starts_nothing(tmp_path: Path) -> None:
    """Their last words make a kill due: it must neither be carried out nor counted."""
    code, _, pids = interrupted(
        tmp_path, lambda process: process.send_signal(signal.SIGINT), hold=3, mode="farewell", kill=("1@4",)
    )
    assert code == 130 and len(pids) == STAGES * REPLICAS + 1
    merged = [json.loads(line) for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines()]
    assert sum(record.get("version") == 5 for record in merged) == STAGES * REPLICAS
    assert summary(tmp_path)["kills"] == 0


def test_a_reader_that_goes_away_ends_the_printing_and_nothing_else(tmp_path: Path) -> None:
    argv = [
        sys.executable,
        "-c",
        WHOLE.replace(", console=Console()", "")
        .replace("tools = kit(", "tools = replace(kit(")
        .replace("mode=mode)", "mode=mode), console=None)"),
        str(Path(__file__).parent),
        str(tmp_path),
        "-1",
        "",
    ]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith("swarmnet local: 3 stages")
        process.stdout.close()
        complaint = process.stderr.read()
    assert process.returncode == 0, complaint
    assert complaint == (
        "swarmnet: the output has no reader any more; the run goes on, its files are in "
        f"{tmp_path / 'out'} (Ctrl+C ends it)\n"
    )
    assert summary(tmp_path)["ok"] and len((tmp_path / "out" / "loss.csv").read_text().splitlines()) == STEPS + 1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a child to its parent")
def test_children_do_not_outlive_a_killed_supervisor(tmp_path: Path) -> None:
    code, _, pids = interrupted(tmp_path, lambda process: process.kill())
    assert code == -signal.SIGKILL and len(pids) == STAGES * REPLICAS + 1


def test_a_replica_killed_by_hand_comes_back(tmp_path: Path) -> None:
    """The first one even, by whose address the others had found each other: `kit` checks that it is given another."""

    def end(process: subprocess.Popen[str]) -> None:
        records = [json.loads(line) for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines()]
        (pid,) = [record["pid"] for record in records if record.get("child") == "s0-r0"]
        os.kill(pid, signal.SIGKILL)

    code, output, _ = interrupted(tmp_path, end)
    assert code == 0 and "s0-r0 was killed (from outside)" in output
    assert summary(tmp_path)["kills"] == 1


def test_a_finished_run_is_said_to_be_and_left_alone(tmp_path: Path) -> None:
    assert run_local(options(tmp_path), kit(tmp_path / "board")) == 0
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    again = kit(tmp_path / "again")
    assert run_local(LocalOptions(out=tmp_path / "out", resume=True), again) == 0
    assert f"is finished: all {STEPS} steps are done" in said(again)
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == before


PATIENT_REFERENCE = "import os, signal, time; os.kill({pid}, signal.SIGINT); time.sleep(600)"


def test_ctrl_c_while_it_is_compared_leaves_a_finished_swarm_that_can_be_compared_later(tmp_path: Path) -> None:
    first = replace(kit(tmp_path / "board"), reference=lambda _: ["-c", PATIENT_REFERENCE.format(pid=os.getpid())])
    assert run_local(options(tmp_path, verify=True, kill=("1@3",)), first) == 130
    assert summary(tmp_path)["problem"] == UNCOMPARED and "FAILED" not in said(first)
    assert f"{UNCOMPARED}. Do it again with:\n    swarmnet local --resume --verify --out {tmp_path}" in said(first)
    before, files = summary(tmp_path), (tmp_path / "out" / "loss.csv").read_bytes()

    again = kit(tmp_path / "again")
    assert run_local(LocalOptions(out=tmp_path / "out", resume=True, verify=True), again) == 0
    assert "compared with one process: largest loss difference 0 (bit-equal)" in said(again)
    assert summary(tmp_path) == before | {
        "ok": True,
        "problem": "",
        "reference_problem": "",
        "reference_max_difference": 0.0,
        "reference_bit_equal": True,
        "reference_weights_equal": None,
    }
    assert (tmp_path / "out" / "loss.csv").read_bytes() == files

    other = kit(tmp_path / "other", slope=0.2)
    assert run_local(LocalOptions(out=tmp_path / "out", resume=True, verify=True), other) == 1
    assert "FAILED: losses differ from one process" in said(other) and not summary(tmp_path)["ok"]
    assert run_local(LocalOptions(out=tmp_path / "out", resume=True, verify=True), kit(tmp_path / "last")) == 0


def test_a_finished_run_that_lost_its_summary_is_compared_and_has_its_files_again(tmp_path: Path) -> None:
    assert run_local(options(tmp_path), kit(tmp_path / "board")) == 0
    (tmp_path / "out" / "summary.json").unlink()
    assert run_local(LocalOptions(out=tmp_path / "out", resume=True, verify=True), kit(tmp_path / "again")) == 0
    found = summary(tmp_path)
    assert (found["ok"], found["steps"], found["reference_bit_equal"], found["lost"]) == (True, STEPS, True, 0)


def test_what_is_refused_leaves_nothing_behind(tmp_path: Path) -> None:
    for bad in ({"kill": ("1@99",)}, {"kill_all": 99}, {"chaos": "nothere.toml"}, {"chaos": "random:x"}):
        with pytest.raises(UsageError):
            run_local(options(tmp_path, **bad), kit(tmp_path / f"board-{next(iter(bad.values()))}"))
        assert not (tmp_path / "out").exists()


def test_an_end_before_any_checkpoint_is_said_to_cost_everything(tmp_path: Path) -> None:
    first = kit(tmp_path / "board", hold=3)  # else a fast swarm ends, with a checkpoint, before the kill
    assert run_local(options(tmp_path, kill_all=3), first) == 0
    assert "note: step 3 comes before the first checkpoint, at version 50" in said(first)
    assert "no checkpoint of all stages was on disk: everything will be done again" in said(first)
