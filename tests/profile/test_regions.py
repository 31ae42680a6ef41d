"""Which regions there are, and that they and the residual are the whole."""

import pytest
import torch
from torch import nn

from perfladder import stage


def ids(result):
    return [region["id"] for region in result.data["regions"]]


def rows(result, run=0):
    return {row["region_id"]: row for row in result.data["runs"][run]["regions"]}


def tree(nodes):
    return {node["region_id"].partition(":")[2]: tree(node["children"]) for node in nodes}


def assert_whole(result):
    for run in result.data["runs"]:
        covered = sum(row["cpu_time_fraction"] for row in run["regions"])
        assert covered + run["residual"]["cpu_time_fraction"] == pytest.approx(1, abs=1e-3)
        parts = run["residual"]["host"]
        split = sum(value for name, value in parts.items() if name.endswith("_us"))
        assert split == pytest.approx(run["residual"]["cpu_time_us"], rel=0.05, abs=5)
        assert run["timing"]["wall_time_us"] < run["timing"]["cpu_time_us"] * 1.05 + 100


def test_topmost_modules_and_entry_points_are_regions(pipe, x, profile):
    result = profile(pipe, x)
    assert ids(result) == ["untuned_module:unet", "untuned_module:vae.decode"]
    unet, decode = result.data["regions"]
    assert unet["kind"] == decode["kind"] == "untuned_module"
    assert unet["name"] == "unet"
    assert decode["name"] == "vae.decode"
    assert unet["module_type"].endswith(".Unet")
    assert decode["module_type"].endswith(".Decoder")
    assert "wrapper_state" not in unet
    assert 0 < unet["wall_time_p50_us"] <= unet["wall_time_p95_us"]
    assert unet["peak_memory_bytes"] is None


def test_calls_of_a_run_are_one_row(pipe, x, profile):
    result = profile(pipe, {"x": x, "steps": 5})
    assert {name: row["calls"] for name, row in rows(result).items()} == {
        "untuned_module:unet": 5,
        "untuned_module:vae.decode": 1,
    }
    assert_whole(result)


def test_device_times_of_a_host_only_run_are_unknown_and_not_zero(pipe, x, profile):
    result = profile(pipe, x)
    row = rows(result)["untuned_module:unet"]
    assert row["device_time_us"] is None
    assert row["device_time_fraction"] is None
    assert result.data["runs"][0]["device"] is None or torch.accelerator.is_available()


def test_the_tree_nests_modules_and_methods_with_self_times(pipe, x, profile):
    result = profile(pipe, x)
    blocks = {f"unet.blocks.{i}": {f"unet.blocks.{i}.inner": {}, f"unet.blocks.{i}.norm": {}} for i in (0, 1)}
    assert tree(result.data["region_tree"]) == {
        "unet": blocks,
        "vae.decode": {"vae.out": {}, "vae._scaled": {}},
    }
    unet = result.data["region_tree"][0]
    inside = sum(child["cpu_time_us"] for child in unet["children"])
    assert unet["self_cpu_time_us"] + inside == pytest.approx(unet["cpu_time_us"])
    assert unet["calls"] == 6  # two runs of three steps


def test_a_method_inside_a_module_is_no_flat_region_of_its_own(pipe, x, profile):
    result = profile(pipe, x, inference_function=lambda value: pipe.vae(value))
    assert ids(result) == ["untuned_module:vae"]
    assert tree(result.data["region_tree"]) == {"vae": {"vae.decode": {"vae.out": {}, "vae._scaled": {}}}}


def test_a_call_straight_into_a_descendant_is_attributed(pipe, x, profile):
    result = profile(pipe, x, inference_function=lambda value: pipe.unet.blocks[1].inner(value))
    assert ids(result) == ["untuned_module:unet.blocks.1.inner"]
    assert_whole(result)


def test_children_of_a_bare_module_are_regions_and_containers_are_transparent(pipe, x, profile):
    result = profile(pipe.unet, x)
    assert ids(result) == ["untuned_module:blocks.0", "untuned_module:blocks.1"]
    assert result.data["target"]["type"].endswith(".Unet")


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.head = nn.ModuleDict({"out": nn.Linear(8, 8)})

    def forward(self, value):
        return self.head["out"](self.layer(value))

    def generate(self, value, steps=4):
        for _ in range(steps):
            value = self._pick(self(value))
        return value

    def _pick(self, value):
        return value.softmax(-1) + value.sum()


def test_methods_of_a_bare_root_keep_what_its_parts_do_not_cover(x, profile):
    model = Generator()
    result = profile(model, x, inference_function=model.generate)
    found = rows(result)
    assert set(found) == {
        "untuned_module:generate",
        "untuned_module:_pick",
        "untuned_module:layer",
        "untuned_module:head.out",
    }
    assert found["untuned_module:layer"]["calls"] == 4
    assert found["untuned_module:generate"]["calls"] == 1
    node = result.data["region_tree"][0]
    assert node["region_id"] == "untuned_module:generate"
    per_run = sum(row["cpu_time_us"] for run in result.data["runs"] for row in run["regions"])
    assert per_run == pytest.approx(node["cpu_time_us"], rel=1e-3)
    assert_whole(result)


def test_a_container_around_the_model_makes_its_methods_whole_regions(x, profile):
    model = Generator()
    holder = type("Container", (), {})()
    holder.model = model
    result = profile(holder, x, inference_function=lambda value: holder.model.generate(value))
    assert ids(result) == ["untuned_module:model.generate"]


def test_modules_in_plain_lists_dicts_and_objects_are_found(x, block, profile):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden = [block(), {"deep": block()}]

        def forward(self, value):
            return self.hidden[1]["deep"](self.hidden[0](value))

    holder = type("Holder", (), {})()
    holder.stages = {"first": [block()], "second": (block(),)}
    holder._private = Model()
    holder.engine = type("Engine", (), {})()
    holder.engine.net = block()

    def infer(value):
        value = holder.stages["second"][0](holder.stages["first"][0](value))
        return holder.engine.net(holder._private(value))

    result = profile(holder, x, inference_function=infer)
    assert ids(result) == [
        "untuned_module:stages.first.0",
        "untuned_module:stages.second.0",
        "untuned_module:_private",
        "untuned_module:engine.net",
    ]
    inner = tree(result.data["region_tree"])["_private"]
    assert list(inner) == ["_private.hidden.0", "_private.hidden.1.deep"]


def test_a_module_with_two_paths_is_one_region(pipe, x, profile):
    pipe.alias = pipe.unet
    result = profile(pipe, x, inference_function=lambda value: pipe.alias(pipe.unet(value)))
    assert {name: row["calls"] for name, row in rows(result).items()} == {"untuned_module:unet": 2}


def test_inherited_methods_count_and_those_of_module_do_not(x, profile):
    class Mixin:
        def generate(self, value):
            return self(value)

        @staticmethod
        def helper(value):
            return value

        @property
        def size(self):
            return 1

    class Model(nn.Linear, Mixin):
        def train(self, mode=True):
            return super().train(mode)

    holder = type("Holder", (), {})()
    holder.model = Model(8, 8)

    def infer(value):
        holder.model.train(False)
        holder.model.helper(value)
        return holder.model.generate(value) * holder.model.size

    assert ids(profile(holder, x, inference_function=infer)) == ["untuned_module:model.generate"]


def test_managed_modules_are_regions_with_the_state_of_now(pipe, x, wrap, profile):
    for state in ("tuned", "recording", "passthrough"):
        pipe.unet = wrap(pipe.unet if state == "tuned" else pipe.unet.module, state=state)
        result = profile(pipe, x)
        managed = result.data["regions"][0]
        assert managed["id"] == "aot_module:unet"
        assert managed["kind"] == "aot_managed_module"
        assert managed["wrapper_state"] == state
        assert managed["module_type"].endswith(".Unet")
        assert tree(result.data["region_tree"])["unet"] == {}
        assert_whole(result)


def test_a_managed_module_gets_no_method_wrappers(pipe, x, wrap, profile):
    pipe.vae = wrap(pipe.vae)
    result = profile(pipe, x, inference_function=lambda value: pipe.vae.decode(value))
    assert {name: row["calls"] for name, row in rows(result).items()} == {"aot_module:vae": 1}


def test_the_parent_of_a_managed_module_is_entered(pipe, x, wrap, profile):
    pipe.unet.blocks[0] = wrap(pipe.unet.blocks[0])
    result = profile(pipe, x)
    assert ids(result) == [
        "aot_module:unet.blocks.0",
        "untuned_module:unet.blocks.1",
        "untuned_module:vae.decode",
    ]
    assert_whole(result)
    # Also in runs that do not reach the managed module.
    result = profile(pipe, x, inference_function=lambda value: pipe.unet.blocks[1](value))
    assert ids(result) == ["untuned_module:unet.blocks.1"]


def test_a_managed_root_is_named_by_its_wrapper(pipe, x, wrap, profile):
    assert ids(profile(wrap(pipe.unet, name="denoiser"), x)) == ["aot_module:denoiser"]


def test_jit_managed_modules_have_a_kind_of_their_own(pipe, x, wrap, profile):
    pipe.unet = wrap(pipe.unet, by="jit")
    region = profile(pipe, x).data["regions"][0]
    assert region["id"] == "jit_module:unet"
    assert region["kind"] == "jit_managed_module"
    assert region["wrapper_state"] == "tuned"


def test_a_module_unwrapped_meanwhile_has_an_unknown_state(pipe, x, wrap, profile):
    pipe.unet = wrap(pipe.unet)
    wrapper = pipe.unet

    def infer(value):
        result = wrapper(value)
        pipe.unet = wrapper.module
        return result

    result = profile(pipe, x, inference_function=infer)
    region = result.data["regions"][0]
    assert region["wrapper_state"] == "unknown"
    assert "UNREGISTERED_AOT_REGION" in {w["code"] for w in result.data["warnings"]}


def test_marks_of_user_code_keep_what_no_module_covers(pipe, x, profile):
    @stage("post")
    def post(y):
        return y.sort().values

    def call(x):
        with stage("denoise"):
            y = pipe(x)
            for _ in range(50):
                y = y.sin()
        return post(y)

    result = profile(pipe, x, inference_function=call)
    found = {region["id"]: region["kind"] for region in result.data["regions"]}
    assert found == {
        "untuned_module:unet": "untuned_module",
        "untuned_module:vae.decode": "untuned_module",
        "marked_stage:denoise": "marked_stage",
        "marked_stage:post": "marked_stage",
    }
    assert_whole(result)
    tree = {node["region_id"]: node for node in result.data["region_tree"]}
    assert "marked_stage:denoise" in tree
    assert rows(result)["marked_stage:denoise"]["cpu_time_us"] > 0
