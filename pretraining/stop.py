"""The wish to stop early: a signal or a file, remembered until a step's end."""

import signal
from pathlib import Path

STOP_FILE = "STOP"
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopFlag:
    """Raised by SIGTERM, SIGUSR1, Ctrl-C, or a file named STOP in the run folder; the ranks agree on it between steps.

    A second Ctrl-C ends the process at once, without a checkpoint. Made before anything slow is imported, so that
    a signal during start-up is not lost; the run folder is told as soon as it is known.
    """

    def __init__(self, run_folder: Path | None = None):
        self._file = run_folder and run_folder / STOP_FILE
        self.reason: str | None = None
        for number in STOP_SIGNALS:
            signal.signal(number, self._catch)

    def _catch(self, number: int, _frame) -> None:
        if number == signal.SIGINT and self.reason == "SIGINT":
            raise KeyboardInterrupt
        self.reason = self.reason or signal.Signals(number).name

    def watch(self, run_folder: Path) -> None:
        """Look for the file in this folder."""
        self._file = run_folder / STOP_FILE

    def raised(self) -> bool:
        """Whether this process wants to stop."""
        if self.reason is None and self._file and self._file.exists():
            self.reason = f"the file {self._file}"
        return self.reason is not None

    def ignore(self) -> None:
        """How the run ends is settled: from its last save until Python's own end no signal changes anything."""
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def clear(self) -> None:
        """Remove the file, so that the next start does not stop at once."""
        try:
            self._file.unlink(missing_ok=True)
        except OSError as error:
            print(
                f"{self._file}: it could not be removed ({error.strerror}); remove it before the next start",
                flush=True,
            )
