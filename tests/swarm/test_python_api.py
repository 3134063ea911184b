"""The programs of docs/python-api.md as they stand there, and what the public names say of mistakes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import write_tiny_run

import swarmnet
from swarmnet.manifest.file import to_toml
from swarmnet.manifest.schema import Protocol

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/python-api.md").read_text(encoding="utf-8")
PROGRAMS = dict(re.findall(r"```python\n# (\S+)\n(.*?)```", PAGE, flags=re.DOTALL))


def run(name: str, folder: Path) -> str:
    """What the page's program prints at the end, in `folder`."""
    (folder / name).write_text(PROGRAMS[name])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, name], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


SPY = """
from swarmnet.pipeline.router import least_time

def least(parameter):
    def rule(candidates):
        with open("called", "a") as file:
            print(parameter, file=file)
        return least_time(candidates)
    return rule
"""


def test_the_program_of_a_local_swarm_runs(tmp_path: Path) -> None:
    assert run("local_swarm.py", tmp_path).endswith("code 0 stages 2 steps 3\n")


def test_the_program_of_two_peers_runs_and_both_route_by_their_configs_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "spy.py").write_text(SPY)
    info = tmp_path / "spy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: spy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[swarmnet.routing_rules]\nspy.least = spy:least\n")
    (tmp_path / "runs/small").mkdir(parents=True)
    unfed = Protocol(long_silence_s=1800.0)  # nothing moves before the trainer comes
    write_tiny_run(tmp_path / "runs/small", stages=2, steps=2, protocol=unfed)
    program = PROGRAMS["by_hand.py"]
    for place in ("stages=[0, 1],", 'role="trainer",'):
        assert program.count(place) == 1
        program = program.replace(place, f'{place} routing="spy.least:{place[:5]}",')
    monkeypatch.setitem(PROGRAMS, "by_hand.py", program)
    assert run("by_hand.py", tmp_path).endswith("seen True stages 2\ncodes 0 0\n")
    assert set((tmp_path / "called").read_text().split()) == {"stage", "role="}


def test_the_page_names_what_is_public() -> None:
    named = set(re.findall(r"`(\w+)[`(]", PAGE)) | set(re.findall(r"swarmnet\.(\w+)", PAGE))
    assert set(swarmnet.__all__) <= named and set(swarmnet.__all__) <= set(dir(swarmnet))
    assert all(getattr(swarmnet, name).__doc__ for name in swarmnet.__all__)


def test_a_config_is_made_of_a_file_and_settings(tmp_path: Path) -> None:
    file = tmp_path / "peer.toml"
    file.write_text('host = "127.0.0.1"\nport = 31340\n[mesh]\nranks = 2\n')
    config = swarmnet.peer_config(file, port=31350, stages=(0, 3), dir=tmp_path, mesh={"tensor": 1})
    assert (config.host, config.port, config.stages, config.dir) == ("127.0.0.1", 31350, (0, 3), tmp_path)
    assert (config.mesh.ranks, config.mesh.tensor) == (2, 1)
    assert swarmnet.peer_config(role="trainer").dir == Path("~/.swarmnet/trainer").expanduser()


def test_mistakes_are_said_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(to_toml(swarmnet.Manifest()))
    for call, line in (
        (lambda: swarmnet.load_manifest(tmp_path / "no.toml"), "no such file"),
        (lambda: swarmnet.peer_config(prot=1), "peer_config: prot: unknown key; did you mean port?"),
        (lambda: swarmnet.peer_config(port="x"), 'peer_config: port = "x": must be an integer'),
        (lambda: swarmnet.run_peer(swarmnet.peer_config()), "needs the run's manifest"),
        (lambda: swarmnet.run_peer(swarmnet.peer_config(manifest=path)), "stages are 0 to 2"),
        (lambda: swarmnet.run_peer(swarmnet.peer_config(manifest=path, stages=[7])), "there is no stage 7"),
        (lambda: swarmnet.run_trainer(swarmnet.peer_config(role="trainer")), "needs the run's manifest"),
        (lambda: swarmnet.LocalOptions(stages=0), "must be at least 1"),
        (lambda: swarmnet.read_status("nothing"), "nothing: no such file, and neither a link"),
        (lambda: swarmnet.read_status(path), "status needs to know a peer"),
    ):
        with pytest.raises(swarmnet.UsageError) as caught:
            call()
        assert line in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(AttributeError, match="has no attribute 'run_everything'"):
        swarmnet.run_everything  # noqa: B018
