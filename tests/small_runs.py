"""Small runs for tests of what reads them: the real layout on disk, without the training."""

import shutil
from pathlib import Path

import torch
from corpora import make_documents, write_corpus

from data_prep.run import main as data_prep
from data_prep.shards import ShardSet
from pretraining.checkpoint import Checkpoints, TrainState
from pretraining.model import BertConfig, BertForPreTraining


def make_tokenizer(folder: Path, seed: int = 3, vocab_size: int = 300, eval_fraction: float = 0.1) -> Path:
    """A SentencePiece tokenizer of made-up text, in folder/tokenizer."""
    text = write_corpus(folder / "tokenizer_text.txt", make_documents(150, seed=seed))
    output = folder / "tokenizer"
    options = ["--vocab_size", str(vocab_size), "--workers", "1", "--eval_fraction", str(eval_fraction)]
    assert not data_prep(["tokenizer", "--input", str(text), "--output", str(output), *options])
    return output


def make_shards(
    folder: Path, tokenizer: Path, seed: int = 3, documents: int = 150, eval_fraction: float = 0.1
) -> Path:
    """Shards of made-up text with that tokenizer, in folder/shards."""
    text = write_corpus(folder / "text.txt", make_documents(documents, seed=seed))
    arguments = ["--input", str(text), "--tokenizer", str(tokenizer), "--output", str(folder / "shards")]
    assert not data_prep(
        ["shards", *arguments, "--seq_len", "48", "--workers", "1", "--eval_fraction", str(eval_fraction)]
    )
    return folder / "shards"


def make_training_shards(folder: Path, at_least: int) -> Path:
    """Shards of at least so many training instances, and enough for an evaluation, in folder/shards."""
    tokenizer = make_tokenizer(folder, eval_fraction=0.2)
    shards = make_shards(folder, tokenizer, seed=5, documents=60, eval_fraction=0.2)
    assert ShardSet.open(shards).block_offsets("train")[-1] >= at_least
    return shards


def tiny_config(**changes) -> BertConfig:
    """Two layers of 32 numbers, for the vocabulary of make_tokenizer."""
    shape = {
        "vocab_size": 300,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 80,
        "max_position_embeddings": 40,
    }
    return BertConfig(**shape | changes)


def random_model(config: BertConfig, seed: int = 0, std: float = 0.15) -> BertForPreTraining:
    """Every parameter random, so that none can be forgotten unnoticed; the vocabulary's padding too."""
    torch.manual_seed(seed)
    model = BertForPreTraining(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * std)
    return model.eval()


class _Engine:
    """As much of DeepSpeed's engine as Checkpoints.save asks for."""

    def __init__(self, model: BertForPreTraining):
        self.model = model
        self.checkpoint_engine = None

    def zero_optimization(self) -> bool:
        return True

    def save_checkpoint(self, folder: str, tag: str, client_state: dict, save_latest: bool) -> None:
        self.checkpoint_engine.makedirs(f"{folder}/{tag}", exist_ok=True)
        content = {"module": self.model.state_dict(), **client_state}
        self.checkpoint_engine.save(content, f"{folder}/{tag}/mp_rank_00_model_states.pt")
        self.checkpoint_engine.save({}, f"{folder}/{tag}/zero_pp_rank_0_mp_rank_00_optim_states.pt")


def write_run(
    folder: Path, model: BertForPreTraining, tokenizer: Path, step: int = 5, identity: dict | None = None
) -> Path:
    """A run folder with a checkpoint of an fp32 model and the tokenizer; returns the checkpoint's folder."""
    identity = identity or {"model": model.config.to_dict(), "precision": "fp32"}
    checkpoints = Checkpoints(folder, identity, 0, 1, lambda value: [value], print)
    shutil.copytree(tokenizer, folder / "tokenizer", dirs_exist_ok=True)
    checkpoints.save(_Engine(model), TrainState(0, 384, 256, "", step=step))
    return checkpoints.finish()
