"""The body of a random function while it is written: every line is tried on the first sample as it is added."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from random_spellings import COMPLEX_TERMS, SPELLINGS, TERMS, lines_of

OPERAND = re.compile(r"\{([A-Z])(!?)(?::([^{}<?]*)(\?|<\w)?)?\}")
TERM_LINES, COMPLEX_LINES = lines_of(TERMS), lines_of(COMPLEX_TERMS)
TRANSFORMS = [
    *("grad", "grad", "penalty", "maml", "jvp", "vjp", "jacrev", "jacfwd", "hessian", "vmap", "vmap", "value"),
    "argnums",
]


class UnfitError(Exception):
    """No operand can be found or made."""


@dataclass(frozen=True)
class Statement:
    """Lines of source and the name they define."""

    name: str
    code: str

    def uses(self, name):
        return re.search(rf"\b{name}\b", self.code) is not None


def alive(statements, text):
    """The statements that a text needs, and those that these need."""
    kept: list[Statement] = []
    for statement in reversed(statements):
        if re.search(rf"\b{statement.name}\b", text):
            kept.insert(0, statement)
            text += " " + statement.code
    return kept


def indented(text):
    return "\n".join(f"    {line}" for line in text.splitlines())


@dataclass
class Scope:
    """The body of a function while it is written: the values its names have for the first sample."""

    rng: random.Random
    space: dict[str, Any]
    tensors: list[str]
    varying: set[str]
    ids: Any
    constants: dict[str, torch.Tensor]
    dtype: torch.dtype
    calls: list[str] = field(default_factory=list)
    statements: list[Statement] = field(default_factory=list)
    depth: int = 0
    mutable: bool = True
    limit: int = 160

    def value(self, name):
        return self.space[name]

    def run(self, name, code, *, checked=True):
        """Execute lines and keep them if the result will do."""
        space = dict(self.space)
        exec(code, space)
        value = space.get(name)
        if checked:
            usable = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
            if not usable or value.numel() > self.limit or not bool((value.abs() < 60).all()):
                raise UnfitError
        statement = Statement(name, code)
        if any(statement.uses(v) for v in self.varying):
            self.varying.add(name)
        self.space[name] = value
        self.statements.append(statement)
        if checked:
            self.tensors.append(name)
        return name

    # Operands.

    def real(self):
        return [name for name in self.tensors if not self.value(name).is_complex()]

    def choose(self, names, taken=()):
        """One of some names: rather not the same twice, in a function rather what follows from its arguments."""
        weights = [(6 if self.depth and name in self.varying else 1) * (0.2 if name in taken else 1) for name in names]
        return self.rng.choices(names, weights)[0]

    def constant(self, value):
        name = f"c{next(self.ids)}"
        self.constants[name] = self.space[name] = value
        return name

    def size(self, sizes, letter):
        if letter.isdigit():
            return int(letter)
        return sizes.setdefault(letter, self.rng.choice([1, 2, 2, 3, 3, 4]))

    def matches(self, name, dims, sizes):
        shape, bound = self.value(name).shape, dict(sizes)
        if dims in {"*", "**"}:
            known = sizes.get("*")
            return shape == known if known is not None else dims == "**" or len(shape) > 0
        if len(shape) != len(dims):
            return False
        return all((int(d) if d.isdigit() else bound.setdefault(d, n)) == n for d, n in zip(dims, shape, strict=True))

    def shape_of(self, dims, sizes):
        if dims in {"*", "**"}:
            return tuple(sizes["*"])
        if dims == "+":
            shape = list(sizes["*"])[self.rng.choice([0, 0, 0, 1]) :]
            return tuple(1 if self.rng.random() < 0.15 else n for n in shape)
        return tuple(self.size(sizes, d) for d in dims)

    def operand(self, dims, sizes, *, vary=False, complex_too=False, taken=()):
        names = self.tensors if complex_too else self.real()
        names = [name for name in names if not vary or name in self.varying]
        if not names or (vary and not self.mutable):
            raise UnfitError
        fitting = [name for name in names if dims != "+" and self.matches(name, dims, sizes)]
        if fitting and self.rng.random() < 0.9:
            name = self.choose(fitting, taken)
        elif dims in {"*", "**"} and "*" not in sizes:
            raise UnfitError
        else:
            shape = self.shape_of(dims, sizes)
            same = [name for name in names if tuple(self.value(name).shape) == shape]
            if not vary and self.rng.random() < 0.15:
                return self.constant(torch.tensor(np.round(self.np().normal(size=shape), 2), dtype=self.dtype))
            name = (
                self.choose(same, taken)
                if same and self.rng.random() < 0.7
                else self.adapted(self.choose(names, taken), shape)
            )
        shape = self.value(name).shape
        if dims in {"*", "**"}:
            sizes["*"] = tuple(shape)
        elif dims != "+":
            sizes.update({d: n for d, n in zip(dims, shape, strict=True) if not d.isdigit()})
        return name

    def np(self):
        return np.random.default_rng(self.rng.randrange(2**32))

    def adapted(self, source, shape):
        """A line that gives a tensor another shape."""
        x, name = self.value(source), f"v{next(self.ids)}"
        count, target = int(np.prod(shape)), ", ".join(map(str, shape))
        if x.numel() == 0:
            raise UnfitError
        if self.rng.random() < 0.1:
            code = f"{source}.mean().expand({target})" if shape else f"{source}.mean()"
        elif x.numel() >= count:
            cut = self.rng.choice([f"[:{count}]", f"[{x.numel() - count}:]"]) if x.numel() > count else ""
            code = f"{source}.reshape(-1){cut}.reshape({tuple(shape)})"
        else:
            code = f"{source}.reshape(-1).repeat({-(-count // x.numel())})[:{count}].reshape({tuple(shape)})"
        return self.run(name, f"{name} = {code}")

    def index(self, shape, bound):
        """Indices below a bound, from the batch or constants."""
        ints = [n for n in self.space if n[0] == "n" and n[1:].isdigit()]
        count = int(np.prod(shape))
        if bound < 1:
            raise UnfitError
        if ints and self.rng.random() < 0.8:
            name = self.rng.choice(ints)
            x = self.value(name)
            if tuple(x.shape) == tuple(shape):
                return f"({name} % {bound})"
            if x.ndim == 0:
                return f"(({name} + torch.arange({count})) % {bound}).reshape({tuple(shape)})"
            if x.numel() >= count:
                return f"({name}.reshape(-1)[:{count}].reshape({tuple(shape)}) % {bound})"
        return self.constant(torch.tensor(self.np().integers(0, bound, size=shape), dtype=torch.long))

    def mask(self, shape, sizes):
        masks = [
            n for n in self.space if n[0] == "m" and n[1:].isdigit() and tuple(self.value(n).shape) == tuple(shape)
        ]
        if masks and self.rng.random() < 0.8:
            return self.rng.choice(masks)
        same = [n for n in self.real() if tuple(self.value(n).shape) == tuple(shape)]
        if same and self.rng.random() < 0.8:
            return f"({self.rng.choice(same)} > {self.rng.choice([-0.3, 0.0, 0.2])})"
        return self.constant(torch.tensor(self.np().random(size=shape) < 0.6))

    # Statements.

    def filled(self, template, name):
        """Replace the operands of a line by names."""
        sizes: dict[str, Any] = {}
        chosen: dict[str, str] = {}
        found = [m for m in OPERAND.finditer(template) if m[3] is not None]
        complex_too = self.rng.random() < 0.3
        for match in sorted(found, key=lambda m: (m[4] is not None, m[1] not in "WVU")):
            letter, vary, dims, kind = match[1], bool(match[2]), match[3], match[4]
            if kind is None:
                chosen[letter] = self.operand(
                    dims, sizes, vary=vary, complex_too=complex_too, taken=set(chosen.values())
                )
            elif kind == "?":
                chosen[letter] = self.mask(self.shape_of(dims, sizes), sizes)
            else:
                chosen[letter] = self.index(self.shape_of(dims, sizes), self.size(sizes, kind[1]))
        text = OPERAND.sub(lambda m: chosen[m[1]], template)
        text = re.sub(
            r"\{#(\w)\}", lambda m: str(self.rng.randrange(-self.size(sizes, m[1]), self.size(sizes, m[1]))), text
        )
        text = re.sub(r"\{=(\w)\}", lambda m: str(self.size(sizes, m[1])), text)
        text = re.sub(r"\{f\}", lambda m: str(self.rng.choice([0.3, 0.5, 0.8, 1.3, 2.0])), text)
        if "{dim}" in text:
            rank = self.value(chosen["A"]).ndim
            text = text.replace("{dim}", str(self.rng.randrange(-rank, rank)))
        return text.replace("{out}", name) if "{out}" in template else f"{name} = {text}"

    def attempt(self, make):
        """Write a statement; leave all as it was where that fails."""
        kept = len(self.statements), len(self.tensors), dict(self.space), set(self.varying), dict(self.constants)
        try:
            return make()
        except Exception:  # noqa: BLE001 - whatever torch says to a random line
            statements, tensors, space, self.varying, constants = kept
            del self.statements[statements:], self.tensors[tensors:]
            self.space.clear()
            self.space.update(space)
            self.constants.clear()
            self.constants.update(constants)
            return None

    def line(self):
        templates = SPELLINGS if not self.calls else [*SPELLINGS, (6, self.calls)]
        (_, spellings), *_ = self.rng.choices(templates, [weight for weight, _ in templates])
        name = f"v{next(self.ids)}"
        return self.run(name, self.filled(self.rng.choice(spellings), name))

    def statement(self, nested):
        for _ in range(25):
            make = self.transform if self.rng.random() < nested else self.line
            if (name := self.attempt(make)) is not None:
                return name
        return None

    # Transforms of functions.

    def function(self, arguments, values, *, scalar, count):
        """Write ``def f(…)`` whose arguments stand for tensors of this scope; returns its name."""
        name = f"f{next(self.ids)}"
        own = [f"v{next(self.ids)}" for _ in arguments]
        space = {**self.space, **dict(zip(own, values, strict=True))}
        mutable = self.mutable and self.varying.issuperset(arguments)  # by what differs from sample to sample
        inner = replace(
            self,
            space=space,
            tensors=[*self.tensors, *own],
            varying=set(own),
            statements=[],
            depth=self.depth + 1,
            mutable=mutable,
        )
        for _ in range(count):
            inner.statement(0.15 if self.depth == 0 else 0.0)
        candidates = [
            n for n in inner.tensors[len(self.tensors) :] if n in inner.varying and not inner.value(n).is_complex()
        ]
        result = candidates[-1]
        if scalar:
            result = f"v{next(self.ids)}"
            inner.run(result, f"{result} = {inner.term(candidates[-1])}")
        body = "\n".join([*(s.code for s in alive(inner.statements, result)), f"return {result}"])
        self.run(name, f"def {name}({', '.join(own)}):\n{indented(body)}", checked=False)
        return name

    def transform(self):
        """A transform of a function written for it."""
        rng, name = self.rng, f"v{next(self.ids)}"
        kind = rng.choice(TRANSFORMS)
        x = self.choose(self.real())
        value = self.value(x)
        count = rng.randint(1, 3)
        if kind == "vmap":
            return self.mapped(name, x, count)
        if kind == "argnums":
            y = self.choose(self.real())
            f = self.function([x, y], [value, self.value(y)], scalar=True, count=count)
            return self.run(name, f"{name} = torch.func.grad({f}, argnums=(0, 1))({x}, {y})[{rng.randrange(2)}]")
        scalar = kind in {"grad", "penalty", "maml", "hessian", "value"}
        f = self.function([x], [value], scalar=scalar, count=count)
        tangent = self.operand("*" if value.ndim else "**", {"*": tuple(value.shape)})
        step = rng.choice([0.1, 0.3])
        code = {
            "grad": f"torch.func.grad({f})({x})",
            "penalty": f"torch.func.grad({f})({x}).square().sum()",
            "maml": f"{x} - {step} * torch.func.grad({f})({x})",
            "value": f"torch.stack([*torch.func.grad_and_value({f})({x})[1:]])",
            "jvp": f"torch.func.jvp({f}, ({x},), ({tangent},))[1]",
            "vjp": f"torch.func.vjp({f}, {x})[1](torch.ones_like({f}({x})))[0]",
            "jacrev": f"torch.func.jacrev({f})({x})",
            "jacfwd": f"torch.func.jacfwd({f})({x})",
            "hessian": f"torch.func.hessian({f})({x})",
        }[kind]
        return self.run(name, f"{name} = {code}")

    def mapped(self, name, x, count):
        value = self.value(x)
        if not value.ndim or not value.shape[0]:
            raise UnfitError
        dim = self.rng.randrange(value.ndim)
        f = self.function([x], [value.select(dim, 0)], scalar=False, count=count)
        inner = self.rng.choice([f, f"torch.func.jacrev({f})"]) if value.ndim == 1 else f
        return self.run(name, f"{name} = torch.func.vmap({inner}, in_dims={dim})({x})")

    # The loss.

    def finish(self, needs):
        """Terms that use what nothing else uses."""
        unused = [n for n in self.tensors if not any(s.uses(n) for s in self.statements if s.name != n)]
        unused = [n for n in unused if n in needs and (n[0] == "v" or self.rng.random() < 0.2)] or sorted(needs)
        self.rng.shuffle(unused)
        terms = []
        for name in unused[:4]:
            before = len(self.statements)
            if self.value(name).is_complex():
                text = self.rng.choice(COMPLEX_LINES).replace("{Z}", name)
            else:
                text = self.attempt(lambda name=name: self.term(name))
            if text and self.sound(text):
                terms.append(f"({text})")
            else:
                del self.statements[before:]
        return tuple(terms)

    def term(self, name):
        template = self.rng.choice(TERM_LINES)
        shape = tuple(self.value(name).shape)
        if "{A:*}" in template and not shape:
            raise UnfitError
        text = template.replace("{A:**}", name).replace("{A:*}", name)
        if "{B:*}" in text:
            text = text.replace("{B:*}", self.operand("*", {"*": shape}))
        return text.replace("{f}", "0.7")

    def sound(self, text):
        try:
            value = eval(text, dict(self.space))
        except (RuntimeError, ValueError, IndexError):
            return False
        return value.ndim == 0 and bool(value.abs() < 1e3) and value.is_floating_point()
