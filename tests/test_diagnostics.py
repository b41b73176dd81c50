"""What a run says about its updates, against the weights of its checkpoints."""

import json
import math
from pathlib import Path

import pytest
import torch
from forked_ranks import run
from small_runs import make_shards, make_tokenizer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training_runs import arguments, deepspeed_json, final_parameters

from pretraining.metrics import Recorder

LR, STEPS = 2e-3, 3


@pytest.fixture(scope="module")
def measured_run(tmp_path_factory) -> Path:
    """Two ranks, LAMB at a constant rate, a checkpoint and a measurement after each step."""
    folder = tmp_path_factory.mktemp("diagnostics")
    shards = make_shards(folder, make_tokenizer(folder))
    optimizer = {"type": "Lamb", "params": {"lr": LR, "eps": 1e-6, "weight_decay": 0.01}}
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 1}}
    config = deepspeed_json(folder, optimizer=optimizer, scheduler=schedule)
    options = (
        "--max_steps",
        str(STEPS),
        "--save_interval",
        "1",
        "--keep",
        "9",
        "--diagnostics_interval",
        "1",
    )
    run(arguments(shards, folder / "run", *options, config=config), 2, folder / "logs")
    return folder / "run"


def test_norms_and_ratios_are_those_of_the_weights(measured_run):
    """Norms of weights and updates by group, and the extremes of the update-to-weight ratio, are what two checkpoints
    give; a matrix that LAMB adapts moves by the learning rate times its norm."""
    lines = [json.loads(line) for line in (measured_run / "metrics.jsonl").read_text().splitlines()]
    measured = {line["step"]: line for line in lines if "norms/weights_of_matrices" in line}
    assert list(measured) == [1, 2, 3]
    old, new = (final_parameters(measured_run, step) for step in (2, 3))
    for name, is_matrix in (("matrices", True), ("biases_and_layer_norms", False)):
        names = [key for key in new if (new[key].dim() > 1) == is_matrix]
        weights, update = (
            float(torch.cat([values.flatten().double() for values in those]).norm())
            for those in ([new[key] for key in names], [new[key] - old[key] for key in names])
        )
        assert measured[3][f"norms/weights_of_{name}"] == pytest.approx(weights, rel=1e-5)
        assert measured[3][f"norms/update_of_{name}"] == pytest.approx(update, rel=1e-4)
    ratios = torch.stack([(new[key] - old[key]).double().norm() / new[key].double().norm() for key in new])
    for extreme in ("min", "max", "median"):
        expected = float(getattr(ratios, extreme)())
        assert measured[3][f"optimizer/update_to_weight_{extreme}"] == pytest.approx(expected, rel=1e-3)
    assert any(float(ratio) == pytest.approx(LR, rel=1e-2) for ratio in ratios)
    extremes = [measured[3][f"optimizer/trust_ratio_{extreme}"] for extreme in ("min", "median", "max")]
    assert 0 < extremes[0] < extremes[1] < extremes[2]


def test_histograms_are_in_tensorboard(measured_run):
    """Trust ratios of all matrices and update-to-weight ratios of all parameters, at each measured step."""
    events = EventAccumulator(str(measured_run), size_guidance={"histograms": 0}).Reload()
    parameters = final_parameters(measured_run, STEPS)
    counts = {
        "optimizer/trust_ratio": sum(value.dim() > 1 for value in parameters.values()),
        "optimizer/update_to_weight": len(parameters),
    }
    for tag, count in counts.items():
        found = events.Histograms(tag)
        assert [event.step for event in found] == [1, 2, 3]
        assert found[-1].histogram_value.num == count


def test_what_is_not_finite_stops_nothing(tmp_path):
    """Histograms of weights that have diverged hold the finite numbers, and are left out if there are none."""
    recorder = Recorder(tmp_path, None)
    recorder.record(
        1, {}, {"some": torch.tensor([1.0, math.nan, math.inf]), "none": torch.tensor([math.nan])}
    )
    recorder.close()
    events = EventAccumulator(str(tmp_path), size_guidance={"histograms": 0}).Reload()
    assert events.Tags()["histograms"] == ["some"]
    assert events.Histograms("some")[0].histogram_value.num == 1
