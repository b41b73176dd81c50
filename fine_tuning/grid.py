"""The runs of a grid, one after the other: every learning rate with every seed, then the best one's model."""

import time
from collections.abc import Iterator
from importlib.metadata import version

import numpy as np
import torch

from fine_tuning.heads import SequenceClassifier
from fine_tuning.metrics import METRICS
from fine_tuning.model_folder import Description, read_description, write_model
from fine_tuning.preparation import Preparation
from fine_tuning.results import MODEL, Results, RunResult, by_rate, finite
from fine_tuning.trainer import Trainer, predict
from pretraining.metrics import ProgressLine, Recorder

# Updates between points of the curves.
LOG_STEPS = 10


class Grid:
    """The runs that a command line asks for, and their results."""

    def __init__(self, preparation: Preparation):
        self.preparation = preparation
        task, arguments = preparation.task, preparation.arguments
        self.results = Results(arguments.output, preparation.identity(), task.metrics[0])
        number = arguments.search_seeds or len(arguments.seeds)
        self._search_seeds, self._other_seeds = arguments.seeds[:number], arguments.seeds[number:]
        self._search = [(rate, seed) for rate in arguments.learning_rate for seed in self._search_seeds]
        self.number_of_runs = len(self._search) + len(self._other_seeds)
        self.pending = self._count_pending()
        self._progress = ProgressLine(self.pending * preparation.steps_per_run(), 0)
        self._steps_done = 0

    def _count_pending(self) -> int:
        """How many runs are not finished; which ones the last are may not be known yet."""
        searched = [result for run in self._search if (result := self.results.finished(*run))]
        missing = len(self._search) - len(searched)
        if missing:
            return missing + len(self._other_seeds)
        return sum(self.results.finished(*run) is None for run in self._others(searched))

    def _others(self, searched: list[RunResult]) -> list[tuple[float, int]]:
        """The runs of the best learning rate with the seeds that did not choose it."""
        rate = self.results.best_rate(searched, self._search_seeds)[0].learning_rate
        return [(rate, seed) for seed in self._other_seeds]

    def run(self) -> dict:
        """Train what is not finished, choose, write metrics.json and the best model; returns the summary."""
        self._write_settings()
        finished: list[RunResult] = []
        self._finish(self._search, finished)
        self._finish(self._others(finished), finished)
        chosen = self.results.best_rate(finished, self._search_seeds)
        self._write_model(self.results.best_seed(chosen))
        self.results.drop_all_weights()
        return self.results.write_metrics(finished, chosen, self._search_seeds, self._description_of_data())

    def _finish(self, runs: list[tuple[float, int]], finished: list[RunResult]) -> None:
        """Train those that are not finished; results are added to `finished`."""
        for run in runs:
            finished.append(self.results.finished(*run) or self._train(*run))
            # Of each learning rate only its best run can become the model.
            for same_rate in by_rate(finished):
                best = self.results.best_seed(same_rate)
                self.results.drop_weights([result for result in same_rate if result != best])

    def _train(self, learning_rate: float, seed: int) -> RunResult:
        """One run from start to result.json."""
        started = time.monotonic()
        preparation = self.preparation
        trainer = Trainer(
            preparation.new_model(seed),
            preparation.settings(learning_rate, seed),
            preparation.features["train"],
            preparation.targets["train"],
            preparation.device,
            preparation.precision,
        )
        recorder = Recorder(self.results.begin(learning_rate, seed), None)
        for epoch in range(preparation.arguments.epochs):
            train_loss = self._train_epoch(trainer, epoch, recorder)
            scores = {"dev": self._score(trainer.computing, "dev")}
            recorder.record(trainer.step, {f"dev/{name}": value for name, value in scores["dev"].items()})
        if "test" in preparation.features:
            scores["test"] = self._score(trainer.computing, "test")
        recorder.close()
        self._steps_done += trainer.total_steps
        scores = {split: {name: finite(x) for name, x in values.items()} for split, values in scores.items()}
        seconds = round(time.monotonic() - started, 2)
        result = RunResult(learning_rate, seed, trainer.step, finite(train_loss), scores, seconds)
        self.results.finish(result, trainer.model)
        self._progress.say(f"{result.name}: {_sentence(scores['dev'])} on dev ({seconds:.1f} s)")
        return result

    def _train_epoch(self, trainer: Trainer, epoch: int, recorder: Recorder) -> float:
        """Train one epoch; returns its mean loss over updates."""
        losses, since, tokens, started = [], [], 0, time.monotonic()
        for report in trainer.train_epoch(epoch):
            since.append(report.mean_loss)
            tokens += report.tokens
            if report.step % LOG_STEPS and report.step != trainer.total_steps:
                self._progress.update(self._steps_done + report.step, 0.0)
                continue
            losses += torch.stack(since).tolist()  # the device is waited for here only
            mean_loss, speed = float(np.mean(losses[-len(since) :])), tokens / (time.monotonic() - started)
            since.clear()
            values = {
                "train/loss": mean_loss,
                "optimizer/learning_rate": report.learning_rate,
                "optimizer/gradient_norm": float(report.gradient_norm),
                "progress/epoch": report.step / trainer.total_steps * self.preparation.arguments.epochs,
                "speed/tokens_per_second": speed,
            }
            recorder.record(report.step, values)
            self._progress.update(
                self._steps_done + report.step, 0.0, loss=mean_loss, tokens_per_second=speed
            )
        losses += [float(loss) for loss in since]
        return float(np.mean(losses))

    def _score(self, model: SequenceClassifier, split: str) -> dict[str, float]:
        """Mean loss and the task's metrics on a split."""
        preparation = self.preparation
        instances, targets = preparation.features[split].instances, preparation.targets[split]
        outputs = predict(model, instances, preparation.device)
        loss_sum = model.loss_sum(torch.from_numpy(outputs), torch.from_numpy(targets))
        scores = {name: METRICS[name](outputs, targets) for name in preparation.task.metrics}
        return {"loss": float(loss_sum) / len(targets)} | scores

    def _write_model(self, best: RunResult) -> None:
        """Make model/ that of the best run, which is trained again if its weights are gone."""
        preparation = self.preparation
        folder = self.results.folder / MODEL
        run = {
            "learning_rate": best.learning_rate,
            "seed": best.seed,
            "fingerprint": self.results.fingerprint,
        }
        written = read_description(folder)
        if written is not None and written.run == run:
            return
        model = preparation.new_model(best.seed)
        if not self.results.load_weights(best, model):
            print(
                f"{best.name} is the best of these runs and its weights are gone: training it again",
                flush=True,
            )
            self._progress, self._steps_done = ProgressLine(preparation.steps_per_run(), 0), 0
            self._train(best.learning_rate, best.seed)
            self.results.load_weights(best, model)
        description = Description(
            task=preparation.arguments.task,
            problem=preparation.task.problem,
            pooling=preparation.arguments.pooling,
            labels=preparation.data.labels,
            text_columns=preparation.task.text_columns,
            max_length=preparation.arguments.max_length,
            run=run,
        )
        write_model(folder, model, preparation.start.tokenizer, description)

    def _write_settings(self) -> None:
        preparation = self.preparation
        self.results.write_settings(
            {
                "arguments": {
                    name: value if isinstance(value, int | float | list | None) else str(value)
                    for name, value in vars(preparation.arguments).items()
                },
                "start": preparation.start.source,
                "device": str(preparation.device),
                "versions": {name: version(name) for name in ("torch", "numpy", "sentencepiece")},
            }
        )

    def _description_of_data(self) -> dict:
        preparation = self.preparation
        return {
            "task": preparation.arguments.task,
            "start": preparation.start.source,
            "labels": list(preparation.data.labels),
            "examples": {split: len(features) for split, features in preparation.features.items()},
            "truncated": {split: features.truncated for split, features in preparation.features.items()},
            "settings": self.results.identity,
        }


def _sentence(scores: dict[str, float | None]) -> str:
    parts = [f"{name} {value:.4f}" for name, value in scores.items() if value is not None]
    return ", ".join(parts)


def table(summary: dict, metric: str) -> Iterator[str]:
    """The summary in lines for the user: a row per learning rate, then the best run."""
    for row in summary["learning_rates"]:
        yield f"learning rate {row['learning_rate']:g}: {_mean(row['dev'][metric])} {metric} on dev"
    best = summary["best"]
    for split in ("dev", "test"):
        if split in summary:
            runs = summary[split][metric]
            yield (
                f"best learning rate {best['learning_rate']:g}, {split}: {metric} {_mean(runs)}, "
                f"of the best run (seed {best['seed']}) {best['scores'][split][metric]:.4f}"
            )


def _mean(values: dict[str, float | None]) -> str:
    deviation = values["standard_deviation"]
    return f"{values['mean']:.4f}" + ("" if deviation is None else f" ± {deviation:.4f}")
