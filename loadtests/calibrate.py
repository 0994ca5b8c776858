"""What the load generator itself adds: its CPU, and the time from a response's sending to its stamp.

    python loadtests/calibrate.py --tokens-per-s 1000
    python loadtests/calibrate.py --tokens-per-s 1000 --gap-ms 20     # all streams in step, as a batching engine sends

Runs the generator as a campaign does, pinned to one core, against a server of known truth on another one, and prints
added latency and CPU. Exit code 0 when p99 is within --limit-ms, else 1: on this machine, with this load, the client
would then be a part of what it measures.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from loadtests.capacity_toml import to_toml  # noqa: E402
from loadtests.metrics import percentile_ns  # noqa: E402
from loadtests.raw_files import read_run  # noqa: E402
from loadtests.records import OK, CampaignRun  # noqa: E402

GAP_MS, TOKENS = 19.7, 100


@dataclass(frozen=True)
class Calibration:
    """Added latency in milliseconds per response, the generator's share of one core, and the rate that came about."""

    tokens_per_s: float
    streams: float
    responses: int
    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float
    client_cpu: float
    ended_ok: bool


def document(tokens_per_s: float, seconds: float) -> dict:
    """A contract of constant arrivals whose answers are kept: each word of them is a time."""
    phases = [
        {"name": "warmup", "rate": tokens_per_s / TOKENS, "seconds": 3.0, "measured": False},
        {"name": "steady", "rate": tokens_per_s / TOKENS, "seconds": seconds},
    ]
    profile = {
        "id": "calibration",
        "data": {"source": "quality", "seed": 1},
        "quality": [{"id": "times", "prompt": "x", "max_tokens": TOKENS, "check": "contains", "expect": ["0"]}],
        "arrivals": {"process": "constant", "seed": 1, "phases": phases},
        "client": {"drain_s": 20.0, "max_in_flight": 100_000},
        "objectives": [{"id": "failed", "metric": "failed_requests", "le": 1}],
    }
    measurement = {"schedule_lag_p99_ms": 1000, "messages_per_s_max": 1e6, "client_cpu_max": 1.0}
    return {
        "schema": "tritonforge.contract/1",
        "name": "calibration",
        "revision": 1,
        "target": {"model": "llm"},
        "measurement": measurement,
        "profiles": [profile],
    }


def added_ns(run: CampaignRun) -> list[int]:
    """From the server's stamp to the client's, of every response of the measured requests that ended ok."""
    part, found = run.profiles[0], []
    start = {shard.shard: shard.t0_ns for shard in part.shards}
    for record in part.records:
        if record.status == OK and record.measured:
            sent = map(int, record.answer.split())
            found += [start[record.shard] + at - then for (at, _), then in zip(record.chunks, sent, strict=True)]
    return found


def calibrate(folder: Path, tokens_per_s: float, seconds: float, gap_ms: float = GAP_MS) -> Calibration:
    """Run one calibration in `folder`; the generator gets the first allowed core, the server another one."""
    cores = sorted(os.sched_getaffinity(0))
    (folder / "calibration.toml").write_text(to_toml(document(tokens_per_s, seconds)), encoding="utf-8")
    server = _pinned([str(ROOT / "loadtests" / "known_server.py"), "--gap-s", str(gap_ms / 1000)], cores[-1])
    try:
        url = f"127.0.0.1:{server.stdout.readline().strip()}"
        command = [str(ROOT / "loadtests" / "campaign.py"), "--contract", str(folder / "calibration.toml")]
        command += ["--url", url, "--tokenizer", str(_tokenizer(folder)), "--out", str(folder / "out")]
        campaign = _pinned(command, cores[0])
        output, _ = campaign.communicate()
        code = campaign.returncode
    finally:
        server.terminate()
        server.wait()
    if not (folder / "out" / "raw.jsonl").exists():
        raise SystemExit(f"the campaign ended with code {code}: {output}")
    return _summary(read_run(folder / "out" / "raw.jsonl"), seconds, gap_ms, ended_ok=code == 0)


def _summary(run: CampaignRun, seconds: float, gap_ms: float, *, ended_ok: bool) -> Calibration:
    added = added_ns(run)
    if not added:
        raise SystemExit("no request of the calibration ended ok")
    p50, p95, p99 = (percentile_ns(added, quantile) / 1e6 for quantile in (0.5, 0.95, 0.99))
    (shard,) = run.profiles[0].shards
    rate = len(added) / seconds
    return Calibration(
        tokens_per_s=round(rate, 1),
        streams=round(rate * gap_ms / 1000, 1),
        responses=len(added),
        p50_ms=round(p50, 3),
        p95_ms=round(p95, 3),
        p99_ms=round(p99, 3),
        max_ms=round(max(added) / 1e6, 3),
        client_cpu=round(shard.cpu_ns / shard.wall_ns, 4),
        ended_ok=ended_ok,
    )


def _pinned(command: list[str], core: int) -> subprocess.Popen:
    """A Python program of this repository on one core; its children stay there."""
    pin = f"import os, runpy, sys; os.sched_setaffinity(0, {{{core}}}); sys.argv = sys.argv[1:]; "
    pin += "runpy.run_path(sys.argv[0], run_name='__main__')"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", pin, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=environment,
    )  # fmt: skip


def _tokenizer(folder: Path) -> Path:
    """A tokenizer of words: the calibration's prompt is one."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens-per-s", type=float, default=1000.0)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument(
        "--gap-ms", type=float, default=GAP_MS, help="between two tokens of a stream (default %(default)s)"
    )
    parser.add_argument("--limit-ms", type=float, default=3.0, help="of the added latency at p99 (default 3)")
    parser.add_argument("--out", type=Path, help="keep contract, records and calibration.json here")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.out or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        found = calibrate(folder, options.tokens_per_s, options.seconds, options.gap_ms)
        (folder / "calibration.json").write_text(json.dumps(vars(found), indent=1) + "\n", encoding="utf-8")
    print(
        f"{found.tokens_per_s:g} tokens/s, one a response, in {found.streams:g} streams: the generator adds "
        f"{found.p50_ms:g} ms at p50, {found.p95_ms:g} at p95, {found.p99_ms:g} at p99, {found.max_ms:g} at most, "
        f"and takes {found.client_cpu:.1%} of one core ({found.responses} responses)"
    )
    return int(not found.ended_ok or found.p99_ms > options.limit_ms)


if __name__ == "__main__":
    sys.exit(main())
