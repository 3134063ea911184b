"""What kills cost a fleet of 64, and what they would cost the loss if nobody kept a ledger.

    python benchmarks/goodput.py [--json FILE] [--plot FILE] [--quick]

`swarmnet simulate`'s machinery: 64 equal peers in four stages and three regions, 10 to 100 ms apart, 384 microbatches a
step, one second of compute each. A replica is killed every 15 s and is back 30 s later, without its weights.
`goodput` is microbatches per second over those of the same fleet without kills; every committed sum and every version
of the weights is held against one process, so the loss curve is the undisturbed one, or the run ends in an error. One
kill costs the fleet `lost_s` seconds; from that, `goodput_1pct` is what is left if 1 % of the peers leave an hour.

Negative control: what SWARM's published code would have counted of the same executions. It keeps no ledger: a peer that
dies takes along what it has summed, and a second execution of a microbatch is summed beside the first. The shares of
each microbatch in each stage and step, 0, 1 or 2, weight the gradients of a small network (numpy, four layers, one a
stage) that is trained with them, over and over, beside the same network with a share of 1 for all.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from harness import Benchmark, write

from swarmnet.config.fleet import DrawnMachine, FleetRegions
from swarmnet.simulate.fleet import FleetChurn, FleetFile, FleetRun, calm, drawn
from swarmnet.simulate.fleet_run import FleetSimulation
from swarmnet.testing.virtual_device import JobKind

KILL_EVERY_S, BACK_S = 15.0, 30.0
LEAVE_PER_HOUR = 0.01
STAGES = 4
WIDTH, EXAMPLES, TOY_STEPS = 16, 4, 300
Shares = np.ndarray[Any, np.dtype[np.float64]]


def fleet_of(*, peers: int, microbatches: int, steps: int) -> FleetFile:
    """Equal machines, so that whoever is killed costs the same."""
    return FleetFile(
        run=FleetRun(
            stages=STAGES, microbatches=microbatches, steps=steps, seconds=1e5, microbatch_s=1.0, rebalance=False
        ),
        peers=peers,
        machine=DrawnMachine(speed=(1.0,), up_mbit=(200.0,), down_mbit=(200.0,), memory_gb=(16.0,)),
        regions=FleetRegions(count=3, near_ms=10.0, far_ms=(50.0, 100.0)),
        churn=FleetChurn(kill_every=KILL_EVERY_S, back_s=BACK_S),
    )


def shares_without_ledger(simulation: FleetSimulation, microbatches: int, steps: int) -> Shares:
    """How often each microbatch would have been counted, by step, stage and index."""
    ended: dict[tuple[int, int], float] = {}
    for at, _, event, fields in simulation.swarm.events:
        if event == "applied":
            key = fields["version"] - 1, fields["stage"]
            ended[key] = min(at, ended.get(key, at))
    executions: dict[tuple[int, int, int], list[tuple[float, bool]]] = defaultdict(list)
    for node in simulation.swarm.nodes:
        for stage, engine in node.engines.items():
            for job in engine.device.log:
                if job.turn.kind is JobKind.BACKWARD:
                    until = ended.get((job.turn.step, stage), 0.0)
                    died = node.ended_at is not None and node.ended_at < until
                    executions[job.turn.step, stage, job.turn.index].append((job.stop, died))
    shares = np.ones((steps, STAGES, microbatches))
    for (step, stage, index), found in executions.items():
        if step < steps:
            first, *more = (died for _, died in sorted(found))
            # What the ledger had done again is not doubled: the first was lost.
            shares[step, stage, index] = 0 if first else 1 + sum(not died for died in more)
    return shares


def toy_losses(shares: Shares, *, steps: int) -> list[float]:
    """Losses of a network of one layer a stage, whose gradient of microbatch m in stage s is taken `shares` times."""
    draw = np.random.default_rng(1)
    num_patterns, stages, microbatches = shares.shape
    scale = 1.5 / np.sqrt(WIDTH)
    teacher = [draw.normal(0, scale, (WIDTH, WIDTH)) for _ in range(stages)]
    layers = [draw.normal(0, scale, (WIDTH, WIDTH)) for _ in range(stages)]
    moved = [np.zeros_like(layer) for layer in layers]
    losses = []
    for step in range(steps):
        inputs = draw.normal(size=(microbatches * EXAMPLES, WIDTH))
        wanted = inputs
        for layer in teacher:
            wanted = np.tanh(wanted @ layer)
        passed = [inputs]
        for layer in layers:
            passed.append(np.tanh(passed[-1] @ layer))
        error = passed[-1] - wanted
        losses.append(float((error**2).mean()))
        gradient = error
        of_step = np.repeat(shares[step % num_patterns], EXAMPLES, axis=1)
        for stage in reversed(range(stages)):
            local = gradient * (1 - passed[stage + 1] ** 2)
            gradient = local @ layers[stage].T
            weight = of_step[stage]
            # A mean over what was counted, as its averager takes it.
            moved[stage] = 0.9 * moved[stage] + passed[stage].T @ (local * weight[:, None]) / weight.sum()
        for stage in range(stages):
            layers[stage] = layers[stage] - 0.1 * moved[stage]
    return losses


def measure(*, peers: int, microbatches: int, steps: int, toy_steps: int) -> dict[str, Any]:
    """Run the fleet with kills and without, and the control on what was executed. Raises Broken if a sum is wrong."""
    fleet = drawn(fleet_of(peers=peers, microbatches=microbatches, steps=steps), "goodput")
    killed = FleetSimulation(fleet)
    killed.swarm.detailed = True
    undisturbed = FleetSimulation(calm(fleet))
    killed.run()
    undisturbed.run()
    found, still = killed.report(), undisturbed.report()
    assert found["steps_done"] == still["steps_done"] == steps and found["losses"] == still["losses"]
    goodput = found["throughput"] / still["throughput"]
    kills = sum(found["faults"].values())
    lost_s = (1 - goodput) * sum(found["steps_s"]) / max(kills, 1)
    shares = shares_without_ledger(killed, microbatches, steps)
    exact, without = (toy_losses(each, steps=toy_steps) for each in (np.ones_like(shares), shares))
    away = kills * BACK_S / sum(found["steps_s"]) / peers
    return {
        "peers": peers,
        "microbatches": microbatches,
        "steps": steps,
        "kills": kills,
        "goodput": goodput,
        "away": away,
        "lost_s": lost_s,
        "goodput_1pct": 1 - lost_s * LEAVE_PER_HOUR * peers / 3600,
        "repairs": found["repairs"],
        "without_ledger": {
            "lost": int((shares == 0).sum()),
            "doubled": int((shares > 1).sum()),
            "of": shares.size,
            "last_loss": without[-1],
            "last_loss_exact": exact[-1],
            "largest_difference": max(abs(a / b - 1) for a, b in zip(without, exact, strict=True)),
        },
        "losses": {"exact": exact, "without_ledger": without},
    }


def draw(found: dict[str, Any], path: Path) -> None:
    """Both curves of the small network, and what lies between them."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    exact, without = found["losses"]["exact"], found["losses"]["without_ledger"]
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 5), sharex=True, layout="constrained")
    above.semilogy(exact, label="each microbatch once, as in swarmnet (and as without kills)")
    above.semilogy(without, label="no ledger: lost and doubled microbatches")
    above.set_ylabel("loss")
    above.legend()
    below.plot([a / b - 1 for a, b in zip(without, exact, strict=True)], color="C1")
    below.axhline(0.0, color="C0")
    below.set_ylabel("relative difference")
    below.set_xlabel("step")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Print what kills cost, and what they would have."""
    parser = Benchmark(__doc__, quick="8 peers")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the control's losses (needs the extra `plot`)")
    typed = parser.asked()
    if typed.quick:
        found = measure(peers=8, microbatches=24, steps=3, toy_steps=40)
    else:
        found = measure(peers=64, microbatches=384, steps=2, toy_steps=TOY_STEPS)
    control = found["without_ledger"]
    print(f"{found['peers']} peers, {found['kills']} kills in {found['steps']} steps, one every {KILL_EVERY_S:g} s,")
    print(f"back after {BACK_S:g} s: {found['away']:.1%} of the peers are away")
    print(f"goodput                         {found['goodput']:.1%}   same losses, bit for bit")
    print(f"one kill costs the fleet        {found['lost_s']:.2f} s, {found['repairs']} microbatches computed again")
    print(f"goodput at 1 % leaving an hour  {found['goodput_1pct']:.2%}")
    print(f"without a ledger: {control['lost']} lost, {control['doubled']} doubled of {control['of']};")
    print(
        f"a small network ends at {control['last_loss']:.4g} instead of {control['last_loss_exact']:.4g}, "
        f"at most {control['largest_difference']:.1%} away"
    )
    write(typed.json, found)
    if typed.plot:
        draw(found, typed.plot)


if __name__ == "__main__":
    main()
