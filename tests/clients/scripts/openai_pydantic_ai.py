"""Pydantic AI with OpenAI's responses and chats: tools, structured output, streams."""

import asyncio
import os
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Answer(BaseModel):
    weather: Literal["sunny", "rainy"]
    certain: bool


def get_weather(city: str) -> str:
    """The weather of a city."""
    assert city == "Rome"
    return "sunny"


async def main() -> None:
    url, key = f"{os.environ['BASE_URL']}/v1", os.environ["API_KEY"]
    provider = OpenAIProvider(base_url=url, api_key=key)
    for kind in (OpenAIResponsesModel, OpenAIChatModel):
        model: Any = kind(os.environ["MODEL"], provider=provider)
        agent = Agent(model, instructions="Be brief.", tools=[get_weather])
        result = await agent.run("What is the weather in Rome?")
        assert result.output == "It is sunny.", result
        history = result.all_messages()
        again = await agent.run("And now?", message_history=history)
        assert again.output == "It is sunny.", again
        async with agent.run_stream("What is the weather in Rome?") as streamed:
            assert await streamed.get_output() == "It is sunny."
        for output in (NativeOutput(Answer), Answer):
            shaped: Any = Agent(model, output_type=output)
            found = await shaped.run("What is the weather in Rome?")
            assert found.output.weather in ("sunny", "rainy"), found
        reasoned = await agent.run("Hi", model_settings={"thinking": "high"})
        assert reasoned.output == "It is sunny.", reasoned
    settings: Any = {"openai_previous_response_id": "auto"}
    agent = Agent(OpenAIResponsesModel(os.environ["MODEL"], provider=provider), tools=[get_weather])
    first = await agent.run("What is the weather in Rome?", model_settings=settings)
    second = await agent.run(
        "And now?", message_history=first.all_messages(), model_settings=settings
    )
    assert second.output == "It is sunny.", second


asyncio.run(main())
