"""Which modules of a path repeat each other, on hand-made costs."""

import pytest

from perfladder.trace.positions import Costs, find_positions

ALIKE = "block"


def positions(time_us, num_bytes=None, kinds=None):
    return find_positions(Costs(time_us=time_us, num_bytes=num_bytes or {}, kinds=kinds or {}))


def kinds_of(list_path, *kinds):
    return {f"{list_path}.{index}": kind for index, kind in enumerate(kinds)}


def test_repeated_blocks_are_one_position_for_each_place_inside():
    paths = [
        "net",
        "net.proj",
        *(f"net.blocks.{index}{part}" for index in range(12) for part in ("", ".attn", ".mlp.2")),
    ]
    found = positions(dict.fromkeys(paths, 5.0), kinds=kinds_of("net.blocks", *[ALIKE] * 12))
    assert found["net.blocks.0.attn"] == found["net.blocks.11.attn"] == "net.blocks.*.attn"
    assert found["net.blocks.3.mlp.2"] == "net.blocks.*.mlp.2"
    assert (found["net"], found["net.proj"], found["net.blocks.7"]) == ("net", "net.proj", "net.blocks.*")
    assert set(found) == set(paths)


def test_a_number_that_occurs_once_and_layers_of_different_kinds_stay():
    paths = ["net.attn.to_out.0", "net.mlp.0", "net.mlp.2"]
    kinds = {"net.mlp.0": ("Linear", (8, 4)), "net.mlp.2": ("Linear", (4, 8))}
    assert positions(dict.fromkeys(paths, 1.0), kinds=kinds) == {path: path for path in paths}


def test_stages_of_other_sizes_stay_although_their_times_are_the_same():
    blocks = {f"unet.up_blocks.{index}.resnets.0.conv1": 50.0 for index in range(3)}
    other_weights = positions(blocks, kinds=kinds_of("unet.up_blocks", 1280, 640, 320))
    assert other_weights == {path: path for path in blocks}
    # The same weights at another resolution: four times the bytes.
    num_bytes = {path: 10.0 * 4**index for index, path in enumerate(blocks)}
    assert positions(blocks, num_bytes, kinds_of("unet.up_blocks", *[ALIKE] * 3)) == {path: path for path in blocks}


def test_some_of_the_siblings_are_named_by_their_numbers():
    paths = {f"up.resnets.{index}.conv": 9.0 for index in range(8)}
    found = positions(paths, kinds=kinds_of("up.resnets", "first", *[ALIKE] * 3, "odd", *[ALIKE] * 3))
    assert found["up.resnets.0.conv"] == "up.resnets.0.conv"
    assert found["up.resnets.4.conv"] == "up.resnets.4.conv"
    assert {found[f"up.resnets.{index}.conv"] for index in (1, 2, 3, 5, 6, 7)} == {"up.resnets.[1-3,5-7].conv"}


def test_two_kinds_in_turn_are_two_positions_with_short_names():
    paths = {f"layers.{index}": 9.0 for index in range(24)}
    found = positions(paths, kinds=kinds_of("layers", *["local", "global"] * 12))
    assert set(found.values()) == {"layers.[0,2,4,..,22]", "layers.[1,3,5,..,23]"}


def test_without_kinds_the_same_places_inside_are_repeated():
    paths = ["a.0.x", "a.1.x", "a.2.y", "b.0.x", "b.1.y"]
    found = positions(dict.fromkeys(paths, 1.0))
    assert [found[path] for path in paths] == ["a.[0-1].x", "a.[0-1].x", "a.2.y", "b.0.x", "b.1.y"]


@pytest.mark.parametrize(("last_us", "expected"), [(20.0, "n.*"), (20.1, "n.2")])
def test_time_tells_like_cost_where_work_was_not_counted(last_us, expected):
    times = {"n.0": 10.0, "n.1": 12.0, "n.2": last_us}
    assert positions(times, {"n.0": 5.0}, kinds_of("n", *[ALIKE] * 3))["n.2"] == expected


def test_lists_inside_of_repeated_blocks_are_judged_over_all_of_them():
    paths = {f"u.{outer}.t.{inner}.ff": 3.0 for outer in range(3) for inner in range(10)}
    kinds = kinds_of("u", *["outer"] * 3) | {path.removesuffix(".ff"): "inner" for path in paths}
    assert set(positions(paths, kinds=kinds).values()) == {"u.*.t.*.ff"}


def test_numbers_are_ordered_as_numbers():
    paths = {f"n.{index}": 1.0 for index in (10, 9, 11, 2, 1)}
    kinds = {path: "odd" if path == "n.1" else ALIKE for path in paths}
    assert set(positions(paths, kinds=kinds).values()) == {"n.1", "n.[2,9-11]"}
