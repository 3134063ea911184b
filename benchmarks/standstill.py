"""How long the whole run stands still after a fault: production peers on virtual time, default timers.

    python benchmarks/standstill.py [--json FILE] [--moments N] [--only TEXT] [--quick]

Each row is a fault in two stages of R replicas, struck at several moments of a step and repeated for the leader of
stage 0 and for another replica. A standstill is the longest time between two steps of the run after the fault, less
the median time between two steps before it. The worst of all moments is printed beside the median and the bound.

    kill        the process ends, its connections break
    hang        the process answers nothing and breaks nothing (SIGSTOP)
    lost        the machine vanishes: nothing reaches it or comes from it, and no connection breaks
    cut         the replicas of stage 0 do not reach each other; everybody else reaches them
    wake        a process that has hung for 40 s goes on (SIGCONT); what the hang itself cost is not in it

`of every stage` strikes one replica of each stage in the same moment. A run that ends has the weights of one process
to the bit, or the benchmark fails.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

from harness import Benchmark, progress, write

from swarmnet.manifest.timers import Timers
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import Node, VirtualSwarm

LASTS_S = 30.0
"""How long a hang, a cut or the absence of a lost machine lasts."""

HUNG_S = 40.0
"""How long a process has hung that wakes."""

BEGIN_S = 10.0
"""By then steps have their usual length."""

LARGE, LARGE_LASTS_S, LARGE_BEGIN_S = 128, 12.0, 10.0
"""The same of a stage of so many replicas, of which a virtual second takes ten real ones."""

_LONG_SILENCE = Timers().long_silence_s


class Enough(Exception):
    """The measurement is over."""


@dataclass(frozen=True, slots=True)
class Row:
    """One fault. bound_s: the longest standstill that is accepted."""

    name: str
    replicas: int
    strike: Callable[[VirtualSwarm, list[Node]], None]
    bound_s: float
    every_stage: bool = False
    leader: bool | None = None
    """Strike the leader of stage 0, or another replica; None: both, in turn."""
    wakes: bool = False
    """What was struck goes on after `HUNG_S`, and the standstill is measured from then on."""


@dataclass(frozen=True, slots=True)
class Found:
    """What came of a row, in virtual seconds."""

    name: str
    usual_s: float
    median_s: float
    worst_s: float
    bound_s: float
    runs: int


def kill(swarm: VirtualSwarm, struck: list[Node]) -> None:
    """SIGKILL."""
    for node in struck:
        swarm.kill(node)


def hang(swarm: VirtualSwarm, struck: list[Node]) -> None:
    """SIGSTOP."""
    for node in struck:
        swarm.stop(node)


def lost(swarm: VirtualSwarm, struck: list[Node]) -> None:
    """Each is alone on its side of a cut."""
    others = [node for node in swarm.nodes if node not in struck]
    swarm.partition([*others, *swarm.trainers], *([node] for node in struck))


def cut(swarm: VirtualSwarm, struck: list[Node]) -> None:
    """The replicas of stage 0 are apart."""
    here, *others = swarm.replicas(0)
    for node in others:
        swarm.deafen(here, node)
        swarm.deafen(node, here)


ROWS = (
    Row("kill, three replicas", 3, kill, 1.0),
    Row("kill, two replicas", 2, kill, 1.0),
    Row("hang, three replicas", 3, hang, 8.0),
    Row("hang, two replicas", 2, hang, _LONG_SILENCE + 5.0),
    Row("wake, three replicas", 3, hang, 5.0, wakes=True),
    Row("wake, two replicas", 2, hang, 5.0, wakes=True),
    Row("lost machine, three replicas", 3, lost, 8.0),
    Row("lost machine, two replicas", 2, lost, _LONG_SILENCE + 5.0),
    Row("cut between two replicas", 2, cut, _LONG_SILENCE + 5.0, leader=True),
    Row("kill of every stage, three replicas", 3, kill, 10.0, every_stage=True),
    Row("hang of every stage, three replicas", 3, hang, 10.0, every_stage=True),
    Row("lost machines of every stage, three replicas", 3, lost, 10.0, every_stage=True),
    Row("lost machine, 32 replicas", 32, lost, 8.0),
    Row("lost machine, 128 replicas", 128, lost, 8.0),
)


def victims(swarm: VirtualSwarm, row: Row, *, leader: bool) -> list[Node]:
    """Whom this run strikes."""
    struck = []
    for stage in range(swarm.plan.stages if row.every_stage else 1):
        nodes = swarm.replicas(stage)
        leads = next(node for node in nodes if node.peer.replicas[stage].member.oldest.leader is not None)
        struck.append(leads if leader else next(node for node in nodes if node is not leads))
    return struck


def first_applied(events: Iterable[tuple[float, object, str, dict[str, object]]]) -> list[float]:
    """When each step was first applied anywhere."""
    first: dict[object, float] = {}
    for at, _, event, fields in events:
        if event == "applied":
            first.setdefault(fields["version"], at)
    return sorted(first.values())


def standstill(row: Row, *, leader: bool, moment: float, seed: int) -> tuple[float, float]:
    """(usual seconds of a step, how much longer the longest one was after the fault). moment: of a step, in [0, 1)."""
    plan = Plan(stages=2, replicas=row.replicas, microbatches=max(8, row.replicas), steps=1000, forward_s=0.03)
    swarm, at = VirtualSwarm(plan, seed), list[float]()

    begin_s, lasts_s = (LARGE_BEGIN_S, LARGE_LASTS_S) if row.replicas >= LARGE else (BEGIN_S, LASTS_S)

    async def script(swarm: VirtualSwarm) -> None:
        await asyncio.sleep(begin_s)
        steps = first_applied(swarm.events)
        usual = statistics.median(later - earlier for earlier, later in itertools.pairwise(steps))
        await asyncio.sleep(moment * usual)
        # Between two terms a stage has no leader for a moment.
        while True:
            try:
                struck = victims(swarm, row, leader=leader)
                break
            except StopIteration:
                await asyncio.sleep(0.01)
        at.append(swarm.loop.time())
        row.strike(swarm, struck)
        if row.wakes:
            # It accepts no connection while it hangs.
            for node, other in itertools.product(struck, swarm.nodes):
                swarm.block_dial(other, node)
            await asyncio.sleep(HUNG_S)
            swarm.heal()
            for node in struck:
                swarm.resume(node)
            at[0] = swarm.loop.time()
        await asyncio.sleep(lasts_s)
        raise Enough

    try:
        swarm.run(until_s=10 * LASTS_S, script=script)
    except Enough:
        swarm.check_now()
    steps = first_applied(swarm.events)
    before = [later - earlier for earlier, later in itertools.pairwise(steps) if later <= at[0]]
    usual = statistics.median(before)
    end = swarm.loop.time()
    after = [later - earlier for earlier, later in itertools.pairwise([*steps, end]) if later > at[0]]
    return usual, max(0.0, max(after) - usual)


def measure(row: Row, moments: int) -> Found:
    """Strike at these many moments of a step."""
    leaders = (True, False) if row.leader is None else (row.leader,)
    found = [
        standstill(row, leader=leader, moment=number / moments, seed=1 + number)
        for leader in leaders
        for number in range(moments)
    ]
    stood = [each for _, each in found]
    usual = statistics.median(each for each, _ in found)
    return Found(row.name, usual, statistics.median(stood), max(stood), row.bound_s, len(found))


def main() -> int:
    """Measure, print, write. Exits with 1 if a bound is missed."""
    parser = Benchmark(__doc__, quick="no row of more than three replicas")
    parser.add_argument("--moments", type=int, default=8, metavar="N", help="of a step, in each of which is struck; 8")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose names contain this")
    args = parser.asked()
    rows = [row for row in ROWS if args.only in row.name and not (args.quick and row.replicas > 3)]
    if not rows:
        parser.error(f"--only: no row has {args.only!r} in its name; there are: {', '.join(r.name for r in ROWS)}")
    warnings.filterwarnings("ignore", "coroutine .* was never awaited")  # a run that is broken off leaves them
    print(f"{'fault':46} {'step':>7} {'median':>8} {'worst':>8} {'bound':>7}")
    found = []
    for row in progress(rows, lambda row: row.name):
        moments = args.moments if row.replicas < 32 else max(1, args.moments // 4)
        one = measure(row, moments)
        found.append(one)
        missed = "" if one.worst_s <= one.bound_s else "  missed"
        print(
            f"{one.name:46} {one.usual_s:5.2f} s {one.median_s:6.2f} s {one.worst_s:6.2f} s "
            f"{one.bound_s:5.1f} s{missed}",
            flush=True,
        )
    write(args.json, [asdict(each) for each in found])
    return int(any(each.worst_s > each.bound_s for each in found))


if __name__ == "__main__":
    sys.exit(main())
