"""An engine with the interface of TensorRT's that computes by torch at the addresses it is given, on any device.

It is as strict as the real one about profiles, addresses and alignment, so that a runner that forgets one is found out.
"""

import ctypes
import enum
import types
from contextlib import contextmanager

import torch

from perfladder.backend.trt_build import EngineRecord
from perfladder.backend.trt_engine import Engine
from perfladder.backend.trt_library import Library
from perfladder.backend.trt_profiles import InputRange, Profile

DataType = enum.Enum("DataType", "FLOAT HALF BF16 INT64 INT32 INT8 UINT8 BOOL FP8")
TensorIOMode = enum.Enum("TensorIOMode", "INPUT OUTPUT")
Strategy = enum.Enum("Strategy", "STATIC USER_MANAGED")
KINDS = {
    torch.float32: DataType.FLOAT,
    torch.float16: DataType.HALF,
    torch.int64: DataType.INT64,
    torch.bool: DataType.BOOL,
}


class OutputAllocator:
    pass


API = types.SimpleNamespace(
    DataType=DataType,
    TensorIOMode=TensorIOMode,
    ExecutionContextAllocationStrategy=Strategy,
    IOutputAllocator=OutputAllocator,
)
LIBRARY = Library("tensorrt", API, "0", None)


def at(address, shape, dtype, device):
    """The tensor that lies at an address."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    if not num_bytes:
        return torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cpu":
        memory = torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=torch.uint8)
    else:
        facts = {"data": (address, False), "shape": (num_bytes,), "typestr": "|u1", "version": 2}
        memory = torch.as_tensor(types.SimpleNamespace(__cuda_array_interface__=facts), device=device)
    return memory.view(dtype).view(shape)


class StandInEngine:
    """Computes `function` of its inputs.

    `sizes` gives the shapes of all outputs from those of the inputs; an output of an unknown size has -1 in it.
    """

    def __init__(self, function, inputs, outputs, ranges, sizes, device, lane):
        self.function, self.ranges, self.sizes = function, ranges, sizes
        self.inputs, self.outputs = dict(inputs), dict(outputs)
        self.device, self.lane = device, lane
        self.contexts = []
        self.device_memory_size_v2 = 1 << 12
        self.can_be_recorded = self.works = True

    @property
    def num_io_tensors(self):
        return len(self.inputs) + len(self.outputs)

    def get_tensor_name(self, number):
        return [*self.inputs, *self.outputs][number]

    def get_tensor_mode(self, name):
        return TensorIOMode.INPUT if name in self.inputs else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name):
        return KINDS[(self.inputs | self.outputs)[name]]

    def create_execution_context(self, strategy):
        assert strategy is Strategy.USER_MANAGED
        self.contexts.append(StandInContext(self))
        return self.contexts[-1]


class StandInContext:
    def __init__(self, engine):
        self.engine = engine
        self.active_optimization_profile = 0
        self.num_switches = 0
        self.shapes, self.addresses, self.allocators = {}, {}, {}
        self.scratch = None
        self.ran_at = []

    def set_device_memory(self, address, size):
        assert size >= self.engine.device_memory_size_v2
        self.scratch = address

    def set_optimization_profile_async(self, number, stream):
        self.active_optimization_profile = number
        self.num_switches += 1
        self.shapes.clear()
        return True

    def set_input_shape(self, name, shape):
        low, high = self.engine.ranges[self.active_optimization_profile][name]
        if len(shape) != len(low) or not all(a <= b <= c for a, b, c in zip(low, shape, high, strict=True)):
            return False
        self.shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name, address):
        assert address
        assert address % self.engine.lane.alignment_bytes == 0
        self.addresses[name] = address
        return True

    def set_output_allocator(self, name, allocator):
        self.allocators[name] = allocator
        return True

    def infer_shapes(self):
        return [name for name in self.engine.inputs if name not in self.shapes]

    def get_tensor_shape(self, name):
        if name in self.shapes:
            return self.shapes[name]
        return self.engine.sizes(*(self.shapes[one] for one in self.engine.inputs))[[*self.engine.outputs].index(name)]

    def is_stream_capturable(self, stream):
        return self.engine.can_be_recorded

    def execute_async_v3(self, stream):
        if not self.engine.works or self.scratch is None:
            return False
        # A graph has what was set when it was recorded.
        work = self._work(dict(self.shapes), dict(self.addresses), dict(self.allocators))
        tape = getattr(self.engine.lane, "tape", None)
        work() if tape is None else tape.append(work)
        return True

    def _work(self, shapes, addresses, allocators):
        engine, device = self.engine, self.engine.device

        def run():
            self.ran_at.append(dict(addresses))
            given = [at(addresses[name], shapes[name], dtype, device) for name, dtype in engine.inputs.items()]
            # All through the scratch memory, as kernels of an engine go.
            offset, taken = 0, []
            for tensor in given:
                there = at(self.scratch + offset, tensor.shape, tensor.dtype, device)
                taken.append(there.copy_(tensor))
                offset += -(-tensor.nbytes // 256) * 256
            for (name, dtype), result in zip(engine.outputs.items(), engine.function(*taken), strict=True):
                address = addresses.get(name)
                if allocators.get(name) is not None:
                    address = allocators[name].reallocate_output_async(name, 0, result.nbytes, 256, 0)
                    allocators[name].notify_shape(name, tuple(result.shape))
                at(address, result.shape, dtype, device).copy_(result)

        return run


class CpuLane:
    """Work of the CPU: done at once, or put on a tape."""

    alignment_bytes = 64

    def __init__(self):
        self.device = torch.device("cpu")
        self.tape = None
        self.others_record = self.is_own = False

    def is_recording(self):
        return self.others_record

    @contextmanager
    def work(self, *, is_own=False):
        self.is_own = is_own
        yield 0
        self.is_own = False

    def hold(self, tensors):
        pass

    def record(self, work):
        assert self.is_own, "streams of callers have other work too"
        self.tape = tape = []
        try:
            work(0)
        finally:
            self.tape = None
        return types.SimpleNamespace(replay=lambda: [one() for one in tape])


def opened(function, inputs, outputs, profiles, sizes, lane):
    """An engine around a stand-in: inputs and outputs as {name: dtype}, profiles as [{name: (min, opt, max)}]."""
    ranges = [{name: (low, high) for name, (low, _, high) in profile.items()} for profile in profiles]
    engine = StandInEngine(function, inputs, outputs, ranges, sizes, lane.device, lane)
    record = EngineRecord(
        library="tensorrt",
        version="0",
        outputs=list(outputs),
        profiles=[
            Profile(
                inputs=[
                    InputRange(name=name, access_path=name, min=low, opt=best, max=high)
                    for name, (low, best, high) in profile.items()
                ]
            )
            for profile in profiles
        ],
    )

    def scratch(num_bytes):
        return torch.empty(num_bytes, dtype=torch.uint8, device=lane.device)

    return Engine(LIBRARY, engine, record, scratch), record, engine
