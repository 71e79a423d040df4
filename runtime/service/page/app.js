// Starts the page: reads the settings of the service, asks for a key if it needs one, and shows one
// of the two views.

import { request } from "./api.js";
import { startChat } from "./chat.js";
import { byId, element } from "./dom.js";
import { showServer } from "./server.js";

const RETRY_MS = 1500;
let service = null;

// Asks for the key if that is what is missing; returns whether it is.
function failed({ status }) {
  byId("key-form").hidden = status !== 401;
  if (status === 401) byId("key").focus();
  return status === 401;
}

const notice = (text) => (byId("notice").textContent = text);

async function start() {
  try {
    const settings = await (await request("page/settings")).json();
    notice("");
    byId("key-form").hidden = true;
    const isFirst = !service;
    service ??= settings;
    route();
    if (!isFirst) return;
    byId("model").append(...service.models.map((name) => element("option", {}, name)));
    startChat(service, failed);
  } catch (error) {
    if (failed(error)) return notice("");
    notice(`Waiting for the service: ${error.message}`);
    setTimeout(start, RETRY_MS);
  }
}

function route() {
  if (!service) return;
  const isServer = location.hash === "#server";
  byId("server").hidden = !isServer;
  byId("chat").hidden = isServer;
  for (const link of document.querySelectorAll("nav a")) {
    link.ariaCurrent = (link.hash === "#server") === isServer ? "page" : null;
  }
  showServer(isServer && !document.hidden, service, failed);
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("stepgraph.key", byId("key").value.trim());
  byId("key").value = "";
  start();
});
addEventListener("hashchange", route);
document.addEventListener("visibilitychange", route);
start();
