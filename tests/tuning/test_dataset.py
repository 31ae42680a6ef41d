"""Samples of every form become calls."""

import pytest
import torch
from torch.utils.data import Dataset

from perfladder.errors import InputError
from perfladder.tuning.dataset import DataLoaderFactory, calls_of, cycled


def shapes(dataset, batch_size, **options):
    return [
        [list(value.shape) if isinstance(value, torch.Tensor) else value for value in (*args, *kwargs.values())]
        for args, kwargs in calls_of(dataset, batch_size, **options)
    ]


def test_tensors_are_stacked_and_the_rest_is_dropped():
    samples = [torch.full((3, 4), float(n)) for n in range(5)]
    assert shapes(samples, 2) == [[[2, 3, 4]], [[2, 3, 4]]]
    (first, _), *_ = calls_of(samples, 2)
    assert first[0][:, 0, 0].tolist() == [0, 1]


def test_a_short_dataset_begins_again():
    (((batch,), _),) = calls_of([torch.tensor(1.0), torch.tensor(2.0)], 5)
    assert batch.tolist() == [1, 2, 1, 2, 1]


def test_a_bare_tensor_or_text_is_one_sample():
    assert shapes(torch.ones(3, 4), 2) == [[[2, 3, 4]]]
    assert list(calls_of("a lighthouse", 2)) == [((["a lighthouse", "a lighthouse"],), {})]


def test_mappings_are_keyword_arguments_and_settings_stay_plain():
    samples = [{"prompt": f"p{n}", "x": torch.ones(2), "steps": 4, "seed": n} for n in range(2)]
    ((args, kwargs),) = calls_of(samples, 2)
    assert args == ()
    assert (kwargs["prompt"], kwargs["steps"]) == (["p0", "p1"], 4)
    assert kwargs["x"].shape == (2, 2)
    assert kwargs["seed"].tolist() == [0, 1]


def test_sequences_are_positional_and_pairs_are_both():
    ((args, kwargs),) = calls_of([(torch.ones(2), torch.zeros(3))] * 2, 2)
    assert ([list(a.shape) for a in args], kwargs) == ([[2, 2], [2, 3]], {})
    ((args, kwargs),) = calls_of([((torch.ones(2),), {"scale": 2.0})] * 2, 2)
    assert ([list(a.shape) for a in args], kwargs) == ([[2, 2]], {"scale": 2.0})


def test_dataset_and_factory_of_torch():
    class Numbers(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return torch.tensor([float(index)])

    assert shapes(Numbers(), 2, max_batches=1) == [[[2, 1]]]
    factory = DataLoaderFactory(Numbers(), collate_fn=lambda samples: {"x": torch.cat(samples)})
    assert [kwargs["x"].tolist() for _, kwargs in calls_of(factory, 2)] == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("dataset", "match"),
    [
        (None, "give samples"),
        ({"prompt": "x"}, "one sample goes into a list"),
        (iter([1]), "expected a list of samples"),
        ([], "holds no samples"),
        ([torch.ones(2), torch.ones(3)], r"sample has the shapes \[2\] and \[3\]"),
        ([{"a": 1}, {"b": 1}], "'a' in some samples only"),
        ([{"a": 1}, [1]], "is a dict in one sample and a list in another"),
        ([{"a": {"b": torch.ones(1)}}, {"a": {"b": 3}}], r"sample\['a'\]\['b'\] is a Tensor in one sample"),
        ([(1, 2), (1,)], "length differs"),
        ([{3: torch.ones(1)}, {3: torch.ones(1)}], "3 is none"),
    ],
)
def test_wrong_forms_are_named(dataset, match):
    with pytest.raises(InputError, match=match):
        list(calls_of(dataset, 2))


@pytest.mark.parametrize("size", [0, -1, 1.5, True])
def test_batch_size_is_checked(size):
    with pytest.raises(InputError, match="batch_size: expected a whole number"):
        list(calls_of([torch.ones(1)], size))


def test_calls_come_again():
    assert list(cycled([1, 2], 5)) == [1, 2, 1, 2, 1]
