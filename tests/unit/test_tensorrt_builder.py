"""The engine builder where TensorRT itself is installed, on a fake of it: NVIDIA's container was not at hand.

What TensorRT for RTX builds is tested with the real one, in tests/build.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "build"))

import tensorrt_builder as builder  # noqa: E402
import tensorrt_recipe  # noqa: E402
from recipe import Recipe  # noqa: E402

from tritonforge.errors import InvalidRecipe, SetupError  # noqa: E402

RECIPE = ROOT / "build" / "recipes" / "qwen3-8b-tensorrt-fp8-80gb.toml"


class Config:
    """IBuilderConfig's timing cache: it grows by what is timed."""

    def create_timing_cache(self, content):
        return SimpleNamespace(content=content, serialize=lambda: content + b"timed ")

    def set_timing_cache(self, cache, ignore_mismatch):
        assert ignore_mismatch is False, "timings of another GPU must not count"
        self.cache = cache

    def get_timing_cache(self):
        return self.cache


@pytest.fixture
def tensorrt():
    return SimpleNamespace(__name__="tensorrt", __version__="11.1.0.106")


def test_tensorrt_itself_is_preferred_and_rtx_taken_where_it_is_not(monkeypatch):
    installed = {"tensorrt", "tensorrt_rtx"}
    monkeypatch.setattr(builder, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.setattr(builder, "import_module", lambda name: name)
    assert builder.import_flavour() == "tensorrt"
    installed.remove("tensorrt")
    assert builder.import_flavour() == "tensorrt_rtx"


def test_timings_are_kept_for_the_next_build_of_the_same_version(tensorrt, tmp_path):
    for expected in (b"timed ", b"timed timed "):
        builder.reuse_timings(tensorrt, Config(), tmp_path)()
        assert (tmp_path / "tensorrt-timing-11.1.0.106.cache").read_bytes() == expected
    newer = SimpleNamespace(__version__="11.2")
    config = Config()
    builder.reuse_timings(newer, config, tmp_path)
    assert config.cache.content == b""


def test_tensorrt_for_rtx_has_nothing_to_time(tmp_path):
    rtx = SimpleNamespace(ComputeCapability=SimpleNamespace(__members__={"SM89": 89}), __version__="1.7")
    builder.reuse_timings(rtx, object(), tmp_path)()
    assert not list(tmp_path.iterdir())


def test_tensorrt_builds_only_for_the_gpu_that_is_there(tensorrt, monkeypatch):
    recipe = Recipe.load(RECIPE)
    assert recipe.compile.compute_capabilities == ["9.0"]
    monkeypatch.setattr(builder, "import_flavour", lambda: tensorrt)
    monkeypatch.setattr(tensorrt_recipe, "require_driver", lambda: 1)
    found = SimpleNamespace(compute_capability="9.0", close=lambda: None)
    monkeypatch.setattr(tensorrt_recipe, "Device", lambda: found)
    tensorrt_recipe.check_tools(recipe)
    found.compute_capability = "8.9"
    with pytest.raises(InvalidRecipe, match=r"among 8.9, which tensorrt 11.1.0.106 builds for here, got 9.0"):
        tensorrt_recipe.check_tools(recipe)

    def absent():
        raise SetupError("no NVIDIA driver")

    monkeypatch.setattr(tensorrt_recipe, "require_driver", absent)
    with pytest.raises(SetupError, match="no NVIDIA driver"):
        tensorrt_recipe.check_tools(recipe)
