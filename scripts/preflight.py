"""Says in one line, with the remedy, what this machine lacks for the demo and the tests. Standard library only.

It is written for any Python 3, so that an old one can say that it is too old. Exit code 1 when something is missing.
"""

import ctypes.util
import os
import shutil
import socket
import subprocess
import sys
import sysconfig

SUPPORTED = ((3, 11), (3, 12))
NEEDED_GB = {"install": 12, "run": 2}  # PyPI's torch brings CUDA's libraries, a CPU build of it does not
ENVIRONMENTS = (".venv", ".venv-build")
STAMP = ".made-from"  # as in environment.py, which writes it when an environment is complete


def version_name(version):
    """3.11 for (3, 11, 7, ...)."""
    return f"{version[0]}.{version[1]}"


def check_python(version, found_on_path):
    """Return what is wrong with this Python version; `found_on_path` names supported ones that are installed."""
    if version[:2] in SUPPORTED:
        return None
    if found_on_path:
        remedy = f"run it with PYTHON={found_on_path[0]}"
    else:
        remedy = "install Python 3.12 and run it with PYTHON=python3.12"
    return f"Python 3.11 or 3.12 is needed, found {version_name(version)} at {sys.executable}; {remedy}"


def check_venv():
    """Return what is wrong when environments cannot be made."""
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError as error:
        package = f"python{version_name(sys.version_info)}-venv"
        return f"{error.name} is missing; install the venv module (Debian, Ubuntu: apt-get install {package})"
    return None


def check_libpython():
    """Return what is wrong when the Python backend's stub will not find its libpython."""
    version = version_name(sys.version_info)
    name = f"libpython{version}.so.1.0"
    folders = [sysconfig.get_config_var("LIBDIR"), "/usr/lib64"]
    folders.append(f"/usr/lib/{sysconfig.get_config_var('MULTIARCH')}")
    known = ctypes.util.find_library("python" + version)
    if known == name or any(folder and os.path.exists(os.path.join(folder, name)) for folder in folders):
        return None
    return f"{name} is missing; install it (Debian, Ubuntu: apt-get install libpython{version})"


def check_machine():
    """Return what is wrong when the tritonserver of the wheel cannot run here at all."""
    if sys.platform.startswith("linux") and os.uname().machine == "x86_64":
        return None
    return f"Linux on x86_64 is needed for tritonserver, found {sys.platform}; use a container or a virtual machine"


def check_disk(folder, needed_gb):
    """Return what is wrong when `folder` has less than `needed_gb` GB left."""
    free_gb = shutil.disk_usage(folder).free / 1e9
    if free_gb >= needed_gb:
        return None
    return f"{needed_gb} GB of disk are needed in {folder}, found {free_gb:.1f}; free some space"


def disk_needed_gb(folder):
    """GB that the commands need in the checkout `folder`: less when both environments are complete."""
    made = all(os.path.exists(os.path.join(folder, name, STAMP)) for name in ENVIRONMENTS)
    return NEEDED_GB["run" if made else "install"]


def check_ports(ports):
    """Return what is wrong when one of `ports` of the loopback address is in use."""
    for port in ports:
        probe = socket.socket()
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return f"port {port} is busy ({error.strerror}); stop what uses it, or choose another"
        finally:
            probe.close()
    return None


def installed_pythons():
    """Names of supported Pythons that start; a version manager's stand-in may be on PATH and not start."""
    names = [f"python{version_name(version)}" for version in reversed(SUPPORTED)]
    return [name for name in names if shutil.which(name) and starts(name)]


def starts(name):
    """True when the program `name` runs as a Python."""
    with open(os.devnull, "wb") as nowhere:
        return subprocess.call([name, "-c", ""], stdout=nowhere, stderr=nowhere) == 0


def main(arguments):
    """Check everything, and that the ports named in `arguments` are free; say all that is wrong."""
    ports = [int(argument) for argument in arguments]
    wrong = check_python(tuple(sys.version_info), installed_pythons())
    checks = [] if wrong else [check_machine(), check_venv(), check_libpython()]
    checks += [check_disk(os.getcwd(), disk_needed_gb(os.getcwd())), check_ports(ports)]
    problems = [problem for problem in [wrong, *checks] if problem]
    for problem in problems:
        sys.stderr.write(f"preflight: {problem}\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
