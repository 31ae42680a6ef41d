import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from perfladder.instrument import Observer, instrument
from perfladder.rungs.stages import StagesRequest, measure
from perfladder.sites import resolve_site, resolve_sites, stage_sites


class Model(nn.Module):
    """A language model on the injected clock: 10 ms for the prompt, 2 ms a token, 1 ms to choose one."""

    def __init__(self, clock):
        super().__init__()
        self.clock, self.layers = clock, nn.Linear(1, 1)
        self.is_prompt = True

    def prepare_inputs_for_generation(self):
        pass

    def forward(self, x):
        self.clock.pass_ms(10 if self.is_prompt else 2)
        self.is_prompt = False
        return self.layers(x)

    def generate(self, num_tokens=4):
        self.is_prompt = True
        self.clock.pass_ms(5)
        for _ in range(num_tokens):
            self(torch.zeros(1, 1))
            self.clock.pass_ms(1)


class Pipe:
    def __init__(self, clock):
        self.model = Model(clock)

    def __call__(self, num_generations=2):
        for _ in range(num_generations):
            self.model.generate()


@pytest.fixture
def model(clock):
    return Model(clock)


@pytest.fixture
def measured(wrap, clock):
    def run(obj, **fields):
        return measure(wrap(obj, **{"measured_runs": 3, **fields}), StagesRequest(), clock=clock)

    return run


def by_name(result):
    return {stage.name: stage for stage in result.default.stages}


def test_first_call_of_generate_is_the_prefill_and_the_others_decode(measured, model):
    result = measured(model, call="generate")
    assert not any(stage.is_module for stage in by_name(result).values())
    found = by_name(result)
    assert set(found) == {"prefill", "decode"}, "neither the model as a whole nor its parts"
    assert (found["prefill"].calls_per_run, found["decode"].calls_per_run) == (1, 3)
    assert found["prefill"].total_ms.values == [10.0] * 3
    assert found["decode"].total_ms.values == [6.0] * 3
    assert result.default.wall_ms.values == [25.0] * 3
    assert result.default.outside_ms.values == [9.0] * 3


def test_tokens_are_there_when_the_next_step_begins(measured, model):
    made = measured(model, call="generate").default.generation
    assert made.model == ""
    assert (made.generations_per_run, made.steps_per_generation) == (1, 4)
    assert made.first_token_ms.values == [16.0] * 3, "5 before, 10 for the prompt, 1 to choose"
    assert made.prefill_ms.values == [10.0] * 3
    assert made.token_samples_ms == [3.0] * 9
    assert (made.token_ms.p50, made.token_ms.p95) == (3.0, 3.0)


def test_one_token_has_no_time_for_later_ones(measured, model):
    made = measured(model, call="generate", inputs={"num_tokens": 1}).default.generation
    assert made.first_token_ms.values == [16.0] * 3
    assert made.token_ms is None


def test_each_generation_of_a_pipeline_counts_from_its_own_start(measured, clock):
    result = measured(Pipe(clock))
    assert set(by_name(result)) == {"model.generate", "model.prefill", "model.decode"}
    assert by_name(result)["model.generate"].self_ms.values == [18.0] * 3
    made = result.default.generation
    assert (made.model, made.generations_per_run, made.steps_per_generation) == ("model", 2, 4)
    assert made.first_token_ms.values == [16.0] * 6
    assert made.token_samples_ms == [3.0] * 18


def test_phases_can_be_named_and_one_alone_has_no_token_times(measured, clock):
    result = measured(Pipe(clock), stages=["model.decode"])
    assert set(by_name(result)) == {"model.decode"}
    assert by_name(result)["model.decode"].calls_per_run == 6
    assert result.default.generation is None


def test_model_that_is_only_called_has_its_parts_as_stages(measured, model):
    result = measured(model, inputs={"x": {"$tensor": [1, 1]}})
    assert set(by_name(result)) == {"layers"}
    assert result.default.generation is None


def test_model_that_is_called_outside_generate_too_stays_a_stage(measured, clock):
    class Both(Pipe):
        def __call__(self):
            self.model(torch.zeros(1, 1))
            self.model.generate()

    assert {"model", "model.prefill", "model.decode"} <= set(by_name(measured(Both(clock))))


def test_generate_is_as_before_and_phases_of_threads_are_apart(model):
    sites = [site for site in stage_sites(SimpleNamespace(model=model)) if site.phase]

    class Log(Observer):
        seen: list[tuple[int, str]] = []

        def enter(self, site, args, kwargs):
            self.seen.append((threading.get_ident(), site.phase))

    log = Log()
    with instrument(sites, log) as state:
        # Both alive at once: the number of a thread that has ended is used again.
        both = threading.Barrier(2)
        threads = [threading.Thread(target=lambda: (both.wait(), model.generate(), both.wait())) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        model(torch.zeros(1, 1))
    assert state.lost == []
    assert "generate" not in vars(model)
    assert not model._forward_hooks
    for ident in {ident for ident, _ in log.seen}:
        assert [phase for other, phase in log.seen if other == ident] == ["prefill"] + ["decode"] * 3


def test_a_models_own_attribute_of_that_name_is_meant(model):
    model.decode = nn.Identity()
    assert resolve_site(model, "decode").owner is model.decode
    assert resolve_site(model, "prefill").phase == "prefill"


@pytest.mark.slow
def test_real_model_of_transformers(wrap):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).eval()
    inputs = {
        "inputs": {"$tensor": [2, 6], "dtype": "int64", "fill": "ones"},
        "max_new_tokens": 5,
        "min_new_tokens": 5,
        "do_sample": False,
        "pad_token_id": 0,
    }
    result = measure(wrap(model, call="generate", inputs=inputs, measured_runs=2), StagesRequest())
    assert set(by_name(result)) == {"prefill", "decode"}
    made = result.default.generation
    assert made is not None
    assert made.steps_per_generation == 5
    assert made.first_token_ms.summary.p50 >= made.prefill_ms.summary.p50
    assert "generate" not in vars(model)


@pytest.mark.slow
def test_real_pipeline_of_transformers(wrap):
    transformers = pytest.importorskip("transformers")
    from perfladder.workloads.tokens import build_tokenizer

    tokenizer = build_tokenizer(None)
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer), n_positions=64, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    pipe = transformers.TextGenerationPipeline(
        model=transformers.GPT2LMHeadModel(config).eval(), tokenizer=tokenizer, device="cpu"
    )
    inputs = {"text_inputs": "a house", "max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    result = measure(wrap(pipe, inputs=inputs, measured_runs=2), StagesRequest())
    assert {"preprocess", "_forward", "postprocess", "model.prefill", "model.decode"} <= set(by_name(result))
    assert result.default.generation is not None
    assert result.default.generation.steps_per_generation == 3
    assert {site.path for site in resolve_sites(pipe, ["model.decode", "preprocess"])} == {"model.decode", "preprocess"}
