"""The report: one model, and its Markdown view."""

from __future__ import annotations


def build_report(path):
    return None


def write_report(report, path):
    return None
