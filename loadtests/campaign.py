"""Measures a served model against its contract and says whether it passed.

    python loadtests/campaign.py --contract loadtests/contracts/demo.toml --url 127.0.0.1:8001 --release DIR
    python loadtests/campaign.py --recompute artifacts/reports/demo/raw.jsonl
    python loadtests/campaign.py --recompute artifacts/reports/demo/raw.jsonl --explain short-short.ttft
    python loadtests/campaign.py --diff before/raw.jsonl after/raw.jsonl

Exit codes: 0 passed, 1 failed, 2 usage or contract error, 3 measurement invalid or verifier broken, 4 undecided,
5 target unreachable, 130 interrupted. The load runs in a Locust process per profile; this one asks, merges and judges.
"""

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # not this folder: its modules are `loadtests.x`

from loadtests.contract import Contract  # noqa: E402
from loadtests.contract_toml import load_contract  # noqa: E402
from loadtests.exits import FAILED, INTERRUPTED, INVALID, refuse  # noqa: E402
from loadtests.explain import explain  # noqa: E402
from loadtests.lint import lint, load_of  # noqa: E402
from loadtests.raw_files import read_run  # noqa: E402
from loadtests.regression import (  # noqa: E402
    WORSE,
    baseline_of,
    compare,
    not_compared,
    read_baseline,
    regressions,
    table_of,
    untrusted,
    write_baseline,
)
from loadtests.report_text import table  # noqa: E402
from loadtests.runs import Run, recompute, report_of  # noqa: E402
from loadtests.target import inspect, server_state  # noqa: E402

PROGRESS = "progress: "
STOP_S = 10.0


def parse_args(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contract", type=Path, help="contract file (TOML)")
    parser.add_argument("--url", default="127.0.0.1:8001", help="gRPC endpoint (default %(default)s)")
    parser.add_argument(
        "--release", type=Path, help="folder of the release that is served: named in the report, its tokenizer used"
    )
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json, when there is no release folder")
    parser.add_argument("--http-url", help="HTTP endpoint, for profiles over http-sse (default 127.0.0.1:8000)")
    parser.add_argument("--metrics-url", help="metrics endpoint: the engine's own counts are compared with the records")
    parser.add_argument("--server-pid", type=int, help="process that serves, for its memory and for faults")
    parser.add_argument("--out", type=Path, help="report folder (default artifacts/reports/<contract name>)")
    parser.add_argument("--profile", help="run only this profile of the contract")
    parser.add_argument("--salt", help="repeat the prompts of an earlier run: its salt")
    parser.add_argument("--lint", action="store_true", help="check the contract, print what it takes, and stop")
    parser.add_argument("--baseline", type=Path, help="file to compare with: what got worse is a FAIL (exit code 1)")
    parser.add_argument("--max-worse", type=float, default=0.1, help="share by which it may be worse (default 0.1)")
    parser.add_argument("--write-baseline", type=Path, help="keep this run as a baseline")
    parser.add_argument("--diff", type=Path, nargs=2, metavar="RAW", help="compare two runs of one contract, and stop")
    parser.add_argument("--explain", metavar="PROFILE.OBJECTIVE", help="with --recompute: why it came out so")
    parser.add_argument("--recompute", type=Path, metavar="RAW", help="judge the records of an earlier run again")
    options = parser.parse_args(arguments)
    if options.explain and not options.recompute:
        parser.error("--explain needs --recompute RAW")
    if options.contract is None:
        earlier = options.recompute or (options.diff and options.diff[0])
        if earlier is None:
            parser.error("--contract is needed")
        options.contract = earlier.parent / "contract.toml"
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run one command; every way it can end has its exit code, and only a broken promise has 1."""
    options = parse_args(arguments)
    try:
        if options.diff:
            return print_diff(load_contract(options.contract), *options.diff)
        if options.recompute:
            return judge_again(options)
        if options.lint:
            return print_lint(options.contract)
        return run_campaign(options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        return refuse(error)


def judge_again(options: argparse.Namespace) -> int:
    """Judge the records of an earlier run, or explain one of its objectives."""
    contract = load_contract(options.contract)
    if options.explain:
        print(explain(contract, read_run(options.recompute), options.explain))
        return 0
    verdict = recompute(options.recompute, contract)
    print(table(report_of(options.recompute.parent)))
    return against_baseline(options, contract, options.recompute, verdict.exit_code)


def print_diff(contract: Contract, first: Path, second: Path) -> int:
    """Say what differs between two runs: 1 when something is worse beyond doubt, 3 when a profile says nothing."""
    runs = [read_run(path) for path in (first, second)]
    left_out = {name: why for run in runs for name, why in untrusted(contract, run).items()}
    found = compare(contract, *runs, leave_out=left_out)
    print(table_of(found) or "the runs have no profile in common that can be compared")
    for name, why in left_out.items():
        print(f"not compared: {name}: the measurement is invalid: {why}")
    worse = any(difference.outcome == WORSE for difference in found)
    return FAILED if worse else INVALID if left_out else 0


def against_baseline(options: argparse.Namespace, contract: Contract, raw: Path, code: int) -> int:
    """Compare with the baseline and keep a new one, where asked; a proven regression turns a pass into a failure."""
    if options.baseline is None and options.write_baseline is None:
        return code
    now = baseline_of(contract, read_run(raw))
    if options.baseline is not None:
        before = read_baseline(options.baseline)
        worse = regressions(before, now, options.max_worse)
        print("".join(f"not compared: {text}\n" for text in not_compared(before, now)), end="")
        print("\n".join(f"regression: {text}" for text in worse) or "no regression against the baseline")
        code = FAILED if worse and code == 0 else code
    if options.write_baseline is not None:
        write_baseline(options.write_baseline, now)
        print(f"baseline: {options.write_baseline}")
    return code


def print_lint(path: Path) -> int:
    """Say for each profile what it asks for, and for each objective what it has and what the shortest run needs."""
    contract, total = load_contract(path), 0.0
    for profile in contract.profiles:
        found, load = lint(contract, profile), load_of(contract, profile)
        total += load["seconds"]
        again = f" in {profile.arrivals.repeats} repeats" if profile.arrivals.repeats > 1 else ""
        print(
            f"{profile.id}: {load['seconds']:g} s{again}, {load['measured']:g} measured requests of "
            f"{load['requests']:g}, {load['prompt_tokens']:g} prompt and {load['output_tokens']:g} output tokens, "
            f"workers: {load['workers']:g}"
        )
        for need in found:
            shortest = "" if need.seconds is None else f" ({need.seconds:g} s)"
            print(f"  {need.objective.id}: {need.has} {need.unit}, decided by {need.needed} or more{shortest}")
    print(f"contract {contract.name} revision {contract.revision}, {total:g} s in all, sha256 {contract.sha256}")
    return 0


def run_campaign(options: argparse.Namespace) -> int:
    """Check, load, judge. Whatever the load does, what was recorded is judged and reported."""
    name = load_contract(options.contract).name
    run = Run.prepare(
        contract=options.contract,
        out=options.out or Path("artifacts/reports") / name,
        url=options.url,
        release=options.release,
        tokenizer=options.tokenizer,
        profile=options.profile,
        salt=options.salt,
        http_url=options.http_url,
        metrics_url=options.metrics_url,
        server_pid=options.server_pid,
    )
    target = inspect(run.url, run.contract.target.model)
    run.create_folder()
    finished = measure(run)
    verdict = run.conclude(target)
    print(f"{table(report_of(run.out))}\nreport: {run.out / 'report.html'}", flush=True)
    if not finished:
        return INTERRUPTED
    return against_baseline(options, run.contract, run.out / "raw.jsonl", verdict.exit_code)


def measure(run: Run) -> bool:
    """Load the profiles one after the other, with the target's counters around each; False when interrupted."""
    try:
        return all(measure_profile(run, profile_id) for profile_id in run.profiles)
    except KeyboardInterrupt:
        return False


def measure_profile(run: Run, profile_id: str) -> bool:
    """Load one profile; False when a person interrupted it."""
    profile = run.contract.profile(profile_id)
    seconds = sum(phase.seconds for phase in profile.arrivals.phases)
    print(f"{profile_id}: {len(run.prompts[profile_id])} requests in {seconds:g} s", flush=True)
    before = server_state(run)
    finished = load(run, profile_id)
    run.note_server(profile_id, before, server_state(run))
    return finished


def load(run: Run, profile_id: str) -> bool:
    """Run one profile in a Locust process; its output goes to locust.log, its progress to the terminal.

    False when a person interrupted it. A process that fails leaves no end line, which the verdict sees.
    """
    command = [sys.executable, "-m", "locust", "-f", str(ROOT / "loadtests" / "locustfile.py")]
    command += ["--headless", "--only-summary", "--host", run.url, "--out", str(run.out)]
    command += ["--contract", str(run.contract_path), "--contract-profile", profile_id]
    command += ["--tokenizer", str(run.tokenizer), "--salt", run.salt, "--run-id", run.run_id, "--raw-only"]
    command += ["--http-url", run.http_url, "--metrics-url", run.metrics_url or ""]
    command += ["--server-pid", str(run.server_pid or 0)]
    with (run.out / "locust.log").open("a", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            for line in process.stdout:
                log.write(line)
                if line.startswith(PROGRESS):
                    print("  " + line.removeprefix(PROGRESS), end="", flush=True)
            process.wait()
        except KeyboardInterrupt:
            return False
        finally:
            stop(process)
    if process.returncode:
        print(f"  the load process ended with code {process.returncode}; see {log.name}", flush=True)
    return True


def stop(process: subprocess.Popen) -> None:
    """End the load process if it runs: asked first, killed after STOP_S or at a second Ctrl-C."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(timeout=STOP_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
