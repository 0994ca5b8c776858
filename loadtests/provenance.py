"""Are these the records of this contract, of one run, unchanged, and of the service that the contract speaks of? Pure.

The verdict calls `check_identity` once for a whole campaign; a broken check makes everything INVALID.
"""

from collections.abc import Iterator

from loadtests.checks import Check, equal
from loadtests.contract import Contract
from loadtests.records import CampaignRun, ProfileRun

START_SPREAD_NS = 1_000_000_000
"""Workers that start further apart than this send another load than the contract's: less at any moment."""


def check_identity(contract: Contract, run: CampaignRun) -> tuple[Check, ...]:
    """Is what was measured what the contract speaks of? A fact that is expected but unknown is a mismatch.

    The release's digest is what the server tells, which must be that of the folder given to the campaign, if one was,
    and must stay it: before and after each profile. A server that tells none is taken at the word of who gave the
    folder.
    """
    header = run.header
    found, expect = header.get("identity", {}), contract.target.expect
    checks = [equal("contract", contract.sha256, header.get("contract_sha256"))]
    told, given = found.get("release_digest"), found.get("given_release_digest")
    if told and given:
        same = "" if told == given else f", the folder given holds {given}"
        checks.append(Check("served_release", not same, f"the server serves {told}{same}"))
    if expect.release_digest is not None:
        name = "release_digest" if told else "release_digest of the folder given (the server tells none)"
        checks.append(equal(name, expect.release_digest, told or given))
    if expect.server_version is not None:
        checks.append(equal("server_version", expect.server_version, found.get("server_version")))
    return (*checks, *_unchanged(run), *_of_one_run(contract, run), *_of_one_release(told, run))


def _unchanged(run: CampaignRun) -> Iterator[Check]:
    """The file is the one that the campaign closed: its seal is the digest of all before it."""
    if run.header.get("sealed"):
        text = f"the records are those that the campaign wrote, sha256 {run.sha256}"
        if run.sha256 is None:
            text = "the records were changed, cut short or added to after the campaign wrote them"
        yield Check("records_file", run.sha256 is not None, text)


def _of_one_run(contract: Contract, run: CampaignRun) -> Iterator[Check]:
    """Ids of requests begin with the run's: another campaign's records in the same folder are not this one's."""
    run_id = run.header.get("run_id")
    foreign = [
        record.request_id
        for part in run.profiles
        for record in part.records
        if record.request_id.partition(".")[0] != f"{run_id}-{part.profile}-{record.index}"
    ]
    if run_id is not None and foreign:
        yield Check("run", False, f"{len(foreign)} records are not of run {run_id}, the first is {foreign[0]}")
    for part in run.profiles:
        others = {s.contract_sha256 for s in part.shards} - {"", contract.sha256}
        if others:
            yield Check("run", False, f"{part.profile}: a worker read another contract, sha256 {min(others)}")


def _of_one_release(told: str | None, run: CampaignRun) -> Iterator[Check]:
    for part in run.profiles:
        sides = (part.server or {}).get("release") or {}
        others = [f"{side} it, {digest}" for side, digest in sorted(sides.items()) if digest and digest != told]
        if others:
            text = f"{part.profile}: the server served another release {' and '.join(others)}; it was asked as {told}"
            yield Check("served_release", False, text)


def started_together(run: ProfileRun) -> Check:
    """Each worker says how long after the common start it began to walk its shard."""
    late = [shard.start_late_ns for shard in run.shards]
    spread = max(late, default=0) - min(late, default=0)
    good = spread <= START_SPREAD_NS
    rule = "" if good else f", must be at most {START_SPREAD_NS / 1e9:g} s: the load was another one"
    return Check("start", good, f"the workers started within {spread / 1e9:.3g} s of each other{rule}")
