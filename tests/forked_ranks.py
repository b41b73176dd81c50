"""Runs of the training program, or of cases of a test, whose ranks are forked from a process that has imported all.

Starting Python, torch and DeepSpeed takes several seconds of a processor for each rank; a fork takes none. The
ranks are real processes, joined through RANK, WORLD_SIZE and the rest, and can be killed like any other.
"""

import contextlib
import functools
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path

import pytest

from data_prep.errors import run_program

CONTEXT = multiprocessing.get_context("forkserver")


@functools.cache
def start_server() -> None:
    """Start the process that the ranks are forked from."""
    CONTEXT.set_forkserver_preload(["forked_ranks_imports"])
    with pytest.MonkeyPatch.context() as patch:
        # The server is told this process's sys.path, but Python 3.11 does not use it.
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        patch.setenv("OMP_NUM_THREADS", "1")
        forkserver.ensure_running()


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_rank(
    argv: list[str],
    place: dict[str, str],
    log: str,
    prepare: Callable[[], object] | None,
    program: Callable[[list[str]], int | None] | None,
) -> None:
    """One rank: its output goes to a file, its exit code is the program's."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.environ.update(place)
    if prepare:
        prepare()
    from pretraining.run import main

    code = run_program(program or main, argv)
    sys.stdout.flush()
    os._exit(code)


class Ranks:
    """Ranks of a program that have been started.

    Args:
        argv: of the program.
        count: of ranks.
        logs: folder for what they print.
        prepare: called in each rank before the program, with RANK in its environment; it can be pickled.
        program: its main function; None for `pretraining/run.py`.
    """

    def __init__(
        self,
        argv: list[str],
        count: int,
        logs: Path,
        prepare: Callable[[], object] | None = None,
        program: Callable[[list[str]], int | None] | None = None,
    ):
        logs.mkdir(parents=True, exist_ok=True)
        self.logs = [logs / f"rank-{rank}.log" for rank in range(count)]
        common = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        start_server()
        self.processes = []
        for rank, log in enumerate(self.logs):
            place = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            arguments = argv, place, str(log), prepare, program
            process = CONTEXT.Process(target=run_rank, args=arguments, daemon=True)
            process.start()
            self.processes.append(process)

    def signal_when(
        self, condition: Callable[[], object], number: int, ranks: list[int] | None = None
    ) -> None:
        """Send a signal to the ranks (default: all) as soon as the condition holds."""
        deadline = time.monotonic() + 200
        while not condition():
            assert self.processes[0].exitcode is None and time.monotonic() < deadline, self.printed()
            time.sleep(0.001)
        for rank in ranks if ranks is not None else range(len(self.processes)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, number)

    def wait(self) -> list[int]:
        """The exit codes, minus the signal's number where one ended a rank."""
        for process in self.processes:
            process.join(timeout=200)
        return [process.exitcode for process in self.processes]

    def printed(self) -> str:
        """What all ranks have printed so far."""
        return "".join(log.read_text() for log in self.logs if log.exists())


def run(argv: list[str], count: int, logs: Path, prepare=None, program=None) -> str:
    """Run to the end and return what was printed; every exit code must be 0. The arguments are those of Ranks."""
    ranks = Ranks(argv, count, logs, prepare, program)
    codes = ranks.wait()
    assert codes == [0] * count, ranks.printed()[-3000:]
    return ranks.printed()
