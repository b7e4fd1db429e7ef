/**
 * The head sheet: every layer and head as a small picture of its attention, with measured scores.
 */

import { sequential } from "./colors.js";
import { fill, h } from "./dom.js";
import { makeGrid, say } from "./grid.js";
import { CanvasPaint } from "./paint.js";
import { app, go, layerIndex, piecesOf, redraw, stackAt, toggleEdit } from "./store.js";
import { t } from "./text.js";

export const MEASURES = ["entropy", "distance", "previous", "same", "induction", "first"];
let measure = "";
let hideFirst = false;
let grid = null;
let kept = { key: "", picture: document.createElement("canvas") };

const thumbnails = () => app.trace?.[app.state.stack > 0 ? "source.heads" : "heads"] ?? null;
const measured = () => app.trace?.[app.state.stack > 0 ? "source.scores" : "scores"] ?? null;
const size = () => thumbnails()?.shape.slice(0, 2) ?? [0, 0];

/** A measured score of a head on this text. */
export function score(layer, head, name) {
  const scores = measured();
  if (!scores) return null;
  const [, heads, kinds] = scores.shape;
  return scores.data[(layer * heads + head) * kinds + MEASURES.indexOf(name)];
}

export function headViews() {
  const host = document.getElementById("head-grid");
  grid = makeGrid(host, {
    label: () => t("heads.grid", { layers: size()[0], heads: size()[1] }),
    size: () => [Math.max(1, size()[0]), Math.max(1, size()[1])],
    at: () => [layerIndex(), app.state.head ?? 0],
    describe,
    move: (layer, head) => go({ layer, head, kind: "self", value: null, cell: null, trail: [] }, true),
    open: () => document.getElementById("step-grid").focus(),
    key: (event, layer, head) => {
      const kind = { x: "zero", m: "mean", f: "freeze" }[event.key];
      if (!kind) return false;
      say(t(editHead(stackAt(app.state.stack).layers[layer].attention[0], head, kind)));
      return true;
    },
    hit: (x, y) => {
      const g = places(host.clientWidth);
      const at = [Math.floor(y / g.high), Math.floor((x - g.left) / g.wide)];
      return at[0] >= 0 && at[0] < size()[0] && at[1] >= 0 && at[1] < size()[1] ? at : null;
    },
    resized: redraw,
    hover: (text) => {
      document.getElementById("head-note").textContent = text;
    },
    draw,
  });
}

function describe(layer, head) {
  if (!size()[0]) return t("heads.none");
  const scores = MEASURES.map((name) => [name, score(layer, head, name)]).filter(([, value]) => value !== null);
  const list = scores.map(([name, value]) => `${t(`measure.${name}`)} ${value.toFixed(2)}`).join(", ");
  return `${t("layer")} ${layer}, ${t("head")} ${head}${list ? `: ${list}` : ""}`;
}

/** Switch a head off, set it to its mean over the positions, or freeze where it looks; again: take that back. */
export function editHead(attn, head, kind) {
  const edit = { name: `${attn.path}.${kind === "freeze" ? "weights" : "mixed"}`, kind, at: [null, head], value: null, on: true };
  return toggleEdit(edit);
}

function places(width) {
  const [, heads] = size();
  const left = 22;
  const wide = Math.max(16, Math.min(64, Math.floor((width - left) / Math.max(1, heads))));
  return { left, wide, high: wide + (measure && wide > 30 ? 15 : 0) };
}

export function drawHeads() {
  if (!app.trace || !grid) return;
  const there = size()[0] > 0;
  document.getElementById("head-grid").hidden = !there;
  fill(
    document.getElementById("head-tools"),
    there
      ? [
          h(
            "label",
            null,
            `${t("heads.measure")} `,
            h(
              "select",
              { id: "measure", onchange: (event) => ((measure = event.target.value), drawHeads()) },
              h("option", { value: "", selected: measure === "" }, t("heads.pictures")),
              MEASURES.map((name) => h("option", { value: name, selected: measure === name }, t(`measure.${name}`))),
            ),
          ),
          h(
            "label",
            { class: "check" },
            h("input", { type: "checkbox", id: "hide-first", checked: hideFirst, onchange: (event) => ((hideFirst = event.target.checked), drawHeads()) }),
            t("heads.first"),
          ),
        ]
      : h("p", { class: "soft" }, t("heads.none")),
  );
  if (!there) return;
  grid.draw();
  fill(document.getElementById("head-best"), measure ? ranking() : null);
}

/** The heads with the highest scores, as buttons. */
function ranking() {
  const [layers, heads] = size();
  const all = [];
  for (let layer = 0; layer < layers; layer += 1) {
    for (let head = 0; head < heads; head += 1) all.push([score(layer, head, measure), layer, head]);
  }
  all.sort((a, b) => b[0] - a[0]);
  return [
    h("p", { class: "soft small" }, t("heads.best", { name: t(`measure.${measure}`) })),
    h(
      "div",
      { class: "row" },
      all.slice(0, 6).map(([value, layer, head]) =>
        h("button", { type: "button", class: "small", onclick: () => go({ layer, head, kind: "self", value: null }) }, `${layer}.${head} ${value.toFixed(2)}`),
      ),
    ),
  ];
}

/** One image of all heads, a pixel per byte; painted again only when the trace or the colours changed. */
function pictures() {
  const tensor = thumbnails();
  const key = `${app.trace.id}|${app.state.stack}|${app.theme.dark}|${hideFirst}`;
  if (kept.key === key) return kept.picture;
  const [layers, heads, high, wide] = tensor.shape;
  const picture = kept.picture;
  if (picture.width !== heads * wide) picture.width = heads * wide;
  if (picture.height !== layers * high) picture.height = layers * high;
  const context = picture.getContext("2d");
  const image = context.createImageData(picture.width, picture.height);
  const pixel = new Uint32Array(image.data.buffer);
  const ground = pixelOf(app.theme.scale.zero);
  for (let k = 0; k < layers * heads; k += 1) {
    const from = k * high * wide;
    const inks = shades(hideFirst ? loudest(tensor.data, from, high * wide, wide) : 255);
    const corner = Math.floor(k / heads) * high * picture.width + (k % heads) * wide;
    for (let i = 0; i < high; i += 1) {
      const line = corner + i * picture.width;
      for (let j = 0; j < wide; j += 1) pixel[line + j] = inks[tensor.data[from + i * wide + j]];
      if (hideFirst) pixel[line] = ground;
    }
  }
  context.putImageData(image, 0, 0);
  kept = { key, picture };
  return picture;
}

/** The largest byte of a head's picture, without its first column. */
function loudest(data, from, size, wide) {
  let most = 1;
  for (let i = 0; i < size; i += 1) if (i % wide) most = Math.max(most, data[from + i]);
  return most;
}

/** The colour of every byte, where `most` has the full one. */
function shades(most) {
  const key = `${app.theme.dark}|${most}`;
  if (!inked.has(key)) inked.set(key, Uint32Array.from({ length: 256 }, (_, byte) => pixelOf(sequential(app.theme, byte / most))));
  return inked.get(key);
}
const inked = new Map();

/** @param {number[]} color as the four bytes of a pixel */
const pixelOf = ([r, g, b]) => (255 << 24) | (b << 16) | (g << 8) | r;

function draw(canvas, width) {
  const [layers, heads] = size();
  if (!layers) return;
  const g = places(width);
  const paint = new CanvasPaint(canvas, g.left + heads * g.wide + 2, layers * g.high + 2);
  const { theme } = app;
  const picture = pictures();
  const [high, wide] = thumbnails().shape.slice(2);
  let n = piecesOf(stackAt(app.state.stack)).length; // pixels in use: each stands for a power of two of cells
  while (n > 32) n = Math.ceil(n / 2);
  paint.context.imageSmoothingEnabled = false;
  for (let layer = 0; layer < layers; layer += 1) {
    paint.text(String(layer), g.left - 6, layer * g.high + g.wide / 2 + 4, { size: 11, fill: theme.soft, anchor: "right" });
    for (let head = 0; head < heads; head += 1) {
      const [x, y, side] = [g.left + head * g.wide + 2, layer * g.high + 2, g.wide - 4];
      paint.context.drawImage(picture, head * wide, layer * high, n, n, x, y, side, side);
      const chosen = layer === layerIndex() && head === app.state.head;
      const stroke = chosen ? theme.accent : theme.line;
      paint.rect(x - 0.5, y - 0.5, side + 1, side + 1, { stroke, strokeWidth: chosen ? 3 : 1, radius: 2 });
      if (isOff(layer, head)) paint.hatch(x, y, side, side, theme.ink);
      if (measure && g.wide > 30) {
        const value = score(layer, head, measure);
        paint.text(value.toFixed(2), x + side / 2, y + side + 12, { size: 10.5, fill: theme.ink });
      }
    }
  }
}

function isOff(layer, head) {
  const path = stackAt(app.state.stack).layers[layer]?.attention[0]?.path;
  return app.state.edits.some((edit) => edit.on && edit.name === `${path}.mixed` && edit.at[1] === head);
}

