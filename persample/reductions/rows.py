"""One row per sample: the gradients, as tensors or factors, their norms, the losses and aux."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from persample.errors import ArgumentError, LossError
from persample.factors import Op
from persample.gradients import Gradients, ParamSpec
from persample.merge import Stacked
from persample.reductions.base import Reduction
from persample.reductions.norms import check_metric, in_metric
from persample.utils.numerics import accumulate_dtype, widest
from persample.utils.trees import Tree, tree_map


class PerSample(Reduction):
    """A reduction with one row per sample: chunks are concatenated."""

    def finish(self, merged: object) -> Tree:
        return tree_map(Stacked.finish, merged)


@dataclass(frozen=True)
class Stack(PerSample):
    """The per-sample gradients themselves: a tree like the parameters with leaves ``[B, *shape]``.

    Row i is the gradient of sample i's own loss ℓᵢ, never divided by B. ``reduce=None`` means the same.

    Examples:
        >>> import torch
        >>> from persample import per_sample_grads
        >>> per_sample_grads(lambda w, x: w * x, torch.tensor(1.0), torch.tensor([1.0, 2.0]), Stack())
        tensor([1., 2.])
    """

    returns_rows = True

    def lift(self, gradients: Gradients) -> Tree:
        pairs = zip(gradients.factors, gradients.spec.dtypes, strict=True)
        return gradients.spec.tree([Stacked(factor, dtype) for factor, dtype in pairs])


@dataclass(frozen=True)
class Factored(Reduction):
    """The per-sample gradients as they are stored: a tree of factors, one per parameter.

    A factor has the methods ``materialize``, ``squared_norms``, ``weighted_sum``, ``gram``, ``dot`` and more
    (``persample.factors.Factor``), and serves contractions that no reduction computes. Complex parameters appear as
    pairs of reals. Factors may share memory with the batch, and with ``Stack()`` in the same call: clone a tensor
    before you overwrite it.

    Examples:
        >>> import torch
        >>> from persample import per_sample_grads
        >>> per_sample_grads(lambda w, x: w * x, torch.tensor(1.0), torch.tensor([1.0, 2.0]), Factored()).gram()
        tensor([[1., 2.],
                [2., 4.]])
    """

    uses: ClassVar[frozenset[Op]] = frozenset()

    def lift(self, gradients: Gradients) -> Tree:
        return gradients.spec.tree([Stacked(factor) for factor in gradients.factors])

    def finish(self, merged: object) -> Tree:
        return tree_map(Stacked.concatenated, merged)


@dataclass(frozen=True)
class Norm(PerSample):
    """The Euclidean norm of each sample's gradient, ‖gᵢ‖ over all parameters: ``[B]``, real, float32 at least.

    Args:
        per_param: return a tree like the parameters instead, with the norms ``[B]`` of each parameter.
        metric: D, a tree like the parameters of positive tensors that broadcast with them, such as Adam's second
            moments plus a small number: the norms are ‖D⁻¹ᐟ² gᵢ‖. If D is one row, one column, one number or a
            ``persample.reductions.RankOne(rows, columns)``, gradients stay factors; otherwise they are written out a
            few samples at a time.

    Raises:
        ArgumentError: (when used) if ``metric`` is not like the parameters, or not positive.

    Examples:
        >>> import torch
        >>> from persample import per_sample_grads
        >>> per_sample_grads(lambda w, x: w @ x, torch.ones(2), torch.tensor([[3.0, 4.0], [0.0, 0.0]]), Norm())
        tensor([5., 0.])
        >>> x, metric = torch.tensor([[3.0, 4.0]]), torch.tensor([9.0, 4.0])
        >>> per_sample_grads(lambda w, x: w @ x, torch.ones(2), x, Norm(metric=metric))  # (1, 2)
        tensor([2.2361])
    """

    per_param: bool = False
    metric: Tree = field(default=None, kw_only=True)
    uses: ClassVar[frozenset[Op]] = frozenset({Op.squared_norms})
    live: ClassVar[tuple[str, ...]] = ("metric",)

    def check(self, spec: ParamSpec) -> None:
        check_metric(self.metric, spec)

    def lift(self, gradients: Gradients) -> Tree:
        dtypes, gradients = gradients.spec.dtypes, in_metric(gradients, self.metric)
        if not self.per_param:
            return Stacked(gradients.norms, widest(dtypes))
        pairs = zip(gradients.norms_per_param, dtypes, strict=True)
        return gradients.spec.tree([Stacked(norms, accumulate_dtype(dtype)) for norms, dtype in pairs])


@dataclass(frozen=True)
class TermNorm(PerSample):
    """The norm of each term of a parameter's gradient gᵢ = Σₜ lₜ rₜᵀ: a tree like the parameters, leaves ``[B, T]``.

    A layer has one term for each position (token, step, pixel) that it is applied to: ‖lₜ‖ ‖rₜ‖, lₜ the gradient of the
    output and rₜ the input there; ‖lₜ‖ for a bias or an embedding. They come from the same pass as the gradients, and
    nothing more is stored. T counts the positions of all uses of a parameter, use after use in the order of the loss;
    it is 0 for an unused one. With K outputs, ``[B, K, T]``. With ``unit``, rows remain samples. lₜ belongs to the
    sample's whole loss: the gradient of the loss of token t alone is another quantity (``outputs="rows"``).

    Raises:
        LossError: (when used) if a parameter is used outside linear, recurrent, convolution and embedding layers, like
            the weights of normalization layers (freeze those), or at no position (T = 0); if T differs among
            samples; if vmap cannot take the loss; inside the caller's transforms.

    Examples:
        >>> import torch
        >>> from persample import per_sample_grads
        >>> def loss(w, x):
        ...     return torch.nn.functional.linear(x, w).sum()
        >>> x = torch.tensor([[[3.0, 4.0], [0.0, 1.0]]])  # one sample of two tokens
        >>> per_sample_grads(loss, torch.ones(1, 2), x, TermNorm())
        tensor([[5., 1.]])
    """

    uses: ClassVar[frozenset[Op]] = frozenset({Op.term_norms})
    rows_of_samples = True

    def lift(self, gradients: Gradients) -> Tree:
        pairs = zip(gradients.term_norms or (), gradients.spec.dtypes, strict=True)
        return gradients.spec.tree([Stacked(norms, accumulate_dtype(dtype)) for norms, dtype in pairs])


@dataclass(frozen=True)
class Loss(PerSample):
    """ℓᵢ: the losses, ``[B]``, in the dtype the loss returns.

    Examples:
        >>> import torch
        >>> from persample import per_sample_grads
        >>> per_sample_grads(lambda w, x: w * x, torch.tensor(2.0), torch.tensor([1.0, 3.0]), Loss())
        tensor([2., 6.])
    """

    uses: ClassVar[frozenset[Op]] = frozenset()

    def lift(self, gradients: Gradients) -> Tree:
        return Stacked(gradients.losses)


@dataclass(frozen=True)
class Aux(PerSample):
    """The auxiliary outputs of the loss, stacked: leaves ``[B, *]``.

    With ``keep_batch_dim``, a leading axis of 1 of the loss's aux is left out. With ``unit``, rows remain samples.

    Raises:
        LossError: (when used) if the loss returns no aux.

    Examples:
        >>> import torch
        >>> from persample import per_sample_grads
        >>> per_sample_grads(lambda w, x: (w * x, {"x": x}), torch.tensor(2.0), torch.tensor([1.0, 3.0]), Aux())
        {'x': tensor([1., 3.])}
    """

    uses: ClassVar[frozenset[Op]] = frozenset()
    rows_of_samples = True

    def lift(self, gradients: Gradients) -> Tree:
        if not gradients.has_aux:
            raise LossError("Aux(): expected loss_fn to return (loss, aux), received a loss alone. Return both.")
        return tree_map(Stacked, gradients.aux)


@dataclass(frozen=True)
class UnitIds(PerSample):
    """The ids of the units, ``[U]`` int64, in the order in which other reductions return units: of first appearance.

    Raises:
        ArgumentError: (when used) if the call has no ids: ``unit`` is None or a number.

    Examples:
        >>> import torch
        >>> from persample import per_sample_grads
        >>> user, x = torch.tensor([7, 3, 7]), torch.tensor([1.0, 2.0, 4.0])
        >>> per_sample_grads(lambda w, x: w * x, torch.tensor(1.0), x, (UnitIds(), Norm()), unit=user)
        (tensor([7, 3]), tensor([5., 2.]))
    """

    uses: ClassVar[frozenset[Op]] = frozenset()
    returns_ids = True

    def lift(self, gradients: Gradients) -> Tree:
        if gradients.unit_ids is None:
            received = "the size of units, which have no ids but their places" if gradients.are_of_units else "none"
            fix = "Pass unit=ids, one id for each sample, or leave UnitIds() out."
            raise ArgumentError.about("unit", expected="ids [B] for UnitIds()", received=received, fix=fix)
        return Stacked(gradients.unit_ids)
