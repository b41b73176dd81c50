"""LAMB: You et al. 2019, "Large Batch Optimization for Deep Learning", algorithm 2; exact under ZeRO-1 and 2.

The trust ratio of a parameter needs the norms of the whole parameter and of its whole update, and ZeRO gives the
optimizer slices of parameters (slices.py): one all-reduce of [2, parameters] squared norms per group makes them whole.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from pretraining.slices import Layout, Slices

# After so many steps Adam's bias corrections are exactly 1 for any betas that float32 tells from 1.
NO_BIAS_CORRECTION = 1e9


class Lamb(torch.optim.Optimizer):
    """LAMB with float32 states named as torch's AdamW names them; the parameters of a group are stepped together.

    A group may have `"layer_adaptation": False`: its parameters take Adam's step at the plain learning rate, as those
    without weight decay do in NVIDIA's BERT.

    Args:
        params: parameters or groups.
        lr: learning rate η.
        betas: β1 and β2.
        eps: added to the root of the second moment.
        weight_decay: λ, decoupled, inside the norm of the update.
        bias_correction: divide the moments by 1 − β^t, as algorithm 2 does.
        grad_averaging: weigh a new gradient with 1 − β1 in the first moment; else with 1 (the state exp_avg is
            kept averaged either way, and the update made larger).
        trust_ratio_clamp: bounds of the trust ratio; None for none.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        grad_averaging: bool = True,
        trust_ratio_clamp: tuple[float, float] | None = None,
    ):
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        defaults |= {"bias_correction": bias_correction, "grad_averaging": grad_averaging}
        defaults |= {"trust_ratio_clamp": trust_ratio_clamp, "layer_adaptation": True}
        super().__init__(params, defaults)
        # By the tensors of a group, and not in it: groups are saved, layouts belong to the ranks of this run.
        self._layouts: dict[tuple[int, ...], Layout] = {}
        self._trust_ratios: dict[int, Tensor] = {}

    def shard(self, zero) -> None:
        """Learn where parameters lie in the flat partitions; once, after `deepspeed.initialize`.

        Args:
            zero: the engine's optimizer at ZeRO stage 1 or 2, which holds this one.
        Raises:
            ValueError: there are experts, whose parameters other groups of ranks hold.
        """
        if zero.has_moe_layers:
            raise ValueError("the norms of a mixture of experts are not those of one group of ranks")
        for number, flat in enumerate(zero.single_partition_of_fp32_groups):
            self.set_layout([flat], Layout(Slices.of_partition(zero, number), flat.device))

    def set_layout(self, tensors: Sequence[Tensor], layout: Layout) -> None:
        """Say where the parameters lie in the tensors of a group; by default each tensor is one."""
        self._layouts[tuple(map(id, tensors))] = layout

    def trust_ratios(self, group: dict[str, Any]) -> Tensor | None:
        """[n] float64: those of the last step, by parameter of the group; None without layer adaptation."""
        return self._trust_ratios.get(id(group["params"][0]))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update, which leaves the negative update in the gradients.

        With partitions a collective call, whatever this rank holds of a group.
        """
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if weights:
                self._step(group, weights)

    def _step(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        states = [self._state(weight) for weight in weights]
        layout = self._layout(weights)
        gradients = [weight.grad for weight in weights]
        weight_parts, descent_parts = layout.parts(weights), layout.parts(gradients)
        weight_pieces, descent_pieces = layout.pieces(weights), layout.pieces(gradients)
        exp_avgs, exp_avg_sqs = (
            layout.parts([state[name] for state in states]) for name in ("exp_avg", "exp_avg_sq")
        )
        norms: tuple[list[Tensor], list[Tensor]] = [], []
        for parts, pieces in layout.chunks:
            _descend(
                group,
                states[0]["step"],
                weight_parts[parts],
                descent_parts[parts],
                exp_avgs[parts],
                exp_avg_sqs[parts],
            )
            if group["layer_adaptation"]:
                norms[0].extend(torch._foreach_norm(weight_pieces[pieces]))
                norms[1].extend(torch._foreach_norm(descent_pieces[pieces]))
        torch._foreach_add_([state["step"] for state in states], 1)
        if group["layer_adaptation"]:
            ratios = _trust_ratios(group, *layout.combine(*norms))
            self._trust_ratios[id(weights[0])] = ratios
            factors = ratios[layout.numbers].to(weights[0].dtype).unbind()
        for parts, pieces in layout.chunks:
            if group["layer_adaptation"]:
                torch._foreach_mul_(descent_pieces[pieces], factors[pieces])
            torch._foreach_add_(weight_parts[parts], descent_parts[parts], alpha=group["lr"])

    def _layout(self, weights: list[Tensor]) -> Layout:
        key = tuple(map(id, weights))
        if key not in self._layouts:
            self._layouts[key] = Layout(Slices.of_whole(weights), weights[0].device)
        return self._layouts[key]

    def _state(self, weight: Tensor) -> dict[str, Tensor]:
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
            state["exp_avg"] = torch.zeros_like(weight)
            state["exp_avg_sq"] = torch.zeros_like(weight)
        # torch moves the counts of its own fused optimizers only when it loads a state from the CPU.
        state["step"] = state["step"].to(weight.device)
        return state


def _descend(
    group: dict[str, Any],
    step: Tensor,
    weights: list[Tensor],
    gradients: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
) -> None:
    """Update the moments and replace the gradients by the negative updates, −(r + λx) with r = m̂ / (√v̂ + ε).

    torch's fused AdamW takes its step from zero, at the rate 1: what it leaves is −r.
    """
    count = step if group["bias_correction"] else torch.full_like(step, NO_BIAS_CORRECTION)
    copies = [gradient.clone() for gradient in gradients]
    torch._foreach_zero_(gradients)
    beta1, beta2 = group["betas"]
    adamw(
        gradients,
        copies,
        exp_avgs,
        exp_avg_sqs,
        [],
        [count.clone() for _ in weights],  # the kernel adds 1, in each chunk
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=1.0 if group["grad_averaging"] else 1 / (1 - beta1),
        weight_decay=0.0,
        eps=group["eps"],
        maximize=False,
    )
    if group["weight_decay"]:
        torch._foreach_add_(gradients, weights, alpha=-group["weight_decay"])


def _trust_ratios(group: dict[str, Any], weight_norms: Tensor, update_norms: Tensor) -> Tensor:
    """[n] float64: ‖x‖ / ‖r + λx‖; 1 where one of them is zero."""
    ratios = weight_norms / update_norms
    if group["trust_ratio_clamp"]:
        ratios = ratios.clamp(*group["trust_ratio_clamp"])
    return torch.where((weight_norms > 0) & (update_norms > 0), ratios, 1.0)
