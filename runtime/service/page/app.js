// Starts the page: reads the settings of the service, asks for a key if it needs one, and shows one
// of the two views.

import { request } from "./api.js";
import { startChat } from "./chat.js";
import { byId, element } from "./dom.js";
import { showServer } from "./server.js";

const RETRY_MS = 1500;
let service = null;

const notice = (text) => (byId("notice").textContent = text);

async function start() {
  byId("key-form").hidden = true;
  let settings;
  try {
    settings = await (await request("page/settings")).json();
  } catch (error) {
    if (error.status === 401) return;
    notice(`Waiting for the service: ${error.message}`);
    setTimeout(start, RETRY_MS);
    return;
  }
  notice("");
  const isFirst = !service;
  service ??= settings;
  route();
  if (!isFirst) return;
  byId("model").append(...service.models.map((name) => element("option", {}, name)));
  startChat(service);
}

function route() {
  if (!service) return;
  const isServer = location.hash === "#server";
  byId("server").hidden = !isServer;
  byId("chat").hidden = isServer;
  for (const link of document.querySelectorAll("nav a")) {
    link.ariaCurrent = (link.hash === "#server") === isServer ? "page" : null;
  }
  showServer(isServer && !document.hidden, service);
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("stepgraph.key", byId("key").value.trim());
  byId("key").value = "";
  start();
});
addEventListener("unauthorized", () => {
  notice("");
  byId("key-form").hidden = false;
  byId("key").focus();
});
addEventListener("hashchange", route);
document.addEventListener("visibilitychange", route);
start();
