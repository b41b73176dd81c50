"""Self-attention over sequences of unequal length laid end to end, and dropout that is fast on a CPU.

Dimensions: T tokens of all sequences, n sequences of one length, h heads, d numbers per head.

Nothing here ever builds a mask or a padded row. `choose_backend` names the kernel, `plan_attention` does the
host work once per micro-batch, and `attention` is called by every layer with that plan.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

# Keep or drop is decided by 16 random bits, so that one 64-bit word serves four numbers.
_DROPOUT_LEVELS = 1 << 16


class Backend(NamedTuple):
    """A way to compute attention: its name, and one sentence on what is lost with it ("" for nothing)."""

    name: str
    loss: str


class AttentionPlan(NamedTuple):
    """What the layers of one forward pass share.

    runs: (n, length) of each stretch of consecutive sequences of equal length.
    cu_seqlens: int32 [B+1] borders of the sequences on the device; None where the backend works on runs.
    """

    backend: Backend
    runs: list[tuple[int, int]]
    cu_seqlens: Tensor | None
    max_length: int


def attention(
    query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, dropout_p: float = 0.0
) -> Tensor:
    """softmax(Q Kᵀ / √d) V within each sequence (Vaswani et al. 2017, section 3.2.1), [T, h, d] → [T, h, d].

    `dropout_p` drops attention probabilities, as BERT does; pass 0 in evaluation. The rows of the three
    inputs must be the sequences of `plan`, end to end, in any order of lengths.
    """
    if not plan.runs:
        return value
    return _KERNELS[plan.backend.name](query, key, value, plan, dropout_p)


def plan_attention(
    lengths: Sequence[int] | np.ndarray, device: torch.device, backend: Backend
) -> AttentionPlan:
    """Prepare `attention` for sequences of these `lengths` (host integers, each at least 1).

    Sort a micro-batch by length and there are few runs; unsorted it is only slower.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if lengths.size and lengths.min() < 1:
        raise ValueError("every sequence needs at least one token")
    starts = np.flatnonzero(np.diff(lengths, prepend=0))  # where a length differs from the one before it
    counts = np.diff(starts, append=len(lengths))
    runs = list(zip(counts.tolist(), lengths[starts].tolist(), strict=True))
    cu_seqlens = None
    if backend.name in _VARLEN_BACKENDS:
        borders = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        cu_seqlens = torch.from_numpy(borders).to(device, non_blocking=True)
    return AttentionPlan(backend, runs, cu_seqlens, int(lengths.max(initial=0)))


def choose_backend(device: torch.device, dtype: torch.dtype, dropout_p: float, head_dim: int = 64) -> Backend:
    """The fastest backend that computes exactly this on this device, and what is lost beside the best one."""
    if device.type != "cuda":
        return Backend("sdpa_runs", "")
    obstacle = _flash_obstacle(device, dtype, head_dim)
    if not obstacle and _flash_attn_varlen() is not None:
        return Backend("flash_attn_varlen", "")
    if obstacle:
        reason = obstacle
    elif _torch_varlen() is None:
        reason = "neither flash-attn nor a torch with torch.nn.attention.varlen is installed"
    elif dropout_p > 0:
        reason = "flash-attn is not installed and torch's varlen_attn has no dropout"
    else:
        return Backend("torch_varlen", "")
    return Backend("sdpa_runs", f"{reason}: one kernel launch per distinct sequence length, which is slower")


def dropout_add(x: Tensor, residual: Tensor, dropout_p: float) -> Tensor:
    """residual + dropout(x), all of one shape; no random number is drawn when `dropout_p` is 0."""
    if dropout_p == 0:
        return residual + x
    if x.device.type != "cpu":
        return residual + F.dropout(x, dropout_p)
    keep, scale = _keep_mask(x, dropout_p)
    return torch.addcmul(residual, x, keep, value=scale)


def dropout(x: Tensor, dropout_p: float) -> Tensor:
    """Inverted dropout (Srivastava et al. 2014, section 10): x / (1-p) with probability 1-p, otherwise 0."""
    if dropout_p == 0:
        return x
    if x.device.type != "cpu":
        return F.dropout(x, dropout_p)
    keep, scale = _keep_mask(x, dropout_p)
    return x * keep * scale


def _keep_mask(x: Tensor, dropout_p: float) -> tuple[Tensor, float]:
    """Zeros and ones in the shape and dtype of `x`, and the factor that keeps the mean.

    F.dropout draws one Bernoulli number after the other: about six times the time of this. The words come from
    torch's generator, so torch.manual_seed governs them. p is rounded to 1/65536 and the factor is that of
    the rounded p, so the mean is exact.
    """
    dropped_levels = round(dropout_p * _DROPOUT_LEVELS)
    words = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    levels = words.view(torch.int16)[: x.numel()].view(x.shape)
    keep = torch.empty(x.shape, dtype=x.dtype)
    torch.ge(levels, dropped_levels - _DROPOUT_LEVELS // 2, out=keep)
    return keep, _DROPOUT_LEVELS / (_DROPOUT_LEVELS - dropped_levels)


def _attend_runs(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, dropout_p: float) -> Tensor:
    """Dense attention, one call per run of sequences of equal length."""
    heads, head_dim = query.shape[1:]
    sizes = [n * length for n, length in plan.runs]
    # One split rather than slices: its gradient is one concatenation, that of a slice a zeroed [T, h, d] each.
    parts = zip(plan.runs, query.split(sizes), key.split(sizes), value.split(sizes), strict=True)
    on_cpu = query.device.type == "cpu"
    dense = _dense_with_dropout if on_cpu and dropout_p > 0 else F.scaled_dot_product_attention
    outputs = []
    for (n, length), *run in parts:
        # [n·length, h, d] → [n, h, length, d] without a copy
        q, k, v = (x.view(n, length, heads, head_dim).transpose(1, 2) for x in run)
        context = dense(q, k, v, dropout_p=dropout_p)
        outputs.append(context.transpose(1, 2).reshape(n * length, heads, head_dim))  # [n·length, h, d]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)  # [T, h, d]


def _dense_with_dropout(query: Tensor, key: Tensor, value: Tensor, dropout_p: float) -> Tensor:
    """[n, h, length, d] → the same; torch's own CPU path with dropout computes in float32 and is slower."""
    scale = 1 / math.sqrt(query.shape[-1])
    scores = torch.matmul(query * scale, key.transpose(2, 3))  # [n, h, length, length]
    probabilities = scores.softmax(-1)
    keep, inverse_keep = _keep_mask(probabilities, dropout_p)
    # The factor goes on the values, which are smaller than the probabilities.
    return torch.matmul(probabilities * keep, value * inverse_keep)


def _attend_flash_attn(
    query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, dropout_p: float
) -> Tensor:
    """flash-attn's variable-length kernel (Dao 2023), dropout included."""
    cu_seqlens, longest = plan.cu_seqlens, plan.max_length
    options = {"dropout_p": dropout_p, "deterministic": torch.are_deterministic_algorithms_enabled()}
    return _flash_attn_varlen()(query, key, value, cu_seqlens, cu_seqlens, longest, longest, **options)


def _attend_torch_varlen(
    query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, dropout_p: float
) -> Tensor:
    """torch's variable-length kernel, which has no dropout."""
    if dropout_p > 0:
        raise ValueError("torch's varlen_attn has no dropout; plan with what choose_backend names")
    cu_seqlens, longest = plan.cu_seqlens, plan.max_length
    return _torch_varlen()(query, key, value, cu_seqlens, cu_seqlens, longest, longest)


_KERNELS: dict[str, Callable[..., Tensor]] = {
    "sdpa_runs": _attend_runs,
    "flash_attn_varlen": _attend_flash_attn,
    "torch_varlen": _attend_torch_varlen,
}
_VARLEN_BACKENDS = ("flash_attn_varlen", "torch_varlen")


def _flash_obstacle(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Why no variable-length flash kernel can run here; "" when one can."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"flash attention computes in float16 or bfloat16, not {str(dtype).removeprefix('torch.')}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "flash attention needs an Ampere GPU (compute capability 8.0) or a later one"
    if head_dim % 8 or head_dim > 256:
        return f"flash attention needs a head size that is a multiple of 8 up to 256, not {head_dim}"
    return ""


@cache
def _flash_attn_varlen() -> Callable[..., Tensor] | None:
    """flash-attn's function; None if the package is absent or was built for another torch."""
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    return flash_attn_varlen_func


@cache
def _torch_varlen() -> Callable[..., Tensor] | None:
    """torch's function; None before torch had it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn
