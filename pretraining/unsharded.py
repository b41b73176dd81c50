"""Training without ZeRO: every rank holds the whole optimizer, which updates the model's own float32 parameters.

It is the plain way that ZeRO-1 and 2 are compared with. Gradients are averaged over the ranks before a step, so all
ranks take the same one. What one rank has saved is all that there is, and in ZeRO's words that is the one partition of
one rank: in this form a checkpoint moves between training with and without ZeRO.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_

from pretraining.repartition import MOMENTS, WEIGHTS, as_partition


class Unsharded:
    """An optimizer of whole parameters, with what DeepSpeed's engine and the trainer ask of ZeRO's optimizer.

    It clips by the norm of all gradients, and skips an update if one of them is not finite, as ZeRO does. DeepSpeed's own
    engine would clip, but neither skip nor say the norm.

    Args:
        optimizer: of the model's own parameters, which are float32.
        gradient_clipping: the largest norm; 0 for none.

    Attributes:
        overflow: whether the last update was skipped.
        single_partition_of_fp32_groups: float32 weights beside the model's own; there are none.
    """

    single_partition_of_fp32_groups = ()

    def __init__(self, optimizer: torch.optim.Optimizer, gradient_clipping: float):
        from deepspeed.runtime.fp16.loss_scaler import LossScaler

        self.optimizer = optimizer
        self.gradient_clipping = gradient_clipping
        self.loss_scaler = LossScaler(1.0)
        self.overflow = False
        self._global_grad_norm = 0.0  # where the engine looks for it

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of the optimizer."""
        return self.optimizer.param_groups

    @property
    def loss_scale(self) -> float:
        """1: nothing is scaled."""
        return self.loss_scaler.cur_scale

    def step(self) -> None:
        """Clip the gradients, which are averaged over the ranks, and update; or neither."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        # In float32 a CPU's sum of many squares would be off in the third digit.
        norms = [torch.linalg.vector_norm(value.grad, dtype=torch.float64) for value in parameters]
        norm = torch.linalg.vector_norm(torch.stack(norms)).float()
        self._global_grad_norm = float(norm)
        self.overflow = not bool(norm.isfinite())
        if self.overflow:
            return
        if self.gradient_clipping:
            clip_grads_with_norm_(parameters, self.gradient_clipping, norm)
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """That of the optimizer, which DeepSpeed saves on rank 0 with the model."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` has given."""
        self.optimizer.load_state_dict(state)

    def partition(self) -> dict[str, Any]:
        """Weights and state as the one partition of one rank under ZeRO."""
        weights = [[value.detach() for value in group["params"]] for group in self.param_groups]
        return as_partition(weights, self.optimizer.state_dict())

    @torch.no_grad()
    def load_partition(self, partition: dict[str, Any]) -> None:
        """Load weights and state out of the one partition of one rank."""
        state, groups = {}, []
        saved_groups, lines = partition[MOMENTS]["param_groups"], partition[WEIGHTS]
        own_groups = self.optimizer.state_dict()["param_groups"]
        for group, own, saved, line in zip(self.param_groups, own_groups, saved_groups, lines, strict=True):
            weights, moments = group["params"], partition[MOMENTS]["state"].get(saved["params"][0], {})
            for weight, piece in zip(weights, _split(line, weights), strict=True):
                weight.copy_(piece)
            for index in own["params"] if moments else ():
                state[index] = {}
            for name, value in moments.items():
                pieces = _split(value, weights) if _is_line(value, line) else [value] * len(weights)
                for index, piece in zip(own["params"], pieces, strict=True):
                    # A tensor of its own for each parameter: updates work in place.
                    state[index][name] = piece.clone() if isinstance(piece, Tensor) else piece
            groups.append({**saved, "params": own["params"]})
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})


def _is_line(value: Any, line: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == line.shape


def _split(line: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    pieces = line.split([tensor.numel() for tensor in like])
    return [piece.view_as(tensor) for piece, tensor in zip(pieces, like, strict=True)]
