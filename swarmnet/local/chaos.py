"""A chaos file: what is to be done to a local swarm, as TOML, or drawn from a seed. Text in, `Fault`s out.

    seed = 7

    [[kill]]
    stage = 1
    step = 5
    phase = "backward"

    [random]
    stop = 4            # on average, per 100 steps

docs/chaos.md shows every key.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from swarmnet.config import toml
from swarmnet.config.check import check
from swarmnet.config.table import Count, Table
from swarmnet.errors import UsageError
from swarmnet.local.fault import Fault, Kind, Moment, Phase, stage_of

Duration = Annotated[float, Field(gt=0, le=3600)]
Rate = Annotated[float, Field(ge=0, le=1000)]

PHASES: tuple[Phase, ...] = ("forward", "backward", "averaging", "apply")
"""Phases that every replica comes through in every step, so that random faults can count on them."""


class When(Table):
    """When it happens, and whose steps and phases count."""

    step: Count | None = Field(default=None, description="in the middle of this step, or in its `phase`")
    at_s: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="seconds since every stage had a replica"
    )
    stage: Count | None = Field(default=None, description="a replica of this stage, chosen by the seed")
    peer: Annotated[str, Field(pattern=r"^s\d+-r\d+$")] | None = Field(
        default=None, description='this replica, such as "s1-r0"'
    )
    phase: Phase | None = Field(default=None, description="while that replica is in this phase of the step")
    moment: Moment = Field(default="begin", description="before the phase's work is done, or after")

    @model_validator(mode="after")
    def _once(self) -> When:
        if (self.step is None) == (self.at_s is None):
            raise ValueError("name either step or at_s")
        if self.stage is not None and self.peer is not None:
            raise ValueError("name either stage or peer")
        return self


class Kill(When):
    """SIGKILL."""

    back_s: Duration | None = Field(default=None, description="it returns after so long; 1 if not said")
    back: bool = Field(default=True, description="false: it never returns")


class Stop(When):
    """SIGSTOP, and SIGCONT after `for_s`."""

    for_s: Duration = Field(description="seconds until it goes on")


class KillRank(When):
    """SIGKILL to one rank of a replica that has several; the replica starts its ranks anew."""


class Join(When):
    """A replica more, in `stage` or where the fewest are."""


class Drain(When):
    """SIGTERM: it leaves in an orderly way."""

    back_s: Duration | None = Field(default=None, description="it returns after so long; not at all if not said")


class Partition(When):
    """Groups that do not hear of each other for a while; who is in no group hears everybody."""

    between: Annotated[tuple[tuple[str, ...], ...], Field(min_length=2)] = Field(
        description='groups of replicas, stages and trainers: [["s0", "s1-r0"], ["s1-r1", "trainer-0"]]'
    )
    for_s: Duration = Field(description="seconds until it is healed")


class Slow(When):
    """Slow links."""

    peers: Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        description='whose links, to everybody: replicas, stages, trainers, such as ["s1-r0", "s2"]'
    )
    bytes_per_s: Annotated[float, Field(ge=0)] = Field(default=0.0, description="of each link, each way; 0: unlimited")
    latency_s: Annotated[float, Field(ge=0, le=60)] = Field(default=0.0, description="added, each way")
    for_s: Duration = Field(description="seconds until they are as before")

    @model_validator(mode="after")
    def _something(self) -> Slow:
        if not (self.bytes_per_s or self.latency_s):
            raise ValueError("name bytes_per_s, latency_s, or both")
        return self


class Random(Table):
    """Faults drawn from the seed: how many of each kind, on average, per 100 steps."""

    kill: Rate = 0.0
    stop: Rate = 0.0
    join: Rate = 0.0
    drain: Rate = 0.0
    partition: Rate = 0.0
    slow: Rate = 0.0
    kill_rank: Rate = 0.0


class _Top(Table):
    seed: Count = 0
    random: Random = Random()


SHORTHAND = Random(kill=10, stop=5, join=2, partition=2, slow=2)
"""What `random:SEED` means."""

_KINDS: dict[str, type[When]] = {
    "kill": Kill,
    "stop": Stop,
    "join": Join,
    "drain": Drain,
    "partition": Partition,
    "slow": Slow,
    "kill_rank": KillRank,
}


def load(text: str, *, stages: int, replicas: int, steps: int) -> tuple[int, tuple[Fault, ...]]:
    """(seed, faults) of `--chaos text`: the path of a chaos file, or `random:SEED`. Raises UsageError, one line."""
    if (seed := text.removeprefix("random:")) != text:
        if not seed.isdigit():
            raise UsageError(f"--chaos {text}: write random:SEED, for example random:7, or the path of a file")
        return int(seed), expand(SHORTHAND, int(seed), stages=stages, replicas=replicas, steps=steps)
    return faults_of(toml.read(Path(text)), where=text, stages=stages, replicas=replicas, steps=steps)


def faults_of(
    data: Mapping[str, Any], *, where: str, stages: int, replicas: int, steps: int
) -> tuple[int, tuple[Fault, ...]]:
    """(seed, faults) of a chaos file's data. Raises UsageError that names the file and the entry."""
    unknown = sorted(data.keys() - {"seed", "random", *_KINDS})
    if unknown:
        raise UsageError(f"{where}: {unknown[0]}: unknown key; known here: seed, random, [[{']], [['.join(_KINDS)}]]")
    top = check(_Top, {key: data[key] for key in ("seed", "random") if key in data}, origin=lambda _: where)
    found: list[Fault] = []
    for kind, model in _KINDS.items():
        entries = data.get(kind, [])
        if not (isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)):
            raise UsageError(f"{where}: {kind}: write [[{kind}]] above each entry")
        for number, entry in enumerate(entries, 1):
            here = f"{where}: [[{kind}]] number {number}"
            _complete(model, entry, here)
            table = check(model, entry, origin=lambda _, here=here: here)  # type: ignore[misc]  # bound at once
            _exists(table, here, stages=stages, steps=steps)
            found.append(_fault(kind, table))
    found += expand(top.random, top.seed, stages=stages, replicas=replicas, steps=steps)
    if not found:
        raise UsageError(f"{where}: nothing is to happen: add [[kill]], [[stop]], ... or [random]")
    return top.seed, tuple(found)


def _complete(model: type[When], entry: Mapping[str, Any], here: str) -> None:
    """Raises UsageError for a key that this kind cannot do without."""
    for name, field in model.model_fields.items():
        if field.is_required() and name not in entry and entry.keys() <= model.model_fields.keys():
            raise UsageError(f"{here}: {name} is missing: {field.description}")


def _exists(entry: When, here: str, *, stages: int, steps: int) -> None:
    """Raises UsageError for a stage or step that the run has not. A replica may be one that joins."""
    if entry.step is not None and entry.step >= steps:
        raise UsageError(f"{here}: there is no step {entry.step}, steps are 0 to {steps - 1}")
    groups: Iterable[Iterable[str]] = ()
    match entry:
        case Partition():
            groups = entry.between
        case Slow():
            groups = (entry.peers,)
    for name in (*(name for group in groups for name in group), *((entry.peer,) if entry.peer else ())):
        stage = stage_of(name)
        if stage is None and not name.startswith("trainer-"):
            raise UsageError(
                f'{here}: "{name}" is no name: write a replica ("s1-r0"), a stage ("s1") or a trainer ("trainer-0")'
            )
        if stage is not None and stage >= stages:
            raise UsageError(f"{here}: {name}: there is no stage {stage}, stages are 0 to {stages - 1}")
    if entry.stage is not None and entry.stage >= stages:
        raise UsageError(f"{here}: there is no stage {entry.stage}, stages are 0 to {stages - 1}")


def _fault(kind: str, entry: When) -> Fault:
    fields: dict[str, Any] = {}
    match entry:
        case Kill():
            fields["back_s"] = (entry.back_s or 1.0) if entry.back else None
        case Drain():
            fields["back_s"] = entry.back_s
        case Stop():
            fields["for_s"] = entry.for_s
        case Partition():
            fields |= {"for_s": entry.for_s, "groups": entry.between}
        case Slow():
            fields |= {
                "for_s": entry.for_s,
                "groups": (entry.peers,),
                "bytes_per_s": entry.bytes_per_s,
                "latency_s": entry.latency_s,
            }
    return _labelled(
        Fault(
            kind,  # type: ignore[arg-type]
            "",
            entry.stage if entry.peer is None else stage_of(entry.peer),
            entry.peer,
            entry.step,
            entry.at_s,
            entry.phase,
            entry.moment,
            **fields,
        )
    )


def _labelled(fault: Fault) -> Fault:
    """`fault` with the name it goes by on the terminal: "kill s1@5 backward"."""
    whom = fault.peer or (f"s{fault.stage}" if fault.stage is not None else "")
    if fault.groups:
        whom = "|".join("+".join(group) for group in fault.groups)
    when = f"@{fault.step}" if fault.step is not None else f" at {fault.at_s:g} s"
    phase = f" {fault.phase}" + (" end" if fault.moment == "end" else "") if fault.phase else ""
    return replace(fault, label=f"{fault.kind} {whom}{when}{phase}")


# ---------------------------------------------------------------- at random


def expand(rates: Random, seed: int, *, stages: int, replicas: int, steps: int) -> tuple[Fault, ...]:
    """Draw faults for `steps` steps: the same for the same arguments. The last steps are left alone."""
    rng = random.Random(f"{seed}/chaos")
    found: list[Fault] = []
    kinds: tuple[Kind, ...] = ("kill", "stop", "join", "drain", "partition", "slow", "kill_rank")
    for kind in kinds:
        expected = getattr(rates, kind) * steps / 100
        count = int(expected) + (rng.random() < expected % 1)
        for _ in range(count):
            found += _draw(kind, rng, stages=stages, replicas=replicas, steps=steps)
    return tuple(sorted(map(_labelled, found), key=lambda fault: fault.step or 0))


def _draw(kind: Kind, rng: random.Random, *, stages: int, replicas: int, steps: int) -> list[Fault]:
    step, stage = rng.randrange(1, max(steps - 2, 2)), rng.randrange(stages)
    moment: Literal["begin", "end"] = rng.choice(("begin", "end"))
    phase = rng.choice((None, *PHASES))
    match kind:
        case "kill":
            found = [Fault("kill", "", stage, step=step, phase=phase, moment=moment, back_s=rng.uniform(0.2, 2.0))]
            if rng.random() < 0.3:  # and again while the first one fetches its state
                during: Phase = rng.choice(("snapshot", "fetch"))
                found.append(Fault("kill", "", stage, step=step, phase=during, back_s=rng.uniform(0.2, 2.0)))
            return found
        case "stop":
            return [Fault("stop", "", stage, step=step, phase=phase, moment=moment, for_s=rng.uniform(0.5, 6.0))]
        case "join":
            return [Fault("join", "", rng.choice((None, stage)), step=step)]
        case "kill_rank":  # the stage is one that has ranks: the machine of faults knows
            return [Fault("kill_rank", "", step=step, phase=phase, moment=moment)]
        case "drain":
            return [Fault("drain", "", stage, step=step, phase=phase, moment=moment, back_s=rng.uniform(1.0, 3.0))]
        case "partition":
            everybody = [f"s{number}-r{replica}" for number in range(stages) for replica in range(replicas)]
            rng.shuffle(everybody)
            here = rng.choice((1, max(len(everybody) // 2, 1)))
            groups = tuple(sorted(everybody[:here])), tuple(sorted(everybody[here:]))
            return [Fault("partition", "", step=step, for_s=rng.uniform(0.5, 4.0), groups=groups)] if groups[1] else []
        case _:
            name = f"s{stage}-r{rng.randrange(replicas)}"
            return [
                Fault(
                    "slow",
                    "",
                    step=step,
                    for_s=rng.uniform(1.0, 5.0),
                    groups=((name,),),
                    bytes_per_s=10 ** rng.uniform(5.0, 7.0),
                    latency_s=rng.uniform(0.0, 0.1),
                )
            ]
