"""The benchmark suite: persample, the naive loop and every peer, checked before they are timed."""
