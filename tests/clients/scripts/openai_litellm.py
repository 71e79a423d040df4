"""LiteLLM over chats and responses: texts, streams, tools in two turns."""

import json
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm

TO: Any = {
    "model": f"openai/{os.environ['MODEL']}",
    "api_base": f"{os.environ['BASE_URL']}/v1",
    "api_key": os.environ["API_KEY"],
    "num_retries": 0,
}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "The weather.", "parameters": SCHEMA}
QUESTION: Any = {"role": "user", "content": "What is the weather in Rome?"}

tools: Any = [{"type": "function", "function": FUNCTION}]
asked = litellm.completion(messages=[QUESTION], tools=tools, **TO).choices[0].message
(call,) = asked.tool_calls
assert json.loads(call.function.arguments) == {"city": "Rome"}, asked
result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
told = litellm.completion(messages=[QUESTION, asked, result], tools=tools, **TO)
assert told.choices[0].message.content == "It is sunny.", told
chunks = litellm.completion(messages=[QUESTION], stream=True, **TO)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "It is sunny."

flat: Any = [{"type": "function", **FUNCTION}]
response: Any = litellm.responses(input=[QUESTION], tools=flat, **TO)
(item,) = response.output
assert json.loads(item.arguments) == {"city": "Rome"}, response
output = {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
continued: Any = litellm.responses(
    input=[output], tools=flat, previous_response_id=response.id, **TO
)
assert continued.output[-1].content[0].text == "It is sunny.", continued
events: Any = litellm.responses(input="Hi", stream=True, **TO)
texts = [event.delta for event in events if event.type == "response.output_text.delta"]
assert "".join(texts) == "It is sunny.", texts
