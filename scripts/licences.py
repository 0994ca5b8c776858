"""Says which packages a service is made of, under which licences, and whether each licence was thought about.

    python scripts/licences.py                            the extras of pyproject.toml that serve
    python scripts/licences.py --extra serve --extra gateway --json

Run it in the environment in question: it reads what is installed there and follows the requirements of the extras.
Exit codes: 0; 1 when a package states no licence that is known, or one that obliges whoever passes the service on.
"""

import argparse
import importlib.metadata
import json
import re
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
SERVING = ("serve", "client", "gateway", "traces")
PERMISSIVE, FILE_COPYLEFT, UNKNOWN = "permissive", "copyleft of its own files", "to be looked at"
CLASSES = {
    PERMISSIVE: (
        *("0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "CNRI-Python", "ISC", "MIT", "MIT-0", "MIT-CMU"),
        *("PSF-2.0", "Python-2.0", "Unlicense", "ZPL-2.1", "Zlib"),
    ),
    FILE_COPYLEFT: ("MPL-2.0",),
}
"""SPDX identifiers whose conditions are met: notices are kept in the packages themselves, which are passed on whole."""
SPELLINGS = {
    "Apache 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "OSI Approved :: Apache Software License": "Apache-2.0",
    "3-Clause BSD License": "BSD-3-Clause",
    "BSD License": "BSD-3-Clause",
    "BSD": "BSD-3-Clause",
    "ISC License": "ISC",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}
"""How packages without an SPDX expression put it. "BSD License" does not say which; the conditions are alike."""


@dataclass(frozen=True)
class Stated:
    """A package and what it says of its licence, in SPDX terms where it can be put so."""

    name: str
    version: str
    licence: str
    kind: str


def state(name: str, version: str, metadata: Any) -> Stated:
    """What a package's metadata says: its SPDX expression, else the licence field, else its classifiers."""
    expression = metadata.get("License-Expression") or ""
    if not expression:
        field = (metadata.get("License") or "").strip().partition("\n")[0]
        classifiers = metadata.get_all("Classifier") or []
        named = [line.rpartition(" :: ")[2] for line in classifiers if line.startswith("License :: ") and "::" in line]
        spelt = [SPELLINGS.get(one, one) for one in (field, *named) if one and one != "OSI Approved"]
        expression = next((one for one in spelt if kind_of(one) != UNKNOWN), spelt[0] if spelt else "none stated")
    return Stated(name, version, expression, kind_of(expression))


def kind_of(expression: str) -> str:
    """What an SPDX expression asks for: with OR one may choose, with AND all hold; with parentheses, all it names."""
    if "(" in expression:
        return _all_of(re.split(r"\s+(?:OR|AND)\s+", expression.replace("(", " ").replace(")", " ").strip()))
    choices = re.split(r"\s+OR\s+", expression)
    kinds = [_all_of(re.split(r"\s+AND\s+", choice)) for choice in choices]
    return min(kinds, key=_ORDER.index)


_ORDER = (PERMISSIVE, FILE_COPYLEFT, UNKNOWN)


def _all_of(names: Iterable[str]) -> str:
    kinds = [next((kind for kind, known in CLASSES.items() if name.strip() in known), UNKNOWN) for name in names]
    return max(kinds, key=_ORDER.index)


def closure(extras: Iterable[str]) -> list[str]:
    """Names of the packages that the project with these extras requires, themselves and through others.

    PackageNotFoundError names the first that is not installed here.
    """
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    direct = [*project["dependencies"], *(line for one in extras for line in project["optional-dependencies"][one])]
    waiting = [Requirement(line) for line in direct]
    done: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        wanted = waiting.pop()
        name, chosen = canonicalize_name(wanted.name), frozenset(wanted.extras)
        if (name, chosen) in done:
            continue
        done.add((name, chosen))
        for one in map(Requirement, importlib.metadata.requires(name) or []):
            if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in {"", *chosen}):
                waiting.append(one)
    return sorted({name for name, _ in done})


def main(arguments: list[str] | None = None) -> int:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extra", action="append", help=f"an extra of the project; repeatable (default: {SERVING})")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    options = parser.parse_args(arguments)
    try:
        installed = map(importlib.metadata.distribution, closure(options.extra or SERVING))
        stated = [state(found.metadata["Name"], found.version, found.metadata) for found in installed]
    except importlib.metadata.PackageNotFoundError as error:
        print(f"{error.name} is required and not installed here", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps([asdict(one) for one in stated], indent=2))
    else:
        for one in stated:
            print(f"{one.name:28} {one.version:14} {one.licence:36} {one.kind}")
    return int(any(one.kind == UNKNOWN for one in stated))


if __name__ == "__main__":
    sys.exit(main())
