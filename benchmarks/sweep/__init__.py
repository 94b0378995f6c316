"""The sweep: workloads whose sizes are drawn, so that no number holds for one size only."""
