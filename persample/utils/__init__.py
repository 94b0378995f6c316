"""Helpers that know nothing of gradients: pytrees, random streams, dtypes, and the state of a thread."""
