"""What finished requests add to the metrics: the right durations, only of answers that ended well, in given buckets."""

import json

import pytest

from tritonforge.errors import NotFound, ReleaseMismatch
from tritonforge.recorder import HISTOGRAMS, VARIABLE, Recorder, load_buckets

STATISTICS = {
    "queue_us": 1000,
    "prefill_us": 20_000,
    "first_emit_us": 500,
    "decode_us": 90_000,
    "decode_steps": 9,
    "completion_tokens": 10,
}


def test_durations_are_seconds_of_the_phases_they_are_named_after():
    recorder = Recorder()
    recorder.ended("length", STATISTICS, 12_000.0)
    counts, observed = recorder.take()
    assert counts == {"length": 1}
    assert dict(observed) == pytest.approx(
        {
            "tritonforge_ttft_seconds": 0.0215,
            "tritonforge_tpot_seconds": 0.010,
            "tritonforge_e2e_seconds": 0.111,
            "tritonforge_max_stall_seconds": 0.012,
            "tritonforge_queue_seconds": 0.001,
            "tritonforge_prefill_seconds": 0.020,
            "tritonforge_first_emit_seconds": 0.0005,
            "tritonforge_decode_step_seconds": 0.010,
        }
    )
    assert recorder.take() == ({}, [])


def test_one_token_has_no_tpot_and_no_stall():
    recorder = Recorder()
    recorder.ended("stop", {**STATISTICS, "completion_tokens": 1, "decode_steps": 0, "decode_us": 0}, None)
    names = {name for name, _ in recorder.take()[1]}
    assert len(names) == len(HISTOGRAMS) - 3
    assert not names & {"tritonforge_tpot_seconds", "tritonforge_max_stall_seconds", "tritonforge_decode_step_seconds"}


def test_what_did_not_end_well_is_counted_and_not_timed():
    """Wrong: fast failures would make latencies look good; a client's own mistake would burn the error budget."""
    recorder = Recorder()
    recorder.ended("cancelled", STATISTICS, 1.0)
    for code in ("INTERNAL", "DEADLINE_EXCEEDED", "UNAVAILABLE", "INVALID_ARGUMENT", "CANCELLED"):
        recorder.failed(code)
    assert recorder.take() == ({"cancelled": 2, "error": 2}, [])


def test_given_buckets_replace_the_default_ones_of_their_family(tmp_path, monkeypatch):
    path = tmp_path / "buckets.json"
    path.write_text(json.dumps({"tritonforge_ttft_seconds": [0.4, 1.5]}))
    monkeypatch.setenv(VARIABLE, str(path))
    buckets = load_buckets()
    assert buckets["tritonforge_ttft_seconds"] == [0.4, 1.5]
    assert set(buckets) == {family.name for family in HISTOGRAMS} and len(buckets["tritonforge_tpot_seconds"]) > 10


@pytest.mark.parametrize("content", ['{"tritonforge_ttft": [1]}', '{"tritonforge_ttft_seconds": [2, 1]}', "[1]", "{"])
def test_wrong_buckets_are_refused_by_file(tmp_path, monkeypatch, content):
    path = tmp_path / "buckets.json"
    path.write_text(content)
    monkeypatch.setenv(VARIABLE, str(path))
    with pytest.raises(ReleaseMismatch, match=r"buckets\.json"):
        load_buckets()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "none.json"))
    with pytest.raises(NotFound, match=r"none\.json cannot be read"):
        load_buckets()
