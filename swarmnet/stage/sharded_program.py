"""`stage.rank_program` for ranks that shard parameters: imports FSDP2 first, seconds that no restart should wait for.

Ranks are forks of a process that has imported their program (`mesh.starter`), and other meshes need none of it.
"""

from __future__ import annotations

import swarmnet.stage.fully_sharded  # noqa: F401  the import is all this is for
from swarmnet.stage.rank_program import handler

__all__ = ["handler"]
