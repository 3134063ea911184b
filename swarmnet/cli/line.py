"""What members have, by `--mbit` and what goes with it or by `--fleet FILE`; and what was chosen for them."""

from __future__ import annotations

import functools
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
    from swarmnet.manifest.schema import Manifest
    from swarmnet.plan.choice import Look, Priced
    from swarmnet.plan.cost import LayerTimes
    from swarmnet.plan.members import Counts
    from swarmnet.stage.passes import MemoryPolicy

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
class Lent:
    """Members, and how many replicas each stage has of them, where that was said."""

    members: Members
    replicas: int | None
    words: str
    device_said: bool = True
    """False: it is this machine's, and another's may differ."""

    def counts(self, stages: int) -> Counts | None:
        """Where everybody is; None: wherever they are needed."""
        return None if self.replicas is None else ((self.replicas,),) * stages

    def peer_files(self, manifest: Path) -> dict[str, Path]:
        """Where the peer config of each kind of machine is: run.peer.toml beside run.toml, and run.KIND.peer.toml if
        there are several kinds."""
        kinds = [kind.name for kind in self.members.machines]
        return {name: manifest.with_suffix(f".{name}.peer.toml" if kinds[1:] else ".peer.toml") for name in kinds}

    @property
    def device(self) -> Literal["cuda", "cpu"]:
        """What the run is for: cuda only if nobody computes on a CPU."""
        return "cpu" if any(kind.device == "cpu" for kind in self.members.machines) else "cuda"


def lent(
    *,
    mbit: float | None,
    fleet: Path | None,
    device: str | None,
    replicas: int | None,
    tflops: float | None,
    rtt: float | None,
    ranks: int = 1,
    usual_device: str | None = None,
) -> Lent | None:
    """What was said of members; None if nothing was. Raises UsageError for an option that would then do nothing."""
    others = {"--device": device, "--replicas": replicas, "--tflops": tflops, "--rtt": rtt}
    said = [flag for flag, value in others.items() if value is not None]
    if fleet is not None:
        if said := [*(["--mbit"] if mbit is not None else []), *said]:
            raise UsageError(f"{said[0]} and --fleet exclude each other: {fleet} says what members have")
        members = read_fleet(fleet)
        kinds = ", ".join(f"{kind.count} x {kind.name}" for kind in members.machines)
        return Lent(members, None, f"{fleet.name}: {kinds}")
    if mbit is None:
        if said:
            raise UsageError(f"{said[0]} describes members: add --mbit, such as --mbit 200")
        return None
    from swarmnet.config.fleet import ROUND_TRIP_MS, TFLOPS, Members

    kind = device or usual_device or _device_here()
    reached, count, trip = tflops or ranks * TFLOPS[kind], replicas or 4, rtt or ROUND_TRIP_MS
    words = f"{mbit:g} Mbit/s each way, {trip:g} ms, {reached:g} TFLOP/s ({kind}), {count} replicas"
    like: Literal["cuda", "cpu"] = "cpu" if kind == "cpu" else "cuda"
    alike = Members.alike(count, mbit=mbit, tflops=reached, round_trip_s=trip / 1000, device=like)
    return Lent(alike, count, words, device_said=device is not None)


def _device_here() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def read_fleet(path: Path) -> Members:
    """Raises UsageError, one line, for a file that describes no fleet."""
    from swarmnet.config import toml
    from swarmnet.config.check import check
    from swarmnet.config.fleet import MachineKind, Members

    data = toml.read(path)
    # Both describe a fleet: one by its machines, the other by how they are drawn.
    if data.keys() & {"peers", "run", "machine", "churn", "timers"}:
        raise UsageError(f"{path}: this is a fleet of `swarmnet simulate`; docs/plan.md shows one of `plan` and `init`")
    entries = data.get("machines", [])
    if not (isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)):
        raise UsageError(f"{path}: machines: write [[machines]] above each kind of machine")
    for number, entry in enumerate(entries, 1):
        # A mistake in one of several is said with its number.
        check(MachineKind, entry, origin=functools.partial(_at, f"{path}: [[machines]] number {number}"))
    return check(Members, data, origin=lambda _: str(path))


def _at(here: str, _: tuple[str, ...]) -> str:
    return here


def looking(manifest: Manifest, members: Members, memory: MemoryPolicy, memo_bytes: int, *, bf16: bool) -> Look:
    """How machines hold the stages of proposals, found by planning them."""
    from swarmnet.manifest.schema import Wire
    from swarmnet.peer.memory_fit import machine_fit
    from swarmnet.plan.choice import MachineFit
    from swarmnet.plan.memory import Setup
    from swarmnet.ranks.layout import MeshLayout
    from swarmnet.stage.canonical import layers_of

    def look(priced: Priced) -> tuple[tuple[MachineFit, ...], ...]:
        spec, way = manifest.of_stage(0), priced.way
        numerics = spec.numerics.model_copy(
            update={"mode": priced.fields["numerics.mode"]} | ({"compute": "bf16"} if bf16 else {})
        )
        averaging = spec.averaging.model_copy(update={"sync": way.sync, "codec": way.codec})
        changed = {"cut": priced.cut, "training": priced.training, "averaging": averaging, "numerics": numerics}
        specs = tuple(spec.model_copy(update=changed | {"stage": stage}) for stage in range(priced.cut.stages))
        wire = Wire(activations=way.activations, gradients=way.gradients)
        audited = manifest.model_copy(update=changed).audited
        setup = Setup(specs, wire, MeshLayout(), memory=memory, memo_bytes=memo_bytes, audited=audited)
        places = priced.cut.stages // priced.stages_per_peer
        known: dict[object, tuple[MachineFit, ...]] = {}
        found = []
        for place in range(places):
            stages = range(place, priced.cut.stages, places)
            # Stages in the middle are alike but for their layers.
            key = tuple((specs[each].first, specs[each].last, len(layers_of(specs[each]))) for each in stages)
            if key not in known:
                known[key] = tuple(machine_fit(setup, stages, kind) for kind in members.machines)
            found.append(known[key])
        return tuple(found)

    return look


def _microbatches(priced: Priced) -> str:
    return f"{priced.training.microbatches} x {priced.training.microbatch_size}"


_HEAD = ("", "sync", "sums", "boundary", "stages", "microbatch", "slots", "s/step", "busy", "steps", "limited by")


@dataclass(frozen=True, slots=True)
class Fit:
    """What was chosen for members, and what it was compared with."""

    lent: Lent
    best: Priced
    compared: tuple[Priced, ...]

    @classmethod
    def of(
        cls,
        manifest: Manifest,
        said: Mapping[str, object],
        lent: Lent,
        *,
        memory: MemoryPolicy | None = None,
        memo_bytes: int = 0,
        times: LayerTimes | None = None,
    ) -> Fit:
        """Of a fleet by search, with `memory` and what is kept for who asks again at each peer. Raises UsageError for
        a field that was said and has no price, and if nothing fits."""
        from swarmnet.plan.choice import choose, search
        from swarmnet.stage.passes import MemoryPolicy

        spec = manifest.of_stage(0)
        if (counts := lent.counts(manifest.cut.stages)) is not None:
            return cls(lent, *choose(spec, said, lent.members, counts, times))
        look = looking(manifest, lent.members, memory or MemoryPolicy(), memo_bytes, bf16=lent.device == "cuda")
        return cls(lent, *search(spec, said, lent.members, look, times))

    @property
    def fields(self) -> dict[str, object]:
        """Of the manifest."""
        return self.best.fields | ({"numerics.compute": "bf16"} if self.lent.device == "cuda" else {})

    def lines(self) -> list[str]:
        """A table, the chosen row with a star; and for a fleet who serves what."""
        rows = [_HEAD]
        for each in self.compared:
            way = each.way
            rows.append(
                (
                    "*" if each is self.best else "",
                    way.sync,
                    way.codec,
                    way.activations if way.activations == way.gradients else f"{way.activations}/{way.gradients}",
                    f"{each.cut.stages}" + f", {each.stages_per_peer} a peer" * (each.stages_per_peer > 1),
                    _microbatches(each),
                    str(way.slots),
                    f"{each.cost.step_s:.3g}" if each.cost.step_s < 100 else f"{each.cost.step_s:.0f}",
                    f"{each.cost.utilisation:.0%}",
                    f"x {each.more_steps:.2f}",
                    _limited(each),
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        of = f" of {self.best.situation.load.parameters:,} parameters" if self.lent.replicas else ""
        return [
            f"for {self.lent.words}{of} (*: chosen):",
            *("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows),
            *(served_lines(self.best, self.lent.members) if self.best.fits else ()),
        ]

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "members": self.lent.members.model_dump(mode="json"),
            "replicas": self.lent.replicas,
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

    def peer_configs(self, manifest: Path) -> dict[Path, str]:
        """The files that members start with, one for each kind of machine that has a place."""
        files = self.lent.peer_files(manifest)
        return {
            files[kind.name]: self._peer_config(number, kind, manifest, files[kind.name])
            for number, kind in enumerate(self.lent.members.machines)
            if any(place[number] for place in self.best.situation.counts)
        }

    def written(self, manifest: Path) -> list[tuple[Path, int]]:
        """(file, slots) of each of them."""
        files = self.lent.peer_files(manifest)
        return [
            (files[kind.name], slots_of(self.best, number))
            for number, kind in enumerate(self.lent.members.machines)
            if any(place[number] for place in self.best.situation.counts)
        ]

    def _peer_config(self, number: int, kind: MachineKind, manifest: Path, file: Path) -> str:
        best = self.best
        start = f"swarmnet peer --manifest {typed(manifest.name)} --config {typed(file.name)} --stage"
        if not best.fits:
            lines = [f"# For {self.lent.words}, as `swarmnet init` found; docs/plan.md has the formulas.", "#"]
            lines.append(f"#   {start} 0")
        else:
            lines = [f"# For {kind.count} x {kind.name}, as `swarmnet init` found; docs/plan.md has the formulas.", "#"]
            for place, counts in enumerate(best.situation.counts):
                if counts[number]:
                    lines.append(f"#   {counts[number]} of them: {start} {served(best, place)}")
        lines += ["", f"slots = {slots_of(best, number)}"]
        if self.lent.device_said:
            lines.append(f'device = "{kind.device}"')
        if kind.device == "cuda" and kind.gpus > 1:
            placed = zip(best.fits, best.situation.counts, strict=True)
            shard = next(fits[number].shard for fits, counts in placed if counts[number])
            lines += ["", "[mesh]", f'gpus = "{kind.gpus}"', f'shard = "{shard}"']
        return "\n".join(lines) + "\n"


def slots_of(priced: Priced, kind: int) -> int:
    """Slots of machines of that kind: as many as are enough, or fit everywhere where it is."""
    from swarmnet.plan.cost import cost

    found = priced.situation
    enough = cost(found.load, found.site, priced.way).slots
    able = [fits[kind].slots for fits, n in zip(priced.fits, found.counts, strict=False) if n[kind]]
    return min([enough, *able])


def served(priced: Priced, place: int) -> str:
    """The stages of a peer there, as `--stage` takes them."""
    places = len(priced.situation.counts)
    return ",".join(map(str, range(place, priced.cut.stages, places)))


def served_lines(priced: Priced, members: Members) -> list[str]:
    """Who serves what, with how much of its memory."""
    from swarmnet.plan.memory import shown

    lines = [""]
    for place, counts in enumerate(priced.situation.counts):
        parts = []
        for n, fit, kind in zip(counts, priced.fits[place], members.machines, strict=True):
            if n:
                room = f" of {shown(kind.room)}" if kind.room is not None else ""
                mesh = f", {kind.gpus} GPUs by {fit.shard if fit.shard != 'none' else 'tensor'}" * (kind.gpus > 1)
                parts.append(f"{n} x {kind.name} (up to {fit.slots} slots{room}{mesh})")
        seconds = priced.situation.place_s[place]
        lines.append(f"stage {served(priced, place)}: {', '.join(parts)}; {seconds:.3g} s a microbatch")
    for number, kind in enumerate(members.machines):
        if idle := kind.count - sum(place[number] for place in priced.situation.counts):
            lines.append(f"{idle} x {kind.name} do nothing: no stage fits them")
    return lines


def _limited(priced: Priced) -> str:
    """What twice as much of would help most, and what devices wait for."""
    from swarmnet.plan.cost import limits

    found, cost = priced.situation, priced.cost
    faster = limits(found.load, found.site, priced.way)
    waits = {
        "bubble": cost.bubble_s,
        "boundary": cost.boundary_s,
        "averaging": cost.averaging_s / priced.way.inner_steps,
        "barrier": cost.barrier_s,
    }
    most = max(waits, key=lambda name: waits[name])
    return f"{min(faster, key=lambda name: faster[name])}; {most} {waits[most]:.3g} s"
