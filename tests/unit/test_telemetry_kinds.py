"""The table of event kinds has every event that the code emits, with its fields, and no other."""

from __future__ import annotations

import ast
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from event_schema import event_problem

import swarmnet
from swarmnet.ids import PeerId
from swarmnet.telemetry.kinds import _TYPES, KINDS, MARKS, page, schema

PACKAGE = Path(swarmnet.__file__).parent

EMITTERS = re.compile("_?(on_|case_)?event|_?say|name_once|heard|log|emit|_write|_blame|_end_accumulator")
"""Functions that are given the name of an event as their first or second argument."""

NO_EVENTS = frozenset(["cli", "monitor", "model", "wire", "ranks/program.py", "telemetry/kinds.py"])
"""Packages and modules where a function of such a name does something else."""


def texts(node: ast.expr) -> Iterator[str]:
    """The text, or both texts of `"a" if ... else "b"`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from (*texts(node.body), *texts(node.orelse))


def emitted(source: str) -> Iterator[tuple[str, set[str]]]:
    """Events in a module's source, each with the fields that are written out where it is emitted."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if EMITTERS.fullmatch(name):
                keys = [key for arg in node.args if isinstance(arg, ast.Dict) for key in arg.keys if key is not None]
                fields = {text for key in keys for text in texts(key)} | {
                    each.arg for each in node.keywords if each.arg
                }
                yield from ((text, fields) for arg in node.args[:2] for text in texts(arg) if text.isidentifier())
        # A name that is emitted later, or that a class has for its instances: `event = "..."`, alone or in a tuple.
        elif isinstance(node, ast.Assign):
            target = node.targets[0]
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            for name, value in pairs:
                if isinstance(name, ast.Name) and name.id in ("event", "BEGAN"):
                    yield from ((text, set()) for text in texts(value))


@pytest.fixture(scope="module")
def found() -> dict[str, set[str]]:
    """The fields of each event that the package emits."""
    events: dict[str, set[str]] = defaultdict(set)
    for path in sorted(PACKAGE.rglob("*.py")):
        module = path.relative_to(PACKAGE)
        if NO_EVENTS.isdisjoint((module.parts[0], module.as_posix())):
            for event, fields in emitted(path.read_text(encoding="utf-8")):
                events[event] |= fields
    return events


def test_every_event_is_in_the_table_and_every_row_is_emitted(found: dict[str, set[str]]) -> None:
    assert found.keys() - KINDS.keys() == set()
    assert KINDS.keys() - found.keys() == set()


def test_the_table_has_the_fields_of_every_event(found: dict[str, set[str]]) -> None:
    unknown = {event: more for event, fields in found.items() if (more := fields - KINDS[event].fields.keys())}
    assert unknown == {}


def test_every_mark_is_explained_and_used() -> None:
    assert set().union(*(kind.marks for kind in KINDS.values())) == MARKS.keys()


def test_the_page_of_events_is_the_table() -> None:
    written = (PACKAGE.parent / "docs/events.md").read_text(encoding="utf-8")
    assert written == page(), "run: python -m swarmnet.telemetry.kinds > docs/events.md"


def test_the_schema_is_that_of_the_table() -> None:
    written = (PACKAGE.parent / "docs/events.schema.json").read_text(encoding="utf-8")
    assert written == schema(), "run: python -m swarmnet.telemetry.kinds --schema > docs/events.schema.json"


def test_every_field_has_one_type_and_every_type_is_one_of_a_field() -> None:
    typed = Counter(field for row in _TYPES.strip().splitlines() for field in row.split(" | ")[1].split())
    assert typed == Counter({field for kind in KINDS.values() for field in kind.fields})


@pytest.mark.parametrize(
    ("event", "fields", "problem"),
    [
        ("applied", {"stage": 0, "step": 3, "loss": math.nan, "grad_norm": 1}, ""),
        ("fetching", {"level_in": None, "seconds_left": 2.5}, ""),
        ("dialled_back", {"could": [PeerId("a")], "could_not": {PeerId("b"): "no answer"}}, ""),
        ("applied", {"stage": "0"}, "stage: '0' is no integer"),
        ("applied", {"stage": True}, "stage: True is no integer"),
        ("applied", {"peer": "a"}, "more fields: ['peer']"),
        ("applied", {"loss": "high"}, "loss: 'high' is no number and 'high' is none of ['nan', 'inf', '-inf']"),
        ("audited", {"ok": 1}, "ok: 1 is no boolean"),
        ("disputed", {"peers": [PeerId("a"), 3]}, "peers: 1: 3 is no string"),
        ("reference_weights", {"sha256": {"a": 1}}, "sha256: a: 1 is no string"),
        ("no_event", {}, "event: 'no_event' is none of ["),
    ],
)
def test_an_event_that_the_schema_forbids_is_found(event: str, fields: dict[str, object], problem: str) -> None:
    found = event_problem(event, fields)
    assert found.startswith(problem) and bool(found) == bool(problem)


def test_events_are_found_wherever_they_are_emitted() -> None:
    source = """
class Fault:
    kind, event = "hang", "hung"
def f(self, peer, worse):
    self._on_event("late" if worse else "slow", {"peer": peer, **self.more})
    self._blame(peer, "lied", why="so")
"""
    assert sorted((event, sorted(fields)) for event, fields in emitted(source)) == [
        ("hung", []),
        ("late", ["peer"]),
        ("lied", ["why"]),
        ("slow", ["peer"]),
    ]
