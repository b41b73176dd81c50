"""Draw the curves of one or several runs into one picture, from their metrics.jsonl.

    python pretraining/plot.py runs/base-zero2 --output curves.png
    python pretraining/plot.py runs/a runs/b --output curves.png --quantity masked_lm_accuracy --x steps

The line with marks is the held-out evaluation, its last value stands in the legend; the light line behind it is
the training loss (means of neighbouring points where there are many). The dashed line is the loss of somebody
who guesses, drawn where it leaves the curves readable.
"""

import argparse
import io
import json
import math
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data_prep.errors import UserError, run_program
from data_prep.options import Help
from data_prep.shards import write_atomically
from pretraining.metrics import METRICS

if TYPE_CHECKING:  # matplotlib takes a second to import, --help none
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TRAIN, HELD_OUT = "train/", "eval/"
X_AXES = ("tokens", "steps", "samples")
# Training points of a run that are drawn: more than the picture has room for only make it noisy and large.
MAX_POINTS = 200
MAX_MARKS = 20
MAX_RUNS = 14  # twice the colours; more would cover the curves with their names
# The share of a run in which the training loss falls from ln(vocabulary), which may leave the picture.
STEEP_SHARE = 0.05
# Okabe and Ito's colours, which colour-blind readers tell apart too; where they are used up, the marks differ.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5B5B5B")
MARKS = "osD^v"


@dataclass(frozen=True)
class Curve:
    """Values [n] of a quantity at places [n] on the x axis, ascending."""

    x: np.ndarray
    y: np.ndarray

    def __len__(self) -> int:
        return len(self.x)

    def thinned(self, points: int) -> "Curve":
        """At most so many points, each the mean of neighbours."""
        if len(self) <= points:
            return self
        starts = np.arange(points) * len(self) // points
        counts = np.diff(starts, append=len(self))
        return Curve(*(np.add.reduceat(values, starts) / counts for values in (self.x, self.y)))


@dataclass(frozen=True)
class Run:
    """What is drawn of a run; vocab_size is None if its folder does not say."""

    name: str
    train: Curve
    held_out: Curve
    vocab_size: int | None


def main(argv: list[str] | None = None) -> int:
    """Draw; returns the exit code."""
    parser = argparse.ArgumentParser(prog="pretraining/plot.py", description=__doc__, formatter_class=Help)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="run folders, as pretraining/run.py writes them")
    add("--output", type=Path, required=True, metavar="FILE", help="the picture, a .png")
    what = "what is drawn: a name that metrics.jsonl has behind train/ and eval/, or a whole one like speed/tokens_per_second"
    add("--quantity", default="masked_lm_loss", metavar="NAME", help=what)
    add("--x", choices=X_AXES, default="tokens", help="what the x axis counts")
    add("--title", metavar="TEXT", help="a line above the picture")
    arguments = parser.parse_args(argv)
    if arguments.output.suffix.lower() != ".png":
        raise UserError(f"--output {arguments.output}: the picture is a PNG; give a name that ends in .png")
    if len(arguments.runs) > MAX_RUNS:
        raise UserError(f"{len(arguments.runs)} runs: one picture shows {MAX_RUNS} at most; make several")
    quantity = arguments.quantity.removeprefix(TRAIN).removeprefix(HELD_OUT)
    folders = zip(arguments.runs, short_names(arguments.runs), strict=True)
    runs = [read_run(folder, name, quantity, arguments.x) for folder, name in folders]
    write_output(arguments.output, render(runs, quantity, arguments.x, arguments.title))
    if "loss" in quantity and len({run.vocab_size for run in runs if run.vocab_size}) > 1:
        print("note: the vocabularies differ, and a loss per token can only be compared within one")
    print(f"picture: {arguments.output}")
    return 0


def short_names(folders: Sequence[Path]) -> list[str]:
    """What to show for folders: the last part of each path, or as many parts as tell them apart.

    Raises:
        UserError: a folder is given twice.
    """
    parts = [Path(os.path.abspath(folder)).parts for folder in folders]
    for i, folder in enumerate(folders):
        if parts[i] in parts[:i]:
            raise UserError(f"{folder}: this folder is given twice; give it once")
    for length in range(1, max(map(len, parts)) + 1):
        names = [str(Path(*part[-length:])) for part in parts]
        if len(set(names)) == len(names):
            break
    return [_printable(name) for name in names]


def _printable(text: str) -> str:
    """Line ends, and bytes of a file name that are not UTF-8, as question marks."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def write_output(path: Path, data: bytes) -> None:
    """Write a result where the user wants it, with the folders above it. Raises UserError where that fails."""
    if os.path.exists(path) and not os.path.isfile(path):
        kind = "is a folder" if os.path.isdir(path) else "is no ordinary file"
        raise UserError(f"--output {path}: that {kind}; give the name of a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data)
    except OSError as error:
        raise UserError(
            f"--output {path}: it cannot be written ({error.strerror}); choose another place"
        ) from None


def read_run(folder: Path, name: str, quantity: str, x: str) -> Run:
    """The curves of a run folder.

    Args:
        folder: with metrics.jsonl, and settings.json for the size of the vocabulary.
        name: for the legend.
        quantity: a name that stands behind "train/" or "eval/" in metrics.jsonl, or a whole one.
        x: one of X_AXES.
    Raises:
        UserError: there is no such file, quantity or x axis, or a line is damaged.
    """
    path = folder / METRICS
    lines = _read_metrics(path)
    train = _points(lines, quantity if "/" in quantity else TRAIN + quantity)
    held_out = _points(lines, HELD_OUT + quantity)
    if not train and not held_out:
        raise UserError(f"{path}: there is no {quantity!r}; {_quantities(lines)}")
    return Run(name, _curve(train, lines, x, path), _curve(held_out, lines, x, path), _vocab_size(folder))


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl in the order of steps.

    Where steps go back (the run was killed, then resumed from an earlier checkpoint), what came later counts.
    """
    if not os.path.isdir(path.parent):
        problem = "is not a folder" if os.path.exists(path.parent) else "does not exist"
        raise UserError(f"{path.parent}: this {problem}; give the folder of a run, like runs/base-zero2")
    try:
        raw_lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        raise UserError(
            f"{path.parent}: there is no {METRICS} here; give the folder that pretraining/run.py wrote"
        ) from None
    except OSError as error:
        raise UserError(f"{path}: it cannot be read ({error.strerror})") from None
    lines: list[dict[str, Any]] = []
    for number, raw in enumerate(raw_lines, 1):
        line = _parse(raw)
        if line is None and number == len(raw_lines) and not raw.endswith(b"\n"):
            break  # the run is writing it, or was killed while it did
        if line is None:
            raise UserError(
                f"{path}, line {number}: expected a JSON object with a step and numbers; remove the line (the run "
                "itself does not need it)"
            )
        while lines and lines[-1]["step"] > line["step"]:
            lines.pop()
        lines.append(line)
    return lines


def _parse(raw: bytes) -> dict[str, Any] | None:
    """A line of metrics.jsonl: a step and finite numbers or nulls; None if it is anything else."""
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or type(line.get("step")) is not int or line["step"] < 0:
        return None
    numbers = [value for value in line.values() if value is not None]
    is_right = all(type(value) in (int, float) and abs(value) < math.inf for value in numbers)
    return line if is_right else None


def _points(lines: list[dict[str, Any]], name: str) -> dict[int, float]:
    """Step → value, where there is one."""
    return {line["step"]: line[name] for line in lines if line.get(name) is not None}


def _quantities(lines: list[dict[str, Any]]) -> str:
    names = {name for line in lines for name, value in line.items() if name != "step" and value is not None}
    if not names:
        return "it has no points yet: wait for the first ones (--log_interval, --eval_interval)"
    return f"it has {', '.join(sorted({name.removeprefix(TRAIN).removeprefix(HELD_OUT) for name in names}))}"


def _curve(points: dict[int, float], lines: list[dict[str, Any]], x: str, path: Path) -> Curve:
    """Points by the x axis. Evaluations know their step only; between logged steps tokens are interpolated."""
    steps = np.array(list(points), dtype=np.float64)
    values = np.array(list(points.values()), dtype=np.float64)
    if x == "steps" or not points:
        return Curve(steps, values)
    known = {0: 0.0} | _points(lines, f"progress/{x}")
    last = max(known)
    if not last:
        raise UserError(f"{path}: it does not say the {x} of any step; take --x steps")
    if steps[-1] > last:
        known[int(steps[-1])] = known[last] * steps[-1] / last
    return Curve(np.interp(steps, list(known), list(known.values())), values)


def _vocab_size(folder: Path) -> int | None:
    path = folder / "settings.json"
    try:
        size = json.loads(path.read_bytes())["model"]["vocab_size"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        size = None
    if type(size) is not int or size < 1:
        raise UserError(f"{path}: it does not say the model's vocab_size; restore it or remove it")
    return size


def render(runs: Sequence[Run], quantity: str, x: str, title: str | None = None) -> bytes:
    """The picture as a PNG of 900 by 500 pixels, the same bytes for the same runs."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()  # what the user's matplotlibrc says would change the picture
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # it is drawn as a box
        canvas = FigureCanvasAgg(draw(runs, quantity, x, title))
        canvas.draw()
    image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    buffer = io.BytesIO()
    # A palette makes the file a third as large.
    image.quantize(64, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(buffer, "png", optimize=True)
    return buffer.getvalue()


def draw(runs: Sequence[Run], quantity: str, x: str, title: str | None = None) -> "Figure":
    """The figure that is rendered.

    Args:
        runs: their curves, all of this quantity over this x axis.
        quantity: for the y axis.
        x: for the x axis, one of X_AXES.
        title: a line above the picture.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), dpi=100, layout="constrained")
    axes = figure.subplots()
    unit, factor = _unit(max(curve.x[-1] for curve in _all_curves(runs)))
    for number, run in enumerate(runs):
        _draw_run(axes, run, number, factor)
    _draw_levels(axes, _guessing(runs, quantity), *_limits(runs))
    axes.set_xlim(left=0)
    axes.set_xlabel(f"{unit}{x}" if x == "steps" else f"{unit}{x} seen", fontsize=12)
    axes.set_ylabel(quantity.replace("masked_lm", "masked-LM").replace("_", " "), fontsize=12)
    axes.tick_params(labelsize=11)
    axes.grid(color="0.92")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if title:
        axes.set_title(_printable(title), fontsize=13, loc="left", parse_math=False)
    _draw_legend(axes, runs)
    return figure


def _all_curves(runs: Sequence[Run]) -> list[Curve]:
    return [curve for run in runs for curve in (run.train, run.held_out) if len(curve)]


def _unit(largest: float) -> tuple[str, float]:
    """Name and size of the unit in which the x axis has short numbers."""
    for name, size in (("billion ", 1e9), ("million ", 1e6), ("thousand ", 1e3)):
        if largest >= size:
            return name, size
    return "", 1.0


def _style(number: int) -> tuple[str, dict[str, Any]]:
    """Colour and marks of the n-th run."""
    mark = MARKS[number // len(COLOURS) % len(MARKS)]
    style = {"marker": mark, "markersize": 6, "markeredgecolor": "white", "markeredgewidth": 0.8}
    return COLOURS[number % len(COLOURS)], style


def _draw_run(axes: "Axes", run: Run, number: int, unit: float) -> None:
    colour, mark = _style(number)
    train, held_out = run.train.thinned(MAX_POINTS), run.held_out
    alone = not len(held_out)
    style = {"linewidth": 1.3} if alone else {"linewidth": 1, "alpha": 0.4}
    if len(train) == 1:  # a line through one point is invisible
        style |= {"marker": ".", "markersize": 8}
    axes.plot(train.x / unit, train.y, color=colour, zorder=2, **style)
    every = -(-len(held_out) // MAX_MARKS) or 1
    marks = list(range(len(held_out) - 1, -1, -every))
    axes.plot(
        held_out.x / unit,
        held_out.y,
        color=colour,
        markevery=marks,
        linewidth=2,
        zorder=3,
        **mark,
    )


def _limits(runs: Sequence[Run]) -> tuple[float, float]:
    """Bottom and top of the picture: all held-out values, and training values but for what squashes them.

    That is the steep beginning, and single outliers.
    """
    seen = []
    for run in runs:
        seen.append(run.held_out.y)
        train = run.train.thinned(MAX_POINTS)
        later = train.y
        if len(run.held_out):
            later = train.y[train.x >= STEEP_SHARE * run.held_out.x[-1]]
            later = np.percentile(later, [1, 99]) if len(later) else later
        seen.append(later)
    values = np.concatenate(seen)
    low, high = float(values.min()), float(values.max())
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin


def _guessing(runs: Sequence[Run], quantity: str) -> dict[float, str]:
    """Losses of somebody who guesses, with their names."""
    if quantity == "next_sentence_loss":
        return {math.log(2): "guessing: ln 2 = 0.69"}
    if quantity != "masked_lm_loss":
        return {}
    sizes = sorted({run.vocab_size for run in runs if run.vocab_size})
    return {math.log(size): f"guessing: ln {size:,} = {math.log(size):.2f}" for size in sizes}


def _draw_levels(axes: "Axes", levels: dict[float, str], low: float, high: float) -> None:
    """Dashed lines, where they leave the curves four fifths of the height; sets the limits of the y axis."""
    room = high + 0.25 * (high - low)
    levels = {level: text for level, text in levels.items() if low < level < room}
    axes.set_ylim(low, max([high, *(level + 0.03 * (high - low) for level in levels)]))
    for level, text in levels.items():
        axes.axhline(level, color="0.4", linewidth=1.2, linestyle=(0, (5, 3)), zorder=1)
        place = {"transform": axes.get_yaxis_transform(), "ha": "right", "va": "top"}
        axes.text(0.995, level - 0.015 * (high - low), text, fontsize=10, color="0.35", **place)


def _draw_legend(axes: "Axes", runs: Sequence[Run]) -> None:
    """A row per run: its name and last held-out value."""
    from matplotlib.lines import Line2D

    light = " (light: training)" if any(len(run.train) for run in runs) else ""
    title = f"held out, last value{light}" if any(len(run.held_out) for run in runs) else None
    handles, labels = [], []
    for number, run in enumerate(runs):
        colour, mark = _style(number)
        alone = not len(run.held_out)
        handles.append(Line2D([], [], color=colour, linewidth=2, **({} if alone else mark)))
        value = "" if alone else f"   {run.held_out.y[-1]:#.4g}"
        labels.append(run.name + value)
    legend = axes.legend(
        handles,
        labels,
        fontsize=11,
        title=title,
        title_fontsize=10,
        alignment="left",
        framealpha=0.9,
        edgecolor="0.85",
        loc="best",
    )
    for text in legend.get_texts():
        text.set_parse_math(False)


if __name__ == "__main__":
    sys.exit(run_program(main))
