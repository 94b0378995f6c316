"""Losses made of linear layers and embeddings: these are computed on the rows of all samples at once."""
