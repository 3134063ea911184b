"""What a swarm tells of a run with all kinds of faults is what docs/events.schema.json says."""

from __future__ import annotations

from chaos import Chaos, run_seed
from event_schema import event_problem

from swarmnet.manifest.schema import Audits
from swarmnet.testing.plan import Plan

PLAN = Plan(
    stages=2,
    replicas=3,
    microbatches=8,
    steps=12,
    forward_s=0.1,
    trainers=2,
    checkpoint_every=2,
    eval_every=4,
    audit=Audits(microbatches=0.5, contributions=0.5),
)
FAULTS = Chaos(until_s=40.0, crash_s=5.0, stop_s=8.0, cut_s=15.0, join_s=6.0, trainer_s=15.0, kill_stage_s=15.0)

SURE = frozenset(("applied", "audited", "checkpoint", "committed", "evaluated", "fetching", "synced"))
"""Some of what any such run tells, wherever the faults strike."""


def test_every_event_of_a_run_with_faults_is_as_the_schema_says() -> None:
    swarm = run_seed(PLAN, FAULTS, 1)
    assert swarm.counts.keys() >= SURE
    assert not [problem for _, _, event, fields in swarm.events if (problem := event_problem(event, fields))]
