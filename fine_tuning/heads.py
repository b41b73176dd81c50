"""Task models: the encoder of pretraining with a head. Dimensions as in pretraining/model.py, C classes.

A task model is a module whose `forward` takes a MicroBatch and gives outputs in float32, and whose `loss_sum`
takes outputs and targets; its encoder is called `bert`, so that pretrained weights find their places.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data_prep.errors import UserError
from pretraining.attention import dropout
from pretraining.model import BertConfig, BertModel, MicroBatch, initialize_weights


class SequenceClassifier(nn.Module):
    """Dropout and a linear layer on one vector per sequence (Devlin et al. 2019, section 4.1).

    With `pooling` "cls" the vector is BERT's pooler, and this is transformers' BertForSequenceClassification;
    with "mean" it is the mean of the last hidden states, which needs no pretrained [CLS].
    """

    def __init__(self, config: BertConfig, classes: int, pooling: str) -> None:
        super().__init__()
        self.config = replace(config, next_sentence=pooling == "cls")  # so the encoder has a pooler or none
        self.bert = BertModel(self.config)
        self.classifier = nn.Linear(config.hidden_size, classes)
        self.pooling = pooling
        for module in self.modules():
            initialize_weights(module, config.initializer_range)
        with torch.no_grad():
            self.bert.embeddings.word_embeddings.weight[config.vocab_size :] = 0

    def forward(self, batch: MicroBatch) -> Tensor:
        """B sequences → logits [B, C] in float32."""
        hidden = self.bert(batch.input_ids, batch.token_type_ids, batch.position_ids, batch.lengths)
        if self.pooling == "cls":
            pooled = self.bert.pool(hidden, batch.cls_positions)
        else:
            pooled = mean_of_sequences(hidden, batch.lengths)
        pooled = dropout(pooled, self.config.hidden_dropout_prob if self.training else 0.0)
        return self.classifier(pooled).float()

    @staticmethod
    def loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
        """Logits [B, C] and class numbers [B] → cross entropy in nats, summed over B."""
        return F.cross_entropy(logits, targets, reduction="sum")


HEADS: dict[str, type[SequenceClassifier]] = {"classification": SequenceClassifier}


def mean_of_sequences(hidden: Tensor, lengths: np.ndarray) -> Tensor:
    """Mean over the tokens of each sequence: [T, H] and B lengths that sum to T → [B, H], summed in float32."""
    lengths = torch.from_numpy(lengths).to(hidden.device)
    sequence = torch.repeat_interleave(lengths)  # [T], number of the sequence
    sums = hidden.new_zeros(len(lengths), hidden.shape[1], dtype=torch.float32).index_add(
        0, sequence, hidden.float()
    )
    return (sums / lengths[:, None]).to(hidden.dtype)


def load_encoder(model: nn.Module, state_dict: Mapping[str, Tensor], source: str) -> list[str]:
    """Copy pretrained weights into the encoder of a task model.

    Args:
        model: with its encoder under `bert`.
        state_dict: names of BertForPreTraining; what belongs to other heads is left out.
        source: whose weights these are, for messages.
    Returns:
        The names of the encoder's weights that stay as they were because the source has none: the pooler's, or
        none.
    Raises:
        UserError: other weights of the encoder are missing.
    """
    wanted = [name for name in model.state_dict() if name.startswith("bert.")]
    missing = [name for name in wanted if name not in state_dict]
    if lost := [name for name in missing if not name.startswith("bert.pooler.")]:
        raise UserError(
            f"{source}: it has no weights {lost[0]}, so it is not a whole encoder; start from another"
        )
    model.load_state_dict({name: state_dict[name] for name in wanted if name in state_dict}, strict=False)
    return missing
