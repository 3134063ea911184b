"""The house: who may import whom, which modules are pure, which names are not ours. This table is the only one."""

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path

import pytest

import swarmnet

PACKAGE = Path(swarmnet.__file__).parent

# Row by row from the ground. A module imports from rows below its own, and from its own room. The rooms of row 0
# may use each other, without a cycle.
ROWS = (
    "bounds clock config host manifest ids errors messages pacing pledge quorum statement transport directory telemetry"
    " fetch",
    "data wire",
    "model net",
    "stage",
    "engine",
    "sums",
    "pipeline averaging ranks state",
    "plan step",
    "audit",
    "peer trainer",
    "testing",
    "local simulate monitor",
    "cli",
    "api",
)
ROW = {room: number for number, rooms in enumerate(ROWS) for room in rooms.split()}
GROUND = frozenset(ROWS[0].split())

# Decisions: the standard library, row 0 and each other. No clock, no socket, no torch. By room; "" is the package.
PURE = {
    "": "ids errors messages quorum statement bounds pacing pledge",
    "telemetry": "kinds run_state figures spans text",
    "fetch": "plan",
    "net": "admission limits nat/kinds nat/relay_book",
    "step": "*",
    "pipeline": "depth router",
    "data": "sampler",
    "model": "cut tensor_plan",
    "peer": "placement checkup rates rebalance contributors control devices swarm_health",
    "monitor": "curve page state waterfall",
    "audit": "health case cases",
    "state": "rollback",
    "averaging": "parts grid watch",
    "plan": "choice cost members",
    "ranks": "layout",
    "manifest": "implied",
    "testing": "invariants",
}
DRIVER = "driver.py"  # modules of step/ whose name ends so are hosts of the machines, and are not pure
NOT_PURE = frozenset(["asyncio", "logging", "socket", "subprocess", "threading", "time"])

FORBIDDEN = frozenset(["expert", "server", "worker", "manager", "coordinator", "utils", "common", "core", "security"])
LAZY = ("swarmnet", "swarmnet.api")
"""The one arrow that points up: the package itself names what is public, and imports it on first use. That it stays
light, tests/test_import_weight.py asserts."""

MODULES = sorted(PACKAGE.rglob("*.py"))


parsed = cache(ast.parse)


def name_of(path: Path, package: Path = PACKAGE) -> str:
    """`swarmnet.net.transport` for its file; a package for its `__init__.py`."""
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = frozenset(name_of(path) for path in PACKAGE.rglob("*.py"))
SOURCES = {name_of(path): path.read_text(encoding="utf-8") for path in MODULES}


def room_of(module: str) -> str:
    """`net` for `swarmnet.net.transport`. The package itself is ground, `python -m swarmnet` is the command line."""
    parts = module.split(".")
    return "cli" if module == "swarmnet.__main__" else parts[1] if len(parts) > 1 else "ids"


def imports(source: str, names: frozenset[str] = NAMES) -> Iterator[tuple[str, int]]:
    """(module, line) of every import anywhere in `source`; relative ones as written, with their dots."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                yield (inner if inner in names else module), node.lineno


def rooms(source: str) -> set[str]:
    """The rooms of this package that it imports from."""
    return {room_of(target) for target, _ in imports(source) if target.startswith("swarmnet.")}


def breaches(module: str, source: str) -> Iterator[str]:
    """Imports of `source` that the table does not allow."""
    mine = room_of(module)
    for target, line in imports(source):
        if target.startswith("."):
            yield f"{module}:{line} imports {target}: write it absolutely"
        elif target.split(".")[0] == "swarmnet" and (module, target) != LAZY:
            theirs = room_of(target)
            if theirs not in ROW:
                yield f"{module}:{line} imports {target}: {theirs} is in no row"
            elif not (theirs == mine or ROW[theirs] < ROW[mine] or {mine, theirs} <= GROUND):
                yield f"{module}:{line} imports {target}: {mine} (row {ROW[mine]}) may not see {theirs} ({ROW[theirs]})"


def impurities(module: str, source: str, pure: frozenset[str]) -> Iterator[str]:
    """Imports of a pure module that are neither the standard library, nor row 0, nor pure."""
    for target, line in imports(source):
        top = target.split(".")[0]
        if top == "swarmnet":
            allowed = room_of(target) in GROUND - {"telemetry", "transport"} or target in pure
        else:
            allowed = top in sys.stdlib_module_names and target not in NOT_PURE
        if not allowed:
            yield f"{module}:{line} imports {target}"


def words(name: str) -> set[str]:
    """`GrpcServer_pool` as {grpc, server, pool}."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def pure_modules() -> list[str]:
    found = {
        path for room, names in PURE.items() for name in names.split() for path in (PACKAGE / room).glob(f"{name}.py")
    }
    return sorted(name_of(path) for path in found if not path.name.endswith(DRIVER))


def broken(rule: Callable[[str, str], Iterable[str]], modules: Iterable[str] = SOURCES) -> list[str]:
    """What breaks a rule in these modules, each with its place."""
    return [finding for module in modules for finding in rule(module, SOURCES[module])]


def test_every_module_is_in_a_room() -> None:
    assert not [module for module in SOURCES if room_of(module) not in ROW]


def test_imports_are_absolute_and_point_down() -> None:
    assert not broken(breaches)


SPINE = frozenset(["step", "pipeline", "averaging", "stage", "engine"])
WINGS = ROW.keys() - GROUND - SPINE - {"data", "wire", "model"}
"""Rooms that the spine is read without: what they do for it is handed in by `peer`, through a protocol."""


def test_the_spine_imports_no_wing() -> None:
    spine = [module for module in SOURCES if room_of(module) in SPINE]
    assert not broken(lambda module, source: [f"{module} imports {each}" for each in rooms(source) & WINGS], spine)


def test_the_ground_has_no_cycle() -> None:
    below: dict[str, set[str]] = {room: set() for room in GROUND}
    for module, source in SOURCES.items():
        if (room := room_of(module)) in GROUND and module != "swarmnet":
            below[room] |= rooms(source) - {room}
    while free := [room for room, uses in below.items() if not uses & below.keys()]:
        for room in free:
            del below[room]
    assert not below, f"a cycle: {below}"


def test_pure_modules_decide_and_do_nothing_else() -> None:
    pure = frozenset(pure_modules()) | {"swarmnet.step"}
    assert not broken(lambda module, source: impurities(module, source, pure), pure_modules())


def borrowed(module: str, source: str) -> set[str]:
    """Names of the module, its room and its classes that have a forbidden word in them."""
    classes = {node.name for node in ast.walk(parsed(source)) if isinstance(node, ast.ClassDef)}
    return {name for name in {*module.split(".")[-2:], *classes} if words(name) & FORBIDDEN}


def test_names_are_the_fields_own() -> None:
    assert not broken(borrowed)


def test_a_class_name_means_one_class() -> None:
    found: dict[str, list[str]] = {}
    for module, source in SOURCES.items():
        for node in parsed(source).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(module)
    twice = [f"{name} is a class of {', '.join(modules)}" for name, modules in found.items() if len(modules) > 1]
    assert not twice, "; ".join(twice)


SMALL = 60


def test_no_small_module_serves_one_neighbour_alone() -> None:
    sources = {name_of(path): path.read_text(encoding="utf-8") for path in MODULES if path.name != "__init__.py"}
    importers: dict[str, set[str]] = {}
    for module, source in sources.items():
        for target, _ in imports(source, frozenset(sources)):
            importers.setdefault(target, set()).add(module)
    assert not [
        f"{module} ({len(source.splitlines())} lines): fold it into {only}"
        for module, source in sources.items()
        if len(source.splitlines()) < SMALL
        for only in importers.get(module, set())
        if len(importers[module]) == 1 and room_of(only) == room_of(module)
    ]


def test_the_glossary_names_modules_that_exist() -> None:
    page = (PACKAGE.parent / "docs" / "glossary.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z_0-9/]+\.py)`", page))
    assert named and not [path for path in sorted(named) if not (PACKAGE / path).exists()]


def test_the_spine_is_read_in_an_hour() -> None:
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    files = re.findall(r"^\| \*{0,2}`([a-z_/]+\.py)`\*{0,2} \|", page, re.MULTILINE)
    lines = [len((PACKAGE / path).read_text(encoding="utf-8").splitlines()) for path in files]
    assert 20 <= len(files) == len(set(files)) <= 28 and sum(lines) <= 8500, (len(files), sum(lines))


def references(module: str, source: str) -> Iterator[str]:
    """Docstrings that only send the reader elsewhere."""
    for node in ast.walk(parsed(source)):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and re.match(r"See\b", ast.get_docstring(node) or ""):
            yield f"{module}:{node.body[0].lineno} begins with See: say what it is, or nothing"


def test_docstrings_say_what_modules_and_things_are() -> None:
    assert not broken(references)
    trees = {module: parsed(source) for module, source in SOURCES.items()}
    assert not [module for module, tree in trees.items() if tree.body and not ast.get_docstring(tree)]


WHOLE = frozenset(["Manifest", "PeerConfig"])
WHERE_THEY_ARE = frozenset(["manifest", "config"])


def whole_settings(module: str, source: str) -> Iterator[str]:
    """Annotations that name all of a run's or a peer's settings: a room below `peer` takes the table that it reads."""
    for node in ast.walk(parsed(source)):
        annotated = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        for each in (part for annotation in annotated if annotation for part in ast.walk(annotation)):
            if {getattr(each, name, None) for name in ("id", "attr", "value")} & WHOLE:
                yield f"{module}:{each.lineno} takes a whole {ast.unparse(each)}"


def test_rooms_below_peer_take_the_tables_they_read() -> None:
    below = {room for room in ROW if ROW[room] < ROW["peer"]} - WHERE_THEY_ARE
    assert not broken(
        whole_settings, [module for module in SOURCES if room_of(module) in below and module != "swarmnet"]
    )


LEVELS = frozenset(["debug", "info", "warning", "error", "exception"])


def prose(module: str, source: str) -> Iterator[str]:
    """Log lines that are not an event's name and fields, and loggers that know no fields."""
    for node in ast.walk(parsed(source)):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="logging"), attr="getLogger"), args=[ast.Name()]):
                yield f"{module}:{node.lineno} makes a logger of its own: telemetry.get(__name__)"
            case ast.Call(func=ast.Attribute(value=ast.Name(id="log"), attr=level), args=args) if level in LEVELS:
                name = args[0].value if len(args) == 1 and isinstance(args[0], ast.Constant) else None
                if not (isinstance(name, str) and name.isidentifier()):
                    yield f"{module}:{node.lineno} logs prose: an event's name, and its facts as keyword arguments"


def test_logs_are_events_with_fields() -> None:
    assert not broken(prose, [module for module in SOURCES if room_of(module) != "telemetry"])


CLOCKS = frozenset(["time.time", "time.time_ns", "time.clock_gettime", "asyncio.run", "asyncio.new_event_loop"])
CLOCKS_BY_DEFAULT = frozenset(["time.localtime", "time.gmtime", "time.ctime", "time.strftime"])
"""What reads the system's clock where it is given no moment."""
OF_THIS_MACHINE = frozenset(["clock", "ranks", "local", "cli", "simulate"])
"""Rooms that wait for processes of this machine, or tell a person how long something took: both sleep when it does."""
READS_A_CLOCK = {
    "swarmnet.clock": "it is the clock",
    "swarmnet.peer.control_socket": "`--hours` are hours of the day where the machine stands",
    "swarmnet.local.run": "a directory's name",
    "swarmnet.local.supervisor": "a file's name",
    "swarmnet.testing.process_swarm": "it waits for processes of this machine",
    "swarmnet.telemetry.screen": "how often a screen is drawn",
}


def clocks_read(module: str, source: str) -> Iterator[str]:
    """Where a module reads a clock that is not its business, or runs a loop that goes by one."""
    tree = parsed(source)
    calls = {id(node.func): len(node.args) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        given = calls.get(id(node), 0) - name.endswith(".strftime")
        wrong = (
            name in CLOCKS
            or (name in CLOCKS_BY_DEFAULT and given < 1)
            or name.endswith(("datetime.now", "datetime.utcnow", "date.today", "datetime.today"))
            or (name == "time.monotonic" and room_of(module) not in OF_THIS_MACHINE)
        )
        if wrong or (isinstance(node, ast.ImportFrom) and node.module == "time"):
            yield f"{module}:{node.lineno} reads {name or 'a name of time'}: see swarmnet/clock.py"


def test_one_module_reads_the_clocks() -> None:
    assert not broken(clocks_read, SOURCES.keys() - READS_A_CLOCK)
    assert all(broken(clocks_read, [module]) for module in READS_A_CLOCK), "an exception that nothing needs"


def majorities(module: str, source: str) -> Iterator[str]:
    """Comparisons of a number of things with half or twice another number; twice a constant is no majority."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Compare):
            inner = list(ast.walk(node))
            counts = any(isinstance(each, ast.Call) and ast.unparse(each.func) in ("len", "sum") for each in inner)
            sums = [each for each in inner if isinstance(each, ast.BinOp) and not ast.unparse(each.right).isupper()]
            doubled = any(isinstance(each.op, ast.Mult) and "2" in ast.unparse(each).split(" * ") for each in sums)
            halved = any(isinstance(each.op, ast.FloorDiv) and ast.unparse(each.right) == "2" for each in sums)
            if counts and (doubled or halved):
                yield f"{module}:{node.lineno} counts a majority: see swarmnet/quorum.py"


def test_one_module_counts_majorities() -> None:
    assert not broken(majorities)


IMPURE = partial(impurities, pure=frozenset())


@pytest.mark.parametrize(
    ("rule", "module", "wrong", "right"),
    [
        (breaches, "net.x", "from swarmnet.peer import run_peer", "from swarmnet.wire import signed"),
        (breaches, "net.x", "from . import tls", "from swarmnet.net import tls"),
        (breaches, "net.x", "from swarmnet.attic import y", "import time"),
        (breaches, "errors", "from swarmnet.net import tls", "from swarmnet import ids"),
        (IMPURE, "step.x", "import torch", "import math"),
        (IMPURE, "step.x", "import time", "from swarmnet import ids"),
        (borrowed, "net.x", "class GrpcServer: ...", "class Observer: ..."),
        (borrowed, "net.x", "class HTTPServer: ...", "class Scores: ..."),
        (references, "net.x", 'class A:\n    """See `B`: so."""', 'def g():\n    """Seeds of a run."""'),
        (whole_settings, "net.x", "def f(run: 'Manifest'): ...", "def f(given: ManifestRequest) -> Training: ..."),
        (whole_settings, "net.x", "x: Callable[[PeerConfig], int]", "x: StageSpec | None = None"),
        (prose, "net.x", 'log.info(f"gone {peer}")', 'log.info("peer_gone", peer=peer)'),
        (prose, "net.x", "logging.getLogger(__name__)", 'logging.getLogger("hivemind").setLevel(40)'),
        (clocks_read, "peer.m", "def f(clock=time.time): ...", "datetime.datetime.fromtimestamp(wall_time())"),
        (clocks_read, "peer.m", "time.strftime('%H')", "time.strftime('%H', time.localtime(moment))"),
        (clocks_read, "peer.m", "time.monotonic()", "loop.time()"),
        (majorities, "net.x", "len(a) >= len(b) // 2 + 1", "len(a) >= 2 * LIMIT"),
    ],
)
def test_each_rule_can_be_broken(rule: Callable, module: str, wrong: str, right: str) -> None:
    assert list(rule(f"swarmnet.{module}", wrong)) and not list(rule(f"swarmnet.{module}", right))


def test_the_leader_has_at_most_twenty_attributes() -> None:
    tree = ast.parse((PACKAGE / "step" / "leader.py").read_text())
    (leader,) = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "Leader")
    stored = {
        node.attr
        for node in ast.walk(leader)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    assert 10 < len(stored) <= 20
