"""gpu-check: its floors, what it compares, and that a machine without a GPU is told so in one line.

It was never run on a GPU; here it measures an engine on the fake runtime, which shows that it measures the right steps.
"""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(Path(__file__).parent)]

import gpu_check  # noqa: E402
import gpu_floors  # noqa: E402
from test_tensorrt_engine import CONFIG, IDENTITY_VALUES, SLOTS, Case  # noqa: E402

from tritonforge.engines.base import EngineSpec  # noqa: E402
from tritonforge.engines.simulated import SimulatedEngine  # noqa: E402
from tritonforge.errors import SetupError  # noqa: E402

PEAK = gpu_floors.Peak(bytes_per_s=1e12, flops_per_s=1e14)


def test_without_a_driver_one_line_says_so_and_nothing_is_run(monkeypatch, capsys):
    def absent():
        raise SetupError("no NVIDIA driver: libcuda.so.1 is not on this machine")

    monkeypatch.setattr(gpu_check, "require_driver", absent)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    assert gpu_check.main() == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.splitlines() == [
        "gpu-check: no NVIDIA driver: libcuda.so.1 is not on this machine; nothing was run"
    ]


def test_a_decode_step_reads_all_weights_and_the_keys_and_values_of_each_sequence():
    identity = replace(IDENTITY_VALUES, weight_bytes=10**9)
    token = identity.kv_bytes / (identity.slots * identity.cache_len)
    assert token == sum(2 * layer.kv_heads * layer.head_size * 2 for layer in identity.layers)
    assert gpu_floors.decode_floor_ms(identity, 1, 0, PEAK) == pytest.approx(1.0)
    assert gpu_floors.decode_floor_ms(identity, 4, 1000, PEAK) == pytest.approx(1.0 + 4000 * token / 1e9)


def test_a_prefill_is_bound_by_products_or_by_reading_the_weights():
    identity = replace(IDENTITY_VALUES, weight_bytes=10**9)
    long = gpu_floors.prefill_floor_ms(identity, 10**9, 1000, PEAK, fp8=False)
    assert long == pytest.approx(2e12 / 1e14 * 1e3)
    assert gpu_floors.prefill_floor_ms(identity, 10**9, 1000, PEAK, fp8=True) == pytest.approx(long / 2)
    assert gpu_floors.prefill_floor_ms(identity, 10**9, 1, PEAK, fp8=False) == pytest.approx(1.0)
    unknown = replace(PEAK, flops_per_s=0.0)
    assert gpu_floors.prefill_floor_ms(identity, 10**9, 1000, unknown, fp8=False) == pytest.approx(1.0)


def test_embedding_head_and_norms_are_no_products_of_each_token():
    assert gpu_floors.product_parameters([(100, 8), (8, 16), (8,), (4, 8, 8)], 100) == 8 * 16 + 4 * 8 * 8


def test_the_peak_is_that_of_known_cards():
    """TFLOP/s of the whitepapers, from multiprocessors and boost clock."""
    for capability, multiprocessors, clock, tflops in (("8.0", 108, 1.41, 312), ("8.9", 128, 2.52, 165)):
        assert gpu_floors.TENSOR_FLOPS[capability] * multiprocessors * clock / 1e3 == pytest.approx(tflops, rel=0.01)


@pytest.fixture
def engine(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "REPEATS", 3)
    case = Case(tmp_path)
    opened = case.open()
    opened.events = case.events
    return opened


def test_prefill_and_decode_steps_are_timed_in_the_shapes_that_they_name(engine):
    engine.events.clear()
    gpu_check.prefill_ms(engine, 20)
    assert [event[1] for event in engine.events if event[0] == "execute"] == [(1, 20)] * 5
    engine.events.clear()
    gpu_check.decode_ms(engine, SLOTS, 16)
    computed = [event[0] for event in engine.events if event[0] in ("execute", "launch")]
    assert computed[-4:] == ["launch"] * 4, "what is timed is the replayed CUDA graph, as in serving"


def test_the_difference_covers_prefill_chunk_and_decodes_of_two_sequences(engine):
    reference = SimulatedEngine(EngineSpec(**CONFIG))
    assert gpu_check.largest_difference(engine, reference) == 0.0
    changed = SimulatedEngine(EngineSpec(**CONFIG))
    step = changed.step
    changed.step = lambda sequences: step(sequences) + np.float32(0.25)
    assert gpu_check.largest_difference(engine, changed) == pytest.approx(0.25)


def test_the_table_shows_times_beside_their_floors_and_every_failure():
    row = gpu_floors.Row("tiny", 1.5, 3.0, 1.01, 0.002, 0.97, 0.03, (2.0, 1.0), (0.5, 0.1), (4.0, 0.5))
    lines = gpu_floors.table([row], {"other": "no engine"}).splitlines()
    assert lines[1].split()[:7] == ["tiny", "1.5", "3.0", "1.0100", "0.00200", "0.9700", "0.0300"]
    assert "2.000 (2.0x 1.000)" in lines[1] and "4.000 (8.0x 0.500)" in lines[1]
    assert lines[2].split() == ["other", "failed:", "no", "engine"]
