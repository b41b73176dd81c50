"""Training one task model with one learning rate and one seed, and what it predicts.

Everything random is a function of the seed and the step, so a run repeated on the same machine is the same.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from data_prep.counter_rng import Stream, key
from fine_tuning.features import Features, epoch_batches, select
from pretraining.micro_batches import Instances, cut_micro_batches
from pretraining.optimizer import AdamWSettings, choose_optimizer, parameter_groups
from pretraining.schedules import WarmupDecayLR, learning_rate

Precision = Literal["fp32", "bf16", "fp16"]

# Bounds of one forward pass: memory. A batch with more tokens is trained in several.
MAX_TOKENS = 16_384
PREDICTION_SEQUENCES = 256
# Devlin et al. 2019 and Mosbach et al. 2021, "On the Stability of Fine-tuning BERT", table 4: with bias correction.
ADAM_EPSILON = 1e-6
MAX_GRADIENT_NORM = 1.0

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class TrainSettings:
    """What a run computes with; warmup_ratio is a share of the updates."""

    learning_rate: float
    seed: int
    epochs: int
    batch_size: int
    warmup_ratio: float
    weight_decay: float

    def steps_per_epoch(self, examples: int) -> int:
        """Updates in one pass over so many examples."""
        return -(-examples // self.batch_size)


@dataclass(frozen=True)
class StepReport:
    """What one update did; the loss waits on the device until it is asked for."""

    step: int
    mean_loss: Tensor
    learning_rate: float
    gradient_norm: Tensor
    tokens: int


class Trainer:
    """Drives one task model.

    Args:
        model: in float32 on `device`; its weights are updated in place.
        settings: of this run.
        features, targets: the training examples; targets [n].
        device: where it computes.
        precision: below fp32, a copy of the model in that type computes, and these weights are updated from its
            gradients (Micikevicius et al. 2018, "Mixed Precision Training", section 3.1); fp16 scales the loss.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: TrainSettings,
        features: Features,
        targets: np.ndarray,
        device: torch.device,
        precision: Precision = "fp32",
    ):
        self.model = model
        self.settings = settings
        self.features = features
        self.targets = torch.from_numpy(targets)
        self.device = device
        self.computing = model if precision == "fp32" else copy.deepcopy(model).to(_DTYPES[precision])
        self.scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
        adamw = AdamWSettings(lr=settings.learning_rate, eps=ADAM_EPSILON, weight_decay=settings.weight_decay)
        groups = parameter_groups(model, settings.weight_decay)
        self.optimizer = choose_optimizer(adamw, device.type).build(groups, adamw)
        self.total_steps = settings.epochs * settings.steps_per_epoch(len(features))
        self.schedule = WarmupDecayLR(
            warmup_num_steps=max(1, round(settings.warmup_ratio * self.total_steps)),
            warmup_type="linear",
            warmup_max_lr=settings.learning_rate,
            # One more, and steps counted from one: neither the first nor the last of few updates is for nothing.
            total_num_steps=self.total_steps + 1,
        )
        self.step = 0

    def train_epoch(self, epoch: int) -> Iterator[StepReport]:
        """One pass over the training examples, update by update."""
        self.computing.train()
        settings = self.settings
        for rows in epoch_batches(self.features.lengths, settings.batch_size, settings.seed, epoch):
            yield self._update(rows)

    def _update(self, rows: np.ndarray) -> StepReport:
        instances = select(self.features.instances, rows)
        loss_sum = self._forward_backward(instances, self.targets[torch.from_numpy(rows)])
        rate = learning_rate(self.schedule, self.step + 1)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self._fetch_gradients()
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRADIENT_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self._hand_weights_over()
        self.step += 1
        return StepReport(self.step, loss_sum / len(rows), rate, norm, len(instances.tokens))

    def _forward_backward(self, instances: Instances, targets: Tensor) -> Tensor:
        """Accumulate the gradients of the batch's mean loss; returns the loss's sum. Rows are longest first."""
        loss_sum, done = torch.zeros((), device=self.device), 0
        for number, batch in enumerate(cut_micro_batches(instances, len(targets), MAX_TOKENS)):
            torch.manual_seed(key(self.settings.seed, Stream.DROPOUT, self.step, number))
            part = targets[done : done + len(batch.lengths)].to(self.device)
            done += len(part)
            loss = self.model.loss_sum(self.computing(batch.to(self.device)), part)
            self.scaler.scale(loss / len(targets)).backward()
            loss_sum += loss.detach()
        return loss_sum

    def _fetch_gradients(self) -> None:
        if self.computing is not self.model:
            for ours, theirs in zip(self.model.parameters(), self.computing.parameters(), strict=True):
                ours.grad, theirs.grad = theirs.grad.float(), None

    def _hand_weights_over(self) -> None:
        if self.computing is not self.model:
            with torch.no_grad():
                for ours, theirs in zip(self.model.parameters(), self.computing.parameters(), strict=True):
                    theirs.copy_(ours)


@torch.no_grad()
def predict(
    model: nn.Module,
    instances: Instances,
    device: torch.device,
    max_sequences: int = PREDICTION_SEQUENCES,
    on_batch: Callable[[], object] | None = None,
) -> np.ndarray:
    """Outputs for each instance in its order, float32 [n, …]; they do not depend on how batches are cut.

    Args:
        model: a task model on `device`.
        instances: in any order of lengths.
        device: where it computes.
        max_sequences: instances per forward pass.
        on_batch: called after each forward pass.
    """
    was_training = model.training
    model.eval()
    longest_first = np.argsort(-np.diff(instances.offsets), kind="stable")
    outputs = []
    for batch in cut_micro_batches(select(instances, longest_first), max_sequences, MAX_TOKENS):
        outputs.append(model(batch.to(device)).cpu())
        if on_batch:
            on_batch()
    model.train(was_training)
    in_order = np.empty_like(longest_first)
    in_order[longest_first] = np.arange(len(longest_first))
    return torch.cat(outputs).numpy()[in_order]
