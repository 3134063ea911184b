"""Whoever is alone in its numerics class is looked at by all others, as far as rounding lets them see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from swarmnet.ids import PeerId
from swarmnet.manifest.schema import Audits
from swarmnet.messages import Packed
from swarmnet.stage.interfaces import Recomputed
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import Guise, VirtualSwarm
from tests.benchmark_modules import load

load("audit")

import audit_lies  # noqa: E402  # beside it
import audit_model  # noqa: E402

ALONE = PeerId("alone")
PLAN = Plan(stages=2, replicas=3, microbatches=12, steps=12, audit=Audits(microbatches=0.5, contributions=1e-9))


class Brazen:
    """Shows what it has made, false as it is, where it should compute it again."""

    def __init__(self, lie: audit_lies.FalseWork) -> None:
        self._lie, self._made = lie, dict[tuple[int, int], list[tuple[Packed, ...]]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lie, name)

    def engine(self, engine: Any) -> Any:
        bent = self._lie.engine(engine)

        async def backward(stash: Any, gradient: Any) -> tuple[Packed, ...]:
            answer = await bent.backward(stash, gradient)
            self._made[stash.step, stash.index] = [stash.output, answer]
            return answer

        async def recompute(step: int, works: Any, seed: bytes = b"") -> tuple[tuple[Recomputed, ...], bytes]:
            found, root = await engine.recompute(step, works, seed)
            again = []
            for (index, *_), each in zip(works, found, strict=True):
                output, answer = self._made.get((step, index), (each.output, each.answer))
                again.append(replace(each, output=output, answer=answer))
            return tuple(again), root

        return audit_lies.Bent(bent, backward=backward, recompute=recompute)


def run(
    lie: str, stage: int, others: str = "", hear: Callable[[PeerId, str, dict[str, Any]], None] | None = None
) -> dict[str, set[PeerId]]:
    """A fourth member of that stage, the only one of its class, lies so; by event, about whom. others: another one.

    hear: told of every event.
    """
    swarm, told = VirtualSwarm(PLAN, 1, audit_model.Regression), dict[str, set[PeerId]]()
    swarm.exact = False
    kind = ({"": audit_lies.FalseWork} | audit_lies.LIES)[lie]
    lying = kind(swarm, ALONE, stage)
    lying.lying = True
    swarm.guises[ALONE] = cast(Guise, Brazen(lying))
    swarm.classes = {ALONE: "other", PeerId(others): "other"}

    def look(peer: PeerId, event: str, fields: dict[str, Any]) -> None:
        rounding = event == "late" and "rounding" in fields["reason"]
        if rounding or event in ("weighed", "convicted", "withheld", "disputed"):
            told.setdefault(event, set()).add(fields["peer"])

    swarm.hooks += [look, *([hear] if hear is not None else [])]

    async def script(swarm: VirtualSwarm) -> None:
        swarm.add((stage,), ALONE)

    swarm.run(until_s=240.0, script=script)
    return told


@pytest.mark.parametrize(("lie", "stage"), [("sign-flip", 1), ("scaled", 1), ("lazy", 1), ("random", 0)])
def test_a_gross_lie_of_one_that_is_alone_costs_it_its_place_at_whoever_looks(lie: str, stage: int) -> None:
    told = run(lie, stage)
    assert told["weighed"] == told["late"] == {ALONE}
    # Up to rounding nothing is proven. (Who is left out drops its works, and may be asked for one of them later.)
    assert "convicted" not in told


def test_an_honest_one_is_weighed_and_left_alone() -> None:
    assert run("", 1) == {"weighed": {ALONE}}


def test_who_has_a_mate_of_its_class_is_not_weighed() -> None:
    """Its mate verifies its work in every step to which both have contributed."""
    mate, weighed, both = PeerId("s1.3"), set[int](), set[int]()

    def look(peer: PeerId, event: str, fields: dict[str, Any]) -> None:
        if event == "weighed" and fields["peer"] == ALONE:
            weighed.add(fields["step"])
        shares = dict(fields["contributions"]) if event == "committed" and fields["stage"] == 1 else {}
        if shares.get(ALONE) and shares.get(mate):
            both.add(fields["step"])

    run("", 1, others=mate, hear=look)
    assert both and not weighed & both
