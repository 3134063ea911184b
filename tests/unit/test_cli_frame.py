"""The frame: errors are one line and an exit code, help is complete, nothing leaks."""

import errno
import io
import os
import pty
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from command_lines import command_lines, found

from swarmnet.cli import frame, main
from swarmnet.cli.frame import COMMANDS, run
from swarmnet.errors import NoReplica, PeerGone, UsageError


@pytest.fixture
def boom(monkeypatch: pytest.MonkeyPatch):
    """A command that raises what it is given: `boom(error)` runs it."""

    def start(error: BaseException) -> int:
        @click.command("peer")
        def command() -> None:
            raise error

        monkeypatch.setattr(frame.Lazy, "get_command", lambda *_: command)
        return run(["peer"])

    return start


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UsageError("run.toml: x: unknown key"), 2, "swarmnet: error: run.toml: x: unknown key\n"),
        (NoReplica(stage=3), 1, "swarmnet: error: NoReplica: stage=3\n"),
        (NoReplica(), 1, "swarmnet: error: NoReplica\n"),
        (PeerGone("nobody listens", peer="a\nb"), 1, "swarmnet: error: nobody listens definite=False peer='a\\nb'\n"),
        (click.UsageError("two\nlines"), 2, "swarmnet: error: two lines\n"),
        (UsageError("it says \x1b[2J"), 2, "swarmnet: error: it says \\x1b[2J\n"),
        (KeyboardInterrupt(), 130, ""),
        (
            ExceptionGroup("tasks", [UsageError("bad"), ExceptionGroup("inner", [NoReplica("none")])]),
            2,
            "swarmnet: error: bad\nswarmnet: error: none\n",
        ),
        (BaseExceptionGroup("tasks", [NoReplica("none"), KeyboardInterrupt()]), 130, ""),
    ],
    ids=repr,
)
def test_an_expected_error_is_one_line_and_a_code(boom, capsys, error: BaseException, code: int, line: str) -> None:
    assert boom(error) == code
    captured = capsys.readouterr()
    assert captured.err.lstrip("\n") == line and captured.out == ""  # click ends the line of the ^C


@pytest.mark.parametrize("error", [ValueError("a bug"), ExceptionGroup("tasks", [UsageError("x"), ValueError("a")])])
def test_a_bug_keeps_its_traceback(boom, error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        boom(error)
    assert caught.value is error


@pytest.mark.parametrize(
    "error",
    [BrokenPipeError(), ExceptionGroup("tasks", [ExceptionGroup("inner", [BrokenPipeError()]), BrokenPipeError()])],
    ids=repr,
)
def test_when_nobody_reads_on_it_ends_quietly(boom, capfd, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    with open(os.dup(1), "w") as out:  # it is bent to the null device
        monkeypatch.setattr("sys.stdout", out)
        assert boom(error) == 1
    assert capfd.readouterr() == ("", "")


def test_other_io_errors_are_not_mistaken_for_a_closed_pipe(boom) -> None:
    with pytest.raises(OSError, match="disk"):
        boom(OSError(errno.EIO, "disk"))


def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "swarmnet", "--help"]
        ended = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 1 and ended.stderr.count("\n") == 1 and "no space left on the disk" in ended.stderr


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named_with_how_to_go_on(boom, capfd, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    full = OSError(number, "full", "/x/loss.csv")
    full.add_note("go on with --resume")
    with open(os.dup(1), "w") as out:  # it is bent to the null device
        monkeypatch.setattr("sys.stdout", out)
        assert boom(full) == 1
    said = "/x/loss.csv: no space left on the disk that is written to: free some, then go on with --resume"
    assert capfd.readouterr().err == f"swarmnet: error: {said}\n"


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (RuntimeError("can't start new thread"), 1, "lets no more processes or threads start: raise pids.max"),
        (BlockingIOError(errno.EAGAIN, "fork"), 1, "lets no more processes or threads start: raise pids.max"),
        (ExceptionGroup("tasks", [RuntimeError("can't start new thread")]), 1, "lets no more processes or threads"),
        (MemoryError(), 1, "may take no more memory"),
        (OSError(errno.ENOMEM, "fork"), 1, "may take no more memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ..."), 1, "may take no more memory"),
        (FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"), 2, "with TMPDIR"),
        (RuntimeError("Could not determine home directory."), 2, "~ names no directory"),
    ],
    ids=repr,
)
def test_what_the_machine_lacks_is_one_line(
    boom, capfd, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, words: str
) -> None:
    with open(os.dup(1), "w") as out:  # it is bent to the null device
        monkeypatch.setattr("sys.stdout", out)
        assert boom(error) == code
    said = capfd.readouterr().err
    assert said.startswith("swarmnet: error: ") and words in said and said.count("\n") == 1


LOSES_ITS_OUTPUT = """
import click, sys
from swarmnet.cli import frame
@click.command("any")
def command():
    sys.stdin.readline()  # until nothing can be written any more
    print("x" * 100_000)
    print("y" * 100_000, file=sys.stderr)
    return 7
frame.Lazy.get_command = lambda *_: command
sys.exit(frame.run(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("command", "opened"),
    [("peer", os.pipe), ("peer", pty.openpty), ("local", pty.openpty)],
    ids=["peer, pipe", "peer, terminal", "local, terminal"],
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_command_that_runs_long_outlasts_its_terminal_and_a_peer_its_reader(
    command: str, opened: Callable[[], tuple[int, int]], unbuffered: str
) -> None:
    ours, theirs = opened()
    words, env = [sys.executable, "-c", LOSES_ITS_OUTPUT, command], os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        os.close(ours)
        process.communicate(b"\n")
    assert process.returncode == 7


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_standard_files_that_are_closed_are_as_good_as_the_null_device(closed: str, tmp_path: Path) -> None:
    """Else the next file that is opened has their number, and gets what is printed."""
    check = (
        f"import os; print('printed'); os.write(os.open({str(tmp_path / 'file')!r}, os.O_CREAT | os.O_WRONLY), b'x')"
    )
    script = f"from swarmnet.cli import main, _open_standard_files as opened; opened(); {check}"
    line = f"exec {shlex.join([sys.executable, '-c', script])} {closed}"
    assert subprocess.run(["sh", "-c", line], timeout=60).returncode == 0
    assert (tmp_path / "file").read_bytes() == b"x"
    line = f"exec {shlex.join([sys.executable, '-m', 'swarmnet', '--version'])} {closed}"
    assert subprocess.run(["sh", "-c", line], timeout=60).returncode == 0


NAMESPACE = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", sys.executable, "-c"]
FIRST = """
import os, signal, subprocess, sys
from swarmnet.cli import _go_on_in_a_child
_go_on_in_a_child()
assert os.getpid() != 1
if sys.argv[1] == "orphans":
    # Its parent ends first, so that PID 1 gets it; a zombie would keep its number.
    orphan = int(subprocess.check_output(["sh", "-c", "sleep 0.01 >&2 & echo $!"]))
    while True:
        try:
            os.kill(orphan, 0)
        except ProcessLookupError:
            sys.exit(7)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
os.kill(1, signal.SIGTERM)
signal.sigwait({signal.SIGTERM})
print("caught", flush=True)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
os.kill(1, signal.SIGTERM)
while True:
    signal.pause()
"""


@pytest.mark.skipif(
    sys.platform != "linux" or subprocess.run([*NAMESPACE, ""], capture_output=True).returncode != 0,
    reason="no process namespaces here",
)
@pytest.mark.parametrize(("does", "code", "said"), [("signals", 143, "caught\n"), ("orphans", 7, "")])
def test_as_the_first_process_of_a_container(does: str, code: int, said: str) -> None:
    """The kernel would drop its second SIGTERM, and leave it every orphan to reap."""
    ended = subprocess.run([*NAMESPACE, FIRST, does], stdout=subprocess.PIPE, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (code, said)


@pytest.fixture
def own_handler() -> Iterator[None]:
    """`main` is for a process of its own."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("own_handler")
def test_main_exits_with_the_code(capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0 and capsys.readouterr().out.startswith("swarmnet ")
    with pytest.raises(SystemExit) as caught:
        main(["pear"])
    assert caught.value.code == 2


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]], ids=str)
def test_help_lists_every_command(argv: list[str], capsys) -> None:
    assert run(argv) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in COMMANDS) and "Example" in out


@pytest.mark.parametrize("words", [*command_lines()], ids=" ".join)
def test_every_help_has_an_example_that_parses(words: tuple[str, ...], capsys) -> None:
    assert run([*words, "--help"]) == 0
    lines = capsys.readouterr().out.replace("\\\n", " ").splitlines()
    start = next(number for number, line in enumerate(lines) if line.strip().startswith("Example"))
    examples = [line.split() for line in lines[start + 1 :] if line.strip().startswith(f"swarmnet {' '.join(words)}")]
    assert examples
    for example in examples:
        found(*words).make_context(words[-1], example[1 + len(words) :])


@pytest.mark.parametrize("group", ["control", "owner", "audit"])
def test_a_group_alone_prints_its_help(group: str, capsys) -> None:
    assert run([group]) == run([group, "--help"]) == 0
    alone, asked = capsys.readouterr().out.split("Usage: ")[1:]
    assert alone == asked and "Commands:" in alone


def test_a_terminal_that_knows_ascii_only_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", shown)

    @click.command("peer")
    def command() -> None:
        print("loss 5.5 → 3.8, 3 × 2")

    monkeypatch.setattr(frame.Lazy, "get_command", lambda *_: command)
    assert run(["peer"]) == 0
    shown.flush()
    assert shown.buffer.getvalue() == b"loss 5.5 ? 3.8, 3 ? 2\n"


AT_IMPORT = """
import os, signal, sys
from swarmnet.cli import main

class Finder:
    def find_spec(name, path=None, target=None):
        if name == sys.argv[1]:
            print(signal.getsignal(signal.SIGINT).__name__, flush=True)
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Finder)
if sys.argv[2] == "held":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    signal.raise_signal(signal.SIGINT)
main(sys.argv[3:])
"""


@pytest.mark.parametrize(
    ("module", "words", "handler"),
    [
        ("click", ["peer"], "leave_at_once"),
        ("swarmnet.cli.serve", ["join", "x"], "leave_at_once"),
        ("swarmnet.local.run", ["local", "--steps", "1"], "leave_at_once"),
        ("swarmnet.peer.supervise", ["peer"], "leave_at_once"),
        ("swarmnet.cli.weights", ["eval", "x"], "leave_at_once"),
        ("swarmnet.net.swarm_link", ["status", "x"], "default_int_handler"),
    ],
    ids=str,
)
def test_ctrl_c_while_it_imports_ends_it_without_a_traceback(module: str, words: list[str], handler: str) -> None:
    ended = subprocess.run([sys.executable, "-c", AT_IMPORT, module, "", *words], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout.strip(), ended.stderr.strip()) == (130, handler, "")


def test_ctrl_c_that_was_held_while_the_interpreter_started_ends_it() -> None:
    words = [sys.executable, "-c", AT_IMPORT, "none", "held", "peer", "--help"]
    ended = subprocess.run(words, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")
