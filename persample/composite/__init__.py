"""Losses L = g(f(x₁), …, f(xₙ)) that couple samples, differentiated with one graph alive at a time."""

from persample.composite.grads import composite_grads

__all__ = ["composite_grads"]
