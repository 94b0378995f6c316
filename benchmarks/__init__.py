"""The benchmark suite: persample, the naive loop and other libraries, each checked before it is timed."""
