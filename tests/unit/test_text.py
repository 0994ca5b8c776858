"""Stop strings and tokens: what of an answer may be shown, what is held back, and what of a prompt is kept."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tritonforge.errors import InvalidRequest
from tritonforge.text import TextStream, Tokenizer, find_stop, held_back, text_delta


def decode(token_ids):
    """Token ids are the bytes of a text."""
    return bytes(token_ids).decode("utf-8", errors="replace")


def push_all(stream, token_ids):
    shown = []
    for index, token_id in enumerate(token_ids):
        shown.append(stream.push(token_id, final=index == len(token_ids) - 1))
        if stream.stopped:
            break
    return shown


@given(st.text(max_size=60))
def test_deltas_join_to_the_whole_text_and_never_split_a_character(text):
    shown = push_all(TextStream(decode), list(text.encode()))
    assert "".join(shown) == text
    assert all("\ufffd" not in delta for delta in shown) or "\ufffd" in text


@given(st.binary(min_size=1, max_size=60))
@example(b"\x80" * 40)
@example(b"\x80" * 40 + b"a")
def test_bytes_that_are_no_text_end_as_replacement_characters(raw):
    assert "".join(push_all(TextStream(decode), list(raw))) == decode(raw)


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_what_is_shown_ends_before_the_earliest_stop_string(text, stops):
    stream = TextStream(decode, tuple(stops))
    shown = "".join(push_all(stream, list(text.encode())))
    # Characters arrive one by one, so the stop string that is complete first ends the text.
    complete = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not complete:
        assert shown == text and not stream.stopped
        return
    seen = text[: min(complete)]
    assert stream.stopped
    assert shown == seen[: find_stop(seen, stops)]


@pytest.mark.parametrize(
    ("text", "stops", "length"),
    [("hello wor", ["world"], 3), ("hello", ["world"], 0), ("aab", ["aabb", "b!"], 3), ("x", ["x"], 0), ("", ["a"], 0)],
)
def test_only_the_longest_possible_start_of_a_stop_string_is_held_back(text, stops, length):
    assert held_back(text, stops) == length


def test_an_unfinished_character_waits_unless_the_answer_ends():
    start = list("é".encode())[:1]
    assert text_delta(decode, [], start, final=False) == ""
    assert text_delta(decode, [], start, final=True) == "\ufffd"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer of bytes that puts <s> before a plain prompt and </s> after it, and a template that needs neither."""
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers import decoders, models, pre_tokenizers, processors

    folder = tmp_path_factory.mktemp("tokenizer")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = FastTokenizer(models.BPE({token: index for index, token in enumerate(("<s>", "</s>", *alphabet))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]),
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("<s>{% for m in messages %}{{ m.content }}</s>{% endfor %}")
    return folder


def test_a_chat_has_only_the_special_tokens_that_its_template_writes(folder):
    ids = Tokenizer(folder).encode_chat([{"role": "user", "content": "a"}])
    assert ids[0] == 0 and ids[-1] == 1 and len(ids) == 3


@given(st.text(min_size=1, max_size=12), st.integers(-2, 60))
def test_the_end_of_a_prompt_keeps_its_special_tokens_and_whole_characters(folder, text, room):
    tokenizer = Tokenizer(folder)
    whole = tokenizer.encode(text)
    last = len(text[-1].encode())
    if room < 2 + last:
        with pytest.raises(InvalidRequest, match="room for a token"):
            tokenizer.encode_end(text, room)
        return
    kept = tokenizer.encode_end(text, room)
    assert len(kept) <= room and kept[0] == 0 and kept[-1] == 1
    assert kept[1:] == whole[-len(kept) + 1 :]
    assert text.endswith(tokenizer.decode(kept)) and "\ufffd" not in tokenizer.decode(kept).replace(text, "")
    wide = max(len(character.encode()) for character in text)
    assert len(kept) > min(room, len(whole)) - wide, "more was cut than the room asked for"
