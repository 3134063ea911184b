"""What a peer or a trainer keeps in memory does not grow with the number of steps, on virtual time."""

from __future__ import annotations

import asyncio
import functools
import sys
import types
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Any

import pytest
from further import further

from swarmnet.manifest.schema import Audits
from swarmnet.net.history import KEPT_STEPS
from swarmnet.telemetry.figures import MAX_EVALUATIONS
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import VirtualSwarm

STEPS = 80
"""After so many steps everything has its size: of sums and contributors, the last 64 are kept."""

LARGER = {
    "HistoryBook._figures[]": KEPT_STEPS,  # what the dashboard draws of a run: 0.3 kB a step
    "HistoryBook._evaluations[]": MAX_EVALUATIONS,
    "StepFigures": KEPT_STEPS,
    "Evaluation": MAX_EVALUATIONS,
}
"""What still grows then, and the constant that ends it: 0.6 MB together."""

SHORT, MOST_CACHED = 64, 1024
"""Entries of a function's cache: those that are keyed by messages are full after some hundred steps."""

_HARNESS = "swarmnet.simulate", "swarmnet.testing"

_LEAVES = (type, types.ModuleType, str, bytes, int, float, Enum, asyncio.AbstractEventLoop, type(None))


def sizes(roots: Iterable[object]) -> Counter[str]:
    """Entries of all containers that can be reached, and instances of our own classes, by name.

    A container is named by the class and attribute that leads to it: `Court._sums{}`. What the simulator stands in for
    is left out.
    """
    found, seen, waiting = Counter[str](), set[int](), deque((type(root).__name__, root) for root in roots)
    while waiting:
        name, thing = waiting.popleft()
        module = str(type(thing).__module__)
        if (
            isinstance(thing, _LEAVES)
            or module.startswith(("swarmnet.simulate", "swarmnet.testing"))
            or id(thing) in seen
        ):
            continue
        seen.add(id(thing))
        if module.startswith("swarmnet"):
            found[type(thing).__name__] += 1
        if isinstance(thing, Mapping):
            found[name + "{}"] += len(thing)
            waiting.extend((name + "{}", each) for pair in list(thing.items()) for each in pair)
        elif isinstance(thing, list | tuple | set | frozenset | deque):
            # A short one that is bounded as it is made has its size from the beginning, and so has a value in a table.
            short = 0 < (getattr(thing, "maxlen", None) or 0) <= SHORT
            value = name.endswith(("[]", "{}")) and isinstance(thing, tuple | frozenset)
            found[name + "[]"] += 1 if short or value else len(thing)
            waiting.extend((name + "[]", each) for each in list(thing))
        waiting.extend((f"{name}()" if led == "" else led, each) for led, each in _parts(thing))
    return found


def _parts(thing: Any) -> Iterator[tuple[str, object]]:
    """What else this leads to, and its name; "": none of its own."""
    match thing:
        case types.MethodType():
            yield "", thing.__self__
        case types.FunctionType():
            yield from (("", cell.cell_contents) for cell in thing.__closure__ or () if cell != types.CellType())
        case asyncio.Task():
            yield "", thing.get_coro()
        case types.CoroutineType():
            yield from (("", each) for each in (thing.cr_frame.f_locals.values() if thing.cr_frame else ()))
        case _:
            names = {name for kind in type(thing).__mro__ for name in _slots(kind)} | getattr(
                thing, "__dict__", {}
            ).keys()
            for name in names - {"__dict__", "__weakref__"}:
                yield f"{type(thing).__name__}.{name}", getattr(thing, name, None)


def _slots(kind: type) -> list[str]:
    slots = kind.__dict__.get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    return [f"_{kind.__name__}{name}" if name.startswith("__") and name[-2:] != "__" else name for name in names]


def caches() -> dict[str, Any]:
    """What is known of the caches of our functions, by name; those of the harness aside."""
    names = [name for name in sys.modules if name.startswith("swarmnet.") and not name.startswith(_HARNESS)]
    found = (each for name in names for each in vars(sys.modules[name]).values())
    return {
        f"{f.__module__}.{f.__qualname__}": f.cache_info() for f in found if isinstance(f, functools._lru_cache_wrapper)
    }


@pytest.mark.parametrize("sync", ["exact", *further("overlap")])
def test_no_container_grows_with_the_steps(sync: str) -> None:
    """All that can be reached from two replicas of a stage, one of another and a trainer, in a run with everything
    that is done now and then: the second 80 steps add to no container."""
    plan = Plan(
        sync=sync,
        served=((0,), (1,), (1,)),
        microbatches=2,
        steps=2 * STEPS,
        checkpoint_every=7,
        eval_every=5,
        drift_every=5,
        audit=Audits(microbatches=0.2, contributions=0.2),
    )
    swarm = VirtualSwarm(plan, seed=1)
    swarm.detailed = False
    most, cached = {STEPS: Counter[str](), 2 * STEPS: Counter[str]()}, dict[int, dict[str, Any]]()

    def look(peer: object, event: str, fields: dict[str, Any]) -> None:
        if event != "applied" or peer != swarm.nodes[1].peer_id or fields["version"] % 5:
            return
        for mark in most:
            # Some tables are full only now and then.
            if mark - STEPS // 2 < fields["version"] <= mark:
                most[mark] |= sizes(node.service for node in swarm.network._nodes.values())
            if fields["version"] == mark:
                cached[mark] = caches()

    swarm.hooks.append(look)
    swarm.run()
    half, full = most[STEPS], most[2 * STEPS]
    assert {"Peer", "Trainer", "Cases", "Cases._sums{}", "StepFigures"} <= half.keys(), "the search has found nothing"
    grown = {name: (half[name], size) for name, size in full.items() if size > half[name] + max(8, half[name] // 4)}
    assert grown.keys() <= LARGER.keys(), grown
    assert set(LARGER) <= grown.keys(), "an exception that is needed no more"
    for name, now in cached[2 * STEPS].items():
        before = cached[STEPS].get(name)
        grows = now.currsize > (before.currsize if before is not None else 0) + 4
        assert not grows or (now.maxsize or MOST_CACHED + 1) <= MOST_CACHED, f"{name} grows with the steps: {now}"
