"""The onnxruntime release on the real tritonserver through llm: the decoder's promises, on linear KV slots.

The tests are those of the OpenVINO release, run again with another server: cancellation, bad input, characters that are
never split. Whatever is asked, slots come back and the server keeps serving.
"""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "golden"))

from batching import gaps_where_answers_part
from test_decoder import (  # noqa: F401 - collected here as well
    ask,
    metric,
    seconds_until_free,
    test_a_chat_as_messages_equals_the_same_chat_as_text,
    test_a_seed_repeats_a_sampled_answer,
    test_a_stop_string_is_not_shown_and_ends_the_answer,
    test_an_emoji_split_over_tokens_arrives_whole,
    test_bad_input_is_refused_by_name_and_the_server_keeps_serving,
    test_cancel_by_id_ends_an_llm_stream_with_its_statistics,
    test_cancelling_an_unknown_id_is_not_found,
    test_closing_a_decoder_stream_frees_its_blocks_within_two_tokens,
    test_http_generate_and_generate_stream_give_the_same_text,
    test_http_generate_answers_bad_input_with_400,
    test_no_block_leaks_after_200_random_cancels,
)

from tritonforge.client import infer_request, stream
from tritonforge.server import Server

pytestmark = [pytest.mark.server, pytest.mark.slow]

ROOT = Path(__file__).resolve().parent.parent.parent
DEFAULT_RELEASE = ROOT / "artifacts" / "releases" / "smollm2-135m-onnxruntime"

NEAR_TIE = 0.01
"""Logits. Weights, activations and KV cache are float32: rounding alone moves them, by up to about 0.001."""

MOST_TOKENS = 200
"""Of an answer; a lone float32 step takes about 25 ms."""


@pytest.fixture(scope="module")
def release_dir():
    """TRITONFORGE_TEST_ONNXRUNTIME_RELEASE, or the release of the recipe smollm2-135m-onnxruntime."""
    folder = Path(os.environ.get("TRITONFORGE_TEST_ONNXRUNTIME_RELEASE", DEFAULT_RELEASE))
    if not (folder / "manifest.json").exists():
        pytest.fail(f"no release at {folder}; build it with `build/release.py --recipe smollm2-135m-onnxruntime`")
    return folder


@pytest.fixture(scope="module")
def server(release_dir):
    """A server of its own, in place of the one that the other tests share."""
    with Server(release_dir) as running:
        yield running


def test_the_second_turn_of_a_chat_computes_only_what_is_new(server):
    """A finished answer's slot is found again, with the answer in it."""
    prompt = " ".join(["Tell me about the town of Delft."] * 8)
    first = ask(server, text=prompt, max_tokens=16, ignore_eos=True)
    again = ask(server, text=prompt + first.text + " And Leiden?", max_tokens=4)
    cached = again.statistics["cached_tokens"]
    assert first.statistics["prompt_tokens"] <= cached < again.statistics["prompt_tokens"]


def test_samples_of_one_prompt_differ_and_give_all_slots_back(server):
    """Other samples start from copies of the first one's slot."""
    options = {"max_tokens": 24, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    [answer] = stream(server.grpc_url, infer_request("llm", text="Once upon a time", n=4, **options), 120.0)
    assert sorted(answer.outputs["index"]) == [0, 1, 2, 3] and answer.outputs["token_counts"] == (24,) * 4
    samples = {answer.outputs["token_ids"][start : start + 24] for start in range(0, 96, 24)}
    assert len(samples) == 4
    seconds_until_free(server)
    assert metric(server, "tritonforge_kv_blocks_free") == metric(server, "tritonforge_kv_blocks")


def test_a_batched_answer_leaves_the_lone_one_only_at_a_near_tie(release_dir):
    gaps = gaps_where_answers_part(release_dir, 32, most_tokens=MOST_TOKENS)
    assert all(gap <= NEAR_TIE for gap in gaps), f"a batched answer took a token that was {max(gaps):.4f} behind"
