"""Both ways to start a child keep one contract; what is forked from may be forked."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swarmnet.local.processes import PRELOAD, child_starter
from swarmnet.ranks.starter import ChildCall, ChildProcess, ForkerLost, ForkStarter, FreshStarter, Starter

CHILD = """
import json, os, signal, sys
print(json.dumps({
    "argv": sys.argv[1:], "name": __name__, "pid": os.getpid(), "session": os.getsid(0), "stdin": sys.stdin.read(),
    "environment": {key: value for key, value in os.environ.items() if key.startswith(("SWARMNET_", "OMP_NUM_"))},
    "files": sorted(int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")),
    "threads": len(os.listdir("/proc/self/task")),
}), flush=True)
match sys.argv[1]:
    case "exit": sys.exit(int(sys.argv[2]))
    case "raise": raise ValueError("out of luck")
    case "leave":
        import atexit, threading
        atexit.register(print, "at the exit")
        thread = threading.Thread(target=lambda: threading.main_thread().join() or print("in a thread"))
        thread.start()
        sys.exit("said last")
    case "missing": print("missing:", [name for name in sys.argv[2:] if name not in sys.modules])
    case "stay":
        print("ready", file=open(sys.argv[2], "w"), flush=True)
        signal.pause()
"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="forks, /proc and a parent's death are Linux's to tell")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of modules that children can import, and of their logs."""
    (tmp_path / "child_of_a_test.py").write_text(CHILD)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("SWARMNET_PORT", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    return tmp_path


def until_ready(starter: Starter) -> None:
    while not starter.ready():
        assert isinstance(starter, ForkStarter)
        assert select.select([starter._control], [], [], 60)[0], "the forker says nothing"


@pytest.fixture(params=[FreshStarter, pytest.param(lambda: ForkStarter(()), marks=linux)], ids=["fresh", "forked"])
def starter(request: pytest.FixtureRequest, place: Path) -> Iterator[Starter]:
    make: Callable[[], Starter] = request.param
    starter = make()
    until_ready(starter)
    yield starter
    starter.close()


def begin(starter: Starter, *words: str, name: str = "child", log: Path) -> ChildProcess:
    """`python -m WORDS...`."""
    return starter.start(ChildCall(["-m", *words], name, output=log), time.monotonic() + 60)


def code(process: ChildProcess) -> int | None:
    """How it has ended, once it has."""
    assert process.wait(time.monotonic() + 60)
    return process.code()


def stay(starter: Starter, place: Path, name: str = "child") -> ChildProcess:
    """A child that runs until it is ended, once it does run."""
    os.mkfifo(place / f"{name}.up")
    up = str(place / f"{name}.up")
    process = begin(starter, "child_of_a_test", "stay", up, name=name, log=place / f"{name}.txt")
    assert (place / f"{name}.up").read_text() == "ready\n"
    return process


@linux
def test_a_child_is_a_process_of_its_own(starter: Starter, place: Path) -> None:
    log = place / "log.txt"
    log.write_text("before\n")
    process = begin(starter, "child_of_a_test", "exit", "0", "ü x", log=log)
    assert code(process) == 0
    before, line = log.read_text().splitlines()
    said = json.loads(line)
    assert before == "before" and said["name"] == "__main__" and said["argv"] == ["exit", "0", "ü x"]
    assert said["pid"] == said["session"] == process.pid != os.getpid()
    assert said["environment"] == {"OMP_NUM_THREADS": "1"}
    assert (said["stdin"], said["threads"], said["files"]) == ("", 1, [0, 1, 2])


def test_how_a_child_ends_is_known(starter: Starter, place: Path) -> None:
    log = place / "log.txt"
    assert code(begin(starter, "child_of_a_test", "exit", "3", log=log)) == 3
    assert code(begin(starter, "child_of_a_test", "raise", log=log)) == 1
    assert log.read_text().rstrip().endswith("ValueError: out of luck")
    assert code(begin(starter, "no_such_module_here", log=log)) == 1
    assert "no_such_module_here" in log.read_text()


def test_what_is_done_on_leaving_is_done(starter: Starter, place: Path) -> None:
    assert code(begin(starter, "child_of_a_test", "leave", log=place / "log.txt")) == 1
    said = (place / "log.txt").read_text().splitlines()[1:]
    assert sorted(said) == ["at the exit", "in a thread", "said last"]


def test_a_signal_meets_the_child_and_nobody_after_it(starter: Starter, place: Path) -> None:
    first, second = stay(starter, place, "a"), stay(starter, place, "b")
    assert not first.wait(0.0) and not second.wait(0.0)
    first.send(signal.SIGKILL)
    assert code(first) == first.code() == -signal.SIGKILL
    first.send(signal.SIGTERM)  # gone: nothing happens
    assert not second.wait(0.0)
    os.kill(second.pid, signal.SIGTERM)  # by hand, as an operator would
    assert code(second) == -signal.SIGTERM


def test_a_log_that_cannot_be_written_is_no_silent_success(starter: Starter, place: Path) -> None:
    try:
        process = begin(starter, "child_of_a_test", "exit", "0", log=place / "nowhere" / "log.txt")
    except OSError:
        return
    assert code(process) == 1


@linux
def test_children_of_a_lost_forker_die_with_it_and_that_is_said(place: Path) -> None:
    starter = ForkStarter(())
    until_ready(starter)
    child = stay(starter, place)
    handle = os.pidfd_open(child.pid)
    starter._forker.kill()
    assert select.select([handle], [], [], 30)[0], "the child outlived the forker"
    os.close(handle)
    assert code(child) is None
    child.send(signal.SIGTERM)
    with pytest.raises(ForkerLost):
        begin(starter, "child_of_a_test", "exit", "0", log=place / "log.txt")
    starter.close()


@linux
@pytest.mark.parametrize(
    "module",
    [
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()",
        "import os\nos._exit(1)",
    ],
)
def test_what_cannot_be_forked_is_started_afresh(place: Path, module: str) -> None:
    (place / "awkward_for_a_test.py").write_text(module)
    starter = ForkStarter(["awkward_for_a_test"])
    until_ready(starter)
    process = begin(starter, "child_of_a_test", "exit", "7", log=place / "log.txt")
    assert code(process) == 7
    starter.close()


@linux
def test_a_module_that_is_missing_is_the_childs_affair(place: Path) -> None:
    starter = ForkStarter(["no_such_module_here"])
    until_ready(starter)
    assert code(begin(starter, "child_of_a_test", "exit", "0", log=place / "l")) == 0
    starter.close()


@linux
def test_everything_is_preloaded_and_leaves_no_thread_behind(place: Path) -> None:
    starter = child_starter()
    until_ready(starter)
    assert starter._instead is None
    process = begin(starter, "child_of_a_test", "missing", *PRELOAD, log=place / "log.txt")
    assert code(process) == 0 and (place / "log.txt").read_text().splitlines()[1] == "missing: []"
    starter.close()
