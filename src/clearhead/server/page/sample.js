/**
 * From logits to the next token, over the whole vocabulary: the twin of generation/sample.py.
 *
 *   repetition penalty -> temperature -> top-k -> top-p -> min-p -> softmax -> draw
 *
 * A token that is out has -Infinity. Temperature 0 takes the likeliest; nothing is drawn.
 */

/** @typedef {{temperature: number, top_k: number, top_p: number, min_p: number, repetition_penalty: number, seed: number}} Sampling */

export function softmax(logits) {
  let max = -Infinity;
  for (const value of logits) if (value > max) max = value;
  const out = new Float64Array(logits.length);
  let total = 0;
  for (let i = 0; i < logits.length; i += 1) {
    out[i] = Math.exp(logits[i] - max);
    total += out[i];
  }
  for (let i = 0; i < out.length; i += 1) out[i] /= total;
  return out;
}

/**
 * Every step of the way, so that each can be shown.
 * @param {ArrayLike<number>} logits
 * @param {Sampling} sampling
 * @param {Iterable<number>} seen ids that occurred, for the repetition penalty
 */
export function pipeline(logits, sampling, seen = []) {
  const penalised = penalise(logits, seen, sampling.repetition_penalty);
  const before = softmax(logits);
  if (sampling.temperature === 0) {
    const winner = argmax(penalised);
    const after = new Float64Array(logits.length);
    after[winner] = 1;
    return { before, penalised, tempered: penalised, after, kept: 1, out: cutNames(), greedy: true };
  }
  const t = sampling.temperature;
  const tempered = t === 1 ? penalised : Float64Array.from(penalised, (x) => x / t);
  const order = descending(tempered);
  const out = cutNames();
  const k = keepTopK(tempered, order, sampling.top_k);
  out.top_k = order.length - k;
  const p = keepTopP(tempered, order.subarray(0, k), sampling.top_p);
  out.top_p = k - p;
  const m = keepMinP(tempered, order.subarray(0, p), sampling.min_p);
  out.min_p = p - m;
  const cut = new Float64Array(logits.length).fill(-Infinity);
  for (const id of order.subarray(0, m)) cut[id] = tempered[id];
  return { before, penalised, tempered, after: softmax(cut), kept: m, out, greedy: false };
}

const cutNames = () => ({ top_k: 0, top_p: 0, min_p: 0 });

/** s / penalty where s >= 0, s * penalty where s < 0, once for each token that occurred. */
export function penalise(logits, seen, penalty) {
  const out = Float64Array.from(logits);
  if (penalty === 1) return out;
  for (const id of new Set(seen)) out[id] = out[id] < 0 ? out[id] * penalty : out[id] / penalty;
  return out;
}

/** Ids from the largest to the smallest value; of equal ones the first comes first. */
export function descending(values) {
  const order = Uint32Array.from(values, (_, i) => i);
  return order.sort((a, b) => values[b] - values[a] || a - b);
}

/** The `n` ids of the largest values, without sorting all. */
export function largest(values, n) {
  const best = [];
  for (let i = 0; i < values.length; i += 1) {
    if (best.length === n && values[i] <= values[best[n - 1]]) continue;
    let at = best.length;
    while (at > 0 && values[best[at - 1]] < values[i]) at -= 1;
    best.splice(at, 0, i);
    if (best.length > n) best.pop();
  }
  return best;
}

export const argmax = (values) => largest(values, 1)[0];

/** How many of `order` stay with top-k: ties with the k-th stay. */
function keepTopK(values, order, k) {
  if (k === 0 || k >= order.length) return order.length;
  let kept = k;
  while (kept < order.length && values[order[kept]] === values[order[k - 1]]) kept += 1;
  return kept;
}

/** From the small end, tokens drop while their sum is at most 1 - p; the likeliest stays. */
function keepTopP(values, order, p) {
  if (p === 1) return order.length;
  const probability = softmax(Float64Array.from(order, (id) => values[id]));
  let kept = order.length;
  let sum = 0;
  while (kept > 1 && sum + probability[kept - 1] <= 1 - p) {
    sum += probability[kept - 1];
    kept -= 1;
  }
  return kept;
}

/** Tokens at least `fraction` as likely as the likeliest. */
function keepMinP(values, order, fraction) {
  if (fraction === 0) return order.length;
  let kept = 1;
  while (kept < order.length && Math.exp(values[order[kept]] - values[order[0]]) >= fraction) kept += 1;
  return kept;
}

/**
 * The draw as a race: token i arrives after e_i / p_i, with e_i from the exponential distribution; the first
 * one is drawn, and each wins with its probability. The noise is a pure function of (seed, step, token).
 */
export function race(probability, seed, step = 0) {
  let winner = -1;
  let best = Infinity;
  const times = new Map();
  for (let i = 0; i < probability.length; i += 1) {
    if (!(probability[i] > 0)) continue;
    const time = -Math.log(uniform(seed, step, i)) / probability[i];
    times.set(i, time);
    if (time < best) {
      best = time;
      winner = i;
    }
  }
  return { winner, times };
}

/** A number in (0, 1) from three whole ones, by mixing their bits. */
export function uniform(seed, step, token) {
  let x = (seed ^ 0x9e3779b9) >>> 0;
  for (const part of [step + 1, token + 1, Math.floor(seed / 2 ** 32)]) {
    x = Math.imul(x ^ part, 0x85ebca6b) >>> 0;
    x = Math.imul(x ^ (x >>> 13), 0xc2b2ae35) >>> 0;
    x = (x ^ (x >>> 16)) >>> 0;
  }
  return (x + 0.5) / 2 ** 32;
}
