"""Fine-tuning: data, features, batches, runs, results, the exported model, prediction, bad input."""

import gzip
import io
import json
import random
import shutil
import statistics
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from corpora import SYLLABLES, files
from safetensors.torch import save_file

from data_prep.errors import UserError, run_program
from data_prep.run import main as data_prep
from data_prep.tokenizer import Tokenizer
from fine_tuning import trainer as trainer_module
from fine_tuning.arguments import parse_arguments
from fine_tuning.examples import choose_subset, label_order, read_data, read_examples
from fine_tuning.features import Features, epoch_batches, select, sentence_features
from fine_tuning.grid import Grid
from fine_tuning.heads import SequenceClassifier, load_encoder, mean_of_sequences
from fine_tuning.model_folder import Predictor
from fine_tuning.predict import main as predict_main
from fine_tuning.preparation import prepare
from fine_tuning.results import Results, RunResult
from fine_tuning.run import main
from fine_tuning.tasks import TASKS, Task
from fine_tuning.trainer import Trainer, TrainSettings, predict
from pretraining.huggingface import config_to_huggingface, to_huggingface
from pretraining.model import BertConfig, BertForPreTraining

CPU = torch.device("cpu")
WORDS = SYLLABLES[:120]
# Words that only texts with this label hold, of letters that are nowhere else.
SIGNS = {"bad": ["zaz", "zoz"], "good": ["wew", "wuw"]}
TASK = Task("classification", {}, ("text",), "label")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Matrices are tiny here: a second thread would only wait for the first."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def toy_rows(number: int, seed: int) -> list[tuple[str, str]]:
    """Texts of made-up words, each with one that tells its label."""
    draw = random.Random(seed)
    rows = []
    for i in range(number):
        label = ("bad", "good")[i % 2]
        words = draw.choices(WORDS, k=draw.randint(2, 12))
        words.insert(draw.randrange(len(words)), draw.choice(SIGNS[label]))
        rows.append((" ".join(words), label))
    return rows


def write_csv(path: Path, rows: list[tuple[str, str]], header: str = "text,label") -> Path:
    path.write_text("\n".join([header, *(",".join(row) for row in rows)]) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    """Folder with a separable set in train.csv, dev.csv and test.csv, and a tokenizer."""
    folder = tmp_path_factory.mktemp("toy")
    for seed, (split, number) in enumerate({"train": 200, "dev": 80, "test": 60}.items()):
        write_csv(folder / f"{split}.csv", toy_rows(number, seed))
    text = folder / "text.txt"
    text.write_text("\n".join(text for text, _ in toy_rows(600, 9)) + "\n")
    options = ["--input", str(text), "--output", str(folder / "tokenizer"), "--vocab_size", "140"]
    assert not data_prep(["tokenizer", *options, "--eval_fraction", "0", "--workers", "1"])
    return folder


@pytest.fixture(scope="module")
def tokenizer(toy) -> Tokenizer:
    return Tokenizer(toy / "tokenizer")


def command(toy: Path, output: Path, *changes: str, test: bool = True) -> list[str]:
    """A grid of one learning rate and one seed on the toy set; later options override earlier ones."""
    options = {"train": toy / "train.csv", "dev": toy / "dev.csv", "output": output}
    options |= {"init_from": "random", "model": "tiny", "tokenizer": toy / "tokenizer"}
    options |= {"learning_rate": "3e-3", "epochs": 3, "batch_size": 16, "max_length": 24, "precision": "fp32"}
    if test:
        options["test"] = toy / "test.csv"
    return [str(part) for name, value in options.items() for part in (f"--{name}", value)] + list(changes)


GRID = ("--learning_rate", "3e-3", "1e-6", "--seeds", "0", "1")


@pytest.fixture(scope="module")
def grid(toy) -> Path:
    """The results folder of two learning rates with two seeds each, on [CLS]."""
    assert main(command(toy, toy / "grid", *GRID)) == 0
    return toy / "grid"


def metrics(folder: Path) -> dict:
    return json.loads((folder / "metrics.json").read_text(encoding="utf-8"))


def untimed(content: dict) -> dict:
    for run in [*content["runs"], content["best"]]:
        del run["seconds"]
    return content


def tiny(tokenizer: Tokenizer, pooling: str = "cls", **changes) -> SequenceClassifier:
    torch.manual_seed(5)
    config = BertConfig.preset("tiny", tokenizer.vocab_size, initializer_range=0.2, **changes)
    return SequenceClassifier(config, 2, pooling)


# Data


def test_csv_tsv_jsonl_and_compressed_files_read_the_same(tmp_path):
    """The same rows come out of CSV, TSV, JSONL and gzip, with clean texts; labels lose outer spaces, numbers stay as
    written."""
    rows = [("a, b", "1"), ('say "yes"', "0"), ("two lines", "10")]
    csv_text = 'id,label,text\n1, 1,"a, b"\n2,0,"say ""yes"""\n3,10,"two\nlines"\n'
    (tmp_path / "a.csv").write_text(csv_text)
    (tmp_path / "a.tsv").write_text(csv_text.replace(",", "\t").replace("a\t b", "a, b"))
    lines = [json.dumps({"label": int(label), "text": text.replace("two ", "two\n")}) for text, label in rows]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n\n")
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + csv_text.encode()))
    for name in ("a.csv", "a.tsv", "a.jsonl", "b.csv.gz"):
        examples = read_examples(tmp_path / name, TASK)
        assert list(zip(examples.columns[0], examples.labels, strict=True)) == rows, name


def test_a_lone_quotation_mark_is_a_character_in_glue_files(tmp_path):
    """SST-2's row reads a field that begins with a quotation mark as it stands, and the row after it too."""
    (tmp_path / "train.tsv").write_text('sentence\tlabel\n"odd\t1\nplain\t0\n')
    assert read_examples(tmp_path / "train.tsv", TASKS["sst2"]).columns[0] == ['"odd', "plain"]


def test_labels_are_in_numeric_order_or_sorted(tmp_path):
    """Labels that are all numbers are ordered by value, others as text."""
    for labels, expected in (
        (["10", "9", "-1"], ("-1", "9", "10")),
        (["b", "10", "a"], ("10", "a", "b")),
        (["nan", "2", "10"], ("10", "2", "nan")),
    ):
        path = write_csv(tmp_path / "a.csv", [("x", label) for label in labels])
        assert label_order(read_examples(path, TASK)) == expected


def test_subsets_are_nested_and_keep_the_files_order(tmp_path):
    """A subset is a function of the texts alone: it does not depend on the order of rows, and a larger one contains it."""
    rows = toy_rows(100, 3)
    examples = read_examples(write_csv(tmp_path / "a.csv", rows), TASK)
    backwards = read_examples(write_csv(tmp_path / "b.csv", rows[::-1]), TASK)
    small, large = (choose_subset(examples, number).columns[0] for number in (20, 50))
    assert set(small) < set(large) and len(small) == 20
    assert choose_subset(backwards, 20).columns[0] == small[::-1]
    positions = [examples.columns[0].index(text) for text in small]
    assert positions == sorted(positions) and positions != list(range(20))


def test_empty_texts_are_left_out_of_training_and_scored_in_dev(tmp_path):
    """An empty text is dropped from train and kept in dev, and both are counted and located for the user."""
    train = write_csv(tmp_path / "train.csv", [("a", "x"), ("<br /> ", "y"), ("b", "y"), ("", "x")])
    dev = write_csv(tmp_path / "dev.csv", [("a", "x"), (" \u3000", "y")])
    data = read_data(replace(TASK, files={"train": train, "dev": dev}), None)
    assert data.splits["train"].columns[0] == ["a", "b"]
    assert data.splits["dev"].columns[0] == ["a", ""]
    assert data.notes == [
        f"{train}: 2 empty texts are left out (first: line 3)",
        f"{dev}: 1 empty texts are kept and scored (first: line 3)",
    ]


# Features and batches


def test_features_equal_a_slow_reference(tokenizer):
    """Ids, segments and the count of cut texts are those of one text after the other, for any text and length."""
    draw = random.Random(1)
    texts = ["", " ", "\u200b\n", "한국어", *(" ".join(draw.choices(WORDS, k=n)) for n in range(40))]
    for max_length in (3, 8, 512):
        features = sentence_features(tokenizer, [texts], max_length)
        rows, truncated = [], 0
        for text in texts:
            ids = tokenizer.encode([text])[0].tolist()
            truncated += len(ids) > max_length - 2
            rows.append([tokenizer.cls_id, *ids[: max_length - 2], tokenizer.sep_id])
        instances = features.instances
        bounds = zip(instances.offsets[:-1], instances.offsets[1:], strict=True)
        assert [instances.tokens[a:b].tolist() for a, b in bounds] == rows
        assert instances.segment_a.tolist() == [len(row) for row in rows]
        assert features.truncated == truncated


def test_no_texts_give_no_features(tokenizer):
    """An empty list of texts gives zero instances."""
    assert len(sentence_features(tokenizer, [[]], 8)) == 0


def test_select_gathers_rows_in_any_order(tokenizer):
    """Rows asked for in any order, repeats included, come out as those rows' tokens."""
    texts = [" ".join(WORDS[i : i + 1 + i % 5]) for i in range(20)]
    instances = sentence_features(tokenizer, [texts], 64).instances
    rows = np.array([7, 0, 19, 7])
    chosen = select(instances, rows)
    for number, row in enumerate(rows):
        expected = instances.tokens[instances.offsets[row] : instances.offsets[row + 1]]
        assert np.array_equal(chosen.tokens[chosen.offsets[number] : chosen.offsets[number + 1]], expected)


@pytest.mark.parametrize("n", [1, 31, 32, 33, 1000])
def test_an_epoch_has_every_example_once(n):
    """Each epoch's batches hold every example once, all but one are full, and each runs from long to short."""
    lengths = np.random.default_rng(n).integers(3, 60, n)
    batches = epoch_batches(lengths, 32, seed=1, epoch=4)
    assert sorted(np.concatenate(batches).tolist()) == list(range(n))
    assert sorted(map(len, batches))[1:] == [32] * (len(batches) - 1)
    assert all((np.diff(lengths[batch]) <= 0).all() for batch in batches)


def test_the_order_is_a_function_of_seed_and_epoch():
    """The same seed and epoch give the same batches, another seed or epoch others, and lengths come mixed."""
    lengths = np.random.default_rng(0).integers(3, 60, 4000)

    def order(seed: int, epoch: int) -> list[int]:
        return np.concatenate(epoch_batches(lengths, 16, seed, epoch)).tolist()

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9
    means = [lengths[batch].mean() for batch in epoch_batches(lengths, 16, 0, 0)]
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.2


# Model and training


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_predictions_do_not_depend_on_batches_or_order(tokenizer, pooling, monkeypatch):
    """Logits agree to 1e-5 whatever the batch size, the token bound and the order of the texts."""
    texts = [text for text, _ in toy_rows(50, 8)]
    model = tiny(tokenizer, pooling)
    instances = sentence_features(tokenizer, [texts], 24).instances
    together = predict(model, instances, CPU)
    assert np.ptp(together[:, 0]) > 0.01
    order = np.random.default_rng(0).permutation(50)
    shuffled = predict(model, select(instances, order), CPU, max_sequences=7)
    assert np.abs(shuffled - together[order]).max() < 1e-5
    monkeypatch.setattr(trainer_module, "MAX_TOKENS", 30)
    assert np.abs(predict(model, instances, CPU, max_sequences=3) - together).max() < 1e-5


def test_mean_of_sequences_equals_a_loop():
    """The mean runs over each sequence's own tokens, and its gradient too."""
    lengths = np.array([3, 1, 5])
    hidden = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    expected = torch.stack([part.mean(0) for part in hidden.detach().split(lengths.tolist())])
    assert torch.allclose(mean_of_sequences(hidden, lengths), expected, atol=1e-6)
    mean_of_sequences(hidden, lengths).sum().backward()
    each = torch.repeat_interleave(1 / torch.tensor(lengths), torch.tensor(lengths)).double()
    assert torch.allclose(hidden.grad, each[:, None].expand(9, 4), atol=1e-6)


def toy_trainer(tokenizer: Tokenizer, precision: str = "fp32", **changes) -> Trainer:
    texts, labels = zip(*toy_rows(48, 2), strict=True)
    features = sentence_features(tokenizer, [texts], 24)
    targets = np.array([label == "good" for label in labels]).astype(np.int64)
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    settings = replace(TrainSettings(1e-3, 0, 2, 16, 0.1, 0.01), **changes)
    return Trainer(tiny(tokenizer, **no_dropout), settings, features, targets, CPU, precision)


def test_a_batch_in_parts_is_the_same_update(tokenizer, monkeypatch):
    """A batch that exceeds the token bound is trained in parts, and weights agree to 1e-5 after three updates."""
    whole, parts = toy_trainer(tokenizer), toy_trainer(tokenizer)
    list(whole.train_epoch(0))
    monkeypatch.setattr(trainer_module, "MAX_TOKENS", 40)
    list(parts.train_epoch(0))
    for one, other in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_one_update_is_adamw_with_clipping_and_warm_up(tokenizer):
    """Updates equal torch's own AdamW on the mean loss, clipped at 1.0, at rates that rise and fall linearly."""
    ours, reference = toy_trainer(tokenizer, warmup_ratio=0.5), toy_trainer(tokenizer).model.train()
    matrices = [p for p in reference.parameters() if p.dim() > 1]
    others = [p for p in reference.parameters() if p.dim() == 1]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, eps=1e-6, weight_decay=0.01)
    expected_rates = [step / 3 * 1e-3 for step in (1, 2, 3)] + [(7 - step) / 4 * 1e-3 for step in (4, 5, 6)]
    rates, losses = [], []
    for epoch in range(2):
        batches = epoch_batches(ours.features.lengths, 16, 0, epoch)
        for rows, report in zip(batches, ours.train_epoch(epoch), strict=True):
            rates.append(report.learning_rate)
            adamw.zero_grad()
            outputs = [
                reference(trainer_module.cut_micro_batches(select(ours.features.instances, rows[[i]]), 1)[0])
                for i in range(len(rows))
            ]
            loss = torch.nn.functional.cross_entropy(torch.cat(outputs), ours.targets[rows])
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
            for group in adamw.param_groups:
                group["lr"] = expected_rates[len(rates) - 1]
            adamw.step()
            losses.append((float(report.mean_loss), float(loss.detach()), float(norm)))
    assert np.allclose(rates, expected_rates)
    assert max(norm for _, _, norm in losses) > 1.0  # clipping was at work
    assert np.allclose([a for a, _, _ in losses], [b for _, b, _ in losses], atol=1e-4)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_updates_float32_weights(tokenizer, precision):
    """Below fp32 a rounded copy computes, the weights that are kept stay float32, and the loss follows fp32's."""
    half, full = toy_trainer(tokenizer, precision), toy_trainer(tokenizer)
    losses = [
        [float(report.mean_loss) for epoch in range(2) for report in trainer.train_epoch(epoch)]
        for trainer in (half, full)
    ]
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    for kept, computing in zip(half.model.parameters(), half.computing.parameters(), strict=True):
        assert kept.dtype == torch.float32 and torch.equal(kept.to(dtype), computing)
    assert losses[0] != losses[1] and losses[0][0] == pytest.approx(losses[1][0], abs=0.05)
    assert losses[0][-1] < losses[0][0] / 1.5  # fp16 skips its first updates, until the loss scale is found


def test_pretrained_weights_find_their_places(toy, tokenizer, tmp_path, capsys):
    """A run from a folder starts with its encoder and pooler; without a pooler that part is fresh, and this is said."""
    for next_sentence in (True, False):
        folder = tmp_path / f"from{next_sentence}"
        shutil.copytree(toy / "tokenizer", folder)
        torch.manual_seed(3)
        config = BertConfig.preset("tiny", tokenizer.vocab_size, next_sentence=next_sentence)
        source = BertForPreTraining(config)
        (folder / "config.json").write_text(json.dumps(config_to_huggingface(config)))
        save_file(to_huggingface(source.state_dict(), config), folder / "model.safetensors")
        arguments = command(toy, tmp_path / "x")
        for name in ("--init_from", "--model", "--tokenizer"):
            del arguments[arguments.index(name) : arguments.index(name) + 2]
        preparation = prepare(parse_arguments([*arguments, "--init_from", str(folder)]))
        models = [preparation.new_model(seed) for seed in (0, 0, 1)]
        weights = [model.state_dict() for model in models]
        for name, tensor in source.state_dict().items():
            if name.startswith("bert."):
                assert all(torch.equal(state[name], tensor) for state in weights), name
        fresh = {name for name in weights[0] if not torch.equal(weights[0][name], weights[2][name])}
        pooler = set() if next_sentence else {"bert.pooler.weight"}
        assert fresh == {"classifier.weight"} | pooler
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
        said = "\n".join(preparation.describe())
        assert ("pooler starts from random weights" in said) == (not next_sentence)


def test_an_encoder_with_a_hole_is_refused(tokenizer):
    """Weights that lack a part of the encoder are refused by the name of the part."""
    model = tiny(tokenizer)
    weights = dict(model.state_dict())
    del weights["bert.layers.1.output_dense.weight"]
    with pytest.raises(UserError, match="no weights bert.layers.1.output_dense.weight"):
        load_encoder(model, weights, "folder x")


# Runs and results


def test_a_separable_set_is_learnt_from_random_weights(grid, capsys):
    """In seconds a tiny random model gets more than 95 % right of dev and test, where a word tells the label."""
    content = metrics(grid)
    assert content["best"]["learning_rate"] == 3e-3
    assert content["dev"]["accuracy"]["minimum"] > 0.95
    assert content["test"]["accuracy"]["minimum"] > 0.9


def test_mean_pooling_learns_too(toy, tmp_path, capsys):
    """With --pooling mean the same set is learnt, and the program says where the folder does not load."""
    assert main(command(toy, tmp_path / "mean", "--pooling", "mean", test=False)) == 0
    assert metrics(tmp_path / "mean")["dev"]["accuracy"]["mean"] > 0.95
    assert "encoder only (AutoModel)" in capsys.readouterr().out
    assert "test" not in metrics(tmp_path / "mean")


def test_metrics_json_is_what_the_runs_say(grid, toy):
    """metrics.json has every run, and means and deviations over seeds that can be computed again from them."""
    content = metrics(grid)
    runs = [(run["learning_rate"], run["seed"]) for run in content["runs"]]
    assert runs == [(3e-3, 0), (3e-3, 1), (1e-6, 0), (1e-6, 1)]
    for split in ("dev", "test"):
        values = [run["scores"][split]["accuracy"] for run in content["runs"][:2]]
        assert content[split]["accuracy"]["mean"] == statistics.mean(values)
        assert content[split]["accuracy"]["standard_deviation"] == statistics.stdev(values)
    assert content["labels"] == ["bad", "good"]
    assert content["examples"] == {"train": 200, "dev": 80, "test": 60}
    assert content["learning_rates"][1]["dev"]["accuracy"]["mean"] < 0.8
    best = max(
        content["runs"][:2], key=lambda run: (run["scores"]["dev"]["accuracy"], -run["scores"]["dev"]["loss"])
    )
    assert content["best"] == best


def test_the_models_scores_are_those_of_the_folder(grid, toy):
    """The model that is kept is the best run's: it scores on test what metrics.json says."""
    examples = read_examples(toy / "test.csv", TASK)
    predictor = Predictor(grid, CPU)
    chosen = [max(row, key=row.get) for row in predictor.probabilities(examples.columns)]
    right = np.mean([a == b for a, b in zip(chosen, examples.labels, strict=True)])
    assert right == pytest.approx(metrics(grid)["best"]["scores"]["test"]["accuracy"])
    assert not list(grid.rglob("weights.safetensors"))  # no second copy of any model stays


def test_curves_and_lines_are_recorded(grid):
    """Each run has its curves in TensorBoard and the same numbers in metrics.jsonl."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = grid / "runs" / "lr0.003-seed1"
    events = EventAccumulator(str(folder)).Reload()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    accuracies = [line["dev/accuracy"] for line in lines if "dev/accuracy" in line]
    assert [event.value for event in events.Scalars("dev/accuracy")] == pytest.approx(accuracies)
    assert len(accuracies) == 3
    assert [event.step for event in events.Scalars("train/loss")] == [10, 20, 30, 39]


def test_a_killed_grid_goes_on_and_ends_the_same(grid, toy, tmp_path, monkeypatch, capsys):
    """A grid that is interrupted in its third run trains only what is missing and ends with the same numbers and model."""
    train = Grid._train_epoch
    calls = []

    def interrupted(self, trainer, epoch, recorder):
        calls.append(epoch)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return train(self, trainer, epoch, recorder)

    monkeypatch.setattr(Grid, "_train_epoch", interrupted)
    arguments = command(toy, tmp_path / "again", *GRID)
    assert run_program(main, arguments) == 130
    assert not (tmp_path / "again" / "metrics.json").exists()
    assert main(arguments) == 0
    assert len(calls) == 8 + 2 * 3
    assert "2 runs are finished already" in capsys.readouterr().out
    assert untimed(metrics(tmp_path / "again")) == untimed(metrics(grid))
    assert files(tmp_path / "again" / "model") == files(grid / "model")
    assert main(arguments) == 0
    assert len(calls) == 14
    assert "nothing is left to train" in capsys.readouterr().out


def test_the_first_seeds_choose_the_learning_rate(toy, tmp_path, monkeypatch, capsys):
    """--search_seeds 1: each rate runs with the first seed, the best one with the others too, whose scores choose nothing;
    an interrupted search goes on."""
    trained = []
    train = Grid._train

    def scored(self, rate, seed):
        if len(trained) == 3:
            trained.append("interrupted")
            raise KeyboardInterrupt
        trained.append((rate, seed))
        result = train(self, rate, seed)
        # The better rate of the search is bad with the other seeds.
        accuracy = {0: 0.9 if rate == 3e-3 else 0.5}.get(seed, 0.1)
        result.scores["dev"]["accuracy"] = accuracy
        self.results.finish(result, self.preparation.new_model(seed))
        return result

    monkeypatch.setattr(Grid, "_train", scored)
    killed = tmp_path / "x" / "runs" / "lr0.5-seed9" / "weights.safetensors"
    killed.parent.mkdir(parents=True)
    killed.touch()  # of an earlier command that was killed
    options = ("--epochs", "1", "--learning_rate", "1e-6", "3e-3", "--seeds", "0", "1", "2", "--search_seeds")
    arguments = command(toy, tmp_path / "x", *options, "1")
    assert run_program(main, arguments) == 130
    assert main(arguments) == 0
    assert trained == [(1e-6, 0), (3e-3, 0), (3e-3, 1), "interrupted", (3e-3, 2)]
    said = capsys.readouterr().out
    assert "4 runs of" in said and "3 runs are finished already" in said
    content = metrics(tmp_path / "x")
    assert content["best"]["learning_rate"] == 3e-3
    assert content["dev"]["accuracy"]["mean"] == pytest.approx((0.9 + 0.1 + 0.1) / 3)
    # The rates are listed as they were compared: with the first seed.
    assert [row["dev"]["accuracy"]["mean"] for row in content["learning_rates"]] == [0.5, 0.9]
    assert not list((tmp_path / "x").glob("runs/*/weights.safetensors"))
    assert main(arguments) == 0
    assert "nothing is left to train" in capsys.readouterr().out
    assert run_program(main, command(toy, tmp_path / "x", *options, "4")) == 2
    assert "--seeds has 3" in capsys.readouterr().err


def test_more_seeds_are_added_and_other_settings_refused(toy, tmp_path, monkeypatch, capsys):
    """A new seed is trained beside those that are there; fewer seeds choose among theirs; another number of epochs or other data is refused."""
    trained = []
    train = Grid._train
    monkeypatch.setattr(Grid, "_train", lambda self, *run: trained.append(run) or train(self, *run))
    data, output = tmp_path / "data", tmp_path / "x"
    shutil.copytree(toy, data, ignore=shutil.ignore_patterns("grid"))
    for seeds in (["0"], ["0", "1"]):
        assert main(command(data, output, "--epochs", "1", "--seeds", *seeds)) == 0
    assert trained == [(3e-3, 0), (3e-3, 1)]
    best = metrics(output)["best"]["seed"]
    other = 1 - best
    assert main(command(data, output, "--epochs", "1", "--seeds", str(other))) == 0
    assert trained[2:] == [(3e-3, other)]  # whose weights had made room for the best run's
    assert metrics(output)["best"]["seed"] == other
    assert Predictor(output, CPU).description.run["seed"] == other
    capsys.readouterr()
    assert run_program(main, command(data, output, "--epochs", "2")) == 2
    assert "epochs is 2 and was 1" in capsys.readouterr().err
    write_csv(data / "dev.csv", toy_rows(30, 77))
    assert run_program(main, command(data, output, "--epochs", "1")) == 2
    assert "files is" in capsys.readouterr().err


def test_the_learning_rate_with_the_best_mean_wins(tmp_path):
    """A rate whose single best seed is lucky loses against one with the better mean; loss decides between equals."""
    results = Results(tmp_path, {}, "accuracy")

    def run(rate: float, seed: int, accuracy: float, loss: float | None = 0.5) -> RunResult:
        return RunResult(rate, seed, 1, 0.1, {"dev": {"loss": loss, "accuracy": accuracy}}, 0.0)

    lucky, steady = [run(1.0, 0, 0.95), run(1.0, 1, 0.5)], [run(2.0, 0, 0.9), run(2.0, 1, 0.91, 0.4)]
    assert results.best_rate(lucky + steady, [0, 1]) == steady
    assert results.best_seed(steady) == steady[1]
    assert results.best_rate([run(1.0, 0, 0.9), run(2.0, 0, 0.9, 0.4)], [0])[0].learning_rate == 2.0
    assert results.best_rate([run(1.0, 0, 0.9, None), run(2.0, 0, 0.9, 9.0)], [0])[0].learning_rate == 2.0


def test_a_result_of_other_settings_is_not_taken(tmp_path, tokenizer):
    """A finished run counts only with its own fingerprint, and half a file counts as none."""
    result = RunResult(1.0, 0, 1, None, {"dev": {"loss": 0.5, "accuracy": 1.0}}, 0.0)
    mine, other = Results(tmp_path, {"epochs": 1}, "accuracy"), Results(tmp_path, {"epochs": 2}, "accuracy")
    folder = mine.begin(1.0, 0)
    mine.finish(result, torch.nn.Linear(2, 2))
    assert asdict(mine.finished(1.0, 0)) == asdict(result)
    assert other.finished(1.0, 0) is None
    path = folder / "result.json"
    path.write_text(path.read_text()[:40])
    assert mine.finished(1.0, 0) is None


# The exported model


def test_the_folder_is_a_bert_for_sequence_classification(grid, toy):
    """AutoTokenizer and AutoModelForSequenceClassification give our logits to 1e-5 and the names of the labels."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model, info = AutoModelForSequenceClassification.from_pretrained(grid / "model", output_loading_info=True)
    assert type(model).__name__ == "BertForSequenceClassification"
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.id2label == {0: "bad", 1: "good"} and model.config.label2id == {"bad": 0, "good": 1}
    texts = read_examples(toy / "test.csv", TASK).columns[0]
    inputs = AutoTokenizer.from_pretrained(grid / "model")(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        theirs = model.eval()(**inputs).logits.numpy()
    ours = Predictor(grid, CPU).logits([texts])
    assert np.ptp(ours) > 1 and np.abs(ours - theirs).max() < 1e-5


def test_a_mean_pooling_folder_is_an_encoder_elsewhere(toy, tmp_path):
    """With mean pooling AutoModel gives the encoder's hidden states, and no classifier is taken for BERT's."""
    from transformers import AutoModel, AutoModelForSequenceClassification

    main(command(toy, tmp_path / "x", "--pooling", "mean", "--epochs", "1", test=False))
    predictor = Predictor(tmp_path / "x", CPU)
    instances = sentence_features(predictor.tokenizer, [["ban ba des"]], 24).instances
    batch = trainer_module.cut_micro_batches(instances, 1)[0]
    encoder = AutoModel.from_pretrained(tmp_path / "x" / "model").eval()
    with torch.no_grad():
        ours = predictor.model.eval().bert(
            batch.input_ids, batch.token_type_ids, batch.position_ids, batch.lengths
        )
        theirs = encoder(batch.input_ids[None]).last_hidden_state[0]
    assert torch.allclose(ours, theirs, atol=1e-5)
    folder = tmp_path / "x" / "model"
    _, info = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert "classifier.weight" in info["missing_keys"]


# predict.py


def predictions(capsys) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_predict_answers_arguments_lines_and_jsonl_alike(grid, monkeypatch, capsys):
    """Texts as arguments, as lines and as JSON lines get the same answer, one JSON object each, in their order."""
    texts = [f"ban {SIGNS['good'][0]} ba", f"des {SIGNS['bad'][1]}", ""]
    assert predict_main([str(grid), *texts]) == 0
    given = predictions(capsys)
    assert [row["label"] for row in given[:2]] == ["good", "bad"]
    assert all(sum(row["probabilities"].values()) == pytest.approx(1) for row in given)
    assert all(list(row["probabilities"]) == ["bad", "good"] for row in given)
    jsonl = "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts)
    for content, options in (("\n".join(texts) + "\n", []), (jsonl, ["--jsonl"])):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content.encode())))
        assert predict_main([str(grid / "model"), *options]) == 0
        assert predictions(capsys) == given


def test_predict_cleans_texts_as_training_does(grid, toy, tmp_path, monkeypatch, capsys):
    """A text full of line breaks and odd spaces is read the same, and as its clean form is, in a file for training and
    as an argument, a line or a JSON line for predict; labels and other fields are not cleaned."""
    clean = [f"ban {SIGNS['good'][0]} ba", f"des {SIGNS['bad'][1]} ban des"]
    messy = [f" ban<br /><BR>{SIGNS['good'][0]}\u3000 ba\x0b", f"des\xa0{SIGNS['bad'][1]}<br>ban\x00\x85des"]
    jsonl = "".join(json.dumps({"text": text, "label": "a<br />\u3000b"}) + "\n" for text in messy)
    (tmp_path / "x.jsonl").write_text(jsonl)
    examples = read_examples(tmp_path / "x.jsonl", TASK)
    assert examples.columns == (clean,) and examples.labels == ["a<br />\u3000b"] * 2
    predictor = Predictor(grid, CPU)
    wanted = predictor.probabilities([clean])
    assert predictor.probabilities(examples.columns) == predictor.probabilities([messy]) == wanted
    assert predictor.probabilities([["ban ban", "ban ban"]]) != wanted
    lines = "\ufeff" + "\n".join(messy) + "\n"
    jsonl = "\ufeff" + jsonl.replace("}\n", "}\n\n")
    for content, options in ((None, messy), (None, clean), (lines, []), (jsonl, ["--jsonl"])):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO((content or "").encode())))
        assert predict_main([str(grid), *options]) == 0
        assert [row["probabilities"] for row in predictions(capsys)] == wanted


@pytest.mark.parametrize(
    ("stdin", "options", "wanted"),
    [
        (b"fine\n\xff\n", [], "standard input, line 2: the text is not valid UTF-8"),
        (
            b'{"text": "a"}\n{"txt": "a"}\n',
            ["--jsonl"],
            'line 2: there is no field "text"; the fields are "txt"',
        ),
        (b"plain\n", ["--jsonl"], "line 1: expected one JSON object a line"),
        (b'{"text": []}\n', ["--jsonl"], 'line 1: field "text" must be a string or a number, found list'),
        (b"", ["--jsonl", "TEXT"], "--jsonl is for lines of standard input"),
    ],
)
def test_predict_names_the_bad_line(grid, monkeypatch, capsys, stdin, options, wanted):
    """Bad lines of standard input are named in a sentence, with exit code 2."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
    assert run_program(predict_main, [str(grid), *reversed(options)]) == 2
    assert wanted in capsys.readouterr().err


def test_predict_refuses_folders_without_a_whole_model(grid, toy, tmp_path, capsys):
    """A folder that is no fine-tuned model, one without weights and one with a damaged file are refused by name."""
    for missing, wanted in (
        ("fine_tuning.json", "there is no fine-tuned model here"),
        ("model.safetensors", "model.safetensors"),
        ("config.json", "config.json: the file is missing"),
        ("sentencepiece.model", "sentencepiece.model"),
    ):
        folder = tmp_path / missing
        shutil.copytree(grid / "model", folder)
        (folder / missing).unlink()
        assert run_program(predict_main, [str(folder), "x"]) == 2
        assert wanted in capsys.readouterr().err
    (folder := tmp_path / "cut").mkdir()
    for path in (grid / "model").iterdir():
        (folder / path.name).write_bytes(path.read_bytes()[:5000])
    assert run_program(predict_main, [str(folder), "x"]) == 2


# Bad input


BAD_FILES = {
    "no such column": (
        "train",
        "txt,label\na,b\n",
        'line 1: there is no column "text"; the columns are "txt", "label"',
    ),
    "a column twice": ("dev", "text,label,text\na,b,c\n", 'line 1: there is more than one column "text"'),
    "label only in dev": ("dev", "text,label\na,bad\nb,ugly\n", 'line 3: the label "ugly" is not in'),
    "empty file": ("train", "", 'the file is empty; expected rows with "text", "label"'),
    "only a header": ("dev", "text,label\n", "the file is empty"),
    "one class": ("train", "text,label\na,good\nb,good\n", 'all 2 examples have the label "good"'),
    "one class with text": ("train", "text,label\na,good\n,bad\n", "what is left for training has 1 class"),
    "wide row": ("train", "text,label\na,good\nb,bad,c\n", "line 3: the row has 3 columns, the header 2"),
    "not UTF-8": (
        "dev",
        b"text,label\na,good\n\xe9t\xe9,bad\n",
        "line 3, byte 18: the text is not valid UTF-8",
    ),
    "label missing": ("train", "text,label\na,good\nb, \n", 'line 3: the label is missing (column "label")'),
    "open quotation": ("train", 'text,label\n"a,good\nb,bad\n', "malformed CSV"),
    "NUL byte": ("train", "text,label\na,good\nb\0,bad\n", "line 3: there is a NUL byte"),
}


@pytest.mark.parametrize(("split", "content", "wanted"), BAD_FILES.values(), ids=BAD_FILES)
def test_bad_files_are_named_in_one_sentence(toy, tmp_path, capsys, split, content, wanted):
    """Each fault in a file ends the program with exit code 2 and one line that names the file and its place."""
    path = tmp_path / "given.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert run_program(main, command(toy, tmp_path / "x", f"--{split}", str(path))) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path}") and wanted in error and error.count("\n") == 1
    assert not (tmp_path / "x").exists()


BAD_JSON = {
    "no object": ("[1]", "line 2: expected one JSON object a line, found list"),
    "no JSON": ("{", "line 2: expected one JSON object a line, but it does not parse"),
    "no such field": ('{"label": 1}', 'line 2: there is no field "text"; the fields are "label"'),
    "a list for text": ('{"text": [], "label": 1}', 'line 2: field "text" must be a string or a number'),
    "no label": ('{"text": "b", "label": null}', "line 2: the label is missing"),
}


@pytest.mark.parametrize(("line", "wanted"), BAD_JSON.values(), ids=BAD_JSON)
def test_bad_json_lines_are_named(toy, tmp_path, capsys, line, wanted):
    """Each fault in a JSON line is named with file and line."""
    path = tmp_path / "given.jsonl"
    path.write_text('{"text": "a", "label": "good"}\n' + line + "\n")
    assert run_program(main, command(toy, tmp_path / "x", "--train", str(path))) == 2
    assert f"error: {path}, {wanted}" in capsys.readouterr().err


def test_half_a_surrogate_in_json_becomes_a_replacement_character(tmp_path, tokenizer):
    """A JSON escape that UTF-8 cannot hold is read as U+FFFD and can be encoded."""
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b \\ud83d\\ude00", "label": "x"}\n')
    text = read_examples(tmp_path / "a.jsonl", TASK).columns[0]
    assert text == ["a\ufffdb 😀"]
    assert len(sentence_features(tokenizer, [text], 24)) == 1


BAD_OPTIONS = {
    "unknown extension": (["--dev", "/dev/null"], "the extension says how to read a file"),
    "missing file": (["--dev", "nowhere.csv"], "nowhere.csv: the file cannot be read (No such file"),
    "too many examples": (["--train_examples", "9999"], "has 200 examples with text; ask for fewer"),
    "too long": (["--max_length", "513"], "--max_length 513: the model has 512 positions"),
    "too short": (["--max_length", "2"], "--max_length 2"),
    "a value twice": (["--seeds", "1", "1"], "a value stands there twice"),
    "options of a named task": (["--task", "sst2"], "leave --train, --dev, --test out"),
    "data_dir with own files": (["--data_dir", "x"], "leave --data_dir out"),
    "no such model": (["--init_from", "nowhere"], "brings its own: leave --model, --tokenizer out"),
    "precision": (["--precision", "fp16"], "does not have it in hardware"),
}


@pytest.mark.parametrize(("options", "wanted"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_bad_options_are_named(toy, tmp_path, capsys, options, wanted):
    """Each contradiction on the command line is one sentence and exit code 2."""
    assert run_program(main, command(toy, tmp_path / "x", *options)) == 2
    assert wanted in capsys.readouterr().err


@pytest.mark.parametrize("content", [{}, {"config.json": "{}"}], ids=["empty", "only a config"])
def test_a_folder_without_weights_is_refused(toy, tmp_path, capsys, content):
    """--init_from a folder that holds no weights is refused by its name."""
    folder = tmp_path / "weightless"
    folder.mkdir()
    for name, text in content.items():
        (folder / name).write_text(text)
    files_ = ["--train", str(toy / "train.csv"), "--dev", str(toy / "dev.csv")]
    assert run_program(main, [*files_, "--init_from", str(folder), "--output", str(tmp_path / "x")]) == 2
    assert str(folder) in capsys.readouterr().err


def test_random_weights_need_a_size_and_a_tokenizer(toy, tmp_path, capsys):
    """--init_from random without --model or --tokenizer says which are missing."""
    options = ["--train", "a.csv", "--dev", "b.csv", "--output", "x", "--init_from", "random"]
    assert run_program(main, options) == 2
    assert "needs --model and --tokenizer" in capsys.readouterr().err


# Real text


def test_sst2_runs_end_to_end(shared_data, toy, tmp_path, capsys):
    """GLUE's SST-2 files as they are downloaded train, score and predict; the last line says what to type next."""
    options = ["--task", "sst2", "--data_dir", str(shared_data / "glue" / "SST-2"), "--train_examples", "64"]
    start = ["--init_from", "random", "--model", "tiny", "--tokenizer", str(toy / "tokenizer")]
    training = ["--epochs", "1", "--max_length", "16", "--learning_rate", "1e-3"]
    assert main([*options, *start, *training, "--output", str(tmp_path / "sst2")]) == 0
    out = capsys.readouterr().out
    content = metrics(tmp_path / "sst2")
    assert content["labels"] == ["0", "1"] and content["examples"] == {"train": 64, "dev": 872}
    assert (
        content["truncated"]["dev"] > 100 and f"{content['truncated']['dev']:,} cut to --max_length 16" in out
    )
    last = out.splitlines()[-1]
    assert last.startswith(f"next: python fine_tuning/predict.py {tmp_path / 'sst2'} ")
    assert predict_main([str(tmp_path / "sst2"), last.split('"')[1]]) == 0
    assert predictions(capsys)[0]["label"] in ("0", "1")


def test_features_hold_no_padding(tokenizer):
    """The arrays hold as many tokens as the texts have, and nothing else."""
    features = sentence_features(tokenizer, [["ba", "ba be bi bo bu"]], 24)
    assert isinstance(features, Features)
    assert len(features.instances.tokens) == features.lengths.sum()
