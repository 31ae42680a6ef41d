import importlib
import inspect
import subprocess
import sys

import pytest
import yaml

from perfladder.workload import load_workload
from perfladder.workloads import builtin_names, builtin_path


def test_names_are_the_packaged_workloads():
    assert builtin_names() == [
        "diffusion",
        "diffusion-sd15",
        "embedding",
        "flux-transformer",
        "llama-1b",
        "sdxl-unet",
        "streaming",
    ]


def test_path_of_a_name_is_its_file():
    path = builtin_path("streaming")
    assert path is not None
    assert yaml.safe_load(path.read_text())["name"] == "streaming"


@pytest.mark.parametrize("name", ["", "no-such", "../workloads/diffusion", "diffusion.yaml"])
def test_unknown_name_has_no_path(name):
    assert builtin_path(name) is None


@pytest.mark.parametrize("name", builtin_names())
def test_file_fits_its_factory(name):
    workload = load_workload(name).workload
    module, _, factory = workload.target.rpartition(":")
    signature = inspect.signature(getattr(importlib.import_module(module), factory))
    signature.bind(**workload.target_args)
    assert {"device", "dtype"} <= set(signature.parameters)
    assert workload.name == name
    assert workload.model
    assert workload.task


def test_embedding_counts_its_sentences_as_items():
    workload = load_workload("embedding").workload
    assert workload.items_per_call == len(workload.inputs["sentences"])


def test_streaming_media_matches_its_inputs():
    workload = load_workload("streaming").workload
    assert workload.media is not None
    assert workload.media.frames_per_chunk == workload.inputs["frames_per_chunk"]


@pytest.mark.slow
def test_looking_up_a_name_does_not_import_torch():
    code = "import sys, perfladder.workloads as w; w.builtin_path('streaming'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
