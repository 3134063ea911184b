"""A peer whose ranks die again and again without finishing anything ends with one line, and what it held is on disk."""

import os
import signal
import sys
from pathlib import Path

import pytest
from running import PATIENCE_S, Running

from swarmnet.errors import MeshFailed
from swarmnet.local.prepare import with_data
from swarmnet.manifest.file import to_toml
from swarmnet.manifest.schema import Cut, Data, Manifest, Model, Protocol, Training
from swarmnet.peer.run import _given_up_in_words

MANIFEST = Manifest(
    model=Model(vocab_size=256, hidden_size=16, intermediate_size=32, num_layers=2, num_heads=2, num_kv_heads=1,
                head_dim=8),
    cut=Cut(stages=1), data=Data(source="corpus:small"),
    training=Training(total_steps=1000, microbatches=2, microbatch_size=1, sequence_length=16, eval_every=0),
    protocol=Protocol(idle_index_s=600.0),               # nobody brings microbatches, and none is ordered
)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="ranks are killed by their process ids")
def test_a_peer_without_ranks_ends(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(to_toml(with_data(MANIFEST, base=Path())), encoding="utf-8")
    words = "peer", "--manifest", str(path), "--stage", "0", "--device", "cpu", "--ranks", "2", "--no-restart"
    peer = Running(tmp_path / "peer", *words)
    try:
        for epoch in range(1, 7):
            started = peer.says("mesh_started", epoch=epoch)
            os.kill(started["pids"][epoch % 2], signal.SIGKILL)
        written = peer.says("checkpoint")
        assert peer.process.wait(PATIENCE_S) == 1
    finally:
        if peer.process.poll() is None:
            peer.process.kill()
            peer.process.wait()
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
