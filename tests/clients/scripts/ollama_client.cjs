// The npm client of Ollama: chats, prompts, streams, tools, and what models there are.
const assert = require("node:assert/strict");
const { Ollama } = require("ollama");

const model = process.env.MODEL;
const client = new Ollama({
  host: process.env.BASE_URL,
  headers: { Authorization: `Bearer ${process.env.API_KEY}` },
});
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const described = { name: "get_weather", description: "The weather.", parameters };
const tools = [{ type: "function", function: described }];
const messages = [{ role: "user", content: "Hi" }];

async function main() {
  const { models } = await client.list();
  assert.equal(models[0].name, model);
  const shown = await client.show({ model });
  assert(shown.capabilities.includes("completion"));
  assert.equal((await client.ps()).models[0].name, model);

  const chat = await client.chat({ model, messages, options: { num_predict: 60 } });
  assert(chat.message.content);
  assert(chat.done);
  assert(chat.eval_count > 0);
  let gained = "";
  for await (const part of await client.chat({ model, messages, stream: true })) {
    gained += part.message.content;
  }
  assert.equal(gained, chat.message.content);

  const prompt = "Hi";
  const generated = await client.generate({ model, prompt });
  gained = "";
  for await (const part of await client.generate({ model, prompt, stream: true })) {
    gained += part.response;
  }
  assert.equal(gained, generated.response);

  const question = { role: "user", content: "What is the weather in Rome?" };
  const asked = { model, tools, messages: [question] };
  const { message } = await client.chat(asked);
  const [call] = message.tool_calls;
  assert.equal(call.function.name, "get_weather");
  assert.equal(typeof call.function.arguments.city, "string");
  const result = { role: "tool", tool_name: "get_weather", content: "sunny" };
  const reply = await client.chat({ ...asked, messages: [question, message, result] });
  assert(reply.message.content);
  assert(!reply.message.tool_calls);

  const error = await client.chat({ model: "another", messages }).catch((e) => e);
  assert.equal(error.status_code, 404);
  assert.match(error.message, /another/);
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
