"""What `benchmarks/stage_cost.py` makes of clocks: every moment counts once, and a step is the sum of its parts."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.benchmark_modules import load

stage_cost = load("stage_cost")


def line(t: float, scale: float) -> dict[str, Any]:
    """As a peer writes it, everything `scale` times a unit."""
    wall = {"forward": 5.0, "backward": 6.0, "weight pass": 4.0, "round and add": 2.0, "largest": 1.0}
    wall |= {"codecs": 0.5, "engine": 0.25, "round": 3.0, "update": 2.5}
    cpu = {"forward": 4.0, "backward": 5.0, "weight pass": 4.0, "sealing": 0.5}
    return {
        "t": t,
        "wall": {kind: scale * seconds for kind, seconds in wall.items()},
        "cpu": {kind: scale * seconds for kind, seconds in cpu.items()},
        "threads": {"MainThread": 3.0 * scale, "compute": 20.0 * scale, "averaging": scale, "gRPC's own": 0.5 * scale},
        "loop": {"transport": 2.0 * scale} if scale else {},
    }


def test_a_microbatch_is_made_of_what_lies_between_two_updates() -> None:
    plain = stage_cost.Plain(6.0, 5.5)
    found = stage_cost.costs(line(100.0, 0.0), line(130.0, 1.0), plain, microbatches=2)
    later = stage_cost.costs(line(130.0, 1.0), line(160.0, 2.0), plain, microbatches=2)
    assert later == found, "what was spent before does not count"
    ms = {kind: round(each) for kind, each in found.wall.items()}
    assert ms == {
        "forward and backward, plain": 6000,
        "split backward": 1000,  # 13 of CPU in passes, 11 in two plain microbatches
        "waits for a core": 500,  # 2 in passes, 1 in the plain ones
        "rounding and summing": 1500,
        "copies and codecs": 250,
        "engine's checks": 125,
        "round: sum coded, digested": 1500,
        "update": 1250,
        "idle: fill, hand-overs, barrier": 2875,
    }
    assert sum(found.wall.values()) == pytest.approx(15_000)
    beside = {kind: round(each) for kind, each in found.beside.items()}
    assert beside == {"event loop: transport": 1000, "event loop: itself": 500, "gRPC's own": 250}
    overhead = {kind: round(each) for kind, each in found.overhead.items()}
    assert overhead == {
        "split backward": 1000,
        "copies and codecs": 250,
        "engine's checks": 125,
        "claims, ledger, control": 0,
        "calls of microbatches": 0,
        "TLS: records sealed and opened": 250,
        "transport, the rest of it": 750,
        "gRPC's threads, with its TLS": 250,
        "event loop, the rest of it": 500,
        "together": 3125,
    }


def test_a_moment_belongs_to_the_innermost_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "thread_time", lambda: now[0] / 2)
    clocks = stage_cost.Clocks()
    passes = lambda seconds: now.__setitem__(0, now[0] + seconds)  # noqa: E731
    inner = clocks.around("inner", lambda: passes(3.0))
    clocks.around("outer", lambda: (passes(1.0), inner(), inner()))()
    inner()
    assert clocks.wall == {"outer": 1.0, "inner": 9.0}
    assert clocks.cpu == {"outer": 0.5, "inner": 4.5}


def test_a_callback_is_for_what_its_code_is_for() -> None:
    assert stage_cost.kind_of("/x/swarmnet/pipeline/tasks.py") == "calls of microbatches"
    assert stage_cost.kind_of("/x/swarmnet/net/bulk/connection.py") == "transport"
    assert stage_cost.kind_of("/x/swarmnet/net/dht.py") == "claims, ledger, control"
    assert stage_cost.kind_of("/x/somewhere.py") == stage_cost.LOOP
