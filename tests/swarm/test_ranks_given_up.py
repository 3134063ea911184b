"""A peer whose ranks die again and again without finishing anything ends with one line, and what it held is on disk."""

import os
import signal
import sys
from pathlib import Path

import pytest
from running import PATIENCE_S, Running
from tiny_run import write_tiny_run

from swarmnet.errors import MeshFailed
from swarmnet.manifest.schema import Protocol
from swarmnet.peer.run import _given_up_in_words

UNFED = Protocol(long_silence_s=1800.0)  # nobody brings microbatches, and none is ordered


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="ranks are killed by their process ids")
def test_a_peer_without_ranks_ends(tmp_path: Path) -> None:
    path = write_tiny_run(tmp_path, protocol=UNFED)
    words = "peer", "--manifest", str(path), "--stage", "0", "--device", "cpu", "--ranks", "2", "--no-restart"
    with Running(tmp_path / "peer", *words) as peer:
        for epoch in range(1, 7):
            started = peer.says("mesh_started", epoch=epoch)
            os.kill(started["pids"][epoch % 2], signal.SIGKILL)
        written = peer.says("checkpoint")
        assert peer.process.wait(PATIENCE_S) == 1
    said = [line for line in peer.log.read_text().splitlines() if line.startswith("swarmnet: error")]
    assert len(said) == 1 and "were started 6 times and finished nothing" in said[0], peer.log.read_text()
    assert "Traceback" not in peer.log.read_text()
    assert written["version"] == 0 and Path(written["path"]).stat().st_size == written["bytes"]


def test_what_gives_ranks_up_is_told_from_a_bug() -> None:
    failed, bug = MeshFailed("no more"), KeyError("a bug")
    with pytest.raises(MeshFailed) as caught, _given_up_in_words():
        raise ExceptionGroup("tasks", [ExceptionGroup("inner", [failed])])
    assert caught.value is failed
    with pytest.raises(ExceptionGroup), _given_up_in_words():
        raise ExceptionGroup("tasks", [bug, failed])
