"""What a check of the measurement is, and the two ways to make one: a limit and an equality. Pure."""

from dataclasses import dataclass

from loadtests.records import ProfileRun, Record


@dataclass(frozen=True)
class Check:
    """One check of the measurement: `text` says what was found and, when it is broken, which rule it broke.

    `ok` is None when the check had nothing to look at, which breaks nothing.
    """

    name: str
    ok: bool | None
    text: str


def equal(name: str, wanted: str, found: str | None) -> Check:
    """A check that a fact is the wanted one; an unknown fact is not."""
    same = wanted == found
    return Check(name, same, f"{name} is {found}" + ("" if same else f", the contract says {wanted}"))


def limited(name: str, what: str, value: float, limit: float, *, at_least: bool = False) -> Check:
    """A check of `value` against its limit: at most `limit`, or at least."""
    ok = value >= limit if at_least else value <= limit
    side = "at least" if at_least else "at most"
    return Check(name, ok, f"{what} {value:.6g}" + ("" if ok else f", must be {side} {limit:g}"))


def issued(run: ProfileRun) -> list[Record]:
    """The requests that were sent, whatever became of them."""
    return [record for record in run.records if record.sent_ns is not None]


def first_sent_ns(record: Record) -> int:
    """When a request was first sent: of one that was retried, its first attempt."""
    return record.attempts[0][0] if record.attempts else record.sent_ns
