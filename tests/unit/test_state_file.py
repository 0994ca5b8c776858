"""What supervisors tell in the temporary folder: one file a server, and nothing that another user put there."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tritonforge import cli
from tritonforge.launch import state_file
from tritonforge.launch.state_file import control_path, find_state, is_trusted, read_state, state_path, write_state


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(state_file.tempfile, "tempdir", str(tmp_path))
    return tmp_path


def tell_dead(path, state):
    """Have a process that has ended tell its state."""
    code = (
        "import sys; from pathlib import Path; from tritonforge.launch.state_file import write_state\n"
        "write_state(Path(sys.argv[1]), sys.argv[2])"
    )
    subprocess.run([sys.executable, "-c", code, str(path), state], check=True, timeout=30)


def test_two_servers_with_one_port_on_two_addresses_tell_their_own_state():
    """Wrong: the probe of one would say what the other does, and the end of one would remove the other's word."""
    write_state(state_path(8000, "127.0.0.1"), "serving")
    write_state(state_path(8000, "127.0.0.2"), "draining")
    assert find_state("localhost:8000")[0].state == "serving"
    assert find_state("127.0.0.2:8000")[0].state == "draining"
    assert find_state("[::1]:8000") is None
    assert control_path(8000, "127.0.0.1") != control_path(8000, "127.0.0.2")


@pytest.mark.parametrize(
    ("bound", "asked"), [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("::", "127.0.0.1"), ("::1", "[::1]")]
)
def test_a_server_that_is_bound_to_every_address_is_found_by_each(bound, asked):
    write_state(state_path(8000, bound), "draining")
    told, control = find_state(f"{asked}:8000")
    assert told.state == "draining" and control == control_path(8000, bound)


def test_the_word_of_a_living_supervisor_comes_before_that_of_a_dead_one():
    tell_dead(state_path(8000, "127.0.0.1"), "starting")
    write_state(state_path(8000, "0.0.0.0"), "serving")
    assert find_state("127.0.0.1:8000")[0].state == "serving"


def test_the_word_of_another_user_counts_for_nothing(monkeypatch):
    """Wrong: any user could have a load balancer believe that the service drains."""
    write_state(state_path(8000), "draining")
    monkeypatch.setattr(state_file, "is_trusted", lambda facts: False)
    assert read_state(state_path(8000)) is None and find_state("127.0.0.1:8000") is None


@pytest.mark.parametrize(
    ("owner", "mode", "trusted"),
    [(0, 0o100644, True), (5, 0o100644, True), (6, 0o100644, False), (5, 0o010644, False), (5, 0o120777, False)],
)
def test_only_a_plain_file_of_this_user_or_of_root_is_heeded(owner, mode, trusted, monkeypatch):
    monkeypatch.setattr(state_file.os, "getuid", lambda: 5)
    assert is_trusted(SimpleNamespace(st_uid=owner, st_mode=mode)) is trusted


def log(*arguments):
    return cli.main(["log", "--url", "127.0.0.1:8000", *arguments])


def test_logging_that_was_changed_before_is_changed_further(capsys):
    write_state(state_path(8000), "serving")
    assert log("--level", "debug") == 0 and log("--content", "on") == 0
    assert "level debug, content True" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["{", "[]", '"x"', '{"level": 7}', '{"content": "on"}', '{"other": 1}', "\xff\xfe"])
def test_a_control_file_without_meaning_is_named_and_not_continued(text, capsys):
    """Wrong: a traceback; or options that nobody can have meant go on."""
    write_state(state_path(8000), "serving")
    control_path(8000).write_bytes(text.encode("latin-1"))
    assert log("--level", "info") == cli.EXIT_FAILED
    assert f"{control_path(8000)} has no meaning" in capsys.readouterr().err
    assert control_path(8000).read_bytes() == text.encode("latin-1")


@pytest.mark.parametrize(
    "make", [lambda path: os.mkfifo(path), lambda path: path.symlink_to("/etc/passwd"), lambda path: path.mkdir()]
)
def test_a_control_file_that_is_no_file_of_this_user_is_refused(make, capsys):
    """Wrong: what another user put there would be merged into this user's file, which the server heeds."""
    write_state(state_path(8000), "serving")
    make(control_path(8000))
    assert log("--level", "info") == cli.EXIT_FAILED
    assert "the server does not heed it" in capsys.readouterr().err


def test_another_users_control_file_is_not_continued(monkeypatch, capsys):
    write_state(state_path(8000), "serving")
    control_path(8000).write_text('{"content": true}')
    monkeypatch.setattr("tritonforge.observation.log_control.is_trusted", lambda facts: False)
    assert log("--level", "info") == cli.EXIT_FAILED
    assert "no file of this user" in capsys.readouterr().err
