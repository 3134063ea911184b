"""What can be done to a swarm: each kind of fault is declared once, and everything else is derived from it.

A kind is a class. Its fields are the keys of its entries in a chaos file, its `told` is the line on the terminal, its
`event` the line in events.jsonl:

    seed = 7

    [[kill]]
    stage = 1
    step = 5
    phase = "backward"

    [random]
    stop = 4            # on average, per 100 steps

Text in, `Fault`s out; `schedule` decides about them, `local` and `simulate` carry them out. docs/testing.md shows every
key.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, PrivateAttr, create_model, model_validator

from swarmnet.config import toml
from swarmnet.config.check import check
from swarmnet.config.table import Count, Table, says
from swarmnet.errors import UsageError

Phase = Literal["forward", "backward", "averaging", "apply", "snapshot", "fetch"]
"""Where in a step. "averaging" begins when a contribution is asked for and ends when the sum is in; "snapshot": a
source is about to hand over a piece of its state; "fetch": a joiner has just received one, and knows no step."""
Moment = Literal["begin", "end"]
Duration = Annotated[float, Field(gt=0, le=3600)]
Group = tuple[str, ...]

TRANSFERS = ("snapshot", "fetch")
"""Phases that a replica comes through only while it hands over or takes state."""


class Fault(Table):
    """One thing to be done, once, and when; the base of all kinds."""

    step: Count | None = says(None, "in the middle of this step, or in its `phase`")
    at_s: Annotated[float, Field(ge=0)] | None = says(None, "seconds since every stage had a replica")
    stage: Count | None = says(None, "a replica of this stage, of several orders each in turn")
    peer: Annotated[str, Field(pattern=r"^s\d+-r\d+$")] | None = says(None, 'this replica, such as "s1-r0"')
    phase: Phase | None = says(None, "while that replica is in this phase of the step")
    moment: Moment = says("begin", "before the phase's work is done, or after")

    kind: ClassVar[str]
    event: ClassVar[str]
    told: ClassVar[str]
    """The line on the terminal when it is done; of what happens to `name` in `step`, with the fault's own fields."""
    takes_away: ClassVar[bool] = False
    """Is there a replica less while this lasts?"""
    strikes_one: ClassVar[bool] = False
    """Is it done to one replica?"""
    virtual_only: ClassVar[bool] = False
    """Can it be done to virtual processes alone?"""
    _label: str = PrivateAttr("")
    _into_step: float = PrivateAttr(0.35)

    @model_validator(mode="after")
    def _once(self) -> Self:
        if (self.step is None) == (self.at_s is None):
            raise ValueError("name either step or at_s")
        if self.stage is not None and self.peer is not None:
            raise ValueError("name either stage or peer")
        return self

    def __str__(self) -> str:
        """What it goes by on the terminal: "kill s1@5 backward"."""
        whom = "|".join("+".join(group) for group in self.groups)
        whom = whom or self.peer or (f"s{self.stage}" if self.stage is not None else "")
        when = f"@{self.step}" if self.step is not None else f" at {self.at_s:g} s"
        phase = f" {self.phase}" + (" end" if self.moment == "end" else "") if self.phase else ""
        return self._label or f"{self.kind} {whom}{when}{phase}"

    def named(self, label: str) -> Self:
        """The same fault, under the name that its order has in the command line."""
        found = self.model_copy()
        found._label = label
        return found

    @property
    def into_step(self) -> float:
        """Which share of its step is over when it is done, where no phase says it."""
        return self._into_step

    @property
    def place(self) -> int | None:
        """The stage that it says, or that of the replica it names."""
        return self.stage if self.peer is None else stage_of(self.peer)

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups that are cut off from each other, or (one group) that have slow links: names of peers, or of
        stages ("s1")."""
        return ()


class Kill(Fault):
    """SIGKILL."""

    back_s: Duration = says(1.0, "it returns after so long; 1 if not said")
    back: bool = says(True, "false: it never returns")
    every_s: Annotated[float, Field(ge=0)] = says(0.0, "again so long after it was done, and so on; 0: once")

    kind, event, takes_away, strikes_one = "kill", "killed", True, True
    told = "{name} was killed ({fault}, step {step})"


class Stop(Fault):
    """SIGSTOP, and SIGCONT after `for_s`."""

    for_s: Duration = Field(description="seconds until it goes on")

    kind, event, takes_away, strikes_one = "stop", "stop", True, True
    told = "{name} is stopped for {fault.for_s:.1f} s ({fault})"


class Join(Fault):
    """A replica more, in `stage` or where the fewest are."""

    kind, event = "join", "join"
    told = "{name} joins stage {stage} ({fault})"


class Drain(Fault):
    """SIGTERM: it leaves in an orderly way."""

    back_s: Duration | None = says(None, "it returns after so long; not at all if not said")

    kind, event, takes_away, strikes_one = "drain", "drain", True, True
    told = "{name} is told to leave ({fault}, step {step})"


class Partition(Fault):
    """Groups that get no messages of each other for a while; a peer in no group is connected to all."""

    between: Annotated[tuple[Group, ...], Field(min_length=2)] = Field(
        description='groups of replicas, stages and trainers: [["s0", "s1-r0"], ["s1-r1", "trainer-0"]]'
    )
    for_s: Duration = Field(description="seconds until it is healed")

    kind, event = "partition", "partition"
    told = "{fault} begins"

    @property
    def groups(self) -> tuple[Group, ...]:
        return self.between


class OneWayCut(Fault):
    """What some send does not reach some others; the other way is open."""

    senders: Annotated[Group, Field(min_length=1)] = Field(
        description='the senders of the lost messages: replicas, stages, trainers, such as ["s1-r0"]'
    )
    receivers: Annotated[Group, Field(min_length=1)] = Field(description="who does not hear them")
    for_s: Duration = Field(description="seconds until it is healed")

    kind, event = "one_way_cut", "one_way_cut"
    told = "{fault} begins"

    @property
    def groups(self) -> tuple[Group, ...]:
        return self.senders, self.receivers


class Slow(Fault):
    """Slow links."""

    peers: Annotated[Group, Field(min_length=1)] = Field(
        description='their links to all others are slow: replicas, stages, trainers, such as ["s1-r0", "s2"]'
    )
    bytes_per_s: Annotated[float, Field(ge=0)] = says(0.0, "of each link, each way; 0: unlimited")
    latency_s: Annotated[float, Field(ge=0, le=60)] = says(0.0, "added, each way")
    for_s: Duration = Field(description="seconds until they are as before")

    kind, event = "slow", "slow"
    told = "{fault} begins"

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not (self.bytes_per_s or self.latency_s):
            raise ValueError("name bytes_per_s, latency_s, or both")
        return self

    @property
    def groups(self) -> tuple[Group, ...]:
        return (self.peers,)


class KillRank(Fault):
    """SIGKILL to one rank of a replica that has several; the replica restarts its ranks."""

    kind, event, strikes_one = "kill_rank", "kill_rank", True
    told = "rank {rank} of {name} was killed ({fault}, step {step})"


class DiskFull(Fault):
    """The disk of one replica is full: what it writes there fails."""

    for_s: Duration = Field(description="seconds until it has space again")

    kind, event, strikes_one, virtual_only = "disk_full", "disk_full", True, True
    told = "the disk of {name} is full for {fault.for_s:.1f} s ({fault})"


class ClockChange(Fault):
    """The wall clock of one replica jumps."""

    by_s: Annotated[float, Field(ge=-1e9, le=1e9)] = Field(description="seconds ahead; below 0: back")

    kind, event, strikes_one, virtual_only = "clock_change", "clock_change", True, True
    told = "the clock of {name} jumps by {fault.by_s:g} s ({fault})"


class KillAll(Fault):
    """SIGKILL to every process, or to every replica of `stage`; by `--kill-all` and by tests, in no chaos file."""

    kind, event = "kill_all", "killed_all"
    told = "step {step}: {fault.whom} is killed"

    @property
    def whom(self) -> str:
        return "everything" if self.stage is None else f"all of stage {self.stage}"


LINKS = (Partition, OneWayCut, Slow)
"""Kinds that are done to links."""

KINDS: dict[str, type[Fault]] = {
    each.kind: each for each in (Kill, Stop, Join, Drain, Partition, Slow, KillRank, OneWayCut, DiskFull, ClockChange)
}
"""What a chaos file may order, by its key."""

_RATES: dict[str, Any] = dict.fromkeys(KINDS, (Annotated[float, Field(ge=0, le=1000)], 0.0))
Random: Any = create_model(
    "Random", __base__=Table, __doc__="How many faults of each kind are drawn per 100 steps, on average.", **_RATES
)
SHORTHAND = Random(kill=10, stop=5, join=2, partition=2, slow=2)
"""What `random:SEED` means."""


class _Top(Table):
    seed: Count = 0
    random: Random = Random()


# ---------------------------------------------------------------- names


def stage_of(name: str) -> int | None:
    """1 for "s1-r0" and for "s1"; None for a trainer."""
    head = name.partition("-")[0]
    return int(head[1:]) if head[:1] == "s" and head[1:].isdigit() else None


def names(selector: str, name: str) -> bool:
    """Does `selector` ("s1-r0", "s1", "trainer-0") mean the process `name`?"""
    whole_stage = "-" not in selector and stage_of(selector) is not None
    return selector == name or (whole_stage and stage_of(selector) == stage_of(name))


def member_of(groups: Sequence[Iterable[str]], name: str) -> int | None:
    """The first group that means `name`; None if none does."""
    found = (number for number, group in enumerate(groups) if any(names(selector, name) for selector in group))
    return next(found, None)


class LinkLimit(NamedTuple):
    """A slow link: bytes_per_s 0 means unlimited."""

    bytes_per_s: float
    latency_s: float


def links_of(name: str, rules: Iterable[Fault], others: Iterable[str]) -> tuple[set[str], Mapping[str, LinkLimit]]:
    """Under these rules of links: whom `name` cannot reach, and at what pace it reaches whom.

    A process in no group of a partition reaches all others. Of several slow links between two the slowest counts.
    """
    cut: set[str] = set()
    paces: dict[str, LinkLimit] = {}
    for rule in rules:
        mine = member_of(rule.groups, name)
        for other in others:
            theirs = member_of(rule.groups, other)
            if other == name:
                continue
            apart = None not in (mine, theirs) and mine != theirs
            if apart and (isinstance(rule, Partition) or (isinstance(rule, OneWayCut) and mine == 0)):
                cut.add(other)
            elif isinstance(rule, Slow) and (mine is not None or theirs is not None):
                before = paces.get(other, LinkLimit(0.0, 0.0))
                rates = [rate for rate in (before.bytes_per_s, rule.bytes_per_s) if rate]
                paces[other] = LinkLimit(min(rates, default=0.0), max(before.latency_s, rule.latency_s))
    return cut, paces


# ---------------------------------------------------------------- from flags and files


def flagged(kind: type[Fault], texts: Iterable[str], *, stages: int, steps: int) -> Iterator[Fault]:
    """The faults of one kind that its option asks for, "STAGE@STEP" each. Raises UsageError with the text at fault."""
    for text in texts:
        here = f"--{kind.kind.replace('_', '-')} {text}"
        if not (match := re.fullmatch(r"\s*(\d{1,15})\s*@\s*(\d{1,15})\s*", text)):
            raise UsageError(f"{here}: write STAGE@STEP, for example 1@20")
        fault = kind(stage=int(match[1]), step=int(match[2]))
        _check_exists(fault, here, stages=stages, steps=steps)
        yield fault.named(f"{kind.kind} {fault.stage}@{fault.step}")


def kill_every(every_s: float | None, back_s: float = 1.0) -> tuple[Fault, ...]:
    """Kill some replica of some stage every `every_s` seconds; nothing for None and 0."""
    if not every_s:
        return ()
    return (Kill(at_s=every_s, every_s=every_s, back_s=back_s).named(f"kill every {every_s:g} s"),)


def kill_all(step: int | None, *, steps: int) -> tuple[Fault, ...]:
    """The end of everything, if it is ordered. Raises UsageError for a step that the run has not."""
    if step is None:
        return ()
    if not 0 <= step < steps:
        raise UsageError(f"--kill-all {step}: there is no step {step}, steps are 0 to {steps - 1}")
    return (KillAll(step=step).named(f"kill all@{step}"),)


def load(text: str, *, stages: int, replicas: int, steps: int) -> tuple[Fault, ...]:
    """The faults of `--chaos text`: the path of a chaos file, or `random:SEED`.

    Raises:
        UsageError: one line that names the file and the entry.
    """
    if (seed := text.removeprefix("random:")) != text:
        if not seed.isdigit():
            raise UsageError(f"--chaos {text}: write random:SEED, for example random:7, or the path of a file")
        return expand(SHORTHAND, int(seed), stages=stages, replicas=replicas, steps=steps)
    data = toml.read(Path(text))
    if unknown := sorted(data.keys() - {"seed", "random", *KINDS}):
        raise UsageError(f"{text}: {unknown[0]}: unknown key; known here: seed, random, [[{']], [['.join(KINDS)}]]")
    top = check(_Top, {key: data[key] for key in ("seed", "random") if key in data}, origin=lambda _: text)
    found: list[Fault] = []
    for kind, model in KINDS.items():
        entries = data.get(kind, [])
        if not (isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)):
            raise UsageError(f"{text}: {kind}: write [[{kind}]] above each entry")
        if model.virtual_only and (entries or getattr(top.random, kind)):
            raise UsageError(f"{text}: {kind}: only tests can do this, to a virtual swarm (docs/testing.md)")
        for number, entry in enumerate(entries, 1):
            # Its number is that in its kind, as a reader of the file counts.
            here = f"{text}: [[{kind}]] number {number}"
            found.append(_entry(model, entry, here))
            _check_exists(found[-1], here, stages=stages, steps=steps)
    found += expand(top.random, top.seed, stages=stages, replicas=replicas, steps=steps)
    if not found:
        raise UsageError(f"{text}: nothing is to happen: add [[kill]], [[stop]], ... or [random]")
    return tuple(found)


def _entry(model: type[Fault], entry: Mapping[str, Any], here: str) -> Fault:
    for name, field in model.model_fields.items():
        # A misspelt key is the better explanation of one that is missing.
        if field.is_required() and name not in entry and entry.keys() <= model.model_fields.keys():
            raise UsageError(f"{here}: {name} is missing: {field.description}")
    return check(model, entry, origin=lambda _: here)


def _check_exists(fault: Fault, here: str, *, stages: int, steps: int) -> None:
    """Raises UsageError for a stage or step that the run has not. A replica may be one that joins."""
    if fault.step is not None and fault.step >= steps:
        raise UsageError(f"{here}: there is no step {fault.step}, steps are 0 to {steps - 1}")
    named = [*(name for group in fault.groups for name in group), *filter(None, [fault.peer])]
    for name, stage in [("", fault.stage), *((name, stage_of(name)) for name in named)]:
        if name and stage is None and not name.startswith("trainer-"):
            raise UsageError(
                f'{here}: "{name}" is no name: write a replica ("s1-r0"), a stage ("s1") or a trainer ("trainer-0")'
            )
        if stage is not None and stage >= stages:
            raise UsageError(
                f"{here}: {name}{': ' * bool(name)}there is no stage {stage}, stages are 0 to {stages - 1}"
            )


def expand(rates: Table, seed: int, *, stages: int, replicas: int, steps: int) -> tuple[Fault, ...]:
    """Draw faults for `steps` steps: the same for the same arguments. The last steps are left alone."""
    rng, moments = random.Random(f"{seed}/chaos"), random.Random(f"{seed}/moments")
    names = [f"s{stage}-r{number}" for stage in range(stages) for number in range(replicas)]
    found: list[Fault] = []
    for kind in KINDS:
        expected = getattr(rates, kind) * steps / 100
        # The rest of a whole one is a chance.
        for _ in range(int(expected) + (rng.random() < expected % 1)):
            # The last two steps are left alone: a replica that fails there has nothing to come back to.
            step, stage = rng.randrange(1, max(steps - 2, 2)), rng.randrange(stages)
            for fault in _drawn(kind, rng, step, stage, names):
                fault._into_step = moments.uniform(0.1, 0.6)
                found.append(fault)
    return tuple(sorted(found, key=lambda fault: fault.step or 0))


def _drawn(kind: str, rng: random.Random, step: int, stage: int, replicas: Sequence[str]) -> Iterator[Fault]:
    """One fault of this kind by chance. replicas: names of all, of each stage equally many."""
    match kind:
        case "kill":
            yield Kill(step=step, stage=stage, back_s=rng.uniform(0.2, 2.0))
        case "stop":
            yield Stop(step=step, stage=stage, for_s=rng.uniform(0.5, 6.0))
        case "join":
            yield Join(step=step, stage=rng.choice((None, stage)))
        case "drain":
            yield Drain(step=step, stage=stage, back_s=rng.uniform(1.0, 3.0))
        case "kill_rank":
            yield KillRank(step=step)  # of a stage that has ranks: the schedule knows which
        case "slow":
            peers = (rng.choice([name for name in replicas if names(f"s{stage}", name)]),)
            for_s, bytes_per_s = rng.uniform(1.0, 5.0), 10 ** rng.uniform(5.0, 7.0)
            latency_s = rng.uniform(0.0, 0.1)
            yield Slow(step=step, peers=peers, for_s=for_s, bytes_per_s=bytes_per_s, latency_s=latency_s)
        case "disk_full":
            yield DiskFull(step=step, stage=stage, for_s=rng.uniform(1.0, 10.0))
        case "clock_change":
            yield ClockChange(step=step, stage=stage, by_s=rng.uniform(-60.0, 60.0))
        case "one_way_cut" if len(replicas) > 1:
            sender, receiver = rng.sample(replicas, 2)
            yield OneWayCut(step=step, for_s=rng.uniform(0.5, 4.0), senders=(sender,), receivers=(receiver,))
        case "partition":
            rng.shuffle(shuffled := list(replicas))
            here = rng.choice((1, max(len(shuffled) // 2, 1)))
            groups = tuple(sorted(shuffled[:here])), tuple(sorted(shuffled[here:]))
            # A lone replica has no other to be cut off from.
            if groups[1]:
                yield Partition(step=step, for_s=rng.uniform(0.5, 4.0), between=groups)


def unlikely(faults: Sequence[Fault], replicas: Mapping[str, int]) -> Iterator[str]:
    """In words: what of `faults` no replica may ever be there for. replicas: stage by name, those at the start."""
    stages = list(replicas.values())
    single = {stage for stage in stages if stages.count(stage) == 1}
    joins = [fault.place for fault in faults if isinstance(fault, Join)]
    found: dict[tuple[str, bool], list[str]] = {}
    for fault in faults:
        stage = fault.place
        # A replica that joins there may make it possible.
        later = bool(joins) and (stage is None or stage in joins or None in joins)
        if fault.peer is not None and fault.peer not in replicas:
            found.setdefault(("no replica of that name is there", later), []).append(str(fault))
        elif fault.takes_away and (stage in single if stage is not None else bool(single)):
            found.setdefault(("the only replica of a stage is never taken away", later), []).append(str(fault))
    for (why, later), labels in found.items():
        what = "waits for one that joins" if later else "cannot be carried out"
        yield f"note: {why}, so this {what}: {', '.join(labels)}"
