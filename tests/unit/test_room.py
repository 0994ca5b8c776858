"""Memory for a canary: refused with the figures before it is loaded, when it would take what the server needs."""

import logging
from pathlib import Path

import pytest

from tritonforge.errors import Overloaded
from tritonforge.memory.plan import MIB, MemoryPlan
from tritonforge.release import Release
from tritonforge.rollout import room

BASE = 100 * MIB


def release(*, fit_memory: bool = False, memory: bool = True) -> Release:
    sizes = {"kv_cache": {"bytes_per_block": MIB, "num_blocks": 500, "spare_blocks": 1, "fit_memory": fit_memory}}
    if memory:
        sizes["memory"] = {
            name: 50 * MIB for name in ("weight_bytes", "runtime_bytes", "step_bytes", "load_peak_bytes")
        }
    recipe = {"limits": {"max_num_seqs": 32, "max_model_len": 1024}, "kv_cache": {"block_size": 32}}
    manifest = {"name": "two", "sizes": sizes, "recipe": recipe, "checkpoint": {"model": {"vocab_size": 49152}}}
    return Release(Path("/releases/two"), manifest)


@pytest.fixture
def free(monkeypatch):
    """free(bytes): what machine and control groups have left."""
    monkeypatch.setattr(room, "measure_base_bytes", lambda folder: BASE)
    return lambda size: monkeypatch.setattr(room, "available_bytes", lambda: size)


@pytest.mark.parametrize("fit_memory", [False, True])
def test_a_release_is_refused_by_its_plan_and_its_tokenizer_to_the_byte(free, fit_memory):
    """A cache that is sized at load takes what there is, but it must hold one longest sequence."""
    plan = MemoryPlan.of_manifest(release().manifest, BASE)
    needed = (plan.bytes_for(1, 1024) if fit_memory else plan.total_bytes) + BASE
    free(needed)
    room.check_room(release(fit_memory=fit_memory))
    free(needed - 1)
    with pytest.raises(Overloaded) as refused:
        room.check_room(release(fit_memory=fit_memory))
    mib = -(-needed // MIB)
    assert f"release two needs {mib} MiB (decoder {mib - 100}, tokenizer 100)" in str(refused.value)
    assert f"have {(needed - 1) // MIB} MiB left" in str(refused.value) and "--ignore-memory" in str(refused.value)


def test_a_release_without_figures_is_loaded_and_that_is_logged(free, caplog):
    free(0)
    with caplog.at_level(logging.WARNING, "tritonforge.server"):
        room.check_room(release(memory=False))
    assert "the memory for two is not checked" in caplog.text and "memory figures" in caplog.text
