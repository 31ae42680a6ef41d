"""What three repeats of one call say together, on hand-made windows in which one of them stalls."""

import pytest

from perfladder.trace.attribution import attribute
from perfladder.trace.kernels import list_kernels, summarize_kernels
from perfladder.trace.launches import summarize_families
from perfladder.trace.repeats import add_repeats, leads, repeats_led, take_typical


def table_of(scene, *repeats):
    """A window on a device; each repeat is a list of (kernel, duration in us), launched one after the other."""
    number = 0
    for index, kernels in enumerate(repeats):
        start = index * 10_000.0
        scene.run(index, start, 9_000.0)
        scene.label("untuned_module", "net", start + 1, 8_000.0)
        at = start + 10.0
        for name, duration in kernels:
            number += 1
            scene.op(f"aten::{name}", at, 2.0)
            scene.call("cudaLaunchKernel", at + 0.5, 1.0, number)
            scene.kernel(f"{name}_kernel", at + 3.0, duration, number)
            at += duration + 5.0
    trace = scene.trace()
    return list_kernels(trace, attribute(trace), only_runs=True)


def totals(table):
    return {row.kernel: row.total_us for row in summarize_kernels(table)}


def test_a_stall_in_one_of_three_repeats_counts_in_no_sum(scene):
    stalled = [("mm", 40.0), ("add", 3000.0)]
    table = take_typical(table_of(scene, [("mm", 42.0), ("add", 6.0)], stalled, [("mm", 44.0), ("add", 4.0)]), 3)
    assert totals(table) == pytest.approx({"mm_kernel": 3 * 42, "add_kernel": 3 * 6})
    first, second = summarize_kernels(table)
    assert (first.kernel, first.repeat_us) == ("mm_kernel", pytest.approx([42, 40, 44]))
    assert (second.count, second.repeat_us) == (3, pytest.approx([6, 3000, 4]))
    assert first.share == pytest.approx(42 / 48)
    assert sum(row.total_us for row in summarize_families(table)) == pytest.approx(table.total_us) == 3 * 48
    assert table.repeat_us(table.run * 0, 1) == [pytest.approx([48, 3040, 48])]
    assert leads(first, [first, second])
    assert repeats_led(first, [first, second]) == 2


def test_each_of_a_rows_launches_has_the_duration_of_its_turn_in_the_median_repeat(scene):
    slow_first, slow_last = [("mm", 30.0), ("mm", 10.0)], [("mm", 10.0), ("mm", 31.0)]
    table = take_typical(table_of(scene, slow_first, slow_last, [("mm", 10.0), ("mm", 500.0)]), 3)
    assert (table.duration_ns / 1000).tolist() == pytest.approx([10, 31] * 3)


def test_repeats_with_other_launches_are_scaled_to_the_median_total(scene):
    table = take_typical(
        table_of(scene, [("mm", 30.0)], [("mm", 10.0), ("mm", 10.0)], [("mm", 400.0), ("add", 9.0)]), 3
    )
    assert totals(table) == pytest.approx({"mm_kernel": 90, "add_kernel": 0})
    assert (table.duration_ns / 1000).tolist() == pytest.approx([30, 15, 15, 30, 0])


def test_of_an_even_number_the_two_in_the_middle_count_and_two_are_too_few(scene, make_scene):
    four = [[("mm", us)] for us in (10.0, 20.0, 30.0, 900.0)]
    assert totals(take_typical(table_of(scene, *four), 4)) == pytest.approx({"mm_kernel": 4 * 25})
    two = table_of(make_scene(), *four[2:])
    assert take_typical(two, 2) is two
    (row,) = summarize_kernels(two)
    assert (row.total_us, row.repeat_us) == (pytest.approx(930), [])
    assert leads(row, [row])
    assert add_repeats([row, row]) == []
