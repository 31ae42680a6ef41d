"""Calls become graphs: what makes one, which sizes it covers, and what is said where none fits."""

import dataclasses

import pytest
import torch

from perfladder.errors import InputError
from perfladder.tuning.dims import BatchDim, DynamicDim
from perfladder.tuning.graphs import GraphSpec, GraphTable, TableModel
from perfladder.tuning.tree import register_input_type


@dataclasses.dataclass
class Request:
    image: torch.Tensor


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


def table_of(*parameters, strict=True, limit=8, **options):
    return GraphTable(parameters, strict=strict, limit=limit, **options)


def observed(calls, *parameters, **options):
    """A table, and the one graph of all calls, given as (batch size, keyword arguments)."""
    table = table_of(*parameters, **options)
    graphs = [table.observe((), kwargs, batch_size) for batch_size, kwargs in calls]
    assert len(table.graphs) == 1
    return table, graphs[-1]


def shapes_of(specs):
    return {spec.access_path: spec.shape for spec in specs}


class TestIdentity:
    def test_position_and_keyword_are_one_graph(self):
        table = table_of("x", "y")
        first = table.observe((ones(1), ones(2)), {}, 1)
        assert table.observe((ones(1),), {"y": ones(2)}, 1) is first
        assert table.observe((), {"y": ones(2), "x": ones(1)}, 1) is first
        assert table.find((), {"y": ones(2), "x": ones(1)}) is first
        assert first.num_samples == 3

    def test_the_order_of_keys_does_not_matter(self):
        table = table_of("x")
        first = table.observe(({"a": ones(1), "b": [2]},), {}, 1)
        assert table.observe(({"b": [2], "a": ones(1)},), {}, 1) is first

    @pytest.mark.parametrize(
        "other",
        [
            {"x": ones(2, 1)},
            {"x": ones(2, dtype=torch.int64)},
            {"x": [ones(2)]},
            {"x": ones(2), "y": ones(2)},
            {"y": ones(2)},
            {"x": ones(2), "y": None},
            {"x": None},
            {},
        ],
    )
    def test_other_names_structures_ranks_and_dtypes_are_other_graphs(self, other):
        table = table_of("x", "y")
        first = table.observe((ones(2),), {}, 2)
        assert table.find((), other) is None
        assert table.observe((), other, 2) is not first
        assert [graph.name for graph in table.graphs] == ["0", "1"]

    def test_a_list_and_a_tuple_are_two_graphs(self):
        table = table_of("x")
        assert table.observe(([ones(1)],), {}, 1) is not table.observe(((ones(1),),), {}, 1)

    def test_sizes_are_no_other_graph(self):
        table = table_of("x")
        assert table.observe((ones(2, 3),), {}, 2) is table.observe((ones(5, 7),), {}, 5)

    def test_values_make_graphs_in_strict_mode_only(self):
        strict, loose = table_of("x"), table_of("x", strict=False)
        for table, count in ((strict, 5), (loose, 1)):
            for steps in range(5):
                table.observe((ones(1),), {"steps": steps}, 1)
            assert len(table.graphs) == count
        assert loose.find((ones(1),), {"steps": 99}) is loose.graphs[0]
        assert loose.find((ones(1),), {"steps": "99"}) is None
        assert loose.find((ones(1),), {"steps": True}) is None
        assert strict.find((ones(1),), {"steps": 99}) is None
        assert loose.graphs[0].others[0].varies
        assert not strict.graphs[0].others[0].varies

    @pytest.mark.parametrize(("one", "two"), [(1, True), (1, 1.0), (0.0, -0.0), (None, "None"), ([], ()), ([], None)])
    def test_values_that_look_alike_are_two(self, one, two):
        table = table_of("x")
        assert table.observe((one,), {}) is not table.observe((two,), {})

    def test_nan_is_one_value(self):
        table = table_of("x")
        assert table.observe((float("nan"),), {}) is table.find((float("nan"),), {})

    def test_objects_nobody_registered_count_by_class(self):
        table = table_of("x")
        graph = table.observe(([torch.nn.ReLU(), ones(1)],), {}, 1)
        assert table.find(([torch.nn.ReLU(), ones(1)],), {}) is graph
        assert table.find(([torch.nn.GELU(), ones(1)],), {}) is None
        (spec,) = graph.unsupported
        assert (spec.access_path, spec.type) == ("x[0]", "torch.nn.modules.activation.ReLU")
        assert [spec.access_path for spec in graph.inputs] == ["x[1]"]


class TestAxes:
    def test_an_axis_that_follows_the_batch_and_one_that_does_not(self):
        _, graph = observed([(1, {"x": ones(1, 7, 3)}), (4, {"x": ones(4, 9, 3)})], "x")
        (spec,) = graph.inputs
        assert spec.shape == ("batch0", "dim1", 3)
        assert (spec.min_shape, spec.opt_shape, spec.max_shape) == ((1, 7, 3), (4, 9, 3), (4, 9, 3))
        assert (spec.batch_axes, spec.dynamic_axes) == ({0: 1}, [0, 1])
        assert graph.batch_sizes == [1, 4]
        assert graph.has_batch_axis
        assert (graph.get_min_batch_size(), graph.get_max_batch_size()) == (1, 4)

    def test_one_batch_size_shows_no_batch_axis(self):
        _, graph = observed([(2, {"x": ones(2, 3)})] * 2, "x")
        assert graph.inputs[0].shape == (2, 3)
        assert not graph.has_batch_axis
        assert (graph.get_min_batch_size(), graph.get_max_batch_size()) == (1, 1)

    def test_an_axis_that_changes_at_one_batch_size_is_not_the_batch(self):
        _, graph = observed([(2, {"x": ones(2)}), (2, {"x": ones(4)})], "x")
        assert graph.inputs[0].shape == ("dim0",)

    def test_a_ratio_has_to_hold_in_every_call(self):
        calls = [(1, {"x": ones(2)}), (2, {"x": ones(4)}), (4, {"x": ones(9)})]
        assert observed(calls[:2], "x")[1].inputs[0].shape == ("batch0",)
        assert observed(calls, "x")[1].inputs[0].shape == ("dim0",)

    def test_an_axis_that_once_broke_the_ratio_is_never_the_batch(self):
        _, graph = observed([(1, {"x": ones(3)}), (2, {"x": ones(5)}), (3, {"x": ones(9)})], "x")
        assert graph.inputs[0].shape == ("dim0",)

    def test_an_unknown_batch_size_shows_no_batch_axis(self):
        _, graph = observed([(None, {"x": ones(1)}), (None, {"x": ones(2)})], "x")
        assert graph.inputs[0].shape == ("dim0",)
        assert graph.batch_sizes == []

    def test_inputs_doubled_for_guidance_follow_the_batch(self):
        calls = [(n, {"latents": ones(2 * n, 4, 8, 8), "time": ones(n), "text": ones(2 * n, 77, 16)}) for n in (1, 2)]
        table, graph = observed(calls, "latents", "time", "text")
        assert shapes_of(graph.inputs) == {
            "latents": ("batch0", 4, 8, 8),
            "time": ("batch1",),
            "text": ("batch0", 77, 16),
        }
        assert [spec.batch_multipliers[0] for spec in graph.inputs] == [2, 1, 2]
        assert (graph.get_min_batch_size(), graph.get_max_batch_size()) == (1, 2)
        assert table.find((ones(2, 4, 8, 8), ones(1), ones(2, 77, 16)), {}) is graph
        assert table.find((ones(4, 4, 8, 8), ones(1), ones(4, 77, 16)), {}) is None
        assert table.find((ones(3, 4, 8, 8), ones(1), ones(3, 77, 16)), {}) is None

    def test_axes_that_change_alike_have_one_label_in_results_too(self):
        table = table_of("ids", "mask", "image")
        for batch_size, length, side in ((1, 5, 9), (2, 7, 8), (2, 5, 9)):
            ids, mask = ones(batch_size, length), ones(batch_size, 1, length, length)
            graph = table.observe((ids, mask, ones(batch_size, side)), {}, batch_size)
            table.observe_output(graph, (ones(batch_size, 16, length), ones(batch_size)), batch_size)
        assert shapes_of(graph.inputs) == {
            "ids": ("batch0", "dim1"),
            "mask": ("batch0", 1, "dim1", "dim1"),
            "image": ("batch0", "dim2"),
        }
        assert shapes_of(graph.outputs) == {"output[0]": ("batch0", 16, "dim1"), "output[1]": ("batch0",)}

    def test_a_batch_size_that_worked_extends_the_graph(self):
        calls = [(n, {"x": ones(2 * n, 3), "y": ones(n)}) for n in (1, 2)]
        table, graph = observed(calls, "x", "y")
        assert table.find((ones(16, 3), ones(8)), {}) is None
        graph.extend_max_batch_size(8)
        assert table.find((ones(16, 3), ones(8)), {}) is graph
        assert graph.get_max_batch_size() == 8
        assert graph.effective_input_shapes()["x"] == ((2, 3), (16, 3), (16, 3))
        graph.extend_max_batch_size(4)
        assert graph.get_max_batch_size() == 8


class TestFind:
    @pytest.fixture
    def table(self):
        calls = [(1, {"x": ones(1, 224, 3), "y": ones(1, 224)}), (4, {"x": ones(4, 256, 3), "y": ones(4, 256)})]
        return observed(calls, "x", "y")[0]

    def test_sizes_between_are_covered(self, table):
        assert table.find((ones(3, 240, 3), ones(3, 240)), {}) is table.graphs[0]
        assert table.why_unseen((ones(3, 240, 3), ones(3, 240)), {}) == "Graph 0 covers the call."

    @pytest.mark.parametrize(
        ("call", "reason"),
        [
            ({"x": ones(4, 300, 3), "y": ones(4, 300)}, "size 300 of `x` axis 1 is outside 224..256"),
            ({"x": ones(4, 256, 4), "y": ones(4, 256)}, "size 4 of `x` axis 2 is not 3"),
            ({"x": ones(5, 256, 3), "y": ones(5, 256)}, "size 5 of `x` axis 0 is outside 1..4"),
            ({"x": ones(4, 256, 3), "y": ones(2, 256)}, "'batch0' and have to be equal"),
            ({"x": ones(4, 256, 3), "y": ones(4, 255)}, "`x` axis 1 has size 256 and `y` axis 1 has 255"),
            ({"x": ones(4, 256), "y": ones(4, 256)}, "`x` has rank 2, recorded with 3"),
            ({"x": ones(4, 256, 3).half(), "y": ones(4, 256)}, "`x` has the dtype float16, recorded with float32"),
            ({"x": ones(4, 256, 3), "y": None}, "`y` is None, recorded as a tensor"),
            ({"x": ones(4, 256, 3)}, "`y` is missing"),
            ({"x": ones(4, 256, 3), "y": ones(1), "z": 1}, "`y` has rank 1, recorded with 2; `z` was not given"),
            ({"x": [ones(4, 256, 3)], "y": ones(4, 256)}, "`x[0]` was not given when calls were recorded; `x` is m"),
        ],
    )
    def test_what_does_not_fit_is_named(self, table, call, reason):
        assert table.find((), call) is None
        assert reason in table.why_unseen((), call)

    def test_the_nearest_graph_is_named(self):
        table = table_of("x")
        table.observe((ones(1),), {"return_dict": False}, 1)
        table.observe((ones(1, 1),), {"return_dict": False}, 1)
        assert table.why_unseen((ones(1, 1),), {"return_dict": True}) == (
            "The call differs from graph 1: `return_dict` is True, recorded as False."
        )

    def test_containers_and_tensors_in_place_of_settings_are_named(self):
        table = table_of("x")
        table.observe(((ones(1), None),), {}, 1)
        assert "`x[0]` lies in a list, recorded in a tuple" in table.why_unseen(([ones(1), None],), {})
        assert "`x[1]` is a tensor, recorded as None" in table.why_unseen(((ones(1), ones(1)),), {})

    def test_without_recorded_calls_it_says_so(self):
        assert table_of("x").find((ones(1),), {}) is None
        assert table_of("x").why_unseen((ones(1),), {}) == "No call has been recorded."

    def test_shapes_alone_can_be_asked(self, table):
        graph = table.graphs[0]
        assert graph.covers({"x": (2, 230, 3), "y": (2, 230)})
        assert not graph.covers({"x": (2, 300, 3), "y": (2, 300)})
        assert not graph.covers({"x": (2, 230, 3)})
        assert not graph.covers({"x": (2, 230), "y": (2, 230)})


class TestLimit:
    def test_a_value_that_varies_is_named(self):
        table = table_of("x", limit=3)
        for step in range(3):
            table.observe((ones(1),), {"step": step, "mode": "a"}, 1)
        with pytest.raises(InputError, match=r"`step` has 4 different values \(0, 1, 2, \.\.\.\).*strict_mode = False"):
            table.observe((ones(1),), {"step": 3, "mode": "a"}, 1)
        assert len(table.graphs) == 3
        assert table.observe((ones(1),), {"step": 2, "mode": "a"}, 1) is table.graphs[2]

    @pytest.mark.parametrize("strict", [True, False])
    def test_a_structure_that_varies_is_named(self, strict):
        table = table_of("x", limit=2, strict=strict)
        for length in (1, 2):
            table.observe(([ones(1)] * length,), {"mode": "a"}, 1)
        with pytest.raises(InputError, match=r"structure of its arguments varies.*`x\[2\]` was not given") as error:
            table.observe(([ones(1)] * 3,), {"mode": "a"}, 1)
        assert "strict_mode" not in str(error.value)

    @pytest.mark.parametrize("limit", [0, True, 1.5, None])
    def test_a_wrong_limit_is_refused(self, limit):
        with pytest.raises(InputError, match="limit: expected a whole number of graphs"):
            table_of("x", limit=limit)


BATCH = BatchDim("batch", min=1, opt=2, max=8)
HEIGHT = DynamicDim("spatial", min=224, opt=224, max=512)
WIDTH = DynamicDim("spatial", min=224, opt=224, max=512)


class TestStatedShapes:
    @pytest.fixture
    def resnet(self):
        table = table_of("x", dynamic_shapes={"x": (BATCH, 3, HEIGHT, WIDTH)})
        graph = table.observe((ones(1, 3, 224, 224),), {}, 1)
        table.observe_output(graph, ones(1, 10), 1)
        table.check_dynamic_paths()
        return table

    def test_one_recorded_call_covers_all_that_is_stated(self, resnet):
        (graph,) = resnet.graphs
        assert resnet.find((ones(2, 3, 256, 256),), {}) is graph
        assert resnet.find((ones(8, 3, 512, 512),), {}) is graph
        assert graph.inputs[0].shape == ("batch", 3, "spatial", "spatial")
        assert graph.effective_input_shapes() == {"x": ((1, 3, 224, 224), (2, 3, 224, 224), (8, 3, 512, 512))}
        assert (graph.get_min_batch_size(), graph.get_opt_batch_size(), graph.get_max_batch_size()) == (1, 2, 8)

    @pytest.mark.parametrize(
        ("shape", "reason"),
        [
            ((2, 4, 256, 256), "size 4 of `x` axis 1 is not 3"),
            ((2, 3, 600, 600), "size 600 of `x` axis 2 is outside 224..512"),
            ((2, 3, 256, 224), "`x` axis 2 has size 256 and `x` axis 3 has 224, but both are 'spatial'"),
            ((9, 3, 256, 256), "size 9 of `x` axis 0 is outside 1..8"),
        ],
    )
    def test_what_is_outside_is_named(self, resnet, shape, reason):
        assert resnet.find((ones(*shape),), {}) is None
        assert reason in resnet.why_unseen((ones(*shape),), {})

    @pytest.mark.parametrize(
        ("which", "shape"), [("min", (1, 3, 224, 224)), ("opt", (2, 3, 224, 224)), ("max", (8, 3, 512, 512))]
    )
    def test_a_sample_is_made_at_the_stated_sizes(self, resnet, which, shape):
        (x,), kwargs = resnet.graphs[0].at_shapes((ones(1, 3, 224, 224),), {}, which)
        assert (x.shape, kwargs) == (shape, {})

    @pytest.mark.parametrize(
        ("shape", "match"),
        [
            ((1, 3, 224), r"dynamic_shapes\['x'\] states 4 sizes, but the tensor in a recorded call has 3"),
            ((1, 4, 224, 224), "states size 3 for axis 1, but a recorded call has 4"),
            ((1, 3, 100, 100), r"axis 2 has size 100 in a recorded call, not 224..512 as 'spatial'"),
            ((9, 3, 224, 224), r"axis 0 has size 9 in a recorded call, not 1..8 as 'batch'"),
            ((1, 3, 224, 225), "axis 3 has size 225 in a recorded call, but 'spatial' has size 224"),
        ],
    )
    def test_recorded_calls_are_checked(self, shape, match):
        table = table_of("x", dynamic_shapes={"x": (BATCH, 3, HEIGHT, WIDTH)})
        with pytest.raises(InputError, match=match):
            table.observe((ones(*shape),), {}, 1)
        assert table.graphs == []

    def test_a_shared_dimension_is_checked_between_inputs(self):
        table = table_of("x", "y", dynamic_shapes={"x": (HEIGHT,), "y": (WIDTH,)})
        with pytest.raises(InputError, match=r"dynamic_shapes\['y'\].*'spatial' has size 224 in 'x' of the same call"):
            table.observe((ones(224), ones(225)), {})
        graph = table.observe((ones(224), ones(224)), {})
        assert table.find((ones(300), ones(300)), {}) is graph
        assert table.find((ones(300), ones(301)), {}) is None

    def test_omitted_inputs_keep_what_was_seen(self):
        table = table_of("x", "y", dynamic_shapes={"x": (BATCH, 3)})
        for batch_size in (1, 4):
            graph = table.observe((ones(batch_size, 3), ones(batch_size, 5)), {}, batch_size)
        assert shapes_of(graph.inputs) == {"x": ("batch", 3), "y": ("batch0", 5)}
        assert graph.effective_input_shapes() == {
            "x": ((1, 3), (2, 3), (8, 3)),
            "y": ((1, 5), (4, 5), (4, 5)),
        }
        assert (graph.get_opt_batch_size(), graph.get_max_batch_size()) == (2, 4)
        args, _ = graph.at_shapes((ones(1, 3), ones(1, 5)), {}, "opt")
        assert [list(arg.shape) for arg in args] == [[2, 3], [2, 5]]
        assert table.find((ones(3, 3), ones(3, 5)), {}) is graph
        assert table.find((ones(3, 3), ones(2, 5)), {}) is None

    def test_a_stated_batch_may_be_a_multiple_of_the_samples(self):
        table = table_of("x", dynamic_shapes={"x": (BatchDim("batch", 2, 8),)})
        graph = table.observe((ones(4),), {}, 2)
        assert (graph.get_min_batch_size(), graph.get_max_batch_size()) == (1, 4)
        assert graph.make_batch((ones(4),), {}, 3)[0][0].shape == (6,)
        assert table.find((ones(5),), {}) is None

    def test_labels_stay_apart_from_stated_names(self):
        table = table_of("x", "y", dynamic_shapes={"x": (DynamicDim("dim0", 1, 9),)})
        for size in (2, 3):
            graph = table.observe((ones(1), ones(size)), {}, 1)
        assert shapes_of(graph.inputs) == {"x": ("dim0",), "y": ("dim1",)}
        assert table.find((ones(5), ones(2)), {}) is graph

    def test_paths_lead_through_every_container(self):
        class Box:
            def __init__(self, inside):
                self.inside = inside

        register_input_type(Box, lambda box: {"inside": box.inside}, lambda parts: Box(**parts))
        size = (DynamicDim("n", 1, 9),)
        table = table_of(
            "options",
            "items",
            "request",
            "box",
            dynamic_shapes={
                ("options", "mask"): size,
                ("items", 0): size,
                ("request", "image"): size,
                ("box", "inside", "deep", 1): size,
            },
        )

        def call(n):
            return {
                "options": {"mask": ones(n)},
                "items": [ones(n)],
                "request": Request(ones(n)),
                "box": Box({"deep": [None, ones(n)]}),
            }

        graph = table.observe((), call(2), 1)
        table.check_dynamic_paths()
        assert table.find((), call(9)) is graph
        assert table.find((), call(10)) is None
        assert {spec.access_path: spec.semantic_path for spec in graph.inputs} == {
            'options["mask"]': ("options", "mask"),
            "items[0]": ("items", 0),
            "request.image": ("request", "image"),
            'box.inside["deep"][1]': ("box", "inside", "deep", 1),
        }
        (_, made) = graph.at_shapes((), call(2), "max")
        assert (made["request"].image.shape, made["box"].inside["deep"][1].shape) == ((9,), (9,))

    @pytest.mark.parametrize(
        ("path", "hint"),
        [
            ("hiden", "Did you mean 'hidden'"),
            (("options", "masc"), r"('options', 'mask')"),
            ("options", "('options', 'mask')"),
            ("flag", "Known paths of tensors: hidden"),
        ],
    )
    def test_a_path_that_no_call_has_is_named_with_near_ones(self, path, hint):
        table = table_of("hidden", dynamic_shapes={path: (3,)})
        table.observe((ones(3),), {"options": {"mask": ones(3)}, "flag": True}, 1)
        with pytest.raises(InputError, match="no recorded call has a tensor at") as error:
            table.check_dynamic_paths()
        assert hint in str(error.value)

    def test_a_path_may_be_absent_from_some_calls(self):
        table = table_of("x", "mask", dynamic_shapes={"mask": (DynamicDim("n", 1, 9),)})
        table.observe((ones(1), None), {}, 1)
        with pytest.raises(InputError, match="at 'mask'"):
            table.check_dynamic_paths()
        table.observe((ones(1), ones(3)), {}, 1)
        table.check_dynamic_paths()


class TestOtherBatches:
    @pytest.fixture
    def graph(self):
        calls = [(n, {"x": ones(2 * n, 3), "o": {"y": ones(n, 2)}, "s": 5, "z": ones(7)}) for n in (1, 4)]
        return observed(calls, "x", "o")[1]

    def test_samples_are_cut_or_come_again_in_each_block(self, graph):
        x = torch.arange(4.0)[:, None].expand(4, 3)
        y = torch.tensor([[0.0, 0], [1, 1]])
        z = ones(7)
        for batch_size, xs, ys in ((1, [0, 2], [0]), (2, [0, 1, 2, 3], [0, 1]), (3, [0, 1, 0, 2, 3, 2], [0, 1, 0])):
            (new_x,), kwargs = graph.make_batch((x,), {"o": {"y": y}, "s": 5, "z": z}, batch_size)
            assert new_x[:, 0].tolist() == xs
            assert kwargs["o"]["y"][:, 1].tolist() == ys
            assert (kwargs["s"], kwargs["z"].tolist()) == (5, [1] * 7)
            assert kwargs["z"] is not z

    def test_copies_do_not_share_memory_and_shared_tensors_stay_shared(self):
        _, graph = observed([(n, {"x": ones(n), "y": ones(n)}) for n in (1, 2)], "x", "y")
        x = ones(2).requires_grad_()
        (new_x, new_y), _ = graph.make_batch((x, x), {}, 2)
        assert new_x is new_y
        assert not new_x.requires_grad
        new_x += 1
        assert x.tolist() == [1, 1]

    def test_the_memory_format_stays(self):
        _, graph = observed([(n, {"x": ones(n, 3, 4, 4)}) for n in (1, 2)], "x")
        x = ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
        (grown,), _ = graph.make_batch((x,), {}, 4)
        assert grown.is_contiguous(memory_format=torch.channels_last)
        assert not grown.is_contiguous()

    def test_other_axes_are_cut_or_filled_up_at_the_recorded_sizes(self):
        calls = [
            (1, {"x": torch.arange(3)[None], "e": ones(1, 0)}),
            (2, {"x": torch.arange(10).view(2, 5), "e": ones(2, 2)}),
        ]
        _, graph = observed(calls, "x", "e")
        sample = {"x": torch.arange(4)[None], "e": ones(1, 0)}
        assert graph.at_shapes((), sample, "min")[1]["x"].tolist() == [[0, 1, 2]]
        _, largest = graph.at_shapes((), sample, "max")
        assert largest["x"].tolist() == [[0, 1, 2, 3, 0]] * 2
        assert largest["e"].tolist() == [[0, 0], [0, 0]]
        assert graph.make_batch((), sample, 2)[1]["x"].tolist() == [[0, 1, 2, 3]] * 2

    def test_a_cache_is_made_at_other_batches(self):
        from transformers import DynamicCache

        def cache(batch_size, length):
            made = DynamicCache()
            made.update(ones(batch_size, 2, length, 4), ones(batch_size, 2, length, 4), 0)
            return made

        table, graph = observed(
            [(n, {"x": ones(n, 1), "past": cache(n, length)}) for n, length in ((1, 3), (2, 7))], "x", "past"
        )
        assert shapes_of(graph.inputs)["past.layers[0].keys"] == ("batch0", 2, "dim2", 4)
        sample = cache(1, 4)
        (_, grown), _ = graph.make_batch((ones(1, 1), sample), {}, 2)
        assert type(grown) is DynamicCache
        assert grown.layers[0].values.shape == (2, 2, 4, 4)
        assert sample.layers[0].values.shape == (1, 2, 4, 4)
        assert table.find((ones(2, 1), grown), {}) is graph
        assert table.find((ones(1, 1), cache(1, 8)), {}) is None

    @pytest.mark.parametrize("batch_size", [0, True, 1.5])
    def test_a_wrong_batch_size_is_refused(self, graph, batch_size):
        with pytest.raises(InputError, match="batch_size: expected a whole number"):
            graph.make_batch((), {}, batch_size)

    def test_a_call_of_another_graph_is_refused(self, graph):
        with pytest.raises(InputError, match="none of graph 0"):
            graph.make_batch((ones(2),), {}, 2)
        with pytest.raises(InputError, match="none of graph 0"):
            graph.at_shapes((ones(2, 3),), {"unknown": ones(1)}, "min")


class TestOutputs:
    def test_results_have_paths_and_ranges(self):
        table = table_of("x")
        for batch_size in (1, 2):
            graph = table.observe((ones(batch_size),), {}, batch_size)
            table.observe_output(graph, {"sample": ones(batch_size, 3), "step": batch_size}, batch_size)
        (spec,) = graph.outputs
        assert (spec.access_path, spec.semantic_path, spec.shape) == ('output["sample"]', "sample", ("batch0", 3))
        (other,) = graph.output_others
        assert (other.access_path, other.value, other.varies) == ('output["step"]', "1", True)
        assert graph.output_change is None

    @pytest.mark.parametrize(
        ("first", "later", "change"),
        [
            (
                ones(1),
                ones(1, 1),
                "`output` was a 1-d float32 tensor in the first call and a 2-d float32 tensor in a later one",
            ),
            (
                {"a": ones(1)},
                {"a": ones(1).half()},
                '`output["a"]` was a 1-d float32 tensor in the first call and a 1-d float16 tensor in a later one',
            ),
            ((ones(1),), (ones(1), None), "`output[1]` was absent in the first call and NoneType in a later one"),
            ((ones(1), 2), (ones(1),), "`output[1]` was int in the first call and absent in a later one"),
            ((ones(1),), [ones(1)], "`output[0]` lies in other containers than in the first call"),
            (
                None,
                ones(1),
                "`output` was NoneType in the first call and a 1-d float32 tensor in a later one",
            ),
        ],
    )
    def test_a_result_of_another_form_is_noted(self, first, later, change):
        table = table_of("x")
        graph = table.observe((1,), {})
        for output in (first, first, later, first):
            table.observe_output(graph, output)
        assert graph.output_change == change


class TestText:
    @pytest.fixture
    def graph(self):
        table = table_of("hidden_states", "options")
        for batch_size in (1, 2):
            call = (ones(2 * batch_size, 16), {"mask": ones(1, dtype=torch.int64), "scale": 0.5})
            graph = table.observe(call, {"return_dict": False, "module": torch.nn.ReLU()}, batch_size)
            table.observe_output(graph, (ones(2 * batch_size, 16),), batch_size)
        return graph

    def test_tables_show_paths_shapes_and_values(self, graph):
        assert graph.tables() == [
            (
                "Input tensors",
                ("Access Path", "Semantic Path", "Shape", "Min Shape", "Max Shape", "Dtype"),
                [
                    ("hidden_states", "hidden_states", "['batch0', 16]", "[2, 16]", "[4, 16]", "float32"),
                    ('options["mask"]', "('options', 'mask')", "[1]", "[1]", "[1]", "int64"),
                ],
            ),
            (
                "Other inputs",
                ("Access Path", "Semantic Path", "Value"),
                [
                    ('options["scale"]', "('options', 'scale')", "0.5"),
                    ("return_dict", "return_dict", "False"),
                    ("module", "module", "<torch.nn.modules.activation.ReLU, not looked into>"),
                ],
            ),
            (
                "Output tensors",
                ("Access Path", "Semantic Path", "Shape", "Min Shape", "Max Shape", "Dtype"),
                [("output[0]", "0", "['batch0', 16]", "[2, 16]", "[4, 16]", "float32")],
            ),
        ]

    def test_the_text_holds_every_cell_unbroken(self, graph):
        text = graph.describe()
        assert "\x1b" not in text
        for title, header, rows in graph.tables():
            assert f"{title}:\n" in text
            for row in (header, *rows):
                assert any(all(cell in line for cell in row) for line in text.splitlines())

    def test_long_values_are_cut_and_brackets_are_no_markup(self):
        table = table_of("x")
        graph = table.observe((["[bold]a[/bold]", "b" * 500],), {})
        text = graph.describe()
        assert "'[bold]a[/bold]'" in text
        assert "b" * 50 in text
        assert "b" * 100 not in text


class TestFiles:
    def test_a_table_comes_back_from_json_and_goes_on(self):
        stated = {"x": (BATCH, 3, HEIGHT, WIDTH), ("o", "y"): (2,)}
        table = table_of("x", "o", limit=3, dynamic_shapes=stated)
        for batch_size in (1, 2):
            graph = table.observe(
                (ones(batch_size, 3, 224, 224), {"y": ones(2), 3: [ones(2 * batch_size)], "e": []}),
                {"s": float("nan"), "m": torch.nn.ReLU()},
                batch_size,
            )
            table.observe_output(graph, (ones(batch_size), None), batch_size)
        graph.extend_max_batch_size(4)
        text = table.to_model().model_dump_json()
        back = GraphTable.from_model(TableModel.model_validate_json(text))
        assert back.to_model().model_dump_json() == text
        assert back.dynamic_shapes == stated
        back.check_dynamic_paths()
        assert back.graphs[0].describe() == graph.describe()

        def call(n, side=224):
            return (ones(n, 3, side, side), {"y": ones(2), "e": [], 3: [ones(2 * n)]})

        settings = {"s": float("nan"), "m": torch.nn.ReLU()}
        assert back.find(call(4, 512), settings) is back.graphs[0]
        assert back.find(call(5), settings) is None
        assert back.why_unseen(call(5), settings) == table.why_unseen(call(5), settings)
        for one in (table, back):
            one.observe(call(8), settings, 8)
        assert back.to_model() == table.to_model()

    def test_one_graph_comes_back(self):
        _, graph = observed([(n, {"x": ones(n)}) for n in (1, 2)], "x")
        back = GraphSpec.from_model(graph.to_model())
        assert back.to_model() == graph.to_model()
        assert back.make_batch((ones(1),), {}, 2)[0][0].shape == (2,)
        assert repr(back) == "GraphSpec(0: x: ['batch0'] float32)"

    def test_a_loose_table_comes_back(self):
        table = table_of("x", strict=False)
        table.observe((ones(1),), {"s": 1}, 1)
        back = GraphTable.from_model(table.to_model())
        assert back.find((ones(1),), {"s": 2}) is back.graphs[0]
