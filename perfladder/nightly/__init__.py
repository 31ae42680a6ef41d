"""Nightly profiling: the history of a workload, its noise, the nights on which it changed, and a verdict on the last one."""
