"""Losses made of linear layers and embeddings: these are computed on the rows of all samples at once."""

from persample.engines.layers.engine import gradients, suits
from persample.engines.layers.guard import NotLayersError

__all__ = ["NotLayersError", "gradients", "suits"]
