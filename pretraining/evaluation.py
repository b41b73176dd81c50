"""Losses and accuracies as sums over micro-batches and ranks, in training and on held-out shards."""

import math
from collections.abc import Callable

import torch

from data_prep.errors import UserError
from pretraining.data import evaluation_batches
from pretraining.distributed import World, all_sum, raise_together
from pretraining.model import PreTrainingOutput


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

    def local(self) -> list[float]:
        """The sums and counts of this rank, as `means` takes them; the only place that waits for the device."""
        return [*self._values.tolist(), self.masked_tokens, self.instances]

    @classmethod
    def means(cls, values: list[float], has_next_sentence: bool) -> dict[str, float]:
        """Means out of what `local` gave, summed over the ranks."""
        totals = dict(zip(cls.NAMES, values, strict=False))
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
    sums, problem = Sums(world.device), None
    try:
        for micro_batch in evaluation_batches(
            shard_set, "eval", world.rank, world.world_size, micro_batch_size, limit, micro_batch_tokens
        ):
            output = model(micro_batch.to(world.device))
            sums.add(output, len(micro_batch.masked_lm_labels), len(micro_batch.lengths))
            if on_batch:
                on_batch()
    except UserError as error:
        problem = error
    model.train(was_training)
    raise_together(problem)
    means = Sums.means(all_sum(sums.local()), model.next_sentence_head is not None)
    means["masked_lm_perplexity"] = math.exp(min(means["masked_lm_loss"], 50.0))
    return means
