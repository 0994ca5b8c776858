"""The files of a batch, in the form of OpenAI's Batch API: requests in, answers and errors out, resumable at any line.

Form: https://platform.openai.com/docs/api-reference/batch/request-input and .../request-output
"""

import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tritonforge.errors import InvalidRequest, SetupError

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
SYNC_S = 1.0
"""How old what is not yet on the disk may be, should the machine lose its power; a killed process loses nothing."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the input, without its body: `place` is its number among them, `start` and `size` its bytes.

    `id` is that of its answer: it says what was asked, so that an answer to something else is noticed.
    """

    place: int
    custom_id: str
    url: str
    start: int
    size: int
    id: str


def read_entries(path: Path) -> list[Entry]:
    """Every request of the file. Raises InvalidRequest naming the line that is none, before anything is sent."""
    entries: list[Entry] = []
    seen: set[str] = set()
    start = 0
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    content = _checked(line, f"{path}, line {number}")
                    custom_id = content["custom_id"]
                    if custom_id in seen:
                        raise InvalidRequest(f"{path}, line {number}: custom_id {custom_id!r} must be given only once")
                    seen.add(custom_id)
                    entries.append(Entry(len(entries), custom_id, content["url"], start, len(line), id_of(content)))
                start += len(line)
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}") from None
    if not entries:
        raise InvalidRequest(f"{path} must have at least one request")
    return entries


def body_of(path: Path, entry: Entry) -> dict[str, Any]:
    """The body of an entry's request. Raises SetupError when the file is not the one that was read before."""
    try:
        with open(path, "rb") as file:
            file.seek(entry.start)
            content = json.loads(file.read(entry.size))
            if id_of(content) == entry.id:
                return content["body"]
    except (OSError, ValueError, TypeError, AttributeError):
        pass
    raise SetupError(f"{path} was changed while the batch ran, see {entry.custom_id!r}; the batch resumes from there")


def id_of(content: dict[str, Any]) -> str:
    """The id of the answer to a request: a digest of what it asks, however that was written."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return f"batch_req_{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:24]}"


def _checked(line: bytes, where: str) -> dict[str, Any]:
    try:
        content = json.loads(line)
    except ValueError as error:
        raise InvalidRequest(f"{where}: a request must be a JSON object: {error}") from None
    if not isinstance(content, dict):
        raise InvalidRequest(f"{where}: a request must be a JSON object")
    for key in content:
        if key not in ("custom_id", "method", "url", "body"):
            raise InvalidRequest(f"{where}: unknown key {key!r}")
    custom_id = content.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise InvalidRequest(f"{where}: custom_id must be a text that is not empty, got {custom_id!r}")
    if content.get("method") != "POST":
        raise InvalidRequest(f"{where}: method must be POST, got {content.get('method')!r}")
    if content.get("url") not in URLS:
        raise InvalidRequest(f"{where}: url must be one of {', '.join(URLS)}, got {content.get('url')!r}")
    body = content.get("body")
    if not isinstance(body, dict):
        raise InvalidRequest(f"{where}: body must be a JSON object")
    if body.get("stream"):
        raise InvalidRequest(f"{where}: stream of a request in a batch must be false")
    return content


def line_of(entry: Entry, response: dict[str, Any] | None, error: dict[str, Any] | None) -> bytes:
    """A line of the output: `response` has status_code, request_id and body; `error` when there was none."""
    content = {"id": entry.id, "custom_id": entry.custom_id, "response": response, "error": error}
    return json.dumps(content, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


class Results:
    """The two files of a batch that runs: answers, and errors. One process at a time has them."""

    def __init__(self, out: Path, errors: Path) -> None:
        """Raises SetupError when another process writes them, InvalidRequest when they hold something else."""
        self._files: list[Any] = []
        self.answered: dict[str, str] = {}
        self.failed: dict[str, str] = {}
        self._synced = time.monotonic()
        for path, done in ((out, self.answered), (errors, self.failed)):
            file = self._open(path)
            self._files.append(file)
            done |= _resume(file, path)
        both = self.answered.keys() & self.failed.keys()
        if both:
            raise InvalidRequest(f"{out} and {errors} must not have the same custom_id, got {min(both)!r} in both")

    def check(self, source: Path, entries: list[Entry]) -> None:
        """Raise InvalidRequest, naming one, unless every line that is there is of one of `entries`, as it is now."""
        asked = {entry.custom_id: entry.id for entry in entries}
        for file, done in zip(self._files, (self.answered, self.failed), strict=True):
            for custom_id, answered in done.items():
                if custom_id not in asked:
                    raise InvalidRequest(f"{file.name} is of another batch: {source} has no {custom_id!r}")
                if answered != asked[custom_id]:
                    kept = "choose another file" if done is self.answered else "--retry-errors asks it again"
                    raise InvalidRequest(
                        f"{file.name} has the answer to another request {custom_id!r} than {source} has now; {kept}"
                    )

    @property
    def done(self) -> set[str]:
        """The ids of all that has an answer or an error."""
        return self.answered.keys() | self.failed.keys()

    def write(self, entry: Entry, line: bytes, *, ok: bool) -> None:
        """Add a line; when this returns, the process may be killed. Raises SetupError when it cannot be written."""
        (self.answered if ok else self.failed)[entry.custom_id] = entry.id
        file, left = self._files[0 if ok else 1], line
        try:
            while left:
                left = left[os.write(file.fileno(), left) :]
        except OSError as error:
            raise SetupError(f"{file.name} cannot be written: {error.strerror}; the batch resumes from there") from None
        if time.monotonic() - self._synced >= SYNC_S:
            self._sync()

    def close(self) -> None:
        """Wait for the disk, and let others have the files."""
        self._sync()
        for file in self._files:
            file.close()

    def _sync(self) -> None:
        for file in self._files:
            os.fsync(file.fileno())
        self._synced = time.monotonic()

    def _open(self, path: Path) -> Any:
        try:
            file = os.fdopen(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666), "a+b", buffering=0)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SetupError(f"{path} is being written by another batch; wait for it or end it") from None
        except OSError as error:
            raise SetupError(f"{path} cannot be written: {error.strerror}; choose another file") from None
        return file


def _resume(file: Any, path: Path) -> dict[str, str]:
    """The custom_id and id of the file's whole lines; what a killed process left of one more is cut off."""
    file.seek(0)
    done: dict[str, str] = {}
    size = 0
    for number, line in enumerate(_lines(file), 1):
        if not line.endswith(b"\n"):
            break
        try:
            content = json.loads(line)
            custom_id, answered = content["custom_id"], content["id"]
            if not (isinstance(custom_id, str) and isinstance(answered, str)):
                raise TypeError
        except (ValueError, KeyError, TypeError):
            raise InvalidRequest(
                f"{path}, line {number}, is no line of a batch's output: choose another file"
            ) from None
        if custom_id in done:
            raise InvalidRequest(f"{path}, line {number}: {custom_id!r} is there already; choose another file")
        done[custom_id] = answered
        size += len(line)
    file.truncate(size)
    return done


def _lines(file: Any) -> Iterator[bytes]:
    """The file's lines, through a buffer of its own: the file itself has none."""
    with open(os.dup(file.fileno()), "rb") as reader:
        yield from reader


def set_errors_aside(errors: Path) -> None:
    """Rename the file of errors, so that its requests are asked again and it is kept."""
    if not errors.exists():
        return
    for number in range(1, 1000):
        kept = errors.with_name(f"{errors.stem}.{number}{errors.suffix}")
        with contextlib.suppress(FileExistsError):
            os.link(errors, kept)
            errors.unlink()
            return
    raise SetupError(f"{errors} has been set aside 999 times; remove some of these files")
