"""The order of tasks: what perfladder does under Prefect. Installed as `perfladder.flows`."""
