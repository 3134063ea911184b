"""The benchmark book: every target with today's figure, the missed ones first.

    python benchmarks/report.py                    render docs/benchmarks.md and its pictures from benchmarks/results
    python benchmarks/report.py --run NAME...      run these first, and keep what they write (`all`: every one named in
                                                   benchmarks/targets.toml, hours)
    python benchmarks/report.py --take NAME=FILE   keep what NAME wrote to FILE just now, with this code on this machine
    python benchmarks/report.py --list             which there are, how long each takes, when it was last run

A result is what a benchmark writes with `--json`, without lists of more than 64 numbers, stamped with machine,
versions, date and the last commit that changed `swarmnet/`. `busy`: other programs had the machine when it began, so
seconds say little, ratios and virtual time stand. `targets.toml` says which target is read from where; its head has the
grammar.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parent
ROOT = BENCHMARKS.parent
TARGETS, RESULTS, PAGE = BENCHMARKS / "targets.toml", BENCHMARKS / "results", ROOT / "docs" / "benchmarks.md"
MOST_NUMBERS = 64
BUSY_LOAD = 0.25
"""Load average a core, before a benchmark begins, from which on the machine is called busy."""

TAKES: dict[str, Callable[[list[float]], float]] = {
    "max": max,
    "min": min,
    "mean": statistics.fmean,
    "sum": sum,
    "count": len,
}
STATES = {
    "missed": "Missed",
    "missed, noted": "Missed when last noted, not re-run here",
    "not measured": "Not measured",
    "met": "Met",
    "met, noted": "Met when last noted, not re-run here",
    "test": "Held by a test",
    "stated": "Without a target",
}
"""In the order of the page."""
APPENDIX = "missed, noted"
"""Where it begins."""


class ReportError(Exception):
    """One line: what, where, what to do."""


@dataclass(frozen=True, slots=True)
class Target:
    """A row of targets.toml."""

    part: str
    what: str
    anchor: str
    benchmark: str = ""
    figure: str = ""
    over: str = ""
    take: str = ""
    at_least: float | None = None
    at_most: float | None = None
    near: tuple[float, float] | None = None
    """(value, distance)."""
    unit: str = ""
    noted: float | None = None
    noted_on: datetime.date | None = None
    note: str = ""
    open: str = ""
    test: str = ""

    @property
    def goal(self) -> str:
        if self.near is not None:
            return f"{shown(self.near[0], self.unit)} ± {shown(self.near[1], self.unit)}"
        if self.at_least is not None:
            return f"≥ {shown(self.at_least, self.unit)}"
        return "" if self.at_most is None else f"≤ {shown(self.at_most, self.unit)}"

    def met_by(self, value: float) -> bool:
        if self.near is not None:
            return abs(value - self.near[0]) <= self.near[1]
        return value >= self.at_least if self.at_least is not None else value <= (self.at_most or 0.0)

    @property
    def has_goal(self) -> bool:
        return (self.near, self.at_least, self.at_most) != (None, None, None)


@dataclass(frozen=True, slots=True)
class Benchmark:
    """How a benchmark is run for the book, and about how long it takes."""

    minutes: float
    args: str = ""
    needs: str = ""
    program: str = ""
    """The file, where one has several ways to be run."""

    def command(self, name: str) -> str:
        return f"python benchmarks/{self.program or name}.py {self.args}".strip()


@dataclass(frozen=True, slots=True)
class Row:
    """A target with its figure."""

    target: Target
    state: str
    value: float | None
    said: str
    command: str


def shown(value: float, unit: str) -> str:
    """A number as the page has it."""
    if unit == "%":
        return f"{100 * value:.4g} %"
    number = f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"
    return f"{number} {unit}".strip()


# ---------------------------------------------------------------- targets and results


def read_targets(path: Path = TARGETS) -> tuple[list[Target], dict[str, Benchmark]]:
    """Raises ReportError, with the row that is at fault."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        benchmarks = {name: Benchmark(**row) for name, row in table.get("benchmark", {}).items()}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, TypeError) as error:
        raise ReportError(f"{path.name}: {error}; mend it") from error
    known, targets = {field.name for field in fields(Target)}, []
    for number, row in enumerate(table.get("target", []), 1):
        where = f"{path.name}, target {number} ({row.get('what', 'without `what`')!s:.60})"
        if strange := row.keys() - known:
            raise ReportError(f"{where}: no such key: {min(strange)}; there are {', '.join(sorted(known))}")
        read: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
        try:
            target = Target(**read)
        except TypeError as error:
            raise ReportError(f"{where}: part, what and anchor must be there: {error}") from error
        if target.take and target.take not in TAKES:
            raise ReportError(f"{where}: take = {target.take!r}; choose from {', '.join(TAKES)}")
        if (target.noted is None) != (target.noted_on is None):
            raise ReportError(f"{where}: `noted` and `noted_on` come together")
        if not (target.test or target.open or target.figure or target.noted is not None):
            raise ReportError(f"{where}: say where the figure is (`figure`, `test`), or why there is none (`open`)")
        targets.append(target)
    return targets, benchmarks


def read_results(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """By benchmark. Raises ReportError, with the file that is at fault."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ReportError(f"{path}: {error}; run `benchmarks/report.py --run {path.stem}` again") from error
        stamp = {"date", "commit", "machine", "cores", "versions", "busy", "command", "figures"}
        if not isinstance(result, dict) or (missing := stamp - result.keys()):
            what = f"without {min(missing)}" if isinstance(result, dict) else "no table"
            raise ReportError(f"{path}: {what}; run `benchmarks/report.py --run {path.stem}` again")
        found[path.stem] = result
    return found


SEGMENT = re.compile(r"(?P<name>[^.\[\]{}]+|\{[^{}]+\})(?:\[(?P<conditions>[^\]]*)\])?(?:\.|$)")


def picked(found: Any, path: str) -> list[Any]:
    """All values at `path`; none if there is no such place. Raises ReportError for a path that is none."""
    values, at = [found], 0
    while at < len(path):
        part = SEGMENT.match(path, at)
        if part is None:
            raise ReportError(f"{TARGETS.name}: {path!r} is no path at {path[at:]!r}")
        values = list(_step(values, part["name"], part["conditions"]))
        at = part.end()
    return values


def _step(values: Sequence[Any], name: str, conditions: str | None) -> Iterator[Any]:
    names = name[1:-1].split(",") if name.startswith("{") else [name]
    for value in values:
        for each in names:
            if not isinstance(value, dict) or each not in value:
                continue
            if conditions is None:
                yield value[each]
            elif isinstance(value[each], list):
                wanted = [pair.split("=", 1) for pair in conditions.split(";") if pair]
                yield from (row for row in value[each] if all(_is(row, key, text) for key, text in wanted))


def _is(row: Any, key: str, text: str) -> bool:
    value = row.get(key) if isinstance(row, dict) else None
    return text == (value if isinstance(value, str) else json.dumps(value))


def figure_of(target: Target, result: dict[str, Any]) -> float | None:
    """None: the benchmark did not write it. Raises ReportError where one number is asked for, and more are there."""
    value = _taken(target, result, target.figure)
    if value is None or not target.over:
        return value
    below = _taken(target, result, target.over)
    return value / below if below else None


def _taken(target: Target, result: dict[str, Any], path: str) -> float | None:
    values = [value for value in picked(result["figures"], path) if value is not None]
    if not values:
        return None
    where = f"{TARGETS.name}: {path!r} of {target.benchmark}"
    if not target.take and len(values) > 1:
        raise ReportError(f"{where} is {len(values)} numbers: say `take`")
    if target.take != "count" and not all(isinstance(value, int | float) for value in values):
        raise ReportError(f"{where} is no number: {values[0]!r:.40}")
    return float(TAKES[target.take](values)) if target.take else float(values[0])


def rows_of(
    targets: Sequence[Target], benchmarks: dict[str, Benchmark], results: dict[str, dict[str, Any]]
) -> list[Row]:
    """Every target with its figure. Raises ReportError if one has none, and nothing says why."""
    return [_row(target, benchmarks, results.get(target.benchmark)) for target in targets]


def _row(target: Target, benchmarks: dict[str, Benchmark], result: dict[str, Any] | None) -> Row:
    if target.benchmark and target.benchmark not in benchmarks:
        raise ReportError(f"{TARGETS.name}: no [benchmark.{target.benchmark}], which {target.what!r} names")
    command = f"pytest {target.test}" if target.test else ""
    if target.benchmark:
        command = benchmarks[target.benchmark].command(target.benchmark)
    value = figure_of(target, result) if result is not None and target.figure else None
    note = f"; {target.note}" if target.note else ""
    if value is not None and result is not None:
        busy = ", busy" if result["busy"] else ""
        # What was remarked of an older figure need not be true of this one.
        said = f"**{shown(value, target.unit)}** ({result['date']}{busy})" + (note if target.noted is None else "")
        return Row(target, _verdict(target, value, ""), value, said, command)
    if target.noted is not None:
        said = f"{shown(target.noted, target.unit)} (noted {target.noted_on}){note}"
        return Row(target, _verdict(target, target.noted, ", noted"), None, said, command)
    if target.test:
        return Row(target, "test", None, f"asserted{note}", command)
    if not target.open:
        raise ReportError(
            f"{TARGETS.name}: {target.what!r} has no figure: {target.benchmark}.json has no {target.figure!r}; run it, "
            "or say why not (`open`)"
        )
    return Row(target, "not measured", None, target.open + note, command)


def _verdict(target: Target, value: float, suffix: str) -> str:
    if not target.has_goal:
        return "stated"
    return ("met" if target.met_by(value) else "missed") + suffix


# ---------------------------------------------------------------- the page

HEAD = """# Benchmarks

Every target of every part of the plan, with its figure: the missed ones first. `python benchmarks/report.py` writes
this page from [benchmarks/results](../benchmarks/results) and [benchmarks/targets.toml](../benchmarks/targets.toml);
`--run NAME` runs a benchmark before. A bold figure is read from a result in this repository. "Noted" is the figure of
an earlier note, not re-run here. "Asserted" is what a test would fail on. "Busy": other programs had the
machine, so ratios and virtual time count, and seconds say little. Parts 1 to 6 and 8 are the present plan's, A1 to
A4 those before it. No GPU was there for any of it.
"""


def render(rows: Sequence[Row], benchmarks: dict[str, Benchmark], results: dict[str, dict[str, Any]]) -> str:
    """docs/benchmarks.md."""
    count = Counter(row.state for row in rows)
    summary = ", ".join(f"{count[state]} {state}" for state in STATES if count[state])
    parts = [
        HEAD,
        f"{len(rows)} rows: {summary.replace('test', 'held by a test').replace('stated', 'without a target')}.\n",
    ]
    for state, title in STATES.items():
        of_state = [row for row in rows if row.state == state]
        if state == APPENDIX:
            parts += ["## Appendix\n", *pictures(results)]
        if of_state:
            mark = "##" if list(STATES).index(state) < list(STATES).index(APPENDIX) else "###"
            parts += [f"{mark} {title}\n", _table(of_state)]
    if "time_to_loss" in results:
        parts += ["### Time to a loss\n", _times(results["time_to_loss"]["figures"])]
    parts.append("### When and where\n")
    parts.append(_runs(benchmarks, results))
    return "\n".join(parts)


def _table(rows: Sequence[Row]) -> str:
    lines = ["| part | target | goal | figure | anchor | command |", "|---|---|---|---|---|---|"]
    for row in rows:
        target = row.target
        command = f"`{row.command}`" if row.command else "none"
        cells = (target.part, target.what, target.goal, row.said, target.anchor, command)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _times(found: dict[str, Any]) -> str:
    """Hours to two losses by line and mode, and how many times sooner than SWARM-like."""
    every, low = found["losses"]["all"], found["losses"]["low"]
    modes = list(found["curves"])
    lines = [
        f"Hours to a held-out loss of {every:.3f}, then of {low:.3f}, of the small model, at the large model's virtual "
        "seconds a step; in brackets, times sooner than SWARM-like. `python benchmarks/time_to_loss.py --help` says "
        "what is assumed.\n",
        "| Mbit/s | round trip, ms | " + " | ".join(modes) + " |",
        "|---|---|" + "---|" * len(modes),
        "| steps | | "
        + " | ".join(_pair(found["steps"][name][mode] for name in ("all", "low")) for mode in modes)
        + " |",
    ]
    for line in dict.fromkeys((row["mbit"], row["rtt_ms"]) for row in found["rows"]):
        cells = []
        for row in (row for row in found["rows"] if (row["mbit"], row["rtt_ms"]) == line):
            taken = ((row[f"{name}_s"], row[f"{name}_times"]) for name in ("all", "low"))
            cells.append("; ".join("never" if s is None else f"{s / 3600:.2f} ({times:.2f})" for s, times in taken))
        lines.append(f"| {line[0]} | {line[1]} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _pair(steps: Iterator[float | None]) -> str:
    return "; ".join("never" if each is None else f"{each:.0f}" for each in steps)


def _runs(benchmarks: dict[str, Benchmark], results: dict[str, dict[str, Any]]) -> str:
    lines = ["| benchmark | minutes | date | commit | machine | versions |", "|---|---|---|---|---|---|"]
    for name, benchmark in sorted(benchmarks.items()):
        cells = [name, f"{benchmark.minutes:g}", "not run here", "", benchmark.needs and f"needs {benchmark.needs}", ""]
        if name in results:
            result = results[name]
            busy = ", busy" if result["busy"] else ""
            versions = ", ".join(f"{of} {version}" for of, version in result["versions"].items())
            cells[2:] = [
                result["date"],
                result["commit"],
                f"{result['machine']}, {result['cores']} cores{busy}",
                versions,
            ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


PICTURES = {
    "audit": "Liars named, by how many microbatches of their own: the formula of trust.md, and dots measured.",
    "latency": "Devices busy, by round trip, beside a relay that waits and SWARM's published figures.",
    "time_to_loss": "Time to a fixed loss by mode and link, over the SWARM-like mode's.",
    "scaling": "Microbatches per second by replicas, over one replica's.",
}


def pictures(results: dict[str, dict[str, Any]]) -> list[str]:
    """Lines of the page for what can be drawn."""
    names = ["targets", *(name for name in PICTURES if name in results)]
    words = PICTURES | {"targets": "How far each measured target is met: right of 1 is better than asked."}
    return [f"![{words[name]}](benchmarks/{name}.png)\n" for name in names]


# ---------------------------------------------------------------- running


def small(found: Any) -> Any:
    """Without lists of many numbers."""
    if isinstance(found, dict):
        return {key: small(value) for key, value in found.items() if not _is_long(value)}
    return [small(each) for each in found] if isinstance(found, list) else found


def _is_long(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) > MOST_NUMBERS
        and all(isinstance(each, int | float | list) for each in value)
    )


def machine() -> str:
    """Processor, architecture, system."""
    model = ""
    try:
        found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
        model = found[1] if found else ""
    except OSError:
        pass  # not Linux
    return f"{model or platform.processor() or 'unknown'}, {platform.machine()} {platform.system()}"


def stamp(command: str, found: Any, load: float) -> dict[str, Any]:
    """The result as it is kept."""
    asked = ["git", "-C", str(ROOT)]
    commit = subprocess.run(
        [*asked, "log", "-1", "--format=%h", "--", "swarmnet"], capture_output=True, text=True, check=False
    )
    changed = subprocess.run(
        [*asked, "status", "--porcelain", "--", "swarmnet"], capture_output=True, text=True, check=False
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    versions = {"python": platform.python_version(), "torch": importlib.metadata.version("torch")}
    return {
        "command": command,
        "date": datetime.date.today().isoformat(),
        "commit": (commit.stdout.strip() or "unknown") + ("+" if changed.stdout.strip() else ""),
        "machine": machine(),
        "cores": os.cpu_count(),
        "versions": versions | {"swarmnet": project["version"]},
        "busy": load > BUSY_LOAD * (os.cpu_count() or 1),
        "figures": small({"rows": found} if isinstance(found, list) else found),
    }


def run(name: str, benchmark: Benchmark) -> None:
    """Run it and keep its result. Raises ReportError if it wrote none."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        program = BENCHMARKS / f"{benchmark.program or name}.py"
        command = [sys.executable, str(program), *benchmark.args.split(), "--json", str(file)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        # Some end with 1 where a goal is missed.
        if code not in (0, 1) or not file.exists():
            raise ReportError(f"{name} ended with {code} and wrote no result; run it alone to see why")
        keep(name, benchmark, file, load)


def keep(name: str, benchmark: Benchmark, file: Path, load: float) -> None:
    """Stamp what the benchmark has written. Raises ReportError if it is no JSON."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ReportError(f"{file}: {error}; run {name} again") from error
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps(stamp(benchmark.command(name), found, load), indent=1) + "\n"
    (RESULTS / f"{name}.json").write_text(text, encoding="utf-8")


def take(text: str, benchmarks: dict[str, Benchmark]) -> None:
    """NAME=FILE."""
    name, _, file = text.partition("=")
    if name not in benchmarks or not file:
        raise ReportError(f"--take {text}: say NAME=FILE; --list names them")
    keep(name, benchmarks[name], Path(file), os.getloadavg()[0])


def run_all(names: Sequence[str], benchmarks: dict[str, Benchmark]) -> bool:
    """Returns whether all of them wrote their results."""
    if unknown := [name for name in names if name != "all" and name not in benchmarks]:
        raise ReportError(f"no such benchmark: {unknown[0]}; --list names them")
    failed = []
    every = list(benchmarks) if "all" in names else list(dict.fromkeys(names))
    for number, name in enumerate(every, 1):
        print(
            f"{number} of {len(every)}: {name}, about {benchmarks[name].minutes:g} minutes", file=sys.stderr, flush=True
        )
        try:
            run(name, benchmarks[name])
        except ReportError as error:
            print(f"report: {error}", file=sys.stderr, flush=True)
            failed.append(name)
    return not failed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python benchmarks/report.py --run lines rebalance",
    )
    parser.add_argument("--run", nargs="+", metavar="NAME", help="run these first, or all")
    parser.add_argument("--take", nargs="+", metavar="NAME=FILE", help="keep these results")
    parser.add_argument("--list", action="store_true", help="name the benchmarks")
    parser.add_argument("--no-pictures", action="store_true", help="the page alone (pictures need the extra `plot`)")
    options = parser.parse_args()
    try:
        targets, benchmarks = read_targets()
        complete = run_all(options.run, benchmarks) if options.run else True
        for text in options.take or ():
            take(text, benchmarks)
        results = read_results()
        if options.list:
            for name, benchmark in benchmarks.items():
                last = results[name]["date"] if name in results else "never"
                needs = f"  needs {benchmark.needs}" if benchmark.needs else ""
                print(f"{name:20} {benchmark.minutes:>5g} min  {last}{needs}")
            return 0
        rows = rows_of(targets, benchmarks, results)
        PAGE.write_text(render(rows, benchmarks, results), encoding="utf-8")
        if not options.no_pictures:
            draw(rows, results)
    except ReportError as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("report: interrupted; what had ended is kept", file=sys.stderr)
        return 130
    print(f"{PAGE.relative_to(ROOT)}: " + ", ".join(f"{n} {s}" for s, n in Counter(row.state for row in rows).items()))
    return 0 if complete else 1


def draw(rows: Sequence[Row], results: dict[str, dict[str, Any]]) -> None:
    """Raises ReportError without matplotlib."""
    try:
        import report_pictures
    except ImportError as error:
        raise ReportError(f"{error}: install the extra `plot`, or say --no-pictures") from error
    report_pictures.draw(
        rows, {name: result["figures"] for name, result in results.items()}, PAGE.parent / "benchmarks"
    )


if __name__ == "__main__":
    sys.exit(main())
