"""LAMB against algorithm 2 of its paper in float64, in one process and on real ranks under ZeRO."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from dense_lamb import DenseLamb
from ranks_lamb import UNAWARE, VARIANTS
from test_distributed import clean_environment

from pretraining.lamb import Lamb
from pretraining.slices import CPU_CHUNK, CPU_PIECE

REPOSITORY = Path(__file__).parent.parent


def run_ranks(output: Path, ranks: int) -> dict:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command += [str(REPOSITORY / "tests" / "ranks_lamb.py"), str(output)]
    done = subprocess.run(
        command, env=clean_environment(), cwd=REPOSITORY, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(output.read_text())


def check(measured: dict, ranks: int) -> None:
    """Weights after 20 steps and each parameter's trust ratio are the oracle's, and a border did cut parameters."""
    assert len(measured) == 2 * len(VARIANTS) + 4
    for name, differences in measured.items():
        if name == UNAWARE:
            continue
        assert differences["weights"] < 1e-6, name
        assert differences.get("trust_ratios", 0) < 1e-6, name
        assert ranks == 1 or differences.get("straddling", 1) >= 1, name
    assert measured[UNAWARE]["weights"] > 0.1


def test_three_ranks_take_the_steps_of_the_dense_algorithm(tmp_path):
    """On 3 ranks, stages 0, 1 and 2, fp32, bf16 and fp16, with clipping, unequal micro-steps and both groups, weights and
    trust ratios are the oracle's; an optimizer that takes its slices for parameters is far off."""
    check(run_ranks(tmp_path / "three.json", 3), 3)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_any_number_of_ranks_takes_the_same_steps(tmp_path, ranks):
    """As on 3 ranks."""
    check(run_ranks(tmp_path / "ranks.json", ranks), ranks)


def test_norms_of_matrices_longer_than_a_chunk_are_exact():
    """Chunks and pieces change nothing: a matrix of several chunks and an odd rest has the oracle's ratio, whose
    norm in one float32 sum would be off by 1e-5."""
    torch.manual_seed(0)
    shapes = {"large": (CPU_CHUNK + CPU_PIECE + 7,), "small": (3, 5)}
    weights = {name: torch.nn.Parameter(torch.rand(shape) + 1) for name, shape in shapes.items()}
    options = {"betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01}
    lamb, dense = Lamb(weights.values(), 0.1, **options), DenseLamb(weights, set(weights), **options)
    for _ in range(2):
        gradients = {name: torch.randn(shape) for name, shape in shapes.items()}
        for name, weight in weights.items():
            weight.grad = gradients[name].clone()
        lamb.step()
        dense.step(gradients, 0.1)
        ratios = dict(zip(weights, lamb.trust_ratios(lamb.param_groups[0]).tolist(), strict=True))
        assert ratios == pytest.approx(dense.trust_ratios, rel=3e-6)
        for name, weight in weights.items():
            assert (
                float((weight.detach().double() - dense.weights[name]).norm() / dense.weights[name].norm())
                < 1e-6
            )
    assert int(lamb.state[weights["large"]]["step"]) == 2


def test_a_group_whose_gradients_are_absent_stays():
    """Without a gradient nothing moves, and the other group's step is taken."""
    still, moved = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    lamb = Lamb([{"params": [still]}, {"params": [moved]}], 0.1)
    moved.grad = torch.ones(3)
    lamb.step()
    assert torch.equal(still, torch.ones(3)) and not torch.equal(moved, torch.ones(3))
    assert not lamb.state[still]


def test_a_loaded_state_follows_its_parameter():
    """Counts and moments that were loaded from the CPU are on the device of the parameter at the next step, as the
    fused kernel needs them."""
    here, there = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3, device="meta"))
    here.grad = torch.ones(3)
    saved, loading = Lamb([here], 0.1), Lamb([there], 0.1)
    saved.step()
    loading.load_state_dict(saved.state_dict())
    assert {name: value.device.type for name, value in loading._state(there).items()} == dict.fromkeys(
        ("step", "exp_avg", "exp_avg_sq"), "meta"
    )


def test_experts_are_refused():
    """Their norms would be summed over the wrong ranks."""
    lamb = Lamb([torch.nn.Parameter(torch.ones(3))], 0.1)
    with pytest.raises(ValueError, match="mixture of experts"):
        lamb.shard(SimpleNamespace(has_moe_layers=True))
