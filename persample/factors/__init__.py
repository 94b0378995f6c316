"""How the B gradients of one parameter are stored, and what can be asked of them without writing them out."""

from persample.factors.conv import Conv
from persample.factors.defer import Deferral, factor_of, suited
from persample.factors.dense import Dense
from persample.factors.embedding import Embedding
from persample.factors.join import concatenate
from persample.factors.outer import Outer
from persample.factors.protocol import Factor
from persample.factors.total import Total, total

__all__ = [
    "Conv",
    "Deferral",
    "Dense",
    "Embedding",
    "Factor",
    "Outer",
    "Total",
    "concatenate",
    "factor_of",
    "suited",
    "total",
]
