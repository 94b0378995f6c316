"""The eager engine against the loop, for losses that the oracle in float64 would not do justice to."""

import torch
from oracle import assert_trees_close
from torch.func import vmap

from persample import Loss, Norm, Stack, per_sample_grads

WANTED = {"losses": Loss(), "grads": Stack(), "norms": Norm()}


def assert_eager_is_loop(loss, params, batch, wanted=None, rtol=1e-9, **options):
    eager, loop = (per_sample_grads(loss, params, batch, wanted, engine=e, **options) for e in ("eager", "loop"))
    assert_trees_close(eager, loop, rtol)


def assert_mapped_is_looped(loss, params, batch):
    """A vmap in the loss, under the eager engine, against a loop in the loss under the loop engine."""

    def mapped(params, *sample):
        return vmap(lambda row: loss(params, row, *sample))(sample[0]).sin().sum()

    def looped(params, *sample):
        return torch.stack([loss(params, row, *sample) for row in sample[0]]).sin().sum()

    expected = per_sample_grads(looped, params, batch, WANTED, engine="loop")
    assert_trees_close(per_sample_grads(mapped, params, batch, WANTED), expected, 1e-9)
