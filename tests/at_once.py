"""Sums without threads: every method is run where it is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


class JobsAtOnce:
    """Stands for `engine.compute_thread.StageJobs`."""

    async def in_round(self, step: int, job: Callable[[], Any]) -> Any:
        return job()

    between_rounds = in_round


class AtOnce:
    """A sum made with `JobsAtOnce`, whose asynchronous methods give their answers at once."""

    def __init__(self, sums: Any) -> None:
        self._sums = sums

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._sums, name)
        if not inspect.iscoroutinefunction(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                found(*args, **kwargs).send(None)
            except StopIteration as done:
                return done.value
            raise AssertionError(f"{name} waits for something")

        return call
