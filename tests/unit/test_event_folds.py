"""What an event means is said in the table of kinds and in the folds: no other code asks for an event's name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import swarmnet
from swarmnet.telemetry.kinds import KINDS, EventFold

PACKAGE = Path(swarmnet.__file__).parent
FOLD = PACKAGE / "telemetry/run_state.py"


def is_name(node: ast.expr) -> bool:
    """Does this hold an event's name: `event`, `kind.name`, `line["event"]`, `line.get("event")`?"""
    match node:
        case ast.Name("event") | ast.Attribute(ast.Name("kind"), "name"):
            return True
        case ast.Subscript(slice=ast.Constant("event")):
            return True
        case ast.Call(ast.Attribute(attr="get"), [ast.Constant("event"), *_]):
            return True
    return False


def kinds_in(*nodes: ast.AST) -> set[str]:
    """Names of kinds that are written out within."""
    texts = (each.value for node in nodes for each in ast.walk(node) if isinstance(each, ast.Constant))
    return {text for text in texts if isinstance(text, str)} & KINDS.keys()


def asked(source: str) -> Iterator[tuple[int, set[str]]]:
    """Lines that compare an event's name with those of kinds, or match it."""
    # Most modules know no events.
    if "event" not in source and "kind.name" not in source:
        return
    for node in ast.walk(ast.parse(source)):
        found: set[str] = set()
        match node:
            case ast.Compare(left, _, others) if any(map(is_name, (left, *others))):
                found = kinds_in(left, *others)
            case ast.Match(subject, cases) if is_name(subject):
                found = kinds_in(*(case.pattern for case in cases))
            case ast.MatchMapping(keys, patterns):
                found = kinds_in(*(pattern for key, pattern in zip(keys, patterns, strict=True) if is_key(key)))
        if found:
            yield node.lineno, found


def is_key(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == "event"


def test_no_code_but_the_fold_asks_for_the_name_of_an_event() -> None:
    found = {
        f"{path.relative_to(PACKAGE)}:{line}": kinds
        for path in sorted(PACKAGE.rglob("*.py"))
        if path != FOLD
        for line, kinds in asked(path.read_text(encoding="utf-8"))
    }
    assert found == {}, "give the kind a mark, the run state a field, or derive from EventFold"


@pytest.mark.parametrize(
    "source",
    [
        'event == "synced"',
        '"late" != event["event"]',
        'each.get("event") == "finished" and more',
        'event in ("applied", "synced")',
        'kind.name == "applied"',
        "match event:\n    case 'synced' | 'other': pass",
        'match line["event"]:\n    case "late": pass',
        'match line:\n    case {"event": "late", "peer": peer}: pass',
    ],
)
def test_a_question_is_found_in_any_form(source: str) -> None:
    assert len(list(asked(source))) == 1


@pytest.mark.parametrize(
    "source", ['event == "no such kind"', 'state == "synced"', 'match line:\n    case {"how": "late"}: pass']
)
def test_other_words_are_no_events(source: str) -> None:
    assert list(asked(source)) == []


def test_a_fold_hears_the_kinds_for_which_it_has_a_method() -> None:
    class Late(EventFold):
        def on_late(self, peer: str) -> str:
            return f"{peer} is late"

    assert (Late().take("late", "a"), Late().take("synced", "a")) == ("a is late", None)


def test_a_fold_that_waits_for_an_event_that_nobody_emits_cannot_be_made() -> None:
    with pytest.raises(AssertionError, match=r"Typo: no kinds of events: \['on_syncd'\]"):
        type("Typo", (EventFold,), {"on_syncd": print})
