"""Functions of ``torch.nn.functional``: normalization of activations and weights, losses, activations, images."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from persample._torch import weight_norm
from persample.errors import LossError
from persample.utils.numerics import accumulate_dtype, is_autocast
from persample.utils.tracing import is_batched, untraced
from persample.vmap_rules.levels import Function, Rules, is_differentiated, is_in_forward_mode

_group_norm_of_torch: Function = F.group_norm
_loss_of_classes: Function = F.linear_cross_entropy


def _autocast(function: Function, input: Tensor, *args: object, **kwargs: object) -> Tensor:
    """Call a normalization on an input in the dtype of its weights: under autocast torch.func does not cast it."""
    if is_autocast(input.device):
        dtypes = {x.dtype for x in (*args, *kwargs.values()) if isinstance(x, Tensor)}
        if len(dtypes) == 1:
            return function(input.to(dtypes.pop()), *args, **kwargs).to(input.dtype)
    return function(input, *args, **kwargs)


# Until torch 2.14, kernels of group norm reject strided tensors, or read beyond them, and vmap passes such tensors to
# them (torch's pull request 186414). A copy mends that; so does layer norm over the channels of one group, without a
# copy, but its second derivatives in forward mode are wrong.
def _group_norm(
    compute: Function,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    channels = input.shape[1:2]
    fits = input.ndim > 1 and not channels[0] % num_groups and input.numel() > num_groups
    fits = fits and all(parameter is None or parameter.shape == channels for parameter in (weight, bias))
    return (compute if fits else _group_norm_of_torch)(input, num_groups, weight, bias, eps)  # the latter mostly raises


def _by_copy(x: Tensor, *args: object) -> Tensor:
    copied = x.clone(memory_format=torch.contiguous_format) if torch.__version__ < "2.14" else x
    return _group_norm_of_torch(copied, *args)


def _by_layer_norm(x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    groups = x.reshape(x.shape[0], num_groups, -1)
    out = F.layer_norm(groups, groups.shape[2:], eps=eps).reshape(x.shape)
    return _scaled(out, weight, bias, x.shape[1:2], (1,) * (x.ndim - 2)).to(x.dtype)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    if g.dtype != v.dtype:
        return weight_norm(v, g, dim)  # raises
    return v * (g / torch.norm_except_dim(v, 2, dim))


# torch's kernels (2.13) are right for one derivative. In further ones, terms are missing: of the gradients of weights
# under vmap(grad); of reverse derivatives of forward ones, and of third derivatives, also without vmap.
def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    axes = tuple(range(-len(normalized_shape), 0))
    if list(input.shape[axes[0] :]) == list(normalized_shape):
        normalized = _normalized(input, axes, eps)
    else:  # an error
        normalized = F.layer_norm(input, normalized_shape, eps=eps)
    return _scaled(normalized, weight, bias, normalized_shape, ()).to(input.dtype)


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    samples: tuple[int, ...] = (0,),
    norm: Function = F.batch_norm,
    by_kernel: bool = False,
) -> Tensor:
    """Compute batch norm, and instance norm by other ``samples``: means are over positions and over these axes.

    Running statistics are taken by the formula, which has fewer operations than torch's batched kernel, and those of
    the input, too, unless ``by_kernel`` leaves them to torch.
    """
    axes, channels, places = (*samples, *range(2, input.ndim)), input.shape[1:2], (1,) * (input.ndim - 2)
    running = running_mean, running_var
    wide = accumulate_dtype(input.dtype)
    known = all(
        x is not None and x.shape == channels and x.dtype in {input.dtype, wide} and not x.requires_grad
        for x in running
    )
    if not training and known and running_mean is not None and running_var is not None:
        mean, scale = (x.reshape(-1, *places) for x in (running_mean.to(wide), (running_var.to(wide) + eps).rsqrt()))
        return _scaled((input.to(wide) - mean) * scale, weight, bias, channels, places).to(input.dtype)
    if by_kernel:
        return norm(input, *running, weight, bias, training, momentum, eps)
    has_several = math.prod(input.shape[axis] for axis in axes) > 1  # otherwise an error
    if training and running_mean is None and has_several:
        normalized = _normalized(input, axes, eps)
    else:
        normalized = norm(input, *running, None, None, training, momentum, eps)
    return _scaled(normalized, weight, bias, channels, places).to(input.dtype)


def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    by_kernel: bool = False,
) -> Tensor:
    given = input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps
    return _batch_norm(*given, samples=(), norm=F.instance_norm, by_kernel=by_kernel)


def _normalized(x: Tensor, axes: tuple[int, ...], eps: float) -> Tensor:
    """Return (x − mean) / √(variance + ε) over some axes, in float32 at least."""
    wide = x.to(accumulate_dtype(x.dtype))
    centered = wide - wide.mean(axes, keepdim=True)
    return centered * (centered.square().mean(axes, keepdim=True) + eps).rsqrt()


def _scaled(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int], axes: tuple[int, ...]
) -> Tensor:
    """Return a normalized tensor times weight plus bias, which have a given shape and get axes of 1 at their end."""
    for parameter in (weight, bias):
        if parameter is not None and list(parameter.shape) != list(shape):
            raise RuntimeError(f"Expected weight and bias of shape {list(shape)}, but got {list(parameter.shape)}")
    out = x if weight is None else x * weight.reshape(*weight.shape, *axes)
    return out if bias is None else out + bias.reshape(*bias.shape, *axes)


def _linear_cross_entropy(
    *args: object, options: object = None, weight: Tensor | None = None, **kwargs: object
) -> Tensor:
    """Compute it at once: torch batches the gradients of its parts wrongly, and forward derivatives leave them out."""
    if options is not None and is_in_forward_mode():
        raise LossError(
            "loss_fn: linear_cross_entropy with options is differentiated in forward mode (torch.func.jvp), where "
            "torch computes other numbers. Leave options out."
        )
    if options is not None and weight is not None and is_differentiated(weight):
        raise LossError(
            "loss_fn: linear_cross_entropy with options expected weights of classes that depend on no parameter, "
            "received weights that do. Leave options out, or detach the weights."
        )
    return _loss_of_classes(*args, weight=weight, **kwargs)


def _difference_loss(
    function: Function,
    of_difference: Function,
    input: Tensor,
    target: Tensor,
    reduction: str = "mean",
    **options: Tensor | float | None,
) -> Tensor:
    # Inside of two vmaps torch.func confuses their axes, which mostly shows as sizes that do not fit. Its gradient of
    # smooth_l1_loss is 0 where it should be NaN (pytorch/pytorch#99429).
    given = {name: option for name, option in options.items() if option is not None}
    plain = given.keys() <= {"delta", "beta"} and all(x > 0 for x in given.values())
    floats = input.is_floating_point() and target.is_floating_point() and not is_autocast(input.device)
    if not plain or not floats or input.shape != target.shape or reduction not in REDUCTIONS:
        return function(input, target, reduction=reduction, **options)  # warns, raises, or takes weights
    return REDUCTIONS[reduction](of_difference(input - target, **given))


def _huber(difference: Tensor, delta: float = 1.0) -> Tensor:
    is_far = difference.abs() >= delta  # selected, since a product with an infinite gradient may be NaN
    near, far = torch.where(is_far, 0, difference), torch.where(is_far, difference, delta)
    return torch.where(is_far, delta * (far.abs() - delta / 2), near.square() / 2)


def gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """Compute ``F.gaussian_nll_loss`` without its check that a tensor of variances is not negative."""
    sizes = {input.shape, input.shape[:-1], (*input.shape[:-1], 1)}
    fits = var.shape in sizes if isinstance(var, Tensor) else var >= 0
    if not fits or reduction not in REDUCTIONS:
        return F.gaussian_nll_loss(input, target, var, full, eps, reduction)  # raises
    if not isinstance(var, Tensor):
        var = torch.full_like(input, var)
    if input.shape != var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    var = torch.where(var < eps, eps + (var - var.detach()), var)  # the value is clamped, its gradient is not
    loss = (var.log() + (input - target).square() / var) / 2
    if full:
        loss = loss + math.log(2 * math.pi) / 2
    return REDUCTIONS[reduction](loss)


REDUCTIONS: dict[str, Callable[..., Tensor]] = {"mean": torch.mean, "sum": torch.sum, "none": lambda x, *_: x}


def _prelu(input: Tensor, weight: Tensor) -> Tensor:
    # Inside of two vmaps torch.func confuses their axes.
    channels = input.shape[1] if input.ndim > 1 else 1
    if weight.ndim > 1 or weight.numel() not in {1, channels} or weight.dtype != input.dtype:
        return torch.prelu(input, weight)  # raises
    shape = [1] * input.ndim
    if weight.numel() > 1:
        shape[1] = channels
    positive = input > 0
    rest = torch.where(positive, 0, input)  # an infinite input times a gradient of zero would be NaN
    return torch.where(positive, input, weight.reshape(shape) * rest)


def _affine_grid(theta: Tensor, size: Sequence[int], align_corners: bool | None = None) -> Tensor:
    """Multiply the positions of all pixels, each in [-1, 1], by the affine maps."""
    axes = len(size) - 2
    is_image = isinstance(size, tuple | list) and axes in {2, 3} and min(size) > 0
    fits = is_image and theta.is_floating_point() and theta.shape == (size[0], axes, axes + 1)
    if not (fits and is_batched(theta)):
        return F.affine_grid(theta, size, align_corners)  # type: ignore[arg-type]
    steps = [_positions(n, theta, align_corners=bool(align_corners)) for n in size[2:]]
    places = torch.meshgrid(*steps, indexing="ij")[::-1]  # x comes first
    positions = torch.stack([*places, torch.ones_like(places[0])], -1)
    return (positions.view(1, -1, axes + 1) @ theta.mT).view(size[0], *size[2:], axes)


def _positions(count: int, like: Tensor, *, align_corners: bool) -> Tensor:
    if count == 1:
        return like.new_zeros(1)
    ends = 1.0 if align_corners else (count - 1) / count
    return torch.linspace(-ends, ends, count, dtype=like.dtype, device=like.device)


def _max_unpool(
    function: Function, axes: int, input: Tensor, indices: Tensor, *args: object, **kwargs: object
) -> Tensor:
    fits = input.shape == indices.shape and input.ndim - axes in {1, 2} and indices.dtype == torch.long
    if not fits or not input.numel():
        return function(input, indices, *args, **kwargs)  # raises
    with untraced():  # a program would read the value of a check of these
        like = [torch.empty(input.shape, dtype=x.dtype, device="meta") for x in (input, indices)]
        size = function(*like, *args, **kwargs).shape[-axes:]
    flat = input.new_zeros(*input.shape[:-axes], size.numel())
    return flat.scatter(-1, indices.flatten(-axes), input.flatten(-axes)).unflatten(-1, size)


RULES: Rules = {
    F.layer_norm: functools.partial(_autocast, _layer_norm),
    F.batch_norm: functools.partial(_autocast, _batch_norm),
    F.instance_norm: functools.partial(_autocast, _instance_norm),
    F.group_norm: functools.partial(_autocast, functools.partial(_group_norm, _by_copy)),
    weight_norm: _weight_norm,
    F.mse_loss: functools.partial(_difference_loss, F.mse_loss, torch.square),
    F.huber_loss: functools.partial(_difference_loss, F.huber_loss, _huber),
    F.smooth_l1_loss: functools.partial(
        _difference_loss, F.smooth_l1_loss, lambda difference, beta=1.0: _huber(difference, beta) / beta
    ),
    F.gaussian_nll_loss: gaussian_nll_loss,
    _loss_of_classes: _linear_cross_entropy,
    torch.prelu: _prelu,
    Tensor.prelu: _prelu,
    F.affine_grid: _affine_grid,
    **{
        pool: functools.partial(_max_unpool, pool, axes)
        for axes, pool in enumerate((F.max_unpool1d, F.max_unpool2d, F.max_unpool3d), 1)
    },
}


FIRST_DERIVATIVE_RULES: Rules = {
    F.layer_norm: functools.partial(_autocast, F.layer_norm),
    F.batch_norm: functools.partial(_autocast, functools.partial(_batch_norm, by_kernel=True)),
    F.instance_norm: functools.partial(_autocast, functools.partial(_instance_norm, by_kernel=True)),
    F.group_norm: functools.partial(_autocast, functools.partial(_group_norm, _by_layer_norm)),
}
