"""What tests of tuning share: settings and a cache of their own, and toys that count."""

import pytest
import toys

import perfladder as pl


@pytest.fixture(autouse=True)
def _own_settings(tmp_path):
    """Each test has its own cache, and leaves the settings as they were."""
    pl.config.cache_dir = tmp_path / "tuning-cache"
    toys.calls.clear()
    toys.builds.clear()
    yield
    pl.config.reset_to_defaults()


@pytest.fixture
def tuned_toy():
    """A toy that serves its calls, of batches of 1 to 4 samples, by a faster backend; counted in `toys.calls`."""

    def make(toy=None, **options):
        wrapper = pl.Module(
            toys.Toy() if toy is None else toy,
            strategy=pl.OneBackendStrategy(toys.Faster()).enable_performance_validation(False),
            **options,
        )
        pl.tune(wrapper, toys.samples(4), batch_sizes=[1, 2, 4])
        assert wrapper.state == "tuned"
        toys.calls.clear()
        return wrapper

    return make
