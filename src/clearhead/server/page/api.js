/**
 * What the page asks the server: a trace of the text, slices of its values, how one number was made.
 *
 * The newest question wins: an older one that is still running is called off. A trace never changes, so what
 * was fetched of it is kept. Tensors come as safetensors, the same bytes that are saved to a file:
 *
 *   8 bytes: length of the header (little-endian)   header: JSON   raw little-endian numbers
 */

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

/** @typedef {ReturnType<typeof readTrace> & Record<string, any>} Trace */

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
    step: metadata.step ? Number(metadata.step) : null,
    weights: metadata.weights ?? "",
    of: metadata.of ?? "",
    select: Number(metadata.select),
    pieces,
    source: json("source_pieces", []),
    rows: json("rows", []),
    sourceRows: json("source_rows", []),
    experts: json("experts", []),
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
  if (runName && name.startsWith("param:")) query.set("trace", id); // weights of a run differ from step to step
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

/** How far the logits of generate() are from a trace's. */
export const delta = (id) => once(`/api/trace/${id}/delta`, async (response) => (await response.json()).delta);

/** The tokens whose rows of a table point nearest to that of one: [id, text, cosine][]. */
export const near = (id, table, row) => once(`/api/trace/${id}/near/${part(table)}?row=${row}`, (response) => response.json());

/** What each depth adds to the logit of a word at a position: {rows: [name, amount][], rest, logit}. */
export const origins = (id, position, word) => once(`/api/trace/${id}/origins?at=${position}&word=${word}`, (response) => response.json());

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

/** What a server sends piece by piece. */
async function* pieces(path, request, signal) {
  const response = await post(path, request, signal);
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

/** Tokens from the server, drawn as the command line draws them, one by one. */
export const generate = (request, signal) => pieces("/api/generate", request, signal);

/** What each change does to one word: every head off, or every row of the map as in another trace. */
export const sweep = (request, signal) => pieces("/api/sweep", request, signal);

/** The model that stands beside this one, to compare with, or null. */
export const besideName = first.beside ?? null;
export const besidePlace = first.beside_place ?? besideName;

/** What the rows of the map say of some tokens: their logits and probabilities, (token, row, position). */
export const followed = (id, ids) => once(`/api/trace/${id}/watch?ids=${ids.join(".")}`, async (response) => parse(await response.arrayBuffer()).tensors);

/** The run that is looked at, or null. */
export const runName = first.run ?? null;
export const run = async () => (await ask("/api/runs/current")).json();

/** What each kept step of the run makes of a text. */
export const story = (request, signal) => pieces("/api/runs/current/story", request, signal);

/** Hear what is added to the run from `place` on, until `hear` answers true: then all is asked for `again`. */
export function follow(place, hear, again) {
  unfollow();
  following = new EventSource(`/api/runs/current/events?place=${place}`);
  following.onmessage = (event) => {
    if (!hear(JSON.parse(event.data))) return;
    unfollow();
    again();
  };
}
let following = null;

/** Hear no more: a browser has few connections for all its pages. */
export function unfollow() {
  following?.close();
  following = null;
}

/** A file about a pass, and how the server calls it. */
export async function exported(path) {
  const response = await ask(path);
  const name = /filename="([^"]+)"/.exec(response.headers.get("content-disposition") ?? "")?.[1];
  return { blob: await response.blob(), name: name ?? path.split("?")[0].split("/").at(-1) };
}

export const exportPath = (id, kind, query = "") => `/api/export/${id}.${kind}${query}`;

// ---------------------------------------------------------------- tensors on the wire


const KINDS = {
  F64: Float64Array,
  F32: Float32Array,
  I64: BigInt64Array,
  I32: Int32Array,
  I16: Int16Array,
  I8: Int8Array,
  U32: Uint32Array,
  U16: Uint16Array,
  U8: Uint8Array,
  BOOL: Uint8Array,
};

/** @typedef {{shape: number[], data: ArrayLike<number>, dtype: string}} Tensor */

/**
 * Read a safetensors file.
 * @param {ArrayBuffer} buffer
 * @returns {{tensors: Record<string, Tensor>, metadata: Record<string, string>}}
 */
export function parse(buffer) {
  if (buffer.byteLength < 8) throw new Error(`${buffer.byteLength} bytes are no safetensors file`);
  const length = Number(new DataView(buffer).getBigUint64(0, true));
  if (length > buffer.byteLength - 8) throw new Error(`a header of ${length} bytes does not fit the file`);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  const tensors = /** @type {Record<string, any>} */ ({});
  for (const [name, entry] of Object.entries(header)) {
    if (name === "__metadata__") continue;
    const [start, end] = entry.data_offsets;
    const bytes = buffer.slice(8 + length + start, 8 + length + end); // a copy is aligned, the file is not
    tensors[name] = { shape: entry.shape, dtype: entry.dtype, data: read(bytes, entry.dtype) };
  }
  return { tensors, metadata: header.__metadata__ ?? {} };
}

/** The numbers behind bytes of a dtype; half precision is widened exactly. */
function read(bytes, dtype) {
  if (dtype === "BF16" || dtype === "F16") {
    const halves = new Uint16Array(bytes);
    return Float32Array.from(halves, dtype === "BF16" ? fromBfloat16 : fromFloat16);
  }
  const kind = KINDS[dtype];
  if (!kind) throw new Error(`tensors of ${dtype} cannot be read here`);
  const numbers = new kind(bytes);
  return dtype === "I64" ? Float64Array.from(numbers, Number) : numbers;
}

const bits = new DataView(new ArrayBuffer(4));

function fromBfloat16(half) {
  bits.setUint32(0, half << 16);
  return bits.getFloat32(0);
}

function fromFloat16(half) {
  const sign = half & 0x8000 ? -1 : 1;
  const exponent = (half >> 10) & 31;
  const fraction = half & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

/** @param {string} text base64 @returns {ArrayBuffer} */
export function fromBase64(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i += 1) bytes[i] = binary.charCodeAt(i);
  return bytes.buffer;
}

/** Row `i` of a tensor along its first axis (a view where the data is typed). */
export function row(tensor, ...indices) {
  let data = tensor.data;
  let shape = tensor.shape;
  for (const index of indices) {
    const size = shape.slice(1).reduce((a, b) => a * b, 1);
    data = data.subarray(index * size, (index + 1) * size);
    shape = shape.slice(1);
  }
  return { shape, data, dtype: tensor.dtype };
}
