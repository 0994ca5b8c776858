"""The log: one line a request, with all that operators need and nothing that users said; its level can be changed."""

import io
import json
import os
import sys
from types import SimpleNamespace

import pytest

from tests.unit.test_recorder import STATISTICS, ended
from tritonforge.errors import EngineFailure, InvalidRequest
from tritonforge.observation import logs
from tritonforge.observation.observation import Observation
from tritonforge.observation.recorder import Recorder
from tritonforge.observation.request_record import RequestRecord

LABELS = {"model": "decoder", "version": "1"}


@pytest.fixture
def written(tmp_path, monkeypatch):
    """make(**settings) -> RequestLog whose lines `lines()` returns; the loggers are as before afterwards."""
    stream = io.StringIO()
    before = [(logger, logger.level, list(logger.handlers), logger.propagate) for logger in (logs.ROOT, logs.requests)]

    def make(**settings):
        monkeypatch.setattr(sys, "stderr", stream)
        recorder = Recorder()
        settings = Observation(log_control=tmp_path / "control.json", **settings)
        return logs.RequestLog(settings, recorder, lambda ids: f"<{len(ids)} tokens>", LABELS), recorder

    make.lines = lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    make.control = tmp_path / "control.json"
    yield make
    for logger, level, handlers, propagate in before:
        logger.level, logger.handlers, logger.propagate = level, handlers, propagate


def test_a_request_is_one_line_with_ids_sizes_durations_and_outcome(written):
    log, _ = written()
    log.write(ended("stop", tenant="acme"))
    (line,) = written.lines()
    expected = {
        "level": "info",
        "event": "request",
        "request_id": "r-1",
        "outcome": "stop",
        "tenant": "acme",
        "model": "decoder",
        "version": "1",
        "prompt_tokens": 7,
        "completion_tokens": 10,
        "cached_tokens": 3,
        "longest_gap_ms": 12.0,
        "max_tokens": 10,
    }
    assert expected.items() <= line.items()
    assert {"queue_ms", "prefill_ms", "first_emit_ms", "decode_ms", "e2e_ms"} <= line.keys()


def test_nothing_that_users_said_is_logged_unless_it_is_asked_for(written):
    """Wrong: prompts of customers in the log of operators; also an option's value in an error's text is one."""
    log, _ = written()
    error = InvalidRequest("stop must be a string of 1 to 256 characters, got 'my secret'")
    log.write(RequestRecord("error", 9, "r-2", error))
    record = ended("stop")
    log.write(RequestRecord("stop", 9, "r-3", None, record.asked, record.timeline, STATISTICS, text="my secret"))
    assert "secret" not in json.dumps(written.lines())
    assert written.lines()[0]["error"] == "INVALID_ARGUMENT: stop must be a string of 1 to 256 characters"


def test_content_that_was_asked_for_is_in_the_line(written):
    log, recorder = written(log_content=True)
    assert recorder.keeps_text
    record = ended("stop")
    log.write(RequestRecord("stop", 9, "r-3", None, record.asked, record.timeline, STATISTICS, text="Paris.\nReally"))
    (line,) = written.lines()
    assert line["text"] == "Paris.\nReally" and line["prompt"] == "<2 tokens>"


def test_an_error_is_told_by_its_code(written):
    log, _ = written()
    log.write(ended("error", error=EngineFailure("a step failed")))
    (line,) = written.lines()
    assert line["code"] == "INTERNAL" and line["error"] == "INTERNAL: a step failed" and line["prompt_tokens"] == 2


def test_the_level_and_content_change_while_it_runs(written):
    log, recorder = written()
    written.control.write_text(json.dumps({"level": "warning", "content": True}))
    log.look()
    log.write(ended())
    assert recorder.keeps_text
    assert [line["message"] for line in written.lines()] == ["logging at warning, content on"]
    written.control.write_text(json.dumps({"level": "debug", "content": False}))
    logs.log.debug("seen")
    log._control_ns = None  # the two writes may have one time stamp
    log.look()
    logs.log.debug("seen now")
    assert written.lines()[-1]["message"] == "seen now" and not recorder.keeps_text


@pytest.mark.parametrize("content", ['{"level": "loud"}', "{", "[]", '{"content": "yes"}'])
def test_a_change_without_meaning_changes_nothing_and_is_named(written, content):
    log, _ = written()
    written.control.write_text(content)
    log.look()
    (line,) = written.lines()
    assert line["level"] == "error" and "changes nothing" in line["message"]


def test_a_change_by_another_user_is_none(written, monkeypatch):
    """Wrong: whoever may write to the temporary folder could have the prompts of others logged."""
    log, recorder = written()
    written.control.write_text('{"content": true}')
    real = written.control.stat(follow_symlinks=False)
    foreign = SimpleNamespace(st_uid=os.getuid() + 4711, st_mode=real.st_mode, st_mtime_ns=real.st_mtime_ns)
    monkeypatch.setattr(type(written.control), "stat", lambda path, **options: foreign)
    log.look()
    assert not recorder.keeps_text


def test_a_change_behind_a_link_is_none(written, tmp_path):
    log, recorder = written()
    (tmp_path / "elsewhere.json").write_text('{"content": true}')
    written.control.symlink_to(tmp_path / "elsewhere.json")
    log.look()
    assert not recorder.keeps_text


def test_requests_go_to_a_file_of_their_own_that_may_be_rotated(written, tmp_path):
    path = tmp_path / "requests.log"
    log, _ = written(request_log=path)
    log.write(ended())
    path.rename(tmp_path / "requests.log.1")
    log.write(ended())
    assert len(path.read_text().splitlines()) == 1 and not written.lines()
    for handler in logs.requests.handlers:
        handler.close()


def test_a_message_cannot_forge_a_line(written):
    written()
    logs.log.warning('a\n{"event": "request", "outcome": "stop"}')
    assert len(written.lines()) == 1 and "event" not in written.lines()[0]
