"""One decoding step of a transformers model over a linear KV cache, as a torch module that exports to standard ONNX.

Models are not rewritten: a cache, an attention function with its masks and an experts function are registered with
transformers under the name LINEAR. Attention and cache update are one operator each here, which export_onnx.py turns
into ONNX's Attention and TensorScatter. What these cannot express is refused by name while the model is traced.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import checkout  # noqa: F401  (puts the repository root on sys.path)
import onnx_graph
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import causal_mask_function

from tritonforge.errors import InvalidCheckpoint

LINEAR = "tritonforge_linear"
HARMLESS = ("position_ids", "cache_position")
"""Tensors that models hand to attention and that cannot change its result here."""


@torch.library.custom_op("tritonforge::cache_update", mutates_args=())
def cache_update(cache: torch.Tensor, new: torch.Tensor, write_index: torch.Tensor) -> torch.Tensor:
    """`cache` [batch, kv_heads, cache_len, size] with `new` [batch, kv_heads, tokens, size] from write_index on."""
    rows = write_index[:, None] + torch.arange(new.shape[2])[None]
    return cache.clone().scatter_(2, rows[:, None, :, None].expand_as(new), new)


@cache_update.register_fake
def _(cache, new, write_index):
    return torch.empty_like(cache)


@torch.library.custom_op("tritonforge::attention", mutates_args=())
def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    kv_len: torch.Tensor,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """Attention of `query` [batch, heads, tokens, size] over whole caches of which `kv_len` [batch] tokens are written.

    Without a mask a query sees the tokens up to itself. softcap 0 is none.
    """
    groups, tokens = query.shape[1] // key.shape[1], query.shape[2]
    if mask is None:
        last = (kv_len - tokens)[:, None] + torch.arange(tokens)[None]
        mask = (torch.arange(key.shape[2]) <= last[:, :, None])[:, None]
    scores = query @ key.repeat_interleave(groups, 1).transpose(2, 3) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    weights = scores.float().masked_fill(~mask, float("-inf")).softmax(-1).to(query.dtype)
    return weights @ value.repeat_interleave(groups, 1)


@attend.register_fake
def _(query, key, value, mask, kv_len, scale, softcap):
    return torch.empty_like(query)


@dataclass
class Tracing:
    """What attention and masks must know of the step that is traced, and what they find out about the layers.

    `windows` holds the masks that were made, with their windows, by identity.
    """

    write_index: torch.Tensor
    tokens: Any
    cache_len: Any
    windows: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict)
    layers: dict[int, onnx_graph.Layer] = field(default_factory=dict)

    def see(self, index: int, layer: onnx_graph.Layer) -> None:
        """Note that a layer attends."""
        if self.layers.setdefault(index, layer) != layer:
            raise InvalidCheckpoint(f"layer {index} attends twice in different ways, which this export does not offer")


CURRENT: ContextVar[Tracing] = ContextVar("current")


@contextmanager
def tracing(state: Tracing) -> Iterator[Tracing]:
    """Make `state` the step that registered functions belong to."""
    token = CURRENT.set(state)
    try:
        yield state
    finally:
        CURRENT.reset(token)


class SlotCache(Cache):
    """The caches of one step, [batch, kv_heads, cache_len, head_size] by layer; update() writes behind write_index.

    Made with no caches it makes empty ones from what it is given: so the shapes of a model's caches are found out.
    """

    is_compileable = True

    def __init__(self, caches: list[torch.Tensor], write_index: torch.Tensor, cache_len: Any) -> None:
        super().__init__(layers=[])
        self.caches = dict(enumerate(caches))
        self.write_index = write_index
        self.cache_len = cache_len

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """The layer's whole caches with the new states in them."""
        for index, new in ((2 * layer_idx, key_states), (2 * layer_idx + 1, value_states)):
            if index not in self.caches:
                shape = (*new.shape[:2], self.cache_len, new.shape[3])
                self.caches[index] = torch.zeros(shape, dtype=new.dtype, device=new.device)
            self.caches[index] = torch.ops.tritonforge.cache_update(self.caches[index], new, self.write_index)
        return self.caches[2 * layer_idx], self.caches[2 * layer_idx + 1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: positions are given, not counted."""
        return 0

    def get_mask_sizes(self, query_length: Any, layer_idx: int) -> tuple[Any, int]:
        """Masks cover the whole cache."""
        return self.cache_len, 0

    def has_previous_state(self, layer_idx: int | None = None) -> bool:
        """Refused: only layers with a recurrent state ask."""
        raise InvalidCheckpoint("layers with a recurrent state are not offered by this export: it has a KV cache only")

    def __len__(self) -> int:
        return len(self.caches) // 2


def mask(*, mask_function: Callable, local_size: int = 0, attention_mask: Any = None, **kwargs: Any) -> Any:
    """The mask of the model's own rule: None where it is just causal, else bool [batch, 1, tokens, cache_len].

    The rule is evaluated over positions, so chunks and padded rows get the mask that one whole sequence would have.
    """
    if mask_function is causal_mask_function:
        return None
    state = CURRENT.get()
    device = state.write_index.device
    queries = state.write_index[:, None, None, None] + torch.arange(state.tokens, device=device)[None, None, :, None]
    keys = torch.arange(state.cache_len, device=device)[None, None, None, :]
    allowed = mask_function(0, 0, queries, keys)
    state.windows[id(allowed)] = (allowed, int(local_size or 0))
    return allowed


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it: `key` and `value` are whole caches. Returns [batch, tokens, heads, size]."""
    state, index = CURRENT.get(), module.layer_idx
    name = f"attention of layer {index}"
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal:
        raise InvalidCheckpoint(f"{name} is not causal; this export offers causal attention only")
    odd = [key for key, item in kwargs.items() if isinstance(item, torch.Tensor) and key not in HARMLESS]
    if odd:
        raise InvalidCheckpoint(f"{name} takes {', '.join(odd)}, which ONNX's Attention has no input for")
    if key.shape[3] != value.shape[3]:
        raise InvalidCheckpoint(
            f"{name} must have keys and values of one size, got {key.shape[3]} and {value.shape[3]}"
        )
    if attention_mask is not None and id(attention_mask) not in state.windows:
        raise InvalidCheckpoint(f"{name} has a mask that is not made of a rule over positions")
    window = 0 if attention_mask is None else state.windows[id(attention_mask)][1]
    state.see(index, onnx_graph.Layer(int(key.shape[1]), int(key.shape[3]), window))
    scale = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
    kv_len = state.write_index + state.tokens
    out = torch.ops.tritonforge.attention(query, key, value, attention_mask, kv_len, scale, float(softcap or 0.0))
    return out.transpose(1, 2).contiguous(), None


def experts(module: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
    """A mixture of experts without data-dependent control flow: every expert computes, the routing weights sum.

    `hidden` [tokens, size]; `top_k_index` and `top_k_weights` [tokens, k]. Costs num_experts / k times the arithmetic
    of the experts that count, and no more memory traffic than a batch that hits all of them.
    """

    def linear(inputs: torch.Tensor, name: str) -> torch.Tensor:
        weight = getattr(module, name)
        out = inputs @ (weight if module.is_transposed else weight.transpose(1, 2))
        return out + getattr(module, f"{name}_bias")[:, None] if module.has_bias else out

    chosen = torch.nn.functional.one_hot(top_k_index, module.num_experts).to(top_k_weights.dtype)
    weights = (chosen * top_k_weights[..., None]).sum(1)
    inner = linear(hidden[None], "gate_up_proj" if module.has_gate else "up_proj")
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    outer = linear(inner, "down_proj")
    return (outer * weights.T[..., None].to(outer.dtype)).sum(0).to(hidden.dtype)


AttentionInterface.register(LINEAR, attention)
AttentionMaskInterface.register(LINEAR, mask)
ALL_EXPERTS_FUNCTIONS[LINEAR] = experts


class Step(torch.nn.Module):
    """The step graph of a causal language model; `layers` is found out by every call."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.layers: dict[int, onnx_graph.Layer] = {}

    def forward(
        self, input_ids: torch.Tensor, write_index: torch.Tensor, logit_rows: torch.Tensor, caches: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Inputs and outputs are those of the graph; without `caches` an empty one of `tokens` tokens is made."""
        tokens = input_ids.shape[1]
        cache_len = caches[0].shape[2] if caches else tokens
        cache = SlotCache(caches, write_index, cache_len)

        def take_rows(_module: Any, args: tuple[torch.Tensor, ...]) -> torch.Tensor:
            return args[0].flatten(0, 1).index_select(0, logit_rows)

        hook = self.model.get_output_embeddings().register_forward_pre_hook(take_rows)
        try:
            with tracing(Tracing(write_index, tokens, cache_len)) as state:
                positions = write_index[:, None] + torch.arange(tokens, device=input_ids.device)[None]
                logits = self.model(
                    input_ids=input_ids, position_ids=positions, past_key_values=cache, use_cache=True
                ).logits
        finally:
            hook.remove()
        self.layers = state.layers
        return logits.flatten(0, -2).float(), *(cache.caches[index] for index in range(len(cache.caches)))
