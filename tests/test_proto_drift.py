"""The committed protobuf code is what `proto/generate.py` makes of the `.proto` files."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
COMMITTED = ROOT / "swarmnet" / "wire" / "pb"
_DESCRIPTOR = re.compile(r"AddSerializedFile\((.*)\)")
_VERSION = re.compile(r"# Protobuf Python Version: (.*)")


def test_generated_code_has_not_drifted(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="grpcio-tools is not installed: cannot regenerate")
    spec = importlib.util.spec_from_file_location("generate", ROOT / "proto" / "generate.py")
    assert spec is not None and spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    generate.generate(tmp_path)
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    kept = {path.name: path.read_text() for path in COMMITTED.glob("*_pb2.py*")}
    assert set(made) == set(kept)
    for name, text in made.items():
        if name.endswith(".py"):
            assert _DESCRIPTOR.search(text)[1] == _DESCRIPTOR.search(kept[name])[1], f"run proto/generate.py: {name}"
    if _versions(made) == _versions(kept):  # another protoc may dress the same descriptor differently
        assert made == kept


def _versions(files: dict[str, str]) -> set[str]:
    return {found[1] for text in files.values() if (found := _VERSION.search(text))}
