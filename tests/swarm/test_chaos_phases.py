"""Real processes, three replicas a stage, struck in every phase of a step, and still one process's curve and weights.

A schedule is a row of a Latin square: SIGKILL, SIGSTOP with SIGCONT and a join, each in another of the phases forward,
backward, averaging, apply, snapshot (a donor hands over state) and fetch (a newcomer receives it); six rows have every
kind in every phase once, and the two that always run, in one swarm, strike in every phase. Stages, moments and the
order are the seed's.
Each swarm's own verdict (exit code 0) says: no index lost or doubled, replicas of a stage equal, losses those of the
reference; the tests below look again, from the files.
"""

from __future__ import annotations

import itertools
import json
import random
import tomllib
from pathlib import Path

import pytest
import torch
from running import LocalRun, run_swarm
from safetensors.torch import load_file

from swarmnet.manifest.timers import Timers

REPLICAS = 3
KINDS = ("kill", "stop", "join")
PHASES = ("forward", "backward", "averaging", "apply", "snapshot", "fetch")
SETTINGS = (
    "training.sequence_length=32",
    "training.microbatch_size=2",
    "training.microbatches=6",
    "training.eval_every=0",
    "model.hidden_size=64",
    "model.intermediate_size=128",
    "model.head_dim=16",
)
pytestmark = pytest.mark.timeout(1800)  # on one slow core
SUSPECT_S = Timers().suspect_s
SCHEDULE_STEPS = 9  # one strike every three steps
TAIL_STEPS = 12  # on a slow machine strikes come late, and processes back later


Entries = list[tuple[str, dict[str, object]]]
"""Faults of a chaos file: kind and keys."""


def row(seed: int) -> list[tuple[str, str]]:
    """(kind, phase): row `seed` modulo 6 of the square."""
    return [(kind, PHASES[(seed + 2 * number) % len(PHASES)]) for number, kind in enumerate(KINDS)]


def schedule(seed: int, first: int, stages: int) -> Entries:
    """The row of that seed. What strikes a transfer of state follows a kill that causes one, and comes first: a process
    is back after some steps only."""
    rng = random.Random(seed)
    strikes = row(seed)
    rng.shuffle(strikes)
    strikes.sort(key=lambda strike: strike[1] not in ("snapshot", "fetch"))
    entries: Entries = []
    turn = rng.randrange(stages)
    for number, (kind, phase) in enumerate(strikes):
        step, stage = first + 3 * number, (turn + number) % stages  # its stage has recovered from the one before
        if phase in ("snapshot", "fetch"):
            entries.append(("kill", {"stage": stage, "step": step, "back_s": 0.2}))
        entry = {"stage": stage, "step": step, "phase": phase, "moment": rng.choice(("begin", "end"))}
        if kind == "stop":
            entry["for_s"] = round(rng.uniform(1.2, 2.0) * SUSPECT_S, 2)
        entries.append((kind, entry))
    return entries


def links_and_leaving(first: int, stages: int) -> Entries:
    """A replica is cut off from everybody, another is slow, a third leaves and comes back."""
    rest = ["s0-r1", "s0-r2", *(f"s{stage}" for stage in range(1, stages)), "trainer-0"]
    return [
        ("partition", {"step": first, "between": [["s0-r0"], rest], "for_s": 1.5 * SUSPECT_S}),
        (
            "slow",
            {"step": first + 2, "peers": [f"s{stages - 1}-r1"], "bytes_per_s": 2e5, "latency_s": 0.02, "for_s": 1.0},
        ),
        ("drain", {"step": first + 4, "stage": 1, "back_s": 0.5}),
    ]


def plan(numerics: str, stages: int, seeds: list[int]) -> tuple[Entries, int]:
    """The schedules one after the other, and the number of steps they need."""
    firsts = range(1, 1 + len(seeds) * SCHEDULE_STEPS, SCHEDULE_STEPS)
    entries = [entry for seed, first in zip(seeds, firsts, strict=True) for entry in schedule(seed, first, stages)]
    after = 1 + len(seeds) * SCHEDULE_STEPS
    if numerics == "deterministic":
        entries += links_and_leaving(after, stages)
    return entries, after + TAIL_STEPS


def write_chaos(path: Path, seed: int, entries: Entries) -> None:
    lines = [f"seed = {seed}"]
    for kind, entry in entries:
        lines += [f"[[{kind}]]", *(f"{key} = {json.dumps(value)}" for key, value in entry.items())]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


CI = [("deterministic", 2, [0, 1])]  # test_equal_to_one_process kills in a stage between two others
REST = [("fast", 3, [2, 3, 4, 5])]
"""What six schedules still have besides `CI`: every kind strikes in the four other phases."""
LONG = [
    (numerics, 3, [100 + 6 * number + offset for offset in range(6)])
    for number, numerics in enumerate(("deterministic", "fast", "deterministic", "fast", "deterministic"))
]


@pytest.fixture(
    scope="module",
    params=[*CI, *(pytest.param(case, marks=pytest.mark.long) for case in (*REST, *LONG))],
    ids=lambda case: f"{case[0]}-{'-'.join(map(str, case[2]))}",
)
def swarm(request, tmp_path_factory) -> LocalRun:
    numerics, stages, seeds = request.param
    entries, steps = plan(numerics, stages, seeds)
    directory = tmp_path_factory.mktemp("chaos")
    write_chaos(directory / "chaos.toml", seeds[0], entries)
    size = ("--stages", str(stages), "--replicas", str(REPLICAS), "--steps", str(steps), "--numerics", numerics)
    fine = ("averaging.codec=int64",) if numerics == "fast" else ()  # in which rounding of kernels does not grow
    chaos = ("--chaos", str(directory / "chaos.toml"))
    return run_swarm(directory / "out", *size, *chaos, settings=(*SETTINGS, *fine))


@pytest.fixture(scope="module")
def entries(swarm: LocalRun) -> Entries:
    """What was ordered."""
    ordered = tomllib.loads((swarm.directory.parent / "chaos.toml").read_text())
    return [(kind, entry) for kind in ordered.keys() - {"seed"} for entry in ordered[kind]]


def test_six_schedules_strike_in_every_way_in_every_phase() -> None:
    for seeds_of_six in ([seed for *_, seeds in (*CI, *REST) for seed in seeds], *(seeds for *_, seeds in LONG)):
        entries = [entry for seed in seeds_of_six for entry in schedule(seed, 1, 3)]
        ordered = [(kind, entry["phase"]) for kind, entry in entries if "phase" in entry]
        assert sorted(ordered) == sorted(itertools.product(KINDS, PHASES))


def test_everything_that_was_ordered_happened(swarm: LocalRun, entries: Entries) -> None:
    assert swarm.summary["kills_not_done"] == []
    assert sum(swarm.summary["faults"].values()) == len(entries)
    assert swarm.summary["crashes"] == []


def test_every_strike_hit_its_phase(swarm: LocalRun, entries: Entries) -> None:
    """A replica that holds in the phase says so before it is struck."""
    reached = [event["hold"] for event in swarm.of("reached")]
    for kind, entry in entries:
        if "phase" in entry:
            when = f"{kind} s{entry['stage']}@{entry['step']} {entry['phase']}"
            assert any(hold.startswith(when) for hold in reached), when


def test_the_curve_is_the_references(swarm: LocalRun) -> None:
    reference = swarm.reference.losses
    assert len(swarm.losses) == len(reference)
    if swarm.manifest.numerics.mode == "deterministic":
        assert swarm.losses == reference
    else:
        assert max(abs(a - b) for a, b in zip(swarm.losses[:20], reference[:20], strict=True)) <= 1e-5
        # Nothing but rounding may differ later either; it grows, but one microbatch more or less would be 1e-2.
        assert max(abs(a - b) for a, b in zip(swarm.losses, reference, strict=True)) <= 1e-3


def test_every_index_was_contributed_once(swarm: LocalRun) -> None:
    swarm.check_invariants()


def test_all_replicas_end_with_one_process_s_weights(swarm: LocalRun) -> None:
    """Also those that were killed, stopped, or had not been there at the start."""
    finals = {event["name"]: Path(event["path"]) for event in swarm.events if event["event"] == "finished"}
    assert len(finals) >= swarm.manifest.cut.stages * REPLICAS
    exact = swarm.manifest.numerics.mode == "deterministic"
    for name, path in finals.items():
        for key, value in load_file(path).items():
            weight = swarm.reference.weights.get(key.removeprefix("weights."))
            if weight is not None and exact:
                assert torch.equal(value, weight), (name, key)
            elif weight is not None:
                assert torch.allclose(value, weight, atol=1e-3), (name, key)
