"""What runs on CUDA only: the optimizers' kernels, against the same float64 references as their twins on the CPU."""

import functools

import pytest
import torch
from dense_lamb import DenseLamb
from test_optimizer import adamw_reference

from pretraining.lamb import Lamb
from pretraining.optimizer import (
    AdamWSettings,
    _build_fused_adam,
    _build_torch,
    choose_optimizer,
    parameter_groups,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]
STEPS = 20


def test_lamb_on_cuda_is_the_dense_algorithm():
    """20 steps of both groups: weights and trust ratios are those of the float64 oracle."""
    torch.manual_seed(0)
    shapes = {"large": (30_522, 96), "small": (3, 5), "bias": (96,)}
    start = {name: torch.randn(shape) * 0.05 for name, shape in shapes.items()}
    weights = {name: torch.nn.Parameter(value.cuda()) for name, value in start.items()}
    options = {"betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 0.01}
    matrices = [weights["large"], weights["small"]]
    groups = [
        {"params": matrices},
        {"params": [weights["bias"]], "weight_decay": 0.0, "layer_adaptation": False},
    ]
    lamb, dense = Lamb(groups, 0.01, **options), DenseLamb(start, {"large", "small"}, **options)
    for step in range(STEPS):
        if step == STEPS // 2:  # as a run that goes on, from a checkpoint that was read into host memory
            saved = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, lamb.state_dict())
            lamb = Lamb(groups, 0.01, **options)
            lamb.load_state_dict(saved)
        gradients = {name: torch.randn(shape) * 2.0 ** -(step % 7) for name, shape in shapes.items()}
        for name, weight in weights.items():
            weight.grad = gradients[name].cuda()
        lamb.step()
        dense.step(gradients, 0.01)
        ratios = lamb.trust_ratios(lamb.param_groups[0]).tolist()
        assert ratios == pytest.approx(list(dense.trust_ratios.values()), rel=1e-5)
    for name, weight in weights.items():
        expected = dense.weights[name]
        assert float((weight.detach().cpu().double() - expected).norm() / expected.norm()) < 1e-6


@pytest.mark.parametrize("kernel", ["the chosen one", "torch", "apex.optimizers", "deepspeed.ops.adam"])
def test_every_adamw_for_cuda_is_the_papers(kernel):
    """Each fused kernel that is here, and the one that is chosen, equals the float64 recurrence."""
    settings = AdamWSettings(lr=1e-2, betas=[0.9, 0.98], eps=1e-6, weight_decay=0.1)
    torch.manual_seed(0)
    model = torch.nn.Linear(512, 100).cuda()
    start = [parameter.detach().cpu().numpy().copy() for parameter in (model.weight, model.bias)]
    choice = choose_optimizer(settings, "cuda")
    if kernel == "the chosen one":
        print(f"{choice.name}: {choice.why}")
        build = choice.build
    else:
        build = _build_torch if kernel == "torch" else functools.partial(_build_fused_adam, kernel)
    try:
        optimizer = build(parameter_groups(model, settings.weight_decay), settings)
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"{kernel} is not here: {error}")
    gradients = [[torch.randn(value.shape) for value in start] for _ in range(STEPS)]
    for step in gradients:
        for parameter, gradient in zip((model.weight, model.bias), step, strict=True):
            parameter.grad = gradient.cuda()
        optimizer.step()
    rates = [settings.lr] * STEPS
    for index, (parameter, decay) in enumerate([(model.weight, 0.1), (model.bias, 0.0)]):
        taken = [step[index].numpy() for step in gradients]
        expected = adamw_reference(start[index], taken, rates, decay, settings.betas, settings.eps)
        found = parameter.detach().cpu().double()
        assert float((found - torch.from_numpy(expected)).abs().max()) < 1e-5
