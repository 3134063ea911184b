"""A launcher keeps one contract, whether its children are forks or fresh interpreters."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarmnet.ranks.launcher import ChildCall, ChildProcess, Launcher, LauncherLost
from swarmnet.testing.process_swarm import PRELOAD, child_launcher

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
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, /proc and a parent's death are Linux's to tell")

THREADED = "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of modules that children can import, and of their logs."""
    (tmp_path / "child_of_a_test.py").write_text(CHILD)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("SWARMNET_PORT", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    return tmp_path


def until_ready(launcher: Launcher) -> None:
    while not launcher.ready():
        assert select.select([launcher._control], [], [], 60)[0], "the fork server says nothing"


@pytest.fixture(params=["forked", "fresh"])
def launcher(request: pytest.FixtureRequest, place: Path) -> Iterator[Launcher]:
    """Its children are forks, or fresh interpreters because an import has left a thread behind."""
    (place / "threaded_for_a_test.py").write_text(THREADED)
    launcher = Launcher(["threaded_for_a_test"] if request.param == "fresh" else [])
    until_ready(launcher)
    yield launcher
    launcher.close()


def begin(launcher: Launcher, *words: str, name: str = "child", log: Path) -> ChildProcess:
    """`python -m WORDS...`."""
    return launcher.start(ChildCall(["-m", *words], name, output=log), time.monotonic() + 60)


def code(process: ChildProcess) -> int | None:
    """How it has ended, once it has."""
    assert process.wait(time.monotonic() + 60)
    return process.code()


def stay(launcher: Launcher, place: Path, name: str = "child") -> ChildProcess:
    """A child that runs until it is ended, once it does run."""
    os.mkfifo(place / f"{name}.up")
    up = str(place / f"{name}.up")
    process = begin(launcher, "child_of_a_test", "stay", up, name=name, log=place / f"{name}.txt")
    assert (place / f"{name}.up").read_text() == "ready\n"
    return process


def test_a_child_is_a_process_of_its_own(launcher: Launcher, place: Path) -> None:
    log = place / "log.txt"
    log.write_text("before\n")
    process = begin(launcher, "child_of_a_test", "exit", "0", "ü x", log=log)
    assert code(process) == 0
    before, line = log.read_text().splitlines()
    said = json.loads(line)
    assert before == "before" and said["name"] == "__main__" and said["argv"] == ["exit", "0", "ü x"]
    assert said["pid"] == said["session"] == process.pid != os.getpid()
    assert said["environment"] == {"OMP_NUM_THREADS": "1"}
    assert (said["stdin"], said["threads"], said["files"]) == ("", 1, [0, 1, 2])


def test_how_a_child_ends_is_known(launcher: Launcher, place: Path) -> None:
    log = place / "log.txt"
    assert code(begin(launcher, "child_of_a_test", "exit", "3", log=log)) == 3
    assert code(begin(launcher, "child_of_a_test", "raise", log=log)) == 1
    assert log.read_text().rstrip().endswith("ValueError: out of luck")
    assert code(begin(launcher, "no_such_module_here", log=log)) == 1
    assert "no_such_module_here" in log.read_text()


def test_what_is_done_on_leaving_is_done(launcher: Launcher, place: Path) -> None:
    assert code(begin(launcher, "child_of_a_test", "leave", log=place / "log.txt")) == 1
    said = (place / "log.txt").read_text().splitlines()[1:]
    assert sorted(said) == ["at the exit", "in a thread", "said last"]


def test_a_signal_meets_the_child_and_nobody_after_it(launcher: Launcher, place: Path) -> None:
    first, second = stay(launcher, place, "a"), stay(launcher, place, "b")
    assert not first.wait(0.0) and not second.wait(0.0)
    first.send(signal.SIGKILL)
    assert code(first) == first.code() == -signal.SIGKILL
    first.send(signal.SIGTERM)  # gone: nothing happens
    assert not second.wait(0.0)
    os.kill(second.pid, signal.SIGTERM)  # by hand, as an operator would
    assert code(second) == -signal.SIGTERM


def test_a_log_that_cannot_be_written_is_no_silent_success(launcher: Launcher, place: Path) -> None:
    try:
        process = begin(launcher, "child_of_a_test", "exit", "0", log=place / "nowhere" / "log.txt")
    except OSError:
        return
    assert code(process) == 1


def test_children_of_a_lost_fork_server_die_with_it_and_that_is_said(place: Path) -> None:
    launcher = Launcher(())
    until_ready(launcher)
    child = stay(launcher, place)
    handle = os.pidfd_open(child.pid)
    launcher._server.kill()
    assert select.select([handle], [], [], 30)[0], "the child outlived the fork server"
    os.close(handle)
    assert code(child) is None
    child.send(signal.SIGTERM)
    with pytest.raises(LauncherLost):
        begin(launcher, "child_of_a_test", "exit", "0", log=place / "log.txt")
    launcher.close()


def test_what_children_have_started_ends_with_the_launcher(place: Path) -> None:
    launcher = Launcher(())
    until_ready(launcher)
    os.mkfifo(place / "up")
    words = (
        "import subprocess, sys; sleep = subprocess.Popen(['sleep', '1000'])\n"
        "print(sleep.pid, file=open(sys.argv[1], 'w'), flush=True); sleep.wait()"
    )
    call = ChildCall(["-c", words, str(place / "up")], "child", output=place / "log.txt")
    launcher.start(call, time.monotonic() + 60)
    handle = os.pidfd_open(int((place / "up").read_text()))
    launcher.close()
    assert select.select([handle], [], [], 30)[0], "it outlived the launcher"
    os.close(handle)


def test_words_that_are_no_module_are_run_by_a_fresh_interpreter(launcher: Launcher, place: Path) -> None:
    call = ChildCall(["-c", "import sys; sys.exit(len(sys.argv))", "a", "b"], "child", output=place / "log.txt")
    assert code(launcher.start(call, time.monotonic() + 60)) == 3


def test_an_import_that_ends_the_fork_server_is_told(place: Path) -> None:
    (place / "awkward_for_a_test.py").write_text("import os\nos._exit(1)")
    launcher = Launcher(["awkward_for_a_test"])
    with pytest.raises(LauncherLost, match="has ended"):
        begin(launcher, "child_of_a_test", "exit", "7", log=place / "log.txt")
    launcher.close()


def test_a_module_that_is_missing_is_the_childs_affair(place: Path) -> None:
    launcher = Launcher(["no_such_module_here"])
    until_ready(launcher)
    assert code(begin(launcher, "child_of_a_test", "exit", "0", log=place / "l")) == 0
    launcher.close()


def test_everything_is_preloaded_and_leaves_no_thread_behind(place: Path) -> None:
    launcher = child_launcher()
    until_ready(launcher)
    process = begin(launcher, "child_of_a_test", "missing", *PRELOAD, log=place / "log.txt")
    assert code(process) == 0 and (place / "log.txt").read_text().splitlines()[1] == "missing: []"
    launcher.close()
