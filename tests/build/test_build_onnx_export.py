"""Every architecture's ONNX step graph says what transformers says, however a sequence is cut into steps.

If these failed, engines on this graph would answer with another model's tokens, or one request with another's.
"""

import export_onnx
import numpy as np
import pytest
from onnx_sessions import Slots
from tiny_checkpoint import SIZES

LAYERED = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
ONE = {"num_hidden_layers": 1}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
ARCHITECTURES = {
    "llama": {},
    "qwen2": ONE,
    "qwen3": {**ONE, "head_dim": 32},
    "mistral": {"sliding_window": 8},
    "gemma2": {**LAYERED, "head_dim": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {**LAYERED, "head_dim": 16, "query_pre_attn_scalar": 16},
    "phi3": {**ONE, "num_key_value_heads": 4},
    "gpt_neox": ONE,
    "opt": {**ONE, "ffn_dim": 128, "word_embed_proj_dim": 64},
    "mixtral": {**ONE, "num_local_experts": 4, **EXPERTS},
    "qwen3_moe": {"num_experts": 4, "decoder_sparse_step": 1, "norm_topk_prob": True, **EXPERTS},
    "granite": {**ONE, "logits_scaling": 2.0, "residual_multiplier": 0.5},
}
CACHE_LEN = 48


def tiny_model(model_type: str, dtype="float32", **changes):
    """A random model of one or two layers; its norms are not all ones, so that none of them can be left out unseen."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    config = AutoConfig.for_model(model_type, **{**SIZES, **ARCHITECTURES.get(model_type, {}), **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.to(getattr(torch, dtype)).eval()


def expected_logits(model, ids: np.ndarray) -> np.ndarray:
    """Logits [tokens, vocab_size] that transformers gives to one whole sequence, with its own attention."""
    import torch

    model.set_attn_implementation("eager")
    with torch.inference_mode():
        return model(torch.tensor(ids)[None]).logits[0].float().numpy()


def sequences(*lengths: int) -> list[np.ndarray]:
    """Random token ids, one array a length."""
    generator = np.random.default_rng(3)
    return [generator.integers(3, SIZES["vocab_size"], length) for length in lengths]


def padded(parts: list[np.ndarray]) -> np.ndarray:
    """[batch, tokens]: rows are padded on the right."""
    width = max(map(len, parts))
    return np.stack([np.pad(part, (0, width - len(part))) for part in parts])


def rows_of(parts: list[np.ndarray]) -> list[int]:
    """Flat indices of the tokens that are no padding."""
    width = max(map(len, parts))
    return [row * width + column for row, part in enumerate(parts) for column in range(len(part))]


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_logits_are_those_of_transformers_at_every_position(model_type, tmp_path):
    """Three sequences of mixed lengths in chunks, then token by token; then slot 1 is used again by a fourth."""
    model = tiny_model(model_type)
    export_onnx.check(model.config)
    ids = sequences(30, 22, 17, 25)
    wanted = [expected_logits(model, one) for one in ids]
    export_onnx.write(model, tmp_path)
    slots = Slots(tmp_path, num_slots=3, cache_len=CACHE_LEN)
    done, got = [0, 0, 0], [[], [], [], []]

    def advance(owners: list[int], counts: list[int]) -> None:
        parts = [ids[owner][done[slot] : done[slot] + counts[slot]] for slot, owner in enumerate(owners)]
        logits = iter(slots.step(padded(parts), done[: len(owners)], rows_of(parts)))
        for slot, (owner, part) in enumerate(zip(owners, parts, strict=True)):
            got[owner] += [next(logits) for _ in part]
            done[slot] += len(part)

    advance([0, 1, 2], [11, 4, 9])
    advance([0, 1, 2], [1, 13, 5])
    while len(got[1]) < len(ids[1]):
        advance([0, 1, 2], [1, 1, 1])
    done[1] = 0
    advance([0, 3, 2], [5, 25, 0])
    advance([0], [len(ids[0]) - len(got[0])])
    for owner in range(4):
        difference = np.abs(np.array(got[owner]) - wanted[owner])
        assert difference.shape == wanted[owner].shape and difference.max() < 1e-3, (
            f"sequence {owner}: {difference.max()}"
        )


def test_only_asked_rows_get_logits(tmp_path):
    model = tiny_model("llama")
    (ids,) = sequences(9)
    wanted = expected_logits(model, ids)
    export_onnx.write(model, tmp_path)
    logits = Slots(tmp_path, 1, CACHE_LEN).step(ids[None], [0], [8, 2, 2])
    assert np.abs(logits - wanted[[8, 2, 2]]).max() < 1e-3
