"""What a run will be, before it is started: parameters, memory, batches, epochs, and what is replaced here."""

import numpy as np

from pretraining.config import Lowered
from pretraining.model import BertConfig
from pretraining.optimizer import choose_optimizer

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def describe(
    config: BertConfig,
    lowered: Lowered,
    shard_set,
    *,
    seq_len: int,
    world_size: int,
    max_steps: int,
    masked_lm_prob: float,
    notes: list[str],
) -> list[str]:
    """Lines for the user."""
    optimizer = choose_optimizer(lowered.optimizer, lowered.optimizer_device)
    return [
        *_model_lines(config),
        *_batch_lines(lowered, shard_set, world_size, max_steps),
        *_memory_lines(config, lowered, seq_len, masked_lm_prob, world_size),
        f"optimizer: {optimizer.name}: {optimizer.why}",
        *(f"note: {note}" for note in notes),
    ]


def _model_lines(config: BertConfig) -> list[str]:
    return [
        f"model: {config.num_hidden_layers} layers, hidden size {config.hidden_size}, {config.num_attention_heads} heads, "
        f"vocabulary {config.vocab_size:,} ({config.padded_vocab_size:,} in memory)",
        f"parameters: {config.num_parameters():,}",
    ]


def _batch_lines(lowered: Lowered, shard_set, world_size: int, max_steps: int) -> list[str]:
    counts = shard_set.manifest["splits"]["train"]["counts"]
    instances, batch = counts["instances"], lowered.train_batch_size
    share = -(-batch // world_size)
    epochs = max_steps * batch / instances
    budget = f" and {lowered.micro_batch_tokens:,} tokens" if lowered.micro_batch_tokens else ""
    return [
        f"batch: {batch:,} instances = {world_size} ranks × {share:,} at most, in up to {lowered.max_micro_steps} "
        f"micro-batches of {lowered.micro_batch_size}{budget}",
        f"epoch: {instances:,} instances, {counts['tokens']:,} tokens = {instances / batch:,.1f} steps",
        f"steps: {max_steps:,} = {epochs:,.2f} epochs, {max_steps * batch * counts['tokens'] / instances:,.0f} tokens",
    ]


def _memory_lines(
    config: BertConfig, lowered: Lowered, seq_len: int, masked_lm_prob: float, world_size: int
) -> list[str]:
    """Memory of one rank in bytes by use.

    Model states after Rajbhandari et al. 2020 (ZeRO), section 3.1: parameters, gradients, and 12 bytes per
    parameter for the fp32 copy and both moments, divided by the ranks; without ZeRO the moments alone, on each rank.
    Activations after Korthikanti et al. 2022, section 4.1: 34·s·b·h + 5·a·s²·b bytes per layer in 16 bits; here s·b
    are real tokens at most, and no score matrix is kept where attention is fused, so the second term is an upper bound.
    """
    parameters = config.num_parameters()
    width = BYTES[lowered.precision]
    tokens = lowered.micro_batch_size * seq_len
    if lowered.micro_batch_tokens:
        tokens = min(tokens, lowered.micro_batch_tokens)
    per_layer = 34 * tokens * config.hidden_size + 5 * config.num_attention_heads * tokens * seq_len
    masked = round(tokens * masked_lm_prob)
    stage = lowered.engine_config["zero_optimization"]["stage"]
    optimizer = parameters * 12 // world_size if stage else parameters * 8
    gradient_width = 4 if lowered.max_micro_steps > 1 else width
    uses = {
        "parameters": parameters * width,
        "gradients": parameters * gradient_width,
        f"optimizer ({f'ZeRO-{stage}' if stage else 'whole'})": optimizer,
        "activations": config.num_hidden_layers * per_layer * width // 2,
        "vocabulary scores": masked * config.padded_vocab_size * (width + 4),
    }
    total = np.sum(list(uses.values()))
    parts = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in uses.items())
    return [f"memory per rank: about {total / 1e9:.2f} GB ({parts})"]
