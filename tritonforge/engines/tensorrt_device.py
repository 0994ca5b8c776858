"""One NVIDIA GPU through cuda.bindings: memory, one stream, copies, CUDA graphs. The tensorrt engine is its only user.

Every CUDA call goes through here, and one that fails raises EngineFailure with CUDA's own name of the error. Whether
there is a driver at all is asked of libcuda itself, before any NVIDIA package is imported.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from tritonforge.errors import EngineFailure, SetupError

DRIVER = "libcuda.so.1"


def require_driver(load: Callable[[str], Any] = ctypes.CDLL) -> int:
    """The number of GPUs; SetupError in one line when there is no driver or no GPU.

    TensorRT must not be asked: creating its Runtime without a driver ends the process (a segmentation fault was seen).
    """
    try:
        driver = load(DRIVER)
    except OSError:
        raise SetupError(
            f"no NVIDIA driver: {DRIVER} is not on this machine; the tensorrt engine runs on an NVIDIA GPU "
            "(in a container: start it with --gpus all)"
        ) from None
    code = driver.cuInit(0)
    if code:
        raise SetupError(
            f"the NVIDIA driver does not start: cuInit returned {code}; is a GPU there, and may we use it?"
        )
    count = ctypes.c_int(0)
    code = driver.cuDeviceGetCount(ctypes.byref(count))
    if code or not count.value:
        raise SetupError(f"the NVIDIA driver finds no GPU (cuDeviceGetCount returned {code}, {count.value} devices)")
    return count.value


class Device:
    """GPU 0 with one non-blocking stream, on which everything is enqueued in order. `cuda` is cuda.bindings.runtime."""

    def __init__(self, cuda: Any | None = None) -> None:
        if cuda is None:
            try:
                from cuda.bindings import runtime as cuda
            except ImportError as error:
                raise SetupError(
                    f"the tensorrt engine needs the package cuda-bindings ({error}): pip install tritonforge[tensorrt]"
                ) from None
        self._cuda = cuda
        self._call("cudaSetDevice", 0)
        self._properties = self._call("cudaGetDeviceProperties", 0)
        # Not the default stream: TensorRT would synchronise the device around it (enqueueV3's warning).
        self._stream = self._call("cudaStreamCreateWithFlags", cuda.cudaStreamNonBlocking)
        self._buffers: list[int] = []
        self._pinned: list[int] = []
        self._graphs: list[Any] = []

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call a CUDA function; its result without the error code, or EngineFailure."""
        error, *results = getattr(self._cuda, name)(*arguments)
        if int(error):
            raise EngineFailure(f"{name} failed: {getattr(error, 'name', error)} ({int(error)})")
        return results[0] if len(results) == 1 else tuple(results)

    @property
    def name(self) -> str:
        """The GPU's name."""
        name = self._properties.name
        return name.decode().rstrip("\0") if isinstance(name, bytes) else name

    @property
    def compute_capability(self) -> str:
        """The GPU's generation, "8.9" for instance."""
        return f"{self._properties.major}.{self._properties.minor}"

    @property
    def multiprocessors(self) -> int:
        """Number of its multiprocessors."""
        return self._properties.multiProcessorCount

    @property
    def clock_hz(self) -> int:
        """Its highest clock."""
        return 1000 * self._call("cudaDeviceGetAttribute", self._cuda.cudaDeviceAttr.cudaDevAttrClockRate, 0)

    @property
    def stream(self) -> int:
        """Handle of the stream, as TensorRT takes it."""
        return int(self._stream)

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes of the device."""
        return self._call("cudaMemGetInfo")

    def allocate(self, size: int) -> int:
        """Address of `size` zeroed bytes on the device; cudaMalloc aligns to 256 bytes at least."""
        address = int(self._call("cudaMalloc", size))
        self._buffers.append(address)
        self._call("cudaMemsetAsync", address, 0, size, self._stream)
        return address

    def pinned(self, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        """An array in page-locked host memory, so that copies to and from it are asynchronous."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        address = int(self._call("cudaHostAlloc", size, self._cuda.cudaHostAllocDefault))
        self._pinned.append(address)
        memory = (ctypes.c_byte * size).from_address(address)
        return np.frombuffer(memory, dtype).reshape(shape)

    def to_device(self, address: int, source: np.ndarray) -> None:
        """Enqueue a copy of a pinned, contiguous array to the device."""
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._call("cudaMemcpyAsync", address, source.ctypes.data, source.nbytes, kind, self._stream)

    def to_host(self, target: np.ndarray, address: int) -> None:
        """Enqueue a copy from the device to a pinned, contiguous array."""
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._call("cudaMemcpyAsync", target.ctypes.data, address, target.nbytes, kind, self._stream)

    def copy(self, target: int, source: int, pitch: int, width: int, height: int) -> None:
        """Enqueue a copy within the device of `height` pieces of `width` bytes that lie `pitch` bytes apart."""
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        self._call("cudaMemcpy2DAsync", target, pitch, source, pitch, width, height, kind, self._stream)

    def wait(self) -> None:
        """Wait until everything on the stream is done."""
        self._call("cudaStreamSynchronize", self._stream)

    def capture(self, enqueue: Callable[[], None]) -> Any:
        """A CUDA graph of what `enqueue` puts on the stream; nothing is computed."""
        mode = self._cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._call("cudaStreamBeginCapture", self._stream, mode)
        try:
            enqueue()
        finally:  # a capture that fails must end too, or the stream is lost
            graph = self._call("cudaStreamEndCapture", self._stream)
        executable = self._call("cudaGraphInstantiate", graph, 0)
        self._call("cudaGraphDestroy", graph)
        self._graphs.append(executable)
        return executable

    def launch(self, graph: Any) -> None:
        """Enqueue a captured graph."""
        self._call("cudaGraphLaunch", graph, self._stream)

    def close(self) -> None:
        """Wait for the stream, then free graphs, memory and stream. Arrays from `pinned` are gone after it."""
        self.wait()
        for graph in self._graphs:
            self._call("cudaGraphExecDestroy", graph)
        for address in self._buffers:
            self._call("cudaFree", address)
        for address in self._pinned:
            self._call("cudaFreeHost", address)
        self._call("cudaStreamDestroy", self._stream)
        self._graphs, self._buffers, self._pinned = [], [], []
