"""The user's loss as a function of flat tensors, checked each time it is called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from persample.errors import LossError
from persample.gradients import ParamSpec
from persample.inputs.modules import ParamTree
from persample.inputs.options import Outputs
from persample.utils import trees
from persample.utils.tracing import inside


@dataclass(frozen=True)
class SampleLoss:
    """The loss ℓ in the engines' form: from the tensors of the parameters and the leaves of one sample to (ℓ, aux).

    Args:
        fn: the user's loss.
        params: the flattened params, which call the loss with tensors in place of the parameters.
        spec: the structure, names, shapes and dtypes of results like the parameters.
        batch: the structure of the batch.
        batched: for each leaf of the batch, whether it holds one row per sample.
        unpack: whether the batch is a plain tuple or list, passed as positional arguments.
        keep_batch_dim: whether each sample is passed with a leading axis of 1.
        outputs: "scalar", or "rows" if the loss of one sample is a vector ``[K]``.
        called: the name of the function's argument, for messages.
        given: the name of the batch's argument, for messages.
    """

    fn: Callable[..., Any]
    params: ParamTree
    spec: ParamSpec
    batch: trees.TreeSpec
    batched: tuple[bool, ...]
    unpack: bool
    keep_batch_dim: bool
    outputs: Outputs = "scalar"
    called: str = "loss_fn"
    given: str = "batch"

    def shaped(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the leaves of one sample in the shape that the user's loss takes."""
        if not self.keep_batch_dim:
            return list(leaves)
        return [x.unsqueeze(0) if split else x for x, split in zip(leaves, self.batched, strict=True)]

    def arguments(self, shaped: Sequence[Any]) -> Sequence[Any]:
        """Return the arguments after ``params`` in a call of the user's loss, from leaves that are ``shaped``."""
        sample = trees.unflatten(list(shaped), self.batch)
        return sample if self.unpack else (sample,)

    def returned(self, params: Sequence[Tensor], leaves: Sequence[Any]) -> Any:
        """Call the user's function for one sample, and return its result unchecked."""
        with inside(self.called, self.params):
            return self.params.call(params, self.fn, self.arguments(self.shaped(leaves)))

    def __call__(self, params: Sequence[Tensor], leaves: Sequence[Any]) -> tuple[Tensor, Any]:
        """Return the loss of one sample, and the pair (aux, whether the loss returned aux)."""
        returned = self.returned(params, leaves)
        loss, aux = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, ())
        _check_loss(loss, returned, self.outputs)
        if returned is not loss:
            _check_aux(aux)
        return loss, (aux, isinstance(returned, tuple))


def _check_loss(loss: Any, returned: Any, outputs: Outputs) -> None:
    expected = "one real scalar tensor" if outputs == "scalar" else "one real vector [K] (outputs='rows')"
    if not isinstance(loss, Tensor):
        received = type(loss).__name__ if loss is returned else f"a 2-tuple that starts with {type(loss).__name__}"
        if isinstance(returned, tuple | list):
            received = f"a {type(returned).__name__} of {len(returned)}"
        fix = "Return the tensor itself (no .item(), no float()), and with more to return exactly (loss, aux)."
    elif not loss.is_floating_point():
        received, fix = f"dtype {loss.dtype}", "Compute a real floating loss (.float(), or .abs() of a complex one)."
    elif outputs == "rows" and (loss.ndim != 1 or not len(loss)):
        received = f"shape {list(loss.shape)}"
        fix = "Return the K outputs of one sample, for example by .flatten(); for one output leave outputs='scalar'."
    elif outputs == "scalar" and loss.ndim:
        received = f"shape {list(loss.shape)}"
        fix = "loss_fn sees one sample: reduce what is left, for example with .sum(), .mean() or .squeeze()."
        if loss.ndim == 1:
            fix += " Or pass outputs='rows' for the gradient of each number."
    else:
        return
    raise LossError(f"loss_fn: expected to return {expected}, received {received}. {fix}")


def _check_aux(aux: Any) -> None:
    for path, leaf in zip(trees.paths(aux, "aux"), trees.flatten(aux)[0], strict=True):
        if not isinstance(leaf, Tensor):
            raise LossError(
                f"loss_fn returned (loss, aux): expected {path} to be a tensor, received {type(leaf).__name__}. "
                "Return tensors only, torch.as_tensor(x) for a number."
            )


NOT_CONNECTED = (
    "loss_fn: expected a loss that depends on params, received one that depends on none of them. Likely causes: it "
    "uses a module or tensors it closed over instead of the params it is given, every path is detached "
    "(stop_gradient, no_grad, .item()), or the parameters sit in a module hidden in a plain Python list (use "
    "nn.ModuleList). Compute the loss from the first argument."
)


class NotConnectedError(LossError):
    """Raised if the loss depends on no parameter."""

    def __init__(self, message: str = NOT_CONNECTED) -> None:
        super().__init__(message)
