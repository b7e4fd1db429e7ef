/**
 * What the page asks the server: a trace of the text, slices of its values, how one number was made.
 *
 * The newest question wins: an older one that is still running is called off. A trace never changes, so what
 * was fetched of it is kept.
 */

import { fromBase64, parse } from "./wire.js";

const token = document.querySelector('meta[name="clearhead-token"]')?.content ?? "";
const first = JSON.parse(document.getElementById("first")?.textContent || "{}");

export const manifest = first.manifest;
export const words = new Map(); // id -> text, as far as the server has told

export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

async function ask(path, options = {}) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("", 0); // nobody answers
  }
  if (!response.ok) {
    const answer = await response.json().catch(() => ({}));
    throw new ServerError(answer.error ?? answer.detail ?? `${response.status}`, response.status);
  }
  return response;
}

const post = (path, body, signal) =>
  ask(path, {
    method: "POST",
    headers: { "content-type": "application/json", "x-clearhead-token": token },
    body: JSON.stringify(body),
    signal,
  });

/** @typedef {ReturnType<typeof readTrace>} Trace */

/** A trace summary from its bytes: tensors by name, and what the metadata says. */
function readTrace(buffer) {
  const { tensors, metadata } = parse(buffer);
  const json = (name, otherwise) => (metadata[name] ? JSON.parse(metadata[name]) : otherwise);
  for (const [id, text] of Object.entries(json("words", {}))) words.set(Number(id), text);
  const pieces = json("pieces", []);
  for (const piece of pieces) if (!words.has(piece.id)) words.set(piece.id, piece.text);
  return {
    ...tensors,
    id: metadata.trace,
    ms: Number(metadata.ms),
    delta: metadata.delta === undefined || metadata.delta === "" ? null : Number(metadata.delta),
    head: metadata.head,
    select: Number(metadata.select),
    pieces,
    source: json("source_pieces", []),
    rows: json("rows", []),
    sourceRows: json("source_rows", []),
    experts: json("experts", {}),
    bytes: buffer.byteLength,
  };
}

/** The trace that came with the page, or null. */
export function firstTrace() {
  const data = first.trace?.data ?? first.trace;
  return typeof data === "string" ? readTrace(fromBase64(data)) : null;
}

/** What the first trace was asked with. */
export const firstRequest = { text: first.text ?? first.trace?.text ?? "", source: first.source ?? "" };

const client = `${performance.timeOrigin}`; // tells the pages of one reader apart
let sequence = 0;
let running = null;

/** Run the model on a text; null when a newer question came in between. */
export async function trace(request, { quiet = false } = {}) {
  sequence += 1;
  const mine = sequence;
  running?.abort();
  running = new AbortController();
  try {
    const response = await post("/api/trace", { ...request, seq: mine, client }, running.signal);
    const result = readTrace(await response.arrayBuffer());
    return mine === sequence || quiet ? result : null;
  } catch (error) {
    if (error.name === "AbortError" || error.status === 409) return null;
    throw error;
  }
}

const kept = new Map();

/** Fetch once per address, and remember the last few hundred answers. */
function once(path, read) {
  const there = kept.get(path);
  if (there) {
    kept.delete(path);
    kept.set(path, there);
    return there;
  }
  const answer = ask(path).then(read);
  answer.catch(() => kept.delete(path));
  kept.set(path, answer);
  if (kept.size > 300) kept.delete(kept.keys().next().value);
  return answer;
}

const part = encodeURIComponent;

/** A slice of a value (or of a parameter, where the name starts with "param:"). `at` as in "0,1,:,0:64". */
export function slice(id, name, at, options = {}) {
  const query = new URLSearchParams({ at, ...options });
  const path = name.startsWith("param:")
    ? `/api/w/${part(name.slice(6))}?${query}`
    : `/api/trace/${id}/t/${part(name)}?${query}`;
  return once(path, async (response) => {
    const { tensors, metadata } = parse(await response.arrayBuffer());
    return { ...tensors.x, metadata };
  });
}

/** How one number was made. */
export const cell = (id, name, index) =>
  once(`/api/trace/${id}/cell/${part(name)}?at=${index.join(",")}`, (response) => response.json());

/** Attention lines and logits of another position. */
export const lines = (id, position) =>
  once(`/api/trace/${id}/lines?at=${position}`, async (response) => {
    const { tensors, metadata } = parse(await response.arrayBuffer());
    for (const [key, text] of Object.entries(JSON.parse(metadata.words ?? "{}"))) words.set(Number(key), text);
    return tensors;
  });

export const source = (key) => once(`/api/source/${key.split("/").map(part).join("/")}`, (response) => response.text());

export const tokenize = async (text, signal) => (await post("/api/tokenize", { text }, signal)).json();

/** The text of every id, for the tokens that a trace did not name. */
export const vocabulary = () =>
  once("/api/vocab", (response) => response.json()).then((texts) => {
    texts.forEach((text, id) => words.set(id, text));
    return texts;
  });

/** Tokens from the server, drawn as the command line draws them, one by one. */
export async function* generate(request, signal) {
  const response = await post("/api/generate", request, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const events = rest.split("\n\n");
    rest = events.pop() ?? "";
    for (const event of events) {
      const data = event.split("\n").find((line) => line.startsWith("data:"));
      if (data && data.slice(5).trim() !== "[DONE]") yield JSON.parse(data.slice(5));
    }
  }
}

export const exportPath = (id, kind) => `/api/export/${id}.${kind}`;
