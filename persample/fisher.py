"""``fisher_vector_product``: the empirical Fisher matrix times vectors, in one pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from persample._torch import uncaptured
from persample.inputs import Engine, Outputs, Randomness
from persample.inputs.units import UnitReduce
from persample.per_sample import per_sample_grads
from persample.reductions.directions import FisherVectorProduct
from persample.utils.trees import Tree


@uncaptured
def fisher_vector_product(
    loss_fn: Callable[..., Tensor | tuple[Tensor, Tree]],
    params: Tree,
    batch: Tree,
    v: Tree,
    *,
    weights: Tree = None,
    in_dims: tuple[Tree, Tree] = (None, 0),
    keep_batch_dim: bool = False,
    randomness: Randomness = "error",
    outputs: Outputs = "scalar",
    unit: int | Tensor | Sequence[int] | None = None,
    unit_reduce: UnitReduce = "sum",
    chunk_size: int | None = None,
    engine: Engine = "eager",
    out: Tree = None,
    differentiable: bool = False,
) -> Tree:
    """Compute F v = (1/n) Σ wᵢ ⟨gᵢ, v⟩ gᵢ, n = Σ wᵢ, for the empirical Fisher matrix F of per-sample gradients gᵢ.

    One forward and backward pass for any number of vectors; neither F nor the gradients are written out. With outputs
    in place of losses, F is the Gauss–Newton matrix of a squared error.

    Source: Kunstner, Balles, Hennig, "Limitations of the Empirical Fisher Approximation for Natural Gradient Descent"
    (2019), equation 3.

    Args:
        loss_fn: as in ``per_sample_grads``.
        params: as in ``per_sample_grads``.
        batch: as in ``per_sample_grads``.
        v: a tree like the parameters, of their shapes (of a module: a dict by name); or K vectors, stacked on a new
            axis 0 of every leaf.
        weights: as in ``per_sample_grads``, none negative.
        in_dims: as in ``per_sample_grads``.
        keep_batch_dim: as in ``per_sample_grads``.
        randomness: as in ``per_sample_grads``.
        outputs: as in ``per_sample_grads``; with "rows", F also sums over the K outputs of each sample.
        unit: as in ``per_sample_grads``; gᵢ is then the gradient of a unit.
        unit_reduce: as in ``per_sample_grads``.
        chunk_size: as in ``per_sample_grads``.
        engine: as in ``per_sample_grads``.
        out: as in ``per_sample_grads``.
        differentiable: as in ``per_sample_grads``.

    Returns:
        A tree like ``v``, in the dtypes of the parameters.

    Raises:
        ArgumentError: as ``per_sample_grads`` does, and if ``v`` is not a tree like the parameters.
        LossError: as ``per_sample_grads`` does.

    Examples:
        >>> import torch
        >>> x = torch.tensor([[2.0, 0.0], [1.0, 1.0]])
        >>> fisher_vector_product(lambda w, x: w @ x, torch.zeros(2), x, torch.tensor([1.0, 0.0]))
        tensor([2.5000, 0.5000])
        >>> fisher_vector_product(lambda w, x: w @ x, torch.zeros(2), x, torch.eye(2))  # all of F
        tensor([[2.5000, 0.5000],
                [0.5000, 0.5000]])
    """
    return per_sample_grads(
        loss_fn,
        params,
        batch,
        FisherVectorProduct(v),
        weights=weights,
        in_dims=in_dims,
        keep_batch_dim=keep_batch_dim,
        randomness=randomness,
        outputs=outputs,
        unit=unit,
        unit_reduce=unit_reduce,
        chunk_size=chunk_size,
        engine=engine,
        out=out,
        differentiable=differentiable,
    )
