"""The server's own account of a run against what the client saw: counters, versions, token counts, phases.

`check_profile` of validity calls these; each answer's statistics came with its last response. Pure functions.
"""

from collections.abc import Callable, Iterator, Sequence

from loadtests import metrics
from loadtests.checks import Check, issued, limited
from loadtests.contract import Contract, Profile
from loadtests.records import OK, ProfileRun, Record
from tritonforge.errors import Overloaded


def counters_agree(contract: Contract, run: ProfileRun) -> Check:
    """The server counted at least all ok requests, and at most all issued, where a failed one may count twice.

    A server that crashed and was started again has forgotten its counters. That does not hide the failures it caused.
    """
    if not run.server:
        return Check("counters", None, "the server offers no counters")
    before, after = run.server["before"], run.server["after"]
    counted = sum(after.values()) - sum(before.values())
    ok = sum(record.status == OK for record in run.records)
    sent = sum(1 + len(record.attempts) for record in issued(run))
    tolerance = contract.measurement.counter_mismatch_max
    good = ok * (1 - tolerance) <= counted <= (2 * sent - ok) * (1 + tolerance)
    if restarted(before, after, run.records, short=counted < ok * (1 - tolerance)):
        return Check("counters", None, "not applicable: the server restarted, and forgot its counters")
    text = f"the server counted {counted} requests, the client issued {sent}, {ok} ok"
    return Check("counters", good, text + ("" if good else ": somebody else used it, or requests were lost"))


def restarted(before: dict[str, int], after: dict[str, int], records: Sequence[Record], *, short: bool) -> bool:
    """True when lost counts are a crash that clients saw, too: requests failed, and a counter runs backwards.

    A young server counts on from 0 past what it had: then the sum is `short`, and a client found nobody at the port.
    Without a failed request no crash was seen: the counts are then somebody else's, or of another server.
    """
    failed = [record for record in records if record.sent_ns is not None and record.status != OK]
    backwards = any(after.get(name, 0) < count for name, count in before.items())
    return bool(failed) and (backwards or (short and any(record.code == Overloaded.code for record in failed)))


def one_model_version(contract: Contract, run: ProfileRun) -> Check:
    """All answers came from one version, the expected one. A server that never answered has none: that is a failure."""
    found = sorted({record.model_version for record in run.records if record.model_version})
    wanted = contract.target.expect.model_version
    if not found:
        return Check("model_version", None, "no answer told its model version")
    good = len(found) <= 1 if wanted is None else found == [wanted]
    rule = "" if good else ", must be one version" + (f": {wanted}" if wanted else "")
    return Check("model_version", good, f"answers came from version {', '.join(found)}{rule}")


def statistics_agree(contract: Contract, profile: Profile, run: ProfileRun) -> Iterator[Check]:
    """Token counts, phases and cache use that the server reports with each answer, against what the client saw."""
    limits = contract.measurement
    ok = [record for record in run.records if record.status == OK and record.measured]
    told = [record for record in run.records if record.statistics is not None and record.measured]
    if not ok and not told:
        yield Check("statistics", None, "no request ended ok")
        return

    def share(rule: Callable[[Record], bool]) -> float:
        return sum(map(rule, told)) / len(told) if told else 0.0

    matched = sum(record.statistics is not None for record in ok) / len(ok) if ok else 1.0
    yield limited("statistics", "share of ok answers with them:", matched, limits.statistics_matched_min, at_least=True)
    wrong_prompt = share(lambda r: not r.item and r.statistics["prompt_tokens"] != r.prompt_tokens)
    yield limited("prompt_tokens", "share the server counts otherwise:", wrong_prompt, limits.prompt_token_mismatch_max)
    wrong_output = share(lambda r: r.status == OK and r.statistics["completion_tokens"] != r.received_tokens)
    yield limited("output_tokens", "share the server counts otherwise:", wrong_output, limits.output_token_mismatch_max)
    if profile.data.source == "synthetic" and not profile.data.shared_prefix_tokens:
        prompt = sum(record.prompt_tokens for record in told)
        cached = sum(record.statistics["cached_tokens"] for record in told) / prompt if prompt else 0.0
        yield limited("prefix_cache", "share of prompt tokens from the cache:", cached, limits.prefix_cached_max)
    impossible = share(lambda r: _impossible(r, limits.residual_min_ms))
    rule = f"share of answers whose server phases exceed what the client saw by over {-limits.residual_min_ms:g} ms:"
    yield limited("phases", rule, impossible, limits.residual_violations_max)
    yield from _beyond_the_account(contract, ok, told)


def _beyond_the_account(contract: Contract, ok: Sequence[Record], told: Sequence[Record]) -> Iterator[Check]:
    """What lies between server and client, and how many tokens a response carries: limits that a contract may set."""
    limits = contract.measurement
    residuals = [value for record in told if (value := metrics.residual_ttft_ns(record)) is not None]
    beyond = (metrics.percentile_ns(residuals, 0.95) or 0) / 1e6
    rule = "p95 of TTFT beyond the server's own account (network, front end, client), ms:"
    yield limited("residual", rule, beyond, limits.residual_ttft_p95_ms)
    received = sum(record.received_tokens for record in ok)
    ratio = sum(len(record.chunks) for record in ok) / received if received else 1.0
    yield limited("batch_ratio", "responses with tokens to tokens:", ratio, limits.batch_ratio_min, at_least=True)


def _impossible(record: Record, residual_min_ms: float) -> bool:
    """True when the server's phases are negative, or add up to more than the client waited."""
    if any(value < 0 for value in record.statistics.values()):
        return True
    residuals = (metrics.residual_ttft_ns(record), metrics.residual_e2e_ns(record))
    return any(residual is not None and residual < residual_min_ms * 1e6 for residual in residuals)
