"""What the network layer reads of a run's manifest: a small table, so that what carries bytes knows no manifest."""

from __future__ import annotations

from dataclasses import dataclass

from swarmnet.ids import PeerId, RunId
from swarmnet.manifest.file import completed_hash, filled_in, run_id
from swarmnet.manifest.schema import Manifest


@dataclass(frozen=True, slots=True)
class RunTerms:
    """The numbers of a run that its peers agree on before they talk."""

    run: RunId
    completed: bytes
    filled_in: str
    """Of the manifest: `manifest.file.completed_hash`, `manifest.file.filled_in`."""
    owner: PeerId | None
    """Signs the invitations that admit peers; None: any peer may join."""
    key: PeerId | None
    """Who may extend the run; None: it cannot be extended."""
    total_steps: int
    """Of the manifest."""
    num_stages: int
    microbatches: int
    """Of a step."""
    boundary: tuple[int, int, int]
    """[B, T, D]: what crosses a stage boundary for one microbatch."""
    boundary_codecs: tuple[str, ...]
    num_windows: int
    """Windows of the data, at least."""
    beat_s: float
    """Between two heartbeats."""
    max_payload_bytes: int
    max_clock_offset_s: float

    @classmethod
    def of(cls, manifest: Manifest) -> RunTerms:
        """As a manifest says."""
        training, limits, admission = manifest.training, manifest.limits, manifest.admission
        return cls(
            run=run_id(manifest),
            completed=completed_hash(manifest),
            filled_in=filled_in(manifest),
            # The owner of an open run admits no peers.
            owner=PeerId(admission.key) if admission.policy == "invite" else None,
            key=PeerId(admission.key) if admission.key else None,
            total_steps=training.total_steps,
            num_stages=manifest.cut.stages,
            microbatches=training.microbatches,
            boundary=(training.microbatch_size, training.sequence_length, manifest.model.hidden_size),
            boundary_codecs=manifest.wire.codecs,
            # Some of them are held out; as a bound it is close enough.
            num_windows=manifest.data.num_tokens // training.sequence_length,
            beat_s=manifest.protocol.timers.beat_s,
            max_payload_bytes=limits.max_payload_mib << 20,
            max_clock_offset_s=limits.max_clock_offset_s,
        )
