"""Modules as parameters against plain autograd on copies of them, and the promise that they come back untouched."""

from __future__ import annotations

import copy
import io
import pickle
import threading
import time
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils import _pytree as pytree
from workloads import Tied

from persample import ArgumentError, Aux, ClippedSum, LossError, Mean, Norm, Sum, per_sample_grads, set_grads
from persample.inputs.modules import trained_parameters

ENGINES = ["eager", "loop"]
F64 = torch.float64
engines = pytest.mark.parametrize("engine", ENGINES)


def draw(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def trainable(module):
    return {name: param for name, param in module.named_parameters() if param.requires_grad}


def autograd(loss_fn, params, batch, tensors_of=trainable):
    """The oracle: every sample gets its own copy of ``params``; ``tensors_of`` says what is differentiated."""
    rows = []
    for sample in zip(*batch, strict=True):
        fresh = copy.deepcopy(params)
        leaves, structure = pytree.tree_flatten(tensors_of(fresh))
        grads = torch.autograd.grad(loss_fn(fresh, *sample), leaves, allow_unused=True, materialize_grads=True)
        rows.append(grads)
    stacked = [torch.stack(column) for column in zip(*rows, strict=True)]
    return pytree.tree_unflatten(stacked, structure)


@contextmanager
def untouched(*modules):
    """The same Parameter and buffer objects with the same numbers, grads and modes afterwards, error or not."""

    def tensors(module):
        named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        return dict(named)

    before = [tensors(module) for module in modules]
    values = [{name: x.detach().clone() for name, x in each.items()} for each in before]
    grads = [{name: x.grad for name, x in each.items()} for each in before]
    modes = [[part.training for part in module.modules()] for module in modules]
    try:
        yield
    finally:
        for module, old, numbers, gradients, mode in zip(modules, before, values, grads, modes, strict=True):
            now = tensors(module)
            assert now.keys() == old.keys()
            for name, x in old.items():
                assert now[name] is x, f"{name} is another object"
                assert torch.equal(x, numbers[name]), f"{name} has other numbers"
                assert x.grad is gradients[name]
            assert [part.training for part in module.modules()] == mode


class TestUntouchedCanFail:
    @pytest.mark.parametrize(
        "damage",
        [
            pytest.param(lambda m: m[0].weight.data.add_(1), id="numbers"),
            pytest.param(lambda m: setattr(m[0], "weight", nn.Parameter(m[0].weight.clone())), id="object"),
            pytest.param(lambda m: m[1].running_mean.add_(1), id="buffer-numbers"),
            pytest.param(lambda m: m[1].register_buffer("running_var", m[1].running_var.clone()), id="buffer-object"),
            pytest.param(lambda m: m[1].register_buffer("more", torch.zeros(1)), id="buffer-added"),
            pytest.param(lambda m: setattr(m[0].bias, "grad", torch.zeros_like(m[0].bias)), id="grad"),
            pytest.param(lambda m: m.eval(), id="mode"),
        ],
    )
    def test_it_sees(self, damage):
        module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        with pytest.raises(AssertionError), untouched(module):
            damage(module)


# The modules that the grid runs over. Module-level classes, so that they pickle.


class LoRA(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, base.in_features))
        self.b = nn.Parameter(torch.randn(base.out_features, 2))

    def forward(self, x):
        return self.base(x) + self.b @ (self.a @ x)


class Containers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.heads = nn.ModuleDict({"policy": nn.Linear(3, 2), "value": nn.Linear(3, 1)})
        self.scales = nn.ParameterList([torch.ones(3), torch.full((3,), 0.5)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        heads = self.heads["policy"](x * self.scales[0]), self.heads["value"](x * self.scales[1])
        return torch.cat(heads)


class RunningMean(nn.Module):
    """Subtracts a running mean that moves with every sample, and counts its calls."""

    def __init__(self, *, in_place):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.in_place = in_place
        self.register_buffer("mean", torch.full((3,), 0.1))
        self.register_buffer("calls", torch.tensor(0), persistent=False)

    def forward(self, x):
        if self.in_place:  # a captured buffer takes only what is the same for every sample
            self.calls += 1
            self.mean.mul_(0.9)
        else:
            self.calls = self.calls + 1
            self.mean = 0.9 * self.mean + 0.1 * x.detach()
        return self.linear(x - self.mean) * self.calls.clone()  # the graph must not see later writes


class OnDemand(nn.Module):
    """Fills a buffer that starts as None."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("cache", None)

    def forward(self, x):
        self.cache = x.detach() * 2
        return self.linear(x + self.cache)


class EncoderDecoder(nn.Module):
    """Has no forward: the loss calls its methods."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(3, 2)
        self.decoder = nn.Linear(2, 3)

    def encode(self, x):
        return torch.tanh(self.encoder(x))

    def decode(self, z):
        return self.decoder(z)


class SelfAttention(nn.Module):
    def __init__(self, *, need_weights):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x):
        return self.attention(x, x, x, need_weights=self.need_weights)[0]


def double_output(module, args, output):
    return 2 * output


def shift_input(module, args):
    return (args[0] + 1,)


def hooked():
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    module[0].register_forward_hook(double_output)
    module[2].register_forward_pre_hook(shift_input)
    return module


def mlp():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def frozen_first_layer():
    module = mlp()
    module[0].requires_grad_(False)
    return module


def batch_norm_in_eval():
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    module(draw(16, 3))  # running statistics that are not those of a new layer
    return module.eval()


def spectral(mode):
    module = nn.Sequential(parametrizations.spectral_norm(nn.Linear(3, 3)), nn.Tanh(), nn.Linear(3, 2))
    return module.train(mode)


def square_loss(model, x, y):
    return ((model(x) - y) ** 2).sum()


def square_loss_of_rows(model, x, y):
    return ((model(x[None])[0] - y) ** 2).sum()


def cross_entropy(model, tokens):
    return F.cross_entropy(model(tokens[:-1]), tokens[1:])


def autoencoder_loss(model, x, y):
    return ((model.decode(model.encode(x)) - x) ** 2).sum()


def attention_loss(model, x):
    return (model(x) ** 2).sum() + model(x)[0, 0]


VECTORS = draw(4, 3, seed=1), draw(4, 2, seed=2)
SEQUENCES = (draw(4, 5, 4, seed=3),)
TOKENS = (torch.randint(6, (4, 5), generator=torch.Generator().manual_seed(4)),)
# Where vmap has no batching rule (fused attention on the CPU, tril_), torch loops and warns; the numbers are right.
slow_fallback = pytest.mark.filterwarnings("ignore:There is a performance drop")


@dataclass(frozen=True)
class Case:
    build: Any
    names: list[str]
    loss_fn: Any = square_loss
    batch: tuple[torch.Tensor, ...] = field(default=VECTORS, repr=False)
    marks: tuple[Any, ...] = ()


LINEAR = ["weight", "bias"]
ATTENTION = ["in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"]
ENCODER = [f"{part}.{name}" for part in ("linear1", "linear2", "norm1", "norm2") for name in LINEAR]
TWO_LAYERS = ["0.weight", "0.bias", "2.weight", "2.bias"]
CONTAINERS = [f"{p}.{n}" for p in ("layers.0", "layers.1", "layers.2", "heads.policy", "heads.value") for n in LINEAR]
ORTHOGONAL = "parametrizations.weight.original"
CASES = {
    "mlp": Case(mlp, TWO_LAYERS),
    "tied": Case(Tied, ["embed.weight", "mix.weight", "mix.bias"], cross_entropy, TOKENS),
    "frozen-layer": Case(frozen_first_layer, ["2.weight", "2.bias"]),
    "lora": Case(lambda: LoRA(nn.Linear(3, 2)), ["a", "b"]),
    "containers": Case(
        Containers, [*CONTAINERS, "scales.0", "scales.1"], lambda m, x, y: (m(x)[:2] - y).square().sum() + m(x)[2] ** 2
    ),
    "methods": Case(EncoderDecoder, [f"{p}.{n}" for p in ("encoder", "decoder") for n in LINEAR], autoencoder_loss),
    "buffers-replaced": Case(lambda: RunningMean(in_place=False), ["linear.weight", "linear.bias"]),
    "buffers-in-place": Case(lambda: RunningMean(in_place=True), ["linear.weight", "linear.bias"]),
    "batch-norm-eval": Case(
        batch_norm_in_eval, ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"], square_loss_of_rows
    ),
    "weight-norm": Case(
        lambda: parametrizations.weight_norm(nn.Linear(3, 2)),
        ["bias", f"{ORTHOGONAL}0", f"{ORTHOGONAL}1"],
    ),
    "orthogonal": Case(
        lambda: parametrizations.orthogonal(nn.Linear(3, 2)), ["bias", ORTHOGONAL], marks=(slow_fallback,)
    ),
    "spectral-norm-eval": Case(lambda: spectral(False), ["0.bias", f"0.{ORTHOGONAL}", "2.weight", "2.bias"]),
    "spectral-norm-train": Case(lambda: spectral(True), ["0.bias", f"0.{ORTHOGONAL}", "2.weight", "2.bias"]),
    "hooks": Case(hooked, TWO_LAYERS),
    "attention": Case(
        lambda: SelfAttention(need_weights=True), [f"attention.{n}" for n in ATTENTION], attention_loss, SEQUENCES
    ),
    "fused-attention": Case(
        lambda: SelfAttention(need_weights=False),
        [f"attention.{n}" for n in ATTENTION],
        attention_loss,
        SEQUENCES,
        (slow_fallback,),
    ),
    "transformer-layer": Case(
        lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval(),
        [*(f"self_attn.{n}" for n in ATTENTION), *ENCODER],
        attention_loss,
        SEQUENCES,
        (slow_fallback,),
    ),
}


def build(make, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make().double()


cases = pytest.mark.parametrize("case", [pytest.param(case, id=name, marks=case.marks) for name, case in CASES.items()])


@engines
@cases
class TestEveryModule:
    def test_equals_autograd_and_is_untouched(self, case, engine):
        module = build(case.build)
        with untouched(module):
            result = per_sample_grads(case.loss_fn, module, case.batch, engine=engine)
        expected = autograd(case.loss_fn, module, case.batch)
        assert list(result) == case.names
        assert all(rows.abs().max() > 1e-6 for name, rows in expected.items() if "in_proj_bias" not in name)
        close(result, expected)

    def test_is_a_working_module_afterwards(self, case, engine):
        """Copied, pickled and trained further, it does what a module does that was never differentiated here."""
        module, never = build(case.build), build(case.build)
        set_grads(module, per_sample_grads(case.loss_fn, module, case.batch, Mean(), engine=engine))
        set_grads(never, {name: rows.mean(0) for name, rows in autograd(case.loss_fn, never, case.batch).items()})
        for model in (module, never):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        sample = [x[0] for x in case.batch]
        expected = case.loss_fn(copy.deepcopy(never), *sample)
        copies = [copy.deepcopy(module)]
        if not any(parametrize.is_parametrized(part) for part in module.modules()):  # torch does not pickle those
            copies.append(pickle.loads(pickle.dumps(module)))
        for model in (*copies, module):
            close(case.loss_fn(model, *sample), expected)


class TestTied:
    @engines
    def test_the_gradient_sums_both_uses(self, engine):
        tied, untied = build(Tied), build(Tied)
        untied.head.weight = nn.Parameter(untied.embed.weight.detach().clone())
        result = per_sample_grads(cross_entropy, tied, TOKENS, engine=engine)
        both = autograd(cross_entropy, untied, TOKENS)
        assert both["embed.weight"].abs().max() > 1e-3
        close(result["embed.weight"], both["embed.weight"] + both["head.weight"])

    @engines
    def test_across_a_list_of_modules_it_appears_once(self, engine):
        first, second = build(mlp), build(mlp, seed=1)
        second[2].weight = first[2].weight
        params = [first, second]

        def loss(params, x, y):
            return square_loss(params[0], x, y) + 3 * square_loss(params[1], x, y)

        with untouched(first, second):
            result = per_sample_grads(loss, params, VECTORS, engine=engine)
        assert [list(grads) for grads in result] == [TWO_LAYERS, ["0.weight", "0.bias", "2.bias"]]
        without = {name: p for name, p in trainable(second).items() if name != "2.weight"}.keys()
        close(
            result,
            autograd(
                loss,
                params,
                VECTORS,
                lambda p: [trainable(p[0]), {n: q for n, q in trainable(p[1]).items() if n in without}],
            ),
        )


def recurrent():
    """One layer used three times."""
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), layer)


def shared_loss(model, x, y):
    return square_loss(model, x, F.pad(y, (0, 1)))


class TestOneModuleInTwoPlaces:
    @engines
    def test_a_layer_used_three_times_appears_once(self, engine):
        module = build(recurrent)
        expected = autograd(shared_loss, module, VECTORS)
        result = per_sample_grads(shared_loss, module, VECTORS, engine=engine)
        assert list(result) == ["0.weight", "0.bias"]
        close(result, expected)

    @engines
    def test_and_comes_back(self, engine):
        module = build(recurrent)
        with untouched(module):
            per_sample_grads(shared_loss, module, VECTORS, engine=engine)

    @staticmethod
    def loss_of_both(params, x, y):
        return square_loss(params["online"], x, y) * square_loss(params["again"], x + 1, y)

    @engines
    def test_a_module_given_twice_appears_once(self, engine):
        module = build(mlp)
        params = {"online": module, "again": module}
        expected = autograd(self.loss_of_both, params, VECTORS, lambda p: trainable(p["online"]))
        result = per_sample_grads(self.loss_of_both, params, VECTORS, engine=engine)
        assert result["again"] == {}
        close(result["online"], expected)

    @engines
    def test_a_module_given_twice_comes_back(self, engine):
        module = build(mlp)
        with untouched(module):
            per_sample_grads(self.loss_of_both, {"online": module, "again": module}, VECTORS, engine=engine)


def actor_critic_loss(actor, critic, x, y):
    return square_loss(actor, x, y) * (1 + critic(x).sum() ** 2)


class TestTreesOfModules:
    @engines
    def test_a_list(self, engine):
        params = [build(mlp), build(frozen_first_layer, seed=1)]

        def loss(params, x, y):
            return actor_critic_loss(*params, x, y)

        with untouched(*params):
            result = per_sample_grads(loss, params, VECTORS, engine=engine)
        assert [list(grads) for grads in result] == [TWO_LAYERS, ["2.weight", "2.bias"]]
        close(result, autograd(loss, params, VECTORS, lambda p: [trainable(module) for module in p]))

    @engines
    def test_a_dict(self, engine):
        params = {"critic": build(mlp), "actor": build(mlp, seed=1)}

        def loss(params, x, y):
            return actor_critic_loss(params["actor"], params["critic"], x, y)

        result = per_sample_grads(loss, params, VECTORS, engine=engine)
        close(result, autograd(loss, params, VECTORS, lambda p: {key: trainable(module) for key, module in p.items()}))

    @engines
    @pytest.mark.parametrize(
        "order", [["net", "log_alpha"], ["log_alpha", "net"]], ids=["module-first", "tensor-first"]
    )
    @pytest.mark.parametrize("leaf", [lambda x: x, nn.Parameter], ids=["tensor", "parameter"])
    def test_modules_beside_tensors(self, leaf, order, engine):
        parts = {"net": build(mlp), "log_alpha": leaf(torch.tensor(-0.3, dtype=F64))}
        params = {key: parts[key] for key in order}

        def loss(params, x, y):
            return params["log_alpha"].exp() * square_loss(params["net"], x, y) - 2 * params["log_alpha"]

        def tensors_of(copied):
            copied["log_alpha"] = copied["log_alpha"].requires_grad_()
            return {key: p if key == "log_alpha" else trainable(p) for key, p in copied.items()}

        with untouched(params["net"]):
            result = per_sample_grads(loss, params, VECTORS, engine=engine)
        assert list(result) == order
        assert result["log_alpha"].shape == (4,)
        close(result, autograd(loss, params, VECTORS, tensors_of))

    @engines
    def test_a_dozen_modules_keep_their_places(self, engine):
        """The gradient of Σ k·wₖx is k·x for the k-th: names such as 1 and 11 must not mix."""
        params = [nn.Linear(1, 1, bias=False).double() for _ in range(12)]
        x = draw(3, 1)
        result = per_sample_grads(
            lambda p, x: sum(k * module(x) for k, module in enumerate(p)).squeeze(), params, x, engine=engine
        )
        close(result, [{"weight": k * x[:, None]} for k in range(12)])

    @engines
    def test_reductions_keep_the_structure(self, engine):
        params = [build(mlp), {"head": build(mlp, seed=1)}]

        def loss(params, x, y):
            return actor_critic_loss(params[0], params[1]["head"], x, y)

        rows = per_sample_grads(loss, params, VECTORS, engine=engine)
        mean = per_sample_grads(loss, params, VECTORS, Mean(), engine=engine, chunk_size=3)
        close(mean, pytree.tree_map(lambda x: x.mean(0), rows))

    @engines
    def test_modules_hidden_from_the_tree_are_named_as_a_cause(self, engine):
        class Hidden(nn.Module):
            def __init__(self):
                super().__init__()
                self.own = nn.Linear(3, 2)
                self.hidden = [mlp()]

            def forward(self, x):
                return self.hidden[0](x)

        with pytest.raises(LossError, match=r"plain Python list \(use nn.ModuleList\)"):
            per_sample_grads(lambda m, x, y: square_loss(m, x.float(), y.float()), Hidden(), VECTORS, engine=engine)


class TestBuffers:
    @engines
    def test_a_write_is_seen_within_a_sample_and_gone_after_it(self, engine):
        """Each of two forward passes counts a call: the second sees 2, for every sample of every chunk and engine."""
        module = build(lambda: RunningMean(in_place=True))

        def loss(module, x, y):
            before = module.calls.clone()
            module(x)
            return module(x).sum(), {"before": before, "after": module.calls.clone()}

        with untouched(module):
            aux = per_sample_grads(loss, module, VECTORS, Aux(), chunk_size=2, engine=engine)
        assert aux["before"].tolist() == [0] * 4
        assert aux["after"].tolist() == [2] * 4

    @engines
    def test_shared_by_two_parts_it_stays_shared(self, engine):
        module = nn.ModuleList([RunningMean(in_place=True), RunningMean(in_place=True)]).double()
        module[1].register_buffer("calls", module[0].calls)

        def loss(module, x, y):
            return module[0](x).sum() + 100 * module[1](x).sum()  # calls is 1 in the first and 2 in the second

        with untouched(module):
            result = per_sample_grads(loss, module, VECTORS, engine=engine)
        assert module[0].calls is module[1].calls
        close(result["0.linear.bias"], torch.ones(4, 2, dtype=F64))
        close(result["1.linear.bias"], torch.full((4, 2), 200.0, dtype=F64))

    @engines
    def test_one_that_starts_as_none_is_none_again(self, engine):
        module = build(OnDemand)
        expected = autograd(square_loss, module, VECTORS)
        result = per_sample_grads(square_loss, module, VECTORS, engine=engine)
        close(result, expected)
        assert module.cache is None


class TestDropout:
    """Dropout with p = 0.5 in front of a linear map of ones: the gradient is its mask, 0 or 2."""

    @staticmethod
    def grads(engine, randomness, seed=0, chunk_size=None):
        module = nn.Sequential(nn.Dropout(0.5), nn.Linear(40, 1, bias=False))
        torch.manual_seed(seed)
        options = {"randomness": randomness, "engine": engine, "chunk_size": chunk_size}
        with untouched(module):
            result = per_sample_grads(lambda m, x: m(x).sum(), module, torch.ones(6, 40), **options)
        masks = result["1.weight"].squeeze(1)
        assert set(masks.unique().tolist()) == {0, 2}
        return masks

    @engines
    def test_different_draws_a_mask_for_each_sample(self, engine):
        masks = self.grads(engine, "different")
        assert len({tuple(row) for row in masks.tolist()}) == 6
        assert torch.equal(masks, self.grads(engine, "different"))
        assert not torch.equal(masks, self.grads(engine, "different", seed=1))

    @engines
    @pytest.mark.parametrize("chunk_size", [None, 4])
    def test_same_draws_one_mask_for_all(self, chunk_size, engine):
        masks = self.grads(engine, "same", chunk_size=chunk_size)
        assert torch.equal(masks, masks[:1].expand(6, 40))
        assert not torch.equal(masks, self.grads(engine, "same", seed=1, chunk_size=chunk_size))

    def test_different_on_the_loop_engine_draws_what_a_loop_draws(self):
        torch.manual_seed(0)
        by_hand = torch.stack([F.dropout(torch.ones(40), 0.5) for _ in range(6)])
        assert torch.equal(self.grads("loop", "different"), by_hand)

    @engines
    def test_error_refuses_and_restores(self, engine):
        module = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 2)).double()
        with (
            pytest.raises(LossError, match=r"randomness='different'.*or put the module in eval mode"),
            untouched(module),
        ):
            per_sample_grads(square_loss, module, VECTORS, engine=engine)

    @engines
    def test_eval_draws_nothing(self, engine):
        module = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 2)).double().eval()
        close(per_sample_grads(square_loss, module, VECTORS, engine=engine), autograd(square_loss, module, VECTORS))


class MishapError(Exception):
    """Raised by losses below."""


def fails_first(model, x, y):
    del model, x, y
    raise MishapError


def fails_after_writing(model, x, y):
    model(x)
    raise MishapError(y)


def wrong_shape(model, x, y):
    return (model(x) - y) ** 2


def not_a_loss(model, x, y):
    return {"loss": square_loss(model, x, y)}


def wrong_dtype(model, x, y):
    return square_loss(model.linear, x.float(), y)


class TestErrors:
    @engines
    @pytest.mark.parametrize(
        ("loss_fn", "error", "match"),
        [
            (fails_first, MishapError, None),
            (fails_after_writing, MishapError, None),
            (wrong_shape, LossError, r"received shape \[2\]"),
            (not_a_loss, LossError, "received dict"),
            (wrong_dtype, LossError, "mixes dtypes"),
        ],
        ids=lambda x: getattr(x, "__name__", None),
    )
    def test_modules_come_back_and_are_not_left_locked(self, loss_fn, error, match, engine):
        module = build(lambda: RunningMean(in_place=True))
        expected = autograd(square_loss, module, VECTORS)
        with pytest.raises(error, match=match), untouched(module):
            per_sample_grads(loss_fn, module, VECTORS, engine=engine)
        results = []
        other = threading.Thread(
            target=lambda: results.append(per_sample_grads(square_loss, module, VECTORS, engine=engine)), daemon=True
        )
        other.start()
        other.join(timeout=20)
        assert results, "the module is still locked"
        close(results[0], expected)

    def test_what_vmap_refuses(self):
        module = build(lambda: RunningMean(in_place=False))

        def branches(model, x, y):
            return square_loss(model, x, y) if model(x).sum().item() > 0 else model(x).sum()

        with pytest.raises(LossError, match="engine='loop'"), untouched(module):
            per_sample_grads(branches, module, VECTORS)
        with untouched(module):
            result = per_sample_grads(branches, module, VECTORS, engine="loop")
        close(result, autograd(branches, module, VECTORS))

    @engines
    def test_batch_norm_in_train_mode(self, engine):
        module = build(batch_norm_in_eval).train()
        with pytest.raises(ArgumentError, match=r"'1' \(BatchNorm1d\) in train mode"), untouched(module):
            per_sample_grads(square_loss_of_rows, module, VECTORS, engine=engine)

    @engines
    def test_a_module_closed_over_instead_of_given(self, engine):
        closed, given = build(mlp), build(mlp)
        with pytest.raises(LossError, match="closed over"), untouched(closed, given):
            per_sample_grads(lambda _, x, y: square_loss(closed, x, y), given, VECTORS, engine=engine)


PAIR_OF_BATCHES = [(draw(4, 3, seed=10 + k), draw(4, 2, seed=20 + k)) for k in range(2)]


class TestThreads:
    @engines
    def test_four_threads_on_one_module(self, engine):
        """Each pauses between two uses of the module, so that without the lock they would see each other's tensors."""
        module = build(lambda: RunningMean(in_place=False))

        def loss(model, x, y):
            first = square_loss(model, x, y)
            time.sleep(0.003)
            return first + square_loss(model, x + 1, y)

        batches = [(draw(4, 3, seed=10 + k), draw(4, 2, seed=20 + k)) for k in range(4)]
        expected = [autograd(loss, module, batch) for batch in batches]
        results, start = [[] for _ in batches], threading.Barrier(4)

        def work(k):
            start.wait()
            for _ in range(3):
                results[k].append(per_sample_grads(loss, module, batches[k], engine=engine))

        with untouched(module):
            threads = [threading.Thread(target=work, args=(k,), daemon=True) for k in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(timeout=30)
        for k, found in enumerate(results):
            assert len(found) == 3
            for result in found:
                close(result, expected[k])

    @staticmethod
    def run_both(loss, params, batches, engine):
        """Differentiate each params with its batch, four times, in a thread of its own."""
        results, start = [[], []], threading.Barrier(2)

        def work(k):
            start.wait()
            for _ in range(4):
                results[k].append(per_sample_grads(loss, params[k], batches[k], engine=engine))

        threads = [threading.Thread(target=work, args=(k,), daemon=True) for k in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
        assert not any(thread.is_alive() for thread in threads), "deadlock"
        return results

    @engines
    def test_a_shared_part_is_locked_too(self, engine):
        """Two models with one trunk."""
        trunk = build(mlp)
        models = [nn.ModuleDict({"trunk": trunk, "head": nn.Linear(2, 2).double()}) for _ in range(2)]

        def loss(model, x, y):
            hidden = model["trunk"](x)
            time.sleep(0.003)
            return ((model["head"](hidden * model["trunk"](x + 1)) - y) ** 2).sum()

        expected = [autograd(loss, *pair) for pair in zip(models, PAIR_OF_BATCHES, strict=True)]
        with untouched(*models):
            results = self.run_both(loss, models, PAIR_OF_BATCHES, engine)
        for found, wanted in zip(results, expected, strict=True):
            assert len(found) == 4
            for result in found:
                close(result, wanted)

    @engines
    def test_lists_in_opposite_orders_do_not_deadlock(self, engine):
        first, second = build(mlp), build(mlp, seed=1)

        def loss(params, x, y):
            before = square_loss(params[0], x, y)
            time.sleep(0.003)
            return before * square_loss(params[1], x, y) + square_loss(params[0], x + 1, y)

        orders = [[first, second], [second, first]]
        expected = [
            autograd(loss, order, batch, lambda p: [trainable(module) for module in p])
            for order, batch in zip(orders, PAIR_OF_BATCHES, strict=True)
        ]
        with untouched(first, second):
            results = self.run_both(loss, orders, PAIR_OF_BATCHES, engine)
        for found, wanted in zip(results, expected, strict=True):
            assert len(found) == 4
            for result in found:
                close(result, wanted)

    def test_parameters_are_those_of_the_module_not_of_another_thread(self):
        """While one thread asks for the shapes of an empty batch, its fake tensors sit in the module."""
        module = build(mlp)
        inside, leave = threading.Event(), threading.Event()

        def slow_loss(model, x, y):
            inside.set()
            leave.wait(timeout=10)
            return square_loss(model, x, y)

        nothing = (torch.zeros(0, 3, dtype=F64), torch.zeros(0, 2, dtype=F64))
        other = threading.Thread(target=lambda: per_sample_grads(slow_loss, module, nothing, Sum()), daemon=True)
        other.start()
        assert inside.wait(timeout=10)
        threading.Timer(0.1, leave.set).start()
        try:
            result = per_sample_grads(square_loss, module, VECTORS)
        finally:
            leave.set()
            other.join(timeout=10)
        close(result, autograd(square_loss, module, VECTORS))


class TestNested:
    """A loss may itself ask for per-sample gradients of the module it was given, under no_grad: as constants."""

    @pytest.mark.parametrize(
        ("outer", "inner"),
        [
            ("eager", "eager"),
            ("loop", "eager"),
            ("loop", "loop"),
            pytest.param(
                "eager",
                "loop",
                marks=pytest.mark.xfail(
                    strict=True, raises=ArgumentError, reason="torch refuses requires_grad_() inside torch.func"
                ),
            ),
        ],
    )
    def test_on_the_same_module(self, outer, inner):
        module = build(mlp)

        def loss(model, x, y):
            with torch.no_grad():
                grads = per_sample_grads(square_loss, model, (x[None], y[None]), Sum(), engine=inner)
            return sum(grad.square().sum() for grad in grads.values()) * square_loss(model, x, y)

        plain = autograd(square_loss, module, VECTORS)
        squared = torch.cat([rows.flatten(1) for rows in plain.values()], dim=1).square().sum(1)
        with untouched(module):
            result = per_sample_grads(loss, module, VECTORS, engine=outer)
        close(result, {name: torch.einsum("b,b...->b...", squared, rows) for name, rows in plain.items()})

    @pytest.mark.parametrize("reduction", [Norm(), ClippedSum(1.0)], ids=lambda r: type(r).__name__)
    def test_norms_under_vmap(self, reduction):
        w, x = draw(3), draw(2, 4, 3, seed=1)

        def inner(w, x):
            return per_sample_grads(lambda w, x: torch.tanh(w @ x), w, x, reduction).sum()

        def loss(w, x):
            with torch.no_grad():
                norms = inner(w, x)
            return norms * w.sum()

        expected = torch.stack([inner(w, rows) * torch.ones(3, dtype=F64) for rows in x])
        close(per_sample_grads(loss, w, x), expected)


class TestLSTM:
    SEQUENCES = draw(3, 5, 2, seed=5), draw(3, 4, seed=6)

    @staticmethod
    def lstm():
        return nn.LSTM(2, 2, num_layers=2, batch_first=True, bidirectional=True)

    @staticmethod
    def loss(model, x, y):
        return ((model(x)[0][-1] - y) ** 2).sum()

    def test_loop_engine(self):
        module = build(self.lstm)
        with untouched(module):
            result = per_sample_grads(self.loss, module, self.SEQUENCES, engine="loop")
        assert len(result) == 16
        close(result, autograd(self.loss, module, self.SEQUENCES))

    def test_trains_on_afterwards(self):
        """An LSTM keeps a second list of its weights: it must not be left with the swapped ones."""
        module, never = build(self.lstm), build(self.lstm)
        set_grads(module, per_sample_grads(self.loss, module, self.SEQUENCES, Mean(), engine="loop"))
        update = autograd(self.loss, never, self.SEQUENCES)
        set_grads(never, {name: rows.mean(0) for name, rows in update.items()})
        for model in (module, never):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        x, y = (rows[0] for rows in self.SEQUENCES)
        saved = io.BytesIO()
        torch.save(module, saved)
        saved.seek(0)
        restored = torch.load(saved, weights_only=False)
        for model in (copy.deepcopy(module), restored, module, module.double()):
            close(self.loss(model, x, y), self.loss(never, x, y))

    def test_eager_engine(self):
        module = build(self.lstm)
        with untouched(module):
            result = per_sample_grads(self.loss, module, self.SEQUENCES)
        close(result, autograd(self.loss, module, self.SEQUENCES))


class TestSetGrads:
    @engines
    @pytest.mark.parametrize(
        "make", [mlp, frozen_first_layer, lambda: LoRA(nn.Linear(3, 2))], ids=["mlp", "frozen", "lora"]
    )
    @pytest.mark.parametrize(
        "optimizer",
        [lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), lambda p: torch.optim.Adam(p, lr=0.05)],
        ids=["SGD", "Adam"],
    )
    def test_five_steps_equal_those_of_backward(self, optimizer, make, engine):
        module, plain = build(make), build(make)
        steppers = [optimizer([p for p in model.parameters() if p.requires_grad]) for model in (module, plain)]
        for step in range(5):
            batch = draw(4, 3, seed=10 + step), draw(4, 2, seed=20 + step)
            set_grads(module, per_sample_grads(square_loss, module, batch, Mean(), engine=engine))
            plain.zero_grad()
            torch.stack([square_loss(plain, *sample) for sample in zip(*batch, strict=True)]).mean().backward()
            for stepper in steppers:
                stepper.step()
        close(module.state_dict(), plain.state_dict(), 1e-12)
        start = build(make)
        assert all(
            (p - q).abs().max() > 1e-3
            for p, q in zip(trainable(module).values(), trainable(start).values(), strict=True)
        )

    def test_tied_parameters_are_set_once_for_both_uses(self):
        module = build(Tied)
        update = per_sample_grads(cross_entropy, module, TOKENS, Mean())
        set_grads(module, update)
        close(module.head.weight.grad, update["embed.weight"])
        assert module.head.weight.grad is module.embed.weight.grad

    def test_frozen_parameters_are_left_alone_and_old_gradients_replaced(self):
        module = frozen_first_layer()
        module[2].bias.grad = torch.full((2,), 7.0)
        set_grads(module, {"2.weight": torch.ones(2, 4), "2.bias": torch.ones(2)})
        assert module[0].weight.grad is None
        assert torch.equal(module[2].bias.grad, torch.ones(2))

    def test_accumulated_gradients_are_those_of_all_batches(self):
        module, x, y = build(mlp), draw(8, 3), draw(8, 2)
        first, second = (
            per_sample_grads(square_loss, module, (x[rows], y[rows]), Sum()) for rows in (x[:, 0] > 0, x[:, 0] <= 0)
        )
        kept = {name: grad.clone() for name, grad in first.items()}
        set_grads(module, first, accumulate=True)  # where there are none, they are set
        set_grads(module, second, accumulate=True)
        expected = per_sample_grads(square_loss, module, (x, y), Sum())
        close({name: p.grad for name, p in module.named_parameters()}, expected, 1e-12)
        close(first, kept, 0)  # the results are the caller's
        set_grads(module, second)
        close({name: p.grad for name, p in module.named_parameters()}, second, 0)

    def test_converted_to_the_dtype_of_the_parameter(self):
        module = nn.Linear(3, 1, bias=False)
        set_grads(module, {"weight": torch.ones(1, 3, dtype=F64)})
        assert module.weight.grad.dtype == torch.float32

    def test_otherwise_not_copied_and_without_a_graph(self):
        module, update = nn.Linear(3, 1, bias=False), torch.ones(1, 3, requires_grad=True)
        set_grads(module, {"weight": update})
        assert module.weight.grad.data_ptr() == update.data_ptr()
        assert not module.weight.grad.requires_grad

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            (lambda g: g.pop("2.bias"), r"grads: .*missing \['2.bias'\], unknown or frozen \[\]. .*Mean\(\)"),
            (lambda g: g.update(other=torch.ones(1)), r"missing \[\], unknown or frozen \['other'\]"),
            (lambda g: g.update({"0.bias": torch.ones(4)}), r"missing \[\], unknown or frozen \['0.bias'\]"),
            (
                lambda g: g.update({"2.bias": torch.ones(5, 2)}),
                r"grads\['2.bias'\]: expected shape \[2\], .*received shape \[5, 2\], .*Reduce .*Mean\(\)",
            ),
        ],
        ids=["missing", "unknown", "frozen", "per-sample-shape"],
    )
    def test_what_does_not_fit_is_refused_and_nothing_is_set(self, change, match):
        module = frozen_first_layer()
        grads = {name: torch.ones_like(p).detach() for name, p in trainable(module).items()}
        change(grads)
        with pytest.raises(ArgumentError, match=match):
            set_grads(module, grads)
        assert all(p.grad is None for p in module.parameters())


class TakenOff(nn.Module):
    """Takes a parameter off itself while it runs, as wrappers that gather or recompute weights do."""

    def __init__(self, slots):
        super().__init__()
        self.__dict__["_parameters"] = slots()
        self.first = nn.Parameter(draw(3))
        self.last = nn.Parameter(draw(3, seed=1))

    def forward(self, x):
        return (self._parameters.pop("first") * self.last * x).sum()


@engines
@pytest.mark.parametrize("slots", [dict, OrderedDict])
def test_parameters_that_a_forward_pass_takes_off_are_back_in_their_order(slots, engine):
    model, x = TakenOff(slots), draw(4, 3)
    before = dict(model.named_parameters())
    grads = per_sample_grads(lambda model, x: model(x), model, x, engine=engine)
    torch.testing.assert_close(grads["first"], before["last"] * x)
    assert type(model._parameters) is slots
    assert [(name, id(param)) for name, param in model.named_parameters()] == [(n, id(p)) for n, p in before.items()]


class Keeping(nn.Linear):
    """Keeps tensors in lists and dicts."""

    def __init__(self):
        super().__init__(3, 1)
        self.losses, self.cache, self.pairs, self.sizes = [torch.zeros(())], {}, {}, []

    def forward(self, x):
        self.losses.append(x.sum())
        self.cache.setdefault("ones", x.new_ones(3) + 0 * self.weight[0])
        self.pairs["x"] = (x, self.weight)
        self.sizes.append(len(x))
        return super().forward(x * self.cache["ones"])


@pytest.mark.parametrize("engine", ["eager", "loop"])
def test_tensors_in_lists_and_dicts_are_gone_after_the_call(engine):
    model, x = Keeping(), torch.randn(4, 3)
    losses, kept = model.losses, list(model.losses)
    found = per_sample_grads(lambda model, x: model(x).sum(), model, x, engine=engine)
    assert torch.equal(found["weight"][:, 0], x)
    assert model.losses is losses
    assert len(losses) == 1
    assert losses[0] is kept[0]
    assert not model.cache
    assert not model.pairs
    assert model.sizes
    assert copy.deepcopy(model)(x[0]).shape == (1,)


class Listed(nn.Linear):
    """Reaches its parameters by a list and a dict, too."""

    def __init__(self):
        super().__init__(3, 1)
        self.decayed, self.named = [self.weight], {"bias": self.bias}

    def forward(self, x):
        return super().forward(x) + sum(p.square().sum() for p in self.decayed) + self.named["bias"].square()


@pytest.mark.parametrize("engine", ["eager", "loop", "traced"])
def test_parameters_in_lists_and_dicts_are_those_of_the_module(engine):
    model, x = Listed(), torch.randn(4, 3)
    found = per_sample_grads(lambda model, x: model(x).sum(), model, x, engine=engine)
    torch.testing.assert_close(found["weight"], x[:, None] + 2 * model.weight.detach())
    torch.testing.assert_close(found["bias"], 1 + 2 * model.bias.detach().expand(4, 1))
    assert model.decayed[0] is model.weight
    assert model.named["bias"] is model.bias


@pytest.mark.parametrize("engine", ["eager", "loop", "traced"])
def test_marks_of_parameters_and_buffers_are_seen(engine):
    model, x = nn.BatchNorm1d(3).eval(), torch.randn(4, 3)
    model.weight.decays, model.running_var.is_log = 2.0, True

    def loss(model, x):
        decay = sum(getattr(p, "decays", 0.0) * p.square().sum() for p in model.parameters())
        return decay + getattr(model.running_var, "is_log", False) * (model.bias @ x)

    found = per_sample_grads(loss, model, x, engine=engine)
    assert torch.equal(found["weight"], 4 * model.weight.detach().expand(4, 3))
    assert torch.equal(found["bias"], x)


@pytest.mark.parametrize("outputs", ["scalar", "rows"])
def test_a_part_that_the_loss_freezes_has_no_gradient_on_the_loop_engine(outputs):
    model, x = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)), draw(4, 3).float()

    def loss(model, x):
        model[1].requires_grad_(False)
        return model(x).sum() if outputs == "scalar" else model(x)

    found = per_sample_grads(loss, model, x, Sum(), engine="loop", outputs=outputs)
    assert not found["1.weight"].any()
    assert all(p.requires_grad for p in model.parameters())
    expected = model[1].weight.detach().sum(0) if outputs == "scalar" else model[1].weight.detach()
    torch.testing.assert_close(found["0.bias"], 4 * expected)


@engines
def test_tensors_are_no_parameters_of_modules_that_the_loss_closes_over(engine):
    def put_in(name):
        def loss(w, x):
            setattr(linear, name, w)
            return (w * linear(x)).sum()

        return loss

    linear = nn.Linear(3, 3).double()
    weight = linear.weight
    with pytest.raises(TypeError, match="cannot assign"):
        per_sample_grads(put_in("weight"), draw(3, 3), draw(4, 3), engine=engine)
    per_sample_grads(put_in("other"), draw(3, 3), draw(4, 3), engine=engine)
    assert linear.weight is weight
    assert [name for name, _ in linear.named_parameters()] == ["weight", "bias"]


def test_trained_parameters_are_those_that_torch_names():
    shared, model = nn.Linear(3, 3), Tied()
    model.first, model.second, model.nothing = nn.Sequential(shared, nn.Tanh()), nn.ModuleList([shared]), None
    model.register_parameter("no_bias", None)
    model.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    expected = {name: x for name, x in model.named_parameters() if x.requires_grad}
    found = trained_parameters(model)
    assert list(found) == list(expected)
    assert all(found[name] is x for name, x in expected.items())
    assert len(found) < len([name for name, _ in model.named_parameters(remove_duplicate=False)])


def weight_normed():
    return parametrizations.weight_norm(nn.Linear(3, 2)).double()


def used_twice(model, x):
    return model(x).sin().sum() + model(x).square().sum()


@pytest.mark.parametrize("is_module", [True, False])
@pytest.mark.parametrize("engine", [*ENGINES, "traced", "auto"])
def test_parametrizations_that_are_cached_around_a_call_are_refused(engine, is_module):
    """The cache would keep the weight of the first sample, or of an earlier call, as a constant."""
    model, x = weight_normed(), draw(4, 3)
    params = model if is_module else {name: p.detach() for name, p in model.named_parameters()}

    def loss(params, x):
        net = params if is_module else lambda x: torch.func.functional_call(model, params, (x,))
        return used_twice(net, x)

    refused = r"^loss_fn: expected parametrized tensors.*parametrize.cached\(\).*enter it inside of the loss"
    before = per_sample_grads(loss, params, x, engine=engine)
    for _ in range(2):
        with parametrize.cached(), pytest.raises(ArgumentError, match=refused):
            per_sample_grads(loss, params, x, engine=engine)
        close(per_sample_grads(loss, params, x, engine=engine), before)


@engines
def test_parametrizations_may_be_cached_inside_of_the_loss(engine):
    model, x = weight_normed(), draw(4, 3)

    def cached(model, x):
        with parametrize.cached():
            return used_twice(model, x)

    close(per_sample_grads(cached, model, x, engine=engine), per_sample_grads(used_twice, model, x, engine="loop"))
