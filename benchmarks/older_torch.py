"""Names that persample needs and the torch of a GPU may not have yet: import this first.

A GPU comes with the torch of its machine. What persample takes from later versions serves losses that no row has.
"""

from __future__ import annotations

import torch
from torch._inductor import custom_graph_pass

if not hasattr(torch.nn.functional, "linear_cross_entropy"):  # until torch 2.12
    torch.nn.functional.linear_cross_entropy = lambda *_: None
if not hasattr(custom_graph_pass, "CustomSchedulerPass"):
    custom_graph_pass.CustomSchedulerPass = custom_graph_pass.CustomGraphPass
