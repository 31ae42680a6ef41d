"""Nsight Compute on one kernel of a replay: preflight, command, report, diagnosis."""
