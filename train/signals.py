"""A polite end: SIGTERM and SIGINT ask a run to save and stop; the second one stops it at once."""

import signal
from types import FrameType, TracebackType
from typing import Any


class StoppedError(Exception):
    """The run was asked to stop and has saved; the same command continues it."""


class StopRequest:
    """Within the `with` block, remembers the first SIGTERM or SIGINT instead of dying of it.

    Only the main thread of a process may have one; elsewhere it never is requested.
    """

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._remember)
        except ValueError:  # not the main thread
            self._before.clear()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None:
            raise KeyboardInterrupt
        self.requested = signal.Signals(number)
