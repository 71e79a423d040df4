"""The client of Anthropic: messages, streams, tools in two turns, and token counts."""

import os
from typing import Any

import anthropic

MODEL = os.environ["MODEL"]
TOOLS: Any = [
    {
        "name": "get_weather",
        "description": "The weather of a city.",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    }
]
client = anthropic.Anthropic(
    base_url=os.environ["BASE_URL"], api_key=os.environ["API_KEY"], max_retries=0
)
hello: Any = {"model": MODEL, "max_tokens": 60, "messages": [{"role": "user", "content": "Hi"}]}
system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]

message = client.messages.create(**hello, system=system)
text = message.content[-1].text
assert text, message
assert message.stop_reason == "end_turn", message
assert message.usage.output_tokens > 0, message
assert message._request_id, message

with client.messages.stream(**hello) as stream:
    parts = list(stream.text_stream)
    final = stream.get_final_message()
assert "".join(parts) == final.content[-1].text == text, (parts, final, text)
assert final.stop_reason == "end_turn", final
assert final.usage.output_tokens > 0, final

stopped = client.messages.create(**hello, stop_sequences=[text[1:3]])
assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text[1:3]), stopped
cut = client.messages.create(**{**hello, "max_tokens": 1})
assert cut.stop_reason == "max_tokens", cut

question = {"role": "user", "content": "What is the weather in Rome?"}
asked = {**hello, "messages": [question], "tools": TOOLS}
whole = client.messages.create(**asked)
with client.messages.stream(**asked) as stream:
    streamed = stream.get_final_message()
for answer in (whole, streamed):
    assert answer.stop_reason == "tool_use", answer
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    assert call.name == "get_weather", call
    assert isinstance(call.input["city"], str), call
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny", "is_error": False}
    turns = [
        question,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result, {"type": "text", "text": "Thanks"}]},
    ]
    reply = client.messages.create(**{**asked, "messages": turns})
    assert reply.content[-1].type == "text", reply
    assert reply.stop_reason == "end_turn", reply
    count = client.messages.count_tokens(model=MODEL, messages=turns, tools=TOOLS)
    usage = reply.usage
    assert count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0), usage

image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
for fields, kind, name in (
    ({"messages": [{"role": "user", "content": [image]}]}, anthropic.BadRequestError, "content[0]"),
    ({"model": "claude-sonnet-4-5"}, anthropic.NotFoundError, "--served-model-name"),
):
    refusal: Any = None
    try:
        client.messages.create(**{**hello, **fields})
    except kind as error:
        refusal = error
    assert refusal is not None, f"{fields} was accepted"
    assert name in refusal.body["error"]["message"], refusal.body
    assert refusal.request_id, refusal
