"""A run's peers move to a new version of the software one by one: from this tree to a wheel of it, real processes.

The wheel has another version number, a later minor version of the protocol, and a field more in heartbeats and in
records. A copy of what it installs speaks another major version.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
from fed_slowly import SLOWLY
from running import PATIENCE_S, Running
from tiny_run import write_tiny_run

from swarmnet import PROTOCOL_VERSION, SOFTWARE, __version__
from swarmnet.cli.frame import run
from swarmnet.data.source import load_tokens
from swarmnet.manifest.file import load
from swarmnet.ranks.launcher import Launcher
from swarmnet.testing.process_swarm import child_launcher
from swarmnet.testing.reference import run_reference

ROOT = Path(__file__).resolve().parents[2]
MAJOR, MINOR = PROTOCOL_VERSION
STEPS = 20_000  # it is stopped long before
AFTER = 5  # steps after the last peer has moved
STAGES = {"first": "0", "second": "1", "both": "0,1"}
"""Of each peer: whichever moves, another serves its stage, and calls go between the versions."""
NOTICES = "    notices: Annotated[bytes, Size(MARK_BYTES), Proto(18)] = b"
GOES_BACK = "    goes_back: bool = False\n"
FIELD = '    mood: Annotated[str, Size(64), Proto(900)] = ""\n'

Edit = dict[str, tuple[tuple[str, str], ...]]

LATER: Edit = {
    "swarmnet/messages.py": ((NOTICES, FIELD + NOTICES),),
    "swarmnet/step/heartbeats.py": (
        ("            notices=self._of.shape", '            mood="fine",\n            notices=self._of.shape'),
    ),
    "swarmnet/directory.py": ((GOES_BACK, GOES_BACK + FIELD),),
    "swarmnet/net/endpoint.py": (
        ("            software=SOFTWARE,\n", '            software=SOFTWARE,\n            mood="fine",\n'),
    ),
}


def edit(source: Path, edits: Edit) -> None:
    for name, changes in edits.items():
        text = (source / name).read_text(encoding="utf-8")
        for before, after in changes:
            assert text.count(before) == 1, f"{name} has not one {before!r}"
            text = text.replace(before, after)
        (source / name).write_text(text, encoding="utf-8")


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree with the later edits, built as a wheel and installed without its dependencies: for PYTHONPATH."""
    folder = tmp_path_factory.mktemp("new")
    source, target = folder / "source", folder / "installed"
    without = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "swarmnet", source / "swarmnet", ignore=without)
    for path in (ROOT / name for name in ("pyproject.toml", "README.md", "LICENSE")):
        shutil.copy(path, source)
    numbers = f"PROTOCOL_VERSION = ({MAJOR}, {MINOR})", f"PROTOCOL_VERSION = ({MAJOR}, {MINOR + 1})"
    own: Edit = {"swarmnet/__init__.py": ((f'__version__ = "{__version__}"', '__version__ = "9.0.0"'), numbers)}
    edit(source, own | LATER)
    python = (sys.executable, "-P")
    pip = (*python, "-m", "pip", "--disable-pip-version-check", "-q")
    here = ("--no-deps", "--no-index")
    built = folder / "wheel"
    subprocess.run([*pip, "wheel", *here, "--no-build-isolation", "-w", str(built), str(source)], check=True)
    (file,) = built.iterdir()
    subprocess.run([*pip, "install", *here, "--target", str(target), str(file)], check=True)
    return target


@pytest.fixture(scope="module")
def other(new: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the wheel installs, which speaks the next major version."""
    copy = shutil.copytree(new, tmp_path_factory.mktemp("other") / "installed")
    numbers = f"PROTOCOL_VERSION = ({MAJOR}, {MINOR + 1})", f"PROTOCOL_VERSION = ({MAJOR + 1}, 0)"
    edit(copy, {"swarmnet/__init__.py": (numbers,)})
    return copy


@pytest.fixture(scope="module")
def launchers() -> Iterator[dict[Path, Launcher]]:
    """Of each folder from which something was started: importing torch takes seconds."""
    started: dict[Path, Launcher] = {}
    yield started
    for launcher in started.values():
        launcher.close()


@pytest.fixture
def start(tmp_path: Path, launchers: dict[Path, Launcher]) -> Iterator[Callable[..., Running]]:
    """Starts `swarmnet ...` as it is installed in a folder, or of this tree."""
    started: list[Running] = []

    def begin(package: Path | None, name: str, *words: str) -> Running:
        if package is not None and package not in launchers:
            with mock.patch.object(sys, "path", [str(package), *sys.path]):
                launchers[package] = child_launcher()
        module = SLOWLY if words[0] == "trainer" else ("swarmnet",)
        launcher = None if package is None else launchers[package]
        started.append(Running(tmp_path / name, *words, module=module, again=True, launcher=launcher))
        return started[-1]

    yield begin
    for each in started:
        each.process.kill()
    for each in started:
        each.process.wait()


def test_peers_move_to_a_later_minor_version_one_by_one(
    new: Path, start: Callable[..., Running], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    later = f"swarmnet 9.0.0, protocol {MAJOR}.{MINOR + 1}"
    path = write_tiny_run(tmp_path, stages=2, steps=STEPS, microbatches=4)
    words = ("--manifest", str(path), "--device", "cpu", "--no-restart")

    def serve(package: Path | None, name: str, bootstrap: str = "") -> Running:
        stage = ("--stage", STAGES[name], *(("--bootstrap", bootstrap) if bootstrap else ()))
        return start(package, name, "peer", *words, *stage)

    def software(bootstrap: str) -> str:
        capsys.readouterr()
        assert run(["status", str(path), "--bootstrap", bootstrap]) == 0
        return capsys.readouterr().out

    first = serve(None, "first")
    (address, *_) = first.says("listening")["dht"]
    peers = {"first": first} | {name: serve(None, name, address) for name in ("second", "both")}
    start(None, "trainer", "trainer", "--manifest", str(path), "--bootstrap", address)
    first.until(lambda event: event["event"] == "applied" and event["version"] >= AFTER)
    seen = []
    for name, peer in list(peers.items()):
        known = next(each for each in peers.values() if each is not peer)
        assert run(["control", "drain", "--dir", str(peer.directory)]) == 0
        assert peer.process.wait(timeout=PATIENCE_S) == 0
        seen += peer.so_far("applied", "restart")
        peers[name] = serve(new, name, known.says("listening")["dht"][0])
        peers[name].says("synced")
        peers[name].says("applied")
        if name == "second":
            table = software(peers[name].says("listening")["dht"][0])
            assert later in table and SOFTWARE in table, table
    for peer in peers.values():
        version = peer.says("applied")["version"] + AFTER
        peer.until(lambda event, version=version: event["event"] == "applied" and event["version"] >= version)
    table = software(peers["first"].says("listening")["dht"][0])
    assert later in table and SOFTWARE not in table, table
    seen += [event for peer in peers.values() for event in peer.so_far("applied", "restart")]
    assert not [event for event in seen if event["event"] == "restart"], "nothing was computed again"
    last = max(event["step"] for event in seen)
    reference = run_reference(load(path), load_tokens("corpus:small"), steps=last + 1)
    assert {event["step"] for event in seen} == set(range(last + 1))
    assert all(event["loss"] == reference.losses[event["step"]] for event in seen)


@pytest.mark.parametrize("first", ["older", "newer"])
def test_a_peer_of_another_major_version_is_refused_in_one_line(
    other: Path, start: Callable[..., Running], tmp_path: Path, first: str
) -> None:
    older, newer = (None, SOFTWARE), (other, f"swarmnet 9.0.0, protocol {MAJOR + 1}.0")
    (there, theirs), (package, mine) = (older, newer) if first == "older" else (newer, older)
    path = write_tiny_run(tmp_path, steps=STEPS)
    command = ("peer", "--manifest", str(path), "--stage", "0", "--device", "cpu", "--no-restart")
    here = start(there, "here", *command)
    address = here.says("listening")["dht"][0]
    here.says("synced")
    strange = start(package, "strange", *command, "--bootstrap", address)
    strange.says("listening")
    behind = "callee's" if first == "older" else "caller's"
    words = f"protocols differ, {mine} and {theirs}: update the {behind} software (docs/upgrading.md)"
    # Neither end's log is an event: any event of its own is a chance to look.
    strange.until(lambda _: words in strange.log.read_text(encoding="utf-8"))
    assert not here.so_far("evicted", "restart")
