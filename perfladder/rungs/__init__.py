"""One module a rung: a config, a result, `measure` (runs beside the target) and `run` (runs in the ladder)."""
