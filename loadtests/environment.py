"""The machine that sends the load, as the header of a run names it. Facts for the reader; the verdict uses none."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from loadtests.target import is_local

PACKAGES = ("locust", "gevent", "grpcio", "tritonclient", "tokenizers", "protobuf")


def environment(url: str) -> dict[str, Any]:
    """The machine the client ran on. Facts for the reader; the verdict does not use them."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "client_same_host": is_local(url),
        "packages": versions,
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
