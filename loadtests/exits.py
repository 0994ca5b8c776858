"""How an error ends a campaign or a Locust test: what is said, which exit code. 1 is only for broken promises."""

import errno
import sys
import traceback

from loadtests.records import InvalidRecords
from tritonforge.errors import ReleaseMismatch, SetupError, TritonForgeError

FAILED, USAGE, INVALID, UNREACHABLE, INTERRUPTED = 1, 2, 3, 5, 130
LOST = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What a disk says when it does not take what was measured."""


def exit_code_of(error: Exception) -> int:
    """2 for what the user wrote, 3 for files that are not what they say, 5 for a target that cannot be loaded.

    An error without a type is this verifier's own: it says nothing about the service, which is 3 as well.
    """
    if isinstance(error, ReleaseMismatch | InvalidRecords) or (isinstance(error, OSError) and error.errno in LOST):
        return INVALID
    if isinstance(error, SetupError):
        return UNREACHABLE
    return USAGE if isinstance(error, TritonForgeError | OSError) else INVALID


def refuse(error: Exception) -> int:
    """Say what is wrong on stderr, in one line unless it is this verifier's own fault; return the exit code."""
    if isinstance(error, TritonForgeError):
        print(error, file=sys.stderr, flush=True)
    elif isinstance(error, OSError):
        code = "INTERNAL: the records or the report cannot be kept" if error.errno in LOST else "INVALID_ARGUMENT"
        print(f"{code}: {error}", file=sys.stderr, flush=True)
    else:
        traceback.print_exception(error)
    return exit_code_of(error)
