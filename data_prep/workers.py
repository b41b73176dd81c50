"""A local pool that runs the tasks of a stage, with a progress bar, and a lock on the work folder."""

import fcntl
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from data_prep.errors import UserError


def progress_bar(total: int, unit: str, description: str) -> tqdm:
    """A bar on stderr; a log file gets a line every 15 seconds instead of a stream of them."""
    every = 0.2 if sys.stderr.isatty() else 15
    scale = unit == "B"
    return tqdm(
        total=total,
        unit=unit,
        unit_scale=scale,
        desc=description,
        mininterval=every,
        file=sys.stderr,
        leave=True,
    )


def run_tasks(
    function: Callable, tasks: Sequence[tuple], workers: int, bar: tqdm, amount: Callable[[object], int] = int
) -> Iterator:
    """Yield `function(*task)` of every task as it is done; results come in no particular order.

    Args:
        function: a module-level function.
        tasks: its arguments.
        workers: processes; with 1 the tasks run in this process.
        bar: moves by `amount(result)`.
    Raises:
        UserError: of a task, or if a worker was killed from outside.
    """
    with bar:
        if workers == 1 or len(tasks) <= 1:
            for task in tasks:
                result = function(*task)
                bar.update(amount(result))
                yield result
            return
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(workers, len(tasks)), context, initializer=_die_with_parent) as pool:
            try:
                with _workers_ignore_interrupts():
                    futures = [pool.submit(function, *task) for task in tasks]
                for future in as_completed(futures):
                    result = future.result()
                    bar.update(amount(result))
                    yield result
            except BrokenProcessPool:
                raise UserError(
                    "a worker process was killed (out of memory?); what is finished is kept: run the same command "
                    "again, with fewer --workers or a smaller --bucket_mb"
                ) from None
            finally:
                pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _workers_ignore_interrupts() -> Iterator[None]:
    """Ctrl-C reaches the whole group; the parent alone answers it, once the tasks at work are done and kept.

    Processes that start meanwhile inherit the blocked signal, so it cannot catch one during its imports; the
    parent gets a signal that came meanwhile as soon as it is unblocked.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _die_with_parent() -> None:
    """End a worker when its parent is gone: a killed command must not leave processes that go on writing."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def work_lock(folder: Path, shared: bool) -> Iterator[None]:
    """Hold the lock of a work folder: one whole command, or any number of array elements, at a time.

    Raises:
        UserError: somebody else is at work there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a") as file:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{folder}: another command is working here; wait for it or choose another --output"
            ) from None
        yield
