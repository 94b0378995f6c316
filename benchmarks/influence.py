"""The linear datamodeling score of each method of docs/attribution.md, and of kronfluence.

Run as ``python -m benchmarks.influence [subsets] [seeds]``; minutes of one thread. The functions, the data and the five
models are those of the page. Models are trained on random halves, from several starts each; the score is the rank
correlation of a half's summed scores and the margins of the models trained on it, averaged over 200 test samples
(Park et al., "TRAK: Attributing Model Behavior at Scale", 2023). Writes ``benchmarks/results/influence/digits.json``.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from kronfluence.analyzer import Analyzer, prepare_model
from kronfluence.arguments import FactorArguments, ScoreArguments
from kronfluence.task import Task
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.machine import environment

ROOT = Path(__file__).parents[1]


def of_the_page() -> dict[str, Any]:
    """Return what the page defines, after its training."""
    namespace: dict[str, Any] = {}
    page = (ROOT / "docs/attribution.md").read_text(encoding="utf-8")
    code = re.findall(
        r"```python\n(.*?)```", page.split("## On two processes")[0].split("## Of sequences")[0], re.DOTALL
    )
    exec("\n".join(code), namespace)
    return namespace


def kronfluence_scores(
    model: nn.Module,
    loss: Callable[..., Tensor],
    train: tuple[Tensor, ...],
    test: tuple[Tensor, ...],
    *,
    empirical: bool = True,
    damping: float | None = None,
    double: bool = False,
) -> Tensor:
    """Return kronfluence's EKFAC scores ``[training samples, test samples]``; its damping is a tenth of each mean.

    Args:
        model: of layers of its own; it is wrapped.
        loss: ``(outputs, *targets)`` to the sum over a batch, where ``train`` and ``test`` are (inputs, *targets).
        train: the training samples.
        test: the test samples.
        empirical: whether labels are those of the data.
        damping: of all layers; None for a tenth of the mean of each.
        double: float64 in all steps.
    """

    class Sums(Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            outputs, targets = model(batch[0]), batch[1:]
            if sample:
                drawn = torch.multinomial(outputs.detach().flatten(0, -2).softmax(-1), 1)
                targets = (drawn.view(targets[0].shape), *targets[1:])
            return loss(outputs, *targets)

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return loss(model(batch[0]), *batch[1:])

    factors, scores = FactorArguments(use_empirical_fisher=empirical), ScoreArguments(damping_factor=damping)
    if double:
        for arguments in (factors, scores):
            for name in vars(arguments):
                if name.endswith("_dtype") and name != "amp_dtype":
                    setattr(arguments, name, torch.float64)
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare_model(model, Sums())
        options: dict[str, Any] = {"cpu": True, "disable_tqdm": True, "output_dir": folder}
        analyzer = Analyzer("influence", prepared, Sums(), **options)
        analyzer.fit_all_factors("f", TensorDataset(*train), per_device_batch_size=250, factor_args=factors)
        analyzer.compute_pairwise_scores(
            "s", "f", TensorDataset(*test), TensorDataset(*train), 250, 250, score_args=scores
        )
        return analyzer.load_pairwise_scores("s")["all_modules"].T


def ranks(x: Tensor) -> Tensor:
    """Return ranks along the first axis, centred."""
    places = x.argsort(0).argsort(0).double()
    return places - places.mean(0)


def main(subsets: int = 50, seeds: int = 3) -> None:
    """Measure, and write the scores with the machine and the time of each method."""
    torch.set_num_threads(1)
    page = of_the_page()
    x, y, test, train, ends, path, of = (page[name] for name in ("x", "y", "test", "train", "ends", "path", "of"))
    halves = torch.stack(
        [torch.randperm(1000, generator=torch.Generator().manual_seed(i))[:500] for i in range(subsets)]
    )

    def margins(p: dict[str, Tensor]) -> Tensor:
        log_p = -torch.vmap(page["loss"], (None, 0, 0))(p, *test)
        return log_p - torch.log(-torch.expm1(log_p))

    outputs = torch.stack([torch.vmap(margins)(page["trained"](halves, 100 + seed)[-1]) for seed in range(seeds)])

    def theirs(p: dict[str, Tensor], **options: Any) -> Tensor:
        model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
        model.load_state_dict(p)
        loss = lambda outputs, y: nn.functional.cross_entropy(outputs, y, reduction="sum")
        return kronfluence_scores(model, loss, (x, y), test, **options)

    def columns(p: dict[str, Tensor]) -> dict[str, Tensor]:
        return {i: torch.cat([p[f"{i}.weight"], p[f"{i}.bias"][:, None]], 1) for i in "02"}

    def joined(p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        one = x.new_ones(*x.shape[:-1], 1)
        hidden = torch.tanh(nn.functional.linear(torch.cat([x, one], -1), p["0"]))
        return nn.functional.cross_entropy(nn.functional.linear(torch.cat([hidden, one], -1), p["2"]), y)

    loss, generator = page["loss"], torch.Generator().manual_seed(0)
    methods: dict[str, Callable[[], Tensor]] = {
        "EKFAC": lambda: sum(page["ekfac"](loss, p, train, test) for p in ends),
        "EKFAC, sampled": lambda: sum(page["ekfac"](loss, p, train, test, page["drawn"](p)) for p in ends),
        "EKFAC, biases joined": lambda: sum(page["ekfac"](joined, columns(p), train, test) for p in ends),
        "EKFAC, sampled, biases joined": lambda: sum(
            page["ekfac"](joined, columns(p), train, test, page["drawn"](p)) for p in ends
        ),
        "EKFAC, one model": lambda: page["ekfac"](loss, ends[0], train, test),
        "kronfluence, empirical": lambda: sum(theirs(p) for p in ends),
        "kronfluence, sampled": lambda: sum(theirs(p, empirical=False) for p in ends),
        "kronfluence, sampled, damping 1e-8 (its default)": lambda: sum(
            theirs(p, empirical=False, damping=1e-8) for p in ends
        ),
        "TRAK": lambda: page["trak"](loss, ends, train, test),
        "TRAK, damping 0": lambda: page["trak"](loss, ends, train, test, damping=0.0),
        "TracIn": lambda: sum(page["tracin"](loss, [of(p, i) for p in path], train, test) for i in range(5)),
        "leverage": lambda: sum(page["accumulate"](loss, p, train, page["Leverage"](1e-3)) for p in ends)[:, None],
        "random": lambda: torch.randn(1000, 200, generator=generator),
    }
    found, kept = {}, {}
    for name, scored in methods.items():
        start = time.process_time()
        kept[name] = scored().double()
        seconds = time.process_time() - start
        predicted = ranks(torch.stack([kept[name][half].sum(0) for half in halves]))
        each = [torch.cosine_similarity(predicted, ranks(one), dim=0).mean() for one in outputs]
        averaged = torch.cosine_similarity(predicted, ranks(outputs.mean(0)), dim=0)
        found[name] = {
            "lds": round(torch.stack(each).mean().item(), 4),
            "lds_std_over_seeds": round(torch.stack(each).std().item(), 4),
            "lds_of_averaged_outputs": round(averaged.mean().item(), 4),
            "seconds": round(seconds, 2),
        }
        print(name, found[name], flush=True)
    theirs_flat = kept["kronfluence, empirical"].flatten()
    agreement = {
        name: round(torch.corrcoef(torch.stack([kept[name].flatten(), theirs_flat]))[0, 1].item(), 6)
        for name in ("EKFAC", "EKFAC, biases joined")
    }
    record = {
        "setting": {"subsets": subsets, "seeds": seeds, "training samples": 1000, "test samples": 200},
        "environment": environment(),
        "correlation with kronfluence, empirical": agreement,
        "methods": found,
    }
    where = ROOT / "benchmarks/results/influence/digits.json"
    where.parent.mkdir(exist_ok=True)
    where.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
