// The view of the server: numbers of the last minute, one event a second while it is visible.

import { events, request } from "./api.js";
import { bars, stacked } from "./charts.js";
import { byId, count, duration, element, sum } from "./dom.js";

const SECONDS = 60;
const RETRY_MS = 1000;
const PROFILE_MS = 2000;

let history = []; // the last events, the newest last
let controller = null;

// Listens while the view is visible, and not otherwise.
export async function showServer(isVisible, service) {
  controller?.abort();
  byId("profile").hidden = !service.may_profile;
  if (!isVisible) return;
  controller = new AbortController();
  const { signal } = controller;
  while (!signal.aborted) {
    try {
      for await (const data of events(await request("live", { signal }))) {
        history = [...history, JSON.parse(data)].slice(-SECONDS);
        update(service);
      }
    } catch (error) {
      if (signal.aborted || error.status === 401) return;
      byId("phase").textContent = `The server does not respond: ${error.message}`;
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

const of = (group, name) => history.map((event) => event[group][name] ?? 0);
const total = (name) => sum(of("counts", name));
const rates = (name) => history.map(({ counts, seconds }) => counts[name] / (seconds || 1));
const share = (part, whole) => `${((100 * part) / (whole || 1)).toFixed(part ? 1 : 0)} %`;

function update(service) {
  const { phase, ready, gauges } = history.at(-1);
  const state = phase === "serving" && !ready ? "a step takes too long" : phase;
  const text = `${state} · ${count(service.max_model_len)} tokens of context`;
  if (byId("phase").textContent !== text) byId("phase").textContent = text; // is read aloud
  const { rows = 0, usable_blocks: blocks = 0, block_size: size } = gauges;
  const queued = of("gauges", "queued_requests");
  const waiting = of("gauges", "waiting").map((value, index) => value + queued[index]);
  const held = of("gauges", "held_blocks");
  const tokens = `of ${count(blocks * size)} tokens`;
  const snapshots = gauges.cached_snapshots;
  const cached = snapshots ? `${tokens} · ${count(snapshots)} snapshots` : tokens;
  const drafts = total("drafted_tokens");
  const accepted = `${share(total("accepted_tokens"), drafts)} of drafts accepted`;
  const steps = `${count(rates("steps").at(-1))} steps/s`;
  byId("tiles").replaceChildren(
    tile("Rows", count, `of ${rows}`, of("gauges", "running")),
    tile("Waiting", count, `${count(gauges.queued_tokens)} prompt tokens`, waiting),
    tile("KV cache", (used) => share(used, blocks), cached, held),
    tile("Output tokens/s", count, drafts ? accepted : steps, rates("output_tokens")),
    tile(
      "Prompt tokens/s",
      count,
      `${share(total("cached_tokens"), total("prompt_tokens"))} cached`,
      rates("prompt_tokens"),
    ),
  );
  byId("gaps").replaceChildren(...gapChart(service.gap_bounds_ms));
  byId("steps").replaceChildren(...stepTimes());
}

function tile(name, shown, detail, values) {
  const top = Math.max(1, ...values);
  const bar = [...Array(SECONDS - values.length).fill(0), ...values];
  const label = `${name} of the last minute, at most ${shown(Math.max(...values))}`;
  const value = element("p", { className: "value" }, shown(values.at(-1)));
  const below = element("p", { className: "muted" }, detail);
  const chart = bars({ bar }, { top, label });
  return element("section", {}, element("h3", {}, name), value, below, chart);
}

function gapChart(bounds) {
  const counts = bounds.map(() => 0);
  for (const { gaps } of history) {
    for (const [bucket, number] of gaps) counts[Math.min(bucket, bounds.length - 1)] += number;
  }
  const number = sum(counts);
  if (!number) return [element("p", { className: "muted" }, "none")];
  const quantile = (p) => {
    let below = 0;
    return bounds[counts.findIndex((value) => (below += value) >= p * number)];
  };
  const first = Math.max(0, counts.findIndex(Boolean) - 4);
  const bar = counts.slice(first, Math.max(counts.findLastIndex(Boolean) + 5, first + 24));
  const shown = [0.5, 0.9, 0.99].map((p) => `p${100 * p} ${duration(quantile(p))}`);
  const label = [...shown, `${count(number)} gaps`].join(" · ");
  const axis = [0, 0.5, 1].map((part) => {
    const at = Math.min(first + Math.round(part * (bar.length - 1)), bounds.length - 1);
    return element("span", {}, duration(bounds[at]));
  });
  return [
    element("p", {}, label),
    bars({ bar }, { top: Math.max(...bar), label }),
    element("div", { className: "axis" }, ...axis),
  ];
}

function stepTimes() {
  const kinds = {};
  for (const { steps } of history) {
    for (const [kind, numbers] of Object.entries(steps)) {
      const found = (kinds[kind] ??= {});
      for (const [name, value] of Object.entries(numbers)) found[name] = (found[name] ?? 0) + value;
    }
  }
  return Object.entries(kinds).flatMap(([kind, { steps, rows, prefill_tokens, ...ms }]) => {
    const mean = Object.values(ms).map((value) => value / steps);
    const number = steps === 1 ? "1 step" : `${count(steps)} steps`;
    const facts = [`${kind}: ${duration(sum(mean))}`, number];
    if (rows) facts.push(`${(rows / steps).toFixed(1)} rows`);
    if (prefill_tokens) facts.push(`${(prefill_tokens / steps).toFixed(1)} prompt tokens`);
    const parts = Object.keys(ms).map((name, index) => {
      const key = element("i", { className: `part-${index}` });
      return element("span", {}, key, `${name} ${duration(mean[index])}`);
    });
    const legend = element("p", { className: "legend" }, ...parts);
    return [element("p", {}, facts.join(" · ")), stacked(mean, legend.textContent), legend];
  });
}

// Shows how long each operation of a step took, by a profile of the next steps.
byId("profile-start").addEventListener("click", async ({ target: button }) => {
  const place = byId("operations");
  button.disabled = true;
  place.textContent = "";
  try {
    await request("start_profile", { method: "POST" });
    await new Promise((resolve) => setTimeout(resolve, PROFILE_MS));
    const response = await request("stop_profile?report=true", { method: "POST" });
    const { operations } = await response.json();
    place.replaceChildren(operations ? operationTable(operations) : "The report is in nsys.");
  } catch (error) {
    place.textContent = error.status === 409 ? `No profile: ${error.message}` : error.message;
  }
  button.disabled = false;
});

function operationTable(operations) {
  const cell = (tag) => (text) => element(tag, {}, text);
  const head = ["Steps", "Operation", "Median", "Share"].map(cell("th"));
  const rows = operations.map(({ phase, name, us, share: part }) => {
    const cells = [phase, name, duration(us.p50 / 1000), share(part, 1)].map(cell("td"));
    return element("tr", {}, ...cells);
  });
  return element("table", {}, element("tr", {}, ...head), ...rows);
}
