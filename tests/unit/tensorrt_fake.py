"""A recorded fake of CUDA's and TensorRT's runtime API, strict about what their documentation demands.

Memory is real host memory behind real addresses. The stream is lazy: what is enqueued happens when it is waited for, so
a result that is read too early, or a buffer that is reused too early, shows. The engine computes SimulatedEngine's
logits from token ids that it keeps in the caches it is bound to. Rules are quoted from NVIDIA's NvInferRuntime.h
(TensorRT 11.1) and from the developer guide's page on the KV cache.
"""

import ctypes
import itertools
from enum import Enum
from types import SimpleNamespace

import numpy as np

from tritonforge.engines.simulated import logits_of
from tritonforge.engines.tensorrt_identity import Identity

UNWRITTEN = np.float16(-1)


class FakeCuda:
    """cuda.bindings.runtime: functions return (error, result...)."""

    cudaStreamNonBlocking = 1
    cudaHostAllocDefault = 0
    cudaMemcpyKind = SimpleNamespace(
        cudaMemcpyHostToDevice="to device", cudaMemcpyDeviceToHost="to host", cudaMemcpyDeviceToDevice="copy"
    )
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal="thread")

    def __init__(self, events, *, capability=(8, 9), free=1 << 34, capture_error=0):
        self.events, self.free, self.capture_error = events, free, capture_error
        self.properties = SimpleNamespace(name=b"Fake GPU\0\0", major=capability[0], minor=capability[1])
        self.device, self.host, self.owners = {}, {}, []
        self.queue, self.graph, self.graphs = [], None, {}
        self.handles = itertools.count(7)
        self.stream = None

    def enqueue(self, work, stream):
        assert stream == self.stream, "work on another stream is not ordered with the rest"
        (self.queue if self.graph is None else self.graph).append(work)

    def memory(self, address, size):
        """The bytes at a device address; it must lie in one allocation."""
        for begin, length in self.device.items():
            if begin <= address and address + size <= begin + length:
                return np.frombuffer((ctypes.c_byte * size).from_address(address), np.uint8)
        raise AssertionError(f"{size} bytes at {address} are not in one device buffer")

    def cudaSetDevice(self, index):
        return (0,)

    def cudaGetDeviceProperties(self, index):
        return 0, self.properties

    def cudaStreamCreateWithFlags(self, flags):
        assert flags == self.cudaStreamNonBlocking and self.stream is None, "one stream, not the default one"
        self.stream = next(self.handles)
        return 0, self.stream

    def cudaMemGetInfo(self):
        return 0, self.free, 1 << 34

    def _memory_of(self, size):
        memory = np.zeros(size + 256, np.uint8)
        self.owners.append(memory)
        return memory.ctypes.data + (-memory.ctypes.data) % 256

    def cudaMalloc(self, size):
        address = self._memory_of(size)
        self.device[address] = size
        self.events.append(("malloc", size))
        return 0, address

    def cudaHostAlloc(self, size, flags):
        address = self._memory_of(size)
        self.host[address] = size
        return 0, address

    def cudaFree(self, address):
        del self.device[address]
        return (0,)

    def cudaFreeHost(self, address):
        del self.host[address]
        return (0,)

    def cudaStreamDestroy(self, stream):
        self.stream = None
        return (0,)

    def cudaMemsetAsync(self, address, value, size, stream):
        self.enqueue(lambda: self.memory(address, size).fill(value), stream)
        return (0,)

    def cudaMemcpyAsync(self, target, source, size, kind, stream):
        assert size > 0
        host = {"to device": source, "to host": target}[kind]
        assert any(begin <= host and host + size <= begin + length for begin, length in self.host.items()), (
            "only page-locked memory is copied asynchronously"
        )
        self.memory(target if kind == "to device" else source, size)
        self.enqueue(lambda: ctypes.memmove(target, source, size), stream)
        return (0,)

    def cudaMemcpy2DAsync(self, target, target_pitch, source, source_pitch, width, height, kind, stream):
        assert kind == "copy" and width <= target_pitch and width <= source_pitch

        def work():
            for index in range(height):
                piece = self.memory(source + index * source_pitch, width).copy()
                self.memory(target + index * target_pitch, width)[:] = piece

        self.enqueue(work, stream)
        return (0,)

    def cudaStreamSynchronize(self, stream):
        assert stream == self.stream and self.graph is None, "waiting ends a capture with an error"
        queue, self.queue = self.queue, []
        for work in queue:
            work()
        self.events.append(("wait",))
        return (0,)

    def cudaStreamBeginCapture(self, stream, mode):
        assert stream == self.stream and self.graph is None
        self.graph = []
        self.events.append(("begin capture",))
        return (0,)

    def cudaStreamEndCapture(self, stream):
        graph, self.graph = self.graph, None
        self.events.append(("end capture",))
        handle = next(self.handles)
        self.graphs[handle] = graph
        return self.capture_error, handle

    def cudaGraphInstantiate(self, graph, flags):
        handle = next(self.handles)
        self.graphs[handle] = self.graphs[graph]
        return 0, handle

    def cudaGraphDestroy(self, graph):
        del self.graphs[graph]
        return (0,)

    def cudaGraphExecDestroy(self, graph):
        del self.graphs[graph]
        return (0,)

    def cudaGraphLaunch(self, graph, stream):
        for work in self.graphs[graph]:
            self.enqueue(work, stream)
        self.events.append(("launch",))
        return (0,)


class FakeContext:
    """IExecutionContext of the step graph, for profile and binding rules."""

    def __init__(self, engine, strategy):
        self.engine, self.cuda, self.identity = engine, engine.cuda, engine.identity
        self.events, self.strategy = engine.events, strategy
        self.profile, self.shapes, self.addresses, self.work = 0, {}, {}, None

    def set_device_memory(self, address, size):
        assert self.strategy == "user managed" and address % 256 == 0
        assert size >= self.engine.device_memory_size_v2
        self.cuda.memory(address, size)
        self.work = address

    def set_optimization_profile_async(self, index, stream):
        """One stream for both: "It is the application's responsibility to guarantee that synchronization between the
        profile sync stream and the enqueue stream occurs"."""
        assert stream == self.cuda.stream and self.cuda.graph is None
        self.events.append(("profile", index))
        self.profile, self.shapes = index, {}
        return True

    def set_input_shape(self, name, shape):
        """Each dimension must agree with the network's unless that is -1, and lie within the profile."""
        own = self.engine.shapes[name]
        assert len(own) == len(shape) and all(a in (-1, b) for a, b in zip(own, shape, strict=True)), (name, shape)
        profile = self.identity.profiles[self.profile]
        ranges = {"input_ids": (profile.batch, profile.tokens), "logit_rows": (profile.rows,)}
        for value, limits in zip(shape, ranges.get(name, (profile.batch,)), strict=False):
            assert value in limits, f"{name} {shape} is outside profile {self.profile}"
        self.events.append(("shape", name, shape))
        self.shapes[name] = shape
        return True

    def set_tensor_address(self, name, address):
        """ "The pointer must have at least 256-byte alignment"."""
        assert address % 256 == 0, f"the address of {name} is not aligned"
        self.events.append(("address", name, address))
        self.addresses[name] = address
        return True

    def infer_shapes(self):
        return [name for name in self.engine.inputs if name not in self.shapes]

    def execute_async_v3(self, stream):
        """All inputs have shapes and addresses, outputs addresses, and aliased ones the address of their input.

        "The cache input tensor and the output tensor must share the same device memory": other addresses are an error.
        """
        assert stream == self.cuda.stream
        assert not self.infer_shapes() and set(self.addresses) == set(self.engine.shapes)
        assert self.work is not None, "the context has no memory"
        for output, source in self.engine.aliases.items():
            assert self.addresses[output] == self.addresses[source], f"{output} is not updated in place"
        call = dict(self.shapes), dict(self.addresses)
        self.cuda.enqueue(lambda: self._compute(*call), stream)
        self.events.append(("execute", self.shapes["input_ids"], self.cuda.graph is not None))
        return True

    def _compute(self, shapes, addresses):
        def tensor(name, shape, dtype):
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            return self.cuda.memory(addresses[name], size).view(dtype).reshape(shape)

        ids = tensor("input_ids", shapes["input_ids"], np.int64)
        starts = tensor("write_index", shapes["write_index"], np.int64)
        rows = tensor("logit_rows", shapes["logit_rows"], np.int64)
        caches = [tensor(name, shapes[name], np.float16) for name in self.engine.aliases.values()]
        for line, start in enumerate(starts):
            for cache in caches:  # what is beyond the end is ignored silently
                part = cache[line, :, start : start + ids.shape[1], :]
                part[...] = ids[line, : part.shape[1]][None, :, None]
        contexts = []
        for line, token in (divmod(int(row), ids.shape[1]) for row in rows):
            seen = [cache[line, :, : starts[line] + token + 1, :] for cache in caches]
            context = seen[0][0, :, 0]
            assert all((one == context[None, :, None]).all() for one in seen), "layers hold different tokens"
            contexts.append(context.astype(int).tolist())
        logits = tensor("logits", (len(contexts), self.identity.vocab_size), np.float32)
        logits[...] = logits_of(contexts, self.identity.vocab_size)


class FakeEngine:
    """ICudaEngine of the step graph with the identity's shapes."""

    device_memory_size_v2 = 4096
    num_optimization_profiles = 2

    def __init__(self, cuda, identity: Identity, events):
        self.cuda, self.identity, self.events = cuda, identity, events
        self.inputs = ["input_ids", "write_index", "logit_rows"]
        self.shapes = {"input_ids": (-1, -1), "write_index": (-1,), "logit_rows": (-1,)}
        self.shapes["logits"] = (-1, identity.vocab_size)
        self.aliases, self.host = {}, set()
        for index, layer in enumerate(identity.layers):
            for part in ("key", "value"):
                past, present = f"past_{part}_{index}", f"present_{part}_{index}"
                self.shapes[past] = (-1, layer.kv_heads, identity.cache_len, layer.head_size)
                self.shapes[present] = self.shapes[past]
                self.aliases[present] = past
                self.inputs.append(past)

    @property
    def num_io_tensors(self):
        return len(self.shapes)

    def get_tensor_name(self, index):
        return list(self.shapes)[index]

    def get_tensor_shape(self, name):
        return self.shapes[name]

    def get_tensor_location(self, name):
        return "host" if name in self.host else "device"

    def get_aliased_input_tensor(self, name):
        return self.aliases.get(name)

    def create_runtime_config(self):
        return FakeRuntimeConfig()

    def create_execution_context(self, strategy):
        self.runtime_config = strategy
        own = strategy.strategy if isinstance(strategy, FakeRuntimeConfig) else strategy
        self.context = FakeContext(self, own)
        return self.context


class FakeRuntimeConfig:
    """IRuntimeConfig of TensorRT for RTX."""

    def __init__(self):
        self.strategy = self.cuda_graph_strategy = self.cache = None

    def set_execution_context_allocation_strategy(self, strategy):
        self.strategy = strategy

    def create_runtime_cache(self):
        return SimpleNamespace(deserialize=self._restore, serialize=lambda: b"kernels")

    def _restore(self, content):
        self.restored = content
        return content == b"kernels"

    def set_runtime_cache(self, cache):
        self.cache = cache

    def get_runtime_cache(self):
        return self.cache


class Severity(Enum):
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)


class Logger:
    """ILogger."""

    Severity = Severity

    def log(self, level, message):
        raise NotImplementedError


class FakeTensorRT:
    """The module tensorrt or tensorrt_rtx. `change(engine)` spoils the engine that comes out of the file."""

    ILogger = Logger
    TensorLocation = SimpleNamespace(DEVICE="device", HOST="host")
    ExecutionContextAllocationStrategy = SimpleNamespace(USER_MANAGED="user managed", STATIC="static")
    CudaGraphStrategy = SimpleNamespace(WHOLE_GRAPH_CAPTURE="whole graph", DISABLED="disabled")

    def __init__(self, cuda, identity, events, *, change=lambda engine: None, content=b"engine"):
        self.cuda, self.identity, self.events = cuda, identity, events
        self.change, self.content = change, content
        self.__version__ = identity.version
        self.refitted = []

    def Runtime(self, logger):
        assert self.cuda.stream is not None, "the device comes before the runtime"
        self.logger = logger
        return SimpleNamespace(deserialize_cuda_engine=self._deserialize)

    def _deserialize(self, content):
        if bytes(content) != self.content:
            self.logger.log(Severity.ERROR, "Serialized engine does not conform")
            return None
        self.engine = FakeEngine(self.cuda, self.identity, self.events)
        self.change(self.engine)
        return self.engine

    def Refitter(self, engine, logger):
        assert engine is self.engine
        return SimpleNamespace(refit_cuda_engine=lambda: self.refitted.append("engine") is None)

    def OnnxParserRefitter(self, refitter, logger):
        return SimpleNamespace(refit_from_file=lambda path: self.refitted.append(path) is None)
