"""The errors of the library: each says what was expected, what was received, and what to do."""

from __future__ import annotations

import torch

# Those known to have every private name that is used.
KNOWN_TORCH_VERSIONS = ">=2.13,<2.16"
# Advice that argument checking gives, and engines too.
SAY_RANDOMNESS = (
    "Pass randomness='different' (each sample its own) or 'same' (all samples the same), "
    "or put the module in eval mode."
)
STOP_STATISTICS = "Call .eval() on it, or use GroupNorm; track_running_stats=False normalizes each sample by itself."


class ArgumentError(ValueError):
    """An argument of a call was rejected before anything was computed."""

    @classmethod
    def about(cls, argument: str, *, expected: str, received: str, fix: str) -> ArgumentError:
        """Return an error that says all that is needed to correct the call.

        Args:
            argument: the argument that was rejected, as the caller spells it.
            expected: what it should have been.
            received: what it was.
            fix: what to do.

        Returns:
            The error, ready to be raised.

        Examples:
            >>> print(ArgumentError.about("chunk_size", expected="a positive int", received="0", fix="Use 1 or more."))
            chunk_size: expected a positive int, received 0. Use 1 or more.
        """
        return cls(f"{argument}: expected {expected}, received {received}. {fix}")


class LossError(RuntimeError):
    """The user's loss returned or did something for which per-sample gradients cannot be computed."""


class PersampleWarning(RuntimeWarning):
    """The base of the library's warnings; each cause has its own category, so that one filter silences it."""


class FallbackWarning(PersampleWarning):
    """A call took a slower path than its engine's; the message says why, and what it costs."""


class CompilerWarning(PersampleWarning):
    """Torch's compiler failed, or there is none: the traced program runs operation by operation."""


class RecompilationWarning(PersampleWarning):
    """The same loss is compiled again and again; the message says what changes from call to call."""


class CompileLimitWarning(PersampleWarning):
    """A program gives way to the eager engine, because every call changes something for which it was made."""


class ConditionWarning(PersampleWarning):
    """A linear system is so ill-conditioned that less than half of the digits of its solution are right."""


class BatchStatisticsWarning(PersampleWarning):
    """All gradients are 0 or NaN, because the loss takes a statistic of a batch that is one sample."""


class WrapperWarning(PersampleWarning):
    """The module inside a wrapper is used; the wrapper's own work does not run."""


class TorchVersionWarning(PersampleWarning):
    """The installed torch lacks private names; calls run without them, slower."""

    def __init__(self, *names: str) -> None:
        super().__init__(
            f"torch {torch.__version__} does not have {', '.join(names)}, which persample uses. The call was answered "
            "without: the same results, slower, each time, and an interrupt may leave torch in the state of the call. "
            f"Install a torch that is known (pip install 'torch{KNOWN_TORCH_VERSIONS}'), or a newer persample."
        )


class SinkError(RuntimeError):
    """A folder of results cannot be written, or does not hold what was written to it."""


class TorchVersionError(RuntimeError):
    """The installed torch lacks a private name that the call cannot do without."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(
            f"persample needs {name}, which torch {torch.__version__} does not have. Install a torch that is known "
            f"(pip install 'torch{KNOWN_TORCH_VERSIONS}'), or a newer persample."
        )
