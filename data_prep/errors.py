"""The one error that users see: a sentence and exit code 2, never a traceback."""

import os
import sys
from collections.abc import Callable


class UserError(Exception):
    """Bad input. The message is one sentence: which file, line or key, what was expected, what to do."""


def run_program(main: Callable[[list[str] | None], int | None], argv: list[str] | None = None) -> int:
    """Run a program's `main` and return its exit code: 2 for bad input, 130 for Ctrl-C.

    A closed pipe (`… | head`) ends the program quietly, as it does for other command-line tools.
    """
    try:
        return main(argv) or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Python flushes stdout at exit and would complain again about the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
