// The AI SDK with Anthropic's provider: texts, streams, and a loop of tool calls.
const assert = require("node:assert/strict");
const { createAnthropic } = require("@ai-sdk/anthropic");
const { generateText, stepCountIs, streamText, tool } = require("ai");
const { z } = require("zod");

const anthropic = createAnthropic({
  baseURL: `${process.env.BASE_URL}/v1`,
  apiKey: process.env.API_KEY,
});
const model = anthropic(process.env.MODEL);
const common = { model, maxOutputTokens: 60, maxRetries: 0 };

async function main() {
  const whole = await generateText({ ...common, system: "Be brief.", prompt: "Hi" });
  assert(whole.text);
  assert.equal(whole.finishReason, "stop");
  const stream = streamText({ ...common, prompt: "Hi" });
  let gained = "";
  for await (const part of stream.textStream) gained += part;
  assert.equal(gained, whole.text);
  assert((await stream.usage).outputTokens > 0);

  const cities = [];
  const weather = tool({
    description: "The weather of a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => {
      cities.push(city);
      return "sunny";
    },
  });
  const asked = {
    ...common,
    prompt: "What is the weather in Rome?",
    tools: { get_weather: weather },
    stopWhen: stepCountIs(2),
  };
  const answer = await generateText(asked);
  assert.equal(answer.steps.length, 2);
  assert(answer.text);
  const streamed = streamText(asked);
  await streamed.consumeStream();
  assert.equal((await streamed.steps).length, 2);
  assert.equal(await streamed.text, answer.text);
  assert.equal(cities.length, 2);
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
