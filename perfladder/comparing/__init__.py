"""Whether one version of a workload is faster than another: runs side by side, or both measured now in turns."""
