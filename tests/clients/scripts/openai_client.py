"""The client of OpenAI: completions, chats and responses; streams, schemas, tools in two turns."""

import json
import os
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import openai
from pydantic import BaseModel

MODEL = os.environ["MODEL"]
client = openai.OpenAI(
    base_url=f"{os.environ['BASE_URL']}/v1", api_key=os.environ["API_KEY"], max_retries=0
)
SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION: Any = {"name": "get_weather", "description": "The weather.", "parameters": SCHEMA}
QUESTION = {"role": "user", "content": "What is the weather in Rome?"}


class Answer(BaseModel):
    weather: Literal["sunny", "rainy"]
    certain: bool


# Completions and chats.
text = client.completions.create(model=MODEL, prompt="Hi", max_tokens=20).choices[0].text
chunks = client.completions.create(model=MODEL, prompt="Hi", max_tokens=20, stream=True)
assert text == "".join(chunk.choices[0].text for chunk in chunks)
messages: list[Any] = [QUESTION]
chat_tools: Any = [{"type": "function", "function": FUNCTION}]
asked = client.chat.completions.create(model=MODEL, messages=messages, tools=chat_tools)
(call,) = asked.choices[0].message.tool_calls
assert json.loads(call.function.arguments) == {"city": "Rome"}
with client.chat.completions.stream(model=MODEL, messages=messages, tools=chat_tools) as stream:
    stream.until_done()
    (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
assert streamed.function.arguments == call.function.arguments
messages += [
    asked.choices[0].message.model_dump(exclude_none=True),
    {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
]
told = client.chat.completions.create(model=MODEL, messages=messages, tools=chat_tools)
assert told.choices[0].message.content == text, told
parsed = client.chat.completions.parse(
    model=MODEL, messages=[QUESTION], response_format=Answer, max_tokens=60
)
assert parsed.choices[0].message.parsed.weather in ("sunny", "rainy")

# Responses.
tools: Any = [{"type": "function", "strict": True, **FUNCTION}]
first = client.responses.create(
    model=MODEL, instructions="Be brief.", input="Hi", metadata={"a": "b"}
)
assert first.output_text == text, first
assert (first.status, first.usage.output_tokens_details.reasoning_tokens) == ("completed", 0)
assert client.responses.retrieve(first.id) == first
with client.responses.stream(model=MODEL, input="Hi", reasoning={"effort": "high"}) as stream:
    kinds = {event.type for event in stream}
    final = stream.get_final_response()
assert final.output_text == text, final
assert [item.type for item in final.output] == ["reasoning", "message"], final
assert final.output[0].content[0].text.strip() == "Let me see."
assert {"response.reasoning_text.delta", "response.output_text.done"} <= kinds, kinds
assert final.usage.output_tokens_details.reasoning_tokens > 0
assert (
    final.usage.input_tokens
    == client.responses.input_tokens.count(model=MODEL, input="Hi").input_tokens
)
shaped = client.responses.parse(model=MODEL, input="Hi", text_format=Answer, max_output_tokens=60)
assert shaped.output_parsed.weather in ("sunny", "rainy")
with client.responses.stream(
    model=MODEL, input="Hi", text_format=Answer, max_output_tokens=60
) as stream:
    assert stream.until_done().get_final_response().output_parsed.weather in ("sunny", "rainy")
counted = client.responses.create(
    model=MODEL, input="Hi", include=["message.output_text.logprobs"], top_logprobs=2
)
logprobs = counted.output[0].content[0].logprobs
assert "".join(each.token for each in logprobs).startswith(text), logprobs

whole = client.responses.create(model=MODEL, input=[QUESTION], tools=tools)
with client.responses.stream(model=MODEL, input=[QUESTION], tools=tools) as stream:
    stream.until_done()
    streamed = stream.get_final_response()
for response in (whole, streamed):
    (call,) = (item for item in response.output if item.type == "function_call")
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Rome"})
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    history = [QUESTION, *response.output, result]
    stateless = client.responses.create(model=MODEL, input=history, tools=tools, store=False)
    continued = client.responses.create(
        model=MODEL, input=[result], tools=tools, previous_response_id=response.id
    )
    assert stateless.output_text == continued.output_text == text
    assert stateless.usage.input_tokens == continued.usage.input_tokens
    listed = list(client.responses.input_items.list(continued.id, order="asc", limit=2))
    assert [item.type for item in listed] == ["message", "function_call", "function_call_output"]

begun = client.responses.create(model=MODEL, input="Hi", background=True)
assert begun.status in ("queued", "in_progress")
while begun.status in ("queued", "in_progress"):
    begun = client.responses.retrieve(begun.id)
assert begun.output_text == text
assert client.responses.cancel(begun.id).status == "completed"
client.responses.delete(begun.id)


def refused(call: Callable[[], object], kind: type[openai.APIStatusError]) -> Any:
    """The error of a call."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError("it was accepted")


for call_of in (client.responses.retrieve, client.responses.cancel, client.responses.delete):
    error = refused(partial(call_of, begun.id), openai.NotFoundError)
    assert error.code == "response_not_found", error
image: Any = [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]
error = refused(lambda: client.responses.create(model=MODEL, input=image), openai.BadRequestError)
assert error.param == "input[0].content[0]", error
