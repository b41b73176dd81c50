"""Put the scores of several fine-tuning folders side by side.

    python fine_tuning/compare.py runs/reviews runs/baseline
    python fine_tuning/compare.py runs/reviews runs/baseline --output comparison.json

A row is a folder with its best learning rate, which was chosen on dev: mean ± sample standard deviation of the
score over the seeds (smallest–largest). Compared is what has the same task and the same dev and test files.
"""

import argparse
import json
import math
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from data_prep.errors import UserError, run_program
from data_prep.options import Help
from pretraining.plot import short_names, write_output

# As in fine_tuning/results.py, which imports torch: that would take longer than all that is done here.
SETTINGS = "settings.json"
METRICS = "metrics.json"
TRAIN, DEV = "train", "dev"
# Metrics that are the share of right answers, for which sqrt(p(1-p)/n) holds.
PROPORTIONS = ("accuracy",)
# Columns of a terminal that a row needs in one line, and folded.
UNFOLDED_WIDTH, FOLDED_WIDTH = 180, 100
# Settings that have a column of their own, or that the start tells.
_SHOWN = ("task", "files", "train_examples", "model", "weights", "tokenizer")


class _Content(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class _Arguments(_Content):
    learning_rate: list[float]
    seeds: list[int]
    search_seeds: int | None = None

    def runs(self, best_rate: float) -> set[tuple[float, int]]:
        """Learning rates and seeds of the grid, once the best rate is known."""
        number = self.search_seeds or len(self.seeds)
        searched = {(rate, seed) for rate in self.learning_rate for seed in self.seeds[:number]}
        return searched | {(best_rate, seed) for seed in self.seeds[number:]}


class _Identity(_Content):
    task: str
    files: dict[str, str]
    columns: list[str]


class _Settings(_Content):
    arguments: _Arguments
    identity: _Identity


class _Run(_Content):
    learning_rate: float
    seed: int


class _Best(_Run):
    scores: dict[str, dict[str, float | None]]


class Summary(_Content):
    """A score over the seeds of a learning rate; None where it is not a finite number, or needs two seeds."""

    mean: float | None
    standard_deviation: float | None
    minimum: float | None
    maximum: float | None


class _Metrics(_Content):
    start: str
    metric: str
    examples: dict[str, int]
    settings: dict[str, Any]
    best: _Best
    runs: list[_Run]


@dataclass(frozen=True)
class Entry:
    """A fine-tuning folder.

    Attributes:
        folder: as given.
        start: the weights that its runs started from.
        metric: the score by which the learning rate was chosen.
        identity: what its runs share.
        examples: split → how many.
        learning_rate: the chosen one.
        learning_rates: how many it was chosen from.
        seeds: of the runs with the chosen one.
        scores: split → the metric over these runs.
    """

    folder: Path
    start: str
    metric: str
    identity: dict[str, Any]
    examples: dict[str, int]
    learning_rate: float
    learning_rates: int
    seeds: list[int]
    scores: dict[str, Summary]

    def standard_error(self, split: str) -> float | None:
        """Of one score on these examples: sqrt(p(1-p)/n).

        None where the metric is no proportion, and for 0 and 1, where the formula does not hold.
        """
        mean = self.scores[split].mean
        if self.metric not in PROPORTIONS or mean is None or not 0 < mean < 1:
            return None
        return math.sqrt(mean * (1 - mean) / self.examples[split])


def main(argv: list[str] | None = None) -> int:
    """Compare; returns the exit code."""
    parser = argparse.ArgumentParser(prog="fine_tuning/compare.py", description=__doc__, formatter_class=Help)
    add = parser.add_argument
    add("folders", nargs="+", type=Path, metavar="RESULTS", help="--output folders of fine_tuning/run.py")
    add("--output", type=Path, metavar="FILE", help="write the comparison as JSON too")
    arguments = parser.parse_args(argv)
    names = short_names(arguments.folders)
    entries = [read_entry(folder) for folder in arguments.folders]
    check_comparable(entries)
    print_table(entries, names)
    for note in notes(entries):
        print(note)
    if arguments.output:
        text = json.dumps(to_json(entries), indent=1, ensure_ascii=False, allow_nan=False)
        write_output(arguments.output, f"{text}\n".encode())
        print(f"comparison: {arguments.output}")
    return 0


_C = TypeVar("_C", bound=_Content)


def _read(path: Path, kind: type[_C], advice: str) -> _C:
    try:
        return kind.model_validate(json.loads(path.read_bytes(), parse_constant=_refuse_constant))
    except ValidationError as error:
        first = error.errors()[0]
        problem = f"{'.'.join(map(str, first['loc'])) or 'content'}: {first['msg']}"
    except (OSError, ValueError, RecursionError) as error:
        problem = str(error)
    raise UserError(f"{path}: it is not as fine_tuning/run.py writes it ({problem}); {advice}") from None


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def read_entry(folder: Path) -> Entry:
    """What a fine-tuning folder says. Raises UserError if it is none, damaged, or not finished."""
    if not os.path.isfile(folder / SETTINGS):
        raise UserError(
            f"{folder}: there is no {SETTINGS} here; give a folder that fine_tuning/run.py wrote (its --output)"
        )
    settings = _read(folder / SETTINGS, _Settings, "run the command that wrote it again")
    command = _command(settings.arguments)
    if not os.path.isfile(folder / METRICS):
        raise UserError(f"{folder}: its runs are not finished (no {METRICS}); finish them: {command}")
    metrics = _read(folder / METRICS, _Metrics, f"write it again: {command}")
    missing = settings.arguments.runs(metrics.best.learning_rate) - {
        (run.learning_rate, run.seed) for run in metrics.runs
    }
    if missing:
        raise UserError(f"{folder}: {len(missing)} of its runs are not finished; finish them: {command}")
    identity = settings.identity.model_dump()
    if metrics.settings != identity:
        raise UserError(f"{folder}: {METRICS} is not of the runs in {SETTINGS}; write it again: {command}")
    return _entry(folder, metrics, identity, command)


def _entry(folder: Path, metrics: _Metrics, identity: dict[str, Any], command: str) -> Entry:
    rate = metrics.best.learning_rate
    try:
        scores = {
            split: Summary.model_validate(metrics.model_extra[split][metrics.metric])
            for split in metrics.best.scores
        }
    except (KeyError, TypeError, ValidationError):
        scores = {}
    if DEV not in scores or any(metrics.examples.get(split, 0) < 1 for split in (TRAIN, *scores)):
        raise UserError(
            f"{folder / METRICS}: it does not say {metrics.metric} and the number of examples of each split; "
            f"write it again: {command}"
        )
    return Entry(
        folder=folder,
        start=metrics.start,
        metric=metrics.metric,
        identity=identity,
        examples=metrics.examples,
        learning_rate=rate,
        learning_rates=len({run.learning_rate for run in metrics.runs}),
        seeds=[run.seed for run in metrics.runs if run.learning_rate == rate],
        scores=scores,
    )


def _command(arguments: _Arguments) -> str:
    """The command that made a folder, with every option, as defaults may have changed since."""
    words = ["python", "fine_tuning/run.py"]
    for name, value in arguments.model_dump().items():
        if value is None or value is False:
            continue
        values = [] if value is True else value if isinstance(value, list) else [value]
        words += [f"--{name}", *map(str, values)]
    return shlex.join(words)


def check_comparable(entries: Sequence[Entry]) -> None:
    """Raises UserError for the first entry whose scores do not compare with those of the ones before it."""
    files: dict[str, tuple[str, Entry]] = {}
    first = entries[0]
    for entry in entries:
        for what, value in (
            ("the task", lambda e: e.identity["task"]),
            ("the metric", lambda e: e.metric),
            ("the label column", lambda e: e.identity["columns"][-1]),
        ):
            if value(entry) != value(first):
                raise UserError(
                    f"{entry.folder}: {what} is {value(entry)!r}, and {value(first)!r} in {first.folder}: their scores "
                    "do not compare; leave one of them out"
                )
        for split in entry.scores:
            digest = entry.identity["files"].get(split)
            known, other = files.setdefault(split, (digest, entry))
            if digest != known:
                raise UserError(
                    f"{entry.folder}: its {split} file is not that of {other.folder}: their scores do not compare; "
                    "leave one of them out, or fine-tune again with the same file"
                )


def _splits(entries: Sequence[Entry]) -> list[str]:
    return list(dict.fromkeys(split for entry in entries for split in entry.scores))


def print_table(entries: Sequence[Entry], names: Sequence[str]) -> None:
    """Print a row per entry, as a Markdown table; in a terminal that is too narrow for it cells are folded."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else UNFOLDED_WIDTH
    fold = " " if width >= UNFOLDED_WIDTH else "\n"
    splits = _splits(entries)
    table = Table(box=box.MARKDOWN, header_style="")
    for name in ("folder", "start"):
        table.add_column(name, overflow="fold")
    for name in ("train examples", "learning rate", "seeds", *(f"{x} {entries[0].metric}" for x in splits)):
        table.add_column(name.replace(" ", fold), justify="right", no_wrap=True)
    for entry, name in zip(entries, names, strict=True):
        scores = [_score(entry.scores.get(split)) for split in splits]
        cells = [f"{entry.examples[TRAIN]:,}", _rate(entry), _seeds(entry), *scores]
        table.add_row(name, entry.start, *(cell.replace(" (", f"{fold}(") for cell in cells))
    console = Console(width=1000, markup=False, highlight=False, emoji=False)
    if fold != " ":
        console.width = max(width, FOLDED_WIDTH)
    with console.capture() as captured:
        console.print(table)
    print("\n".join(line for line in captured.get().splitlines() if line.strip()))


def _rate(entry: Entry) -> str:
    chosen_from = f" (of {entry.learning_rates})" if entry.learning_rates > 1 else ""
    return f"{entry.learning_rate:g}{chosen_from}"


def _seeds(entry: Entry) -> str:
    listed = ", ".join(map(str, entry.seeds[:5]))
    return f"{len(entry.seeds)} ({listed}{', …' if len(entry.seeds) > 5 else ''})"


def _score(summary: Summary | None) -> str:
    if summary is None or summary.mean is None:
        return "–"
    if None in (summary.standard_deviation, summary.minimum, summary.maximum):
        return f"{summary.mean:.4f}"
    spread = f"({summary.minimum:.4f}–{summary.maximum:.4f})"
    return f"{summary.mean:.4f} ± {summary.standard_deviation:.4f} {spread}"


def notes(entries: Sequence[Entry]) -> Iterator[str]:
    """What a reader of the table must know."""
    for split in _splits(entries):
        rows = [entry for entry in entries if split in entry.scores]
        errors = [error for entry in rows if (error := entry.standard_error(split)) is not None]
        if errors:
            low, high = f"{min(errors):.4f}", f"{max(errors):.4f}"
            yield (
                f"{split}: {rows[0].examples[split]:,} examples give one score p a standard error √(p(1−p)/n) of "
                f"{low if low == high else f'{low}–{high}'}; differences of that size may be chance"
            )
    for name, values in differing_settings(entries).items():
        if name == "train_file":
            yield "the training files differ"
        else:
            yield f"also different, in the order of the rows: {name} {', '.join(map(_plain, values))}"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def differing_settings(entries: Sequence[Entry]) -> dict[str, list[Any]]:
    """Setting → its value in each entry, for settings that differ and have no column in the table."""
    rows = [
        {name: value for name, value in entry.identity.items() if name not in _SHOWN}
        | {"train_file": entry.identity["files"].get(TRAIN)}
        for entry in entries
    ]
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    return {name: values for name, values in columns.items() if any(value != values[0] for value in values)}


def to_json(entries: Sequence[Entry]) -> dict[str, Any]:
    """The comparison in plain values."""
    return {
        "task": entries[0].identity["task"],
        "metric": entries[0].metric,
        "rows": [
            {
                "folder": str(entry.folder),
                "start": entry.start,
                "train_examples": entry.examples[TRAIN],
                "learning_rate": entry.learning_rate,
                "learning_rates": entry.learning_rates,
                "seeds": entry.seeds,
                "scores": {
                    split: summary.model_dump()
                    | {"examples": entry.examples[split], "standard_error": entry.standard_error(split)}
                    for split, summary in entry.scores.items()
                },
            }
            for entry in entries
        ],
        "differing_settings": differing_settings(entries),
    }


if __name__ == "__main__":
    sys.exit(run_program(main))
