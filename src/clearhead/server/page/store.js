/**
 * The one place where the state lives: the address, the trace that belongs to it, and who draws them.
 */

import * as api from "./api.js";
import { palette } from "./colors.js";
import { decode, encode, first } from "./state.js";
import { t } from "./text.js";

export const manifest = api.manifest;

export const app = {
  state: first(),
  /** @type {api.Trace|null} the trace of the text in the box, or of the one before it while `stale` */
  trace: null,
  /** @type {api.Trace|null} the same text without edits */
  baseline: null,
  /** the attention rows and logits of the selected position */
  lines: null,
  /** what patching each cell of the map does: {trace, other, changes: "row|position" -> change of the logit} */
  patched: null,
  stale: false,
  whole: false, // whether all views are there
  error: "",
  note: () => "",
  lent: /** @type {import("./state.js").Edit|null} */ (null), // what a question of the guide switched off, until it is left
  theme: /** @type {ReturnType<typeof palette>} */ (null),
};

const views = new Map();
let wanted = new Set();
let frame = 0;

/** Draw with this view whenever something changed. */
export const onDraw = (name, view) => views.set(name, view);

/** Draw these views, all if none is named, once, before the next picture of the screen. */
export function redraw(names = null) {
  for (const name of names ?? views.keys()) wanted.add(name);
  if (frame) return;
  frame = requestAnimationFrame(() => {
    frame = 0;
    const now = wanted;
    wanted = new Set();
    for (const [name, view] of views) if (now.has(name)) view();
    const id = app.trace && !app.stale ? app.trace.id : "";
    document.documentElement.dataset.picture = id;
    document.documentElement.dataset.ready = app.whole ? id : "";
  });
}

/** What need not be drawn again when only this part of the state changed. */
const NARROW = { cell: ["header", "steps", "number", "takeaway"], trail: ["number", "takeaway"], sampling: ["next"], guide: ["header", "guide"] };

function touched(before, after) {
  const names = new Set();
  for (const field of Object.keys(after)) {
    if (before[field] === after[field]) continue;
    if (!NARROW[field]) return null;
    for (const name of NARROW[field]) names.add(name);
  }
  return names;
}

/** What the model has to be asked again for. */
const question = (state) => JSON.stringify([state.against, state.versus, state.text, state.ids, state.source, state.step, active(state.edits)]);
const active = (edits) => edits.filter((edit) => edit.on).map(({ on, ...edit }) => edit);

/**
 * Change the state; the address follows. `quietly`: without a step for the Back button.
 * @param {Partial<ReturnType<typeof first>>} patch
 */
export function go(patch, quietly = false) {
  const before = app.state;
  if (!quietly) writeAddress(); // what was seen before the step is where Back leads
  app.state = { ...before, ...patch };
  if (app.lent && app.state.guide !== before.guide) takeBack();
  if (before.theme !== app.state.theme) setTheme();
  if (quietly) later ||= setTimeout(writeAddress, 120); // a slider that is dragged is not sixty addresses a second
  else if (`#${encode(app.state)}` !== location.hash) history.pushState(null, "", `#${encode(app.state)}`);
  if (question(app.state) !== question(before)) return ask(true);
  if (before.position !== app.state.position || before.stack !== app.state.stack) fetchLines();
  redraw(touched(before, app.state));
}

/** The guide goes on or closes: the model is again as it was before its question. */
function takeBack() {
  const lent = JSON.stringify(app.lent);
  const edits = app.state.edits.filter((edit) => JSON.stringify(edit) !== lent);
  app.lent = null;
  if (edits.length === app.state.edits.length) return;
  app.state.edits = edits;
  notice = () => t("guide.undone");
}
let notice = () => ""; // what the next answer is to say

let later = 0;

/** Let the address say what is seen. */
function writeAddress() {
  clearTimeout(later);
  later = 0;
  const address = `#${encode(app.state)}`;
  if (address !== location.hash && (location.hash || address !== "#")) history.replaceState(null, "", address);
}

/** Take the state from the address: at the start, and for Back and Forward. */
export function readAddress() {
  clearTimeout(later);
  later = 0;
  const { state, problems } = decode(location.hash);
  const before = question(app.state);
  app.state = state;
  setTheme();
  app.note = () => (problems.length ? t("address", { names: problems.join(", ") }) : "");
  if (!app.trace || question(state) !== before) ask();
  else fetchLines();
  redraw();
}

/**
 * Run the model on the state's text. What is on screen is marked stale until the answer is there.
 * `acted`: the reader changed something; else the state is that of an address, and what differs is said.
 */
export async function ask(acted = false) {
  const { state } = app;
  const select = state.stack === 0 ? state.position : null;
  if (!state.ids && !state.text.trim()) { // nothing to read: what is on screen belongs to the text before
    app.stale = true;
    app.error = t("empty");
    return redraw();
  }
  const plain = { ...(state.ids ? { ids: state.ids } : { text: state.text }), source: state.source || undefined, step: state.step ?? undefined };
  app.stale = true;
  app.error = "";
  redraw(["header"]); // the rest is of the text before, and marked as such
  try {
    const there = await placed(active(state.edits), plain);
    if (!there) return; // a newer question is on its way
    const other = { ...plain, ...(state.against ? { text: state.against, ids: undefined } : {}), ...weights(state) };
    const patches = there.some((edit) => edit.kind === "patch");
    let baseline = patches ? await compare(other, there, null) : null; // what is put in must be there first
    if (patches && !baseline) return;
    const edits = there.filter((edit) => edit.kind !== "patch" || alone.pieces.length === baseline.pieces.length);
    const sent = edits.map((edit) => (edit.kind === "patch" ? { ...edit, value: { trace: baseline.id } } : edit));
    const answer = await api.trace({ ...plain, edits: sent, select });
    if (!answer) return;
    let refused = null;
    try {
      baseline ??= await compare(other, edits, answer);
    } catch (error) {
      [baseline, refused] = [answer, error]; // this text is shown, beside nothing
    }
    if (!baseline) return;
    [app.trace, app.baseline] = [answer, baseline]; // both at once: no picture mixes two questions
    app.error = "";
    app.stale = false;
    app.lines = null;
    if (refused) throw refused;
    if (question(app.state) === question(state)) settle(acted);
    fetchLines();
    measure();
  } catch (error) {
    app.error = error.status === 0 ? "away" : error.message;
    if (error.status === 0) setTimeout(() => app.error === "away" && ask(acted), 2000);
  }
  redraw();
}

/** Whose weights answer the question that is compared with. */
function weights({ versus }) {
  if (versus === "beside") return { model: "beside", step: undefined };
  return versus ? { step: Number(versus) } : {};
}

/** The text belongs to the tokens that were forced; the address says of which weights the numbers are. */
function settle(acted) {
  const { state, trace, baseline } = app;
  if (state.ids) state.text = written(trace.pieces);
  const now = trace.of + (state.versus && baseline ? `.${baseline.of.split(".")[1]}` : "");
  const then = state.of.split(".");
  const other = now.split(".").flatMap((part, i) => (part === then[i] ? [] : [i]));
  if (acted) [app.note, notice] = [notice, () => ""];
  if (acted || !state.of) state.of = now;
  else if (other.length) app.note = () => t("differs", { names: other.map((i) => t(`differs.${i}`)).join(", ") });
  if (state.versus === "beside" && !api.besideName) app.note = () => t("compare.none");
  writeAddress();
}

/** The text of pieces, without the token that a decoder is started with. A token may hold half a character. */
export function written(pieces) {
  const hex = pieces.filter((piece, i) => i > 0 || !piece.special).map((piece) => piece.bytes).join("");
  if (!hex) return pieces.map((piece) => piece.id).join(" "); // without a tokenizer a text is numbers
  return new TextDecoder("utf-8", { ignoreBOM: true }).decode(Uint8Array.from(hex.match(/../g), (byte) => parseInt(byte, 16)));
}

/** The trace that the picture is compared with: another text, other weights, or this one without edits. */
async function compare(request, edits, /** @type {api.Trace|null} */ answer) {
  const { state } = app;
  const plain = JSON.stringify(request);
  const nothing = !state.against && (!state.versus || (state.versus === "beside" && !api.besideName));
  if (edits.length === 0 && nothing && answer) {
    answer.plain = plain;
    return answer;
  }
  if (app.baseline?.plain === plain) return app.baseline;
  const found = /** @type {api.Trace|null} */ (await api.trace({ ...request, edits: [] }, { quiet: true }));
  if (!found || question(app.state) !== question(state)) return null;
  found.plain = plain;
  return found;
}

// ---------------------------------------------------------------- edits whose place is not there

/** How many places an axis of a value has in this pass, where the text decides; S is that of the keys. */
function room(name, k, trace) {
  const letter = byName.get(name)?.shape[k];
  if (letter !== "T" && letter !== "S") return Infinity;
  const source = /^(encoder|source)/.test(name) || (letter === "S" && /\.cross\b/.test(name));
  return (source && trace.source.length ? trace.source : trace.pieces).length;
}

const along = ({ name, at }) => at.some((index, k) => index !== null && "TS".includes(byName.get(name)?.shape[k]));
/** The axis along which an edit stands outside; -1 if it has its place. */
const outside = ({ name, at }, trace) => at.findIndex((index, k) => index !== null && index >= room(name, k, trace));

/** The pass without edits that told how many tokens there are. */
let alone = /** @type {api.Trace|null} */ (null);

/** The edits whose place this text has; null when a newer question came in between. */
async function placed(edits, request) {
  if (!edits.some((edit) => along(edit) || edit.kind === "patch")) return edits;
  const plain = JSON.stringify(request);
  if (app.baseline?.plain === plain) alone = app.baseline;
  if (alone?.plain !== plain) {
    const found = await api.trace({ ...request, edits: [] });
    if (!found) return null;
    alone = found;
    alone.plain = plain;
  }
  return edits.filter((edit) => outside(edit, alone) < 0);
}

/** Why an edit that is on does nothing to this text; "" if it does. */
export function waits(edit) {
  const { trace, baseline } = app;
  if (!trace || !edit.on) return "";
  const k = outside(edit, trace);
  if (k >= 0) return t("edit.waits", { n: room(edit.name, k, trace) });
  const n = trace.pieces.length;
  return edit.kind === "patch" && baseline && baseline.pieces.length !== n ? t("edit.waits.patch", { a: n, b: baseline.pieces.length }) : "";
}

/** The edits that are in the pass on screen. */
export const acting = () => app.state.edits.filter((edit) => edit.on && !waits(edit));

/** Make this edit; if it is there already, take it back. Says which. */
export function toggleEdit(edit) {
  const same = (one) => ["name", "kind", "at", "value"].every((key) => JSON.stringify(one[key]) === JSON.stringify(edit[key]));
  const { edits } = app.state;
  const there = edits.find(same);
  if (!there) go({ edits: [...edits, edit] });
  else if (there.on) go({ edits: edits.filter((one) => !same(one)) });
  else go({ edits: edits.map((one) => (one === there ? { ...one, on: true } : one)) });
  return there?.on ? "edit.undone" : "edit.done";
}

/** Whether there is something to compare with. */
export const compared = () => Boolean(app.baseline && app.baseline !== app.trace);

/** The column of the other text that a column stands beside: texts are laid together at both ends. */
export function beside(column) {
  const [ours, theirs] = [app.trace.pieces, app.baseline.pieces];
  let front = 0;
  while (front < Math.min(ours.length, theirs.length) && ours[front].id === theirs[front].id) front += 1;
  if (column < front || ours.length === theirs.length) return column;
  const end = theirs.length - (ours.length - column);
  const tail = ours.slice(column).every((piece, k) => piece.id === theirs[end + k]?.id);
  return tail && end >= front ? end : null;
}

/** How far generate() is from what is shown: asked when the hand rests, for it costs a pass of its own. */
function measure() {
  const { trace } = app;
  clearTimeout(resting);
  if (trace.delta !== null || active(app.state.edits).length) return;
  resting = setTimeout(async () => {
    if (app.trace !== trace || app.stale) return; // the hand does not rest
    trace.delta = await api.delta(trace.id).catch(() => null);
    if (app.trace === trace) redraw(["next"]);
  }, 500);
}
let resting = 0;

/** Start with the trace that came in the page, if the address asks for nothing else. */
export function start() {
  const given = api.firstTrace();
  const { state, problems } = decode(location.hash);
  app.state = state;
  setTheme();
  app.note = () => (problems.length ? t("address", { names: problems.join(", ") }) : "");
  const empty = !state.text && !state.ids && !state.source;
  if (empty) {
    state.text = api.firstRequest.text;
    state.source = api.firstRequest.source;
  }
  history.replaceState(null, "", `#${encode(state)}`); // so that Back finds the text again
  const same = state.text === api.firstRequest.text && state.source === api.firstRequest.source && !state.ids;
  if (given && (empty || same) && state.step === null && !state.against && !state.versus && active(state.edits).length === 0) {
    app.trace = given;
    app.baseline = given;
    settle(false);
    fetchLines();
  } else ask();
  redraw();
}

/** Which experts each token went to, layer by layer: (expert, weight) pairs. */
export function expertsOf(path) {
  const key = `${app.trace.id}|${path}`;
  if (!routes.has(key)) {
    const place = app.trace.experts.indexOf?.(path) ?? -1;
    routes.set(key, place < 0 ? null : pairs(api.row(app.trace["experts.chosen"], place), api.row(app.trace["experts.weights"], place)));
    if (routes.size > 200) routes.delete(routes.keys().next().value);
    if (place >= 0) return routes.get(key);
    const names = [`${path}.chosen`, `${path}.weights`];
    if (names.every((name) => byName.has(name))) {
      Promise.all(names.map((name) => api.slice(app.trace.id, name, "0,:,:"))).then(([chosen, weights]) => {
        routes.set(key, pairs(chosen, weights));
        redraw();
      }, () => {});
    }
  }
  return routes.get(key);
}
const routes = new Map();

function pairs(chosen, weights) {
  const k = chosen.shape.at(-1);
  return Array.from({ length: chosen.data.length / k }, (_, i) => Array.from({ length: k }, (_, r) => [chosen.data[i * k + r], weights.data[i * k + r]]));
}

/** The length of each token's vector in a value of a foreign module, from the vectors themselves. */
export function lengthsOf(name) {
  const key = `${app.trace.id}|${name}|length`;
  if (!routes.has(key)) {
    routes.set(key, null);
    api.slice(app.trace.id, name, "0,:,:").then((tensor) => {
      const width = tensor.shape.at(-1);
      const square = (i) => tensor.data.subarray(i * width, (i + 1) * width).reduce((sum, x) => sum + x * x, 0);
      routes.set(key, Float64Array.from({ length: tensor.data.length / width }, (_, i) => Math.sqrt(square(i))));
      redraw();
    }, () => {});
  }
  return routes.get(key);
}

let asked = "";

/** The attention rows of a position other than the one the trace was asked for. */
async function fetchLines() {
  const { trace } = app;
  if (!trace || app.stale || app.state.stack !== 0 || manifest.stacks.length === 0) return;
  const at = position();
  const key = `${trace.id}/${at}`;
  if (asked === key && app.lines?.key === key) return;
  asked = key;
  if (at === trace.select && app.state.stack === 0) {
    app.lines = { key, lines: trace.lines, cross: trace.cross, logits: trace.logits, at };
    return;
  }
  try {
    const answer = await api.lines(trace.id, at);
    if (asked !== key) return;
    app.lines = { key, logits: trace.logits, ...answer, at };
    redraw();
  } catch (error) {
    app.error = error.status === 0 ? "away" : error.message;
  }
}

// ---------------------------------------------------------------- what follows from the state

/** A foreign module has no stacks: its map is a row for each value that has one vector per token. */
const foreign = {
  name: "module",
  causal: false,
  foreign: true,
  layers: [],
  values: (manifest?.values ?? []).filter((value) => value.axes.length === 3 && value.axes[1] === "T"),
};
export const stacks = manifest?.stacks.length ? manifest.stacks : [foreign];

/** The stack whose map is selected: 0 is the one that speaks. */
export const stackAt = (i) => stacks[stacks.length - 1 - i];
export const stack = () => stackAt(app.state.stack) ?? stackAt(0);

/** Pieces under a stack's map: the encoder of an encoder-decoder reads the source. */
export function piecesOf(one) {
  if (!app.trace) return [];
  return manifest.stacks.length > 1 && one === manifest.stacks[0] ? app.trace.source : app.trace.pieces;
}

/** The rows of a stack's map, from the embedding to the output. */
export function rowsOf(one) {
  if (one.foreign) return one.values.map((value) => ({ name: value.name, label: value.name, layer: null, added: value.name }));
  const rows = [{ name: one.start, label: "start", layer: null, added: null }];
  one.layers.forEach((layer, i) => {
    for (const row of layer.rows) rows.push({ ...row, layer: i });
  });
  return rows;
}

/** The selected position, a number from 0. */
export function position() {
  const last = Math.max(0, piecesOf(stack()).length - 1);
  return Math.min(app.state.position ?? last, last);
}

/** The selected row of the map; -1 is the row of tokens. */
export function rowIndex() {
  const last = rowsOf(stack()).length - 1;
  return Math.min(app.state.row ?? last, last);
}

/** The layer that is open: the one that was chosen, else that of the selected row. */
export function layerIndex() {
  const there = app.state.layer ?? rowsOf(stack())[rowIndex()]?.layer ?? 0;
  return Math.max(0, Math.min(there, (stack()?.layers.length ?? 1) - 1));
}

/** The attention of the open layer, self or cross. */
export function attention(layer = layerIndex()) {
  const there = stack()?.layers[layer]?.attention ?? [];
  return there.find((one) => one.kind === app.state.kind) ?? there[0] ?? null;
}

/** The attention and head whose steps are shown, or null when another value is. */
export function openHead() {
  const { state } = app;
  if (state.value !== null || !app.trace) return null;
  const attn = attention();
  return attn ? { attn, head: Math.min(state.head ?? 0, attn.n_heads - 1) } : null;
}

/** The pieces that the keys of an attention come from. */
export const keysOf = (attn) => (attn?.kind === "cross" ? app.trace.source : piecesOf(stack()));

export const valueNamed = (name) => byName.get(name);
const byName = new Map((manifest?.values ?? []).map((value) => [value.name, value]));

/** Select a cell of the map. */
export function select(row, at, quietly = false) {
  const rows = rowsOf(stack());
  const patch = { row: row === rows.length - 1 ? null : row };
  patch.position = at === piecesOf(stack()).length - 1 ? null : at;
  go({ ...patch, layer: null }, quietly);
}

/** Show a number. Walking on from another one leaves a trail. */
export function show(name, index, walk = false) {
  const { cell, trail } = app.state;
  if (cell && cell.name === name && cell.index.join() === index.join()) return;
  go({ cell: { name, index }, trail: walk && cell ? [...trail, cell].slice(-40) : [] }, !walk);
}

export function setTheme() {
  const wanted = app.state.theme;
  const dark = wanted ? wanted === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const root = document.documentElement;
  root.dataset.theme = dark ? "dark" : "light";
  app.theme = palette(dark, matchMedia("(forced-colors: active)").matches);
}
