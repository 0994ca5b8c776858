"""Measures a served model against its contract and says whether it passed.

    python loadtests/campaign.py --contract loadtests/contracts/demo.toml --url 127.0.0.1:8001 --release DIR
    python loadtests/campaign.py --recompute artifacts/reports/demo/raw.jsonl

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

from loadtests.contract_toml import load_contract  # noqa: E402
from loadtests.exits import INTERRUPTED, refuse  # noqa: E402
from loadtests.metrics import METRICS, RATE  # noqa: E402
from loadtests.report import table  # noqa: E402
from loadtests.runs import Run, lint, recompute, report_of, shortest  # noqa: E402
from loadtests.schedule import build_schedule  # noqa: E402
from loadtests.target import counters, inspect  # noqa: E402

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
    parser.add_argument("--out", type=Path, help="report folder (default artifacts/reports/<contract name>)")
    parser.add_argument("--profile", help="run only this profile of the contract")
    parser.add_argument("--salt", help="repeat the prompts of an earlier run: its salt")
    parser.add_argument("--lint", action="store_true", help="check the contract, print what it takes, and stop")
    parser.add_argument("--recompute", type=Path, metavar="RAW", help="judge the records of an earlier run again")
    options = parser.parse_args(arguments)
    if options.contract is None:
        if options.recompute is None:
            parser.error("--contract is needed")
        options.contract = options.recompute.parent / "contract.toml"
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run one command; every way it can end has its exit code, and only a broken promise has 1."""
    options = parse_args(arguments)
    try:
        if options.recompute:
            verdict = recompute(options.recompute, load_contract(options.contract))
            print(table(report_of(options.recompute.parent)))
            return verdict.exit_code
        if options.lint:
            return print_lint(options.contract)
        return run_campaign(options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        return refuse(error)


def print_lint(path: Path) -> int:
    """Say for each profile how long it takes and how many requests each objective has and needs."""
    contract = load_contract(path)
    for profile in contract.profiles:
        lint(contract, profile)
        slots = [slot for slot in build_schedule(profile) if slot.measured]
        seconds = sum(phase.seconds for phase in profile.arrivals.phases)
        print(f"{profile.id}: {seconds:g} s, {len(slots)} measured requests")
        for objective in profile.objectives:
            count = sum(objective.phase in (None, slot.phase) for slot in slots)
            needs = (
                ""
                if METRICS[objective.metric].kind == RATE
                else f", decided by {shortest(contract, objective)} or more"
            )
            print(f"  {objective.id}: {count} requests{needs}")
    print(f"contract {contract.name} revision {contract.revision}, sha256 {contract.sha256}")
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
    )
    model = run.contract.target.model
    target = inspect(run.url, model)
    run.create_folder()
    finished = measure(run, model)
    verdict = run.conclude(target)
    print(f"{table(report_of(run.out))}\nreport: {run.out / 'report.html'}", flush=True)
    return verdict.exit_code if finished else INTERRUPTED


def measure(run: Run, model: str) -> bool:
    """Load the profiles one after the other, with the target's counters around each; False when interrupted."""
    try:
        return all(measure_profile(run, model, profile_id) for profile_id in run.profiles)
    except KeyboardInterrupt:
        return False


def measure_profile(run: Run, model: str, profile_id: str) -> bool:
    """Load one profile; False when a person interrupted it."""
    profile = run.contract.profile(profile_id)
    seconds = sum(phase.seconds for phase in profile.arrivals.phases)
    print(f"{profile_id}: {len(run.prompts[profile_id])} requests in {seconds:g} s", flush=True)
    before = counters(run.url, model)
    finished = load(run, profile_id)
    after = counters(run.url, model)
    if before is not None and after is not None:
        run.server[profile_id] = {"before": before, "after": after}
    return finished


def load(run: Run, profile_id: str) -> bool:
    """Run one profile in a Locust process; its output goes to locust.log, its progress to the terminal.

    False when a person interrupted it. A process that fails leaves no end line, which the verdict sees.
    """
    command = [
        sys.executable,
        "-m",
        "locust",
        "-f",
        str(ROOT / "loadtests" / "locustfile.py"),
        "--headless",
        "--only-summary",
    ]
    command += [
        "--host",
        run.url,
        "--contract",
        str(run.contract_path),
        "--contract-profile",
        profile_id,
        "--out",
        str(run.out),
    ]
    command += ["--tokenizer", str(run.tokenizer), "--salt", run.salt, "--run-id", run.run_id, "--raw-only"]
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
