"""Exports a transformers decoder to the ONNX step graph of onnx_graph.py; the export stage calls it.

`check` refuses by name what the path does not offer, before weights are read. `write` writes the graph of a model that
is in memory, at the model's own precision.
"""

import ast
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkout  # noqa: F401  (puts the repository root on sys.path)
import onnx_graph
import onnx_step
import torch
from onnxscript.onnx_opset import opset24 as op

from tritonforge.errors import InvalidCheckpoint

Say = Callable[[str], None]
EXAMPLE = {"batch": 3, "tokens": 7, "rows": 5, "cache_len": 16}
"""Sizes that the graph is traced with; all are symbolic in the file. They differ, so that none passes for another."""

PROBE_TOKENS = 12
DTYPE_TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
"""How far logits may be from those of the model itself, as a part of the largest, by element type."""


def check(config: Any) -> None:
    """Refuse a configuration whose model this export cannot express: InvalidCheckpoint says by name what it needs.

    The model is built without memory for its weights and traced once.
    """
    from transformers import AutoModelForCausalLM

    name = config.model_type
    if config.is_encoder_decoder:
        raise InvalidCheckpoint(f"{name} has an encoder; the onnx format offers decoders only")
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
        trace(prepare(model.eval()))
    except InvalidCheckpoint as error:
        raise InvalidCheckpoint(f"{name} cannot be exported to ONNX: {error.args[0]}") from None
    except Exception as error:  # models fail in their own ways when control flow depends on values
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise InvalidCheckpoint(
            f"{name} cannot be exported to ONNX: its step cannot be traced without values "
            f"({type(error).__name__}: {reason})"
        ) from error


def prepare(model: Any) -> onnx_step.Step:
    """The step of a model, which from now on attends by the registered functions. InvalidCheckpoint if it cannot."""
    if not model._can_set_attn_implementation():
        raise InvalidCheckpoint("its attention cannot be replaced (it has no AttentionInterface)")
    if model.get_output_embeddings() is None:
        raise InvalidCheckpoint("it has no output embeddings, so logits of chosen rows cannot be taken")
    model.set_attn_implementation(onnx_step.LINEAR)
    if model._can_set_experts_implementation():
        model.config._experts_implementation = onnx_step.LINEAR  # the public setter knows transformers' own ones only
    return onnx_step.Step(model).eval()


@torch.no_grad()
def trace(step: onnx_step.Step) -> tuple[onnx_graph.Layer, ...]:
    """Run a step without past; returns its layers' caches. InvalidCheckpoint unless every layer keeps its own."""
    device = next(step.parameters()).device
    zeros = torch.zeros(2, dtype=torch.int64, device=device)
    outputs = step(zeros[:, None].expand(2, 3).contiguous(), zeros, zeros, [])
    layers = step.model.config.get_text_config().num_hidden_layers
    if sorted(step.layers) != list(range(layers)) or len(outputs) != 1 + 2 * layers:
        raise InvalidCheckpoint(
            f"each of its {layers} layers must keep a KV cache of its own, layers with one: {sorted(step.layers)}"
        )
    return tuple(step.layers[index] for index in range(layers))


def write(model: Any, folder: Path, say: Say = lambda _line: None) -> onnx_graph.Graph:
    """Write model.onnx, its data and graph.json of a causal language model to `folder`; `say` gets lines of progress.

    Raises InvalidCheckpoint when the model's step does not say what the model itself says of a whole sequence. The
    model keeps the registered functions afterwards: it is of no other use.
    """
    dtype = str(model.dtype).removeprefix("torch.")
    if dtype not in onnx_graph.DTYPES:
        raise InvalidCheckpoint(f"a model must be in one of {', '.join(onnx_graph.DTYPES)}, got {dtype}")
    ids = torch.arange(PROBE_TOKENS)[None] * 7 % model.get_input_embeddings().weight.shape[0]
    with torch.no_grad():
        whole = model.eval()(input_ids=ids, use_cache=False).logits[0].float()
    step = prepare(model)
    layers = trace(step)
    compare(step, ids, whole, DTYPE_TOLERANCE[dtype])
    vocab_size = model.get_output_embeddings().weight.shape[0]
    context = getattr(model.config.get_text_config(), "max_position_embeddings", 0)
    graph = onnx_graph.Graph(len(layers), int(vocab_size), dtype, layers, context)
    say(f"traces {len(layers)} layers of {model.config.model_type}")
    program = export(step, graph)
    say("stores its weights")
    store(program.model, folder)
    graph.write(folder)
    return graph


@torch.no_grad()
def compare(step: onnx_step.Step, ids: torch.Tensor, whole: torch.Tensor, tolerance: float) -> None:
    """Refuse a step that, in two chunks and beside another sequence, gives other logits than the model in one go.

    `ids` [1, tokens], `whole` [tokens, vocab_size]. A model that counts positions itself, for instance, is found so.
    """
    tokens, half = ids.shape[1], ids.shape[1] // 2
    zeros = torch.zeros(2, dtype=torch.int64)
    both = torch.cat((ids.flip(1), ids))
    room = torch.nn.functional.pad(both, (0, half))
    _, *caches = step(room, zeros, zeros[:1], [])
    first, *caches = step(both[:, :half], zeros, torch.arange(half, 2 * half), caches)
    second, *_ = step(both[:, half:], zeros + half, torch.arange(tokens - half, 2 * (tokens - half)), caches)
    difference = float((torch.cat((first, second)) - whole).abs().max() / whole.abs().max())
    if not difference <= tolerance:
        raise InvalidCheckpoint(
            f"{step.model.config.model_type} cannot be exported to ONNX: computed in chunks over a linear KV cache it "
            f"must give the logits of the whole sequence within {tolerance:.0e} of the largest, got {difference:.1e}"
        )


def export(step: onnx_step.Step, graph: onnx_graph.Graph) -> Any:
    """The ONNX program of a step, as torch's exporter makes it."""
    arguments, shapes = example(graph)
    ops = torch.ops.tritonforge
    return torch.onnx.export(
        step,
        arguments,
        dynamo=True,
        opset_version=onnx_graph.OPSET,
        dynamic_shapes=shapes,
        input_names=onnx_graph.input_names(graph.num_layers),
        output_names=onnx_graph.output_names(graph.num_layers),
        custom_translation_table={
            ops.cache_update.default: translate_update,
            ops.attention.default: translate_attention,
        },
        external_data=True,
        verbose=False,
    )


def example(graph: onnx_graph.Graph) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Example inputs of a step, and their symbolic dimensions."""
    dims = {name: torch.export.Dim(name, min=1, max=1 << 20) for name in EXAMPLE}
    batch, tokens, rows, cache_len = (EXAMPLE[name] for name in ("batch", "tokens", "rows", "cache_len"))
    caches = [
        torch.zeros(batch, layer.kv_heads, cache_len, layer.head_size, dtype=getattr(torch, graph.kv_dtype))
        for layer in graph.layers
        for _ in ("key", "value")
    ]
    integers = {"dtype": torch.int64}
    arguments = (
        torch.ones(batch, tokens, **integers),
        torch.zeros(batch, **integers),
        torch.arange(rows, **integers),
        caches,
    )
    shapes = (
        {0: dims["batch"], 1: dims["tokens"]},
        {0: dims["batch"]},
        {0: dims["rows"]},
        [{0: dims["batch"], 2: dims["cache_len"]}] * len(caches),
    )
    return arguments, shapes


def translate_update(cache: Any, new: Any, write_index: Any) -> Any:
    """cache_update in ONNX."""
    return op.TensorScatter(cache, new, write_index, axis=2, mode="linear")


def translate_attention(query: Any, key: Any, value: Any, mask: Any, kv_len: Any, scale: float, softcap: float) -> Any:
    """attend in ONNX: a mask holds the whole rule, else the operator's own causal one does."""
    causal = int(mask is None)
    out = op.Attention(query, key, value, mask, None, None, kv_len, is_causal=causal, scale=scale, softcap=softcap)
    return out[0] if isinstance(out, tuple | list) else out


def store(model: Any, folder: Path) -> None:
    """Save an exported graph with speaking names and without what the exporter notes of this machine."""
    import onnx_ir

    values = model.graph.initializers
    for name in [name for name in values if name.startswith("model.")]:
        values[name].name = name.removeprefix("model.")
    counts: Counter[str] = Counter()
    for node in model.graph:
        scope = scope_of(node)
        for value in node.inputs:
            if is_nameless_weight(node, value) and f"{scope}.weight" not in values:
                value.name = f"{scope}.weight"
        base = f"{scope}/{node.op_type}"
        counts[base] += 1
        node.name = base if counts[base] == 1 else f"{base}_{counts[base]}"
    for item in (model, model.graph, *model.graph, *model.graph.inputs, *values.values()):
        item.metadata_props.clear()
        item.doc_string = None
    for node in model.graph:
        for value in node.outputs:
            value.metadata_props.clear()
    model.producer_name, model.producer_version = "tritonforge", None
    onnx_ir.save(model, folder / onnx_graph.MODEL, external_data=onnx_graph.DATA)


def scope_of(node: Any) -> str:
    """The dotted name of the torch module that a node comes from, "step" outside the model."""
    scopes = ast.literal_eval(node.metadata_props.get("pkg.torch.onnx.name_scopes", "[]"))
    scope = scopes[-2] if len(scopes) > 1 else ""
    return scope.removeprefix("model.") if scope.startswith("model.") else "step"


def is_nameless_weight(node: Any, value: Any) -> bool:
    """Whether `value` is the matrix of a linear layer that the exporter transposed, and so lost its name."""
    if node.op_type not in ("MatMul", "Gemm") or value is not node.inputs[1] or not value.is_initializer():
        return False
    return value.name.startswith("val_") and len(value.shape) >= 2
