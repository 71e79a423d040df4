"""Instructor: objects of a schema, over tools, JSON schemas and responses."""

import os
from typing import Any, Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Answer(BaseModel):
    weather: Literal["sunny", "rainy"]
    certain: bool


for mode in (
    instructor.Mode.TOOLS,
    instructor.Mode.TOOLS_STRICT,
    instructor.Mode.JSON_SCHEMA,
    instructor.Mode.RESPONSES_TOOLS,
):
    client: Any = instructor.from_openai(
        OpenAI(
            base_url=f"{os.environ['BASE_URL']}/v1", api_key=os.environ["API_KEY"], max_retries=0
        ),
        mode=mode,
    )
    found = client.chat.completions.create(
        model=os.environ["MODEL"],
        messages=[{"role": "user", "content": "What is the weather in Rome?"}],
        response_model=Answer,
        max_retries=0,
    )
    assert found.weather in ("sunny", "rainy"), (mode, found)
