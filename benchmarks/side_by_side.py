"""Our engine loop and our served model beside openvino-genai on the same machine, weights and KV precision.

python -m benchmarks.side_by_side RELEASE [RELEASE ...]   (`make bench` makes the environments and runs it)

Each run of a contestant is a process of its own; contestants take turns within each repeat, so a drift of the machine
meets all of them. Ratios are taken within a repeat. Prints a Markdown table and writes it all as JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from benchmarks.workload import Figures, build_workload

ROOT = Path(__file__).resolve().parent.parent
OURS, SERVED, PEER = "engine loop", "served (llm, gRPC)", "openvino-genai"
DEFAULT = "served, with prompt lookup"
CONTESTANTS = (OURS, SERVED, DEFAULT, PEER)


def command(contestant: str, peer_python: str) -> list[str]:
    """The command line of a contestant, without release and workload."""
    if contestant == PEER:
        return [peer_python, str(ROOT / "benchmarks" / "openvino_genai_pipeline.py")]
    return [sys.executable, "-m", "benchmarks.engine_loop" if contestant == OURS else "benchmarks.served"]


def measure(contestant: str, release: Path, workload: Path, peer_python: str) -> Figures:
    """Run a contestant once; its last line of output holds its figures."""
    arguments = [*command(contestant, peer_python), str(release), str(workload)]
    arguments += ["--speculate"] if contestant == DEFAULT else []
    done = subprocess.run(arguments, cwd=ROOT, env=os.environ, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{contestant} failed on {release}:\n{done.stderr[-2000:]}")
    return Figures(**json.loads(done.stdout.splitlines()[-1]))


def ratio(runs: list[dict[str, Figures]], field: str, first: str, second: str) -> str:
    """Median, least and greatest of first / second within a repeat."""
    ratios = [getattr(run[first], field) / getattr(run[second], field) for run in runs]
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def table(release: str, runs: list[dict[str, Figures]]) -> str:
    """The figures of one release as Markdown: medians over the repeats, and the ratios that matter."""
    lines = [
        f"### {release}: {len(runs)} repeats",
        "",
        "| contestant | batch tok/s | TPOT ms, one stream | TTFT ms, one stream | outside the engine ms |",
        "|---|---|---|---|---|",
    ]
    for contestant in runs[0]:
        columns = defaultdict(list)
        for run in runs:
            for field in ("tokens_per_s", "tpot_ms", "ttft_ms", "outside_engine_ms"):
                columns[field].append(getattr(run[contestant], field))
        cells = [
            "-" if None in values else f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"
            for values in columns.values()
        ]
        lines.append(f"| {contestant} | {' | '.join(cells)} |")
    scaling = statistics.median(run[SERVED].tokens_per_s * run[SERVED].tpot_ms / 1e3 for run in runs)
    return "\n".join(
        [
            *lines,
            "",
            f"- engine loop / openvino-genai, tok/s: {ratio(runs, 'tokens_per_s', OURS, PEER)}",
            f"- engine loop / openvino-genai, TPOT: {ratio(runs, 'tpot_ms', OURS, PEER)}",
            f"- served / openvino-genai in process, tok/s: {ratio(runs, 'tokens_per_s', SERVED, PEER)}",
            f"- the same with prompt lookup: {ratio(runs, 'tokens_per_s', DEFAULT, PEER)}",
            f"- served / engine loop, tok/s: {ratio(runs, 'tokens_per_s', SERVED, OURS)}",
            f"- served batch / served single stream, tok/s: {scaling:.2f}",
            "",
        ]
    )


def write(path: Path, runs: dict[Path, list[dict[str, Figures]]]) -> None:
    """All figures so far as JSON, so that an interrupted benchmark keeps what it measured."""
    plain = {release.name: [{k: vars(v) for k, v in run.items()} for run in taken] for release, taken in runs.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(plain, indent=2), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("releases", nargs="+", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--peer-python", default=str(ROOT / ".venv-bench" / "bin" / "python"))
    parser.add_argument("--out", type=Path, default=ROOT / "artifacts" / "benchmarks" / "side_by_side.json")
    options = parser.parse_args()
    runs = {release: [] for release in options.releases}
    with tempfile.TemporaryDirectory() as folder:
        workload = Path(folder) / "workload.json"
        for repeat in range(options.repeats):
            for release in options.releases:
                build_workload(
                    release / "model_repository" / "tokenizer" / "1" / "tokenizer.json",
                    seed=repeat,
                    concurrency=options.concurrency,
                    prompt_tokens=options.prompt_tokens,
                    max_tokens=options.max_tokens,
                ).write(workload)
                turns = CONTESTANTS if repeat % 2 == 0 else reversed(CONTESTANTS)
                taken = {name: measure(name, release, workload, options.peer_python) for name in turns}
                runs[release].append({name: taken[name] for name in CONTESTANTS})
                write(options.out, runs)
                print(f"repeat {repeat + 1} of {options.repeats}: {release.name} done", file=sys.stderr, flush=True)
    for release, taken in runs.items():
        print(table(release.name, taken), flush=True)


if __name__ == "__main__":
    main()
