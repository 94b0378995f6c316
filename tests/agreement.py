"""The eager engine against the loop, for losses that the oracle in float64 would not do justice to."""

from oracle import assert_trees_close

from persample import per_sample_grads


def assert_eager_is_loop(loss, params, batch, wanted=None, rtol=1e-9, **options):
    eager, loop = (per_sample_grads(loss, params, batch, wanted, engine=e, **options) for e in ("eager", "loop"))
    assert_trees_close(eager, loop, rtol)
