"""A fine-tuned model as a folder: what transformers needs to load it, and fine_tuning.json beside it.

With the pooler on [CLS] it is transformers' BertForSequenceClassification. A classifier on the mean of all
tokens has no class there: its folder loads as the encoder that it is (AutoModel), and as a classifier only here.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from data_prep.documents import clean_text
from data_prep.errors import UserError
from data_prep.huggingface_tokenizer import write_huggingface_tokenizer
from data_prep.shards import sync, write_atomically
from data_prep.tokenizer import Tokenizer
from fine_tuning.features import FEATURES
from fine_tuning.heads import HEADS, SequenceClassifier
from fine_tuning.results import MODEL
from fine_tuning.trainer import predict
from pretraining.huggingface import (
    config_for_weights,
    config_to_huggingface,
    from_huggingface,
    standard_layout,
    to_huggingface,
)

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
DESCRIPTION = "fine_tuning.json"
# The class in transformers, and the name that keeps a head from being loaded there as something else.
_ARCHITECTURES = {"cls": "BertForSequenceClassification", "mean": "BertModel"}
_HEAD_NAMES = {"cls": "classifier", "mean": "mean_pooling_classifier"}


@dataclass(frozen=True)
class Description:
    """What a model must know about its task.

    Attributes:
        task: its name.
        problem: the key of features.FEATURES and heads.HEADS.
        pooling: "cls" or "mean".
        labels: in the order of the outputs.
        text_columns: names of the fields of text.
        max_length: tokens at which texts are cut.
        run: learning rate, seed and fingerprint of the run that it came from.
    """

    task: str
    problem: str
    pooling: str
    labels: Sequence[str]
    text_columns: Sequence[str]
    max_length: int
    run: dict[str, Any]


def write_model(
    folder: Path, model: SequenceClassifier, tokenizer: Tokenizer, description: Description
) -> None:
    """Write a model folder in place of the one that is there."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write_huggingface_tokenizer(tokenizer, partial, max_length=model.config.max_position_embeddings)
    state_dict = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    encoder = {name: tensor for name, tensor in state_dict.items() if name.startswith("bert.")}
    head = _HEAD_NAMES[description.pooling]
    weights = to_huggingface(encoder, model.config) | {
        f"{head}.{kind}": state_dict[f"classifier.{kind}"] for kind in ("weight", "bias")
    }
    save_file(weights, partial / WEIGHTS, metadata={"format": "pt"})
    sync(partial / WEIGHTS)
    values = config_to_huggingface(model.config) | {
        "architectures": [_ARCHITECTURES[description.pooling]],
        "id2label": {str(i): label for i, label in enumerate(description.labels)},
        "label2id": {label: i for i, label in enumerate(description.labels)},
        "problem_type": "single_label_classification",
        "pad_token_id": tokenizer.pad_id,
        "dtype": "float32",
    }
    for name, content in ((CONFIG, values), (DESCRIPTION, asdict(description))):
        text = json.dumps(content, indent=2, ensure_ascii=False)
        write_atomically(partial / name, f"{text}\n".encode())
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    sync(folder.parent)


def read_description(folder: Path) -> Description | None:
    """The description in a model folder; None if there is none that is whole."""
    try:
        return Description(**json.loads((folder / DESCRIPTION).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


class Predictor:
    """A fine-tuned model with its tokenizer, ready to predict.

    Args:
        folder: a model folder, or a results folder with one.
        device: where it computes.
    Raises:
        UserError: there is no model, or it is damaged.
    """

    def __init__(self, folder: Path, device: torch.device):
        if not (folder / DESCRIPTION).is_file() and (folder / MODEL).is_dir():
            folder = folder / MODEL
        description = read_description(folder)
        if description is None:
            raise UserError(
                f"{folder}: there is no fine-tuned model here (no {DESCRIPTION}); make one with "
                "`python fine_tuning/run.py`"
            )
        self.description = description
        self.device = device
        self.tokenizer = Tokenizer(folder)
        self.model = _read_model(folder, description).to(device)

    def logits(self, columns: Sequence[Sequence[str]]) -> np.ndarray:
        """Outputs for texts (one list per text column), float32 [n, classes]."""
        make_features = FEATURES[self.description.problem]
        columns = [[clean_text(text) for text in column] for column in columns]  # as training examples are
        features = make_features(self.tokenizer, columns, self.description.max_length)
        return predict(self.model, features.instances, self.device)

    def probabilities(self, columns: Sequence[Sequence[str]]) -> list[dict[str, float]]:
        """Label → probability for each text, in the order of the labels."""
        rows = torch.from_numpy(self.logits(columns)).softmax(-1).tolist()
        return [dict(zip(self.description.labels, row, strict=True)) for row in rows]


def _read_model(folder: Path, description: Description) -> SequenceClassifier:
    try:
        weights = load_file(folder / WEIGHTS)
        values = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(
            f"{error.filename or folder / WEIGHTS}: the file is missing; fine-tune again"
        ) from None
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{folder}: the model cannot be read ({error}); fine-tune again") from None
    encoder, _ = standard_layout(weights)
    config = config_for_weights(values, encoder)
    head = _HEAD_NAMES[description.pooling]
    model = HEADS[description.problem](config, len(description.labels), description.pooling)
    state_dict = from_huggingface(encoder, config)
    try:
        state_dict |= {f"classifier.{kind}": weights[f"{head}.{kind}"] for kind in ("weight", "bias")}
        model.load_state_dict(state_dict)
    except (KeyError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{folder}: weights and {DESCRIPTION} do not fit together ({reason})") from None
    return model
