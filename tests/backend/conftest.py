"""What tests of backends share with those of tuning: settings and a cache of their own."""

import pytest
import toys

import perfladder as pl


@pytest.fixture(autouse=True)
def _own_settings(tmp_path):
    pl.config.cache_dir = tmp_path / "tuning-cache"
    toys.calls.clear()
    toys.builds.clear()
    yield
    pl.config.reset_to_defaults()
