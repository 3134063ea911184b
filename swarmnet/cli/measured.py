"""`swarmnet plan --measure`: layer times of this machine, kept next to the manifest, and the cut that follows."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

import click

from swarmnet.errors import UsageError, unwritable
from swarmnet.manifest.schema import Manifest, StageSpec
from swarmnet.model.cut import cut_layers
from swarmnet.net.identity import write_whole
from swarmnet.plan.cost import LayerTimes

if TYPE_CHECKING:
    from swarmnet.plan.memory import Setup


def measured_file(manifest: Path) -> Path:
    """Where a manifest's layer times are: run.measured.json next to run.toml."""
    return manifest.with_suffix(".measured.json")


def _what(spec: StageSpec) -> dict[str, object]:
    """What layer times depend on."""
    training = spec.training
    return {
        "model": spec.model.model_dump(mode="json"),
        "microbatch_size": training.microbatch_size,
        "sequence_length": training.sequence_length,
        "compute": spec.numerics.compute,
    }


def saved(path: Path, manifest: Manifest) -> LayerTimes | None:
    """The times that were measured for this run; None if there are none, or of another model. Raises UsageError."""
    file = measured_file(path)
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if found["of"] != _what(manifest.of_stage(0)):
            click.echo(f"ignored: {file} is of another model or microbatch; --measure measures again", err=True)
            return None
        return LayerTimes(**{each.name: found["times"][each.name] for each in fields(LayerTimes)})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{file}: cannot be read ({error}): remove it, or measure again with --measure") from error


def measured_here(path: Path, setup: Setup, *, threads: int, as_json: bool) -> int:
    """Measure, keep the times and print them, with the cut that makes stages equally fast. Raises UsageError."""
    import torch

    from swarmnet.plan.measure import measure

    torch.set_num_threads(threads)
    spec, device, file = setup.specs[0], setup.layout.devices[0], measured_file(path)
    times = measure(spec, device=device, memory=setup.memory, progress=lambda words: click.echo(words, err=True))
    record = {"of": _what(spec), "times": asdict(times), "device": device}
    try:
        write_whole(file, json.dumps(record, indent=2) + "\n", mode=0o666, once=False)
    except OSError as error:
        raise unwritable(file, error) from error
    now = tuple(map(len, cut_layers(spec.model, spec.cut, spec.training.sequence_length)))
    best = times.cut(spec.model.num_layers, spec.cut.stages)
    if as_json:
        click.echo(json.dumps(record | {"cut": best, "stage_s": times.stages_s(best)}, indent=2))
        return 0
    click.echo(
        f"wrote {file}: a microbatch of {times.tokens:,} tokens takes {1e3 * times.layer_s:.3g} ms a layer, "
        f"{1e3 * times.head_s:.3g} the head, {1e3 * times.embedding_s:.3g} the embedding, "
        f"{1e3 * times.call_s:.3g} each stage in addition, on {device}: {times.flops_per_s / 1e12:.3g} TFLOP/s\n"
        f"slowest stage of the cut {list(now)}: {1e3 * max(times.stages_s(now)):.3g} ms"
    )
    if best != now:
        said = json.dumps(best, separators=(",", ":"))
        slowest_ms = 1e3 * max(times.stages_s(best))
        click.echo(f"of the cut {list(best)}: {slowest_ms:.3g} ms; a new run has it by --set cut.layers={said}")
    return 0
