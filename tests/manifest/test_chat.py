"""Chat data: tokens and labels are what the checkpoint's own template and tokenizer make of a conversation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inline_snapshot import snapshot

from fcp_cli.errors import ManifestError
from fcp_cli.manifest.chat import NOT_LEARNED, ChatEncoder
from fcp_cli.manifest.detect import detect_kind
from fcp_cli.manifest.read import read_manifest
from fcp_cli.manifest.table import manifest_source
from fcp_cli.manifest.tokens import open_tokens
from fcp_cli.util.templates import ChatToRender, Renderer
from tests.manifest.chat_checkpoint import CHATML, THOROUGH, write_checkpoint
from tests.manifest.datasets import build, write_arrow, write_jsonl, write_parquet
from tests.messages import raises

pytestmark = [pytest.mark.hf, pytest.mark.torch, pytest.mark.processes]

# Shows the thoughts of the last turn alone, as templates of thinking models do.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last and '</think>' not in m.content %}<think></think>{% endif %}"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = "{% if messages[0].role != 'user' %}{{ raise_exception('a user begins') }}{% endif %}" + CHATML

TURNS = [
    {"role": "system", "content": "short answers"},
    {"role": "user", "content": "  two and two?"},
    {"role": "assistant", "content": "four"},
    {"role": "user", "content": "and three?"},
    {"role": "assistant", "content": "seven "},
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def learned(encoder: ChatEncoder, record: dict[str, Any]) -> list[str]:
    """The texts of each run of learned tokens, and the whole text in front."""
    encoded = encoder(record, "here")
    decode: Any = encoder._tokenizer.decode
    runs: list[list[int]] = []
    for before, label in zip([NOT_LEARNED, *encoded.labels], encoded.labels, strict=False):
        if label != NOT_LEARNED:
            runs = [*runs, []] if before == NOT_LEARNED else runs
            runs[-1].append(int(label))
    return [decode(encoded.tokens), *(decode(run) for run in runs)]


def test_each_turn_of_the_assistant_is_learned_with_its_end(checkpoint: Path) -> None:
    text, *said = learned(ChatEncoder(checkpoint, "assistant"), {"messages": TURNS})
    assert said == ["four<|im_end|>", "seven <|im_end|>"]
    assert text == snapshot(
        """\
<|im_start|>system
short answers<|im_end|>
<|im_start|>user
  two and two?<|im_end|>
<|im_start|>assistant
four<|im_end|>
<|im_start|>user
and three?<|im_end|>
<|im_start|>assistant
seven <|im_end|>
"""
    )


@settings(max_examples=25, deadline=None)
@given(texts=st.lists(st.text(alphabet=" \n\tab", max_size=6), min_size=1, max_size=4))
def test_a_conversation_beside_pictures_is_counted_as_its_template_renders_it(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str]
) -> None:
    from transformers import AutoTokenizer

    # A line break and the white space after it are one token, as in the tokenizers of Qwen.
    folder = write_checkpoint(tmp_path_factory.mktemp("merged"), merges=[("Ċ", "Ġ"), ("Ċ", "Ċ"), ("ĊĠ", "Ġ")])
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    roles = ("human", "gpt")
    turns = [{"from": roles[i % 2], "value": text} for i, text in enumerate(texts)]
    data = write_jsonl(folder / "data.jsonl", [{"conversations": turns}])
    build(data, folder / "m.parquet", kind="media", processor="qwen3-vl", tokenizer=str(folder / "tokenizer.json"))
    # ChatML's roles are one token each in those tokenizers, and several bytes in this one.
    rendered = tokenizer.apply_chat_template([{"role": "r", "content": text} for text in texts], return_dict=True)
    assert read_manifest(folder / "m.parquet").length_tokens.tolist() == [len(rendered["input_ids"])]


def test_a_record_is_counted_token_for_token_as_transformers_counts_it(checkpoint: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
    expected = tokenizer.apply_chat_template(TURNS, return_dict=True)["input_ids"]
    assert ChatEncoder(checkpoint, "assistant")({"messages": TURNS}, "here").tokens.tolist() == expected


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "é": [1, None, 0.5]}}}]
CALLS = [
    {"role": "user", "content": "<b>add</b> 1 & 2"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": [1, 2]}}}]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "<think>\nso three\n</think>\n\nthree"},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "that is all", "reasoning_content": "nothing"},
]


@pytest.mark.parametrize("turns", [TURNS, CALLS, CALLS[:4], TURNS * 20], ids=["plain", "tools", "thoughts", "long"])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["without", "with"])
@pytest.mark.parametrize("prompts", [False, True])
def test_a_template_renders_as_transformers_renders_it(
    tmp_path: Path, turns: list[dict[str, Any]], tools: Any, prompts: bool
) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(write_checkpoint(tmp_path, THOROUGH))
    expected = tokenizer.apply_chat_template(turns, tools=tools, tokenize=False, add_generation_prompt=prompts)
    values = {"messages": turns, "tools": tools, "add_generation_prompt": prompts}
    ((text, _),) = Renderer().render([ChatToRender(tokenizer.chat_template, tokenizer.special_tokens_map | values)])
    assert text == expected


def test_a_folder_without_a_template_says_what_is_missing(tmp_path: Path) -> None:
    encoder = ChatEncoder(write_checkpoint(tmp_path, ""), "all")
    with raises(
        snapshot(
            "ManifestError: FOLDER has no chat template: neither chat_template.jinja nor a tokenizer_config.json with one; copy that of the model's instruct variant there, or give the folder of that variant"
        )
    ):
        encoder({"messages": TURNS}, "here")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            '{{ "a" * 10**10 }}',
            "it takes more than 1,024 MiB of memory",
        ),
        (
            "{% for a in range(10**5) %}{% for b in range(10**5) %}{% endfor %}{% endfor %}",
            "it takes more than 1 s of CPU time",
        ),
        ("{{ lipsum.__globals__.os }}", "access to attribute '__globals__' of 'function' object is unsafe."),
        ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe."),
    ],
)
def test_a_hostile_template_of_a_checkpoint_is_one_line(tmp_path: Path, template: str, reason: str) -> None:
    encoder = ChatEncoder(write_checkpoint(tmp_path, template), "all")
    encoder._renderer = Renderer(cpu_seconds=1)
    with raises(
        f"ManifestError: here: the chat template of {tmp_path} fails: {reason}".replace(str(tmp_path), "FOLDER")
    ):
        encoder({"messages": TURNS}, "here")


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {"role": "model", "content": "ho"},
            ]
        },
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]},
        {"prompt": [{"role": "user", "content": "hi"}], "completion": [{"role": "assistant", "content": "ho"}]},
        {"instruction": "hi", "input": "", "output": "ho"},
    ],
    ids=["messages", "parts", "sharegpt", "prompt and completion", "alpaca"],
)
def test_every_form_of_a_conversation_is_read_alike(checkpoint: Path, record: dict[str, Any]) -> None:
    text, *said = learned(ChatEncoder(checkpoint, "assistant"), record)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho<|im_end|>\n"
    assert said == ["ho<|im_end|>"]


@pytest.mark.parametrize(
    ("train_on", "said"),
    [
        ("completion", ["seven <|im_end|>"]),
        ("assistant", ["four<|im_end|>", "seven <|im_end|>"]),
    ],
)
def test_what_is_learned_is_chosen(checkpoint: Path, train_on: Any, said: list[str]) -> None:
    assert learned(ChatEncoder(checkpoint, train_on), {"messages": TURNS})[1:] == said


def test_all_tokens_may_be_learned(checkpoint: Path) -> None:
    encoded = ChatEncoder(checkpoint, "all")({"messages": TURNS}, "here")
    assert encoded.labels.tolist() == encoded.tokens.tolist()
    assert encoded.learned_tokens == len(encoded.tokens) - 1


def test_a_plain_completion_is_learned_up_to_its_end(checkpoint: Path) -> None:
    text, *said = learned(ChatEncoder(checkpoint, "assistant"), {"prompt": "1+1=", "completion": "2"})
    assert (text, said) == ("1+1=2<|im_end|>", ["2<|im_end|>"])


def test_given_labels_stay_as_they_are(checkpoint: Path) -> None:
    encoded = ChatEncoder(checkpoint, "assistant")({"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}, "here")
    assert (encoded.tokens.tolist(), encoded.labels.tolist()) == ([5, 6, 7], [-100, -100, 7])
    assert encoded.learned_tokens == 1


def test_a_template_that_drops_earlier_thoughts_still_marks_what_is_left(tmp_path: Path) -> None:
    encoder = ChatEncoder(write_checkpoint(tmp_path, THINKING), "assistant")
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>b</think>c"},
        {"role": "user", "content": "d"},
        {"role": "assistant", "content": "<think>e</think>f"},
    ]
    assert learned(encoder, {"messages": turns})[1:] == ["c<|im_end|>", "<think>e</think>f<|im_end|>"]


@settings(max_examples=25, deadline=None)
@given(texts=st.lists(st.text(max_size=12), min_size=2, max_size=6))
def test_what_is_learned_is_what_was_said_whatever_the_texts(checkpoint: Path, texts: list[str]) -> None:
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    said = learned(ChatEncoder(checkpoint, "assistant"), {"messages": turns})[1:]
    assert said == [f"{text}<|im_end|>" for text in texts[1::2]]


@pytest.mark.parametrize("form", ["jsonl", "json", "parquet", "arrow"])
def test_a_manifest_of_chat_gives_tokens_and_labels(tmp_path: Path, checkpoint: Path, form: str) -> None:
    records = [
        {"messages": TURNS},
        {"messages": [{"role": "user", "content": "no answer"}]},
        {"messages": [{"role": "user", "content": "é"}, {"role": "assistant", "content": "ü"}]},
    ]
    data = tmp_path / f"data.{form}"
    if form == "jsonl":
        write_jsonl(data, records)
    elif form == "json":
        data.write_text(json.dumps(records))
    else:
        columns = {"messages": [record["messages"] for record in records]}
        write_parquet(data, columns, row_group_size=2) if form == "parquet" else write_arrow(data, columns, stream=True)
    assert detect_kind(data) == "chat"
    manifest = tmp_path / "m.parquet"
    built = build(data, manifest, tokenizer=str(checkpoint))
    assert (built.rows, built.unlearned) == (3, 1)
    encoder = ChatEncoder(checkpoint, "assistant")
    reader: Any = open_tokens(manifest)
    for row in (2, 0, 1):
        tokens, labels = reader(row)
        expected = encoder(records[row], "here")
        np.testing.assert_array_equal(tokens, expected.tokens)
        np.testing.assert_array_equal(labels, expected.labels)
        assert len(tokens) == read_manifest(manifest).length_tokens[row]
    source = manifest_source(manifest)
    assert source is not None
    assert (source["kind"], source["train_on"], source["vocab_size"]) == ("chat", "assistant", 258)


def test_records_with_a_text_are_no_chat_and_those_with_a_picture_are_media(tmp_path: Path) -> None:
    conversation = [{"from": "human", "value": "hi"}]
    both = write_jsonl(tmp_path / "a.jsonl", [{"text": "hi", "messages": [{"role": "user", "content": "hi"}]}])
    seen = write_jsonl(tmp_path / "b.jsonl", [{"conversations": conversation, "image": "a.jpg"}])
    assert (detect_kind(both), detect_kind(seen)) == ("jsonl", "media")


RECORDS: dict[str, dict[str, Any]] = {
    "no turns": {"messages": []},
    "an unknown role": {"messages": [{"role": "narrator", "content": "a"}]},
    "a picture": {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
    "a number in place of a text": {"messages": [{"role": "user", "content": 3}]},
    "fewer labels than tokens": {"input_ids": [1, 2], "labels": [1]},
    "tokens that are texts": {"input_ids": ["a"], "labels": [1]},
    "other fields": {"question": "a"},
}
RECORDS_MESSAGES = snapshot(
    {
        "no turns": "ManifestError: here: 'messages' must be a list of turns with 'role' and 'content'",
        "an unknown role": "ManifestError: here: a turn of 'messages' is of 'narrator'; roles are assistant, function, gpt, human, model, observation, system, tool, user",
        "a picture": "ManifestError: here: a turn of 'messages' holds a part of type 'image'; chat data is text alone, and --kind media reads conversations about images and videos",
        "a number in place of a text": "ManifestError: here: 'messages' holds '3' instead of a text",
        "fewer labels than tokens": "ManifestError: here has 2 input_ids but 1 labels; give as many",
        "tokens that are texts": "ManifestError: here: input_ids and labels must be flat lists of whole numbers",
        "other fields": "ManifestError: here has none of messages, conversations, prompt + completion, instruction + output, input_ids + labels; its fields are question",
    }
)


@pytest.mark.parametrize("case", RECORDS)
def test_a_record_that_is_no_conversation_is_one_line(checkpoint: Path, case: str) -> None:
    with raises(RECORDS_MESSAGES[case]):
        ChatEncoder(checkpoint, "assistant")(RECORDS[case], "here")


def test_a_template_that_fails_names_the_record(tmp_path: Path) -> None:
    encoder = ChatEncoder(write_checkpoint(tmp_path / "strict", STRICT), "assistant")
    with pytest.raises(ManifestError, match=r"^row 7: the chat template of .*/strict fails: a user begins$"):
        encoder({"messages": TURNS}, "row 7")


def test_a_folder_without_a_tokenizer_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="is not the folder of a checkpoint with a tokenizer") as caught:
        ChatEncoder(tmp_path, "assistant")
    assert "\n" not in str(caught.value)


def test_chat_without_a_checkpoint_says_what_is_missing(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "chat.jsonl", [{"messages": TURNS}])
    with raises(
        snapshot(
            "UsageError: chat data is rendered by a checkpoint's chat template; give the checkpoint's folder with --tokenizer FOLDER, or name a field of texts or tokens with --kind and --column"
        )
    ):
        build(data, tmp_path / "m.parquet")


def test_a_folder_of_splits_asks_for_one(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "state.json").write_text("{}")
    with raises(
        snapshot("ManifestError: FOLDER holds several splits; name the one to read: FOLDER/test, FOLDER/train")
    ):
        detect_kind(tmp_path)
