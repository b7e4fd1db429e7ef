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
  const { kept, out, least, ties } = cuts(tempered, sampling);
  const untouched = t === 1 && sampling.repetition_penalty === 1 && kept === tempered.length;
  const after = untouched ? before : softmax(kept === tempered.length ? tempered : without(tempered, least, ties));
  return { before, penalised, tempered, after, kept, out, greedy: false };
}

const cutNames = () => ({ top_k: 0, top_p: 0, min_p: 0 });

/** s / penalty where s >= 0, s * penalty where s < 0, once for each token that occurred. */
export function penalise(logits, seen, penalty) {
  const out = Float64Array.from(logits);
  if (penalty === 1) return out;
  for (const id of new Set(seen)) out[id] = out[id] < 0 ? out[id] * penalty : out[id] / penalty;
  return out;
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

/**
 * How many tokens stay after each cut, the least value that stays, and how many of its equals do. The values
 * alone are sorted, which is far quicker than ids by their values; of equal ones the first stays.
 */
function cuts(values, { top_k, top_p, min_p }) {
  const n = values.length;
  if ((top_k === 0 || top_k >= n) && top_p === 1 && min_p === 0) return { kept: n, out: cutNames(), least: -Infinity, ties: 0 };
  const falling = Float64Array.from(values).sort().reverse();
  const k = keepTopK(falling, top_k);
  const p = keepTopP(falling.subarray(0, k), top_p);
  const kept = keepMinP(falling.subarray(0, p), min_p);
  const least = falling[kept - 1];
  return { kept, out: { top_k: n - k, top_p: k - p, min_p: p - kept }, least, ties: kept - falling.indexOf(least) };
}

/** The values, those that are cut at -Infinity. */
function without(values, least, ties) {
  let room = ties;
  return Float64Array.from(values, (x) => {
    if (x === least) room -= 1;
    return x > least || (x === least && room >= 0) ? x : -Infinity;
  });
}

/** How many stay with top-k: ties with the k-th stay. */
function keepTopK(falling, k) {
  if (k === 0 || k >= falling.length) return falling.length;
  let kept = k;
  while (kept < falling.length && falling[kept] === falling[k - 1]) kept += 1;
  return kept;
}

/** From the small end, tokens drop while their sum is at most 1 - p; the likeliest stays. */
function keepTopP(falling, p) {
  if (p === 1) return falling.length;
  const probability = softmax(falling);
  let kept = falling.length;
  let sum = 0;
  while (kept > 1 && sum + probability[kept - 1] <= 1 - p) {
    sum += probability[kept - 1];
    kept -= 1;
  }
  return kept;
}

/** Tokens at least `fraction` as likely as the likeliest. */
function keepMinP(falling, fraction) {
  if (fraction === 0) return falling.length;
  let kept = 1;
  while (kept < falling.length && Math.exp(falling[kept] - falling[0]) >= fraction) kept += 1;
  return kept;
}

/**
 * The draw as a race: token i arrives after e_i / p_i, with e_i from the exponential distribution; the first
 * one is drawn, and each wins with its probability. The noise is a pure function of (seed, step, token).
 */
export function race(probability, seed, step = 0) {
  let winner = -1;
  let time = Infinity;
  for (let i = 0; i < probability.length; i += 1) {
    const p = probability[i];
    if (!(p > 0)) continue;
    const u = uniform(seed, step, i);
    if (1 - u >= time * p) continue; // -ln u is larger still: too late
    const arrives = -Math.log(u) / p;
    if (arrives < time) [time, winner] = [arrives, i];
  }
  return { winner, time };
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
