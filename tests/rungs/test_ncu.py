"""Rung 5 in the ladder and on the command line, with an `ncu` that does as it is told, and with a real one on a GPU."""

"""PLACEHOLDER"""
