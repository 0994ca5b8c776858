"""A build stage: a folder of files and the record that says from what, how and how fast they were made.

Every stage script runs through `run_stage`: same inputs, same settings, same tools and same code as the record says
means there is nothing to do. A stage's input must be a folder whose record matches its files.
"""

import argparse
import contextlib
import errno
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import checkout

from tritonforge.errors import ReleaseMismatch, TritonForgeError
from tritonforge.release import content_digest, describe_files, digest_of, file_digest, verify_files

RECORD = "record.json"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Stage:
    """What decides a stage's outputs: digests of its inputs by name, settings, versions of tools, sources of its code.

    `makes` says in a few words what comes out, for the progress line.
    """

    name: str
    makes: str
    inputs: dict[str, str]
    settings: dict[str, Any] = field(default_factory=dict)
    packages: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()

    def facts(self) -> dict[str, Any]:
        """The JSON value that the key is the digest of."""
        code = {name: file_digest(checkout.ROOT / name) for name in self.sources}
        tools = {name: tool_version(name) for name in self.packages}
        return {"stage": self.name, "inputs": self.inputs, "settings": self.settings, "tools": tools, "code": code}


@dataclass(frozen=True)
class Done:
    """A finished stage: its folder and its record. `skipped` says that nothing had to be done."""

    folder: Path
    record: dict[str, Any]
    skipped: bool = False

    @property
    def digest(self) -> str:
        """sha256 (hex) over the names and digests of the stage's files."""
        return self.record["digest"]

    @property
    def measurements(self) -> dict[str, Any]:
        """What the stage found out: JSON values by name."""
        return self.record["measurements"]

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(facts["bytes"] for facts in self.record["files"].values())


def tool_version(package: str) -> str:
    """The installed version of a distribution, without a local part such as +cpu; "absent" when it is not installed."""
    if package == "python":
        return ".".join(map(str, sys.version_info[:3]))
    try:
        return version(package).split("+")[0]
    except PackageNotFoundError:
        return "absent"


def open_input(folder: Path, stage: str) -> Done:
    """The finished stage in `folder`; ReleaseMismatch when no record holds what lies there."""
    path = folder / RECORD
    if not path.is_file():
        raise ReleaseMismatch(f"{folder} has no {RECORD}: it is no finished {stage} stage; run build/{stage}.py first")
    record = _read_record(path)
    if record.get("stage") != stage:
        raise ReleaseMismatch(f"{folder} was made by stage {record.get('stage')!r}, not by {stage}")
    verify_files(folder, record["files"], ignore=(RECORD,))
    return Done(folder, record)


def finished(stage: Stage, folder: Path) -> Done | None:
    """The finished stage in `folder` if it was made from the same facts and its files are intact, else None."""
    path = folder / RECORD
    if not path.is_file():
        return None
    try:
        record = _read_record(path)
        if record["key"] != digest_of(stage.facts()):
            return None
        verify_files(folder, record["files"], ignore=(RECORD,))
    except ReleaseMismatch:
        return None
    return Done(folder, record, skipped=True)


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        record["key"], record["files"], record["digest"]
    except (ValueError, KeyError, TypeError):
        raise ReleaseMismatch(f"{path} is not a stage record") from None
    return record


def run_stage(stage: Stage, folder: Path, make: Callable[[Path], dict[str, Any]], *, force: bool = False) -> Done:
    """Make `folder` by calling make(scratch folder) -> measurements, or keep it when its record has the same facts.

    The folder appears whole or not at all, and replaces an older one.
    """
    done = None if force else finished(stage, folder)
    if done is None:
        say(f"{stage.name:<9} makes {stage.makes} ...")
        done = _make(stage, folder, make)
    how = "kept, its inputs are the same" if done.skipped else f"{done.record['seconds']:.1f} s"
    say(f"{stage.name:<9} {stage.makes}: {how}, {done.bytes / 2**20:.1f} MiB in {shown(folder)}")
    return done


def _make(stage: Stage, folder: Path, make: Callable[[Path], dict[str, Any]]) -> Done:
    facts = stage.facts()
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        begin = time.monotonic()
        with quiet(folder.with_name(f"{folder.name}.log")):
            measurements = make(scratch)
        seconds = round(time.monotonic() - begin, 3)
        files = describe_files(scratch)
        record = {**facts, "key": digest_of(facts), "digest": content_digest(files), "seconds": seconds}
        record |= {"measurements": measurements, "files": files}
        (scratch / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        replace_folder(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return Done(folder, record)


def replace_folder(new: Path, folder: Path) -> None:
    """Put the finished folder `new` in the place of `folder`, which may exist."""
    old = folder.with_name(f"{folder.name}.old-{os.getpid()}")
    if folder.exists():
        os.rename(folder, old)
    os.rename(new, folder)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def quiet(log: Path) -> Iterator[None]:
    """Send what libraries print to `log` while a stage works; an unexpected exception's message names the log."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    with open(log, "w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
                yield
        except TritonForgeError:
            raise
        except Exception as error:
            error.add_note(f"what the stage printed lies in {shown(log)}")
            raise
        finally:
            file.flush()
            for descriptor, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, descriptor)
                os.close(copy)


def say(line: str) -> None:
    """One line of progress."""
    print(line, flush=True)


def shown(path: Path) -> Path:
    """`path` as it is shown to people: relative to the current folder where it lies below it."""
    path = path.absolute()
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def arguments(description: str, *inputs: str) -> argparse.ArgumentParser:
    """The command line that all stage scripts share; `inputs` are the stages whose folders this one reads."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--recipe", required=True, type=Path, help="recipe file (build/recipes/*.toml)")
    for name in inputs:
        parser.add_argument(
            f"--{name}", required=True, type=Path, metavar="DIR", help=f"folder made by build/{name}.py"
        )
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to make")
    parser.add_argument("--force", action="store_true", help="make it again even if nothing changed")
    return parser


def script(main: Callable[[], None]) -> None:
    """Run a script's main; a typed error, and a full disk, become one line on stderr, with exit code 1."""
    try:
        main()
    except TritonForgeError as error:
        sys.exit(f"error: {Exception.__str__(error)}")
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        where = error.filename2 or error.filename
        sys.exit(
            f"error: {error.strerror}" + (f": {where}" if where else "") + "; make room, what was finished is kept"
        )
    except KeyboardInterrupt:
        sys.exit("error: interrupted; what was finished is kept")
