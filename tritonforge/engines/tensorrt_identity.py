"""What a TensorRT engine file is: flavour, version, GPUs, shapes. Written beside it by the build, checked at load.

Pure: values in, typed errors out. The build writes it, the tensorrt engine reads it and knows no shape from elsewhere.
"""

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tritonforge.errors import ReleaseMismatch, SetupError

ENGINE = "model.engine"
IDENTITY = "engine.json"
FORMAT = 1
FLAVOURS = ("tensorrt", "tensorrt_rtx")
"""Python modules of the two flavours: TensorRT itself (NVIDIA's container) and TensorRT for RTX (PyPI)."""

ALIGNMENT = 256
"""IExecutionContext::setTensorAddress: "The pointer must have at least 256-byte alignment" (NvInferRuntime.h, 11.1)."""

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}
"""Bytes of an element of the KV cache; KVCacheUpdate takes these types only (INetworkDefinition::addKVCacheUpdate)."""

PREFILL, DECODE = 0, 1
"""Indices of the two optimization profiles."""


@dataclass(frozen=True)
class Range:
    """The least, usual and greatest value of one dimension in a profile."""

    least: int
    usual: int
    most: int

    def __contains__(self, value: int) -> bool:
        return self.least <= value <= self.most


@dataclass(frozen=True)
class Profile:
    """One optimization profile: the ranges of batch, tokens in a row, and rows of logits."""

    batch: Range
    tokens: Range
    rows: Range

    def holds(self, batch: int, tokens: int, rows: int) -> bool:
        """Whether a call of this shape is within the profile."""
        return batch in self.batch and tokens in self.tokens and rows in self.rows


@dataclass(frozen=True)
class Layer:
    """The KV cache of one layer."""

    kv_heads: int
    head_size: int


@dataclass(frozen=True)
class Identity:
    """Everything that must agree between an engine file, the machine that loads it and the configuration it serves.

    `compute_capabilities` are those it was built for, "8.9" for instance. `layer_counts` counts the network's layers by
    type, as parsed. `engine_bytes` is the size of the file, `weight_bytes` that of the weights it was built from.
    """

    flavour: str
    version: str
    compute_capabilities: tuple[str, ...]
    vocab_size: int
    slots: int
    max_model_len: int
    cache_len: int
    kv_dtype: str
    layers: tuple[Layer, ...]
    profiles: tuple[Profile, Profile]
    stripped: bool
    layer_counts: dict[str, int]
    engine_bytes: int
    weight_bytes: int

    @property
    def slot_bytes(self) -> tuple[int, ...]:
        """Bytes of one slot's keys (or values, the same) in each layer."""
        return tuple(slot_bytes(layer, self.cache_len, self.kv_dtype) for layer in self.layers)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the whole KV cache: keys and values of all slots and layers."""
        return 2 * self.slots * sum(self.slot_bytes)

    def write(self, folder: Path) -> None:
        """Write engine.json, with the size of the engine file that lies in `folder`."""
        own = replace(self, engine_bytes=(folder / ENGINE).stat().st_size)
        text = json.dumps({"format": FORMAT, **asdict(own)}, indent=2)
        (folder / IDENTITY).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "Identity":
        """The identity of the engine in `folder`.

        Raises ReleaseMismatch when a file is missing, is none of these, or the engine file has another size.
        """
        path = folder / IDENTITY
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            identity = cls._of(values)
            found = (folder / ENGINE).stat().st_size
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ReleaseMismatch(f"{path} does not describe a TensorRT engine beside it: {error!r}") from None
        if found != identity.engine_bytes:
            raise ReleaseMismatch(
                f"{ENGINE} must have {identity.engine_bytes} bytes ({IDENTITY}), it has {found}: the file is corrupt"
            )
        return identity

    @classmethod
    def _of(cls, values: dict[str, Any]) -> "Identity":
        if values.pop("format") != FORMAT:
            raise ValueError(f"format is not {FORMAT}")
        profiles = [
            Profile(**{name: Range(**limits) for name, limits in profile.items()}) for profile in values["profiles"]
        ]
        own = {
            "compute_capabilities": tuple(values["compute_capabilities"]),
            "layers": tuple(Layer(**layer) for layer in values["layers"]),
            "profiles": (profiles[PREFILL], profiles[DECODE]),
        }
        return cls(**{**values, **own})

    def check_config(self, config: dict[str, Any]) -> None:
        """ReleaseMismatch when decoder.json's engine_config asks for what the engine was not built for."""
        for name, own in (
            ("vocab_size", self.vocab_size),
            ("num_blocks", self.slots),
            ("max_model_len", self.max_model_len),
        ):
            wanted = config[name]
            if wanted != own:
                raise ReleaseMismatch(f"{name} must be {own}, as the engine was built, got {wanted}")

    def check_runtime(self, flavours: Collection[str], version: str | None = None) -> None:
        """ReleaseMismatch unless the engine's flavour is among those installed, in exactly its version.

        An engine is deserialized by the version that built it; the build asks for no version compatible engine.
        """
        if self.flavour not in flavours:
            raise ReleaseMismatch(
                f"the engine was built by {self.flavour} {self.version}; "
                f"installed here: {', '.join(flavours) or 'none'}"
            )
        if version is not None and version != self.version:
            raise ReleaseMismatch(f"the engine was built by {self.flavour} {self.version}, {version} is installed here")

    def check_device(self, name: str, compute_capability: str) -> None:
        """ReleaseMismatch when the engine was not built for this GPU."""
        if compute_capability not in self.compute_capabilities:
            raise ReleaseMismatch(
                f"the engine was built for compute capability {', '.join(self.compute_capabilities)}; "
                f"{name} has {compute_capability}: build it for this GPU (compile.compute_capabilities)"
            )

    def check_memory(self, free_bytes: int, other_bytes: int) -> None:
        """SetupError when the KV cache and `other_bytes` of the engine's do not fit what the device has free."""
        if self.kv_bytes + other_bytes > free_bytes:
            raise SetupError(
                f"the KV cache of {self.slots} slots of {self.cache_len} tokens takes {mib(self.kv_bytes)} MiB and the "
                f"engine's buffers {mib(other_bytes)} MiB; {mib(free_bytes)} MiB are free on the device: "
                "lower kv_cache.slots or limits.max_model_len"
            )


def slot_bytes(layer: Layer, cache_len: int, kv_dtype: str) -> int:
    """Bytes of one slot's keys in a layer: [kv_heads, cache_len, head_size]."""
    return layer.kv_heads * cache_len * layer.head_size * ITEMSIZE[kv_dtype]


def mib(size: int) -> int:
    """`size` in MiB, rounded up."""
    return -(-size // 2**20)
