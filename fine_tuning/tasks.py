"""The tasks by name: which files and columns hold what, and which parts solve them. A new task is a row here."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from data_prep.errors import UserError

# Own data in one file per split, which the options describe.
OWN_DATA = "classification"


@dataclass(frozen=True)
class Task:
    """What is read and how it is solved.

    Attributes:
        problem: the key of features.FEATURES and heads.HEADS.
        files: split → file; "train" and "dev", and "test" where its labels are known.
        text_columns: names of the columns that hold the text.
        label_column: name of the column that holds the label.
        metrics: names in metrics.METRICS; the first chooses among the runs.
        quoted: whether a quotation mark in CSV and TSV encloses a field (else it is a character like others).
    """

    problem: str
    files: Mapping[str, Path]
    text_columns: tuple[str, ...]
    label_column: str
    metrics: tuple[str, ...] = ("accuracy",)
    quoted: bool = True


TASKS = {
    # GLUE (Wang et al. 2019); its test.tsv has no labels. Sentences hold lone quotation marks.
    "sst2": Task(
        problem="classification",
        files={"train": Path("train.tsv"), "dev": Path("dev.tsv")},
        text_columns=("sentence",),
        label_column="label",
        quoted=False,
    ),
}


def task_of(arguments: argparse.Namespace) -> Task:
    """The task that the command line asks for, with the paths of its files.

    Raises UserError where options are missing or belong to the other way of naming data.
    """
    own = {"--train": arguments.train, "--dev": arguments.dev, "--test": arguments.test}
    columns = {"--text_column": arguments.text_column, "--label_column": arguments.label_column}
    if arguments.task != OWN_DATA:
        return _named_task(arguments, {name: value for name, value in (own | columns).items() if value})
    missing = [name for name in ("--train", "--dev") if own[name] is None]
    if missing or arguments.data_dir is not None:
        wanted = f"give {' and '.join(missing)}" if missing else "leave --data_dir out"
        raise UserError(f"--task {OWN_DATA} reads the files named by --train, --dev and --test: {wanted}")
    return Task(
        problem="classification",
        files={name.removeprefix("--"): path for name, path in own.items() if path is not None},
        text_columns=(arguments.text_column or "text",),
        label_column=arguments.label_column or "label",
    )


def _named_task(arguments: argparse.Namespace, superfluous: Mapping[str, object]) -> Task:
    if superfluous:
        raise UserError(
            f"--task {arguments.task} knows its files and columns: leave {', '.join(superfluous)} out, "
            f"or describe your own data with --task {OWN_DATA}"
        )
    if arguments.data_dir is None:
        raise UserError(f"--task {arguments.task} needs --data_dir, the folder with its files")
    task = TASKS[arguments.task]
    files = {split: arguments.data_dir / name for split, name in task.files.items()}
    return Task(**(vars(task) | {"files": files}))
