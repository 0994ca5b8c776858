"""Finds a tritonserver on this machine: the container's, or the one of the PyPI wheel nvidia-pytriton.

The server process is started from what this module returns. It starts nothing itself.
"""

import importlib.metadata
import importlib.util
import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

from tritonforge.errors import SetupError

CONTAINER_BINARY = Path("/opt/tritonserver/bin/tritonserver")
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
LIBPYTHON = f"libpython{PYTHON}.so.1.0"
STUB = "triton_python_backend_stub"
VERTEX_AI = "AIP_MODE"
"""With this variable Triton opens one more port, on every address."""


@dataclass(frozen=True)
class TritonInstall:
    """A tritonserver: its binary and, for the wheel's, what has to lie beside it: `links` maps a path in a run folder
    to the file it points to, `library_path` lists folders for LD_LIBRARY_PATH."""

    binary: Path
    links: dict[str, Path] = field(default_factory=dict)
    library_path: tuple[Path, ...] = ()

    def lay_out(self, run_dir: Path) -> tuple[str, ...]:
        """Place the links in `run_dir` and return the arguments that make the server use them."""
        for name, target in self.links.items():
            (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
            (run_dir / name).symlink_to(target)
        return (f"--backend-directory={run_dir / 'backends'}",) if self.links else ()

    def environment(self, run_dir: Path) -> dict[str, str]:
        """The process environment: this interpreter is first on PATH, by which the stub finds its packages.

        The stub's own Python is isolated: no PYTHON... variable reaches it, so it does write __pycache__ folders.
        """
        environment = {name: value for name, value in os.environ.items() if name != VERTEX_AI}
        if self.links:
            inherited = os.environ.get("LD_LIBRARY_PATH")
            folders = [*map(str, self.library_path), str(run_dir / "lib"), *([inherited] if inherited else [])]
            environment["LD_LIBRARY_PATH"] = os.pathsep.join(folders)
            environment["PATH"] = os.pathsep.join(
                (str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath))
            )
        return environment


def find_triton(binary: Path | None = None) -> TritonInstall:
    """Return the server to use: `binary` if given, else the container's, the wheel's, or one on PATH, in this order.

    Raises SetupError, with the remedy, when there is none or something it needs is missing.
    """
    if binary is not None:
        if not os.access(binary, os.X_OK):
            raise SetupError(f"{binary} is not an executable tritonserver; name one with --tritonserver")
        return TritonInstall(binary)
    if os.access(CONTAINER_BINARY, os.X_OK):
        return TritonInstall(CONTAINER_BINARY)
    package = importlib.util.find_spec("pytriton")
    if package is not None and package.origin is not None:
        return _wheel_install(Path(package.origin).parent)
    on_path = shutil.which("tritonserver")
    if on_path:
        return TritonInstall(Path(on_path))
    raise SetupError("no tritonserver found; run `pip install nvidia-pytriton==0.7.0` or work in the Triton container")


def find_libpython() -> Path | None:
    """Return the shared library of this Python version, which the wheel's stub links; None when there is none."""
    folders = (sysconfig.get_config_var("LIBDIR"), f"/usr/lib/{sysconfig.get_config_var('MULTIARCH')}", "/usr/lib64")
    candidates = (Path(folder) / LIBPYTHON for folder in folders if folder)
    return next((path for path in candidates if path.exists()), None)


def _wheel_install(package: Path) -> TritonInstall:
    root = package / "tritonserver"
    stub = root / "python_backend_stubs" / PYTHON / STUB
    libpython = find_libpython()
    numpy = importlib.metadata.version("numpy")
    if not stub.exists():
        raise SetupError(f"the wheel's tritonserver has no stub for Python {PYTHON}; use Python 3.11 or 3.12")
    if libpython is None:
        raise SetupError(
            f"{LIBPYTHON} is missing; install it (Debian, Ubuntu: apt-get install libpython{PYTHON}) "
            "or use a Python built with --enable-shared"
        )
    if int(numpy.split(".")[0]) >= 2:
        raise SetupError(f"numpy {numpy} makes the Python backend crash; run `pip install 'numpy<2'`")
    backend = root / "backends" / "python"
    names = ("libtriton_python.so", "triton_python_backend_utils.py")
    links = {f"backends/python/{name}": backend / name for name in names}
    links |= {f"backends/python/{STUB}": stub, f"lib/{LIBPYTHON}": libpython}
    return TritonInstall(root / "bin" / "tritonserver", links, (package.parent / "nvidia_pytriton.libs",))
