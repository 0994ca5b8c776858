"""The memory of this process, by Linux's /proc and control groups: what it holds, what it may still take.

Engines ask when the size of the KV cache is to be decided at load; the memory probes ask what a process holds.
"""

import ctypes
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
MADV_DONTNEED = 4


def available_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Bytes that this process can take before the machine or one of its control groups (versions 1 and 2) runs out.

    File pages that nobody used lately are free in effect: the kernel counts them so for the machine (MemAvailable), and
    here they are for a group.
    """
    free = [_fields(proc / "meminfo")["MemAvailable:"] * 1024]
    for line in (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            names = ("memory.max", "memory.current", "inactive_file")
            free += _free_in_groups(cgroups, path, *names)
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            free += _free_in_groups(cgroups / "memory", path, *names)
    return max(0, min(free))


def resident_bytes(proc: Path = PROC, pid: int | str = "self") -> tuple[int, int]:
    """What process `pid` holds in memory now, and the most that it ever held (VmRSS, VmHWM)."""
    status = _fields(proc / str(pid) / "status")
    return status["VmRSS:"] * 1024, status["VmHWM:"] * 1024


def release_mapped_pages(file: Path, proc: Path = PROC) -> int:
    """Let go of the pages of `file` that are mapped read-only into this process; returns the bytes of the mappings.

    A page that is read again comes back from the file, so nothing is lost: for weights that were copied to another
    layout and are not read again.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    name, total = str(file.resolve()), 0
    for line in (proc / "self" / "maps").read_text(encoding="utf-8").splitlines():
        addresses, access, *_, path = line.split(maxsplit=5)
        if path != name or "w" in access:
            continue
        begin, end = (int(address, 16) for address in addresses.split("-"))
        if libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_DONTNEED) == 0:
            total += end - begin
    return total


def _free_in_groups(root: Path, path: str, limit: str, used: str, inactive: str) -> Iterator[int]:
    """Limit minus use of the group `path` below `root` and of each group that holds it; those without a limit are left
    out, and those that lie outside what this container sees."""
    folder = root / path.lstrip("/")
    for group in (folder, *folder.parents):
        if (group / limit).is_file() and (value := (group / limit).read_text(encoding="utf-8").strip()) != "max":
            in_use = int((group / used).read_text(encoding="utf-8"))
            yield int(value) - in_use + _fields(group / "memory.stat").get(inactive, 0)
        if group == root:
            return


def _fields(path: Path) -> dict[str, int]:
    """Lines of `name number ...` as a mapping; other lines are left out."""
    lines = (line.split() for line in path.read_text(encoding="utf-8").splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
