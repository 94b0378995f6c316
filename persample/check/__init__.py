"""Everything the door refuses, one file per argument. What is past it is trusted."""

from persample.check.call import check_call
from persample.check.options import check_options
from persample.check.reduce import reductions

__all__ = ["check_call", "check_options", "reductions"]
