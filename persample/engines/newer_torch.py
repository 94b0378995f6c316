"""Whether an engine still computes what it must with a torch newer than the tested ones.

A private name of such a torch may exist and do something else. Once in a process the names of levels of vmap are tried,
and an engine computes small programs that the loop computes, too. Where results differ, ``fallback.py`` answers all
calls without the engine. ``tests/public/test_torch.py`` says in full what each private name must do.
"""

from __future__ import annotations

import functools
import threading
from contextlib import suppress

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F

from persample import _torch
from persample.engines.compiled import lift_compiled
from persample.engines.uncompiled import loop
from persample.errors import KNOWN_TORCH_VERSIONS, TorchVersionError
from persample.inputs.call import normalize
from persample.pipeline import Engine, lift_by, run
from persample.reductions import Norm
from persample.reductions.base import Reductions
from persample.utils.tracing import is_wrapped, unwrapped_once

_FIRST_UNKNOWN = tuple(map(int, KNOWN_TORCH_VERSIONS.rpartition("<")[2].split(".")))


@functools.cache
def changed(way: Engine | None) -> str:
    """Return a private name that does not do in a newer torch what an engine needs, or "" if the engine works.

    None stands for the traced engine. The loop needs no private names.
    """
    if way is loop or tuple(map(int, torch.__version__.split(".")[:2])) < _FIRST_UNKNOWN:
        return ""
    found: list[str] = []
    # A thread of its own has no modes and no transforms, whatever the caller's has.
    thread = threading.Thread(target=lambda: found.append(_name() or ("" if _is_loop(way) else "a private name")))
    thread.start()
    thread.join()
    return found[0]


def _layers(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return (F.linear(x, params["w"], params["b"]).tanh() @ params["v"]).square().sum()


def _attention(params: dict[str, Tensor], x: Tensor) -> Tensor:
    q = F.linear(x, params["w"]).unsqueeze(0)
    return F.scaled_dot_product_attention(q, q * params["v"], q + params["b"]).square().sum()


def _distances(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.cdist(x @ params["w"].T, params["v"].expand(2, 5) * x.sum() + params["b"]).sum()


def _is_loop(way: Engine | None) -> bool:
    def numbers(*shape: int, first: float) -> Tensor:
        return torch.arange(first, first + torch.Size(shape).numel(), dtype=torch.float64).sin().view(shape)

    params = {"w": numbers(5, 4, first=0), "b": numbers(5, first=30), "v": numbers(5, first=60)}
    reductions = Reductions([Norm()])
    traced = functools.partial(lift_compiled, reductions=reductions, engine="traced")
    for loss in (_layers, _attention, _distances):
        call = normalize(
            loss, params, numbers(6, 3, 4, first=90), [Norm()], weights=None, in_dims=(None, 0), keep_batch_dim=False
        )
        try:
            lifts = (traced if way is None else lift_by(way, reductions), lift_by(loop, reductions))
            found, expected = (run(call, lift, reductions, None)[0] for lift in lifts)
            if not torch.allclose(found, expected):
                return False
        except TorchVersionError:  # of a name that is missing, which is noticed where it is needed
            continue
        except Exception:  # noqa: BLE001 - whatever a changed name leads to, the engine does not work
            return False
    return True


def _name() -> str:
    """Return the first private name of levels of vmap that does something else than is known, or ""."""
    rows = torch.arange(6.0).view(2, 3)
    facts: dict[str, bool] = {}

    def check(x: Tensor) -> Tensor:
        facts["torch._C._functorch.maybe_get_level"] = _torch.maybe_get_level(x) == 1 and not is_wrapped(rows)
        facts["torch.func.debug_unwrap"] = (inside := unwrapped_once(x)).equal(rows) and not is_wrapped(inside)
        facts["torch._C._functorch.maybe_get_bdim"] = _torch.maybe_get_bdim(x) == 0
        facts["torch._C._functorch._add_batch_dim"] = unwrapped_once(_torch.add_batch_dim(rows, 0, 1)).equal(rows)
        facts["torch._C._functorch.get_dynamic_layer_stack_depth"] = _torch.get_dynamic_layer_stack_depth() == 1
        return x

    with suppress(Exception):  # of a name that is missing, or whose arguments have changed
        vmap(check)(rows)
    return next((name for name, is_as_known in facts.items() if not is_as_known), "")
