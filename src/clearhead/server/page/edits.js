/**
 * The tray of edits: what was changed in the pass, each with its switch; and what the changes did.
 */

import * as api from "./api.js";
import { brief, fill, h, percent, visible } from "./dom.js";
import { say } from "./grid.js";
import { wordOf } from "./map.js";
import { logitsHere, logitsThere, spell } from "./next.js";
import { argmax, softmax } from "./sample.js";
import { acting, app, compared, go, manifest, redraw, rowsOf, stacks, valueNamed, waits } from "./store.js";
import { t } from "./text.js";
import { keptSteps } from "./train.js";

let sweep = null; // {stop: AbortController|null, rows: events of heads, done, all, id: of which text, word}

/** Where an edit is, in words: "layer 3, head 0"; its full name is the title. */
export function whereOf({ name, at }) {
  const found = /^(?:(encoder|decoder)\.)?blocks\.(\d+)\.(.+)$/.exec(name);
  const shape = valueNamed(name)?.shape ?? [];
  const places = at.map((index, k) => (index === null ? null : shape[k] === "T" || shape[k] === "S" ? t("edit.at", { n: index }) : `[${index}]`));
  if (!found) return [name, ...places].filter(Boolean).join(", ");
  const row = stacks.flatMap((one) => rowsOf(one)).find((one) => one.added === name || one.name === name);
  const [, side, layer, rest] = found;
  const cross = rest.startsWith("cross.") ? t("kind.cross") : "";
  const head = /^(attn|cross)\.(mixed|weights)$/.test(rest) && typeof at[1] === "number";
  if (head) places[1] = t("edit.head", { head: t("head"), n: at[1] });
  const what = row ? `${row.name === name ? `${t("row.plus")} ` : ""}${t(`row.${row.label}`)}` : head ? cross : rest;
  return [`${manifest.stacks.length > 1 ? `${t(`stack.${side}`)} ` : ""}${t("layer")} ${layer}`, what, ...places].filter(Boolean).join(", ");
}

const set = (i, patch) => go({ edits: app.state.edits.map((edit, k) => (k === i ? { ...edit, ...patch } : edit)) });

export function drawEdits() {
  const { edits } = app.state;
  fill(
    document.getElementById("edits-body"),
    edits.length === 0 && h("p", { class: "soft" }, t("edit.none")),
    edits.length > 0 &&
      h(
        "ul",
        { class: "edits" },
        edits.map((edit, i) =>
          h(
            "li",
            null,
            h("label", { class: "check" }, h("input", { type: "checkbox", checked: edit.on, id: `edit-${i}`, onchange: (event) => set(i, { on: event.target.checked }) }), `${t(`kind.${edit.kind}`)} `, h("span", { class: "where", title: `${edit.name}${edit.at.length > 0 ? ` [${edit.at.map((k) => k ?? ":").join(", ")}]` : ""}` }, whereOf(edit))),
            waits(edit) && h("span", { class: "soft small waits" }, ` ${waits(edit)}`),
            edit.kind === "scale" &&
              h("label", { class: "knob" }, h("span", null, "×"), h("input", { type: "range", min: -2, max: 4, step: 0.1, value: edit.value ?? 1, id: `scale-${i}`, "aria-label": t("edit.scale"), oninput: (event) => set(i, { value: Number(event.target.value) }) }), h("output", null, String(edit.value))),
            h("button", { type: "button", class: "small", "aria-label": t("edit.remove", { name: whereOf(edit) }), onclick: () => go({ edits: edits.filter((_, k) => k !== i) }) }, "×"),
          ),
        ),
      ),
    compared() && effect(),
    compareBox(),
    sweepTools(),
  );
}

/** What to compare with, another text or other weights, and how to change that. */
function compareBox() {
  if (manifest.stacks.length === 0) return null;
  const { against, versus } = app.state;
  const steps = keptSteps();
  const weights = [["", t("compare.same")], ...(api.besideName ? [["beside", api.besideName]] : []), ...steps.map((step) => [String(step), t("train.at", { step })])];
  if (!weights.some(([value]) => value === versus)) weights.push([versus, versus]);
  return h(
    "details",
    { id: "compare", open: against !== "" || versus !== "" },
    h("summary", null, t("compare.title")),
    h(
      "label",
      { class: "box other" },
      h("span", null, t("compare.text")),
      h("input", { type: "text", id: "against", value: against, onchange: (event) => compareWith({ against: event.target.value }) }),
    ),
    weights.length > 1 &&
      h("label", { class: "row" }, `${t("compare.weights")} `, h("select", { id: "versus", onchange: (event) => compareWith({ versus: event.target.value }) }, weights.map(([value, name]) => h("option", { value, selected: value === versus }, name)))),
    (against || versus) && h("p", { class: "soft small" }, t("compare.note")),
    (against || versus) && patchTools(),
  );
}

/** Compare with something else, or with nothing more; the colours say what differs. */
export function compareWith(patch) {
  const next = { ...app.state, ...patch };
  const on = next.against || next.versus || next.edits.some((edit) => edit.on);
  go({ ...patch, paint: on ? "delta" : "p" });
}

/** `c`: the colours of what differs and back; where nothing is compared yet, the model beside, or the box. */
export function toggleCompare() {
  const { against, versus, paint, edits } = app.state;
  if (against || versus || edits.some((edit) => edit.on)) return go({ paint: paint === "delta" ? "p" : "delta" }, true);
  if (api.besideName) return compareWith({ versus: "beside" });
  const box = document.getElementById("compare");
  if (!box) return;
  box.open = true;
  document.getElementById("against").focus();
}

/** The other text's vectors, put in one by one, where both have as many tokens. */
function patchTools() {
  const [ours, theirs] = [app.trace?.pieces.length, app.baseline?.pieces.length];
  if (ours !== theirs) return h("p", { class: "soft small" }, t("patch.lengths", { a: ours ?? 0, b: theirs ?? 0 }));
  const running = app.patched?.stop;
  return h(
    "div",
    { class: "row" },
    h("button", { type: "button", class: "small", id: "patch-all", onclick: running ? () => app.patched.stop.abort() : runPatches }, t(running ? "sweep.stop" : "patch.run")),
    app.patched && h("span", { class: "soft small", id: "patch-note" }, t("patch.done", { done: app.patched.changes.size, all: app.patched.all, word: visible(wordOf(app.patched.word)) })),
  );
}

/** What the server is asked in a sweep: the text as it is, edits and all. */
function asked() {
  const { state, baseline } = app;
  const text = state.ids ? { ids: state.ids } : { text: state.text };
  const edits = acting().map(({ on, ...edit }) => (edit.kind === "patch" ? { ...edit, value: { trace: baseline.id } } : edit));
  return { ...text, source: state.source || undefined, step: state.step ?? undefined, edits };
}

/** The word whose logit a sweep follows: the first that the reader follows, else the likeliest. */
const wordSwept = () => app.state.watch[0] ?? argmax(app.trace.logits.data);

async function runPatches() {
  if (app.stale) return;
  const { trace, baseline } = app;
  const mine = { stop: new AbortController(), trace: trace.id, all: 0, word: wordSwept(), changes: new Map() };
  app.patched = mine;
  go({ paint: "patch" }, true);
  const hear = (event) => mine.changes.set(`${event.row}|${event.position}`, event.change);
  await listen(mine, { ...asked(), what: "rows", from: baseline.id }, hear, () => mine.trace === app.trace.id);
}

/** Hear a sweep to its end, or until the reader stops it, or what is seen is no longer what it is of. */
async function listen(mine, request, hear, still) {
  try {
    for await (const event of api.sweep({ ...request, word: mine.word }, mine.stop.signal)) {
      if (!still()) mine.stop.abort();
      if (event.error) throw new Error(event.error);
      if (event.all !== undefined) mine.all = event.all;
      if (event.change === undefined) continue;
      hear(event);
      redraw(["header", "maps", "edits"]);
    }
  } catch (error) {
    if (error.name !== "AbortError") app.error = error.message || "away";
  }
  mine.stop = null;
  redraw();
}

/** How the prediction moved, and the number on screen. */
function effect() {
  const [there, here] = [logitsThere(), logitsHere()];
  if (!there || !here || there.length !== here.length) return null;
  const [before, after] = [softmax(there), softmax(here)];
  const [a, b] = [argmax(before), argmax(after)];
  let most = 0;
  for (let id = 1; id < after.length; id += 1) if (Math.abs(after[id] - before[id]) > Math.abs(after[most] - before[most])) most = id;
  spell([a, b, most]);
  if (after[most] === before[most]) return h("div", { id: "effect" }, h("p", { id: "still" }, t(app.state.against || app.state.versus ? "edit.still.compared" : "edit.still")), numberThere());
  const key = app.state.against || app.state.versus ? "compare.moved" : "edit.moved";
  const line = (id) => t(key, { word: visible(wordOf(id)), before: percent(before[id]), after: percent(after[id]), logit: brief(here[id] - there[id], 3) });
  const rest = [...new Set([a, b, ...app.state.watch])].filter((id) => id !== most && id < here.length);
  return h("div", { id: "effect" }, h("p", { id: "mover", "data-id": most }, h("b", null, t("edit.most")), ` ${line(most)}`), rest.map((id) => h("p", { "data-id": id }, line(id))), numberThere());
}

/** The number on screen in what is compared with, where that has the same cells. */
function numberThere() {
  const { trace, baseline, state } = app;
  if (!state.cell || state.cell.name.startsWith("param:") || trace.pieces.length !== baseline.pieces.length) return null;
  const { name, index } = state.cell;
  const key = [trace.id, baseline.id, name, index].join();
  if (pair.key !== key) {
    pair = { key, values: null };
    const mine = pair;
    Promise.all([baseline, trace].map((one) => api.slice(one.id, name, index.join()))).then((both) => {
      mine.values = both.map(({ data }) => data[0]);
      redraw(["edits"]);
    }, () => {});
  }
  if (!pair.values) return null;
  const [before, after] = pair.values;
  return h("p", { id: "number-there" }, t("compare.number", { name: `${name}[${index.join(", ")}]`, before: brief(before), after: brief(after), change: brief(after - before) }));
}
let pair = { key: "", values: null };

function sweepTools() {
  const speaks = manifest.stacks.length > 0 && app.trace?.logits && app.trace.heads;
  if (!speaks) return null;
  const running = sweep?.stop;
  return h(
    "div",
    { class: "sweep" },
    h("button", { type: "button", class: "small", id: "sweep", onclick: running ? () => sweep.stop.abort() : runSweep }, running ? t("sweep.stop") : t("sweep.run")),
    sweep && sweep.id === sweepId() && h("p", { class: "soft small" }, t("sweep.done", { done: sweep.done, all: sweep.all, word: visible(wordOf(sweep.word)) })),
    sweep && sweep.id === sweepId() &&
      h(
        "ol",
        { class: "ranking" },
        [...sweep.rows].sort((a, b) => Math.abs(b.change) - Math.abs(a.change)).slice(0, 5).map(({ change, stack, layer, head, path }) =>
          h("li", null, h("button", { type: "button", class: "link", onclick: () => go({ stack: stack === manifest.stacks.at(-1).name ? 0 : 1, position: null, row: null, layer, head, kind: path.endsWith(".cross") ? "cross" : "self", value: null }) }, `${manifest.stacks.length > 1 ? `${t(`stack.${stack}`)} ` : ""}${t("layer")} ${layer}, ${path.endsWith(".cross") ? `${t("kind.cross")}, ` : ""}${t("head")} ${head}`), ` ${brief(change, 3)}`),
        ),
      ),
  );
}

const sweepId = () => JSON.stringify([app.state.text, app.state.ids, app.state.source]);

/** Let the server switch every head off, one after the other, and note what a word's logit loses. */
async function runSweep() {
  if (app.stale) return;
  const mine = { stop: new AbortController(), rows: [], done: 0, all: 0, id: sweepId(), word: wordSwept() };
  sweep = mine;
  redraw(["edits"]);
  const hear = (event) => {
    mine.done = event.done;
    mine.rows.push(event);
  };
  await listen(mine, { ...asked(), what: "heads" }, hear, () => mine.id === sweepId());
}

// ---------------------------------------------------------------- a vector made longer or shorter

const SCALE = 0.25; // of a key
const [LEAST, MOST] = [-2, 4];

/** By how much a key changes the factor. */
export const stepOf = (key) => ({ "+": SCALE, "=": SCALE, "-": -SCALE, "−": -SCALE })[key] ?? 0;

/** Whether the row of the map is a value that can be changed. */
export const scalable = (row) => Boolean(row) && (row.layer !== null || !row.name.endsWith(".input"));

/** The edit that scales a cell, if there is one. */
export const scaleOf = (row, column) => app.state.edits.find((edit) => edit.kind === "scale" && edit.name === row.name && edit.at.join() === [null, column].join());

/** Multiply the vector of a cell; times one is no edit. */
export function scaleCell(row, column, factor, quietly = false) {
  const value = Math.max(LEAST, Math.min(MOST, Math.round(100 * factor) / 100));
  const there = scaleOf(row, column);
  const rest = app.state.edits.filter((edit) => edit !== there);
  const edit = { name: row.name, kind: "scale", at: [null, column], value, on: true };
  go({ edits: value === 1 ? rest : there ? app.state.edits.map((one) => (one === there ? edit : one)) : [...rest, edit] }, quietly);
  const text = t("map.scaled", { name: row.name, value });
  document.getElementById("readout").textContent = text;
  say(text);
}

/** With a mouse or a pen: press on a cell and pull it up or down. A finger scrolls; it has the slider of the edit. */
export function dragToScale(canvas, host, find) {
  let drag = null;
  let pulled = false;
  canvas.addEventListener("pointerdown", (event) => {
    const box = canvas.getBoundingClientRect();
    const at = event.pointerType === "touch" || event.button !== 0 ? null : find(event.clientX - box.left, event.clientY - box.top);
    pulled = false;
    drag = at && scalable(at.row) ? { ...at, y: event.clientY, from: scaleOf(at.row, at.column)?.value ?? 1, last: null } : null;
    if (drag) canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const up = drag ? drag.y - event.clientY : 0;
    if (!drag || (!pulled && Math.abs(up) < 6)) return;
    const factor = Math.round(10 * (drag.from + up / 50)) / 10;
    if (factor !== drag.last) scaleCell(drag.row, drag.column, factor, pulled);
    drag.last = factor;
    pulled = true;
  });
  for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => (drag = null));
  host.addEventListener("click", (event) => pulled && event.stopPropagation(), true); // a pull is no click
}
