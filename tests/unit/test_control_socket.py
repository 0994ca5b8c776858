"""Commands to the launcher: answers and typed errors come back, and nobody but its own user is answered."""

import os
import socket

import pytest

from tritonforge.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineFailure,
    InvalidRequest,
    NotFound,
    Overloaded,
    SetupError,
)
from tritonforge.launch import control_socket
from tritonforge.launch.control_socket import ControlSocket, ask

PORT = 100_000 + os.getpid()
"""No TCP port, so no server's name is taken by a test."""


@pytest.fixture
def answering():
    """answering(handle): a launcher whose commands `handle` carries out."""
    opened = []

    def answering(handle):
        opened.append(ControlSocket(PORT, handle))

    yield answering
    for control in opened:
        control.close()


def test_an_answer_comes_back(answering):
    answering(lambda request: {"got": request})
    assert ask(PORT, {"command": "x", "share": 0.5}, 10) == {"got": {"command": "x", "share": 0.5}}


@pytest.mark.parametrize("kind", [InvalidRequest, NotFound, Overloaded, Cancelled, DeadlineExceeded, EngineFailure])
def test_an_error_comes_back_with_its_type_and_its_words_once(answering, kind):
    def handle(request):
        raise kind("the reason")

    answering(handle)
    with pytest.raises(kind) as caught:
        ask(PORT, {}, 10)
    assert str(caught.value) == f"{kind.code}: the reason"


def test_a_command_that_breaks_is_answered_without_its_traceback(answering):
    answering(lambda request: 1 / 0)
    with pytest.raises(EngineFailure, match="the launcher's log has the cause"):
        ask(PORT, {}, 10)


@pytest.mark.parametrize("line", [b"\n", b"[]\n", b"{\n", b"\xff\n"])
def test_what_is_no_command_is_refused(answering, line):
    answering(lambda request: pytest.fail("handled"))
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"\0tritonforge-{PORT}")
        connection.sendall(line)
        assert b'"INVALID_ARGUMENT"' in connection.makefile("rb").readline()


def test_without_a_launcher_the_remedy_is_told():
    with pytest.raises(Overloaded, match=f"no server is controlled on gRPC port {PORT} .*tritonforge serve"):
        ask(PORT, {}, 10)


def test_one_port_has_one_launcher(answering):
    answering(lambda request: {})
    with pytest.raises(SetupError, match=f"control socket of gRPC port {PORT} is taken"):
        ControlSocket(PORT, lambda request: {})


def test_two_servers_with_one_port_on_two_addresses_have_a_launcher_each(answering):
    answering(lambda request: {"of": "loopback"})
    other = ControlSocket(PORT, lambda request: {"of": "127.0.0.2"}, address="127.0.0.2")
    try:
        assert ask(PORT, {}, 10) == {"of": "loopback"} == ask(PORT, {}, 10, address="0.0.0.0")
        assert ask(PORT, {}, 10, address="127.0.0.2") == {"of": "127.0.0.2"}
    finally:
        other.close()


def test_another_users_command_is_not_carried_out(answering, monkeypatch):
    """The name has no permissions: without the check any local user could load a release, and so run code."""
    answering(lambda request: pytest.fail("handled"))
    monkeypatch.setattr(control_socket, "_is_mine", lambda connection: False)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"\0tritonforge-{PORT}")
        assert connection.recv(10) == b"", "closed without an answer"
    with pytest.raises(SetupError, match="belongs to another user"):
        ask(PORT, {}, 10)


def test_the_kernel_says_who_the_other_end_is(monkeypatch):
    one, other = socket.socketpair()
    with one, other:
        assert control_socket._is_mine(one)
        monkeypatch.setattr(control_socket.os, "getuid", lambda: 12345)
        assert control_socket._is_mine(one) == (os.geteuid() == 0)
