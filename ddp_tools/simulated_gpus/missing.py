"""Operators that torch has only for CUDA, built from operators of the CPU; and a few switches.

`build` copies this file next to the loader, which imports it after torch and the library.
"""

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("aten", "IMPL")  # its operators are unregistered when it is freed


def _exact(x: Tensor) -> Tensor:
    """Return float16 and bfloat16 as float32, whose sums are precise enough."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _per_channel(x: Tensor) -> Tensor:
    """Return a view with the channels, dimension 1, as the last dimension."""
    return _exact(x).movedim(1, -1)


# ---- SyncBatchNorm


def _stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    var, mean = torch.var_mean(_per_channel(x).flatten(0, -2), 0, correction=0)
    return mean, (var + eps).rsqrt()


def _gather(
    _x: Tensor,
    means: Tensor,
    invstds: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    total = counts.sum()
    share = (counts / total)[:, None]
    mean = (means * share).sum(0)
    var = ((invstds**-2 - eps + (means - mean) ** 2) * share).sum(0)
    if running_mean is not None and running_var is not None:
        running_mean.mul_(1 - momentum).add_(mean, alpha=momentum)
        running_var.mul_(1 - momentum).add_(var * total / (total - 1), alpha=momentum)
    return mean, (var + eps).rsqrt()


def _elemt(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, _eps: float
) -> Tensor:
    y = (_per_channel(x) - mean) * invstd
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return y.to(x.dtype).movedim(-1, 1)


def _backward_reduce(
    grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad, x = _per_channel(grad).flatten(0, -2), _per_channel(x).flatten(0, -2)
    product = (grad * (x - mean)).sum(0)
    return grad.sum(0), product, product * invstd, grad.sum(0)


def _backward_elemt(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sums: Tensor,
    products: Tensor,
    counts: Tensor,
) -> Tensor:
    total = counts.sum()
    slope = (_per_channel(x) - mean) * invstd**2 * products / total
    y = (_per_channel(grad) - sums / total - slope) * invstd
    return (y if weight is None else y * weight).to(x.dtype).movedim(-1, 1)


# ---- what autograd differentiates by itself


def _add(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias


def _lstm_cell(
    x: Tensor, h: Tensor, cx: Tensor, bias: Tensor | None = None, h_bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    gates = _add(x, bias) + _add(h, h_bias)
    i, f, g, o = gates.chunk(4, 1)
    cy = f.sigmoid() * cx + i.sigmoid() * g.tanh()
    return o.sigmoid() * cy.tanh(), cy, gates


def _gru_cell(
    x: Tensor, h: Tensor, hx: Tensor, bias: Tensor | None = None, h_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    (xr, xz, xn), (hr, hz, hn) = _add(x, bias).chunk(3, 1), _add(h, h_bias).chunk(3, 1)
    n = (xn + (xr + hr).sigmoid() * hn).tanh()
    return n + (xz + hz).sigmoid() * (hx - n), x


for _name, _function in {
    "batch_norm_stats": _stats,
    "batch_norm_gather_stats_with_counts": _gather,
    "batch_norm_elemt": _elemt,
    "batch_norm_backward_reduce": _backward_reduce,
    "batch_norm_backward_elemt": _backward_elemt,
}.items():
    _LIBRARY.impl(_name, _function, "CPU")
for _name, _function in {"lstm": _lstm_cell, "gru": _gru_cell}.items():
    for _key in ("AutogradCUDA", "CPU"):  # the CPU's in inference_mode
        _LIBRARY.impl(f"_thnn_fused_{_name}_cell", _function, _key)
_LIBRARY.impl("_fused_rms_norm", torch.ops.aten._fused_rms_norm.default.decompose, "AutogradCUDA")

# ---- switches

_load_library = torch.ops.load_library


def _load_and_replace(path: str) -> None:
    _load_library(path)
    torch.ops.simulated_gpus.replace_operators()


torch.ops.load_library = _load_and_replace  # type: ignore[method-assign]
# There are no kernels of cuDNN, so a script cannot enable them.
torch._C._set_cudnn_enabled(False)
torch._C._set_cudnn_enabled = lambda arg: None
vars(torch.backends.cudnn.CudnnModule)["enabled"].setter = torch._C._set_cudnn_enabled
torch.backends.mha.set_fastpath_enabled(
    False
)  # it makes nested tensors, which have no bytes to lend
