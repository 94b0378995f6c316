"""The reasons of our losses, written by hand: one note per row of the table "Where we lose".

``make bench-report`` fails with a message if a loss has no note here, or a note has no loss. The keys are (workload,
quantity, "time" or "memory").
"""

from __future__ import annotations

_MKL = "XLA multiplies with its own kernels, torch with MKL's, which take twice as long on this processor."
_GRAPHS = "The loop holds the graph of one sample, we of 16, half of the batch gradient; `chunk_size` bounds it."
_FREED = "Not comparable: JAX reuses memory that its earlier calls freed; the activations alone are 3 MiB."

NOTES: dict[tuple[str, str, str], str] = {
    ("tutorial TD(0), B=2", "stack", "time"): (
        "A call is all overhead: we check in Python what the loss reads, JAX checks in C++ only its arguments."
    ),
    ("REINFORCE MLP 64, 32x200", "clipped_mean", "time"): (
        "Times of this row vary: 0.64 some hours before, 0.68 and 0.78 in two other processes within the hour."
    ),
    ("REINFORCE MLP 256, 32x200", "clipped_mean", "time"): _MKL,
    ("GRU policy, 32x50", "clipped_mean", "time"): (
        "Fifty steps of small products, each a call into torch: half of our time is addmm, bmm and mm."
    ),
    ("tutorial TD(0), B=4096", "stack", "time"): (
        "Half of a call is overhead: we check in Python what the loss reads. The others ran on a faster day (Age)."
    ),
    ("tutorial TD(0), B=65536", "stack", "time"): (
        "Both write the result once, at the speed of the machine's memory. The others ran on a faster day (Age)."
    ),
    ("TD(0) MLP 256, B=256", "mean", "time"): _MKL,
    ("TD(0) MLP 64, B=256", "natural_gradient", "memory"): (
        "Not comparable: JAX reuses memory that its earlier calls freed; a float64 matrix [B, B] is 0.5 MiB."
    ),
    ("REINFORCE MLP 64, 32x200", "natural_gradient", "memory"): _FREED,
    ("TD(0) MLP 64, B=1024", "clipped_mean", "memory"): (
        "Not comparable: JAX reuses memory that its earlier calls freed; the activations alone are 0.5 MiB."
    ),
    ("TD(0) MLP 256, B=1024", "clipped_mean", "memory"): (
        "The loop holds the graph of one sample, we of 1024, as the batch gradient does; `chunk_size` bounds it."
    ),
    ("REINFORCE MLP 64, 32x200", "clipped_mean", "memory"): _FREED,
    ("REINFORCE MLP 64, 32x200", "variance", "memory"): _FREED,
    ("REINFORCE MLP 256, 32x200", "clipped_mean", "memory"): (
        "Not comparable: JAX reuses memory that its earlier calls freed; the activations alone are 12 MiB."
    ),
    ("GRU policy, 32x50", "clipped_mean", "memory"): (
        "Not comparable: JAX reuses memory that its earlier calls freed."
    ),
    ("DQN Nature CNN, B=32", "clipped_mean", "memory"): (
        "One sample at a time there, in over ten times our time; `chunk_size` bounds ours."
    ),
    ("DQN Nature CNN, B=32", "norms", "memory"): (
        "The activations of all samples, as the batch gradient; part of JAX's lies in memory freed before."
    ),
    ("transformer tied, B=16", "clipped_mean", "memory"): (
        "The loop holds the graph of one sample, we of 16, less than the batch gradient; `chunk_size` bounds it."
    ),
    ("transformer tied 32000, B=16", "clipped_mean", "memory"): _GRAPHS,
    ("LoRA transformer, B=16", "clipped_mean", "memory"): _GRAPHS,
    ("LoRA transformer, B=16", "stack", "memory"): _GRAPHS,
    ("wide MLP 5120, B=32", "clipped_mean", "memory"): (
        "Not comparable: BackPACK's result lies in `.grad`, allocated by its earlier calls; ours is new."
    ),
}
