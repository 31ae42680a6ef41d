"""What makes two tunings the same: a change of any part is another key, and nothing else is."""

import copy
import os
import shutil
import stat
from importlib.metadata import version

import pytest
import torch
import toys
from torch import nn

from perfladder.errors import NotPossibleHereError
from perfladder.tuning import cache as cache_module
from perfladder.tuning.cache import BuildCache, code_digest, content_key, source_of, weights_digest
from perfladder.tuning.graphs import GraphTable
from perfladder.tuning.records import CandidateRecord

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self, width=4, epsilon=1e-5):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width))
        self.register_buffer("offset", torch.zeros(width))
        self.epsilon = epsilon
        self.heads = (2, 2)

    def forward(self, x, scale=1.0):
        return self.layers(x) * scale + self.offset


class SameNet(Net):
    pass


def graph_of(*shapes, **settings):
    table = GraphTable(("x", "scale"), strict=True, limit=8)
    for shape in shapes or ((1, 4), (2, 4)):
        graph = table.observe((torch.ones(shape),), settings, shape[0])
    return graph


def key(module=None, graph=None):
    return content_key(module or Net(), graph or graph_of(), CPU)


def test_the_same_content_has_the_same_key():
    assert key() == key() == key(copy.deepcopy(Net()))


def changed(change):
    module = Net()
    with torch.no_grad():
        change(module)
    return module


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.layers[0].weight[0].add_(1e-6),
        lambda m: m.offset.fill_(-0.0),
        lambda m: m.half(),
        lambda m: m.layers.append(nn.Identity()),
        lambda m: setattr(m, "epsilon", 1e-6),
        lambda m: setattr(m, "heads", (2, 4)),
        lambda m: setattr(m.layers[1], "eps", 1e-3),
        lambda m: m.layers.__setitem__(1, nn.RMSNorm(4)),
        lambda m: setattr(m.layers[0], "bias", None),
        lambda m: setattr(m, "mode", "fast"),
    ],
    ids=["weight", "sign of zero", "dtype", "layer", "float", "tuple", "inner", "class", "no bias", "new attribute"],
)
def test_any_part_of_the_module_makes_another_key(change):
    assert key(changed(change)) != key()


def test_another_class_is_other_code():
    assert key(SameNet()) != key()


@pytest.mark.parametrize(
    "graph",
    [
        lambda: graph_of((1, 4), (4, 4)),
        lambda: graph_of((1, 4, 4), (2, 4, 4)),
        lambda: graph_of(scale=2.0),
    ],
)
def test_another_graph_makes_another_key(graph):
    assert key(graph=graph()) != key()


def test_values_of_settings_count(monkeypatch):
    assert key(graph=graph_of(scale=2.0)) != key(graph=graph_of(scale=3.0))


def test_another_version_of_a_library_makes_another_key(monkeypatch):
    before = key()
    monkeypatch.setattr(cache_module, "version_of", lambda package: "0.0")
    assert key() != before


def test_code_of_a_file_is_known_by_the_file(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    digests = []
    for value in (1, 2):
        (tmp_path / "user_net.py").write_text(f"import torch\nclass Net(torch.nn.Module):\n    value = {value}\n")
        import user_net

        digests.append(code_digest(user_net.Net()))
        source_of.cache_clear()
        monkeypatch.delitem(__import__("sys").modules, "user_net")
    assert digests[0] != digests[1]


def test_code_without_a_file_is_known_by_what_it_does():
    def kind(source):
        names = {"nn": nn, "__name__": "a_notebook"}
        exec(source, names)
        return names["Net"]

    one, same, other = (
        source_of(kind(f"class Net(nn.Module):\n    def forward(self, x):\n        return x * {factor}{comment}"))
        for factor, comment in ((2, ""), (2, "  # twice"), (3, ""))
    )
    assert one == same != other


def test_code_of_libraries_is_known_by_their_version():
    assert source_of(nn.Linear) == f"torch {version('torch')}"


def test_weights_that_are_not_there_have_a_digest_too():
    with torch.device("meta"):
        module = nn.Linear(4, 4)
    assert weights_digest(module) == weights_digest(module)
    assert weights_digest(module) != weights_digest(nn.Linear(4, 4))


def test_weights_of_any_dtype_and_stride_have_a_digest():
    module = nn.Module()
    for name, value in {
        "strided": torch.arange(12.0).reshape(3, 4).t(),
        "empty": torch.empty(0),
        "scalar": torch.tensor(3),
        "brain": torch.ones(3, dtype=torch.bfloat16),
        "flag": torch.tensor([True]),
        "complex": torch.ones(2, dtype=torch.complex64),
        "float8": torch.ones(4).to(torch.float8_e4m3fn),
    }.items():
        module.register_buffer(name, value)
    assert len(weights_digest(module)) == 64


def record(**options):
    return CandidateRecord(backend="toy", description="Toy()", config={}, status="kept", **options)


def test_records_are_kept_and_forgotten(tmp_path):
    cache = BuildCache(tmp_path / "cache")
    assert cache.read("one") is None
    cache.write("one", record(build_s=1.5))
    assert BuildCache(tmp_path / "cache").read("one") == record(build_s=1.5)
    cache.forget("one")
    cache.forget("one")
    assert cache.read("one") is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"backend": "toy"}', "\x00\xff"])
def test_a_damaged_record_is_none(tmp_path, text, caplog):
    cache = BuildCache(tmp_path)
    (tmp_path / "records" / "one.json").write_text(text)
    assert cache.read("one") is None
    assert "The record one in" in caplog.text


def test_folders_are_of_the_user_alone(tmp_path):
    cache = BuildCache(tmp_path / "cache")
    for folder in (cache.root, cache.root / "records"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_module_names_make_safe_folders(tmp_path):
    cache = BuildCache(tmp_path)
    for name in ("../un et/x", "..", "."):
        assert cache.build_folder(name, "0").resolve().parent.parent == (tmp_path / "builds").resolve()


def test_inductor_keeps_its_files_here_inside_the_block_only(tmp_path, monkeypatch):
    cache = BuildCache(tmp_path)
    for before in (None, "/elsewhere"):
        if before is None:
            monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        else:
            monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", before)
        with cache.inductor():
            assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inductor")
        assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == before


def test_blocks_of_several_threads_may_overlap(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    first, second = (BuildCache(tmp_path / name).inductor() for name in "ab")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "b" / "inductor")
    second.__exit__(None, None, None)
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_toys_are_code_of_the_project():
    assert len(source_of(toys.Toy)) == 64


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        NotPossibleHereError, match=r"cache_dir: the folder .*file/cache cannot be made: Not a directory"
    ):
        BuildCache(tmp_path / "file" / "cache")


def test_a_record_that_cannot_be_kept_is_no_error(tmp_path, caplog):
    cache = BuildCache(tmp_path)
    record = CandidateRecord(backend="b", description="B()", config={}, status="kept")
    (tmp_path / "records" / "key.json").mkdir()
    cache.write("key", record)
    assert "The record of B() cannot be kept" in caplog.text


def test_first_calls_of_what_was_loaded_compile_into_the_cache(tmp_path, monkeypatch):
    elsewhere = str(tmp_path / "elsewhere")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", elsewhere)
    compiled, seen = torch.compile(lambda x: x + 1, backend="eager"), []

    def call(x):
        seen.append(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        return compiled(x)

    served = BuildCache(tmp_path).compiled_here(call)
    for _ in range(3):
        assert served(torch.zeros(2)).tolist() == [1, 1]
    own = str(tmp_path / "inductor")
    assert seen == [own, own, elsewhere]


def test_first_calls_go_on_where_the_cache_is_no_folder_any_more(tmp_path, monkeypatch):
    elsewhere = str(tmp_path / "elsewhere")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", elsewhere)
    served = BuildCache(tmp_path / "cache").compiled_here(lambda: os.environ["TORCHINDUCTOR_CACHE_DIR"])
    shutil.rmtree(tmp_path / "cache" / "inductor")
    (tmp_path / "cache" / "inductor").write_text("")
    assert served() == elsewhere
