"""A second phase that goes on from a run: its optimizer on other shards, other ranks and another schedule."""

import json
import shutil
import signal
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path

import injections
import pytest
import torch
from corpora import make_documents, write_corpus
from forked_ranks import Ranks, run
from small_runs import make_tokenizer
from training_runs import arguments, deepspeed_json, metrics, optimizer_lines

from data_prep.errors import UserError
from data_prep.run import main as data_prep
from pretraining.arguments import parse_arguments, prepare
from pretraining.checkpoint import Checkpoint, TrainState
from pretraining.data import TrainingBatches
from pretraining.loading import load_pretrained
from pretraining.model import BertForPreTraining
from pretraining.order import Order
from pretraining.phase import next_phase

STEPS = 5  # of the first phase
BATCH = 7  # of the second one
SECOND = {"lr": 1e-3, "betas": [0.8, 0.9], "eps": 1e-5, "weight_decay": 0.1}
CLIP = 0.7


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A tokenizer, shards of 48 and of 64 tokens, and a first phase that two ranks have trained in bf16."""
    home = tmp_path_factory.mktemp("phase")
    tokenizer = make_tokenizer(home, eval_fraction=0.2)
    text = write_corpus(home / "text.txt", make_documents(60, seed=5))
    for seq_len in ("48", "64"):
        output = ["--output", str(home / seq_len), "--tokenizer", str(tokenizer), "--eval_fraction", "0.2"]
        options = ["--seq_len", seq_len, "--workers", "1"]
        assert not data_prep(["shards", "--input", str(text), *output, *options])
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}
    config = deepspeed_json(home, scheduler=scheduler, bf16={"enabled": True})
    options = ("--max_steps", str(STEPS), "--dropout", "0", "--max_position_embeddings", "64")
    run(arguments(home / "48", home / "first", *options, config=config), 2, home / "logs")
    return home


def second(home: Path, output: Path, *options: str, stage: int = 2) -> list[str]:
    """Arguments of a second phase in fp32 with another sequence length, batch, schedule and optimizer."""
    output.parent.mkdir(parents=True, exist_ok=True)
    config = deepspeed_json(
        output.parent,
        optimizer={"type": "AdamW", "params": SECOND},
        scheduler=None,
        train_batch_size=BATCH,
        gradient_clipping=CLIP,
        zero_optimization={"stage": stage},
    )
    fixed = ("--phase_from", str(home / "first"), "--dropout", "0", "--save_interval", "1", "--keep", "9")
    given = arguments(home / "64", output, *fixed, "--max_steps", "1", *options, config=config)
    place = given.index("--model")
    return given[:place] + given[place + 2 :]


def checkpoint(output: Path, step: int) -> Path:
    return output / "checkpoints" / f"step-{step:08d}"


def in_groups(named: list[tuple[str, torch.Tensor]]) -> torch.Tensor:
    return torch.cat(
        [value.reshape(-1) for matrix in (True, False) for _, value in named if (value.dim() > 1) == matrix]
    )


def set_parameters(model: BertForPreTraining, line: torch.Tensor) -> None:
    """The reverse of `in_groups`."""
    values = [
        value for matrix in (True, False) for value in model.parameters() if (value.dim() > 1) == matrix
    ]
    with torch.no_grad():
        for value, piece in zip(values, line.split([value.numel() for value in values]), strict=True):
            value.copy_(piece.view_as(value))


def hand_made_step(home: Path, argv: list[str], moments: dict[str, torch.Tensor], step: int) -> torch.Tensor:
    """Weights after one AdamW step on the second phase's first batch, written out (Kingma & Ba 2015, algorithm 1)."""
    preparation = prepare(parse_arguments(argv), 1)
    model = BertForPreTraining(preparation.config)
    set_parameters(model, optimizer_lines(checkpoint(home / "first", STEPS))["weights"])
    shard_set = preparation.shard_set
    order = Order(shard_set.block_offsets("train"), 0)
    batches = TrainingBatches(
        order, shard_set, consumed=0, train_batch_size=BATCH, rank=0, world_size=1, masking="dynamic", seed=0,
        max_instances=BATCH,
    )  # fmt: skip
    with closing(batches):
        (batch,) = next(batches).micro_batches
    output = model(batch)
    loss = output.masked_lm_loss_sum / len(batch.masked_lm_labels) + output.next_sentence_loss_sum / BATCH
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    gradient = in_groups([(name, value.grad) for name, value in model.named_parameters()])
    weights = in_groups([(name, value.detach()) for name, value in model.named_parameters()])
    decayed = in_groups(
        [(name, torch.full_like(value, float(value.dim() > 1))) for name, value in model.named_parameters()]
    )
    (beta1, beta2), lr = SECOND["betas"], SECOND["lr"]
    mean = beta1 * moments["exp_avg"] + (1 - beta1) * gradient
    square = beta2 * moments["exp_avg_sq"] + (1 - beta2) * gradient**2
    update = mean / (1 - beta1**step) / ((square / (1 - beta2**step)).sqrt() + SECOND["eps"])
    return weights - lr * SECOND["weight_decay"] * decayed * weights - lr * update


def zeros(lines: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(value) for name, value in lines.items()}


def test_moments_go_on_with_other_ranks_and_the_curve_too(home, tmp_path):
    """3 ranks take over what 2 have left, to the last bit; after SIGKILL without the first folder too; one curve."""
    first, output, dump = home / "first", tmp_path / "run", tmp_path / "dump"
    argv = second(home, output, "--max_steps", "4")
    ranks = Ranks(argv, 3, tmp_path / "logs", partial(injections.dump_at_start, dump))
    ranks.signal_when(checkpoint(output, 2).is_dir, signal.SIGKILL)
    ranks.wait()
    left = optimizer_lines(checkpoint(first, STEPS))
    right = optimizer_lines(checkpoint(first, STEPS), dump)
    assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
    assert left["step"] == STEPS and left["exp_avg_sq"].max() > 0
    expected = hand_made_step(home, argv, left, STEPS + 1)
    found = optimizer_lines(checkpoint(output, 1))
    assert float((found["weights"].detach() - expected).abs().max()) < 1e-6
    first.rename(home / "gone")
    try:
        said = run(argv, 2, tmp_path / "logs")
    finally:
        (home / "gone").rename(first)
    assert "going on from step" in said
    state = json.loads((checkpoint(output, 4) / "checkpoint.json").read_text())["train_state"]
    assert (state["step"], state["phase"], state["consumed"]) == (4, 2, 4 * BATCH)
    assert (state["earlier_steps"], state["earlier_samples"]) == (STEPS, STEPS * 13)
    lines = [line for folder in (first, output) for line in metrics(folder) if "train/loss" in line]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 5))
    assert [line["progress/samples"] for line in lines][-5:] == [STEPS * 13 + BATCH * n for n in range(5)]
    tokens = [line["progress/tokens"] for line in lines]
    assert all(0 < after - before <= 13 * 48 for before, after in zip(tokens, tokens[1:], strict=False))
    assert [line["optimizer/learning_rate"] for line in lines][STEPS:] == [SECOND["lr"]] * 4
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    curve = EventAccumulator(str(output)).Reload().Scalars("train/loss")
    assert [event.step for event in curve] == list(range(STEPS + 1, STEPS + 5))


@pytest.mark.parametrize(
    ("options", "step", "stage"),
    [(("--phase_step", "reset"), 1, 2), (("--phase_optimizer", "fresh"), 1, 0)],
)
def test_moments_or_steps_begin_anew(home, tmp_path, options, step, stage):
    """The first step of the second phase is the hand-made one: moments kept with a new bias correction, or zero and
    without ZeRO from now on, whose weights are the first phase's of fp32."""
    output = tmp_path / "run"
    argv = second(home, output, *options, stage=stage)
    run(argv, 1, tmp_path / "logs")
    kept = optimizer_lines(checkpoint(home / "first", STEPS))
    moments = zeros(kept) if "fresh" in options else kept
    expected = hand_made_step(home, argv, moments, step)
    found = optimizer_lines(checkpoint(output, 1))
    assert float((found["weights"].detach() - expected).abs().max()) < 1e-6
    assert found["step"] == 1
    other = hand_made_step(home, argv, kept, STEPS + 1)
    assert float((found["weights"].detach() - other).abs().max()) > 1e-5


def test_phases_with_and_without_zero(home, tmp_path):
    """ZeRO-2 on 2 ranks → whole optimizers, moments kept → ZeRO-2 on 2 ranks, which hold what was left to the last bit."""
    whole, output, dump = tmp_path / "a" / "run", tmp_path / "b" / "run", tmp_path / "dump"
    argv = second(home, whole, stage=0)
    run(argv, 1, tmp_path / "logs")
    left = optimizer_lines(checkpoint(home / "first", STEPS))
    found = optimizer_lines(checkpoint(whole, 1))
    assert float((found["weights"] - hand_made_step(home, argv, left, STEPS + 1)).abs().max()) < 1e-6
    assert found["step"] == STEPS + 1
    # As export.py, fill_mask.py and fine_tuning/ read it.
    weights = list(load_pretrained(whole).state_dict.items())
    assert torch.equal(in_groups(weights), found["weights"])
    argv = second(home, output, "--phase_from", str(whole))
    run(argv, 2, tmp_path / "logs", partial(injections.dump_at_start, dump))
    right = optimizer_lines(checkpoint(whole, 1), dump)
    assert found.keys() == right.keys() and all(torch.equal(found[name], right[name]) for name in found)


def test_what_does_not_fit_the_first_phase_is_refused(home, tmp_path):
    """Another tokenizer, too few positions, other objectives, no run, and options that need it: named, before anything."""

    def refused(*options: str, start: bool = True) -> str:
        argv = second(home, tmp_path / "run", *options)
        if not start:
            place = argv.index("--phase_from")
            del argv[place : place + 2]
        with pytest.raises(UserError) as error:
            prepare(parse_arguments(argv), 1)
        return str(error.value)

    assert "found no checkpoint" in refused("--phase_from", str(home / "48"))
    assert "give --no_next_sentence" not in refused(
        "--no_next_sentence"
    ) and "leave --no_next_sentence out" in refused("--no_next_sentence")
    assert "--model tiny: with --phase_from" in refused("--model", "tiny")
    assert "--init_from and --phase_from are both given" in refused("--init_from", str(home / "first"))
    assert "--phase_step reset: there is no earlier phase" in refused("--phase_step", "reset", start=False)
    assert "give another --output" in refused("--output", str(home / "first"))
    text = write_corpus(tmp_path / "text.txt", make_documents(60, seed=9))
    longer = ["--tokenizer", str(home / "tokenizer"), "--output", str(tmp_path / "96"), "--seq_len", "96"]
    once = ["--workers", "1", "--eval_fraction", "0.2"]
    assert not data_prep(["shards", "--input", str(text), *longer, *once])
    assert "--seq_len 96: the model has 64 positions; make shorter shards" in refused(
        "--data", str(tmp_path / "96")
    )
    other = make_tokenizer(tmp_path, seed=8, vocab_size=310, eval_fraction=0.2)
    foreign = ["--tokenizer", str(other), "--output", str(tmp_path / "foreign"), "--seq_len", "48"]
    assert not data_prep(["shards", "--input", str(text), *foreign, *once])
    assert "made with another tokenizer" in refused("--data", str(tmp_path / "foreign"))


def test_a_damaged_first_phase_is_refused(home, tmp_path):
    """One byte wrong in the optimizer's file that would be taken over: exit code 2 and one sentence, nothing trained."""
    shutil.copytree(home / "first", tmp_path / "first")
    path = next(checkpoint(tmp_path / "first", STEPS).glob("*zero_pp_rank_1_*"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    output = tmp_path / "run"
    ranks = Ranks(second(home, output, "--phase_from", str(tmp_path / "first")), 2, tmp_path / "logs")
    assert ranks.wait() == [2, 2]
    assert ranks.printed().count(f"{path.name} was changed") == 1 and "Traceback" not in ranks.printed()
    assert not (output / "checkpoints").exists()


def test_counters_add_up_over_phases():
    """Steps, samples and tokens of all phases before go on in a third one; position, skipped ranges and history do not."""
    second = TrainState(
        1, 2, 3, "two", step=5, skipped_steps=1, consumed=40, tokens=900, phase=2, skipped_ranges=[(7, 14)], rollbacks=1,
        earlier_steps=30, earlier_samples=300, history=[(33, 2.0)],
    )  # fmt: skip
    manifest = {"train_state": asdict(second), "identity": {"train_batch_size": 7}}
    third = next_phase(Checkpoint(Path(), manifest), TrainState(4, 5, 6, "three"))
    expected = TrainState(4, 5, 6, "three", tokens=900, phase=3, earlier_steps=35, earlier_samples=335)
    assert third == expected and third.global_step == 35
