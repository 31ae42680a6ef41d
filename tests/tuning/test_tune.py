"""Recording, tuning and serving: which calls are recorded, what fails alone, and what is not done twice."""

import logging
import re
import threading
import warnings

import pytest
import torch
import toys
from torch import nn

import perfladder as pl
from perfladder.errors import InputError, TuningError, UnseenGraphWarning, WorkloadError
from perfladder.tuning.module import control_of


@pytest.fixture
def tune(clock):
    """`pl.tune` with the clock that toys move."""

    def run(func, dataset=None, *args, **options):
        return pl.tune(func, toys.samples() if dataset is None else dataset, *args, **{"clock": clock, **options})

    return run


@pytest.fixture
def wrapped(clock):
    def make(strategy=None, **options):
        return pl.Module(toys.Toy(clock), strategy=strategy or pl.OneBackendStrategy(toys.Faster()), **options)

    return make


class Pipe:
    """Two toys in a row."""

    def __init__(self, clock, *backends):
        first, second = backends or (toys.Faster(label="first"), toys.Faster(label="second"))
        self.unet = pl.Module(toys.Toy(clock), "unet", pl.OneBackendStrategy(first))
        self.vae = pl.Module(toys.Toy(clock), "vae", pl.OneBackendStrategy(second))

    def __call__(self, x):
        return self.vae(self.unet(x))


class Raising(toys.Faster):
    name = "toy_raising"

    def compile(self, request):
        raise OSError("no such thing here")


class Interrupting(toys.Faster):
    name = "toy_interrupting"

    def compile(self, request):
        raise KeyboardInterrupt


def the_graph(report):
    return report.modules[0].graphs[0]


def test_a_faster_backend_serves_what_was_recorded(tune, wrapped):
    wrapper = wrapped()
    report = tune(wrapper)
    decision = the_graph(report).decision
    assert (decision.selected, decision.batch_size) == ("Faster()", 2)
    assert decision.speedup == pytest.approx(2)
    assert (report.num_builds, report.is_dry_run) == (1, False)
    assert (report.modules[0].name, report.modules[0].path, report.modules[0].state) == ("Toy", "", "tuned")
    assert (report.modules[0].num_parameters, report.modules[0].device) == (4, "cpu")
    assert report.module("Toy") is report.modules[0]
    with pytest.raises(InputError, match="No module 'vae' was tuned; there are Toy"):
        report.module("vae")
    assert "Toy, graph 0: Faster(). Faster() is right; The speedup is 2.000" in report.describe()
    toys.calls.clear()
    assert torch.equal(wrapper(torch.ones(2, 4)), torch.tensor([[1.0, 2, 3, 4]] * 2))
    assert toys.calls["faster"] == 1


def test_the_report_is_written_and_kept(tune, wrapped, tmp_path):
    report = tune(wrapped())
    assert pl.snapshot_tuning_data() is report
    written = type(report).model_validate_json(pl.config.snapshot().report_path.read_bytes())
    assert written == report
    pl.snapshot_tuning_data(tmp_path / "mine.json")
    assert type(report).model_validate_json((tmp_path / "mine.json").read_bytes()) == report
    with pytest.raises(InputError, match=r"path: .* cannot be written"):
        pl.snapshot_tuning_data(tmp_path / "mine.json" / "below")


SAMPLE = torch.arange(4.0)


class Ragged(torch.utils.data.Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return {"x": SAMPLE + index}


@pytest.mark.parametrize(
    "dataset",
    [
        SAMPLE,
        [SAMPLE],
        (SAMPLE, SAMPLE),
        [[SAMPLE]],
        [{"x": SAMPLE}],
        [((SAMPLE,), {"scale": 1.0})],
        Ragged(),
        pl.DataLoaderFactory(Ragged()),
        pl.DataLoaderFactory([SAMPLE] * 3, collate_fn=lambda samples: {"x": torch.stack(samples)}),
    ],
    ids=["tensor", "list", "tuple", "positional", "keywords", "pair", "Dataset", "factory", "collate_fn"],
)
def test_datasets_of_each_form(tune, wrapped, dataset):
    wrapper = wrapped()
    graph = the_graph(tune(wrapper, dataset))
    assert [list(spec.shape) for spec in graph.inputs] == [["batch0", 4]]
    assert wrapper.state == "tuned"


def test_texts_and_settings_reach_the_function(tune, wrapped):
    wrapper, seen = wrapped(), []

    def function(prompt, steps):
        seen.append((prompt, steps))
        return wrapper(torch.ones(len(prompt), 4))

    tune(function, [{"prompt": "a lighthouse", "steps": 3}])
    assert seen == [(["a lighthouse"], 3), (["a lighthouse"] * 2, 3)]


def test_what_a_function_streams_is_consumed(tune, wrapped):
    wrapper = wrapped()

    def function(x):
        for _ in range(2):
            yield wrapper(x)

    assert the_graph(tune(function)).num_samples == 6


def test_batch_sizes_are_one_and_two_by_default(tune, wrapped):
    graph = the_graph(tune(wrapped(), toys.samples(5)))
    assert (graph.inputs[0].min_shape, graph.inputs[0].max_shape) == ((1, 4), (2, 4))
    assert graph.num_samples == 5 + 2, "what is not a full batch is left out"
    graph = the_graph(tune(wrapped(), toys.samples(5), []))
    assert graph.num_samples == 7


def test_one_batch_size_warns_and_fixes_the_shapes(tune, wrapped):
    wrapper = wrapped()
    with pytest.warns(UserWarning, match="batch_sizes has one size, 2, so that no batch axis can be seen") as caught:
        graph = the_graph(tune(wrapper, None, [2, 2]))
    assert caught[0].filename == __file__
    assert graph.inputs[0].shape == (2, 4)
    assert graph.decision.batch_size == 2
    with pytest.warns(UnseenGraphWarning, match="size 1 of `x` axis 0 is not 2"):
        wrapper(torch.ones(1, 4))


def test_a_batch_size_may_be_any_number(tune, wrapped):
    decision = the_graph(tune(wrapped(), toys.samples(3), batch_sizes=[3, 1])).decision
    assert decision.batch_size == 3
    with pytest.warns(UserWarning, match="one size"):
        assert the_graph(tune(wrapped(), toys.samples(3), range(3, 4))).decision.batch_size == 3


def test_a_dataset_may_be_smaller_than_a_batch(tune, wrapped):
    assert the_graph(tune(wrapped(), toys.samples(1), [1, 4])).inputs[0].max_shape == (4, 4)


def test_batches_of_a_size_can_be_limited(tune, wrapped):
    assert the_graph(tune(wrapped(), toys.samples(8), [1, 2], 2)).num_samples == 4
    assert the_graph(tune(wrapped(), toys.samples(8), [1, 2], 0)).num_samples == 12


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch_sizes": [0]}, "batch_sizes: expected whole numbers from 1 up, got 0"),
        ({"batch_sizes": [True]}, "batch_sizes: .* got True"),
        ({"batch_sizes": [1.0]}, "batch_sizes: .* got 1.0"),
        ({"batch_sizes": 4}, r"batch_sizes: expected a list such as \[1, 2\], got 4"),
        ({"batch_sizes": "12"}, "batch_sizes: expected a list"),
        ({"max_num_batches_per_batch_size": -1}, "max_num_batches_per_batch_size: .* got -1"),
        ({"device": "nowhere"}, "device: 'nowhere' is none; expected cpu"),
        ({"quality_gate": "cosine"}, "quality_gate: expected a pl.QualityGate or a function, got 'cosine'"),
        ({"dataset": None}, "dataset: give samples"),
        ({"dataset": []}, "dataset: it holds no samples"),
        ({"dataset": {"x": 1}}, "dataset: expected a list of samples"),
        ({"func": 3}, "func: a int cannot be called"),
        ({"func": toys.Toy()}, "func: it reaches no wrapped module. Wrap modules first"),
    ],
)
def test_wrong_input_is_named_and_changes_nothing(wrapped, tune, options, says):
    wrapper = wrapped()
    tune(wrapper)
    with pytest.raises(InputError, match=says):
        pl.tune(**{"func": wrapper, "dataset": toys.samples(), **options})
    assert wrapper.state == "tuned"
    toys.calls.clear()
    wrapper(torch.ones(1, 4))
    assert toys.calls["faster"] == 1


def test_a_dry_run_describes_and_builds_nothing(tune, wrapped, caplog):
    wrapper = wrapped()
    with caplog.at_level(logging.INFO, "perfladder.tuning"):
        report = tune(wrapper, dry_run=True)
    assert not toys.builds
    assert (report.is_dry_run, report.num_builds, the_graph(report).decision) == (True, 0, None)
    assert wrapper.state == "passthrough"
    assert list(wrapper.graph_specs[0].inputs[0].shape) == ["batch0", 4]
    text = caplog.text
    for part in (
        "Tuning module Toy (1 graphs) (dry run)",
        "number of parameters: 4",
        "precisions: float32",
        "Input tensors",
        "batch0",
        "Output tensors",
        "number of samples: 3, of which 3 are kept",
        "device: cpu",
        str(pl.config.cache_dir),
        "One Backend Strategy (use one backend, if it is right and faster)",
        "Faster()",
    ):
        assert part in text
    assert the_graph(report).backends == ["Faster()"]


def test_a_dry_run_leaves_a_tuned_module_tuned(tune, wrapped):
    wrapper = wrapped()
    tune(wrapper)
    tune(wrapper, toys.samples(4), [1, 4], dry_run=True)
    assert wrapper.state == "tuned"
    assert wrapper.graph_specs[0].get_max_batch_size() == 2
    toys.calls.clear()
    wrapper(torch.ones(2, 4))
    assert toys.calls["faster"] == 1


def test_a_tuning_after_a_dry_run_begins_its_recording_anew(tune, wrapped):
    wrapper = wrapped()
    tune(wrapper, toys.samples(8), [1, 8], dry_run=True)
    assert the_graph(tune(wrapper)).num_samples == 3


def test_calls_before_do_not_hide_the_batch_axis(tune, wrapped):
    wrapper = wrapped()
    wrapper(torch.ones(3, 4))
    assert the_graph(tune(wrapper)).inputs[0].shape == ("batch0", 4)


def test_calls_that_were_recorded_on_purpose_count(tune, wrapped):
    wrapper = wrapped()
    wrapper.enable_recording()
    wrapper(torch.ones(7, 4))
    graph = the_graph(tune(wrapper))
    assert (graph.num_samples, graph.inputs[0].max_shape) == (4, (7, 4))


def test_a_module_that_fails_stays_eager_and_others_go_on(tune, clock, caplog):
    pipe = Pipe(clock, Raising(), toys.Faster())
    report = tune(pipe)
    assert [module.state for module in report.modules] == ["passthrough", "tuned"]
    failure = report.module("unet").error
    assert failure.type == "TuningError"
    assert "Raising() failed: OSError: no such thing here" in failure.message
    assert report.module("unet").graphs[0].candidates[0].status == "failed"
    assert "unet stays as it is" in caplog.text
    assert "unet: stays as it is." in report.describe()
    toys.calls.clear()
    assert torch.equal(pipe(torch.ones(1, 4)), torch.tensor([[1.0, 4, 9, 16]]))
    assert toys.calls["faster"] == 1


def test_a_failure_can_be_raised_instead_after_all_modules(tune, clock):
    pipe = Pipe(clock, Raising(), toys.Faster())
    with pytest.raises(TuningError, match="no such thing here"):
        tune(pipe, ignore_failing_modules=False)
    assert (pipe.unet.state, pipe.vae.state) == ("passthrough", "tuned")
    assert pl.snapshot_tuning_data().module("unet").error is not None


class BrokenStrategy(pl.FirstWinsStrategy):
    title = "Broken"

    def _choose(self, work, backends):
        raise ZeroDivisionError("a fault of the strategy")


def test_an_error_that_nobody_foresaw_costs_its_module_only(tune, clock, caplog):
    pipe = Pipe(clock)
    control_of(pipe.unet).strategy = BrokenStrategy([toys.Faster()])
    report = tune(pipe)
    assert report.module("unet").error.message == "unet: ZeroDivisionError: a fault of the strategy"
    assert (pipe.unet.state, pipe.vae.state) == ("passthrough", "tuned")
    with pytest.raises(TuningError, match="a fault of the strategy") as caught:
        tune(pipe, ignore_failing_modules=False)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_function_that_raises_halfway_leaves_modules_working(tune, clock):
    pipe = Pipe(clock)

    def function(x):
        pipe.unet(x)
        raise RuntimeError("the scheduler is broken")

    with pytest.raises(WorkloadError, match="The function raised: RuntimeError: the scheduler is broken"):
        tune(function)
    assert (pipe.unet.state, pipe.vae.state) == ("passthrough", "passthrough")
    assert torch.equal(pipe(torch.ones(1, 4)), torch.tensor([[1.0, 4, 9, 16]]))
    assert {module.state for module in tune(pipe).modules} == {"tuned"}


def test_a_function_that_raises_leaves_tuned_modules_tuned(tune, clock):
    pipe = Pipe(clock)
    tune(pipe)

    def function(x):
        pipe(x)
        raise RuntimeError("no more")

    with pytest.raises(WorkloadError, match="no more"):
        tune(function)
    assert (pipe.unet.state, pipe.vae.state) == ("tuned", "tuned")
    toys.calls.clear()
    pipe(torch.ones(1, 4))
    assert toys.calls == {"first": 1, "second": 1}


def test_an_interrupt_while_recording_leaves_modules_working(tune, clock):
    pipe = Pipe(clock)

    def function(x):
        pipe(x)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(function)
    assert (pipe.unet.state, pipe.vae.state) == ("passthrough", "passthrough")
    pipe(torch.ones(1, 4))


def test_after_an_interrupt_what_was_finished_is_not_done_again(tune, clock):
    pipe = Pipe(clock)
    control_of(pipe.vae).strategy = pl.OneBackendStrategy(Interrupting())
    with pytest.raises(KeyboardInterrupt):
        tune(pipe)
    assert (pipe.unet.state, pipe.vae.state) == ("tuned", "passthrough")
    assert torch.equal(pipe(torch.ones(1, 4)), torch.tensor([[1.0, 4, 9, 16]]))
    control_of(pipe.vae).strategy = pl.OneBackendStrategy(toys.Faster(label="second"))
    report = tune(pipe)
    assert report.module("unet").graphs[0].decision.candidates[0].is_reused
    assert (report.num_builds, toys.builds) == (1, {"first": 1, "second": 1})


def test_modules_that_the_function_does_not_call_stay_as_they_are(tune, clock):
    pipe = Pipe(clock)

    def function(x):
        return pipe.unet(x)

    report = tune(function)
    assert [module.state for module in report.modules] == ["tuned", "passthrough"]
    assert "vae was not called by the function" in report.module("vae").error.message
    tune(pipe)
    report = tune(function, toys.samples(4), [1, 4])
    assert [module.name for module in report.modules] == ["unet"]
    assert pipe.vae.state == "tuned"
    toys.calls.clear()
    pipe.vae(torch.ones(2, 4))
    assert toys.calls == {"second": 1}


def test_two_pipelines_are_tuned_side_by_side(tune, clock):
    first, second = Pipe(clock), Pipe(clock)
    tune(first)
    assert second.unet.state == "init"
    tune(second)
    assert {m.state for pipe in (first, second) for m in (pipe.unet, pipe.vae)} == {"tuned"}
    toys.calls.clear()
    first(torch.ones(1, 4))
    second(torch.ones(1, 4))
    assert toys.calls == {"first": 2, "second": 2}


def test_two_pipelines_are_tuned_by_two_threads():
    pipes = [Pipe(toys.NoClock()), Pipe(toys.NoClock())]
    for pipe in pipes:
        for wrapper in (pipe.unet, pipe.vae):
            control_of(wrapper).strategy.enable_performance_validation(False)
    barrier, reports = threading.Barrier(2), {}

    def work(index):
        barrier.wait()
        reports[index] = pl.tune(pipes[index], toys.samples(3 + 5 * index), [1, 2 + 2 * index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, most in ((0, 2), (1, 4)):
        assert [module.state for module in reports[index].modules] == ["tuned", "tuned"]
        assert reports[index].module("vae").graphs[0].inputs[0].max_shape == (most, 4)


def test_a_failure_for_lack_of_memory_is_tried_again(tune, wrapped, monkeypatch):
    def exhausted(self, request):
        raise torch.OutOfMemoryError("CUDA out of memory")

    wrapper = wrapped()
    with monkeypatch.context() as patch:
        patch.setattr(toys.Faster, "compile", exhausted)
        assert "OutOfMemoryError" in tune(wrapper).modules[0].error.message
    assert the_graph(tune(wrapper)).decision.selected == "Faster()"


def test_a_module_in_training_mode_is_not_tuned(tune, wrapped):
    wrapper = wrapped()
    wrapper.train()
    assert "Toy is in training mode; call its eval()" in tune(wrapper).modules[0].error.message


def test_a_module_that_is_moved_at_each_call_is_not_tuned(tune, wrapped):
    wrapper = wrapped()
    wrapper._hf_hook = object()
    assert "moved between devices at each call" in tune(wrapper).modules[0].error.message


@pytest.mark.parametrize(("device", "is_right"), [("cpu", True), (torch.device("cpu"), True), ("cuda:0", False)])
def test_the_device_has_to_be_that_of_the_module(tune, wrapped, device, is_right):
    report = tune(wrapped(), device=device)
    error = report.modules[0].error
    assert (error is None) == is_right
    if error:
        assert "device: Toy is on cpu, not on cuda:0; move it there first" in error.message


def test_calls_that_raise_inside_the_function_are_told(tune, wrapped):
    wrapper = wrapped()

    def function(x):
        try:
            wrapper(x[:, :3])
        except RuntimeError:
            return

    assert "graph 0: every call of this form raised" in tune(function).modules[0].error.message
    assert wrapper.state == "passthrough"


def test_too_many_forms_of_call_are_an_error_of_that_module_and_can_be_mended(tune, wrapped):
    pl.config.max_num_graphs = 3
    wrapper, other = wrapped(), wrapped()
    numbers = iter(range(100))
    told = r"more than 3 different forms.*`scale` has 4 different values"

    def varying(x):
        return other(wrapper(x, scale=next(numbers)))

    with pytest.warns(UserWarning, match=told):
        report = tune(varying, toys.samples(4))
    failed = [module for module in report.modules if module.error is not None]
    assert [module.state for module in failed] == ["passthrough"]
    assert re.search(told, failed[0].error.message)
    assert [module.state for module in report.modules if module not in failed] == ["tuned"]
    assert wrapper.state == "passthrough"
    with pytest.warns(UserWarning, match=told), pytest.raises(InputError, match=told):
        tune(varying, toys.samples(4), ignore_failing_modules=False)
    assert len(tune(lambda x: wrapper(x, scale=2)).modules[0].graphs) == 1


def test_too_many_forms_of_call_do_not_end_a_program_that_tunes_nothing(wrapped):
    pl.config.max_num_graphs = 3
    wrapper = wrapped()
    with pytest.warns(UserWarning, match="records no more calls") as warned:
        results = [wrapper(torch.ones(1, 4), scale=scale) for scale in range(8)]
    assert len(warned) == 1
    assert torch.equal(results[7], wrapper.module(torch.ones(1, 4), scale=7))


def test_few_samples_warn(tune, wrapped):
    pl.config.min_num_samples = 4
    with pytest.warns(UserWarning, match="3 samples were recorded, fewer than config.min_num_samples = 4"):
        tune(wrapped())


def test_only_so_many_samples_are_kept(tune, wrapped):
    pl.config.max_num_samples_stored = 2
    wrapper = wrapped()
    tune(wrapper, toys.samples(8), [1, 2], dry_run=True)
    kept = control_of(wrapper).recording.samples["0"]
    assert [sample.batch_size for sample in kept] == [1, 2], "of each batch size, if there is room"


class ThirdParty:
    """A function that logs by a logger of its own."""

    def __init__(self, wrapper):
        self.wrapper = wrapper

    def __call__(self, x):
        logging.getLogger("third.party").warning("third party speaks")
        return self.wrapper(x)


@pytest.mark.parametrize("is_disabled", [True, False])
def test_logs_of_others_are_muted_during_the_call_only(tune, wrapped, is_disabled, caplog):
    function = ThirdParty(wrapped())
    with caplog.at_level(logging.INFO):
        tune(function, disable_external_logging=is_disabled)
        assert ("third party speaks" in caplog.text) != is_disabled
        assert "Tuning module Toy" in caplog.text
        caplog.clear()
        logging.getLogger("third.party").warning("third party again")
        assert "third party again" in caplog.text


def test_logs_of_others_come_back_after_an_error(wrapped, caplog):
    wrapper = wrapped()

    def function(x):
        wrapper(x)
        raise RuntimeError("stop")

    with pytest.raises(WorkloadError):
        pl.tune(function, toys.samples(), disable_external_logging=True)
    logging.getLogger("third.party").warning("third party again")
    assert "third party again" in caplog.text


def test_clearing_the_cache_removes_what_is_perfladders_own(tune, wrapped):
    tune(wrapped())
    cache = pl.config.cache_dir
    foreign = [cache / "notes.txt", cache / "mine" / "model.bin"]
    for file in foreign:
        file.parent.mkdir(exist_ok=True)
        file.write_text("keep me")
    assert tune(wrapped()).num_builds == 1, "a new wrapper builds what is chosen"
    report = tune(wrapped(), clear_cache=True)
    assert not the_graph(report).decision.candidates[0].is_reused
    assert [file.read_text() for file in foreign] == ["keep me"] * 2


def test_a_second_tuning_of_the_same_builds_nothing(tune, wrapped):
    wrapper = wrapped()
    first = tune(wrapper)
    second = tune(wrapper)
    assert (first.num_builds, second.num_builds, toys.builds["faster"]) == (1, 0, 1)
    candidates = [the_graph(report).decision.candidates[0] for report in (first, second)]
    assert [candidate.is_reused for candidate in candidates] == [False, True]
    assert candidates[0].measurements == candidates[1].measurements
    assert wrapper.state == "tuned"
    toys.calls.clear()
    wrapper(torch.ones(1, 4))
    assert toys.calls["faster"] == 1


def changed_weights(wrapper):
    with torch.no_grad():
        wrapper.weight[0] = 7


def changed_attribute(wrapper):
    wrapper.module.epsilon = 0.5


def changed_options(wrapper):
    control_of(wrapper).strategy = pl.OneBackendStrategy(toys.Faster(ms=4))


def changed_protocol(wrapper):
    stop = pl.NumStepsMeasuringStopStrategy(num_steps=12)
    control_of(wrapper).strategy.set_profiling_config(pl.ProfilingConfig(measurement_stop_strategy=stop))


def changed_precision(wrapper):
    torch.set_float32_matmul_precision("high")


def changed_threads(wrapper):
    torch.set_num_threads(torch.get_num_threads() + 1)


@pytest.mark.parametrize(
    "change",
    [changed_weights, changed_attribute, changed_options, changed_protocol, changed_precision, changed_threads],
)
def test_what_has_changed_is_evaluated_anew(tune, wrapped, change):
    wrapper, threads, precision = wrapped(), torch.get_num_threads(), torch.get_float32_matmul_precision()
    tune(wrapper)
    try:
        change(wrapper)
        candidate = the_graph(tune(wrapper)).decision.candidates[0]
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
    assert not candidate.is_reused


def test_another_version_of_a_library_that_builds_is_evaluated_anew(tune, wrapped, monkeypatch):
    monkeypatch.setattr(toys.Faster, "libraries", ("pydantic",))
    wrapper = wrapped()
    tune(wrapper)
    assert the_graph(tune(wrapper)).decision.candidates[0].is_reused
    monkeypatch.setattr(
        "perfladder.tuning.candidates.library_versions", lambda libraries: dict.fromkeys(libraries, "0")
    )
    assert not the_graph(tune(wrapper)).decision.candidates[0].is_reused


def test_other_sizes_are_evaluated_anew(tune, wrapped):
    wrapper = wrapped()
    tune(wrapper)
    assert not the_graph(tune(wrapper, None, [1, 2, 4])).decision.candidates[0].is_reused
    assert toys.builds["faster"] == 2


class RightOnSmall(toys.Faster):
    name = "toy_right_on_small"

    def result(self, right, x):
        return right if x.max() < 100 else right * 2


def test_what_was_right_before_is_held_against_new_samples(tune, wrapped):
    wrapper = wrapped(pl.FirstWinsStrategy([RightOnSmall(), toys.Faster()]))
    assert the_graph(tune(wrapper)).decision.selected == "RightOnSmall()"
    large = [sample * 100 for sample in toys.samples()]
    decision = the_graph(tune(wrapper, large)).decision
    assert decision.selected == "Faster()"
    assert decision.candidates[0].status == "rejected"
    assert not decision.candidates[0].is_reused


def test_a_known_winner_that_does_not_build_any_more_is_tried_anew(tune, wrapped, monkeypatch):
    tune(wrapped())

    def broken(self, request):
        raise OSError("the disk is full")

    monkeypatch.setattr(toys.Faster, "compile", broken)
    wrapper = wrapped()
    report = tune(wrapper)
    assert "Faster() failed: OSError: the disk is full" in report.modules[0].error.message
    assert wrapper.state == "passthrough"


def test_a_damaged_record_is_made_anew(tune, wrapped, caplog):
    wrapper = wrapped()
    tune(wrapper)
    (record,) = (pl.config.cache_dir / "records").iterdir()
    record.write_text("{")
    assert not the_graph(tune(wrapper)).decision.candidates[0].is_reused
    assert "cannot be used and is made anew" in caplog.text


def test_each_module_has_its_own_strategy(tune, clock):
    pipe = Pipe(clock)
    control_of(pipe.vae).strategy = pl.MinLatencyStrategy([toys.Faster(label="a", ms=4), toys.Faster(label="b", ms=3)])
    report = tune(pipe)
    graphs = [report.module(name).graphs[0] for name in ("unet", "vae")]
    assert [graph.strategy for graph in graphs] == ["One Backend Strategy", "Min Latency Strategy"]
    assert graphs[1].decision.selected == "Faster(label='b', ms=3.0)"


def two_graphs(wrapper):
    def function(x):
        wrapper(x)
        wrapper(x, scale=2.0)

    return function


@pytest.mark.parametrize(
    "strategies",
    [
        lambda one, two: [one, two],
        lambda one, two: {"1": two, "0": one},
    ],
)
def test_each_graph_has_its_own_strategy(tune, clock, strategies):
    one, two = (pl.OneBackendStrategy(toys.Faster(label=label)) for label in ("one", "two"))
    wrapper = pl.Module(toys.Toy(clock), strategies=strategies(one, two))
    report = tune(two_graphs(wrapper))
    assert [graph.decision.selected for graph in report.modules[0].graphs] == [
        "Faster(label='one')",
        "Faster(label='two')",
    ]
    toys.calls.clear()
    wrapper(torch.ones(1, 4), scale=2.0)
    assert toys.calls == {"two": 1}


def test_a_strategy_of_a_graph_that_there_is_not_warns(tune, clock):
    one = pl.OneBackendStrategy(toys.Faster())
    wrapper = pl.Module(toys.Toy(clock), strategies={"0": one, "7": one})
    with pytest.warns(UserWarning, match="strategies has '7', which is no graph here; there are 0"):
        tune(wrapper)


def test_values_of_settings_do_not_count_where_that_is_asked_for(tune, wrapped):
    pl.config.strict_mode = False
    wrapper = wrapped()
    report = tune(two_graphs(wrapper))
    assert len(report.modules[0].graphs) == 2, "a call without the setting is another form"
    toys.calls.clear()
    wrapper(torch.ones(1, 4), scale=3.0)
    assert toys.calls["faster"] == 1


class Sized(nn.Module):
    """A toy of images, whose size is a setting of the pipeline."""

    def __init__(self, clock):
        super().__init__()
        self.clock = clock
        self.conv = nn.Conv2d(1, 1, 3, padding=1)
        self.eval()

    def compute(self, x, scale=1.0):
        return self.conv(x) * scale

    def forward(self, x, scale=1.0):
        self.clock.pass_ms(10)
        return self.compute(x, scale)


class SizedPipe:
    def __init__(self, clock):
        self.unet = Sized(clock)

    def __call__(self, prompt, height, width, guidance_scale):
        return self.unet(torch.ones(len(prompt), 1, height, width), guidance_scale)


def test_a_wrapper_of_the_workload_records_all_its_sizes(tune, clock):
    pipe = SizedPipe(clock)
    sizes = [(16, 16), (32, 24)]

    def call_wrapper(*args, **kwargs):
        for height, width in sizes:
            pipe(*args, height=height, width=width, guidance_scale=1.0, **kwargs)

    data = [{"prompt": "a lighthouse"}]
    info = pl.inspect(pipe, data, inference_function=call_wrapper, number_of_iterations=1, clock=clock)
    assert info.get_modules()[0].execution_count == 2
    pipe = pl.wrap(pipe, info.get_modules(), strategy=pl.OneBackendStrategy(toys.Faster()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = tune(call_wrapper, data)
        graph = the_graph(report)
        assert graph.inputs[0].shape == ("batch0", 1, "dim2", "dim3")
        assert (graph.inputs[0].min_shape, graph.inputs[0].max_shape) == ((1, 1, 16, 16), (2, 1, 32, 24))
        toys.calls.clear()
        call_wrapper(["a", "b"])
    assert toys.calls["faster"] == 2


def test_another_function_than_was_inspected_warns(tune, clock):
    pipe = SizedPipe(clock)

    def call_wrapper(prompt):
        return pipe(prompt, 16, 16, 1.0)

    def another(prompt):
        return pipe(prompt, 8, 8, 1.0)

    data = [{"prompt": "a lighthouse"}]
    info = pl.inspect(pipe, data, inference_function=call_wrapper, number_of_iterations=1, clock=clock)
    pl.wrap(pipe, info.get_modules(), strategy=pl.OneBackendStrategy(toys.Faster()))
    with pytest.warns(UserWarning, match=r"unet was inspected through .*call_wrapper, and is tuned through .*another"):
        tune(another, data)
    assert pipe.unet.state == "tuned"


def test_a_module_that_was_inspected_itself_is_tuned_without_a_warning(tune, clock):
    toy = toys.Toy(clock)
    info = pl.inspect(toy, toys.samples(), number_of_iterations=1, clock=clock)
    wrapper = pl.wrap(toy, info.get_modules(), strategy=pl.OneBackendStrategy(toys.Faster()))
    tune(wrapper)
    assert wrapper.state == "tuned"


def test_progress_is_told(tune, clock):
    moments = []
    tune(Pipe(clock), on_progress=moments.append)
    labels = [moment.label for moment in moments]
    assert labels[:2] == ["recording calls of batch size 1"] * 2
    assert "unet, graph 0: trying Faster(label='first')" in labels
    assert [moment.num_done for moment in moments if moment.num_total][-1] == 2
    assert moments[-1].remaining_s == 0
    assert all(moment.remaining_s is None for moment in moments if not moment.num_done)


class Owning(toys.Faster):
    """Keeps its own copy of the weights."""

    name = "toy_owning"

    def compile(self, request):
        built = super().compile(request)
        weight = request.module.weight.detach().clone()

        def call(x, scale=1.0):
            request.module.clock.pass_ms(5)
            return x * weight * scale

        return type(built)(call, owns_weights=True)


def test_weights_can_be_given_up_where_nothing_needs_them(tune, wrapped, caplog):
    pl.config.device_after_tuning = "meta"
    wrapper = wrapped(pl.OneBackendStrategy(Owning()))
    tune(wrapper)
    assert wrapper.weight.device.type == "meta"
    assert "a call of another form than those that were tuned will be an error" in caplog.text
    assert torch.equal(wrapper(torch.ones(1, 4)), torch.tensor([[1.0, 2, 3, 4]]))
    with pytest.raises(TuningError, match=r"rank 3.*original weights were given up"):
        wrapper(torch.ones(1, 1, 4))
    with pytest.raises(TuningError, match=r"given up.*cannot be recorded; load them again first"):
        tune(wrapper)
    assert torch.equal(wrapper(torch.ones(1, 4)), torch.tensor([[1.0, 2, 3, 4]]))


def test_weights_stay_where_what_was_chosen_uses_them(tune, wrapped):
    pl.config.device_after_tuning = "meta"
    wrapper = wrapped()
    tune(wrapper)
    assert wrapper.weight.device.type == "cpu"


def test_random_numbers_go_on_as_if_nothing_was_drawn(tune, clock):
    class Dropping(toys.Toy):
        def compute(self, x, scale=1.0):
            return nn.functional.dropout(x, 0.5, training=True) * scale

    wrapper = pl.Module(Dropping(clock), strategy=pl.OneBackendStrategy(toys.Faster()))
    assert the_graph(tune(wrapper)).decision.selected == "Faster()", "both sides draw the same numbers"
