"""Does an event match docs/events.schema.json? As much of JSON Schema as that file uses, so that tests need no
validator."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from swarmnet.telemetry.log import plain

SCHEMA = json.loads((Path(__file__).parent.parent / "docs/events.schema.json").read_text(encoding="utf-8"))

_CASES = {case["if"]["properties"]["event"]["const"]: case["then"] for case in SCHEMA["allOf"]}
"""By event: a validator goes through all of them, which takes too long in a test of 100,000 events."""

_WORDS: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "array": list,
    "object": dict,
    "null": type(None),
}


def event_problem(event: str, fields: Mapping[str, object]) -> str:
    """What of an event the schema forbids; "": nothing."""
    return line_problem(plain({"t": 0.0, "event": event, **fields}))


def line_problem(line: Mapping[str, Any]) -> str:
    """The same, of a line of an events file."""
    whole = {keyword: rule for keyword, rule in SCHEMA.items() if keyword != "allOf"}
    found = _problem(line, whole) or _problem(line, _CASES[line["event"]])
    return found and f"{found}, in {line}"


def _problem(value: Any, schema: Any) -> str:
    if schema is True:
        return ""
    return next(filter(None, (_broken(value, keyword, rule, schema) for keyword, rule in schema.items())), "")


def _broken(value: Any, keyword: str, rule: Any, schema: Mapping[str, Any]) -> str:
    """What one keyword forbids."""
    match keyword:
        case "type":
            right = isinstance(value, bool) if rule == "boolean" else isinstance(value, _WORDS[rule])
            # To Python a boolean is an integer, too.
            right = right and (rule == "boolean" or not isinstance(value, bool))
            return "" if right else f"{value!r} is no {rule}"
        case "enum":
            return "" if value in rule else f"{value!r} is none of {rule}"
        case "anyOf":
            found = [_problem(value, each) for each in rule]
            return "" if "" in found else " and ".join(found)
        case "$ref":
            return _problem(value, SCHEMA["$defs"][rule.removeprefix("#/$defs/")])
        case "required":
            return "".join(f"{each} is missing" for each in rule if each not in value)
        case "properties":
            return _first((each, _problem(value[each], rule[each])) for each in rule if each in value)
        case "additionalProperties":
            more = value.keys() - schema.get("properties", {})
            if rule is False:
                return f"more fields: {sorted(more)}" if more else ""
            return _first((each, _problem(value[each], rule)) for each in more)
        case "items":
            return _first((str(place), _problem(each, rule)) for place, each in enumerate(value))
        case "$schema" | "$defs" | "title" | "description":
            return ""
    raise AssertionError(f"events.schema.json has a keyword that this check does not know: {keyword}")


def _first(problems: Iterable[tuple[str, str]]) -> str:
    return next((f"{where}: {problem}" for where, problem in problems if problem), "")
