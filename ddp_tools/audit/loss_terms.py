"""Read from a loss's autograd graph the divisor of the sum over this rank's terms.

The audit's watch of training calls it on every rank before a backward pass. Needs torch.
"""

import math

import torch

# Nodes that keep a number or change its sign.
_SAME = {"CloneBackward0", "ToCopyBackward0", "SqueezeBackward0", "ViewBackward0", "NegBackward0"}
_MEAN, _SUM = 1, 2  # torch's numbers of the reductions


def divisor_of(loss: object) -> float | None:
    """Compute the divisor of a loss that is one sum or mean, multiplied or divided by numbers.

    The mean of 5 terms: 5. That mean times 2: 2.5. None if the graph does not show it: a sum of
    several losses, a mean weighted by class, a compiled loss; or if `loss` is not a tensor.
    """
    factor, node = 1.0, loss.grad_fn if isinstance(loss, torch.Tensor) else None
    while node is not None:
        if (terms := _terms(node)) is not None:
            return terms * factor
        if node.name() in ("MulBackward0", "DivBackward0"):
            scale = _number(getattr(node, "_saved_other", None))
            if not scale:
                return None
            factor *= scale if node.name() == "DivBackward0" else 1 / scale
        elif node.name() not in _SAME:
            return None
        (parent, _), *others = node.next_functions
        node = None if any(other for other, _ in others) else parent
    return None


def _terms(node: torch.autograd.graph.Node) -> float | None:
    """The divisor of a node that adds up terms: 1 for a sum; None for other nodes."""
    if node.name() == "SumBackward0":
        return 1.0
    if node.name() == "MeanBackward0":
        return float(getattr(node, "_saved_self_sym_numel", math.nan))
    reduction = getattr(node, "_saved_reduction", None)
    if reduction == _SUM:
        return 1.0
    if reduction != _MEAN or getattr(node, "_saved_weight", None) is not None:
        return None
    if node.name().startswith("NllLoss"):
        return _number(getattr(node, "_saved_total_weight", None))
    return float(getattr(node, "_saved_self").numel())  # noqa: B009 mypy knows no such attribute


def _number(value: object) -> float | None:
    """The value of a tensor of one number, or None."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value.detach())
    return None
