"""One network in many spellings: the time of ``ClippedMean`` in units of the batch gradient's.

Run as ``python -m benchmarks.spellings [eager|traced|compiled]``. Times are CPU seconds of one thread, medians of calls
of all spellings and of the batch gradient that alternate, and of these the medians over three processes.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from benchmarks.alternating import medians, medians_of_processes
from persample import ClippedMean, per_sample_grads, stop_gradient

SECONDS = 20
# From weight, bias and input ``[..., i]`` to ``[..., o]``.
LAYERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "F.linear(x, w, b)": lambda w, b, x: F.linear(x, w, b),
    "x @ w.T + b": lambda w, b, x: x @ w.T + b,
    "w @ x + b": lambda w, b, x: w @ x + b if x.ndim == 1 else (w @ x.T).T + b,
    "torch.mm or torch.mv": lambda w, b, x: (torch.mv(w, x) if x.ndim == 1 else torch.mm(x, w.t())) + b,
    "torch.addmm": lambda w, b, x: torch.addmm(b, x, w.T) if x.ndim == 2 else torch.addmm(b, x[None], w.T)[0],
    "torch.einsum": lambda w, b, x: torch.einsum("oi,...i->...o", w, x) + b,
}


def spellings(model: nn.Sequential) -> dict[str, tuple[Any, Callable[[Any, Tensor], Tensor]]]:
    """Return parameters and a network for each spelling of a perceptron with tanh."""
    detached = {name: x.detach() for name, x in model.named_parameters()}
    pairs = [(layer.weight.detach(), layer.bias.detach()) for layer in model if isinstance(layer, nn.Linear)]

    def chain(layer: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
        def net(params: Any, x: Tensor) -> Tensor:
            *hidden, (weight, bias) = params
            for w, b in hidden:
                x = torch.tanh(layer(w, b, x))
            return layer(weight, bias, x)

        return net

    return {
        "module": (model, lambda model, x: model(x)),
        "functional_call": (detached, lambda params, x: functional_call(model, params, (x,))),
        **{name: (pairs, chain(layer)) for name, layer in LAYERS.items()},
    }


class Net(nn.Module):
    """A small convolutional network."""

    def __init__(self, padding: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=padding), nn.Conv2d(16, 32, 3, padding=padding)
        self.last = nn.Linear(2048, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of one image, or of a batch."""
        return self.last(F.avg_pool2d(F.relu(self.second(F.relu(self.first(x)))), 2).flatten(-3))


def convolutions() -> dict[str, tuple[Any, Callable[[Any, Tensor], Tensor]]]:
    """Return parameters and a network for each spelling of a convolutional network."""
    model, same = Net(1), Net("same")
    params = {name: x.detach() for name, x in model.named_parameters()}

    def raw(padding: Any) -> Callable[[Any, Tensor], Tensor]:
        def net(p: Mapping[str, Tensor], x: Tensor) -> Tensor:
            for name in ("first", "second"):
                x = F.relu(F.conv2d(x, p[f"{name}.weight"], p[f"{name}.bias"], padding=padding))
            return F.linear(F.avg_pool2d(x, 2).flatten(-3), p["last.weight"], p["last.bias"])

        return net

    return {
        "module": (model, lambda model, x: model(x)),
        "module, padding='same'": (same, lambda model, x: model(x)),
        "functional_call": (params, lambda params, x: functional_call(model, params, (x,))),
        "F.conv2d": (params, raw(1)),
        "F.conv2d, padding='same'": (params, raw("same")),
    }


def perceptron(*widths: int) -> nn.Sequential:
    """Return a perceptron with tanh."""
    layers = [layer for sizes in itertools.pairwise(widths) for layer in (nn.Linear(*sizes), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def td_loss(net: Callable[[Any, Tensor], Tensor], params: Any, s_tm1: Tensor, r_t: Tensor, s_t: Tensor) -> Tensor:
    """Return the squared TD error of one transition, or those of a batch."""
    target = r_t + 0.99 * stop_gradient(net(params, s_t).squeeze(-1))
    return (target - net(params, s_tm1).squeeze(-1)) ** 2


def reinforce_loss(net: Callable[[Any, Tensor], Tensor], params: Any, s: Tensor, a: Tensor, returns: Tensor) -> Tensor:
    """Return the REINFORCE loss of one episode, or of a batch."""
    chosen = torch.log_softmax(net(params, s), -1).gather(-1, a[..., None]).squeeze(-1)
    return -(chosen * returns).sum(-1)


def class_loss(net: Callable[[Any, Tensor], Tensor], params: Any, x: Tensor, y: Tensor) -> Tensor:
    """Return the cross-entropy of one image, or the mean of a batch."""
    return F.cross_entropy(net(params, x), y)


def programs() -> dict[str, tuple[Any, Any, tuple[Tensor, ...]]]:
    """Return spellings, loss and batch of each program."""
    transitions = (torch.randn(300, 11), torch.randn(300), torch.randn(300, 11))
    episodes = (torch.randn(30, 180, 4), torch.randint(2, (30, 180)), torch.randn(30, 180))
    images = (torch.randn(32, 3, 16, 16), torch.randint(10, (32,)))
    return {
        "TD(0), MLP 256, B=300": (spellings(perceptron(11, 256, 256, 1)), td_loss, transitions),
        "REINFORCE, MLP 64, 30x180": (spellings(perceptron(4, 64, 64, 2)), reinforce_loss, episodes),
        "CNN, B=32": (convolutions(), class_loss, images),
    }


def call(
    number: int, spelling: tuple[Any, Any], loss: Any, batch: tuple[Tensor, ...], engine: Any
) -> Callable[[], object]:
    """Return a call of one spelling, whose loss has code of its own: captures are kept by code."""
    params, net = spelling

    def of_sample(params: Any, *sample: Tensor) -> Tensor:
        return loss(net, params, *sample)

    code = of_sample.__code__.replace(co_name=f"spelling_{number}")
    loss_fn = FunctionType(code, globals(), closure=of_sample.__closure__)
    return lambda: per_sample_grads(loss_fn, params, batch, ClippedMean(1.0), engine=engine)


def ratios(program: str, engine: Any) -> list[float]:
    """Return the time of each spelling's call in units of the batch gradient's of the module."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    nets, loss, batch = programs()[program]
    model, forward = nets["module"]

    def batch_gradient() -> object:
        return torch.autograd.grad(loss(forward, model, *batch).mean(), list(model.parameters()))

    calls = {name: call(number, nets[name], loss, batch, engine) for number, name in enumerate(nets)}
    times = medians({"batch gradient": batch_gradient, **calls}, SECONDS)
    return [times[name] / times["batch gradient"] for name in nets]


def main(engine: Any = "eager") -> None:
    """Measure, and print one table in Markdown for each program."""
    for program, (nets, _, _) in programs().items():
        [found] = medians_of_processes(ratios, [(program, engine)])
        rows = [f"| {name} | {x:.3f} |" for name, x in zip(nets, found, strict=True)]
        lines = [f"| {program}, {engine} | batch gradients |", "| --- | --- |", *rows]
        sys.stdout.write("\n".join([*lines, f"| slowest over fastest | {max(found) / min(found):.3f} |", "", ""]))


if __name__ == "__main__":
    main(*sys.argv[1:2])
