"""What a run of the benchmark suite leaves behind, and the tables and figures that are made of it."""
