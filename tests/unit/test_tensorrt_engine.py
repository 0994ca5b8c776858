"""The TensorRT engine against a recorded fake of the runtime API: what it computes, and every call in its order.

Never run on a GPU. The fake refuses what TensorRT's documentation forbids, and its memory and stream are real enough to
show a wrong address, an early read, or a cache that is not updated in place.
"""

import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from tensorrt_fake import FakeCuda, FakeTensorRT

from tritonforge.engines import tensorrt as engine_module
from tritonforge.engines.base import EngineSpec, SequenceStep
from tritonforge.engines.simulated import SimulatedEngine
from tritonforge.engines.tensorrt import TensorRTEngine
from tritonforge.engines.tensorrt_device import require_driver
from tritonforge.engines.tensorrt_identity import ENGINE, IDENTITY, Identity, Layer
from tritonforge.engines.tensorrt_loader import import_flavour, runtime_cache_path
from tritonforge.engines.tensorrt_plan import cache_len, profiles
from tritonforge.errors import EngineFailure, ReleaseMismatch, SetupError

SLOTS, CONTEXT, CHUNK, VOCAB = 6, 96, 32, 64
CONFIG = {"vocab_size": VOCAB, "max_model_len": CONTEXT, "block_size": CONTEXT, "num_blocks": SLOTS}
IDENTITY_VALUES = Identity(
    flavour="tensorrt",
    version="11.1.0.106",
    compute_capabilities=("8.9", "12.0"),
    vocab_size=VOCAB,
    slots=SLOTS,
    max_model_len=CONTEXT,
    cache_len=cache_len(CONTEXT),
    kv_dtype="float16",
    layers=(Layer(2, 8), Layer(1, 16)),
    profiles=profiles(SLOTS, CONTEXT, CHUNK),
    stripped=False,
    layer_counts={"KV_CACHE_UPDATE": 4, "ATTENTION_INPUT": 2},
    engine_bytes=6,
    weight_bytes=6,
)


class Case:
    """A folder with an engine, a fake GPU and a fake TensorRT; `open` loads the engine."""

    def __init__(self, folder, *, identity=IDENTITY_VALUES, content=b"engine", change=lambda engine: None, **gpu):
        self.folder, self.identity, self.events = folder, identity, []
        (folder / ENGINE).write_bytes(content)
        identity.write(folder)
        self.cuda = FakeCuda(self.events, **gpu)
        self.trt = FakeTensorRT(self.cuda, identity, self.events, change=change)

    def open(self, **config):
        return TensorRTEngine(self.folder, CONFIG | config, trt=self.trt, cuda=self.cuda)


@pytest.fixture
def case(tmp_path):
    return Case(tmp_path)


def prefill(slot, count, start=0):
    return SequenceStep([(7 * slot + index) % VOCAB for index in range(start, start + count)], start, [slot])


def decode(slot, start):
    return SequenceStep([(3 * slot + start) % VOCAB], start, [slot])


def kinds(events):
    return [event[0] for event in events]


def test_random_steps_give_what_a_reference_gives(case):
    """Chunks, decodes, drafts and copied slots, in any mix and order: the same logits as without slots and padding."""
    rng = random.Random(4)
    engine = case.open()
    reference = SimulatedEngine(EngineSpec(**CONFIG))
    lengths = [0] * SLOTS
    for _ in range(300):
        steps = []
        for slot in rng.sample(range(SLOTS), rng.randint(1, SLOTS)):
            if lengths[slot] > CONTEXT - 40:
                lengths[slot] = rng.choice((0, 5))  # a new request, perhaps with a prefix kept
            count = rng.choice((1, 1, 1, 2, 5, 16, 17, 40))
            ids = [rng.randrange(VOCAB) for _ in range(count)]
            steps.append(SequenceStep(ids, lengths[slot], [slot], num_logits=rng.choice((0, 1, count))))
            lengths[slot] += count
        np.testing.assert_array_equal(engine.step(steps), reference.step(steps))
        if rng.random() < 0.1:
            source, target = rng.sample(range(SLOTS), 2)
            if lengths[source]:
                for one in (engine, reference):
                    one.copy_blocks([(source, target)])
                lengths[target] = lengths[source]


def test_a_call_sets_profile_then_shapes_then_addresses_and_is_enqueued(case):
    """setOptimizationProfileAsync "must be called before calling setInputShape() for all dynamic input tensors"."""
    engine = case.open()
    case.events.clear()
    engine.step([prefill(0, 20)])
    names = [event for event in kinds(case.events) if event != "wait"]
    inputs = 3 + 2 * len(IDENTITY_VALUES.layers)
    assert names == ["shape"] * inputs + ["address"] * (inputs + 1 + 2 * len(IDENTITY_VALUES.layers)) + ["execute"], (
        "a new context has profile 0, the prefill profile"
    )
    case.events.clear()
    engine.step([decode(0, 20)])
    assert kinds(case.events)[: inputs + 1] == ["profile"] + ["shape"] * inputs
    assert case.events[0] == ("profile", 1)


def test_past_and_present_have_one_address_that_follows_the_row(case):
    engine = case.open()
    engine.step([prefill(slot, 20) for slot in range(4)])
    case.events.clear()
    engine.step([decode(2, 20)])
    addresses = {event[1]: event[2] for event in case.events if event[0] == "address"}
    for index, layer in enumerate(IDENTITY_VALUES.layers):
        for part in ("key", "value"):
            past = addresses[f"past_{part}_{index}"]
            assert past == addresses[f"present_{part}_{index}"]
            size = layer.kv_heads * IDENTITY_VALUES.cache_len * layer.head_size * 2
            begin = next(begin for begin, length in case.cuda.device.items() if begin <= past < begin + length)
            assert past - begin == 2 * size, "the third row of its cache"
    assert len({address for name, address in addresses.items() if name.startswith("past")}) == 4


def test_memory_is_allocated_when_the_engine_opens_and_never_again(case):
    engine = case.open()
    case.events.clear()
    engine.step([prefill(1, 20)])
    for start in range(20, 40):
        engine.step([decode(1, start)])
        engine.copy_blocks([(1, 3)])
    assert "malloc" not in kinds(case.events)
    kv = sum(
        2 * SLOTS * layer.kv_heads * IDENTITY_VALUES.cache_len * layer.head_size * 2 for layer in IDENTITY_VALUES.layers
    )
    assert IDENTITY_VALUES.kv_bytes == kv
    assert sum(case.cuda.device.values()) > kv


def test_a_decode_shape_is_enqueued_once_then_captured_then_replayed(case):
    """A capture right after a shape change would hold TensorRT's deferred work: the first call must be a plain one."""
    engine = case.open()
    engine.step([prefill(0, 20), prefill(1, 20)])
    case.events.clear()
    engine.step([decode(0, 20), decode(1, 20)])
    made = [event for event in case.events if event[0] in ("execute", "wait", "begin capture", "end capture")]
    assert made == [
        ("execute", (2, 1), False),
        ("wait",),
        ("begin capture",),
        ("execute", (2, 1), True),
        ("end capture",),
    ]
    case.events.clear()
    engine.step([decode(0, 21), decode(1, 21)])
    assert case.events == [("launch",), ("wait",)], "nothing is bound again for the same shape"


def test_a_replayed_shape_is_bound_again_after_another_call(case):
    """A context keeps state of its profile: it is brought to the graph's shape before the graph runs."""
    engine = case.open()
    engine.step([prefill(0, 20)])
    engine.step([decode(0, 20)])
    engine.step([prefill(1, 20)])
    case.events.clear()
    engine.step([decode(0, 21)])
    assert case.events[0] == ("profile", 1) and case.events[-2:] == [("launch",), ("wait",)]
    assert "execute" not in kinds(case.events)


def test_prefills_are_never_captured(case):
    engine = case.open()
    for _ in range(3):
        engine.step([prefill(0, 20)])
    assert "begin capture" not in kinds(case.events)


def test_a_capture_that_fails_turns_graphs_off_and_no_result_is_lost(tmp_path, caplog):
    case = Case(tmp_path, capture_error=900)
    engine = case.open()
    reference = SimulatedEngine(EngineSpec(**CONFIG))
    steps = [[prefill(0, 20)], [decode(0, 20)], [decode(0, 21)], [decode(0, 22)]]
    for step in steps:
        np.testing.assert_array_equal(engine.step(step), reference.step(step))
    assert kinds(case.events).count("begin capture") == 1 and "launch" not in kinds(case.events)
    assert "cudaStreamEndCapture failed" in caplog.text


def test_tensorrt_for_rtx_captures_by_itself_and_keeps_its_kernels_outside_the_release(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "engine").mkdir()
    rtx = replace(IDENTITY_VALUES, flavour="tensorrt_rtx", version="1.7.1.116")
    case = Case(tmp_path / "engine", identity=rtx)
    before = sorted(case.folder.iterdir())
    engine = case.open()
    config = case.trt.engine.runtime_config
    assert (config.strategy, config.cuda_graph_strategy) == ("user managed", "whole graph")
    for start in range(20, 24):
        engine.step([decode(0, start)] if start > 20 else [prefill(0, 21)])
    assert "begin capture" not in kinds(case.events)
    engine.close()
    kept = runtime_cache_path(Identity.read(case.folder), "8.9")
    assert kept.read_bytes() == b"kernels" and sorted(case.folder.iterdir()) == before
    again = Case(tmp_path / "engine", identity=rtx)
    again.open()
    assert again.trt.engine.runtime_config.restored == b"kernels"


def test_closing_frees_all_memory_and_every_graph(case):
    engine = case.open()
    engine.step([prefill(0, 20)])
    engine.step([decode(0, 20)])
    engine.close()
    assert not case.cuda.device and not case.cuda.host and not case.cuda.graphs and case.cuda.stream is None


def test_a_stripped_engine_takes_its_weights_from_the_graph_beside_it(tmp_path):
    case = Case(tmp_path, identity=replace(IDENTITY_VALUES, stripped=True))
    case.open()
    assert case.trt.refitted == [str(tmp_path / "model.onnx"), "engine"]


def test_without_a_driver_loading_ends_before_tensorrt_or_cuda_is_imported(case, monkeypatch):
    """TensorRT's Runtime ends the process where there is no driver."""

    def absent():
        raise SetupError("no NVIDIA driver")

    def imported(name):
        raise AssertionError(f"{name} was imported")

    monkeypatch.setattr(engine_module, "require_driver", absent)
    monkeypatch.setattr("tritonforge.engines.tensorrt_loader.import_module", imported)
    monkeypatch.setattr(engine_module, "Device", imported)
    with pytest.raises(SetupError, match="no NVIDIA driver"):
        TensorRTEngine(case.folder, CONFIG)


class FakeDriver:
    def __init__(self, init=0, count=1):
        self.cuInit = lambda flags: init
        self._count = count

    def cuDeviceGetCount(self, pointer):
        pointer._obj.value = self._count
        return 0


def test_a_driver_is_asked_for_itself_and_what_is_missing_is_said():
    assert require_driver(lambda name: FakeDriver(count=2)) == 2
    with pytest.raises(SetupError, match=r"no NVIDIA driver: libcuda.so.1 is not on this machine"):
        require_driver(lambda name: (_ for _ in ()).throw(OSError()))
    with pytest.raises(SetupError, match="cuInit returned 100"):
        require_driver(lambda name: FakeDriver(init=100))
    with pytest.raises(SetupError, match="finds no GPU"):
        require_driver(lambda name: FakeDriver(count=0))


def test_an_engine_for_another_compute_capability_is_refused_before_it_is_read(tmp_path):
    case = Case(tmp_path, capability=(8, 6))
    with pytest.raises(ReleaseMismatch, match=r"built for compute capability 8.9, 12.0; Fake GPU has 8.6"):
        case.open()
    assert not hasattr(case.trt, "logger"), "no runtime was made"
    assert case.cuda.stream is None, "what was taken on the device is given back"


def test_a_kv_cache_larger_than_the_device_is_refused_before_the_engine_is_read(tmp_path):
    case = Case(tmp_path, free=IDENTITY_VALUES.kv_bytes)
    with pytest.raises(SetupError, match=r"KV cache of 6 slots of 128 tokens takes 1 MiB .* 1 MiB are free"):
        case.open()
    assert not hasattr(case.trt, "logger")


def test_another_flavour_or_version_of_tensorrt_is_refused():
    with pytest.raises(ReleaseMismatch, match=r"built by tensorrt 11.1.0.106; installed here: tensorrt_rtx"):
        IDENTITY_VALUES.check_runtime(["tensorrt_rtx"])
    with pytest.raises(ReleaseMismatch, match="installed here: none"):
        IDENTITY_VALUES.check_runtime([])
    with pytest.raises(ReleaseMismatch, match=r"built by tensorrt 11.1.0.106, 10.9 is installed here"):
        IDENTITY_VALUES.check_runtime(["tensorrt"], "10.9")
    IDENTITY_VALUES.check_runtime(["tensorrt"], "11.1.0.106")


def test_the_flavour_that_is_installed_is_asked_for_its_version(monkeypatch):
    """Both may be installed: the one that built the engine counts, not the first that is found."""
    loader = "tritonforge.engines.tensorrt_loader"
    modules = {"tensorrt": SimpleNamespace(__version__="10.9"), "tensorrt_rtx": SimpleNamespace(__version__="1.7")}
    monkeypatch.setattr(f"{loader}.find_spec", modules.get)
    monkeypatch.setattr(f"{loader}.import_module", modules.__getitem__)
    with pytest.raises(ReleaseMismatch, match=r"11.1.0.106, 10.9 is installed"):
        import_flavour(IDENTITY_VALUES)
    rtx = replace(IDENTITY_VALUES, flavour="tensorrt_rtx", version="1.7")
    assert import_flavour(rtx) is modules["tensorrt_rtx"]
    del modules["tensorrt_rtx"]
    with pytest.raises(ReleaseMismatch, match=r"installed here: tensorrt$"):
        import_flavour(rtx)


@pytest.mark.parametrize("name, value", [("max_model_len", 128), ("num_blocks", 7), ("vocab_size", 65)])
def test_a_configuration_that_the_engine_was_not_built_for_is_refused(case, name, value):
    with pytest.raises(ReleaseMismatch, match=rf"{name} must be {CONFIG[name]}, as the engine was built, got {value}"):
        case.open(**{name: value})


def test_a_corrupt_engine_file_is_refused_by_its_size_or_by_tensorrt(tmp_path):
    case = Case(tmp_path)
    (tmp_path / ENGINE).write_bytes(b"engin")
    with pytest.raises(ReleaseMismatch, match=r"must have 6 bytes \(engine.json\), it has 5: the file is corrupt"):
        case.open()
    (tmp_path / ENGINE).write_bytes(b"enginf")
    with pytest.raises(ReleaseMismatch, match=r"could not be read.*Serialized engine does not conform"):
        case.open()


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 2}'])
def test_a_broken_identity_is_refused(case, text):
    (case.folder / IDENTITY).write_text(text)
    with pytest.raises(ReleaseMismatch, match="does not describe a TensorRT engine"):
        case.open()


def test_an_identity_reads_as_it_was_written(case):
    assert Identity.read(case.folder) == IDENTITY_VALUES
    values = json.loads((case.folder / IDENTITY).read_text())
    assert values["compute_capabilities"] == ["8.9", "12.0"] and values["profiles"][1]["tokens"]["most"] == 1


def not_in_place(engine):
    del engine.aliases["present_value_1"]


def on_the_host(engine):
    engine.host.add("write_index")


def another_cache(engine):
    engine.shapes["past_key_0"] = (-1, 2, 64, 8)


def another_input(engine):
    engine.shapes["position_ids"] = (-1, -1)


def one_profile(engine):
    engine.num_optimization_profiles = 1


@pytest.mark.parametrize(
    "change, message",
    [
        (not_in_place, "present_value_1 must share the memory of past_value_1"),
        (on_the_host, "write_index in host memory"),
        (another_cache, r"past_key_0 must be \(-1, 2, 128, 8\), the engine has \(-1, 2, 64, 8\)"),
        (another_input, r"not those of the step graph: \['position_ids'\]"),
        (one_profile, "must have 2 profiles, it has 1"),
    ],
)
def test_an_engine_of_another_graph_is_refused(tmp_path, change, message):
    with pytest.raises(ReleaseMismatch, match=message):
        Case(tmp_path, change=change).open()


def test_what_tensorrt_refuses_fails_the_step_and_the_next_one_binds_again(case):
    engine = case.open()
    context = case.trt.engine.context
    take = context.set_input_shape
    context.set_input_shape = lambda name, shape: False
    with pytest.raises(EngineFailure, match=r"did not take the shape \(1, 20\) of input_ids"):
        engine.step([prefill(0, 20)])
    context.set_input_shape = take
    reference = SimulatedEngine(EngineSpec(**CONFIG))
    np.testing.assert_array_equal(engine.step([prefill(0, 20)]), reference.step([prefill(0, 20)]))


def test_a_shape_that_was_bound_halfway_does_not_count_as_bound(case):
    """The context would compute in the rows of the call that failed."""
    engine = case.open()
    reference = SimulatedEngine(EngineSpec(**CONFIG))
    engine.step([prefill(0, 20)])
    context = case.trt.engine.context
    infer = context.infer_shapes
    context.infer_shapes = lambda: ["past_key_0"]
    with pytest.raises(EngineFailure, match=r"did not take the call without \['past_key_0'\]"):
        engine.step([prefill(1, 20)])
    context.infer_shapes = infer
    for step in ([replace(prefill(0, 20), token_ids=[9] * 20)], [decode(0, 20)]):
        np.testing.assert_array_equal(engine.step(step), reference.step(step))


def test_a_cuda_error_is_named(case):
    engine = case.open()
    case.cuda.cudaStreamSynchronize = lambda stream: (719,)
    with pytest.raises(EngineFailure, match="cudaStreamSynchronize failed: 719"):
        engine.step([prefill(0, 20)])
