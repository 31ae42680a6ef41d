"""Backends that are wrong, each in its own way: all are found out, told apart, and leave the module as it was."""

import math
import re
from collections import UserDict

import pytest
import torch
import toys
from torch import nn

import perfladder as pl
from perfladder.capturing.compare import Encoded, compare_values
from perfladder.tuning.correctness import TOLERANCES, Case, check, expectations
from perfladder.tuning.quality import QualityGate

CPU = torch.device("cpu")
EAGER = pl.backend.TorchEagerBackend()


@pytest.fixture
def tried(clock):
    """Try a backend on a module, before the plain one; tells what is known of it, and sees that the module works."""

    def run(backend, module=None, dataset=None, function=None, **options):
        plain = module or toys.Toy(clock)
        wrapper = pl.Module(plain, strategy=pl.FirstWinsStrategy([backend, EAGER]))
        x = torch.arange(8.0).reshape(2, 4)
        report = pl.tune(wrapper, dataset or toys.samples(4), batch_sizes=[1, 2, 4], clock=clock, **options)
        assert report.modules[0].error is None, report.modules[0].error
        decision = report.modules[0].graphs[0].decision
        assert wrapper.state == "tuned"
        found, right = (Encoded.of({"output": call(x.clone())}) for call in (wrapper, plain))
        assert decision.candidates[0].status == "kept" or not compare_values(right, found)
        return decision.candidates[0]

    return run


class Doctored(toys.Faster):
    """Right but for what a function does to its result."""

    def result(self, right, x):
        return type(self).doctor(right, x)


def doctored(doctor, **options):
    """A backend whose results a function changes."""
    kind = type("Doctored", (Doctored,), {"name": "toy_doctored", "doctor": staticmethod(doctor)})
    return kind(**options)


def nan_where_large(right, x):
    return torch.where(x > 3.5, math.nan, right)


def infinite_once(right, x):
    right = right.clone()
    right[0, 0] = math.inf
    return right


def changes_input(right, x):
    x.add_(1)
    return right


def wrong_when_largest(right, x):
    return right + 1 if len(x) == 4 else right


def rounded(right, x):
    return right.half().float()


def as_view_of_larger(right, x):
    return torch.cat([right, right])


def raises(right, x):
    raise ValueError("no kernel for this shape")


@pytest.mark.parametrize(
    ("doctor", "status", "says"),
    [
        (
            lambda right, x: torch.zeros_like(right),
            "rejected",
            r"sample 0: output: largest error 12 \(1 of ",
        ),
        (lambda right, x: right * 1.001, "rejected", "sample 0: output: largest error 0.012"),
        (rounded, "kept", None),
        (lambda right, x: right * (1 + 1e-6), "kept", None),
        (nan_where_large, "rejected", "sample 1: output: 1 of 4 values are NaN or infinite on one side only"),
        (infinite_once, "rejected", "sample 0: output: 1 of 4 values are NaN or infinite"),
        (lambda right, x: right.double(), "rejected", r"float32 \[1, 4\] became float64 \[1, 4\]"),
        (lambda right, x: right.half(), "rejected", r"float32 \[1, 4\] became float16 \[1, 4\]"),
        (lambda right, x: right[:, :3], "rejected", r"float32 \[1, 4\] became float32 \[1, 3\]"),
        (as_view_of_larger, "rejected", r"float32 \[1, 4\] became float32 \[2, 4\]"),
        (lambda right, x: right.flatten(), "rejected", r"became float32 \[4\]"),
        (lambda right, x: (right,), "rejected", "output"),
        (lambda right, x: None, "rejected", "output"),
        (lambda right, x: right.numpy(), "rejected", "a tensor became a"),
        (lambda right, x: right.to("meta"), "rejected", "a tensor became"),
        (
            changes_input,
            "rejected",
            r"sample 0: it changes its input args\.0, which the plain module leaves",
        ),
        (wrong_when_largest, "rejected", "largest error"),
        (raises, "failed", "ValueError: no kernel for this shape"),
    ],
    ids=[
        "zeros",
        "slightly wrong",
        "rounded but exact here",
        "within tolerance",
        "NaN on some inputs",
        "infinite",
        "wider dtype",
        "narrower dtype",
        "narrower",
        "another batch",
        "flat",
        "in a tuple",
        "nothing",
        "an array",
        "no numbers",
        "changes its input",
        "wrong at the largest",
        "raises",
    ],
)
def test_a_wrong_backend_is_told_by_its_reason(tried, doctor, status, says):
    found = tried(doctored(doctor))
    assert found.status == status, found.reason
    if says:
        assert found.reason
        assert re.search(says, found.reason), found.reason
    if status == "kept":
        assert found.correctness.max_rel_error <= TOLERANCES["float32"]
    else:
        assert found.measurements == [], "it is not timed"


def test_a_slower_backend_is_rejected_by_its_time(tried):
    found = tried(toys.Faster(ms=11))
    assert found.status == "rejected"
    assert "no faster at batch size 4: The speedup is 0.909" in found.reason


def test_what_is_wrong_at_the_ends_of_the_ranges_only_is_found(tried, clock):
    """Sizes that no sample has: stated ones."""
    module = toys.Toy(clock)
    wrapper = pl.Module(
        module,
        strategy=pl.FirstWinsStrategy([doctored(lambda right, x: right * 2 if len(x) == 64 else right), EAGER]),
        dynamic_shapes={"x": (pl.BatchDim("batch", 1, 64, opt=8), 4)},
    )
    report = pl.tune(wrapper, toys.samples(), clock=clock)
    found = report.modules[0].graphs[0].decision.candidates[0]
    assert found.reason.startswith("largest sizes: output: largest error")
    assert found.correctness.num_cases == 3 + 3


class Cached(nn.Module):
    """Writes to its input, as caches are written to."""

    def __init__(self, clock):
        super().__init__()
        self.clock = clock
        self.eval()

    def compute(self, x):
        x[:, 0] += 1
        return x * 2

    def forward(self, x):
        self.clock.pass_ms(10)
        return self.compute(x)


class NoWriting(toys.Faster):
    name = "toy_no_writing"

    def compile(self, request):
        built = super().compile(request)
        return type(built)(lambda x: built.call(x.clone()))


def test_an_input_that_is_not_changed_alike_is_found(tried, clock):
    found = tried(NoWriting(), Cached(clock))
    assert found.status == "rejected"
    assert "sample 0: it leaves its input args.0 otherwise than the plain module does (largest error 1" in found.reason


def test_an_input_that_is_changed_alike_is_right(tried, clock):
    found = tried(toys.Faster(), Cached(clock))
    assert (found.status, found.reason) == ("kept", None)


class Structured(nn.Module):
    """Returns nested containers."""

    def __init__(self, clock):
        super().__init__()
        self.clock = clock
        self.eval()

    def compute(self, x):
        return (x, {"twice": x * 2, "list": [x + 1, "a text", 3, None]})

    def forward(self, x):
        self.clock.pass_ms(10)
        return self.compute(x)


@pytest.mark.parametrize(
    "doctor",
    [
        lambda right, x: list(right),
        lambda right, x: (right[0], UserDict(right[1])),
        lambda right, x: (right[0], {**right[1], "list": tuple(right[1]["list"])}),
        lambda right, x: (right[0], {**right[1], "more": x}),
        lambda right, x: (right[0], {"twice": right[1]["twice"]}),
        lambda right, x: (right[0], {**right[1], "list": [x + 1, "b text", 3, None]}),
        lambda right, x: (right[0], {**right[1], "list": [x + 1, "a text", 4, None]}),
        lambda right, x: (right[0], {**right[1], "list": [x + 1, "a text", 3.0, None]}),
        lambda right, x: (right[0], {**right[1], "list": [x + 1, "a text", 3, False]}),
        lambda right, x: (right[0], {**right[1], "list": right[1]["list"][:3]}),
    ],
    ids=[
        "a list, not a tuple",
        "another mapping",
        "an inner tuple, not a list",
        "one more",
        "one less",
        "another text",
        "another number",
        "another type of number",
        "a flag, not None",
        "a shorter list",
    ],
)
def test_another_structure_is_wrong(tried, clock, doctor):
    found = tried(doctored(doctor), Structured(clock))
    assert found.status == "rejected"
    assert found.reason.startswith("sample 0: output")


def test_the_same_structure_is_right(tried, clock):
    assert tried(toys.Faster(), Structured(clock)).status == "kept"


class Lossy(toys.Faster):
    """Off by as much as its option says."""

    name = "toy_lossy"
    is_lossy = True

    def result(self, right, x):
        error = torch.tensor([1.0, -1.0, 1.0, -1.0]) * right.abs().mean()
        return right + error * self.config.noise


def lossy(noise, **options):
    return type("Lossy", (Lossy,), {})(noise=noise, **options)


class TestLossyBackends:
    def test_a_small_loss_is_accepted_and_told(self, tried):
        found = tried(lossy(0.02))
        assert found.status == "kept"
        assert found.correctness.gate == "cosine >= 0.99"
        assert 0.99 < found.correctness.quality < 1
        assert found.correctness.tolerances == {}

    def test_a_large_loss_is_rejected(self, tried):
        found = tried(lossy(0.9))
        assert found.status == "rejected"
        assert "cosine is 0." in found.reason
        assert "below 0.99" in found.reason

    def test_a_gate_on_the_whole_output_decides_instead(self, tried):
        assert tried(lossy(0.2), quality_gate=pl.QualityGate("cosine", 0.9)).status == "kept"
        found = tried(lossy(0.2), quality_gate=pl.QualityGate("cosine", 0.99999))
        assert found.status == "rejected"
        assert "cosine of the whole output is 0.9" in found.reason

    def test_a_function_can_be_the_gate(self, tried):
        seen = []

        def likeness(expected, found):
            seen.append((expected, found))
            return -float((expected - found).abs().max())

        assert "likeness of the whole output is -" in tried(lossy(0.1), quality_gate=likeness).reason
        assert [tuple(pair[0].shape) for pair in seen] == [(1, 4)]
        assert tried(lossy(0.1), quality_gate=QualityGate(likeness, -100)).status == "kept"

    def test_a_gate_that_returns_no_number_fails_the_candidate(self, tried):
        def likeness(expected, found):
            return "alike"

        found = tried(lossy(0.1), quality_gate=likeness)
        assert (found.status, found.reason) == ("failed", "InputError: quality: likeness returned a str, not a number.")

    @pytest.mark.parametrize("doctor", [nan_where_large, lambda right, x: right.half(), lambda right, x: right[:, :3]])
    def test_no_gate_accepts_what_is_wrong_in_form(self, tried, doctor):
        backend = doctored(doctor)
        type(backend).is_lossy = True
        found = tried(backend, quality_gate=lambda expected, found: 1.0)
        assert found.status == "rejected"

    def test_a_candidate_is_judged_anew_under_another_gate(self, clock):
        toy = toys.Toy(clock)
        strategy = pl.FirstWinsStrategy([lossy(0.2), EAGER])

        def status(gate):
            report = pl.tune(pl.Module(toy, strategy=strategy), toys.samples(), clock=clock, quality_gate=gate)
            return report.modules[0].graphs[0].decision.candidates[0].status

        gates = [pl.QualityGate("cosine", least) for least in (0.9999, 0.5, 0.9999)]
        assert [status(gate) for gate in gates] == ["rejected", "kept", "rejected"]

    def test_a_function_of_another_meaning_is_another_gate(self, clock):
        toy = toys.Toy(clock)
        strategy = pl.FirstWinsStrategy([lossy(0.2), EAGER])

        def status(gate):
            report = pl.tune(pl.Module(toy, strategy=strategy), toys.samples(), clock=clock, quality_gate=gate)
            candidate = report.modules[0].graphs[0].decision.candidates[0]
            return candidate.status, candidate.is_reused

        gates = [lambda expected, found, value=value: value for value in (-1.0, 1.0)]
        assert [status(gate) for gate in (*gates, gates[0])] == [
            ("rejected", False),
            ("kept", False),
            ("rejected", True),
        ]

    def test_a_known_winner_is_held_against_the_whole_output_again(self, clock):
        wrapper = pl.Module(toys.Toy(clock), strategy=pl.FirstWinsStrategy([lossy(0.2), EAGER]))
        weights = {"factor": 1.0}

        def pipeline(x):
            return torch.softmax(wrapper(x) * weights["factor"], -1)

        def selected():
            gate = pl.QualityGate("cosine", 0.99)
            return pl.tune(pipeline, toys.samples(), clock=clock, quality_gate=gate).modules[0].graphs[0].decision

        weights["factor"] = 0.001
        assert selected().selected == "Lossy(noise=0.2)"
        weights["factor"] = -1.0
        decision = selected()
        assert decision.selected == "eager"
        assert "of the whole output is" in decision.candidates[0].reason


@pytest.fixture
def checked():
    """Check a function against another one on one input."""

    def run(plain, candidate, x, gate=None):
        expected = expectations(plain, [Case("the case", lambda: ((x.clone(),), {}))], CPU)
        return check(candidate, expected, CPU, gate)

    return run


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_tolerances_go_by_dtype(checked, dtype):
    x = torch.linspace(-2, 2, 64, dtype=torch.float64).to(dtype)
    tolerance = TOLERANCES[str(dtype).removeprefix("torch.")]
    assert checked(lambda x: x, lambda x: x + 0.1 * tolerance, x).reason is None
    assert "largest error" in checked(lambda x: x, lambda x: x + 5 * tolerance, x).reason


def test_whole_numbers_have_no_tolerance(checked):
    x = torch.arange(100_000)
    assert "1 of 100000 values differ" in checked(lambda x: x, lambda x: x.clone().put_(x[:1], x[:1] + 1), x).reason
    assert checked(lambda x: x > 5, lambda x: x >= 6, x).reason is None
    assert "values differ" in checked(lambda x: x > 5, lambda x: x > 6, x).reason


def test_the_same_nan_and_infinity_are_right(checked):
    x = torch.tensor([math.nan, math.inf, -math.inf, 1.0])
    assert checked(lambda x: x * 2, lambda x: x + x, x).reason is None
    assert "3 of 4 values are NaN" in checked(lambda x: x, torch.nan_to_num, x).reason
    assert checked(lambda x: x, lambda x: -x, x).reason is not None


def test_empty_outputs_are_right(checked):
    assert checked(lambda x: x[:0], lambda x: x[:0], torch.ones(3)).reason is None


def test_the_worst_errors_are_told(checked):
    found = checked(lambda x: x, lambda x: x + torch.tensor([0.0, 1e-5]), torch.tensor([1.0, 4.0]))
    assert found.max_abs_error == pytest.approx(1e-5, rel=0.1)
    assert found.max_rel_error == pytest.approx(2.5e-6, rel=0.1)
    assert (found.num_cases, found.quality) == (1, None)


def test_random_numbers_are_the_same_on_both_sides(checked):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    assert checked(lambda x: x + torch.rand(4), lambda x: torch.rand(4) + x, torch.ones(4)).reason is None
    assert torch.equal(torch.rand(2), expected), "and those outside go on"


def test_a_sample_is_as_it_was_recorded(tried, clock):
    """A function that writes to what it passed does not change what candidates are compared on."""
    wrapper = pl.Module(toys.Toy(clock), strategy=pl.OneBackendStrategy(toys.Faster()))

    def function(x):
        wrapper(x)
        x.fill_(math.nan)

    report = pl.tune(function, toys.samples(), clock=clock)
    decision = report.modules[0].graphs[0].decision
    assert decision.candidates[0].correctness.num_cases == 6
    assert decision.selected == "Faster()"


def test_what_is_wrong_is_not_timed(clock, tried):
    before = clock.now_ns
    tried(doctored(lambda right, x: right * 0))
    assert clock.now_ns - before < 30 * 10e6


def test_an_output_that_the_next_call_overwrites_is_wrong():
    memory = torch.zeros(3)

    def reusing(x):
        return torch.mul(x, 2, out=memory)

    def keeping(x):
        return x * 2

    cases = [Case(f"sample {number}", lambda n=number: ((torch.full((3,), 1.0 + n),), {})) for number in range(2)]
    found = check(reusing, expectations(keeping, cases, CPU), CPU, None)
    assert found.reason.startswith("sample 1: it puts its output into the memory of the one before")
    assert check(keeping, expectations(keeping, cases, CPU), CPU, None).reason is None
    # A module that does so itself asks no more of others.
    assert check(reusing, expectations(reusing, cases, CPU), CPU, None).reason is None
    # What is the same at each call may lie in one place.
    assert check(lambda x: memory, expectations(lambda x: memory.clone(), cases, CPU), CPU, None).reason is None


def _checked(plain, candidate, gate=None):
    device = torch.device("cpu")
    case = Case("sample 0", lambda: ((torch.linspace(-1, 1, 64).reshape(8, 8),), {}))
    return check(candidate, expectations(plain, [case], device), device, gate)


def test_another_sign_of_zero_is_no_error():
    assert _checked(lambda x: x * 0.0, lambda x: x.abs() * 0.0).reason is None


def test_arrays_have_the_tolerance_of_their_dtype():
    assert _checked(lambda x: x.numpy(), lambda x: (x * (1 + 1e-6)).numpy()).reason is None
    assert "largest error" in _checked(lambda x: x.numpy(), lambda x: (x * 1.1).numpy()).reason


def test_a_gate_measures_pictures_of_bytes():
    def picture(x, offset=0):
        return ((x + 1) * 100).to(torch.uint8) + offset

    gate = pl.QualityGate("psnr", 30)
    found = _checked(picture, lambda x: picture(x, 1), gate)
    assert found.reason is None
    assert found.quality > 30
    assert "psnr" in _checked(picture, lambda x: picture(x, 50), gate).reason
    assert "values differ" in _checked(picture, lambda x: picture(x, 1)).reason
    assert "values differ" in _checked(lambda x: x > 0, lambda x: x > 0.5, gate).reason


class Opaque:
    """A class that nobody told tuning of."""

    def __init__(self, x):
        self.x = x


class Comparable(Opaque):
    __hash__ = None

    def __eq__(self, other):
        return torch.equal(self.x, other.x)


class Known(Opaque):
    """One that tuning was told of."""


pl.register_input_type(Known, lambda known: {"x": known.x}, lambda parts: Known(parts["x"]))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (Opaque, "Opaque, which cannot be compared"),
        (lambda x: iter([x]), "list_iterator, which cannot be compared"),
        (lambda x: (part for part in x), "generator, which cannot be compared"),
        (lambda x: {"found": [1, Opaque(x)]}, 'output["found"][1] is a '),
        (torch.Tensor.to_sparse, "tensor of layout torch.sparse_coo, which cannot be compared"),
    ],
)
def test_an_output_that_cannot_be_looked_into_is_not_taken_for_right(make, says):
    assert says in _checked(make, make).reason
    assert says in _checked(make, lambda x: make(x * 2)).reason


def test_an_object_that_says_it_is_equal_or_is_the_same_one_is_right():
    handle = Opaque(None)
    assert _checked(lambda x: (x, handle), lambda x: (x, handle)).reason is None
    assert _checked(Comparable, Comparable).reason is None
    assert "cannot be compared" in _checked(Comparable, lambda x: Comparable(x * 2)).reason


def test_a_registered_class_is_compared_by_its_parts():
    assert _checked(Known, Known).reason is None
    assert _checked(Known, lambda x: Known(x * 2)).reason.startswith("sample 0: output.x: largest error")
