"""`perfladder init`: look at a target once, and write a workload file for it that runs."""
