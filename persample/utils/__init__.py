"""Helpers independent of gradients: pytrees, random streams, dtypes, norms, traces, and the state of a thread."""
