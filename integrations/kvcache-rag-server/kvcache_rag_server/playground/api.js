// The server's HTTP interface: JSON, and answers as server-sent events.

const KEY = "kvcache-rag.key";
let key = sessionStorage.getItem(KEY) ?? "";

export function apiKey() {
  return key;
}

// Kept for this tab alone, and never written into the page's address.
export function setApiKey(value) {
  key = value.trim();
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

async function refused(response) {
  const body = await response.json().catch(() => null);
  const told = body?.error?.message;
  if (told) return new Error(told);
  return new Error(`The server answered ${response.status} ${response.statusText}.`);
}

async function request(path, body, signal) {
  const headers = {};
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  const options = { headers, signal, cache: "no-store" };
  if (body) Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer; is it still running?");
  }
  if (!response.ok) throw await refused(response);
  return response;
}

export async function getJson(path) {
  return (await request(path)).json();
}

export async function postJson(path, body, signal) {
  return (await request(path, body, signal)).json();
}

// The values of `data:` lines, as they come; comments (heartbeats) are passed over.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    const lines = (rest + (value ?? "")).split(/\r?\n/);
    rest = done ? "" : lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:")) yield line.slice(5).trim();
    }
    if (done) return;
  }
}

// Stream one answer; `onPiece(text)` gets what is new. Resolves to
// {text, usage, kvcache, isCut, firstPiece, total}, times in seconds as this page saw them.
export async function streamAnswer(path, body, { signal, onPiece }) {
  const started = performance.now();
  const since = () => (performance.now() - started) / 1000;
  const found = { text: "", usage: null, kvcache: null, isCut: false, firstPiece: null };
  const response = await request(path, { ...body, stream: true }, signal);
  let ended = false;
  for await (const data of events(response)) {
    if (data === "[DONE]") {
      ended = true;
      break;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message ?? "The server stopped with an error.");
    const piece = chunk.choices?.[0]?.delta?.content ?? "";
    if (piece) {
      found.firstPiece ??= since();
      found.text += piece;
      onPiece(piece);
    }
    found.isCut ||= chunk.choices?.[0]?.finish_reason === "length";
    for (const part of ["usage", "kvcache"]) found[part] = chunk[part] ?? found[part];
  }
  if (!ended) throw new Error("The answer broke off; ask again.");
  return { ...found, firstPiece: found.firstPiece ?? since(), total: since() };
}
