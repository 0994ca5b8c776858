"""Ids of requests: ours, and the client's own, which is only kept."""

import uuid


def new_request_id() -> str:
    """One that nothing else has."""
    return f"req_{uuid.uuid4().hex}"


def printable(text: str) -> str:
    """A client's id, if it can stand in any log; else nothing."""
    return text if len(text) <= 128 and text.isprintable() and text.isascii() else ""
