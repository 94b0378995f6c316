"""Calls on ``standin``, a device of our own: what each one transfers between the host and the device, as JSON.

Each result is compared with that of the CPU. A process of its own registers the device (``test_standin.py`` starts it).
"""

from __future__ import annotations

import copy
import functools
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import standin
import torch
from device_cases import REDUCTIONS, B, Case, cases, moved, squares, written_out
from standin import BACKEND, DEVICE, traffic
from torch.nn import functional as F

import persample as ps


def counted(call: Callable[[], Any], expected: Any) -> dict[str, Any]:
    """Count the transfers of a call; compare its result with what the CPU computes."""
    with traffic() as transfers:
        result = call()
    for found, wanted in zip(written_out(result), written_out(expected), strict=True):
        assert found.device == DEVICE, found.device
        torch.testing.assert_close(found.cpu(), wanted.cpu(), rtol=1e-4, atol=1e-5)
    kinds = Counter(x.kind for x in transfers)
    return {"read": kinds["read"], "write": kinds["write"], "lines": sorted({f"{x.kind} {x.line}" for x in transfers})}


def of_reductions(name: str, case: Case, engine: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """What each reduction transfers for one model."""
    loss, params, batch = case
    direction, other = ps.per_sample_grads(loss, params, batch, (ps.Sum(), ps.Factored()))
    far = Case(loss, moved(params, DEVICE), moved(batch, DEVICE))
    for asked, make in REDUCTIONS.items():
        near = ps.per_sample_grads(*case, make(direction, other))
        reduce = make(moved(direction, DEVICE), moved(other, DEVICE))
        call = functools.partial(ps.per_sample_grads, *far, reduce, engine=engine)
        yield f"{asked} of {name}, {engine}", counted(call, near)


def of_programs(case: Case) -> Iterator[tuple[str, dict[str, Any]]]:
    """What programs transfer: one of the reductions that check nothing, and one of all others."""
    loss, params, batch = case
    direction, other = ps.per_sample_grads(loss, params, batch, (ps.Sum(), ps.Factored()))
    far = Case(loss, moved(params, DEVICE), moved(batch, DEVICE))
    checked = [x for x in REDUCTIONS if any(word in x for word in ("Clipped", "WeightedSum", "Natural", "Leverage"))]
    for name, chosen in (("unchecked", REDUCTIONS.keys() - checked - {"Factored()"}), ("checked", checked)):
        near = {x: REDUCTIONS[x](direction, other) for x in sorted(chosen)}
        reduce = {x: REDUCTIONS[x](moved(direction, DEVICE), moved(other, DEVICE)) for x in sorted(chosen)}
        call = functools.partial(ps.per_sample_grads, *far, reduce, engine="traced")
        yield f"{name}, first", counted(call, ps.per_sample_grads(*case, near))
        yield f"{name}, again", counted(call, ps.per_sample_grads(*case, near))


def of_options(case: Case) -> Iterator[tuple[str, dict[str, Any]]]:
    """What the options of a call transfer."""
    loss, params, batch = case
    model, x = moved(params, DEVICE), moved(batch, DEVICE)
    mean, grads = ps.per_sample_grads(loss, params, batch, (ps.Mean(), ps.Stack()))
    mean_of = functools.partial(ps.per_sample_grads, loss, model, x, ps.Mean())
    yield "chunk_size=2", counted(lambda: mean_of(chunk_size=2), mean)
    yield "out= of a mean", counted(functools.partial(mean_of, out=moved(mean, DEVICE)), mean)
    out = functools.partial(ps.per_sample_grads, loss, model, x, out=moved(grads, DEVICE))
    yield "out= of a stack", counted(out, grads)
    weights = torch.tensor([1.0, 0.0, 2.0, 1.0, 1.0])
    weighted = ps.per_sample_grads(loss, params, batch, ps.Mean(), weights=weights)
    yield "weights on the device", counted(functools.partial(mean_of, weights=weights.to(DEVICE)), weighted)
    yield "weights on the host", counted(functools.partial(mean_of, weights=weights), weighted)
    numpy = functools.partial(ps.per_sample_grads, loss, model, batch.numpy(), ps.Mean())
    yield "batch of NumPy arrays", counted(numpy, mean)
    yield (
        "fisher_vector_product",
        counted(
            functools.partial(ps.fisher_vector_product, loss, model, x, moved(mean, DEVICE)),
            ps.fisher_vector_product(loss, params, batch, mean),
        ),
    )
    yield "accumulate", counted(lambda: ps.accumulate(loss, model, [x, x], ps.Mean()), mean)
    yield (
        "empty batch",
        counted(
            lambda: ps.per_sample_grads(loss, model, x[:0], ps.Sum()),
            ps.per_sample_grads(loss, params, batch[:0], ps.Sum()),
        ),
    )
    yield (
        "composite_grads",
        counted(
            lambda: ps.composite_grads(encode, coupled, model, x), ps.composite_grads(encode, coupled, params, batch)
        ),
    )
    yield "dropout", random_numbers(model, x)


def encode(model, x):
    return model(x)


def coupled(z):
    return z.sum(0).square().sum()


def random_numbers(model: Any, x: Any) -> dict[str, Any]:
    """Losses draw from the device's stream: seeded again it gives the same, and the host's stream does not move."""

    def noisy(model, x):
        return model(F.dropout(x, 0.5)).square().sum()

    def drawn(seed: int, randomness: str, chunk_size: int | None = None) -> Any:
        BACKEND.manual_seed_all(seed)
        return ps.per_sample_grads(noisy, model, x, ps.Norm(), randomness=randomness, chunk_size=chunk_size)

    before = torch.get_rng_state()
    first, again, other = (drawn(seed, "different").cpu() for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    torch.testing.assert_close(drawn(0, "same", 2).cpu(), drawn(0, "same").cpu())
    assert torch.equal(before, torch.get_rng_state())
    return counted(lambda: drawn(0, "different"), first)


def errors(case: Case) -> Iterator[tuple[str, str]]:
    """What is said where tensors are on the wrong device."""
    loss, params, batch = case
    model, x = moved(params, DEVICE), moved(batch, DEVICE)
    mean = ps.per_sample_grads(loss, params, batch, ps.Mean())
    calls = {
        "batch on the host": lambda: ps.per_sample_grads(loss, model, batch, ps.Mean()),
        "params on the host": lambda: ps.per_sample_grads(loss, params, x, ps.Mean()),
        "loop": lambda: ps.per_sample_grads(loss, model, batch, ps.Mean(), engine="loop"),
        "out on the host": lambda: ps.per_sample_grads(loss, model, x, ps.Mean(), out=mean),
        "generator of the host": lambda: torch.randn(3, device=DEVICE, generator=torch.Generator()),
    }
    for name, call in calls.items():
        yield name, said(call)


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except (RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def elsewhere(case: Case) -> Iterator[tuple[str, dict[str, Any]]]:
    """Tensors of reductions on the host are moved."""
    loss, params, batch = case
    model, x = moved(params, DEVICE), moved(batch, DEVICE)
    direction, other = ps.per_sample_grads(loss, params, batch, (ps.Mean(), ps.Factored()))
    targets, number = torch.randn(B), torch.tensor(0.5)
    for name, reduce in {
        "Dot(direction)": ps.Dot(direction),
        "Gram(other)": ps.Gram(other),
        "CosineSimilarity(other)": ps.CosineSimilarity(other),
        "NaturalGradient(λ, targets)": ps.NaturalGradient(number, targets),
        "ClippedMean(C)": ps.ClippedMean(number),
    }.items():
        call = functools.partial(ps.per_sample_grads, loss, model, x, reduce)
        yield name, counted(call, ps.per_sample_grads(loss, params, batch, reduce))


def without_float64(case: Case) -> Iterator[tuple[str, str]]:
    """What a device without float64 says to each call."""
    loss, params, batch = case
    direction, other = ps.per_sample_grads(loss, params, batch, (ps.Sum(), ps.Factored()))
    direction, other = moved(direction, DEVICE), moved(other, DEVICE)
    call = functools.partial(ps.per_sample_grads, loss, moved(params, DEVICE), moved(batch, DEVICE))
    calls = {asked: functools.partial(call, make(direction, other)) for asked, make in REDUCTIONS.items()}
    calls["chunk_size=2"] = functools.partial(call, ps.Sum(), chunk_size=2)
    calls["weights"] = functools.partial(call, ps.Sum(), weights=[1.0] * B)
    place = standin.device

    def refuse(x: Any) -> Any:
        if x.dtype == torch.float64:
            raise TypeError("this device has no float64")  # as torch's MPS does
        return place(x)

    with mock.patch.object(standin, "device", refuse):
        for name, ask in calls.items():
            yield name, said(ask)


def main() -> None:
    torch.set_num_threads(1)
    known = cases()
    small = known["linear layers"]
    found: dict[str, Any] = {"reductions": {}, "host": numbers(x := torch.ones(2, device=DEVICE), x + 1)}
    for name, case in known.items():
        found["reductions"].update(of_reductions(name, case, "eager"))
    found["reductions"].update(of_reductions("linear layers", small, "loop"))
    doubles = Case(small.loss, copy.deepcopy(small.params).double(), small.batch.double())
    found["reductions"].update(of_reductions("linear layers in float64", doubles, "eager"))
    found["programs"] = dict(of_programs(small))
    found["options"] = dict(of_options(Case(no_aux, small.params, small.batch)))
    found["elsewhere"] = dict(elsewhere(small))
    found["errors"] = dict(errors(small))
    found["without float64"] = dict(without_float64(small))
    json.dump(found, sys.stdout)


def no_aux(model, x):
    return squares(model, x)[0]


def numbers(x: Any, y: Any) -> dict[str, int]:
    """What the device counts of each kind of transfer: one."""
    array = np.ones(2, np.float32)
    calls: dict[str, Callable[[], Any]] = {
        "item": x[0].item,
        "bool": lambda: bool(x[0] > 0),
        "branch": lambda: 1 if (x > y).any() else 0,
        "tolist": x.tolist,
        "cpu": x.cpu,
        "nonzero": x.nonzero,
        "mask": lambda: x[x > 0],
        "unique": x.unique,
        "equal": lambda: torch.equal(x, y),
        "to the device": lambda: torch.from_numpy(array).to(DEVICE),
        "tensor": lambda: torch.tensor([1.0, 2.0], device=DEVICE),
        "sum": lambda: (x + y * 2).sum().sqrt(),
        "masked_fill": lambda: x.masked_fill(x > 0, 1.0),
        "where": lambda: torch.where(x > 0, x, y),
    }
    counts = {}
    for name, call in calls.items():
        with traffic() as transfers:
            call()
        counts[name] = len(transfers)
    return counts


if __name__ == "__main__":
    main()
