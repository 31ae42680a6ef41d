"""Wrappers go into the places of an object's modules, and come out again."""

import functools

import pytest
import toys
from torch import nn

import perfladder as pl
from perfladder.errors import InputError
from perfladder.tuning.inspect import InspectedModulesInfo, ModuleInfo
from perfladder.tuning.module import control_of
from perfladder.tuning.wrap import wrapped_in


class Pipe:
    def __init__(self):
        self.unet = toys.Toy()
        self.encoders = [toys.Toy(), toys.Toy()]
        self.parts = {"vae": nn.Sequential(toys.Toy(), toys.Toy())}
        self.alias = self.unet
        self._cached = {"again": self.unet}

    def __call__(self, x):
        return self.parts["vae"](self.encoders[0](self.unet(x)))


PATHS = ["unet", "encoders.0", "parts.vae.1"]


@pytest.fixture
def pipe():
    return Pipe()


def test_paths_lead_into_attributes_lists_dicts_and_modules(pipe):
    before = [pipe.unet, pipe.encoders[0], pipe.parts["vae"][1]]
    assert pl.wrap(pipe, PATHS) is pipe
    wrapped = [pipe.unet, pipe.encoders[0], pipe.parts["vae"][1]]
    assert [control_of(wrapper).inner for wrapper in wrapped] == before
    assert [control_of(wrapper).name for wrapper in wrapped] == PATHS, "the whole path is the name"
    assert not isinstance(pipe.encoders[1], pl.Module)
    assert not isinstance(pipe.parts["vae"][0], pl.Module)


def test_a_shared_module_has_one_wrapper_everywhere(pipe):
    pl.wrap(pipe, iter(["unet"]))
    assert pipe.unet is pipe.alias is pipe._cached["again"]
    assert isinstance(pipe.unet, pl.Module)


def test_a_shared_module_at_two_given_paths_has_one_wrapper(pipe):
    pl.wrap(pipe, ["unet", "alias"])
    assert pipe.unet is pipe.alias is pipe._cached["again"]
    assert control_of(pipe.unet).name == "unet"


def test_a_module_that_is_shared_inside_others_has_one_wrapper(pipe):
    shared = pipe.parts["vae"][1]
    pipe.decoder = nn.ModuleDict({"block": shared, "blocks": nn.ModuleList([shared])})
    pl.wrap(pipe, ["parts.vae.1"])
    wrapper = pipe.parts["vae"][1]
    assert pipe.decoder["block"] is pipe.decoder["blocks"][0] is wrapper
    pl.unwrap(pipe)
    assert pipe.decoder["block"] is pipe.decoder["blocks"][0] is pipe.parts["vae"][1] is shared


def test_a_second_reference_that_cannot_be_changed_warns(pipe):
    pipe.fixed = (pipe.unet,)
    with pytest.warns(UserWarning, match=r"'unet' lies at 'fixed\.0' too, which cannot be replaced") as caught:
        pl.wrap(pipe, ["unet"])
    assert caught[0].filename == __file__
    assert isinstance(pipe.unet, pl.Module)


def test_unwrapping_gives_every_module_back(pipe):
    before = [pipe.unet, pipe.alias, *pipe.encoders, *pipe.parts["vae"], pipe._cached["again"]]
    pl.wrap(pipe, PATHS)
    assert pl.unwrap(pipe) is pipe
    after = [pipe.unet, pipe.alias, *pipe.encoders, *pipe.parts["vae"], pipe._cached["again"]]
    assert all(one is other for one, other in zip(before, after, strict=True))
    with pytest.raises(InputError, match="Nothing in this Pipe is wrapped"):
        pl.unwrap(pipe)


def test_the_object_itself_becomes_its_wrapper():
    toy = toys.Toy()
    info = pl.inspect(toy, toys.samples(), number_of_iterations=1, warmup_iterations=0)
    wrapper = pl.wrap(toy, info.get_modules())
    assert wrapper.module is toy
    assert wrapper.name == "Toy"
    assert pl.unwrap(wrapper) is toy


def test_what_was_inspected_is_known_to_the_wrappers(pipe):
    info = pl.inspect(pipe, toys.samples(), number_of_iterations=1, warmup_iterations=0)
    pl.wrap(pipe, (module for module in info.get_modules()))
    assert control_of(pipe.unet).inspected is pipe
    function = lambda x: pipe(x)  # noqa: E731 (a function that is none of the pipe's)
    other = Pipe()
    info = pl.inspect(other, toys.samples(), inference_function=lambda x: other(x), number_of_iterations=1)
    assert all(module.inspected is not function and callable(module.inspected) for module in info.get_modules())


def test_strategies_go_by_path_or_order(pipe):
    first, second, third = pl.MaxThroughputStrategy(), pl.MinLatencyStrategy(), pl.FirstWinsStrategy()
    pl.wrap(pipe, PATHS, strategies={"encoders.0": second, "unet": first})
    chosen = [control_of(wrapper).strategy for wrapper in (pipe.unet, pipe.encoders[0], pipe.parts["vae"][1])]
    assert chosen == [first, second, None], "by name, whatever the order"
    pl.unwrap(pipe)
    pl.wrap(pipe, PATHS, strategies=[first, second, third])
    chosen = [control_of(wrapper).strategy for wrapper in (pipe.unet, pipe.encoders[0], pipe.parts["vae"][1])]
    assert chosen == [first, second, third]
    pl.unwrap(pipe)
    pl.wrap(pipe, PATHS, strategy=first)
    assert control_of(pipe.parts["vae"][1]).strategy is first


def info_of(path):
    return ModuleInfo(module=toys.Toy(), name=path, object_path=path, parent=None, depth=1)


@pytest.mark.parametrize(
    ("modules", "options", "says"),
    [
        ([], {}, "there is none to wrap"),
        (["unett"], {}, r"modules: .* has no 'unett'. Did you mean 'unet'"),
        (["parts"], {}, "'parts' is a dict, not a module"),
        (["unet", "unet"], {}, "'unet' is given twice"),
        (["parts.vae", "parts.vae.1"], {}, "'parts.vae.1' lies in 'parts.vae'; wrap one of them"),
        ([toys.Toy()], {}, r"not a Toy; one module is wrapped by pl\.Module"),
        ([info_of("gone")], {}, "has no 'gone'"),
        (["unet"], {"strategies": {"unt": pl.FirstWinsStrategy()}}, "'unt' is no module here. Did you mean 'unet'"),
        (["unet"], {"strategies": []}, "or a list of 1, one for each module in order"),
        (["unet"], {"strategies": [None], "strategy": pl.FirstWinsStrategy()}, "give one of them"),
        (["unet"], {"strategy": toys.Faster()}, r"strategy: Faster\(\) is no strategy"),
    ],
)
def test_wrong_input_is_named_and_changes_nothing(pipe, modules, options, says):
    with pytest.raises(InputError, match=says):
        pl.wrap(pipe, modules, **options)
    assert not wrapped_in(pipe)


def test_a_place_that_cannot_be_changed_leaves_all_as_it_was(pipe):
    pipe.fixed = (toys.Toy(),)
    with pytest.raises(InputError, match=r"'fixed\.0' cannot be replaced in a tuple"):
        pl.wrap(pipe, ["unet", "fixed.0"])
    assert not wrapped_in(pipe)
    assert type(pipe.unet) is type(pipe._cached["again"]) is toys.Toy


def test_a_module_is_wrapped_once(pipe):
    pl.wrap(pipe, ["unet"])
    with pytest.raises(InputError, match="unet is wrapped already"):
        pl.wrap(pipe, ["encoders.0", "unet"])
    assert type(pipe.encoders[0]) is toys.Toy


def test_wrapping_another_object_leaves_the_first_as_it_is(pipe):
    other = Pipe()
    pl.wrap(pipe, ["unet"])
    pl.wrap(other, ["unet", "encoders.0"])
    assert [control.name for control in wrapped_in(pipe)] == ["unet"]
    assert [control.name for control in wrapped_in(other)] == ["unet", "encoders.0"]


def test_listing_the_same_path_twice_is_an_error():
    listed = InspectedModulesInfo(1.0, 1)
    listed.add_module(info_of("unet"))
    with pytest.raises(InputError, match="listed already"):
        listed.add_module(info_of("unet"))


@pytest.mark.parametrize(
    "reach",
    [
        lambda pipe: pipe,
        lambda pipe: pipe.__call__,
        lambda pipe: pipe.unet,
        lambda pipe: lambda x: pipe(x),
        lambda pipe: functools.partial(lambda pipe, x: pipe(x), pipe),
        lambda pipe: (lambda inner: lambda x: inner(x))(lambda x: pipe.unet(x)),
        lambda pipe: functools.wraps(pipe.__call__)(lambda x: pipe(x)),
        lambda pipe: lambda x, held=pipe: held(x),
    ],
    ids=["object", "method", "module", "closure", "partial", "nested closure", "decorated", "default"],
)
def test_wrapped_modules_are_found_from_what_is_called(pipe, reach):
    pl.wrap(pipe, ["unet"])
    assert [control.name for control in wrapped_in(reach(pipe))] == ["unet"]


def test_a_function_with_a_name_that_is_not_bound_yet_is_no_error():
    def outer():
        def function(x):
            return later(x)

        found = wrapped_in(function)
        later = toys.Toy()
        return found, later

    assert outer()[0] == []
