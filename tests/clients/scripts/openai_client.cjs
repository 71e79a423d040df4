// The npm client of OpenAI: chats and responses; streams, schemas, tools in two turns.
const assert = require("node:assert/strict");
const OpenAI = require("openai").default;
const { zodResponseFormat, zodTextFormat } = require("openai/helpers/zod");
const { z } = require("zod");

const model = process.env.MODEL;
const client = new OpenAI({
  baseURL: `${process.env.BASE_URL}/v1`,
  apiKey: process.env.API_KEY,
  maxRetries: 0,
});
const schema = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};
const described = { name: "get_weather", description: "The weather.", parameters: schema };
const question = { role: "user", content: "What is the weather in Rome?" };
const Answer = z.object({ weather: z.enum(["sunny", "rainy"]), certain: z.boolean() });

async function chats() {
  const tools = [{ type: "function", function: described }];
  const asked = { model, messages: [question], tools };
  const whole = await client.chat.completions.create(asked);
  const streamed = await client.chat.completions.stream(asked).finalChatCompletion();
  for (const { message, finish_reason } of [whole.choices[0], streamed.choices[0]]) {
    assert.equal(finish_reason, "tool_calls");
    const [call] = message.tool_calls;
    assert.deepEqual(JSON.parse(call.function.arguments), { city: "Rome" });
    const result = { role: "tool", tool_call_id: call.id, content: "sunny" };
    const messages = [question, message, result];
    const told = await client.chat.completions.create({ ...asked, messages });
    assert(told.choices[0].message.content);
  }
  const format = zodResponseFormat(Answer, "answer");
  const parsed = await client.chat.completions.parse({
    model,
    messages: [question],
    response_format: format,
    max_completion_tokens: 60,
  });
  assert.equal(typeof parsed.choices[0].message.parsed.certain, "boolean");
}

async function responses() {
  const hello = { model, input: "Hi" };
  const first = await client.responses.create({ ...hello, instructions: "Be brief." });
  assert(first.output_text);
  assert.equal((await client.responses.retrieve(first.id)).output_text, first.output_text);

  let gained = "";
  const stream = client.responses.stream({ ...hello, reasoning: { effort: "high" } });
  stream.on("response.output_text.delta", (event) => {
    gained += event.delta;
    assert.equal(event.snapshot, gained);
  });
  const final = await stream.finalResponse();
  assert.equal(final.output_text, first.output_text);
  assert.equal(gained, final.output_text);
  assert.deepEqual(final.output.map((item) => item.type), ["reasoning", "message"]);

  const text = { format: zodTextFormat(Answer, "answer") };
  const shaped = { ...hello, text, max_output_tokens: 60 };
  assert.equal(typeof (await client.responses.parse(shaped)).output_parsed.certain, "boolean");
  const parsed = await client.responses.stream(shaped).finalResponse();
  assert.equal(typeof parsed.output_parsed.certain, "boolean");

  const asked = { model, input: [question], tools: [{ type: "function", strict: true, ...described }] };
  const whole = await client.responses.create(asked);
  const streamed = await client.responses.stream(asked).finalResponse();
  for (const response of [whole, streamed]) {
    const call = response.output.find((item) => item.type === "function_call");
    assert.deepEqual(JSON.parse(call.arguments), { city: "Rome" });
    const result = { type: "function_call_output", call_id: call.call_id, output: "sunny" };
    const input = [question, ...response.output, result];
    const stateless = await client.responses.create({ ...asked, input, store: false });
    const continued = await client.responses.create({
      ...asked,
      input: [result],
      previous_response_id: response.id,
    });
    assert(stateless.output_text);
    assert.equal(stateless.output_text, continued.output_text);
    const { input_tokens } = await client.responses.inputTokens.count({
      ...asked,
      input: [result],
      previous_response_id: response.id,
    });
    assert.equal(continued.usage.input_tokens, input_tokens);
  }

  let begun = await client.responses.create({ ...hello, background: true });
  while (["queued", "in_progress"].includes(begun.status)) {
    begun = await client.responses.retrieve(begun.id);
  }
  assert.equal(begun.output_text, first.output_text);
  assert.equal((await client.responses.cancel(begun.id)).status, "completed");
  await client.responses.delete(begun.id);
  await assert.rejects(client.responses.retrieve(begun.id), OpenAI.NotFoundError);
}

chats()
  .then(responses)
  .catch((error) => {
    console.error(error);
    process.exit(1);
  });
