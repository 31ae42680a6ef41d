"""How rung 1 times: the timer and its arithmetic, cadence, memory, and the models of its result."""
