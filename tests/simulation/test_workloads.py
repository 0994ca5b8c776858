"""Thousands of random workloads: no token changes, no block leaks, nobody starves, everybody is answered once."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FEATURES = {
    "InvalidRequest",
    "Overloaded",
    "accepted_tokens",
    "cancelled",
    "chunks",
    "copies",
    "failed row",
    "failed step",
    "fairness_preemptions",
    "forks",
    "length",
    "preemptions",
    "prefix_hits",
    "pushed out",
    "rejected_tokens",
    "stop",
}


@pytest.mark.parametrize(("count", "layout"), [(10000, ()), (4000, ("--linear",))], ids=["paged", "linear"])
def test_random_workloads_keep_every_promise_and_reach_every_feature(count, layout):
    """In a process of its own: it forks workers, which this one must not with its threads."""
    script = Path(__file__).resolve().parent / "soak.py"
    done = subprocess.run([sys.executable, script, str(count), *layout], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    tally = json.loads(done.stdout)
    met = {feature for feature in FEATURES if tally.get(feature, 0) >= 100}
    assert met == FEATURES, "the workloads prove nothing about a feature that they do not reach"
