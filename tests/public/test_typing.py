"""What a type checker and an editor make of code that uses persample."""

from __future__ import annotations

import inspect
import itertools
import re
from pathlib import Path

import jedi
import pytest
from mypy import api
from paths import ROOT

import persample
from persample import accumulate, composite_grads, explain, per_sample_grads
from persample.rl.diagnostics import policy_gradients

FUNCTIONS = [per_sample_grads, explain, composite_grads, accumulate]
# Code of users, in strict mode. Every line that is wrong says with which error; there are no others.
USER = """
from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import torch
from torch import Tensor, nn

import persample as ps
from persample import losses


class Transition(NamedTuple):
    s_tm1: Tensor
    r_t: Tensor
    s_t: Tensor


class Agent(NamedTuple):
    actor: nn.Linear
    critic: nn.Linear


class Wanted(NamedTuple):
    update: ps.Mean
    norms: ps.Norm


def by_dict(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return (params["w"] @ x) ** 2


def by_module(model: nn.Linear, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    y: Tensor = model(x)
    return y.sum(), {"y": y}


def by_tuple(agent: Agent, t: Transition) -> Tensor:
    return losses.td_loss(agent.critic(t.s_tm1)[0], t.r_t, 0.9, agent.critic(t.s_t)[0])


def text(params: Tensor, x: Tensor) -> str:
    return "no loss"


x, linear = torch.ones(5, 3), nn.Linear(3, 1)
agent, batch = Agent(linear, linear), Transition(x, x[:, 0], x)
means = [ps.Mean(), ps.Norm()]

rows: dict[str, Tensor] = ps.per_sample_grads(by_dict, {"w": x[0]}, x)
update: dict[str, Tensor] = ps.per_sample_grads(by_module, linear, x, ps.ClippedMean(1.0), engine="compiled")
both = ps.per_sample_grads(by_tuple, agent, batch, Wanted(ps.Mean(), ps.Norm()), chunk_size=2, randomness="same")
nested = ps.per_sample_grads(by_dict, OrderedDict(w=x[0]), (x,), {"a": (ps.Mean(), None), "b": means})
shared = ps.per_sample_grads(lambda w, s, x: s * w @ x, x[0], (x[0], x), in_dims=(None, (None, 0)), weights=[1.0] * 5)
loss, grads = ps.composite_grads(lambda w, x: w @ x, lambda z: z.sum(), x[0], x, batch_norm="refuse")
print(loss.item(), ps.explain(by_module, linear, x, means).rows[0].factor)
ps.set_grads(linear, update)

ps.per_sample_grads(by_dict, {"w": x[0]})  # wrong: call-arg
ps.per_sample_grads(by_dict, {"w": x[0]}, x, ps.Mean(), None)  # wrong: arg-type
ps.per_sample_grads(by_dict, {"w": x[0]}, x, reduction=ps.Mean())  # wrong: call-arg
ps.per_sample_grads(by_dict, {"w": x[0]}, x, ps.Mean)  # wrong: arg-type
ps.per_sample_grads(by_dict, {"w": x[0]}, x, "mean")  # wrong: arg-type
ps.per_sample_grads(by_dict, {"w": x[0]}, x, {"update": "mean"})  # wrong: dict-item
ps.per_sample_grads(by_dict, {"w": x[0]}, x, engine="eagre")  # wrong: arg-type
ps.per_sample_grads(by_dict, {"w": x[0]}, x, randomness=True)  # wrong: arg-type
ps.per_sample_grads(by_dict, {"w": x[0]}, x, chunk_size=2.0)  # wrong: arg-type
ps.per_sample_grads(by_dict, {"w": x[0]}, x, in_dims=(None, 0, 0))  # wrong: arg-type
ps.per_sample_grads(text, x[0], x)  # wrong: arg-type
ps.composite_grads(lambda w, x: w @ x, lambda z: z.sum(), x[0], x, engine="compiled")  # wrong: arg-type
ps.set_grads(update, linear)  # wrong: arg-type
ps.Norm(True, False)  # wrong: call-arg
losses.td_loss(x[0, 0], x[0, 0], "0.9", x[0, 0])  # wrong: arg-type
"""


def test_the_checker_takes_what_is_right_and_only_that(tmp_path):
    path = tmp_path / "user.py"
    path.write_text(USER)
    report, trouble, _ = api.run([str(path), "--config-file", str(ROOT / "pyproject.toml")])
    assert not trouble
    found = {int(line): code for line, code in re.findall(r"user\.py:(\d+): error: .*?\[([\w-]+)\]$", report, re.M)}
    marked = (line.partition("# wrong: ") for line in USER.splitlines())
    assert found == {number: code for number, (_, _, code) in enumerate(marked, 1) if code}, report


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("persample.per_sa", "per_sample_grads"),
        ("persample.Clip", "ClippedMean"),
        ("persample.losses.td_", "td_loss"),
        ("persample.per_sample_grads(f, p, b, chu", "chunk_size="),
        ("persample.explain(f, p, b).ro", "rows"),
    ],
)
def test_editors_complete(typed, completed):
    script = jedi.Script(f"import persample\n{typed}", path=ROOT / "user.py")
    assert completed in {completion.name_with_symbols for completion in script.complete()}


def test_the_package_says_that_it_is_typed():
    assert (Path(persample.__file__).parent / "py.typed").exists()


@pytest.mark.parametrize(
    ("one", "other"), list(itertools.combinations(FUNCTIONS, 2)), ids=lambda function: function.__name__
)
def test_functions_share_names_order_and_defaults(one, other):
    """``reduce`` and ``chunk_size`` of composite_grads have defaults of their own, which its docstring explains."""
    first, second = inspect.signature(one).parameters, inspect.signature(other).parameters
    shared = [name for name in first if name in second]
    assert shared == [name for name in second if name in first]
    own = {"reduce", "chunk_size"} if composite_grads in {one, other} else set()
    assert all(first[name].default == second[name].default for name in shared if name not in own)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_options_are_named(function):
    kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
    assert kinds[:4] == kinds[:1] * 4
    assert {*kinds[4:]} - {inspect.Parameter.VAR_POSITIONAL} == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_help_explains_every_argument(function):
    text = inspect.getdoc(function)
    documented = re.findall(r"^    (\w+): ", text.partition("Args:")[2].partition("Returns:")[0], re.MULTILINE)
    assert documented == [name for name in inspect.signature(function).parameters if name != "_apart"]
    assert all(f"\n{section}:\n" in text for section in ("Args", "Returns", "Raises", "Examples"))


def test_help_names_the_options_that_are_passed_on():
    assert "``keep_batch_dim``" in inspect.getdoc(policy_gradients).partition("**options: ")[2]
