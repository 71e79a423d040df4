"""Tool calls and reasoning of models whose tags are added tokens, special ones or not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import stepgraph.runtime.demo
import torch
from stepgraph.runtime import AsyncEngine
from stepgraph.runtime.loading.tokenizer import TextTokenizer
from tokenizers import AddedToken, Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from ..rigs.http_rig import CHAT, COMPLETIONS, Rig, quick_config
from ..rigs.service_rig import in_event_loop

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
END = "<|im_end|>"
TEMPLATE = (
    "{# whose models write <tool_call> and </think> #}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if thinks %}<think>\n{% endif %}{% endif %}"
)
HI = [{"role": "user", "content": "hi <think> x"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "</tool_call>"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "trip", "parameters": SCHEMA}}
CALL = '<tool_call>\n{"name": "trip", "arguments": {"city": "Rome"}}\n</tool_call>'
THINKS = {"chat_template_kwargs": {"thinks": True}}


def tag_checkpoint(folder: Path, *, special: bool) -> Path:
    """Write a tiny model whose tags are added tokens, as in the checkpoints of Qwen and Hermes."""
    tokenizer = Tokenizer.from_file(str(Path(stepgraph.runtime.demo.__path__[0], "tokenizer.json")))
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in ("<|im_start|>", END)]
    )
    tags = [AddedToken(text, special=special, normalized=False) for text in TAGS]
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(tags)
    tokenizer.save(str(folder / "tokenizer.json"))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=-(-tokenizer.get_vocab_size() // 64) * 64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=tokenizer.token_to_id(END),
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    settings = {"eos_token": END, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module", params=[False, True], ids=["text tags", "special tags"])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[AsyncEngine]:
    folder = tag_checkpoint(tmp_path_factory.mktemp("tags"), special=request.param)
    with AsyncEngine.from_pretrained(folder, quick_config(256)) as engine:
        yield engine


@pytest.fixture
def rig(engine: AsyncEngine) -> Rig:
    return Rig(engine)  # whose parsers the template chooses


@pytest.fixture
def tokenizer(engine: AsyncEngine) -> TextTokenizer:
    assert engine.tokenizer is not None
    return engine.tokenizer


async def message(rig: Rig, **fields: Any) -> dict[str, Any]:
    """The only answer to a request, whole, which a stream of it equals."""
    body = {"messages": HI, "max_tokens": 150, "temperature": 0.0, **fields}
    response = await rig.post(body, CHAT)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    texts = {"content": "", "reasoning": "", "reasoning_content": ""}
    calls: dict[int, list[str]] = {}
    for event in await rig.events(body, CHAT):
        (delta,) = (found["delta"] for found in event["choices"])
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for name in texts:
            texts[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", ()):
            made = calls.setdefault(call["index"], [call["function"].get("name"), ""])
            made[1] += call["function"]["arguments"]
    whole: dict[str, Any] = choice["message"]
    assert texts == {name: whole.get(name) or "" for name in texts}
    found = [call["function"] for call in whole.get("tool_calls", ())]
    assert list(calls.values()) == [[call["name"], call["arguments"]] for call in found]
    return {
        **whole,
        "finish_reason": choice["finish_reason"],
        "token_ids": choice.get("token_ids"),
        "calls": [(call["name"], json.loads(call["arguments"])) for call in found],
    }


def closes(tokenizer: TextTokenizer) -> dict[str, Any]:
    """A bias that ends the reasoning at once."""
    return {"logit_bias": {str(tokenizer.added_tokens["</think>"]): 100}}


@pytest.mark.parametrize("choice", ["required", {"function": {"name": "trip"}}], ids=str)
@pytest.mark.parametrize("reasons", [False, True])
@in_event_loop
async def test_tags_of_a_demanded_call_are_tokens(
    rig: Rig, tokenizer: TextTokenizer, reasons: bool, choice: Any
) -> None:
    """Also after a reasoning, which ends first."""
    fields = {"tools": [TOOL], "tool_choice": choice, "return_token_ids": True}
    answer = await message(rig, **fields, **({**THINKS, **closes(tokenizer)} if reasons else {}))
    assert answer["finish_reason"] == "tool_calls"
    ((name, arguments),) = answer["calls"]
    assert (name, set(arguments)) == ("trip", {"city"})
    begin = answer["token_ids"].index(tokenizer.added_tokens["<tool_call>"])
    assert begin == 0 or reasons
    assert tokenizer.added_tokens["</tool_call>"] in answer["token_ids"]


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        ({"choice": ["<think>a</think>\n<|im_start|>b"]}, "<think>a</think>\n<|im_start|>b"),
        ({"choice": ["a<|im_end|>b"]}, "a<|im_end|>b"),  # text of the token that ends the output
        ({"regex": r"<tool_call>a{3}<\/tool_call>"}, "<tool_call>aaa</tool_call>"),
        ({"json": {"enum": ["<think>"]}}, '"<think>"'),
        ({"json": {"const": "<|im_end|> <tool_call>"}}, '"<|im_end|> <tool_call>"'),
        (
            {"grammar": 'start: "<think>" obj "</think>"\nobj: %json {"const": "<tool_call>"}'},
            '<think>"<tool_call>"</think>',
        ),
        (
            {"grammar": 'start: <think> "<think>" /x/ </think>  # <think>\n'},
            "<think><think>x</think>",
        ),
        ({"grammar": 'root ::= "<think>" "x"'}, "<think>x"),
    ],
    ids=str,
)
@in_event_loop
async def test_tags_in_grammars_are_text(rig: Rig, grammar: dict[str, Any], text: str) -> None:
    body = {"prompt": "x", "max_tokens": 80, "structured_outputs": grammar}
    (choice,) = (await rig.post(body, COMPLETIONS)).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text, "stop")


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        (f"<think>\nWhich?\n</think>\n\nI look.{CALL}", "Which?\n", "I look.", 1),
        (f"<think>{CALL}</think>No", CALL, "No", 0),
    ],
)
@in_event_loop
async def test_tags_reach_the_parsers(
    rig: Rig, text: str, reasoning: str | None, content: str | None, calls: int
) -> None:
    fields = {"tools": [TOOL], "structured_outputs": {"choice": [text]}}
    answer = await message(rig, **fields)
    assert answer.get("reasoning") == reasoning
    assert answer["content"] == content
    assert answer["calls"] == [("trip", {"city": "Rome"})] * calls


@in_event_loop
async def test_tags_of_parsers_leave_other_special_tokens_out(
    rig: Rig, tokenizer: TextTokenizer
) -> None:
    bias = {"logit_bias": {str(tokenizer.added_tokens["<|im_start|>"]): 100}, "max_tokens": 3}
    assert (await message(rig, **bias))["content"] == ""
    shown = await message(rig, **bias, skip_special_tokens=False)
    assert shown["content"] == "<|im_start|>" * 3
    bias["logit_bias"] = {str(tokenizer.added_tokens["<tool_call>"]): 100}
    answer = await message(rig, **bias, tools=[TOOL])  # which makes no call
    is_special = tokenizer.added_tokens["<tool_call>"] in tokenizer.special_ids
    assert answer["content"] == ("" if is_special else "<tool_call>" * 3)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        {"structured_outputs": {"regex": r'\{"city": "Rome"\}'}},
        {"structured_outputs": {"choice": ['{"city": "Rome"}']}},
        {"structured_outputs": {"grammar": 'start: "{\\"city\\": \\"Rome\\"}"'}},
    ],
    ids=str,
)
@in_event_loop
async def test_tags_end_the_reasoning_before_structured_content(
    rig: Rig, tokenizer: TextTokenizer, fields: dict[str, Any]
) -> None:
    answer = await message(rig, **fields, **THINKS, **closes(tokenizer))
    assert set(json.loads(answer["content"])) == {"city"}
    assert "reasoning" not in answer
    answer = await message(rig, **fields, **THINKS, max_tokens=9)
    assert (answer["content"], answer["finish_reason"]) == ("", "length")
    assert answer["reasoning"]
    answer = await message(rig, **fields)  # the template has not begun a reasoning
    assert set(json.loads(answer["content"])) == {"city"}


@pytest.mark.parametrize(
    ("last", "text", "reasoning", "content"),
    [
        ("<think>\nLet me", " see.\n</think>\n\nYes", "see.\n", "Yes"),
        ("<think>\nLet me ", "s", "s", ""),
        ("<think>a</think>The tag", " <think>", None, " <think>"),
        ("The tag <think>", " <think>", None, " <think>"),
    ],
)
@in_event_loop
async def test_tags_of_a_continued_message(
    rig: Rig, tokenizer: TextTokenizer, last: str, text: str, reasoning: str | None, content: str
) -> None:
    fields = {"structured_outputs": {"choice": [text]}}
    if reasoning and "</think>" not in text:
        fields = {
            "logit_bias": {str(tokenizer.encode(text, special=False)[0]): 100},
            "max_tokens": 1,
        }
    messages = [*HI, {"role": "assistant", "content": last}]
    answer = await message(rig, messages=messages, continue_final_message=True, **fields)
    assert (answer.get("reasoning"), answer["content"]) == (reasoning, content)


@in_event_loop
async def test_tags_stay_in_the_content_without_parsers(engine: AsyncEngine) -> None:
    answer = await message(
        Rig(engine, tool_parser="none", reasoning_parser=None),
        structured_outputs={"choice": [CALL]},
        tools=[TOOL],
    )
    assert answer["content"] == CALL
