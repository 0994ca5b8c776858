"""What a served release shows from outside: the decoder's metrics, its processes' memory, its shared memory.

Soak and server tests read it; it changes nothing.
"""

import re
import urllib.request
from pathlib import Path

import psutil

from tritonforge.launch.shared_memory import SHM
from tritonforge.server import Server

_SAMPLE = re.compile(r"^(tritonforge_\w+)\{[^}]*\} (\S+)$", re.MULTILINE)
_REGION = re.compile(rf" ({SHM}/\S+)$", re.MULTILINE)
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def decoder_metrics(server: Server, timeout_s: float = 10.0) -> dict[str, float]:
    """The decoder's metrics by family, without the project's prefix. They follow the decoder every 100 ms.

    Raises OSError when the metrics port does not answer.
    """
    with _DIRECT.open(f"http://{server.metrics_url}/metrics", timeout=timeout_s) as answer:
        found = _SAMPLE.findall(answer.read().decode())
    return {name.removeprefix("tritonforge_"): float(value) for name, value in found}


def processes(server: Server) -> dict[str, psutil.Process]:
    """tritonserver and its Python stubs, those by the model they run; a restart changes them."""
    found = {"tritonserver": psutil.Process(server.pid)}
    for stub in map(psutil.Process, server.stub_pids()):
        model = re.search(r"/(\w+)/\d+/model\.py", " ".join(stub.cmdline()))
        found[f"{model[1]} stub" if model else f"stub {stub.pid}"] = stub
    return found


def memory(server: Server) -> dict[str, int]:
    """Bytes in use: resident memory of each process, and what the server's own regions take of /dev/shm."""
    running = processes(server)
    used = {name: process.memory_info().rss for name, process in running.items()}
    maps = "".join(Path(f"/proc/{process.pid}/maps").read_text() for process in running.values())
    regions = map(Path, set(_REGION.findall(maps)))
    return used | {str(SHM): sum(path.stat().st_blocks * 512 for path in regions)}
