"""Steps and side effects of the flows: the rung task, MLflow, Prefect artifacts. Installed as `perfladder.tasks`."""
