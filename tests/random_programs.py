"""Random losses, parameters and batches, each from one seed: lines of torch, and transforms of functions inside.

A program is Python source: it prints as it runs. Every line is tried on the first sample when it is written, so that
operands have the right shapes; lines that fail, or blow up, are dropped.
"""

from __future__ import annotations

import itertools
import linecache
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from random_inputs import (
    INDEX_SHAPES,
    PARAM_SHAPES,
    SAMPLE_SHAPES,
    Leaf,
    Net,
    Pair,
    arrange,
    batched,
    draw_shape,
    filler,
    spread_out,
)
from random_scope import Scope, Statement, alive, indented
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from persample import stop_gradient

LINEAR = torch.nn.utils.skip_init(torch.nn.Linear, 2, 3)  # a layer that no parameters belong to
NAMES = {"LINEAR": LINEAR, "torch": torch, "F": F, "stop_gradient": stop_gradient}


@dataclass(frozen=True)
class Program:
    """A loss as source, its inputs, and how to call it.

    ``params`` and ``batch`` are trees of ``Leaf`` (and of modules and constants).
    """

    signature: str
    bindings: tuple[Statement, ...]
    statements: tuple[Statement, ...]
    terms: tuple[str, ...]
    aux: str | None
    constants: dict[str, torch.Tensor]
    params: Any
    batch: Any
    size: int
    keep_batch_dim: bool = False
    per_sample_params: bool = False
    seed: int = 0
    rtol: float = 1e-9

    @property
    def source(self) -> str:
        total = " + ".join(self.terms)
        body = "\n".join([*(s.code for s in (*self.bindings, *self.statements)), f"total = {total}"])
        last = f"return total, {self.aux}" if self.aux else "return total"
        inner = f"def loss(params, {self.signature}):\n{indented(body)}\n    {last}\n"
        if not self.constants:
            return inner
        return f"def make({', '.join(self.constants)}):\n{indented(inner)}\n    return loss\n"

    def loss(self) -> Callable[..., Any]:
        """Compile the source; constants are closed over."""
        file = f"<program {self.seed}>"
        linecache.cache[file] = (len(self.source), None, self.source.splitlines(keepends=True), file)
        space = {**NAMES, "__name__": __name__}  # Dynamo looks its functions up there
        exec(compile(self.source, file, "exec"), space)
        return space["make"](**self.constants) if self.constants else space["loss"]

    def without_dead_code(self) -> Program:
        """Drop what nothing uses."""
        kept = alive((*self.bindings, *self.statements), " ".join([*self.terms, self.aux or ""]))
        text = " ".join(statement.code for statement in kept) + " ".join([*self.terms, self.aux or ""])
        constants = {name: x for name, x in self.constants.items() if re.search(rf"\b{name}\b", text)}
        bound = {id(s) for s in self.bindings}
        bindings, rest = (tuple(s for s in kept if (id(s) in bound) is own) for own in (True, False))
        return replace(self, bindings=bindings, statements=rest, constants=constants)

    def __str__(self) -> str:
        def told(x):
            if isinstance(x, Leaf):
                return f"{x.value.dtype} {list(x.value.shape)} dim={x.dim}"
            return repr(x).replace("\n", "")

        inputs = "\n".join(
            f"# {name}: {pytree.tree_map(told, tree)}"
            for name, tree in (("params", self.params), ("batch", self.batch))
        )
        closed = "".join(f"\n# {name} = {x.tolist()}" for name, x in self.constants.items())
        called = f"# seed {self.seed}, B = {self.size}, keep_batch_dim={self.keep_batch_dim}"
        return f"{called}\n{inputs}{closed}\n{self.source}"


SIZES = [1, 2, 2, 5, 5, 7, 5, 2]


def draw_tensors(rng, generator, dtype, size):
    """Leaves of parameters and of the batch, and the dtypes they are of."""
    own = rng.random() < 0.07
    other = {0: torch.complex128 if dtype == torch.float64 else torch.complex64, 1: torch.float32}.get(
        rng.randrange(14)
    )
    params = []
    for _ in range(rng.choice([1, 2, 2, 3, 3, 4, 5])):
        fill = filler(rng, generator, other if other and rng.random() < 0.5 else dtype, 0.7)
        shape = draw_shape(rng, PARAM_SHAPES)
        params.append(batched(rng, size, shape, fill) if own else Leaf(spread_out(rng, fill(*shape))))
    kinds = [(dtype, SAMPLE_SHAPES)] + [
        rng.choice([(dtype, SAMPLE_SHAPES)] * 2 + [(torch.long, INDEX_SHAPES), (torch.bool, INDEX_SHAPES)])
        for _ in range(rng.randint(0, 3))
    ]
    leaves = []
    for kind, shapes in kinds:
        fill, shape = filler(rng, generator, kind), draw_shape(rng, shapes)
        shared = leaves and rng.random() < 0.12
        leaves.append(Leaf(spread_out(rng, fill(*shape))) if shared else batched(rng, size, shape, fill))
    return params, leaves, own


def draw_program(seed: int, *, small: bool = False) -> Program | None:
    """Return the program of a seed, or None where nothing that uses a parameter came of it."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    dtype = torch.float32 if rng.random() < 0.08 else torch.float64
    size = 0 if rng.random() < 0.02 else rng.choice(SIZES)
    params, leaves, own = draw_tensors(rng, generator, dtype, max(size, 1))
    keep = rng.random() < 0.1
    scope = Scope(rng, dict(NAMES), [], set(), itertools.count(), {}, dtype)
    bindings: list[Statement] = []

    def bind(letter, access, leaf, *, batch):
        name = f"{letter}{next(scope.ids)}"
        value = leaf.row(0) if batch else leaf.row(0).detach().clone().requires_grad_()
        scope.space[name] = value.unsqueeze(0) if batch and keep and leaf.dim is not None else value
        bindings.append(Statement(name, f"{name} = {access}"))
        if letter in "wx" and value.numel():
            scope.tensors.append(name)
        if leaf.dim is not None:
            scope.varying.add(name)
        return name

    module = None if own or rng.random() > 0.2 else Net(rng, dtype)
    alone = module is not None and rng.random() < 0.6
    if not alone:
        places, reached = arrange(rng, list(range(len(params))), "params" if module is None else "params['rest']")
        tree = pytree.tree_map(lambda i: params[i], places)
        needs = {bind("w", reached[i], leaf, batch=False) for i, leaf in enumerate(params)}
    if module is not None:
        tree = module if alone else {"net": module, "rest": tree}
        access = "params" if alone else "params['net']"
        scope.space["params"] = module if alone else {"net": module}
        scope.calls = [access + "." + name + call for name, call in module.calls.items()]
        inner = {name: p.detach() for name, p in module.named_parameters() if "parametrizations" not in name}
        own_names = {
            bind("w", re.sub(r"\.(\d+)", r"[\1]", f"{access}.{name}"), Leaf(p), batch=False)
            for name, p in inner.items()
        }
        needs = own_names if alone else needs | own_names
    kinds = (dict, Pair, tuple, list, tuple)
    if rng.random() < 0.6:
        order = list(range(len(leaves)))
        split, reached = tuple(order), {i: f"a{i}" for i in order}
        signature = ", ".join(f"a{i}" for i in order)
    else:
        split, reached = arrange(rng, list(range(len(leaves))), "batch", kinds=kinds[:2])
        signature = "batch"
    letters = {torch.long: "n", torch.bool: "m"}
    for i, leaf in enumerate(leaves):
        bind(letters.get(leaf.value.dtype, "x"), reached[i], leaf, batch=True)
    batch = pytree.tree_map(lambda i: leaves[i], split)
    used = {n for n in needs if n in scope.tensors}
    for _ in range(rng.randint(1, 3) if small else rng.randint(2, 7)):
        scope.statement(0.15)
    terms = scope.finish(_depending(scope, used))
    if not terms or any(s.code.startswith("total") for s in scope.statements):
        return None
    names = [n for n in scope.tensors if n[0] == "v"]
    aux = f"{{'aux': {rng.choice(names)}}}" if names and rng.random() < 0.25 else None
    loose = dtype == torch.float32 or any(
        isinstance(x, Leaf) and x.value.dtype in {torch.float32, torch.complex64} for x in pytree.tree_leaves(tree)
    )
    made = Program(
        signature,
        tuple(bindings),
        tuple(scope.statements),
        terms,
        aux,
        dict(scope.constants),
        tree,
        batch,
        size,
        keep,
        own,
        seed,
        1e-4 if loose else 1e-9,
    )
    return made.without_dead_code()


def _depending(scope, names):
    depends = set(names)
    for statement in scope.statements:
        if any(statement.uses(n) for n in depends) or (scope.calls and "params" in statement.code):
            depends.add(statement.name)
    return depends
