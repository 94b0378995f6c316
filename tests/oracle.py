"""The definition of correct: a plain Python loop over samples with autograd, in float64. Never made fast."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Rows:
    """Per-sample gradients of every parameter in float64 (complex128), losses, and the tree they belong to."""

    grads: list[torch.Tensor]
    losses: torch.Tensor
    structure: pytree.TreeSpec

    def tree(self, leaves):
        return pytree.tree_unflatten(list(leaves), self.structure)


def double(x):
    if not isinstance(x, torch.Tensor) or not (x.is_floating_point() or x.is_complex()):
        return x
    return x.detach().to(torch.promote_types(x.dtype, torch.float64))


def oracle(loss_fn, params, batch) -> Rows:
    """Differentiate the loss of one sample after the other. ``batch`` is a tuple of tensors, batch axis first."""
    if isinstance(params, nn.Module):
        params = copy.deepcopy(params).double()
        named = {name: p for name, p in params.named_parameters() if p.requires_grad}
        leaves, structure = pytree.tree_flatten(named)
    else:
        leaves, structure = pytree.tree_flatten(pytree.tree_map(lambda p: double(p).clone().requires_grad_(), params))
        params = pytree.tree_unflatten(leaves, structure)
    rows, losses = [], []
    for sample in zip(*(double(x) for x in batch), strict=True):
        loss = loss_fn(params, *sample)
        grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        rows.append([grad.detach() for grad in grads])
        losses.append(loss.detach())
    return Rows([torch.stack(column) for column in zip(*rows, strict=True)], torch.stack(losses), structure)


def reals(rows: Rows) -> torch.Tensor:
    """All gradients as one matrix [B, P] of reals, complex numbers as pairs."""
    flat = [torch.view_as_real(g) if g.is_complex() else g for g in rows.grads]
    return torch.cat([g.reshape(len(g), -1) for g in flat], dim=1)


def assert_trees_close(actual, expected, rtol, atol=0.0):
    """Same structure, shapes, and numbers to ``rtol`` of the largest expected one, or to ``atol``."""
    a_leaves, a_spec = pytree.tree_flatten(actual)
    e_leaves, e_spec = pytree.tree_flatten(expected)
    assert a_spec == e_spec
    for a, e in zip(a_leaves, e_leaves, strict=True):
        assert a.shape == e.shape
        scale = e.abs().max().item() if e.numel() else 0.0
        error = (a.to(e.dtype) - e).abs().max().item() if e.numel() else 0.0
        assert error <= rtol * scale + atol, f"off by {error:g} beside numbers up to {scale:g}"  # NaN fails, too


def error_of(step, *args):
    """Call a step; return its error as text, or "none"."""
    try:
        step(*args)
    except Exception as error:  # noqa: BLE001 (what it is, is the test)
        return f"{type(error).__name__}: {error}"
    return "none"
