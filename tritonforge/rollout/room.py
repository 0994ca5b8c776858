"""Is there memory for one more release? Asked before it is loaded: a machine that runs out kills the stable one too."""

import logging

from tritonforge.errors import Overloaded, ReleaseMismatch
from tritonforge.memory.available import available_bytes
from tritonforge.memory.plan import MIB, MemoryPlan
from tritonforge.memory.probe import measure_base_bytes
from tritonforge.release import Release

log = logging.getLogger("tritonforge.server")


def check_room(release: Release) -> None:
    """Raises Overloaded, with the figures, when `release` takes more memory than machine and control groups have left.

    By its memory plan, for its decoder and its tokenizer. A KV cache that is sized at load has to hold one longest
    sequence. A release whose manifest has no memory figures is not checked, which is logged.
    """
    try:
        MemoryPlan.of_manifest(release.manifest, 0)  # before anything is measured
    except ReleaseMismatch as error:
        log.warning("the memory for %s is not checked: %s", release.name, error)
        return
    base_bytes = measure_base_bytes(release.model_repository / "decoder" / "1")
    plan = MemoryPlan.of_manifest(release.manifest, base_bytes)
    fits_itself = release.manifest["sizes"]["kv_cache"].get("fit_memory", False)
    decoder = plan.bytes_for(1, plan.max_model_len) if fits_itself else plan.total_bytes
    needed, free = decoder + base_bytes, available_bytes()
    if needed > free:
        raise Overloaded(
            f"release {release.name} needs {_mib(needed)} MiB (decoder {_mib(decoder)}, tokenizer {_mib(base_bytes)}); "
            f"this machine and its control groups have {free // MIB} MiB left: free memory, build it with a smaller KV "
            "cache, or load it anyway with --ignore-memory"
        )


def _mib(size: int) -> int:
    return -(-size // MIB)
