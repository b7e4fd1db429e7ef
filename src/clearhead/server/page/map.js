/**
 * The map: every position, every depth. A cell's word is what the model would say if it stopped there, its
 * colour the probability of that word; the lines are the attention of the selected position.
 */

import { followed, words } from "./api.js";
import { css, diverging, inkOn, sequential } from "./colors.js";
import { brief, h, percent, visible } from "./dom.js";
import { dragToScale, scalable, scaleCell, scaleOf, stepOf } from "./edits.js";
import { makeGrid, say } from "./grid.js";
import { follow } from "./next.js";
import { CanvasPaint, SvgPaint } from "./paint.js";
import { app, beside, compared, expertsOf, go, layerIndex, lengthsOf, manifest, piecesOf, position, redraw, rowIndex, rowsOf, select, show, stackAt, stacks, toggleEdit } from "./store.js";
import { t } from "./text.js";

const LIMIT = 680; // a map taller than this closes the layers that are not looked at
const FAINT = 0.02; // a line thinner than this is not drawn, and that is said

const grids = [];

/** One grid per stack; `i` counts from the stack that speaks. */
export function mapViews() {
  stacks.forEach((_, i) => {
    const host = document.getElementById(`map-${i}`);
    host.hidden = false;
    const scroller = host.parentElement;
    const view = makeGrid(host, {
      first: -1,
      label: () => t("map.grid", { n: piecesOf(stackAt(i)).length, stack: t(`stack.${stackAt(i).name}`) }),
      size: () => [rowsOf(stackAt(i)).length + 1, Math.max(1, piecesOf(stackAt(i)).length)],
      at: () => (app.state.stack === i ? [rowIndex(), position()] : [rowsOf(stackAt(i)).length - 1, piecesOf(stackAt(i)).length - 1]),
      describe: (row, column) => describe(i, row, column),
      move: (row, column) => {
        if (app.state.stack !== i) go({ stack: i, position: null, row: null, layer: null, head: null, value: null, cell: null, trail: [] }, true);
        select(row, column, true);
      },
      open: (row, column) => openCell(i, row, column),
      key: (event, row, column) => keyOn(i, event, row, column),
      resized: redraw,
      hover: (text) => {
        document.getElementById("readout").textContent = text;
      },
      hit: (x, y) => hit(place(i, scroller.clientWidth), x, y),
      draw: (canvas) => {
        const geometry = place(i, scroller.clientWidth);
        scroller.firstElementChild.style.width = `${geometry.width}px`;
        canvas.style.transform = `translateX(${geometry.scroll}px)`;
        paintMap(new CanvasPaint(canvas, geometry.seen, geometry.height), geometry, i);
      },
    });
    dragToScale(view.canvas, host, (x, y) => {
      const at = hit(place(i, scroller.clientWidth), x, y);
      return at && { row: rowsOf(stackAt(i))[at[0]], column: at[1] };
    });
    scroller.addEventListener("scroll", () => view.draw(), { passive: true });
    grids.push(view);
  });
}

export function drawMaps() {
  if (!app.trace) return;
  for (const grid of grids) grid.draw();
  drawCross();
  keepInSight(app.state.stack);
  document.getElementById("readout").textContent = describe(app.state.stack, rowIndex(), position());
}

/** Scroll a map that is wider than the screen to the selected column, when another one was selected. */
function keepInSight(i) {
  const key = `${app.trace.id}|${i}|${position()}`;
  if (key === inSight) return;
  inSight = key;
  const scroller = document.getElementById(`map-${i}`).parentElement;
  const g = place(i, scroller.clientWidth);
  const [from, to] = [g.x(g.selected), g.x(g.selected) + g.w(g.selected)];
  if (to > g.scroll + g.seen) scroller.scrollLeft = to - g.seen + 10;
  else if (from < g.scroll + g.left) scroller.scrollLeft = from - g.left;
}
let inSight = "";

/** Where columns and rows stand. */
function place(i, seen) {
  const one = stackAt(i);
  const rows = rowsOf(one);
  const pieces = piecesOf(one);
  const scroller = document.getElementById(`map-${i}`)?.parentElement;
  const narrow = seen < 560;
  const left = narrow ? 92 : 178;
  const room = seen - left - 10;
  const selected = app.state.stack === i ? position() : pieces.length - 1;
  const even = room / Math.max(1, pieces.length);
  let column = Math.min(76, even);
  let extra = 0;
  if (column < 34 && (app.state.wide || narrow)) column = 58;
  else if (column < 23) {
    extra = 74;
    column = Math.max(2, (room - extra) / pieces.length);
  }
  const width = Math.max(seen, left + column * pieces.length + extra + 10);
  const scroll = width > seen ? (scroller?.scrollLeft ?? 0) : 0;
  const { tops, heights, height } = rowPlaces(rows, one, i);
  const x = (j) => left + j * column + (j > selected ? extra : 0);
  const w = (j) => column + (j === selected ? extra : 0);
  return { rows, pieces, left, column, extra, width, seen, scroll, tops, heights, height, x, w, selected, narrow };
}

/** The open layer's band is full; with many layers the others shrink. */
function rowPlaces(rows, one, i) {
  const tall = (gap, row) => 62 + row + one.layers.reduce((sum, layer) => sum + gap + layer.rows.length * (row + 4), 0);
  const layers = Math.max(1, one.layers.length);
  const gap = Math.max(24, Math.min(64, (LIMIT - tall(0, 31)) / layers));
  const closed = tall(gap, 31) > LIMIT;
  const shrunk = Math.max(4, Math.min(14, (610 - 260) / Math.max(1, rows.length) - 3));
  const open = app.state.stack === i ? layerIndex() : one.layers.length - 1;
  const tops = [];
  const heights = [];
  let y = 62;
  rows.forEach((row, r) => {
    const starts = r > 0 && rows[r - 1].layer !== row.layer;
    const full = !closed || row.layer === null || row.layer === open || row.layer === one.layers.length - 1;
    if (starts) y += closed ? (row.layer === open ? 40 : 5) : gap;
    tops.push(y);
    heights.push(full ? 31 : shrunk);
    y += (full ? 31 : shrunk) + (full ? 4 : 1);
  });
  return { tops, heights, height: y + 6 };
}

function hit(g, x, y) {
  if (x < g.left) return null;
  let column = -1;
  for (let j = 0; j < g.pieces.length; j += 1) {
    const left = g.x(j) - g.scroll;
    if (x >= left && x < left + g.w(j)) column = j;
  }
  if (column < 0) return null;
  if (y < 58) return [-1, column];
  for (let r = 0; r < g.rows.length; r += 1) {
    if (y >= g.tops[r] - 2 && y < g.tops[r] + g.heights[r] + 2) return [r, column];
  }
  return null;
}

/** The lens of a cell: id, probability; null where nothing was recorded. */
export function lensAt(trace, row, column) {
  const r = trace?.rows.indexOf(row.name) ?? -1;
  const id = trace?.["lens.id"];
  if (r < 0 || !id) return null;
  const at = r * id.shape[1] + column;
  return id.data[at] === undefined || id.data[at] < 0 ? null : { id: id.data[at], p: trace["lens.p"].data[at] };
}

function normAt(trace, i, row, column) {
  if (stackAt(i).foreign) return lengthsOf(row.name)?.[column] ?? null;
  const source = i > 0;
  const r = (source ? trace.sourceRows : trace.rows).indexOf(row.name);
  const norm = trace[source ? "source.norm" : "norm"];
  return r < 0 || !norm ? null : norm.data[r * norm.shape[1] + column];
}

export const wordOf = (id) => words.get(id) ?? `#${id}`;

function rowName(row) {
  if (row.layer === null) return row.label === "start" ? t("row.start") : row.name;
  return `${t("layer")} ${row.layer} ${t("row.plus")} ${t(`row.${row.label}`)}`;
}

export function describe(i, r, column) {
  const one = stackAt(i);
  const piece = piecesOf(one)[column];
  const row = rowsOf(one)[r];
  if (!piece) return "";
  const where = t("map.where", { n: column, word: visible(piece.text) });
  if (r < 0 || !row) return `${where} · ${t("map.token", { id: piece.id })}`;
  const lens = i === 0 && row.layer !== null ? lensAt(app.trace, row, column) : null;
  const norm = normAt(app.trace, i, row, column);
  const parts = [where, rowName(row)];
  if (lens) parts.push(t("map.says", { word: visible(wordOf(lens.id)), p: percent(lens.p) }));
  if (norm !== null && norm !== undefined) parts.push(`‖·‖ ${brief(norm)}`);
  if (lens && compared()) {
    const there = beside(column);
    const other = there === null ? null : lensAt(app.baseline, row, there);
    parts.push(other ? t("map.there", { word: visible(wordOf(other.id)), p: percent(other.p) }) : t("map.alone"));
  }
  const watched = lens ? followedAt(row, column) : null;
  if (watched) parts.push(t("map.watch", { word: visible(wordOf(watched.id)), p: percent(watched.p) }) + (watched.change === null ? "" : ` (${t("map.watch.delta", { change: brief(watched.change, 3) })})`));
  const edit = scaleOf(row, column);
  if (edit) parts.push(`${t("kind.scale")} × ${edit.value}`);
  const change = patchAt(row.name, column);
  if (change !== undefined) parts.push(t("map.patch", { change: brief(change, 3) }));
  for (const [expert, weight] of expertsAt(one, row, column)) parts.push(t("map.expert", { n: expert, w: weight.toFixed(2) }));
  return parts.join(" · ");
}

/** The experts a token went to; with many layers only those of the open one are fetched. */
function expertsAt(one, row, column) {
  if (row.layer === null || row.label !== "feed-forward") return [];
  const { feed_forward: ff } = one.layers[row.layer];
  if (ff?.kind !== "experts" || (one.layers.length > 8 && row.layer !== layerIndex())) return [];
  return expertsOf(ff.path)?.[column] ?? [];
}

/** Enter on a cell: its token, or the value that stands there. */
function openCell(i, r, column) {
  const row = rowsOf(stackAt(i))[r];
  if (r < 0) {
    go({ value: "tokens", cell: null, trail: [] });
  } else {
    const patch = { value: row.name, lead: [0], head: null };
    go(patch);
    show(row.name, [0, column, 0]);
  }
  document.getElementById("steps").scrollIntoView({ block: "nearest" });
  document.getElementById("step-grid").focus({ preventScroll: true });
  say(describe(i, r, column));
}

function keyOn(i, event, r, column) {
  const row = rowsOf(stackAt(i))[r];
  const kind = { x: "zero", m: "mean", f: "freeze" }[event.key];
  if (kind && row?.added) {
    const edit = { name: row.added, kind, at: [null, column], value: null, on: true };
    const done = toggleEdit(edit);
    say(done === "edit.done" && kind === "zero" ? t("edit.added", { name: row.added }) : t(done));
    return true;
  }
  const step = stepOf(event.key);
  if (step && scalable(row)) {
    scaleCell(row, column, (scaleOf(row, column)?.value ?? 1) + step);
    return true;
  }
  const lens = event.key === "w" && i === 0 && row ? lensAt(app.trace, row, column) : null;
  if (lens) {
    follow(lens.id);
    return true;
  }
  if (event.key === "p" && row && (app.state.against || app.state.versus) && compared()) {
    const edit = { name: row.name, kind: "patch", at: [null, column], value: null, on: true };
    say(t(toggleEdit(edit)));
    return true;
  }
  return false;
}

/** The map as a table: of each depth and position the word and how sure; else the length of the vector. */
export function mapTable() {
  const i = app.state.stack;
  const [one, pieces] = [stackAt(i), piecesOf(stackAt(i))];
  const from = Math.max(0, Math.min(pieces.length - 64, position() - 32));
  const shown = pieces.slice(from, from + 64);
  const says = (row, column) => {
    const lens = i === 0 && row.layer !== null ? lensAt(app.trace, row, column) : null;
    if (lens) return `${visible(wordOf(lens.id))} ${percent(lens.p)}`;
    const norm = normAt(app.trace, i, row, column);
    return norm === null || norm === undefined ? "" : `‖·‖ ${brief(norm)}`;
  };
  return h(
    "table",
    { id: "map-table" },
    h("caption", null, i === 0 && app.trace["lens.id"] ? t("table.map") : t("map.title")),
    h("thead", null, h("tr", null, h("td"), shown.map((piece, k) => h("th", { scope: "col" }, `${from + k} ${visible(piece.text)}`)))),
    h("tbody", null, rowsOf(one).map((row) => h("tr", null, h("th", { scope: "row" }, rowName(row)), shown.map((_, k) => h("td", null, says(row, from + k)))))),
  );
}

// ---------------------------------------------------------------- painting

/** Colour and text of a cell. */
function looksOf(i, row, column, theme, extremes) {
  const { trace, baseline, state } = app;
  const lens = i === 0 && row.layer !== null ? lensAt(trace, row, column) : null;
  const norm = normAt(trace, i, row, column);
  if (row.layer === null && !stackAt(i).foreign) {
    const piece = piecesOf(stackAt(i))[column];
    return { color: theme.scale.ground, word: visible(piece.text), small: norm == null ? "" : `‖${brief(norm, 1).slice(1)}‖` };
  }
  if (state.paint === "norm" || (!lens && norm !== null)) {
    const share = norm === null ? 0 : norm / extremes.norm;
    const word = lens ? visible(wordOf(lens.id)) : norm === null ? "" : brief(norm, 1).slice(1);
    return { color: sequential(theme, share), word, small: lens && norm !== null ? brief(norm, 1).slice(1) : "‖·‖", share };
  }
  if (!lens) return null;
  const word = visible(wordOf(lens.id));
  if (state.paint === "delta" && baseline && compared()) {
    const before = lensThere(row, column);
    if (before === undefined) return null;
    const change = lens.p - (before?.p ?? 0);
    const other = before && before.id !== lens.id;
    const small = `${change < 0 ? "−" : "+"}${Math.round(100 * Math.abs(change))}`;
    return { color: diverging(theme, change, extremes.delta()), word, small, share: Math.abs(change), mark: other };
  }
  if (state.paint === "watch" && state.watch.length) {
    const found = followedAt(row, column);
    if (!found) return null;
    if (found.change === null) return { color: sequential(theme, found.p), word, small: percent(found.p, 0), share: found.p };
    const share = Math.abs(found.change) / extremes.watch();
    return { color: diverging(theme, found.change, extremes.watch()), word, small: brief(found.change, 1), share };
  }
  if (state.paint === "patch") {
    const change = patchAt(row.name, column);
    if (change === undefined) return null;
    const most = Math.max(1e-9, ...Array.from(app.patched.changes.values(), Math.abs));
    return { color: diverging(theme, change, most), word, small: brief(change, 2), share: Math.abs(change) / most };
  }
  return { color: sequential(theme, lens.p), word, small: percent(lens.p, 0), share: lens.p };
}

/** What putting the other text's vector here does to the logit, once that was tried. */
const patchAt = (name, column) => (app.patched?.trace === app.trace.id ? app.patched.changes.get(`${name}|${column}`) : undefined);

/** What a cell says of the token that is followed first: its probability, and how its logit differs. */
function followedAt(row, column) {
  const id = app.state.watch[0];
  if (id === undefined) return null;
  const [here, other] = [rowsSay(app.trace, id), compared() ? rowsSay(app.baseline, id) : null];
  const r = app.trace.rows.indexOf(row.name);
  if (!here || r < 0) return null;
  const at = r * here.p.shape[2] + column;
  const there = other ? beside(column) : null;
  const change = there === null ? null : here.logit.data[at] - other.logit.data[r * other.p.shape[2] + there];
  return { id, p: here.p.data[at], change };
}

/** The logits and probabilities of one token in every row of a trace; null until they are there. */
function rowsSay(trace, id) {
  const key = `${trace.id}|${id}`;
  if (!said.has(key)) {
    if (said.size > 50) said.clear();
    said.set(key, null);
    if (trace["lens.id"]) followed(trace.id, [id]).then((tensors) => {
      said.set(key, tensors);
      redraw();
    }, () => {});
  }
  return said.get(key);
}
const said = new Map();

/** The lens of the cell beside this one; undefined where no token stands beside it. */
function lensThere(row, column) {
  const there = beside(column);
  return there === null ? undefined : lensAt(app.baseline, row, there);
}

/** The largest of these sizes on the map, to measure the others by. */
function largest(i, size) {
  let most = 1e-9;
  for (const row of rowsOf(stackAt(i))) {
    if (row.layer !== null) piecesOf(stackAt(i)).forEach((_, column) => (most = Math.max(most, Math.abs(size(row, column)))));
  }
  return most;
}

const changeOfP = (row, column) => (lensAt(app.trace, row, column)?.p ?? 0) - (lensThere(row, column)?.p ?? 0);
const changeOfLogit = (row, column) => followedAt(row, column)?.change ?? 0;

/** What the strongest colour stands for, where colours say what differs. */
export function scaleNote() {
  if (!app.trace || !compared() || manifest.stacks.length === 0) return "";
  if (app.state.paint === "delta") return t("map.scale", { most: percent(largest(0, changeOfP)) });
  return app.state.paint === "watch" && app.state.watch.length ? t("map.scale", { most: brief(largest(0, changeOfLogit), 3).slice(1) }) : "";
}

/** Draw a map with any paint. */
export function paintMap(paint, g, i) {
  const theme = app.theme;
  const one = stackAt(i);
  const here = app.state.stack === i;
  const at = here ? position() : null;
  const selectedRow = here ? rowIndex() : null;
  const first = g.scroll ? Math.max(0, Math.floor((g.scroll) / g.column) - 1) : 0;
  const last = Math.min(g.pieces.length, Math.ceil((g.scroll + g.seen - g.left) / g.column) + 1);
  const norm = app.trace[i > 0 ? "source.norm" : "norm"];
  const extremes = { norm: norm ? norm.data.reduce((a, b) => Math.max(a, b), 0) : 1 };
  const once = (size, value = 0) => () => (value ||= largest(i, size));
  [extremes.watch, extremes.delta] = [once(changeOfLogit), once(changeOfP)];
  if (one.foreign) extremes.norm = Math.max(1e-9, ...g.rows.flatMap((row) => [...(lengthsOf(row.name) ?? [])]));
  const X = (j) => g.x(j) - g.scroll;

  if (here) drawLines(paint, g, one, X);
  for (let j = first; j < last; j += 1) {
    const chosen = j === at;
    const wide = g.w(j);
    const size = wide < 34 ? 11 : chosen ? 15 : 14;
    if (wide >= 22) {
      const fill = chosen ? theme.accent : theme.ink;
      paint.text(visible(g.pieces[j].text), X(j) + wide / 2, 26, { size, weight: 700, fill, width: wide - 2 });
      paint.text(String(g.pieces[j].id), X(j) + wide / 2, 44, { size: wide < 34 ? 9.5 : 11, fill: theme.soft, width: wide - 2 });
    }
    if (chosen && selectedRow === -1) {
      paint.rect(X(j) + 1, 6, wide - 2, 44, { stroke: theme.accent, strokeWidth: 2, radius: 6 });
    }
  }
  g.rows.forEach((row, r) => {
    for (let j = first; j < last; j += 1) drawCell(paint, g, i, row, r, j, X(j), extremes, at, selectedRow);
  });
  drawLabels(paint, g, theme);
}

function drawCell(paint, g, i, row, r, j, x, extremes, at, selectedRow) {
  const theme = app.theme;
  const inset = g.column >= 10 ? 1.5 : 0.4;
  const [w, y, high] = [g.w(j) - 2 * inset, g.tops[r], g.heights[r]];
  if (x + w < g.left - 60 || x > g.seen) return;
  const look = looksOf(i, row, j, theme, extremes);
  const radius = high > 20 && w > 20 ? 5 : 0;
  const chosen = j === at && r === selectedRow;
  const frame = j === at ? { stroke: theme.accent, strokeWidth: chosen ? 3 : 1.5 } : {};
  if (!look) {
    paint.hatch(x + inset, y, w, high, theme.line);
    if (j === at) paint.rect(x + inset, y, w, high, { ...frame, radius });
    return;
  }
  const fill = theme.forced ? theme.paper : css(look.color);
  const ink = theme.forced ? theme.ink : inkOn(look.color);
  paint.rect(x + inset, y, w, high, { fill, radius, ...(theme.forced ? { stroke: theme.line } : {}), ...frame });
  if (theme.forced && look.share) paint.rect(x + inset, y + high - 3, w * Math.min(1, look.share), 3, { fill: theme.accent });
  if (high < 20 || w < 19) return;
  const tight = w < 31;
  const middle = x + g.w(j) / 2;
  paint.text(look.word, middle, y + 14, { size: tight ? 10.5 : 12.5, weight: chosen ? 700 : 500, fill: ink, width: w - 3 });
  const experts = expertsAt(stackAt(i), row, j);
  const small = experts.length ? experts.map(([e, share]) => `${e}·${share.toFixed(1).slice(1)}`).join(" ") : look.small;
  if (small && !(tight && row.layer === null)) paint.text(small, middle, y + 26.5, { size: tight ? 9 : 10.5, fill: ink, width: w - 1 });
  if (look.mark) paint.rect(x + w - 5, y + 2, 4, 4, { fill: theme.accent, radius: 2 });
}

function drawLabels(paint, g, theme) {
  paint.rect(0, 58, g.left - 6, g.height - 58, { fill: theme.paper });
  g.rows.forEach((row, r) => {
    if (g.heights[r] < 9 && row.layer !== null && r % 2) return;
    const name = row.layer === null ? rowName(row) : `${g.narrow ? "L" : `${t("layer")} `}${row.layer} + ${t(g.narrow ? `short.${row.label}` : `row.${row.label}`)}`;
    const size = Math.min(12, Math.max(8, g.heights[r]));
    const open = row.layer === layerIndex();
    paint.text(name, g.left - 12, g.tops[r] + g.heights[r] / 2 + 4, { size, fill: open ? theme.ink : theme.soft, weight: open ? 600 : 400, anchor: "right", width: g.left - 16 });
  });
}

/** Attention rows of the selected position, per layer: [key, weight][], and what was left out. */
export function attentionRows(kind, layer) {
  const tensor = app.lines?.[kind === "cross" ? "cross" : "lines"];
  if (!tensor || app.state.stack !== 0 || layer >= tensor.shape[0]) return null;
  const [, heads, keys] = tensor.shape;
  const row = new Float64Array(keys);
  const chosen = app.state.head !== null && layer === layerIndex() && app.state.kind === kind ? [app.state.head] : null;
  const used = chosen ?? Array.from({ length: heads }, (_, head) => head);
  for (const head of used) {
    for (let j = 0; j < keys; j += 1) row[j] += tensor.data[(layer * heads + head) * keys + j] / used.length;
  }
  return { row, heads: used };
}

function drawLines(paint, g, one, X) {
  const at = app.lines?.at;
  if (at === undefined || at !== g.selected) return;
  one.layers.forEach((layer, l) => {
    const r = g.rows.findIndex((row) => row.layer === l);
    if (r < 1 || g.tops[r] - (g.tops[r - 1] + g.heights[r - 1]) < 12) return;
    const found = attentionRows("self", l);
    if (!found) return;
    const top = g.tops[r - 1] + g.heights[r - 1] + 1;
    const end = X(at) + g.w(at) / 2;
    found.row.forEach((weight, j) => {
      if (weight < FAINT || j >= g.pieces.length) return;
      paint.curve(X(j) + g.w(j) / 2, top, end, g.tops[r] - 1, 0.8 + 6 * weight, app.theme.accent, 0.3 + 0.6 * Math.sqrt(weight));
    });
  });
}

/** Cross-attention lines run across the gutter, from the encoder's last row to the open layer's. */
function drawCross() {
  const canvas = document.getElementById("cross-lines");
  const box = canvas.parentElement.getBoundingClientRect();
  canvas.hidden = manifest.shape !== "encoder-decoder" || box.width === 0;
  if (canvas.hidden) return;
  const paint = new CanvasPaint(canvas, box.width, box.height);
  const layer = layerIndex();
  const found = attentionRows("cross", layer);
  if (!found) return;
  const corner = (i) => {
    const here = document.getElementById(`map-${i}`).parentElement.getBoundingClientRect();
    return { x: here.left - box.left, y: here.top - box.top, g: place(i, here.width) };
  };
  const [from, to] = [corner(1), corner(0)];
  const r = to.g.rows.findIndex((row) => row.layer === layer && row.label === "cross");
  if (r < 0) return;
  const last = from.g.rows.length - 1;
  const end = { x: to.x + to.g.x(app.lines.at) - to.g.scroll + 2, y: to.y + to.g.tops[r] + to.g.heights[r] / 2 };
  found.row.forEach((weight, j) => {
    if (weight < FAINT || j >= from.g.pieces.length) return;
    const x = from.x + from.g.x(j) - from.g.scroll + from.g.w(j) / 2;
    const y = from.y + from.g.tops[last] + from.g.heights[last] + 2;
    paint.curve(x, y, end.x, end.y, 0.8 + 6 * weight, app.theme.accent, 0.3 + 0.6 * Math.sqrt(weight));
  });
}

/** The same in words. */
export function crossNote() {
  const layer = layerIndex();
  const found = manifest.shape === "encoder-decoder" ? attentionRows("cross", layer) : null;
  if (!found) return "";
  const best = Array.from(found.row, (weight, j) => [weight, j]).sort((a, b) => b[0] - a[0]).slice(0, 3);
  const list = best.map(([weight, j]) => `“${visible(app.trace.source[j]?.text ?? "")}” ${percent(weight, 0)}`).join(", ");
  return t("map.cross", { layer, list });
}

/** How much of the open layer's attention the lines leave out. */
export function linesNote() {
  const found = app.state.stack === 0 ? attentionRows("self", layerIndex()) : null;
  if (!found) return "";
  const faint = found.row.reduce((sum, weight) => sum + (weight < FAINT ? weight : 0), 0);
  const who = found.heads.length === 1 ? t("lines.head", { n: found.heads[0] }) : t("lines.mean", { n: found.heads.length });
  return t("lines.note", { layer: layerIndex(), who, p: percent(faint) });
}

/** The map as SVG text. */
export function mapSvg(i = app.state.stack) {
  const geometry = { ...place(i, 1100), scroll: 0 };
  geometry.seen = geometry.width;
  const paint = new SvgPaint(geometry.width, geometry.height, app.theme.paper);
  paintMap(paint, geometry, i);
  return paint.toString();
}

