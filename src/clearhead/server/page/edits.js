/**
 * The tray of edits: what was changed in the pass, each with its switch; and what the changes did.
 */

import * as api from "./api.js";
import { brief, fill, h, percent, visible } from "./dom.js";
import { wordOf } from "./map.js";
import { argmax, softmax } from "./sample.js";
import { app, go, manifest, redraw } from "./store.js";
import { t } from "./text.js";

let sweep = null; // {stop: AbortController|null, rows: [change, layer, head][], done, all, id}

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
            h("label", { class: "check" }, h("input", { type: "checkbox", checked: edit.on, id: `edit-${i}`, onchange: (event) => set(i, { on: event.target.checked }) }), `${t(`kind.${edit.kind}`)} `, h("code", null, edit.name), edit.at.length > 0 && ` [${edit.at.map((k) => k ?? ":").join(", ")}]`),
            edit.kind === "scale" &&
              h("label", { class: "knob" }, h("span", null, "×"), h("input", { type: "range", min: -2, max: 4, step: 0.1, value: edit.value ?? 1, id: `scale-${i}`, "aria-label": t("edit.scale"), oninput: (event) => set(i, { value: Number(event.target.value) }) }), h("output", null, String(edit.value))),
            h("button", { type: "button", class: "small", "aria-label": t("edit.remove", { name: edit.name }), onclick: () => go({ edits: edits.filter((_, k) => k !== i) }) }, "×"),
          ),
        ),
      ),
    (edits.length > 0 || app.state.against) && effect(),
    compareBox(),
    sweepTools(),
  );
}

/** Another text to compare with, and how to change that. */
function compareBox() {
  if (manifest.stacks.length === 0) return null;
  const { against } = app.state;
  return h(
    "details",
    { id: "compare", open: against !== "" },
    h("summary", null, t("compare.title")),
    h(
      "label",
      { class: "box other" },
      h("span", null, t("compare.text")),
      h("input", { type: "text", id: "against", value: against, onchange: (event) => go({ against: event.target.value, paint: event.target.value ? "delta" : "p" }) }),
    ),
    against && h("p", { class: "soft small" }, t("compare.note")),
    against && patchTools(),
  );
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

async function runPatches() {
  if (app.stale) return;
  const { trace, state, baseline } = app;
  const mine = { stop: new AbortController(), trace: trace.id, all: 0, word: argmax(trace.logits.data), changes: new Map() };
  app.patched = mine;
  go({ paint: "patch" }, true);
  const text = state.ids ? { ids: state.ids } : { text: state.text };
  const edits = state.edits.filter((edit) => edit.on && edit.kind !== "patch").map(({ on, ...edit }) => edit);
  const asked = { ...text, source: state.source || undefined, step: state.step ?? undefined, edits, what: "rows", from: baseline.id, word: mine.word };
  try {
    for await (const event of api.sweep(asked, mine.stop.signal)) {
      if (app.trace.id !== mine.trace) mine.stop.abort();
      if (event.error) throw new Error(event.error);
      if (event.all !== undefined) mine.all = event.all;
      if (event.change === undefined) continue;
      mine.changes.set(`${event.row}|${event.position}`, event.change);
      redraw();
    }
  } catch (error) {
    if (error.name !== "AbortError") app.error = error.message || "away";
  }
  mine.stop = null;
  redraw();
}

/** How the prediction moved. */
function effect() {
  const { baseline, trace } = app;
  if (!baseline?.logits || !trace?.logits || baseline === trace) return null;
  const [before, after] = [softmax(baseline.logits.data), softmax(trace.logits.data)];
  const [a, b] = [argmax(before), argmax(after)];
  const line = (id) => t(app.state.against ? "compare.moved" : "edit.moved", { word: visible(wordOf(id)), before: percent(before[id]), after: percent(after[id]), logit: brief(trace.logits.data[id] - baseline.logits.data[id], 3) });
  return h("p", { id: "effect" }, line(a), a !== b && h("br"), a !== b && line(b));
}

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

/** Let the server switch every head off, one after the other, and note what the likeliest word's logit loses. */
async function runSweep() {
  const { trace, state } = app;
  sweep = { stop: new AbortController(), rows: [], done: 0, all: 0, id: sweepId(), word: argmax(trace.logits.data) };
  const mine = sweep;
  const edits = state.edits.filter((edit) => edit.on).map(({ on, ...edit }) => edit);
  const text = state.ids ? { ids: state.ids } : { text: state.text };
  const asked = { ...text, source: state.source || undefined, step: state.step ?? undefined, edits, what: "heads", word: mine.word };
  redraw();
  try {
    for await (const event of api.sweep(asked, mine.stop.signal)) {
      if (sweepId() !== mine.id) mine.stop.abort(); // the reader typed
      if (event.error) throw new Error(event.error);
      if (event.all !== undefined) mine.all = event.all;
      if (event.change === undefined) continue;
      mine.done = event.done;
      mine.rows.push(event);
      redraw();
    }
  } catch (error) {
    if (error.name !== "AbortError") app.error = error.message || "away";
  }
  mine.stop = null;
  redraw();
}
