"""LangChain's client of Anthropic: messages, streams, and tools in two turns."""

import os

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


model = ChatAnthropic(
    model=os.environ["MODEL"],
    base_url=os.environ["BASE_URL"],
    api_key=os.environ["API_KEY"],
    max_tokens=60,
    max_retries=0,
)
hello = [SystemMessage("Be brief."), HumanMessage("Hi")]
answer = model.invoke(hello)
assert answer.text, answer
assert answer.usage_metadata["output_tokens"] > 0, answer
chunks = list(model.stream(hello))
assert "".join(chunk.text for chunk in chunks) == answer.text, chunks

agent = model.bind_tools([get_weather])
turns = [HumanMessage("What is the weather in Rome?")]
called = agent.invoke(turns)
gathered = None
for chunk in agent.stream(turns):
    gathered = chunk if gathered is None else gathered + chunk
for message in (called, gathered):
    (call,) = message.tool_calls
    assert call["name"] == "get_weather", message
    result = get_weather.invoke(call["args"])
    reply = agent.invoke([*turns, message, ToolMessage(result, tool_call_id=call["id"])])
    assert reply.text, reply
    assert not reply.tool_calls, reply
