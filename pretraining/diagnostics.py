"""What the updates do to the weights: norms, update-to-weight and trust ratios, of whole parameters under ZeRO too.

The ratio of an update's norm to its weights' tells a learning rate that is too high or too low before the loss does;
about 1e-3 is healthy for Adam. It is measured from copies of the weights before the step, so it holds for any optimizer.
"""

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from pretraining.lamb import Lamb
from pretraining.slices import Layout, Slices


class Diagnostics:
    """Measures the steps that are made inside `measure`.

    Args:
        engine: a DeepSpeed engine, whose parameter groups are those of `optimizer.parameter_groups`.
    """

    def __init__(self, engine):
        outer, is_sharded = engine.optimizer, engine.zero_optimization()
        self._optimizer: torch.optim.Optimizer = outer.optimizer
        self._groups: list[tuple[str, list[Tensor], Layout]] = []
        for number, group in enumerate(self._optimizer.param_groups):
            held = group["params"]
            slices = Slices.of_partition(outer, number) if is_sharded else Slices.of_whole(held)
            whole = outer.bit16_groups[number] if is_sharded else held
            name = "matrices" if whole[0].dim() > 1 else "biases_and_layer_norms"
            self._groups.append((name, held, Layout(slices, held[0].device)))

    @contextlib.contextmanager
    def measure(self) -> Iterator[tuple[dict[str, float], dict[str, Tensor]]]:
        """Yields curves and histograms by name, which hold the numbers when the step inside is done.

        A collective call. A step that was skipped has updates of norm zero.
        """
        curves: dict[str, float] = {}
        histograms: dict[str, Tensor] = {}
        before = [[tensor.detach().clone() for tensor in held] for _, held, _ in self._groups]
        yield curves, histograms
        ratios = []
        for (name, held, layout), update in zip(self._groups, before, strict=True):
            now = [tensor.detach() for tensor in held]
            torch._foreach_sub_(update, now)
            weight_norms, update_norms = layout.norms(now, update)
            curves[f"norms/weights_of_{name}"] = float(weight_norms.norm())
            curves[f"norms/update_of_{name}"] = float(update_norms.norm())
            ratios.append((update_norms / weight_norms)[weight_norms > 0])
        histograms["optimizer/update_to_weight"] = torch.cat(ratios)
        if isinstance(self._optimizer, Lamb):
            trust = [self._optimizer.trust_ratios(group) for group in self._optimizer.param_groups]
            trust = [ratios for ratios in trust if ratios is not None]
            if trust:
                histograms["optimizer/trust_ratio"] = torch.cat(trust)
        for name, values in histograms.items():
            for extreme in ("min", "median", "max"):
                curves[f"{name}_{extreme}"] = float(getattr(values, extreme)()) if len(values) else math.nan
