"""The memory plan: its sums agree with each other, a cache sized at load fits, and the real decoder keeps the plan."""

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tritonforge.errors import InvalidRequest, ReleaseMismatch, SetupError
from tritonforge.memory.available import available_bytes, release_mapped_pages, resident_bytes
from tritonforge.memory.plan import MIB, MemoryPlan, fit_num_blocks, report
from tritonforge.memory.probe import measure_base_bytes
from tritonforge.release import Release

PLAN = MemoryPlan(
    base_bytes=100 * MIB,
    weight_bytes=130 * MIB,
    runtime_bytes=200 * MIB,
    step_bytes=50 * MIB,
    sampling_bytes=12 * MIB,
    load_peak_bytes=500 * MIB,
    block_bytes=437_760,
    block_size=32,
    num_blocks=128,
    spare_blocks=1,
    max_model_len=2048,
    max_num_seqs=32,
)


def test_a_plan_adds_up():
    assert PLAN.kv_tokens == 4096 and PLAN.kv_bytes == 129 * 437_760
    assert PLAN.kv_bytes_per_token == 13_680
    assert PLAN.fixed_bytes == 492 * MIB
    assert PLAN.total_bytes == 100 * MIB + 500 * MIB, "loading takes more than serving here"
    assert PLAN.within(2000 * MIB).total_bytes > 1999 * MIB


@given(st.integers(1, 2048), st.integers(1, 128))
def test_sequences_and_context_are_two_views_of_one_pool(context, sequences):
    assert PLAN.sequences(context) * PLAN.blocks_of(context) <= PLAN.num_blocks
    assert (PLAN.sequences(context) + 1) * PLAN.blocks_of(context) > PLAN.num_blocks
    longest = PLAN.context(sequences)
    assert PLAN.sequences(longest) >= sequences
    assert longest == PLAN.max_model_len or PLAN.sequences(longest + 1) < sequences


@given(st.integers(600, 100_000))
def test_a_cache_sized_for_a_memory_limit_fills_it_and_keeps_it(memory_mib):
    sized = PLAN.within(memory_mib * MIB)
    assert (
        sized.fixed_bytes + sized.kv_bytes <= memory_mib * MIB < sized.fixed_bytes + sized.kv_bytes + PLAN.block_bytes
    )
    assert sized.sequences(PLAN.max_model_len) >= 1


def test_what_cannot_be_planned_is_refused_with_the_rule():
    with pytest.raises(InvalidRequest, match=r"context must be in \[1, 2048\] \(max_model_len\), got 2049"):
        PLAN.sequences(2049)
    with pytest.raises(InvalidRequest, match="sequences must be at least 1, got 0"):
        PLAN.context(0)
    with pytest.raises(InvalidRequest, match=r"memory must be at least 600 MiB .* max_model_len 2048, got 599"):
        PLAN.within(599 * MIB)
    with pytest.raises(ReleaseMismatch, match=r"lacks 'memory'.*build the release again"):
        MemoryPlan.of_manifest({"sizes": {"kv_cache": {}}}, 0)


def test_the_report_shows_every_part_and_no_context_beyond_the_models():
    lines = report(PLAN).splitlines()
    assert any(line.split() == ["KV", "cache", "53.9", "MiB"] for line in lines)
    assert [line.split() for line in lines[-4:]] == [
        ["256", "16", "16"],
        ["512", "8", "8"],
        ["1024", "4", "4"],
        ["2048", "2", "2"],
    ]


@given(st.integers(64, 4096), st.integers(-(2**20), 2**32), st.integers(1, 2**20))
def test_a_cache_sized_at_load_fits_what_is_free_or_is_refused(most, free, block_bytes):
    needed = (64 + 1) * block_bytes
    try:
        blocks = fit_num_blocks(
            most, max_model_len=2048, block_size=32, block_bytes=block_bytes, spare_blocks=1, free_bytes=free
        )
    except SetupError as error:
        assert free < needed and "max_model_len 2048" in str(error)
    else:
        assert 64 <= blocks <= most and (blocks + 1) * block_bytes <= free
        assert blocks == most or (blocks + 2) * block_bytes > free


def machine(folder, cgroup: str, files: dict[str, str]):
    """A /proc and a /sys/fs/cgroup with 8 GiB available."""
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable:    8388608 kB\n")
    (folder / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        (folder / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "cgroup" / name).write_text(text)
    return folder / "proc", folder / "cgroup"


def test_without_a_limit_the_machine_decides(tmp_path):
    files = {"memory.max": "max\n", "memory.current": "5\n", "memory.stat": ""}
    assert available_bytes(*machine(tmp_path, "0::/\n", files)) == 8 * 2**30


def test_the_tightest_group_decides_and_file_pages_not_in_use_are_free(tmp_path):
    files = {
        "pod/memory.max": "1000000\n",
        "pod/memory.current": "700000\n",
        "pod/memory.stat": "anon 5\ninactive_file 50000\n",
        "pod/box/memory.max": "900000\n",
        "pod/box/memory.current": "100000\n",
        "pod/box/memory.stat": "inactive_file 0\n",
    }
    assert available_bytes(*machine(tmp_path, "0::/pod/box\n", files)) == 350_000


def test_groups_of_version_1_count_and_folders_outside_the_container_do_not_matter(tmp_path):
    files = {
        "memory/memory.limit_in_bytes": "1000000\n",
        "memory/memory.usage_in_bytes": "999999\n",
        "memory/memory.stat": "inactive_file 7\ntotal_inactive_file 99999\n",
    }
    assert available_bytes(*machine(tmp_path, "3:cpu:/x\n2:memory:/docker/abc\n", files)) == 100_000


def test_a_group_over_its_limit_has_nothing_left(tmp_path):
    files = {"memory.max": "10\n", "memory.current": "20\n", "memory.stat": ""}
    assert available_bytes(*machine(tmp_path, "0::/\n", files)) == 0


def test_mapped_pages_go_and_come_back(tmp_path):
    import mmap

    file = tmp_path / "weights"
    file.write_bytes(b"x" * (64 * MIB))
    with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert mapped[:].count(b"x") == 64 * MIB
        before, _ = resident_bytes()
        assert release_mapped_pages(file) == 64 * MIB
        assert resident_bytes()[0] < before - 60 * MIB
        assert mapped[:].count(b"x") == 64 * MIB


LOAD = """
import json, random, sys, threading
from pathlib import Path
from tritonforge.memory.available import resident_bytes
from tritonforge.decoder import Decoder

decoder = Decoder(Path(sys.argv[1]))
rng = random.Random(5)
ended = threading.Semaphore(0)
errors = []

def sink(generation, delta):
    if delta.final:
        errors.append(delta.error)
        ended.release()

def ask(prompt_tokens, max_tokens, temperature):
    options = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": temperature, "stream": True}
    decoder.submit([rng.randrange(100, 40000) for _ in range(prompt_tokens)], options, sink)

for prompt_tokens in (2000, *range(64, 513, 32)):
    ask(prompt_tokens, 2, 0.0)
    ended.acquire()
for index in range(64):
    ask(rng.choice((20, 100, 300)), 8 + 2 * index % 64, index % 2)
for _ in range(64):
    ended.acquire()
assert errors == [None] * len(errors), errors
print(json.dumps(resident_bytes()[1]))
"""


@pytest.mark.server
def test_the_real_decoder_under_its_worst_load_keeps_the_plan_within_a_tenth(release_dir):
    """As the served process loads it: Decoder, prefills of all sizes, then a full batch with sampling."""
    release = Release.open(release_dir)
    folder = release.model_repository / "decoder" / "1"
    planned = MemoryPlan.of_manifest(release.manifest, measure_base_bytes(folder)).total_bytes
    command = [sys.executable, "-c", LOAD, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    peak = json.loads(done.stdout.splitlines()[-1])
    print(f"planned {planned / MIB:.0f} MiB, the process took {peak / MIB:.0f} MiB")
    assert abs(peak / planned - 1) < 0.10
