"""Chaos files: what they say, what is wrong with them in one line, and what a seed draws."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from swarmnet.errors import UsageError
from swarmnet.testing.fault import (
    SHORTHAND,
    Drain,
    Fault,
    Join,
    Kill,
    KillRank,
    OneWayCut,
    Partition,
    Random,
    Slow,
    Stop,
    expand,
    load,
)


def read(tmp_path: Path, text: str) -> tuple[Fault, ...]:
    path = tmp_path / "chaos.toml"
    path.write_text(text)
    return load(str(path), stages=3, replicas=2, steps=20)


def test_every_kind(tmp_path: Path) -> None:
    faults = read(
        tmp_path,
        """
seed = 7
[[kill]]
stage = 1
step = 5
phase = "backward"
moment = "end"
[[kill]]
peer = "s2-r1"
at_s = 2.5
back = false
[[stop]]
step = 3
for_s = 2
[[join]]
step = 4
[[drain]]
stage = 0
step = 6
back_s = 1.5
[[partition]]
step = 7
between = [["s0-r0"], ["s0-r1", "trainer-0"]]
for_s = 3.0
[[slow]]
step = 8
peers = ["s2"]
bytes_per_s = 1e5
for_s = 1.0
[[kill_rank]]
stage = 1
step = 9
phase = "backward"
[[one_way_cut]]
step = 10
senders = ["s0"]
receivers = ["s1-r0"]
for_s = 1.0
""",
    )
    assert {str(fault): fault for fault in faults} == {
        "kill s1@5 backward end": Kill(stage=1, step=5, phase="backward", moment="end", back_s=1.0),
        "kill s2-r1 at 2.5 s": Kill(peer="s2-r1", at_s=2.5, back=False),
        "stop @3": Stop(step=3, for_s=2.0),
        "join @4": Join(step=4),
        "drain s0@6": Drain(stage=0, step=6, back_s=1.5),
        "partition s0-r0|s0-r1+trainer-0@7": Partition(step=7, for_s=3.0, between=(("s0-r0",), ("s0-r1", "trainer-0"))),
        "slow s2@8": Slow(step=8, for_s=1.0, peers=("s2",), bytes_per_s=1e5),
        "kill_rank s1@9 backward": KillRank(stage=1, step=9, phase="backward"),
        "one_way_cut s0|s1-r0@10": OneWayCut(step=10, senders=("s0",), receivers=("s1-r0",), for_s=1.0),
    }
    assert faults[1].place == 2


def test_a_seed_draws_the_same_faults_and_another_one_others() -> None:
    def draw(seed: int) -> tuple[Fault, ...]:
        return expand(SHORTHAND, seed, stages=3, replicas=3, steps=200)

    assert draw(1) == draw(1) != draw(2)
    assert load("random:1", stages=3, replicas=3, steps=200) == draw(1)
    kinds = Counter(fault.kind for fault in draw(1))
    assert set(kinds) == {"kill", "stop", "join", "partition", "slow"} and kinds["kill"] >= 20
    assert all(1 <= fault.step < 198 for fault in draw(1) if fault.step is not None)
    assert len({str(fault) for fault in draw(1)}) > 20


def test_rates_are_counts_per_hundred_steps() -> None:
    ranks = expand(Random(kill_rank=100.0), 1, stages=3, replicas=2, steps=50)
    assert {(fault.kind, fault.stage) for fault in ranks} == {("kill_rank", None)} and len(ranks) == 50
    drawn = [len(expand(Random(stop=2.0), seed, stages=3, replicas=3, steps=25)) for seed in range(200)]
    assert set(drawn) == {0, 1} and 70 < sum(drawn) < 130


@pytest.mark.parametrize("text", ["random:", "random:x", "random:-1", "nowhere.toml"])
def test_what_is_no_chaos_file(text: str) -> None:
    with pytest.raises(UsageError):
        load(text, stages=3, replicas=2, steps=20)


def test_a_lone_replica_is_never_partitioned_from_nobody() -> None:
    for seed in range(20):
        for fault in expand(Random(partition=100.0), seed, stages=1, replicas=1, steps=10):
            assert all(fault.groups)
