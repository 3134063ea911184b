"""What is wrong in a file or a setting is said in one line, with its place: a transcript for each kind of them.

After an intended change, read the difference, and write the file again: `REFUSED=write pytest THIS_FILE`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_devices import MANIFEST, chosen
from test_huggingface_config import LLAMA

from swarmnet.cli.weights import scores_of
from swarmnet.config import PeerConfig, toml
from swarmnet.config.check import check
from swarmnet.config.fleet import read_fleet
from swarmnet.config.peer import Mesh
from swarmnet.errors import UsageError
from swarmnet.local.options import LocalOptions
from swarmnet.local.prepare import choose, parse_meshes
from swarmnet.manifest.codec_names import check_averaging
from swarmnet.manifest.file import load, override, to_toml
from swarmnet.manifest.schema import Manifest
from swarmnet.model.huggingface.config import describe
from swarmnet.net.swarm_link import SwarmLink
from swarmnet.peer.control import Control, WorkCount, WorkDone
from swarmnet.simulate import fleet
from swarmnet.testing import fault

REFUSED = Path(__file__).parents[1] / "data/refused_files.txt"


def changed_manifest(text: str) -> object:
    """text: lines of the default manifest behind `- `, what stands there instead behind `+ `."""
    lines = text.split("\n")
    before, after = ("\n".join(line[2:] for line in lines if line.startswith(mark)) for mark in ("- ", "+ "))
    assert before in to_toml(Manifest())
    return load(to_toml(Manifest()).replace(before, after, 1), where="run.toml")


def written(name: str, read: Callable[[Path], object]) -> Callable[[str], object]:
    def reader(text: str) -> object:
        Path(name).write_text(text, encoding="utf-8")
        return read(Path(name))

    return reader


def mesh(*, device: Any, cuda: int, **asked: Any) -> object:
    return chosen(Mesh(**asked), device, cuda=cuda)


def local_meshes(**options: Any) -> object:
    replicas = [f"s{stage}-r{number}" for number in range(2) for stage in range(3)]
    return parse_meshes(LocalOptions(**options), MANIFEST, replicas)


def operator(text: str) -> object:
    at = Control(PeerConfig(), WorkCount(WorkDone(1.0)), paused=False)
    try:
        return at.answer(json.loads(text), minute=720, day="2026-11-23")
    finally:
        assert at.config == PeerConfig()


def scored(*, scored: str | None = None, **manifest: Any) -> object:
    training = {"sequence_length": 8, "microbatch_size": 2}
    return scores_of(Manifest.model_validate({"training": training, **manifest}), None, scored, None, None)


def averaging_codec(name: str) -> str:
    try:
        return check_averaging(name)
    except ValueError as error:  # a field's, of which a manifest makes a line
        raise UsageError(str(error)) from error


READERS: dict[str, Callable[[str], object]] = {
    "a manifest": changed_manifest,
    "--set of a manifest": lambda text: override(Manifest(), text.split("\n--set ")),
    "a peer config": lambda text: check(PeerConfig, toml.parse(text, where="peer.toml"), origin=lambda _: "peer.toml"),
    "a chaos file": written("chaos.toml", lambda path: fault.load(str(path), stages=3, replicas=2, steps=20)),
    "a fleet that is simulated": written("fleet.toml", lambda path: fleet.read(path, [])),
    "machines that are planned for": written(
        "fleet.toml", lambda path: read_fleet(path, fleet.FleetFile).members(str(path))
    ),
    "a config.json, of Llama's but for this": lambda text: describe(LLAMA | json.loads(text), where="config.json"),
    "a mesh": lambda text: mesh(**json.loads(text)),
    "meshes of a local swarm": lambda text: local_meshes(**json.loads(text)),
    "options of a local swarm": lambda text: choose(LocalOptions(**json.loads(text))),
    "a request of a peer's operator": operator,
    "a stranger's manifest, for eval": lambda text: scored(**json.loads(text)),
    "averaging.codec": averaging_codec,
    "a link": SwarmLink.parse,
}


def test_each_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = ["# What files hold, and the line that each is refused with, behind `! `."]
    for section in REFUSED.read_text(encoding="utf-8").split("\n== ")[1:]:
        name, *entries = section.rstrip("\n").split("\n\n")
        told += ["", f"== {name}"]
        for entry in entries:
            *text, _ = entry.split("\n")
            with pytest.raises(UsageError) as refused:
                READERS[name]("\n".join(text))
            told += ["", *text, f"! {refused.value}"]
            assert "\n" not in str(refused.value) and len(str(refused.value)) < 300, entry
    if os.environ.get("REFUSED") == "write":
        REFUSED.write_text("\n".join(told) + "\n", encoding="utf-8")
    assert REFUSED.read_text(encoding="utf-8").splitlines() == told
