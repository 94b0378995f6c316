"""Kernels of other libraries on CPUs, where they are faster than torch's own."""
