"""Products and solutions of ``Curvature``, and EKFAC's moments, equal dense matrices, and curvlinops'."""

from __future__ import annotations

import warnings

import pytest
import torch
from oracle import assert_trees_close
from torch import nn
from torch.nn import functional as F

from persample import ArgumentError, Curvature, EigenMoment, KroneckerFactors, Stack, eigenbases, per_sample_grads
from persample.reductions import KroneckerFactor


class Net(nn.Module):
    """Products of all kinds: tables, convolutions of two groups, recurrences, and a weight used elementwise."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.convolution = nn.Conv1d(4, 4, 3, padding=1, groups=2)
        self.recurrent = nn.GRU(4, 3, batch_first=True)
        self.head = nn.Linear(3, 2)
        self.gate = nn.Parameter(torch.ones(4, 4))

    def forward(self, tokens):
        x = self.table(tokens)
        x = torch.tanh(self.convolution(x.mT).mT) * self.gate
        return self.head(self.recurrent(x)[0]).sum(1)


def loss(net, tokens):
    return net(tokens[None])[0].square().sum()


def make():
    torch.manual_seed(0)
    net = Net().double()
    tokens = torch.randint(7, (6, 4))
    vector = {name: torch.randn_like(p) for name, p in net.named_parameters()}
    return net, tokens, vector


def matrix(x):
    """One square matrix: of a vector the diagonal one, of groups the block-diagonal one."""
    return torch.block_diag(*x) if x.ndim == 3 else x.diag() if x.ndim == 1 else x


def blocks(factor):
    """F of one parameter."""
    if isinstance(factor, torch.Tensor):
        return factor.flatten().diag()
    if factor.S.ndim == 3:
        return torch.block_diag(*map(kron, factor.S, factor.A))
    return kron(matrix(factor.S), matrix(factor.A))


def kron(s, a):
    return torch.kron(s.contiguous(), a.contiguous())


def times(matrices, vector):
    return {name: (m @ vector[name].flatten()).view_as(vector[name]) for name, m in matrices.items()}


def damped_inverse(matrices, strength):
    return {name: torch.linalg.inv(m + strength * torch.eye(len(m)).double()) for name, m in matrices.items()}


@pytest.mark.parametrize("approximation", ["expand", "reduce"])
def test_products_and_solutions_equal_dense_ones(approximation):
    net, tokens, vector = make()
    factors = per_sample_grads(loss, net, tokens, KroneckerFactors(approximation, max_size=7))
    assert isinstance(factors["gate"], torch.Tensor)
    curvature, dense = Curvature(factors), {name: blocks(factor) for name, factor in factors.items()}
    assert_trees_close(curvature.matvec(vector), times(dense, vector), 1e-12)
    assert_trees_close(curvature.solve(vector, 0.1), times(damped_inverse(dense, 0.1), vector), 1e-10)
    assert_trees_close(curvature.solve(vector, torch.tensor(3)), times(damped_inverse(dense, 3), vector), 1e-10)


def test_the_heuristic_damps_both_factors():
    net, tokens, vector = make()
    factors = per_sample_grads(loss, net, tokens, KroneckerFactors())
    found = Curvature(factors).solve(vector, 0.25, heuristic=True)
    for name in ("head.weight", "head.bias", "recurrent.weight_ih_l0"):
        (a, s), eye = factors[name], lambda x: torch.eye(len(x)).double()
        ratio = (a.trace() / len(a) / (s.trace() / len(s))).sqrt()
        inverse = torch.kron(torch.linalg.inv(s + 0.5 / ratio * eye(s)), torch.linalg.inv(a + 0.5 * ratio * eye(a)))
        assert_trees_close(found[name].flatten(), inverse @ vector[name].flatten(), 1e-10)


def test_scipy_solves_with_it():
    from scipy.sparse import identity
    from scipy.sparse.linalg import aslinearoperator, cg

    net, tokens, vector = make()
    curvature = Curvature(per_sample_grads(loss, net, tokens, KroneckerFactors()))
    flat = torch.cat([x.flatten() for x in vector.values()]).numpy()
    expected = [torch.cat([x.flatten() for x in tree.values()]) for tree in (curvature.matvec(vector), vector)]
    assert_trees_close(torch.from_numpy(curvature.to_scipy() @ flat), expected[0], 1e-12)
    inverse = curvature.to_scipy(damping=0.1)
    system = curvature.to_scipy() + 0.1 * aslinearoperator(identity(len(flat)))
    assert_trees_close(torch.from_numpy(inverse @ (system @ flat)), expected[1], 1e-9)
    found, failed = cg(system, flat, M=inverse, rtol=1e-10, maxiter=3)  # preconditioned by its inverse
    assert not failed
    assert_trees_close(torch.from_numpy(found), torch.from_numpy(inverse @ flat), 1e-9)


@pytest.mark.parametrize("options", [{}, {"chunk_size": 4}, {"engine": "loop"}, {"engine": "traced"}], ids=str)
def test_moments_in_eigenbases_equal_those_of_a_loop(options):
    net, tokens, vector = make()
    factors = per_sample_grads(loss, net, tokens, KroneckerFactors())
    bases = eigenbases(factors)
    rows, moments = per_sample_grads(loss, net, tokens, (Stack(), EigenMoment(bases)), **options)
    rotations = {}
    for name, g in rows.items():
        leaf = bases[name]
        rotations[name] = torch.eye(g[0].numel()).double() if isinstance(leaf, torch.Tensor) else blocks(leaf)
        expected = (g.flatten(1) @ rotations[name]).square().mean(0)
        assert_trees_close(moments[name].flatten(), expected, 1e-10)
    dense = {name: u @ moments[name].flatten().diag() @ u.T for name, u in rotations.items()}
    curvature = Curvature(bases, moments)
    assert_trees_close(curvature.matvec(vector), times(dense, vector), 1e-10)
    assert_trees_close(curvature.solve(vector, 0.1), times(damped_inverse(dense, 0.1), vector), 1e-10)


def test_moments_are_the_best_diagonal():
    """No other diagonal between these eigenvectors is closer to F: that of the Kronecker factors is farther."""
    net, tokens, _ = make()
    factors = per_sample_grads(loss, net, tokens, KroneckerFactors())
    bases = eigenbases(factors)
    rows, moments = per_sample_grads(loss, net, tokens, (Stack(), EigenMoment(bases)))
    for name in ("head.weight", "recurrent.weight_hh_l0", "convolution.weight"):
        g, u = rows[name].flatten(1), blocks(bases[name])
        fisher = g.T @ g / len(g)
        ekfac = u @ moments[name].flatten().diag() @ u.T
        assert (fisher - ekfac).norm() < (fisher - blocks(factors[name])).norm()


def test_moments_of_several_outputs_add_up():
    net, tokens, _ = make()

    def outputs(net, tokens):
        return net(tokens[None])[0]

    options = {"outputs": "rows"}
    bases = eigenbases(per_sample_grads(outputs, net, tokens, KroneckerFactors(), **options))
    found = per_sample_grads(outputs, net, tokens, EigenMoment(bases), **options)
    each = [per_sample_grads(lambda *args, k=k: outputs(*args)[k], net, tokens, EigenMoment(bases)) for k in range(2)]
    assert_trees_close(found, {name: each[0][name] + each[1][name] for name in found}, 1e-10)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("approximation", ["expand", "reduce"])
def test_solutions_agree_with_curvlinops(approximation, exact):
    from curvlinops import EKFACLinearOperator, KFACInverseLinearOperator, KFACLinearOperator

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)).double()
    x, labels = torch.randn(8, 2, 6, 6, dtype=torch.float64), torch.randint(3, (8,))
    params = dict(model.named_parameters())
    vector = {name: torch.randn_like(p) for name, p in params.items()}
    flat = torch.cat([v.flatten() for v in vector.values()])

    def loss(model, x, label):
        return F.cross_entropy(model(x[None])[0], label)

    options = {"fisher_type": "empirical", "kfac_approx": approximation}
    damping = {"use_exact_damping": True} if exact else {"use_heuristic_damping": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = model, nn.CrossEntropyLoss(), [*params.values()], [(x, labels)]
        theirs = KFACLinearOperator(*given, **options)
        solution = KFACInverseLinearOperator(theirs, damping=0.01, **damping) @ flat
        ekfac = EKFACLinearOperator(*given, **options) @ flat
    factors = per_sample_grads(loss, model, (x, labels), KroneckerFactors(approximation))
    found = Curvature(factors).solve(vector, 0.01, heuristic=not exact)
    weights = [name for name in params if exact or name.endswith("weight")]  # theirs damps a bias by √λ
    expected = dict(zip(params, solution.detach().split([p.numel() for p in params.values()]), strict=True))
    for name in weights:
        assert_trees_close(found[name].flatten(), expected[name], 1e-8)
    if approximation == "expand":  # reduce: patches lie in the null space of A, where eigenvectors are arbitrary
        bases = eigenbases(factors)
        moments = per_sample_grads(loss, model, (x, labels), EigenMoment(bases))
        product = Curvature(bases, moments).matvec(vector)
        assert_trees_close(torch.cat([v.flatten() for v in product.values()]), ekfac.detach(), 1e-8)


def test_bad_arguments():
    factors = {"w": KroneckerFactor(torch.eye(3), torch.eye(2))}
    curvature, v = Curvature(factors), {"w": torch.ones(2, 3)}
    for damping in (0, -1.0, torch.inf, True, "a"):
        with pytest.raises(ArgumentError, match="damping: expected a finite number > 0"):
            curvature.solve(v, damping)
    with pytest.raises(ArgumentError, match="heuristic: expected False with moments"):
        Curvature(factors, v).solve(v, 1.0, heuristic=True)
    with pytest.raises(ArgumentError, match="v: expected the structure"):
        curvature.matvec({"u": v["w"]})
    with pytest.raises(
        ArgumentError, match=r"v: expected a parameter whose matrix is \[2, 3\], received shape \[3, 3\]"
    ):
        curvature.matvec({"w": torch.ones(3, 3)})
    with pytest.raises(ArgumentError, match=r"v: .* \[2, 3\], received shape \[3, 2\]"):
        curvature.matvec({"w": torch.ones(3, 2)})
    with pytest.raises(ArgumentError, match=r"moments: .* \[2, 3\], received shape \[3, 2\]"):
        Curvature(factors, {"w": torch.ones(3, 2)}).matvec(v)
    with pytest.raises(ArgumentError, match="moments: expected the structure"):
        Curvature(factors, v["w"]).matvec(v)
    with pytest.raises(ArgumentError, match="bases: expected the structure"):
        per_sample_grads(lambda p, x: (p["u"] @ x).sum(), {"u": v["w"]}, torch.ones(4, 3), EigenMoment(factors))
    with pytest.raises(ArgumentError, match=r"bases\['w'\]: expected .* shape \[2, 2\], .* \[3, 3\] and \[2, 2\]"):
        per_sample_grads(
            lambda p, x: (p["w"] @ x).sum(), {"w": torch.ones(2, 2)}, torch.ones(4, 2), EigenMoment(factors)
        )
    with pytest.raises(ArgumentError, match=r"bases\['w'\]: expected .* shape \[3, 2\], .* \[3, 3\] and \[2, 2\]"):
        per_sample_grads(
            lambda p, x: (p["w"] @ x).sum(), {"w": torch.ones(3, 2)}, torch.ones(4, 2), EigenMoment(factors)
        )


def test_a_complex_parameter_keeps_its_imaginary_part():
    w, x = torch.randn(3, dtype=torch.complex128), torch.randn(5, 3, dtype=torch.float64)

    def loss(w, x):
        return (w * x).sum().abs() + w.imag.sum()

    factors = per_sample_grads(loss, w, x, KroneckerFactors())
    bases = eigenbases(factors)
    curvature = Curvature(bases, per_sample_grads(loss, w, x, EigenMoment(bases)))
    assert_trees_close(curvature.matvec(w), Curvature(factors).matvec(w), 1e-12)


def test_numbers_have_moments():
    """A parameter without axes is a matrix of one element."""
    w, x = torch.tensor(2.0, dtype=torch.float64), torch.randn(5, dtype=torch.float64)

    def loss(w, x):
        return w.square() * x

    bases = eigenbases(per_sample_grads(loss, w, x, KroneckerFactors()))
    moment = per_sample_grads(loss, w, x, EigenMoment(bases))
    assert_trees_close(moment, (4 * x).square().mean(), 1e-12)
    assert_trees_close(Curvature(bases, moment).solve(w, 0.5), w / (moment + 0.5), 1e-12)


def test_products_are_not_taken_in_the_dtype_of_autocast():
    net, tokens, _ = make()
    net = net.float()
    factors = per_sample_grads(loss, net, tokens, KroneckerFactors())
    vector = {name: torch.randn_like(p) for name, p in net.named_parameters()}
    expected = Curvature(factors).matvec(vector), Curvature(factors).solve(vector, 0.1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = Curvature(factors).matvec(vector), Curvature(factors).solve(vector, 0.1)
    assert_trees_close(found, expected, 1e-6)


def test_frozen_and_nested_parameters():
    """What is trained decides the tree; each factor is the one it has among all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    batch = torch.randn(9, 5).double(), torch.randint(3, (9,))
    classify = lambda model, x, y: F.cross_entropy(model(x), y)
    full = per_sample_grads(classify, model, batch, KroneckerFactors())
    model[0].bias.requires_grad_(False)
    model[2].weight.requires_grad_(False)
    frozen = per_sample_grads(classify, model, batch, KroneckerFactors())
    assert_trees_close(frozen, {name: full[name] for name in ("0.weight", "2.bias")}, 1e-12)
    nested = {"first": [model[0].weight, (model[0].bias,)], "head": {"w": model[2].weight, "b": model[2].bias}}

    def functional(p, x, y):
        hidden = torch.tanh(F.linear(x, p["first"][0], p["first"][1][0]))
        return F.cross_entropy(F.linear(hidden, p["head"]["w"], p["head"]["b"]), y)

    factors = per_sample_grads(functional, nested, batch, KroneckerFactors())
    expected = {"first": [full["0.weight"], (full["0.bias"],)], "head": {"w": full["2.weight"], "b": full["2.bias"]}}
    assert_trees_close(factors, expected, 1e-12)
    bases = eigenbases(factors)
    curvature = Curvature(bases, per_sample_grads(functional, nested, batch, EigenMoment(bases)))
    solved = curvature.solve(curvature.matvec(nested), 1e-12)
    assert solved["first"][1][0].shape == (4,)
    assert_trees_close(curvature.matvec(solved), curvature.matvec(nested), 1e-8)
