/**
 * Nine questions that walk a newcomer from text to the next token, answered with the numbers of this model
 * and this text.
 */

import * as api from "./api.js";
import { brief, exact, fill, h, percent, visible } from "./dom.js";
import { lensAt, wordOf } from "./map.js";
import { signedBar } from "./number.js";
import { products } from "./ops.js";
import { argmax, softmax } from "./sample.js";
import { app, go, manifest, piecesOf, redraw, rowIndex, rowsOf, show, stackAt, valueNamed } from "./store.js";
import { t } from "./text.js";

export const QUESTIONS = 9;
const slices = new Map(); // what an answer quotes and had to fetch

/** A slice for an answer: null until it is there. */
function quote(name, at) {
  const key = `${app.trace.id}|${name}|${at}`;
  if (!slices.has(key)) {
    slices.set(key, null);
    if (slices.size > 60) slices.delete(slices.keys().next().value);
    api.slice(app.trace.id, name, at).then((tensor) => {
      slices.set(key, tensor);
      redraw();
    }, () => {});
  }
  return slices.get(key) ?? null;
}

const speaker = () => stackAt(0);
const pieces = () => piecesOf(speaker());
const last = () => pieces().length - 1;
const word = (i) => visible(pieces()[i]?.text ?? "");

/** The head that looks most at one earlier token from the last position. */
function strongest() {
  const tensor = app.trace.lines;
  if (!tensor) return null;
  const [layers, heads, keys] = tensor.shape;
  let best = null;
  for (let layer = 0; layer < layers; layer += 1) {
    for (let head = 0; head < heads; head += 1) {
      for (let key = 0; key < Math.min(keys, last() + 1); key += 1) {
        if (key === last() || (key === 0 && last() > 2)) continue; // itself, and the place where heads rest
        const weight = tensor.data[(layer * heads + head) * keys + key];
        if (!best || weight > best.weight) best = { layer, head, key, weight };
      }
    }
  }
  return best;
}

const pathOf = (found) => speaker().layers[found.layer].attention[0].path;

/** Words and probabilities of the last position, depth by depth. */
function depths() {
  return rowsOf(speaker()).filter((row) => row.layer !== null).map((row) => ({ row, lens: lensAt(app.trace, row, last()) })).filter((one) => one.lens);
}

/** An answer of the server for a sentence: null until it is there, `without` where there is none. */
function told(key, request, without) {
  const whole = `${app.trace.id}|${key}`;
  if (!slices.has(whole)) {
    slices.set(whole, null);
    const keep = (answer) => {
      slices.set(whole, answer);
      redraw(["guide"]);
    };
    request().then(keep, () => keep(without));
  }
  return slices.get(whole);
}

/** What each depth adds to the logit of a word, largest first; null until it is there, empty where it is no sum. */
function whence(id) {
  const answer = told(`origins|${id}`, () => api.origins(app.trace.id, last(), id), { rows: [] });
  if (!answer) return null;
  const names = new Map(rowsOf(speaker()).map((row) => [row.name, row.layer === null ? t("row.start") : `${t("layer")} ${row.layer} ${t(`row.${row.label}`)}`]));
  const list = answer.rows.map(([name, amount]) => [names.get(name), amount]);
  if (Math.abs(answer.rest) > 1e-9) list.push([t("guide.8.bias"), answer.rest]);
  return { logit: answer.logit, list: list.sort((a, b) => Math.abs(b[1]) - Math.abs(a[1])) };
}

/** The sum in words, of numbers that add up as they stand. */
function sumOf({ logit, list }) {
  const round = (x) => Math.round(100 * x) / 100;
  const best = list.slice(0, 3);
  const rest = round(logit) - best.reduce((sum, [, amount]) => sum + round(amount), 0);
  return t("guide.8.from", { logit: brief(logit, 2), list: best.map(([name, amount]) => `${name} ${brief(amount, 2)}`).join(", "), n: list.length - best.length, rest: brief(rest, 2) });
}

/** The same, depth by depth. */
function depthList({ list }) {
  const most = Math.abs(list[0][1]);
  return h(
    "details",
    { id: "guide-depths" },
    h("summary", null, t("guide.8.all", { n: list.length })),
    h("ul", null, list.map(([name, amount]) => h("li", null, h("span", null, name), h("span", { class: "amount" }, brief(amount, 2)), signedBar(amount / most)))),
  );
}

const ANSWERS = [
  () => ({
    text: t("guide.1", { n: pieces().length, first: word(0), id: pieces()[0]?.id, v: manifest.vocab_size ?? "?" }),
    look: () => go({ stack: 0, value: "tokens", row: -1, position: last() === 0 ? null : 0, cell: null, trail: [] }),
  }),
  () => {
    const name = rowsOf(speaker())[0]?.name;
    const row = valueNamed("embed") ? quote("embed", `0,${last()},:`) : name && quote(name, `0,${last()},:`);
    const numbers = row ? Array.from(row.data.slice(0, 3), (x) => brief(x)).join(", ") : "…";
    return { text: t("guide.2", { word: word(last()), d: manifest.config?.d_model ?? row?.data.length ?? "?", numbers }), look: () => go({ value: valueNamed("embed") ? "embed" : name, position: null, row: 0, cell: { name: valueNamed("embed") ? "embed" : name, index: [0, last(), 0] } }) };
  },
  () => {
    const kind = manifest.config?.positions ?? "none";
    const known = ["rotary", "learned", "sinusoidal", "relative"].find((one) => kind.startsWith(one)) ?? "none";
    const attn = speaker().layers[0]?.attention[0];
    const name = known === "rotary" ? `${attn.path}.queries` : rowsOf(speaker())[0]?.name;
    return { text: t(`guide.3.${known}`, { n: last() }), look: () => (go({ value: name, lead: [0, 0], layer: 0 }), show(name, known === "rotary" ? [0, 0, last(), 0] : [0, last(), 0])) };
  },
  () => {
    const found = strongest();
    if (!found) return { text: t("guide.none") };
    return { text: t("guide.4", { word: word(last()), other: word(found.key), p: percent(found.weight), layer: found.layer, head: found.head }), look: () => go({ position: null, layer: found.layer, head: found.head, kind: "self", value: null, cell: { name: `${pathOf(found)}.weights`, index: [0, found.head, last(), found.key] } }) };
  },
  () => {
    const found = strongest();
    if (!found) return { text: t("guide.none") };
    const name = `${pathOf(found)}.scores`;
    const index = [0, found.head, last(), found.key];
    const cell = told(`${name}|${index}`, () => api.cell(app.trace.id, name, index), { unknown: true });
    const words = { word: word(last()), other: word(found.key) };
    const plain = cell && !cell.unknown && cell.compute === "sum" && !cell.bias && !cell.params?.softcap;
    const sum = plain ? products(cell).reduce((a, b) => a + b, 0) : 0;
    const text = plain ? t("guide.5", { ...words, n: cell.terms.length, sum: brief(sum), scale: exact(cell.scale), score: brief(cell.value) }) : t("guide.5.plain", { ...words, score: cell?.value === undefined ? "…" : brief(cell.value) });
    return { text: cell?.unknown && cell.value === undefined ? t("guide.none") : text, look: () => (go({ position: null, layer: found.layer, head: found.head, kind: "self", value: null }), show(name, index)) };
  },
  () => {
    const one = speaker();
    const middle = Math.floor(last() / 2);
    const kind = manifest.shape === "encoder-decoder" ? "both" : one.causal ? "causal" : "free";
    return { text: t(`guide.6.${kind}`, { n: pieces().length, word: word(middle), at: middle, seen: middle + 1, hidden: last() - middle, s: app.trace.source.length }), look: () => go({ position: middle === last() ? null : middle, value: null, head: app.state.head ?? 0, kind: "self", cell: null, trail: [] }) };
  },
  () => {
    const path = depths();
    let best = /** @type {any} */ (null);
    path.forEach(({ row, lens }, i) => {
      if (row.label !== "feed-forward" || i === 0) return;
      const before = path[i - 1].lens;
      const change = before.id === lens.id ? Math.abs(lens.p - before.p) : Math.max(lens.p, before.p);
      if (!best || change > best.change) best = { change, row, lens, before };
    });
    if (!best) return { text: t("guide.none") };
    const layer = speaker().layers[best.row.layer];
    const kind = layer.feed_forward?.kind ?? "plain";
    const n = layer.feed_forward?.n_experts ?? manifest.config?.d_ff ?? "?";
    const rows = rowsOf(speaker());
    return {
      text: t(`guide.7.${kind === "experts" ? "experts" : "plain"}`, { layer: best.row.layer, before: visible(wordOf(best.before.id)), p: percent(best.before.p), after: visible(wordOf(best.lens.id)), q: percent(best.lens.p), n, k: layer.feed_forward?.top_k ?? "" }),
      look: () => go({ stack: 0, position: null, layer: null, row: rows.indexOf(rows.find((row) => row.name === best.row.name)), value: valueNamed(`${layer.feed_forward.path}.hidden`) ? `${layer.feed_forward.path}.hidden` : layer.feed_forward.path, lead: [], paint: "p", cell: null, trail: [] }),
    };
  },
  () => {
    const path = depths();
    if (path.length === 0 || !app.trace.logits) return { text: t("guide.none") };
    const final = argmax(app.trace.logits.data);
    const p = softmax(app.trace.logits.data)[final];
    let from = path.length;
    while (from > 0 && path[from - 1].lens.id === final) from -= 1;
    const first = path[Math.min(from, path.length - 1)];
    const rows = rowsOf(speaker());
    const earlier = path.slice(0, from).filter(({ lens }) => lens.id === final).length;
    const sum = whence(final);
    const said = t("guide.8", { word: visible(wordOf(final)), p: percent(p), where: `${t("layer")} ${first.row.layer} (${t(`row.${first.row.label}`)})`, n: path.length - from, all: path.length });
    return {
      text: [said, earlier > 0 && t("guide.8.earlier", { n: earlier }), sum === null ? "…" : sum.list.length > 0 && sumOf(sum)].filter(Boolean).join(" "),
      more: sum?.list.length > 0 && depthList(sum),
      look: () => {
        go({ stack: 0, position: null, row: rows.findIndex((row) => row.name === first.row.name), layer: null, paint: "p", cell: null, trail: [] });
        document.getElementById("guide-depths")?.setAttribute("open", "");
      },
    };
  },
  () => {
    const found = strongest();
    const edit = found && { name: `${pathOf(found)}.mixed`, kind: "zero", at: [null, found.head], value: null, on: true };
    const on = app.state.edits.find((one) => one.on && one.kind === "zero" && /\.mixed$/.test(one.name));
    if (on && app.baseline?.logits && app.baseline !== app.trace) {
      const id = argmax(app.baseline.logits.data);
      return { text: t("guide.9.after", { name: on.name.replace(/^.*blocks\.(\d+)\..*$/, "$1"), head: on.at[1] ?? "", word: visible(wordOf(id)), before: percent(softmax(app.baseline.logits.data)[id]), after: percent(softmax(app.trace.logits.data)[id]) }), look: () => go({ edits: app.state.edits.filter((one) => one !== on) }), button: t("guide.restore") };
    }
    if (!found) return { text: t("guide.none") };
    return { text: t("guide.9", { layer: found.layer, head: found.head, other: word(found.key) }), look: () => (go({ edits: [...app.state.edits, edit], position: null, layer: found.layer, head: found.head, cell: null, trail: [] }), (app.lent = edit)), button: t("guide.off") };
  },
];

/** Where the answer to each question is to be seen. */
const TARGETS = ["map", "number", "steps", "steps", "number", "steps", "map", "map", "next"];

/** Do what an answer offers, and bring what it shows into view, below the answer. */
function reveal(look, target) {
  look();
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  setTimeout(() => {
    const narrow = matchMedia("(max-width: 760px)").matches;
    const shown = document.getElementById(target === "number" && narrow ? "steps" : target); // there the number is always in view
    const under = document.getElementById("guide").offsetHeight + 16;
    window.scrollTo({ top: window.scrollY + shown.getBoundingClientRect().top - under + (target === "map" ? below(under) : 0), behavior: calm ? "auto" : "smooth" });
  }, 60);
}

/** How far a map must move up so that its selected row is in view. */
function below(under) {
  const top = document.getElementById("map").getBoundingClientRect().top;
  const grid = document.getElementById("map-0").getBoundingClientRect();
  const share = (rowIndex() + 2) / (rowsOf(speaker()).length + 1); // the row of pieces stands above all
  return Math.max(0, grid.top - top + share * grid.height + 64 - (window.innerHeight - under));
}

export function drawGuide() {
  const host = document.getElementById("guide");
  const n = app.state.guide;
  host.hidden = !(n >= 1 && n <= QUESTIONS) || !app.trace;
  document.getElementById("guide-open").setAttribute("aria-expanded", String(!host.hidden));
  if (host.hidden) return;
  let answer = /** @type {any} */ ({ text: t("guide.none") });
  if (manifest.stacks.length > 0) answer = ANSWERS[n - 1]();
  fill(
    host,
    h("h2", { id: "guide-title" }, h("span", { class: "count" }, `${n} / ${QUESTIONS}`), ` ${t(`guide.q${n}`)}`),
    h("p", { id: "guide-answer", "aria-live": "polite" }, answer.text),
    /[⏎␣⇥␍⟨]/.test(answer.text) && h("p", { class: "soft small", id: "guide-signs" }, t("signs")),
    h(
      "div",
      { class: "row" },
      answer.look && h("button", { type: "button", id: "guide-look", class: "main", onclick: () => reveal(answer.look, TARGETS[n - 1]) }, answer.button ?? t("guide.look")),
      h("button", { type: "button", id: "guide-back", disabled: n === 1, onclick: () => go({ guide: n - 1 }) }, t("guide.back")),
      h("button", { type: "button", id: "guide-next", disabled: n === QUESTIONS, onclick: () => go({ guide: n + 1 }) }, t("guide.next")),
      h("button", { type: "button", id: "guide-close", onclick: () => go({ guide: 0 }) }, t("close")),
    ),
    answer.more,
  );
}

