"""What lies beside every checkpoint and makes it exist: a small JSON file that says what the data must be.

Decides whether such a file is well-formed and about what it claims to be about. Reads no disk.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from swarmnet.config.table import Count, Table
from swarmnet.errors import BadCheckpoint
from swarmnet.ids import Chain, Restart, RunId
from swarmnet.state.cut import StateHeader

MAX_JSON_BYTES = 64 << 10

_NAME = re.compile(r"stage-(0|[1-9][0-9]{0,15})-step-(0|[1-9][0-9]{0,15})\.(json|safetensors|owed)")

_Hex64 = Annotated[str, Field(pattern=r"\A[0-9a-f]{64}\z")]


class CheckpointInfo(Table):
    """One checkpoint. `chain` says which commits led here, `before` those up to one version earlier, `restart_*` which
    restart of the run it descends from. `owed_*`: what the averaging codec of peer `owner` owed; 0 and "": nothing."""

    format: Literal[1] = 1
    run: _Hex64
    stage: Count
    version: Count
    chain: _Hex64
    before: _Hex64
    term_chain: _Hex64
    restart_number: Count
    restart_version: Count
    num_bytes: Count
    sha256: _Hex64
    numerics: Annotated[str, Field(max_length=256)] = ""
    written_at: Annotated[str, Field(max_length=64)] = ""
    owner: Annotated[str, Field(max_length=256)] = ""
    owed_bytes: Count = 0
    owed_sha256: Annotated[str, Field(pattern=r"\A([0-9a-f]{64})?\z")] = ""

    @property
    def restart(self) -> Restart:
        """What the state descends from."""
        return Restart(self.restart_number, self.restart_version)

    @property
    def header(self) -> StateHeader:
        """Where a replica stands that has loaded it."""
        return StateHeader(self.version, Chain(self.chain), Chain(self.before), Chain(self.term_chain), self.restart)


def file_name(stage: int, version: int, kind: Literal["json", "safetensors", "owed"]) -> str:
    """Name of one part of a checkpoint."""
    return f"stage-{stage}-step-{version}.{kind}"


def parse_name(name: str) -> tuple[int, int, str] | None:
    """(stage, version, kind) of a file that is called like a part of a checkpoint."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2]), match[3]) if match else None


def parse_info(text: bytes, path: Path, *, run: RunId, stage: int, version: int) -> CheckpointInfo:
    """Read the JSON found at `path`. Raises BadCheckpoint unless it is about exactly this run, stage and version."""
    try:
        info = CheckpointInfo.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise BadCheckpoint(path, f"not a checkpoint's JSON: {where and where + ': '}{first['msg']}"[:300]) from error
    if info.run != run:
        raise BadCheckpoint(path, f"of another run ({info.run[:12]}, not {run[:12]})")
    if (info.stage, info.version) != (stage, version):
        raise BadCheckpoint(path, f"speaks of stage {info.stage}, step {info.version}: the file was renamed")
    return info
