"""A long call into C++ -> one that Ctrl-C ends: Python runs handlers of signals in its main thread, between its own instructions."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def heeding(function: Callable[[], Result], *, stop: Callable[[], None]) -> Result:
    """What a function returns or raises. It runs in another thread, and an interrupt of this one stops it.

    Args:
        function: lets the lock of the interpreter go while it takes long.
        stop: makes it end soon.
    """
    found: Future[Result] = Future()

    def call() -> None:
        if not found.set_running_or_notify_cancel():
            return
        try:
            found.set_result(function())
        except BaseException as error:  # it belongs to who waits
            found.set_exception(error)

    try:
        threading.Thread(target=call, daemon=True).start()
        return found.result()
    except KeyboardInterrupt:
        stop()
        if not found.cancel():  # it has begun
            found.exception()
        raise
