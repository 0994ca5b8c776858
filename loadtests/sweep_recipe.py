"""Writes the limits that a sweep recommends into a recipe. Everything else of the recipe, comments too, stays."""

import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

from loadtests.fields import InvalidContract
from tritonforge.release import Release

BUILD = Path(__file__).resolve().parent.parent / "build"
SECTION = re.compile(r"^\[limits\][^\n]*\n(?P<body>.*?)(?=^\[|\Z)", re.MULTILINE | re.DOTALL)


def check_recipe(path: Path, release: Release, limits: Mapping[str, int]) -> None:
    """Refuse, before anything is measured, a recipe that is not the release's or has no place for the limits."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidContract(f"recipe {path} cannot be read: {error}") from error
    if document.get("name") != release.name:
        raise InvalidContract(f"recipe must be that of release {release.name}, got {document.get('name')!r}")
    for name in limits:
        if name not in document.get("limits", {}):
            raise InvalidContract(f"recipe {path} must have limits.{name} for a sweep of it to be written there")


def with_recipe_limits(text: str, limits: Mapping[str, int], note: str) -> str:
    """The recipe's text with other values in its [limits] table and `note` as a comment above them."""
    section = SECTION.search(text)
    if section is None:
        raise InvalidContract("recipe must have a [limits] table")
    body = section["body"]
    for name, value in limits.items():
        body, count = re.subn(rf"^({re.escape(name)}\s*=\s*)[^\s#]+", rf"\g<1>{value}", body, flags=re.MULTILINE)
        if count != 1:
            raise InvalidContract(f"recipe must have one line for limits.{name}, got {count}")
    return text[: section.start("body")] + f"# {note}\n" + body + text[section.end("body") :]


def recommend(recipe: Path, out: Path, limits: Mapping[str, int], measured: str) -> None:
    """Write `recipe` with `limits` to `out`, and check that it is a recipe with these limits and no other change."""
    before = recipe.read_text(encoding="utf-8")
    names = " and ".join(limits)
    after = with_recipe_limits(before, limits, f"{names}: the best of a sweep, {measured}")
    wanted = tomllib.loads(before)
    wanted["limits"] |= limits
    if tomllib.loads(after) != wanted:
        raise InvalidContract(
            f"the limits of recipe {recipe} could not be changed alone; change them by hand: {limits}"
        )
    _check(after)
    out.write_text(after, encoding="utf-8")


def _check(text: str) -> None:
    """The build's own check. Raises InvalidRecipe."""
    sys.path.insert(0, str(BUILD))
    try:
        from recipe import Recipe

        Recipe.from_dict(tomllib.loads(text))
    finally:
        sys.path.remove(str(BUILD))
