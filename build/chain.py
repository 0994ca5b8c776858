"""Whether finished stages belong together: made from each other, and as the recipe says.

The stages that take other stages' folders ask it, because those folders may come from anywhere. It reads records only.
"""

from collections.abc import Mapping
from typing import Any

from stage import Done

from tritonforge.errors import ReleaseMismatch
from tritonforge.release import canonical_json


def check_inputs(part: Done, origins: Mapping[str, Done]) -> None:
    """ReleaseMismatch when `part` was made from another stage than the one of that name in `origins`."""
    for name, origin in origins.items():
        expected = part.record["inputs"].get(name)
        if expected is not None and expected != origin.digest:
            raise ReleaseMismatch(f"the {part.record['stage']} stage was made from another {name} than {origin.folder}")


def check_settings(part: Done, wanted: Mapping[str, Any], recipe_name: str) -> None:
    """ReleaseMismatch names the first setting of `part` that is not what the recipe gives (`wanted`).

    Values are compared as JSON: a record that was just made holds tuples where one that was read holds lists.
    """
    found = part.record["settings"]
    for key in {**wanted, **found}:
        if canonical_json([found.get(key)]) != canonical_json([wanted.get(key)]):
            raise ReleaseMismatch(
                f"the {part.record['stage']} stage in {part.folder} was made with {key} {found.get(key)!r}, "
                f"recipe {recipe_name} gives {wanted.get(key)!r}"
            )
