// The times of one answer: a chart of its tokens, and numbers.

import { bars, stacked } from "./charts.js";
import { count, duration, element, sum } from "./dom.js";

const MAX_BARS = 120;
const LEAST_BARS = 48;

// Shows the times of an answer in `place`, which the server has measured. While the answer arrives,
// and if it was stopped, these are the times between its events.
export function showTiming(place, message) {
  const { timings, usage, arrived = [], first_ms: first } = message;
  const gaps = timings?.inter_token_ms ?? arrived;
  const facts = element("dl");
  const fact = (name, value) => {
    facts.append(element("div", {}, element("dt", {}, name), element("dd", {}, value)));
  };
  place.replaceChildren();
  if (gaps.length) {
    const ascending = [...gaps].sort((a, b) => a - b);
    const p50 = ascending[gaps.length >> 1];
    const p99 = ascending[Math.floor(0.99 * gaps.length)];
    const last = gaps.length < 100 ? "Longest" : "99th percentile";
    place.append(chart(gaps, p50, p99, timings ? "Token" : "Event"));
    fact("Median", duration(timings?.inter_token_p50_ms ?? p50));
    fact(last, duration(timings?.inter_token_p99_ms ?? p99));
    const unit = timings ? "tokens/s" : "events/s";
    fact("Speed", `${((1000 * gaps.length) / sum(gaps)).toPrecision(3)} ${unit}`);
  }
  if (timings) {
    const { queue_ms: queue, prefill_ms: prefill } = timings;
    const label = `queue ${duration(queue)}, prefill ${duration(prefill)}`;
    fact("First token", duration(queue + prefill));
    facts.append(stacked([queue, prefill], label), element("p", {}, label));
  } else if (first !== undefined) {
    fact("First event", duration(first));
  }
  if (usage) {
    const { cached_tokens: cached } = usage.prompt_tokens_details;
    fact("Prompt", `${count(usage.prompt_tokens)} tokens, ${count(cached)} cached`);
    fact("Answer", `${count(usage.completion_tokens)} tokens`);
  }
  if (timings?.accepted_drafts) fact("Accepted drafts", count(timings.accepted_drafts));
  if (message.finish_reason) fact("Finished", message.finish_reason);
  place.append(facts);
}

function chart(gaps, p50, p99, unit) {
  const size = Math.ceil(gaps.length / MAX_BARS);
  const parts = [];
  for (let at = 0; at < gaps.length; at += size) parts.push(gaps.slice(at, at + size));
  const peak = parts.map((part) => Math.max(...part));
  const bar = parts.map((part) => sum(part) / part.length);
  const top = 1.25 * Math.max(p99, 1.5 * p50) || 1;
  const label = `${unit}s by time: median ${duration(p50)}, 99th percentile ${duration(p99)}`;
  const picture = bars({ peak, bar }, { top, label, marks: [p50, p99], least: LEAST_BARS });
  const scale = `0 to ${duration(top)}${size > 1 ? `, ${size} tokens a bar` : ""}`;
  const caption = element("figcaption", {}, scale);
  picture.addEventListener("pointermove", ({ clientX }) => {
    const { left, width } = picture.getBoundingClientRect();
    const at = Math.floor(((clientX - left) / width) * Math.max(LEAST_BARS, peak.length));
    // The first gap ends with the second token.
    if (at in peak) caption.textContent = `${unit} ${at * size + 2}: ${duration(peak[at])}`;
  });
  picture.addEventListener("pointerleave", () => (caption.textContent = scale));
  return element("figure", {}, picture, caption);
}
