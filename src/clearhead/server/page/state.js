/**
 * What the reader sees is a function of this state, and the state is the part of the address after "#".
 *
 * `encode` leaves out what is as it was at first, in a fixed order, so that state and address are one to one.
 */

/**
 * @typedef {{name: string, kind: string, at: (number|null)[], value: number|null, on: boolean}} Edit
 * @typedef {{name: string, index: number[]}} Place
 * @typedef {{of: number, keep: number, ids: number[]}} Node the first `keep` tokens of node `of` (-1: of none), then these
 */

export const first = () => ({
  text: "", // what the model reads
  ids: /** @type {number[]|null} */ (null), // tokens that were forced: then they count, not the text
  source: "", // what an encoder-decoder reads first
  stack: 0, // which map
  position: /** @type {number|null} */ (null), // null: the last
  row: /** @type {number|null} */ (null), // null: the last row of the map
  layer: /** @type {number|null} */ (null), // null: that of the row
  head: /** @type {number|null} */ (null), // null: all heads together
  kind: "self", // self or cross attention
  value: /** @type {string|null} */ (null), // the value whose matrix is shown
  lead: /** @type {number[]} */ ([]), // its leading indices
  cell: /** @type {Place|null} */ (null), // the number that is shown
  trail: /** @type {Place[]} */ ([]), // where the walk back came from
  edits: /** @type {Edit[]} */ ([]),
  against: "", // the text that this one is compared with
  versus: "", // the weights it is compared with: "beside", or of a run a step; "": the same
  tree: /** @type {Node[]} */ ([]), // texts that were branched off one another
  watch: /** @type {number[]} */ ([]), // tokens whose logits are followed
  sampling: { temperature: 1, top_k: 0, top_p: 1, min_p: 0, repetition_penalty: 1, seed: 7 },
  paint: "p", // what the colour of the map's cells says
  wide: false, // columns wide enough for words, whatever the length
  guide: 0, // the question of the guided path; 0: none
  step: /** @type {number|null} */ (null), // of a run: the step whose weights are shown; null: the newest
  time: false, // of a run: whether the text is shown at every step
  score: "induction", // of a run: the score of the heads that is shown over time
  lang: "", // "": the browser's
  theme: "", // "": the system's
  of: "", // architecture, weights, vocabulary and machine that the numbers come from, as short hashes
});

/** @type {[string, string, {write: (x: any) => string, read: (x: string) => any}][]} */
const FIELDS = [
  ["t", "text", text()],
  ["ids", "ids", list(".")],
  ["s", "source", text()],
  ["m", "stack", number()],
  ["pos", "position", number()],
  ["row", "row", number()],
  ["layer", "layer", number()],
  ["head", "head", number()],
  ["kind", "kind", text()],
  ["v", "value", text()],
  ["lead", "lead", list(",")],
  ["at", "cell", { write: place, read: readPlace }],
  ["trail", "trail", { write: (x) => x.map(place).join(";"), read: (x) => x.split(";").map(readPlace) }],
  ["edits", "edits", { write: (x) => x.map(writeEdit).join(";"), read: (x) => x.split(";").map(readEdit) }],
  ["b", "against", text()],
  ["vs", "versus", text()],
  ["tree", "tree", { write: (x) => x.map(writeNode).join(";"), read: (x) => x.split(";").map(readNode) }],
  ["watch", "watch", list(".")],
  ["paint", "paint", text()],
  ["wide", "wide", { write: () => "1", read: () => true }],
  ["q", "guide", number()],
  ["step", "step", number()],
  ["time", "time", { write: () => "1", read: () => true }],
  ["score", "score", text()],
  ["lang", "lang", text()],
  ["theme", "theme", text()],
  ["of", "of", text()],
];
const KNOBS = [
  ["T", "temperature"],
  ["k", "top_k"],
  ["p", "top_p"],
  ["minp", "min_p"],
  ["rep", "repetition_penalty"],
  ["seed", "seed"],
];

function text() {
  return { write: (x) => x, read: (x) => x };
}
function number() {
  return { write: String, read: toNumber };
}
function list(separator) {
  return { write: (x) => x.join(separator), read: (x) => x.split(separator).map(toNumber) };
}
function toNumber(x) {
  const value = Number(x);
  if (x === "" || !Number.isFinite(value)) throw new Error(`"${x}" is no number`);
  return value;
}
function place(x) {
  return `${x.name}@${x.index.join(",")}`;
}
function readPlace(x) {
  const at = x.lastIndexOf("@");
  if (at < 1) throw new Error(`"${x}" is no place`);
  const rest = x.slice(at + 1);
  return { name: x.slice(0, at), index: rest === "" ? [] : rest.split(",").map(toNumber) };
}
function writeEdit(edit) {
  const at = edit.at.map((i) => (i === null ? "*" : i)).join(",");
  const value = edit.value === null ? "" : `=${edit.value}`;
  return `${edit.on ? "" : "-"}${edit.kind}:${edit.name}@${at}${value}`;
}
function readEdit(x) {
  const match = /^(-?)(\w+):([^@]+)@([^=]*)(?:=(.+))?$/.exec(x);
  if (!match) throw new Error(`"${x}" is no edit`);
  const [, off, kind, name, at, value] = match;
  return {
    name,
    kind,
    at: at === "" ? [] : at.split(",").map((i) => (i === "*" ? null : toNumber(i))),
    value: value === undefined ? null : toNumber(value),
    on: off === "",
  };
}

function writeNode({ of, keep, ids }) {
  return `${of < 0 ? "" : `${of},${keep}`}:${ids.join(".")}`;
}
function readNode(x, i) {
  const match = /^(?:(\d+),(\d+))?:((?:\d+(?:\.\d+)*)?)$/.exec(x);
  if (!match || Number(match[1] ?? -1) >= i) throw new Error(`"${x}" is no branch`);
  return { of: Number(match[1] ?? -1), keep: Number(match[2] ?? 0), ids: match[3] ? match[3].split(".").map(Number) : [] };
}

const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);

/** @returns {string} the fragment, without "#" */
export function encode(state) {
  const start = first();
  const parts = [];
  for (const [key, field, form] of FIELDS) {
    if (!same(state[field], start[field])) parts.push(`${key}=${escape(form.write(state[field]))}`);
  }
  for (const [key, field] of KNOBS) {
    if (state.sampling[field] !== start.sampling[field]) parts.push(`${key}=${state.sampling[field]}`);
  }
  return parts.join("&");
}

/** The state of a fragment; a part that cannot be read is left at its start and named in `problems`. */
export function decode(fragment) {
  const state = first();
  const problems = [];
  for (const part of fragment.replace(/^#/, "").split("&").filter(Boolean)) {
    const cut = part.indexOf("=");
    const key = cut < 0 ? part : part.slice(0, cut);
    try {
      const value = decodeURIComponent(cut < 0 ? "" : part.slice(cut + 1));
      const field = FIELDS.find((entry) => entry[0] === key);
      const knob = KNOBS.find((entry) => entry[0] === key);
      if (field) state[field[1]] = field[2].read(value);
      else if (knob) state.sampling[knob[1]] = toNumber(value);
      else problems.push(key);
    } catch {
      problems.push(key);
    }
  }
  return { state, problems };
}

/** Like encodeURIComponent, but what is harmless stays readable; a lone surrogate becomes U+FFFD. */
function escape(x) {
  return encodeURIComponent(x.toWellFormed ? x.toWellFormed() : x)
    .replace(/%40/g, "@")
    .replace(/%2C/g, ",")
    .replace(/%3A/g, ":")
    .replace(/%3B/g, ";");
}
