"""Names and shapes of Hugging Face's BERT: weights and configuration, in both directions, without transformers.

Differences: there query, key and value are three layers and here one; here the vocabulary is padded to a
multiple of 64 rows; there the tied decoder has names of its own, which its files leave out.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from data_prep.errors import UserError
from pretraining.model import BertConfig, BertForPreTraining

_EMBEDDINGS = {
    "bert.embeddings.word_embeddings": "bert.embeddings.word_embeddings",
    "bert.embeddings.position_embeddings": "bert.embeddings.position_embeddings",
    "bert.embeddings.token_type_embeddings": "bert.embeddings.token_type_embeddings",
}
_MODULES = {
    "bert.embeddings.layer_norm": "bert.embeddings.LayerNorm",
    "masked_lm_head.dense": "cls.predictions.transform.dense",
    "masked_lm_head.layer_norm": "cls.predictions.transform.LayerNorm",
}
_NEXT_SENTENCE_MODULES = {
    "bert.pooler": "bert.pooler.dense",
    "next_sentence_head": "cls.seq_relationship",
}
_LAYER_MODULES = {
    "attention_dense": "attention.output.dense",
    "attention_layer_norm": "attention.output.LayerNorm",
    "intermediate_dense": "intermediate.dense",
    "output_dense": "output.dense",
    "output_layer_norm": "output.LayerNorm",
}
_VOCABULARY = ("bert.embeddings.word_embeddings.weight", "masked_lm_head.bias")
_TIED = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
# Parts that a model may lack: our names and theirs.
HEADS = {
    "masked_lm_head": "cls.predictions",
    "bert.pooler": "bert.pooler",
    "next_sentence_head": "cls.seq_relationship",
}
# A buffer of old transformers versions: 0, 1, 2, …
_IGNORED = ("bert.embeddings.position_ids",)

_ARCHITECTURES = {"BertForPreTraining": True, "BertForMaskedLM": False}  # → next_sentence
# Their class for each choice of heads (masked LM, next sentence).
_CLASS_OF_HEADS = {
    (True, True): "BertForPreTraining",
    (True, False): "BertForMaskedLM",
    (False, True): "BertForNextSentencePrediction",
    (False, False): "BertModel",
}
_SAME_KEYS = [name for name in BertConfig.__dataclass_fields__ if name != "next_sentence"]
# What transformers assumes, and the only thing that this model can be.
_FIXED = {
    "model_type": "bert",
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}


def to_huggingface(state_dict: Mapping[str, Tensor], config: BertConfig) -> dict[str, Tensor]:
    """Our state dict of BertForPreTraining → Hugging Face's, of the class class_of names.

    Heads that the state dict lacks are left out. Tensors are copies that share no memory, and tied weights
    appear once, as safetensors wants both.
    """
    weights = {}
    absent = absent_heads(state_dict)
    for ours, theirs in _tensor_names(config):
        if ours.startswith(absent):
            continue
        tensor = state_dict[ours]
        if ours in _VOCABULARY:
            tensor = tensor[: config.vocab_size]
        # [3H, …] → three of [H, …]; every other tensor is its only part
        for name, part in zip(theirs, tensor.chunk(len(theirs)), strict=True):
            weights[name] = part.clone(memory_format=torch.contiguous_format)
    return weights


def from_huggingface(state_dict: Mapping[str, Tensor], config: BertConfig) -> dict[str, Tensor]:
    """Hugging Face's state dict of BertForPreTraining → ours, dtypes as they are.

    Heads that it lacks altogether are absent from the result. Raises UserError where other weights are missing,
    are not known, have another shape than `config` says, or where a decoder is not tied to the embeddings.
    Names of the first release (LayerNorm.gamma and .beta) are read too.
    """
    given = {_modern_name(name): tensor for name, tensor in state_dict.items() if name not in _IGNORED}
    for tied, original in _TIED.items():
        # A file may name tied weights by either name, or by both.
        if tied in given and not torch.equal(tensor := given.pop(tied), given.setdefault(original, tensor)):
            raise UserError(f"{tied} differs from {original}: only models with tied weights can be read")
    absent = tuple(ours for ours, theirs in HEADS.items() if not _has_part(given, theirs))
    names = [(ours, theirs) for ours, theirs in _tensor_names(config) if not ours.startswith(absent)]
    _check_names(given, [name for _, theirs in names for name in theirs])

    weights = {}
    for ours, theirs in names:
        tensor = torch.cat([given[name] for name in theirs])
        shape = _shapes(config)[ours]
        padding = config.padded_vocab_size - config.vocab_size if ours in _VOCABULARY else 0
        wanted = [shape[0] - padding, *shape[1:]]
        if list(tensor.shape) != wanted:
            raise UserError(
                f"the shape of {' + '.join(theirs)} is {list(tensor.shape)}, "
                f"but the model configuration needs {wanted}"
            )
        weights[ours] = torch.cat((tensor, tensor.new_zeros(padding, *tensor.shape[1:])))
    return weights


def standard_layout(state_dict: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """The state dict of any of their BERT classes → that of their BertForPreTraining, and what was left out.

    An encoder of its own has no prefix "bert."; heads for other tasks are left out, by name.
    """
    bare = not _has_part(state_dict, "bert")
    encoder = ("embeddings.", "encoder.", "pooler.")
    named = {
        f"bert.{name}" if bare and name.startswith(encoder) else name: tensor
        for name, tensor in state_dict.items()
    }
    kept = {name: tensor for name, tensor in named.items() if name.startswith(("bert.", "cls."))}
    return kept, sorted(named.keys() - kept.keys())


def absent_heads(state_dict: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The prefixes of our names of those heads that our state dict lacks."""
    return tuple(ours for ours in HEADS if not _has_part(state_dict, ours))


def class_of(state_dict: Mapping[str, Tensor]) -> str:
    """The class of theirs that has the heads of our state dict."""
    absent = absent_heads(state_dict)
    return _CLASS_OF_HEADS["masked_lm_head" not in absent, "next_sentence_head" not in absent]


def config_to_huggingface(config: BertConfig) -> dict[str, Any]:
    """The content of config.json, but for what the tokenizer and the file decide (pad_token_id, dtype)."""
    architecture = next(name for name, has_head in _ARCHITECTURES.items() if has_head == config.next_sentence)
    return {"architectures": [architecture], **_FIXED, **{name: getattr(config, name) for name in _SAME_KEYS}}


def config_for_weights(values: Mapping[str, Any], weights: Mapping[str, Tensor]) -> BertConfig:
    """The content of a config.json of any of their BERT classes → the BertConfig of weights in standard layout.

    Which heads there are is read off the weights. Raises UserError naming the key that does not fit.
    """
    classes = values.get("architectures") or []
    if any(not str(name).startswith("Bert") for name in classes):
        raise UserError(f"config.json: architectures is {classes!r}; a BERT model is needed")
    architecture = "BertForPreTraining" if _has_part(weights, "bert.pooler") else "BertForMaskedLM"
    return config_from_huggingface({**values, "architectures": [architecture]})


def config_from_huggingface(values: Mapping[str, Any]) -> BertConfig:
    """The content of a config.json → BertConfig. Raises UserError naming the key that does not fit."""
    for key, expected in _FIXED.items():
        if values.get(key, expected) != expected:
            raise UserError(f"config.json: {key} is {values[key]!r}; only {expected!r} is supported")
    architectures = values.get("architectures") or []
    known = [name for name in architectures if name in _ARCHITECTURES]
    if not known:
        wanted = " or ".join(_ARCHITECTURES)
        raise UserError(
            f"config.json: architectures is {architectures!r}; a model of class {wanted} is needed"
        )
    shape = {name: values[name] for name in _SAME_KEYS if name in values}
    return BertConfig.from_dict({**shape, "next_sentence": _ARCHITECTURES[known[0]]})


def _tensor_names(config: BertConfig) -> Iterator[tuple[str, list[str]]]:
    """Each of our tensors with the names of theirs that make it when stacked."""
    for ours, theirs in _EMBEDDINGS.items():
        yield f"{ours}.weight", [f"{theirs}.weight"]
    yield "masked_lm_head.bias", ["cls.predictions.bias"]
    modules = {ours: [theirs] for ours, theirs in _MODULES.items()}
    if config.next_sentence:
        modules |= {ours: [theirs] for ours, theirs in _NEXT_SENTENCE_MODULES.items()}
    for i in range(config.num_hidden_layers):
        ours, theirs = f"bert.layers.{i}", f"bert.encoder.layer.{i}"
        parts = [f"{theirs}.attention.self.{x}" for x in ("query", "key", "value")]
        modules[f"{ours}.query_key_value"] = parts
        modules |= {f"{ours}.{a}": [f"{theirs}.{b}"] for a, b in _LAYER_MODULES.items()}
    for ours, theirs in modules.items():
        for kind in ("weight", "bias"):
            yield f"{ours}.{kind}", [f"{name}.{kind}" for name in theirs]


def _has_part(state_dict: Mapping[str, Tensor], part: str) -> bool:
    return any(name.startswith(f"{part}.") for name in state_dict)


def _modern_name(name: str) -> str:
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def _check_names(given: Mapping[str, Tensor], wanted: list[str]) -> None:
    missing, unknown = sorted(set(wanted) - set(given)), sorted(set(given) - set(wanted))
    for names, what in ((missing, "lack"), (unknown, "also have")):
        if names:
            listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise UserError(f"the weights {what} {listed}, so they are not those of the model configuration")


@cache
def _shapes(config: BertConfig) -> dict[str, torch.Size]:
    """The shape of each of our tensors; no memory is taken."""
    with torch.device("meta"):
        model = BertForPreTraining(config)
    return {name: tensor.shape for name, tensor in model.state_dict().items()}
