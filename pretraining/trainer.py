"""One optimizer step on any layout, the evaluation, and the loop that repeats them.

The loss of a step is that of the global batch, whatever the ranks and micro-batches: the sum of the masked-LM
cross entropies divided by the number of masked tokens of all ranks, plus the mean next-sentence cross entropy
(Devlin et al. 2019, appendix A.2). DeepSpeed averages gradients over the ranks, so each rank's sums are scaled
by world_size / global count.
"""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from data_prep.counter_rng import Stream, key
from data_prep.errors import UserError
from pretraining.checkpoint import Checkpoints, TrainState
from pretraining.data import StepShare, evaluation_batches
from pretraining.distributed import World, all_sum, gather_objects, gradient_accumulation
from pretraining.metrics import ProgressLine, Recorder
from pretraining.model import PreTrainingOutput
from pretraining.optimizer import ScheduleSettings, learning_rate
from pretraining.stop import StopFlag


class Sums:
    """Sums over micro-batches, kept on the device: no micro-step waits for a number."""

    NAMES = ("masked_lm_loss", "masked_lm_correct", "next_sentence_loss", "next_sentence_correct")

    def __init__(self, device: torch.device):
        self._values = torch.zeros(len(self.NAMES), dtype=torch.float64, device=device)
        self.masked_tokens = 0
        self.instances = 0

    def add(self, output: PreTrainingOutput, masked_tokens: int, instances: int) -> None:
        """Add the sums of one micro-batch."""
        parts = (
            output.masked_lm_loss_sum,
            output.masked_lm_correct,
            output.next_sentence_loss_sum,
            output.next_sentence_correct,
        )
        zero = self._values.new_zeros(())
        self._values += torch.stack([zero if part is None else part.detach().double() for part in parts])
        self.masked_tokens += masked_tokens
        self.instances += instances

    def reduce(self, has_next_sentence: bool) -> dict[str, float]:
        """Means over all ranks; a collective call, and the only place that waits for the device."""
        values = all_sum([*self._values.tolist(), self.masked_tokens, self.instances])
        totals = dict(zip(self.NAMES, values, strict=False))
        masked_tokens, instances = max(1.0, values[-2]), max(1.0, values[-1])
        means = {
            "masked_lm_loss": totals["masked_lm_loss"] / masked_tokens,
            "masked_lm_accuracy": totals["masked_lm_correct"] / masked_tokens,
        }
        means["loss"] = means["masked_lm_loss"]
        if has_next_sentence:
            means["next_sentence_loss"] = totals["next_sentence_loss"] / instances
            means["next_sentence_accuracy"] = totals["next_sentence_correct"] / instances
            means["loss"] += means["next_sentence_loss"]
        return means


@dataclass(frozen=True)
class RunSettings:
    """What a step computes with, and when the loop does what; intervals in steps, 0 for never."""

    seed: int
    seq_len: int
    train_batch_size: int
    micro_batch_size: int
    micro_batch_tokens: int | None
    max_micro_steps: int
    precision: str
    schedule: ScheduleSettings
    max_steps: int
    log_interval: int
    save_interval: int
    eval_interval: int
    eval_instances: int
    keep: int
    keep_every: int


class Trainer:
    """Drives a DeepSpeed engine over batches; every decision about files is a collaborator's.

    Args:
        engine: the DeepSpeed engine.
        world: this rank.
        settings: what a step computes with, and when to log, evaluate, save and end.
        state: where the run stands; advanced in place.
        checkpoints: where it is saved.
        shard_set: for the evaluation.
        recorder: metrics, on rank 0.
        progress: the progress line, on rank 0.
        stop: whether to stop early.
    """

    def __init__(
        self,
        engine,
        world: World,
        settings: RunSettings,
        state: TrainState,
        checkpoints: Checkpoints,
        shard_set,
        recorder: Recorder | None,
        progress: ProgressLine | None,
        stop: StopFlag,
    ):
        self.engine = engine
        self.world = world
        self.settings = settings
        self.state = state
        self.checkpoints = checkpoints
        self.shard_set = shard_set
        self.recorder = recorder
        self.progress = progress
        self.stop = stop
        self._saved_step = state.step
        self._problem: OSError | None = None  # of the metrics, until all ranks know of it
        self._last_sums: Sums | None = None
        self._last_skipped = False
        self._logged_at = time.monotonic()
        self._tokens_since = 0
        self._wait_since = 0.0

    def run(self, batches: Iterable[StepShare]) -> bool:
        """Train to the last step; returns whether it was reached (else a stop was asked for). Saves either way."""
        finished = self.state.step >= self.settings.max_steps
        if not finished:
            for share in batches:
                if not self.train_step(share):
                    break
                step, finished = self.state.step, self.state.step == self.settings.max_steps
                if finished or _is_due(step, self.settings.eval_interval):
                    self.evaluate()
                if finished or _is_due(step, self.settings.save_interval):
                    self.save()
                if finished:
                    break
        self.stop.ignore()
        self.save()
        self._publish()
        return finished

    def train_step(self, share: StepShare) -> bool:
        """Train on one global batch; False, and nothing done, if some rank was asked to stop."""
        flags = self.stop.raised(), self.checkpoints.is_written, self._problem is not None
        masked, tokens, stop, written, problems = all_sum([share.masked_lm_count, share.tokens, *flags])
        if written == self.world.world_size:
            self._publish()
        if problems:
            self._end_if_unrecorded()
        if stop:
            return False
        sums = self._forward_backward(share, masked)
        rate = learning_rate(self.settings.schedule, self.state.applied_steps)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        skipped_before = self.engine.skipped_steps
        self.engine.step()
        self.state.step += 1
        self.state.skipped_steps += self.engine.skipped_steps - skipped_before
        self.state.consumed = share.stop
        self.state.tokens += int(tokens)
        self._tokens_since += int(tokens)
        self._wait_since += share.wait_seconds
        self._last_sums, self._last_skipped = sums, self.engine.skipped_steps > skipped_before
        if self.state.step == self.settings.max_steps or _is_due(self.state.step, self.settings.log_interval):
            self._log(sums, rate, share, int(tokens))
        elif self.progress:
            self.progress.update(self.state.step, 0.0)
        return True

    def _forward_backward(self, share: StepShare, global_masked: float) -> Sums:
        masked_lm_scale = self.world.world_size / max(1.0, global_masked)
        next_sentence_scale = self.world.world_size / self.settings.train_batch_size
        sums = Sums(self.world.device)
        micro_steps = len(share.micro_batches)
        # Beyond it this rank would reduce gradients more often than the others, and hang or train something else.
        assert 1 <= micro_steps <= self.settings.max_micro_steps
        with gradient_accumulation(self.engine, self.settings.max_micro_steps):
            for micro_step, micro_batch in enumerate(share.micro_batches):
                if self.progress:
                    self.progress.update(self.state.step, micro_step / micro_steps)
                torch.manual_seed(
                    key(self.settings.seed, Stream.DROPOUT, self.state.step, micro_step, self.world.rank)
                )
                output = self.engine(micro_batch.to(self.world.device))
                loss = output.masked_lm_loss_sum * masked_lm_scale
                if output.next_sentence_loss_sum is not None:
                    loss = loss + output.next_sentence_loss_sum * next_sentence_scale
                self.engine.backward(loss)
                sums.add(output, len(micro_batch.masked_lm_labels), len(micro_batch.lengths))
        return sums

    def _log(self, sums: Sums, rate: float, share: StepShare, tokens: int) -> None:
        means = self._finite(sums.reduce(self.engine.module.next_sentence_head is not None))
        now = time.monotonic()
        seconds, self._logged_at = now - self._logged_at, now
        tokens_per_second = self._tokens_since / seconds
        values = {f"train/{name}": value for name, value in means.items()}
        values |= {
            "optimizer/learning_rate": rate,
            "optimizer/gradient_norm": float(self.engine.get_global_grad_norm() or 0.0),
            "optimizer/loss_scale": float(getattr(self.engine.optimizer, "loss_scale", 1.0)),
            "optimizer/skipped_steps": self.state.skipped_steps,
            "progress/samples": self.state.step * self.settings.train_batch_size,
            "progress/tokens": self.state.tokens,
            "progress/epoch": self.state.consumed / int(self.shard_set.block_offsets("train")[-1]),
            "speed/tokens_per_second": tokens_per_second,
            "speed/data_wait_share": self._wait_since / seconds,
            "speed/padding_avoided": 1 - tokens / (self.settings.train_batch_size * self.settings.seq_len),
        }
        self._tokens_since, self._wait_since = 0, 0.0
        self._record(values)
        if self.progress:
            self.progress.update(
                self.state.step, 0.0, loss=means["loss"], tokens_per_second=tokens_per_second
            )

    def _record(self, values: dict[str, float]) -> None:
        if self.recorder and not self._problem:
            try:
                self.recorder.record(self.state.step, values)
            except OSError as error:
                self._problem = error

    def _end_if_unrecorded(self) -> None:
        """End the run on all ranks if rank 0 could not write its metrics; a collective call."""
        problem = gather_objects(self._problem and str(self._problem))[0]
        if problem:
            self._publish()
            raise UserError(
                f"step {self.state.step:,}: the metrics could not be written ({problem}); mend that, or make room on the "
                f"disk, and run the same command again: it goes on from step {self._saved_step:,}"
            )

    def _finite(self, means: dict[str, float]) -> dict[str, float]:
        """Pass on the means of the last step, or end the run if it has diverged; the same on every rank.

        In fp16 the forward pass may overflow on a step that the loss scaler then skips.
        """
        if not math.isfinite(means["loss"]) and not (
            self.settings.precision == "fp16" and self._last_skipped
        ):
            self._publish()
            raise UserError(
                f"step {self.state.step:,}: the loss is {means['loss']}: the run has diverged; nothing was saved since "
                f"step {self._saved_step:,}; lower the learning rate or lengthen the warm-up, with another --output"
            )
        return means

    def evaluate(self) -> dict[str, float] | None:
        """Loss and accuracies on the held-out shards with their stored masks; None if there are none."""
        if not self.shard_set.block_offsets("eval")[-1]:
            return None
        started = time.monotonic()
        means = evaluate(
            self.engine.module,
            self.shard_set,
            self.world,
            self.settings.micro_batch_size,
            self.settings.eval_instances,
            self.settings.micro_batch_tokens,
            on_batch=lambda: self.progress and self.progress.update(self.state.step, 0.0),
        )
        self._logged_at += time.monotonic() - started
        self._record({f"eval/{name}": value for name, value in means.items()})
        if self.progress:
            text = f"step {self.state.step:,}: held-out masked-LM loss {means['masked_lm_loss']:.4f}, "
            text += f"accuracy {means['masked_lm_accuracy']:.1%}"
            if "next_sentence_accuracy" in means:
                text += f", next-sentence accuracy {means['next_sentence_accuracy']:.1%}"
            self.progress.say(text)
        return means

    def save(self) -> None:
        """Begin to save a checkpoint, unless this step has one; training may go on meanwhile."""
        if self.state.step == self._saved_step:
            return
        started = time.monotonic()
        self._finite(self._last_sums.reduce(self.engine.module.next_sentence_head is not None))
        if self.recorder and not self._problem:
            try:
                self.recorder.flush()
            except OSError as error:
                self._problem = error
        self._end_if_unrecorded()
        self._publish()
        self.checkpoints.save(self.engine, self.state)
        self._saved_step = self.state.step
        self._logged_at += time.monotonic() - started

    def _publish(self) -> None:
        """Wait for the checkpoint that is being written, if there is one, and make it the newest."""
        path = self.checkpoints.finish()
        if path is None:
            return
        self.checkpoints.prune(self._saved_step, self.settings.keep, self.settings.keep_every)
        if self.progress:
            self.progress.say(f"step {self._saved_step:,}: saved {path}")


def _is_due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


@torch.no_grad()
def evaluate(
    model,
    shard_set,
    world: World,
    micro_batch_size: int,
    limit: int,
    micro_batch_tokens: int | None = None,
    on_batch: Callable[[], object] | None = None,
) -> dict[str, float]:
    """Means over the held-out instances, each counted once; a collective call.

    Args:
        model: BertForPreTraining.
        shard_set: whose "eval" split is read, in storage order, with its stored masks.
        world: this rank.
        micro_batch_size, micro_batch_tokens: instances and tokens per forward pass at most.
        limit: instances at most; 0 for all.
        on_batch: called after each forward pass.
    """
    was_training = model.training
    model.eval()
    sums = Sums(world.device)
    for micro_batch in evaluation_batches(
        shard_set, "eval", world.rank, world.world_size, micro_batch_size, limit, micro_batch_tokens
    ):
        output = model(micro_batch.to(world.device))
        sums.add(output, len(micro_batch.masked_lm_labels), len(micro_batch.lengths))
        if on_batch:
            on_batch()
    model.train(was_training)
    means = sums.reduce(model.next_sentence_head is not None)
    means["masked_lm_perplexity"] = math.exp(min(means["masked_lm_loss"], 50.0))
    return means
