"""Where this peer has the weights of version 0, in a run that begins with a checkpoint (`manifest.initial`).

A directory that the operator names has to hold them. One that only the manifest names may be absent or another: then
the peer takes the weights from mates, as a late joiner does, and its engines hold the seed's until it has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from swarmnet import telemetry
from swarmnet.config.peer import PeerConfig
from swarmnet.errors import UsageError
from swarmnet.manifest.schema import Manifest
from swarmnet.model.huggingface.checkpoint import stage_shapes, stage_weights

E = TypeVar("E")

Initial = Callable[[], Mapping[str, Tensor]]

log = telemetry.get(__name__)


class Beginning:
    """The weights that engines are built with. missing: why this peer lacks some of them; empty: it lacks none.

    at_source: may files be read where the manifest says they are?
    """

    def __init__(self, config: PeerConfig, manifest: Manifest, *, at_source: bool) -> None:
        self._manifest, self._named, self.missing = manifest, config.initial is not None, ""
        self._folder: Path | None = None
        if config.initial is not None and not manifest.initial.sha256:
            raise UsageError(f"--initial {config.initial}: this run begins with weights drawn from its seed")
        if not manifest.initial.sha256:
            return
        if config.initial is not None:
            self._folder = config.initial
        elif at_source:
            base = config.manifest.parent if config.manifest else Path()
            self._folder = base / Path(manifest.initial.source).expanduser()
        else:
            self._lack("a manifest from the network opens no files here")

    def engine(self, stage: int, build: Callable[[int, Initial | None], E]) -> E:
        """Build the engine of `stage`. Raises UsageError if the operator's directory does not hold its weights."""
        if self._folder is None:
            return build(stage, None)
        try:
            return build(stage, functools.partial(self._weights, stage, self._folder))
        except UsageError as error:
            if self._named:
                raise
            self._lack(str(error))
            return build(stage, None)

    def _weights(self, stage: int, folder: Path) -> Mapping[str, Tensor]:
        manifest = self._manifest
        shapes = stage_shapes(manifest.model, manifest.cut, manifest.training.sequence_length)[stage]
        return stage_weights(folder, shapes, stage=stage, agreed=manifest.initial.sha256[stage])

    def _lack(self, reason: str) -> None:
        self.missing = (
            f"the run begins with a checkpoint ({self._manifest.initial.source!r} in the manifest) that is not here, "
            "and no other replica of the stage is up: start a peer that has it, or name its directory with --initial"
        )
        log.warning("no_initial_weights", reason=reason, then="they come from another replica")
