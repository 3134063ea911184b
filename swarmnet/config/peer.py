"""What one operator chooses for one machine. Never part of the run id; see `docs/peer-config.md`.

Knows no file and no flag: `cli.settings` lays those over each other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from swarmnet.config.table import Count, Positive, Seconds, Table

Role = Literal["stage", "trainer", "bootstrap"]
Port = Annotated[int, Field(ge=0, le=65535)]


def _home(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ValueError(f"{path}: whose home is that?") from error


def _multiaddr(text: str) -> str:
    if not text.startswith("/") or len(text.split("/")) < 3:
        raise ValueError("must be a multiaddr, such as /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW...")
    return text


Home = Annotated[Path, AfterValidator(_home)]
"""A path; `~` is the operator's home."""

Multiaddr = Annotated[str, AfterValidator(_multiaddr)]


class Mesh(Table):
    """The ranks inside this peer. Above one GPU: a later release."""

    gpus: Positive = Field(default=1, description="GPUs of this peer, one rank each")
    tensor: Count = Field(default=0, description="ranks that split each layer; 0: all that `shard` leaves")
    shard: Positive = Field(default=1, description="ranks that split the parameters (ZeRO-3)")

    @property
    def tensor_ranks(self) -> int:
        """`tensor`, with 0 resolved."""
        return self.tensor or self.gpus // self.shard

    @model_validator(mode="after")
    def _ranks(self) -> Mesh:
        if self.tensor_ranks * self.shard != self.gpus:
            raise ValueError(f"tensor x shard = {self.tensor_ranks} x {self.shard} must be gpus = {self.gpus}")
        return self


class Caps(Table):
    """What this machine lends at most."""

    keep_checkpoints: Positive = Field(default=3, description="checkpoints kept on disk, per stage")
    memo_bytes: Count = Field(
        default=512 * 2**20, description="what was sent and answered, kept for who asks again, per stage; 0: nothing"
    )


class Log(Table):
    """Logging to standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="the least that is shown")
    format: Literal["text", "json"] = Field(default="text", description="text: short lines; json: one object per line")


class PeerConfig(Table):
    """One machine of a swarm.

    Precedence: flag > environment SWARMNET_* > this file > default. Relative paths start at the directory in which
    the command is typed; `~` is your home directory.
    """

    manifest: Home | None = Field(default=None, description="the run's manifest; a bootstrap node needs none")
    roles: tuple[Role, ...] = Field(
        default=("stage",), description="what the peer does; must include what the command asks"
    )
    stages: tuple[Count, ...] = Field(default=(), description="the stages it serves, such as [0, 3]")
    dir: Home = Field(
        default_factory=lambda: _home(Path("~/.swarmnet/peer")), description="identity key and snapshots"
    )
    data: str | None = Field(default=None, description="where this machine has the run's tokens, if not at data.source")
    initial: Home | None = Field(
        default=None, description="where this machine has the checkpoint the run begins with, if not at initial.source"
    )
    host: str = Field(default="0.0.0.0", min_length=1, description="address to listen on")
    port: Port = Field(default=0, description="port of the data plane; 0: last time's, else any free one")
    dht_port: Port = Field(default=0, description="port of the DHT; 0: last time's, else any free one")
    announce: tuple[Multiaddr, ...] = Field(
        default=(), description="multiaddrs to publish instead of what `host` suggests"
    )
    bootstrap: tuple[Multiaddr, ...] = Field(
        default=(), description="multiaddrs of peers that are up; empty: start a new swarm"
    )
    device: Literal["cpu", "cuda", "auto"] = Field(default="auto", description="auto: cuda where there is one")
    threads: Positive = Field(default=1, description="CPU threads of the compute thread")
    slots: Positive = Field(default=4, description="microbatches in flight per stage and open step: the memory bound")
    drain_s: Seconds = Field(
        default=60.0, description="seconds a leaving peer waits for another replica to have its stage's state"
    )
    reseed_from_neighbours: bool = Field(
        default=False, description="last resort: make a stage that has no state left from the stages beside it"
    )
    events: Home | None = Field(default=None, description="append events to this file, one JSON object per line")
    mesh: Mesh = Mesh()
    caps: Caps = Caps()
    log: Log = Log()

    @model_validator(mode="after")
    def _together(self) -> PeerConfig:
        if not self.roles:
            raise ValueError('roles must name at least one of "stage", "trainer", "bootstrap"')
        if len(set(self.stages)) != len(self.stages):
            raise ValueError(f"stages = {list(self.stages)} names a stage twice")
        if self.device == "cpu" and self.mesh.gpus > 1:
            raise ValueError(f'mesh.gpus = {self.mesh.gpus} needs device = "cuda" or "auto"')
        return self
