"""Which machines a run has, by `--mbit` and what goes with it or by `--fleet FILE`; and what was chosen for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from swarmnet.cli.settings import CountRange
from swarmnet.errors import UsageError
from swarmnet.telemetry.text import typed

if TYPE_CHECKING:
    from swarmnet.config.fleet import MachineKind, Members
    from swarmnet.config.peer import PeerConfig
    from swarmnet.manifest.schema import Manifest
    from swarmnet.plan.choice import Look, Priced
    from swarmnet.plan.cost import LayerTimes
    from swarmnet.plan.members import Counts, Fits, MachineFit

F = TypeVar("F", bound=Callable[..., Any])

MOST_MBIT, MOST_REPLICAS = 1e6, 10_000


def above_0(ctx: click.Context, param: click.Parameter, text: str | None) -> float | None:
    """A number above 0. Raises UsageError."""
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    # A number that is none is in no range.
    if not 0.0 < value <= MOST_MBIT:
        raise UsageError(f"{param.opts[0]} {text}: must be a number above 0 and at most {MOST_MBIT:,.0f}")
    return value


MEMBER = {
    "tflops": ("N", "TFLOP/s that a member reaches in training.  [30 on cuda, 0.08 on a CPU's core]"),
    "rtt": ("MS", "Milliseconds of a round trip between members.  [50]"),
}
"""What else is said of a member, with `--mbit`: flag -> (metavar, help)."""


def with_line(mbit_help: str, *, device: bool = True) -> Callable[[F], F]:
    """`--mbit`, and what it is said with; and `--fleet`. device: `--device`, too."""

    def options(command: F) -> F:
        command = click.option(
            "--fleet",
            type=click.Path(path_type=Path),
            metavar="FILE",
            allow_from_autoenv=False,
            help="Machines of members by kind, memory, line and region, instead of --mbit; docs/plan.md.",
        )(command)
        for name, (metavar, words) in MEMBER.items():
            command = click.option(
                f"--{name}", callback=above_0, metavar=metavar, allow_from_autoenv=False, help=words
            )(command)
        command = click.option(
            "--replicas",
            type=CountRange(1, MOST_REPLICAS),
            metavar="N",
            allow_from_autoenv=False,
            help="Replicas of each stage that are expected.  [4]",
        )(command)
        if device:
            command = click.option(
                "--device",
                type=click.Choice(["cuda", "cpu"]),
                allow_from_autoenv=False,  # of a peer it says something else
                help="What members compute on.  [cuda if it is here]",
            )(command)
        return click.option("--mbit", callback=above_0, metavar="N", allow_from_autoenv=False, help=mbit_help)(command)

    return options


@dataclass(frozen=True, slots=True)
class Machines:
    """What was said of them, and how many replicas each stage has, where that was said."""

    members: Members
    replicas: int | None
    words: str
    device_said: bool = True
    """False: it is this machine's, and another's may differ."""

    def counts(self, stages: int) -> Counts | None:
        """Where they are; None: wherever they are needed."""
        return None if self.replicas is None else ((self.replicas,),) * stages

    def peer_files(self, manifest: Path) -> list[Path]:
        """Where the peer config of each kind is: run.peer.toml next to run.toml, and run.KIND.peer.toml if there are
        several kinds."""
        kinds = [kind.name for kind in self.members.machines]
        return [manifest.with_suffix(f".{name}.peer.toml" if kinds[1:] else ".peer.toml") for name in kinds]

    @property
    def device(self) -> Literal["cuda", "cpu"]:
        """What the run is for: cuda only if no machine computes on a CPU."""
        return "cpu" if any(kind.device == "cpu" for kind in self.members.machines) else "cuda"


def machines_of(options: Mapping[str, Any], *, ranks: int = 1, usual_device: str | None = None) -> Machines | None:
    """What a command's options say of machines; None if nothing. Raises UsageError for an option that would then do
    nothing."""
    mbit, fleet, device = options["mbit"], options["fleet"], options.get("device")
    replicas, tflops, rtt = options["replicas"], options["tflops"], options["rtt"]
    if usual_device is not None:  # of a peer --device says something else
        device = None
    others = {"--device": device, "--replicas": replicas, "--tflops": tflops, "--rtt": rtt}
    said = [flag for flag, value in others.items() if value is not None]
    if fleet is not None:
        if said := [*(["--mbit"] if mbit is not None else []), *said]:
            raise UsageError(f"{said[0]} and --fleet exclude each other: {fleet} says what members have")
        from swarmnet.config.check import refusing
        from swarmnet.config.fleet import read_fleet
        from swarmnet.simulate.fleet import FleetFile

        with refusing(str(fleet)):
            members = read_fleet(fleet, FleetFile).members(str(fleet))
        kinds = ", ".join(f"{kind.count} x {kind.name}" for kind in members.machines)
        return Machines(members, None, f"{fleet.name}: {kinds}")
    if mbit is None:
        if said:
            raise UsageError(f"{said[0]} describes members: add --mbit, such as --mbit 200")
        return None
    from swarmnet.config.check import refusing
    from swarmnet.config.fleet import ROUND_TRIP_MS, TFLOPS, Members

    kind = device or usual_device or _device_here()
    reached, count, trip = tflops or ranks * TFLOPS[kind], replicas or 4, rtt or ROUND_TRIP_MS
    words = f"{mbit:g} Mbit/s each way, {trip:g} ms, {reached:g} TFLOP/s ({kind}), {count} replicas"
    like: Literal["cuda", "cpu"] = "cpu" if kind == "cpu" else "cuda"
    with refusing("what --mbit, --rtt, --tflops and --replicas say"):
        alike = Members.alike(count, mbit=mbit, tflops=reached, round_trip_s=trip / 1000, device=like)
    return Machines(alike, count, words, device_said=device is not None)


def _device_here() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def looking(manifest: Manifest, members: Members, config: PeerConfig, *, bf16: bool = False) -> Look:
    """How machines hold the stages of proposals, found by planning the memory of peers with `config`."""
    from swarmnet.manifest.schema import Wire
    from swarmnet.peer.memory_fit import machine_fit, setup_of
    from swarmnet.ranks.layout import MeshLayout
    from swarmnet.stage.canonical import layers_of

    def look(priced: Priced) -> Fits:
        way, stages, places = priced.way, priced.cut.stages, priced.cut.stages // priced.stages_per_peer
        numerics = manifest.numerics.model_copy(update={"mode": priced.mode} | ({"compute": "bf16"} if bf16 else {}))
        averaging = manifest.averaging.model_copy(update={"sync": way.sync, "codec": way.codec})
        changed = {"cut": priced.cut, "training": priced.training, "averaging": averaging, "numerics": numerics}
        wire = Wire(activations=way.activations, gradients=way.gradients)
        setup = setup_of(config, manifest.model_copy(update=changed | {"wire": wire}), MeshLayout())
        known: dict[object, tuple[MachineFit, ...]] = {}
        found = []
        for place in range(places):
            mine = [setup.specs[stage] for stage in range(place, stages, places)]
            # Stages in the middle are alike but for their layers.
            key = tuple((spec.first, spec.last, len(layers_of(spec))) for spec in mine)
            if key not in known:
                numbers = [spec.stage for spec in mine]
                known[key] = tuple(machine_fit(setup, numbers, kind) for kind in members.machines)
            found.append(known[key])
        return tuple(found)

    return look


_HEAD = (
    *("", "sync", "sums", "boundary", "stages", "machines", "microbatch", "slots", "s/step", "busy", "steps"),
    "limited by",
)


@dataclass(frozen=True, slots=True)
class Proposal:
    """What was chosen for machines, and what it was compared with."""

    machines: Machines
    best: Priced
    compared: tuple[Priced, ...]

    @classmethod
    def of(
        cls,
        manifest: Manifest,
        said: Mapping[str, object],
        machines: Machines,
        config: PeerConfig | None = None,
        times: LayerTimes | None = None,
    ) -> Proposal:
        """For peers with `config`. Raises UsageError for a field that was said and has no price, and if nothing
        fits."""
        from swarmnet.config.peer import PeerConfig
        from swarmnet.plan.choice import search

        look = None
        if (counts := machines.counts(manifest.cut.stages)) is None:
            bf16 = machines.device == "cuda" and "numerics.compute" not in said
            look = looking(manifest, machines.members, config or PeerConfig(), bf16=bf16)
        return cls(machines, *search(manifest.of_stage(0), said, machines.members, look, times, counts))

    @property
    def fields(self) -> dict[str, object]:
        """Of the manifest."""
        return self.best.fields | ({"numerics.compute": "bf16"} if self.machines.device == "cuda" else {})

    def lines(self) -> list[str]:
        """A table, the chosen row with a star; and for a fleet which machine serves what."""
        from swarmnet.cli.plan_report import aligned, number, served_lines

        rows = [_HEAD]
        for each in self.compared:
            way, used = each.way, sum(map(sum, each.situation.counts))
            rows.append(
                (
                    "*" if each is self.best else "",
                    way.sync,
                    way.codec,
                    way.activations if way.activations == way.gradients else f"{way.activations}/{way.gradients}",
                    f"{each.cut.stages}" + f", {each.stages_per_peer} a peer" * (each.stages_per_peer > 1),
                    f"{used} of {max(self.machines.members.count, used)}",
                    f"{each.training.microbatches} x {each.training.microbatch_size}",
                    str(way.slots),
                    number(each.cost.step_s),
                    f"{each.cost.utilisation:.0%}",
                    f"x {each.more_steps:.2f}",
                    _limited(each),
                )
            )
        of = f" of {self.best.situation.load.parameters:,} parameters" if self.machines.replicas else ""
        return [
            f"for {self.machines.words}{of} (*: chosen):",
            *aligned(rows, right=False),
            *(["", *served_lines(self.best, self.machines.members)] if self.best.fits else []),
        ]

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "members": self.machines.members.model_dump(mode="json"),
            "replicas": self.machines.replicas,
            "chosen": self.fields | {"slots": self.best.way.slots},
            "compared": [
                {
                    **each.fields,
                    "way": asdict(each.way),
                    "stages_per_peer": each.stages_per_peer,
                    "cost": asdict(each.cost),
                    "utilisation": each.cost.utilisation,
                    "more_steps": each.more_steps,
                    "limited_by": _limited(each),
                    "counts": each.situation.counts,
                    "fits": [[asdict(fit) for fit in place] for place in each.fits],
                    "chosen": each is self.best,
                }
                for each in self.compared
            ],
        }

    def peer_configs(self, manifest: Path) -> dict[Path, tuple[int, str]]:
        """(slots, text) of the files that peers start with, one for each kind of machine that serves."""
        kinds = enumerate(zip(self.machines.members.machines, self.machines.peer_files(manifest), strict=True))
        return {
            file: (self.best.slots_of(number), self._peer_config(number, kind, manifest, file))
            for number, (kind, file) in kinds
            if any(place[number] for place in self.best.situation.counts)
        }

    def _peer_config(self, number: int, kind: MachineKind, manifest: Path, file: Path) -> str:
        from swarmnet.cli.plan_report import served

        best = self.best
        start = f"swarmnet peer --manifest {typed(manifest.name)} --config {typed(file.name)} --stage"
        if not best.fits:
            lines = [f"# For {self.machines.words}, as `swarmnet init` found; docs/plan.md has the formulas.", "#"]
            lines.append(f"#   {start} 0")
        else:
            lines = [f"# For {kind.count} x {kind.name}, as `swarmnet init` found; docs/plan.md has the formulas.", "#"]
            for place, counts in enumerate(best.situation.counts):
                if counts[number]:
                    lines.append(f"#   {counts[number]} of them: {start} {served(best, place)}")
        lines += ["", f"slots = {best.slots_of(number)}"]
        if self.machines.device_said:
            lines.append(f'device = "{kind.device}"')
        if kind.device == "cuda" and kind.gpus > 1:
            placed = zip(best.fits, best.situation.counts, strict=True)
            shard = next(fits[number].shard for fits, counts in placed if counts[number])
            lines += ["", "[mesh]", f'gpus = "{kind.gpus}"', f'shard = "{shard}"']
        return "\n".join(lines) + "\n"


def _limited(priced: Priced) -> str:
    """What twice as much of would help most, and what devices wait for."""
    from swarmnet.plan.cost import limits

    found, waits = priced.situation, priced.cost.waits
    faster = limits(found.load, found.site, priced.way)
    most = max(waits, key=lambda name: waits[name])
    return f"{min(faster, key=lambda name: faster[name])}; {most} {waits[most]:.3g} s"
