"""compare.py: the table, what it refuses, what it says beside the scores."""

import copy
import json
import math
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from data_prep.errors import run_program
from fine_tuning.compare import main
from fine_tuning.results import Results, RunResult
from fine_tuning.run import main as fine_tune

IDENTITY = {
    "task": "classification",
    "files": {"train": "t1", "dev": "d1", "test": "e1"},
    "columns": ["text", "label"],
    "train_examples": None,
    "labels": ["bad", "good"],
    "model": {"hidden_size": 128},
    "weights": "w1",
    "tokenizer": {"sentencepiece.model": "s1"},
    "precision": "fp32",
    "epochs": 3,
}
EXAMPLES = {"train": 2000, "dev": 400, "test": 1000}
# Learning rate → seed → right answers in dev and test, of 400 and 1,000.
SCORES = {1e-5: {0: (200, 500), 1: (204, 490)}, 3e-5: {0: (320, 780), 1: (312, 800)}}


def write_results(
    folder: Path,
    changes: dict | None = None,
    train: int = 2000,
    scores: dict = SCORES,
    splits: int = 2,
    search_seeds: int | None = None,
) -> Path:
    """A folder as fine_tuning/run.py leaves it, by its own classes, that was asked for all rates with all seeds."""
    identity = copy.deepcopy(IDENTITY) | (changes or {})
    results = Results(folder, identity, "accuracy")
    arguments = {
        "task": identity["task"],
        "train": Path("my data/train.csv"),
        "data_dir": None,
        "output": folder,
    }
    arguments = {name: value if value is None else str(value) for name, value in arguments.items()}
    grid = {
        "learning_rate": [1e-5, 3e-5],
        "search_seeds": search_seeds,
        "seeds": sorted({seed for runs in scores.values() for seed in runs}),
    }
    results.write_settings({"arguments": arguments | {"epochs": 3} | grid, "start": f"run {folder.name}"})
    finished = []
    for rate, runs in scores.items():
        for seed, right in runs.items():
            values = {
                split: {"loss": 0.5, "accuracy": right[i] / EXAMPLES[split]}
                for i, split in enumerate(("dev", "test")[:splits])
            }
            finished.append(RunResult(rate, seed, 10, 0.4, values, 1.0))
            results.begin(rate, seed)
            results.finish(finished[-1], nn.Linear(1, 1))
    examples = {"start": f"run {folder.name}", "examples": EXAMPLES | {"train": train}}
    chosen = results.best_rate(finished, [0])
    seeds = grid["seeds"][:search_seeds]
    results.write_metrics(finished, chosen, seeds, examples | {"settings": identity})
    return folder


def compare(capsys, *arguments: object) -> tuple[int, str]:
    """Exit code, and what was printed, or the error."""
    code = run_program(main, [str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.err if code else captured.out


def rows(text: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"
    ]


def test_a_row_holds_the_numbers_of_its_folder(tmp_path, capsys):
    """In the given order: name, start, training examples, chosen rate and of how many, seeds, mean ± sample standard
    deviation and range on dev and test; a folder without test has a dash there, one seed no deviation."""
    first = write_results(tmp_path / "b[i]")
    one = {rate: {0: runs[0]} for rate, runs in SCORES.items()}
    second = write_results(tmp_path / "a", train=500, scores=one, splits=1)
    code, text = compare(capsys, first, second)
    assert code == 0
    dev, test = [320 / 400, 312 / 400], [0.78, 0.8]
    expected = [
        f"{statistics.mean(x):.4f} ± {statistics.stdev(x):.4f} ({min(x):.4f}–{max(x):.4f})"
        for x in (dev, test)
    ]
    header = ["folder", "start", "train examples", "learning rate", "seeds", "dev accuracy", "test accuracy"]
    head, _, *body = rows(text)
    assert head == header
    assert body == [
        ["b[i]", "run b[i]", "2,000", "3e-05 (of 2)", "2 (0, 1)", *expected],
        ["a", "run a", "500", "3e-05 (of 2)", "1 (0)", "0.8000", "–"],
    ]


def test_the_standard_error_of_a_score_is_said(tmp_path, capsys):
    """For dev and test the text has sqrt(p(1-p)/n) of the smallest and largest, and the number of examples."""
    better = {rate: dict.fromkeys(runs, (380, 950)) for rate, runs in SCORES.items()}
    folders = write_results(tmp_path / "a"), write_results(tmp_path / "b", scores=better)
    _, text = compare(capsys, *folders)
    for split, n, (p, q) in (("dev", 400, (0.79, 0.95)), ("test", 1000, (0.79, 0.95))):
        errors = sorted(math.sqrt(x * (1 - x) / n) for x in (p, q))
        assert re.search(rf"^{split}: {n:,} examples .* {errors[0]:.4f}–{errors[1]:.4f};", text, re.MULTILINE)


def test_json_has_the_same_numbers(tmp_path, capsys):
    """--output has every number unrounded, and makes the folder that it lies in; a perfect score has no standard error."""
    perfect = {rate: dict.fromkeys(runs, (400, 790)) for rate, runs in SCORES.items()}
    output = tmp_path / "new" / "comparison.json"
    code, text = compare(capsys, write_results(tmp_path / "a", scores=perfect), "--output", output)
    assert code == 0 and text.splitlines()[-1] == f"comparison: {output}"
    content = json.loads(output.read_text())
    row = content["rows"][0]
    assert (content["task"], content["metric"], row["seeds"]) == ("classification", "accuracy", [0, 1])
    assert (row["learning_rate"], row["learning_rates"], row["train_examples"]) == (1e-5, 2, 2000)
    assert row["scores"]["dev"] == {
        "mean": 1.0,
        "standard_deviation": 0.0,
        "minimum": 1.0,
        "maximum": 1.0,
        "examples": 400,
        "standard_error": None,
    }
    assert row["scores"]["test"]["standard_error"] == math.sqrt(0.79 * 0.21 / 1000)
    assert "dev: 400" not in text and "test: 1,000" in text


def test_other_settings_are_shown(tmp_path, capsys):
    """Settings that differ and have no column are said; what the start explains (weights, tokenizer, model) is not."""
    first = write_results(tmp_path / "a")
    files = IDENTITY["files"] | {"train": "t2"}
    changes = {
        "epochs": 10,
        "weights": "w2",
        "tokenizer": {},
        "model": {},
        "files": files,
        "train_examples": 500,
    }
    code, text = compare(capsys, first, write_results(tmp_path / "b", changes, train=500))
    assert code == 0
    notes = [line for line in text.splitlines() if "also" in line or "files" in line]
    assert notes == ["also different, in the order of the rows: epochs 3, 10", "the training files differ"]


def test_what_does_not_compare_is_refused(tmp_path, capsys):
    """Another task, dev file, test file, label column, or the same folder twice: one sentence with the folder, exit 2."""
    first = write_results(tmp_path / "first")
    files = IDENTITY["files"]
    for number, (changes, expected) in enumerate(
        (
            ({"task": "sst2"}, "the task is 'sst2', and 'classification' in"),
            ({"columns": ["text", "stars"]}, "the label column is 'stars'"),
            ({"files": files | {"dev": "d2"}}, "its dev file is not that of"),
            ({"files": files | {"test": "e2"}}, "its test file is not that of"),
        )
    ):
        other = write_results(tmp_path / f"other{number}", changes)
        code, error = compare(capsys, first, other)
        assert code == 2 and error.startswith(f"error: {other}: {expected}") and error.count("\n") == 1
    assert compare(capsys, first, first)[0] == 2


def test_an_unfinished_folder_names_the_command_that_finishes_it(tmp_path, capsys):
    """Without metrics.json, and with one of an earlier, smaller grid, the command of settings.json is said.

    A grid whose first seed chooses the learning rate is finished without the other rates' other seeds.
    """
    scores = {1e-5: {0: (200, 500)}, 3e-5: {0: (320, 780), 1: (312, 800)}}
    folder = write_results(tmp_path / "a", scores=scores)
    command = (
        "finish them: python fine_tuning/run.py --learning_rate 1e-05 3e-05 --seeds 0 1 --task classification "
        f"--train 'my data/train.csv' --output {folder} --epochs 3\n"
    )
    assert compare(capsys, folder) == (2, f"error: {folder}: 1 of its runs are not finished; {command}")
    (folder / "metrics.json").unlink()
    assert compare(capsys, folder) == (
        2,
        f"error: {folder}: its runs are not finished (no metrics.json); {command}",
    )
    code, text = compare(capsys, write_results(tmp_path / "b", scores=scores, search_seeds=1))
    assert code == 0 and rows(text)[2][4] == "2 (0, 1)"


def test_damaged_folders_are_refused(tmp_path, capsys):
    """No folder of results, garbage in its files, values of another kind, files of different runs: a sentence each."""
    good = write_results(tmp_path / "good")
    metrics = json.loads((good / "metrics.json").read_text())
    settings = json.loads((good / "settings.json").read_text())
    for name, content, expected in (
        ("metrics.json", "{", "it is not as fine_tuning/run.py writes it (Expecting"),
        ("metrics.json", "[]", "it is not as fine_tuning/run.py writes it (content: "),
        ("metrics.json", "NaN", "(NaN is not a JSON number)"),
        ("metrics.json", metrics | {"examples": {"dev": "4"}}, "(examples.dev: "),
        (
            "metrics.json",
            metrics | {"examples": {"train": 9, "test": 9}},
            "does not say accuracy and the number",
        ),
        (
            "metrics.json",
            metrics | {"dev": {"accuracy": {"mean": 1.0}}},
            "does not say accuracy and the number",
        ),
        ("metrics.json", metrics | {"settings": {}}, "is not of the runs in settings.json"),
        ("settings.json", "\ud800", "it is not as"),
        ("settings.json", settings | {"identity": {}}, "(identity.task: "),
    ):
        before = (good / name).read_bytes()
        text = content if isinstance(content, str) else json.dumps(content)
        (good / name).write_bytes(text.encode("utf-8", "surrogatepass"))
        code, error = compare(capsys, good)
        assert code == 2 and expected in error and str(good) in error and error.count("\n") == 1, error
        (good / name).write_bytes(before)
    code, error = compare(capsys, tmp_path)
    assert code == 2 and "there is no settings.json here" in error
    assert compare(capsys, good)[0] == 0
    assert compare(capsys, good, "--output", tmp_path)[0] == 2


def test_real_folders_compare(tmp_path, capsys):
    """Two runs of fine_tuning/run.py with other numbers of examples stand side by side, with the scores of metrics.json."""
    from corpora import SYLLABLES

    lines = [f"{SYLLABLES[i % 90]} {SYLLABLES[i % 7]},{'ab'[i % 2]}" for i in range(64)]
    for split in ("train", "dev"):
        (tmp_path / f"{split}.csv").write_text("\n".join(["text,label", *lines]) + "\n")
    (tmp_path / "text.txt").write_text("\n".join(SYLLABLES[:90]) + "\n")
    from data_prep.run import main as data_prep

    options = [
        "--input",
        str(tmp_path / "text.txt"),
        "--output",
        str(tmp_path / "tokenizer"),
        "--workers",
        "1",
    ]
    assert not data_prep(["tokenizer", *options, "--vocab_size", "45", "--eval_fraction", "0"])
    common = ["--train", str(tmp_path / "train.csv"), "--dev", str(tmp_path / "dev.csv"), "--epochs", "1"]
    common += ["--init_from", "random", "--model", "tiny", "--tokenizer", str(tmp_path / "tokenizer")]
    common += ["--learning_rate", "1e-3", "--max_length", "8", "--precision", "fp32"]
    assert not fine_tune([*common, "--output", str(tmp_path / "all")])
    assert not fine_tune([*common, "--output", str(tmp_path / "few"), "--train_examples", "32"])
    capsys.readouterr()
    code, text = compare(capsys, tmp_path / "all", tmp_path / "few")
    assert code == 0
    scores = [
        json.loads((tmp_path / name / "metrics.json").read_text())["dev"]["accuracy"]["mean"]
        for name in ("all", "few")
    ]
    assert rows(text)[2:] == [
        ["all", "random weights, tiny", "64", "0.001", "1 (0)", f"{scores[0]:.4f}"],
        ["few", "random weights, tiny", "32", "0.001", "1 (0)", f"{scores[1]:.4f}"],
    ]


def test_nothing_slow_is_imported():
    """The program needs no torch."""
    program = "import sys, fine_tuning.compare; print({'matplotlib', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("columns", [60, 200])
def test_a_terminal_folds_no_number(tmp_path, columns, monkeypatch, capsys):
    """In a narrow terminal cells are folded between numbers only."""
    folder = write_results(tmp_path / "a")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    code, text = compare(capsys, folder)
    assert code == 0
    assert all(number in text for number in ("0.7900 ± 0.0141", "(0.7800–0.8000)", "3e-05"))
