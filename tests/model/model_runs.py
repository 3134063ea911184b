"""Runs of the membership model, and their figures.

python tests/model/model_runs.py calm|lies|strangers|faults|... [--seeds N]
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from model_liars import LIES
from model_network import Setup, World
from model_rules import FINE, Rules

LYING_TICKS = 3000  # of FINE: 300 seconds
SIZES = ((3, 1), (4, 1), (5, 2))


@dataclass(frozen=True, slots=True)
class Kept:
    """Steps within the time of lying, beside those of the same setup without."""

    steps: int
    longest: int
    bad: dict[str, int]
    honest_charged: int
    liars_charged: int
    roster: int


def throughput(setup: Setup, seed: int, ticks: int = LYING_TICKS) -> Kept:
    """How many steps are made."""
    world = World(setup, seed)
    while world.now < ticks:
        world.step()
    at = [0, *sorted(world.committed_at.values()), world.now]
    longest = max(b - a for a, b in itertools.pairwise(at))
    rosters = [len(m.opinions.roster(world.lying_stage)) for m in world.honest(world.lying_stage)]
    return Kept(
        len(world.committed_at),
        longest,
        dict(world.bad),
        world.charges[True, True],
        world.charges[True, False],
        max(rosters),
    )


def lies(
    rules: Rules,
    seeds: int,
    which: Iterable[str] = tuple(LIES),
    sizes: Iterable[tuple[int, int]] = SIZES,
    stages: int = 1,
) -> None:
    """A table: per lie, steps kept of the undisturbed."""
    for replicas, liars in sizes:
        calm = Setup(stages=stages, replicas=replicas, clock=FINE, rules=rules, microbatches=8)
        base = [throughput(calm, seed).steps for seed in range(seeds)]
        print(f"R={replicas} liars={liars} undisturbed {sum(base) / seeds:.0f}", flush=True)
        for lie in which:
            began = time.time()
            got = [throughput(replace(calm, liars=liars, modes=(lie,)), seed) for seed in range(seeds)]
            share = [one.steps / of for one, of in zip(got, base, strict=True)]
            bad = sum((Counter(one.bad) for one in got), Counter())
            print(
                f"  {lie:10s} kept {sum(share) / seeds:.2f} least {min(share):.2f}"
                f" longest {max(o.longest for o in got):4d}"
                f" charged honest {sum(o.honest_charged for o in got) / seeds:.1f}"
                f" liars {sum(o.liars_charged for o in got) / seeds:.1f} roster {max(o.roster for o in got)}"
                f" bad {dict(bad)} {time.time() - began:.0f}s",
                flush=True,
            )


@dataclass(frozen=True, slots=True)
class Recovery:
    """After 300 ticks of faults: were there three commits in the next 400, and is everybody level in the end?"""

    stuck: bool
    away: list[str]
    longest: int
    bad: dict[str, int]
    back: int
    world: World


CHAOS, QUIET, LEVEL = 300, 400, 60


def recovery(setup: Setup, seed: int, keep_cut: str = "") -> Recovery:
    """Faults, then a network that heals; but for cuts that leave a majority of each stage a clique."""
    world = World(setup, seed)
    while world.now < CHAOS:
        if setup.faults and world.rng.random() < 1 / setup.fault_every:
            world.fault()
        world.step()
    world.cut, world.loss = set(), setup.loss if keep_cut == "loss" else 0.0
    for member in world.members.values():
        member.slow, member.paused_until = 1, 0
    outside = _cut_for_ever(world, keep_cut) if keep_cut in ("one", "some") else set()
    first, began = max(world.committed_at, default=-1), world.now
    while world.now - began < QUIET and max(world.committed_at, default=-1) < first + 3:
        world.step()
    stuck = max(world.committed_at, default=-1) < first + 3
    at = [began, *sorted(at for at in world.committed_at.values() if at > began)]
    longest = max([b - a for a, b in itertools.pairwise(at)], default=QUIET)
    for _ in range(LEVEL):
        world.step()
    honest = [member for member in world.members.values() if member.up and not member.lie]
    top = max(member.version for member in honest)
    away = [m.id for m in honest if m.id not in outside and (not m.synced or m.version < top - 1)]
    return Recovery(stuck, away, longest, dict(world.bad), len(world.returns), world)


def _cut_for_ever(world: World, how: str) -> set[str]:
    """One honest replica a stage cannot be called: by anybody ("one"), or by every other ("some")."""
    cut = set()
    for stage in range(world.stages):
        honest = sorted(member.id for member in world.honest(stage))
        liars = sum(member.stage == stage for member in world.members.values() if member.lie)
        if 2 * (len(honest) - 1) > len(honest) + liars:
            peer = world.rng.choice(honest)
            others = (other for other in world.members if other != peer)
            cut |= {(other, peer) for other in others if how == "one" or world.rng.random() < 0.5}
    world.cut, world.cut_for_ever = set(cut), frozenset(cut)
    return {peer for _, peer in cut}


def recoveries(name: str, setup: Setup, seeds: range, keep_cut: str = "") -> list[Recovery]:
    """One line of the table of faults."""
    began, found = time.time(), [recovery(setup, seed, keep_cut) for seed in seeds]
    bad = sum((Counter(one.bad) for one in found), Counter())
    print(
        f"{name:34s} S={setup.stages} R={setup.replicas} runs {len(found)}"
        f" stuck {[seed for seed, one in zip(seeds, found, strict=True) if one.stuck]}"
        f" away {[(seed, one.away) for seed, one in zip(seeds, found, strict=True) if one.away and not one.stuck]}"
        f" longest {max(one.longest for one in found)} back {sum(one.back for one in found)} bad {dict(bad)}"
        f" {time.time() - began:.0f}s",
        flush=True,
    )
    return found


def faults(rules: Rules, seeds: range) -> None:
    """Faults of every kind, without liars and with."""
    for replicas in (1, 2, 3, 4):
        recoveries("crash", Setup(2, replicas, rules=rules, faults=("crash",)), seeds)
    for replicas in (2, 3, 4):
        setup = Setup(2, replicas, rules=rules, faults=("all but one", "crash"), fault_every=40)
        recoveries("kill all but one", setup, seeds)
        recoveries("one uncallable", Setup(2, replicas, rules=rules, faults=("uncallable",)), seeds)
        recoveries("cable out", Setup(2, replicas, rules=rules, faults=("cable",)), seeds)
    for replicas in (3, 4):
        recoveries("pairs cut", Setup(2, replicas, rules=rules, faults=("pair", "one way"), fault_every=25), seeds)
        recoveries("for ever: one uncallable", Setup(2, replicas, rules=rules), seeds, "one")
        recoveries("for ever: no clique", Setup(2, replicas, rules=rules), seeds, "some")
    recoveries("stopped and slow", Setup(2, 3, rules=rules, faults=("pause", "slow")), seeds)
    everything = ("crash", "pause", "one way", "uncallable", "pair", "slow", "join")
    recoveries("all faults, joins", Setup(2, 3, rules=rules, faults=everything, joins=2), seeds)
    for loss in (0.05, 0.15):
        recoveries(f"loss {loss}", Setup(2, 3, rules=rules, loss=loss, faults=("crash", "pause")), seeds, "loss")
        recoveries(f"loss {loss}, liar", Setup(2, 4, rules=rules, loss=loss, liars=1), seeds, "loss")
    recoveries("liar", Setup(2, 3, rules=rules, liars=1), seeds)
    recoveries("liar", Setup(2, 4, rules=rules, liars=1), seeds)
    recoveries("two liars", Setup(2, 5, rules=rules, liars=2), seeds)
    recoveries(
        "liar, faults",
        Setup(2, 4, rules=rules, liars=1, faults=("crash", "uncallable", "pause", "slow"), fault_every=30),
        seeds,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("which", choices=("lies", "faults"))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--lies", nargs="*", default=list(LIES))
    args = parser.parse_args()
    if args.which == "lies":
        lies(Rules(), args.seeds, args.lies)
    else:
        faults(Rules(), range(5000, 5000 + args.seeds))
