"""Losses made of linear layers and embeddings: each layer is computed once, on the rows of all samples."""
