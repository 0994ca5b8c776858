"""`tritonforge batch`. Wrong if a request had no line or two, whatever killed the command, if an error were lost, or if
a file that is no batch were sent or overwritten.
"""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.gateway.serving import MODEL, serve_gateway
from tests.gateway.stand_ins import text_of, tritons
from tritonforge.errors import InvalidRequest, SetupError
from tritonforge.gateway.batch.files import Results, body_of, line_of, read_entries
from tritonforge.gateway.batch.run import MOST_TOLD_WAIT_S, wait_s
from tritonforge.options import PRIORITIES

DEADLINE_S = 120


@pytest.fixture
def standing_in(tmp_path):
    """A gateway in front of a stand-in, and the stand-in."""
    with tritons("a") as (a,), serve_gateway(None, None, tmp_path, {"models": {"m": {"replicas": [a.url]}}}) as gateway:
        yield gateway, a


def request(number, model="m", **fields):
    body = {"model": model, "messages": [{"role": "user", "content": f"number {number}"}]} | fields
    return {"custom_id": f"id-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def write(path, requests):
    path.write_text("".join(json.dumps(one) + "\n" for one in requests))
    return path


def start(gateway, folder, *arguments, key=True):
    command = [sys.executable, "-m", "tritonforge", "batch", str(folder / "in.jsonl"), str(folder / "out.jsonl")]
    environment = os.environ | ({"TRITONFORGE_API_KEY": gateway.keys["open"]} if key else {})
    return subprocess.Popen(
        [*command, "--url", gateway.url, *arguments],
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def finish(process):
    _, told = process.communicate(timeout=600)
    return process.returncode, told


def lines_of(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def await_lines(path, count):
    deadline = time.monotonic() + DEADLINE_S
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert time.monotonic() < deadline, f"{path} never had {count} lines"
        time.sleep(0.005)


@pytest.mark.parametrize("ordered", [False, True])
def test_a_batch_killed_in_its_midst_and_resumed_answers_each_request_once(standing_in, tmp_path, ordered):
    gateway, a = standing_in
    write(tmp_path / "in.jsonl", [request(number) for number in range(60)])
    flags = ("--concurrency", "8", *(("--ordered",) if ordered else ()))
    a.free = 20
    process = start(gateway, tmp_path, *flags)
    for _ in range(8):
        assert a.held.acquire(timeout=DEADLINE_S)
    await_lines(tmp_path / "out.jsonl", 1 if ordered else 20)
    process.send_signal(signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL
    before = lines_of(tmp_path / "out.jsonl")
    assert 1 <= len(before) <= 20
    with open(tmp_path / "out.jsonl", "ab") as file:
        file.write(b'{"id": "batch_req_half of a li')  # what a kill within a write leaves
    a.free = None
    a.go.set()
    assert finish(start(gateway, tmp_path, *flags))[0] == 0
    lines = lines_of(tmp_path / "out.jsonl")
    assert lines[: len(before)] == before
    names = [line["custom_id"] for line in lines]
    assert sorted(names) == sorted(f"id-{number}" for number in range(60))
    if ordered:
        assert names == [f"id-{number}" for number in range(60)]
    assert {line["response"]["body"]["choices"][0]["message"]["content"] for line in lines} == {text_of("a")}
    assert all(line["response"]["status_code"] == 200 and line["error"] is None for line in lines)
    assert all(line["response"]["request_id"].startswith("req_") for line in lines)
    assert not (tmp_path / "out.errors.jsonl").exists()
    began = len(a.began)
    assert finish(start(gateway, tmp_path, *flags))[0] == 0 and len(a.began) == began


@pytest.mark.parametrize("line", [b"[]\n", b'{"custom_id": ["a"], "id": "x"}\n', b"nonsense\n"])
def test_a_file_that_is_no_output_of_a_batch_is_not_written_to(tmp_path, line):
    """Wrong: a mistyped path would lose somebody's file, or end in a traceback."""
    path = tmp_path / "out.jsonl"
    path.write_bytes(line)
    with pytest.raises(InvalidRequest, match="line 1, is no line of a batch's output"):
        Results(path, tmp_path / "errors.jsonl")
    assert path.read_bytes() == line


@pytest.mark.parametrize(
    ("told", "most"), [("2", 3.0), ("9" * 30, MOST_TOLD_WAIT_S + 1), ("\u00b2", 0.5), ("Wed, 21 Oct", 0.5), (None, 0.5)]
)
def test_a_batch_waits_as_long_as_it_is_told_within_reason(told, most):
    assert 0 < wait_s(1, told) <= most


def test_a_batch_waits_for_everybody_else(standing_in, tmp_path):
    gateway, a = standing_in
    write(tmp_path / "in.jsonl", [request(1)])
    code, told = finish(start(gateway, tmp_path))
    assert code == 0 and "HTTP Request" not in told
    assert a.options[0]["priority_class"] == PRIORITIES - 1 > gateway.edge.config.defaults.priority_class


def test_every_error_is_kept_beside_the_answers_and_can_be_asked_again(standing_in, tmp_path):
    gateway, a = standing_in
    bad = [request(1), request(2, temperature=9), request(3, model="nobody")]
    write(tmp_path / "in.jsonl", bad)
    code, told = finish(start(gateway, tmp_path))
    assert code == 1 and "3/3 done, 2 errors" in told
    assert [line["custom_id"] for line in lines_of(tmp_path / "out.jsonl")] == ["id-1"]
    errors = {line["custom_id"]: line["response"] for line in lines_of(tmp_path / "out.errors.jsonl")}
    assert {name: one["status_code"] for name, one in errors.items()} == {"id-2": 400, "id-3": 404}
    assert errors["id-2"]["body"]["error"]["param"] == "temperature"
    began = len(a.began)
    assert finish(start(gateway, tmp_path))[0] == 1 and len(a.began) == began
    bad[1]["body"].pop("temperature")
    write(tmp_path / "in.jsonl", bad)
    assert finish(start(gateway, tmp_path, "--retry-errors"))[0] == 1
    assert {line["custom_id"] for line in lines_of(tmp_path / "out.jsonl")} == {"id-1", "id-2"}
    assert len(lines_of(tmp_path / "out.errors.jsonl")) == 1 and len(lines_of(tmp_path / "out.errors.1.jsonl")) == 2


def test_a_model_that_is_away_for_a_while_costs_no_request_its_answer(standing_in, tmp_path):
    gateway, a = standing_in
    write(tmp_path / "in.jsonl", [request(number) for number in range(4)])
    a.refuse = "UNAVAILABLE: the queue is full, retry in about 1 s"
    process = start(gateway, tmp_path, "--concurrency", "4")
    gateway.await_records(4)
    a.refuse = ""
    assert finish(process)[0] == 0
    assert len(lines_of(tmp_path / "out.jsonl")) == 4


def test_a_gateway_that_is_not_there_is_an_error_of_each_request(standing_in, tmp_path):
    write(tmp_path / "in.jsonl", [request(1)])
    gateway, a = standing_in
    gateway.url, url = f"http://127.0.0.1:{a.port}", gateway.url
    a.die()
    assert finish(start(gateway, tmp_path, "--tries", "1"))[0] == 1
    (line,) = lines_of(tmp_path / "out.errors.jsonl")
    assert line["response"] is None and line["error"]["code"] == "connection_failed"
    gateway.url = url


def test_a_key_that_is_not_accepted_ends_the_batch_without_errors_for_its_requests(standing_in, tmp_path):
    gateway, _ = standing_in
    write(tmp_path / "in.jsonl", [request(1), request(2)])
    code, told = finish(start(gateway, tmp_path, "--key-env", "NO_SUCH_KEY"))
    assert code == 1 and "401" in told
    assert lines_of(tmp_path / "out.errors.jsonl") == []


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("not json", "line 2"),
        ("[]", "JSON object"),
        ('{"custom_id": "id-1", "method": "POST", "url": "/v1/completions", "body": {}}', "only once"),
        ('{"custom_id": "", "method": "POST", "url": "/v1/completions", "body": {}}', "custom_id"),
        ('{"custom_id": "x", "method": "GET", "url": "/v1/completions", "body": {}}', "method"),
        ('{"custom_id": "x", "method": "POST", "url": "/v1/images", "body": {}}', "url"),
        ('{"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": 1}', "body"),
        ('{"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": {"stream": true}}', "stream"),
        ('{"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": {}, "extra": 1}', "extra"),
    ],
)
def test_a_line_that_is_no_request_is_named_before_anything_is_sent(tmp_path, line, named):
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(request(1)) + "\n" + line + "\n")
    with pytest.raises(InvalidRequest, match=named):
        read_entries(path)


def test_files_that_are_of_something_else_or_of_another_process_are_not_written(tmp_path):
    out, errors = tmp_path / "out.jsonl", tmp_path / "errors.jsonl"
    out.write_text("a letter to my mother\n")
    with pytest.raises(InvalidRequest, match="no line of a batch"):
        Results(out, errors)
    assert out.read_text() == "a letter to my mother\n"
    (entry,) = read_entries(write(tmp_path / "in.jsonl", [request(1)]))
    out.write_bytes(line_of(entry, {}, None) * 2)
    with pytest.raises(InvalidRequest, match="already"):
        Results(out, errors)
    out.unlink()
    first = Results(out, errors)
    with pytest.raises(SetupError, match="another batch"):
        Results(out, errors)
    first.close()


def test_a_request_that_was_changed_since_its_answer_is_named_and_nothing_is_sent(standing_in, tmp_path):
    """Wrong: a resumed batch would keep the answer to another question under the same custom_id."""
    gateway, a = standing_in
    asked = [request(1), request(2), request(3, temperature=9)]
    write(tmp_path / "in.jsonl", asked)
    assert finish(start(gateway, tmp_path))[0] == 1
    before, began = (tmp_path / "out.jsonl").read_bytes(), len(a.began)
    asked[1]["body"]["messages"][0]["content"] = "another question"
    write(tmp_path / "in.jsonl", asked)
    code, told = finish(start(gateway, tmp_path))
    assert code == 1 and "another request 'id-2'" in told and "choose another file" in told
    asked[1] = request(2)
    del asked[2]["body"]["temperature"]
    write(tmp_path / "in.jsonl", asked)
    code, told = finish(start(gateway, tmp_path))
    assert code == 1 and "'id-3'" in told and "--retry-errors" in told
    assert (tmp_path / "out.jsonl").read_bytes() == before and len(a.began) == began
    lines = [json.dumps(dict(reversed(one.items())), indent=None) for one in asked]
    (tmp_path / "in.jsonl").write_text("\n\n".join(lines))  # the same requests, written in another way
    assert finish(start(gateway, tmp_path, "--retry-errors"))[0] == 0 and len(a.began) == began + 1


def test_a_file_that_is_changed_while_its_batch_runs_is_noticed(tmp_path):
    path = write(tmp_path / "in.jsonl", [request(1), request(2)])
    entries = read_entries(path)
    assert body_of(path, entries[1]) == request(2)["body"]
    write(path, [request(1), request(3)])
    for _ in range(2):
        with pytest.raises(SetupError, match="was changed while the batch ran, see 'id-2'"):
            body_of(path, entries[1])
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("key", ["sk-abc\n", "sk abc"])
def test_a_key_that_no_header_carries_is_refused_and_told_nowhere(standing_in, tmp_path, key):
    """Wrong: HTTP's own error about it has the key, and would be kept in the file of errors."""
    gateway, _ = standing_in
    write(tmp_path / "in.jsonl", [request(1)])
    gateway.keys = {"open": key}
    code, told = finish(start(gateway, tmp_path))
    assert code == 1 and "TRITONFORGE_API_KEY" in told and "sk" not in told.replace("TRITONFORGE_API_KEY", "")
    assert not (tmp_path / "out.errors.jsonl").exists()


def test_an_address_without_its_scheme_is_refused_before_each_request_fails(standing_in, tmp_path):
    gateway, _ = standing_in
    write(tmp_path / "in.jsonl", [request(1)])
    gateway.url, url = gateway.url.removeprefix("http://"), gateway.url
    code, told = finish(start(gateway, tmp_path))
    gateway.url = url
    assert code == 1 and "--url must begin with http" in told and not (tmp_path / "out.jsonl").exists()


@pytest.mark.slow
@pytest.mark.server
def test_500_requests_killed_again_and_again_are_each_answered_once(gateway, tmp_path):
    """Against the real models; killed each time that about a hundred more are answered."""
    requests = [request(number, model=MODEL, max_tokens=4) for number in range(500)]
    write(tmp_path / "in.jsonl", requests)
    out = tmp_path / "out.jsonl"
    for count in (40, 150, 260, 370, 480):
        process = start(gateway, tmp_path, "--concurrency", "32")
        await_lines(out, count)
        process.send_signal(signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
    code, told = finish(start(gateway, tmp_path, "--concurrency", "32"))
    assert code == 0, told
    names = [line["custom_id"] for line in lines_of(out)]
    assert len(names) == 500 and set(names) == {one["custom_id"] for one in requests}
    assert all(line["response"]["body"]["choices"][0]["message"]["content"] for line in lines_of(out))
