/**
 * One number: the factors it was made from, the formula with its indices, the line of code, and the same
 * arithmetic again, here in the browser. Every factor is a link to how it was made itself.
 */

import * as api from "./api.js";
import { brief, exact, fill, h } from "./dom.js";
import { say } from "./grid.js";
import { products, recompute, softmaxRow } from "./ops.js";
import { app, go, manifest, show } from "./store.js";
import { t } from "./text.js";

const SHOWN = 8;
const EPS = { float32: 2 ** -23, float64: 2 ** -52, bfloat16: 2 ** -7, float16: 2 ** -10 };
let kept = { key: "", cell: null, error: "", source: "" };

/** The cell on screen, when it has arrived. */
export const shownCell = () => kept.cell;

export function drawNumber() {
  const host = document.getElementById("number-body");
  const title = document.getElementById("number-title");
  const { cell: wanted } = app.state;
  if (!wanted || !app.trace) {
    kept = { key: "", cell: null, error: "", source: "" };
    host.removeAttribute("aria-busy");
    title.textContent = t("number.title");
    return fill(host, h("p", { class: "soft" }, t("number.none")));
  }
  const key = `${app.trace.id}|${wanted.name}|${wanted.index}`;
  if (kept.key === key && (kept.cell || kept.error)) host.removeAttribute("aria-busy");
  if (kept.key !== key) {
    const before = kept;
    kept = { key, cell: null, error: "", source: "" };
    api.cell(app.trace.id, wanted.name, wanted.index).then(
      async (cell) => {
        if (kept.key !== key) return;
        kept.cell = cell;
        drawNumber();
        say(`${wanted.name} ${exact(cell.value)}`);
        if (cell.source?.key) {
          const text = await api.source(cell.source.key).catch(() => "");
          if (kept.key === key) kept.source = text;
          drawNumber();
        }
      },
      (error) => {
        if (kept.key === key) kept.error = error.message || t("away");
        drawNumber();
      },
    );
    host.setAttribute("aria-busy", "true"); // what is shown is the number before
    if (before.cell && !document.getElementById("number-body").firstChild) fill(host, h("p", null, "…"));
    return;
  }
  if (kept.error) {
    title.textContent = t("number.title");
    return fill(host, place(wanted), h("p", { class: "soft" }, kept.error), tools(wanted));
  }
  const { cell } = kept;
  if (!cell) return;
  if (cell.unknown) {
    title.textContent = `${t("number.title")}: ${brief(cell.value)}`;
    return fill(host, place(wanted), h("p", { id: "recorded" }, exact(cell.value)), h("p", { class: "soft" }, cell.unknown), tools(wanted));
  }
  title.textContent = `${t("number.title")}: ${brief(cell.value)}`;
  fill(
    host,
    place(wanted),
    h("p", { class: "formula", id: "formula" }, formula(cell)),
    factors(cell),
    check(cell),
    cell.note && h("p", { class: "soft small" }, cell.note),
    codeLines(cell),
    tools(wanted),
  );
  const line = document.getElementById("formula");
  if (line.scrollWidth > line.clientWidth) line.tabIndex = 0; // what is cut off can be reached by keyboard
}

const place = ({ name, index }) =>
  h("p", { class: "place" }, h("code", { id: "cell-name" }, `${name}[${index.join(", ")}]`), h("span", { class: "row" }, app.state.trail.length > 0 && h("button", { type: "button", class: "small", id: "forward", onclick: forward }, t("number.forward")), h("button", { type: "button", class: "small", id: "number-close", "aria-label": t("number.close"), onclick: () => go({ cell: null, trail: [] }) }, "×")));

/** Back to the number this one was a factor of. */
export function forward() {
  const { trail } = app.state;
  if (trail.length === 0) return false;
  go({ cell: trail.at(-1), trail: trail.slice(0, -1) });
  return true;
}

/** The last parts of a name that say what it is. */
const short = (name) => {
  const parts = name.replace(/^param:/, "").split(".");
  return parts.filter((part) => !/^(blocks|\d+|decoder|encoder)$/.test(part)).slice(-2).join(".") || parts.slice(-2).join("."); // "blocks.2": what a layer gives
};

/** The same in one word, as a formula has it. */
const letter = (name) => (/(^|\.)\d+$/.test(name) ? short(name) : short(name).split(".").at(-1));

/** The names that stand in the first factors, in order: each has its colour. */
function operands(cell) {
  const names = [];
  for (const term of cell.terms.slice(0, 4)) {
    for (const factor of term.factors) {
      const name = factor.name ?? factor.label;
      if (!names.includes(name)) names.push(name);
    }
  }
  return names.slice(0, 3);
}

// ---------------------------------------------------------------- factors

function factors(cell) {
  const names = operands(cell);
  const values = products(cell);
  const weightOf = cell.compute === "softmax" ? softmaxRow(cell).exps : values;
  const order = values.map((_, i) => i).sort((a, b) => Math.abs(weightOf[b]) - Math.abs(weightOf[a]) || a - b);
  const live = cell.params?.at ?? null;
  const listed = order.slice(0, values.length <= SHOWN + 1 ? values.length : SHOWN);
  if (live !== null && cell.compute !== "gate" && !listed.includes(live)) listed[listed.length - 1] = live;
  const rest = order.filter((i) => !listed.includes(i));
  const most = Math.max(...listed.map((i) => Math.abs(weightOf[i])), 1e-30);
  const width = Math.max(...cell.terms.map((term) => term.factors.length), 0);
  const softmax = cell.compute === "softmax" ? softmaxRow(cell) : null;
  const added = cell.compute === "sum" && width === 1;
  const amounts = width > 1 || softmax;
  const restSum = rest.reduce((sum, i) => sum + weightOf[i], 0);
  const columns = Array.from({ length: width }, (_, k) => k);
  const blank = (n) => Array.from({ length: n }, () => h("td"));
  const heading = (k) => {
    const factor = cell.terms[0].factors[k];
    const same = cell.terms.every((term) => term.factors[k]?.name === factor?.name);
    return same && factor?.name ? h("span", { class: `op${names.indexOf(factor.name)}` }, letter(factor.name)) : t(added ? "number.summand" : "number.factor");
  };
  const which = (i) => {
    const moving = runs(cell, 0);
    return moving === null ? "" : String(cell.terms[i].factors[0].index[moving]);
  };
  return h(
    "div",
    { class: "scroll" },
    h(
      "table",
      { class: "factors", id: "factors" },
      h("caption", { class: "unseen" }, t(added ? "number.summands" : "number.factors", { n: values.length })),
      h(
        "thead",
        null,
        h("tr", null, h("th", { scope: "col" }, letters[0]), columns.map((k) => h("th", { scope: "col" }, heading(k))), amounts && h("th", { scope: "col" }, softmax ? "e^(s − max)" : t("number.product")), h("th", { scope: "col" }, h("span", { class: "unseen" }, t("number.bar")))),
      ),
      h(
        "tbody",
        null,
        listed.map((i) =>
          h(
            "tr",
            { class: i === live ? "chosen" : null },
            h("th", { scope: "row" }, which(i)),
            columns.map((k) => h("td", null, k > 0 && cell.terms[i].factors[k] && h("span", { class: "soft" }, "× "), cell.terms[i].factors[k] && link(cell.terms[i].factors[k], names, runs(cell, k) !== null))),
            amounts && h("td", { class: "amount" }, softmax ? (softmax.allowed[i] ? exact(Number(softmax.exps[i].toPrecision(4))) : t("masked")) : brief(values[i])),
            h("td", { class: "meters" }, signedBar(weightOf[i] / most)),
          ),
        ),
        rest.length > 0 &&
          h("tr", null, h("th", { scope: "row", colspan: amounts ? 1 + width : 1 }, t(softmax ? "number.others" : "number.smaller", { n: rest.length })), !amounts && blank(width - 1), h("td", { class: "amount" }, brief(restSum)), h("td", { class: "meters" }, signedBar(restSum / most))),
        cell.scale !== 1 && cell.scale !== undefined && h("tr", null, h("th", { scope: "row", colspan: amounts ? 1 + width : width }, `× ${t("number.scale")}`), h("td", { class: "amount" }, exact(cell.scale)), h("td")),
        cell.bias && h("tr", null, h("th", { scope: "row", colspan: amounts ? 1 + width : width }, `+ ${t("number.bias")}`), h("td", { class: "amount" }, link(cell.bias, names)), h("td")),
      ),
    ),
  );
}

/** A factor: a link to how it was made, unless it is a constant or a weight. */
function link(factor, names, plain = false) {
  const color = names.indexOf(factor.name ?? factor.label);
  const kind = color >= 0 ? `op${color}` : "";
  const what = factor.name ? `${factor.name}[${factor.index.join(", ")}]` : factor.label;
  const sign = factor.value < 0 ? "minus" : "plus"; // the number as its bar, its name as in the formula
  const label = plain ? null : h("span", { class: `which ${kind}` }, factor.name ? `${short(factor.name)} ${factor.index.slice(-2).join(",")}` : factor.label);
  if (!factor.name || factor.name.startsWith("param:") || factor.name === "tokens") {
    return h("span", { class: `factor ${sign}`, title: `${what} ${factor.label}` }, brief(factor.value), label);
  }
  return h(
    "button",
    { type: "button", class: `factor link ${sign}`, title: what, "aria-label": `${brief(factor.value)}, ${what}: ${t("number.why")}`, onclick: () => show(factor.name, factor.index, true) },
    brief(factor.value),
    label,
  );
}

/** A bar to the right of its middle, or to the left: shares from -1 to 1. */
export function signedBar(share) {
  const size = Math.min(1, Math.abs(share));
  if (!Number.isFinite(size)) return "";
  return h("span", { class: `signed ${share < 0 ? "minus" : "plus"}`, "aria-hidden": "true" }, h("span", { style: { width: `${50 * size}%`, "margin-left": share < 0 ? `${50 - 50 * size}%` : "50%" } }));
}

/** The same number again, in float64, and how far it is from the recorded one. */
function check(cell) {
  let again;
  try {
    again = recompute(cell);
  } catch (error) {
    return h("p", { class: "soft" }, error.message);
  }
  const difference = Math.abs(again - cell.value);
  const eps = EPS[manifest.dtype] ?? EPS.float32;
  const units = difference / (eps * Math.max(Math.abs(cell.value), 1e-30));
  const fine = difference <= Math.max(cell.tolerance ?? 0, eps * Math.abs(cell.value) * 8) || again === cell.value;
  return h(
    "dl",
    { class: "proof" },
    h("div", null, h("dt", null, t("number.again")), h("dd", { id: "again" }, String(again))),
    h("div", null, h("dt", null, t("number.recorded")), h("dd", { id: "recorded" }, exact(cell.value))),
    h("div", { class: fine ? "fine" : "off" }, h("dt", null, t("number.difference")), h("dd", { id: "difference" }, `${difference === 0 ? "0" : difference.toExponential(1)} · ${units < 1000 ? units.toFixed(1) : units.toExponential(1)} eps ${fine ? "✓" : "✗"}`)),
    h("div", { class: "soft small" }, h("dt", null, "eps"), h("dd", null, t("number.eps", { dtype: manifest.dtype, eps: eps.toExponential(1) }))),
  );
}

// ---------------------------------------------------------------- formula

const letters = "dfmn";

function symbol(name, index, color, varying = null) {
  const from = index.length > 2 && index[0] === 0 ? 1 : 0; // there is one text: its number says nothing
  const parts = index.map((i, k) => (k === varying ? letters[0] : String(i))).slice(from);
  return h("msub", { class: color >= 0 ? `op${color}` : null }, h("mi", { mathvariant: "normal" }, letter(name)), h("mrow", null, parts.flatMap((part, k) => [k > 0 ? h("mo", null, ",") : null, part === letters[0] ? h("mi", null, part) : h("mn", null, part)])));
}

/** Which axis of a factor runs through the terms. */
function runs(cell, k) {
  const [a, b] = [cell.terms[0]?.factors[k], cell.terms[1]?.factors[k]];
  if (!a || !b || a.name !== b.name) return null;
  const moving = a.index.findIndex((i, axis) => i !== b.index[axis]);
  return moving < 0 ? null : moving;
}

/** MathML of the arithmetic with the indices of this very cell; plain text where that says it better. */
function formula(cell) {
  const names = operands(cell);
  const left = symbol(cell.name, cell.index, -1);
  const equals = h("mo", null, "=");
  const wrap = (...parts) => h("math", { display: "block" }, h("mrow", null, left, equals, parts));
  const n = cell.terms.length;
  const sigma = () => h("munderover", null, h("mo", { movablelimits: "false" }, "∑"), h("mrow", null, h("mi", null, letters[0]), h("mo", null, "="), h("mn", null, "0")), h("mn", null, String(n - 1)));
  const of = (factor, varying) => symbol(factor.name ?? factor.label, factor.name ? factor.index : [], names.indexOf(factor.name ?? factor.label), varying);
  if (cell.compute === "sum" && n > 3 && runs(cell, 0) !== null) {
    const { factors } = cell.terms[0];
    return wrap(
      cell.scale !== 1 ? [h("mn", null, String(Number(cell.scale.toPrecision(6)))), h("mo", null, "·")] : null,
      sigma(),
      factors.flatMap((factor, k) => [k > 0 ? h("mo", null, "·") : null, of(factor, runs(cell, k))]),
      cell.bias ? [h("mo", null, "+"), symbol(cell.bias.name, cell.bias.index, -1)] : null,
    );
  }
  if (cell.compute === "softmax" && n > 0) {
    const score = (varying, index) => h("msup", null, h("mi", null, "e"), h("mrow", null, symbol(cell.terms[0].factors[0].name, index, 0, varying), h("mo", null, "−"), h("mi", { mathvariant: "normal" }, "max")));
    const first = cell.terms[0].factors[0];
    const at = [...first.index.slice(0, -1), cell.params.at];
    return wrap(h("mfrac", null, score(null, at), h("mrow", null, h("munder", null, h("mo", null, "∑"), h("mi", null, letters[0])), score(at.length - 1, at))));
  }
  if (cell.compute === "norm" && n > 0) {
    const x = cell.terms[cell.params.at]?.factors[0] ?? cell.terms[0].factors[0];
    const mean = cell.params.kind === "layer";
    return wrap(
      h("mfrac", null, h("mrow", null, symbol(x.name, x.index, 0), mean ? [h("mo", null, "−"), h("mi", null, "μ")] : null), h("msqrt", null, mean ? h("msup", null, h("mi", null, "σ"), h("mn", null, "2")) : h("mrow", null, h("mi", { mathvariant: "normal" }, "mean"), h("mo", null, "("), h("msup", null, h("mi", null, "x"), h("mn", null, "2")), h("mo", null, ")")), h("mo", null, "+"), h("mi", null, "ε"))),
      h("mo", null, "·"),
      h("mn", null, exact(cell.params.gain ?? 1)),
      cell.params.shift ? [h("mo", null, "+"), h("mn", null, exact(cell.params.shift))] : null,
    );
  }
  if (cell.compute === "sum" && n > 0 && n <= 3) {
    return wrap(
      cell.terms.flatMap((term, i) => [i > 0 ? h("mo", null, "+") : null, term.factors.flatMap((factor, k) => [k > 0 ? h("mo", null, "·") : null, factor.name ? of(factor, null) : h("mn", null, brief(factor.value).replace("+", ""))])]),
      cell.scale !== 1 ? [h("mo", null, "·"), h("mn", null, exact(cell.scale))] : null,
      cell.bias ? [h("mo", null, "+"), symbol(cell.bias.name, cell.bias.index, -1)] : null,
    );
  }
  return [cell.formula].flat().join("\n");
}

// ---------------------------------------------------------------- source and edits

/** The line of code that named the value, with its operands in their colours. */
function codeLines(cell) {
  if (!kept.source || !cell.source?.line) return cell.source?.key ? h("p", { class: "soft small" }, `${cell.source.key}:${cell.source.line}`) : null;
  const lines = kept.source.split("\n");
  const from = Math.max(0, cell.source.line - 3);
  const names = operands(cell);
  const colorOf = (word) => {
    const target = cell.source.code?.[word];
    return target ? names.findIndex((name) => name.replace(/^param:/, "").endsWith(target)) : -1;
  };
  return h(
    "figure",
    { class: "code" },
    h("figcaption", { id: "source-place" }, `${cell.source.key}:${cell.source.line}`),
    h(
      "pre",
      { tabindex: "0" },
      lines.slice(from, cell.source.line + 2).map((line, k) =>
        h(
          "span",
          { class: from + k + 1 === cell.source.line ? "line here" : "line" },
          h("span", { class: "no", "aria-hidden": "true" }, `${from + k + 1} `),
          from + k + 1 === cell.source.line ? line.split(/(\b\w+\b)/).map((word) => (colorOf(word) >= 0 ? h("b", { class: `op${colorOf(word)}` }, word) : word)) : line,
          "\n",
        ),
      ),
    ),
  );
}

/** Change this very number. */
function tools({ name, index }) {
  const edit = (kind, value = null) => go({ edits: [...app.state.edits, { name, kind, at: index, value, on: true }] });
  if (name.startsWith("param:") || manifest.capabilities?.edit === false) return null;
  return h(
    "div",
    { class: "row" },
    h("button", { type: "button", class: "small", id: "edit-zero", onclick: () => edit("zero") }, t("edit.zero")),
    h("label", null, `${t("edit.scale")} `, h("input", { type: "number", id: "edit-scale", step: "0.1", value: "2", class: "short" })),
    h("button", { type: "button", class: "small", onclick: () => edit("scale", Number(document.getElementById("edit-scale").value)) }, t("edit.apply")),
    h("button", { type: "button", class: "small", onclick: () => document.getElementById("python-open").click() }, t("take.python")),
  );
}
