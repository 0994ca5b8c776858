"""Rehearsals of what goes wrong before anything is served: a damaged model, a wrong configuration, a full disk."""

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from loadtests.rehearsals_stage import NotPossible, Rehearsal, Served, Stage, see_service, serve, serving
from loadtests.sweep_variant import DECODER_CONFIG, decoder_config, link_files, make_variant, replace_file
from tritonforge.launch.ports import Ports
from tritonforge.release import MANIFEST

START_S = 90.0
ROOT = Path(__file__).resolve().parent.parent


def free_ports() -> tuple[int, int, int]:
    """Three ports that nobody listens on now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ports = tuple(one.getsockname()[1] for one in sockets)
    for one in sockets:
        one.close()
    return ports


def listens(port: int) -> bool:
    """Whether anybody does."""
    with socket.socket() as one:
        one.settimeout(1)
        return one.connect_ex(("127.0.0.1", port)) == 0


def refused(stage: Stage, served: Served, *, names: tuple[str, ...], what: str) -> None:
    """See a start that was refused as it must be: at once, in one line, with every one of `names` in it."""
    lines = served.output.strip().splitlines()
    one_line = len(lines) == 1 and all(name in lines[0] for name in names)
    text = lines[0] if len(lines) == 1 else f"{len(lines)} lines: {served.output[-400:]!r}"
    stage.see(what, served.code == 1 and one_line, f"exit code {served.code} after {served.seconds:.1f} s: {text}")


def model_does_not_load(stage: Stage) -> None:
    """One byte of the engine's weights is another, as after a bad copy or on a bad disk."""
    broken, ports = stage.scratch / "broken", free_ports()
    link_files(stage.release.root, broken)
    shutil.copyfile(stage.release.root / MANIFEST, broken / MANIFEST)
    files = stage.release.manifest["files"]
    victim = max((name for name in files if "/engine/" in name), key=lambda name: files[name]["bytes"])
    content = bytearray((stage.release.root / victim).read_bytes())
    content[len(content) // 2] ^= 1
    replace_file(broken / victim, bytes(content))
    served = serve(broken, ports, START_S)
    refused(stage, served, names=("model decoder does not load", Path(victim).name), what="refused")
    open_ports = [port for port in ports if listens(port)]
    stage.see("closed", not served.was_ready and not open_ports, f"ready: {served.was_ready}; open ports: {open_ports}")
    with serving(stage.release, ports=Ports(*ports)) as server:
        see_service(stage, server.grpc_url)


def invalid_config(stage: Stage) -> None:
    """Three releases whose manifests are right and whose configuration is not."""
    config = decoder_config(stage.release)
    no_seats = json.loads(json.dumps(config))
    no_seats["scheduler"]["max_num_seqs"] = 0
    unknown = {**config, "max_num_sequences": 32}
    pbtxt = "model_repository/decoder/config.pbtxt"
    text = (stage.release.root / pbtxt).read_text(encoding="utf-8")
    cases = (
        ("value", DECODER_CONFIG, json.dumps(no_seats), ("decoder", "scheduler.max_num_seqs", "got 0")),
        ("key", DECODER_CONFIG, json.dumps(unknown), ("decoder", "decoder.json", "max_num_sequences")),
        ("pbtxt", pbtxt, text.replace("max_batch_size: 1", "max_batch_size: one"), ("config.pbtxt",)),
    )
    for what, path, content, names in cases:
        variant = make_variant(stage.release, stage.scratch / what, {path: content.encode()})
        refused(stage, serve(variant.root, free_ports(), START_S), names=names, what=what)
    with serving(stage.release) as server:
        see_service(stage, server.grpc_url)


SCRIPT = """set -e
mount -t tmpfs -o size={small}k tmpfs {room}
cp -r {release} {room}/release
set +e
{command} 2> {out}/stderr > {out}/stdout; echo $? > {out}/code
ls -A {room} > {out}/left
{verify} {room}/release > {out}/verify 2>&1; echo $? > {out}/verify-code
mount -o remount,size={large}k {room}
{command} 2> {out}/stderr-again > {out}/stdout-again; echo $? > {out}/code-again
{verify} {room}/release > {out}/verify-again 2>&1; echo $? > {out}/verify-again-code
"""
"""Runs in a mount namespace of its own: the small disk is seen by nobody else and is gone afterwards."""


def stage_folders(name: str) -> list[str]:
    """Options for build/assemble.py: the folders in which the checkout keeps the stages of a release."""
    work = ROOT / "artifacts" / "build"
    found = {part: work / f"{part}-{name}" for part in ("quantize", "compile")}
    records = {part: folder / "record.json" for part, folder in found.items()}
    if not all(path.is_file() for path in records.values()):
        raise NotPossible(f"needs the build stages of {name} in artifacts/build; build it with `make release`")
    wanted = json.loads(records["quantize"].read_text(encoding="utf-8"))["inputs"].get("export")
    for record in work.glob("export-*/record.json"):
        if json.loads(record.read_text(encoding="utf-8"))["digest"] == wanted:
            found["export"] = record.parent
            return [word for part, folder in found.items() for word in (f"--{part}", str(folder))]
    raise NotPossible(f"needs the export stage of {name} in artifacts/build; build it with `make release`")


def disk_full(stage: Stage) -> None:
    """The last stage of a build writes a new release onto a disk that only has room for the old one."""
    name = stage.release.name
    recipe = ROOT / "build" / "recipes" / f"{name}.toml"
    if not recipe.is_file():
        raise NotPossible(f"needs the release's recipe, {recipe} is not there")
    options = stage_folders(name)
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        raise NotPossible("needs user namespaces (`unshare -rm`) to make a small disk")
    room, out = stage.scratch / "room", stage.scratch / "out"
    room.mkdir()
    out.mkdir()
    size = sum(facts["bytes"] for facts in stage.release.manifest["files"].values()) // 1024
    build = [sys.executable, str(ROOT / "build" / "assemble.py"), "--recipe", str(recipe), *options]
    script = SCRIPT.format(
        small=round(size * 1.4),
        large=size * 3,
        room=room,
        out=out,
        release=stage.release.root,
        command=" ".join([*build, "--out", str(room / "release"), "--force"]),
        verify=" ".join([sys.executable, "-m", "tritonforge", "verify"]),
    )
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, check=False)
    if done.returncode or not (out / "verify-again-code").is_file():
        raise NotPossible(f"the small disk could not be made: {done.stderr.strip()[-200:]}")
    _see_build(stage, lambda name: (out / name).read_text(encoding="utf-8").strip())


def _see_build(stage: Stage, read: Callable[[str], str]) -> None:
    lines = read("stderr").splitlines()
    said = len(lines) == 1 and "No space left on device" in lines[0]
    text = lines[0] if len(lines) == 1 else f"{len(lines)} lines: {read('stderr')[-300:]!r}"
    stage.see("said", read("code") == "1" and said, f"exit code {read('code')}: {text}")
    stage.see("clean", read("left") == "release", f"beside the release: {read('left').split()}")
    stage.see("intact", read("verify-code") == "0", read("verify") or "nothing said")
    again = f"exit code {read('code-again')}; {read('verify-again')}"
    stage.see("back", read("code-again") == read("verify-again-code") == "0", again)


REHEARSALS = (
    Rehearsal(
        "model-does-not-load",
        "one byte of the engine's weights is changed",
        {
            "refused": "`tritonforge serve` ends with exit code 1 and one line that names the model and the file",
            "closed": "the server is never ready, and nothing listens on its ports afterwards",
            "back": "the release that was there before serves on the same ports at once",
        },
        model_does_not_load,
    ),
    Rehearsal(
        "invalid-config",
        "a release's configuration breaks a rule: a value, an unknown key, a config.pbtxt that is none",
        {
            "value": "exit code 1, one line with field, value and rule",
            "key": "exit code 1, one line with the unknown key",
            "pbtxt": "exit code 1, one line with the file",
            "back": "the valid release serves",
        },
        invalid_config,
    ),
    Rehearsal(
        "disk-full-at-build",
        "the disk fills up while a release is written over an older one",
        {
            "said": "the build ends with exit code 1 and one line that says that the disk is full",
            "clean": "nothing half-built is left beside the older release",
            "intact": "the older release is whole",
            "back": "with room on the disk, the same command makes the release",
        },
        disk_full,
    ),
)
