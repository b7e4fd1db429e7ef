/**
 * One layer, step by step: the values it makes, in order; one head's scores, mask and softmax; any other value
 * as a matrix with its axes named. A cell of a picture is a cell of a tensor, and Enter shows how it was made.
 */

import * as api from "./api.js";
import { css, diverging, sequential } from "./colors.js";
import { brief, exact, fill, h, percent, visible } from "./dom.js";
import { makeGrid } from "./grid.js";
import { CanvasPaint, SvgPaint, pixels } from "./paint.js";
import { app, go, keysOf, layerIndex, manifest, openHead, piecesOf, position, redraw, rowIndex, rowsOf, show, stack, valueNamed, written } from "./store.js";
import { t } from "./text.js";

const WINDOW = 256; // rows of a picture at most; where they stand in the whole, a small map shows
const WHOLE = 96; // pixels on a side of that map
let grid = null;
let shown = null; // what the picture shows now
let at = [0, 0]; // the live cell of a value's matrix
let loading = "";

export function stepViews() {
  const host = document.getElementById("step-grid");
  grid = makeGrid(host, {
    label: () => (shown ? t("steps.grid", { name: shown.title, rows: shown.rows, columns: shown.columns }) : t("steps.title")),
    size: () => [Math.max(1, shown?.total ?? shown?.rows ?? 1), Math.max(1, shown?.columns ?? 1)],
    at: () => (shown ? outside(shown.at()) : [0, 0]),
    describe: (i, j) => shown?.describe(i - (shown.from ?? 0), j) ?? "",
    move: (i, j) => ready()?.move(i - (shown.from ?? 0), j),
    open: (i, j) => ready()?.open(i - (shown.from ?? 0), j),
    key: (event) => {
      if (event.key !== " " || !ready()?.next) return false;
      ready().next();
      return true;
    },
    resized: redraw,
    hover: (text) => {
      document.getElementById("step-note").textContent = text;
    },
    hit: (x, y) => outside(ready()?.hit(x, y)) ?? null,
    draw: (canvas, width) => shown?.draw(canvas, width),
  });
}

/** The same cell, its row counted from the first of all and not of those on screen. @returns {any} */
const outside = (place) => place && [place[0] + (shown.from ?? 0), place[1]];

/** What is shown, unless another picture is on its way: a key then belongs to neither. */
const ready = () => (loading === "" ? shown : null);

export function drawSteps() {
  if (!app.trace || !grid) return;
  const layer = layerIndex();
  const head = openHead();
  document.getElementById("steps-title").textContent = titleOf(head);
  fill(document.getElementById("values"), valueButtons(layer));
  const host = document.getElementById("step-grid");
  const tokens = app.state.value === "tokens";
  host.hidden = tokens;
  if (tokens) {
    shown = null;
    loading = "";
    document.getElementById("step-note").textContent = "";
    fill(document.getElementById("step-rows"), tokenView());
    return;
  }
  const wanted = head ? wantHead(head) : wantValue();
  if (!wanted) {
    shown = null;
    loading = "";
    host.hidden = true;
    document.getElementById("step-note").textContent = "";
    return fill(document.getElementById("step-rows"), h("p", { class: "soft" }, t("steps.none")));
  }
  const { key } = wanted;
  if (loading === key && shown?.key !== key) return; // on its way
  if (shown?.key === key) {
    loading = ""; // what was on its way is wanted no more
    return present();
  }
  loading = key;
  if (typed()) { // the whole pass is only run again when the hand rests
    document.getElementById("steps").classList.add("old");
    clearTimeout(resting);
    resting = setTimeout(() => {
      if (loading !== key) return;
      if (app.stale) loading = ""; // the next answer asks again
      else fetchPicture(wanted);
    }, 350);
  } else fetchPicture(wanted);
}

let resting = 0;
const typed = () => document.activeElement?.matches("#text, #source") && shown !== null;

function fetchPicture({ key, slices, make }) {
  Promise.all(slices.map(({ name, spec, options }) => api.slice(app.trace.id, name, spec, options))).then(
    (tensors) => {
      if (loading !== key) return;
      loading = "";
      shown = { key, ...make(Object.fromEntries(slices.map(({ as }, i) => [as, tensors[i]]))) };
      document.getElementById("steps").classList.remove("old");
      present();
    },
    (error) => {
      if (loading === key) loading = "";
      shown = null;
      fill(document.getElementById("step-rows"), h("p", { class: "soft" }, `${t("steps.failed")} ${error.message}`));
    },
  );
}

function present() {
  grid.draw();
  fill(document.getElementById("step-rows"), shown.below());
}

function titleOf(head) {
  if (app.state.value === "tokens") return t("token.title", { n: position() });
  if (head) return t("steps.head", { layer: layerIndex(), head: head.head, kind: t(`kind.${head.attn.kind}`) });
  return t("steps.value", { name: valueName() ?? "" });
}

/** Everything the layer makes, in order; and what comes before and after all layers. */
function valueButtons(layer) {
  const one = stack();
  const path = one?.layers[layer]?.name;
  const all = [...api.manifest.values];
  const inside = path ? all.filter((value) => value.name === path || value.name.startsWith(`${path}.`)) : all;
  const around = path ? all.filter((value) => !/\bblocks\.\d+\b/.test(value.name)) : [];
  const head = openHead();
  const attns = one?.layers[layer]?.attention ?? [];
  const button = (value) =>
    h(
      "button",
      {
        type: "button",
        class: "value",
        "aria-pressed": String(app.state.value === value.name),
        title: `${value.name} · ${value.op} · ${value.axes.join("×")}`,
        onclick: () => go({ value: value.name, lead: [] }),
      },
      path && value.name.startsWith(`${path}.`) ? value.name.slice(path.length + 1) : value.name === path ? t("values.out") : value.name,
      h("span", { class: "shape" }, value.shape.slice(1).join("×")),
    );
  return [
    h(
      "div",
      { class: "row" },
      attns.map((attn) =>
        h(
          "button",
          {
            type: "button",
            class: "small",
            "aria-pressed": String(head?.attn === attn),
            onclick: () => go({ value: null, kind: attn.kind, head: app.state.head ?? 0 }),
          },
          t(`kind.${attn.kind}`),
        ),
      ),
      head && headPicker(head),
    ),
    h(
      "details",
      { id: "all-values" },
      h("summary", null, path ? t("values.title", { layer, n: inside.length }) : t("values.all", { n: inside.length })),
      h("div", { class: "values" }, inside.map(button)),
      around.length > 0 && h("p", { class: "soft small" }, t("values.around")),
      h("div", { class: "values" }, around.map(button)),
    ),
  ];
}

function headPicker({ attn, head }) {
  const group = attn.n_heads / attn.n_kv_heads;
  return [
    h(
      "label",
      null,
      `${t("head")} `,
      h(
        "select",
        { id: "head", onchange: (event) => go({ head: Number(event.target.value), value: null }) },
        Array.from({ length: attn.n_heads }, (_, i) => h("option", { value: i, selected: i === head }, String(i))),
      ),
    ),
    group > 1 && h("span", { class: "soft small" }, t("steps.group", { head, shared: Math.floor(head / group), n: group })),
    attn.window && h("span", { class: "soft small" }, t("steps.window", { n: attn.window })),
  ];
}

// ---------------------------------------------------------------- one head

/** Which rows of a long sequence are fetched. */
function rowsAround(length, middle) {
  if (length <= WINDOW) return [0, length];
  const start = Math.min(length - WINDOW, Math.max(0, 64 * Math.round((middle - WINDOW / 2) / 64)));
  return [start, start + WINDOW];
}

function wantHead({ attn, head }) {
  const { trace } = app;
  const queries = piecesOf(stack()).length;
  const [from, to] = rowsAround(queries, position());
  const shared = Math.floor((head * attn.n_kv_heads) / attn.n_heads);
  const names = ["scores", "weights"].map((name) => `${attn.path}.${name}`);
  if (!names.every(valueNamed)) return null;
  const level = Math.ceil(Math.log2(Math.max(queries, keysOf(attn).length) / WHOLE));
  const slices = [
    { as: "scores", name: names[0], spec: `0,${head},${from}:${to},:` },
    { as: "weights", name: names[1], spec: `0,${head},${from}:${to},:` },
    { as: "queries", name: `${attn.path}.queries`, spec: `0,${head},${from}:${to},:` },
    { as: "keys", name: `${attn.path}.keys`, spec: `0,${shared},:,:` },
    ...(queries > WINDOW ? [{ as: "whole", name: names[1], spec: `0,${head},:,:`, options: { level } }] : []),
  ].filter(({ name }) => valueNamed(name));
  return { key: `${trace.id}|${attn.path}|${head}|${from}`, slices, make: (tensors) => headPicture(attn, head, from, 2 ** level, tensors) };
}

/** The pictures of one head: scores, what may be seen, weights; and query times key below. */
function headPicture(attn, head, from, per, { scores, weights, queries, keys, whole }) {
  const rows = scores.shape.at(-2);
  const columns = scores.shape.at(-1);
  const value = (tensor, i, j) => tensor.data[i * columns + j];
  const reason = (i, j) => whyMasked(attn, i + from, j);
  const masked = (i, j) => reason(i, j) !== "";
  const limit = largestOf(scores.data, (index) => !masked(Math.floor(index / columns), index % columns));
  const top = weights.data.reduce((a, b) => Math.max(a, b), 1e-9);
  const key = () => Math.min(columns - 1, app.state.cell && ours(app.state.cell.name) ? app.state.cell.index[3] : Math.min(position(), columns - 1));
  const ours = (name) => name === `${attn.path}.scores` || name === `${attn.path}.weights`;
  const images = new Map(); // of this head, made once
  let part = app.state.cell?.name === `${attn.path}.scores` ? "scores" : "weights";
  let g = null;
  const here = () => [Math.max(0, Math.min(rows - 1, position() - from)), key()];
  const texts = { query: piecesOf(stack()), key: keysOf(attn) };
  const word = (list, i) => visible(list[i]?.text ?? String(i));

  const self = {
    title: `${attn.path} ${t("head")} ${head}`,
    rows,
    columns,
    from,
    total: texts.query.length,
    at: here,
    tensors: { scores, weights },
    describe(i, j) {
      const name = t(`part.${part}`);
      const where = t("steps.cell", { name, query: word(texts.query, i + from), key: word(texts.key, j) });
      if (masked(i, j)) return `${where}: ${t(`mask.${reason(i, j)}`)}`;
      if (i < 0 || i >= rows) return where; // its numbers are fetched when it is chosen
      return `${where}: ${part === "scores" ? brief(value(scores, i, j)) : percent(value(weights, i, j))}`;
    },
    move(i, j) {
      const last = texts.query.length - 1;
      go({ position: i + from === last ? null : i + from, head, cell: { name: `${attn.path}.${part}`, index: [0, head, i + from, j] }, trail: [] }, true);
    },
    open(i, j) {
      show(`${attn.path}.${part}`, [0, head, i + from, j]);
      document.getElementById("number").focus();
    },
    next() {
      part = part === "scores" ? "weights" : "scores";
      self.move(...here());
    },
    hit(x, y) {
      for (const picture of g?.pictures ?? []) {
        const j = Math.floor((x - picture.x) / g.side);
        const i = Math.floor((y - picture.y) / g.side);
        if (i < 0 || j < 0 || i >= rows || j >= columns) continue;
        if (picture.part !== "mask") part = picture.part;
        return [i, j];
      }
      if (!whole || !g) return null;
      const [i, j] = [Math.floor((y - g.whole) * per) - from, Math.floor((x - g.label) * per)];
      return i + from >= 0 && j >= 0 && i + from < texts.query.length && j < columns ? [i, j] : null;
    },
    draw(canvas, width) {
      g = layout(width);
      paintHead(new CanvasPaint(canvas, width, g.height), g);
    },
    svg() {
      const wide = layout(760);
      const paint = new SvgPaint(760, wide.height, app.theme.paper);
      paintHead(paint, wide);
      return paint.toString();
    },
    below: () => rowTable(),
    csv: () => [["query", "key", "score", "weight"], ...cells()],
  };

  function* cells() {
    for (let i = 0; i < rows; i += 1) {
      for (let j = 0; j < columns; j += 1) yield [i + from, j, exact(value(scores, i, j)), exact(value(weights, i, j))];
    }
  }

  function layout(width) {
    const gap = 66;
    const three = width >= 420 && columns <= 64;
    const count = three ? 3 : columns <= 96 ? 2 : 1;
    const label = rows <= 24 && width > 560 ? 64 : 8;
    const side = Math.max(0.25, Math.min(22, (width - 8 - label - gap * (count - 1)) / count / columns, 420 / rows));
    const parts = count === 3 ? ["scores", "mask", "weights"] : count === 2 ? ["scores", "weights"] : [part];
    const y = 24;
    const pictures = parts.map((name, k) => ({ part: name, x: label + k * (side * columns + gap), y }));
    const strip = y + side * rows + 30;
    const below = strip - 4 + (queries && keys ? 96 : 0);
    return { side, pictures, label, gap, height: below + (whole ? WHOLE + 30 : 0), strip, whole: below + 22, width };
  }

  function colorOf(name, i, j) {
    if (name === "weights") return masked(i, j) ? null : sequential(app.theme, value(weights, i, j) / top);
    if (name === "mask" && masked(i, j)) return null;
    return diverging(app.theme, value(scores, i, j), limit);
  }

  function paintHead(paint, layout) {
    const { theme } = app;
    const [row, column] = here();
    for (const [k, picture] of layout.pictures.entries()) {
      const [wide, high] = [layout.side * columns, layout.side * rows];
      const chosen = picture.part === part;
      paint.text(t(`part.${picture.part}`), picture.x, 14, { size: 12.5, weight: chosen ? 700 : 500, fill: theme.ink, anchor: "left" });
      if (k > 0) {
        const step = picture.part === "mask" ? t("step.mask") : t("step.softmax");
        paint.text(`${step} →`, picture.x - layout.gap / 2, picture.y + high / 2, { size: 11, fill: theme.soft, width: layout.gap - 4 });
      }
      paintMatrix(paint, picture, layout.side, rows, columns, (i, j) => colorOf(picture.part, i, j), picture.part === "scores" ? null : masked, images);
      paint.rect(picture.x - 0.5, picture.y - 0.5, wide + 1, high + 1, { stroke: theme.line });
      paint.rect(picture.x - 1, picture.y + row * layout.side - 1, wide + 2, layout.side + 2, { stroke: theme.accent, strokeWidth: 1 });
      paint.rect(picture.x + column * layout.side - 0.5, picture.y + row * layout.side - 0.5, layout.side + 1, layout.side + 1, { stroke: theme.ink, strokeWidth: chosen ? 2.5 : 1.5 });
      const shownValue = masked(row, column) ? t("masked") : picture.part === "weights" ? percent(value(weights, row, column)) : brief(value(scores, row, column));
      paint.text(shownValue, picture.x, picture.y + high + 16, { size: 12, weight: 600, fill: theme.ink, anchor: "left" });
    }
    if (layout.label > 20) {
      for (let i = 0; i < rows; i += 1) {
        if (layout.side < 11 && i !== row) continue;
        const color = i === row ? theme.accent : theme.soft;
        paint.text(word(texts.query, i + from), layout.label - 6, layout.pictures[0].y + (i + 0.5) * layout.side + 4, { size: 11, fill: color, anchor: "right", width: layout.label - 8 });
      }
    }
    if (queries && keys) paintProduct(paint, layout, row, column);
    if (whole) paintWhole(paint, layout);
  }

  /** All rows, small, and which of them stand above. */
  function paintWhole(paint, layout) {
    const { theme } = app;
    const [high, wide] = whole.shape;
    paint.text(t("steps.whole", { n: per, from, to: from + rows - 1, all: texts.query.length }), layout.label, layout.whole - 8, { size: 11.5, fill: theme.soft, anchor: "left" });
    const most = whole.data.reduce((a, b) => Math.max(a, b), 1e-9);
    paintMatrix(paint, { x: layout.label, y: layout.whole, part: "whole" }, 1, high, wide, (i, j) => sequential(theme, whole.data[i * wide + j] / most), null, images);
    paint.rect(layout.label - 0.5, layout.whole - 0.5, wide + 1, high + 1, { stroke: theme.line });
    paint.rect(layout.label - 2, layout.whole + from / per, wide + 4, rows / per, { stroke: theme.accent, strokeWidth: 2 });
  }

  /** q, k and q times k, feature by feature, of the selected pair. */
  function paintProduct(paint, layout, row, column) {
    const { theme } = app;
    const width = queries.shape.at(-1);
    const q = Array.from({ length: width }, (_, d) => queries.data[row * width + d]);
    const k = Array.from({ length: width }, (_, d) => keys.data[column * width + d]);
    const product = q.map((x, d) => x * k[d]);
    const side = Math.max(1, Math.min(16, (layout.width - 86) / width));
    const lines = [["q", q, word(texts.query, row + from)], ["k", k, word(texts.key, column)], ["q·k", product, ""]];
    lines.forEach(([name, list, token], line) => {
      const y = layout.strip + line * 30;
      const most = list.reduce((a, b) => Math.max(a, Math.abs(b)), 1e-9);
      paint.text(name, 4, y + 12, { size: 12, weight: 600, fill: theme.ink, anchor: "left" });
      paint.text(token, 30, y + 12, { size: 11, fill: theme.soft, anchor: "left", width: 50 });
      list.forEach((x, d) => paint.rect(84 + d * side, y, Math.max(0.6, side - 1), 16, { fill: css(diverging(theme, x, most)) }));
    });
  }

  /** The selected row, key by key: score, allowed, e^(s - max), weight. */
  function rowTable() {
    const [row, column] = here();
    const order = Array.from({ length: columns }, (_, j) => j);
    const open = order.filter((j) => !masked(row, j));
    const hidden = columns - open.length;
    const best = [...open].sort((a, b) => value(weights, row, b) - value(weights, row, a)).slice(0, 8);
    if (!best.includes(column) && open.includes(column)) best.push(column);
    best.sort((a, b) => a - b);
    const sum = open.reduce((total, j) => total + value(weights, row, j), 0);
    const listed = best.reduce((total, j) => total + value(weights, row, j), 0);
    const total = (name, id, x) => h("tr", null, h("th", { scope: "row" }, name), h("td"), h("td"), h("td", { id }, x.toFixed(6)));
    const max = open.reduce((most, j) => Math.max(most, value(scores, row, j)), -Infinity);
    if (open.length === 0) return h("p", null, t("steps.empty"));
    return h(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": t("steps.row", { word: word(texts.query, row + from) }) },
      h(
        "table",
        { id: "row-table" },
        h("caption", null, t("steps.row", { word: word(texts.query, row + from) })),
        h("thead", null, h("tr", null, ["key", "score", "exp", "weight"].map((name) => h("th", { scope: "col" }, t(`col.${name}`))))),
        h(
          "tbody",
          null,
          best.map((j) =>
            h(
              "tr",
              { class: j === column ? "chosen" : null },
              h("th", { scope: "row" }, `${word(texts.key, j)} `, h("span", { class: "soft" }, String(j))),
              cellButton("scores", row, j, brief(value(scores, row, j))),
              h("td", null, fewDigits(Math.exp(value(scores, row, j) - max))),
              cellButton("weights", row, j, percent(value(weights, row, j), 2)),
            ),
          ),
        ),
        h(
          "tfoot",
          null,
          open.length > best.length && [total(t("steps.shown", { n: best.length }), "row-shown", listed), total(t("steps.rest", { n: open.length - best.length }), "row-rest", Math.max(0, sum - listed))],
          total(t("steps.sum"), "row-sum", sum),
        ),
      ),
      hidden > 0 && hiddenNote(order.map((j) => reason(row, j))),
      columns * layout(520).side < columns && h("p", { class: "soft small" }, t("steps.pooled")),
      from + rows < texts.query.length || from > 0 ? h("p", { class: "soft small" }, t("steps.part", { from, to: from + rows - 1, n: texts.query.length })) : null,
    );
  }

  /** How many keys may not be seen, and why. */
  function hiddenNote(reasons) {
    const counts = new Map();
    for (const why of reasons) if (why) counts.set(why, (counts.get(why) ?? 0) + 1);
    return h("p", { class: "soft small", id: "row-hidden" }, Array.from(counts, ([why, n]) => t("steps.hidden", { n, why: t(`mask.${why}`) })).join(" · "));
  }

  const cellButton = (name, i, j, text) =>
    h("td", null, h("button", { type: "button", class: "link", onclick: () => show(`${attn.path}.${name}`, [0, head, i + from, j]) }, text));

  return self;
}

/** A number from 0 to 1 in few letters. */
const fewDigits = (x) => (x !== 0 && x < 1e-3 ? x.toExponential(1).replace("-", "−") : String(Number(x.toPrecision(4))));

/** Why query i may not see key j; "" if it may. A weight of 0 alone is no reason. */
function whyMasked(attn, i, j) {
  const one = stack();
  const padded = attn.kind === "cross" || one.name === "encoder" || manifest.stacks.length === 1;
  if (padded && manifest.pad_id != null && keysOf(attn)[j]?.id === manifest.pad_id) return "padding";
  if (attn.kind === "cross") return "";
  if (one.causal && j > i) return "causal";
  if (attn.window && one.causal && i - j >= attn.window) return "window";
  if (attn.window && !one.causal && Math.abs(i - j) > attn.window) return "window";
  return "";
}

function largestOf(data, counts) {
  let most = 1e-9;
  for (let i = 0; i < data.length; i += 1) {
    const size = Math.abs(data[i]);
    if (size > most && Number.isFinite(size) && counts(i)) most = size;
  }
  return most;
}

/** A matrix of coloured cells; cells without a colour are hatched. */
function paintMatrix(paint, { x, y, part }, side, rows, columns, colorOf, hatched, images = new Map()) {
  const [wide, high] = [side * columns, side * rows];
  if (paint.context && (side < 6 || rows * columns > 4000)) {
    const step = Math.max(1, Math.ceil(1 / side)); // cells per pixel: the one that stands out most is drawn
    const key = `${part}|${step}|${app.theme.dark}`;
    if (!images.has(key)) images.set(key, pixels(Math.ceil(columns / step), Math.ceil(rows / step), (i, j) => pooled(i, j, step)));
    const image = images.get(key);
    paint.hatch(x, y, wide, high, app.theme.line);
    paint.context.imageSmoothingEnabled = false;
    paint.context.drawImage(image, x, y, wide, high);
    return;
  }
  for (let i = 0; i < rows; i += 1) {
    for (let j = 0; j < columns; j += 1) {
      const color = colorOf(i, j);
      if (color) paint.rect(x + j * side, y + i * side, side - (side > 5 ? 1 : 0), side - (side > 5 ? 1 : 0), { fill: css(color) });
    }
  }
  for (let i = 0; i < rows; i += 1) {
    for (let j = 0; j < columns; j += 1) {
      if (hatched?.(i, j)) {
        let end = j;
        while (end + 1 < columns && hatched(i, end + 1)) end += 1;
        paint.hatch(x + j * side, y + i * side, (end - j + 1) * side, side, app.theme.line);
        j = end;
      }
    }
  }

  function pooled(i, j, step) {
    let best = null;
    let most = -1;
    for (let a = i * step; a < Math.min(rows, (i + 1) * step); a += 1) {
      for (let b = j * step; b < Math.min(columns, (j + 1) * step); b += 1) {
        const color = colorOf(a, b);
        const strength = color ? 765 - color[0] - color[1] - color[2] : -1;
        const far = color ? (app.theme.dark ? 765 - strength : strength) : -1;
        if (far > most) [most, best] = [far, color];
      }
    }
    return best;
  }
}

// ---------------------------------------------------------------- any value

function wantValue() {
  const { trace, state } = app;
  const name = valueName();
  const value = name ? valueNamed(name) : null;
  if (!value) return null;
  const dims = value.shape.length;
  const lead = Array.from({ length: Math.max(0, dims - 2) }, (_, i) => Math.min(state.lead[i] ?? 0, sizeOf(value.shape[i]) - 1));
  const length = dims >= 2 ? sizeOf(value.shape[dims - 2]) : 1;
  const [from, to] = rowsAround(length, position());
  const spec = [...lead, ...(dims >= 2 ? [`${from}:${to}`] : []), ...(dims >= 1 ? [":"] : [])].join(",");
  return { key: `${trace.id}|${name}|${spec}`, slices: [{ as: "value", name, spec }], make: (tensors) => valuePicture(value, lead, from, length, tensors.value) };
}

/** The value whose matrix is shown. */
const valueName = () => app.state.value ?? rowsOf(stack())[rowIndex()]?.name ?? api.manifest.values.at(-1)?.name;

const sizeOf = (size) => {
  if (typeof size === "number") return size;
  const pieces = piecesOf(stack()).length;
  return size === "S" && app.state.kind === "cross" ? app.trace.source.length : pieces;
};

function valuePicture(value, lead, from, total, tensor) {
  const columns = tensor.shape.at(-1) ?? 1;
  const rows = tensor.data.length / columns;
  const limit = largestOf(tensor.data, () => true);
  const [down, across] = [value.axes.at(-2) ?? "", value.axes.at(-1) ?? ""];
  const pieces = piecesOf(stack());
  const rowWord = (i) => (down === "T" || down === "S" ? visible(pieces[i + from]?.text ?? String(i + from)) : String(i + from));
  const indexOf = (i, j) => (value.shape.length >= 2 ? [...lead, i + from, j] : [j]);
  let g = null;
  const self = {
    title: value.name,
    rows,
    columns,
    from,
    total,
    tensors: { [value.name]: tensor },
    at: () => {
      const { cell } = app.state;
      if (cell?.name === value.name) at = [(cell.index.at(-2) ?? 0) - from, cell.index.at(-1) ?? 0];
      else if (down === "T") at = [position() - from, at[1]];
      return [Math.max(0, Math.min(rows - 1, at[0])), Math.max(0, Math.min(columns - 1, at[1]))];
    },
    describe(i, j) {
      const where = `${value.name} [${indexOf(i, j).join(", ")}], ${rowWord(i)}`;
      return i < 0 || i >= rows ? where : `${where}: ${exact(tensor.data[i * columns + j])}`;
    },
    move(i, j) {
      at = [i, j];
      const patch = { cell: { name: value.name, index: indexOf(i, j) }, trail: [] };
      const ofText = down === "T" || (down === "S" && app.state.kind === "self");
      if (ofText && i + from < pieces.length) patch.position = i + from === pieces.length - 1 ? null : i + from;
      go(patch, true);
    },
    open(i, j) {
      show(value.name, indexOf(i, j));
      document.getElementById("number").focus();
    },
    hit(x, y) {
      const [i, j] = [Math.floor((y - 24) / g.high), Math.floor((x - g.left) / g.wide)];
      return i >= 0 && j >= 0 && i < rows && j < columns ? [i, j] : null;
    },
    draw(canvas, width) {
      g = layout(width);
      paintValue(new CanvasPaint(canvas, width, g.height), g);
    },
    svg() {
      const wide = layout(760);
      const paint = new SvgPaint(760, wide.height, app.theme.paper);
      paintValue(paint, wide);
      return paint.toString();
    },
    below: () => [leadPickers(value, lead), turningPairs(value, lead, self.at()[0] + from, tensor, from), h("p", { class: "soft small" }, t("values.legend", { op: value.op, axes: value.axes.join(" × "), shape: [...lead.map((i) => `[${i}]`), rows, columns].join(" × "), limit: brief(limit).slice(1) })), self.rowsCut()],
    rowsCut: () => (rows && from + rows < sizeOf(value.shape.at(-2)) ? h("p", { class: "soft small" }, t("steps.part", { from, to: from + rows - 1, n: sizeOf(value.shape.at(-2)) })) : null),
    csv: () => [[down || "row", across || "column", "value"], ...Array.from(tensor.data, (x, k) => [Math.floor(k / columns) + from, k % columns, exact(x)])],
  };

  function layout(width) {
    const left = 74;
    const wide = Math.min(22, (width - left - 6) / columns);
    const high = Math.max(2, Math.min(18, 360 / rows));
    return { left, wide, high, height: 30 + high * rows };
  }

  function paintValue(paint, layout) {
    const { theme } = app;
    const [row, column] = self.at();
    paint.text(`${down} ↓  ${across} →`, 4, 14, { size: 11.5, fill: theme.soft, anchor: "left" });
    const step = Math.max(1, Math.ceil(1 / layout.wide));
    const columnsDrawn = Math.ceil(columns / step);
    const colorOf = (i, j) => {
      let best = 0;
      for (let b = j * step; b < Math.min(columns, (j + 1) * step); b += 1) {
        const x = tensor.data[i * columns + b];
        if (Math.abs(x) > Math.abs(best) || Number.isNaN(x)) best = x;
      }
      return Number.isFinite(best) ? diverging(theme, best, limit) : null;
    };
    paint.hatch?.(layout.left, 24, layout.wide * columns, layout.high * rows, theme.line);
    if (paint.context) {
      paint.context.imageSmoothingEnabled = false;
      paint.context.drawImage(pixels(columnsDrawn, rows, colorOf), layout.left, 24, layout.wide * columns, layout.high * rows);
    } else {
      for (let i = 0; i < rows; i += 1) {
        for (let j = 0; j < columnsDrawn; j += 1) {
          const color = colorOf(i, j);
          if (color) paint.rect(layout.left + j * step * layout.wide, 24 + i * layout.high, layout.wide * step, layout.high, { fill: css(color) });
        }
      }
    }
    for (let i = 0; i < rows; i += 1) {
      if (layout.high < 11 && i !== row) continue;
      paint.text(rowWord(i), layout.left - 6, 24 + (i + 0.5) * layout.high + 4, { size: 11, fill: i === row ? theme.accent : theme.soft, anchor: "right", width: layout.left - 10 });
    }
    paint.rect(layout.left + column * layout.wide - 1, 24 + row * layout.high - 1, Math.max(3, layout.wide) + 2, layout.high + 2, { stroke: theme.ink, strokeWidth: 2 });
    if (step > 1) paint.text(t("values.pooled", { n: step }), layout.left, 14, { size: 11, fill: theme.soft, anchor: "left" });
  }
  return self;
}

/** Rotary positions: each pair of features as a point, before and after it was turned by its angle. */
function turningPairs(value, lead, place, tensor, from) {
  const { config } = api.manifest;
  const part = /\.(queries|keys)$/.exec(value.name)?.[1];
  if (!part || config?.positions !== "rotary" || config.latent || value.shape.length !== 4) return null;
  const width = tensor.shape.at(-1);
  const path = value.name.slice(0, -part.length - 1);
  const letter = part === "queries" ? "q" : "k";
  const normed = valueNamed(`${path}.${letter}_norm`);
  const name = normed ? normed.name : `${path}.${letter}`;
  const head = lead[1] ?? 0;
  const spec = normed?.shape.length === 4 ? `0,${head},${place},:` : `0,${place},${head * width}:${(head + 1) * width}`;
  const key = `${app.trace.id}|${name}|${spec}`;
  if (turned.key !== key) {
    turned = { key, before: null };
    api.slice(app.trace.id, name, spec).then((before) => {
      if (turned.key === key) turned.before = before.data;
      redraw();
    }, () => {});
  }
  if (!turned.before) return null;
  const after = tensor.data.subarray((place - from) * width, (place - from + 1) * width);
  const size = config.rotary_dim ?? width;
  const half = config.rotary_layout !== "interleaved";
  const pairs = Array.from({ length: Math.min(12, size / 2) }, (_, m) => (half ? [m, m + size / 2] : [2 * m, 2 * m + 1]));
  return [
    h("p", { class: "small" }, t("turn.title", { n: place, shown: pairs.length, all: size / 2 })),
    h("div", { class: "turns" }, pairs.map(([a, b], m) => turn([turned.before[a], turned.before[b]], [after[a], after[b]], m))),
  ];
}
let turned = { key: "", before: null };

/** One pair as two hands of a clock. */
function turn(before, after, m) {
  const most = Math.max(Math.hypot(...before), Math.hypot(...after), 1e-9);
  let angle = Math.atan2(after[1], after[0]) - Math.atan2(before[1], before[0]);
  if (angle < -1e-4) angle += 2 * Math.PI;
  const hand = ([x, y], kind) => h("line", { class: kind, x1: 37, y1: 37, x2: 37 + (30 * x) / most, y2: 37 - (30 * y) / most });
  const label = t("turn.pair", { m, angle: angle.toFixed(3), length: Math.hypot(...after).toFixed(3) });
  return h("svg", { viewBox: "0 0 74 90", role: "img", "aria-label": label }, h("circle", { cx: 37, cy: 37, r: 32 }), hand(before, "before"), hand(after, "after"), h("text", { x: 37, y: 86 }, `${m}: ${angle.toFixed(2)}`));
}

/** Choose the leading indices of a value with more than two axes. */
function leadPickers(value, lead) {
  const choices = lead.map((index, i) => [i, index, sizeOf(value.shape[i]), value.axes[i]]).filter(([, , size]) => size > 1);
  if (choices.length === 0) return null;
  return h(
    "div",
    { class: "row" },
    choices.map(([i, index, size, axis]) =>
      h(
        "label",
        null,
        `${axis} `,
        h("input", {
          type: "number",
          id: `lead-${i}`,
          min: 0,
          max: size - 1,
          value: index,
          onchange: (event) => {
            const next = lead.map((old, k) => (k === i ? Math.max(0, Math.min(size - 1, Number(event.target.value) || 0)) : old));
            go({ lead: next, cell: null, trail: [] });
          },
        }),
      ),
    ),
  );
}

// ---------------------------------------------------------------- a token

let token = { key: "", answer: null };
let near = { key: "", rows: [] };

/** The tokens whose vectors point most nearly where this one's does; none where nobody can tell. */
function nearest(table, id) {
  const key = `${app.trace.id}|${table}|${id}`;
  if (near.key !== key) {
    near = { key, rows: [] };
    api.near(app.trace.id, table, id).then((rows) => {
      if (near.key !== key) return;
      near.rows = rows;
      redraw(["steps"]);
    }, () => {});
  }
  return near.rows;
}

/** What the selected token is made of: bytes, number, merges; where its vector stands. */
function tokenView() {
  const piece = piecesOf(stack())[position()];
  if (!piece) return null;
  const text = written(piecesOf(stack()));
  if (token.key !== text) {
    token = { key: text, answer: null };
    api.tokenize(text).then((answer) => {
      if (token.key === text) {
        token.answer = answer;
        redraw();
      }
    }, () => {});
  }
  const same = token.answer?.ids?.[position()] === piece.id;
  const merges = same ? (token.answer.merges?.[position()] ?? []) : [];
  const table = `param:${embeddingName()}`;
  const width = api.manifest.config?.d_model ?? 0;
  const rows = api.manifest.config ? nearest(table.slice(6), piece.id) : [];
  const item = (name, ...value) => h("div", { class: "item" }, h("dt", null, name), h("dd", null, value));
  return h(
    "dl",
    { class: "facts" },
    item(t("token.text"), h("code", null, JSON.stringify(piece.text))),
    item(t("token.id"), String(piece.id), piece.special ? ` · ${t("token.special")}` : ""),
    item(t("token.bytes"), h("code", null, (piece.bytes ?? "").replace(/(..)/g, "$1 ").trim())),
    merges.length > 0 && item(t("token.merges"), merges.map((pair) => h("code", { class: "merge" }, pair.split(" ").map(bytesText).join(" + ")))),
    item(t("token.vector"), h("button", { type: "button", class: "link", onclick: () => show(`${embeddingName().replace(/\.weight$/, "")}`, [0, position(), 0]) }, t("token.row", { table: table.slice(6), id: piece.id, n: width }))),
    rows.length > 0 && item(t("token.near"), h("span", { id: "near" }, rows.map(([id, text, cosine]) => h("span", { class: "merge", title: `${id}` }, h("code", null, visible(text)), ` ${cosine.toFixed(2)}`))), h("span", { class: "soft small" }, t("token.cosine"))),
  );
}

function embeddingName() {
  const names = api.manifest.parameters.map((one) => one.name);
  const source = stack() !== api.manifest.stacks.at(-1) && names.includes("source_embed.weight");
  return source ? "source_embed.weight" : "embed.weight";
}

function bytesText(hex) {
  const bytes = Uint8Array.from(hex.match(/../g) ?? [], (pair) => parseInt(pair, 16));
  try {
    return visible(new TextDecoder("utf-8", { fatal: true }).decode(bytes)).trim() || "␣";
  } catch {
    return hex;
  }
}

/** What is on the picture now, to be taken away. */
export const shownPicture = () => shown;

/** The visible slice as a real table, for screen readers and for tests. */
export function sliceTable() {
  if (!shown) return null;
  const [row, column] = shown.at();
  const [name, tensor] = Object.entries(shown.tensors).find(([key]) => app.state.cell?.name?.endsWith(`.${key}`)) ?? Object.entries(shown.tensors).at(-1);
  const top = Math.max(0, Math.min(shown.rows - 64, row - 32));
  const left = Math.max(0, Math.min(shown.columns - 64, column - 32));
  const rows = Array.from({ length: Math.min(64, shown.rows) }, (_, i) => i + top);
  const columns = Array.from({ length: Math.min(64, shown.columns) }, (_, j) => j + left);
  return h(
    "table",
    { id: "slice" },
    h("caption", null, `${shown.title} · ${name}`),
    h("thead", null, h("tr", null, h("td"), columns.map((j) => h("th", { scope: "col" }, String(j))))),
    h("tbody", null, rows.map((i) => h("tr", null, h("th", { scope: "row" }, String(i + (shown.from ?? 0))), columns.map((j) => h("td", null, exact(tensor.data[i * shown.columns + j])))))),
  );
}
