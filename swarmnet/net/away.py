"""A peer or trainer that was in the run before and that no address answers when it comes back: it keeps trying.

To a newcomer, no answer is an error in the address it was given. That a peer has once had its stage's state, or that a
trainer has once joined, is remembered in its directory, so it holds for a process that was started again as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from swarmnet.clock import loop_time
from swarmnet.ids import RunId
from swarmnet.net.dht_node import NoPeerAnswered
from swarmnet.net.limits import BOOTSTRAP_AGAIN, REPEATS

_MARK, _DIGITS = "was-in-", 12

T = TypeVar("T")


def remember(directory: Path, run: RunId) -> None:
    """This peer or trainer was in `run`. A directory that cannot be written costs the memory, no more."""
    with contextlib.suppress(OSError):
        _mark(directory, run).touch()


def was_in(directory: Path, run: str) -> bool:
    """Was the peer or trainer of `directory` in the run, named by its id or the first digits of it?"""
    return _mark(directory, run).exists()


def other_runs(directory: Path, run: RunId) -> list[str]:
    """The first digits of runs that the peer or trainer of `directory` was in, if it never was in `run`."""
    found = sorted(path.name.removeprefix(_MARK) for path in directory.glob(f"{_MARK}*"))
    return [] if run[:_DIGITS] in found else found


def _mark(directory: Path, run: str) -> Path:
    return directory / f"{_MARK}{run[:_DIGITS]}"


async def until_answered(
    attempt: Callable[[], Awaitable[T]],
    *,
    say: Callable[[str, str], None],
    patient: bool = True,
    rng: random.Random | None = None,
) -> T:
    """What `attempt` returns; it is retried while it raises NoPeerAnswered. Cancel to give up.

    patient: False for a newcomer: its first failure raises.
    say: called with "away" and the reason when the wait begins and now and then while it lasts, and with "back" and the
        length of the wait when it is over.
    """
    began, waited, rng = loop_time(), False, rng or random.Random()
    pauses, says = BOOTSTRAP_AGAIN(rng=rng), REPEATS.bucket()
    while True:
        try:
            found = await attempt()
        # Only this error passes by itself: the operator must fix any other.
        except NoPeerAnswered as error:
            if not patient:
                raise
            waited = True
            if not says.ask(loop_time()):
                long = f" for {(loop_time() - began) / 60:.0f} min" if loop_time() - began >= 60.0 else ""
                say(
                    "away",
                    f"no peer answers{long}, though this peer was in the run before: is this machine online? It tries "
                    f"again at least every {pauses.longest_s:.0f} s, until you stop it ({error.message})",
                )
        else:
            # Who was told of the wait is told of its end.
            if waited:
                say("back", f"a peer answers again, after {loop_time() - began:.0f} s")
            return found
        await asyncio.sleep(pauses.failed(loop_time()))
