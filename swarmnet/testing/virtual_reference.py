"""What one process would compute: the truth that a simulated swarm is held against, last digits apart.

Where steps overlap the gradient of step s is that of the weights one version earlier, and moves the newest ones.
"""

from __future__ import annotations

from collections.abc import Callable

from swarmnet.ids import NO_CHAIN, Ballot, PeerId, RoundId
from swarmnet.manifest.extension import Horizon, Notice
from swarmnet.messages import Commit, Packed
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_engine import Arithmetic, tokens_of


class SimulatedReference:
    """The sum of every stage in every step, and the weights of every version: exact parts."""

    def __init__(
        self, plan: Plan, notices: tuple[Notice, ...] = (), arithmetic: Callable[[int, Plan], Arithmetic] = Arithmetic
    ) -> None:
        """notices: those that take force."""
        self._plan, self._horizon = plan, Horizon(plan.steps, notices)
        self._stages = [arithmetic(stage, plan) for stage in range(plan.stages)]
        weights, delay = [stage.seed() for stage in self._stages], plan.delay
        self.history = [weights]
        self.sums: list[list[list[int]]] = []
        self.losses: list[float] = []
        for step in range(self._horizon.last):
            computed_on = self.history[max(step - delay.behind(step), 0)]
            weights, sums, loss_sum = self.advance(step, weights, computed_on)
            self.sums.append(sums)
            self.losses.append(loss_sum)
            self.history.append(weights)
        self.weights = weights

    def advance(
        self, step: int, weights: list[int], computed_on: list[int]
    ) -> tuple[list[int], list[list[int]], float]:
        """A step from any weights: (weights of the next version, sums, loss)."""
        plan, stages = self._plan, self._stages
        sums = [[0, 0, 0, 0] for _ in stages]
        loss_sum = 0.0
        # No replica can count what is not finite: it is out in every stage.
        discarded = plan.discarded(step)
        for index in [index for index in range(plan.microbatches) if index not in discarded]:
            inputs = [tokens_of(step * plan.microbatches + index)]
            for stage, at in zip(stages[:-1], computed_on[:-1], strict=True):
                # Every stage computes on its own weights of the same version.
                inputs.append(stage.forward(at, inputs[-1]))
            loss_sum += stages[-1].loss(computed_on[-1], inputs[-1])
            gradient: tuple[Packed, ...] = ()
            for place in reversed(range(plan.stages)):
                delta = stages[place].weight_gradient(computed_on[place], inputs[place], gradient)
                sums[place] = [a + b for a, b in zip(sums[place], delta, strict=True)]
                gradient = stages[place].backward(computed_on[place], inputs[place], gradient)
        # The commits carry norms: the update of a stage depends on all of them.
        described = [stage.digest(total) for stage, total in zip(stages, sums, strict=True)]
        commits = [self._commit(plan, place, step, *described[place], loss_sum) for place in range(plan.stages)]
        after = [
            stage.apply(at, total, commits, self._horizon)
            for stage, at, total in zip(stages, weights, sums, strict=True)
        ]
        return after, sums, loss_sum

    @staticmethod
    def _commit(plan: Plan, stage: int, step: int, digest: bytes, norm: float, loss_sum: float) -> Commit:
        return Commit(
            stage,
            step,
            NO_CHAIN,
            RoundId(Ballot(0, PeerId("")), 0),
            digest,
            plan.microbatches - len(plan.discarded(step)),
            loss_sum if stage + 1 == plan.stages else 0.0,
            norm,
            plan.discarded(step),
        )
