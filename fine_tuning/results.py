"""The results folder: runs that are finished stay finished, and metrics.json says what came out.

settings.json             everything that the runs were made with
runs/lr2e-05-seed0/       curves, metrics.jsonl and result.json of a run, which is written last
metrics.json              all runs, the best one, means and standard deviations
model/                    the model of the best run
"""

import hashlib
import json
import math
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import nn

from data_prep.errors import UserError
from data_prep.shards import canonical_json, write_atomically

SETTINGS = "settings.json"
METRICS = "metrics.json"
MODEL = "model"
_RESULT = "result.json"
_WEIGHTS = "weights.safetensors"


@dataclass(frozen=True)
class RunResult:
    """A finished run.

    Attributes:
        learning_rate, seed: which one.
        steps: updates.
        train_loss: mean over the last epoch, None if not finite.
        scores: split ("dev", and "test" if there is one) → "loss" (None if not finite) and metrics.
        seconds: that training and evaluation took.
    """

    learning_rate: float
    seed: int
    steps: int
    train_loss: float | None
    scores: dict[str, dict[str, float | None]]
    seconds: float

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"lr{self.learning_rate!r}-seed{self.seed}"


class Results:
    """The folder of a grid of runs.

    Args:
        folder: made if it is not there.
        identity: what all its runs share (plain values).
        metric: the score by which runs are chosen; larger is better.
    Raises:
        UserError: the folder has runs that were made with something else.
    """

    def __init__(self, folder: Path, identity: dict[str, Any], metric: str):
        self.folder = folder
        self.fingerprint = hashlib.sha256(canonical_json(identity).encode()).hexdigest()
        self.metric = metric
        self.identity = identity
        self._check_identity()

    def _check_identity(self) -> None:
        old = _read(self.folder / SETTINGS).get("identity")
        if old is None:
            return
        new = json.loads(canonical_json(self.identity))
        changed = [
            f"{name} is {json.dumps(new.get(name))} and was {json.dumps(old.get(name))}"
            for name in sorted(old.keys() | new.keys())
            if old.get(name) != new.get(name)
        ]
        if changed:
            raise UserError(
                f"{self.folder}: its runs were made with other settings ({'; '.join(changed)}); give the old ones again, or "
                "choose another --output"
            )

    def write_settings(self, content: dict[str, Any]) -> None:
        """settings.json: the identity and `content`, so that the folder explains itself."""
        self.folder.mkdir(parents=True, exist_ok=True)
        _write(self.folder / SETTINGS, content | {"identity": self.identity})

    def run_folder(self, learning_rate: float, seed: int) -> Path:
        """Where a run lies."""
        return self.folder / "runs" / f"lr{learning_rate!r}-seed{seed}"

    def begin(self, learning_rate: float, seed: int) -> Path:
        """An empty folder for a run; what a killed one left there goes."""
        folder = self.run_folder(learning_rate, seed)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def finish(self, result: RunResult, model: nn.Module) -> None:
        """Keep a run's weights and then its result, which makes it finished."""
        folder = self.run_folder(result.learning_rate, result.seed)
        save_file(model.state_dict(), folder / _WEIGHTS)
        _write(folder / _RESULT, asdict(result) | {"fingerprint": self.fingerprint})

    def finished(self, learning_rate: float, seed: int) -> RunResult | None:
        """The result of a run, if it is finished and was made with the same settings and data."""
        content = _read(self.run_folder(learning_rate, seed) / _RESULT)
        if content.pop("fingerprint", None) != self.fingerprint:
            return None
        return RunResult(**content)

    def load_weights(self, result: RunResult, model: nn.Module) -> bool:
        """Load the weights of a run, if they are still there."""
        path = self.run_folder(result.learning_rate, result.seed) / _WEIGHTS
        if path.is_file():
            model.load_state_dict(load_file(path))
        return path.is_file()

    def drop_weights(self, results: Sequence[RunResult]) -> None:
        """Remove the weights of these runs."""
        for result in results:
            (self.run_folder(result.learning_rate, result.seed) / _WEIGHTS).unlink(missing_ok=True)

    def drop_all_weights(self) -> None:
        """Remove the weights of all runs, those of earlier commands that were killed too."""
        for path in self.folder.glob(f"runs/*/{_WEIGHTS}"):
            path.unlink(missing_ok=True)

    def best_seed(self, results: Sequence[RunResult]) -> RunResult:
        """The best of these runs on dev: by metric, then by loss, then the first."""
        return max(results, key=lambda result: _rank([result], self.metric))

    def best_rate(self, results: Sequence[RunResult], seeds: Sequence[int]) -> list[RunResult]:
        """The runs of the learning rate with the best mean on dev (then the lowest mean loss, then the first).

        Only runs with these seeds are compared, and each learning rate has one.
        """

        def rank(runs: list[RunResult]) -> tuple[float, float]:
            return _rank([run for run in runs if run.seed in seeds], self.metric)

        return max(by_rate(results), key=rank)

    def write_metrics(
        self,
        results: Sequence[RunResult],
        chosen: Sequence[RunResult],
        search_seeds: Sequence[int],
        content: dict[str, Any],
    ) -> dict[str, Any]:
        """metrics.json: `content` and the summary of all runs and of the chosen ones; returns the summary.

        Learning rates are listed with the runs that were compared: those with search_seeds.
        """
        searched = [result for result in results if result.seed in search_seeds]
        summary = {
            "best": asdict(self.best_seed(chosen)),
            **{split: _over_seeds(chosen, split) for split in chosen[0].scores},
            "learning_rates": [
                {"learning_rate": runs[0].learning_rate, "dev": _over_seeds(runs, "dev")}
                for runs in by_rate(searched)
            ],
            "runs": [asdict(result) for result in results],
        }
        _write(self.folder / METRICS, content | {"metric": self.metric} | summary)
        return summary


def by_rate(results: Sequence[RunResult]) -> list[list[RunResult]]:
    """Runs grouped by learning rate, in the order in which the rates first come."""
    rates = dict.fromkeys(result.learning_rate for result in results)
    return [[result for result in results if result.learning_rate == rate] for rate in rates]


def finite(value: float) -> float | None:
    """The value, or None where JSON has no number for it."""
    return value if math.isfinite(value) else None


def _rank(runs: Sequence[RunResult], metric: str) -> tuple[float, float]:
    losses = [run.scores["dev"]["loss"] for run in runs]
    worst = math.inf
    loss = statistics.mean(worst if value is None else value for value in losses)
    return statistics.mean(run.scores["dev"][metric] for run in runs), -loss


def _over_seeds(runs: Sequence[RunResult], split: str) -> dict[str, dict[str, float | None]]:
    """Score → mean, sample standard deviation (None for one run), minimum and maximum over runs."""
    summary = {}
    for name in runs[0].scores[split]:
        values = [run.scores[split][name] for run in runs]
        if None in values:
            summary[name] = dict.fromkeys(("mean", "standard_deviation", "minimum", "maximum"))
            continue
        deviation = statistics.stdev(values) if len(values) > 1 else None
        summary[name] = {
            "mean": statistics.mean(values),
            "standard_deviation": deviation,
            "minimum": min(values),
            "maximum": max(values),
        }
    return summary


def _read(path: Path) -> dict[str, Any]:
    """The content of a file of ours; nothing if it is not there or is not whole."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _write(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    write_atomically(path, f"{text}\n".encode())
