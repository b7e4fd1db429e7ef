/**
 * The page: text → map → layer → step → number. One state, held in the address; every view draws from it.
 */

import * as api from "./api.js";
import { fill, h, visible } from "./dom.js";
import { renew, say } from "./grid.js";
import { drawHeads, editHead, headViews } from "./heads.js";
import { crossNote, drawMaps, linesNote, mapViews, scaleNote } from "./map.js";
import { drawNext, toBranches } from "./next.js";
import { app, go, layerIndex, manifest, onDraw, openHead, piecesOf, position, readAddress, redraw, setTheme, stack, start, toggleEdit } from "./store.js";
import { languages, setLanguage, t } from "./text.js";

const at = (id) => document.getElementById(id);

// ---------------------------------------------------------------- header

const PAINTS = ["p", "norm", "delta", "watch", "patch"];

/** What the sentences for screen readers are of. */
const SPOKEN = ["text", "ids", "source", "step", "edits", "against", "versus", "stack", "position", "row", "layer", "head", "kind", "value", "lead", "cell"];

function drawHeader() {
  const { state, trace } = app;
  setLanguage(state.lang);
  document.documentElement.lang = t("lang");
  renew(JSON.stringify([trace?.id, app.stale, ...SPOKEN.map((field) => state[field])]));
  for (const element of document.querySelectorAll("[data-t]")) element.textContent = t(element.dataset.t);
  for (const element of document.querySelectorAll("[data-label]")) element.setAttribute("aria-label", t(element.dataset.label));
  const size = manifest.n_parameters >= 1e6 ? `${(manifest.n_parameters / 1e6).toFixed(1)} M` : String(manifest.n_parameters);
  const layers = manifest.stacks.map((one) => one.layers.length).join(" + ");
  at("model").textContent = [manifest.name.split("/").filter(Boolean).at(-1), t(`shape.${manifest.shape}`), manifest.stacks.length > 0 && t("chip.layers", { n: layers }), t("chip.numbers", { n: size }), `${manifest.dtype}, ${manifest.device}`].filter(Boolean).join(" · ");
  const box = at("text");
  if (document.activeElement !== box && box.value !== state.text) box.value = state.text;
  const source = at("source");
  at("source-box").hidden = manifest.shape !== "encoder-decoder";
  if (document.activeElement !== source && source.value !== state.source) source.value = state.source;
  const status = at("status");
  status.textContent = app.error === "away" ? t("away") : app.error || (app.stale ? t("running") : trace ? t("traced", { n: trace.pieces.length, ms: trace.ms < 10 ? trace.ms.toFixed(1) : trace.ms.toFixed(0) }) : t("empty"));
  status.className = app.error ? "chip problem" : app.stale ? "chip stale" : "chip";
  at("status-note").textContent = app.note();
  document.body.classList.toggle("stale", app.stale || Boolean(app.error));
  fill(at("crumbs"), crumbs());
  fill(at("settings"), settings());
  const paint = at("paint");
  fill(paint, paintTools());
  at("lens-note").hidden = !manifest.capabilities.lens;
  at("map-note").textContent = [scaleNote(), linesNote(), crossNote()].filter(Boolean).join(" · ");
}

function crumbs() {
  if (!app.trace) return [];
  const { state } = app;
  const head = openHead();
  const word = visible(piecesOf(stack())[position()]?.text ?? "");
  const parts = [
    [t("crumb.map"), () => at("map-0").focus()],
    [`“${word}”`, () => at(`map-${state.stack}`).focus()],
    manifest.stacks.length > 0 && [`${t("layer")} ${layerIndex()}`, () => at("head-grid").focus()],
    head ? [`${t(`kind.${head.attn.kind}`)} · ${t("head")} ${head.head}`, () => at("step-grid").focus()] : [state.value ?? stack().name, () => at("step-grid").focus()],
    state.cell && [`${state.cell.name.split(".").at(-1)} [${state.cell.index.slice(1).join(", ")}]`, () => at("number").focus()],
  ].filter(Boolean);
  return h("ol", null, parts.map(([text, onclick], i) => h("li", null, h("button", { type: "button", class: "link", onclick, "aria-current": i === parts.length - 1 ? "true" : null }, text))));
}

function settings() {
  const { state } = app;
  const dark = document.documentElement.dataset.theme === "dark";
  return [
    h("button", { type: "button", id: "guide-open", "aria-controls": "guide", "aria-expanded": String(state.guide > 0), onclick: () => go({ guide: state.guide ? 0 : 1 }) }, t("guide.open")),
    h("button", { type: "button", id: "theme", "aria-pressed": String(dark), onclick: () => go({ theme: dark ? "light" : "dark" }, true) }, t("theme.dark")),
    languages.map(([code, name]) => h("button", { type: "button", lang: code, class: "language", "aria-pressed": String(t("lang") === code), onclick: () => go({ lang: code }, true) }, name)),
    h("button", { type: "button", id: "keys-open", "aria-label": t("keys.title"), onclick: () => rest.openKeys?.() }, "?"),
  ];
}

function paintTools() {
  const { state } = app;
  const edited = state.against || state.versus || state.edits.some((edit) => edit.on);
  if (manifest.stacks.length === 0) return [];
  return [
    h(
      "label",
      null,
      `${t("paint")} `,
      h("select", { id: "paint-choice", onchange: (event) => go({ paint: event.target.value }, true) }, PAINTS.filter((name) => name === state.paint || (name !== "delta" || edited) && (name !== "watch" || state.watch.length) && (name !== "patch" || app.patched)).map((name) => h("option", { value: name, selected: state.paint === name }, t(`paint.${name}`)))),
    ),
    h("label", { class: "check" }, h("input", { type: "checkbox", id: "wide", checked: state.wide, onchange: (event) => go({ wide: event.target.checked }, true) }), t("wide")),
  ];
}

// ---------------------------------------------------------------- the keyboard, wherever the focus is

const typing = (element) => element?.matches?.("textarea, input:not([type=range]):not([type=checkbox]), select");

function onKey(event) {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
  if (at("dialog").open) return;
  if (typing(event.target)) {
    if (event.key === "Escape") at("map-0").focus();
    return;
  }
  const { state } = app;
  const layers = stack()?.layers.length ?? 0;
  const head = openHead();
  const heads = head?.attn.n_heads ?? stack()?.layers[layerIndex()]?.attention[0]?.n_heads ?? 1;
  const layer = (step) => go({ layer: Math.max(0, Math.min(layers - 1, layerIndex() + step)), ...(state.value ? { value: moved(state.value, step, layers) } : {}) }, true);
  const turn = (step) => go({ head: Math.max(0, Math.min(heads - 1, (state.head ?? (step > 0 ? -1 : heads)) + step)), value: null }, true);
  const actions = {
    "[": () => layer(-1),
    "]": () => layer(1),
    "{": () => turn(-1),
    "}": () => turn(1),
    "/": () => at("text").focus(),
    h: () => at("head-grid").focus(),
    g: () => at("map-0").focus(),
    n: () => at("number").focus(),
    t: () => rest.openTable?.(Boolean(at("map").contains(document.activeElement))),
    z: () => go({ wide: !state.wide }, true),
    c: () => rest.toggleCompare?.(),
    b: toBranches,
    q: () => go({ guide: state.guide ? 0 : 1 }),
    x: () => switchOff("zero"),
    m: () => switchOff("mean"),
    f: () => switchOff("freeze"),
    "?": () => rest.openKeys?.(),
    Backspace: () => rest.forward?.(),
    Escape: outwards,
  };
  if (!actions[event.key]) return;
  event.preventDefault();
  actions[event.key]();
}

/** The same value one layer on. */
const moved = (name, step, layers) => name.replace(/\bblocks\.(\d+)\b/, (_, n) => `blocks.${Math.max(0, Math.min(layers - 1, Number(n) + step))}`);

/** `x`, `m` and `f` away from the map: the number on screen, else the head. */
function switchOff(kind) {
  const { cell, head } = app.state;
  if (cell && at("number").contains(document.activeElement) && !cell.name.startsWith("param:")) {
    say(t(toggleEdit({ name: cell.name, kind, at: cell.index, value: null, on: true })));
  } else if (head !== null && openHead()) say(t(editHead(openHead().attn, head, kind)));
}

/** Escape goes one level out. */
function outwards() {
  const { state } = app;
  const focused = document.activeElement;
  if (at("number").contains(focused)) at("step-grid").focus();
  else if (at("steps").contains(focused)) at(state.value === null ? "head-grid" : "map-0").focus();
  else if (state.cell) go({ cell: null, trail: [] });
  else if (state.value !== null || state.head !== null) go({ value: null, head: null });
  else at("map-0").focus();
  if (at("heads").contains(focused)) at("map-0").focus();
}

// ---------------------------------------------------------------- start

function listen() {
  at("text").addEventListener("input", (event) => go({ text: event.target.value, ids: null, position: null, row: null, cell: null, trail: [] }, true));
  at("source").addEventListener("input", (event) => go({ source: event.target.value, cell: null, trail: [] }, true));
  at("take").addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !at("take").open) return;
    at("take").open = false;
    at("take").querySelector("summary").focus();
    event.preventDefault();
  });
  addEventListener("click", (event) => {
    const inside = event.target instanceof Node && at("take").contains(event.target);
    if (!inside || event.target.closest?.("#take-list")) at("take").open = false;
  });
  addEventListener("keydown", onKey);
  addEventListener("popstate", readAddress);
  addEventListener("resize", () => redraw());
  for (const query of ["(prefers-color-scheme: dark)", "(forced-colors: active)"]) {
    matchMedia(query).addEventListener("change", () => (setTheme(), redraw()));
  }
}

/** What the first picture does not need: fetched while it is looked at. */
async function below() {
  const [edits, guide, number, steps, takeaway, train] = await Promise.all([
    import("./edits.js"),
    import("./guide.js"),
    import("./number.js"),
    import("./steps.js"),
    import("./takeaway.js"),
    api.runName ? import("./train.js") : null,
  ]);
  steps.stepViews();
  train?.trainViews();
  draw({ steps: steps.drawSteps, number: number.drawNumber, edits: edits.drawEdits, takeaway: takeaway.drawTakeaway, guide: guide.drawGuide });
  if (train) draw({ train: train.drawTrain });
  const { toggleCompare } = edits;
  Object.assign(rest, { toggleCompare, forward: number.forward, openKeys: takeaway.openKeys, openTable: takeaway.openTable });
  app.whole = true;
  redraw();
}
const rest = {};

const draw = (views) => Object.entries(views).forEach(([name, view]) => onDraw(name, view));

setTheme();
if (manifest) {
  mapViews();
  headViews();
  draw({ header: drawHeader, maps: drawMaps, next: drawNext, heads: drawHeads });
  listen();
  start();
  requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(below))); // once the first picture stands
}
