"""What must hold in every run, checked from the events of its members. Pure: events in, a report out.

- Each index 0 .. M-1 of a step is contributed by exactly one member of a stage, or listed as skipped and by none.
- Members of a stage commit the same digests, and end with the same weights.
- The losses are those of one process.
- No correct peer suspends another one, unless a fault was done to one of the two.

`swarmnet local`, `swarmnet simulate` and the tests check runs by this. It trusts neither leaders nor the loss. What no
process tells, its sums and weights, a virtual swarm shows: `testing.virtual_swarm` compares them with one process.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swarmnet.telemetry.kinds import EventFold

FP32_TOLERANCE = 1e-5
"""Allowed loss difference to one process while rounding has not yet grown."""
FP32_STEPS = 20
FINAL_TOLERANCE = 0.01
"""Allowed relative difference of the final loss after that."""


@dataclass(frozen=True, slots=True)
class InvariantReport:
    """What the commits add up to. Counts are over all stages and steps; the lists name (stage, step)."""

    lost: int
    doubled: int
    discarded: int
    unaudited: tuple[tuple[int, int], ...]  # no member wrote a commit
    conflicts: tuple[tuple[int, int], ...]  # members wrote different digests
    split_stages: tuple[int, ...]  # replicas ended with different weights
    repeated: int = 0  # steps done again after all peers had been gone
    changed: tuple[int, ...] = ()  # of these, steps with another loss than before
    renewed: tuple[int, ...] = ()  # versions from which the run was another one
    repeats: bool = True  # a step done again was to have the same loss
    suspended: tuple[str, ...] = ()  # a line for each correct peer that correct peers have suspended

    @property
    def problems(self) -> tuple[str, ...]:
        """One phrase for each thing that is wrong with sums, losses and weights; empty when every promise held."""
        found = []
        if self.lost:
            found.append(f"{self.lost} microbatches lost")
        if self.doubled:
            found.append(f"{self.doubled} microbatches counted twice")
        if self.unaudited:
            found.append(f"no commit was written for {_places(self.unaudited)}")
        if self.conflicts:
            found.append(f"replicas committed different sums at {_places(self.conflicts)}")
        if self.split_stages:
            found.append(f"replicas ended with different weights in stage {', '.join(map(str, self.split_stages))}")
        if self.changed:
            found.append(f"done again, step {', '.join(map(str, self.changed[:3]))} had another loss than before")
        return tuple(found)


def _places(places: Sequence[tuple[int, int]]) -> str:
    shown = ", ".join(f"stage {stage} step {step}" for stage, step in places[:3])
    return shown + (f" and {len(places) - 3} more" if len(places) > 3 else "")


_Life = tuple[int, int]
"""How often the run had been made another one, and how often it had been resumed."""


@dataclass(frozen=True, slots=True)
class _Word:
    """What a member said of a commit, and when; of its contributions, which are long, what they add up to."""

    when: _Life
    digest: str
    num_tokens: int
    loss_sum: float
    lost: int
    doubled: int
    discarded: int


@dataclass(slots=True)
class InvariantChecker(EventFold):
    """Collects what members wrote; `report` may be asked at any time, it costs one pass.

    A run that goes on after all peers were gone does some steps again: each life is judged by itself, and a step must
    have the same loss in all of them, with `exact` the same sums. After `restarted` the run is another one, and
    so it is for a member that has gone back before a tainted step. Not `equal`: replicas train on their own, and need
    not end with the same weights. Not `bits`: replicas compute on unlike machines, and what they sum apart differs in
    its last digits: that is a fork, which is counted. Not `repeats`: it shows in a step who computed what, so one that
    is done again may have another loss. names: of processes, by peer id, which the caller fills in. liars: Byzantine
    ones, by name.
    """

    stages: int
    steps: int
    microbatches: int
    exact: bool = True
    equal: bool = True
    bits: bool = True
    repeats: bool = True
    names: Mapping[str, str] = field(default_factory=dict)
    liars: Collection[str] = ()
    faulted: set[str] = field(default_factory=set)
    """Processes that a fault was done to, in this session: they may be silent, or take others for silent."""
    _suspensions: dict[tuple[str, str], str] = field(default_factory=dict)
    """By (suspended, by whom): the first reason."""
    _commits: dict[tuple[int, int], list[_Word]] = field(default_factory=dict)
    _weights: dict[int, set[tuple[int, str]]] = field(default_factory=dict)
    _renewed: list[tuple[int, int]] = field(default_factory=list)
    _tainted: set[int] = field(default_factory=set)
    _undone: dict[str, int] = field(default_factory=dict)
    """By member: the last restart by which it went back before a tainted step. From then on its sums are others."""

    def on(self, event: Mapping[str, Any], *, life: int = 0, by: str = "") -> bool:
        """Take one member's word in. Equal words of several members are kept once. Returns whether it may be news: not
        if another one has said already that their stage lost its state."""
        return self.take(event["event"], event, life, by) is not False

    def on_committed(self, event: Mapping[str, Any], life: int, by: str) -> None:
        seen = self._commits.setdefault((event["stage"], event["step"]), [])
        sums = event["digest"], event["num_tokens"], event["loss_sum"]
        counts = *multiplicity(event, self.microbatches), len(event["discarded"])
        word = _Word((len(self._renewed) + self._undone.get(by, 0), life), *sums, *counts)
        if word not in seen:
            seen.append(word)

    def on_finished(self, event: Mapping[str, Any], life: int, by: str) -> None:
        if self.equal:
            self._weights.setdefault(event["stage"], set()).add((event["version"], event["weights_sha256"]))

    def on_late(self, event: Mapping[str, Any], life: int, by: str) -> None:
        self._suspensions.setdefault((self.names.get(event["peer"], event["peer"]), by), event["reason"])

    def on_tainted(self, event: Mapping[str, Any], life: int, by: str) -> None:
        self._tainted.add(event["step"])

    def on_restart(self, event: Mapping[str, Any], life: int, by: str) -> None:
        if any(step >= event["version"] for step in self._tainted):
            self._undone[by] = event["number"]

    def on_dropped(self, event: Mapping[str, Any], life: int, by: str) -> bool:
        return self.restarted(event["to"], life=life)

    def restarted(self, version: int, *, life: int = 0) -> bool:
        """From `version` on, in this life, steps are others than those of the same numbers before: a stage lost its
        state. False if that is known."""
        if (version, life) in self._renewed:
            return False
        self._renewed.append((version, life))
        return True

    @property
    def committed(self) -> Collection[tuple[int, int]]:
        """Of which (stage, step) a peer wrote."""
        return self._commits.keys()

    @property
    def forks(self) -> int:
        """Sums of one stage and step that were committed with different digests, beyond the first."""
        return sum(len({word.digest for word in words}) - 1 for words in self._commits.values())

    def wrong(self, stage: int, step: int) -> str:
        """What is wrong with the commits of this step so far, to end a run at once; "" if nothing."""
        words, here = self._commits[stage, step], f"stage {stage} step {step}"
        if word := next((word for word in words if word.lost or word.doubled), None):
            return f"{here}: {word.lost} lost, {word.doubled} doubled"
        return f"{here}: sums with different digests" if self._differ(words) else ""

    def report(self) -> InvariantReport:
        """Judge what has been written so far. Where members differ, the worst word counts."""
        lost = doubled = discarded = 0
        for commits in self._commits.values():
            lost += max(commit.lost for commit in commits)
            doubled += max(commit.doubled for commit in commits)
            discarded += max(commit.discarded for commit in commits)
        again = {
            step: commits
            for (stage, step), commits in self._commits.items()
            if stage == self.stages - 1 and len({commit.when for commit in commits}) > 1
        }
        # A step that no peer wrote of is no step that went well.
        everything = [(stage, step) for step in range(self.steps) for stage in range(self.stages)]
        return InvariantReport(
            lost=lost,
            doubled=doubled,
            discarded=discarded,
            unaudited=tuple(place for place in everything if place not in self._commits),
            conflicts=tuple(sorted(place for place, commits in self._commits.items() if self._differ(commits))),
            split_stages=tuple(sorted(stage for stage, ends in self._weights.items() if len(ends) > 1)),
            repeated=len(again),
            changed=tuple(sorted(step for step, commits in again.items() if self._changed(commits))),
            renewed=tuple(version for version, _ in self._renewed),
            repeats=self.repeats,
            suspended=tuple(self._suspended()),
        )

    def _suspended(self) -> Iterator[str]:
        told: dict[tuple[str, str], list[str]] = {}
        for (name, by), reason in sorted(self._suspensions.items()):
            if self.faulted.isdisjoint((name, by)) and name not in self.liars:
                told.setdefault((name, reason), []).append(by)
        for (name, reason), by_whom in told.items():
            yield f"{name} is a correct peer, and {', '.join(by_whom)} suspended it: it {reason}"

    def _differ(self, commits: Sequence[_Word]) -> bool:
        """Other sums in one life, or, where sums do not depend on order, in two."""
        if not self.bits:
            return False
        sums = {(word.when[:1] if self.exact else word.when, word.digest, word.num_tokens) for word in commits}
        return len(sums) > len({when for when, _, _ in sums})

    def _changed(self, commits: Sequence[_Word]) -> bool:
        losses: dict[int, list[float]] = {}
        for word in commits:
            if word.num_tokens:
                losses.setdefault(word.when[0], []).append(float(word.loss_sum) / word.num_tokens)
        tolerance = math.inf if not self.repeats else 0.0 if self.exact else FP32_TOLERANCE
        return any(max(found) - min(found) > tolerance for found in losses.values())


def multiplicity(commit: Mapping[str, Any], microbatches: int) -> tuple[int, int]:
    """(lost, doubled) of one commit: indexes that no member contributed, and contributions beyond what the sum may
    hold.

    A contributed index that is skipped, or that is no index of the step at all, is beyond it.
    """
    times = Counter(index for _, indexes in commit["contributions"] for index in indexes)
    wanted = {index for index in range(microbatches) if index not in commit["discarded"]}
    lost = sum(times[index] == 0 for index in wanted)
    doubled = sum(count - (1 if index in wanted else 0) for index, count in times.items())
    return lost, doubled


@dataclass(frozen=True, slots=True)
class Comparison:
    """The swarm's losses compared with one process's. bit_equal: the same float64 at every step. promised: a run under
    this manifest is to have the curve of one process. within: that close in the first steps, None: judged by bits, or
    by the final loss alone. weights_equal: the last ones, to the bit; None: not looked at."""

    max_difference: float
    at_step: int
    bit_equal: bool
    problem: str = ""
    promised: bool = True
    within: float | None = None
    weights_equal: bool | None = None


def compare(
    losses: Sequence[float], reference: Sequence[float], *, exact: bool, lossless: bool, promised: bool = True
) -> Comparison:
    """Hold the swarm's curve against the reference's.

    exact: deterministic mode, and every peer one rank: only bit-equality will do. lossless: nothing on the wire is
    rounded; then the first 20 steps must agree to 1e-5. Always: finite, and final losses within 1 %. Not promised:
    finite is enough.
    """
    if len(losses) != len(reference) or not losses:
        return Comparison(math.inf, 0, False, f"the swarm has {len(losses)} losses, one process {len(reference)}")
    differences = [
        abs(mine - other) if math.isfinite(mine) and math.isfinite(other) else math.inf
        for mine, other in zip(losses, reference, strict=True)
    ]
    largest = max(differences)
    at_step = differences.index(largest)
    early, problem = max(differences[:FP32_STEPS]), ""
    if not promised:
        problem = "" if largest < math.inf else f"the loss is not finite (step {at_step})"
    elif exact and lossless:
        # Fixed-point sums do not depend on their order.
        if largest != 0.0:
            problem = f"losses differ from one process by up to {largest:.3g} (step {at_step}), not bit-equal"
    elif lossless and early > FP32_TOLERANCE:
        # Later, rounding has grown to where two honest runs are that far apart.
        problem = (
            f"losses of the first {FP32_STEPS} steps differ from one process by {early:.3g}; on some data "
            "rounding alone does that (docs/numerics.md)"
        )
    elif largest == math.inf or differences[-1] > FINAL_TOLERANCE * abs(reference[-1]):
        problem = f"the final loss {losses[-1]:.6g} is more than 1 % from one process's {reference[-1]:.6g}"
    within = FP32_TOLERANCE if promised and lossless and not exact else None
    return Comparison(largest, at_step, largest == 0.0, problem, promised, within)
