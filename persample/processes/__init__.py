"""Several processes of ``torch.distributed`` as one."""

from persample.processes.group import Processes, check_group, own_rows
from persample.processes.merging import merged, one_by_one

__all__ = ["Processes", "check_group", "merged", "one_by_one", "own_rows"]
