"""Being asked to stop while a local swarm runs: signals are counted, and looked at when it suits."""

from __future__ import annotations

import signal


class Interrupt:
    """Counts Ctrl+C and SIGTERM instead of raising in the middle of things. A context manager, main thread only.

    exit_code: 128 + the first signal's number, as shells have it; 0 before any.
    """

    def __init__(self) -> None:
        self.count, self.exit_code = 0, 0
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Interrupt:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._caught)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _caught(self, number: int, _frame: object) -> None:
        self.count += 1
        self.exit_code = self.exit_code or 128 + number

    @property
    def again(self) -> bool:
        """Asked more than once: no grace any more."""
        return self.count > 1
