"""The control socket of a peer, and the commands that speak to it: a real socket, a peer that only notes what it is
told."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import signal
import stat
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarmnet.cli.frame import run
from swarmnet.config import toml
from swarmnet.config.peer import PeerConfig
from swarmnet.errors import UsageError
from swarmnet.net.identity import own_identity
from swarmnet.net.stop import stopped_by_signal
from swarmnet.net.traffic import Traffic
from swarmnet.peer import control_socket
from swarmnet.peer.control_socket import CONTRIBUTED, PAUSED, SOCKET, ControlSocket
from swarmnet.telemetry.run_state import RunState

SLOW, began, goes_on = 7, threading.Event(), threading.Event()
"""So many slots take until `goes_on` to be planned."""


class NotedPeer:
    """As much of a peer as its control socket knows."""

    def __init__(self) -> None:
        self.paused, self.limits = False, {}
        state = SimpleNamespace(checkpoints=SimpleNamespace(fits=True))
        self.replicas = {0: SimpleNamespace(member=SimpleNamespace(synced=True), state=state)}
        self.state = RunState()
        self.state.serve(0, now=0.0)
        self.said: list[str] = []
        self.holding = asyncio.Event()
        self.resumed = asyncio.Event()

    def say(self, event: str, fields: dict[str, object]) -> None:
        self.said.append(event)

    def limit(self, **limits: int) -> None:
        self.limits = limits
        self.replicas[0].state.checkpoints.fits = not 0 < limits["disk_bytes"] < 2**20

    async def hold(self) -> None:
        self.paused = True
        self.holding.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.paused = False
            self.resumed.set()


class OneMachine:
    """Has room for nine microbatches in flight, and takes its time to find out whether SLOW ones fit. Of stages it has
    room for one in each GiB."""

    def __init__(self, fits: Mapping[int, int] | None = None) -> None:
        self.fits = fits

    def stages(self, config: PeerConfig) -> dict[int, int]:
        return dict.fromkeys(range(int(config.caps.host_gib)), 1)

    def slots(self, config: PeerConfig, stages: Sequence[int]) -> int:
        if config.slots > 9:
            raise UsageError("no room for so many")
        if config.slots == SLOW:
            began.set()
            goes_on.wait()
        return config.slots


def with_socket(
    place: Path,
    script: Callable[[NotedPeer, ControlSocket, Traffic, Callable[..., Awaitable[int]]], Awaitable[None]],
    machine: OneMachine | None = None,
    **more: Any,
) -> None:
    """Play a script while a peer's control socket in `place` is open; its last argument runs a command."""

    async def command(*words: str) -> int:
        return await asyncio.to_thread(run, [*words, "--dir", str(place)])

    async def main() -> None:
        traffic, peer = Traffic(), NotedPeer()
        with stopped_by_signal() as stop:
            opened = ControlSocket(
                PeerConfig(dir=place, slots=4, **more), cast(Any, machine or OneMachine()), traffic, stop
            )
            async with asyncio.timeout(30), asyncio.TaskGroup() as group:
                running = group.create_task(opened.run(peer))  # type: ignore[arg-type]
                while not (place / SOCKET).exists():  # noqa: ASYNC110
                    await asyncio.sleep(0)
                await script(peer, opened, traffic, command)
                running.cancel()

    asyncio.run(main())


def test_a_peer_is_paused_and_resumed_and_a_pause_outlives_it(tmp_path: Path) -> None:
    async def pauses(peer: NotedPeer, opened: ControlSocket, traffic: Traffic, command) -> None:
        assert stat.S_IMODE((tmp_path / SOCKET).stat().st_mode) == 0o600
        assert await command("control", "pause") == 0
        await peer.holding.wait()
        assert peer.said == ["pausing"]

    async def resumes(peer: NotedPeer, opened: ControlSocket, traffic: Traffic, command) -> None:
        await peer.holding.wait()  # it was killed, or the machine was: what was asked holds
        assert await command("control", "resume") == 0
        await peer.resumed.wait()

    async def leaves(peer: NotedPeer, opened: ControlSocket, traffic: Traffic, command) -> None:
        await peer.holding.wait()
        await opened.resume()
        assert not peer.paused, "what leaving says next would be taken back"

    with_socket(tmp_path, pauses)
    with_socket(tmp_path, leaves)
    assert not (tmp_path / SOCKET).exists() and (tmp_path / PAUSED).exists()
    with_socket(tmp_path, resumes)
    assert not (tmp_path / PAUSED).exists()


def test_caps_are_in_force_at_once_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)  # longer than a socket's name may be
    deep.mkdir(parents=True)

    async def changes(peer: NotedPeer, opened: ControlSocket, traffic: Traffic, command) -> None:
        assert peer.limits == {"slots": 4, "disk_bytes": 0, "line_bytes_per_s": 0}
        assert (
            await command("control", "limits", "--upload", "8", "--download", "80", "--disk", "1", "--slots", "2") == 0
        )
        assert peer.limits == {"slots": 2, "disk_bytes": 1 << 30, "line_bytes_per_s": 1_000_000}
        assert opened.config.slots == 2, "a peer that moves goes on with it"
        assert (traffic.up.bytes_per_s, traffic.down.bytes_per_s) == (1e6, 1e7)
        assert await command("control", "limits", "--slots", "10") == 2, "a change that does not fit"
        assert await command("control", "limits", "--json") == 0

    with_socket(deep, changes)
    out, errors = capsys.readouterr()
    assert out.splitlines()[0].startswith("upload 8 Mbit/s, download 80 Mbit/s, GPU memory no limit")
    assert errors == "swarmnet: error: no room for so many\n"
    assert json.loads(out.partition("\n")[2])["slots"] == 2
    kept = {"slots": 2, "caps": {"upload_mbit": 8.0, "download_mbit": 80.0, "disk_gib": 1.0}}
    assert toml.read(deep / "peer.toml") == kept


def test_a_disk_that_holds_no_checkpoint_is_said_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def changes(peer: NotedPeer, opened: ControlSocket, traffic: Traffic, command) -> None:
        assert await command("control", "limits", "--disk", "1") == 0
        assert await command("control", "limits", "--disk", "0.0001") == 0

    with_socket(tmp_path, changes)
    enough, tight = capsys.readouterr().out.splitlines()
    assert "checkpoint" not in enough
    assert tight.endswith("no checkpoint of stage 0 fits in so little disk: none is written any more")


def test_a_changed_limit_of_memory_changes_where_the_peer_may_move(tmp_path: Path) -> None:
    machine = OneMachine({0: 1, 1: 1, 2: 1})

    async def changes(peer: NotedPeer, opened: ControlSocket, traffic: Traffic, command) -> None:
        assert await command("control", "limits", "--host-memory", "2") == 0
        assert machine.fits == {0: 1, 1: 1}
        assert await command("control", "limits", "--host-memory", "1", "--slots", "10") == 2
        assert machine.fits == {0: 1, 1: 1}, "what is refused changes nothing"

    with_socket(tmp_path, changes, machine)


def test_what_was_contributed_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def works(peer: NotedPeer, opened: ControlSocket, traffic: Traffic, command) -> None:
        peer.state.on("executed", {"stage": 0, "executions": 3, "counted": 3}, now=0.0)
        traffic.up.spend(1000)
        assert await command("control", "stats", "--json") == 0

    for lives in (1, 2):
        with_socket(tmp_path, works)
        assert json.loads(capsys.readouterr().out)["microbatches"] == 3 * lives
    assert run(["control", "stats", "--dir", str(tmp_path)]) == 0, "nobody runs there any more"
    assert capsys.readouterr().out.startswith("6 microbatches counted, 0 steps applied")
    (tmp_path / CONTRIBUTED).write_text("x")
    assert run(["control", "stats", "--dir", str(tmp_path)]) == 2
    (tmp_path / CONTRIBUTED).unlink()
    with_socket(tmp_path, works)
    assert json.loads((tmp_path / CONTRIBUTED).read_text())["microbatches"] == 3


def test_nonsense_costs_its_sender_alone(tmp_path: Path) -> None:
    async def speaks(peer: NotedPeer, opened: ControlSocket, traffic: Traffic, command) -> None:
        for nonsense in (b"what?\n", b"{}\n", b"[" * 60000 + b"\n", b"x" * (1 << 17) + b"\n", b""):
            reader, writer = await asyncio.open_unix_connection(str(tmp_path / SOCKET))
            writer.write(nonsense)
            writer.write_eof()
            assert (await reader.read()).startswith((b'{"error"', b""))
            writer.close()
        _, silent = await asyncio.open_unix_connection(str(tmp_path / SOCKET))
        assert await command("control", "limits") == 0
        silent.close()

    with_socket(tmp_path, speaks)


def test_where_nobody_runs_it_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["control", "pause", "--dir", str(tmp_path)]) == 2
    assert "no peer that serves a stage runs with --dir" in capsys.readouterr().err
    assert run(["control", "stats", "--dir", str(tmp_path / "none")]) == 2
    assert "no such directory; say with --dir" in capsys.readouterr().err
    assert run(["control", "paws"]) == 2
    assert "did you mean pause?" in capsys.readouterr().err


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / CONTRIBUTED).write_text("[]")
    with pytest.raises(UsageError, match=r"contributed.json cannot be used .*: remove it"):
        ControlSocket(PeerConfig(dir=tmp_path), cast(Any, None), Traffic(), asyncio.Event())


def test_limits_that_an_earlier_version_kept_are_named_as_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def named() -> list[str]:
        caplog.clear()
        ControlSocket(PeerConfig(dir=tmp_path), cast(Any, None), Traffic(), asyncio.Event())
        return [record.message for record in caplog.records]

    assert named() == []
    (tmp_path / "wishes.json").write_text("{}")
    assert named() == ["not_read"]


def test_who_leaves_already_is_not_killed_by_another_drain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def leaves(peer: NotedPeer, opened: ControlSocket, traffic: Traffic, command) -> None:
        assert await command("control", "drain") == 0
        await opened._stop.wait()
        assert await command("control", "drain") == 0

    with_socket(tmp_path, leaves)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert capsys.readouterr().out.splitlines()[1] == "it leaves already; its log says what it waits for"


def test_what_cannot_be_written_is_refused_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    async def changes(peer: NotedPeer, opened: ControlSocket, traffic: Traffic, command) -> None:
        monkeypatch.setattr(control_socket, "write_whole", no_space)
        line = json.dumps({"ask": "limits", "change": {"slots": 2}}).encode()
        answer = await opened._answer(peer, line)  # type: ignore[arg-type]
        assert f"{tmp_path / 'peer.toml'} cannot be written: No space left on device" in answer["error"]
        assert opened.config.slots == 4 and peer.limits["slots"] == 4

    with_socket(tmp_path, changes)


def test_what_takes_too_long_changes_nothing(tmp_path: Path) -> None:
    async def changes(peer: NotedPeer, opened: ControlSocket, traffic: Traffic, command) -> None:
        line = json.dumps({"ask": "limits", "change": {"slots": SLOW, "caps": {"upload_mbit": 8.0}}}).encode()
        answering = asyncio.create_task(opened._answer(peer, line))  # type: ignore[arg-type]
        await asyncio.to_thread(began.wait)
        answering.cancel()  # as its time limit does
        await asyncio.wait((answering,))
        goes_on.set()
        assert opened.config == PeerConfig(dir=tmp_path, slots=4) and peer.limits["slots"] == 4

    with_socket(tmp_path, changes)
    assert not (tmp_path / "peer.toml").exists()


def test_without_a_socket_the_peer_goes_on_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / SOCKET).mkdir()  # what cannot be replaced

    async def goes_on_anyway(peer: NotedPeer, opened: ControlSocket, traffic: Traffic, command) -> None:
        opened._control.paused = True
        opened._looked.set()
        await peer.holding.wait()

    with caplog.at_level(logging.WARNING, "swarmnet.peer.control_socket"):
        with_socket(tmp_path, goes_on_anyway)
    assert [record.message for record in caplog.records] == ["no_control"]


def test_who_is_starting_is_not_said_to_be_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with own_identity(tmp_path):
        assert run(["control", "drain", "--dir", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "a peer that is starting does in a moment" in said
    assert "a trainer or bootstrap node has no controls, and Ctrl+C ends it" in said
    assert run(["control", "drain", "--dir", str(tmp_path)]) == 2
    assert "no peer that serves a stage runs with --dir" in capsys.readouterr().err
