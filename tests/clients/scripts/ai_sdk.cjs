// The AI SDK with the providers of Anthropic and of OpenAI, whose default is the Responses API:
// texts, streams, schemas, and a loop of tool calls, also with the items sent again (store: false).
const assert = require("node:assert/strict");
const { createAnthropic } = require("@ai-sdk/anthropic");
const { createOpenAI } = require("@ai-sdk/openai");
const { generateObject, generateText, stepCountIs, streamObject, streamText, tool } = require("ai");
const { z } = require("zod");

const service = { baseURL: `${process.env.BASE_URL}/v1`, apiKey: process.env.API_KEY };
const anthropic = createAnthropic(service);
const openai = createOpenAI(service);
const schema = z.object({ weather: z.enum(["sunny", "rainy"]), certain: z.boolean() });

async function check(model, options) {
  const providerOptions = { openai: options };
  const common = { model, maxRetries: 0, maxOutputTokens: 200, providerOptions };
  const whole = await generateText({ ...common, system: "Be brief.", prompt: "Hi" });
  assert(whole.text);
  assert.equal(whole.finishReason, "stop");
  const stream = streamText({ ...common, prompt: "Hi" });
  let gained = "";
  for await (const part of stream.textStream) gained += part;
  assert.equal(gained, whole.text);
  assert((await stream.usage).outputTokens > 0);

  const limited = { ...common, prompt: "Hi", schema };
  assert.equal(typeof (await generateObject(limited)).object.certain, "boolean");
  const shaped = streamObject(limited);
  for await (const part of shaped.partialObjectStream) assert(part);
  assert.equal(typeof (await shaped.object).certain, "boolean");

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
    stopWhen: stepCountIs(3),
  };
  const answer = await generateText(asked);
  assert.equal(answer.steps.length, 2);
  assert.equal(answer.text, whole.text);
  const streamed = streamText(asked);
  await streamed.consumeStream();
  assert.equal((await streamed.steps).length, 2);
  assert.equal(await streamed.text, answer.text);
  assert.deepEqual(cities, ["Rome", "Rome"]);
  return answer;
}

async function main() {
  const name = process.env.MODEL;
  await check(anthropic(name), {});
  await check(openai(name), {});
  await check(openai.chat(name), {});
  const reasoning = { reasoningEffort: "high", reasoningSummary: "auto", forceReasoning: true };
  for (const store of [true, false]) {
    const { steps } = await check(openai(name), { ...reasoning, store });
    for (const step of steps) assert.equal(step.reasoningText.trim(), "Let me see.");
  }
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
