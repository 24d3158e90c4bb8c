"""A long call into C++ -> one that Ctrl-C ends, and that may run beside other work of its caller.

Python runs handlers of signals in its main thread, between its own instructions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Running(Generic[Result]):
    """A function that runs in another thread.

    Args:
        function: lets the lock of the interpreter go while it takes long.
        stop: makes it end soon.
    """

    def __init__(self, function: Callable[[], Result], *, stop: Callable[[], None]) -> None:
        self._found: Future[Result] = Future()
        self._function = function
        self._stop = stop
        try:
            threading.Thread(target=self._call, daemon=True).start()
        except KeyboardInterrupt:
            self.leave()
            raise

    def result(self) -> Result:
        """What the function returns or raises; an interrupt of this thread stops it."""
        try:
            return self._found.result()
        except KeyboardInterrupt:
            self.leave()
            raise

    def leave(self) -> None:
        """End it, whatever it would find."""
        if not self._found.cancel() and not self._found.done():  # it has begun
            self._stop()
            self._found.exception()

    def _call(self) -> None:
        if not self._found.set_running_or_notify_cancel():
            return
        try:
            self._found.set_result(self._function())
        except BaseException as error:  # it belongs to who waits
            self._found.set_exception(error)
