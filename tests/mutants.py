"""Which share of small faults in the code the tests notice: `python tests/mutants.py step sums --count 100 --seed 1`.

A mutant is a module with one expression or statement changed. The tests run once in a copy of the tree under `coverage`
(`pip install coverage`). Each mutant is then written into the copy, and the fastest of the tests that execute its line
run against it. Processes that a test starts are not measured, so name tests that start none.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).parents[1]
SWAPS = {ast.Lt: ast.LtE, ast.Gt: ast.GtE, ast.Eq: ast.NotEq, ast.And: ast.Or, ast.Add: ast.Sub}
SWAPS |= {swap: op for op, swap in SWAPS.items()}
FORKED = get_context("forkserver")


@dataclass
class Mutant:
    file: str
    line: int
    operator: str
    place: int
    """Among the changes of the file."""
    result: str = "not covered"


Change = tuple[str, Callable[[], None]]
"""What it is, and how it is made in the tree that it was found in."""


def changes_of(tree: ast.AST) -> Iterator[tuple[int, Change]]:
    """The line of each change that can be made, always in the same order. Annotations stay as they are."""
    for change in _changes(tree):
        yield getattr(tree, "lineno", 1), change
    for name, value in ast.iter_fields(tree):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in ("annotation", "returns"):
                yield from changes_of(child)


def _changes(node: ast.AST) -> Iterator[Change]:
    def change(name: str, value: object) -> Callable[[], None]:
        return lambda: setattr(node, name, value)

    match node:
        case ast.Compare(ops=ops):
            for place, op in enumerate(ops):
                if swap := SWAPS.get(type(op)):
                    operator = f"{type(op).__name__} -> {swap.__name__}"
                    yield operator, change("ops", [*ops[:place], swap(), *ops[place + 1 :]])
        case ast.BoolOp(op=op) | ast.BinOp(op=op) | ast.AugAssign(op=op) if swap := SWAPS.get(type(op)):
            yield f"{type(op).__name__} -> {swap.__name__}", change("op", swap())
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "not removed", change("operand", ast.UnaryOp(ast.Not(), operand))
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            yield f"{number} -> {number + 1}", change("value", number + 1)
        case ast.Return(value=ast.expr() as value) if getattr(value, "value", value) is not None:
            yield "return None", change("value", ast.Constant(None))
        case ast.Expr(value=ast.Call() | ast.Await(value=ast.Call())):
            yield "call removed", change("value", ast.Constant(None))
        # A condition that is `not` or `==` has this mutant already.
        case ast.If(test=test) | ast.IfExp(test=test) if not isinstance(test, ast.UnaryOp):
            if not (isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq | ast.NotEq)):
                yield "if negated", change("test", ast.UnaryOp(ast.Not(), test))
    match node:
        case (
            ast.Assign(targets=[target]) | ast.AugAssign(target=target) | ast.AnnAssign(target=target, value=ast.expr())
        ):
            if isinstance(target, ast.Attribute):
                yield "assignment removed", change("__class__", ast.Pass)


def chosen(packages: list[str], count: int, seed: int) -> list[Mutant]:
    """`count` mutants: each in a module drawn by its lines of code, at a line drawn from those that can change."""
    rng = random.Random(seed)
    files = sorted(path for package in packages for path in (ROOT / "swarmnet" / package).rglob("*.py"))
    trees = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in files}
    lines = [len({getattr(node, "lineno", 0) for node in ast.walk(tree)}) for tree in trees.values()]
    changes = {file: list(enumerate(changes_of(tree))) for file, tree in trees.items()}
    found: dict[tuple[str, int], Mutant] = {}
    while len(found) < min(count, sum(map(len, changes.values()))):
        (file,) = rng.choices(list(trees), lines)
        if changes[file]:
            line = rng.choice(sorted({line for _, (line, _) in changes[file]}))
            place, (_, (operator, _)) = rng.choice([each for each in changes[file] if each[1][0] == line])
            found[file, place] = Mutant(file, line, operator, place)
    return sorted(found.values(), key=lambda mutant: (mutant.file, mutant.line, mutant.place))


def gather(copy: Path, packages: list[str], tests: list[str], limit_s: float, each_s: float) -> dict[str, float]:
    """Run the tests in this process, each as a context of the coverage data; returns the seconds of what passed."""
    import coverage
    import pytest

    cover = coverage.Coverage(data_file=copy / ".coverage", source=[f"swarmnet/{package}" for package in packages])
    seconds: dict[str, float] = {}
    end = time.monotonic() + limit_s

    class Contexts:
        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
            if time.monotonic() > end:
                item.session.shouldstop = f"{limit_s:.0f} s are over"
            cover.switch_context(item.nodeid)
            return (yield)

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.when == "call" and report.passed:
                seconds[report.nodeid] = report.duration

    cover.start()
    pytest.main(["-q", "-p", "no:cacheprovider", f"--timeout={each_s}", "--tb=no", *tests], plugins=[Contexts()])
    cover.stop()
    cover.save()
    return seconds


def covering(copy: Path, mutant: Mutant, seconds: dict[str, float]) -> list[str]:
    """The tests that execute the line, the fastest first; for one that runs at import, those of its module."""
    import coverage

    data = coverage.CoverageData(copy / ".coverage")
    data.read()
    contexts = data.contexts_by_lineno(str(copy / mutant.file))
    tests = set(contexts.get(mutant.line, ()))
    if tests == {""}:
        tests = {test for line in contexts.values() for test in line}
    return sorted(tests & set(seconds), key=lambda test: (seconds[test], test))


def run(tests: list[str], answer: Connection) -> None:
    """Send which of the tests failed first, or why they came to no end; nothing when all passed."""
    import pytest

    failed: list[str] = []

    class Failures:
        def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
            items[:] = [item for item in items if item.nodeid in tests]

        def pytest_runtest_logreport(self, report: pytest.TestReport | pytest.CollectReport) -> None:
            failed.extend([report.nodeid] * report.failed)

        pytest_collectreport = pytest_runtest_logreport

    os.setsid()
    files = sorted({test.partition("::")[0] for test in tests})
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        pytest.main(["-x", "-q", "-p", "no:cacheprovider", *files], plugins=[Failures()])
    answer.send(failed[0] if failed else "")


def killer_of(tests: list[str], limit_s: float) -> str:
    """What `run` sends, from a process that has torch already."""
    here, there = FORKED.Pipe(duplex=False)
    process = FORKED.Process(target=run, args=(tests, there))
    process.start()
    there.close()
    try:
        return str(here.recv()) if here.poll(limit_s) else f"no end in {limit_s:.0f} s"
    except EOFError:
        return "the end of the process"
    finally:
        process.join(2.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)  # and what the tests have started
        process.join()


def tried(copy: Path, mutant: Mutant, tests: list[str], limit_s: float) -> str:
    """What becomes of a mutant that is written into the copy meanwhile."""
    file = copy / mutant.file
    text = file.read_text()
    tree = ast.parse(text)
    list(changes_of(tree))[mutant.place][1][1]()
    file.write_text(ast.unparse(tree))
    killer = killer_of(tests, limit_s)
    file.write_text(text)
    return f"killed by {killer}" if killer else f"survived {len(tests)} tests"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("packages", nargs="+", help="of swarmnet/")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", nargs="+", default=["tests/unit", "tests/sim"])
    parser.add_argument("--tests-s", type=float, default=900, help="tests that would start later are not used")
    parser.add_argument("--test-s", type=float, default=10, help="nor is a slower test")
    parser.add_argument("--most", type=int, default=60, help="tests for one mutant")
    parser.add_argument("--limit-s", type=float, default=60, help="a mutant whose tests take longer is killed")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    mutants = chosen(options.packages, options.count, options.seed)
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch).resolve() / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__"))
        os.chdir(copy)
        sys.path[0] = os.environ["PYTHONPATH"] = str(copy)
        FORKED.set_forkserver_preload(["torch", "pytest", "hypothesis"])
        with ProcessPoolExecutor(1, FORKED) as pool:
            how = (copy, options.packages, options.tests, options.tests_s, options.test_s)
            seconds = pool.submit(gather, *how).result()
        print(f"{len(seconds)} tests passed", flush=True)
        for mutant in mutants:
            tests = covering(copy, mutant, seconds)[: options.most]
            if tests:
                mutant.result = tried(copy, mutant, tests, options.limit_s)
            print(f"{mutant.file}:{mutant.line}: {mutant.operator}: {mutant.result}", flush=True)
        # A test that fails without a mutant has killed none.
        killers = {mutant.result.removeprefix("killed by ") for mutant in mutants} & set(seconds)
        if killer := killer_of(sorted(killers), 60 + 3 * sum(seconds[test] for test in killers)):
            print(f"without a mutant, too: {killer}")
    killed, left = (sum(mutant.result.startswith(word) for mutant in mutants) for word in ("killed", "survived"))
    print(f"{killed} of {killed + left} covered mutants killed ({killed / max(1, killed + left):.0%})")
    if options.json:
        options.json.write_text(json.dumps([asdict(mutant) for mutant in mutants], indent=1))


if __name__ == "__main__":
    main()
