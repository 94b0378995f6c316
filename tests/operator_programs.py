"""Programs made of torch's operator database: a loss that adds the losses of several operations, captured."""

from __future__ import annotations

import importlib
import random
import warnings
import zlib
from collections import Counter

import torch
from operator_cases import EXCLUDED, F64, KEPT, Case, deviation, is_operand, mixtures, name_of, samples_of, tensors

from persample import Aux, Norm, Stack, clear_cache, per_sample_grads
from persample.errors import LossError

LEARNED = {"parameter", "activation"}
WANTED = {"losses": Aux(), "grads": Stack(), "norms": Norm(per_param=True)}
# Where the compiler gives up, the traced graph runs as it is, and a warning says so.
NOT_COMPILED = "engine='compiled' "


def differentiable_operations():
    from torch.testing._internal.common_methods_invocations import op_db

    excluded = EXCLUDED.keys() - KEPT
    return [op for op in op_db if F64 in op.dtypes and op.supports_autograd and op.name not in excluded]


def learned_cases(op, most, seed):
    """Some samples of an operation, each with roles of its operands of which one is learned."""
    rng, found = random.Random(zlib.crc32(f"{name_of(op)} {seed}".encode())), []
    for sample in samples_of(op, rng, most):
        roles = [each for each in mixtures(sample, rng, 64) if LEARNED & {*each}]
        if roles and any(x.dtype == F64 for x in tensors(sample) if is_operand(x)):
            found.append(Case(op.op, sample, rng.choice(roles), "function", rng.randrange(10**6)))
            found[-1].name = name_of(op)
    return [case for case in found if expected(case) is not None]


class Together:
    """A loss that adds those of several cases, each with parameters of its own."""

    def __init__(self, several):
        self.several = several

    def __call__(self, params, batch):
        losses = [case(*own) for case, *own in zip(self.several, params, batch, strict=True)]
        return sum(losses), losses


def measured(several, engine):
    """For each case its losses, gradients and norms."""
    params, batch = [x.params for x in several], [x.batch for x in several]
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", NOT_COMPILED, RuntimeWarning)
        results = per_sample_grads(Together(several), params, (batch,), WANTED, engine=engine, randomness="same")
    return [{key: results[key][place] for key in results} for place in range(len(several))]


def expected(case):
    """What the loop computes; None where torch does not differentiate the operation, or its roles make no sense."""
    try:
        return measured([case], "loop")[0]
    except Exception:  # noqa: BLE001 - not a loss
        return None


def outcomes(several, engine):
    """What came of each case of one program, and of the halves of a program that is refused or not compiled."""
    importlib.import_module("persample.engines.compiled.lower")._warned.clear()
    try:
        actual = measured(several, engine)
    except Exception as error:  # noqa: BLE001 - a crash, which is a finding
        if len(several) > 1:
            middle = len(several) // 2
            return outcomes(several[:middle], engine) + outcomes(several[middle:], engine)
        if isinstance(error, LossError):
            return ["refused"]
        not_compiled = isinstance(error, RuntimeWarning) and str(error).startswith(NOT_COMPILED)
        return ["not compiled" if not_compiled else f"{type(error).__name__}: {error}"]
    finally:
        clear_cache()
    off = [deviation(x, expected(case)) for x, case in zip(actual, several, strict=True)]
    return ["agreed" if x <= 1e-9 else f"off by {x:g}" for x in off]


def culprits(several, wrong, engine):
    """The cases beside which one is wrong, found by halves; none if it is wrong alone."""
    others = [case for case in several if case is not wrong]
    if outcomes([wrong], engine)[0] != "agreed":
        return []
    while len(others) > 1:
        halves = others[: len(others) // 2], others[len(others) // 2 :]
        found = next((half for half in halves if outcomes([*half, wrong], engine)[-1] != "agreed"), None)
        if found is None:
            break
        others = found
    return others


def compare(programs, engine):
    """Compare programs of an engine that captures with the loop; print how many of their cases agreed."""
    counts, apart, wrong = Counter(), {"refused": set(), "not compiled": set()}, []
    for several in programs:
        for case, found in zip(several, outcomes(several, engine), strict=True):
            counts[found if found in {"agreed", *apart} else "wrong"] += 1
            if found in apart:
                apart[found].add(case.name)
            elif found != "agreed":
                beside = [x.name for x in culprits(several, case, engine)]
                shapes = [tuple(case.leaves[k].shape) for k in case.places]
                wrong.append(f"{case.name} {case.roles} {shapes} {case.sample.kwargs} beside {beside}: {found}")
    print(f"{engine}: {len(programs)} programs, {dict(counts)}, {apart}")
    assert not wrong, "\n".join(wrong)
    assert counts["agreed"] > 5 * (counts["refused"] + counts["not compiled"])
