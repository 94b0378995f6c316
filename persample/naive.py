"""The loops that a user would write: one backward pass per sample, and updates from a list of losses.

They define the right result for the rest of the library. They are written to be read, not to be fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized

import torch
from torch import Tensor, nn

from persample.errors import ArgumentError
from persample.utils import trees
from persample.utils.backward import BackwardGuard
from persample.utils.trees import Leaf, Tree


def value_and_grad(
    loss_fn: Callable[..., tuple[Tensor, Tree]],
    params: Sequence[Tensor],
    *sample: Leaf,
    like: Sequence[Tensor] | None = None,
    create_graph: bool = False,
) -> tuple[Tensor, Tree, tuple[Tensor | None, ...]]:
    """Differentiate the loss of one sample with plain autograd.

    Args:
        loss_fn: from (params, *sample) to (0-d loss, aux), or to (K losses ``[K]``, aux).
        params: the tensors to differentiate, any shapes.
        *sample: the other arguments.
        like: one tensor per parameter: where it is an ``nn.Parameter``, the loss receives one too. Default: ``params``.
        create_graph: whether the results have a graph, so that they can be differentiated again.

    Returns:
        The loss, aux, and one gradient per parameter: None where the loss does not depend on it. The gradients of K
        losses are stacked on axis 0. All are detached, unless ``create_graph``.

    Examples:
        >>> value_and_grad(lambda p, x: ((p[0] * x) ** 2, ()), [torch.tensor(2.0)], torch.tensor(3.0))
        (tensor(36.), (), (tensor(36.),))
    """
    with torch.enable_grad():
        pairs = zip(params, params if like is None else like, strict=True)
        leaves = [_leaf(*pair, create_graph=create_graph) for pair in pairs]
        loss, aux = loss_fn(leaves, *sample)
    grads: list[Leaf] = [None] * len(leaves)
    active = [place for place, leaf in enumerate(leaves) if leaf.requires_grad]  # the loss may have frozen others
    if loss.requires_grad and active:
        wanted = [leaves[place] for place in active]
        guard, retain = BackwardGuard(wanted), create_graph or loss.ndim > 0
        units = torch.eye(max(loss.numel(), 1), dtype=loss.dtype, device=loss.device).reshape(-1, *loss.shape)
        rows = [guard.grads([loss], [unit], retain=retain, create_graph=create_graph) for unit in units]
        found = rows[0] if loss.ndim == 0 else _stacked(rows, wanted)
        for place, grad in zip(active, found, strict=True):
            grads[place] = grad
        guard.refuse_derivatives((loss, aux, found))
    if create_graph:
        return loss, aux, tuple(grads)
    return loss.detach(), trees.map_tensors(torch.Tensor.detach, aux), tuple(grads)


def _stacked(rows: Sequence[Sequence[Tensor | None]], leaves: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    columns = zip(leaves, zip(*rows, strict=True), strict=True)
    return tuple(
        None
        if all(g is None for g in column)
        else torch.stack([torch.zeros_like(x) if g is None else g for g in column])
        for x, column in columns
    )


def _leaf(param: Tensor, like: Tensor, *, create_graph: bool) -> Tensor:
    if create_graph and param.requires_grad:
        return param.view_as(param)  # the gradient leaves out what else of the sample depends on the parameter
    # Only an nn.Parameter is replaced by one: a module would register any other as a parameter of its own.
    return nn.Parameter(param.detach()) if isinstance(like, nn.Parameter) else param.detach().requires_grad_()


def loop(loss_fn: Callable[..., Tensor], params: Tree, batch: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tree]]:
    """Iterate over a batch, sample by sample: ℓᵢ and its gradient, with one graph alive at a time.

    Args:
        loss_fn: from (params, *sample) to a 0-d loss.
        params: a pytree of tensors.
        batch: tensors with a leading batch axis of one common size.

    Yields:
        The loss of sample i, and its gradient, a tree like the parameters (zeros where the loss ignores one).

    Examples:
        >>> x = torch.tensor([1.0, 2.0])
        >>> [grads["w"].item() for _, grads in loop(lambda p, x: p["w"] * x, {"w": torch.tensor(1.0)}, (x,))]
        [1.0, 2.0]
    """
    tensors, spec = trees.flatten(params)
    for sample in zip(*batch, strict=True):
        loss, _, grads = value_and_grad(
            lambda values, *rest: (loss_fn(trees.unflatten(list(values), spec), *rest), ()), tensors, *sample
        )
        filled = [torch.zeros_like(p) if g is None else g for p, g in zip(tensors, grads, strict=True)]
        yield loss, trees.unflatten(filled, spec)


def stack_mean_backward(losses: Sequence[Tensor], params: Tree) -> Tree:
    """Average a list of losses and back-propagate once: mean → gradient.

    (1/n) Σ ∇ℓᵢ = ∇ (1/n) Σ ℓᵢ. Every graph stays alive until the one backward pass.

    Args:
        losses: n 0-d losses with their graphs.
        params: a pytree of the tensors they were computed from.

    Returns:
        A tree like the parameters; zeros where no loss depends on one. ``.grad`` is not changed.

    Examples:
        >>> w = torch.tensor(2.0, requires_grad=True)
        >>> stack_mean_backward([w * 1.0, w * 3.0], w)
        tensor(2.)
    """
    tensors, spec = trees.flatten(params)
    mean = torch.stack(list(losses)).mean()
    if not mean.requires_grad:
        return trees.unflatten([torch.zeros_like(param) for param in tensors], spec)
    return trees.unflatten(list(torch.autograd.grad(mean, tensors, allow_unused=True, materialize_grads=True)), spec)


def backward_each(losses: Iterable[Tensor], params: Tree, n: int | None = None, *, retain_graph: bool = False) -> Tree:
    """Back-propagate each loss by itself, divided by n, and add the gradients up: Σ ∇(ℓᵢ/n).

    Given a generator and ``n``, each graph is freed before the next is built, so memory does not grow with n.

    Args:
        losses: n 0-d losses with their graphs; a list, or a generator that builds them one by one.
        params: a pytree of the tensors they were computed from.
        n: how many losses there are; needed where ``losses`` has no length.
        retain_graph: keep the graphs, for losses whose graphs share a part.

    Returns:
        A tree like the parameters; zeros where no loss depends on one. ``.grad`` is not changed.

    Raises:
        ArgumentError: if ``losses`` has no length and ``n`` is not given.

    Examples:
        >>> w = torch.tensor(2.0, requires_grad=True)
        >>> backward_each((w * k for k in (1.0, 3.0)), w, n=2)
        tensor(2.)
    """
    if n is None:
        if not isinstance(losses, Sized):
            fix = "Say how many losses the generator builds; listing them would keep every graph alive."
            raise ArgumentError.about("n", expected="a number, for losses without a length", received="None", fix=fix)
        n = len(losses)
    tensors, spec = trees.flatten(params)
    totals = [torch.zeros_like(param) for param in tensors]
    for loss in losses:
        if not loss.requires_grad:
            continue
        grads = torch.autograd.grad(
            loss / n, tensors, allow_unused=True, materialize_grads=True, retain_graph=retain_graph
        )
        for total, grad in zip(totals, grads, strict=True):
            total.add_(grad)
        del loss, grads  # so that the generator does not build the next graph while this one is alive
    return trees.unflatten(totals, spec)
