"""The training program, run for real: launchers, kills, resumes, other numbers of ranks, bad input."""

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import forked_ranks
import numpy as np
import pytest
import torch
from corpora import make_documents, write_corpus
from training_runs import (
    BATCH,
    STEPS,
    arguments,
    command,
    deepspeed_json,
    environment,
    final_parameters,
    kill_when,
    logged_step,
    metrics,
    optimizer_lines,
    train,
)

from data_prep.counter_rng import Stream, key
from data_prep.errors import UserError
from data_prep.masking import MaskPolicy
from data_prep.run import main as data_prep
from data_prep.shards import ShardSet, manifest_bytes
from data_prep.workers import work_lock
from pretraining.arguments import identity, parse_arguments, prepare
from pretraining.checkpoint import Checkpoints, TrainState
from pretraining.data import TrainingBatches, evaluation_batches
from pretraining.distributed import World
from pretraining.launch import _batches, _run_settings
from pretraining.manifest import write_manifest
from pretraining.metrics import Recorder
from pretraining.model import BertConfig, BertForPreTraining
from pretraining.optimizer import parameter_groups
from pretraining.order import Order
from pretraining.run import main
from pretraining.schedules import learning_rate
from pretraining.stop import STOP_SIGNALS, StopFlag
from pretraining.trainer import Trainer

GOLDEN = Path(__file__).parent / "golden" / "tiny_losses.json"


@pytest.fixture(scope="session")
def shards(tmp_path_factory) -> Path:
    """Shards of a small corpus in several blocks' worth of lanes, with an evaluation set."""
    folder = tmp_path_factory.mktemp("training")
    text = write_corpus(folder / "text.txt", make_documents(150, seed=3))
    options = ["--input", str(text), "--eval_fraction", "0.1", "--workers", "1"]
    assert not data_prep(
        ["tokenizer", *options, "--output", str(folder / "tokenizer"), "--vocab_size", "300"]
    )
    arguments = [
        "--tokenizer",
        str(folder / "tokenizer"),
        "--output",
        str(folder / "shards"),
        "--seq_len",
        "48",
    ]
    assert not data_prep(["shards", *options, *arguments])
    return folder / "shards"


@pytest.fixture(scope="session")
def undisturbed(shards, tmp_path_factory) -> tuple[Path, str]:
    """Two ranks under the deepspeed launcher from start to end, dropout 0.1, and what was printed."""
    output = tmp_path_factory.mktemp("undisturbed") / "run"
    options = ("--save_interval", "3", "--eval_interval", "3")
    return output, train(shards, output, ranks=2, launcher="deepspeed", options=options)


def test_two_ranks_share_gradients_and_optimizer_state(undisturbed):
    """At two ranks of ZeRO-2 each rank's optimizer file holds half of the fp32 weights and moments."""
    folder = undisturbed[0] / "checkpoints" / f"step-{STEPS:08d}"
    parameters = sum(value.numel() for value in final_parameters(undisturbed[0]).values())
    for rank in range(2):
        state = torch.load(folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", weights_only=False)[
            "optimizer_state_dict"
        ]
        assert state["zero_stage"] == 2 and state["partition_count"] == [2, 2]
        held = sum(group.numel() for group in state["single_partition_of_fp32_groups"])
        moments = state["base_optimizer_state"]["state"].values()
        for numbers in (
            held,
            *(sum(moment[name].numel() for moment in moments) for name in ("exp_avg", "exp_avg_sq")),
        ):
            assert abs(numbers - parameters / 2) <= 8  # partitions are padded to whole words


def test_run_explains_itself(undisturbed):
    """The run folder has status, settings and curves, and the last line says what to do next."""
    output, printed = undisturbed
    assert json.loads((output / "status.json").read_text())["state"] == "finished"
    settings = json.loads((output / "settings.json").read_text())
    assert (
        settings["train_batch_size"] == BATCH
        and settings["world_size"] == 2
        and settings["deepspeed"]["zero_optimization"]["stage"] == 2
    )
    assert "tensorboard --logdir" in printed and "held-out masked-LM loss" in printed
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(output)).Reload()
    lines = [line for line in metrics(output) if "train/loss" in line]
    assert (
        [event.step for event in events.Scalars("train/loss")]
        == list(range(1, STEPS + 1))
        == [line["step"] for line in lines]
    )
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx(
        [line["train/loss"] for line in lines]
    )
    assert {
        "optimizer/learning_rate",
        "optimizer/gradient_norm",
        "optimizer/loss_scale",
        "optimizer/skipped_steps",
    } <= set(events.Tags()["scalars"])
    assert {"speed/padding_avoided", "progress/samples", "progress/tokens", "eval/masked_lm_accuracy"} <= set(
        events.Tags()["scalars"]
    )
    assert [line["progress/samples"] for line in lines] == [BATCH * step for step in range(1, STEPS + 1)]


def reference(shards: Path) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """The same run in plain PyTorch: no DeepSpeed, one process, the whole batch at once; parameters, losses, norms."""
    torch.manual_seed(key(0, Stream.INITIALISATION))
    shard_set = ShardSet.open(shards)
    config = BertConfig.preset(
        "tiny",
        shard_set.manifest["tokenizer"]["vocab_size"],
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForPreTraining(config)
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.01), betas=(0.9, 0.98), eps=1e-6)
    preparation = prepare(
        parse_arguments(
            [
                "--deepspeed_config",
                str(deepspeed_json(shards.parent)),
                "--data",
                str(shards),
                "--model",
                "tiny",
            ]
        ),
        1,
    )
    batches = TrainingBatches(
        Order(shard_set.block_offsets("train"), 0), shard_set, consumed=0, train_batch_size=BATCH, rank=0, world_size=1,
        masking="dynamic", seed=0, max_instances=BATCH,
    )  # fmt: skip
    losses, norms = [], []
    for step in range(STEPS):
        (batch,) = next(batches).micro_batches
        output = model(batch)
        loss = output.masked_lm_loss_sum / len(batch.masked_lm_labels) + output.next_sentence_loss_sum / BATCH
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(preparation.schedule, step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    batches.close()
    return {name: value.detach() for name, value in model.named_parameters()}, losses, norms


@pytest.fixture(scope="session")
def one_rank(shards, tmp_path_factory) -> Path:
    """One rank, dropout 0, ended by SIGTERM in the middle and started again."""
    output = tmp_path_factory.mktemp("one_rank") / "run"
    run = command(shards, output, options=("--dropout", "0"))
    assert kill_when(run, lambda: logged_step(output) >= 3, signal.SIGTERM) == 75
    status = json.loads((output / "status.json").read_text())
    assert status["state"] == "stopped" and "SIGTERM" in status["reason"]
    assert (output / "checkpoints" / f"step-{status['step']:08d}" / "checkpoint.json").is_file()
    train(shards, output, options=("--dropout", "0"))
    return output


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_train_the_same_steps(shards, one_rank, tmp_path, ranks):
    """1, 2 and 3 ranks (13 instances a step: unequal shares and micro-steps) = plain PyTorch with the whole batch."""
    output = one_rank
    if ranks == 2:
        output = tmp_path / "run"
        train(shards, output, ranks=ranks, options=("--dropout", "0"))
    elif ranks == 3:
        output = tmp_path / "run"
        forked_ranks.run(arguments(shards, output, "--dropout", "0"), ranks, tmp_path / "logs")
    expected, losses, norms = reference(shards)
    actual = final_parameters(output)
    difference = max(float((expected[name] - actual[name]).abs().max()) for name in expected)
    assert difference < 1e-5
    lines = [line for line in metrics(output) if "train/loss" in line]
    assert [line["train/loss"] for line in lines] == pytest.approx(losses, rel=1e-5)
    assert [line["optimizer/gradient_norm"] for line in lines] == pytest.approx(norms, rel=1e-4)
    assert losses[-1] < losses[0] - 0.1


def test_a_run_in_bf16_starts_from_unrounded_weights(shards, tmp_path):
    """The fp32 weights beside the bf16 ones begin as they were drawn, on both ranks, not rounded and taken back."""
    still = {"type": "AdamW", "params": {"lr": 1e-30}}
    config = deepspeed_json(tmp_path, optimizer=still, scheduler=None, bf16={"enabled": True})
    forked_ranks.run(
        arguments(shards, tmp_path / "run", "--max_steps", "1", config=config), 2, tmp_path / "logs"
    )
    torch.manual_seed(key(0, Stream.INITIALISATION))
    settings = json.loads((tmp_path / "run" / "settings.json").read_text())
    drawn = [p.detach() for p in BertForPreTraining(BertConfig.from_dict(settings["model"])).parameters()]
    line = torch.cat(
        [p.flatten() for is_matrix in (True, False) for p in drawn if (p.dim() > 1) == is_matrix]
    )
    kept = optimizer_lines(tmp_path / "run" / "checkpoints" / "step-00000001")["weights"]
    assert float((kept - line).detach().abs().max()) < 1e-29 and not torch.equal(
        line, line.bfloat16().float()
    )


def test_the_token_budget_reaches_the_loop(shards, tmp_path, monkeypatch):
    """--micro_batch_tokens bounds what a rank computes at once, here and in the evaluation, and --dry_run says so."""
    options = ["--deepspeed_config", str(deepspeed_json(tmp_path)), "--data", str(shards), "--model", "tiny"]
    preparation = prepare(parse_arguments([*options, "--micro_batch_tokens", "100"]), 1)
    state = TrainState(0, 384, 256, preparation.shard_set.manifest_sha256)
    with closing(_batches(preparation, World(0, 0, 1, torch.device("cpu")), state)) as batches:
        sizes = [[len(batch.input_ids) for batch in next(batches).micro_batches] for _ in range(5)]
    assert 48 < max(map(max, sizes)) <= 100
    assert len(set(map(len, sizes))) > 1 and max(map(len, sizes)) <= preparation.lowered.max_micro_steps == 7
    settings = _run_settings(preparation)
    assert (settings.micro_batch_tokens, settings.max_micro_steps) == (100, 7)
    seen, model = [], BertForPreTraining(preparation.config)
    model.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0].input_ids)))
    monkeypatch.setattr("pretraining.evaluation.all_sum", list)
    monkeypatch.setattr("pretraining.evaluation.raise_together", lambda problem: None)
    here = SimpleNamespace(module=model), World(0, 0, 1, torch.device("cpu"))
    Trainer(*here, settings, state, None, preparation.shard_set, None, None, None).evaluate()
    held_out = preparation.shard_set.manifest["splits"]["eval"]["counts"]["tokens"]
    assert max(seen) <= 100 and sum(seen) == held_out
    assert "in up to 7 micro-batches of 4 and 100 tokens" in "\n".join(preparation.describe(1))


def test_golden_losses(shards, one_rank):
    """The losses of a small run are those that were written down, to the last bit on a like processor and torch."""
    losses = [line["train/loss"] for line in metrics(one_rank) if "train/loss" in line]
    shard = ShardSet.open(shards).manifest["splits"]["train"]["shards"][0]["sha256"]
    made_with = {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}
    if "WRITE_GOLDEN" in os.environ:
        GOLDEN.write_text(
            json.dumps({"made_with": made_with, "shard": shard, "losses": losses}, indent=1) + "\n"
        )
    golden = json.loads(GOLDEN.read_text())
    if golden["made_with"] == made_with:
        assert (shard, losses) == (golden["shard"], golden["losses"])
    else:
        # Another processor may round a tokenizer's scores, and so a few of its pieces, otherwise.
        assert losses == pytest.approx(golden["losses"], rel=0.03)


def test_evaluation_counts_each_instance_once(shards, one_rank):
    """The logged held-out loss is the mean over all held-out masked tokens of a plain evaluation."""
    model = BertForPreTraining(
        BertConfig.preset("tiny", ShardSet.open(shards).manifest["tokenizer"]["vocab_size"])
    ).eval()
    model.load_state_dict(final_parameters(one_rank))
    shard_set = ShardSet.open(shards)
    (batch,) = evaluation_batches(shard_set, "eval", 0, 1, 10**6)
    assert len(batch.lengths) == shard_set.block_offsets("eval")[-1]
    with torch.no_grad():
        output = model(batch)
    last = [line for line in metrics(one_rank) if "eval/masked_lm_loss" in line][-1]
    assert last["eval/masked_lm_loss"] == pytest.approx(
        float(output.masked_lm_loss_sum) / len(batch.masked_lm_labels), rel=1e-5
    )
    assert last["eval/masked_lm_accuracy"] == pytest.approx(
        int(output.masked_lm_correct) / len(batch.masked_lm_labels)
    )
    assert last["eval/next_sentence_accuracy"] == pytest.approx(
        int(output.next_sentence_correct) / len(batch.lengths)
    )


def test_finished_run_has_nothing_to_do(shards, one_rank, capfd):
    """The command of a finished run ends at once and changes no number."""
    before = (one_rank / "metrics.jsonl").read_bytes()
    printed = train(shards, one_rank, options=("--dropout", "0"))
    assert f"{STEPS} steps are done" in printed
    assert (one_rank / "metrics.jsonl").read_bytes() == before


def refused(capsys, *argv: str) -> str:
    """The one sentence that the program prints for bad input."""
    from data_prep.errors import run_program

    assert run_program(main, list(argv)) == 2
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err and printed.err.startswith("error: ")
    return printed.err


def test_bad_input_is_one_sentence(shards, tmp_path, capsys, monkeypatch):
    """Missing shards, lengths, batches and ranks that do not fit: the sentence names the option and what to do."""
    config = str(deepspeed_json(tmp_path))
    start = ("--deepspeed_config", config, "--model", "tiny", "--data")
    assert "there is no such shard folder" in refused(capsys, *start, str(tmp_path / "nothing"))
    assert "--seq_len 64: the shards" in refused(capsys, *start, str(shards), "--seq_len", "64")
    assert "--max_position_embeddings 48" in refused(
        capsys, *start, str(shards), "--max_position_embeddings", "32"
    )
    assert "--micro_batch_tokens 47: the shards" in refused(
        capsys, *start, str(shards), "--micro_batch_tokens", "47"
    )
    spikes = (*start, str(shards), "--spike_factor", "10", "--keep")
    assert "--keep 1: a spike (--spike_factor 10)" in refused(capsys, *spikes, "1")
    assert prepare(parse_arguments([*spikes, "2"]), world_size=1)
    assert prepare(parse_arguments([*spikes, "1", "--max_rollbacks", "0"]), world_size=1)
    deepspeed_json(tmp_path, train_batch_size=100_000)
    assert "is more than the" in refused(capsys, *start, str(shards))
    deepspeed_json(tmp_path, gradient_accumulation_steps=7)
    assert '"train_batch_size" 13 is not' in refused(capsys, *start, str(shards))
    deepspeed_json(tmp_path, train_batchsize=13)
    assert 'did you mean "train_batch_size"' in refused(capsys, *start, str(shards))
    deepspeed_json(tmp_path, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 2}})
    assert "give --max_steps" in refused(capsys, *start, str(shards))
    deepspeed_json(tmp_path)
    with pytest.raises(UserError, match="more ranks than instances"):
        prepare(parse_arguments([*start, str(shards)]), world_size=14)


def test_recipe_of_a_start_from_nothing(shards, tmp_path):
    """--initializer_range, --position_init and --masked_lm_prob: the first step's loss is that of a model with wide
    weights and sinusoidal positions, on masks drawn at that rate."""
    recipe = ("--initializer_range", "0.05", "--position_init", "sinusoidal", "--masked_lm_prob", "0.4")
    argv = command(shards, tmp_path / "run", options=("--dropout", "0", "--max_steps", "1", *recipe))
    subprocess.run(argv, env=environment(), check=True, capture_output=True)
    shard_set = ShardSet.open(shards)
    config = BertConfig.preset("tiny", 300, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    torch.manual_seed(key(0, Stream.INITIALISATION))
    model = BertForPreTraining(replace(config, initializer_range=0.05))
    positions = model.bert.embeddings.position_embeddings.weight
    rates = 1000 ** (-torch.arange(64) / 64)
    angles = torch.arange(512)[:, None] * rates
    with torch.no_grad():
        positions.copy_(torch.cat([angles.sin(), angles.cos()], 1) * 0.05 * 2**0.5)
        assert abs(float(positions.std()) - 0.05) < 0.005
        policy = MaskPolicy.for_tokenizer(shard_set.manifest["tokenizer"], rate=0.4)
        batches = TrainingBatches(
            Order(shard_set.block_offsets("train"), 0), shard_set, consumed=0, train_batch_size=BATCH, rank=0,
            world_size=1, masking="dynamic", seed=0, policy=policy, max_instances=BATCH,
        )  # fmt: skip
        (batch,) = next(batches).micro_batches
        batches.close()
        sums = model.eval()(batch)
    assert len(batch.masked_lm_labels) == pytest.approx(0.4 * batch.lengths.sum(), rel=0.05)
    loss = float(sums.masked_lm_loss_sum / len(batch.masked_lm_labels) + sums.next_sentence_loss_sum / BATCH)
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["train/loss"] == pytest.approx(loss, rel=1e-5)


def test_recipe_is_checked(shards, capsys):
    """Stored masks have their own rate, and no masks teach nothing: one sentence each."""
    config = str(deepspeed_json(shards.parent))
    start = ["--deepspeed_config", config, "--data", str(shards), "--model", "tiny", "--masked_lm_prob"]
    with pytest.raises(UserError, match="leave --masking static out"):
        prepare(parse_arguments([*start, "0.4", "--masking", "static"]), 1)
    with pytest.raises(UserError, match="nothing would be predicted"):
        prepare(parse_arguments([*start, "0"]), 1)
    with pytest.raises(SystemExit):
        parse_arguments([*start, "1.5"])
    assert "'1.5' is not a share from 0 to 1" in capsys.readouterr().err


ADAMW = {"lr": 2e-3, "betas": [0.9, 0.98], "eps": 1e-6, "weight_decay": 0.1}
FORBIDDEN_CHANGES = (  # what is said, options, changes of the JSON
    ("seed: 0 there, 3 now", ("--seed", "3"), {}),
    ("model.hidden_dropout_prob: 0.0 there, 0.2 now", ("--dropout", "0.2"), {}),
    ("model.num_hidden_layers: 2 there, 4 now", ("--model", "mini"), {}),
    ("model.next_sentence: True there, False now", ("--no_next_sentence",), {}),
    ("masking: dynamic there, static now", ("--masking", "static"), {}),
    ("masked_lm_prob: 0.15 there, 0.4 now", ("--masked_lm_prob", "0.4"), {}),
    ("position_init: random there, sinusoidal now", ("--position_init", "sinusoidal"), {}),
    ("model.initializer_range: 0.02 there, 0.05 now", ("--initializer_range", "0.05"), {}),
    ("train_batch_size: 13 there, 12 now", (), {"train_batch_size": 12}),
    ("gradient_clipping: 1.0 there, 0.5 now", (), {"gradient_clipping": 0.5}),
    ("optimizer.weight_decay: 0.01 there, 0.1 now", (), {"optimizer": {"type": "AdamW", "params": ADAMW}}),
    ("schedule.total_num_steps: 8 there, 9 now", ("--max_steps", "9"), {}),
    (
        "schedule.type: WarmupDecayLR there, WarmupLR now",
        ("--max_steps", "8"),
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}},
    ),
)
ALLOWED_CHANGES = (  # options, ranks, changes of the JSON
    ((), 1, {}),
    (("--save_interval", "3", "--eval_interval", "2", "--eval_instances", "5", "--log_interval", "3"), 1, {}),
    (("--keep", "1", "--keep_every", "4"), 1, {}),
    (("--position_init", "random", "--masked_lm_prob", "0.15"), 1, {}),  # the defaults, written out
    ((), 1, {"train_micro_batch_size_per_gpu": 13}),
    ((), 5, {}),
    ((), 1, {"zero_optimization": {"stage": 1}}),
)


@pytest.fixture
def refusal(shards, one_rank, tmp_path):
    """What the finished run's folder says to a command with these options, ranks and changes of the JSON."""

    def said(*options: str, world_size: int = 1, **changes) -> str | None:
        config = deepspeed_json(tmp_path, **changes)
        argv = arguments(shards, one_rank, "--dropout", "0", *options, config=Path(config))
        preparation = prepare(parse_arguments(argv), world_size)
        checkpoints = Checkpoints(
            one_rank, identity(preparation), 0, world_size, lambda value: [value], print
        )
        try:
            checkpoints.check_identity(checkpoints.newest_whole())
        except UserError as error:
            return str(error)
        return None

    return said


def test_other_settings_are_refused(shards, one_rank, tmp_path, refusal):
    """A run folder goes on only with the settings that it was made with; the changed one is named, old and new."""
    done = subprocess.run(
        command(shards, one_rank, options=("--dropout", "0", "--seed", "5")),
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "seed: 0 there, 5 now" in done.stderr
    for words, options, changes in FORBIDDEN_CHANGES:
        assert words in (refusal(*options, **changes) or "accepted"), words
    other_shards = tmp_path / "shards"
    shutil.copytree(shards, other_shards)
    other = ShardSet.open(shards).manifest | {"made_with": "another library"}
    (other_shards / "manifest.json").write_bytes(manifest_bytes(other))
    assert "shards: " in refusal("--data", str(other_shards))


def test_settings_that_may_change(refusal):
    """Ranks, micro-batch, ZeRO stage and intervals may change; a batch that is written as so much per rank changes with
    the ranks, and is refused."""
    for options, world_size, changes in ALLOWED_CHANGES:
        assert refusal(*options, world_size=world_size, **changes) is None, (options, changes)
    batch_of_ranks = {
        "train_batch_size": None,
        "gradient_accumulation_steps": 1,
        "train_micro_batch_size_per_gpu": 13,
    }
    assert refusal(**batch_of_ranks) is None
    assert "train_batch_size: 13 there, 26 now" in refusal(world_size=2, **batch_of_ranks)


def test_damaged_checkpoints_are_passed_over(one_rank, tmp_path):
    """The newest checkpoint whose every byte is right is found, damaged ones are named, and none is never a fresh start."""
    shutil.copytree(one_rank, tmp_path / "run")
    said = []

    def checkpoints() -> Checkpoints:
        return Checkpoints(tmp_path / "run", {}, 0, 1, lambda value: [value], said.append)

    folder = tmp_path / "run" / "checkpoints"
    (folder / "latest").unlink()
    names = sorted(path.name for path in folder.glob("step-*"))
    assert len(names) == 2 and checkpoints().newest_whole().path.name == names[1]
    damaged = folder / names[1] / "mp_rank_00_model_states.pt"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    assert checkpoints().newest_whole().path.name == names[0]
    assert names[1] in said[-1] and "mp_rank_00_model_states.pt was changed" in said[-1]
    os.truncate(folder / names[0] / "zero_pp_rank_0_mp_rank_00_optim_states.pt", 1000)
    with pytest.raises(UserError, match="none of its 2 checkpoints is whole"):
        checkpoints().newest_whole()
    assert "has 1,000 of" in said[-1]


def test_damaged_manifest_of_a_checkpoint_is_passed_over(one_rank, tmp_path):
    """A checkpoint.json that is JSON but not ours, whatever is wrong with it, never counts as a whole checkpoint."""
    source = max((one_rank / "checkpoints").glob("step-*"))
    shutil.copytree(source, tmp_path / "checkpoints" / source.name)
    path = tmp_path / "checkpoints" / source.name / "checkpoint.json"
    whole = json.loads(path.read_text())
    wrong = [
        [],
        7,
        {},
        {"files": {}},
        whole | {"files": {}},
        whole | {"files": {"mp_rank_00_model_states.pt": 5}},
    ]
    wrong += [whole | {"format_version": 1}, whole | {"train_state": {}}, whole | {"identity": None}]
    wrong += [{name: value for name, value in whole.items() if name != left_out} for left_out in whole]
    checkpoints = Checkpoints(tmp_path, {}, 0, 1, lambda value: [value], print)
    assert checkpoints.newest_whole()
    for content in wrong:
        path.write_text(json.dumps(content))
        with pytest.raises(UserError, match="none of its 1 checkpoints is whole"):
            checkpoints.newest_whole()
        if isinstance(content, dict) and "sha256" in content:  # not only by its hash
            write_manifest(path.parent, content)
            with pytest.raises(UserError, match="none of its 1 checkpoints is whole"):
                checkpoints.newest_whole()


def test_a_run_folder_belongs_to_one_run_at_a_time(shards, one_rank):
    """A second run in the same folder is refused, and the first one's status stays as it was."""
    status = (one_rank / "status.json").read_bytes()
    with work_lock(one_rank, shared=False):
        done = subprocess.run(
            command(shards, one_rank, options=("--dropout", "0")),
            env=environment(),
            capture_output=True,
            text=True,
        )
    assert done.returncode == 2 and "another command is working here" in done.stderr
    assert (one_rank / "status.json").read_bytes() == status


def test_a_diverged_run_ends_and_saves_nothing(shards, tmp_path):
    """A loss that is not finite ends the run with one sentence, status `failed`, and no checkpoint of it."""
    entry = {"type": "AdamW", "params": {"lr": 1e30}}
    scheduler = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 1, "total_num_steps": 6}}
    config = deepspeed_json(tmp_path, optimizer=entry, scheduler=scheduler)
    run = command(shards, tmp_path / "run", options=("--diagnostics_interval", "1"))
    run[run.index("--deepspeed_config") + 1] = str(config)
    done = subprocess.run(run, env=environment(), capture_output=True, text=True)
    assert done.returncode == 2 and "the run has diverged" in done.stderr
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "failed"
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_stop_signals_are_remembered(tmp_path, capsys):
    """SIGTERM, SIGUSR1, Ctrl-C and a file named STOP raise the flag; a second Ctrl-C interrupts at once."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        for number in STOP_SIGNALS:
            flag = StopFlag(tmp_path)
            assert not flag.raised()
            os.kill(os.getpid(), number)
            assert flag.raised() and flag.reason == signal.Signals(number).name
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        flag = StopFlag(tmp_path)
        (tmp_path / "STOP").touch()
        assert flag.raised() and "STOP" in flag.reason
        flag.clear()
        assert not StopFlag(tmp_path).raised()
        (tmp_path / "STOP").mkdir()
        flag.clear()
        assert (tmp_path / "STOP").is_dir() and "STOP: it could not be removed" in capsys.readouterr().out
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_stop_file_of_the_last_step_does_not_stay(tmp_path, monkeypatch):
    """A run that is finished removes a STOP file that came too late, or a longer --max_steps would stop at once."""
    from pretraining import launch

    def train(*_) -> bool:
        (tmp_path / "STOP").touch()
        return True

    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for name, value in {"_take_folder": None, "gather_objects": [False], "_say_end": None}.items():
        monkeypatch.setattr(launch, name, lambda *_, value=value: value)
    monkeypatch.setattr(launch, "_build", lambda *_: SimpleNamespace(state=TrainState(0, 1, 1, "")))
    monkeypatch.setattr(launch, "_train", train)
    world = SimpleNamespace(rank=0, world_size=1)
    monkeypatch.setattr(launch, "distributed", SimpleNamespace(start=lambda: world, shutdown=lambda: None))
    try:
        preparation = SimpleNamespace(run_folder=tmp_path, max_steps=7)
        assert launch.launch(preparation, StopFlag(tmp_path), 0.0) == 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "finished"
    assert not (tmp_path / "STOP").exists()


def test_damaged_metrics_do_not_stop_a_run(tmp_path, capsys):
    """Lines beyond the resumed step, half lines and garbage are left out of metrics.jsonl, and garbage is said."""
    path = tmp_path / "metrics.jsonl"
    good = b'{"step": 1, "train/loss": 2.5}\n{"step": 2, "train/loss": null}\n'
    path.write_bytes(good + b'\xff\xfe\n[1]\n{}\n7\n{"step": "x"}\n{"step": 3}\n{"step": 2, "train/lo')
    Recorder(tmp_path, 2).close()
    assert path.read_bytes() == good
    assert "5 damaged lines were left out" in capsys.readouterr().out
    recorder = Recorder(tmp_path, 2)
    recorder.record(3, {"optimizer/gradient_norm": float("inf")})
    recorder.close()
    assert path.read_bytes() == good + b'{"step": 3, "optimizer/gradient_norm": null}\n'


@pytest.fixture
def small_disk(tmp_path):
    """A real file system with room for one checkpoint of the tiny model, not for two."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=14m", "none", str(folder)], capture_output=True
    )
    if mount.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mount.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_full_disk_leaves_the_old_checkpoint_good(shards, small_disk, tmp_path):
    """A checkpoint that finds the disk full ends all ranks with one sentence; the one before it is whole."""
    ranks = forked_ranks.Ranks(
        arguments(shards, small_disk / "run", "--save_interval", "3"), 2, tmp_path / "logs"
    )
    assert ranks.wait() == [2, 2]
    printed = ranks.printed()
    assert "No space left on device" in printed and "Traceback" not in printed
    assert "could not be written" in printed and "make room on the disk" in printed
    checkpoints = Checkpoints(small_disk / "run", {}, 0, 1, lambda value: [value], print)
    assert checkpoints.newest_whole().state.step == 3
    assert not list(checkpoints.folder.glob("*.partial"))


def test_train_state_survives_json():
    """TrainState is plain JSON; a field that is missing or unknown is refused."""
    from dataclasses import asdict

    state = TrainState(
        seed=3, lanes=384, window=256, manifest_sha256="ab", step=7, skipped_steps=2, skipped_ranges=[(3, 9)]
    )
    values = json.loads(json.dumps(asdict(state)))
    assert TrainState.from_dict(values) == state and state.applied_steps == 5
    with pytest.raises(UserError, match="train state"):
        TrainState.from_dict(values | {"surprise": 1})


def test_dry_run_says_what_will_be(shards, tmp_path, capsys, monkeypatch):
    """--dry_run prints parameters, memory, batch, epoch, steps and replacements, and makes no run folder."""
    output = tmp_path / "run"
    arguments = [
        "--deepspeed_config",
        "ds_configs/zero2.json",
        "--data",
        str(shards),
        "--output",
        str(output),
    ]
    repository = Path(__file__).parent.parent
    monkeypatch.chdir(repository)
    assert main([*arguments, "--dry_run"]) == 0
    printed = capsys.readouterr().out
    vocabulary = ShardSet.open(shards).manifest["tokenizer"]["vocab_size"]
    instances = ShardSet.open(shards).block_offsets("train")[-1]
    assert f"parameters: {BertConfig.preset('base', vocabulary).num_parameters():,}" in printed
    assert (
        f"epoch: {instances:,} instances" in printed and "steps: 1,000,000" in printed and "fp16 →" in printed
    )
    assert not output.exists()


def test_dry_run_counts_what_each_rank_holds(shards, tmp_path, capsys):
    """Of AdamW under ZeRO-2 in fp32 each of 3 ranks holds a third of the weights and both moments; without, both moments."""
    found = {}
    for stage, name in ((2, "ZeRO-2"), (0, "whole")):
        config = deepspeed_json(tmp_path, zero_optimization={"stage": stage})
        options = [*arguments(shards, tmp_path / "run", config=config), "--model", "large"]
        preparation = prepare(parse_arguments(options), 3)
        (line,) = (line for line in preparation.describe(3) if line.startswith("memory per rank"))
        found[stage] = float(line.partition(f"optimizer ({name}) ")[2].split(",")[0])
    parameters = preparation.config.num_parameters() / 1e9
    assert found == {2: pytest.approx(4 * parameters, abs=0.01), 0: pytest.approx(8 * parameters, abs=0.01)}


def test_help_explains_every_option(capsys):
    """Every option has a text, and --help needs neither torch nor DeepSpeed."""
    with pytest.raises(SystemExit):
        parse_arguments(["--help"])
    assert "deepspeed_config" in capsys.readouterr().out
    code = "import sys; from pretraining.run import main\ntry: main(['--help'])\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_order_of_a_run_is_each_instance_once(shards):
    """A run's batches, whatever the ranks, hold every instance of the shards exactly once per epoch."""
    shard_set = ShardSet.open(shards)
    total = int(shard_set.block_offsets("train")[-1])
    order = Order(shard_set.block_offsets("train"), 0)
    assert np.array_equal(np.sort(order.instances(np.arange(total, 2 * total))), np.arange(total))
