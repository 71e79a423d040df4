"""The client of Ollama: chats, prompts, streams, tools, JSON, and what models there are."""

import json
import os
from typing import Any

import ollama

MODEL = os.environ["MODEL"]
client = ollama.Client(
    host=os.environ["BASE_URL"], headers={"Authorization": f"Bearer {os.environ['API_KEY']}"}
)
hello = [{"role": "user", "content": "Hi"}]


def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name
    """
    return f"sunny in {city}"


(model,) = client.list().models
assert model.model == MODEL, model
assert model.details.family, model
shown = client.show(f"{MODEL}:latest")
assert "completion" in shown.capabilities, shown
assert any(key.endswith(".context_length") for key in shown.modelinfo), shown
assert client.ps().models[0].model == MODEL

chat = client.chat(MODEL, hello, options={"num_predict": 60, "num_ctx": 64})
text = chat.message.content
assert text, chat
assert chat.done, chat
assert chat.done_reason == "stop", chat
assert chat.eval_count > 0, chat
assert 0 < chat.eval_duration < chat.total_duration, chat
parts = list(client.chat(MODEL, hello, stream=True, keep_alive="5m"))
assert "".join(part.message.content for part in parts) == text, parts
assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True], parts

generated = client.generate(MODEL, "Hi", system="Be brief.")
assert generated.response, generated
assert generated.context, generated
parts = list(client.generate(MODEL, "Hi", system="Be brief.", stream=True))
assert "".join(part.response for part in parts) == generated.response, parts
assert client.generate(MODEL).done_reason == "load"

question = {"role": "user", "content": "What is the weather in Rome?"}
whole = client.chat(MODEL, [question], tools=[get_weather])
stream = client.chat(MODEL, [question], tools=[get_weather], stream=True)
streamed = [call for part in stream for call in part.message.tool_calls or ()]
assert list(whole.message.tool_calls) == streamed, (whole, streamed)
(call,) = streamed
assert call.function.name == "get_weather", call
result = get_weather(**call.function.arguments)
turns: list[Any] = [question, whole.message]
turns.append({"role": "tool", "tool_name": "get_weather", "content": result})
reply = client.chat(MODEL, turns, tools=[get_weather])
assert reply.message.content, reply
assert not reply.message.tool_calls, reply

refusal: Any = None
try:
    schema = {"type": "integer", "maximum": 9}
    written = client.chat(MODEL, hello, format=schema, options={"num_predict": 60})
    assert isinstance(json.loads(written.message.content), int), written
except ollama.ResponseError as error:
    refusal = error
assert refusal is None or "token masks" in refusal.error, refusal  # it has none

try:
    client.chat("another", hello)
except ollama.ResponseError as error:
    refusal = error
assert refusal is not None, "a model that is not served was accepted"
assert refusal.status_code == 404, refusal
