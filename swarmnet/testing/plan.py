"""What to simulate: the shape of a swarm, its timers and links."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from swarmnet.averaging.exchange import PIECE_ELEMENTS
from swarmnet.config.table import Table
from swarmnet.ids import RunId
from swarmnet.manifest.schema import (
    Admission,
    Audits,
    Averaging,
    Cut,
    Delay,
    Manifest,
    Model,
    Numerics,
    Protocol,
    Training,
)
from swarmnet.peer.rebalance import Rules
from swarmnet.testing.links import Links
from swarmnet.wire.peer_ids import peer_id_from_public_bytes

OWNER = peer_id_from_public_bytes(b"W" * 32)
"""Who owns simulated runs."""


RUN = RunId("0" * 64)


@dataclass(frozen=True, slots=True)
class Plan:
    """The shape of a swarm, its timers and links; without a word below, a field is what the manifest calls so."""

    stages: int = 2
    replicas: int = 2
    microbatches: int = 4
    steps: int = 3
    trainers: int = 1
    run: RunId = RUN
    """Chains begin with it, so it decides which replica leads when; the seed of a swarm does not."""
    sync: Literal["exact", "overlap"] = "exact"
    overlap_after: int = 0  # nothing without sync = "overlap"
    classes: int = 1
    """Numerics classes of a stage, which peers are in by turns: the gradients of two differ in their last digits. 0:
    `numerics.mode = "fast"`, in which each peer is a class of its own."""
    slots: int = 4
    """Of every replica, always; 0: as many as each finds enough (`pipeline/depth.py`)."""
    output_cache_bytes: int = 1 << 20
    forward_s: float = 0.02
    """Seconds of a forward; backward and weight pass take as long."""
    averaging_s: float = 0.001
    """What a round takes beyond its messages."""
    padding: int = 0
    """Elements of each sum that are zero, and only take their time on the lines."""
    padding_bytes: float = 8.0
    """Of one of them on the lines: under a small codec fewer."""
    sum_piece: int = PIECE_ELEMENTS
    """Elements of the pieces in which a finished sum is handed over."""
    boundary_elements: int = 1
    """Of what crosses a stage boundary, 4 bytes each."""
    data_at_peers: bool = True
    eval_every: int = 0
    eval_microbatches: int = 1
    max_discarded: int = 0
    checkpoint_every: int = 0
    allow_drop: bool = False
    drift_every: int = 0
    resync_every: int = 0
    group_size: int = 16
    state_bytes: int = 0
    """Of a copy of a stage's state, at least; it travels in pieces of `piece_bytes`."""
    piece_bytes: int = 1 << 10
    poison: frozenset[tuple[int, int, int]] = frozenset()
    """(stage, step, index) with a forward that is not finite, which leaves the index out in every stage."""
    links: Links = field(default_factory=Links)
    no_beginning: frozenset[str] = frozenset()
    """These peers have no weights of version 0."""
    invite: bool = False
    """The run is by invitation of `OWNER`."""
    protocol: Protocol = field(default_factory=Protocol)
    between_reads_s: float = 0.0
    """The least time from one look into the directory to the next, 2 s in production; 0: at every look."""
    audit: Audits = field(default_factory=Audits)
    """How much of members' work is computed again."""
    routing: str = "least_time"
    """The rule of every peer and trainer."""
    rebalance: Rules | None = None
    """When peers move to other stages; None: they stay."""
    abstract: bool = False
    """Cheaper models stand for what many peers would take too long for (docs/simulate.md)."""
    served: tuple[tuple[int, ...], ...] | None = None
    """Stages of each peer; None: `replicas` of each stage."""

    @property
    def delay(self) -> Delay:
        """On which version's weights each step is computed."""
        return manifest_of(self).averaging.delay

    def discarded(self, step: int) -> frozenset[int]:
        """Indexes of a step that no stage can count."""
        return frozenset(index for _, at, index in self.poison if at == step)


def manifest_of(plan: Plan) -> Manifest:
    """The smallest manifest with the plan's shape."""

    def as_planned(table: type[Table]) -> dict[str, Any]:
        """What the plan says of this table, by its own names."""
        return {name: getattr(plan, name) for name in table.model_fields if hasattr(plan, name)}

    averaging = as_planned(Averaging)
    # A manifest without overlap may not say when it begins.
    if plan.sync != "overlap":
        del averaging["overlap_after"]
    return Manifest(
        name="simulated",
        model=Model(
            vocab_size=256,
            hidden_size=plan.boundary_elements,
            intermediate_size=1,
            num_layers=plan.stages,
            num_heads=1,
            num_kv_heads=1,
            head_dim=2,
        ),
        cut=Cut(stages=plan.stages),
        training=Training(**as_planned(Training), total_steps=plan.steps, microbatch_size=1, sequence_length=1),
        averaging=Averaging(**averaging),
        protocol=plan.protocol,
        numerics=Numerics(mode="deterministic" if plan.classes else "fast"),
        audit=plan.audit,
        admission=Admission(policy="invite" if plan.invite else "open", key=OWNER),
    )
