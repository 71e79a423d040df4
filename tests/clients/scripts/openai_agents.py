"""The Agents SDK in its default configuration: a function tool, streams, sessions, a schema."""

import asyncio
import os
from typing import Literal

from agents import (
    Agent,
    Runner,
    SQLiteSession,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

CITIES: list[str] = []
set_default_openai_client(
    AsyncOpenAI(
        base_url=f"{os.environ['BASE_URL']}/v1", api_key=os.environ["API_KEY"], max_retries=0
    )
)
set_tracing_disabled(True)


class Answer(BaseModel):
    weather: Literal["sunny", "rainy"]
    certain: bool


@function_tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    CITIES.append(city)
    return "sunny"


async def main() -> None:
    agent = Agent(
        name="a", instructions="Be brief.", model=os.environ["MODEL"], tools=[get_weather]
    )
    whole = await Runner.run(agent, "What is the weather in Rome?")
    assert whole.final_output == "It is sunny.", whole
    assert whole.last_response_id is not None
    more = await Runner.run(agent, "And now?", previous_response_id=whole.last_response_id)
    assert more.final_output == "It is sunny.", more
    streamed = Runner.run_streamed(agent, "What is the weather in Rome?")
    kinds = {event.type async for event in streamed.stream_events()}
    assert streamed.final_output == "It is sunny.", streamed
    assert "raw_response_event" in kinds
    session = SQLiteSession("s")
    for question in ("What is the weather in Rome?", "And now?"):
        result = await Runner.run(agent, question, session=session)
        assert result.final_output == "It is sunny.", result
    assert {*CITIES} == {"Rome"}
    shaped = Agent(name="b", model=os.environ["MODEL"], output_type=Answer)
    result = await Runner.run(shaped, "What is the weather in Rome?")
    assert result.final_output.weather in ("sunny", "rainy"), result


asyncio.run(main())
