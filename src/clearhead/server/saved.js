/**
 * A saved page answers its own questions: from the numbers in the file, in place of a server.
 *
 * It holds one text. What else is asked, another text or a number's arithmetic that was not saved, is refused
 * with a line that says so.
 */

import { fromBase64, parse } from "./api.js";

const held = JSON.parse(document.getElementById("held").textContent);
const { tensors } = parse(fromBase64(held.values));
const first = JSON.parse(document.getElementById("first").textContent);

const json = (value, status = 200) => new Response(JSON.stringify(value), { status });
const refuse = (error, status = 404) => json({ error }, status);

/** The indices along each axis that "0,:,2:4" names. */
function indices(at, shape) {
  const parts = at ? at.split(",") : [];
  return shape.map((size, axis) => {
    const part = parts[axis] ?? ":";
    if (!part.includes(":")) return { one: true, list: [Number(part)] };
    const [start, end] = part.split(":");
    const from = start ? Number(start) : 0;
    const to = end ? Math.min(Number(end), size) : size;
    return { one: false, list: Array.from({ length: Math.max(0, to - from) }, (_, i) => from + i) };
  });
}

/** The cells of a tensor at these indices. */
function cut({ data, shape }, at) {
  const axes = indices(at, shape);
  let places = [0];
  axes.forEach(({ list }, axis) => {
    const stride = shape.slice(axis + 1).reduce((a, b) => a * b, 1);
    places = places.flatMap((place) => list.map((index) => place + index * stride));
  });
  return { shape: axes.filter(({ one }) => !one).map(({ list }) => list.length), data: places.map((i) => data[i]) };
}

/** Each cell the max or sum of n x n cells along the last two axes. */
function pool({ shape, data }, level, reduce) {
  const n = 2 ** level;
  if (n === 1 || !shape.length) return { shape, data };
  const columns = shape.at(-1);
  const rows = shape.length > 1 ? shape.at(-2) : 1;
  const [tall, wide] = [shape.length > 1 ? Math.ceil(rows / n) : 1, Math.ceil(columns / n)];
  const count = data.length / (rows * columns);
  const out = new Array(count * tall * wide).fill(reduce === "sum" ? 0 : -Infinity);
  data.forEach((value, i) => {
    const row = Math.floor(i / columns) % rows;
    const place = Math.floor(i / (rows * columns)) * tall * wide + (shape.length > 1 ? Math.floor(row / n) : 0) * wide;
    const j = place + Math.floor((i % columns) / n);
    out[j] = reduce === "sum" ? out[j] + value : Math.max(out[j], value);
  });
  return { shape: [...shape.slice(0, -2), ...(shape.length > 1 ? [tall] : []), wide], data: out };
}

/** Tensors as safetensors bytes, all of them 32-bit floats. */
function pack(named, metadata = {}) {
  const header = { __metadata__: metadata };
  let end = 0;
  for (const [name, { shape, data }] of Object.entries(named)) {
    header[name] = { dtype: "F32", shape, data_offsets: [end, end + 4 * data.length] };
    end += 4 * data.length;
  }
  const text = new TextEncoder().encode(JSON.stringify(header));
  const bytes = new Uint8Array(8 + text.length + end);
  new DataView(bytes.buffer).setBigUint64(0, BigInt(text.length), true);
  bytes.set(text, 8);
  let place = 8 + text.length;
  for (const { data } of Object.values(named)) {
    bytes.set(new Uint8Array(Float32Array.from(data).buffer), place);
    place += 4 * data.length;
  }
  return new Response(bytes);
}

function slice(name, query) {
  const tensor = tensors[name];
  if (!tensor) return refuse("this value was too large to be saved with the page");
  const part = pool(cut(tensor, query.get("at") ?? ""), Number(query.get("level") ?? 0), query.get("reduce") ?? "max");
  return pack({ x: part }, { shape: JSON.stringify(tensor.shape), level: query.get("level") ?? "0" });
}

/** Where a position looks, and what the model says there. */
function lines(position) {
  const rows = (paths) => paths.map((path) => cut(tensors[`${path}.weights`], `0,:,${position}`));
  const stacked = (list) => ({ shape: [list.length, ...list[0].shape], data: list.flatMap(({ data }) => data) });
  const named = {};
  for (const [name, paths] of Object.entries(held.lines)) {
    if (paths.length && paths.every((path) => tensors[`${path}.weights`])) named[name] = stacked(rows(paths));
  }
  const logits = tensors.logits;
  if (logits) named.logits = logits.shape.length === 3 ? cut(logits, `0,${position}`) : cut(logits, "0");
  return pack(named);
}

async function answer(path, options) {
  const url = new URL(path, "http://saved");
  const parts = url.pathname.split("/").slice(2).map(decodeURIComponent);
  const body = options?.body ? JSON.parse(options.body) : {};
  if (parts[0] === "trace" && options?.method === "POST") {
    const same = body.text === first.text && !body.ids && !body.edits?.length;
    const bytes = fromBase64(first.trace.data);
    if (!same) return refuse("this is a saved page: it holds one text, as it was; clearhead look shows any", 400);
    return new Response(bytes);
  }
  if (parts[0] === "trace" && parts[2] === "t") return slice(parts.slice(3).join("/"), url.searchParams);
  if (parts[0] === "trace" && parts[2] === "lines") return lines(Number(url.searchParams.get("at")));
  if (parts[0] === "trace" && parts[2] === "cell") {
    const cell = held.cells[`${parts.slice(3).join("/")}@${url.searchParams.get("at")}`];
    return cell ? json(cell) : refuse("the arithmetic of this number was not saved; clearhead look shows it");
  }
  if (parts[0] === "source" && held.sources[parts.slice(1).join("/")]) {
    return new Response(held.sources[parts.slice(1).join("/")]);
  }
  if (parts[0] === "vocab") return held.vocabulary ? json(held.vocabulary) : refuse("the vocabulary was not saved");
  if (parts[0] === "tokenize" && body.text === first.text) return json(held.tokens);
  return refuse("this is a saved page: nothing is computed here; clearhead look does", 400);
}

window.fetch = (path, options) => answer(path, options);
