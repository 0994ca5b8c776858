"""The memory plan of a release: what its decoder takes, and which sequences fit. Pure: figures in, figures out.

The command line makes it from the manifest; an engine asks `fit_num_blocks` when it sizes its KV cache at load.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tritonforge.errors import InvalidRequest, ReleaseMismatch, SetupError

MIB = 2**20
CONTEXTS = (256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of the decoder's process, by what takes them, and the shape of its KV cache.

    base: Python, libraries, tokenizer. weights: as in the weights file. runtime: what else the open engine holds (other
    layouts of the weights, graphs). step: activations and kernels of all step sizes. sampling: logits of a full batch
    and a copy of them. load_peak: the most that the engine takes while it opens, before its KV cache is there.
    `spare_blocks` hold no sequence: the engine pads with them.
    """

    base_bytes: int
    weight_bytes: int
    runtime_bytes: int
    step_bytes: int
    sampling_bytes: int
    load_peak_bytes: int
    block_bytes: int
    block_size: int
    num_blocks: int
    spare_blocks: int
    max_model_len: int
    max_num_seqs: int

    @classmethod
    def of_manifest(cls, manifest: Mapping[str, Any], base_bytes: int) -> "MemoryPlan":
        """The plan of a release; `base_bytes` is measured where it is to be served. ReleaseMismatch without figures."""
        try:
            memory, cache = manifest["sizes"]["memory"], manifest["sizes"]["kv_cache"]
            limits = manifest["recipe"]["limits"]
            return cls(
                base_bytes=base_bytes,
                weight_bytes=memory["weight_bytes"],
                runtime_bytes=memory["runtime_bytes"],
                step_bytes=memory["step_bytes"],
                sampling_bytes=2 * 4 * limits["max_num_seqs"] * manifest["checkpoint"]["model"]["vocab_size"],
                load_peak_bytes=memory["load_peak_bytes"],
                block_bytes=cache["bytes_per_block"],
                block_size=manifest["recipe"]["kv_cache"]["block_size"],
                num_blocks=cache["num_blocks"],
                spare_blocks=cache["spare_blocks"],
                max_model_len=limits["max_model_len"],
                max_num_seqs=limits["max_num_seqs"],
            )
        except (KeyError, TypeError) as error:
            raise ReleaseMismatch(
                f"the manifest lacks {error}: it holds no memory figures; build the release again"
            ) from None

    @property
    def fixed_bytes(self) -> int:
        """All but the KV cache."""
        return self.base_bytes + self.weight_bytes + self.runtime_bytes + self.step_bytes + self.sampling_bytes

    @property
    def kv_bytes(self) -> int:
        """The KV cache, spare blocks included."""
        return (self.num_blocks + self.spare_blocks) * self.block_bytes

    @property
    def total_bytes(self) -> int:
        """The peak of the process, while it serves or while it loads; measured within 10%."""
        return max(self.fixed_bytes + self.kv_bytes, self.base_bytes + self.load_peak_bytes)

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.num_blocks * self.block_size

    @property
    def kv_bytes_per_token(self) -> float:
        """KV cache bytes of one token over all layers."""
        return self.block_bytes / self.block_size

    def blocks_of(self, context: int) -> int:
        """Blocks of one sequence of `context` tokens; InvalidRequest unless it is in [1, max_model_len]."""
        if not 1 <= context <= self.max_model_len:
            raise InvalidRequest(f"context must be in [1, {self.max_model_len}] (max_model_len), got {context}")
        return -(-context // self.block_size)

    def sequences(self, context: int) -> int:
        """How many sequences of `context` tokens the KV cache holds, prefixes not shared; more may run or wait."""
        return self.num_blocks // self.blocks_of(context)

    def context(self, sequences: int) -> int:
        """The longest context, in tokens, that so many sequences can have at once: 0 when they outnumber the blocks."""
        if sequences < 1:
            raise InvalidRequest(f"sequences must be at least 1, got {sequences}")
        return min(self.num_blocks // sequences * self.block_size, self.max_model_len)

    def bytes_for(self, sequences: int, context: int) -> int:
        """The process with a KV cache for exactly `sequences` of `context` tokens."""
        return replace(self, num_blocks=sequences * self.blocks_of(context)).total_bytes

    def within(self, memory_bytes: int) -> "MemoryPlan":
        """The plan whose KV cache fills `memory_bytes`; InvalidRequest when one longest sequence does not fit."""
        needed = self.bytes_for(1, self.max_model_len)
        if memory_bytes < needed:
            raise InvalidRequest(
                f"memory must be at least {-(-needed // MIB)} MiB for one sequence of max_model_len "
                f"{self.max_model_len}, got {memory_bytes // MIB}"
            )
        blocks = (memory_bytes - self.fixed_bytes) // self.block_bytes - self.spare_blocks
        return replace(self, num_blocks=blocks)


def fit_num_blocks(
    most: int, *, max_model_len: int, block_size: int, block_bytes: int, spare_blocks: int, free_bytes: int
) -> int:
    """KV blocks for a cache that is sized at load: at most `most`, as many as `free_bytes` hold.

    Raises SetupError when they do not hold one sequence of `max_model_len` tokens.
    """
    needed = -(-max_model_len // block_size)
    blocks = min(most, free_bytes // block_bytes - spare_blocks)
    if blocks < needed:
        raise SetupError(
            f"the KV cache must hold one sequence of max_model_len {max_model_len}: "
            f"{-(-(needed + spare_blocks) * block_bytes // MIB)} MiB; {max(0, free_bytes) // MIB} MiB are free for it "
            "beside weights and reserve: give the process more memory, or build with a lower max_model_len"
        )
    return blocks


def report(plan: MemoryPlan, contexts: Collection[int] = CONTEXTS) -> str:
    """The plan as a table for people, and how many sequences of `contexts` tokens fit.

    Of the usual CONTEXTS those up to max_model_len are shown, with it; another context beyond it is InvalidRequest.
    """
    if contexts is CONTEXTS:
        contexts = {min(context, plan.max_model_len) for context in CONTEXTS}
    rows = (
        ("Python, libraries, tokenizer", plan.base_bytes),
        ("weights", plan.weight_bytes),
        ("runtime", plan.runtime_bytes),
        ("steps", plan.step_bytes),
        ("sampling", plan.sampling_bytes),
        ("KV cache", plan.kv_bytes),
        ("the process under load", plan.total_bytes),
    )
    lines = [f"{name:<30}{size / MIB:>9.1f} MiB" for name, size in rows]
    lines.append(
        f"KV cache: {plan.kv_tokens} tokens in {plan.num_blocks} blocks of {plan.block_size}, "
        f"{plan.kv_bytes_per_token:.0f} bytes a token"
    )
    lines += ["", f"{'context':>9}{'sequences in the KV cache':>28}{'running at once':>18}"]
    for context in sorted(contexts):
        fit = plan.sequences(context)
        lines.append(f"{context:>9}{fit:>28}{min(fit, plan.max_num_seqs):>18}")
    return "\n".join(lines)


def fit_of(plan: MemoryPlan, sequences: int, context: int | None) -> str:
    """In a line: whether so many sequences of `context` tokens fit, or with None which context they can have."""
    if context is None:
        return f"{sequences} sequences fit with a context of up to {plan.context(sequences)} tokens each"
    fit = "fit" if plan.context(sequences) >= context else "do not fit"
    needed = -(-plan.bytes_for(sequences, context) // MIB)
    return f"{sequences} sequences of {context} tokens {fit}; the process takes {needed} MiB with a KV cache for them"
