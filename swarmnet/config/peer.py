"""What one operator chooses for one machine. Never part of the run id; see `docs/peer-config.md`.

Knows no file and no command line: `cli.settings` makes options of the fields that have a `CliOption`, and lays what is
said over what is in files.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from swarmnet import host
from swarmnet.config.plug_in import one_of
from swarmnet.config.table import CliOption, Count, Positive, Seconds, Table, says
from swarmnet.directory import MAX_NICKNAME

Role = Literal["stage", "trainer", "bootstrap"]
Port = Annotated[int, Field(ge=0, le=65535)]

THREADS_PER_CORE = 4
"""More of them only wait for each other; far more cannot even be started, which nothing survives."""


def _home(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ValueError(f"{path}: ~ names no home, because HOME is not set or there is no such user") from error


def _multiaddr(text: str) -> str:
    if not text.startswith("/") or len(text.split("/")) < 3:
        raise ValueError("must be a multiaddr, such as /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW...")
    return text


def listen_at(text: str) -> tuple[str, int]:
    """(host, port) of [HOST:]PORT, this machine's own if no host is said. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    if not (port.isdecimal() and int(port) < 2**16) or (colon and not host):
        raise ValueError("must be a port, or HOST:PORT, such as 9100 or 0.0.0.0:9100")
    return host.strip("[]") or "127.0.0.1", int(port)


def _own_address(text: str) -> str:
    # The DHT daemon takes no name, and a scope (fe80::1%eth0) has no multiaddr.
    try:
        if "%" not in text:
            return str(ipaddress.ip_address(text))
    except ValueError:
        pass
    raise ValueError("must be an IP address of this machine, such as 127.0.0.1; 0.0.0.0 or :: is all of them")


def _listen_at(text: str) -> str:
    if text:
        listen_at(text)
    return text


def _nickname(text: str) -> str:
    # Letters beyond ASCII can look like others, run from right to left or be of any width: every table would have to
    # cope, and a stranger could pass for another peer.
    if len(text) > MAX_NICKNAME or not (text.isascii() and text.isprintable()) or text != text.strip():
        raise ValueError(f"must be at most {MAX_NICKNAME} characters of printable ASCII, no space first or last")
    return text


def _threads(count: int) -> int:
    cores = host.cores()
    # A typing mistake here would bring the machine to a halt.
    if count > THREADS_PER_CORE * cores:
        raise ValueError(
            f"must be at most {THREADS_PER_CORE * cores} on this machine, which has {cores} core{'s' * (cores != 1)} "
            "for this process"
        )
    return count


def _in_words(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _gpus(text: str) -> str:
    # A trailing comma tells GPU 3 from three GPUs.
    if not re.fullmatch(r"auto|[1-9]\d{0,3}|\d{1,4},|\d{1,4}(,\d{1,4})+", text):
        raise ValueError('must be a number from 1 to 9999, which ones with commas ("0,1,3"), or "auto"')
    listed = [int(part) for part in text.strip(",").split(",")] if "," in text else []
    if twice := [number for number in listed if listed.count(number) > 1]:
        raise ValueError(f"names GPU {twice[0]} twice")
    return text


Home = Annotated[Path, AfterValidator(_home)]
"""A path; `~` is the operator's home."""

Multiaddr = Annotated[str, AfterValidator(_multiaddr)]

RoutingName = Annotated[str, AfterValidator(lambda name: one_of(name, ("least_time",)))]
PlacementName = Annotated[str, AfterValidator(lambda name: one_of(name, ("most_under_replicated",)))]


Gpus = Annotated[str, BeforeValidator(_in_words), AfterValidator(_gpus)]
"""How many GPUs ("8"), which ("0,1,3"; "3," is the one), or "auto": as many as there are. A number is taken, too."""

Shard = Literal["none", "dp", "zero1", "zero2", "zero3"]


class Mesh(Table):
    """The ranks inside this peer: one per GPU, or processes on the CPU. They share its stages; see docs/mesh.md."""

    gpus: Annotated[Gpus, CliOption("N|I,J..|auto")] = says(
        "1", 'GPUs, one rank each: a number, which ones ("0,1,3"), or "auto": all, or else the CPU'
    )
    ranks: Annotated[Positive, CliOption("N")] = says(1, "ranks on the CPU, instead of GPUs")
    tensor: Annotated[Count, CliOption("N")] = says(
        0, "ranks that split each layer; the rest split microbatches. 0: all, or 1 with `shard`"
    )
    shard: Annotated[Shard, CliOption()] = says(
        "none",
        'what the other ranks split: "dp" microbatches, "zero1" and moments, "zero2" and sums, "zero3" and weights',
    )
    sequence_parallel: Annotated[bool, CliOption()] = says(
        False, "ranks that split layers split norms and residuals by tokens"
    )

    @model_validator(mode="after")
    def _one_kind(self) -> Mesh:
        if self.ranks > 1 and self.gpus != "1":
            raise ValueError(f'gpus = "{self.gpus}" and ranks = {self.ranks} exclude each other: ranks are on the CPU')
        return self


Activations = Literal["save", "selective", "recompute_layers", "recompute", "offload"]


class Memory(Table):
    """How a device's memory is spent. `compile` and `offload_optimizer` round in their own ways, no other choice does.
    See docs/plan.md."""

    activations: Annotated[Activations, CliOption()] = says(
        "save",
        'what is kept of a microbatch until its backward: from "save" (all) to "recompute" (least), or '
        '"offload": in host memory (CUDA)',
    )
    offload_optimizer: bool = says(False, "optimizer state in host memory, updates on the CPU (CUDA)")
    compile: Annotated[bool, CliOption()] = says(False, "torch.compile each layer (CUDA); a numerics class of its own")

    @model_validator(mode="after")
    def _whole_layers(self) -> Memory:
        # The compiler decides inside a layer; these policies would, too.
        if self.compile and self.activations in ("selective", "offload"):
            raise ValueError(
                f'compile = true chooses itself what a layer keeps: with it activations = "save", '
                f'"recompute_layers" or "recompute", not "{self.activations}"'
            )
        return self


@dataclass(frozen=True, slots=True)
class Hours:
    """A stretch of each day by this machine's clock, in minutes after midnight; it may pass midnight."""

    begin: int
    end: int

    @classmethod
    def parse(cls, text: str) -> Hours:
        """Of "22:00-07:00". Raises ValueError, in words."""
        found = re.fullmatch(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)", text)
        if found is None:
            raise ValueError('must be hours of the day such as "22:00-07:00", or "" for all day')
        first, second, third, fourth = map(int, found.groups())
        if (first, second) == (third, fourth):
            raise ValueError('begins when it ends: say "" for all day')
        return cls(60 * first + second, 60 * third + fourth)

    def includes(self, minute: int) -> bool:
        """Is this minute of the day among them?"""
        if self.begin < self.end:
            return self.begin <= minute < self.end
        return minute >= self.begin or minute < self.end


def _hours(text: str) -> str:
    if text:
        Hours.parse(text)
    return text


def _lendable(mbit: float) -> float:
    # Slower, a piece of a tensor takes longer than others wait for a sign of life.
    if mbit and not LEAST_MBIT <= mbit <= 1e6:
        raise ValueError(f"must be {LEAST_MBIT:g} to 1,000,000, or 0 for all of the line")
    return mbit


LEAST_MBIT = 4.0

Mbit = Annotated[float, AfterValidator(_lendable)]
Gib = Annotated[float, Field(ge=0, le=1e6)]


class Caps(Table):
    """What this machine lends at most. `swarmnet control limits` shows and changes them while the peer runs; see
    docs/volunteers.md."""

    upload_mbit: Annotated[Mbit, CliOption("MBIT", name="upload", live=True)] = says(
        0.0, "Mbit/s to send; 0: all of the line"
    )
    download_mbit: Annotated[Mbit, CliOption("MBIT", name="download", live=True)] = says(
        0.0, "Mbit/s to receive; 0: all of the line"
    )
    gpu_gib: Annotated[Gib, CliOption("GIB", name="gpu-memory", live=True)] = says(
        0.0, "GiB of each GPU; 0: what is free"
    )
    host_gib: Annotated[Gib, CliOption("GIB", name="host-memory", live=True)] = says(
        0.0, "GiB of memory, if it computes on the CPU; 0: what is free"
    )
    disk_gib: Annotated[Gib, CliOption("GIB", name="disk", live=True)] = says(
        0.0, "GiB of checkpoints; 0: what they take"
    )
    hours: Annotated[str, AfterValidator(_hours), CliOption("HH:MM-HH:MM", live=True)] = says(
        "", 'hours of the day, such as "22:00-07:00"; outside them it pauses by itself'
    )
    relay_peers: Annotated[Count, CliOption("N")] = says(
        16, "unreachable peers that this one relays for (docs/nat.md); 0: none"
    )
    relay_mbit: Annotated[Count, CliOption("N")] = says(
        0, "Mbit/s passed on for them; 0: a tenth of what this line was measured to carry"
    )
    keep_checkpoints: Positive = says(3, "checkpoints kept on disk, per stage")
    output_cache_bytes: Count = says(
        512 * 2**20, "cached outputs and answers, for callers that ask again, per stage; 0: none"
    )


LogLevel = Literal["debug", "info", "warning", "error"]


class Log(Table):
    """Logging to standard error."""

    level: Annotated[LogLevel, CliOption(name="log-level")] = says("info", "the least to log")
    format: Annotated[Literal["text", "json"], CliOption(name="log-format")] = says(
        "text", "text: short lines; json: one object per line"
    )


@dataclass(frozen=True, slots=True)
class NetworkSettings:
    """Where a process keeps its identity, where it listens and by whom it joins: fields of `PeerConfig`."""

    dir: Path
    host: str
    port: int
    dht_port: int
    bulk_port: int
    announce: tuple[str, ...]
    map_port: bool
    bootstrap: tuple[str, ...]
    invitation: str
    manifest: Path | None
    caps: Caps
    region: str
    nickname: str


class PeerConfig(Table):
    """One machine of a swarm.

    Precedence: flag > `--set` > environment SWARMNET_* > `peer.toml` in `dir` > this file > default.
    Relative paths start at the directory in which the command is typed; `~` is your home directory.
    """

    manifest: Annotated[Home | None, CliOption("FILE")] = says(None, "the run's manifest, such as run.toml")
    roles: tuple[Role, ...] = says(("stage",), "what the peer does; must include what the command asks")
    stages: Annotated[tuple[Count, ...], CliOption("N[,N..]", name="stage")] = says((), "the stages to serve")
    dir: Annotated[Home, CliOption("DIR", default="~/.swarmnet/ROLE")] = Field(
        default_factory=lambda: _home(Path("~/.swarmnet/peer")),
        description="identity key and snapshots; join is a peer",
    )
    data: Annotated[str | None, CliOption("PATH")] = says(
        None, "where this machine has the run's tokens, if not at data.source"
    )
    initial: Annotated[Home | None, CliOption("DIR")] = says(
        None, "where this machine has the checkpoint the run begins with, if not at initial.source"
    )
    host: Annotated[str, AfterValidator(_own_address), CliOption("ADDR")] = says(
        "0.0.0.0", "address to listen on; :: is IPv6 and IPv4"
    )
    port: Annotated[Port, CliOption("N")] = says(0, "port of the data plane; 0: last time's, else any free one")
    dht_port: Annotated[Port, CliOption("N")] = says(0, "port of the DHT; 0: last time's, else any free one")
    bulk_port: Annotated[Port, CliOption("N")] = says(
        0, "port for tensors, in addition to `port`; 0: any free one (docs/data-plane.md)"
    )
    announce: Annotated[tuple[Multiaddr, ...], CliOption("MADDR")] = says(
        (), "multiaddr to publish instead of what `host` suggests"
    )
    map_port: bool = says(True, "have the home's router forward `port` and `bulk_port` (UPnP; docs/nat.md)")
    bootstrap: Annotated[tuple[Multiaddr, ...], CliOption("MADDR")] = says(
        (), "multiaddr of a peer that is up; without any, a new swarm begins"
    )
    invitation: Annotated[str, CliOption("FILE|TEXT")] = says(
        "", "in a run by invitation: what `swarmnet owner invite` printed, or the file it is in"
    )
    device: Annotated[Literal["cpu", "cuda", "auto"], CliOption()] = says(
        "auto", "where to compute; auto: on cuda where there is one"
    )
    compute: Annotated[Literal["run", "fp32", "bf16"], CliOption()] = says(
        "run", 'operands of matrix products; other than the run\'s only if its numerics.mode is not "deterministic"'
    )
    threads: Annotated[Positive, AfterValidator(_threads)] = says(
        1, "CPU threads of the compute thread, and of a kernel's call"
    )
    slots: Annotated[Count, CliOption("N", live=True)] = says(
        0, "microbatches in flight per stage and open step, at most; 0: as many as fit (docs/routing.md)"
    )
    drain_s: Seconds = says(60.0, "seconds a leaving peer waits for another replica to have its stage's state")
    routing: RoutingName = says("least_time", "which replica of the next stage gets a microbatch (docs/extending.md)")
    placement: PlacementName = says("most_under_replicated", "which stage `swarmnet join` takes (docs/extending.md)")
    rebalance_s: Annotated[Count, CliOption("N")] = says(
        60, "seconds between looks whether another stage needs it more; 0: it stays (docs/routing.md)"
    )
    events: Annotated[Home | None, CliOption("FILE")] = says(
        None, "append events to this file, one JSON object per line"
    )
    region: Annotated[str, CliOption("NAME")] = says(
        "", "where this machine is, such as eu-west; shown by `swarmnet status`", pattern=r"^[A-Za-z0-9-]{0,24}$"
    )
    nickname: Annotated[str, AfterValidator(_nickname), CliOption("NAME")] = says(
        "", "what this machine is called, for all who look at the run: at most 32 characters of printable ASCII"
    )
    trace: Annotated[Home | None, CliOption("FILE")] = says(
        None, "write what each moment was spent on to this file, for chrome://tracing or Perfetto (docs/metrics.md)"
    )
    dashboard: Annotated[str, AfterValidator(_listen_at), CliOption("[HOST:]PORT")] = says(
        "",
        "serve the dashboard, figures and health there, "
        "to this machine unless HOST says more (docs/watch.md); 0: any port; "
        "requests must name an address, localhost, HOST or this machine's name",
    )
    mesh: Mesh = Mesh()
    memory: Memory = Memory()
    caps: Caps = Caps()
    log: Log = Log()

    @property
    def own_file(self) -> Path:
        """This peer's own config file, above --config, which peers may share. `swarmnet control limits` writes it."""
        return self.dir / "peer.toml"

    @property
    def data_folder(self) -> Path | None:
        """Where a relative path to the run's text starts: at the manifest; None: here, for a path that was typed."""
        return self.manifest.parent if self.manifest and self.data is None else None

    @property
    def network(self) -> NetworkSettings:
        """What an endpoint needs to know."""
        return NetworkSettings(*(getattr(self, each.name) for each in fields(NetworkSettings)))

    @model_validator(mode="after")
    def _together(self) -> PeerConfig:
        if not self.roles:
            raise ValueError('roles must name at least one of "stage", "trainer", "bootstrap"')
        # A peer is one replica of a stage: two of them would fail together.
        if len(set(self.stages)) != len(self.stages):
            raise ValueError(f"stages = {list(self.stages)} names a stage twice")
        # 0 is any free port, so two zeros are two ports.
        if self.port and self.port == self.dht_port:
            raise ValueError(f"port and dht_port are both {self.port}: the data plane and the DHT each need their own")
        if self.bulk_port and self.bulk_port in (self.port, self.dht_port):
            raise ValueError(f"bulk_port = {self.bulk_port} is taken by port or dht_port: it needs its own")
        if self.device == "cpu" and self.mesh.gpus not in ("1", "auto"):
            raise ValueError(
                f'mesh.gpus = "{self.mesh.gpus}" needs device = "cuda" or "auto"; for ranks on the CPU '
                "leave gpus out, and use ranks (--ranks N)"
            )
        if self.device == "cuda" and self.mesh.ranks > 1:
            raise ValueError(f'mesh.ranks = {self.mesh.ranks} are on the CPU; with device = "cuda" say mesh.gpus')
        if self.mesh.shard == "zero3" and self.memory.activations == "offload":
            raise ValueError(
                'mesh.shard = "zero3" gathers weights that memory.activations = "offload" would take for '
                'activations: use "recompute_layers" or "recompute" with it'
            )
        return self
