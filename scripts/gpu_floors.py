"""The floors of a step on a GPU, and the table that gpu-check prints: figures in, figures and text out. Pure."""

from dataclasses import dataclass

import numpy as np

from tritonforge.engines.tensorrt_identity import Identity

TENSOR_FLOPS = {"8.0": 2048, "8.6": 512, "8.9": 512, "9.0": 4096, "10.0": 8192, "12.0": 512}
"""Dense 16-bit floating point operations, with float32 sums, of one multiprocessor in one clock, from NVIDIA's
architecture whitepapers (A100 312, RTX 3090 71, RTX 4090 165, H100 SXM 989 TFLOP/s). FP8 has twice as many."""


@dataclass(frozen=True)
class Peak:
    """What the GPU can do at best: bytes a second, as a copy reaches it, and 16-bit operations a second, 0 unknown."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True)
class Row:
    """One line of the table; times in milliseconds."""

    recipe: str
    engine_mib: float
    build_s: float
    perplexity_ratio: float
    mean_kl: float
    top1: float
    difference: float
    prefill: tuple[float, float]
    decode_one: tuple[float, float]
    decode_all: tuple[float, float]


def decode_floor_ms(identity: Identity, batch: int, context: int, peak: Peak) -> float:
    """Least time of a decode step: all weights are read once, and the keys and values of each sequence."""
    kv = batch * context * identity.kv_bytes // (identity.slots * identity.cache_len)
    return (identity.weight_bytes + kv) / peak.bytes_per_s * 1e3


def prefill_floor_ms(identity: Identity, parameters: int, tokens: int, peak: Peak, *, fp8: bool) -> float:
    """Least time of a prefill: a multiply and an add for each parameter and token, or reading the weights."""
    reading = identity.weight_bytes / peak.bytes_per_s
    if not peak.flops_per_s:
        return reading * 1e3
    return max(reading, 2 * parameters * tokens / (peak.flops_per_s * (2 if fp8 else 1))) * 1e3


def product_parameters(shapes: list[tuple[int, ...]], vocab_size: int) -> int:
    """Parameters that every token is multiplied with: those of matrices, embedding and head left out."""
    return sum(int(np.prod(shape)) for shape in shapes if len(shape) > 1 and vocab_size not in shape)


def table(rows: list[Row], failures: dict[str, str]) -> str:
    """The rows as a table for people; recipes that failed follow with their reason."""
    head = ("recipe", "MiB", "build s", "ppl ratio", "KL", "top-1", "max diff", "prefill ms", "decode 1", "decode all")
    lines = [f"{head[0]:<28}" + "".join(f"{name:>12}" for name in head[1:7]) + "".join(f"{n:>22}" for n in head[7:])]
    for row in rows:
        figures = f"{row.engine_mib:>12.1f}{row.build_s:>12.1f}{row.perplexity_ratio:>12.4f}{row.mean_kl:>12.5f}"
        figures += f"{row.top1:>12.4f}{row.difference:>12.4f}"
        for took, floor in (row.prefill, row.decode_one, row.decode_all):
            figures += f"{f'{took:.3f} ({took / floor:.1f}x {floor:.3f})':>22}"
        lines.append(f"{row.recipe:<28}{figures}")
    lines += [f"{name:<28}  failed: {reason}" for name, reason in failures.items()]
    return "\n".join(lines)
