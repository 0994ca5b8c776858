"""Reads tables of a parsed TOML into frozen dataclasses, strictly. The parts of gateway.toml use it."""

import os
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from tritonforge.errors import InvalidRequest, SetupError

Made = TypeVar("Made")


def table_of(content: Mapping[str, Any], name: str, where: str = "") -> Mapping[str, Any]:
    """The table `name` of `content`, an empty one when it is absent. Raises InvalidRequest for anything else."""
    table = content.get(name, {})
    if not isinstance(table, dict):
        raise InvalidRequest(f"{where}{name} must be a table, got {table!r}")
    return table


def refuse_unknown(where: str, table: Mapping[str, Any], known: list[str] | tuple[str, ...]) -> None:
    """Raise InvalidRequest for a key that is not `known`."""
    for key in table:
        if key not in known:
            raise InvalidRequest(f"{where} has the unknown key {key!r}; known keys: {', '.join(known)}")


def read_into(kind: type[Made], where: str, table: Mapping[str, Any], **given: Any) -> Made:
    """A `kind` (a frozen dataclass that checks its values) from a table; lists become tuples. `given` are not keys."""
    known = [one for one in fields(kind) if one.name not in given]
    refuse_unknown(where, table, [one.name for one in known])
    for one in known:
        if one.default is MISSING and one.default_factory is MISSING and one.name not in table:
            raise InvalidRequest(f"{where} must have the key {one.name!r}")
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    return kind(**given, **values)


def check_number(where: str, name: str, value: Any, *, least: float = 0.0, optional: bool = False) -> None:
    """Raise InvalidRequest unless `value` is a number above `least`; None is fine when it is `optional`."""
    if optional and value is None:
        return
    if type(value) not in (int, float) or not least < value < float("inf"):
        raise InvalidRequest(f"{name} of {where} must be a number above {least:g}, got {value!r}")


def secret_of(where: str, variable: str) -> str:
    """The secret in an environment variable. Raises SetupError, which never tells it, for one that no header may carry:
    the libraries below us would tell it in their own errors.
    """
    secret = os.environ.get(variable)
    if not secret:
        raise SetupError(f"{where} in the variable {variable}; set it")
    if not (secret.isascii() and secret.isprintable() and " " not in secret):
        raise SetupError(f"{where} in the variable {variable}, in ASCII, without spaces or line ends; correct it")
    return secret


def check_names(where: str, name: str, value: Any) -> None:
    """Raise InvalidRequest unless `value` is a tuple of names."""
    if not isinstance(value, tuple) or not all(isinstance(one, str) and one for one in value):
        raise InvalidRequest(f"{name} of {where} must be a list of names, got {value!r}")
