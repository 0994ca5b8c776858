"""Repeats of a load: the same phases again with seeds of their own, pooled where that is exact, widened where not."""

from dataclasses import replace

import numpy as np
import pytest
from slo_support import MS, SECOND, broken, change_part, delayed, failing, make_run, statuses

from loadtests.binomial import PASS
from loadtests.bootstrap import block_rate, decide_interval, interval_of
from loadtests.capacity_contract import at_rate
from loadtests.contract_toml import parse_contract
from loadtests.fields import InvalidContract
from loadtests.lint import lint, load_of
from loadtests.page import render_page
from loadtests.repeats import between, by_repeat, student_t
from loadtests.report import build_report
from loadtests.schedule import build_schedule
from loadtests.verdict import judge

LENGTH_NS = 3 * SECOND


def with_repeats(document, repeats=3):
    return parse_contract(document | {"statistics": {"repeats": repeats}})


def test_the_first_repeat_is_the_load_without_repeats_and_the_others_are_their_own(document):
    """Wrong: the same arrivals again would be no independent sample; other first ones no comparable campaign."""
    once = build_schedule(parse_contract(document).profiles[0])
    slots = build_schedule(with_repeats(document).profiles[0])
    assert slots[: len(once)] == once
    assert slots == build_schedule(with_repeats(document).profiles[0])
    parts = [[s for s in slots if s.at_ns // LENGTH_NS == k] for k in range(3)]
    times = [[s.at_ns - k * LENGTH_NS for s in part] for k, part in enumerate(parts)]
    assert len({tuple(part) for part in times}) == 3
    assert all({s.phase for s in part} == {"warmup", "steady"} for part in parts)
    assert [s.index for s in slots] == list(range(len(slots)))


def test_a_contract_without_repeats_keeps_its_hash(document, contract):
    """Wrong: stored records and baselines would be of "another contract" for a key that says nothing."""
    assert with_repeats(document, 1).sha256 == contract.sha256
    assert with_repeats(document, 2).sha256 != contract.sha256
    document["profiles"][0]["repeats"] = 1
    assert with_repeats(document, 3).sha256 == contract.sha256


def test_faults_and_batches_are_not_repeated_in_silence(document):
    document["profiles"][0]["fault"] = {"action": "kill_worker", "at_s": 1.0}
    with pytest.raises(InvalidContract, match=r"profiles\[0\]\.repeats must be 1 in a profile with a fault"):
        with_repeats(document)
    document["profiles"][0]["repeats"] = 1
    assert with_repeats(document).profiles[0].arrivals.repeats == 1


def test_a_trace_is_sent_again(document):
    phases = [{"name": "steady", "seconds": 2.0}]
    trace = [[0.1 * k, 8 + k, 6] for k in range(20)]
    document["profiles"][0]["arrivals"] = {"process": "trace", "seed": 1, "phases": phases, "trace": trace}
    slots = build_schedule(with_repeats(document, 2).profiles[0])
    assert [s.at_ns for s in slots[20:]] == [s.at_ns + 2 * SECOND for s in slots[:20]]
    assert [s.prompt_tokens for s in slots] == [8 + k for k in range(20)] * 2


def test_repeats_are_pooled_and_told_apart(document):
    """Wrong: a limit that a third of the time decides would need three times the run, or hide a repeat that differs."""
    contract = with_repeats(document)
    run = make_run(contract, lambda r: delayed(r, 100) if r.scheduled_ns >= 2 * LENGTH_NS else r)
    verdict = judge(contract, run)
    assert verdict.exit_code == 0, verdict.reasons
    found = {result.objective.id: result for result in verdict.profiles[0].results}
    assert found["ttft"].n == sum(r.measured for r in run.profiles[0].records)
    assert found["ttft"].repeats == (31.0, 31.0, 131.0)
    assert found["goodput"].repeats == (1, 1, 1)
    assert len(found["rate"].repeats) == 3
    parts = by_repeat(contract.profiles[0].arrivals, run.profiles[0].records)
    tokens = [sum(r.measured for r in part) * 6 / 2.5 for part in parts]
    assert found["rate"].repeats == pytest.approx(tokens, rel=0.05)
    report = build_report(contract, run, verdict)
    assert "each repeat" in render_page(report, contract, run)
    assert "31 31 131" in render_page(report, contract, run)


def test_a_repeat_that_went_wrong_fails_the_whole(document):
    """Wrong: two good repeats would outvote a bad one, or dilute the client's own standstill in it."""
    contract = with_repeats(document)
    run = make_run(contract, lambda r: failing(r) if r.scheduled_ns < LENGTH_NS else r)
    assert statuses(judge(contract, run))["ttft"] == "FAIL"
    honest = make_run(contract)
    [shard] = honest.profiles[0].shards
    long = replace(shard, wall_ns=60 * SECOND, in_flight=(), lag_ns=((MS,) * 900 + (300 * MS,)))
    assert broken(judge(contract, change_part(honest, shards=(long,)))) == ["lag"]
    once = parse_contract(document)
    alone = change_part(make_run(once), shards=(replace(long, **_same(once)),))
    assert broken(judge(once, alone)) == []


def _same(contract):
    shard = make_run(contract).profiles[0].shards[0]
    return {"schedule_sha256": shard.schedule_sha256, "requests": shard.requests}


def test_the_shortest_run_counts_all_repeats(document):
    """Wrong: lint would refuse a contract that its repeats decide."""
    document["profiles"][0]["arrivals"]["phases"][1]["rate"] = 12.0
    document["profiles"][0]["objectives"] = document["profiles"][0]["objectives"][:1]
    contract = parse_contract(document)
    with pytest.raises(InvalidContract, match="needs at least 59 requests"):
        lint(contract, contract.profiles[0])
    contract = with_repeats(document)
    [need] = lint(contract, contract.profiles[0])
    assert need.has >= 59
    assert load_of(contract, contract.profiles[0])["seconds"] == 9


def test_a_search_for_capacity_has_no_repeats(document):
    document["statistics"] = {"repeats": 3}
    trial = parse_contract(at_rate(document, "small", 30.0, seed=1, min_seconds=3.0))
    assert trial.profiles[0].arrivals.repeats == 1


def test_students_t():
    """Golden values of the tables, one-sided 95% and 99%."""
    assert [round(student_t(0.95, df), 3) for df in (1, 2, 3, 4, 9, 30)] == [6.314, 2.920, 2.353, 2.132, 1.833, 1.697]
    assert [round(student_t(0.99, df), 3) for df in (1, 2, 5)] == [31.821, 6.965, 3.365]


def test_a_rate_that_differs_between_repeats_passes_at_its_limit_in_at_most_one_run_of_twenty():
    """Wrong: slices of one repeat share its luck; judged by them alone, such a service passes far too often."""
    runs, rng, noise = 1000, np.random.default_rng(11), 3 * (0.05 * 0.95 / 1000) ** 0.5
    means = rng.normal(30, 3, (runs, 3))
    slices = rng.poisson(means[:, :, None], (runs, 3, 10)) * 20
    by_slices = both = 0
    for run, blocks in enumerate(slices.tolist()):
        value, draw = sum(map(sum, blocks)) / 30, block_rate(blocks, 30.0)
        low, high = interval_of(draw, value, count=10, seed=str(run), resamples=100, alpha=0.05)
        reach = between([sum(block) / 10 for block in blocks], 0.95)
        by_slices += decide_interval(low, high, le=None, ge=600.0) == PASS
        both += decide_interval(min(low, *reach), max(high, *reach), le=None, ge=600.0) == PASS
    assert by_slices / runs > 0.10
    assert both / runs <= 0.05 + noise
    assert both / runs >= 0.01  # and it does decide
