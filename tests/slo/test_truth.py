"""The load generator against a server of known truth: what it measures is what the server itself timed."""

import subprocess
import sys

import pytest
from slo_campaigns import CAMPAIGN, ENVIRONMENT, document_with, run_campaign
from slo_stub import Behaviour, Stub

from loadtests import metrics
from loadtests.raw_files import read_run
from loadtests.schedule import Slot
from loadtests.streams import Stream, build_request, on_channel, open_channel


def cost_of_a_bare_call() -> float:
    """Milliseconds from sending to the first token that the server does not account for: the least disturbed tenth."""
    costs = []
    with Stub() as stub, open_channel(stub.url) as channel:
        for index in range(40):
            slot = Slot(index, 0, "bare", True, 2, 6)
            stream = Stream(request=build_request("llm", slot, "two words", f"bare-{index}"), wanted_tokens=6)
            ending = stream.run(on_channel(channel), 10)
            costs.append((stream.chunks[0][0] - stream.sent_ns) / 1e6 - ending.statistics["prefill_us"] / 1e3)
    return sorted(costs)[4]


@pytest.mark.parametrize("jitter", [0.0, 0.8])
def test_known_truth_is_measured(tmp_path, tokenizer, jitter):
    """TTFT and TPOT within 2 ms or 5% of what the server itself timed; the records can be judged again.

    A busy machine only makes a chunk late, so no TTFT is below the truth; a late first chunk shortens TPOT, a late last
    one lengthens it. The least disturbed tenth shows the client's own error. What a bare call costs, with one request
    at a time and no Locust, is the machine's and gRPC's: it is taken off.
    """
    document = document_with(rate=15.0, seconds=5.0, output_tokens={"dist": "constant", "value": 12})
    outcome = run_campaign(tmp_path, tokenizer, Behaviour(jitter=jitter), document)
    assert outcome.exit_code == 0, outcome.report["verdict"]
    records = [record for record in read_run(tmp_path / "raw.jsonl").profiles[0].records if record.measured]
    assert len(records) >= 59
    ttft = [(metrics.ttft_ns(r) / 1e6, r.statistics["prefill_us"] / 1e3) for r in records]
    tpot = [(metrics.tpot_ns(r) / 1e6, r.statistics["decode_us"] / 1e3 / r.statistics["decode_steps"]) for r in records]
    assert min(measured - true for measured, true in ttft) >= -2.0
    for pairs, bare in ((ttft, cost_of_a_bare_call()), (tpot, 0.0)):
        errors = sorted(abs(measured - true - bare) for measured, true in pairs)
        assert errors[len(errors) // 10] <= max(2.0, 0.05 * pairs[0][1])
    before = (tmp_path / "report.json").read_bytes()
    again = subprocess.run(
        [sys.executable, CAMPAIGN, "--recompute", str(tmp_path / "raw.jsonl")],
        env=ENVIRONMENT,
        capture_output=True,
        check=False,
    )
    assert again.returncode == 0
    assert (tmp_path / "report.json").read_bytes() == before
    assert outcome.stub.open == 0
