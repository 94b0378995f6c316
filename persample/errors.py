"""The errors of the library: each says what was expected, what was received, and what to do."""

from __future__ import annotations

import torch

# The versions that the tests are run with; pyproject.toml says the same.
TORCH_VERSIONS = ">=2.12,<2.14"
# Advice that argument checking gives, and engines too.
SAY_RANDOMNESS = (
    "Pass randomness='different' (each sample its own) or 'same' (all samples the same), "
    "or put the module in eval mode."
)
STOP_STATISTICS = "Call .eval() on it, replace it by GroupNorm, or build it with track_running_stats=False."


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


class FallbackWarning(RuntimeWarning):
    """A call was answered in a slower way than its engine's; the message says why, and what it costs."""


class CompileLimitWarning(FallbackWarning):
    """``engine="compiled"`` answers eagerly, because the loss changes at every call what it was compiled for."""


class SinkError(RuntimeError):
    """A folder of results cannot be written, or does not hold what was written to it."""


class TorchVersionError(RuntimeError):
    """The installed torch lacks a private name that the engine needs."""

    @classmethod
    def about(cls, name: str) -> TorchVersionError:
        """Return an error that says which name is missing, and which versions of torch have it.

        Args:
            name: the name, with its module.

        Returns:
            The error, ready to be raised.

        Examples:
            >>> "expected torch>=2.12,<2.14 to have it" in str(TorchVersionError.about("torch._C.no_such_name"))
            True
        """
        return cls(
            f"persample needs {name}, which torch {torch.__version__} does not have; expected torch{TORCH_VERSIONS} to "
            f"have it. Install such a version (pip install 'torch{TORCH_VERSIONS}'), or a newer persample."
        )
