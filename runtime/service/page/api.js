// Requests to the service that this page comes from.

// Returns the response, or throws an error with the `status` and the message of the service. The
// window gets the event `unauthorized` if the key is missing or wrong.
export async function request(path, { body, signal, method = body ? "POST" : "GET" } = {}) {
  const headers = body ? { "content-type": "application/json" } : {};
  const key = new TextEncoder().encode(sessionStorage.getItem("stepgraph.key") ?? "");
  // Headers are bytes, which JavaScript writes as characters.
  if (key.length) headers.authorization = `Bearer ${String.fromCharCode(...key)}`;
  const response = await fetch(path, { method, headers, signal, body: JSON.stringify(body) });
  if (response.ok) return response;
  const text = await response.text();
  let message = `${response.status} ${text.slice(0, 500)}`;
  try {
    ({ message } = JSON.parse(text).error);
  } catch {
    // The response of a proxy.
  }
  if (response.status === 401) dispatchEvent(new Event("unauthorized"));
  throw Object.assign(new Error(message), { status: response.status });
}

// Yields the data of each server-sent event of a response.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) yield part.replace(/^data: /, "");
  }
}
