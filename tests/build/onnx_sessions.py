"""Runs an exported step graph with onnxruntime, past and present bound to the same memory, as engines do."""

from pathlib import Path

import numpy as np
import onnx_graph
import onnxruntime

KINDS = {"float32": np.float32, "float16": np.float16}


class Slots:
    """A step graph with `num_slots` sequences of `cache_len` positions; every call covers the slots 0 to batch - 1."""

    def __init__(self, folder: Path, num_slots: int, cache_len: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        path = str(folder / onnx_graph.MODEL)
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.graph = onnx_graph.Graph.read(folder)
        kind = KINDS[self.graph.kv_dtype]
        shapes = [(num_slots, layer.kv_heads, cache_len, layer.head_size) for layer in self.graph.layers]
        self.caches = [np.full(shape, 7, kind) for shape in shapes for _ in range(2)]

    def step(self, input_ids: np.ndarray, write_index: list[int], logit_rows: list[int]) -> np.ndarray:
        """Logits [rows, vocab_size] of one call; `input_ids` [batch, tokens]."""
        binding, batch = self.session.io_binding(), len(input_ids)
        for name, value in (("input_ids", input_ids), ("write_index", write_index), ("logit_rows", logit_rows)):
            binding.bind_cpu_input(name, np.ascontiguousarray(value, np.int64))
        layers = self.graph.num_layers
        names = zip(onnx_graph.cache_names("past", layers), onnx_graph.cache_names("present", layers), strict=True)
        for (past, present), cache in zip(names, self.caches, strict=True):
            place = ("cpu", 0, cache.dtype, (batch, *cache.shape[1:]), cache.ctypes.data)
            binding.bind_input(past, *place)
            binding.bind_output(present, *place)
        binding.bind_output("logits")  # bound last, so it is the last output
        self.session.run_with_iobinding(binding)
        return binding.copy_outputs_to_cpu()[-1]
