"""plot.py: what is read of a run, what the picture shows, its bytes, bad input."""

import io
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_prep.errors import run_program
from pretraining.metrics import METRICS, Recorder
from pretraining.plot import COLOURS, Run, draw, main, read_run, render, short_names

VOCAB_SIZE = 8000
TOKENS_PER_STEP = 1000


def loss_at(step: int) -> float:
    """Falls from ln(vocabulary) to 2."""
    return 2 + (math.log(VOCAB_SIZE) - 2) * math.exp(-step / 200)


def record(folder: Path, steps: range, resumed: int = 0, shift: float = 0.0, held_out: int = 50) -> Path:
    """A run folder as a trainer leaves it that logs in these steps and evaluates every `held_out` steps."""
    folder.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(folder, resumed)
    for step in steps:
        values = {"train/masked_lm_loss": loss_at(step) + shift, "train/masked_lm_accuracy": 0.1}
        progress = {"progress/tokens": step * TOKENS_PER_STEP, "progress/samples": step * 8}
        recorder.record(step, values | progress | {"optimizer/gradient_norm": math.inf})
        if held_out and step % held_out == 0:
            recorder.record(step, {"eval/masked_lm_loss": loss_at(step) + shift - 0.1})
    recorder.close()
    (folder / "settings.json").write_text(json.dumps({"model": {"vocab_size": VOCAB_SIZE}}))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run of 400 steps, logged every 10 and evaluated every 50."""
    return record(tmp_path_factory.mktemp("plot") / "base", range(10, 401, 10))


def read(folder: Path, quantity: str = "masked_lm_loss", x: str = "steps") -> Run:
    return read_run(folder, folder.name, quantity, x)


def write_lines(folder: Path, lines: list[dict]) -> Path:
    folder.mkdir()
    (folder / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


# What is read


def test_curves_are_what_was_recorded(folder):
    """Training and held-out values come back at their steps, exactly; the vocabulary is that of settings.json."""
    run = read(folder)
    assert run.train.x.tolist() == list(range(10, 401, 10))
    assert run.train.y.tolist() == [loss_at(step) for step in range(10, 401, 10)]
    assert run.held_out.x.tolist() == list(range(50, 401, 50))
    assert run.held_out.y.tolist() == [loss_at(step) - 0.1 for step in range(50, 401, 50)]
    assert run.vocab_size == VOCAB_SIZE


def test_evaluations_stand_at_the_tokens_of_their_step(tmp_path):
    """Tokens and samples of an evaluation between, before and behind logged steps are interpolated."""
    lines = [
        {"step": 5, "eval/masked_lm_loss": 8.0},
        {"step": 10, "train/masked_lm_loss": 7.5, "progress/tokens": 1000, "progress/samples": 80},
        {"step": 15, "eval/masked_lm_loss": 7.0},
        {"step": 20, "train/masked_lm_loss": 6.5, "progress/tokens": 3000, "progress/samples": 160},
        {"step": 25, "eval/masked_lm_loss": 6.0},
    ]
    folder = write_lines(tmp_path / "r", lines)
    assert read(folder, x="tokens").held_out.x.tolist() == [500, 2000, 3750]
    assert read(folder, x="tokens").train.x.tolist() == [1000, 3000]
    assert read(folder, x="samples").held_out.x.tolist() == [40, 120, 200]


def test_a_resumed_run_is_one_line(tmp_path):
    """Of a run that was killed at 300 and resumed at 200, the curve has each step once, with the later values.

    It holds also where the earlier part was put back into the file, and with half a line at its end.
    """
    folder = record(tmp_path / "r", range(10, 301, 10))
    killed = (folder / METRICS).read_bytes()
    record(folder, range(210, 401, 20), resumed=200, shift=1.0)
    resumed = (folder / METRICS).read_bytes()
    steps = [*range(10, 201, 10), *range(210, 401, 20)]
    held_out = [50, 100, 150, 200, 250, 350]
    for content in (resumed, killed + resumed[resumed.index(b'{"step": 210') :], resumed + b'{"step": 4'):
        (folder / METRICS).write_bytes(content)
        run = read(folder)
        assert run.train.x.tolist() == steps
        assert run.train.y == pytest.approx([loss_at(x) + (x > 200) for x in steps])
        assert run.held_out.x.tolist() == held_out
        assert run.held_out.y == pytest.approx([loss_at(x) - 0.1 + (x > 200) for x in held_out])


def test_what_is_not_finite_is_left_out_and_whole_names_are_taken(folder):
    """A null is no point; a name with a group, like speed/…, is a curve of its own."""
    lines = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    assert all(line["optimizer/gradient_norm"] is None for line in lines if "progress/tokens" in line)
    samples = read(folder, "progress/samples")
    assert samples.train.y.tolist() == [step * 8 for step in range(10, 401, 10)] and not len(samples.held_out)


def test_long_curves_are_thinned_by_means(tmp_path):
    """A thinned curve has the points asked for, each the mean of neighbours, and the same mean altogether."""
    lines = [{"step": step, "train/masked_lm_loss": float(step)} for step in range(1, 1001)]
    curve = read(write_lines(tmp_path / "r", lines)).train
    thin = curve.thinned(100)
    assert thin.x.tolist() == thin.y.tolist() == [5.5 + 10 * i for i in range(100)]
    assert len(curve.thinned(300)) == 300 and curve.thinned(1000) is curve


def test_names_tell_folders_apart(tmp_path, monkeypatch):
    """A name is the last part of a path, or as many parts as differ; a dot is the folder that it stands for."""
    assert short_names([Path("runs/a"), Path("x/b/")]) == ["a", "b"]
    assert short_names([Path("runs/a/1"), Path("runs/b/1")]) == ["a/1", "b/1"]
    monkeypatch.chdir(tmp_path)
    assert short_names([Path(".")]) == [tmp_path.name]


# What is shown


def legend(figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].get_legend().get_texts()]


def test_the_picture_shows_both_curves_and_the_last_held_out_value(folder, tmp_path):
    """Each run has its colour, a light training line, a held-out line with a mark on its last point, and a legend row."""
    other = record(tmp_path / "_$\\bad$", range(10, 201, 10), shift=0.5)
    figure = draw([read(folder), read(other)], "masked_lm_loss", "steps", "$\\nonsense")
    lines = figure.axes[0].lines[:4]
    assert [line.get_color() for line in lines] == [COLOURS[0], COLOURS[0], COLOURS[1], COLOURS[1]]
    assert lines[1].get_xdata().tolist() == list(range(50, 401, 50))
    assert lines[0].get_alpha() < 0.5 < lines[1].get_linewidth() / 2 and lines[0].get_linewidth() <= 1
    assert len(lines[1].get_xdata()) - 1 in lines[1].get_markevery()
    assert legend(figure) == [f"base   {loss_at(400) - 0.1:#.4g}", f"_$\\bad$   {loss_at(200) + 0.4:#.4g}"]
    assert render([read(folder), read(other)], "masked_lm_loss", "steps", "$\\nonsense")


def test_guessing_is_drawn_where_it_does_not_squash_the_curve(folder, tmp_path):
    """ln(vocabulary) is a dashed line if the held-out curve began near it, and absent if it lies far above.

    Neither a steep beginning nor a single outlier of the training loss squashes the held-out curve.
    """

    def dashed(path: Path) -> list[float]:
        figure = draw([read(path)], "masked_lm_loss", "steps")
        low, high = figure.axes[0].get_ylim()
        held_out = read(path).held_out.y
        assert low < held_out.min() and held_out.max() < high
        assert held_out.max() - held_out.min() > 0.45 * (high - low)
        return [line.get_ydata()[0] for line in figure.axes[0].lines if line.is_dashed()]

    assert dashed(folder) == [math.log(VOCAB_SIZE)]
    steep = [1, 2, 3, 4, 200]
    late = [
        {"step": i, "train/masked_lm_loss": math.log(VOCAB_SIZE) if i in steep else 2.5}
        for i in range(1, 451)
    ]
    late += [{"step": 50 * i, "eval/masked_lm_loss": 3 - i / 10} for i in range(1, 10)]
    (
        write_lines(tmp_path / "late", sorted(late, key=lambda line: line["step"])) / "settings.json"
    ).write_text((folder / "settings.json").read_text())
    assert dashed(tmp_path / "late") == []


def test_a_run_without_evaluation_is_drawn_by_its_training(tmp_path):
    """Without held-out values the training line is the clear one, and no value stands behind the name."""
    run = read(record(tmp_path / "r", range(10, 101, 10), held_out=0))
    figure = draw([run], "masked_lm_loss", "steps")
    assert figure.axes[0].lines[0].get_alpha() is None and legend(figure) == ["r"]
    assert render(
        [read(write_lines(tmp_path / "one", [{"step": 1, "train/loss": 2.0}]), "loss")], "loss", "steps"
    )


# The file


def noisy(folder: Path, seed: int) -> Path:
    draws, height = np.random.default_rng(seed), seed / 2
    lines = []
    for step in range(10, 30_001, 10):
        progress = {"progress/tokens": step * TOKENS_PER_STEP}
        lines.append(
            {"step": step, "train/masked_lm_loss": height + loss_at(step / 20) + draws.normal()} | progress
        )
        if step % 100 == 0:
            lines.append(
                {"step": step, "eval/masked_lm_loss": height + loss_at(step / 20) + draws.normal() / 50}
            )
    return write_lines(folder, lines)


def test_the_file_is_small_and_the_same_each_time(tmp_path, capsys):
    """Four long noisy runs make a PNG of 900×500 below 60 kB without dates, in a folder that is made, byte for byte the
    same in another process whose user has a matplotlibrc; the held-out colour of each run is in it."""
    runs = [str(noisy(tmp_path / f"run{i}", i)) for i in range(4)]
    output = tmp_path / "new" / "folder" / "curves.png"
    assert run_program(main, [*runs, "--output", str(output)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"picture: {output}"
    data = output.read_bytes()
    assert len(data) < 60_000
    image = Image.open(io.BytesIO(data))
    assert image.size == (900, 500) and not image.info.keys() - {"transparency"}
    pixels = np.asarray(image.convert("RGB")).reshape(-1, 3).astype(int)
    for colour in COLOURS[:4]:
        wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
        assert (abs(pixels - wanted).max(1) < 16).sum() > 300, colour
    (tmp_path / "matplotlibrc").write_text("axes.facecolor: red\nfont.size: 30\nsavefig.dpi: 10\n")
    again = tmp_path / "again.png"
    command = [sys.executable, "-m", "pretraining.plot", *runs, "--output", str(again)]
    subprocess.run(command, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    assert again.read_bytes() == data


def test_help_and_reading_need_no_matplotlib_or_torch():
    """The module is imported without matplotlib and torch, so --help takes no time."""
    program = "import sys, pretraining.plot; print({'matplotlib', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# Bad input

GARBAGE = {
    "no JSON": b"not json",
    "no object": b"[1]",
    "no step": b'{"train/loss": 1}',
    "a step of another kind": b'{"step": true}',
    "a text for a number": b'{"step": 20, "train/loss": "low"}',
    "a number that is none": b'{"step": 20, "train/loss": NaN}',
    "not UTF-8": b'{"step": 20, "\xff": 1}',
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_named_by_its_line(tmp_path, capsys, garbage):
    """A damaged line that is not the unfinished last one ends the program with its number, and nothing is written."""
    good = b'{"step": 10, "train/masked_lm_loss": 8.0, "progress/tokens": 9}\n'
    (tmp_path / METRICS).write_bytes(good + garbage + b"\n" + good.replace(b"10", b"30"))
    assert run_program(main, [str(tmp_path), "--output", str(tmp_path / "a.png")]) == 2
    assert f"{METRICS}, line 2: " in capsys.readouterr().err
    assert not (tmp_path / "a.png").exists()


def test_bad_input_is_one_sentence(tmp_path, folder, capsys):
    """What cannot be drawn or written is said in one line with the file and what to do, with exit code 2."""
    empty, file = write_lines(tmp_path / "empty", []), tmp_path / "file"
    file.write_text("")
    (tmp_path / "folder.png").mkdir()
    steps_only = write_lines(tmp_path / "steps", [{"step": 1, "eval/masked_lm_loss": 2.0}])
    odd = write_lines(tmp_path / "odd", [{"step": 1, "train/masked_lm_loss": 2.0, "progress/tokens": 3}])
    (odd / "settings.json").write_text('{"model": {}}')
    good = ["--output", str(tmp_path / "a.png")]
    for arguments, expected in (
        ([tmp_path / "none", *good], "none: this does not exist"),
        ([file, *good], "file: this is not a folder"),
        ([tmp_path, *good], "there is no metrics.jsonl here"),
        ([empty, *good], "it has no points yet"),
        (
            [folder, *good, "--quantity", "los"],
            "there is no 'los'; it has masked_lm_accuracy, masked_lm_loss, pro",
        ),
        ([steps_only, *good], "it does not say the tokens of any step; take --x steps"),
        ([odd, *good], "it does not say the model's vocab_size"),
        ([folder, folder, *good], "this folder is given twice"),
        ([*[folder] * 15, *good], "15 runs: one picture shows 14 at most"),
        ([folder, "--output", tmp_path / "folder.png"], "folder.png: that is a folder"),
        ([folder, "--output", file / "a.png"], "a.png: it cannot be written"),
        ([folder, "--output", tmp_path / "a.svg"], "the picture is a PNG"),
        ([tmp_path / ("x" * 300), *good], "this does not exist"),
    ):
        assert run_program(main, [str(argument) for argument in arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1 and expected in error
    assert not (tmp_path / "a.png").exists()


def test_different_vocabularies_are_said(folder, tmp_path, capsys):
    """Losses of runs with different vocabularies are drawn, and the user is told that they do not compare."""
    other = record(tmp_path / "other", range(10, 101, 10))
    output = ["--output", str(tmp_path / "a.png")]
    assert run_program(main, [str(folder), str(other), *output]) == 0
    assert "vocabularies differ" not in capsys.readouterr().out
    (other / "settings.json").write_text('{"model": {"vocab_size": 2000}}')
    assert run_program(main, [str(folder), str(other), *output]) == 0
    assert "the vocabularies differ" in capsys.readouterr().out
