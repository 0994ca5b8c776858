"""API keys: a file with their digests, read again when it changes, and written by the command `tritonforge keys`.

A key is `sk-tf-<id>-<secret>`: the id finds the entry, the secret has 256 random bits. Only the SHA-256 of the whole
key is stored; a slow password hash would protect guessable secrets, which these are not.
"""

import contextlib
import fcntl
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tritonforge.errors import InvalidRequest, NotFound
from tritonforge.launch.probe import PROBE_TENANT

log = logging.getLogger(__name__)

FORMAT = 1
_KEY = re.compile(r"sk-tf-([0-9a-f]{12})-[A-Za-z0-9_-]{43}")
_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
_NOBODY = "0" * 64


@dataclass(frozen=True, slots=True)
class Key:
    """What the file holds of a key: never the key itself. Times are ISO 8601 in UTC; `revoked` is None until it is."""

    id: str
    tenant: str
    sha256: str
    created: str
    revoked: str | None = None
    note: str = ""


def read_keys(path: Path) -> dict[str, Key]:
    """Keys by id. Raises InvalidRequest, naming the file, when it is no file of keys."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"its format must be {FORMAT}, got {content['format']!r}")
        keys = {entry["id"]: Key(**entry) for entry in content["keys"]}
        for key in keys.values():
            _check(key)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InvalidRequest(f"{path} is no file of API keys: {error}") from None
    return keys


def _check(key: Key) -> None:
    texts = (key.id, key.tenant, key.sha256, key.created, key.note)
    if not all(isinstance(text, str) for text in texts) or not isinstance(key.revoked, str | None):
        raise ValueError("every value of a key must be a string, and revoked may be null")
    if len(key.sha256) != 64 or not _TENANT.fullmatch(key.tenant):
        raise ValueError(f"the key {key.id!r} has no digest, or no tenant's name")
    if key.tenant == PROBE_TENANT:
        raise ValueError(f"the tenant of the key {key.id!r} must not be {PROBE_TENANT!r}, which is that of probes")


def create_key(path: Path, tenant: str, note: str = "") -> tuple[Key, str]:
    """Add a key for `tenant` to the file, which is made when there is none; returns its entry and the key itself."""
    if not _TENANT.fullmatch(tenant):
        raise InvalidRequest(f"tenant must be 1 to 64 letters, digits, dots, dashes or underscores, got {tenant!r}")
    if tenant == PROBE_TENANT:
        raise InvalidRequest(f"tenant must not be {PROBE_TENANT!r}, which is that of probes")
    with _locked(path):
        keys = read_keys(path) if path.exists() else {}
        key_id = secrets.token_hex(6)
        text = f"sk-tf-{key_id}-{secrets.token_urlsafe(32)}"
        key = Key(key_id, tenant, _digest(text), _now(), None, note)
        _write(path, keys | {key_id: key})
    return key, text


def revoke_key(path: Path, key_id: str) -> Key:
    """Mark a key as revoked. Raises NotFound for an id that the file does not have."""
    with _locked(path):
        keys = read_keys(path)
        if key_id not in keys:
            raise NotFound(f"{path} has no key with the id {key_id!r}")
        key = replace(keys[key_id], revoked=keys[key_id].revoked or _now())
        _write(path, keys | {key_id: key})
    return key


class KeyStore:
    """The keys that are valid now. The file is looked at before each use, so a revoked key is refused at once.

    A file that became unreadable changes nothing: the keys that were read last stay valid, and the log says so.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._keys = read_keys(path)
        self._seen = self._signature()

    def find(self, text: str) -> Key | None:
        """The entry of the key `text`; None for one that is unknown or revoked. Compares in constant time."""
        self._refresh()
        form = _KEY.fullmatch(text)
        key = self._keys.get(form.group(1)) if form else None
        same = hmac.compare_digest(_digest(text), key.sha256 if key else _NOBODY)
        return key if key and same and key.revoked is None else None

    def is_valid(self, key_id: str) -> bool:
        """Whether the key with this id may still be used."""
        self._refresh()
        return key_id in self._keys and self._keys[key_id].revoked is None

    def _refresh(self) -> None:
        seen = self._signature()
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._keys = read_keys(self._path)
        except InvalidRequest as error:
            log.error("%s; the keys that were read before stay valid", error)

    def _signature(self) -> tuple[int, int, int] | None:
        try:
            status = os.stat(self._path)
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Only one command at a time reads and writes the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(path.name + ".lock"), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write(path: Path, keys: dict[str, Key]) -> None:
    """Replace the file at once; only its owner can read it, and the owner stays who it was: the gateway's user."""
    content: dict[str, Any] = {"format": FORMAT, "keys": [asdict(key) for key in keys.values()]}
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=path.name)  # mode 0600
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2) + "\n")
    if path.exists() and (owner := path.stat()).st_uid != os.geteuid():
        os.chown(partial, owner.st_uid, owner.st_gid)
    os.replace(partial, path)
