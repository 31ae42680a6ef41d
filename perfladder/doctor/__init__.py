"""What limits a measurement on this machine, and what to do about it."""
