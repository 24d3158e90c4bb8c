"""HiGHS in a process of its own: an interrupt ends the process, since a call of HiGHS hears of nothing (seen: ortools 9.15).

A call that was left in a thread instead would go on to its time limit, and abort the interpreter where it comes back while that ends.
The process also keeps for itself what the HiGHS of ortools 9.15 prints on standard output from C++, whatever its parameters say.
"""

from __future__ import annotations

import atexit
import datetime
import os
import subprocess
import sys
import threading
import time
from functools import cache
from multiprocessing.connection import Connection

from ortools.math_opt import model_pb2, result_pb2
from ortools.math_opt.python import mathopt
from ortools.math_opt.solvers import highs_pb2
from ortools.util.python.solve_interrupter import SolveInterrupter

from autopar.errors import SolverError
from autopar.solve.solver import Answer, call

_NO_RESTARTS = highs_pb2.HighsOptionsProto(bool_options={"mip_allow_restart": False})
"""Begun again each time that a tenth of the variables was fixed, before any branch is tried, the root takes half of the time, and its
bound stays where it was (seen: ortools 9.15; the first branch closes the gap)."""
_WATCH_S = 0.5


def solve_integer(
    model: model_pb2.ModelProto, *, gap: float, time_limit_s: float, interrupter: SolveInterrupter | None = None
) -> Answer:
    """What HiGHS finds to a relative gap.

    Args:
        interrupter: who asks, for `stop_integer`.

    Raises:
        KeyboardInterrupt: at once, and the process ends.
        SolverError: HiGHS says what is wrong, or its process ended, or who asks was interrupted before.
    """
    answer = _process(os.getpid()).ask(interrupter, model.SerializeToString(), gap, time_limit_s)
    return Answer.of(result_pb2.SolveResultProto.FromString(answer))


def stop_integer(interrupter: SolveInterrupter) -> None:
    """End the process if it works for who asks so, in another thread."""
    _process(os.getpid()).stop(interrupter)


class _Process:
    """Answers one question after the other; it starts with the first, and again with the first after one that was left."""

    def __init__(self, owner: int) -> None:
        self._owner = owner
        self._lock = threading.Lock()
        self._running: tuple[subprocess.Popen[bytes], Connection, Connection] | None = None
        self._asks: SolveInterrupter | None = None
        atexit.register(self._end)

    def ask(self, interrupter: SolveInterrupter | None, *question: object) -> bytes:
        with self._lock:
            self._asks = interrupter
            try:
                process, to, back = self._running = self._running or self._start()
                if interrupter is not None and interrupter.interrupted:  # `stop` looks for the process after that is set
                    raise SolverError("the solver HiGHS was interrupted before it began")
                try:
                    to.send(question)
                    is_found, answer = back.recv()
                except (EOFError, BrokenPipeError):
                    text = f"the process of the solver HiGHS ended while it worked, with exit code {process.wait()}"
                    raise SolverError(f"{text}; -9 is mostly for want of memory: plan where more of it is free") from None
            except BaseException:
                self._end()
                raise
            finally:
                self._asks = None
        if not is_found:
            raise SolverError(f"the solver HiGHS failed: {answer}")
        return answer  # type: ignore[no-any-return]

    def stop(self, interrupter: SolveInterrupter) -> None:
        if self._asks is interrupter and self._running is not None:
            self._running[0].kill()

    def _start(self) -> tuple[subprocess.Popen[bytes], Connection, Connection]:
        """In a session of its own, so that Ctrl-C at a terminal is not for it."""
        paths = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        command = [sys.executable, "-P", "-m", __name__, str(os.getpid())]
        process = subprocess.Popen(command, env=paths, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        assert process.stdin is not None and process.stdout is not None
        to, back = os.dup(process.stdin.fileno()), os.dup(process.stdout.fileno())
        process.stdin.close()
        process.stdout.close()
        return process, Connection(to, readable=False), Connection(back, writable=False)

    def _end(self) -> None:
        if self._running is None or os.getpid() != self._owner:
            return
        process, to, back = self._running
        self._running = None
        process.kill()
        to.close()
        back.close()
        process.wait()


@cache
def _process(owner: int) -> _Process:
    """That of a process: one that was forked needs its own."""
    return _Process(owner)


def _solved(model: bytes, gap: float, time_limit_s: float) -> bytes:
    parameters = mathopt.SolveParameters(
        relative_gap_tolerance=gap, time_limit=datetime.timedelta(seconds=time_limit_s), random_seed=1, highs=_NO_RESTARTS
    )
    answer: bytes = call(model_pb2.ModelProto.FromString(model), mathopt.SolverType.HIGHS, parameters).SerializeToString()
    return answer


def _end_with(parent: int) -> None:
    """End soon after the process that asks, which may have been killed, whatever HiGHS is at."""
    while os.getppid() == parent:
        time.sleep(_WATCH_S)
    os._exit(1)


def _serve() -> None:
    """The life of the process: answer until nobody asks."""
    threading.Thread(target=_end_with, args=[int(sys.argv[1])], daemon=True).start()
    questions, answers = Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    while True:
        try:
            question = questions.recv()
        except EOFError:
            return
        try:
            answer: tuple[bool, bytes | str] = (True, _solved(*question))
        except Exception as error:
            answer = (False, str(error))
        try:
            answers.send(answer)
        except BrokenPipeError:
            return


if __name__ == "__main__":
    _serve()
