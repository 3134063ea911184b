"""Generate `swarmnet/wire/pb` from the `.proto` files: `python proto/generate.py [FOLDER]`. Needs grpcio-tools.

protoc writes imports as if `swarmnet/v1` were a package of its own; they are rewritten to the package's real place.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent
TARGET = ROOT.parent / "swarmnet" / "wire" / "pb"


def generate(target: Path) -> None:
    """Write one `_pb2.py` and one `_pb2.pyi` per `.proto` file into `target`."""
    import grpc_tools
    from grpc_tools import protoc

    sources = sorted(ROOT.glob("swarmnet/v1/*.proto"))
    with tempfile.TemporaryDirectory() as draft:
        arguments = [f"-I{ROOT}", f"-I{Path(grpc_tools.__file__).parent / '_proto'}", f"--python_out={draft}"]
        status = protoc.main(["protoc", *arguments, f"--pyi_out={draft}", *map(str, sources)])
        if status != 0:
            raise SystemExit(status)
        for made in sorted(Path(draft, "swarmnet", "v1").iterdir()):
            text = re.sub(r"from swarmnet\.v1 import", "from swarmnet.wire.pb import", made.read_text())
            (target / made.name).write_text(text)


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET)
