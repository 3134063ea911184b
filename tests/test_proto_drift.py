"""`proto/swarmnet/v1` says what the dataclasses declare, in protobuf's own language."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorSet

PROTO = Path(__file__).resolve().parent.parent / "proto"


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", PROTO / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_text_is_of_the_dataclasses(generate: ModuleType) -> None:
    assert generate.TEXT.read_text(encoding="utf-8") == generate.text(), "run python proto/generate.py"


def test_protoc_reads_in_the_text_what_we_write(generate: ModuleType, tmp_path: Path) -> None:
    protoc = pytest.importorskip("grpc_tools.protoc", reason="grpcio-tools is not installed: cannot parse the text")
    sources = [str(path) for path in sorted(PROTO.glob("swarmnet/v1/*.proto"))]
    assert protoc.main(["protoc", f"-I{PROTO}", f"--descriptor_set_out={tmp_path / 'set'}", *sources]) == 0
    parsed = FileDescriptorSet.FromString((tmp_path / "set").read_bytes())
    read = {message.name: message for file in parsed.file for message in file.message_type}
    assert len(read) > 100
    pool = generate.ROOTS[0].message.DESCRIPTOR.file.pool
    for name, message in read.items():
        declared = DescriptorProto()
        pool.FindMessageTypeByName(f"{generate.PACKAGE}.{name}").CopyToProto(declared)
        assert _facts(message) == _facts(declared)


def _facts(message: DescriptorProto) -> tuple[object, ...]:
    fields = [
        (each.name, each.number, each.type, each.type_name, each.label, each.proto3_optional, each.oneof_index)
        for each in message.field
    ]
    return fields, [each.name for each in message.oneof_decl]
