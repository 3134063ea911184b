"""Shared by all tests: `--long`, GPU and namespace markers with a reason, property tests that repeat, one torch thread.

The whole suite runs in two processes at once, unless `-n` says otherwise: tests of one file in one of them, in order.
One takes the tests that start processes and wait for them, the swarms of many processes first; the other those that
compute, the longest first. Whoever has done its own helps the other. Tests that are named run in this process.
"""

import asyncio
import contextlib
import gc
import inspect
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("swarmnet", max_examples=50, derandomize=True, deadline=None, print_blob=True)
settings.load_profile("swarmnet")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests start hundreds of interpreters: what one of them has compiled, the others need not compile again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts a job in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # children have it by default, and so have tests
gc.disable()  # until all is collected: nothing of it is garbage

PROCESSES = 2

CROWDS = tuple(
    f"tests/swarm/test_{name}.py"
    for name in (
        "chaos_phases",
        "chaos_resume",
        "documented_commands",
        "equal_to_one_process",
        "local_training",
        "mixed_mesh",
    )
)
"""Swarms of so many processes that two at once would keep each other from what they must do in time."""

PROCESSES_S = 900
"""Limit of a test that starts processes of its own, where it sets none: a machine may be several times slower. What
such a test waits for itself has shorter limits, and says what did not come."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run the tests that take minutes")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Before pytest-xdist reads how many processes are wanted."""
    if hasattr(config, "workerinput") or not config.pluginmanager.hasplugin("xdist"):
        return  # one of them itself, which must not have some of its own
    option, whole = config.option, config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if whole and option.numprocesses is None and not (option.usepdb or option.collectonly):
        option.numprocesses = PROCESSES


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Which tests stay together, and in order: those of a file, and all crowds."""
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "crowds" if nodeid.startswith(CROWDS) else nodeid.partition("::")[0]

        def _assign_work_unit(self, node: Any) -> None:
            if node is not self.nodes[0]:  # the others begin at the end, with what computes
                self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
            super()._assign_work_unit(node)

    config.option.loadscopereorder = False  # as they are collected, not files of many tests first
    return Files(config, log)


TURNS = (*CROWDS, "tests/netns/", "tests/swarm/", "tests/unit/", "tests/test_", "tests/model/", "tests/sim/")
"""What starts processes from the front, what computes from the end. In the middle, where both meet, no file is long."""


def _turn(item: pytest.Item) -> int:
    return next((turn for turn, prefix in enumerate(TURNS) if item.nodeid.startswith(prefix)), len(TURNS))


def pytest_runtest_setup() -> None:
    """A command that ran in this process has chosen what is logged; the next test hears what it would hear alone.

    SIGHUP is ignored under `nohup`, and after a command that was asked to stop. A handler is reset in children.
    """
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("swarmnet").setLevel(logging.NOTSET)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an `async def` test to its end: on virtual time if it is marked so."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    from swarmnet.testing.doubles import run_virtual

    run = run_virtual if pyfuncitem.get_closest_marker("virtual_time") else asyncio.run
    run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
    return True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skip_gpu = pytest.mark.skip(reason="no CUDA device here")
    skip_netns = pytest.mark.skip(reason="needs root and network namespaces")
    items.sort(key=_turn)
    if not config.getoption("--long") and (long := [item for item in items if item.get_closest_marker("long")]):
        items[:] = [item for item in items if not item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=long)
    for item in items:
        if item.nodeid.startswith(("tests/swarm/", "tests/netns/")) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(PROCESSES_S))
        if "gpu" in item.keywords and not _has_cuda():
            item.add_marker(skip_gpu)
        if "netns" in item.keywords and os.geteuid() != 0:
            item.add_marker(skip_netns)


def pytest_collection_finish() -> None:
    """What was imported and collected stays until the end: garbage collections need not go through it each time.

    Nor need they come often: a simulated swarm makes objects by the hundred thousand, of which few are garbage in
    circles, and looking for these took a quarter of its time.
    """
    gc.enable()
    gc.freeze()
    gc.set_threshold(100_000)


@pytest.fixture(scope="module", autouse=True)
def nothing_left_in_memory() -> Iterator[None]:
    """Large tensors hang in circles that the rare collections leave to grow: 6 GB in the end without this."""
    yield
    gc.collect()
    gc.freeze()  # what is left by now stays, too: the next one need not go through it


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Starts `swarmnet ...`, a `Running`, in a directory of its own name. Nothing outlives the test."""
    from running import Running

    with contextlib.ExitStack() as running:
        yield lambda name, *words, **how: running.enter_context(Running(tmp_path / name, *words, **how))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch computes on one thread, as in a rank: with several, sums may round otherwise."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
