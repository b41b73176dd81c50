"""BERT (Devlin et al. 2019) without padding, with its two pretraining heads.

Dimensions in the shape comments:

    B  sequences of a micro-batch            H  hidden_size
    T  tokens of all B sequences together    h  attention heads, of d = H / h numbers each
    M  masked positions of all B sequences   F  intermediate_size
    V  vocab_size, Vp padded in memory       L  layers

The sequences lie end to end: every linear layer sees [T, H] and no row is padding. Only attention knows where
one sequence ends (attention.py), only the M masked rows reach the vocabulary, and only the B first rows the
next-sentence head. Layers are post-LayerNorm, as in the paper.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data_prep.errors import UserError
from pretraining.attention import (
    AttentionPlan,
    attention,
    choose_backend,
    dropout,
    dropout_add,
    plan_attention,
)

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu}

# (layers, hidden_size, heads): the first four from Turc et al. 2019, the others from Devlin et al. 2019.
PRESETS = {
    "tiny": (2, 128, 2),
    "mini": (4, 256, 4),
    "small": (4, 512, 8),
    "medium": (8, 512, 8),
    "base": (12, 768, 12),
    "large": (24, 1024, 16),
}


@dataclass(frozen=True)
class BertConfig:
    """The shape of a model. Field names are those of Hugging Face's BERT, except next_sentence.

    next_sentence: whether there is a next-sentence head, and with it the pooler that only this head trains.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    layer_norm_eps: float = 1e-12
    initializer_range: float = 0.02
    next_sentence: bool = True

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise UserError("the model configuration is not usable: " + "; ".join(problems))

    def _problems(self):
        wrong_type = [f for f in fields(self) if not _has_type(getattr(self, f.name), f.type)]
        for f in wrong_type:
            yield f"{f.name} must be of type {f.type.__name__}, not {getattr(self, f.name)!r}"
        if wrong_type:
            return  # comparisons below would fail on them
        for f in fields(self):
            if f.type is int and getattr(self, f.name) < 1:
                yield f"{f.name} must be at least 1, not {getattr(self, f.name)}"
            if f.name.endswith("dropout_prob") and not 0 <= getattr(self, f.name) < 1:
                yield f"{f.name} must be in [0, 1), not {getattr(self, f.name)}"
        if self.num_attention_heads > 0 and self.hidden_size % self.num_attention_heads:
            yield f"hidden_size {self.hidden_size} is not divisible by num_attention_heads {self.num_attention_heads}"
        if self.hidden_act not in ACTIVATIONS:
            yield f"hidden_act must be one of {', '.join(ACTIVATIONS)}, not {self.hidden_act!r}"

    @classmethod
    def preset(cls, name: str, vocab_size: int, **overrides: Any) -> "BertConfig":
        """A named size from PRESETS; `overrides` are fields of this class."""
        if name not in PRESETS:
            raise UserError(f"there is no model preset {name!r}; choose one of {', '.join(PRESETS)}")
        layers, hidden_size, heads = PRESETS[name]
        shape = {"num_hidden_layers": layers, "hidden_size": hidden_size, "num_attention_heads": heads}
        shape |= overrides
        shape.setdefault("intermediate_size", 4 * shape["hidden_size"])
        return cls(vocab_size=vocab_size, **shape)

    @property
    def padded_vocab_size(self) -> int:
        """Vp: the next multiple of 64, for which matrix multiplication has its fast tiles."""
        return -(-self.vocab_size // 64) * 64

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def num_parameters(self) -> int:
        """Parameters of BertForPreTraining, the tied decoder once and vocabulary padding not counted."""
        H, F_ = self.hidden_size, self.intermediate_size  # noqa: N806 (the legend's letters)
        layer_norm = 2 * H
        embeddings = (self.vocab_size + self.max_position_embeddings + self.type_vocab_size) * H + layer_norm
        layer = 4 * (H * H + H) + (H * F_ + F_) + (F_ * H + H) + 2 * layer_norm
        masked_lm = H * H + H + layer_norm + self.vocab_size
        next_sentence = (H * H + H) + (2 * H + 2) if self.next_sentence else 0
        return embeddings + self.num_hidden_layers * layer + masked_lm + next_sentence

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `from_dict` reads them back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "BertConfig":
        """The inverse of `to_dict`. Raises UserError naming missing and unknown keys."""
        known = {f.name for f in fields(cls)}
        required = [f.name for f in fields(cls) if f.default is MISSING]
        missing, unknown = [k for k in required if k not in values], sorted(set(values) - known)
        if missing or unknown:
            complaint = [f"lacks {', '.join(missing)}"] * bool(missing)
            complaint += [f"has the unknown {', '.join(unknown)}"] * bool(unknown)
            raise UserError(f"the model configuration {' and '.join(complaint)}")
        return cls(**values)


def _has_type(value: Any, expected: type) -> bool:
    if isinstance(value, bool) or expected is bool:
        return isinstance(value, bool) and expected is bool
    return isinstance(value, (int, float) if expected is float else expected)


@dataclass
class MicroBatch:
    """B sequences end to end, as the loader makes them."""

    input_ids: Tensor  # [T] int64
    token_type_ids: Tensor  # [T] int64, 0 in segment A and 1 in segment B
    position_ids: Tensor  # [T] int64, from 0 in each sequence
    lengths: np.ndarray  # [B] integers in host memory, of which T is the sum
    cls_positions: Tensor  # [B] int64, where on the T axis each sequence starts
    masked_lm_positions: Tensor  # [M] int64, indices into the T axis
    masked_lm_labels: Tensor  # [M] int64, the original ids
    next_sentence_labels: Tensor | None = None  # [B] int64: 0 = B follows A, 1 = B was drawn at random

    def to(self, device: torch.device | str) -> "MicroBatch":
        """A copy on `device`; from pinned memory the transfer does not wait."""
        tensors = {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **{name: x.to(device, non_blocking=True) for name, x in tensors.items()})


class PreTrainingOutput(NamedTuple):
    """Sums, so that the caller can divide by the counts of the global batch (a mean of means would be wrong).

    A tuple and not a dataclass: DeepSpeed looks for the tensors whose backward pass it must prepare inside
    tuples, lists and dicts only.
    """

    masked_lm_loss_sum: Tensor  # float32 scalar, cross entropy in nats summed over M
    next_sentence_loss_sum: Tensor | None  # float32 scalar, summed over B; None without the head
    masked_lm_correct: Tensor  # int64 scalar, how many of M had the original id on top
    next_sentence_correct: Tensor | None  # int64 scalar, how many of B; None without the head


class BertEmbeddings(nn.Module):
    """Word + position + segment, LayerNorm, dropout (Devlin et al. 2019, figure 2)."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.padded_vocab_size, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout_p = config.hidden_dropout_prob

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Three [T] int64 → [T, H]."""
        words = self.word_embeddings(input_ids)
        # Each of these few rows gathers the gradients of very many tokens: in float32, as a bfloat16 sum
        # stops growing once it is 256 times its addends.
        positions = F.embedding(position_ids, self.position_embeddings.weight.float())
        segments = F.embedding(token_type_ids, self.token_type_embeddings.weight.float())
        hidden = self.layer_norm(words + (positions + segments).to(words.dtype))
        return dropout(hidden, self.dropout_p if self.training else 0.0)


class BertLayer(nn.Module):
    """Self-attention and feed-forward network, each with dropout, residual and LayerNorm after it."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        hidden_size, eps = config.hidden_size, config.layer_norm_eps
        self.heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.attention_dense = nn.Linear(hidden_size, hidden_size)
        self.attention_layer_norm = nn.LayerNorm(hidden_size, eps=eps)
        self.intermediate_dense = nn.Linear(hidden_size, config.intermediate_size)
        self.output_dense = nn.Linear(config.intermediate_size, hidden_size)
        self.output_layer_norm = nn.LayerNorm(hidden_size, eps=eps)
        self.activation = ACTIVATIONS[config.hidden_act]
        self.hidden_dropout_p = config.hidden_dropout_prob
        self.attention_dropout_p = config.attention_probs_dropout_prob

    def forward(self, hidden: Tensor, plan: AttentionPlan) -> Tensor:
        """[T, H] → [T, H]."""
        hidden_dropout_p = self.hidden_dropout_p if self.training else 0.0
        attention_dropout_p = self.attention_dropout_p if self.training else 0.0

        qkv = self.query_key_value(hidden).view(-1, 3, self.heads, self.head_dim)  # [T, 3H] → [T, 3, h, d]
        context = attention(*qkv.unbind(1), plan, attention_dropout_p)  # 3 × [T, h, d] → [T, h, d]
        context = self.attention_dense(context.flatten(1))  # [T, h, d] → [T, H]
        hidden = self.attention_layer_norm(dropout_add(context, hidden, hidden_dropout_p))

        intermediate = self.activation(self.intermediate_dense(hidden))  # [T, F]
        output = self.output_dense(intermediate)  # [T, H]
        return self.output_layer_norm(dropout_add(output, hidden, hidden_dropout_p))


class BertModel(nn.Module):
    """The encoder."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = BertEmbeddings(config)
        self.layers = nn.ModuleList(BertLayer(config) for _ in range(config.num_hidden_layers))
        self.pooler = nn.Linear(config.hidden_size, config.hidden_size) if config.next_sentence else None

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor,
        position_ids: Tensor,
        lengths: Sequence[int] | np.ndarray,
    ) -> Tensor:
        """Three [T] int64 and B lengths that sum to T → hidden states of the last layer [T, H]."""
        hidden = self.embeddings(input_ids, token_type_ids, position_ids)
        dropout_p = self.config.attention_probs_dropout_prob if self.training else 0.0
        backend = choose_backend(hidden.device, hidden.dtype, dropout_p, self.config.head_dim)
        plan = plan_attention(lengths, hidden.device, backend)
        for layer in self.layers:
            hidden = layer(hidden, plan)
        return hidden

    def pool(self, hidden: Tensor, cls_positions: Tensor) -> Tensor:
        """tanh of a linear layer on the first token of each sequence: [T, H] and [B] → [B, H]."""
        return torch.tanh(self.pooler(hidden[cls_positions]))


class MaskedLMHead(nn.Module):
    """Linear, GELU and LayerNorm before the tied decoder, whose bias is here."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(config.padded_vocab_size))
        self.activation = ACTIVATIONS[config.hidden_act]
        self.vocab_size = config.vocab_size

    def forward(self, hidden: Tensor, decoder_weight: Tensor) -> Tensor:
        """[M, H] and the word embeddings [Vp, H] → logits [M, V]."""
        hidden = self.layer_norm(self.activation(self.dense(hidden)))
        logits = F.linear(hidden, decoder_weight, self.bias)  # [M, Vp]
        # Cutting the padding off here gives it no probability and a gradient of exactly zero.
        return logits[:, : self.vocab_size]


class BertForPreTraining(nn.Module):
    """The encoder with the masked-LM head and, if the configuration has it, the next-sentence head.

    Weights start as the original code's do: truncated at two standard deviations (google-research/bert,
    modeling.py, create_initializer), biases 0, LayerNorm 1 and 0. Seed with torch.manual_seed before.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.bert = BertModel(config)
        self.masked_lm_head = MaskedLMHead(config)
        self.next_sentence_head = nn.Linear(config.hidden_size, 2) if config.next_sentence else None
        for module in self.modules():
            initialize_weights(module, config.initializer_range)
        with torch.no_grad():
            self.bert.embeddings.word_embeddings.weight[config.vocab_size :] = 0

    def masked_lm_logits(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """Hidden states [T, H] and [M] indices into T → logits [M, V] over the vocabulary."""
        return self.masked_lm_head(hidden[positions], self.bert.embeddings.word_embeddings.weight)

    def next_sentence_logits(self, hidden: Tensor, cls_positions: Tensor) -> Tensor:
        """Hidden states [T, H] and [B] starts → [B, 2]: is next, is random."""
        return self.next_sentence_head(self.bert.pool(hidden, cls_positions))

    def forward(self, batch: MicroBatch) -> PreTrainingOutput:
        """Losses of one micro-batch; M may be 0, and even T: then the sums are 0 and still have a graph."""
        hidden = self.bert(batch.input_ids, batch.token_type_ids, batch.position_ids, batch.lengths)
        masked_lm_logits = self.masked_lm_logits(hidden, batch.masked_lm_positions)
        masked_lm = _loss_and_correct(masked_lm_logits, batch.masked_lm_labels)
        next_sentence = (None, None)
        if self.next_sentence_head is not None:
            if batch.next_sentence_labels is None:
                raise ValueError("the model has a next-sentence head and the micro-batch no labels for it")
            logits = self.next_sentence_logits(hidden, batch.cls_positions)
            next_sentence = _loss_and_correct(logits, batch.next_sentence_labels)
        return PreTrainingOutput(masked_lm[0], next_sentence[0], masked_lm[1], next_sentence[1])


def _loss_and_correct(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """[N, classes] and [N] → summed cross entropy in float32, and how many argmaxes are right."""
    loss_sum = F.cross_entropy(logits.float(), labels, reduction="sum")
    with torch.no_grad():
        correct = (logits.argmax(-1) == labels).sum()
    return loss_sum, correct


@torch.no_grad()
def initialize_sinusoidal(positions: nn.Embedding, standard_deviation: float) -> None:
    """Set position embeddings [P, H], H even, to the sinusoids of Vaswani et al. 2017, section 3.5.

    Wavelengths go from 2π to 2π·1000 positions, enough to tell a few hundred apart; the amplitude gives
    the rows the standard deviation that random ones would have.
    """
    number, hidden_size = positions.weight.shape
    frequencies = torch.exp(torch.arange(0, hidden_size, 2) * (-math.log(1000) / hidden_size))
    angles = torch.arange(number)[:, None] * frequencies  # [P, H/2]
    positions.weight.copy_(math.sqrt(2) * standard_deviation * torch.cat([angles.sin(), angles.cos()], 1))


def initialize_weights(module: nn.Module, initializer_range: float) -> None:
    """Initialise the parameters that `module` itself holds; heads of other tasks start the same way."""
    if isinstance(module, nn.Linear | nn.Embedding):
        bound = 2 * initializer_range
        nn.init.trunc_normal_(module.weight, std=initializer_range, a=-bound, b=bound)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
