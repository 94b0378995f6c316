"""What a workload is: a seeded model, the loss of one sample, the same loss written for the batch, and a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace as _replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from benchmarks.saved import Saved, save


@dataclass(frozen=True)
class Workload:
    """A model with its loss.

    Args:
        kind: the model and loss, by which other frameworks rebuild them.
        sizes: the sizes of the model and the batch.
        model: the differentiated module.
        loss_fn: the loss of one sample: (model, *sample) → ``[]``.
        batch_loss: the mean loss, written for the batch: (model, *batch) → ``[]``.
        batch: tensors with a leading batch axis.
        name: key of WORKLOADS.
        functional: the loss of one sample as a function of the parameters, (params, *sample) → ``[]``, where that is
            how one would write it.
        target: a frozen network that the losses close over.
        held_out: a batch of validation samples.
    """

    kind: str
    sizes: dict[str, Any]
    model: nn.Module
    loss_fn: Callable[..., Tensor]
    batch_loss: Callable[..., Tensor]
    batch: tuple[Tensor, ...]
    name: str = ""
    functional: Callable[..., Tensor] | None = None
    target: nn.Module | None = None
    held_out: tuple[Tensor, ...] = ()

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that are differentiated, as autograd wants them."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @property
    def params(self) -> dict[str, Tensor]:
        """The same, detached."""
        return {name: p.detach() for name, p in self.trained.items()}

    @property
    def frozen(self) -> dict[str, Tensor]:
        """The parameters that are not: of the model, or of the target network."""
        return {name: p.detach() for name, p in (self.target or self.model).named_parameters() if not p.requires_grad}

    def pure_loss(self, params: dict[str, Tensor], *sample: Tensor) -> Tensor:
        """Compute the loss of one sample as a function of the parameters, as torch.func wants it."""
        if self.functional is not None:
            return self.functional(params, *sample)
        return functional_call(_Called(self), {f"model.{name}": p for name, p in params.items()}, sample)

    def to(self, where: str | torch.dtype) -> Workload:
        """Move networks (in place) and batch to a device, or what is floating of them to a dtype."""
        for module in (self.model, self.target):
            if module is not None:
                module.to(where)
        fixed = isinstance(where, torch.dtype)

        def moved(batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return tuple(x if fixed and not x.is_floating_point() else x.to(where) for x in batch)

        return _replace(self, batch=moved(self.batch), held_out=moved(self.held_out))

    def saved(self) -> Saved:
        """Turn it into arrays."""
        params, frozen = ({k: v.cpu().numpy() for k, v in part.items()} for part in (self.params, self.frozen))
        return Saved(self.name, self.kind, self.sizes, params, frozen, tuple(x.cpu().numpy() for x in self.batch))

    def save(self, path: str | Path) -> None:
        """Write it as one .npz file (see ``benchmarks.saved``)."""
        save(self.saved(), path)


class _Called(nn.Module):
    """The loss as a module, so that functional_call reaches the model through it."""

    def __init__(self, work: Workload):
        super().__init__()
        self.model, self.loss_fn = work.model, work.loss_fn

    def forward(self, *sample):
        return self.loss_fn(self.model, *sample)
