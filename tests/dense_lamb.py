"""LAMB as it is printed in You et al. 2019, algorithm 2, for whole parameters in float64: what ours is compared with."""

import torch
from torch import Tensor


class DenseLamb:
    """A parameter at a time, nothing fused, nothing shared with the code under test.

    Args:
        weights: the parameters by name.
        decays: the names of those with weight decay; the others are not adapted either, unless `adapt_all`.
    """

    def __init__(
        self,
        weights: dict[str, Tensor],
        decays: set[str],
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        bias_correction: bool = True,
        grad_averaging: bool = True,
        clamp: tuple[float, float] | None = None,
        adapt_all: bool = False,
        max_grad_norm: float = 0.0,
    ):
        self.weights = {name: weight.detach().double().clone() for name, weight in weights.items()}
        self.moments = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        self.squares = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        self.decays, self.betas, self.eps, self.weight_decay = decays, betas, eps, weight_decay
        self.bias_correction, self.grad_averaging = bias_correction, grad_averaging
        self.clamp, self.adapt_all, self.max_grad_norm = clamp, adapt_all, max_grad_norm
        self.steps = 0
        self.trust_ratios: dict[str, float] = {}

    def step(self, gradients: dict[str, Tensor], lr: float) -> None:
        """One update with the gradients of the whole batch."""
        gradients = {name: gradient.double() for name, gradient in gradients.items()}
        total = sum(float(gradient.square().sum()) for gradient in gradients.values()) ** 0.5
        shrink = min(1.0, self.max_grad_norm / (total + 1e-6)) if self.max_grad_norm else 1.0
        self.steps += 1
        for name, gradient in gradients.items():
            self._update(name, gradient * shrink, lr)

    def _update(self, name: str, gradient: Tensor, lr: float) -> None:
        beta1, beta2 = self.betas
        x, decays = self.weights[name], name in self.decays
        m = self.moments[name] = (
            beta1 * self.moments[name] + ((1 - beta1) if self.grad_averaging else 1) * gradient
        )
        v = self.squares[name] = beta2 * self.squares[name] + (1 - beta2) * gradient**2
        if self.bias_correction:
            m, v = m / (1 - beta1**self.steps), v / (1 - beta2**self.steps)
        update = m / (v.sqrt() + self.eps) + (self.weight_decay if decays else 0.0) * x
        ratio = 1.0
        if decays or self.adapt_all:
            ratio = _trust_ratio(float(x.norm()), float(update.norm()), self.clamp)
            self.trust_ratios[name] = ratio
        self.weights[name] = x - lr * ratio * update


def _trust_ratio(weight_norm: float, update_norm: float, clamp: tuple[float, float] | None) -> float:
    if weight_norm == 0 or update_norm == 0:
        return 1.0
    ratio = weight_norm / update_norm
    return min(max(ratio, clamp[0]), clamp[1]) if clamp else ratio
