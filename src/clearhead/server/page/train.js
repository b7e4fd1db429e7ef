/**
 * A run: its curves and samples as they stand in its log, and one sentence at every step whose weights were
 * kept. The scrubber chooses the step; every other view of the page is then of that step.
 */

import * as api from "./api.js";
import { sequential } from "./colors.js";
import { fill, h, percent, visible } from "./dom.js";
import { makeGrid, say } from "./grid.js";
import { MEASURES } from "./heads.js";
import { CanvasPaint } from "./paint.js";
import { app, ask, go, redraw } from "./store.js";
import { t } from "./text.js";

const at = (id) => document.getElementById(id);
const CURVES = [
  ["loss", "loss"],
  ["lr", "lr"],
  ["norm", "norm"],
  ["tokens_per_second", "speed"],
];
const HIGH = 92;
const MOST_LINES = 8000;

/** What the server told of the run: see its `summary`. */
let run = null;
let changes = 0;
let failed = "";

/** What each step makes of a text: {key, chapters: step -> chapter, done}. */
let story = { key: "", chapters: new Map(), done: false };
let telling = null;
let timer = 0;
let grid = null;
let seen = [0, 0];

export function trainViews() {
  if (!api.runName) return;
  at("train").hidden = false;
  at("curves").replaceChildren(
    ...CURVES.map(([name]) => h("figure", { class: "curve" }, h("figcaption", { id: `caption-${name}` }), h("canvas", { id: `curve-${name}`, role: "img", onclick: chooseAt }))),
  );
  grid = makeGrid(at("time-grid"), {
    label: () => {
      const { rows, steps } = pictureOrNone();
      return t("train.grid", { name: t(`measure.${app.state.score}`), rows: rows.length, steps: steps.length });
    },
    size: () => {
      const { rows, steps } = pictureOrNone();
      return [Math.max(1, rows.length), Math.max(1, steps.length)];
    },
    at: () => {
      const { rows, steps } = pictureOrNone();
      return [Math.min(seen[0], Math.max(0, rows.length - 1)), columnOf(steps)];
    },
    describe: describeCell,
    move: (row, column) => {
      seen = [row, column];
      const { steps } = pictureOrNone();
      const nearest = (step) => run.milestones.reduce((best, one, i) => (Math.abs(one - step) < Math.abs(run.milestones[best] - step) ? i : best), 0);
      if (steps.length) choose(nearest(steps[column]));
    },
    open: (row) => {
      const one = pictureOrNone().rows[row];
      if (one) go({ layer: one.layer, head: one.head, kind: "self", value: null });
    },
    hit: (x, y) => {
      const found = pictureOrNone();
      const g = places(at("time-grid").clientWidth, found);
      const place = [Math.floor((y - 2) / g.high), Math.floor((x - g.left) / g.wide)];
      return place[0] >= 0 && place[0] < found.rows.length && place[1] >= 0 && place[1] < found.steps.length ? place : null;
    },
    resized: redraw,
    hover: (text) => {
      at("time-note").textContent = text;
    },
    draw: drawTime,
  });
  at("time").addEventListener("toggle", () => at("time").open !== app.state.time && go({ time: at("time").open }, true));
  document.addEventListener("visibilitychange", () => (document.hidden ? api.unfollow() : load()));
  load();
}

const pictureOrNone = () => (run ? picture() : { rows: [], steps: [], value: () => null, note: "" });

/** Ask for all of the run, then for what is added to it. */
async function load() {
  try {
    run = await api.run();
    changes += 1;
    if (!document.hidden) api.follow(run.place, hear, load);
  } catch (error) {
    failed = error.message || "away";
    setTimeout(load, 2000);
  }
  redraw();
}

/** News of the run. */
function hear(event) {
  if (event.anew || run.lines.step.length > MOST_LINES) return true; // ask for all again
  for (const line of event.lines ?? []) {
    if ("validation_loss" in line) {
      if (line.step > (run.validation.at(-1)?.step ?? -1)) run.validation.push(line);
    } else if (line.step > (run.lines.step.at(-1) ?? -1)) {
      if (Object.keys(line).some((name) => name.startsWith("weight_norm/"))) run.norms.push(line);
      for (const name of Object.keys(run.lines)) run.lines[name].push(line[name] ?? null);
      run.done = line.step + 1;
    }
  }
  const before = run.newest;
  for (const name of ["milestones", "samples", "newest"]) if (event[name] !== undefined) run[name] = event[name];
  changes += 1;
  if (run.newest !== before && app.state.step === null) ask(true); // the newest is what is shown
  redraw();
  return false;
}

/** The step whose weights the page shows. */
const shown = () => app.state.step ?? app.trace?.step ?? run.newest;

/** The place of that step among the kept ones; of a step that is gone, the nearest below. */
function chosen() {
  const place = (run?.milestones ?? []).findLastIndex((step) => step <= shown());
  return Math.max(0, place);
}

/** The steps whose weights can be shown or compared with. */
export const keptSteps = () => run?.milestones ?? [];

function choose(place) {
  const step = run.milestones[Math.max(0, Math.min(place, run.milestones.length - 1))];
  if (step !== undefined) go({ step: step === run.newest ? null : step }, true);
}

/** The line of the log that was written when a step was done; of a long log the nearest one that is drawn. */
function lineAt(step) {
  const { lines } = run;
  let i = lines.step.findLastIndex((n) => n + 1 <= step);
  if (i < 0) i = 0;
  return lines.step.length ? Object.fromEntries(Object.keys(lines).map((name) => [name, lines[name][i]])) : null;
}

const validationAt = (step) => run.validation.findLast((line) => line.step + 1 <= step) ?? null;

// ---------------------------------------------------------------- drawing

export function drawTrain() {
  if (!api.runName) return;
  const title = run ? t("train.title", { name: run.name, done: run.done, steps: run.steps ?? "?" }) : t("train.wait", { name: api.runName });
  at("train-title").textContent = title;
  at("train-note").textContent = run ? note() : failed;
  if (!run) return;
  drawScrubber();
  drawCurves();
  drawSamples();
  const { time } = app.state;
  if (at("time").open !== time) at("time").open = time;
  if (time) {
    tell();
    const seen = picture();
    drawTools(seen);
    fill(at("time-table"), story.chapters.size ? table() : h("p", { class: "soft" }, t("running")));
    at("time-grid").hidden = seen.rows.length === 0;
    if (seen.rows.length) grid.draw();
  }
}

function note() {
  const { training_seconds: steps, probe_seconds: probes } = run.cost;
  const parts = [t("train.kept", { n: run.milestones.length })];
  if (steps > 0) parts.push(t("train.cost", { p: percent(probes / steps, 2) }));
  if (run.every > 1) parts.push(t("train.every", { n: run.every }));
  return parts.join(" · ");
}

function drawScrubber() {
  const { milestones, newest } = run;
  const place = chosen();
  const step = shown();
  const label = t(app.state.step === null ? "train.newest.at" : "train.at", { step });
  const most = Math.max(2, Math.floor((at("scrub").clientWidth - 280) / 52));
  const each = Math.ceil(milestones.length / most);
  fill(
    at("scrub"),
    h("label", { for: "step", class: "scrub-name" }, t("train.step")),
    h(
      "div",
      { class: "scrub-line" },
      h("input", { type: "range", id: "step", min: 0, max: Math.max(0, milestones.length - 1), step: 1, value: place, "aria-valuetext": label, oninput: (event) => choose(Number(event.target.value)) }),
      h("div", { class: "ticks", "aria-hidden": "true" }, milestones.map((one, i) => h("span", { class: one === step ? "here" : "" }, i % each === 0 || one === step ? String(one) : ""))),
    ),
    h("output", { for: "step", id: "step-shown" }, label),
    h("button", { type: "button", id: "step-newest", class: "small", "aria-pressed": String(app.state.step === null), onclick: () => (go({ step: null }, true), say(t("train.newest.at", { step: newest }))) }, t("train.newest")),
    h("button", { type: "button", id: "step-pin", class: "small", "aria-pressed": String(pinned()), onclick: pin }, pinned() ? t("train.pinned", { step: app.state.versus }) : t("train.pin")),
  );
  const input = at("step");
  if (Number(input.value) !== place) input.value = String(place);
}

/** Compare with the step that is shown now, whatever step is chosen next; or no longer. */
const pinned = () => app.state.versus !== "" && app.state.versus !== "beside";
const pin = () => (pinned() ? go({ versus: "", paint: "p" }) : go({ versus: String(shown()), paint: "delta" }));

function drawCurves() {
  const line = lineAt(shown());
  const validation = validationAt(shown());
  const own = (found) => (found && found.step + 1 !== shown() ? ` (${t("train.at", { step: found.step + 1 })})` : ""); // not of this very step
  const bold = (name, value, mark = "") => h("b", { id: `value-${name}`, title: String(value ?? "") }, mark + readable(value));
  for (const [name, key] of CURVES) {
    const more = name === "loss" && validation ? [` · ${t("curve.validation")} `, bold("validation_loss", validation.validation_loss, "● "), own(validation)] : [];
    fill(at(`caption-${name}`), `${t(`curve.${key}`)} `, bold(name, line?.[name]), own(line), more);
    at(`curve-${name}`).setAttribute("aria-label", t("curve.label", { name: t(`curve.${key}`), n: run.lines.step.length, step: shown(), value: readable(line?.[name]) }));
    drawCurve(at(`curve-${name}`), name);
  }
}

const readable = (x) => (x === null || x === undefined ? "–" : Math.abs(x) >= 1000 ? Math.round(x).toLocaleString("en-US").replace(/,/g, " ") : Math.abs(x) >= 100 ? x.toFixed(1) : Math.abs(x) >= 0.01 || x === 0 ? x.toFixed(4) : x.toExponential(2).replace("-", "−"));

const LEFT = 52;
const room = (canvas) => canvas.parentElement.clientWidth;
const lastStep = () => Math.max(1, run.done, run.newest);

/** The kept step that is nearest to where a curve was clicked. */
function chooseAt(event) {
  const canvas = event.currentTarget;
  const share = (event.offsetX - LEFT) / (room(canvas) - LEFT - 6);
  const step = share * lastStep();
  const distance = (one) => Math.abs(one - step);
  choose(run.milestones.reduce((best, one, i) => (distance(one) < distance(run.milestones[best]) ? i : best), 0));
}

function drawCurve(canvas, name) {
  const width = room(canvas);
  const key = [changes, width, shown(), app.theme.dark, app.theme.forced].join();
  if (canvas.$key === key) return;
  canvas.$key = key;
  const { lines, validation } = run;
  const points = lines[name].map((value, i) => [lines.step[i] + 1, value]);
  const dots = name === "loss" ? validation.map((line) => [line.step + 1, line.validation_loss]) : [];
  const values = [...points, ...dots].map(([, value]) => value).filter((value) => value !== null);
  const paint = new CanvasPaint(canvas, width, HIGH);
  if (!values.length) return;
  const { theme } = app;
  const low = values.reduce((a, b) => Math.min(a, b));
  const high = values.reduce((a, b) => Math.max(a, b));
  const [top, bottom, right] = [8, HIGH - 18, width - 6];
  const x = (step) => LEFT + ((right - LEFT) * step) / lastStep();
  const y = (value) => (high === low ? (top + bottom) / 2 : bottom - ((bottom - top) * (value - low)) / (high - low));
  const c = paint.context;
  const stroke = (from, to, color, wide, dash = []) => {
    c.beginPath();
    c.setLineDash(dash);
    c.moveTo(...from);
    c.lineTo(...to);
    c.strokeStyle = color;
    c.lineWidth = wide;
    c.stroke();
    c.setLineDash([]);
  };
  stroke([LEFT, bottom], [right, bottom], theme.line, 1);
  stroke([LEFT, top], [right, top], theme.line, 1);
  paint.text(readable(high), LEFT - 5, top + 4, { size: 10.5, fill: theme.soft, anchor: "right" });
  if (high !== low) paint.text(readable(low), LEFT - 5, bottom + 3, { size: 10.5, fill: theme.soft, anchor: "right" });
  paint.text("0", LEFT, HIGH - 4, { size: 10.5, fill: theme.soft });
  paint.text(String(lastStep()), right, HIGH - 4, { size: 10.5, fill: theme.soft, anchor: "right" });
  for (const step of run.milestones) stroke([x(step), bottom], [x(step), bottom + 4], theme.soft, 1);
  c.beginPath();
  let pen = false;
  for (const [step, value] of points) {
    if (value === null) pen = false; // not a finite number: a gap
    else if (pen) c.lineTo(x(step), y(value));
    else {
      c.moveTo(x(step), y(value));
      pen = true;
    }
  }
  c.strokeStyle = theme.plus;
  c.lineWidth = 1.4;
  c.lineJoin = "round";
  c.stroke();
  for (const [step, value] of dots) {
    if (value === null) continue;
    c.beginPath();
    c.arc(x(step), y(value), 3, 0, 2 * Math.PI);
    c.fillStyle = theme.minus;
    c.fill();
  }
  stroke([x(shown()), top], [x(shown()), bottom + 4], theme.accent, 1.6, [4, 3]);
}

function drawSamples() {
  const { samples } = run;
  const now = samples.findLast((sample) => sample.step <= shown());
  const one = (sample) => h("li", null, h("span", { class: "soft small" }, t("train.sample", { step: sample.step })), h("pre", { class: "sample" }, sample.text));
  fill(
    at("samples"),
    samples.length > 0
      ? [
          now ? h("ol", { id: "sample-now" }, one(now)) : h("p", { class: "soft small", id: "sample-none" }, t("train.samples.before", { step: samples[0].step })),
          samples.length > 1 && h("details", { id: "sample-all", open: at("sample-all")?.open }, h("summary", null, t("train.samples", { n: samples.length })), h("div", { class: "samples", tabindex: "0", role: "region", "aria-label": t("train.samples", { n: samples.length }) }, h("ol", null, samples.map(one)))),
        ]
      : h("p", { class: "soft small" }, t("train.samples.none")),
  );
}

// ---------------------------------------------------------------- one sentence over time

/** Let every kept step read the text, once the reader has stopped typing. */
function tell() {
  const { trace } = app;
  if (!trace || app.stale) return;
  const ids = trace.pieces.map((piece) => piece.id);
  const key = JSON.stringify([ids, run.milestones]);
  if (story.key === key) return;
  const same = story.ids === ids.join();
  story = { key, ids: ids.join(), chapters: same ? story.chapters : new Map(), done: false };
  clearTimeout(timer);
  telling?.abort();
  timer = setTimeout(() => listen(story, ids), same ? 0 : 400);
}

async function listen(mine, ids) {
  telling = new AbortController();
  try {
    for await (const chapter of api.story({ ids }, telling.signal)) {
      if (story !== mine) return;
      if (!chapter.error) mine.chapters.set(chapter.step, chapter);
      redraw();
    }
    mine.done = true;
  } catch (error) {
    if (error.name !== "AbortError") at("time-note").textContent = error.message;
  }
  redraw();
}

const HEALTH = ["update", "idle", "load"];

/** Rows, steps and values of the picture: a score of every head, or how the parts of the model fare. */
function picture() {
  const { score } = app.state;
  const chapters = run.milestones.map((step) => story.chapters.get(step));
  const any = chapters.find(Boolean);
  if (!HEALTH.includes(score)) {
    const rows = (any?.scores ?? []).flatMap((heads, layer) => heads.map((_, head) => ({ name: `${t("layer")} ${layer}, ${t("head")} ${head}`, label: `${layer}.${head}`, layer, head })));
    const value = ({ layer, head }, column) => chapters[column]?.scores[layer]?.[head]?.[MEASURES.indexOf(score)];
    return { rows, steps: run.milestones, value, note: "" };
  }
  const noted = run.norms.map((line) => [line.step + 1, notedIn(line, score)]).filter(([, parts]) => parts.size);
  const told = chapters.map((chapter) => chapter && toldIn(chapter, score));
  const [steps, columns] = noted.length ? [noted.map(([step]) => step), noted.map(([, parts]) => parts)] : [run.milestones, told];
  const names = new Set(columns.flatMap((parts) => [...(parts?.keys() ?? [])]));
  const rows = [...names].map((name) => ({ name, label: short(name), layer: Number(/blocks\.(\d+)/.exec(name)?.[1] ?? 0), head: null }));
  return { rows, steps, value: ({ name }, column) => columns[column]?.get(name), note: t(noted.length ? `train.noted.${score}` : `train.told.${score}`) };
}

/** What the trainer noted in a line of its log: part -> number. */
function notedIn(line, score) {
  const found = new Map();
  const start = { update: "update_norm/", idle: "idle_units/", load: "expert_load/" }[score];
  for (const [name, value] of Object.entries(line)) {
    if (!name.startsWith(start)) continue;
    const part = name.slice(start.length);
    found.set(part, score === "update" ? value / line[`weight_norm/${part}`] : value);
  }
  return found;
}

/** The same from the kept weights and this text. */
function toldIn(chapter, score) {
  if (score === "update") return new Map(Object.entries(chapter.moved.parts));
  if (score === "idle") return new Map(Object.entries(chapter.idle));
  return new Map(Object.entries(chapter.experts).flatMap(([path, loads]) => loads.map((n, i) => [`${path} · ${i}`, n / loads.reduce((a, b) => a + b, 0)])));
}

/** "decoder.blocks.3.attn" -> "3.attn" */
const short = (name) => name.replace(/^(\w+\.)?blocks\./, "").replace(/\.ff · /, "·");

const most = ({ rows, steps, value }) => rows.reduce((most, row) => steps.reduce((high, _, column) => Math.max(high, value(row, column) ?? 0), most), 0) || 1;

/** The column of the step that is shown: that step, else the nearest below. */
const columnOf = (steps) => Math.max(0, steps.findLastIndex((step) => step <= shown()));

const figure = (value) => (value === undefined || value === null ? "…" : MEASURES.includes(app.state.score) ? value.toFixed(3) : readable(value));

function describeCell(row, column) {
  if (!run) return t("running");
  const { rows, steps, value } = picture();
  if (!rows[row]) return t("running");
  return `${rows[row].name}, ${t("train.at", { step: steps[column] })}: ${t(`measure.${app.state.score}`)} ${figure(value(rows[row], column))}`;
}

function places(width, { rows, steps }) {
  const left = MEASURES.includes(app.state.score) ? 34 : 86;
  return { left, wide: Math.max(4, Math.min(46, (width - left - 4) / Math.max(1, steps.length))), high: Math.max(9, Math.min(20, 320 / Math.max(1, rows.length))) };
}

function drawTime(canvas, width) {
  const seen = picture();
  const { rows, steps, value } = seen;
  const g = places(width, seen);
  const { theme } = app;
  const paint = new CanvasPaint(canvas, width, rows.length * g.high + 22);
  const limit = most(seen);
  rows.forEach((one, row) => {
    if (g.high >= 12 || !one.head) paint.text(one.label, g.left - 6, 2 + row * g.high + g.high / 2 + 4, { size: Math.min(11, g.high), fill: theme.soft, anchor: "right", width: g.left - 8 });
    steps.forEach((step, column) => {
      const share = value(one, column) ?? null;
      const [x, y] = [g.left + column * g.wide, 2 + row * g.high];
      if (share === null) paint.hatch(x, y, g.wide - 1, g.high - 1, theme.line);
      else paint.rect(x, y, g.wide - 1, g.high - 1, { fill: `rgb(${sequential(theme, share / limit).join()})` });
    });
  });
  const every = Math.ceil(36 / g.wide);
  steps.forEach((step, column) => {
    if (column % every === 0) paint.text(String(step), g.left + (column + 0.5) * g.wide, rows.length * g.high + 16, { size: 10.5, fill: theme.soft });
  });
  paint.rect(g.left + columnOf(steps) * g.wide - 1, 1, g.wide, rows.length * g.high + 1, { stroke: theme.accent, strokeWidth: 2 });
}

function drawTools(seen) {
  const { score } = app.state;
  const experts = [...story.chapters.values()].some((chapter) => Object.keys(chapter.experts).length);
  const names = [...MEASURES, ...HEALTH].filter((name) => name !== "load" || experts || name === score);
  fill(
    at("time-tools"),
    h("label", null, `${t("heads.measure")} `, h("select", { id: "time-score", onchange: (event) => go({ score: event.target.value }, true) }, names.map((name) => h("option", { value: name, selected: score === name }, t(`measure.${name}`))))),
    h("span", { class: "soft small" }, t(seen.note ? "train.legend.parts" : "train.legend", { high: figure(most(seen)) })),
    repeats(score) && h("p", { class: "soft small", id: "time-empty" }, t("train.repeats", { name: t(`measure.${score}`) })),
    seen.note && h("p", { class: "soft small", id: "time-source" }, seen.note),
  );
}

/** Whether a score looks for tokens that stand twice in the text, and none does. */
function repeats(score) {
  const ids = (app.trace?.pieces ?? []).map((piece) => piece.id);
  return ["induction", "same"].includes(score) && ids.length > 0 && new Set(ids).size === ids.length;
}

/** Each kept step in a row: its losses in the log, and what it makes of the text. */
function table() {
  const experts = [...story.chapters.values()].some((chapter) => Object.keys(chapter.experts).length);
  const head = ["step", "loss", "validation", "own", "word", "p", ...(experts ? ["experts"] : [])];
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": t("train.table") },
    h(
      "table",
      null,
      h("caption", null, t("train.table")),
      h("thead", null, h("tr", null, head.map((name) => h("th", { scope: "col" }, t(`train.col.${name}`))))),
      h(
        "tbody",
        null,
        run.milestones.map((step, i) => {
          const chapter = story.chapters.get(step);
          const line = step > 0 ? lineAt(step) : null;
          const validation = validationAt(step);
          const here = validation && validation.step + 1 === step;
          return h(
            "tr",
            { class: i === chosen() ? "chosen" : null },
            h("th", { scope: "row" }, h("button", { type: "button", class: "link", onclick: () => choose(i) }, String(step))),
            h("td", null, line && line.step + 1 === step ? readable(line.loss) : "–"),
            h("td", null, here ? readable(validation.validation_loss) : "–"),
            h("td", null, chapter ? (chapter.loss === null ? "–" : readable(chapter.loss)) : "…"),
            h("td", null, chapter ? visible(chapter.word) : "…"),
            h("td", null, chapter ? percent(chapter.p) : "…"),
            experts && h("td", null, chapter ? Object.values(chapter.experts).map((loads) => loads.join(" ")).join(" | ") : "…"),
          );
        }),
      ),
    ),
  );
}
