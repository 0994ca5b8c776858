"""A contract file as one document: profiles, traces and quality sets that live in files of their own are put inside.

`read_document` is what every reader of contracts begins with; contract_toml gives the document its meaning.
"""

import csv
import tomllib
from pathlib import Path
from typing import Any

from loadtests.fields import InvalidContract

TRACE_COLUMNS = ("at_s", "prompt_tokens", "output_tokens")


def read_document(path: str | Path) -> dict[str, Any]:
    """The document of a contract file without references: `include`, `trace` and `quality_file` are resolved.

    Files are named relative to the file that names them, and lie in its folder or below. Raises InvalidContract.
    """
    path = Path(path)
    document = _toml(path, "contract")
    included = document.pop("include", [])
    if not isinstance(included, list):
        raise InvalidContract(f"include must be a list of file names, got {included!r}")
    parts = [(file, _toml(file, "profile")) for file in (_below(path, name, "include") for name in included)]
    inline = document.get("profiles", [])
    parts += [(path, part) for part in inline] if isinstance(inline, list) else []
    if included or isinstance(inline, list):
        document["profiles"] = [_resolved(file, part) for file, part in parts]
    return document


def _resolved(file: Path, part: Any) -> Any:
    """A profile's table with the files that it names read."""
    if not isinstance(part, dict):
        return part
    part = dict(part)
    if "quality_file" in part:
        if "quality" in part:
            raise InvalidContract(f"{file}: quality and quality_file cannot both be given")
        named = _below(file, part.pop("quality_file"), "quality_file")
        part["quality"] = _toml(named, "quality set").get("quality")
    arrivals = part.get("arrivals")
    if isinstance(arrivals, dict) and isinstance(arrivals.get("trace"), str):
        part["arrivals"] = {**arrivals, "trace": _trace(_below(file, arrivals["trace"], "trace"))}
    return part


def _below(file: Path, name: Any, key: str) -> Path:
    """The file `name`, which `file` names. It must not lead out of the folder: a contract is self-contained."""
    if not isinstance(name, str) or not name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise InvalidContract(f"{key} must name a file in the folder of {file.name} or below, got {name!r}")
    return file.parent / name


def _toml(path: Path, what: str) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidContract(f"{what} {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidContract(f"{what} {path} is not TOML: {error}") from error


def _trace(path: Path) -> list[list[float | int]]:
    """The lines of a CSV file with the header at_s[,prompt_tokens,output_tokens]."""
    try:
        rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines(), strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidContract(f"trace {path} cannot be read as CSV: {error}") from error
    lines = []
    for number, row in enumerate(rows, 2):
        unknown = set(row) - set(TRACE_COLUMNS)
        if unknown or "at_s" not in row:
            raise InvalidContract(f"trace {path} must have the columns {', '.join(TRACE_COLUMNS)} or at_s alone")
        try:
            lines.append([float(row["at_s"]), *(int(row.get(column) or 0) for column in TRACE_COLUMNS[1:])])
        except (TypeError, ValueError):
            raise InvalidContract(f"trace {path} line {number} must hold numbers, got {row}") from None
    return lines
