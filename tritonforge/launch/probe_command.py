"""The command `tritonforge probe`: one line that says what the service is, and an exit code for machines."""

import argparse

from tritonforge.launch.probe import PURPOSES, Condition, Target, check

_CODES = ", ".join(f"{condition.value} {condition.name.lower()}" for condition in Condition)


def run(arguments: argparse.Namespace) -> int:
    """Ask once; 0 when the condition is a yes to the question, else the condition's own code."""
    metrics = None if arguments.metrics_url == "none" else host_and_port(arguments.metrics_url)
    verdict = check(Target(host_and_port(arguments.url), metrics, arguments.model), arguments.timeout)
    print(verdict)
    return 0 if verdict.condition in PURPOSES[arguments.question] else verdict.condition.value


def add_command(commands) -> None:
    """Add it to the command line."""
    command = commands.add_parser(
        "probe",
        help="is the service up? for people, Kubernetes and load balancers",
        description=f"Is the service up? One line says it. Exit codes: {_CODES}; 0 as well for what is no reason to "
        "say no to the question; 2 usage.",
    )
    command.add_argument(
        "--for",
        dest="question",
        choices=sorted(PURPOSES),
        default="readiness",
        help="readiness: may it get requests; liveness: must it not be restarted; startup: has it started "
        "(default: %(default)s)",
    )
    command.add_argument("--url", default="127.0.0.1:8000", help="the HTTP endpoint (default: %(default)s)")
    command.add_argument(
        "--metrics-url", default="127.0.0.1:8002", help="the metrics endpoint; none: do without (default: %(default)s)"
    )
    command.add_argument("--model", default="llm", help="the model that is asked for a token (default: %(default)s)")
    command.add_argument("--timeout", type=float, default=4.0, metavar="S", help="(default: %(default)g)")
    command.set_defaults(run=run)


def host_and_port(url: str) -> str:
    """`url` as host:port; ends the program when it is no such thing."""
    address = url.removeprefix("http://").rstrip("/")
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise SystemExit(_usage(f"a URL must be [http://]HOST:PORT, got {url!r}"))
    return address


def _usage(text: str) -> int:
    import sys

    print(f"tritonforge: {text}", file=sys.stderr)
    return 2
