"""What is kept of requests: audit, metrics, usage. Wrong if a request left no line or two, content were kept of a
tenant that did not ask for it, a count differed from what was charged, or old files stayed.
"""

import json
import os
import sqlite3
import stat
import subprocess
import sys
import threading
from dataclasses import replace
from datetime import date

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.gateway.serving import serve_gateway
from tests.gateway.stand_ins import TOKENS, text_of, tritons
from tests.gateway.test_routing import ask
from tritonforge.errors import NotFound, SetupError
from tritonforge.gateway.accounting import background
from tritonforge.gateway.accounting.audit import AuditFiles
from tritonforge.gateway.accounting.background import Background
from tritonforge.gateway.accounting.config import Price
from tritonforge.gateway.accounting.edge_families import FAMILIES
from tritonforge.gateway.accounting.keepers import trace
from tritonforge.gateway.accounting.metrics_server import metrics_server
from tritonforge.gateway.accounting.records import Content, Record
from tritonforge.gateway.accounting.usage import UsageFile, read_usage
from tritonforge.gateway.accounting.usage_command import table_of_usage

NOON = 1_800_014_400.0
"""2027-01-15 12:00 UTC."""
RECORD = Record(
    request_id="req_1",
    client_request_id="",
    endpoint="chat",
    tenant="acme",
    key_id="0123",
    model="m",
    user="",
    stream=True,
    status=200,
    outcome="ok",
    error_code=None,
    prompt_tokens=100,
    completion_tokens=20,
    cached_tokens=40,
    finish_reasons=("stop",),
    started=NOON,
    first_token_ms=3.25,
    duration_ms=10.5,
    served_model="m",
)


@pytest.fixture
def kept(tmp_path):
    """A gateway with all that is kept of requests, and the folder of it."""
    with tritons("a") as (a,):
        tables = {
            "models": {"m": {"replicas": [a.url]}},
            "tenants": {"acme": {"audit_content": True}},
            "audit": {"folder": str(tmp_path / "audit")},
            "usage": {"file": str(tmp_path / "usage.sqlite"), "currency": "EUR"},
            "prices": {"m": {"prompt": 1.0, "completion": 2.0}},
        }
        with serve_gateway(None, None, tmp_path, tables, ("open", "acme"), keep=True) as gateway:
            yield gateway, a, tmp_path


def lines_of(folder):
    return [json.loads(line) for path in folder.glob("audit-*.jsonl") for line in path.read_text().splitlines()]


def test_every_request_is_one_line_and_content_only_of_who_wants_it(tmp_path, kept):
    gateway, a, folder = kept
    ask(gateway, "m")
    ask(gateway, "m", "acme")
    assert ask(gateway, "m", temperature=9).status_code == 400
    assert ask(gateway, "nothing").status_code == 404
    a.refuse = "INTERNAL: /secret/path exploded"
    assert ask(gateway, "m").status_code == 500
    gateway.await_records(5)
    for close in gateway.edge.closers:
        close()
    gateway.edge.closers = ()
    lines = lines_of(folder / "audit")
    assert [(line["tenant"], line["status"], line["outcome"]) for line in lines] == [
        ("open", 200, "ok"),
        ("acme", 200, "ok"),
        ("open", 400, "refused"),
        ("open", 404, "refused"),
        ("open", 500, "failed"),
    ]
    assert "content" not in lines[0] and "Hello" not in json.dumps([lines[0], *lines[2:]])
    assert lines[1]["content"]["answers"] == [text_of("a")] and "Hello you" in lines[1]["content"]["prompts"][0]
    for name in ("request_id", "trace_id", "key_id", "model", "replica", "duration_ms", "first_token_ms"):
        assert lines[0][name], name
    assert lines[0]["completion_tokens"] == TOKENS
    assert not any(key in json.dumps(lines) for key in gateway.keys.values())
    assert {stat.S_IMODE(path.stat().st_mode) for path in (folder / "audit").glob("*.jsonl")} == {0o600}
    found = {one.tenant: one for one in read_usage(folder / "usage.sqlite") if one.model == "m"}
    assert (found["acme"].requests, found["acme"].completion_tokens) == (1, TOKENS)
    assert (found["open"].requests, found["open"].failed) == (2, 1)


def metrics_of(gateway):
    return parsed(gateway.edge.metrics.exposition().decode())


def parsed(text):
    return {
        (sample.name.removeprefix("tritonforge_gateway_"), *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_tell_requests_tokens_replicas_and_breakers(kept):
    gateway, a, _ = kept
    for _ in range(3):
        ask(gateway, "m", "acme")
    httpx2.post(f"{gateway.url}/v1/chat/completions", json={}, trust_env=False)
    a.refuse = "INTERNAL: it failed"
    ask(gateway, "m")
    gateway.await_records(4)
    found = metrics_of(gateway)
    assert found["requests_total", "200", "chat", "m", "ok"] == 3
    assert found["unauthorized_total", "chat"] == 1
    assert found["tokens_total", "acme", "completion"] == 3 * TOKENS
    assert found["first_token_seconds_count", "m"] == 3
    assert found["request_duration_seconds_count", "chat"] == 4
    assert found["replica_ready", a.url, "m"] == 1
    assert found["breaker_state", a.url, "m"] == 0
    assert found["replica_outstanding", a.url, "m"] == 0 and found["requests_open",] == 0
    assert found["tries_total", a.url, "m", "ok"] == 3 and found["tries_total", a.url, "failed", "m"] == 1


def test_metrics_are_for_who_has_the_token(tmp_path, monkeypatch):
    monkeypatch.setenv("SCRAPER", "scrape-me")
    with (
        tritons("a") as (a,),
        serve_gateway(
            None,
            None,
            tmp_path,
            {"models": {"m": {"replicas": [a.url]}}, "metrics": {"token_env": "SCRAPER"}},
        ) as gateway,
    ):
        for headers in ({}, {"Authorization": "Bearer wrong"}, gateway.bearer()):
            assert httpx2.get(f"{gateway.url}/metrics", headers=headers, trust_env=False).status_code == 403
        answer = httpx2.get(f"{gateway.url}/metrics", headers={"Authorization": "Bearer scrape-me"}, trust_env=False)
        assert answer.status_code == 200 and ("requests_open",) in parsed(answer.text)


def test_without_a_token_the_metrics_are_on_their_own_port_alone(kept):
    """Wrong: behind a proxy on the same machine every client is local, and would read every tenant's counts."""
    gateway, _, _ = kept
    ask(gateway, "m")
    gateway.await_records(1)
    assert httpx2.get(f"{gateway.url}/metrics", trust_env=False).status_code == 403
    with metrics_server(gateway.edge.metrics, "127.0.0.1", 0) as url:
        found = parsed(httpx2.get(url, trust_env=False).text)
        assert found["requests_total", "200", "chat", "m", "ok"] == 1
        assert found["records_lost_total", "audit"] == found["records_delay_seconds", "usage"] == 0
        port = int(url.rpartition(":")[2].removesuffix("/metrics"))
        with (
            pytest.raises(SetupError, match="--metrics-port"),
            metrics_server(gateway.edge.metrics, "127.0.0.1", port),
        ):
            pass
    with metrics_server(gateway.edge.metrics, "127.0.0.1", None) as url:
        assert url is None


def test_the_families_that_are_listed_are_those_that_are_scraped(kept):
    gateway, _, _ = kept
    text = gateway.edge.metrics.exposition().decode()
    scraped = {
        (family.name + ("_total" if family.type == "counter" else ""), family.type, family.documentation)
        for family in text_string_to_metric_families(text)
        if not family.name.endswith("_created")
    }
    assert scraped == {(one.name, one.kind, one.help) for one in FAMILIES}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--port", "70000"],
        ["--metrics-port", "-1"],
        ["--drain-timeout", "nan"],
        ["--drain-timeout", "inf"],
        ["--trace-ratio", "2"],
        ["--otlp-endpoint", "collector:4318"],
    ],
)
def test_a_number_or_address_that_means_nothing_is_refused_by_name(capsys, arguments):
    from tritonforge.cli import main

    assert main(["gateway", "--no-keys", "--triton", "127.0.0.1:1", *arguments]) == 1
    assert arguments[0].lstrip("-").replace("-", " ").split()[-1] in capsys.readouterr().err


def test_the_span_of_a_request_is_a_servers_with_the_ids_that_were_handed_on(tmp_path):
    """Wrong: the decoder's spans would be children of a span that nobody has."""
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    exporter = InMemorySpanExporter()
    with (
        tritons("a") as (a,),
        serve_gateway(None, None, tmp_path, {"models": {"m": {"replicas": [a.url]}}}) as gateway,
    ):
        trace(gateway.edge, "http://127.0.0.1:1", 0.0, exporter)
        ask(gateway, "m", headers={"traceparent": parent})
        ask(gateway, "m", headers={"traceparent": parent.removesuffix("1") + "0"})
        ask(gateway, "m")
        gateway.edge.trace_ratio = 1.0
        ask(gateway, "m")
        a.refuse = "INTERNAL: /secret exploded"
        ask(gateway, "m")
        gateway.await_records(5)
        handed = [one["traceparent"].split("-") for one in a.options]
    first, begun, failed = exporter.get_finished_spans()
    assert [one[3] for one in handed] == ["01", "00", "00", "01", "01"]
    for span, (_, trace_id, span_id, _) in ((first, handed[0]), (begun, handed[3]), (failed, handed[4])):
        assert (f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}") == (trace_id, span_id)
        assert (span.name, span.kind.name) == ("POST /v1/chat/completions", "SERVER")
        assert span.end_time > span.start_time > 1e18
    assert f"{first.parent.span_id:016x}" == "00f067aa0ba902b7" and begun.parent is None
    told = dict(first.attributes)
    assert (told["gen_ai.request.model"], told["gen_ai.usage.output_tokens"]) == ("m", TOKENS)
    assert (told["http.response.status_code"], told["tritonforge.replica"]) == (200, a.url)
    assert "error.type" not in told and not first.status.description
    assert failed.status.status_code.name == "ERROR" and failed.attributes["error.type"] == "internal_error"
    assert "Hello" not in json.dumps([dict(one.attributes) for one in (first, begun, failed)])


def test_streams_that_are_cut_at_the_end_are_told_recorded_and_settled(tmp_path):
    """Wrong: the server would end before the cut requests have: no error event, no line in the audit, no usage."""
    with tritons("a") as (a,):
        a.hold_at = 2
        tables = {
            "models": {"m": {"replicas": [a.url]}},
            "audit": {"folder": str(tmp_path / "audit")},
            "usage": {"file": str(tmp_path / "usage.sqlite")},
        }
        with serve_gateway(None, None, tmp_path, tables, keep=True) as gateway:
            body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "Hello you"}]}
            with httpx2.stream(
                "POST",
                f"{gateway.url}/v1/chat/completions",
                json=body,
                headers=gateway.bearer(),
                timeout=60,
                trust_env=False,
            ) as answer:
                pieces = answer.iter_text()
                seen = next(pieces)
                assert a.held.acquire(timeout=60)
                gateway.stop()
                seen += "".join(pieces)
        error = json.loads(seen.strip().splitlines()[-1].removeprefix("data: "))["error"]
        assert error["code"] == "unavailable" and "stops" in error["message"] and "[DONE]" not in seen
        assert a.cancelled == a.began
        (line,) = lines_of(tmp_path / "audit")
        assert (line["status"], line["outcome"], line["completion_tokens"]) == (200, "failed", 2)
        (used,) = read_usage(tmp_path / "usage.sqlite")
        assert used.completion_tokens == 2


def test_a_file_of_the_audit_is_removed_when_its_days_are_over(tmp_path):
    files = AuditFiles(tmp_path, 30)
    files.write([RECORD, replace(RECORD, started=NOON - 86_400)])
    other = tmp_path / "audit-notes.jsonl"
    other.write_text("kept")
    assert files.path_of(date(2027, 1, 15)).is_file() and files.path_of(date(2027, 1, 14)).is_file()
    files.expire(date(2027, 2, 14))
    assert files.path_of(date(2027, 1, 15)).is_file() and not files.path_of(date(2027, 1, 14)).is_file()
    assert other.is_file()


def test_content_that_no_encoding_has_is_kept_and_does_not_stop_the_audit(tmp_path):
    AuditFiles(tmp_path, 10_000).write([replace(RECORD, content=Content(("half \ud800",), ("日本",)))])
    assert "日本" in (tmp_path / "audit-2027-01-15.jsonl").read_text(encoding="utf-8", errors="replace")


def test_records_wait_while_a_disk_is_full_and_none_is_lost(monkeypatch):
    """Wrong: a file system that is full for a minute, or a locked SQLite file, would cost lines of a tenant's bill."""
    monkeypatch.setattr(background, "FIRST_WAIT_S", 0.01)
    lost, written, tried = [], [], threading.Semaphore(0)
    errors = [OSError(28, "No space left on device"), sqlite3.OperationalError("database is locked")]

    def write(items):
        tried.release()
        if items and errors:
            raise errors.pop()
        written.extend(items)

    writer = Background("audit", write, lost.append)
    writer.put(1)
    assert tried.acquire(timeout=60)
    writer.put(2)
    for _ in range(2):
        assert tried.acquire(timeout=60)
    writer.close()
    writer.close()
    assert (lost, written) == ([], [1, 2])


def test_a_record_that_can_never_be_written_is_lost_alone():
    lost, written, go = [], [], threading.Event()

    def write(items):
        assert go.wait(60)
        if "odd" in items:
            raise ValueError("no integer of SQLite is so large")
        written.extend(items)

    writer = Background("usage", write, lost.append)
    for item in ("first", "second", "odd", "last"):
        writer.put(item)
    go.set()
    writer.close()
    assert (sum(lost), written) == (1, ["first", "second", "last"])


def test_a_disk_that_takes_nothing_holds_up_the_end_for_a_bounded_time_and_every_record_is_counted(monkeypatch):
    monkeypatch.setattr(background, "CLOSE_S", 0.5)
    lost, refused = [], threading.Event()

    def write(items):
        refused.set()
        raise OSError("no such device")

    writer = Background("audit", write, lost.append)
    writer.put(1)
    assert refused.wait(60)
    writer.put(2)
    writer.close()
    writer.put(3)
    assert sum(lost) == 3


def test_half_a_line_of_a_full_disk_or_a_killed_process_spoils_no_other(tmp_path, monkeypatch):
    files = AuditFiles(tmp_path, 10_000)
    today, tomorrow = RECORD, replace(RECORD, started=NOON + 86_400)
    files.write([today])
    whole = files.path_of(date(2027, 1, 15)).read_bytes()
    write, calls = os.write, []

    def full(file, content):
        calls.append(content)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        return write(file, content[: len(content) // 2] if len(calls) == 2 else content)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        files.write([today, tomorrow])
    assert len(calls) == 3
    monkeypatch.undo()
    assert files.path_of(date(2027, 1, 15)).read_bytes() == whole
    assert files.path_of(date(2027, 1, 16)).read_bytes() == b""
    with open(files.path_of(date(2027, 1, 15)), "ab") as file:
        file.write(b'{"time": "half of a li')
    files.write([today])
    lines = files.path_of(date(2027, 1, 15)).read_bytes().splitlines()
    assert [json.loads(line)["request_id"] for line in (lines[0], lines[2])] == ["req_1", "req_1"]


def test_an_old_file_that_cannot_be_removed_costs_no_record(tmp_path):
    files = AuditFiles(tmp_path, 1)
    (tmp_path / "audit-2020-01-01.jsonl").mkdir()
    files._expired_on = None
    files.write([RECORD])
    assert files.path_of(date(2027, 1, 15)).read_text().count("\n") == 1


def test_what_is_too_old_is_removed_where_nobody_asks_any_more(monkeypatch):
    monkeypatch.setattr(background, "IDLE_S", 0.01)
    called = threading.Semaphore(0)
    writer = Background("audit", lambda items: called.release(), lambda count: None)
    assert called.acquire(timeout=60) and called.acquire(timeout=60)
    writer.close()


def test_usage_adds_up_over_writers_and_its_cost_is_exact(tmp_path):
    file = tmp_path / "usage.sqlite"
    prices = {"m": Price("m", prompt=0.15, completion=0.6, cached=0.075)}
    first, second = UsageFile(file, prices), UsageFile(file, prices)
    first.write([RECORD] * 3)
    second.write(
        [RECORD, replace(RECORD, outcome="failed"), replace(RECORD, tenant="beta", served_model="x", model="x")]
    )
    acme, beta = read_usage(file)
    assert (acme.day, acme.requests, acme.failed, acme.prompt_tokens) == ("2027-01-15", 5, 1, 500)
    assert acme.cost_nano == 5 * (60 * 150 + 40 * 75 + 20 * 600) and acme.unpriced == 0
    assert (beta.cost_nano, beta.unpriced) == (0, 1)
    lines = table_of_usage([acme, beta], "EUR")
    assert "cost (EUR)" in lines[0] and lines[-1].startswith("* without 1 requests")
    assert read_usage(file, tenant="beta") == [beta]
    assert read_usage(file, since=date(2027, 1, 16)) == [] and len(read_usage(file, until=date(2027, 1, 15))) == 2


def test_a_price_of_later_changes_nothing_that_was_used(tmp_path):
    file = tmp_path / "usage.sqlite"
    UsageFile(file, {"m": Price("m", 1, 1)}).write([RECORD])
    before = read_usage(file)[0].cost_nano
    UsageFile(file, {"m": Price("m", 5, 5)}).write(
        [replace(RECORD, prompt_tokens=0, cached_tokens=0, completion_tokens=0)]
    )
    assert read_usage(file)[0].cost_nano == before


def test_the_command_prints_usage_and_says_when_there_is_none(tmp_path):
    file = tmp_path / "usage.sqlite"
    command = [sys.executable, "-m", "tritonforge", "usage", "--file", str(file)]
    missing = subprocess.run(command, capture_output=True, text=True)
    assert missing.returncode == 1 and "there is no usage" in missing.stderr
    UsageFile(file, {}).write([RECORD])
    told = subprocess.run([*command, "--json", "--tenant", "acme"], capture_output=True, text=True, check=True)
    assert json.loads(told.stdout)["completion_tokens"] == 20
    with pytest.raises(NotFound):
        (tmp_path / "no.sqlite").write_text("no database, but a text that is long enough to be looked at" * 10)
        read_usage(tmp_path / "no.sqlite")
    assert isinstance(sqlite3.sqlite_version, str)


def test_a_place_that_was_configured_and_cannot_be_written_is_said_at_the_start(tmp_path):
    from tritonforge.gateway.accounting.keepers import keep_records
    from tritonforge.gateway.config import GatewayConfig
    from tritonforge.gateway.edge import Edge

    blocked = tmp_path / "file"
    blocked.write_text("")
    config = GatewayConfig.of_tables({"audit": {"folder": str(blocked / "audit")}})
    with pytest.raises(SetupError, match="audit"):
        keep_records(Edge(config, None, None, None, None))
    assert os.path.exists(blocked)
