"""Fixtures of the whole suite: the release under test, and one real tritonserver that serves it."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

with contextlib.suppress(ImportError):  # the build environment has no hypothesis, and its tests need none
    from hypothesis import settings

    # No test may fail because the machine is busy, and the same commit always sees the same examples. To search on:
    # pytest --hypothesis-profile=search
    settings.register_profile("tritonforge", deadline=None, derandomize=True)
    settings.register_profile("search", deadline=None)
    settings.load_profile("tritonforge")

# A shell starts background jobs with SIGINT ignored, and what they start inherits it: no program could be interrupted.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_RELEASE = ROOT / "artifacts" / "releases" / "smollm2-135m-int8"


@pytest.fixture(scope="session")
def release_dir() -> Path:
    """The release under test: TRITONFORGE_TEST_RELEASE, or the one that `make release` builds."""
    folder = Path(os.environ.get("TRITONFORGE_TEST_RELEASE", DEFAULT_RELEASE))
    if not (folder / "manifest.json").exists():
        pytest.fail(f"no release at {folder}; build it with `make release`")
    return folder


@pytest.fixture(scope="session")
def server(release_dir: Path) -> Iterator["Server"]:  # noqa: F821 - imported late: unit tests run without Triton
    """A supervised tritonserver on free ports, shared by all tests: they must leave it serving."""
    from tritonforge.server import Server

    with Server(release_dir) as running:
        yield running
