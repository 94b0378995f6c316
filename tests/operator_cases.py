"""Losses made of torch's operator database: one operation, its tensors parameters, samples or constants."""

from __future__ import annotations

import itertools
import random
import warnings
import zlib
from dataclasses import dataclass, field

import torch
from torch.func import grad, jvp, vmap
from torch.utils import _pytree as pytree

from persample import FallbackWarning, Loss, Norm, Stack, Sum, per_sample_grads

B, F64 = 3, torch.float64
# Of a tensor of floats: a parameter; a parameter times what is each sample's own; each sample's own; the same for all.
FLOATS, OTHERS = ("parameter", "activation", "sample", "constant"), ("sample", "constant")
# How the operation is called, and the loss computed: "mapped" by a vmap inside of the loss.
FORMS = ("function", "summed", "derivative", "mapped", "last axis", "method", "in place")
FORMS_OF_LAYERS = ("function", "method", "in place", "forward", "forward in place", "mapped")  # a gradient goes dense
# Of a tensor of floats in a loss with layers: parameters, which are stored as a vector or as a matrix; and as above.
FLOATS_OF_LAYERS = ("vector", "matrix", "activation", "sample", "constant")
UNSET = "what it returns is not set to anything"
EXCLUDED = {
    "empty_like": UNSET,
    "new_empty": UNSET,
    "new_empty_strided": UNSET,
    "empty": UNSET,
    "empty_strided": UNSET,
    "empty_permuted": UNSET,
    "native_group_norm": "its kernel takes weights for contiguous; torch.group_norm sees to it",
    "linalg.pinv": "of a matrix without elements, and tolerances per sample, the leading axes are lost",
}
# Of reverse derivatives of their forward ones, torch has some wrong without vmap, too: on the loop engine.
WRONG_FORWARD = (
    *("linalg.det", "linalg.slogdet", "linalg.solve", "logdet"),
    *("nn.functional.batch_norm", "nn.functional.instance_norm", "nn.functional.layer_norm"),
)
KEPT = {"linalg.pinv"}  # but for samples without elements


def name_of(op):
    return f"{op.name} {op.variant_test_name}".strip()


def call_of(op, form):
    if form.endswith("in place"):
        return op.inplace_variant and (lambda x, *args, **kwargs: op.inplace_variant(x.clone(), *args, **kwargs))
    return op.method_variant if form == "method" else op.op


def is_operand(x):
    kinds = (F64, torch.bool, torch.int32, torch.int64)
    return isinstance(x, torch.Tensor) and x.layout == torch.strided and x.dtype in kinds


def tensors(sample):
    return [x for x in pytree.tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(x, torch.Tensor)]


def samples_of(op, rng, most):
    """Some of an operation's small samples."""
    every = list(op.sample_inputs("cpu", F64, requires_grad=op.supports_autograd))
    small = [s for s in every if sum(x.numel() for x in tensors(s)) <= 2000 and any(map(is_operand, tensors(s)))]
    if op.name in KEPT:
        small = [s for s in small if s.input.numel()]
    return rng.sample(small, most) if len(small) > most else small


def mixtures(sample, rng, most, floats=FLOATS):
    """Roles of the sample's operands: all, or some."""
    roles = [floats if x.dtype == F64 else OTHERS for x in tensors(sample) if is_operand(x)]
    grid = list(itertools.product(*roles)) if len(roles) <= 5 else [tuple(map(rng.choice, roles)) for _ in range(most)]
    return rng.sample(grid, most) if len(grid) > most else grid


def vary(x, i, generator):
    """One sample's own: numbers near those given, of the same signs, or the given integers in another order."""
    if x.dtype == F64:
        return x * (0.9 + 0.2 * torch.rand(x.shape, dtype=F64, generator=generator))
    return x.flatten().roll(i).view(x.shape) if x.numel() else x.clone()


@dataclass
class Case:
    """The loss of one sample: what an operation returns, each number of it times its own coefficient."""

    call: object
    sample: object
    roles: tuple
    form: str
    seed: int
    params: dict = field(default_factory=dict)
    batch: dict = field(default_factory=dict)

    def __post_init__(self):
        generator = torch.Generator().manual_seed(self.seed)
        self.params["scale"] = torch.tensor(0.7, dtype=F64)
        self.batch["factor"] = 1 + torch.rand(B, dtype=F64, generator=generator)
        leaves, self.structure = pytree.tree_flatten((self.sample.input, self.sample.args, self.sample.kwargs))
        self.leaves = [x.detach().clone() if is_operand(x) else x for x in leaves]
        self.places = [k for k, x in enumerate(self.leaves) if is_operand(x)]
        for place, role in zip(self.places, self.roles, strict=True):
            x = self.leaves[place]
            if role in {"activation", "sample"}:
                self.batch[str(place)] = torch.stack([vary(x, i, generator) for i in range(B)])
            if role == "activation":
                self.params[str(place)] = torch.ones((), dtype=F64)
            elif role in {"parameter", "vector", "matrix"}:
                stored = {"vector": x.flatten() if x.ndim > 1 else x, "matrix": x if x.ndim > 1 else x.reshape(1, -1)}
                self.params[str(place)] = stored.get(role, x)
        self.coefficients, self.looped = [], True

    def values(self, params, batch):
        values = list(self.leaves)
        for place in self.places:
            factors = [given[str(place)] for given in (params, batch) if str(place) in given]
            if factors:
                x = factors[0] * factors[1] if len(factors) > 1 else factors[0]
                values[place] = x if x.shape == values[place].shape else x.view(values[place].shape)
        return values

    def __call__(self, params, batch):
        total = self.nested(self.values(params, batch))
        # Half of the operations receive the same gradient for all samples: other rules are at work then.
        return params["scale"] * batch["factor"] * total if self.seed % 2 else total + params["scale"] * batch["factor"]

    def nested(self, values):
        floats = [k for k in self.places if self.leaves[k].dtype == F64]
        if self.form in {"function", "summed", "last axis", "method", "in place"} or not floats:
            return self.total(values)
        places = sorted({floats[self.seed % len(floats)], floats[self.seed // 7 % len(floats)]})
        given = [values[k] for k in places]

        def inner(*own):
            return self.total([dict(zip(places, own, strict=True)).get(k, x) for k, x in enumerate(values)])

        if self.form == "derivative":
            return grad(inner)(*given).sin().sum()
        if self.form.startswith("forward"):  # with parameters and constants as they are for tangents
            return sum(jvp(inner, tuple(given), tuple(x if self.seed % 3 else x.cos() for x in given)))
        both = [(x, 1.03 * x) for x in given]
        if self.looped:  # without the vmap whose rules are in question
            return sum(itertools.starmap(inner, zip(*both, strict=True)))
        axis = -1 if self.seed % 3 else 0
        return vmap(inner, in_dims=axis)(*(torch.stack(pair, axis) for pair in both)).sum()

    def total(self, values):
        input, args, kwargs = pytree.tree_unflatten(values, self.structure)  # noqa: A001
        out = self.sample.output_process_fn_grad(self.call(input, *args, **kwargs))
        numbers = [torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in pytree.tree_leaves(out)]
        if not self.coefficients:
            self.coefficients = [0.5 + torch.arange(x.numel()).mul(0.618).frac().to(F64).view(x.shape) for x in numbers]
        pairs = zip(self.coefficients, numbers, strict=True)
        return sum((self.number(c.reshape(x.shape) * x.to(F64)) for c, x in pairs), torch.zeros((), dtype=F64))

    @staticmethod
    def number(x):
        return x.sum()


class CaseOfLayers(Case):
    """A loss with a layer, that is nonlinear in what an operation returns: without random numbers, of layers."""

    def __post_init__(self):
        super().__post_init__()
        generator = torch.Generator().manual_seed(self.seed)
        self.params["layer"] = torch.randn(2, 3, dtype=F64, generator=generator)
        self.batch["input"] = torch.randn(B, 3, dtype=F64, generator=generator)

    def __call__(self, params, batch):
        rate = torch.tanh(params["layer"] @ batch["input"]).sum()
        return rate * super().__call__(params, batch)

    @staticmethod
    def number(x):
        return x.asinh().sum()


def measure(case, engine):
    """Losses, gradients and norms of a case."""
    case.looped = engine == "loop"
    wanted = {"loss": Loss(), "grads": Stack(), "norm": Norm()}
    batch, options = case.batch, {}
    if case.form == "summed":  # gradients are not written out
        wanted = {"loss": Loss(), "sum": Sum(), "norm": Norm(per_param=True)}
    if case.form == "last axis":
        batch = {key: x.movedim(0, -1).contiguous() for key, x in batch.items()}
        options["in_dims"] = (None, ({key: x.ndim - 1 for key, x in batch.items()},))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", FallbackWarning)
        torch.manual_seed(0)
        randomness = "error" if isinstance(case, CaseOfLayers) else "same"
        return per_sample_grads(case, case.params, (batch,), wanted, engine=engine, randomness=randomness, **options)


def deviation(actual, expected):
    """The largest difference beside what is expected; NaN agrees with NaN."""
    pairs = list(zip(pytree.tree_leaves(actual), pytree.tree_leaves(expected), strict=True))
    assert all(a.shape == e.shape for a, e in pairs)
    # Beside the largest number of all: what cancels to nothing has no accuracy of its own.
    size = max([e.nan_to_num(0, 0, 0).abs().max().item() for _, e in pairs if e.numel()] + [1e-3])
    worst = 0.0
    for a, e in pairs:
        differs = ~((a == e) | (a.isnan() & e.isnan()))
        if differs.any():
            worst = max(worst, ((a - e)[differs].abs() / size).nan_to_num(torch.inf).max().item())
    return worst


def cases(op, form, most, kind=Case, floats=FLOATS):
    """Some cases of one operation."""
    rng = random.Random(zlib.crc32(f"{name_of(op)} {form}".encode()))
    call = None if form.startswith("forward") and op.name in WRONG_FORWARD else call_of(op, form)
    for sample in samples_of(op, rng, most) if call else ():
        if (form == "method" or form.endswith("in place")) and not isinstance(sample.input, torch.Tensor):
            continue
        for roles in mixtures(sample, rng, most, floats):
            yield kind(call, sample, roles, form, rng.randrange(10**6))
