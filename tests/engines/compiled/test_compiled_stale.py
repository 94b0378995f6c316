"""Whatever the loss reads is changed: the next result is that of eager, a LossError, or listed as a gap of torch's."""

from __future__ import annotations

import abc
import collections
import contextvars
import dataclasses
import datetime as dt
import enum
import functools
import gc
import itertools
import math
import operator
import os
import random
import sys
import time
import types
import warnings
import weakref
from typing import NamedTuple

import numpy as np
import pytest
import torch
from compiler import compilations
from oracle import assert_trees_close
from paths import ROOT
from seams import captures_at_most
from torch import nn

import persample as ps
from persample import per_sample_grads
from persample.engines.compiled import capture, clear_cache

F64 = torch.float64


@pytest.fixture(autouse=True)
def _fresh():
    clear_cache()


def doubles(*shape, seed=0):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


W, X = doubles(3, seed=1), doubles(4, 3, seed=2)


def grads(loss, params=W, batch=X, reduce=None, rtol=1e-9, **options):
    """Compute on the traced engine twice, the second time as an earlier call; compare with eager, return the result."""
    wanted = (ps.Sum(), ps.Loss()) if reduce is None else reduce
    expected = per_sample_grads(loss, params, batch, wanted, **options)
    for _ in range(2):
        actual = per_sample_grads(loss, params, batch, wanted, engine="traced", **options)
        assert_trees_close(actual, expected, rtol)
    return actual


def differ(one, other):
    leaves = (torch.utils._pytree.tree_leaves(tree) for tree in (one, other))
    return any(a.shape != b.shape or not torch.equal(a, b) for a, b in zip(*leaves, strict=True))


def seen(loss, change, **options):
    """Assert that a change is seen at once, also by a call that was repeated before."""
    before = grads(loss, **options)
    change()
    assert differ(before, grads(loss, **options)), "the change makes no difference: the test shows nothing"


# ---------------------------------------------------------------- what functions refer to

FACTOR = 2.0


def scaled(x):
    return x * FACTOR


def cubed(x):
    return x**3


CHAIN = scaled
TARGET = None
TABLE = {"scale": [2.0, {"deep": 3.0}]}


def test_a_number_in_a_closure_cell():
    gamma = 0.5

    def loss(w, x):
        return gamma * (w @ x)

    def change():
        nonlocal gamma
        gamma = 0.25

    seen(loss, change)


def test_a_tensor_in_a_closure_cell_is_live():
    target = doubles(3, seed=3)

    def loss(w, x):
        return ((w - target) @ x) ** 2

    def rebind():
        nonlocal target
        target = doubles(3, seed=4)

    before = compilations()
    seen(loss, lambda: target.mul_(2))
    seen(loss, rebind)
    seen(loss, lambda: target.mul_(3))
    assert compilations() - before == 1


def test_defaults():
    def loss(w, x, scale=2.0, *, shift=1.0, many=[1.0]):  # noqa: B006 (that is the case to test)
        return scale * many[0] * (w @ x) + shift * w[0]

    seen(loss, lambda: setattr(loss, "__defaults__", (3.0,)))
    seen(loss, lambda: setattr(loss, "__kwdefaults__", {"shift": 4.0, "many": [1.0]}))
    seen(loss, lambda: loss.__kwdefaults__["many"].__setitem__(0, 5.0))


def test_global_variables(monkeypatch):
    def loss(w, x):
        return CHAIN(w @ x) * TABLE["scale"][0] + TABLE["scale"][1]["deep"]

    monkeypatch.setitem(globals(), "TABLE", {"scale": [2.0, {"deep": 3.0}]})
    seen(loss, lambda: monkeypatch.setitem(globals(), "FACTOR", 3.0))  # read by a function that the loss calls
    seen(loss, lambda: monkeypatch.setitem(globals(), "CHAIN", cubed))
    seen(loss, lambda: TABLE["scale"].__setitem__(0, 5.0))
    seen(loss, lambda: TABLE["scale"][1].__setitem__("deep", 6.0))
    seen(loss, lambda: TABLE.__setitem__("scale", [7.0, {"deep": 8.0}]))


def test_the_code_of_a_function():
    def helper(x):
        return 2 * x

    def loss(w, x):
        return helper(w @ x)

    seen(loss, lambda: setattr(helper, "__code__", (lambda x: x * 7).__code__))


def test_functions_in_containers_partials_and_wrappers():
    parts = {"f": [functools.partial(torch.mul, other=2.0)]}

    @functools.wraps(scaled)
    def wrapped(x):
        return parts["f"][0](x)

    seen(lambda w, x: wrapped(w @ x), lambda: parts["f"].__setitem__(0, functools.partial(torch.mul, other=3.0)))
    loss = functools.partial(lambda w, x, table: table["k"] * (w @ x), table=parts)
    parts["k"] = 1.0
    seen(loss, lambda: parts.__setitem__("k", 2.0))


# ---------------------------------------------------------------- objects


@dataclasses.dataclass
class Config:
    gamma: float = 0.5
    inner: types.SimpleNamespace = dataclasses.field(default_factory=lambda: types.SimpleNamespace(scale=[2.0]))


class Slotted:
    __slots__ = ("__hidden", "scale")

    def __init__(self):
        self.scale = self.__hidden = 2.0

    def hide(self, value):
        self.__hidden = value

    def __call__(self, x):
        return self.scale * self.__hidden * x


class Base:
    rate = 2.0

    @classmethod
    def shift(cls):
        return cls.rate

    @staticmethod
    def flat(x):
        return FACTOR * x

    @property
    def double(self):
        return 2 * self.rate


class Derived(Base):
    pass


class Operator:
    """Python calls its methods without their being named."""

    def __init__(self):
        self.scale = 2.0

    def __mul__(self, x):
        return self.scale * x * FACTOR


class Descriptor:
    def __get__(self, owner, kind):
        return FACTOR


class Described:
    rate = Descriptor()


class Row(NamedTuple):
    gamma: float

    def scaled(self, x):
        return self.gamma * FACTOR * x


class Many(list):
    pass


class Kind(enum.Enum):
    MEAN = 1

    def scaled(self, x):
        return FACTOR * x


def test_attributes():
    config, space = Config(), types.SimpleNamespace(gamma=0.5)

    def loss(w, x):
        return config.gamma * config.inner.scale[0] * space.gamma * (w @ x)

    before = compilations()
    seen(loss, lambda: setattr(config, "gamma", 0.25))
    seen(loss, lambda: setattr(space, "gamma", 0.125))
    seen(loss, lambda: config.inner.scale.__setitem__(0, 3.0))
    seen(loss, lambda: setattr(config.inner, "scale", [4.0]))
    assert compilations() - before == 4


def test_slots():
    slotted = Slotted()

    def loss(w, x):
        return slotted(w @ x)

    seen(loss, lambda: setattr(slotted, "scale", 3.0))
    seen(loss, lambda: slotted.hide(4.0))


def test_attributes_of_classes(monkeypatch):
    thing = Derived()

    def loss(w, x):
        return thing.rate * thing.shift() * thing.double * thing.flat(w @ x)

    monkeypatch.setattr(Base, "rate", 2.0)
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    seen(loss, lambda: setattr(Base, "rate", 3.0))
    seen(loss, lambda: setattr(thing, "rate", 4.0))
    seen(loss, lambda: monkeypatch.setitem(globals(), "FACTOR", 3.0))


@pytest.mark.parametrize(
    "expression",
    [
        lambda things, x: (things["operator"] * 3.0) * x,
        lambda things, x: things["described"].rate * x,
        lambda things, x: things["row"].scaled(x),
        lambda things, x: things["kind"].scaled(x),
    ],
    ids=["__mul__", "__get__", "method of a NamedTuple", "method of an Enum"],
)
def test_globals_of_methods_that_nobody_names(expression, monkeypatch):
    things = {"operator": Operator(), "described": Described(), "row": Row(0.5), "kind": Kind.MEAN}
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    seen(lambda w, x: expression(things, w @ x), lambda: monkeypatch.setitem(globals(), "FACTOR", 3.0))


def test_attributes_of_lists():
    container = Many()
    container.rate = 2.0
    seen(lambda w, x: container.rate * (w @ x), lambda: setattr(container, "rate", 3.0))


def test_views_sets_and_weak_references():
    table, config = {"gamma": 2.0}, Derived()
    view, members, reference = types.MappingProxyType(table), {config}, weakref.ref(config)
    seen(lambda w, x: view["gamma"] * (w @ x), lambda: table.update(gamma=3.0))
    seen(lambda w, x: sum(m.rate for m in members) * (w @ x), lambda: setattr(config, "rate", 3.0))
    seen(lambda w, x: reference().rate * (w @ x), lambda: setattr(config, "rate", 4.0))


def test_numpy_arrays_by_value():
    array = np.array([1.0, 2.0, 3.0])

    def loss(w, x):
        return (w * torch.from_numpy(array)) @ x

    seen(loss, lambda: array.__setitem__(0, 9.0))
    seen(loss, lambda: array.__imul__(2.0))


def test_a_callable_object_is_itself_whatever_it_equals():
    @dataclasses.dataclass(frozen=True)
    class Loss:
        scale: float = dataclasses.field(compare=False)

        def __call__(self, w, x):
            return self.scale * (w @ x)

    assert Loss(2.0) == Loss(3.0)
    assert differ(grads(Loss(2.0)), grads(Loss(3.0)))


def test_a_method_of_an_object():
    class Agent:
        gamma = 0.5

        def loss(self, w, x):
            return self.gamma * (w @ x)

    agent, other = Agent(), Agent()
    other.gamma = 0.75
    before = grads(agent.loss)
    assert differ(before, grads(other.loss))
    agent.gamma = 0.25
    assert differ(before, grads(agent.loss))


# ---------------------------------------------------------------- tensors


def test_target_networks():
    target = nn.Linear(3, 1, dtype=F64)
    holder = {"net": target}

    def loss(w, x):
        return (w @ x - holder["net"](x).squeeze()) ** 2

    def update():
        with torch.no_grad():
            target.weight.mul_(0.5)

    def swap_data():
        target.weight.data = doubles(1, 3, seed=5)

    before = compilations()
    seen(loss, update)
    seen(loss, swap_data)
    seen(loss, lambda: target.load_state_dict(nn.Linear(3, 1, dtype=F64).state_dict()))
    seen(loss, lambda: setattr(target, "weight", nn.Parameter(doubles(1, 3, seed=6))))
    seen(loss, lambda: holder.update(net=nn.Linear(3, 1, dtype=F64)))
    assert compilations() - before == 1
    with torch.no_grad():
        kept = grads(loss)
        target.weight.mul_(2)  # no longer the one that is read
        assert not differ(kept, grads(loss))


def test_data_and_grad_of_a_tensor():
    box = {"w": nn.Parameter(doubles(3, seed=7))}
    box["w"].grad = doubles(3, seed=8)

    def of_data(w, x):
        return (w * box["w"].data) @ x

    def of_grad(w, x):
        return (w * box["w"].grad) @ x

    def swap():
        box["w"].data = doubles(3, seed=9)

    def rebind():
        box["w"] = nn.Parameter(doubles(3, seed=11))
        box["w"].grad = doubles(3, seed=12)

    seen(of_data, swap)
    seen(of_grad, lambda: setattr(box["w"], "grad", doubles(3, seed=10)))
    seen(of_grad, lambda: box["w"].grad.mul_(2))
    grads(of_data)
    seen(of_grad, rebind)
    grads(of_data)


@pytest.mark.parametrize("read", [lambda x: x.item(), float], ids=["item", "float"])
def test_a_value_that_is_read_is_live(read):
    number = torch.tensor(2.0)
    before = compilations()
    seen(lambda w, x: read(number) * (w @ x), lambda: number.fill_(0.0))
    seen(lambda w, x: read(number) * (w @ x), lambda: number.fill_(-3.0))
    assert compilations() - before == 2  # one for each of the two functions


def test_an_integer_that_is_read():
    number = torch.tensor(1)
    seen(lambda w, x: w[int(number)] * x[0], lambda: number.fill_(2))
    seen(lambda w, x: w[: number.item()].sum() * x[0], lambda: number.fill_(3))


def test_numbers_that_change_are_inputs():
    scale, power = 0.5, 2
    before = compilations()
    by_scale, by_power = (lambda w, x: scale * (w @ x)), (lambda w, x: power * (w @ x))
    for step in range(6):
        scale = 0.5 + step
        grads(by_scale)
    assert compilations() - before <= 2  # the first value is a constant
    before = compilations()
    for step in range(5):
        power = 2 + step
        grads(by_power)
    assert compilations() - before == 5


NUMBERS = {
    "isnan": (lambda n: 0.5 if math.isnan(n) else math.copysign(1.0, n), (1.0, -2.0, math.nan, 3.0, math.nan)),
    "range": (lambda n: len(range(n)), (2, 3, 4, 2)),
    "str": (lambda n: float(str(n)), (2, 3, 4, 2)),
    "branch": (lambda n: 2.0 if n > 2.5 else 3.0 * n, (1.0, 2.0, 3.0, 1.0)),
    "dictionary": ({1: 2.0, 2: 3.0, 3: 4.0}.get, (1, 2, 3, 1)),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_change_where_no_input_will_do(name):
    read, values = NUMBERS[name]
    number = None

    def closed_over(w, x):
        return read(number) * (w @ x)

    for value in values:
        number = value
        one, other = grads(closed_over), grads(lambda w, x, scale: read(scale) * (w @ x), batch=(X, value))
        assert not differ(one, other)


def test_the_shape_that_is_read_of_a_tensor():
    table = torch.zeros(2, 3)
    seen(lambda w, x: table.shape[1] * (w @ x), lambda: table.resize_(2, 5))

    def swap():
        table.data = torch.zeros(2, 7)

    seen(lambda w, x: table.shape[1] * (w @ x), swap)


def test_tensors_of_another_form():
    box = {"m": doubles(3, seed=3)}

    def loss(w, x):
        return ((w * box["m"]) @ x.to(w.dtype)) ** 2

    strided = doubles(3, 3, seed=4)
    for m in (doubles(1, seed=5), strided[:, 0], doubles(1, seed=6).expand(3), doubles(3, seed=7).float()):
        seen(loss, functools.partial(box.__setitem__, "m", m))
    wide = doubles(4, 6, seed=8)
    clear_cache()  # and with it the count of compilations of one loss
    for batch in (wide[:, ::2], X[:1].expand(4, 3), X.T.contiguous().T, X.float()):
        grads(loss, batch=batch)
    for params in (strided[:, 1], nn.Parameter(W), W[:1].expand(3)):
        grads(loss, params=params)


# ---------------------------------------------------------------- modules


class Net(nn.Module):
    """Keeps a number, a buffer and an unregistered tensor, all read in forward, which no code names."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1, dtype=F64)
        self.scale, self.plain = 2.0, doubles(1, seed=3)
        self.register_buffer("shift", doubles(1, seed=4))

    def forward(self, x):
        return (
            self.scale * self.linear(x) * FACTOR + self.shift * self.linear.bias + self.plain * self.linear.bias
        ).sum()


@pytest.mark.parametrize("as_params", [True, False], ids=["params", "closed over"])
def test_modules(as_params, monkeypatch):
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    net = Net()
    if as_params:
        loss, params = (lambda net, x: net(x)), net
    else:
        loss, params = (lambda w, x: net(w * x)), W
    see = functools.partial(seen, loss, params=params)
    see(lambda: setattr(net, "scale", 3.0))
    see(lambda: monkeypatch.setitem(globals(), "FACTOR", 3.0))
    see(lambda: net.shift.mul_(2))
    see(lambda: setattr(net, "shift", doubles(1, seed=5)))
    see(lambda: setattr(net, "plain", doubles(1, seed=6)))
    see(lambda: net.linear.register_forward_hook(lambda module, args, out: 2 * out))
    see(lambda: setattr(net, "linear", nn.Linear(3, 1, dtype=F64)))
    see(lambda: setattr(net, "forward", lambda x: net.linear(x).sum()))


def test_train_mode_and_dropout():
    net = nn.Sequential(nn.Linear(3, 2, dtype=F64), nn.Dropout(1.0), nn.Linear(2, 1, dtype=F64))
    loss = lambda net, x: net(x).sum()
    options = {"params": net, "randomness": "different"}
    seen(loss, net.eval, **options)
    seen(loss, net.train, **options)
    seen(loss, lambda: setattr(net[1], "p", 0.0), **options)


def test_frozen_parameters():
    net = nn.Sequential(nn.Linear(3, 2, dtype=F64), nn.Linear(2, 1, dtype=F64))
    net[0].requires_grad_(False)
    loss, reduce = (lambda net, x: net(x).sum()), ps.Sum()
    assert grads(loss, net, reduce=reduce).keys() == {"1.weight", "1.bias"}
    with torch.no_grad():
        net[0].weight.mul_(3)
    grads(loss, net, reduce=reduce)
    net[0].requires_grad_(True)
    assert len(grads(loss, net, reduce=reduce)) == 4
    net[1].requires_grad_(False)
    assert grads(loss, net, reduce=reduce).keys() == {"0.weight", "0.bias"}


def test_requires_grad_of_a_tensor_that_is_closed_over():
    scale = doubles(3, seed=3)
    loss = lambda w, x: (w * scale) @ x if scale.requires_grad else w @ x
    seen(loss, lambda: scale.requires_grad_(True))
    seen(loss, lambda: scale.requires_grad_(False))


# ---------------------------------------------------------------- settings, reductions, arguments


def test_settings_of_torch():
    w, x = W.float(), X.float()
    target = nn.Linear(3, 1)

    def loss(w, x):
        return ((w @ x - target(x).squeeze()) ** 2).float()

    plain = grads(loss, w, x, rtol=1e-4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        target(x)  # fills autocast's cache
        assert differ(plain, grads(loss, w, x, rtol=0.05))
        with torch.no_grad():
            target.weight.mul_(4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        grads(loss, w, x, rtol=0.05)
        assert target(x).dtype == torch.bfloat16
    grads(loss, w, x, rtol=1e-4)


def test_default_dtype():
    def loss(w, x):
        return ((torch.ones(3) / 3).double() * w) @ x

    before = grads(loss)
    torch.set_default_dtype(F64)
    try:
        assert differ(before, grads(loss))
    finally:
        torch.set_default_dtype(torch.float32)
    assert not differ(before, grads(loss))


@pytest.mark.parametrize("draw_numbers", [torch.randn, torch.rand])
def test_random_numbers_have_the_default_dtype(draw_numbers):
    """Inductor alone draws them in float32."""

    def loss(w, x):
        noise = draw_numbers(3)
        return (w * x * noise).sum(), noise

    torch.set_default_dtype(F64)
    try:
        w, x = torch.ones(3), torch.ones(2, 3)
        noise = per_sample_grads(loss, w, x, ps.Aux(), engine="traced", randomness="different")
    finally:
        torch.set_default_dtype(torch.float32)
    assert noise.dtype == F64
    assert not torch.equal(noise[0], noise[1])


def test_numbers_and_tensors_of_reductions_are_inputs():
    loss = lambda w, x: (w @ x) ** 2
    before = compilations()
    changing = [
        (0.5, doubles(3, seed=1), 1),
        (0, doubles(3, seed=2), 0),
        (float("inf"), doubles(3, seed=2) * 3, 0.5),
        (torch.tensor(0.25), doubles(3, 2, seed=3)[:, 0].contiguous(), 2),
    ]
    results = []
    for bound, direction, correction in changing:
        wanted = {"c": ps.ClippedSum(bound), "d": ps.Dot(direction), "v": ps.Variance(correction)}
        results.append(grads(loss, reduce=wanted))
    assert all(differ(a[name], b[name]) for a, b in itertools.pairwise(results) for name in "cdv")
    direction.mul_(5)  # in place
    assert differ(results[-1], grads(loss, reduce=wanted))
    assert compilations() - before <= 2  # max_norm of another dtype may cost one


def test_what_the_door_refuses_is_refused_the_next_time_too():
    loss = lambda w, x: (w @ x) ** 2
    grads(loss, reduce=ps.Variance(1))
    with pytest.raises(ps.ArgumentError, match=r"Variance\(\): expected samples .* more than 5, received B = 4"):
        per_sample_grads(loss, W, X, ps.Variance(5), engine="traced")
    with pytest.raises(ps.ArgumentError, match="engine"):
        per_sample_grads(loss, W, X, ps.Variance(1), engine="compile")
    grads(loss, reduce=ps.Dot(W))
    with pytest.raises(ps.ArgumentError, match="direction"):
        per_sample_grads(loss, W, X, ps.Dot(torch.ones(4, dtype=F64)), engine="traced")


def test_the_function_of_a_weighted_sum():
    loss, power = (lambda w, x: (w @ x) ** 2), 1.0
    weigh = lambda norms: norms**-power

    def change():
        nonlocal power
        power = 2.0

    seen(loss, change, reduce=ps.WeightedSum(weigh))
    one, other = (grads(loss, reduce=ps.WeightedSum(f)) for f in (torch.exp, torch.reciprocal))
    assert differ(one, other)


def test_reductions_that_differ():
    loss = lambda w, x: (w @ x) ** 2
    wanted = [ps.Sum(), ps.Mean(), (ps.Sum(), ps.Mean()), [ps.Mean(), ps.Sum()], {"a": ps.Sum()}, {"b": ps.Sum()}]
    for reduce in [*wanted, *wanted]:
        grads(loss, reduce=reduce)
    assert differ(grads(loss, reduce=ps.Norm()), grads(loss, reduce=ps.Loss()))


def test_in_dims_changed_in_place():
    square, other = doubles(3, 3, seed=3), doubles(3, 3, seed=4)
    dims = [0, 0]

    def loss(w, x, y):
        return (w @ x) * (w @ y)

    seen(loss, lambda: dims.__setitem__(1, 1), batch=(square, other), in_dims=(None, dims))


def test_parameters_of_another_structure():
    net = nn.Linear(3, 1, dtype=F64)

    class Params(NamedTuple):
        w: torch.Tensor

    def loss(p, x):
        if isinstance(p, nn.Module):
            return p(x).sum()
        while not isinstance(p, torch.Tensor):
            p = next(iter(p.values())) if isinstance(p, dict) else p[0]
        return (p @ x) ** 2

    for _ in range(2):
        for params in (W, {"w": W}, {"v": W}, {"w": [W]}, Params(W), (W,), net):
            grads(loss, params)


def test_constants_in_the_batch():
    def loss(w, x, scale):
        return scale * (w @ x)

    assert differ(grads(loss, batch=(X, 2.0)), grads(loss, batch=(X, 3.0)))
    grads(loss, batch=(X, 2.0))
    grads(loss, batch=(X, 2))


# ---------------------------------------------------------------- the cache


@pytest.mark.parametrize("is_module", [True, False])
def test_weights_that_are_tied_later(is_module):
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    params = model if is_module else {n: p.detach() for n, p in model.named_parameters() if n != "2.weight"}

    def loss(params, x):
        y = params(x) if is_module else torch.func.functional_call(model, params, (x,))
        return y.sin().sum()

    before = grads(loss, params)
    model[2].weight = model[0].weight
    assert differ(before, grads(loss, params))


def test_an_equal_lambda_hits():
    before = compilations()
    for _ in range(5):
        grads(lambda w, x: (w @ x) ** 2 + 0.5)
    assert compilations() - before == 1


def test_clear_cache():
    loss = lambda w, x: (w @ x) ** 2
    first = grads(loss)
    clear_cache()
    assert compilations() == 0
    assert not differ(first, grads(loss))
    assert compilations() == 1


# ---------------------------------------------------------------- what Dynamo refuses


def reads_a_name_that_is_not_there(w, x):
    try:
        return APPEARS * (w @ x)
    except NameError:
        return w @ x


NUMBER, FLAGS, BOX = torch.tensor(2.0, dtype=F64), torch.tensor([1.0, 0.0, 1.0]), types.SimpleNamespace(a=2.0)
VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("rate", default=2.0)
PAIR, GETTER, STEPS = {"a": 2.0}, operator.attrgetter("a"), itertools.count()
ARRAY, TEXTS = np.array([2.0]), np.array(["a"])
DISABLED = torch.compiler.disable(lambda x: 2 * x)
REFUSED = {
    "a NameError that is caught": (reads_a_name_that_is_not_there, "Failed to find name `APPEARS`"),
    "__mul__": (lambda w, x: Operator() * (w @ x), "Missing `as_proxy\\(\\)`"),
    "bool()": (lambda w, x: (w @ x) * (2.0 if NUMBER else 1.0), "data-dependent branching"),
    "a branch": (lambda w, x: (w @ x) * (2.0 if FLAGS.sum() > 2 else 1.0), "data-dependent branching"),
    "tolist()": (lambda w, x: (w @ x) * NUMBER.tolist(), "tolist"),
    "isnan of a value": (lambda w, x: (w @ x) * math.isnan(NUMBER.item()), "data-dependent expression"),
    "torch.equal": (lambda w, x: (w @ x) * torch.equal(FLAGS, FLAGS), "data of Tensor inputs"),
    "nonzero()": (lambda w, x: w[FLAGS.nonzero()].sum() * x[0], "aten.nonzero"),
    "a mask": (lambda w, x: w[FLAGS > 0].sum() * x[0], "aten.nonzero"),
    "a number of NumPy": (lambda w, x: (w @ x) * float(ARRAY[0]), "local_scalar_dense"),
    "strings of NumPy": (lambda w, x: (w @ x) * (TEXTS[0] == "a"), "numpy.ndarray"),
    "np.random": (lambda w, x: (w @ x) * float(np.random.rand()), "data-dependent expression"),  # noqa: NPY002
    "random": (lambda w, x: (w @ x) * random.gauss(0, 1), "Random.gauss"),
    "contextvars": (lambda w, x: (w @ x) * VARIABLE.get(), "method `get` of class `ContextVar`"),
    "attrgetter": (lambda w, x: (w @ x) * GETTER(BOX), "class `attrgetter`"),
    "bytearray": (lambda w, x: (w @ x) * bytearray(b"a")[0], "bytearray"),
    "globals()": (lambda w, x: (w @ x) * globals()["FACTOR"], "`globals`"),
    "eval()": (lambda w, x: (w @ x) * eval("FACTOR"), "`eval`"),
    "dir()": (lambda w, x: (w @ x) * len(dir(BOX)), "`dir`"),
    "the directory": (lambda w, x: (w @ x) * len(os.getcwd()), "posix.getcwd"),  # noqa: PTH109
    "the time": (lambda w, x: (w @ x) * time.time(), "time.time"),
    "the date": (lambda w, x: (w @ x) * dt.datetime.now().year, "method `now`"),
    "threads": (lambda w, x: (w @ x) * torch.get_num_threads(), "non-Tensor"),
    "data_ptr()": (lambda w, x: (w @ x) * (FLAGS.data_ptr() == NUMBER.data_ptr()), "data pointer"),
    "torch.compiler.disable": (lambda w, x: DISABLED(w @ x), "torch.compiler.disable"),
    "a list outside": (lambda w, x: (PAIR.update(kept=w @ x), w @ x)[1], "keeps a tensor in an object outside"),
}


# The torch from which Dynamo takes a loss, and guards what it reads (of a name that is not there, see below).
TAKEN_SINCE = {"a NameError that is caught": "2.14", "contextvars": "2.14", "bytearray": "2.15"}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    loss, reason = REFUSED[name]
    if torch.__version__ >= TAKEN_SINCE.get(name, "99"):
        grads(loss)
        return
    for _ in range(2):
        with pytest.raises(ps.LossError, match=rf"(?s)cannot be traced: .*{reason}") as raised:
            per_sample_grads(loss, W, X, ps.Sum(), engine="traced")
        message = str(raised.value)
        assert len(message.splitlines()) <= 10
        if "keeps a tensor" not in reason:
            line = loss.__code__.co_firstlineno + 2 * (loss is reads_a_name_that_is_not_there)
            assert f"({__file__}:{line}): `" in message
    PAIR.pop("kept", None)


def test_an_assertion_of_dynamos_is_a_refusal(monkeypatch):
    def fail(*_args, **_options):
        raise AssertionError("expected something")

    monkeypatch.setattr(torch._dynamo.convert_frame, "_compile", fail)
    with pytest.raises(ps.LossError, match=r"cannot be traced: expected something"):
        per_sample_grads(lambda w, x: w @ x, W, X, engine="traced")


# ---------------------------------------------------------------- what torch does not guard

GAPS = {}
OTHER = types.ModuleType("other_module")


def gap(row):
    """Add a case, named by its row in docs/compiled.md: it returns a loss, and a change that torch does not see."""

    def add(case):
        GAPS[row] = case
        return case

    return add


@gap("an attribute that is added to a function later")
def _(patch):
    def loss(w, x):
        return getattr(loss, "rate", 1.0) * (w @ x)

    return loss, lambda: setattr(loss, "rate", 3.0)


@gap("an attribute that is added to a Python module later")
def _(patch):
    loss = lambda w, x: getattr(OTHER, "rate", 1.0) * (w @ x)
    return loss, lambda: patch.setattr(OTHER, "rate", 3.0, raising=False)


@gap("attributes of a subclass of `dict`")
def _(patch):
    class Table(dict):
        rate = 1.0

    table = Table()
    table.rate = 2.0
    return lambda w, x: table.rate * (w @ x), lambda: setattr(table, "rate", 3.0)


@gap("the order of an `OrderedDict`")
def _(patch):
    table = collections.OrderedDict(a=2.0, b=3.0)
    return lambda w, x: next(iter(table.values())) * (w @ x), lambda: table.move_to_end("a")


@gap("a global variable that is the module in `params`, and becomes another module")
def _(patch):
    net = nn.Linear(3, 1, dtype=F64)
    patch.setitem(globals(), "TARGET", net)
    loss = lambda net, x: ((net(x) - TARGET(x).detach() + 1) ** 2).sum()
    return loss, lambda: patch.setitem(globals(), "TARGET", nn.Linear(3, 1, dtype=F64)), net


@gap("`len(vars(x))`")
def _(patch):
    space = types.SimpleNamespace(a=2.0)
    return lambda w, x: len(vars(space)) * (w @ x), lambda: setattr(space, "b", 3.0)


@gap("a method that is replaced in its class, `forward` too")
def _(patch):
    class Module(nn.Module):
        def forward(self, x):
            return 2 * x

    module = Module()
    return lambda w, x: module(w @ x), lambda: setattr(Module, "forward", lambda self, x: 3 * x)


@gap("defaults of the `__init__` of objects that the loss makes")
def _(patch):
    class Made:
        def __init__(self, rate=2.0):
            self.rate = rate

    return lambda w, x: Made().rate * (w @ x), lambda: setattr(Made.__init__, "__defaults__", (3.0,))


@gap("methods of `torch.Tensor`, and of layers of `torch.nn`, that are replaced")
def _(patch):
    layer = nn.Softsign()
    return lambda w, x: layer(w @ x), lambda: patch.setattr(nn.Softsign, "forward", lambda self, x: 3 * x)


@gap("hooks on all modules (`register_module_forward_hook`)")
def _(patch):
    layer, register = nn.Softsign(), torch.nn.modules.module.register_module_forward_hook

    def add():
        handle = register(lambda module, args, out: 3 * out if module is layer else out)
        patch.setattr(OTHER, "remove", handle.remove, raising=False)  # see the test

    return lambda w, x: layer(w @ x), add


@gap("a global variable that is added later and hides a builtin")
def _(patch):
    return lambda w, x: abs(-2.0) * (w @ x), lambda: patch.setitem(globals(), "abs", lambda x: 3.0)


@gap("an attribute or a key that is added after the loss caught its absence; since torch 2.14 a global variable, too")
def _(patch):
    table = {}

    def loss(w, x):
        try:
            return table["rate"] * (w @ x)
        except KeyError:
            return 2.0 * (w @ x)

    return loss, lambda: table.update(rate=3.0)


@gap("a module that is replaced in `sys.modules`, and imported inside the loss")
def _(patch):
    old, new = types.ModuleType("replaced_module"), types.ModuleType("replaced_module")
    old.rate, new.rate = 2.0, 3.0
    patch.setitem(sys.modules, "replaced_module", old)

    def loss(w, x):
        import replaced_module

        return replaced_module.rate * (w @ x)

    return loss, lambda: patch.setitem(sys.modules, "replaced_module", new)


@gap("environment variables, by `os.getenv`, or where they were not set")
def _(patch):
    patch.setenv("RATE_OF_A_TEST", "2")
    return lambda w, x: float(os.getenv("RATE_OF_A_TEST")) * (w @ x), lambda: patch.setenv("RATE_OF_A_TEST", "3")


@gap("`isinstance` of a class that `ABC.register` adds later")
def _(patch):
    class Base(abc.ABC):  # noqa: B024
        pass

    class Thing:
        pass

    thing = Thing()
    return lambda w, x: (3.0 if isinstance(thing, Base) else 2.0) * (w @ x), lambda: Base.register(Thing)


@gap("what `__getattr__` of a metaclass reads")
def _(patch):
    table = {"rate": 2.0}

    class Meta(type):
        def __getattr__(cls, name):
            if name == "rate":
                return table[name]
            raise AttributeError(name)

    class Thing(metaclass=Meta):
        pass

    return lambda w, x: Thing.rate * (w @ x), lambda: table.update(rate=3.0)


@gap("settings of Python (`sys.getrecursionlimit()`)")
def _(patch):
    limit = sys.getrecursionlimit()
    patch.setattr(OTHER, "remove", lambda: sys.setrecursionlimit(limit), raising=False)
    return lambda w, x: sys.getrecursionlimit() * (w @ x), lambda: sys.setrecursionlimit(limit + 1)


@gap("0.0 that becomes −0.0, before torch 2.15")
def _(patch):
    number = 0.0

    def change():
        nonlocal number
        number = -0.0

    return lambda w, x: math.copysign(1.0, number) * (w @ x), change


@gap("functions under `torch.compiler.assume_constant_result`")
def _(patch):
    rates = [2.0]
    rate = torch.compiler.assume_constant_result(lambda: rates[0])
    return lambda w, x: rate() * (w @ x), lambda: rates.insert(0, 3.0)


@pytest.mark.parametrize("row", GAPS)
def test_what_torch_does_not_guard(row, monkeypatch):
    """If one of these fails, torch has closed the gap: drop it here, and its row in docs/compiled.md."""
    if "−0.0" in row and torch.__version__ >= "2.15":
        pytest.skip("guarded since torch 2.15")
    loss, change, params = (*GAPS[row](monkeypatch), W)[:3]
    compiled = torch.compile(loss, backend="eager", fullgraph=True)  # without persample
    before, alone = grads(loss, params), compiled(params, X[0])
    change()
    try:
        assert torch.equal(compiled(params, X[0]), alone)
        assert not differ(before, per_sample_grads(loss, params, X, (ps.Sum(), ps.Loss()), engine="traced"))
        assert differ(before, per_sample_grads(loss, params, X, (ps.Sum(), ps.Loss())))
        clear_cache()
        torch.compiler.reset()
        grads(loss, params)  # a new capture sees it
    finally:
        getattr(OTHER, "remove", int)()


def test_the_page_lists_the_gaps():
    page = (ROOT / "docs" / "compiled.md").read_text()
    table = page.partition("## What torch.compile does not guard")[2].partition("\n## ")[0]
    rows = [line.strip("| ") for line in table.splitlines() if line.startswith("|")]
    assert rows[2:] == list(GAPS)


def test_a_cache_of_functools_is_looked_through():
    rates = [2.0]

    @functools.lru_cache
    def rate():
        return rates[0]

    loss = lambda w, x: rate() * (w @ x)
    before = grads(loss)
    rates[0] = 3.0
    wanted = ps.Sum(), ps.Loss()
    assert not differ(before, per_sample_grads(loss, W, X, wanted))
    assert_trees_close(per_sample_grads(loss, W, X, wanted, engine="traced"), tuple(1.5 * x for x in before), 1e-9)


# ---------------------------------------------------------------- what is kept


def new_loss(scale):
    return eval(f"lambda w, x: {scale} * (w @ x) ** 2")  # code of its own


@pytest.mark.parametrize("times", [1, 2])
def test_a_loss_that_is_dropped_frees_what_it_closed_over(times):
    class Big:
        def __init__(self):
            self.scale = doubles(3)

    def call():
        big = Big()
        loss = lambda w, x: big.scale @ w * (w @ x)
        for _ in range(times):
            per_sample_grads(loss, W, X, ps.Sum(), engine="traced")
        return weakref.ref(big), weakref.ref(big.scale)

    references = call()
    clear_cache()
    gc.collect()
    assert [x() for x in references] == [None, None]


def test_clear_cache_frees_programs():
    loss = new_loss(3)
    grads(loss)
    captures = [x for entry in capture._entries.values() for x in entry.captures]
    programs = [weakref.ref(x) for made in captures for family in made.programs.values() for x in family.programs]
    assert len(programs) == compilations() == 1
    clear_cache()
    gc.collect()
    assert programs[0]() is None
    assert (compilations(), len(capture._entries)) == (0, 0)
    grads(loss)


def test_the_warning_names_the_cause():
    def call(scale):
        return per_sample_grads(lambda w, x: scale * (w @ x), W, X, ps.Sum(), engine="traced")

    for step in range(7):
        call(step + 2)
    with pytest.warns(RuntimeWarning, match=r"8th time, because this changed: .*unbatched.*tensor"):
        call(100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(200)  # said once


def test_too_many_captures(monkeypatch):
    captures_at_most(monkeypatch, 3)
    rates = {"a": 2.0, "b": 3.0, "c": 4.0, "d": 5.0}
    name = ""

    def loss(w, x):
        return rates[name] * (w @ x)

    for key in "abc":
        name = key
        grads(loss)
    name = "d"
    with pytest.warns(ps.CompileLimitWarning, match=r"captured 3 times, 2 of them because .*: .*Pass what changes in"):
        grads(loss)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = grads(loss)  # said once
    assert_trees_close(found, grads(lambda w, x: 5.0 * (w @ x)), 1e-12)
    name = "a"
    grads(loss)  # captured before
    clear_cache()
    name = "d"
    grads(loss)
