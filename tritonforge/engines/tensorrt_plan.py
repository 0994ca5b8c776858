"""The plan of a TensorRT engine: which calls it is built for, and what it takes on the device. Pure.

The build and the engine take profiles and cache length from here, so that they cannot differ.
"""

from dataclasses import dataclass

from tritonforge.engines.linear import cache_len_for
from tritonforge.engines.linear_calls import CallLimits
from tritonforge.engines.tensorrt_identity import DECODE, PREFILL, Identity, Profile, Range, mib

NARROW_TOKENS = 16
"""Rows of up to so many tokens (drafts, short chunks) may share a call; only they are padded."""

WIDE_ROWS = 4
"""Rows in a call of more than one token each. The prefill profile's activations grow with it."""

LOGIT_ROWS = 256
"""Logits of one prefill call: one for serving, more for drafts and where quality is measured."""

DEVICE_RESERVE_BYTES = 1 << 30
"""What CUDA's context, TensorRT's code and kernels take on a device; an assumption, not measured on a GPU."""

WORKSPACE_MIB = 512
"""Memory for activations where a recipe does not say."""


def cache_len(max_model_len: int) -> int:
    """Positions of a row: the context, and room behind it for the padding of narrow calls."""
    return cache_len_for(max_model_len, NARROW_TOKENS)


def profiles(slots: int, max_model_len: int, max_num_batched_tokens: int) -> tuple[Profile, Profile]:
    """The prefill and the decode profile. A call of one token a row is a decode; every other one is a prefill."""
    chunk = max(2, min(max_num_batched_tokens, max_model_len))
    logit_rows = max(min(LOGIT_ROWS, chunk), WIDE_ROWS * NARROW_TOKENS)
    prefill = Profile(Range(1, 1, min(WIDE_ROWS, slots)), Range(2, chunk, chunk), Range(1, 1, logit_rows))
    usual = max(1, slots // 2)
    decode = Profile(Range(1, usual, slots), Range(1, 1, 1), Range(1, usual, slots))
    return prefill, decode


def call_limits(identity: Identity) -> CallLimits:
    """What the linear engine may ask of an engine with these profiles."""
    prefill = identity.profiles[PREFILL]
    return CallLimits(
        views=(identity.cache_len,),
        max_tokens=prefill.tokens.most,
        max_wide_rows=prefill.batch.most,
        max_logit_rows=prefill.rows.most,
        narrow_tokens=min(NARROW_TOKENS, prefill.tokens.most),
    )


def most_logit_rows(both: tuple[Profile, ...]) -> int:
    """Rows of the logits buffer: the most of any profile."""
    return max(profile.rows.most for profile in both)


@dataclass(frozen=True)
class DevicePlan:
    """Bytes on the device, by what takes them. `buffer_bytes`: inputs, logits, and a row to exchange rows through."""

    weight_bytes: int
    kv_bytes: int
    workspace_bytes: int
    buffer_bytes: int
    reserve_bytes: int = DEVICE_RESERVE_BYTES

    @classmethod
    def of(cls, identity: Identity, workspace_bytes: int) -> "DevicePlan":
        """The plan of a built engine. Its weights take what is larger, the engine file or the ONNX file's data."""
        return cls(
            weight_bytes=max(identity.engine_bytes, identity.weight_bytes),
            kv_bytes=identity.kv_bytes,
            workspace_bytes=workspace_bytes,
            buffer_bytes=buffer_bytes(identity.profiles, identity.vocab_size, max(identity.slot_bytes)),
        )

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.weight_bytes + self.kv_bytes + self.workspace_bytes + self.buffer_bytes + self.reserve_bytes

    def __str__(self) -> str:
        parts = ("weight", "kv", "workspace", "buffer", "reserve")
        return ", ".join(f"{part} {mib(getattr(self, f'{part}_bytes'))} MiB" for part in parts)


def buffer_bytes(both: tuple[Profile, ...], vocab_size: int, largest_slot_bytes: int) -> int:
    """Bytes of the engine's own buffers on the device."""
    prefill, decode = both[PREFILL], both[DECODE]
    ids = max(prefill.batch.most * prefill.tokens.most, decode.batch.most)
    rows = most_logit_rows(both)
    return 8 * (ids + decode.batch.most + rows) + 4 * rows * vocab_size + largest_slot_bytes
