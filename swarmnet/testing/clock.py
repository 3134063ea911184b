"""An event loop with a time that jumps to the next timer, and in which single processes can be stopped or killed.

Each simulated process runs in a context of its own: every callback of its tasks carries it. Stopping a process
(SIGSTOP) holds its callbacks back, continuing it releases them in order; killing it (SIGKILL) holds them for good, so
that no `finally` block runs, exactly as in a real process. Time goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_FEW, _RESOLUTION_S = 100, 1e-9
"""Timers among which cancelled ones are not looked for; timers so near to each other are due together."""

_KEPT_TASKS = 32
"""Tasks of a process that are remembered before those that have ended are forgotten."""


class SimulatedProcess:
    """A simulated process: running, stopped or dead."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.stopped = self.dead = False
        self.held: list[Callable[[], None]] = []
        self.remains: list[asyncio.Task[Any]] = []  # of the dead: collecting them would run their `finally` blocks
        self.context = contextvars.copy_context()
        self.context.run(_process.set, self)
        self._tasks: list[asyncio.Task[Any]] = []
        self._most = _KEPT_TASKS

    def add(self, task: asyncio.Task[Any]) -> None:
        """A task of this process has begun."""
        self._tasks.append(task)
        if len(self._tasks) > self._most:
            self._tasks = self.tasks()
            self._most = 2 * len(self._tasks) + _KEPT_TASKS

    def tasks(self) -> list[asyncio.Task[Any]]:
        """Those that go on, in the order in which they began."""
        return [task for task in self._tasks if not task.done()]


_process: contextvars.ContextVar[SimulatedProcess | None] = contextvars.ContextVar("process", default=None)


class _Event(asyncio.TimerHandle):
    """A callback, at a time or as soon as may be, that waits while its process is stopped, and for ever if it is dead.

    Half of what a simulation does is to make these: so it is made in one call, and compared in one.
    """

    __slots__ = ("_process",)

    def __init__(self, when: float, callback: Any, args: Any, loop: VirtualLoop, context: contextvars.Context) -> None:
        self._when, self._callback, self._args, self._loop, self._context = when, callback, args, loop, context
        self._scheduled = self._cancelled = False
        self._source_traceback = self._repr = None
        self._process = context.get(_process)  # None: of the simulator itself, which is never stopped

    def __lt__(self, other: _Event) -> bool:  # type: ignore[override]
        return self._when < other._when

    def drop_if_cancelled(self) -> bool:
        """Was it cancelled? Then it is no timer any more."""
        self._scheduled = self._scheduled and not self._cancelled
        return self._cancelled

    def _run(self) -> None:
        process = self._process
        if process is not None and (process.stopped or process.dead):
            process.held.append(functools.partial(_gated(self._callback, process), *self._args))
            return
        # As in asyncio, without a call more.
        try:
            self._context.run(self._callback, *self._args)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            self._loop.call_exception_handler({"message": "a callback failed", "exception": error, "handle": self})


def _gated(callback: Callable[..., None], process: SimulatedProcess) -> Callable[..., None]:
    """What does this while the process runs, and holds it back otherwise."""

    def run(*args: Any) -> None:
        if process.stopped or process.dead:
            process.held.append(functools.partial(run, *args))
            return
        callback(*args)

    return run


class VirtualLoop(asyncio.SelectorEventLoop):
    """asyncio on virtual time with stoppable processes. Deterministic; no threads inside.

    Events go into asyncio's own queues, `_ready` and `_scheduled`; into this with their times, which compare faster.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._timer_cancelled_count = 0
        # Tasks of killed processes are never finished; that is what being killed means.
        self.set_exception_handler(self._on_exception)
        self.failure: BaseException | None = None

    def _run_once(self) -> None:
        """One turn, as asyncio has it, without a selector: most turns run one event."""
        ready: deque[asyncio.Handle] = self._ready  # type: ignore[attr-defined]
        scheduled: list[tuple[float, _Event]] = self._scheduled  # type: ignore[attr-defined]
        if len(scheduled) > _FEW and self._timer_cancelled_count > len(scheduled) / 2:
            # In place: others hold it.
            scheduled[:] = [entry for entry in scheduled if not entry[1].drop_if_cancelled()]
            heapq.heapify(scheduled)
            self._timer_cancelled_count = 0
        while scheduled and scheduled[0][1].drop_if_cancelled():
            heapq.heappop(scheduled)
            self._timer_cancelled_count -= 1
        if not (ready or self._stopping):  # type: ignore[attr-defined]
            if not scheduled:
                raise RuntimeError("deadlock: every task waits and no timer is set")
            self._now = max(self._now, scheduled[0][0])
        end = self._now + _RESOLUTION_S
        while scheduled and scheduled[0][0] < end:
            event = heapq.heappop(scheduled)[1]
            event._scheduled = False
            ready.append(event)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        """Schedule the callback, which runs only while its process does."""
        event = _Event(0.0, callback, args, self, contextvars.copy_context() if context is None else context)
        self._ready.append(event)  # type: ignore[attr-defined]
        return event

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        """Set a timer; that of a stopped process fires when it continues."""
        event = _Event(when, callback, args, self, contextvars.copy_context() if context is None else context)
        event._scheduled = True
        heapq.heappush(self._scheduled, (when, event))  # type: ignore[attr-defined]
        return event

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        """`call_at`, so many seconds from now."""
        return self.call_at(self._now + delay, callback, *args, context=context)

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Any, *args: Any
    ) -> asyncio.Future[Any]:
        """At once: a thread would take seconds of another clock, and time would jump meanwhile."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # its waiter handles it
            done.set_exception(error)
        return done

    def start(self, process: SimulatedProcess, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine inside a process."""
        return self.create_task(work, context=process.context)

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None) -> asyncio.Task[Any]:
        """Create the task, and tell its process of it."""
        context = contextvars.copy_context() if context is None else context
        # One without a name would be given a number, which takes as long as all the rest.
        task = asyncio.Task(coro, loop=self, name=name or "task", context=context)
        process = context.get(_process)
        if process is not None:
            process.add(task)
        return task

    def _asyncgen_firstiter_hook(self, agen: object) -> None:
        """Each call has several generators, all of which are closed by their reader: they need no registry."""

    def at_once(self, process: SimulatedProcess, act: Callable[..., None], *args: object) -> None:
        """Do this inside a process, now, or when it continues: without a timer, which would reorder others' events."""
        if process.stopped or process.dead:
            # It may be stopped again before its turn comes.
            process.held.append(functools.partial(_gated(act, process), *args))  # it is continued inside its context
        else:
            process.context.run(act, *args)

    def stop_process(self, process: SimulatedProcess) -> None:
        """SIGSTOP."""
        process.stopped = True

    def continue_process(self, process: SimulatedProcess) -> None:
        """SIGCONT."""
        process.stopped = False
        held, process.held = process.held, []
        # In the order in which they came due, past the gate that held them.
        for callback in held:
            super().call_soon(callback, context=process.context)

    def kill_process(self, process: SimulatedProcess) -> None:
        """SIGKILL."""
        process.dead = True
        process.remains = process.tasks()

    def bury_process(self, process: SimulatedProcess) -> None:
        """Clean up after a dead or stopped process, once its last acts can harm no other: end its tasks."""
        process.dead = False
        process.remains = process.tasks()
        self.continue_process(process)
        for task in process.remains:
            task.cancel()

    def _on_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        # The first failure is the cause of most that follow.
        if error is not None and not isinstance(error, asyncio.CancelledError):
            self.failure = self.failure or error
