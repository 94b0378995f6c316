"""Factors: the B gradients of one parameter in a compact form, and the operations on that form."""

from persample.factors.conv import Conv
from persample.factors.cost_model import Op
from persample.factors.embedding import Embedding
from persample.factors.factor import Dense, Factor, concatenate
from persample.factors.outer import Outer
from persample.factors.sum import SumFactor, sum_factors
from persample.factors.term_moments import TermMoments
