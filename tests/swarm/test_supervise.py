"""A process that starts its child again, with real signals: what it passes on, and that nothing outlives it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a child to its parent")

PARENT = """
import json, sys
from swarmnet.peer import supervise
supervise.FIRST_S = float(sys.argv[2])
code = supervise.supervise(say=lambda line: print(json.dumps({"said": line}), flush=True))
if code is None:
    exec(sys.argv[1], {})
    sys.exit(0)
print(json.dumps({"heavy": sorted({"torch", "hivemind", "grpc", "pydantic", "numpy"} & sys.modules.keys())}))
sys.exit(code)
"""

CHILD = """
import json, os, signal, sys, time
caught = []
def on(number, frame):
    caught.append(number)
    if len(caught) == 1:  # before the line, which the second signal may follow at once
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    print(json.dumps({"caught": number}), flush=True)
    %(first)s
signal.signal(signal.SIGINT, on)
signal.signal(signal.SIGTERM, on)
if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
    signal.signal(signal.SIGHUP, on)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
print(json.dumps({"pid": os.getpid(), "session": os.getsid(0)}), flush=True)
while True:
    time.sleep(0.05)  # pause() would miss a signal that comes just before it
"""


class Running:
    """A supervising process whose lines, and its child's, are JSON."""

    def __init__(self, child: str, *, first_s: float = 0.01, nohup: bool = False) -> None:
        first = ["nohup"] if nohup else []
        self.process = subprocess.Popen(
            [*first, sys.executable, "-c", PARENT, child, str(first_s)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> dict:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "it ended"
        return json.loads(line)

    def end(self) -> tuple[int, list[dict]]:
        out, _ = self.process.communicate(timeout=30)
        return self.process.returncode, [json.loads(line) for line in out.splitlines()]


def gone(pid: int) -> bool:
    """Has the process ended? It may be a zombie that nobody reaps here."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def test_a_killed_child_comes_back_and_the_parent_stays_small() -> None:
    running = Running(CHILD % {"first": "sys.exit(0)"})
    first = running.line()["pid"]
    os.kill(first, signal.SIGKILL)
    assert "was ended by SIGKILL" in running.line()["said"]
    second = running.line()["pid"]
    assert second != first and gone(first)
    running.process.send_signal(signal.SIGTERM)
    assert running.end() == (0, [{"caught": signal.SIGTERM}, {"heavy": []}])


def test_the_child_dies_with_the_parent() -> None:
    running = Running(CHILD % {"first": ""})
    child = running.line()["pid"]
    handle = os.pidfd_open(child)
    running.process.kill()
    running.process.wait()
    assert select.select([handle], [], [], 20)[0]
    os.close(handle)
    assert gone(child)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_ends(number: signal.Signals) -> None:
    running = Running(CHILD % {"first": ""})
    assert running.line()["session"] != os.getsid(0)
    running.process.send_signal(number)
    assert running.line() == {"caught": number}
    running.process.send_signal(number)
    assert running.end() == (128 + number, [{"heavy": []}])


def test_a_terminal_that_goes_asks() -> None:
    running = Running(CHILD % {"first": "sys.exit(0)"})
    running.line()
    running.process.send_signal(signal.SIGHUP)
    assert running.end() == (0, [{"caught": signal.SIGHUP}, {"heavy": []}])


def test_with_nohup_the_supervising_process_and_its_child_outlast_the_terminal() -> None:
    running = Running(CHILD % {"first": "sys.exit(0)"}, nohup=True)
    os.kill(running.line()["pid"], signal.SIGHUP)
    running.process.send_signal(signal.SIGHUP)
    running.process.send_signal(signal.SIGTERM)
    assert running.end() == (0, [{"caught": signal.SIGTERM}, {"heavy": []}])


@pytest.mark.parametrize("code", [0, 2])
def test_final_codes_are_passed_on_at_once(code: int) -> None:
    running = Running(f"import sys; sys.exit({code})")
    assert running.end() == (code, [{"heavy": []}])


def test_an_exit_with_an_error_is_a_crash(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    running = Running(
        f"import pathlib, sys; m = pathlib.Path({str(mark)!r}); first = not m.exists(); m.touch(); "
        "sys.exit(1 if first else 0)"
    )
    code, lines = running.end()
    assert code == 0 and "ended with exit code 1" in lines[0]["said"] and len(lines) == 2


def test_asked_to_stop_between_two_lives_it_just_stops() -> None:
    running = Running("import sys; sys.exit(1)", first_s=1000.0)
    assert "it starts again in" in running.line()["said"]
    running.process.send_signal(signal.SIGINT)
    assert running.end() == (0, [{"heavy": []}])


FULL = """
import os, sys
from swarmnet.peer import supervise
supervise._FORK_AGAIN_S, fork, tried = 0.01, os.fork, []
def failing():
    tried.append(0)
    if len(tried) < 3:
        raise OSError(12, "Cannot allocate memory")
    return fork()
os.fork = failing
code = supervise.supervise(say=lambda line: print(line, flush=True))
sys.exit(code or 0)
"""


def test_a_machine_that_cannot_start_a_process_now_may_do_so_a_little_later() -> None:
    ended = subprocess.run([sys.executable, "-c", FULL], capture_output=True, text=True, timeout=60)
    again = "cannot start a process (Cannot allocate memory); trying again in 0 s"
    assert ended.stdout.splitlines()[:2] == [again] * 2 and not ended.stderr
