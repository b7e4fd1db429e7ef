/**
 * The little that is needed to write HTML from JavaScript: `h` makes an element, `morph` changes the page into
 * it without losing the focus, the caret or a slider that is being dragged.
 */

const SPACES = { svg: "http://www.w3.org/2000/svg", math: "http://www.w3.org/1998/Math/MathML" };
const SVG = new Set(["svg", "path", "rect", "circle", "line", "g", "text"]);
const MATHML = new Set("math mrow mi mo mn msub msup msubsup mfrac msqrt munder munderover mtext mspace mtable mtr mtd".split(" "));

/**
 * @param {string} tag
 * @param {Record<string, any>|null} [props] attributes; `onclick` and the like are functions; `style` an object
 * @param {...any} children
 * @returns {any} the element
 */
export function h(tag, props, ...children) {
  const space = SVG.has(tag) ? SPACES.svg : MATHML.has(tag) ? SPACES.math : null;
  const element = /** @type {any} */ (space ? document.createElementNS(space, tag) : document.createElement(tag));
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) {
      element[name] = value;
      (element.$on ??= new Set()).add(name);
    } else if (name === "style") {
      for (const [key, part] of Object.entries(value)) element.style.setProperty(key, part);
    } else element.setAttribute(name, value === true ? "" : value);
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

/** Make the children of `element` these. */
export function fill(element, ...children) {
  const wanted = document.createElement("div");
  append(wanted, children);
  morphChildren(element, wanted);
}

function morphChildren(old, wanted) {
  const next = [...wanted.childNodes];
  for (let i = 0; i < next.length; i += 1) {
    const there = old.childNodes[i];
    if (!there) old.append(next[i]);
    else if (alike(there, next[i])) morph(there, next[i]);
    else there.replaceWith(next[i]);
  }
  while (old.childNodes.length > next.length) old.lastChild.remove();
}

const alike = (a, b) =>
  a.nodeType === b.nodeType && a.nodeName === b.nodeName && (a.nodeType !== 1 || a.id === b.id);

function morph(old, wanted) {
  if (old.nodeType !== 1) {
    if (old.nodeValue !== wanted.nodeValue) old.nodeValue = wanted.nodeValue;
    return;
  }
  for (const { name } of [...old.attributes]) if (!wanted.hasAttribute(name) && name !== "open") old.removeAttribute(name); // open is the reader's
  for (const { name, value } of [...wanted.attributes]) {
    if (name === "style") old.style.cssText = wanted.style.cssText;
    else if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  for (const name of old.$on ?? []) old[name] = null;
  for (const name of wanted.$on ?? []) old[name] = wanted[name];
  old.$on = wanted.$on;
  if (old.nodeName === "INPUT") {
    const value = wanted.getAttribute("value");
    if (old.type === "checkbox") old.checked = wanted.hasAttribute("checked");
    else if (value !== null && old.value !== value && document.activeElement !== old) old.value = value;
  }
  if (old.nodeName === "CANVAS") return;
  morphChildren(old, wanted);
  if (old.nodeName === "SELECT") old.value = wanted.value;
}

/** Save text or bytes as a file of the reader's. */
export function download(name, parts, type) {
  const url = URL.createObjectURL(new Blob([parts].flat(), { type }));
  const link = h("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** A number for reading: sign, and about four digits. */
export function brief(x, digits = 4) {
  if (Number.isNaN(x)) return "NaN";
  if (!Number.isFinite(x)) return x > 0 ? "+∞" : "−∞";
  const size = Math.abs(x);
  if (size !== 0 && (size < 1e-4 || size >= 1e6)) return signed(x.toExponential(3).replace("-", "−").replace("e+", "e"), x);
  return signed(size >= 100 ? x.toFixed(2) : x.toFixed(digits), x);
}
function signed(text, x) {
  const plain = text.replace(/^[-−]/, "");
  return (x < 0 ? "−" : "+") + plain;
}

/** The shortest text that reads back as this float32. */
export function exact(x) {
  if (!Number.isFinite(x)) return brief(x);
  for (let digits = 6; digits <= 9; digits += 1) {
    const text = x.toPrecision(digits);
    if (Math.fround(Number(text)) === Math.fround(x)) return String(Number(text));
  }
  return String(x);
}

export const percent = (p, digits = 1) =>
  p > 0 && p < 10 ** -(digits + 2) / 2 ? `<${(10 ** -(digits)).toFixed(digits)}%` : `${(100 * p).toFixed(digits)}%`;

/** A token's text with its blanks made visible. */
export function visible(text) {
  if (text === "") return "∅";
  const shown = text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/\r/g, "␍");
  if (/^[ ⏎⇥␍]+$/.test(shown)) return shown.replace(/ +/g, (run) => (run.length > 2 ? `␣×${run.length}` : "␣".repeat(run.length)));
  return shown.replace(/^ /, "");
}
