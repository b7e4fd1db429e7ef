/**
 * How one number is made, again, in float64: the twin of `recompute` in inspector/provenance.py.
 *
 * A cell names its kind of arithmetic (`compute`), its terms, and each term's factors with their values.
 */

/** @typedef {{name: string|null, index: number[], value: number, label: string}} Factor */

const product = (term) => term.factors.reduce((total, factor) => total * factor.value, 1);
const cap = (x, limit) => (limit ? limit * Math.tanh(x / limit) : x);

/** What each term adds before scale and bias, in order. */
export const products = (cell) => cell.terms.map(product);

/** @returns {number} the cell's value from its factors */
export function recompute(cell) {
  const rule = RULES[cell.compute];
  if (!rule) throw new Error(`no rule for ${cell.compute}`);
  return rule(cell, products(cell), cell.params ?? {}, cell.scale ?? 1);
}

const RULES = {
  same: (cell, x, params, scale) => x[0] * scale,
  clip: (cell, x, params, scale) => Math.min(Math.max(x[0] * scale, -params.limit), params.limit),
  sum: sum,
  sigmoid: (...all) => 1 / (1 + Math.exp(-sum(...all))),
  softmax: (cell) => {
    const { exps, total, at } = softmaxRow(cell);
    return total ? exps[at] / total : 0;
  },
  norm: (cell, x, params) => {
    const mean = params.kind === "layer" ? average(x) : 0;
    const spread = average(x.map((value) => (value - mean) ** 2));
    return ((x[params.at] - mean) / Math.sqrt(spread + params.eps)) * (params.gain ?? 1) + (params.shift ?? 0);
  },
  unit: (cell, x, params) => x[params.at] / Math.max(Math.sqrt(x.reduce((a, b) => a + b * b, 0)), 1e-12),
  act: (cell, x, params) => activate(params.function, x[0]),
  gate: (cell, x, params) => {
    const [gate, up] = cell.terms.flatMap((term) => term.factors.map((factor) => factor.value));
    if (params.limit == null) return activate(params.function, gate) * up;
    const low = Math.min(gate, params.limit);
    return (low / (1 + Math.exp(-params.slope * low))) * (Math.min(Math.max(up, -params.limit), params.limit) + 1);
  },
  route: (cell, x, params, scale) => {
    const total = x.reduce((a, b) => a + b, 0);
    return (x[params.at ?? 0] / (params.renormalise ? total + 1e-20 : 1)) * scale;
  },
  topk: (cell, x, params) => {
    const preference = x.map((value, e) => value + (params.correction?.[e] ?? 0));
    const kept = preference.map((_, e) => e).filter((e) => (params.allowed ? params.allowed[e] : true));
    return kept.sort((a, b) => preference[b] - preference[a] || a - b)[params.rank];
  },
};

function sum(cell, x, params, scale) {
  return cap(x.reduce((a, b) => a + b, 0) * scale + (cell.bias ? cell.bias.value : 0), params.softcap);
}

/** The softmax of a cell, column by column: what the step view shows. */
export function softmaxRow(cell) {
  const params = cell.params ?? {};
  const scores = products(cell).map((x, j) => cap(x, params.softcap) + (params.bias?.[j] ?? 0));
  const allowed = scores.map((_, j) => (params.allowed ? Boolean(params.allowed[j]) : true));
  const seen = scores.filter((_, j) => allowed[j]);
  if (params.sink != null) seen.push(params.sink);
  const max = seen.reduce((a, b) => Math.max(a, b), -Infinity);
  const exps = scores.map((score, j) => (allowed[j] ? Math.exp(score - max) : 0));
  const sink = params.sink == null ? 0 : Math.exp(params.sink - max);
  const total = exps.reduce((a, b) => a + b, sink);
  return { scores, allowed, exps, total: allowed.some(Boolean) ? total : 0, max, sink, at: params.at };
}

const average = (x) => x.reduce((a, b) => a + b, 0) / x.length;

/** The activation functions of model/layers.py. */
export function activate(name, x) {
  switch (name) {
    case "silu":
    case "swish":
      return x / (1 + Math.exp(-x));
    case "relu":
      return Math.max(0, x);
    case "relu_squared":
    case "relu2":
      return Math.max(0, x) ** 2;
    case "gelu":
      return 0.5 * x * (1 + erf(x / Math.SQRT2));
    case "gelu_tanh":
      return 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3)));
    case "quick_gelu":
    case "gelu_quick":
      return x / (1 + Math.exp(-1.702 * x));
    case "sigmoid":
      return 1 / (1 + Math.exp(-x));
    case "tanh":
      return Math.tanh(x);
    case "softplus":
      return Math.max(x, 0) + Math.log1p(Math.exp(-Math.abs(x)));
    case "identity":
    case "none":
      return x;
    default:
      throw new Error(`no activation ${name}`);
  }
}

/** The error function to about 1e-15: a series near 0, a continued fraction of erfc outside. */
export function erf(x) {
  const size = Math.abs(x);
  if (size > 6) return Math.sign(x);
  if (size < 2.5) {
    let term = x;
    let sum = x;
    for (let n = 1; Math.abs(term) > 1e-17 * Math.abs(sum); n += 1) {
      term *= (-x * x) / n;
      sum += term / (2 * n + 1);
      if (n > 200) break;
    }
    return (2 / Math.sqrt(Math.PI)) * sum;
  }
  let fraction = 0;
  for (let n = 80; n >= 1; n -= 1) fraction = (n / 2) / (size + fraction);
  return Math.sign(x) * (1 - Math.exp(-size * size) / Math.sqrt(Math.PI) / (size + fraction));
}
