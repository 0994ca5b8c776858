"""What the two commands check and make before anything is installed; and that the serving environment has no torch."""

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PINS = re.compile(r"^([A-Za-z0-9_.-]+)==([^\s;#@]+)( *;.*)?$")


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


preflight, environment = load("preflight"), load("environment")


@pytest.mark.parametrize("version", [(3, 9, 1), (3, 10, 0), (3, 13, 0), (3, 6, 15)])
def test_another_python_is_refused_with_what_to_run(version):
    found = f"found {version[0]}.{version[1]} at "
    assert found in preflight.check_python(version, [])
    assert preflight.check_python(version, ["python3.12"]).endswith("PYTHON=python3.12")
    assert "install Python 3.12" in preflight.check_python(version, [])


def test_this_machine_passes():
    assert preflight.check_python(sys.version_info, []) is None
    assert preflight.check_venv() is None
    assert preflight.check_libpython() is None
    assert preflight.check_disk(str(ROOT), 0.001) is None


def test_a_missing_libpython_is_told_with_its_package(monkeypatch):
    monkeypatch.setattr(preflight.os.path, "exists", lambda path: False)
    monkeypatch.setattr(preflight.ctypes.util, "find_library", lambda name: None)
    assert re.search(r"libpython3\.1[12]\.so\.1\.0 is missing; .*libpython3\.1[12]\)", preflight.check_libpython())


def test_a_full_disk_and_a_busy_port_are_told(tmp_path):
    assert "10000000 GB of disk are needed" in preflight.check_disk(str(tmp_path), 10**7)
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        assert f"port {port} is busy" in preflight.check_ports([port])


def test_preflight_stays_readable_for_old_pythons():
    source = (ROOT / "scripts" / "preflight.py").read_text()
    compile(source, "preflight.py", "exec")
    for newer in (":=", "match ", " | None", "removeprefix", "from __future__"):
        assert newer not in source, f"{newer!r} needs a Python that preflight.py is there to refuse"


def test_an_environment_is_made_once_and_again_when_its_pins_change(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(environment.subprocess, "run", lambda command, **options: made.append(command))
    pins, folder = tmp_path / "pins.txt", tmp_path / "venv"
    pins.write_text("a==1\n")
    folder.mkdir()
    (folder / "leftover").touch()

    def make() -> bool:
        folder.mkdir(exist_ok=True)
        return environment.make(folder, [pins], [])

    monkeypatch.setattr(
        environment.shutil, "rmtree", lambda path, **options: (path / "leftover").unlink(missing_ok=True)
    )
    assert make() and len(made) == 3, "venv, the pins, the project"
    assert not (folder / "leftover").exists(), "a half-made environment is not reused"
    assert not make() and len(made) == 3
    pins.write_text("a==2\n")
    assert make()


def test_an_environment_of_a_copied_checkout_is_made_again(tmp_path, monkeypatch):
    """Its editable install and its programs point into the folder that it was copied from."""
    before = environment.content_key([])
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    assert environment.content_key([]) != before


def test_disk_for_an_installation_is_asked_for_until_both_environments_are_complete(tmp_path):
    assert preflight.STAMP == environment.STAMP
    for name in preflight.ENVIRONMENTS:
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "python").touch()
        assert preflight.disk_needed_gb(str(tmp_path)) == 12, "an interrupted installation has a bin/python too"
    for name in preflight.ENVIRONMENTS:
        assert preflight.disk_needed_gb(str(tmp_path)) == 12
        (tmp_path / name / environment.STAMP).touch()
    assert preflight.disk_needed_gb(str(tmp_path)) == 2


def read_pins(path: Path) -> dict[str, str]:
    """{name: version} of a requirements file; every line must be an exact version, without hosts or paths."""
    wanted = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    assert [line for line in wanted if not PINS.match(line)] == []
    return {PINS.match(line)[1].lower(): PINS.match(line)[2] for line in wanted}


@pytest.mark.parametrize("path", sorted((ROOT / "requirements").glob("*.txt")), ids=lambda path: path.name)
def test_requirements_are_exact_versions_without_hosts_or_paths(path):
    assert read_pins(path)


def test_the_build_environment_pins_what_torch_asks_for():
    pins = read_pins(ROOT / "requirements" / "build.txt")
    needed = {"filelock", "typing_extensions", "setuptools", "sympy", "networkx", "jinja2", "fsspec"}
    assert needed - set(pins) == set(), "pip would take the newest of that day"


def test_the_serving_environment_is_pinned_to_what_the_python_backend_takes():
    pins = read_pins(ROOT / "requirements" / "serve.txt")
    assert pins["nvidia-pytriton"] == "0.7.0"
    assert pins["numpy"].startswith("1."), "the Python backend of this Triton crashes with numpy 2"
    assert not {"torch", "transformers", "nncf"} & set(pins)


PROGRAM = """
import sys, time
print("started", flush=True)
try:
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(0.7)
    print("report", flush=True)
"""


@pytest.mark.parametrize("send", [os.kill, os.killpg], ids=["to the demo", "from the terminal, to all"])
def test_an_interrupted_demo_lets_the_campaign_report(send):
    """The campaign judges what it has when interrupted, which takes longer than subprocess.run would wait."""
    driver = f"""
import sys; sys.path.insert(0, {str(ROOT / "scripts")!r})
import demo
demo.run(sys.executable, "-c", {PROGRAM!r})
"""
    command = [sys.executable, "-c", driver]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    with subprocess.Popen(command, start_new_session=True, **options) as process:
        assert process.stdout.readline() == "started\n"
        send(process.pid, signal.SIGINT)
        printed, errors = process.communicate(timeout=20)
    assert printed == "report\n"
    assert errors.endswith("KeyboardInterrupt\n"), "the demo itself ends as interrupted"


def test_the_serving_environment_holds_no_torch():
    assert importlib.util.find_spec("torch") is None
