/**
 * What comes next: the whole vocabulary from logits to the drawn token, at the speed of a slider.
 */

import * as api from "./api.js";
import { brief, fill, h, percent, visible } from "./dom.js";
import { say } from "./grid.js";
import { wordOf } from "./map.js";
import { largest, pipeline, race, softmax } from "./sample.js";
import { app, compared, go, manifest, position } from "./store.js";
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
  const logits = app.lines?.logits?.data ?? app.trace?.logits?.data;
  if (!logits || !logits.length) return null;
  const settings = draws() ? app.state.sampling : { ...app.state.sampling, temperature: 1, top_k: 0, top_p: 1, min_p: 0, repetition_penalty: 1 };
  const seen = app.trace.pieces.slice(0, place() + 1).map((piece) => piece.id);
  const steps = pipeline(logits, settings, seen);
  const drawn = steps.greedy ? { winner: steps.after.indexOf(1), time: 0 } : race(steps.after, settings.seed, seen.length);
  return { logits, steps, drawn, seen };
}

/** Probabilities of the same position without the edits. */
function before() {
  const { baseline, trace } = app;
  if (!compared() || place() !== trace.pieces.length - 1 || !baseline.logits) return null;
  return softmax(baseline.logits.data);
}

const nameOf = (id) => (says() ? visible(wordOf(id)) : (manifest.labels?.[id] ?? t(manifest.shape === "module" ? "output" : "class", { n: id })));

/** The text of pieces, without the token that a decoder is started with. */
const written = (pieces) => pieces.filter((piece, i) => i > 0 || !piece.special).map((piece) => piece.text).join("");

/** Take this token: it becomes part of the text, as itself, whatever the tokenizer would make of the text. */
export function force(id) {
  const pieces = app.trace.pieces.slice(0, place() + 1);
  const ids = [...pieces.map((piece) => piece.id), id];
  const text = written(pieces) + wordOf(id);
  go({ ids, text, position: null, row: null, cell: null, trail: [] });
  say(t("next.forced", { word: nameOf(id) }));
}

export function drawNext() {
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
  if (says() && [...listed, drawn.winner].some((id) => !api.words.has(id))) api.vocabulary().then(drawNext, () => {});
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
    draws() && sliders(found),
    trust(),
  );
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
  if (!draws()) return h("li", { class: kind, title: label }, inside);
  const action = { type: "button", title: label, "aria-label": `${label}. ${t("next.take")}`, onclick: () => force(id) };
  return h("li", null, h("button", { class: kind, ...action, "data-id": id }, inside));
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
  if (ids.length > start.length) go({ ids, text, position: null, row: null, cell: null, trail: [] });
  drawNext();
}
