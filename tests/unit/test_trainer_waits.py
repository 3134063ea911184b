"""A run that lacks a stage: the trainer says so as peers do, when it lasts, and is reminded of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from typing import cast

import pytest

from swarmnet import telemetry
from swarmnet.directory import Record, StageStatus
from swarmnet.ids import PeerId, RunId, first_chain
from swarmnet.manifest.extension import Horizon
from swarmnet.manifest.schema import Cut, Manifest, Training
from swarmnet.messages import Answer, Control, Packed, Request
from swarmnet.net.records import nobody_serves, unserved
from swarmnet.stage.canonical import rate_of
from swarmnet.telemetry.journal import remind
from swarmnet.telemetry.run_state import RunState
from swarmnet.testing.clock import VirtualLoop
from swarmnet.trainer.trainer import Trainer

RUN, ME = RunId("00" * 32), PeerId("trainer")
MANIFEST = Manifest(cut=Cut(stages=2), training=Training(eval_every=0))
NOBODY, ONLY_LAST, WITHOUT_WEIGHTS, ALL = (), ((1, True),), ((0, False), (1, True)), ((0, True), (1, True))


@dataclass
class Directory:
    """Who is there from when on: (seconds, ((stage, synced), ...)) each. Nobody answers."""

    story: list[tuple[float, tuple[tuple[int, bool], ...]]]
    published: list[Record] = field(default_factory=list)

    async def publish(self, record: Record) -> None:
        self.published.append(record)

    def complete(self) -> bool:
        return True

    async def records(self, near: object = None, *, at_once: bool = False) -> tuple[Record, ...]:
        now = asyncio.get_running_loop().time()
        _, stages = [entry for entry in self.story if entry[0] <= now][-1]
        return tuple(
            Record(RUN, PeerId(f"p{stage}"), 1, (), (StageStatus(stage, 0, first_chain(RUN, stage), synced, slots=4),))
            for stage, synced in stages
        )

    def tell(self, peer: PeerId, message: Control) -> None:
        """Nothing is told here."""

    async def call(
        self, peer: PeerId, request: Request, payload: tuple[Packed, ...] = (), *, deadline: float
    ) -> AsyncGenerator[Answer, None]:
        await asyncio.sleep(1e6)
        yield  # type: ignore[misc]


def said(*story: tuple[float, tuple[tuple[int, bool], ...]], until: float) -> list[tuple[float, str, object]]:
    """When a trainer said what of the run it found."""
    events = events_of(Directory(list(story)), until)
    return [(at, event, fields.get("reason")) for at, event, fields in events if event in ("waiting", "complete")]


def events_of(directory: Directory, until: float) -> list[tuple[float, str, dict[str, object]]]:
    """When a trainer said what."""
    events: list[tuple[float, str, dict[str, object]]] = []

    async def feed() -> None:
        trainer = Trainer(
            ME,
            MANIFEST,
            transport=directory,
            directory=directory,
            record=lambda: Record(RUN, ME, 2, (), ()),
            tokens=lambda number: (Packed("int32", (1,), bytes(4)),),
            eval_tokens=lambda number: (),
            on_event=lambda event, fields: events.append((asyncio.get_running_loop().time(), event, fields)),
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(until):
                await trainer.run()

    loop = VirtualLoop()
    try:
        loop.run_until_complete(feed())
    finally:
        loop.close()
    return events


def test_what_lacks_is_said_when_it_lasts_and_when_it_changes() -> None:
    found = said((0.0, NOBODY), (20.0, ONLY_LAST), (40.0, WITHOUT_WEIGHTS), (60.0, ALL), until=90.0)
    assert [(event, reason) for _, event, reason in found] == [
        ("waiting", "nobody serves stage 0, 1 yet"),
        ("waiting", "nobody serves stage 0 yet"),
        ("waiting", "no replica of stage 0 has its weights yet"),
        ("complete", None),
    ]
    assert [at for at, _, _ in found] == pytest.approx([3.5, 23.0, 43.0, 60.0], abs=1.0)


def test_a_run_in_which_all_is_there_is_worth_no_word() -> None:
    assert said((0.0, ALL), (20.0, NOBODY), (21.0, ALL), until=40.0) == []


def test_the_advice_can_be_typed() -> None:
    assert unserved((), num_stages=4, mine=(1,)) == (0, 2, 3)
    assert "unless one is just starting, start a peer with --stage 0,2,3 and" in str(nobody_serves((0, 2, 3))["advice"])
    advice = str(nobody_serves((0,), stranger_to="ab" * 32)["advice"])
    assert advice.startswith("start the peers of these stages; if") and "in run abababababab: compare" in advice


def test_a_wait_is_said_again_every_minute_while_it_lasts(caplog: pytest.LogCaptureFixture) -> None:
    async def wait() -> None:
        state, clock = RunState(), asyncio.get_running_loop().time
        async with asyncio.TaskGroup() as group:
            running = group.create_task(remind(telemetry.get("swarmnet.test"), state))
            state.on("waiting", {"stage": 1, "reason": "nobody has it"}, now=clock())
            state.on("waiting", {"reason": "nobody serves stage 2 yet"}, now=clock())
            await asyncio.sleep(130.0)
            state.on("synced", {"stage": 1}, now=clock())
            await asyncio.sleep(60.0)
            state.on("complete", {"peers": 3}, now=clock())
            await asyncio.sleep(600.0)
            running.cancel()

    loop = VirtualLoop()
    with caplog.at_level(logging.INFO, "swarmnet"):
        loop.run_until_complete(wait())
    loop.close()
    shown = [str(record.swarmnet_fields["reason"]) for record in caplog.records]  # type: ignore[attr-defined]
    assert sorted(shown) == ["nobody has it"] * 2 + ["nobody serves stage 2 yet"] * 3
    assert [record.swarmnet_fields["since"] for record in caplog.records][-1] == "3 min"  # type: ignore[attr-defined]


@dataclass
class Moving(Directory):
    """A run of a step a second. step_s: what its peers measure."""

    step_s: float = 1.0

    async def records(self, near: object = None, *, at_once: bool = False) -> tuple[Record, ...]:
        step = int(asyncio.get_running_loop().time())
        return tuple(
            replace(each, loss=(step, 5.0), steps=600, step_s=self.step_s, tokens_per_second=64.0)
            for each in await super().records()
        )


def test_where_the_run_is_is_said_now_and_then() -> None:
    found = [(at, fields) for at, event, fields in events_of(Moving([(0.0, ALL)]), until=25.0) if event == "progress"]
    assert [fields["step"] for _, fields in found] == pytest.approx([0, 10, 20], abs=1)
    steps = [cast(int, fields["step"]) for _, fields in found]
    warm_up = [rate_of(MANIFEST.optimizer, step, Horizon(600)) for step in steps]
    assert [fields["learning_rate"] for _, fields in found] == warm_up
    assert found[-1][1] | {"learning_rate": 0} == {
        "step": steps[-1],
        "steps": 600,
        "loss": 5.0,
        "learning_rate": 0,
        "tokens_per_second": 64.0,
        "eta_s": 599 - steps[-1],
    }


def test_without_a_pace_no_eta_is_said() -> None:
    directory = Moving([(0.0, ALL)], step_s=0.0)
    found = [fields for _, event, fields in events_of(directory, until=5.0) if event == "progress"]
    assert found and not any({"eta_s", "tokens_per_second"} & fields.keys() for fields in found)
