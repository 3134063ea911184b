"""What `swarmnet plan` says that audits keep is what they keep: weights of past steps, works, what others show."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_plan import CPU, GPU, RUN, STAGES, boundary, inputs

from swarmnet.config.peer import PeerConfig
from swarmnet.errors import UsageError
from swarmnet.ids import PeerId
from swarmnet.manifest.schema import Audits, Manifest, Wire
from swarmnet.messages import AuditRequest, Packed, WorkRecord
from swarmnet.peer.memory_fit import judge, setup_of, slots_within
from swarmnet.pipeline.works import KEPT_CACHES, KEPT_STEPS, ShownWorks, WorkBook, digest
from swarmnet.plan.memory import Setup, audit_bytes, plan_stage
from swarmnet.ranks.device_backend import DeviceBackend
from swarmnet.ranks.layout import MeshLayout
from swarmnet.stage.canonical import Canonical
from swarmnet.stage.interfaces import KEPT_WEIGHTS
from swarmnet.wire import codecs

pytestmark = pytest.mark.usefixtures("one_thread")
AUDITED = RUN.model_copy(
    update={"audit": Audits(microbatches=0.01), "wire": Wire(activations="bf16", gradients="int8")}
)
UNSEEN = AUDITED.model_copy(update={"audit": Audits(microbatches=0.0, contributions=0.0)})
PLENTY = 1 << 30


def planned(manifest: Manifest, stage: int, output_cache_bytes: int, layout: MeshLayout = MeshLayout()) -> int:  # noqa: B008
    """What `swarmnet plan` counts for audits."""
    setup = Setup(
        manifest.specs, manifest.wire, layout, output_cache_bytes=output_cache_bytes, audited=manifest.audited
    )
    return audit_bytes(setup, Canonical.of(manifest.of_stage(stage)))


@pytest.mark.parametrize("stage", range(3), ids=STAGES)
def test_weights_of_past_steps_take_what_was_planned(stage: int) -> None:
    body = DeviceBackend(AUDITED.of_stage(stage), device=CPU)
    body.past.keep(KEPT_WEIGHTS)
    for step in range(2 * KEPT_WEIGHTS):
        body.past.note(step)
    weights = body.state.canonical.num_elements
    assert planned(AUDITED, stage, output_cache_bytes=0) == sum(memory[:weights].nbytes for memory in body.past._memory)


def work_payload(stage: int, depth: int) -> tuple[Packed, ...]:
    """As one microbatch of that stage leaves it. depth: of the proof of its tokens."""
    tokens, hidden = inputs(AUDITED, first=stage == 0)
    payload = [codecs.encode("int32", tokens)]
    if hidden is not None:
        payload.append(codecs.encode(AUDITED.wire.activations, hidden))
    payload.append(codecs.encode("uint8", torch.zeros(len(tokens), depth, 32, dtype=torch.uint8)))
    if stage + 1 < AUDITED.cut.stages:
        payload.append(codecs.encode(AUDITED.wire.gradients, boundary(AUDITED)))
    return tuple(payload)


@pytest.mark.parametrize("output_cache_bytes", [PLENTY, 200_000], ids=["all", "to-the-cap"])
@pytest.mark.parametrize("stage", range(3), ids=STAGES)
def test_works_and_what_is_shown_take_no_more_than_was_planned(stage: int, output_cache_bytes: int) -> None:
    payloads = planned(AUDITED, stage, output_cache_bytes) - planned(AUDITED, stage, output_cache_bytes=0)
    book, shown = WorkBook(KEPT_CACHES * output_cache_bytes), ShownWorks(output_cache_bytes)
    payload, most, most_shown = work_payload(stage, depth=40), 0, 0
    record = WorkRecord(0, digest(payload), *[digest(())] * 3, 0.0, 0)
    for step in range(3 * KEPT_STEPS):
        book.begin(step)
        shown.begin(step)
        for index in range(AUDITED.training.microbatches):
            book.add(step, replace(record, index=index), payload)
            # A mate that has counted as much shows all of the step before.
            if (data := book.shown(step - 1, index)) is not None:
                shown.keep(AuditRequest(step - 1, stage, index, PeerId("mate")), data)
            most, most_shown = max(most, book.num_bytes), max(most_shown, shown.num_bytes)
    # Of the smallest codecs what is planned is the most that they take, and a cap holds whole payloads.
    size = sum(packed.num_bytes for packed in payload)
    assert 0.9 * payloads - size <= most + most_shown <= payloads
    assert most <= KEPT_CACHES * output_cache_bytes and most_shown <= output_cache_bytes


def test_several_ranks_keep_as_much_and_each_has_room_for_one_more_module_and_sum() -> None:
    two = MeshLayout(2, devices=("cpu", "cpu"))
    assert planned(AUDITED, 1, PLENTY, two) == planned(AUDITED, 1, PLENTY)
    without, setup = (setup_of(PeerConfig(slots=1), manifest, two) for manifest in (UNSEEN, AUDITED))
    seen, audited = plan_stage(without, 1).rank, plan_stage(setup, 1).rank
    assert (audited.parameters, audited.sums) == (2 * seen.parameters, 2 * seen.sums)


def test_a_run_without_audits_keeps_nothing() -> None:
    assert planned(UNSEEN, 1, PLENTY) == 0
    local = RUN.averaging.model_copy(update={"sync": "local"})
    assert planned(AUDITED.model_copy(update={"averaging": local}), 1, PLENTY) == 0


def test_a_peer_counts_it_before_it_starts() -> None:
    """On a GPU in the machine beside it, on the CPU with all else."""
    config = PeerConfig(slots=1)
    without, setup = (setup_of(config, manifest, MeshLayout()) for manifest in (UNSEEN, AUDITED))
    beside = replace(setup, layout=GPU)
    more = audit_bytes(setup, Canonical.of(AUDITED.of_stage(1)))
    assert more == plan_stage(setup, 1).host["audits"] > 0
    assert judge(setup, [1], None).need - judge(without, [1], None).need == more
    least = judge(beside, [1], 1 << 50, 1 << 50).host_need
    assert least - judge(replace(beside, audited=False), [1], 1 << 50, 1 << 50).host_need == more
    slots_within(beside, [1], 1 << 50, least)
    with pytest.raises(UsageError, match="the memory outside its devices"):
        slots_within(beside, [1], 1 << 50, least - 1)
