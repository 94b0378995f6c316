"""Modules copied or pickled inside of a loss are ordinary ones, with the values of the parameters."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from persample import LossError, Norm, Stack, per_sample_grads


def saved(module):
    file = io.BytesIO()
    torch.save(module, file)
    return lambda: torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def pickled(module):
    data = pickle.dumps(module)
    return lambda: pickle.loads(data)


def copied(module):
    clone = copy.deepcopy(module)
    return lambda: clone


WAYS = {"deepcopy": copied, "pickle": pickled, "torch.save": saved}


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.BatchNorm1d(4).eval(), nn.Linear(4, 1))
    model.tied = model[0].weight
    return model, torch.randn(5, 3)


@pytest.mark.parametrize("engine", ["eager", "loop"])
@pytest.mark.parametrize("reduce", [Stack(), Norm()], ids=["Stack", "Norm"])
@pytest.mark.parametrize("way", WAYS)
def test_a_copy_made_inside_a_loss_is_an_ordinary_module(way, reduce, engine):
    model, xs = make()
    copies = []

    def loss(model, x):
        copies.append(WAYS[way](model))
        return model(x[None]).sum()

    found = per_sample_grads(loss, model, xs, reduce, engine=engine)
    expected = per_sample_grads(lambda model, x: model(x[None]).sum(), model, xs, reduce, engine=engine)
    torch.testing.assert_close(found, expected)
    clone = copies[0]()
    assert [type(part) for part in clone.modules()] == [type(part) for part in model.modules()]
    assert clone.tied is clone[0].weight
    for theirs, ours in zip(clone.parameters(), model.parameters(), strict=True):
        assert theirs.is_leaf
        assert theirs is not ours
        assert theirs.requires_grad == ours.requires_grad
        assert theirs.data_ptr() != ours.data_ptr()
    assert all(x.data_ptr() for x in clone.buffers() if x.numel())
    assert torch.equal(clone(xs), model(xs))
    per_sample_grads(lambda model, x: model(x[None]).sum(), clone, xs)
    clone(xs).sum().backward()
    torch.optim.SGD(clone.parameters(), 0.1).step()
    assert not torch.equal(clone(xs), model(xs))


def test_deepcopied_parameters_are_parameters():
    model, xs = make()
    copies = []

    def loss(model, x):
        copies.append(copy.deepcopy(model))
        return model(x[None]).sum()

    per_sample_grads(loss, model, xs, Norm())
    per_sample_grads(loss, model, xs, Norm(), engine="loop")
    assert all(isinstance(p, nn.Parameter) for clone in copies for p in clone.parameters())


def test_a_copied_parameter_is_a_constant_to_the_loss():
    w, xs = torch.tensor([1.0, 2.0], dtype=torch.float64), torch.eye(2, dtype=torch.float64)
    rows = per_sample_grads(lambda w, x: (w * copy.deepcopy(w)) @ x, w, xs)
    assert torch.equal(rows, torch.diag(w))


def test_what_differs_from_sample_to_sample_has_no_one_copy():
    xs = torch.eye(2)
    with pytest.raises((LossError, RuntimeError)):
        per_sample_grads(lambda w, x: (w @ x) * copy.deepcopy(x).sum(), torch.ones(2), xs)


def test_a_question_that_the_loss_catches_is_answered_all_the_same():
    model, xs = make()

    def loss(model, x):
        try:
            scale = 2.0 if model[0].weight.requires_grad else 3.0
        except Exception:  # noqa: BLE001 - as careless as losses are
            scale = 5.0
        return scale * model(x[None]).sum()

    found = per_sample_grads(loss, model, xs, Norm())
    torch.testing.assert_close(found, per_sample_grads(loss, model, xs, Norm(), engine="loop"))
