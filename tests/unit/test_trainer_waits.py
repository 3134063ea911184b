"""A run that lacks a stage: the trainer says so as peers do, when it lasts, and is reminded of it. One that is
complete: it waits for nobody."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any, cast

import pytest
from trainers import fed, replica

from swarmnet import telemetry
from swarmnet.directory import Record
from swarmnet.manifest.extension import Horizon
from swarmnet.manifest.schema import Cut, Manifest, Training
from swarmnet.net.records import unserved, waiting_for_stages
from swarmnet.stage.canonical import rate_of
from swarmnet.telemetry.journal import remind
from swarmnet.telemetry.run_state import RunState
from swarmnet.testing.doubles import run_virtual

MANIFEST = Manifest(cut=Cut(stages=2), training=Training(eval_every=0))
NOBODY, ONLY_LAST, WITHOUT_WEIGHTS, ALL = (), ((1, True),), ((0, False), (1, True)), ((0, True), (1, True))


Story = tuple[tuple[float, tuple[tuple[int, bool], ...]], ...]
"""Who is there from when on: (seconds, ((stage, synced), ...)) each. Nobody answers."""


def now() -> float:
    return asyncio.get_running_loop().time()


def there(story: Story) -> list[Record]:
    """Who announces itself now."""
    _, stages = [entry for entry in story if entry[0] <= now()][-1]
    return [replica(stage, synced=synced, name=f"p{stage}") for stage, synced in stages]


def said(*story: tuple[float, tuple[tuple[int, bool], ...]], until: float) -> list[tuple[float, str, object]]:
    """When a trainer said what of the run it found."""
    events = fed(MANIFEST, lambda: there(story), until_s=until).events
    return [(at, event, fields.get("reason")) for at, event, fields in events if event in ("waiting", "complete")]


def test_what_lacks_is_said_when_it_lasts_and_when_it_changes() -> None:
    found = said((0.0, NOBODY), (20.0, ONLY_LAST), (40.0, WITHOUT_WEIGHTS), (60.0, ALL), until=90.0)
    assert [(event, reason) for _, event, reason in found] == [
        ("waiting", "no peer serves stage 0, 1 yet"),
        ("waiting", "no peer serves stage 0 yet"),
        ("waiting", "no replica of stage 0 has its weights yet"),
        ("complete", None),
    ]
    assert [at for at, _, _ in found] == pytest.approx([3.5, 23.0, 43.0, 60.0], abs=1.0)


def test_a_run_in_which_all_is_there_is_worth_no_word() -> None:
    assert said((0.0, ALL), (20.0, NOBODY), (21.0, ALL), until=40.0) == []


def test_a_run_that_ends_without_it_is_done_although_nobody_may_be_called() -> None:
    """It was suspended, say, and all that it called are given up for minutes."""
    timers = {"long_silence_s": 1800.0}
    manifest = MANIFEST.model_copy(update={"protocol": MANIFEST.protocol.model_copy(update=timers)})
    steps = manifest.training.total_steps

    def records() -> list[Record]:
        return [replica(stage, version=steps if now() >= 60.0 else 0, name=f"p{stage}") for stage in (0, 1)]

    ended = fed(manifest, records)
    assert ended.names[-1] == "done" and ended.took_s == pytest.approx(60.0, abs=manifest.protocol.timers.beat_s)
    assert {name for name in ended.names if name != "done"} == {"rerouted"}


def test_the_advice_can_be_typed() -> None:
    assert unserved((), num_stages=4, mine=(1,)) == (0, 2, 3)
    assert "unless one is just starting, start a peer with --stage 0,2,3 and" in str(
        waiting_for_stages((0, 2, 3))["advice"]
    )
    advice = str(waiting_for_stages((0,), stranger_to="ab" * 32)["advice"])
    assert advice.startswith("start the peers of these stages; if") and "in run abababababab: compare" in advice


def test_a_wait_is_said_again_every_minute_while_it_lasts(caplog: pytest.LogCaptureFixture) -> None:
    async def wait() -> None:
        state, clock = RunState(), asyncio.get_running_loop().time
        async with asyncio.TaskGroup() as group:
            running = group.create_task(remind(telemetry.get("swarmnet.test"), state))
            state.on("waiting", {"stage": 1, "reason": "nobody has it"}, now=clock())
            state.on("waiting", {"reason": "no peer serves stage 2 yet"}, now=clock())
            await asyncio.sleep(130.0)
            state.on("synced", {"stage": 1}, now=clock())
            await asyncio.sleep(60.0)
            state.on("complete", {"peers": 3}, now=clock())
            await asyncio.sleep(600.0)
            running.cancel()

    with caplog.at_level(logging.INFO, "swarmnet"):
        run_virtual(wait())
    shown = [str(record.swarmnet_fields["reason"]) for record in caplog.records]  # type: ignore[attr-defined]
    assert sorted(shown) == ["no peer serves stage 2 yet"] * 3 + ["nobody has it"] * 2
    assert [record.swarmnet_fields["since"] for record in caplog.records][-1] == "3 min"  # type: ignore[attr-defined]


def progress(until_s: float, *, step_s: float = 1.0) -> list[dict[str, Any]]:
    """What is said of a run of a step a second. step_s: what its peers measure."""
    changes: dict[str, Any] = {"steps": 600, "step_s": step_s, "tokens_per_second": 64.0}
    records = lambda: [replace(each, loss=(int(now()), 5.0), **changes) for each in there(((0.0, ALL),))]  # noqa: E731
    return [fields for _, event, fields in fed(MANIFEST, records, until_s=until_s).events if event == "progress"]


def test_where_the_run_is_is_said_now_and_then() -> None:
    found = progress(25.0)
    assert [fields["step"] for fields in found] == pytest.approx([0, 10, 20], abs=1)
    steps = [cast(int, fields["step"]) for fields in found]
    warm_up = [rate_of(MANIFEST.optimizer, step, Horizon(600)) for step in steps]
    assert [fields["learning_rate"] for fields in found] == warm_up
    assert found[-1] | {"learning_rate": 0} == {
        "step": steps[-1],
        "steps": 600,
        "loss": 5.0,
        "learning_rate": 0,
        "tokens_per_second": 64.0,
        "eta_s": 599 - steps[-1],
    }


def test_without_a_pace_no_eta_is_said() -> None:
    found = progress(5.0, step_s=0.0)
    assert found and not any({"eta_s", "tokens_per_second"} & fields.keys() for fields in found)
