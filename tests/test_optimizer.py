"""AdamW against the paper in float64, parameter groups, choice of kernels."""

import sys

import numpy as np
import pytest
import torch

from data_prep.errors import UserError, run_program
from pretraining.optimizer import AdamWSettings, choose_optimizer, parameter_groups
from pretraining.run import main
from pretraining.schedules import WarmupDecayLR, learning_rate

ADAMW = AdamWSettings(lr=1e-4)


class TinyBert(torch.nn.Module):
    """The kinds of parameters that a BERT has, with the decoder tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 4)
        self.dense = torch.nn.Linear(4, 4)
        self.norm = torch.nn.LayerNorm(4)
        self.decoder = torch.nn.Linear(4, 7)
        self.decoder.weight = self.embedding.weight
        self.frozen = torch.nn.Parameter(torch.zeros(3, 3), requires_grad=False)


def test_biases_and_layer_norms_do_not_decay():
    """Each trained parameter is in one group, the tied one once, in the order of the module."""
    model = TinyBert()
    decayed, plain = parameter_groups(model, 0.01)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.01, 0.0)
    expected = [model.embedding.weight, model.dense.weight]
    assert [id(p) for p in decayed["params"]] == [id(p) for p in expected]
    expected = [model.dense.bias, model.norm.weight, model.norm.bias, model.decoder.bias]
    assert [id(p) for p in plain["params"]] == [id(p) for p in expected]
    assert len(parameter_groups(torch.nn.LayerNorm(3), 0.01)) == 1


def adamw_reference(weights, gradients, rates, weight_decay, betas, eps):
    """Algorithm 2 of Loshchilov & Hutter with decay × rate, in float64."""
    weights = weights.astype(np.float64)
    first, second = np.zeros_like(weights), np.zeros_like(weights)
    for t, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        weights = weights - rate * weight_decay * weights
        first = betas[0] * first + (1 - betas[0]) * gradient
        second = betas[1] * second + (1 - betas[1]) * gradient**2
        corrected = np.sqrt(second / (1 - betas[1] ** t)) + eps
        weights = weights - rate * first / (1 - betas[0] ** t) / corrected
    return weights


def test_adamw_on_the_cpu_is_the_papers():
    """50 steps of the kernel chosen here, with a schedule and both groups, equal the float64 recurrence."""
    settings = AdamWSettings(lr=1e-2, betas=[0.9, 0.98], eps=1e-6, weight_decay=0.1)
    model = torch.nn.Linear(33, 5)
    start = [p.detach().numpy().copy() for p in (model.weight, model.bias)]
    name, _, build = choose_optimizer(settings, "cpu")
    assert name == "torch.optim.AdamW(fused=True)"
    optimizer = build(parameter_groups(model, settings.weight_decay), settings)
    schedule = WarmupDecayLR(warmup_num_steps=5, warmup_type="linear", warmup_max_lr=1e-2, total_num_steps=60)
    rates = [learning_rate(schedule, step) for step in range(50)]
    generator = np.random.default_rng(0)
    gradients = [[generator.standard_normal(w.shape).astype(np.float32) for w in start] for _ in rates]
    for rate, gradient in zip(rates, gradients, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        for parameter, value in zip((model.weight, model.bias), gradient, strict=True):
            parameter.grad = torch.from_numpy(value)
        optimizer.step()
    for index, (parameter, decay) in enumerate([(model.weight, 0.1), (model.bias, 0.0)]):
        steps = [gradient[index] for gradient in gradients]
        expected = adamw_reference(start[index], steps, rates, decay, settings.betas, settings.eps)
        np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Put made-up packages first on the path; each file holds the given text."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] in ("apex", "amp_C")]:
        monkeypatch.delitem(sys.modules, name)

    def write(files: dict[str, str]) -> None:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.parent != tmp_path:
                (path.parent / "__init__.py").touch()
            path.write_text(text)

    yield write
    for name in [name for name in sys.modules if name.partition(".")[0] in ("apex", "amp_C")]:
        del sys.modules[name]


def test_a_look_alike_of_apex_is_refused(install, tmp_path, capsys):
    """PyPI's apex ends the program in one sentence, on every machine, without being imported."""
    install({"apex/__init__.py": "raise RuntimeError('a web toolkit was imported')"})
    with pytest.raises(UserError, match="not NVIDIA's .* pip uninstall apex"):
        choose_optimizer(ADAMW, "cuda")
    assert run_program(main, ["--deepspeed_config", str(tmp_path / "none.json")]) == 2
    assert f"error: {tmp_path}/apex/__init__.py: this apex is not NVIDIA's" in capsys.readouterr().err
    assert "apex" not in sys.modules


def test_a_folder_called_apex_is_no_package(install, tmp_path):
    """A checkout of NVIDIA's repository in the working folder is not the installed package, and no look-alike."""
    (tmp_path / "apex" / "apex").mkdir(parents=True)
    assert "not installed" in choose_optimizer(ADAMW, "cuda").why


def test_apex_without_its_kernels_is_passed_over(install):
    """A Python-only build of apex would fail at the first step."""
    install({"apex/__init__.py": "", "apex/optimizers/fused_adam.py": "class FusedAdam: pass"})
    assert "without its CUDA extensions" in choose_optimizer(ADAMW, "cuda").why


def test_apex_is_the_first_choice_on_cuda(install):
    """NVIDIA's package is used as AdamW, with the settings of the JSON."""
    fake = "class FusedAdam:\n    def __init__(self, groups, **options): self.given = groups, options\n"
    files = ("apex/__init__.py", "apex/optimizers/fused_adam.py", "amp_C.py")
    install(dict.fromkeys(files, "") | {"apex/optimizers/__init__.py": fake})
    name, _, build = choose_optimizer(ADAMW, "cuda")
    assert name == "apex.optimizers.FusedAdam"
    groups = [{"params": [], "weight_decay": 0.01}]
    built = build(groups, AdamWSettings(lr=1e-4, eps=1e-6)).given
    assert built == (groups, {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-6, "adam_w_mode": True})


def test_deepspeeds_kernel_is_used_only_if_it_is_built(install, monkeypatch):
    """Without apex, DeepSpeed's FusedAdam is second; it is never compiled on the spot."""
    import deepspeed.git_version_info as built

    monkeypatch.setitem(built.installed_ops, "fused_adam", True)
    assert choose_optimizer(ADAMW, "cuda").name == "torch.optim.AdamW(fused=True)"
    monkeypatch.setattr(built, "accelerator_name", "cuda")
    assert choose_optimizer(ADAMW, "cuda").name == "deepspeed.ops.adam.FusedAdam"
