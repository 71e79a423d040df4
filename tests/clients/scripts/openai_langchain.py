"""LangChain's ChatOpenAI over responses and chats: texts, streams, tools, structured output."""

import os
from typing import Any, Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Answer(BaseModel):
    """An answer about the weather."""

    weather: Literal["sunny", "rainy"]
    certain: bool


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return "sunny"


def joined(stream: Any) -> Any:
    """A stream as one message."""
    whole = next(stream)
    for part in stream:
        whole += part
    return whole


for over_responses in (True, False):
    model: Any = ChatOpenAI(
        base_url=f"{os.environ['BASE_URL']}/v1",
        api_key=os.environ["API_KEY"],
        model=os.environ["MODEL"],
        use_responses_api=over_responses,
        max_retries=0,
    )
    assert model.invoke("Hi").text == "It is sunny."
    assert joined(model.stream("Hi")).text == "It is sunny."
    bound, question = model.bind_tools([get_weather]), HumanMessage("What is the weather in Rome?")
    for asked in (bound.invoke([question]), joined(bound.stream([question]))):
        (call,) = asked.tool_calls
        assert (call["name"], call["args"]) == ("get_weather", {"city": "Rome"}), asked
        told = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
        assert bound.invoke([question, asked, told]).text == "It is sunny."
    for method in ("json_schema", "function_calling"):
        shaped = model.with_structured_output(Answer, method=method).invoke([question])
        assert shaped.weather in ("sunny", "rainy"), shaped
