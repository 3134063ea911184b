"""What the soak reads out of samples, logs and its own schedule."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from benchmark_modules import load

from swarmnet.testing import fault

soak = load("soak")

HOUR = 3600.0


def samples(value, seconds=HOUR, since=0.0):
    return [(float(at), value(at)) for at in range(int(since), int(seconds) + 1, 5)]


def test_what_is_flat_has_the_ratio_one_whatever_the_warm_up_was() -> None:
    found = soak.trend(samples(lambda at: 100.0 if at > HOUR / 4 else 10.0), HOUR)
    assert (found.ratio, found.per_hour) == (1.0, 0.0)
    assert soak.trend(samples(lambda at: 0), HOUR).ratio == 1.0


def test_what_grows_steadily_has_its_slope_and_one_spike_changes_no_ratio() -> None:
    found = soak.trend(samples(lambda at: 300.0 + 60.0 * at / HOUR), HOUR)
    assert found.per_hour == pytest.approx(60.0)
    assert found.ratio == pytest.approx((300 + 50) / (300 + 30), rel=1e-3)
    assert soak.trend(samples(lambda at: 1e6 if at == 3000 else 100.0), HOUR).ratio == 1.0


def test_a_process_that_did_not_live_through_the_last_two_thirds_has_no_trend() -> None:
    assert soak.trend([], HOUR) is None
    assert soak.trend(samples(lambda at: 1.0, since=HOUR / 2), HOUR) is None
    assert soak.trend(samples(lambda at: 1.0, seconds=0.8 * HOUR), HOUR) is None


def test_rates_of_thirds() -> None:
    assert soak.third_rates([1, 2, 11, 12, 21, 22, 23], 30.0) == 1.5


def test_lines_of_a_log_are_counted_by_what_they_say() -> None:
    text = '10:00:00 applied step=1\n10:00:01 W waiting for="stage 1"\n10:00:01 applied step=2\nTraceback (most recent'
    assert soak.told(text) == {"applied": 2, "waiting": 1}


def test_kills_and_farewells_spare_the_first_replicas_and_newcomers_leave_again(tmp_path: Path) -> None:
    text = soak.schedule(HOUR, seed=1)
    assert text == soak.schedule(HOUR, seed=1) != soak.schedule(HOUR, seed=2)
    path = tmp_path / "chaos.toml"
    path.write_text(text)
    faults = fault.load(str(path), stages=soak.STAGES, replicas=soak.REPLICAS, steps=1)
    assert {each.kind for each in faults} == set(soak.WEIGHTS)
    assert 200 < len(faults) < 700 and max(each.at_s for each in faults) > HOUR - 60
    spared = {f"s{stage}-r0" for stage in range(soak.STAGES)}
    assert not spared & {each.peer for each in faults if each.kind in ("kill", "drain")}
    for stage in range(soak.STAGES):
        joins = [each for each in faults if each.kind == "join" and each.stage == stage]
        leave = [each.peer for each in faults if each.kind == "drain" and each.back_s is None]
        assert {f"s{stage}-r{soak.REPLICAS + number}" for number in range(len(joins))} <= {*leave}
    assert "for_s" in next(iter(tomllib.loads(text)["stop"]))


def test_what_the_swarm_writes_is_filed_by_process() -> None:
    seen = soak.Seen(seconds=10.0)
    seen.hear({"name": "local", "event": "started", "child": "s0-r0", "pid": 7}, 1.0)
    seen.hear({"name": "s0-r0", "event": "holding", "tasks": 5, "blocks": 900}, 2.0)
    seen.hear({"name": "s0-r0", "event": "applied", "step": 0}, 3.0)
    seen.hear({"name": "s1-r0", "event": "applied", "step": 0}, 4.0)
    assert seen.samples["s0-r0:7"]["tasks"] == [(2.0, 5)] and seen.steps == {0: 3.0}
