"""Losses made of linear layers and embeddings: each layer is computed once, on the rows of all samples."""

from persample.engines.layers.engine import gradients, suits
from persample.engines.layers.shared import NotLayersError

__all__ = ["NotLayersError", "gradients", "suits"]
