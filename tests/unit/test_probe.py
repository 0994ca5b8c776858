"""The probe's answers: each way of not being ready is another answer, and no answer takes longer than it may."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from tritonforge.cli import main
from tritonforge.launch import probe, probe_command, state_file
from tritonforge.launch.probe import PROBE_TENANT, PURPOSES, Condition, Target, check

TOKEN = '{"model_name":"llm","text_output":"!"}'


@pytest.fixture
def served(tmp_path, monkeypatch):
    """Stands for Triton: HTTP and metrics on one port; `.answers` by path, `.asked` what was posted."""
    monkeypatch.setattr(state_file.tempfile, "gettempdir", lambda: str(tmp_path))
    answers = {
        "/v2/health/live": (200, ""),
        "/v2/models/llm/ready": (200, ""),
        "/v2/models/llm/generate": (200, TOKEN),
        "/metrics": (200, metrics()),
    }
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def answer(self):
            status, text = answers[self.path]
            if status == 0:
                released.wait(10)
                return
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = answer

        def do_POST(self):
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            found.when_asked()
            self.answer()

        def log_message(self, *arguments):
            pass

    released = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    url = f"127.0.0.1:{server.server_address[1]}"
    found = SimpleNamespace(target=Target(url, url), answers=answers, asked=asked, url=url, when_asked=lambda: None)
    yield found
    released.set()
    server.shutdown()
    server.server_close()


def metrics(*, reasons=(), heartbeat=0.0, token=None, version=1, steps=0):
    """A page of the decoder; ages in seconds."""
    label, now = f'model="decoder",version="{version}"', time.time()
    lines = [f'tritonforge_not_ready{{{label},reason="{name}"}} {int(name in reasons)}' for name in probe._REASONS]
    lines.append(f"tritonforge_heartbeat_timestamp_seconds{{{label}}} {now - heartbeat}")
    lines.append(f"tritonforge_last_token_timestamp_seconds{{{label}}} {0 if token is None else now - token}")
    lines.append(f"tritonforge_step_seconds_count{{{label}}} {steps}")
    return "\n".join(lines) + "\n"


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def test_an_idle_service_is_ready_because_a_token_comes_out_when_it_is_asked_for(served):
    assert check(served.target).condition is Condition.READY
    assert served.asked == [{"text_input": "Hello", "max_tokens": 1, "tenant": PROBE_TENANT}]


def test_a_service_that_generates_is_ready_and_is_not_asked_for_a_token_too(served):
    """Wrong: probes would cost seats and tokens under load, and wait in the queue for them."""
    served.answers["/metrics"] = (200, metrics(token=2.0))
    assert check(served.target).condition is Condition.READY and not served.asked


@pytest.mark.parametrize(
    ("reason", "condition"),
    [("queue_full", Condition.SATURATED), ("draining", Condition.DRAINING), ("stalled", Condition.STALLED)],
)
def test_what_the_decoder_says_of_itself_is_the_answer(served, reason, condition):
    served.answers["/metrics"] = (200, metrics(reasons=(reason,), token=0.0))
    verdict = check(served.target)
    assert verdict.condition is condition and reason in verdict.cause and not served.asked


def test_one_version_that_is_ready_is_enough(served):
    served.answers["/metrics"] = (200, metrics(reasons=("stalled",), version=999) + metrics(token=1.0, version=1000))
    assert check(served.target).condition is Condition.READY


def test_a_decoder_that_was_not_seen_alive_for_long_is_stalled(served):
    """Wrong: a frozen process leaves its last metrics on the port, and they look well."""
    served.answers["/metrics"] = (200, metrics(heartbeat=30.0, token=30.0))
    assert check(served.target).condition is Condition.STALLED


@pytest.mark.parametrize(
    ("status", "text", "condition"),
    [
        (400, '{"error":"in ensemble \'llm\', UNAVAILABLE: the server is draining and ..."}', Condition.DRAINING),
        (503, '{"error":"UNAVAILABLE: the queue is full: 64 requests wait"}', Condition.SATURATED),
        (500, '{"error":"INTERNAL: a step failed"}', Condition.DEAD),
        (200, '{"error":"INTERNAL: a step failed"}', Condition.DEAD),
    ],
)
def test_without_metrics_the_token_alone_decides(served, status, text, condition):
    served.answers["/metrics"] = (404, "")
    served.answers["/v2/models/llm/generate"] = (status, text)
    assert check(served.target).condition is condition


def test_values_that_are_no_numbers_say_nothing(served):
    """Wrong: the probe ends with a traceback, whose exit code is no condition's."""
    page = metrics(token=1.0) + "".join(
        re.sub(r"\S+$", value, metrics(), flags=re.MULTILINE) for value in ("abc", "1e", "-")
    )
    served.answers["/metrics"] = (200, page)
    assert check(served.target).condition is Condition.READY


def test_no_token_in_time_is_stalled(served):
    served.answers["/v2/models/llm/generate"] = (0, "")
    verdict = check(served.target, 0.3)
    assert verdict.condition is Condition.STALLED and "no token came out" in verdict.cause


def test_no_token_in_time_while_steps_are_made_is_saturated(served):
    """Wrong: a service that computes a long prompt is restarted, and everybody's streams with it."""
    served.answers["/v2/models/llm/generate"] = (0, "")
    served.answers["/metrics"] = (200, metrics(token=60.0, steps=7))
    served.when_asked = lambda: served.answers.update({"/metrics": (200, metrics(token=60.0, steps=9))})
    verdict = check(served.target, 0.3)
    assert verdict.condition is Condition.SATURATED and "2 steps" in verdict.cause


def test_a_token_that_came_out_for_others_while_the_probe_waited_counts(served):
    served.answers["/v2/models/llm/generate"] = (0, "")
    served.answers["/metrics"] = (200, metrics(token=60.0, steps=7))
    served.when_asked = lambda: served.answers.update({"/metrics": (200, metrics(token=0.0, steps=7))})
    assert check(served.target, 0.3).condition is Condition.READY


def test_steps_of_a_version_that_has_just_been_loaded_are_no_progress(served):
    served.answers["/v2/models/llm/generate"] = (0, "")
    served.answers["/metrics"] = (200, metrics(steps=7))
    served.when_asked = lambda: served.answers.update(
        {"/metrics": (200, metrics(steps=7) + metrics(steps=5, version=2))}
    )
    assert check(served.target, 0.3).condition is Condition.STALLED


def test_a_model_that_is_not_loaded_yet_is_starting(served):
    served.answers["/v2/models/llm/ready"] = (400, "")
    assert check(served.target).condition is Condition.STARTING


def test_a_closed_port_is_dead_unless_a_supervisor_says_that_it_starts(served):
    port = free_port()
    target = Target(f"127.0.0.1:{port}", None)
    assert check(target).condition is Condition.DEAD
    path = state_file.state_path(port)
    for state, condition in (("starting", Condition.STARTING), ("restarting", Condition.STARTING)):
        state_file.write_state(path, state, "the Python stub of pid 7 died")
        verdict = check(target)
        assert verdict.condition is condition and "the Python stub of pid 7 died" in verdict.cause
    state_file.write_state(path, "draining")
    assert check(target).condition is Condition.DRAINING
    state_file.write_state(path, "serving")
    assert check(target).condition is Condition.DEAD


def test_the_word_of_a_supervisor_that_is_gone_counts_for_nothing(served):
    port = free_port()
    code = (
        "import sys; from pathlib import Path; from tritonforge.launch.state_file import write_state\n"
        "write_state(Path(sys.argv[1]), 'starting')"
    )
    path = state_file.state_path(port)
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=30)
    assert state_file.read_state(path).state == "starting"
    assert check(Target(f"127.0.0.1:{port}", None)).condition is Condition.DEAD
    state_file.sweep_states()
    assert not path.exists()


def test_a_living_supervisors_word_is_not_swept_and_only_its_own_is_removed(served):
    path = state_file.state_path(free_port())
    state_file.write_state(path, "serving")
    state_file.sweep_states()
    assert path.exists()
    word = json.loads(path.read_text())
    path.write_text(json.dumps(word | {"pid": os.getppid()}))
    state_file.remove_state(path)
    assert path.exists()
    path.write_text(json.dumps(word))
    state_file.remove_state(path)
    assert not path.exists()


def test_neither_a_pipe_nor_a_link_in_the_open_folder_gets_in_the_way(served, tmp_path):
    """Wrong: any user could hold up every start and probe, or have the service write over one of its own files."""
    path = state_file.state_path(free_port())
    os.mkfifo(path)
    assert state_file.read_state(path) is None
    state_file.sweep_states()
    precious = tmp_path / "precious"
    precious.write_text("kept")
    path.with_suffix(f".{os.getpid()}").symlink_to(precious)
    state_file.write_state(path, "serving")
    assert precious.read_text() == "kept" and state_file.read_state(path).state == "serving"
    state_file.remove_state(path)


def test_each_condition_is_a_yes_to_the_questions_that_it_should_be():
    """Wrong: Kubernetes would kill what drains or starts, or send requests to what refuses them."""
    yes = {name: {one.name for one in conditions} for name, conditions in PURPOSES.items()}
    assert yes == {
        "readiness": {"READY"},
        "liveness": {"READY", "STARTING", "SATURATED", "DRAINING"},
        "startup": {"READY", "SATURATED", "DRAINING"},
    }
    assert len({one.value for one in Condition}) == 6 and 2 not in {one.value for one in Condition}


@pytest.mark.parametrize(("question", "code"), [("readiness", 4), ("liveness", 0), ("startup", 0)])
def test_the_command_says_it_in_one_line_and_an_exit_code(served, capsys, question, code):
    served.answers["/metrics"] = (200, metrics(reasons=("queue_full",)))
    url = f"http://{served.url}"
    assert main(["probe", "--for", question, "--url", url, "--metrics-url", url]) == code
    assert capsys.readouterr().out == "saturated: the decoder says: queue_full\n"


@pytest.mark.parametrize("url", ["8000", "https://host:8000", "host:0", "host"])
def test_a_url_that_is_none_is_a_usage_error(url, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["probe", "--url", url])
    assert ended.value.code == 2 and url in capsys.readouterr().err


def test_a_probe_loads_nothing_heavy():
    """Wrong: run every few seconds, it would cost the service a part of a core."""
    heavy = ("numpy", "grpc", "tritonclient", "openvino")
    code = f"import sys, tritonforge.cli; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_the_commands_help_tells_every_code():
    assert all(f"{one.value} {one.name.lower()}" in probe_command._CODES for one in Condition)
