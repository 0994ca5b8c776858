"""Makes a virtual environment from pinned requirement files, once: a second run with the same files installs nothing.

python scripts/environment.py .venv requirements/serve.txt
python scripts/environment.py .venv-build requirements/build.txt --no-deps requirements/build-nodeps.txt

Files after --no-deps are installed without their dependencies. The project itself is installed editable, without
dependencies. Standard library only: it runs before anything is installed.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROJECT = ROOT / "pyproject.toml"
STAMP = ".made-from"


def content_key(files: list[Path]) -> str:
    """sha256 (hex) over what decides the environment: this Python's version, the files, how the project is packaged.

    The checkout's folder counts too: the environment's programs and its editable install point into it.
    """
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))
    packaging = json.dumps([project["build-system"], project["project"]], sort_keys=True)
    digest = hashlib.sha256(f"{sys.version}\n{ROOT}\n{packaging}".encode())
    for file in files:
        digest.update(f"\n{file.name}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def install(python: Path, *arguments: str) -> None:
    """Run pip in the environment; raises CalledProcessError with pip's own message on the terminal."""
    options = ("--quiet", "--disable-pip-version-check", "--no-input")
    subprocess.run([python, "-m", "pip", "install", *options, *arguments], cwd=ROOT, check=True)


def make(folder: Path, files: list[Path], bare_files: list[Path]) -> bool:
    """Bring the environment `folder` to what the files say; return whether anything had to be installed.

    The stamp is written last, so an interrupted installation is made again from nothing.
    """
    stamp = folder / STAMP
    key = content_key([*files, *bare_files])
    if stamp.is_file() and stamp.read_text() == key:
        return False
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    for file in files:
        install(python, "-r", str(file))
    for file in bare_files:
        install(python, "--no-deps", "-r", str(file))
    install(python, "--no-deps", "-e", str(ROOT))
    stamp.write_text(key)
    return True


def main() -> int:
    """Make the environment that the command line names; the exit code is pip's when it fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--no-deps", type=Path, nargs="*", default=[], dest="bare_files")
    arguments = parser.parse_args()
    started = time.monotonic()
    try:
        if make(arguments.folder.absolute(), arguments.files, arguments.bare_files):
            print(f"{arguments.folder} made in {time.monotonic() - started:.0f} s", flush=True)
    except subprocess.CalledProcessError as error:
        print(f"environment: {arguments.folder} could not be made: pip's message is above", file=sys.stderr)
        return error.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
