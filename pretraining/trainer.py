"""One optimizer step on any layout, and the loop that repeats it, evaluates and saves.

The loss of a step is that of the global batch, whatever the ranks and micro-batches: the sum of the masked-LM
cross entropies divided by the number of masked tokens of all ranks, plus the mean next-sentence cross entropy
(Devlin et al. 2019, appendix A.2). DeepSpeed averages gradients over the ranks, so each rank's sums are scaled
by world_size / global count.
"""

import contextlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from data_prep.counter_rng import Stream, key
from data_prep.errors import UserError
from pretraining.checkpoint import Checkpoints
from pretraining.data import StepShare
from pretraining.diagnostics import Diagnostics
from pretraining.distributed import AgreedError, World, all_sum, gradient_accumulation, raise_together
from pretraining.evaluation import Sums, evaluate
from pretraining.loss_scale import hold_loss_scale
from pretraining.manifest import TrainState
from pretraining.metrics import ProgressLine, Recorder
from pretraining.schedules import ScheduleSettings, learning_rate
from pretraining.stop import StopFlag
from pretraining.trouble import HISTORY, check_weights, find_trouble, loss_scale_cannot_fall


@dataclass
class LastStep:
    """What is needed to judge a step when its update is done.

    Attributes:
        sums: of this rank.
        start: position before its global batch.
        skipped: whether its update was skipped, since a gradient overflowed; the same on all ranks.
        cannot_fall: whether no smaller loss scale was left for that.
        means: over all ranks, once they are known and the step was found good.
    """

    sums: Sums
    start: int
    skipped: bool
    cannot_fall: bool
    means: dict[str, float] | None = None


@dataclass(frozen=True)
class RunSettings:
    """What a step computes with, and when the loop does what; intervals in steps, 0 for never."""

    seed: int
    seq_len: int
    train_batch_size: int
    micro_batch_size: int
    micro_batch_tokens: int | None
    max_micro_steps: int
    spike_factor: float
    schedule: ScheduleSettings
    max_steps: int
    log_interval: int
    diagnostics_interval: int
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
        self._diagnostics: Diagnostics | None = None  # made when it is first needed
        self._saved_step = state.step
        self._problem: UserError | None = None  # of this rank, until all ranks know of it
        self._last: LastStep | None = None
        self._logged_at = time.monotonic()
        self._tokens_since = 0
        self._wait_since = 0.0

    def run(self, batches: Iterable[StepShare]) -> bool:
        """Train to the last step; returns whether it was reached (else a stop was asked for). Saves either way.

        Raises:
            TroubleError: training cannot go on from here; nothing is saved since it began.
            AgreedError: of some rank's.
        """
        try:
            finished = self._run(iter(batches))
            self.stop.ignore()
            self.save()
        except AgreedError:
            self.publish()  # what was saved before it is good
            raise
        self.publish()
        return finished

    def _run(self, shares: Iterator[StepShare]) -> bool:
        finished = self.state.step >= self.settings.max_steps
        while not finished:
            if not self.train_step(self._next(shares)):
                break
            step, finished = self.state.step, self.state.step == self.settings.max_steps
            if finished or _is_due(step, self.settings.eval_interval):
                self.evaluate()
            if finished or _is_due(step, self.settings.save_interval):
                self.save()
        return finished

    def _next(self, shares: Iterator[StepShare]) -> StepShare | None:
        try:
            return next(shares)
        except UserError as error:
            self._problem = error
            return None

    def train_step(self, share: StepShare | None) -> bool:
        """Train on one global batch; False, and nothing done, if some rank was asked to stop.

        One small all-reduce at its start tells all ranks the global number of masked tokens, the sums of the last
        step, and who wants to stop, has written its part of a checkpoint, or has a problem.

        Args:
            share: of this rank; None if it has a problem, which ends all ranks here.
        """
        own = (share.masked_lm_count, share.tokens) if share else (0, 0)
        flags = self.stop.raised(), self.checkpoints.is_written, self._problem is not None
        last = self._last.sums.local() if self._last else ()
        masked, tokens, stop, written, problems, *last = all_sum([*own, *flags, *last])
        if problems:
            raise_together(self._problem)
        if self._last:
            self._judge(last)
        if written == self.world.world_size:
            self.publish()
        if stop:
            return False
        sums = self._forward_backward(share, masked)
        rate = learning_rate(self.settings.schedule, self.state.applied_steps)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        skipped_before = self.engine.skipped_steps
        cannot_fall = loss_scale_cannot_fall(self.engine.optimizer.loss_scaler)
        with self._measured() as diagnosis:
            self.engine.step()
        skipped = self.engine.skipped_steps > skipped_before
        self._last = LastStep(sums, self.state.consumed, skipped, cannot_fall)
        self.state.step += 1
        self.state.skipped_steps += skipped
        self.state.consumed = share.stop
        self.state.tokens += int(tokens)
        self._tokens_since += int(tokens)
        self._wait_since += share.wait_seconds
        if self.state.step == self.settings.max_steps or _is_due(self.state.step, self.settings.log_interval):
            self._log(rate, share, int(tokens))
        elif self.progress:
            self.progress.update(self.state.step, 0.0)
        if diagnosis and not skipped:
            self._record(*diagnosis)
        return True

    def _measured(self) -> contextlib.AbstractContextManager:
        """What the coming update does to the weights is measured, if it is time for that."""
        if not _is_due(self.state.step + 1, self.settings.diagnostics_interval):
            return contextlib.nullcontext()
        self._diagnostics = self._diagnostics or Diagnostics(self.engine)
        return self._diagnostics.measure()

    def _forward_backward(self, share: StepShare, global_masked: float) -> Sums:
        masked_lm_scale = self.world.world_size / max(1.0, global_masked)
        next_sentence_scale = self.world.world_size / self.settings.train_batch_size
        sums = Sums(self.world.device)
        micro_steps = len(share.micro_batches)
        # Beyond it this rank would reduce gradients more often than the others, and hang or train something else.
        assert 1 <= micro_steps <= self.settings.max_micro_steps
        hold_loss_scale(self.engine.optimizer)
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

    def last_means(self) -> dict[str, float]:
        """Means of the last step over all ranks; a collective call.

        Raises:
            TroubleError: it was not a good step.
        """
        if self._last.means is None:
            self._judge(all_sum(self._last.sums.local()))
        return self._last.means

    def last_local_sums(self) -> list[float]:
        """What this rank has summed up in the last step."""
        return self._last.sums.local()

    def _judge(self, totals: list[float]) -> None:
        """Take the last step into the history, once, and raise TroubleError if it was not good."""
        last = self._last
        if last.means is None:
            means = Sums.means(totals, self.engine.module.next_sentence_head is not None)
            entry = last.start, None if last.skipped else means["loss"]
            self.state.history = [*self.state.history, entry][-HISTORY:]
            scaler = self.engine.optimizer.loss_scaler
            find_trouble(self.state, means["loss"], scaler, last.cannot_fall, self.settings.spike_factor)
            last.means = means

    def _log(self, rate: float, share: StepShare, tokens: int) -> None:
        means = self.last_means()
        now = time.monotonic()
        seconds, self._logged_at = now - self._logged_at, now
        tokens_per_second = self._tokens_since / seconds
        values = {f"train/{name}": value for name, value in means.items()}
        values |= {
            "optimizer/learning_rate": rate,
            "optimizer/gradient_norm": float(self.engine.get_global_grad_norm() or 0.0),
            "optimizer/loss_scale": float(getattr(self.engine.optimizer, "loss_scale", 1.0)),
            "optimizer/skipped_steps": self.state.skipped_steps,
            "progress/samples": self.state.earlier_samples + self.state.step * self.settings.train_batch_size,
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

    def _record(self, values: dict[str, float], histograms: dict[str, torch.Tensor] | None = None) -> None:
        if self.recorder:
            with self._metrics_problem():
                self.recorder.record(self.state.global_step, values, histograms)

    @contextlib.contextmanager
    def _metrics_problem(self) -> Iterator[None]:
        """Remember that rank 0 could not write its metrics, until all ranks end with it."""
        try:
            yield
        except OSError as error:
            self._problem = self._problem or UserError(
                f"step {self.state.step:,}: the metrics could not be written ({error}); mend that, or make room on the "
                f"disk, and run the same command again: it goes on from step {self._saved_step:,}"
            )

    def evaluate(self) -> dict[str, float] | None:
        """Loss and accuracies on the held-out shards with their stored masks; None if there are none."""
        if not self.shard_set.block_offsets("eval")[-1]:
            return None
        started = time.monotonic()
        self._check()
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
        self._check()
        if self.recorder:
            with self._metrics_problem():
                self.recorder.flush()
        raise_together(self._problem)
        self.publish()
        self.checkpoints.save(self.engine, self.state)
        self._saved_step = self.state.step
        self._logged_at += time.monotonic() - started

    def _check(self) -> None:
        """Raise TroubleError if the last step, or what its update has made, is not good; a collective call."""
        if self._last:
            self.last_means()
            check_weights(self.engine, self.state)

    def restart(self, state: TrainState) -> None:
        """Go on from another state, which the engine was given already; rank 0 takes back what it recorded beyond."""
        self.state = state
        self._saved_step = state.step
        self._last = None
        self._tokens_since, self._wait_since, self._logged_at = 0, 0.0, time.monotonic()
        if self.recorder:
            with self._metrics_problem():
                self.recorder.go_back(state.global_step)

    def publish(self) -> None:
        """Wait for the checkpoint that is being written, if there is one, and make it the newest."""
        path = self.checkpoints.finish()
        if path is None:
            return
        self.checkpoints.prune(self._saved_step, self.settings.keep, self.settings.keep_every)
        if self.progress:
            self.progress.say(f"step {self._saved_step:,}: saved {path}")


def _is_due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0
