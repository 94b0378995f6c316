"""How the B gradients of one parameter are stored, and what can be asked of them without writing them out."""

from persample.factors.dense import Dense
from persample.factors.protocol import Factor, concatenate

__all__ = ["Dense", "Factor", "concatenate"]
