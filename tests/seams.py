"""The seams at which tests reach inside of the engines: thresholds made small, and the answers of the layers engine.

All other tests see persample from outside; ``compiler.py`` stands in for Inductor.
"""

from __future__ import annotations

from persample import vmap_rules
from persample.engines import layers
from persample.engines.compiled import capture, sizes
from persample.engines.layers import interceptor
from persample.factors import Conv, contractions, cost_model
from persample.streams.sink import folder


def answers_of_layers(monkeypatch):
    """Return a list of what the layers engine will answer, call by call: None where it refuses the loss."""
    answers, gradients = [], layers.gradients

    def watched(*args):
        answers.append(None)
        answers[-1] = gradients(*args)
        return answers[-1]

    monkeypatch.setattr(layers, "gradients", watched)
    return answers


def without_layers(monkeypatch):
    """Send every loss to vmap at once."""
    monkeypatch.setattr(layers, "unsuited", lambda call: "as the test says")


def with_rule(monkeypatch, function, rule):
    """Let vmap call a rule in place of a function of torch."""
    monkeypatch.setitem(vmap_rules._RULES, function, rule)


def without_copies(monkeypatch):
    """Treat matrices of any size as too large for one copy per sample."""
    monkeypatch.setattr(interceptor, "_FEW", 0)


def blocks_of(monkeypatch, elements):
    """Write gradients out, and copy operands, in blocks of so many elements."""
    monkeypatch.setattr(cost_model, "BLOCK", elements)


def float32_for_few_terms(monkeypatch):
    """Compute also the inner products of few small samples as those of many."""
    monkeypatch.setattr(contractions, "_SMALL", 0)


def inner_products_of(monkeypatch, pixels):
    """Compute norms of convolutions by inner products of pixels, or else of patches, whatever they cost."""
    monkeypatch.setattr(cost_model, "inner_products_are_faster", lambda size: True)
    monkeypatch.setattr(Conv, "_multiplies_pixels", pixels)


def captures_at_most(monkeypatch, count):
    """Answer a loss eagerly that was captured so often."""
    monkeypatch.setattr(capture, "MOST_CAPTURES", count)


def graphs_compared(monkeypatch):
    """Return a list of the graphs, traced for a thousand samples, that one program for all sizes is made of."""
    pairs = []
    monkeypatch.setattr(sizes, "unified", lambda *graphs: pairs.append(graphs))
    return pairs


def commits_after_every_batch(monkeypatch):
    """Commit to a folder after every batch, however long it takes."""
    monkeypatch.setattr(folder, "_PATIENCE", 0)
