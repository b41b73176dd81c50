"""What a run says about itself: TensorBoard, metrics.jsonl, the progress line and status.json.

The x-axis is always the step; samples and tokens stand beside it. Times are not part of what a resumed run
repeats, everything else is.
"""

import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from data_prep.shards import write_atomically

if TYPE_CHECKING:
    import torch

METRICS = "metrics.jsonl"
STATUS = "status.json"
# A log file gets a line every so many seconds; a terminal is redrawn more often.
LOG_SECONDS = 10.0
TERMINAL_SECONDS = 0.2


class Recorder:
    """Writes the metrics of a run; only rank 0 makes one.

    Args:
        folder: the run folder.
        resumed_step: step from which the run goes on; what a killed run wrote beyond it is taken back. None if it
            begins: whatever is there is of a run that died before its first checkpoint.
    """

    def __init__(self, folder: Path, resumed_step: int | None):
        self._folder = folder
        self._open(resumed_step)

    def _open(self, resumed_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        path = self._folder / METRICS
        _keep_until(path, -1 if resumed_step is None else resumed_step)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (open as long as the run)
        purge = 0 if resumed_step is None else resumed_step + 1
        self._writer = SummaryWriter(str(self._folder), purge_step=purge)

    def go_back(self, step: int) -> None:
        """Take back what was recorded beyond a step: the curves go on from there."""
        self.close()
        self._open(step)

    def record(
        self, step: int, values: dict[str, float], histograms: "dict[str, torch.Tensor] | None" = None
    ) -> None:
        """Write one line and one point of each curve, and histograms; "/" in a name groups curves in TensorBoard.

        What is not finite (the gradient norm of a skipped step) is null in the line: JSON has no such number.
        """
        line = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step} | line) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        for name, numbers in (histograms or {}).items():
            numbers = numbers[
                numbers.isfinite()
            ]  # TensorBoard takes no others, which weights that diverge have
            if len(numbers):
                self._writer.add_histogram(name, numbers, step)

    def note(self, name: str, text: str, step: int) -> None:
        """A text beside the curves."""
        self._writer.add_text(name, text, step)

    def flush(self) -> None:
        """Make what was recorded durable: called before a checkpoint is published."""
        self._writer.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the files."""
        self._writer.close()
        self._file.close()


def _keep_until(path: Path, step: int) -> None:
    """Drop the lines beyond `step`, and half a line that a kill left."""
    if not path.is_file():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if _step_of(line) <= step]
    damaged = sum(_step_of(line) == math.inf for line in lines[:-1])  # a kill may cut the last one
    if damaged:
        print(f"{path}: {damaged} damaged lines were left out; the run itself is not touched by that")
    write_atomically(path, b"".join(kept))


def _step_of(line: bytes) -> float:
    """The step of a line of metrics.jsonl, infinity if it is not a whole one."""
    try:
        step = json.loads(line)["step"]
        return step if line.endswith(b"\n") and isinstance(step, int) else math.inf
    except (ValueError, TypeError, KeyError):
        return math.inf


class ProgressLine:
    """One line about a run's progress: redrawn in a terminal, printed now and then into a log.

    Args:
        total_steps: steps of the whole run.
        first_step: step at which this process began.
    """

    def __init__(self, total_steps: int, first_step: int):
        self._total = total_steps
        self._first = first_step
        self._started = time.monotonic()
        self._shown = 0.0
        self._loss: float | None = None
        self._tokens_per_second: float | None = None
        self._terminal = sys.stdout.isatty()

    def update(
        self, step: int, part: float, *, loss: float | None = None, tokens_per_second: float | None = None
    ) -> None:
        """Show the step that is under way, how much of it is done (0 to 1), and the newest numbers."""
        self._loss = self._loss if loss is None else loss
        self._tokens_per_second = self._tokens_per_second if tokens_per_second is None else tokens_per_second
        now = time.monotonic()
        if now - self._shown >= (TERMINAL_SECONDS if self._terminal else LOG_SECONDS):
            self._shown = now
            self._print(step, part, now)

    def _print(self, step: int, part: float, now: float) -> None:
        done = step + part
        text = f"step {step:,}/{self._total:,}"
        if part:
            text += f" ({part:.0%} of the next)"
        if self._loss is not None:
            text += f"  loss {self._loss:.4f}"
        if self._tokens_per_second is not None:
            text += f"  {self._tokens_per_second:,.0f} tokens/s"
        if done > self._first:
            left = (now - self._started) / (done - self._first) * (self._total - done)
            text += f"  {_duration(left)} left"
        print(f"\r\x1b[2K{text}" if self._terminal else text, end="" if self._terminal else "\n", flush=True)

    def say(self, text: str) -> None:
        """Print a line of its own."""
        print(f"\r\x1b[2K{text}" if self._terminal else text, flush=True)


def _duration(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"


def write_status(
    folder: Path, state: str, reason: str, step: int, skipped_ranges: Sequence[tuple[int, int]] = ()
) -> None:
    """Write status.json, by which scripts decide what to do next: launchers do not pass exit codes on.

    Args:
        folder: the run folder.
        state: "running", "finished", "stopped" or "failed".
        reason: one sentence.
        step: the step of the last checkpoint, or the current one.
        skipped_ranges: half-open ranges of positions in the data that the run leaves out after trouble.
    """
    content = {"state": state, "reason": reason, "step": step, "skipped_ranges": list(skipped_ranges)}
    content["time"] = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    write_atomically(folder / STATUS, (json.dumps(content) + "\n").encode())
