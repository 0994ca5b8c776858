"""The ONNX Runtime engine on a tiny graph: the same logits whatever the neighbours, nothing copied, nothing foreign.

If one of these fails, an answer depends on its batch, a step costs more the more slots there are, or a release that
does not fit its files is served.
"""

import json
import random
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import step_graph

from tritonforge.decoder import load_engine
from tritonforge.engines.base import SequenceStep
from tritonforge.errors import InvalidRequest, ReleaseMismatch
from tritonforge.memory.available import resident_bytes

CONTEXT = 600
MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return step_graph.write(tmp_path_factory.mktemp("graph"))


@pytest.fixture
def broken(folder, tmp_path):
    """A copy of the graph's files, to be damaged."""
    return Path(shutil.copytree(folder, tmp_path / "broken"))


def config(max_model_len=CONTEXT, num_slots=4, **changes):
    fields = dict(
        vocab_size=step_graph.VOCAB,
        max_model_len=max_model_len,
        block_size=max_model_len,
        num_blocks=num_slots,
        kv_cache_precision="f32",
    )
    return fields | changes


def open_engine(folder, **fields):
    return load_engine("onnxruntime", folder, config(**fields))


def alone(folder, text, dtype="f32"):
    """Logits [len(text), vocab] of a sequence that has the engine for itself, token by token."""
    engine = open_engine(folder, num_slots=1, kv_cache_precision=dtype)
    return np.concatenate([engine.step([SequenceStep([one], at, [0])]).copy() for at, one in enumerate(text)])


@pytest.mark.parametrize(("dtype", "precision", "tolerance"), [("float32", "f32", 1e-5), ("float16", "f16", 0.05)])
def test_logits_do_not_depend_on_chunks_neighbours_or_what_a_slot_held(tmp_path, dtype, precision, tolerance):
    """Four texts in random chunks, beyond two view lengths; then a copy of a slot, and a slot begun anew."""
    folder = step_graph.write(tmp_path, dtype)
    engine = open_engine(folder, kv_cache_precision=precision)
    rng = random.Random(2)
    texts = [[rng.randrange(step_graph.VOCAB) for _ in range(length)] for length in (540, 300, 120, 60)]
    wanted = [alone(folder, text, precision) for text in texts]
    done = [0] * len(texts)
    while any(at < len(text) for at, text in zip(done, texts, strict=True)):
        chosen = [one for one in rng.sample(range(4), 4) if done[one] < len(texts[one]) and rng.random() < 0.7]
        counts = [min(rng.choice((1, 1, 1, 3, 9, 40, 200)), len(texts[one]) - done[one]) for one in chosen]
        ends = [done[one] + count for one, count in zip(chosen, counts, strict=True)]
        sequences = [
            SequenceStep(texts[one][done[one] : end], done[one], [one], min(count, 5))
            for one, count, end in zip(chosen, counts, ends, strict=True)
        ]
        if not sequences:
            continue
        logits = engine.step(sequences)
        expected = [
            wanted[one][end - min(count, 5) : end] for one, count, end in zip(chosen, counts, ends, strict=True)
        ]
        np.testing.assert_allclose(logits, np.concatenate(expected), atol=tolerance)
        for one, end in zip(chosen, ends, strict=True):
            done[one] = end
    engine.copy_blocks([(0, 3)])
    logits = engine.step([SequenceStep(texts[0][500:], 500, [3]), SequenceStep(texts[3], 0, [1])])
    np.testing.assert_allclose(logits, [wanted[0][-1], wanted[3][-1]], atol=tolerance)


def test_a_step_of_one_row_costs_the_same_among_4_and_512_slots(folder):
    """By time: a step that touched the whole cache would take 128 times as long. By memory: see the next test."""

    def seconds(num_slots):
        engine = open_engine(folder, max_model_len=2000, num_slots=num_slots)
        sequence = SequenceStep([1], 0, [num_slots - 1])
        times = []
        for _ in range(30):
            start = time.perf_counter()
            engine.step([sequence])
            times.append(time.perf_counter() - start)
        return min(times)

    few, many = seconds(4), seconds(512)
    print(f"a step of one row among 4 slots {few * 1e3:.2f} ms, among 512 {many * 1e3:.2f} ms")
    assert many < 4 * few + 0.001


def test_no_step_holds_a_second_copy_of_the_cache(folder):
    """A batch of all rows at full view: past and present in two places would take as much as the cache once more."""
    engine = open_engine(folder, max_model_len=4000, num_slots=64)
    cache = sum(one.buffer.nbytes for one in engine._caches)
    assert cache > 32 * MIB
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on
    before, _ = resident_bytes()
    for start in range(0, 3900, 100):
        engine.step([SequenceStep([1] * 100, start, [0], 1)])
    engine.copy_blocks([(0, slot) for slot in range(1, 64)])
    for step in range(3):
        engine.step([SequenceStep([2], 3900 + step, [slot]) for slot in range(64)])
    _, peak = resident_bytes()
    print(f"cache {cache / MIB:.0f} MiB, steps took {(peak - before) / MIB:.1f} MiB beside it")
    assert peak - before < cache / 4


def test_the_cache_is_one_allocation_whose_rows_the_graph_reads_and_writes(folder):
    engine = open_engine(folder, max_model_len=100, num_slots=3)
    engine.step([SequenceStep([1, 2, 3], 0, [0]), SequenceStep([4], 0, [2])])
    bases = {id(one.buffer.base) for one in engine._caches}
    assert len(bases) == 1
    for one in engine._caches:
        assert one.buffer.ctypes.data % 64 == 0
        rows = one.rows(3, engine._view)
        filled = [np.abs(rows[row]).sum(axis=(0, 2)) > 0 for row in range(3)]
        lengths = sorted(int(row.nonzero()[0].max(initial=-1)) + 1 for row in filled)
        assert lengths[0] == 0 and lengths[-1] <= 4, "only rows of the step are written, and padding behind them"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "model.onnx").write_bytes(b"no graph"), "model.onnx.*cannot be loaded"),
        (lambda folder: (folder / "model.onnx").unlink(), "model.onnx.*cannot be loaded"),
        (lambda folder: (folder / "model.onnx.data").unlink(), "model.onnx.data cannot be loaded"),
        (lambda folder: (folder / "model.onnx.data").write_bytes(b"\0" * 64), "model.onnx.data cannot be loaded"),
        (lambda folder: (folder / "graph.json").unlink(), "graph.json does not describe an ONNX step graph"),
        (lambda folder: (folder / "graph.json").write_text("{}"), "graph.json does not describe an ONNX step graph"),
        (lambda folder: edit(folder, num_layers=3), "graph.json does not describe.*num_layers"),
        (
            lambda folder: edit(folder, layers=[{"kv_heads": 1, "head_size": 8, "window": 0}] * 2),
            r"past_key_0 of .* must be .*1, 'cache_len', 8.*got .*2, 'cache_len', 8",
        ),
        (lambda folder: rename(folder, "logit_rows", "rows_of_logits"), "logit_rows of .*got None"),
    ],
)
def test_files_that_are_not_a_step_graph_are_refused_by_name(broken, damage, words):
    damage(broken)
    with pytest.raises(ReleaseMismatch, match=words):
        open_engine(broken)


def edit(folder, **facts):
    path = folder / "graph.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


def rename(folder, old, new):
    """Give an input of the graph another name."""
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    for port in model.graph.input:
        port.name = new if port.name == old else port.name
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = new if name == old else name
    onnx.save(model, folder / "model.onnx")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_model_len": 8193}, "max_model_len must be at most the model's context 8192, got 8193"),
        ({"kv_cache_precision": "bf16"}, r"kv_cache_precision must be one of f32, f16 .*float32.*got 'bf16'"),
        ({"kv_cache_precision": "f16"}, r"kv_cache_precision must be .*that of the graph \(float32\).*got 'f16'"),
        ({"vocab_size": 41}, "vocab_size must be the graph's 40, got 41"),
        ({"block_size": 32}, "block_size must be max_model_len 600 for a linear KV cache, got 32"),
        ({"num_slots": 1 << 20}, r"num_blocks must be at most \d+: a slot of 640 positions takes .* MiB are free"),
        ({"properties": {"threads": 2}}, "properties.threads must be one of intra_op_num_threads, allow_spinning"),
    ],
)
def test_a_configuration_that_does_not_fit_the_graph_is_refused_by_field_and_value(folder, fields, words):
    with pytest.raises(InvalidRequest, match=words):
        open_engine(folder, **fields)


def test_an_unknown_engine_is_refused_by_name(folder):
    with pytest.raises(ReleaseMismatch, match="engine must be one of openvino, onnxruntime, tensorrt, got 'onyx'"):
        load_engine("onyx", folder, config())
