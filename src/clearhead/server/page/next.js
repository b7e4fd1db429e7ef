/**
 * What comes next: the whole vocabulary from logits to the drawn token, at the speed of a slider; the tokens
 * that are followed; and the texts that were branched off by taking one token or another.
 */

import * as api from "./api.js";
import { brief, fill, h, percent, visible } from "./dom.js";
import { say } from "./grid.js";
import { wordOf } from "./map.js";
import { largest, pipeline, race, softmax } from "./sample.js";
import { app, beside, compared, go, manifest, position, redraw, written } from "./store.js";
import { t } from "./text.js";

const SHOWN = 9;
const KNOBS = [
  // name, least, most, step, the value that means "off"
  ["temperature", 0, 2, 0.05, null],
  ["top_k", 0, 200, 1, 0],
  ["top_p", 0, 1, 0.01, 1],
  ["min_p", 0, 1, 0.01, 0],
  ["repetition_penalty", 0.5, 2, 0.05, 1],
];

/** The position that is looked at in the stack that speaks. */
const place = () => (app.state.stack === 0 ? position() : app.trace.pieces.length - 1);

const says = () => manifest.head === "lm" || manifest.head === "masked";
const draws = () => manifest.head === "lm";

/** Everything about the selected position, from its logits on. */
export function following() {
  const logits = logitsHere();
  if (!logits?.length) return null;
  const settings = draws() ? app.state.sampling : { ...app.state.sampling, temperature: 1, top_k: 0, top_p: 1, min_p: 0, repetition_penalty: 1 };
  const seen = app.trace.pieces.slice(0, place() + 1).map((piece) => piece.id);
  const steps = pipeline(logits, settings, seen);
  const drawn = steps.greedy ? { winner: steps.after.indexOf(1), time: 0 } : race(steps.after, settings.seed, seen.length);
  return { logits, steps, drawn, seen };
}

/** Logits of the same position in what is compared with; null where there are none, or not yet. */
export function logitsThere() {
  const { baseline } = app;
  const at = compared() ? beside(place()) : null;
  if (at === null || !baseline.logits || !app.trace.logits) return null;
  if (at === baseline.select) return baseline.logits.data;
  const key = `${baseline.id}/${at}`;
  if (there.key !== key) {
    there = { key, data: null };
    const mine = there;
    api.lines(baseline.id, at).then((tensors) => {
      mine.data = tensors.logits?.data ?? null;
      redraw();
    }, () => {});
  }
  return there.data;
}
let there = { key: "", data: null };

/** Logits of the position that is looked at. */
export const logitsHere = () => app.lines?.logits?.data ?? app.trace?.logits?.data ?? null;

/** Probabilities of the same position in what is compared with. */
function before() {
  const logits = logitsThere();
  return logits && softmax(logits);
}

/** Ask for the text of all tokens if one of these is not known yet. */
export function spell(ids) {
  if (says() && ids.some((id) => !api.words.has(id))) api.vocabulary().then(() => redraw(), () => {});
}

const nameOf = (id) => (says() ? visible(wordOf(id)) : (manifest.labels?.[id] ?? t(manifest.shape === "module" ? "output" : "class", { n: id })));

/** Take this token: it becomes part of the text, as itself, whatever the tokenizer would make of the text. */
export function force(id) {
  const pieces = app.trace.pieces.slice(0, place() + 1);
  branch([...pieces.map((piece) => piece.id), id], written(pieces) + wordOf(id));
  say(t("next.forced", { word: nameOf(id) }));
}

export function drawNext() {
  drawTree();
  const host = document.getElementById("next-body");
  const title = document.getElementById("next-title");
  const found = app.trace ? following() : null;
  title.textContent = draws() ? t("next.title") : t(says() ? "next.masked" : manifest.shape === "module" ? "next.outputs" : "next.classes");
  if (!found) return fill(host, h("p", { class: "soft" }, t("next.none")));
  const { steps, drawn } = found;
  const was = before();
  const piece = app.trace.pieces[place()];
  const order = largest(steps.after, SHOWN);
  const listed = order.filter((id) => steps.after[id] > 0);
  for (const id of largest(steps.before, SHOWN)) if (listed.length < SHOWN && !listed.includes(id)) listed.push(id);
  spell([...listed, drawn.winner, ...app.state.watch]);
  const rest = 1 - listed.reduce((sum, id) => sum + steps.after[id], 0);
  const others = steps.after.length - listed.length;
  fill(
    host,
    h("p", { class: "soft" }, t(draws() ? "next.after" : says() ? "next.at" : "next.class", { n: place(), word: visible(piece?.text ?? "") })),
    h(
      "ul",
      { class: "bars", "aria-label": t("next.list") },
      listed.map((id) => bar(id, steps, drawn, was)),
      others > 0 &&
        h(
          "li",
          { class: "bar rest" },
          h("span", { class: "word" }, t("next.others", { n: others })),
          meter(rest),
          h("span", { class: "share" }, percent(Math.max(0, rest))),
        ),
    ),
    watched(steps.before, was),
    draws() && sliders(found),
    trust(),
  );
}

/** Follow a token, or no longer. */
export function follow(id) {
  const { watch } = app.state;
  go({ watch: watch.includes(id) ? watch.filter((one) => one !== id) : [...watch, id].slice(-8) }, true);
  say(t(watch.includes(id) ? "watch.off" : "watch.on", { word: nameOf(id) }));
}

const star = (id) => h("button", { type: "button", class: "small star", "data-watch": id, "aria-pressed": String(app.state.watch.includes(id)), "aria-label": t("watch.one", { word: nameOf(id) }), title: t("watch.one", { word: nameOf(id) }), onclick: () => follow(id) }, app.state.watch.includes(id) ? "★" : "☆");

/** The followed tokens: logit, probability and rank here, and what changed. */
function watched(p, was) {
  const ids = app.state.watch.filter((id) => id < p.length);
  if (!ids.length) return null;
  const [logits, other] = [logitsHere(), logitsThere()];
  const rank = (id) => logits.reduce((n, x) => n + (x > logits[id] ? 1 : 0), 1);
  const head = ["word", "logit", "p", "rank", ...(other ? ["delta"] : [])];
  const table = h(
    "table",
    { id: "watched" },
    h("caption", null, t("watch.title")),
    h("thead", null, h("tr", null, head.map((name) => h("th", { scope: "col" }, t(`watch.${name}`))))),
    h("tbody", null, ids.map((id) => h("tr", { "data-id": id }, h("th", { scope: "row" }, star(id), ` ${nameOf(id)}`), h("td", null, brief(logits[id], 3)), h("td", null, was ? `${percent(was[id])} → ${percent(p[id])}` : percent(p[id])), h("td", null, String(rank(id))), other && h("td", { class: "delta", title: String(logits[id] - other[id]) }, brief(logits[id] - other[id], 3))))),
  );
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": t("watch.title") }, table);
}

const meter = (p, was = null) =>
  h(
    "span",
    { class: "meter", "aria-hidden": "true" },
    h("span", { class: "fill", style: { width: `${Math.max(0.5, 100 * Math.max(0, p))}%` } }),
    was !== null && h("span", { class: "was", style: { left: `${100 * was}%` } }),
  );

function bar(id, steps, drawn, was) {
  const p = steps.after[id];
  const out = p === 0;
  const raw = steps.before[id];
  const change = was ? ` · ${t("next.before", { p: percent(was[id]) })}` : "";
  const label = `${nameOf(id)}: ${percent(p)}, ${t("next.raw", { p: percent(raw) })}${change}`;
  const inside = [
    h("span", { class: "word" }, nameOf(id)),
    meter(out ? raw : p, was ? was[id] : null),
    h("span", { class: "share" }, out ? t("next.cut") : percent(p)),
  ];
  const kind = `bar${out ? " out" : ""}${draws() && drawn.winner === id ? " drawn" : ""}`;
  if (!says()) return h("li", { class: kind, title: label }, inside);
  if (!draws()) return h("li", { class: "pick" }, h("div", { class: kind, title: label }, inside), star(id));
  const action = { type: "button", title: label, "aria-label": `${label}. ${t("next.take")}`, onclick: () => force(id) };
  return h("li", { class: "pick" }, h("button", { class: kind, ...action, "data-id": id }, inside), star(id));
}

function sliders({ steps, drawn, logits }) {
  const { sampling } = app.state;
  const set = (name, value) => go({ sampling: { ...app.state.sampling, [name]: value } }, true);
  const off = steps.greedy;
  return h(
    "div",
    { class: "knobs" },
    KNOBS.map(([name, min, max, step, none]) => {
      const value = sampling[name];
      const shown = value === none ? t("off") : String(value);
      const idle = off && name !== "temperature" && name !== "repetition_penalty";
      return h(
        "label",
        { class: `knob${idle ? " idle" : ""}` },
        h("span", null, t(`knob.${name}`)),
        h("input", { type: "range", id: `knob-${name}`, min, max, step, value, "aria-valuetext": shown, disabled: idle, oninput: (event) => set(name, Number(event.target.value)) }),
        h("output", { for: `knob-${name}` }, shown),
      );
    }),
    h("p", { class: "soft small", id: "pipeline" }, pipelineText(steps, logits.length)),
    h(
      "div",
      { class: "row" },
      h("span", null, steps.greedy ? t("next.greedy", { word: nameOf(drawn.winner) }) : t("next.drawn", { seed: sampling.seed, word: nameOf(drawn.winner), time: brief(drawn.time, 3).slice(1) })),
      !steps.greedy && h("button", { type: "button", class: "small", onclick: () => set("seed", sampling.seed + 1) }, t("next.again")),
      h("button", { type: "button", class: "small", onclick: () => force(drawn.winner) }, t("next.append")),
    ),
    manifest.capabilities?.generate !== false &&
      h(
        "div",
        { class: "row" },
        h("button", { type: "button", id: "continue", class: "small", onclick: speak }, writing ? t("next.stop") : t("next.continue")),
        h("span", { class: "soft small" }, t("next.same")),
      ),
  );
}

function pipelineText(steps, size) {
  if (steps.greedy) return t("next.path.greedy", { v: size });
  const { top_k, top_p, min_p } = steps.out;
  return t("next.path", { v: size, k: size - top_k, p: size - top_k - top_p, m: size - top_k - top_p - min_p });
}

/** The difference to the fused path that the server measured. */
function trust() {
  const { delta } = app.trace;
  if (Number.isNaN(delta) || (delta === null && (manifest.stacks.length === 0 || app.state.edits.some((edit) => edit.on)))) return null;
  return h("p", { class: "soft small", id: "delta" }, t("next.delta", { d: delta === null ? "…" : delta.toExponential(1) }));
}

let writing = null;

/** Let the server speak: the tokens of the command line for this text, these settings and this seed. */
async function speak() {
  if (writing) {
    writing.abort();
    return;
  }
  writing = new AbortController();
  const { sampling } = app.state;
  const settings = sampling.temperature === 0 ? { temperature: 0, repetition_penalty: sampling.repetition_penalty, seed: sampling.seed } : sampling;
  const start = app.trace.pieces.map((piece) => piece.id);
  const ids = [...start];
  let text = written(app.trace.pieces);
  try {
    const request = { ids: start, source: app.state.source || undefined, step: app.trace.step ?? undefined, sampling: settings, n: 20 };
    for await (const event of api.generate(request, writing.signal)) {
      if (event.error) throw new Error(event.error);
      if (event.id === undefined) continue;
      ids.push(event.id);
      text += event.text ?? wordOf(event.id);
      document.getElementById("text").value = text;
    }
  } catch (error) {
    if (error.name !== "AbortError") app.error = error.message || "away";
  }
  writing = null;
  if (ids.length > start.length) branch(ids, text);
  drawNext();
}

// ---------------------------------------------------------------- branches

const MOST = 24;

/** All tokens of a node of the tree. */
export function tokensOf(tree, i) {
  const { of, keep, ids } = tree[i];
  return of < 0 ? ids : [...tokensOf(tree, of).slice(0, keep), ...ids];
}

/** The tree with these tokens in it: they hang on the first node with which they begin alike the longest. */
export function grown(tree, ids) {
  let [of, keep] = [-1, 0];
  for (let i = 0; i < tree.length; i += 1) {
    const all = tokensOf(tree, i);
    let n = 0;
    while (n < all.length && n < ids.length && all[n] === ids[n]) n += 1;
    if (n === all.length && n === ids.length) return tree;
    if (n > keep) [of, keep] = [i, n];
  }
  return [...tree, { of, keep, ids: ids.slice(keep) }];
}

/** The tree without a node that has no branches, the oldest but for these tokens and what they hang on. */
export function pruned(tree, ids) {
  const kept = new Set();
  for (let i = tree.findIndex((_, k) => tokensOf(tree, k).join() === ids.join()); i >= 0; i = tree[i].of) kept.add(i);
  const out = tree.findIndex((_, i) => !kept.has(i) && !tree.some((node) => node.of === i));
  return out < 0 ? tree : tree.filter((_, i) => i !== out).map((node) => ({ ...node, of: node.of > out ? node.of - 1 : node.of }));
}

/** Go to these tokens; where one came from and where one goes stand in the tree. */
function branch(ids, text) {
  let tree = grown(grown(app.state.tree, app.trace.pieces.map((piece) => piece.id)), ids);
  for (let n = tree.length; n > MOST; n -= 1) tree = pruned(tree, ids);
  go({ ids, text, tree, position: null, row: null, cell: null, trail: [] });
}

/** The small tree above the text. */
function drawTree() {
  const host = document.getElementById("branches");
  const { tree } = app.state;
  host.hidden = tree.length === 0;
  if (host.hidden) return fill(host);
  const now = (app.state.ids ?? app.trace?.pieces.map((piece) => piece.id) ?? []).join();
  const texts = tree.map((node) => node.ids.map(wordOf).join("").trim());
  spell(tree.flatMap((node) => node.ids));
  const item = (i) => {
    const { of, keep } = tree[i];
    const all = tokensOf(tree, i);
    const kids = tree.flatMap((node, k) => (node.of === i ? [k] : []));
    const fork = of >= 0 && keep < tokensOf(tree, of).length ? t("branch.fork", { n: keep }) : "";
    const letters = [...texts[i]];
    const name = letters.length > 26 ? `${letters.slice(0, 12).join("")}…${letters.slice(-12).join("")}` : visible(texts[i]);
    const action = { type: "button", class: "small", id: `branch-${i}`, "aria-current": all.join() === now ? "true" : null, title: t("branch.tokens", { n: all.length }) };
    return h("li", null, h("button", { ...action, onclick: () => go({ ids: all, position: null, row: null, cell: null, trail: [] }) }, `${fork} ${name}`.trim()), kids.length > 0 && h("ul", null, kids.map(item)));
  };
  fill(
    host,
    h("ul", null, tree.flatMap((node, i) => (node.of < 0 ? [item(i)] : []))),
    h("button", { type: "button", id: "branch-forget", class: "small", onclick: () => (go({ tree: [] }), document.getElementById("text").focus()) }, t("branch.forget")),
  );
}

/** To the branch that is seen, else the first. */
export function toBranches() {
  const there = /** @type {HTMLElement|null} */ (document.querySelector("#branches [aria-current]") ?? document.getElementById("branch-0"));
  if (there) return there.focus();
  document.getElementById("status-note").textContent = t("branch.none");
  say(t("branch.none"));
}
