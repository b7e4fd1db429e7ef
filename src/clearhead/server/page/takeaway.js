/**
 * Everything on screen can be taken away: the address, pictures, numbers, Python that prints the same.
 */

import * as api from "./api.js";
import { download, fill, h } from "./dom.js";
import { say } from "./grid.js";
import { mapSvg, mapTable } from "./map.js";
import { shownPicture, sliceTable } from "./steps.js";
import { encode } from "./state.js";
import { acting, app, manifest } from "./store.js";
import { t } from "./text.js";

const safe = (name) => name.replace(/[^\w.-]+/g, "_");

export function drawTakeaway() {
  const item = (id, text, onclick) => h("li", null, h("button", { type: "button", id, onclick }, text));
  const file = (id, text, kind, query = "", of = app.trace) => h("li", null, h("a", { id, href: of ? api.exportPath(of.id, kind, query) : "#", download: `trace.${kind}`, onclick: fetchFile }, text));
  const edited = acting().length > 0;
  const alone = !app.state.against && !app.state.versus;
  fill(
    document.getElementById("take-list"),
    item("take-link", t("take.link"), () => copy(`${location.href.split("#")[0]}#${encode(app.state)}`, t("take.copied"))),
    item("take-svg", t("take.svg"), () => download("map.svg", mapSvg(), "image/svg+xml")),
    item("take-png", t("take.png"), takePng),
    item("take-steps", t("take.steps"), () => shownPicture() && download("steps.svg", shownPicture().svg(), "image/svg+xml")),
    item("take-csv", t("take.csv"), takeCsv),
    file("take-tensors", t("take.tensors"), "safetensors"),
    edited && !alone ? h("li", { id: "take-page", class: "soft" }, t("take.page.edited")) : file("take-page", t(edited ? "take.page.plain" : "take.page"), "html", savedCells(), edited ? app.baseline : app.trace),
    item("python-open", t("take.python"), openPython),
  );
}

/** Save what the link leads to; what the server says against it stands on the page. */
async function fetchFile(event) {
  event.preventDefault();
  const note = document.getElementById("status-note");
  try {
    const { blob, name } = await api.exported(event.currentTarget.getAttribute("href"));
    download(name, blob, blob.type);
  } catch (error) {
    note.textContent = t("take.failed", { why: error.message || t("away") });
    say(note.textContent);
  }
}

/** The numbers whose arithmetic goes into the offline page: the one on screen and those it was reached from. */
function savedCells() {
  const { cell, trail } = app.state;
  const cells = [...trail, cell].filter(Boolean).map(({ name, index }) => `${name}@${index.join(",")}`);
  return cells.length ? `?cells=${encodeURIComponent(cells.join(";"))}` : "";
}

async function copy(text, done) {
  try {
    await navigator.clipboard.writeText(text);
    say(done);
    document.getElementById("status-note").textContent = done;
  } catch {
    openText(t("take.link"), text); // the browser does not let us: the reader can
  }
}

function takePng() {
  const image = new Image();
  image.onload = () => {
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [2 * image.width, 2 * image.height];
    const context = canvas.getContext("2d");
    context.scale(2, 2);
    context.drawImage(image, 0, 0);
    canvas.toBlob((blob) => download("map.png", blob, "image/png"));
  };
  image.src = `data:image/svg+xml,${encodeURIComponent(mapSvg())}`;
}

function takeCsv() {
  const picture = shownPicture();
  if (!picture) return;
  const lines = picture.csv().map((row) => row.map((x) => (/[",\n]/.test(x) ? `"${String(x).replace(/"/g, '""')}"` : x)).join(","));
  download(`${safe(picture.title)}.csv`, `${lines.join("\n")}\n`, "text/csv");
}

/** Python that prints the number on screen. */
export function python() {
  const { state, trace } = app;
  const literal = (x) => JSON.stringify(x).replace(/\bnull\b/g, "None").replace(/\btrue\b/g, "True").replace(/\bfalse\b/g, "False");
  const edits = acting();
  const ids = trace.pieces.map((piece) => piece.id);
  const source = trace.source.length ? `, source=torch.tensor([${literal(trace.source.map((piece) => piece.id))}])` : "";
  const cell = state.cell ?? { name: manifest.values.at(-1)?.name, index: [0, ids.length - 1, 0] };
  const frozen = (edit) => edit.kind === "freeze";
  const put = (edit) => edit.kind === "patch";
  const value = (edit) => {
    if (frozen(edit) || put(edit)) return `, ${frozen(edit) ? "plain" : "other"}[${literal(edit.name)}]`;
    return edit.value === null ? "" : `, ${edit.value}`;
  };
  const made = edits.map((edit) => `    Edit(${literal(edit.name)}, ${literal(frozen(edit) ? "patch" : edit.kind)}, (${edit.at.map((i) => `${i ?? "None"},`).join(" ")})${value(edit)}),`);
  return [
    "import torch",
    "",
    "from clearhead.cli_models import open_model",
    "from clearhead.inspector.provenance import explain",
    edits.length ? "from clearhead.inspector.trace import Edit, trace" : "from clearhead.inspector.trace import trace",
    ...(trace.weights || (state.versus && app.baseline?.weights) ? ["from clearhead.training.checkpoint import load_checkpoint"] : []),
    "",
    `model, tokenizer = open_model(${literal(manifest.place)}, \"cpu\")`,
    ...(trace.weights ? [`load_checkpoint(${literal(trace.weights)}, model)  # step ${trace.step}`] : []),
    `tokens = torch.tensor([${literal(ids)}])  # ${literal(trace.pieces.map((piece) => piece.text).join("").slice(0, 60))}`,
    ...(edits.some(put) && app.baseline ? [...beside(), `other = trace(${state.versus ? "beside" : "model"}, torch.tensor([${literal(app.baseline.pieces.map((piece) => piece.id))}])${source}).values`] : []),
    ...(edits.some(frozen) ? [`plain = trace(model, tokens${source}).values`] : []),
    ...(edits.length ? ["edits = [", ...made, "]", `seen = trace(model, tokens${source}, edits=edits)`] : [`seen = trace(model, tokens${source})`]),
    `print(seen.values[${literal(cell.name)}][${cell.index.join(", ")}].item())`,
    `print(explain(seen, ${literal(cell.name)}, (${cell.index.join(", ")}${cell.index.length === 1 ? "," : ""})).to_dict())`,
    "",
  ].join("\n");
}

/** Lines that open the model, or the step, that this one is compared with. */
function beside() {
  const { state, baseline } = app;
  if (!state.versus) return [];
  const name = state.versus === "beside" ? api.besidePlace : manifest.place;
  return [`beside, _ = open_model(${JSON.stringify(name)}, "cpu")`, ...(baseline.weights ? [`load_checkpoint(${JSON.stringify(baseline.weights)}, beside)  # step ${baseline.step}`] : [])];
}

function openPython() {
  if (app.trace) openText(t("take.python"), python());
}

/** A window with a text to copy. */
function openText(title, text) {
  const dialog = document.getElementById("dialog");
  fill(
    dialog,
    h("h2", { id: "dialog-title" }, title),
    h("pre", { class: "copy", tabindex: "0", id: "python" }, text),
    h("form", { method: "dialog", class: "row" }, h("button", { type: "button", onclick: () => navigator.clipboard?.writeText(text).catch(() => {}) }, t("copy")), h("button", { autofocus: true }, t("close"))),
  );
  if (!dialog.open) dialog.showModal();
}

/** The visible slice as a table, or the map. */
export function openTable(ofMap = false) {
  const table = ofMap && app.trace ? mapTable() : sliceTable();
  if (!table) return;
  const dialog = document.getElementById("dialog");
  fill(dialog, h("h2", { id: "dialog-title" }, t("table.title")), h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": t("table.title") }, table), h("form", { method: "dialog" }, h("button", { autofocus: true }, t("close"))));
  if (!dialog.open) dialog.showModal();
}

export function openKeys() {
  const dialog = document.getElementById("dialog");
  const keys = ["arrows", "enter", "esc", "layer", "head", "h", "text", "x", "m", "f", "scale", "p", "c", "w", "b", "t", "z", "space", "back", "q", "help"];
  fill(
    dialog,
    h("h2", { id: "dialog-title" }, t("keys.title")),
    h("dl", { class: "keys" }, keys.map((key) => h("div", null, h("dt", null, h("kbd", null, t(`key.${key}.name`))), h("dd", null, t(`key.${key}`))))),
    h("form", { method: "dialog" }, h("button", { autofocus: true }, t("close"))),
  );
  if (!dialog.open) dialog.showModal();
}

