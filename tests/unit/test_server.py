"""The parts of the server that need no tritonserver: ports, restarts, shared memory, what the log says."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from tritonforge.errors import EngineFailure, InvalidRequest, NotFound, ReleaseMismatch, SetupError
from tritonforge.launch import drain, shared_memory, triton_install, triton_process
from tritonforge.launch.ports import Ports, reachable
from tritonforge.launch.server_log import ServerLog
from tritonforge.launch.supervisor import RestartPolicy
from tritonforge.launch.triton_install import TritonInstall
from tritonforge.launch.triton_process import OPEN_FILES, ServerConfig, TritonProcess
from tritonforge.server import Server


def test_port_zero_becomes_distinct_free_ports():
    ports = Ports(0, 0, 0).claim("127.0.0.1")
    assert len({ports.grpc, ports.http, ports.metrics}) == 3 and min(ports.grpc, ports.http, ports.metrics) > 0


def test_a_busy_port_is_refused_with_its_role_and_the_option():
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(SetupError, match=rf"grpc port {port} of 127.0.0.1: Address already in use; .*--grpc-port"):
            Ports(port, 0, 0).claim("127.0.0.1")


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(SetupError, match=r"192\.0\.2\.1"):
        Ports(0, 0, 0).claim("192.0.2.1")


@pytest.mark.parametrize("ports", [(-1, 0, 0), (0, 65536, 0), (8000, 8000, 0)])
def test_impossible_ports_are_refused(ports):
    with pytest.raises(InvalidRequest):
        Ports(*ports)


@pytest.mark.parametrize(
    ("address", "host"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]")]
)
def test_a_bound_address_is_reachable_as(address, host):
    assert reachable(address) == host


def test_the_first_restart_is_immediate_and_later_ones_wait_longer():
    policy = RestartPolicy(limit=4, window_s=100, first_delay_s=1, max_delay_s=3)
    assert [policy.delay_after_death(now) for now in (0, 1, 2, 3)] == [0, 1, 2, 3]
    assert policy.delay_after_death(4) is None


def test_old_deaths_are_forgotten():
    policy = RestartPolicy(limit=1, window_s=10)
    assert [policy.delay_after_death(now) for now in (0, 11, 22)] == [0, 0, 0]
    assert policy.delay_after_death(23) is None


@pytest.fixture
def shm(tmp_path, monkeypatch):
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(shared_memory, "SHM", folder)
    return folder


def test_only_own_regions_are_removed(shm, tmp_path):
    memory = shared_memory.SharedMemory(tmp_path)
    (shm / f"{memory.prefix}-1").touch()
    (shm / "tritonforge-another").touch()
    memory.close()
    memory.close()
    assert [path.name for path in shm.iterdir()] == ["tritonforge-another"]


def test_a_living_owner_is_not_swept(shm, tmp_path):
    memory = shared_memory.SharedMemory(tmp_path)
    region = shm / f"{memory.prefix}-1"
    region.touch()
    shared_memory.sweep()
    assert region.exists()
    memory.close()


def test_what_a_killed_owner_left_is_swept(shm, tmp_path):
    run_dir = tmp_path / "tritonforge-run"
    run_dir.mkdir()
    (run_dir / "server.log").touch()
    code = (
        "import os, signal, sys; from pathlib import Path; from tritonforge.launch import shared_memory as s\n"
        "s.SHM = Path(sys.argv[1]); m = s.SharedMemory(Path(sys.argv[2])); (s.SHM / f'{m.prefix}-1').touch()\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, shm, run_dir], check=False, timeout=30)
    assert len(list(shm.iterdir())) == 2
    shared_memory.sweep()
    assert not list(shm.iterdir()) and not run_dir.exists()


def test_nothing_is_swept_on_the_word_of_another_user(shm, tmp_path, monkeypatch):
    """Wrong: whoever may write to /dev/shm could have any folder tritonforge-* of this user deleted, a living server's
    run folder or a checkout, and hold up every start with a pipe."""
    folder, region = tmp_path / "tritonforge-checkout", shm / "tritonforge-1-region"
    folder.mkdir()
    region.touch()
    (shm / "tritonforge-.owner").write_text(str(folder))
    os.mkfifo(shm / "tritonforge-pipe.owner")
    (shm / "tritonforge-link.owner").symlink_to(shm / "tritonforge-.owner")
    mine = os.getuid()
    monkeypatch.setattr(shared_memory.os, "getuid", lambda: mine + 1)
    shared_memory.sweep()
    assert folder.exists() and region.exists()


def test_sweeping_removes_no_folder_that_is_not_a_run_folder(shm, tmp_path):
    (shm / "tritonforge-x.owner").write_text(str(tmp_path))
    shared_memory.sweep()
    assert tmp_path.exists() and not list(shm.iterdir())


def log_of(tmp_path: Path, text: str, code: int | None = 1):
    """What a process says of itself whose log is `text`."""
    log = ServerLog(tmp_path / "log")
    os.write(log.fd, text.encode())
    log.started()
    return TritonProcess.failure(SimpleNamespace(_log=log, exit_code=lambda: code))


def test_a_load_error_is_told_in_one_line_without_its_traceback(tmp_path):
    text = (
        'I1130 11:38:43.421422 5700 pb_stub.cc:366] "Failed to initialize Python stub: INVALID_ARGUMENT: x"\n'
        "E1130 11:38:43.681090 5700 model_lifecycle.cc:642] \"failed to load 'decoder' version 1: Internal: "
        'INVALID_ARGUMENT: engine/model.bin was changed\\n\\nAt:\\n  /m/decoder/1/model.py(6): initialize\\n"\n'
        "error: creating server: Internal - failed to load all models\n"
    )
    error = log_of(tmp_path, text)
    assert str(error) == "INTERNAL: model decoder does not load: INVALID_ARGUMENT: engine/model.bin was changed"


def test_without_a_load_error_the_last_fatal_line_is_told(tmp_path):
    text = 'I1130 11:38:43.6 1 a.cc:1] "fine"\nE1130 11:38:43.6 1 main.cc:2] "failed to start HTTP service"\n'
    assert "ended with code 1: failed to start HTTP service" in str(log_of(tmp_path, text))


@pytest.mark.parametrize("install", [TritonInstall(Path("/b")), TritonInstall(Path("/b"), {"backends/x": Path("/x")})])
def test_no_variable_opens_a_port_that_was_not_asked_for(install, monkeypatch, tmp_path):
    """Triton serves Vertex AI on every address as soon as this variable is set."""
    monkeypatch.setenv("AIP_MODE", "PREDICTION")
    monkeypatch.setenv("KEPT", "1")
    environment = install.environment(tmp_path)
    assert "AIP_MODE" not in environment and environment["KEPT"] == "1"


def test_a_missing_libpython_is_told_with_its_package(monkeypatch):
    package = triton_install.importlib.util.find_spec("pytriton")
    if package is None:
        pytest.skip("the wheel is not installed")
    monkeypatch.setattr(triton_install, "CONTAINER_BINARY", Path("/nonexistent"))
    monkeypatch.setattr(triton_install, "find_libpython", lambda: None)
    with pytest.raises(SetupError, match=rf"{triton_install.LIBPYTHON} is missing; .*libpython{triton_install.PYTHON}"):
        triton_install.find_triton()


def test_numpy_2_is_refused_because_the_stub_would_crash(monkeypatch):
    monkeypatch.setattr(triton_install, "CONTAINER_BINARY", Path("/nonexistent"))
    monkeypatch.setattr(triton_install.importlib.metadata, "version", lambda name: "2.1.0")
    monkeypatch.setattr(triton_install, "find_libpython", lambda: Path("/lib/libpython.so"))
    with pytest.raises(SetupError, match=r"numpy 2\.1\.0 .*'numpy<2'"):
        triton_install.find_triton()


def test_no_tritonserver_at_all_is_told_with_the_remedy(monkeypatch):
    monkeypatch.setattr(triton_install, "CONTAINER_BINARY", Path("/nonexistent"))
    monkeypatch.setattr(triton_install.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(triton_install.shutil, "which", lambda name: None)
    with pytest.raises(SetupError, match="pip install nvidia-pytriton"):
        triton_install.find_triton()


def test_a_folder_without_a_manifest_is_no_release(tmp_path):
    with pytest.raises(NotFound, match="no release"):
        Server(tmp_path)


def test_the_decoder_is_told_to_drain_once_and_says_when_it_has(tmp_path, monkeypatch):
    path = tmp_path / "drain"
    monkeypatch.setenv(drain.VARIABLE, str(path))
    asked = drain.threading.Event()
    timeouts = []
    drain.on_drain(lambda timeout_s: (timeouts.append(timeout_s), asked.set()), end_orphan=lambda code: None)
    file = drain.DrainFile(path)
    assert not file.done([os.getpid()])
    file.ask(2.5)
    assert asked.wait(5) and timeouts == [2.5]
    for _ in range(100):
        if file.done([os.getpid()]):
            break
        drain.threading.Event().wait(0.02)
    assert file.done([os.getpid()]) and not file.done([os.getpid(), 1]), "the server drains until every decoder has"


def test_a_decoder_whose_tritonserver_died_ends_itself(tmp_path):
    code = (
        "import os, time\n"
        "from tritonforge.launch.drain import on_drain\n"
        "if os.fork() == 0:\n"
        "    on_drain(lambda timeout_s: None)\n"
        "    print(os.getpid(), flush=True)\n"
        "    time.sleep(60)\n"
        "time.sleep(60)\n"
    )
    environment = dict(os.environ, **{drain.VARIABLE: str(tmp_path / "drain")})
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)
    pidfd = os.pidfd_open(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    ended = select.select([pidfd], [], [], 10)[0]
    os.close(pidfd)
    assert ended


def test_a_process_whose_interpreter_is_stuck_in_a_call_does_not_outlive_its_server(tmp_path):
    """Wrong: a stub of a dead server would keep its model in memory for ever."""
    code = (
        "import ctypes\n"
        "from tritonforge.launch import drain\n"
        "drain.HUNG_S = 0.5\n"
        "drain.on_drain(lambda timeout_s: None)\n"
        "ctypes.PyDLL(None).sleep(60)  # keeps the interpreter's lock, as a call into Triton does\n"
    )
    environment = dict(os.environ, **{drain.VARIABLE: str(tmp_path / "drain")})
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=30).returncode == -signal.SIGALRM


def test_without_a_supervisor_nothing_watches(monkeypatch):
    monkeypatch.delenv(drain.VARIABLE, raising=False)
    before = drain.threading.active_count()
    drain.on_drain(lambda timeout_s: None)
    assert drain.threading.active_count() == before


def test_an_unreadable_model_configuration_is_named_with_what_is_wrong_in_it(tmp_path):
    text = (
        "[libprotobuf ERROR t.cc:3] Error parsing text-format inference.ModelConfig: 3:17: Expected integer, got: one\n"
        "E1130 19:35:28.953773 20898 model_repository_manager.cc:1460] \"Poll failed for model directory 'decoder': "
        'failed to read text proto from /r/decoder/config.pbtxt"\n'
        "error: creating server: Internal - failed to load all models\n"
    )
    error = str(log_of(tmp_path, text))
    assert (
        "model decoder does not load: failed to read text proto from /r/decoder/config.pbtxt (3:17: Expected" in error
    )


def config(compose, **more):
    return ServerConfig(compose, Ports(1, 2, 3), "127.0.0.1", 1.0, "key", **more)


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """The folder in which run folders are made."""
    folder = tmp_path / "runs"
    folder.mkdir()
    monkeypatch.setattr(triton_process.tempfile, "tempdir", str(folder))
    return folder


def test_a_server_that_cannot_be_started_leaves_nothing_behind(shm, runs, tmp_path):
    """Wrong: each try to replace a server whose release is being rebuilt would leave a folder and a locked file."""

    def compose(run_dir):
        raise ReleaseMismatch("config.pbtxt cannot be read")

    with pytest.raises(ReleaseMismatch):
        TritonProcess(TritonInstall(Path("/bin/true")), config(compose))
    with pytest.raises(EngineFailure, match=r"log file .*nowhere/log.*No such file"):
        TritonProcess(TritonInstall(Path("/bin/true")), config(lambda run: run, log_file=tmp_path / "nowhere" / "log"))
    assert not list(shm.iterdir()) and not list(runs.iterdir())


ECHO = "#!/bin/sh\necho error: the disk is full\nexit 3\n"


@pytest.fixture
def echo(tmp_path):
    """Stands for a tritonserver that says why it fails."""
    path = tmp_path / "echo.sh"
    path.write_text(ECHO)
    path.chmod(0o755)
    return TritonInstall(path)


def ended(process):
    assert select.select([process.pidfd], [], [], 30)[0]
    try:
        return str(process.failure())
    finally:
        process.close()


def test_a_log_file_that_is_a_pipe_gets_the_log_and_failures_are_still_explained(shm, runs, echo, tmp_path):
    """Wrong: a container could not have the server's log on its standard output."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reader, True)
    assert "ended with code 3: the disk is full" in ended(TritonProcess(echo, config(lambda run: run, log_file=pipe)))
    with open(reader, "rb") as file:
        assert file.read() == b"error: the disk is full\n"


def test_the_standard_output_can_be_the_log(shm, runs, echo):
    """Whatever it is: here a pipe, which the launcher inherited."""
    code = (
        "import select, sys; from pathlib import Path; from tests.unit.test_server import config, ended\n"
        "from tritonforge.launch import shared_memory; from tritonforge.launch.triton_install import TritonInstall\n"
        "from tritonforge.launch.triton_process import TritonProcess\n"
        "shared_memory.SHM = Path(sys.argv[2])\n"
        "settings = config(lambda run: run, log_file=Path('/dev/stdout'))\n"
        "print(ended(TritonProcess(TritonInstall(Path(sys.argv[1])), settings)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, echo.binary, shm], capture_output=True, text=True, timeout=60)
    assert done.stdout == "error: the disk is full\n" and "code 3: the disk is full" in done.stderr


def test_a_pipe_that_nobody_reads_any_more_stops_no_server(tmp_path):
    """Wrong: the first line after a log collector's death would block or end the server."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    log = ServerLog(path)
    os.close(reader)
    for _ in range(40):
        os.write(log.fd, b"x" * 9_999 + b"\n")
    os.write(log.fd, b"last line\n")
    log.started()
    log.close()
    text = log.text()
    assert text.endswith("x\nlast line\n") and len(text) < 300_000, "what is kept of it is bounded"


def test_a_pipe_that_nobody_opened_is_refused_and_not_waited_for(tmp_path):
    """Wrong: the supervisor would stand still until somebody reads, and not even a stop would end it."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(EngineFailure, match=r"log file .*pipe"):
        ServerLog(tmp_path / "pipe")


def test_a_regular_log_file_is_told_from_where_this_server_began(tmp_path):
    path = tmp_path / "log"
    path.write_text("of the one before\n")
    log = ServerLog(path)
    os.write(log.fd, b"mine\n")
    log.started()
    log.close()
    assert log.text() == "mine\n" and path.read_text() == "of the one before\nmine\n"


def test_folders_of_other_servers_may_go_while_they_are_looked_at(tmp_path):
    """Wrong: a server that stops, or a dangling link in /tmp, would make another one's start fail."""
    (tmp_path / "python_env_gone").symlink_to(tmp_path / "gone")
    (tmp_path / "python_env_mine").mkdir()
    assert triton_process._backend_folders(tmp_path) == {tmp_path / "python_env_mine"}


def test_a_process_of_another_user_is_no_stub_whatever_its_command_line_says(monkeypatch):
    """Wrong: any user could have the server replaced: a look-alike that ends would be the death of a stub."""
    prefix = "tritonforge-123456789abc"
    code = "import sys; print(flush=True); sys.stdin.read()"
    arguments = [sys.executable, "-c", code, triton_install.STUB, prefix]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        seen = SimpleNamespace(_memory=SimpleNamespace(prefix=prefix))
        assert TritonProcess.stub_pids(seen) == [process.pid]
        mine = os.getuid()
        monkeypatch.setattr(triton_process.os, "getuid", lambda: mine + 1)
        assert TritonProcess.stub_pids(seen) == []


def test_a_drain_that_cannot_be_told_to_the_decoder_still_lets_triton_drain(tmp_path):
    """Wrong: with a full disk a stop would kill every running stream."""
    asked = []
    process = SimpleNamespace(
        config=SimpleNamespace(drain_timeout_s=1.0),
        _drain_file=drain.DrainFile(tmp_path / "no-folder" / "drain"),
        _process=SimpleNamespace(terminate=lambda: asked.append("terminate")),
    )
    TritonProcess.drain(process)
    assert asked == ["terminate"]


@pytest.fixture
def answering():
    """answering(bytes) -> the port of a listener that answers each connection so."""
    opened = []

    def answering(answer: bytes) -> int:
        listener = socket.create_server(("127.0.0.1", 0))
        opened.append(listener)

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.recv(4096)
                        connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        return listener.getsockname()[1]

    yield answering
    for listener in opened:
        listener.close()


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "ready"),
    [
        (OK, True),
        (OK.replace(b"200", b"400"), False),
        (b"", False),
        (b"SSH-2.0-OpenSSH_9.2\r\n", False),
        (b"HTTP/1.1 two hundred\r\n\r\n", False),
        (b"HTTP/9.9 200 OK\r\n\r\n", False),
        (b"HTTP/1.1 200 OK\r\n" + b"X: " + b"y" * 70_000 + b"\r\n\r\n", False),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n", False),
        (b"HTTP/1.1 301 Moved\r\nLocation: http://[oops/\r\n\r\n", False),
    ],
)
def test_garbage_on_the_ports_is_a_server_that_is_not_ready(answering, answer, ready):
    """Wrong: what answers in its place, or a server that ends in the middle of an answer, ends the supervisor."""
    ports = Ports(1, answering(answer), 2)
    process = SimpleNamespace(config=SimpleNamespace(address="127.0.0.1", ports=ports))
    assert TritonProcess.is_ready(process) is ready


def test_one_decoder_is_asked_to_refuse_and_the_others_go_on(tmp_path, monkeypatch):
    """Wrong: a canary with changed weights would go on answering until its last stream has ended, or all would stop."""
    monkeypatch.setenv(drain.VARIABLE, str(tmp_path / "drain"))
    asked, timeouts = threading.Event(), []
    file = drain.DrainFile(tmp_path / "drain")
    file.ask_one(os.getpid() + 1, 5.0)
    drain.on_drain(lambda timeout_s: (timeouts.append(timeout_s), asked.set()), end_orphan=lambda code: None)
    file.ask_one(os.getpid(), 0.0)
    assert asked.wait(10) and timeouts == [0.0]


def test_a_decoder_is_told_how_many_canaries_were_given_up(tmp_path, monkeypatch):
    monkeypatch.delenv(drain.VARIABLE, raising=False)
    assert drain.taken_back() == 0
    monkeypatch.setenv(drain.VARIABLE, str(tmp_path / "drain"))
    assert drain.taken_back() == 0
    drain.count_taken_back(tmp_path, 3)
    assert drain.taken_back() == 3


def test_a_process_that_was_given_a_retired_ones_id_is_not_retired(monkeypatch):
    """Wrong: the death of a later canary's process would not be noticed."""
    births = {7: 100, 8: 200}
    monkeypatch.setattr(triton_process, "birth", lambda pid: births.get(pid, 0))
    process = TritonProcess.__new__(TritonProcess)
    process._retired = {}
    process.stubs_of = lambda version: [7, 8]
    process.retire(999)
    assert process.retired_stubs == {7, 8}
    del births[7]
    assert process.retired_stubs == {7, 8}, "its end is still expected when the supervisor looks"
    births[8] = 300
    assert process.retired_stubs == {7}


def test_the_stubs_of_a_version_are_not_those_of_another_whose_number_ends_alike(monkeypatch):
    lines = {
        1: "stub /r/decoder/999/model.py",
        2: "stub /r/tokenizer/999/model.py",
        3: "stub /r/decoder/1999/model.py",
    }
    monkeypatch.setattr(triton_process, "command_line", lines.get)
    process = SimpleNamespace(stub_pids=lambda: [1, 2, 3])
    assert TritonProcess.stubs_of(process, 999) == [1, 2]
    assert TritonProcess.stubs_of(process, 999, "decoder") == [1]


@pytest.mark.parametrize(("soft", "hard", "seen"), [(256, 2048, 2048), (256, 256, 256), (512, -1, OPEN_FILES)])
def test_a_server_may_open_as_many_files_as_the_hard_limit_allows(shm, runs, tmp_path, soft, hard, seen):
    """Wrong: under a shell's usual 1,024 so many idle connections lock every client out, gRPC and HTTP alike."""
    binary = tmp_path / "limits.sh"
    binary.write_text("#!/bin/sh\necho error: $(ulimit -n)\nexit 3\n")
    binary.chmod(0o755)
    code = (
        "import resource, sys; from pathlib import Path; from tests.unit.test_server import config, ended\n"
        "from tritonforge.launch import shared_memory; from tritonforge.launch.triton_install import TritonInstall\n"
        "from tritonforge.launch.triton_process import TritonProcess\n"
        "shared_memory.SHM = Path(sys.argv[2]); hard = int(sys.argv[4])\n"
        "most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[3]), most if hard < 0 else hard)); print(most)\n"
        "print(ended(TritonProcess(TritonInstall(Path(sys.argv[1])), config(lambda run: run))))\n"
    )
    arguments = [sys.executable, "-c", code, binary, shm, str(soft), str(hard)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=True)
    most, told = done.stdout.splitlines()
    if hard < 0 and int(most) >= 0:
        seen = min(seen, int(most))
    assert told.endswith(f"code 3: {seen}")
