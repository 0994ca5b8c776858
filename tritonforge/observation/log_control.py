"""The file that changes a decoder's logging while it serves: `tritonforge log` writes it, the decoder heeds it.

It lies in the temporary folder, which is open to all: only a file of the same user, or of root, says anything.
Standard library only.
"""

import json
import os
from pathlib import Path
from typing import Any

from tritonforge.launch.state_file import is_trusted
from tritonforge.observation.observation import LEVELS

_KEYS = {"level", "content"}


def changed_ns(path: Path) -> int | None:
    """When the file was written; None without one, and for one that is not trusted."""
    try:
        stat = path.stat(follow_symlinks=False)
    except OSError:
        return None
    return stat.st_mtime_ns if is_trusted(stat) else None


def read_control(path: Path) -> dict[str, Any]:
    """What the file changes: `level` and `content`, or one of them.

    Raises PermissionError for a file that is not trusted, other OSErrors when it cannot be read, and ValueError when it
    has no meaning.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), encoding="utf-8") as file:
        if not is_trusted(os.fstat(file.fileno())):
            raise PermissionError("it is no file of this user")
        wanted = json.loads(file.read())
    if not isinstance(wanted, dict) or set(wanted) - _KEYS:
        raise ValueError(f"it must hold a JSON object with keys of {sorted(_KEYS)}, got {wanted}")
    if wanted.get("level", LEVELS[0]) not in LEVELS or not isinstance(wanted.get("content", False), bool):
        raise ValueError(f"level must be one of {', '.join(LEVELS)} and content a boolean, got {wanted}")
    return wanted
