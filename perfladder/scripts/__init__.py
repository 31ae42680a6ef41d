"""An unmodified script as a target: it runs up to the call that matters, which then is made again and again.

As a workload: `target: perfladder.scripts:build`, `target_args: {script: ..., arguments: [...]}` and
`call: perfladder.scripts:call_again`.
"""

from perfladder.scripts.target import build, call_again

__all__ = ["build", "call_again"]
