"""How the command line lets a service be observed: the options of `serve`, and `tritonforge log` at run time."""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from tritonforge.errors import InvalidRequest, NotFound, SetupError
from tritonforge.launch.ports import is_loopback
from tritonforge.launch.probe_command import host_and_port
from tritonforge.launch.state_file import find_state, put
from tritonforge.observation.log_control import read_control
from tritonforge.observation.observation import LEVELS, Observation

OTLP_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of `serve`."""
    defaults = Observation()
    command.add_argument("--log-level", choices=LEVELS, default=defaults.log_level, help="(default: %(default)s)")
    command.add_argument("--log-content", action="store_true", help="log prompts and answers with their requests")
    command.add_argument("--request-log", type=Path, help="one line a request goes here (default: tritonserver's log)")
    add_trace_arguments(command)
    command.add_argument(
        "--stall-timeout",
        type=float,
        default=defaults.stall_timeout_s,
        metavar="S",
        help="a step that takes longer has the server replaced (default: %(default)g)",
    )


def add_trace_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of who makes spans: `serve` and `gateway`."""
    defaults = Observation()
    command.add_argument(
        "--otlp-endpoint",
        default=os.environ.get(OTLP_VARIABLE),
        metavar="URL",
        help=f"send traces to this OTLP collector over HTTP (default: {OTLP_VARIABLE}, else no traces)",
    )
    command.add_argument(
        "--trace-ratio",
        type=float,
        default=defaults.trace_ratio,
        metavar="R",
        help="share of requests without a traceparent that are traced (default: %(default)g)",
    )


def observation(arguments: argparse.Namespace) -> Observation:
    """What these options say. Raises InvalidRequest."""
    return Observation(
        log_level=arguments.log_level,
        log_content=arguments.log_content,
        request_log=arguments.request_log,
        otlp_endpoint=arguments.otlp_endpoint or None,
        trace_ratio=arguments.trace_ratio,
        stall_timeout_s=arguments.stall_timeout,
    )


def add_log_command(commands) -> None:
    """Add `tritonforge log` to the command line."""
    command = commands.add_parser("log", help="change the decoder's logging while it serves")
    command.add_argument("--level", choices=LEVELS, help="requests are logged at info")
    command.add_argument("--content", choices=("on", "off"), help="log prompts and answers with their requests")
    command.add_argument("--url", default="127.0.0.1:8000", help="the HTTP endpoint (default: %(default)s)")
    command.set_defaults(run=change_log)


def change_log(arguments: argparse.Namespace) -> int:
    """Tell the decoder, through a file; it looks twice a second. Only on the machine that serves."""
    url = host_and_port(arguments.url)
    found = find_state(url) if is_loopback(url) else None
    if found is None or not found[0].alive:
        raise NotFound(f"no `tritonforge serve` on this machine has the HTTP endpoint {url}")
    path = found[1]
    wanted = _changed_so_far(path)
    wanted |= {"level": arguments.level} if arguments.level else {}
    wanted |= {"content": arguments.content == "on"} if arguments.content else {}
    try:
        put(path, json.dumps(wanted))
    except OSError as error:
        raise SetupError(f"{path} cannot be written: {error.strerror}; it decides about the logging of {url}") from None
    print(f"logging of {url}: {', '.join(f'{name} {value}' for name, value in wanted.items()) or 'as it was started'}")
    return 0


def _changed_so_far(path: Path) -> dict[str, Any]:
    """What earlier commands have changed; the decoder heeds no file of another user, so none is continued here."""
    try:
        return read_control(path)
    except FileNotFoundError:
        return {}
    except OSError as error:
        remedy = "have it removed, the server does not heed it"
        raise SetupError(f"{path} cannot be read: {error.strerror or error}; {remedy}") from None
    except ValueError as error:
        raise InvalidRequest(f"{path} has no meaning: {error}; remove it to start over") from None
