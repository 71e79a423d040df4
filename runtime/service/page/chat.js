// The conversation: what is sent, how answers arrive, and what can be done with a message.

import { events, request } from "./api.js";
import { byId, element } from "./dom.js";
import { MarkdownWriter } from "./markdown.js";
import { showTiming } from "./timing.js";

const CONTINUED_TOKENS = 128; // of a text that the model continues; the API's default is 16
const STORED = "stepgraph.chat";
const REFRESH_MS = 250;
const ANNOUNCED_CHARS = 2000;
const NAMES = { user: "You", tool: "Result of the call", assistant: "Model" };

let service = null;
let messages = [];
let running = null; // the answer that arrives: its `controller`, and the promise of its `end`
let edited = null; // the number of the message that the composer edits

const turns = byId("turns");
const prompt = byId("prompt");
const composer = byId("composer");
const fields = [...byId("settings").querySelectorAll("input, textarea")];
const valueOf = (name) => fields.find((field) => field.name === name && !field.disabled)?.value;

export function startChat(settings) {
  service = settings;
  const { defaults, has_chat: hasChat } = settings;
  const longest = hasChat ? settings.max_model_len : CONTINUED_TOKENS;
  for (const field of fields) {
    if (field.name in defaults) field.placeholder = defaults[field.name] ?? longest;
    field.disabled = !hasChat && field.type === "textarea";
  }
  prompt.placeholder = hasChat ? "Message" : "Text to continue";
  const saved = JSON.parse(sessionStorage.getItem(STORED) ?? "{}");
  messages = saved.messages ?? [];
  for (const field of fields) field.value = saved.settings?.[field.name] ?? "";
  save();
  showAll();
  prompt.focus();
}

const state = () => ({
  model: byId("model").value,
  date: new Date(),
  settings: Object.fromEntries(fields.map((field) => [field.name, field.value])),
  messages,
});

// Keeps the conversation and the settings in this tab, for when it is loaded again.
function save() {
  const given = fields.filter((field) => field.value && !field.disabled);
  byId("changed").textContent = given.map((field) => field.name).join(", ");
  try {
    sessionStorage.setItem(STORED, JSON.stringify(state()));
  } catch {
    // It is larger than the browser allows, and lasts until the page is loaded again.
  }
}

// Shows the first setting that is invalid, and returns whether there is none.
function isValid() {
  const tools = fields.find((field) => field.name === "tools");
  try {
    tools.setCustomValidity(!tools.value || JSON.parse(tools.value).length ? "" : "Give a list");
  } catch (error) {
    tools.setCustomValidity(error.message);
  }
  if (composer.checkValidity()) return true;
  byId("settings").open = true;
  return composer.reportValidity();
}

// Returns the path and the body of the request; the server has defaults for what is not given.
function requestOf(history) {
  const body = { model: byId("model").value, stream: true, return_timings: true };
  for (const { type, name, value } of fields) {
    if (type === "number" && value) body[name] = Number(value);
  }
  if (!service.has_chat) {
    const text = history.map((message) => message.content).join("");
    return ["v1/completions", { max_tokens: CONTINUED_TOKENS, ...body, prompt: text }];
  }
  const tools = valueOf("tools") && JSON.parse(valueOf("tools"));
  if (tools) Object.assign(body, { tools, parallel_tool_calls: false });
  body.messages = history.map(({ role, content, tool_calls: calls, tool_call_id: id }) => ({
    role,
    content,
    ...(calls?.length && { tool_calls: calls }),
    ...(id && { tool_call_id: id }),
  }));
  if (valueOf("system")) body.messages.unshift({ role: "system", content: valueOf("system") });
  return ["v1/chat/completions", body];
}

// Keeps the first messages, adds another one, and shows the answer while it arrives.
async function goOn(number, ...added) {
  await stop();
  messages = [...messages.slice(0, number), ...added];
  const history = messages.filter(({ content, tool_calls: calls }) => content || calls?.length);
  const message = { role: "assistant", content: "", reasoning: "", tool_calls: [], arrived: [] };
  messages.push(message);
  const controller = new AbortController();
  const { promise: end, resolve } = Promise.withResolvers();
  running = { controller, end };
  showBusy(true);
  const view = showAll();
  try {
    await receive(message, view, history, controller.signal);
  } catch (error) {
    if (controller.signal.aborted) message.finish_reason = "stopped";
    else message.error = error.message;
  }
  if (message.timings) delete message.arrived;
  running = null;
  showBusy(false);
  view.finish();
  follow();
  save();
  const said = message.error ? `Error: ${message.error}` : message.content;
  byId("finished").textContent = `Answer: ${said.slice(0, ANNOUNCED_CHARS)}`;
  resolve();
}

async function receive(message, view, history, signal) {
  let before = performance.now();
  let refreshed = before;
  const [path, body] = requestOf(history);
  for await (const data of events(await request(path, { body, signal }))) {
    if (data === "[DONE]") return;
    const { choices, usage, error } = JSON.parse(data);
    if (error) throw new Error(error.message);
    if (usage) {
      const { timings, ...counts } = usage;
      Object.assign(message, { usage: counts, timings: timings?.[0] });
    }
    if (!choices?.length) continue;
    const now = performance.now();
    if (message.first_ms === undefined) message.first_ms = now - before;
    else message.arrived.push(now - before);
    before = now;
    view.add(choices[0]);
    if (now - refreshed > REFRESH_MS) {
      refreshed = now;
      view.showTiming();
      follow();
    }
  }
  throw new Error("the connection ended before the answer");
}

// Scrolls to the end, if it was there or `always`.
function follow(always = false) {
  const { scrollHeight, scrollTop, clientHeight } = document.documentElement;
  if (always || scrollHeight - scrollTop - clientHeight < 150) scrollTo(0, scrollHeight);
}

async function stop() {
  running?.controller.abort();
  await running?.end;
}

function showBusy(isBusy) {
  byId("send").hidden = isBusy;
  byId("stop").hidden = !isBusy;
  turns.ariaBusy = String(isBusy);
}

// Shows all messages, and returns the view of the last one.
function showAll() {
  const how = service.has_chat
    ? "Each answer has a timeline: how long every token took, and what it waited for."
    : "This model has no chat template: it continues your text, over /v1/completions.";
  turns.replaceChildren();
  if (!messages.length || !service.has_chat) {
    turns.append(element("p", { className: "muted" }, how));
  }
  const views = messages.map(show);
  follow(true);
  return views.at(-1);
}

// Shows a message. The view of an answer adds what it gains.
function show(message, index) {
  const text = element("div", { className: "text" });
  const actions = element("div", { className: "actions" });
  const said = element("div", {}, element("h2", {}, NAMES[message.role]), text, actions);
  const turn = element("article", { className: message.role }, said);
  const act = (label, onclick) =>
    actions.append(element("button", { type: "button", onclick }, label));
  turns.append(turn);
  if (message.role !== "assistant") {
    text.textContent = message.content;
    act("Edit", () => edit(index));
    return null;
  }
  const timing = element("aside", { ariaLabel: "Times of this answer" });
  turn.append(timing);
  act("Copy", (event) => copy(message.content, event.target));
  act("Regenerate", () => isValid() && goOn(index));
  const thoughts = element("div");
  const reasoning = element("details", {}, element("summary", {}, "Reasoning"), thoughts);
  const content = element("div");
  text.append(reasoning, content);
  const writers = { reasoning: new MarkdownWriter(thoughts), content: new MarkdownWriter(content) };
  const write = (gained) => {
    for (const [part, writer] of Object.entries(writers)) writer.append(gained[part] ?? "");
    reasoning.hidden = !message.reasoning;
  };
  const view = {
    add({ delta, text: piece, finish_reason: reason }) {
      const gained = delta ?? { content: piece };
      message.content += gained.content ?? "";
      message.reasoning += gained.reasoning ?? "";
      for (const call of gained.tool_calls ?? []) addCall(message.tool_calls, call);
      message.finish_reason = reason;
      write(gained);
    },
    showTiming: () => showTiming(timing, message),
    finish() {
      for (const writer of Object.values(writers)) writer.finish();
      for (const { function: { name, arguments: given } } of message.tool_calls) {
        text.append(element("p", {}, `calls ${name} `, element("code", {}, given)));
      }
      if (message.error) {
        text.append(element("p", { className: "error", role: "alert" }, message.error));
      }
      view.showTiming();
    },
  };
  write(message);
  if (message.finish_reason || message.error) view.finish();
  return view;
}

// Adds what a call gained: the first part has its name, all have arguments.
function addCall(calls, { index, id, function: { name, arguments: given } }) {
  calls[index] ??= { id, type: "function", function: { name, arguments: "" } };
  calls[index].function.arguments += given;
}

async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "No clipboard"; // browsers have one for https and localhost only
  }
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

// Takes a message into the composer; what is sent then replaces it and all that follow.
function edit(index) {
  edited = index;
  prompt.value = messages[index]?.content ?? "";
  [...turns.querySelectorAll("article")].forEach((turn, i) => {
    turn.classList.toggle("replaced", index !== null && i >= index);
  });
  byId("send").textContent = index === null ? "Send" : "Replace";
  grow();
  prompt.focus();
}

function grow() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

function download() {
  const file = new Blob([JSON.stringify(state(), null, 2)], { type: "application/json" });
  const link = element("a", { href: URL.createObjectURL(file), download: "stepgraph-chat.json" });
  link.click();
  URL.revokeObjectURL(link.href);
}

composer.addEventListener("submit", (event) => {
  event.preventDefault();
  const content = prompt.value;
  if (!content.trim() || running || !isValid()) return;
  const number = edited ?? messages.length;
  const call = messages[number - 1]?.tool_calls?.[0];
  edit(null);
  goOn(number, call ? { role: "tool", tool_call_id: call.id, content } : { role: "user", content });
});
prompt.addEventListener("input", grow);
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    composer.requestSubmit();
  }
});
document.addEventListener("keydown", ({ key }) => {
  if (key !== "Escape") return;
  if (running) stop();
  else if (edited !== null) edit(null);
});
byId("stop").addEventListener("click", stop);
byId("settings").addEventListener("input", save);
byId("export").addEventListener("click", download);
byId("new").addEventListener("click", async () => {
  await stop();
  messages = [];
  save();
  showAll();
  edit(null);
});
