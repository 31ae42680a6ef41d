"""Nightly profiling: the history of a workload, its noise, where it changed, and a verdict on the last night."""
