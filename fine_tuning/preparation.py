"""Everything that is read and checked before the first update: data, labels, model, tokenizer, device."""

import argparse
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_prep.counter_rng import Stream, key
from data_prep.errors import UserError
from data_prep.shards import file_sha256
from data_prep.tokenizer import Tokenizer
from fine_tuning.arguments import RANDOM
from fine_tuning.examples import LabelledData, read_data
from fine_tuning.features import FEATURES, Features
from fine_tuning.heads import HEADS, SequenceClassifier, load_encoder
from fine_tuning.tasks import Task, task_of
from fine_tuning.trainer import Precision, TrainSettings
from pretraining.distributed import Capabilities, machine_capabilities
from pretraining.loading import load_pretrained, weights_sha256
from pretraining.model import BertConfig

# What decides the result of a run with a given learning rate and seed, beside data and weights.
_RUN_OPTIONS = ("epochs", "batch_size", "warmup_ratio", "weight_decay", "dropout", "max_length", "pooling")


@dataclass(frozen=True)
class Start:
    """Where the weights come from; state_dict is None for random ones."""

    config: BertConfig
    state_dict: dict[str, Tensor] | None
    tokenizer: Tokenizer
    source: str


@dataclass(frozen=True)
class Preparation:
    """What the runs of a grid share."""

    arguments: argparse.Namespace
    task: Task
    data: LabelledData
    start: Start
    features: dict[str, Features]
    targets: dict[str, np.ndarray]
    device: torch.device
    precision: Precision

    def settings(self, learning_rate: float, seed: int) -> TrainSettings:
        """Those of one run."""
        given = self.arguments
        return TrainSettings(
            learning_rate, seed, given.epochs, given.batch_size, given.warmup_ratio, given.weight_decay
        )

    def steps_per_run(self) -> int:
        """Updates of one run."""
        rate, seed = self.arguments.learning_rate[0], self.arguments.seeds[0]
        return self.arguments.epochs * self.settings(rate, seed).steps_per_epoch(len(self.features["train"]))

    def new_model(self, seed: int) -> SequenceClassifier:
        """The model as a run with this seed starts from it."""
        torch.manual_seed(key(seed, Stream.INITIALISATION))
        head = HEADS[self.task.problem]
        model = head(self.start.config, len(self.data.labels), self.arguments.pooling)
        if self.start.state_dict is not None:
            load_encoder(model, self.start.state_dict, self.start.source)
        return model.to(self.device)

    def identity(self) -> dict[str, Any]:
        """What runs must share to stand in one folder, in plain values; learning rate and seed are not in it."""
        weights = self.start.state_dict
        return {
            "task": self.arguments.task,
            "files": {split: file_sha256(path) for split, path in self.task.files.items()},
            "columns": [*self.task.text_columns, self.task.label_column],
            "train_examples": self.arguments.train_examples,
            "labels": list(self.data.labels),
            "model": self.start.config.to_dict(),
            "weights": RANDOM if weights is None else weights_sha256(weights),
            "tokenizer": self.start.tokenizer.files(),
            "precision": self.precision,
            **{name: getattr(self.arguments, name) for name in _RUN_OPTIONS},
        }

    def describe(self) -> list[str]:
        """What the runs will be, in lines for the user."""
        lines = [f"task: {self.arguments.task}; labels in this order: {', '.join(self.data.labels)}"]
        for split, features in self.features.items():
            text = f"{split}: {len(features):,} examples of {features.lengths.mean():.0f} tokens on average"
            if features.truncated:
                text += f"; {features.truncated:,} cut to --max_length {self.arguments.max_length}"
            lines.append(text)
        lines += self.data.notes
        config = self.start.config
        shape = f"{config.num_hidden_layers} layers, hidden size {config.hidden_size}"
        lines.append(f"model: {self.start.source}; {shape}, vocabulary {config.vocab_size:,}")
        if self.arguments.pooling == "cls" and not self._has_pooler():
            lines.append("its pooler starts from random weights, as it has none")
        searched = self.arguments.search_seeds or len(self.arguments.seeds)
        runs = len(self.arguments.learning_rate) * searched + len(self.arguments.seeds) - searched
        lines.append(f"{runs} runs of {self.steps_per_run():,} updates on {self.device} in {self.precision}")
        return lines

    def _has_pooler(self) -> bool:
        weights = self.start.state_dict
        return weights is None or "bert.pooler.weight" in weights


def prepare(arguments: argparse.Namespace) -> Preparation:
    """Read data, model and tokenizer. Raises UserError for whatever does not fit together."""
    task = task_of(arguments)
    data = read_data(task, arguments.train_examples)
    start = _start(arguments)
    if arguments.max_length > start.config.max_position_embeddings:
        raise UserError(
            f"--max_length {arguments.max_length}: the model has {start.config.max_position_embeddings} positions; "
            "ask for that many at most"
        )
    number = {label: i for i, label in enumerate(data.labels)}
    make_features = FEATURES[task.problem]
    device_type, capabilities = machine_capabilities()
    return Preparation(
        arguments,
        task,
        data,
        start,
        features={
            split: make_features(start.tokenizer, examples.columns, arguments.max_length)
            for split, examples in data.splits.items()
        },
        targets={
            split: np.array([number[label] for label in examples.labels], dtype=np.int64)
            for split, examples in data.splits.items()
        },
        device=torch.device(device_type),
        precision=_precision(arguments.precision, device_type, capabilities),
    )


def _start(arguments: argparse.Namespace) -> Start:
    dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), arguments.dropout)
    if arguments.init_from == RANDOM:
        tokenizer = Tokenizer(arguments.tokenizer)
        config = BertConfig.preset(arguments.model, tokenizer.vocab_size, **dropout)
        return Start(config, None, tokenizer, f"random weights, {arguments.model}")
    pretrained = load_pretrained(arguments.init_from)
    config = replace(pretrained.config, **dropout)
    return Start(config, pretrained.state_dict, pretrained.open_tokenizer(), pretrained.source)


def _precision(asked: str, device_type: str, capabilities: Capabilities) -> Precision:
    has = {"fp32": True, "bf16": capabilities.bf16 is not None, "fp16": capabilities.fp16}
    if asked == "auto":
        return next(name for name in ("bf16", "fp16", "fp32") if has[name])
    if not has[asked]:
        raise UserError(
            f"--precision {asked}: this {device_type} does not have it in hardware; leave the option out"
        )
    return asked
