"""Profiles runs and attributes their time to modules and methods: one code path for `perfladder.profile` and rung 2."""
