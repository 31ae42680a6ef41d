from perfladder.timing.cold_start import ColdCalls, ColdLaunch, ColdRequest, cold_start_of, measure_cold


def launch(import_ms, first_ms, *, compile_ms=0.0, cache="not_used"):
    calls = ColdCalls(
        first_output_ms=first_ms, first_call_ms=first_ms + 5, second_call_ms=2, num_graphs=0, compile_ms=compile_ms
    )
    return ColdLaunch(load_ms={"import": import_ms, "build": 10}, calls=calls, compile_cache=cache)


def test_total_goes_from_the_import_to_the_first_output():
    found = cold_start_of([launch(100, 20), launch(80, 30), launch(90, 25)])
    assert found.total_ms.launches == [[130], [120], [125]]
    assert {name: samples.launches for name, samples in found.parts_ms.items()} == {
        "import": [[100], [80], [90]],
        "build": [[10], [10], [10]],
        "first_output": [[20], [30], [25]],
    }
    assert found.warm_call_ms.values == [2, 2, 2]
    assert "compile" not in found.disk_cache


def test_launch_that_fills_the_compile_cache_is_reported_but_not_counted():
    launches = [launch(100, 900, compile_ms=850, cache="empty"), launch(100, 90, compile_ms=60, cache="filled")]
    found = cold_start_of(launches)
    assert found.total_ms.launches == [[200]]
    assert found.compile_ms.launches == [[60]]
    assert len(found.launches) == 2
    assert "empty for the first launch" in found.disk_cache


def test_first_output_of_a_stream_is_its_first_item(wrap, clock):
    durations = iter([30, 10, 10, 5, 5, 5])

    def call():
        for item in range(3):
            clock.pass_ms(next(durations))
            yield item

    calls = measure_cold(wrap(call), ColdRequest(), clock=clock)
    assert (calls.first_output_ms, calls.first_call_ms, calls.second_call_ms) == (30, 50, 15)
    assert calls.compile_ms == 0


def test_ranks_wait_for_the_slowest():
    first = launch(1, 20).calls
    slower = first.model_copy(update={"first_output_ms": 50.0})
    assert ColdCalls.of_ranks([first, slower]).first_output_ms == 50
