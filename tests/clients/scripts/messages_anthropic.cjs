// The npm client of Anthropic: messages, streams, tools in two turns, and token counts.
const assert = require("node:assert/strict");
const Anthropic = require("@anthropic-ai/sdk").default;

const model = process.env.MODEL;
const client = new Anthropic({
  baseURL: process.env.BASE_URL,
  apiKey: process.env.API_KEY,
  maxRetries: 0,
});
const schema = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ name: "get_weather", description: "The weather.", input_schema: schema }];
const hello = { model, max_tokens: 60, messages: [{ role: "user", content: "Hi" }] };

async function main() {
  const message = await client.messages.create({ ...hello, system: "Be brief." });
  const { text } = message.content.at(-1);
  assert(text);
  assert.equal(message.stop_reason, "end_turn");
  assert(message._request_id);

  const stream = client.messages.stream(hello);
  let gained = "";
  stream.on("text", (part) => (gained += part));
  const final = await stream.finalMessage();
  assert.equal(gained, text);
  assert.equal(final.content.at(-1).text, text);
  assert(final.usage.output_tokens > 0);

  const question = { role: "user", content: "What is the weather in Rome?" };
  const asked = { ...hello, messages: [question], tools };
  const whole = await client.messages.create(asked);
  const streamed = await client.messages.stream(asked).finalMessage();
  for (const answer of [whole, streamed]) {
    assert.equal(answer.stop_reason, "tool_use");
    const call = answer.content.find((block) => block.type === "tool_use");
    assert.equal(call.name, "get_weather");
    assert.equal(typeof call.input.city, "string");
    const result = { type: "tool_result", tool_use_id: call.id, content: "sunny" };
    const messages = [
      question,
      { role: "assistant", content: answer.content },
      { role: "user", content: [result] },
    ];
    const reply = await client.messages.create({ ...asked, messages });
    assert.equal(reply.content.at(-1).type, "text");
    const { input_tokens } = await client.messages.countTokens({ model, messages, tools });
    assert.equal(input_tokens, reply.usage.input_tokens + reply.usage.cache_read_input_tokens);
  }
  const error = await client.messages.create({ ...hello, model: "claude-x" }).catch((e) => e);
  assert.equal(error.status, 404);
  assert.equal(error.type, "not_found_error");
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
