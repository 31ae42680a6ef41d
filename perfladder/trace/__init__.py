"""One trace as columns, from a torch.profiler window or anyone's trace file, and pure functions over it."""
