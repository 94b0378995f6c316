"""Random programs on an engine, beside plain autograd and formulas written out: do they agree?"""

from __future__ import annotations

import contextlib
import copy
import random
import re
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from dense_reductions import Dense, draw_reductions, of_rows
from random_inputs import Leaf, differentiable, is_module, result_tree
from random_programs import Program, draw_program
from torch.nn.utils import stateless
from torch.utils import _pytree as pytree

import persample as ps


@dataclass(frozen=True)
class Call:
    """How the engine is called: what for, and with which options."""

    reduce: Any
    options: dict[str, Any]
    numpy: bool = False
    again: bool = False


@dataclass(frozen=True)
class Outcome:
    """What came of a seed."""

    seed: int
    kind: str  # "agrees", "thrown away", "refused", "finding"
    why: str = ""
    program: str = ""


def leaf_map(fn, tree):
    return pytree.tree_map(lambda x: fn(x) if isinstance(x, Leaf) else x, tree, is_leaf=is_module)


def unpacked(batch):
    return batch if type(batch) in {tuple, list} else (batch,)


# Plain autograd.


def oracle_row(program: Program, loss: Callable[..., Any], i: int, change: Callable[[Any], Any]) -> tuple[Any, ...]:
    params, leaves = differentiable(leaf_map(lambda leaf: leaf.row(i), program.params), change)

    def given(leaf):
        x = leaf.row(i)
        x = change(x.clone()) if x.is_floating_point() else x
        return x.unsqueeze(0) if program.keep_batch_dim and leaf.dim is not None else x

    returned = loss(params, *unpacked(leaf_map(given, program.batch)))
    total, aux = returned if isinstance(returned, tuple) else (returned, ())
    grads = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    return [g.detach() for g in grads], total.detach(), pytree.tree_map(torch.Tensor.detach, aux)


def oracle(program: Program, change: Callable[[Any], Any] = lambda x: x) -> tuple[list[Any], Any, Any]:
    loss = program.loss()
    rows = [oracle_row(program, loss, i, change) for i in range(program.size)]
    if not rows:
        likes = pytree.tree_leaves(result_tree(leaf_map(lambda leaf: leaf.row(0), program.params)))
        return [x.detach().new_zeros(0, *x.shape) for x in likes], torch.zeros(0, dtype=torch.float64), ()
    grads, losses, aux = zip(*rows, strict=True)
    return (
        [torch.stack(column) for column in zip(*grads, strict=True)],
        torch.stack(losses),
        pytree.tree_map(lambda *x: torch.stack(x), *aux),
    )


def row_sizes(grads):
    return Dense(grads, grads[0].new_zeros(len(grads[0])).real, (), None).row_sizes()


def is_ill_conditioned(program: Program, grads: list[Any]) -> bool:
    generator = torch.Generator().manual_seed(program.seed)
    step, most = (1e-12, 1e-8) if program.rtol < 1e-6 else (1e-6, 1e-4)

    def change(x):
        if not x.is_floating_point() and not x.is_complex():
            return x
        return x * (1 + step * torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.real.dtype))

    moved = oracle(program, change)[0]
    off = row_sizes([a - b for a, b in zip(moved, grads, strict=True)])
    return bool((off > most * row_sizes(grads)).any()) or is_lost_in_rounding(program, grads)


def is_lost_in_rounding(program: Program, grads: list[Any]) -> bool:
    """Whether plain autograd itself, in the program's own precision, is far from what it says in float64."""
    if program.rtol < 1e-6:
        return False

    def widened(x):
        return x.to(torch.promote_types(x.dtype, torch.float64)) if x.is_floating_point() or x.is_complex() else x

    try:
        precise = oracle(program, widened)[0]
    except RuntimeError:  # a constant of float32 that the program multiplies with
        return False
    off = row_sizes([a - b for a, b in zip(precise, grads, strict=True)])
    return bool((off > program.rtol / 10 * row_sizes(grads)).any())


# The call.


def draw_weights(rng, size, averages):
    kind = rng.choice(["none", "none", "bool", "counts", "floats", "signed"])
    if kind == "none" or not size:
        return None
    w = torch.tensor([rng.choice([0.0, 1.0, 1.0, 2.0, 0.5, 1.3]) for _ in range(size)], dtype=torch.float64)
    w = {"bool": (w > 0).double(), "counts": w.round(), "signed": w * (1 if averages else -1) + 0.1}.get(kind, w)
    if averages and w.sum() <= 1.2:
        return None
    return w.bool() if kind == "bool" else w


def is_of_one_dtype(program):
    """Whether arrays, which take the dtype of the first parameter, are what the tensors were."""
    dtypes = {x.value.dtype for x in pytree.tree_leaves((program.params, program.batch)) if isinstance(x, Leaf)}
    return len({x for x in dtypes if x.is_floating_point or x.is_complex}) == 1


def draw_call(program: Program) -> Call:
    rng, generator = random.Random(program.seed + 1), torch.Generator().manual_seed(program.seed)
    row = result_tree(leaf_map(lambda leaf: leaf.row(0), program.params))
    wanted = draw_reductions(rng, generator, row, program.size, has_aux=program.aux is not None and program.size > 0)
    wanted = [r for r in wanted if program.size > r.needs_more_than or not r.divides_by_weight] or [ps.Stack()]
    weights = draw_weights(rng, program.size, any(r.divides_by_weight for r in wanted))
    reduce = rng.choice([tuple, lambda x: {str(i): r for i, r in enumerate(x)}, list])(wanted)
    options = {"randomness": rng.choice(["error", "error", "same", "different"])}
    if weights is not None:
        options["weights"] = weights
    if rng.random() < 0.3:
        options["chunk_size"] = rng.choice([1, 2, 3, 10])
    return Call(
        wanted[0] if len(wanted) == 1 else reduce,
        options,
        rng.random() < 0.05 and is_of_one_dtype(program),
        rng.random() < 0.3,
    )


def arguments(program: Program, places: Any = None) -> dict[str, Any]:
    places = range(program.size) if places is None else places
    dims = [leaf_map(lambda leaf: leaf.dim, tree) for tree in (program.params, program.batch)]
    params = leaf_map(lambda leaf: leaf.rows(places) if leaf.dim is not None else leaf.value, program.params)
    batch = leaf_map(lambda leaf: leaf.rows(places), program.batch)
    if places == range(program.size) and program.size:
        params, batch = (leaf_map(lambda leaf: leaf.value, tree) for tree in (program.params, program.batch))
    simple = all(dim == 0 for dim in pytree.tree_leaves(dims[1]))
    in_dims = dims[0] if program.per_sample_params else None, 0 if simple else dims[1]
    return {"params": params, "batch": batch, "in_dims": in_dims, "keep_batch_dim": program.keep_batch_dim}


def disagreement(result: Any, wanted: Any, dense: Dense, rtol: float) -> str:
    """What is wrong with a result, or nothing."""
    reductions = (
        [wanted]
        if isinstance(wanted, ps.reductions.Reduction)
        else list(wanted.values() if isinstance(wanted, dict) else wanted)
    )
    results = (
        [result]
        if isinstance(wanted, ps.reductions.Reduction)
        else list(result.values() if isinstance(result, dict) else result)
    )
    for reduction, found in zip(reductions, results, strict=True):
        for place, (a, (e, size)) in enumerate(zip(pytree.tree_leaves(found), dense.answer(reduction), strict=True)):
            if a.shape != e.shape:
                return f"{reduction}[{place}]: shape {list(a.shape)}, not {list(e.shape)}"
            off = (a.to(e.dtype) - e).abs()
            bound = rtol * torch.as_tensor(size, dtype=torch.float64) + rtol * 1e-6
            if not bool(((off <= bound) | ~e.abs().isfinite()).all()):
                apart = f"off by {float(off.max()):.3g} beside {float(e.abs().max()):.3g}"
                return f"{reduction}[{place}]: {apart}: {a.tolist()} not {e.tolist()}"[:600]
    return ""


def chosen(dense: tuple[Any, ...], places: Any, weights: Any) -> Dense:
    index = torch.as_tensor(list(places), dtype=torch.long)
    grads, losses, aux = dense
    return Dense([g[index] for g in grads], losses[index], pytree.tree_map(lambda x: x[index], aux), weights)


def plain_vmap(program: Program) -> list[Any]:
    """The gradients that torch.func itself makes of the program; raises if it can make nothing of it."""
    call, loss = arguments(program), program.loss()
    dims = leaf_map(lambda leaf: leaf.dim, program.batch)
    whole = copy.deepcopy(call["params"])
    modules = [(x, place) for place, x in enumerate(pytree.tree_leaves(whole, is_leaf=is_module)) if is_module(x)]

    def one(params, batch):
        if program.keep_batch_dim:
            batch = pytree.tree_map(lambda x, dim: x if dim is None else x.unsqueeze(0), batch, dims)
        if not modules:
            given, context = params, contextlib.nullcontext()
        else:
            net = modules[0][0]
            named = params if whole is net else params["net"]
            given = net if whole is net else {**params, "net": net}
            context = stateless._reparametrize_module(net, named)
        with context:
            returned = loss(given, *unpacked(batch))
        return returned[0] if isinstance(returned, tuple) else returned

    grads = torch.func.vmap(torch.func.grad(one), in_dims=call["in_dims"], randomness="different")
    return pytree.tree_leaves(grads(pytree.tree_map(torch.Tensor.detach, result_tree(call["params"])), call["batch"]))


def torch_too(program: Program, grads: list[Any]) -> str:
    """Whether torch.func without this library errs in the same way."""
    try:
        found = plain_vmap(program)
    except Exception as error:  # noqa: BLE001
        return f"[vmap raises {first_line(error)[:80]}] "
    off = row_sizes([a - b for a, b in zip(found, grads, strict=True)])
    return "[vmap wrong too] " if bool((off > program.rtol * row_sizes(grads) + 1e-13).any()) else "[vmap right] "


# One seed.

# torch 2.13 errs itself: derivatives of forward derivatives of torch.linalg.solve lack a term (pytorch/pytorch#196695).
# So do derivatives of derivatives of layer, instance and batch norm whose weight is differentiated, too: finite
# differences show it, and our rules are right.
WRONG_IN_TORCH = re.compile(
    r"linalg\.solve\(.*(jacfwd|hessian|jvp)|(layer|instance|batch)_norm\(.*(jacfwd|jacrev|hessian|jvp|vjp|grad)",
    re.DOTALL,
)
# Engines that capture refuse these: torch.cov compares values in C++ on its way, and the shapes of the results of
# torch.linalg.lstsq and torch.combinations depend on values, as far as torch can tell.
UNCAPTURABLE = re.compile(r"torch\.(cov|corrcoef|linalg\.lstsq|combinations)\(")
CAPTURING = {"traced", "compiled"}


def examine(seed: int, engine: str = "eager", *, small: bool = False) -> Outcome:
    """Draw the program of a seed and run it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", ps.FallbackWarning)
        program = draw_program(seed, small=small)
        return Outcome(seed, "thrown away", "empty") if program is None else judged(program, draw_call(program), engine)


def judged(program: Program, call: Call, engine: str) -> Outcome:
    def said(kind, why=""):
        return Outcome(program.seed, kind, why, f"{program}\n# {call}" if kind in {"finding", "refused"} else "")

    if WRONG_IN_TORCH.search(program.source):
        return said("thrown away", "wrong in torch")
    if engine in CAPTURING and UNCAPTURABLE.search(program.source):
        return said("thrown away", "not captured by Dynamo")
    try:
        dense = oracle(program)
    except Exception as error:  # noqa: BLE001 - whatever a random program does
        return said("thrown away", f"autograd: {first_line(error)}")
    if not all(bool(g.abs().isfinite().all()) for g in (*dense[0], dense[1])):
        return said("thrown away", "not finite")
    if program.size and is_ill_conditioned(program, dense[0]):
        return said("thrown away", "ill-conditioned")
    if program.size and all(not bool(g.any()) for g in dense[0]):
        return said("thrown away", "depends on no parameter")
    loss, options = program.loss(), call.options
    expected = chosen(dense, range(program.size), options.get("weights"))
    try:
        truth = ps.per_sample_grads(loss, reduce=call.reduce, engine="loop", **arguments(program), **options)
    except Exception as error:  # noqa: BLE001
        return said("thrown away", f"loop: {first_line(error)}")
    if wrong := disagreement(truth, call.reduce, expected, program.rtol):
        return said("finding", f"loop: {wrong}")
    try:
        wrong = runs(program, call, engine, loss, dense, expected)
    except Exception as error:  # noqa: BLE001
        return refusal(program, error, said)
    return said("finding", torch_too(program, dense[0]) + wrong) if wrong else said("agrees")


def runs(program: Program, call: Call, engine: str, loss: Any, dense: Any, expected: Dense) -> str:
    """What is wrong with one call, or with calls after it with other rows."""
    given = arguments(program)
    if call.numpy:
        given["batch"] = pytree.tree_map(lambda x: x.numpy() if isinstance(x, torch.Tensor) else x, given["batch"])
    result = ps.per_sample_grads(loss, reduce=call.reduce, engine=engine, **given, **call.options)
    wrong = disagreement(result, call.reduce, expected, program.rtol)
    if wrong or not program.size or not (call.again or engine in CAPTURING):
        return wrong
    rng = random.Random(program.seed + 2)
    weights = call.options.get("weights")
    for count in (program.size, program.size + 2):
        places = rng.sample(range(program.size), program.size) + [
            rng.randrange(program.size) for _ in range(count - program.size)
        ]
        options = dict(call.options)
        if weights is not None:
            options["weights"] = weights[places]
        out = result if count == program.size and rng.random() < 0.5 else None
        reduce = pytree.tree_map(lambda r, places=places: of_rows(r, places), call.reduce)
        again = ps.per_sample_grads(
            loss, reduce=reduce, engine=engine, out=out, **arguments(program, places), **options
        )
        wrong = disagreement(again, reduce, chosen(dense, places, options.get("weights")), program.rtol)
        if wrong:
            return f"called again with rows {places}, out={out is not None}: {wrong}"
    return ""


def refusal(program: Program, error: Exception, said: Any) -> Outcome:
    ours = isinstance(error, ps.LossError | ps.ArgumentError)
    try:
        plain_vmap(program)
    except Exception as plain:  # noqa: BLE001
        if ours or (type(error), first_line(error)) == (type(plain), first_line(plain)):  # torch's own, word for word
            return said("refused", category(error))
        return said("finding", f"raises (as vmap does: {first_line(plain)[:60]}) {told(error)}")
    return said("finding", f"raises, vmap does not: {told(error)}")


def told(error):
    frames = traceback.extract_tb(error.__traceback__)
    where = [f"{f.filename.split('/')[-1]}:{f.lineno}" for f in frames][-4:]
    return f"{type(error).__name__}: {first_line(error)} at {' '.join(where)}"


def first_line(error):
    return f"{error}".split("\n")[0][:300]


def category(error):
    """The message without names and places."""
    text = re.sub(r"`.*?`|\(<program.*?\)|, in \w+", "", f"{error}".replace("\n", " "))
    said = re.search(r"torch said: (.{0,60})", text)
    return re.sub(r"\d+", "#", text[:60] + (" … " + said[1] if said else ""))
