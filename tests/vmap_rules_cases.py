"""Functions under vmap with our rules, against a loop over samples in plain torch."""

import torch
from oracle import assert_trees_close, oracle
from torch.func import functional_call, grad, vjp, vmap
from torch.utils import _pytree as pytree

from persample.vmap_rules import VmapRules

B = 3


def draw(*shape):
    return torch.randn(B, *shape, dtype=torch.float64)


def measure(out):
    """Return a number that depends on every output, on each in its own way."""
    leaves = [x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    return sum(((k + 1) * x).sin().sum() for k, x in enumerate(leaves))


def once(loss):
    """The gradient as the eager engine takes it: the backward pass is not recorded."""

    def gradient(params, *sample):
        value, backward = vjp(lambda params: loss(params, *sample), params)
        with torch.no_grad():
            return backward(torch.ones_like(value))[0]

    return gradient


def check(fn, params, batch, rtol=1e-9, recorded=False):
    """Compare gradients of parameters, and of a factor of all floats of the batch, with those of the loop."""
    dtype = next(x.dtype for x in pytree.tree_leaves(params))
    params = {"fn": pytree.tree_map(torch.Tensor.detach, params), "scale": torch.tensor(0.9, dtype=dtype)}

    def loss(params, *sample):
        scaled = [x * params["scale"] if x.is_floating_point() else x for x in sample]
        return measure(fn(params["fn"], *scaled))

    def under(params, *sample):
        with VmapRules():
            return loss(params, *sample)

    rows = oracle(loss, params, batch)
    with torch.set_grad_enabled(recorded):
        grads = vmap((grad if recorded else once)(under), in_dims=(None, *(0 for _ in batch)))(params, *batch)
    assert_trees_close(grads, rows.tree(rows.grads), rtol)


def check_module(module, *batch, call=None, **kwargs):
    module = module.double()
    call = call or (lambda apply, *sample: apply(*sample))

    def fn(params, *sample):
        return call(lambda *args, **options: functional_call(module, params, args, options), *sample)

    check(fn, dict(module.named_parameters()), batch, **kwargs)


def states(kind, *shape):
    return (draw(*shape), draw(*shape)) if kind == "lstm" else (draw(*shape),)


def with_state(apply, x, *state):
    return apply(x, state if len(state) > 1 else state[0])
