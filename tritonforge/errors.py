"""Typed errors with a stable code, and the one table that maps a code to Triton and to HTTP.

Every part of the project raises these; the Triton layer, the clients and the command line translate them. An error's
text names the field, the value and the rule that was broken. Tracebacks go to the log, never to a client.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Status:
    """Where an error code lands: `triton` names a member of TritonError, `http` is the status of the answer."""

    triton: str
    http: int


STATUS = {
    "INVALID_ARGUMENT": Status("INVALID_ARG", 400),
    "NOT_FOUND": Status("NOT_FOUND", 404),
    "CANCELLED": Status("CANCELLED", 499),
    "DEADLINE_EXCEEDED": Status("CANCELLED", 504),
    "UNAVAILABLE": Status("UNAVAILABLE", 503),
    "INTERNAL": Status("INTERNAL", 500),
}


class TritonForgeError(Exception):
    """Base of all typed errors; `code` is a key of STATUS and travels in front of the message: `CODE: message`."""

    code = "INTERNAL"

    def __str__(self) -> str:
        return f"{self.code}: {super().__str__()}"


class InvalidRequest(TritonForgeError):
    """The request breaks a rule; the same request will never be accepted."""

    code = "INVALID_ARGUMENT"


class NotFound(TritonForgeError):
    """What the request names does not exist (any more)."""

    code = "NOT_FOUND"


class Overloaded(TritonForgeError):
    """No room now, or the service is draining; the same request may be accepted later."""

    code = "UNAVAILABLE"


class Cancelled(TritonForgeError):
    """The request was cancelled before it finished."""

    code = "CANCELLED"


class DeadlineExceeded(TritonForgeError):
    """The request was not answered within the time that it gave itself."""

    code = "DEADLINE_EXCEEDED"


class EngineFailure(TritonForgeError):
    """The engine could not compute a step; the requests of that step are lost."""

    code = "INTERNAL"


class InvalidRecipe(InvalidRequest):
    """A recipe breaks a rule: unknown key, wrong type, or a value its checkpoint cannot have."""


class InvalidCheckpoint(InvalidRequest):
    """A checkpoint is missing, incomplete or of an unsupported architecture."""


class ReleaseMismatch(TritonForgeError):
    """A release does not match its manifest: a file is changed, missing or foreign."""

    code = "INVALID_ARGUMENT"


class SetupError(TritonForgeError):
    """Something this machine lacks; the message says the remedy in the same line."""

    code = "UNAVAILABLE"
