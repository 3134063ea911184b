"""How late a step's gradient may be: on which version's weights each step is computed.

With `averaging.sync = "overlap"` it is those of one version earlier, but for the first `averaging.overlap_after` steps:
while weights still change fastest, late gradients do the most harm (arXiv:2101.06840 delays after 40 steps, too). Pure.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Delay:
    """most: how many versions late at the most, 0 or 1. since: the first step that is late."""

    most: int = 0
    since: int = 0

    def behind(self, step: int) -> int:
        """Step `step` is computed on the weights of version step - behind (of version 0 at the least)."""
        return self.most if step >= self.since else 0

    def ahead(self, version: int) -> int:
        """At `version` the steps version .. version + ahead are open; the last of them is computed on its weights."""
        return self.behind(version + 1)


NO_DELAY = Delay()
"""Every step on the weights that the one before has led to."""
