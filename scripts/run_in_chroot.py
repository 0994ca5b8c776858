"""Starts what image_in_chroot.py made, with all taken away that a hardened pod takes away, and uses it.

    python scripts/run_in_chroot.py --image /var/tmp/image/cpu.json --release artifacts/releases/smollm2-135m-int8

The root file system is read-only, /tmp and /dev/shm are small and empty, the user is the image's, there are no
capabilities, no new privileges, and no network but a loopback of its own. It must become healthy by the image's own
health check, generate, refuse to write, and end on SIGTERM with code 0. Exit codes: 0 all seen, 1 something was not.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

HEALTHY_S = 180.0
END_S = 90.0
CLOSED = ("/", "/usr", "/opt/tritonforge", "/etc", "/var/tmp", "/run/lock", "/release")
"""Folders in which nobody must be able to write; those of Debian that all may write to are among them."""
STAGING = """
set -e
mount --make-rprivate /
ip link set lo up
mount --bind "$1" "$1"
mount -o remount,bind,ro "$1"
mount -t proc proc "$1/proc"
mount -t tmpfs -o size=256m,mode=1777 tmpfs "$1/tmp"
mount -t tmpfs -o mode=0755 tmpfs "$1/dev"
mkdir "$1/dev/shm"
mount -t tmpfs -o size=512m,mode=1777 tmpfs "$1/dev/shm"
for name in null zero full random urandom; do touch "$1/dev/$name"; mount --bind /dev/$name "$1/dev/$name"; done
mount --bind -o ro "$2" "$1/release"
shift 2
exec "$@"
"""


def command_of(image: dict, words: list[str]) -> list[str]:
    """The command that runs `words` in the image as its user, without capabilities or ways to get any."""
    user, _, group = image["user"].partition(":")
    settings = [f"{name}={value}" for name, value in image["environment"].items()]
    drop = ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all", "--clear-groups"]
    identity = ["setpriv", f"--reuid={user}", f"--regid={group}", *drop]
    return ["chroot", image["root"], *identity, "env", "-i", *settings, *words]


def inside(image: dict) -> list[tuple[str, bool, str]]:
    """Start the service, use it, end it; what must be seen, whether it was, and what was seen. In the namespaces."""
    seen: list[tuple[str, bool, str]] = []
    service = subprocess.Popen(command_of(image, [*image["entrypoint"], *image["command"]]))
    began = time.monotonic()
    try:
        code = 1
        while code != 0 and service.poll() is None and time.monotonic() - began < HEALTHY_S:
            time.sleep(0.5)
            code = subprocess.run(command_of(image, image["health"]), check=False, capture_output=True).returncode
        took = time.monotonic() - began
        seen.append(("healthy", code == 0, f"health check ended with {code} after {took:.1f} s"))
        if code == 0:
            seen += use(image)
    finally:
        service.send_signal(signal.SIGTERM)
        try:
            ended = service.wait(END_S)
        except subprocess.TimeoutExpired:
            service.kill()
            ended = service.wait()
        seen.append(("ends on SIGTERM", ended == 0, f"exit code {ended}"))
    return seen


def use(image: dict) -> list[tuple[str, bool, str]]:
    """What a healthy service must show."""
    question = [*image["entrypoint"], "generate", "--chat", "What is the capital of France?"]
    answer = subprocess.run(command_of(image, question), check=False, capture_output=True, text=True)
    seen = [("generates", "Paris" in answer.stdout, answer.stdout.strip() or answer.stderr.strip())]
    user = image["user"].split(":")[0]
    owners = {process: status for process, status in statuses().items() if status["root"] == image["root"]}
    foreign = [status["name"] for status in owners.values() if set(status["uids"]) != {user}]
    seen.append(
        ("runs as non-root", bool(owners) and not foreign and user != "0", f"{len(owners)} processes of uid {user}")
    )
    powers = {status["capabilities"] for status in owners.values()}
    seen.append(("has no capabilities", powers == {"0000000000000000"}, ", ".join(sorted(powers))))
    script = f"for folder in {' '.join(CLOSED)}; do touch $folder/written 2>/dev/null && echo $folder; done; true"
    written = subprocess.run(command_of(image, ["/bin/sh", "-c", script]), check=True, capture_output=True, text=True)
    seen.append(("cannot write", not written.stdout, written.stdout.strip() or f"refused in {', '.join(CLOSED)}"))
    ready = subprocess.run(command_of(image, image["health"]), check=False, capture_output=True, text=True)
    seen.append(("stays healthy", ready.returncode == 0, ready.stdout.strip()))
    return seen


def statuses() -> dict[int, dict]:
    """Of each process of this namespace: its name, user ids, effective capabilities and root folder."""
    found = {}
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
            root = os.readlink(f"/proc/{pid}/root")
        except OSError:  # it has ended
            continue
        fields = dict(re.findall(r"^(\w+):\t(.*)$", text, re.MULTILINE))
        facts = {"name": fields["Name"], "uids": fields["Uid"].split(), "capabilities": fields["CapEff"], "root": root}
        found[pid] = facts
    return found


def main(arguments: list[str] | None = None) -> int:
    """Make the namespaces and look from inside them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", type=Path, required=True, help="the JSON file that image_in_chroot.py wrote")
    parser.add_argument("--release", type=Path, help="the release to serve")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    image = json.loads(options.image.read_text(encoding="utf-8"))
    if options.inside:
        seen = inside(image)
        for what, ok, text in seen:
            print(f"{'ok   ' if ok else 'WRONG'} {what}: {text}", flush=True)
        return 0 if all(ok for _, ok, _ in seen) else 1
    own = [sys.executable, __file__, "--image", options.image.absolute(), "--inside"]
    namespaces = ["unshare", "--mount", "--net", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc"]
    staging = ["sh", "-c", STAGING, "sh", image["root"], options.release.absolute()]
    return subprocess.run([*namespaces, *staging, *own], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
