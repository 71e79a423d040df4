"""Pydantic AI with Anthropic's provider: an agent that calls a tool, whole and streamed."""

import asyncio
import os
from collections.abc import AsyncIterable
from typing import Any

from pydantic_ai import Agent, RunContext
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.providers.anthropic import AnthropicProvider

provider = AnthropicProvider(base_url=os.environ["BASE_URL"], api_key=os.environ["API_KEY"])
model = AnthropicModel(os.environ["MODEL"], provider=provider)
cities: list[str] = []
events: list[Any] = []
agent = Agent(model, system_prompt="Be brief.", model_settings={"max_tokens": 60})


@agent.tool_plain
def get_weather(city: str) -> str:
    """The weather of a city."""
    cities.append(city)
    return "sunny"


async def gather(context: RunContext, stream: AsyncIterable[Any]) -> None:
    events.extend([event async for event in stream])


async def main() -> None:
    whole = await agent.run("What is the weather in Rome?")
    assert whole.output, whole
    streamed = await agent.run("What is the weather in Rome?", event_stream_handler=gather)
    assert streamed.output == whole.output, (streamed, whole)
    assert len(events) > 2, events
    assert len(cities) == 2, cities
    assert streamed.usage.output_tokens > 0, streamed.usage
    plain: Agent[None, str] = Agent(model)
    hello = await plain.run("Hi")
    assert hello.output, hello


asyncio.run(main())
