"""Serves a release and measures it against the acceptance contract, all profiles: `make accept`.

    .venv/bin/python loadtests/accept.py --release artifacts/releases/smollm2-135m-int8

The exit code is the campaign's. About a quarter of an hour; --profile runs one of them.
"""

import argparse
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from loadtests import campaign  # noqa: E402
from loadtests.exits import INTERRUPTED, UNREACHABLE  # noqa: E402
from tritonforge.errors import TritonForgeError  # noqa: E402
from tritonforge.server import Server  # noqa: E402

RELEASE = ROOT / "artifacts" / "releases" / "smollm2-135m-int8"
CONTRACT = ROOT / "loadtests" / "contracts" / "acceptance.toml"
REPORT = ROOT / "artifacts" / "reports" / "acceptance"


def accept(options: argparse.Namespace) -> int:
    """Serve, measure, say how long it took; return the campaign's exit code."""
    started = time.monotonic()
    with Server(options.release) as server:
        print(f"serving {server.release.name} at {server.grpc_url}, pid {server.pid}", flush=True)
        command = ["--contract", options.contract, "--release", options.release, "--out", options.out]
        command += ["--url", server.grpc_url, "--http-url", server.http_url, "--metrics-url", server.metrics_url]
        command += ["--server-pid", server.pid]
        for name in ("profile", "baseline", "write_baseline"):
            value = getattr(options, name)
            command += [f"--{name.replace('_', '-')}", value] if value is not None else []
        code = campaign.main([str(word) for word in command])
    print(f"{time.monotonic() - started:.0f} s in all")
    return code


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--release", type=Path, default=RELEASE)
    parser.add_argument("--contract", type=Path, default=CONTRACT)
    parser.add_argument("--out", type=Path, default=REPORT, help="report folder (default %(default)s)")
    parser.add_argument("--profile", help="only this profile of the contract")
    parser.add_argument("--baseline", type=Path, help="compare with this run, a proven regression fails")
    parser.add_argument("--write-baseline", type=Path, help="keep this run as a baseline")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return accept(parser.parse_args(arguments))
    except TritonForgeError as error:
        print(f"accept: {error}", file=sys.stderr)
        return UNREACHABLE
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
