"""The command `tritonforge`: serve, generate, chat, plan, capacity, verify. Errors are one line and an exit code."""

import argparse
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from tritonforge import __version__
from tritonforge.errors import SetupError, TritonForgeError
from tritonforge.gateway.arguments import add_parsers as add_gateway
from tritonforge.launch.probe_command import add_command as add_probe
from tritonforge.observation.command import add_arguments, add_log_command, observation
from tritonforge.release import Release
from tritonforge.rollout.commands import add_parser as add_release

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    try:
        return arguments.run(arguments)
    except TritonForgeError as error:
        print(f"tritonforge: {error}", file=sys.stderr)
        return EXIT_FAILED
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def serve(arguments: argparse.Namespace) -> int:
    """Serve a release until SIGINT or SIGTERM; a second signal does not wait for running requests."""
    from tritonforge.launch.ports import Ports
    from tritonforge.launch.supervisor import State
    from tritonforge.server import Server

    server = Server(
        arguments.release,
        ports=Ports(arguments.grpc_port, arguments.http_port, arguments.metrics_port),
        address=arguments.address,
        drain_timeout_s=arguments.drain_timeout,
        startup_timeout_s=arguments.startup_timeout,
        log_file=arguments.log_file,
        histogram_buckets=arguments.histogram_buckets,
        tritonserver=arguments.tritonserver,
        observe=observation(arguments),
        state=arguments.state,
    )
    signals = 0

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal signals
        signals += 1
        server.ask_stop(force=signals > 1)
        note = "draining; a second signal stops at once" if signals == 1 else "stopping at once"
        os.write(sys.stderr.fileno(), f"tritonforge: {signal.Signals(number).name}, {note}\n".encode())

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    with server:
        if server.state is State.SERVING:
            _announce(server.release, server.grpc_url, server.http_url, server.metrics_url)
        server.wait_for(State.STOPPED)
    return 0


def generate(arguments: argparse.Namespace) -> int:
    """Stream the answer to one prompt to stdout, a summary to stderr."""
    from tritonforge import terminal

    prompt = sys.stdin.buffer.read() if arguments.prompt == "-" else arguments.prompt
    options = _options(arguments)
    answer = terminal.generate(arguments.url, prompt, chat=arguments.chat, timeout=arguments.timeout, **options)
    return EXIT_INTERRUPTED if answer.finish_reason == "cancelled" else 0


def chat(arguments: argparse.Namespace) -> int:
    """Chat in the terminal."""
    from tritonforge import terminal

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() history and editing
    terminal.chat(arguments.url, system=arguments.system, timeout=arguments.timeout, **_options(arguments))
    return 0


def verify(arguments: argparse.Namespace) -> int:
    """Compare every file of a release with its manifest."""
    release = Release.open(arguments.release)
    release.verify()
    print(f"{release.name}: {len(release.manifest['files'])} files as built, digest {release.digest}")
    return 0


def plan(arguments: argparse.Namespace) -> int:
    """Say what the decoder's process takes, and which sequences fit its KV cache."""
    from tritonforge.memory.plan import CONTEXTS, MIB, MemoryPlan, fit_of, report
    from tritonforge.memory.probe import measure_base_bytes

    release = Release.open(arguments.release)
    MemoryPlan.of_manifest(release.manifest, 0)  # refused before anything is measured
    base = measure_base_bytes(release.model_repository / "decoder" / "1")
    planned = MemoryPlan.of_manifest(release.manifest, base)
    if arguments.memory is not None:
        planned = planned.within(arguments.memory * MIB)
    contexts = CONTEXTS if arguments.context is None else (arguments.context,)
    lines = [report(planned, contexts)]
    if arguments.sequences is not None:
        lines.append(fit_of(planned, arguments.sequences, arguments.context))
    print("\n".join(lines))
    return 0


def capacity(arguments: argparse.Namespace) -> int:
    """Find the highest rate at which a contract holds; with settings to sweep, the best of them."""
    root = Path(__file__).resolve().parent.parent
    if not (root / "loadtests" / "capacity_command.py").is_file():
        raise SetupError("capacity needs the load tests, which no package holds; run it from a checkout of the project")
    sys.path.insert(0, str(root))
    from loadtests import capacity_command

    return capacity_command.run(arguments)


def _announce(release: Release, grpc_url: str, http_url: str, metrics_url: str) -> None:
    print(f"serving {release.name}, digest {release.digest[:16]}")
    print(f"  gRPC     {grpc_url}")
    print(f"  HTTP     http://{http_url}/v2/models/llm/generate_stream")
    print(f"  metrics  http://{metrics_url}/metrics")
    print("Ctrl-C drains and stops.", flush=True)


def _options(arguments: argparse.Namespace) -> dict[str, object]:
    """The generation options that were given; the server decides about absent ones."""
    names = ("max_tokens", "temperature", "top_k", "top_p", "seed", "stop")
    return {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tritonforge", description=__doc__.split(".")[0])
    parser.add_argument("--version", action="version", version=f"tritonforge {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    _add_serve(commands)
    request = _request_parser()
    one = commands.add_parser("generate", parents=[request], help="stream the answer to one prompt")
    one.add_argument("prompt", help="the text to continue; - reads it from stdin")
    one.add_argument("--chat", action="store_true", help="send the prompt as one user message")
    one.set_defaults(run=generate)
    many = commands.add_parser("chat", parents=[request], help="chat; Ctrl-C cancels an answer, Ctrl-D leaves")
    many.add_argument("--system", help="the system message")
    many.set_defaults(run=chat)
    _add_plan(commands)
    _add_capacity(commands)
    add_release(commands)
    add_gateway(commands)
    add_probe(commands)
    add_log_command(commands)
    check = commands.add_parser("verify", help="compare a release with its manifest")
    check.add_argument("release", type=Path)
    check.set_defaults(run=verify)
    return parser


def _add_serve(commands) -> None:
    command = commands.add_parser("serve", help="serve a release on tritonserver, supervised")
    command.add_argument("--release", type=Path, required=True, help="the release folder")
    command.add_argument("--state", type=Path, help="a folder that remembers promotions (default: none is kept)")
    command.add_argument("--address", default="127.0.0.1", help="the address to bind to (default: %(default)s)")
    for name, port in (("grpc", 8001), ("http", 8000), ("metrics", 8002)):
        command.add_argument(f"--{name}-port", type=int, default=port, help="0: a free one (default: %(default)s)")
    command.add_argument("--drain-timeout", type=_seconds, default=30.0, metavar="S", help="(default: %(default)g)")
    command.add_argument("--startup-timeout", type=_seconds, default=180.0, metavar="S", help="(default: %(default)g)")
    command.add_argument("--log-file", type=Path, help="keep tritonserver's log here (default: a temporary file)")
    command.add_argument(
        "--histogram-buckets", type=Path, help="bounds of the histograms, as loadtests/export.py writes"
    )
    command.add_argument("--tritonserver", type=Path, help="the binary (default: the container's or the wheel's)")
    add_arguments(command)
    command.set_defaults(run=serve)


def _add_plan(commands) -> None:
    command = commands.add_parser("plan", help="what a release takes in memory, and which sequences fit")
    command.add_argument("--release", type=Path, required=True, help="the release folder")
    command.add_argument("--context", type=int, metavar="N", help="tokens of a sequence, prompt and answer")
    command.add_argument("--sequences", type=int, metavar="N", help="sequences that are to fit at once")
    command.add_argument("--memory", type=int, metavar="MIB", help="size the KV cache for a process of so many MiB")
    command.set_defaults(run=plan)


def _add_capacity(commands) -> None:
    command = commands.add_parser("capacity", help="the highest rate at which a contract still holds, and the knee")
    command.add_argument("--contract", type=Path, required=True, help="contract file (TOML)")
    command.add_argument("--profile", help="the profile to search, when the contract has several")
    command.add_argument("--release", type=Path, help="the release; served on free ports unless --url is given")
    command.add_argument("--url", help="gRPC endpoint of a server that runs already")
    command.add_argument("--out", type=Path, help="report folder (default: artifacts/capacity/<contract name>)")
    command.add_argument("--start", type=float, metavar="R", help="first rate, requests/s (default: the contract's)")
    command.add_argument("--tolerance", type=float, default=0.1, help="relative width of the result (default: 0.1)")
    command.add_argument("--min-seconds", type=float, default=30.0, metavar="S", help="of a trial (default: 30)")
    command.add_argument("--max-rate", type=float, default=1000.0, metavar="R", help="do not go beyond (default: 1000)")
    command.add_argument("--max-trials", type=int, default=14, metavar="N", help="of one search (default: 14)")
    command.add_argument("--seed", type=int, default=1, help="of the arrivals (default: 1)")
    command.add_argument(
        "--sweep", action="append", metavar="LIMIT=A,B", help="try these values of a scheduler limit; repeatable"
    )
    command.add_argument("--recipe", type=Path, help="with --sweep: the recipe of the release")
    command.add_argument("--write-recipe", type=Path, metavar="FILE", help="where to write it with the best limits")
    command.set_defaults(run=capacity)


def _request_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--url", default="127.0.0.1:8001", help="the gRPC endpoint (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--stop", action="append", help="a string that ends the answer; may be given several times")
    parser.add_argument("--timeout", type=_seconds, default=300.0, metavar="S", help="(default: %(default)g)")
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, got {text}")
    return value
