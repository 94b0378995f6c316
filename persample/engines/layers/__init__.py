"""Losses made of linear and recurrent layers, convolutions and embeddings: each is computed once for all samples."""

from persample.engines.layers.engine import gradients, unsuited
from persample.engines.layers.shared import NotLayersError

__all__ = ["NotLayersError", "gradients", "unsuited"]
