"""The held-out loss of a version, and how much of it is one replica's word (docs/huggingface.md).

Each microbatch of an evaluation comes back with its *route*: the replica of each stage that computed it. Once all are
there, a few that no peer could foresee are computed again by a route around the first. Where the two answers differ, a
third route decides which peers are excluded, and the whole evaluation is made once more around those; or there is no
score.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from swarmnet.errors import SwarmError
from swarmnet.ids import PeerId
from swarmnet.messages import MAX_AVOIDED, Gradient

TWICE = 0.1
"""The share of an evaluation's microbatches that is computed twice; at least one."""

TOLERANCE = 1e-2
"""Of the loss: how far two honest routes may be apart where replicas need not have equal bits."""

_PASSES = 2
"""Times that an evaluation is made; the second around those who were found wrong in the first."""


class NoScore(SwarmError):
    """There is none of this version; in words for a person."""


class Looks(Protocol):
    """How one version's microbatches are looked at, and what becomes of that."""

    def look(self, number: int, avoid: tuple[PeerId, ...], /) -> Coroutine[Any, Any, Gradient | None]:
        """What comes back for a microbatch by a route around these peers, if there are others. None: too late."""
        ...

    def alike(self, one: Gradient, other: Gradient, /) -> bool:
        """Can both be right?"""
        ...

    def disputed(self, number: int, looks: Sequence[Gradient], /) -> None:
        """These looks at a microbatch are not the same."""


def same(one: Gradient, other: Gradient, *, numerics: Callable[[PeerId], str] | None) -> bool:
    """Can both be right? numerics: the class of a peer, "": not known; None: bits are not equal in this run."""
    if one.num_tokens != other.num_tokens:
        return False
    stages = zip(one.route, other.route, strict=True)
    if numerics is not None and all(a == b or (numerics(a) and numerics(a) == numerics(b)) for a, b in stages):
        return one.loss_sum == other.loss_sum
    return math.isclose(one.loss_sum, other.loss_sum, rel_tol=TOLERANCE)


def said(looks: Sequence[Gradient]) -> Mapping[str, object]:
    """Fields of an event: the loss of each, nats per token, and its route."""
    return {
        "losses": [look.loss_sum / look.num_tokens for look in looks],
        "routes": [list(look.route) for look in looks],
    }


async def score(num_microbatches: int, version: Looks, rng: random.Random) -> tuple[float, int]:
    """(loss, tokens) of one version: nats per token over all microbatches. rng: a Byzantine peer must not foresee it.

    Raises NoScore: the weights have moved on, or a second look contradicts the first and no third agrees with either.
    """
    doubted = frozenset[PeerId]()
    for _ in range(_PASSES):
        first = await _all(version, dict.fromkeys(range(num_microbatches), doubted))
        # Where no other replica can, even the excluded ones compute.
        if any(not doubted.isdisjoint(each.route) for each in first.values()):
            break
        # Only now: while first looks are out, a second one would tell which are not looked at again.
        drawn = rng.sample(range(num_microbatches), max(1, math.ceil(TWICE * num_microbatches)))
        second = await _all(version, {number: doubted.union(first[number].route) for number in drawn})
        disputed = [number for number in drawn if not version.alike(first[number], second[number])]
        if not disputed:
            num_tokens = sum(each.num_tokens for each in first.values())
            return sum(each.loss_sum for each in first.values()) / num_tokens, num_tokens
        for number in disputed:
            doubted |= await _decide(number, (first[number], second[number]), version)
    raise NoScore("a second computation of a microbatch gave another loss, and there is no third replica to ask")


async def _all(version: Looks, wanted: Mapping[int, frozenset[PeerId]]) -> dict[int, Gradient]:
    """number -> a look around those peers. Raises NoScore."""
    avoid = {number: tuple(sorted(around)[:MAX_AVOIDED]) for number, around in wanted.items()}
    async with asyncio.TaskGroup() as group:
        tasks = {number: group.create_task(version.look(number, avoid[number])) for number in wanted}
    looks = {number: each for number, task in tasks.items() if (each := task.result()) is not None}
    if len(looks) < len(wanted):
        raise NoScore("the weights moved on before all was measured")
    return looks


async def _decide(number: int, looks: tuple[Gradient, Gradient], version: Looks) -> frozenset[PeerId]:
    """The peers on the route of the outlier of three answers. Raises NoScore if that is undecided."""
    first, second = looks
    one, other = frozenset(first.route), frozenset(second.route)
    try:
        third = (await _all(version, {number: one | other}))[number]
    except NoScore:
        version.disputed(number, looks)
        raise
    # A peer on exactly one of the two routes cannot decide between them.
    judges = one != other and (one ^ other).isdisjoint(third.route)
    version.disputed(number, (*looks, third) if judges else looks)
    right = [each for each in looks if judges and version.alike(each, third)]
    if len(right) != 1:
        found = "a third decides nothing" if judges else "there is no third"
        raise NoScore(f"microbatch {number} has another loss by another route, and {found}")
    (odd,) = (each for each in looks if each not in right)
    return frozenset(odd.route).difference(right[0].route)
