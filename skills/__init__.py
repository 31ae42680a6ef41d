"""The skills for coding agents, as data of the package: `perfladder skill install` copies them."""
