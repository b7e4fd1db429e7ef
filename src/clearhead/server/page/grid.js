/**
 * A picture that can be walked: a canvas for the eyes, and for keyboards and screen readers a grid of which
 * one cell is alive. It holds one tab stop; arrows move, Enter opens.
 */

import { h } from "./dom.js";

/**
 * @param {HTMLElement} host
 * @param {{
 *   label: () => string, size: () => [number, number], at: () => [number, number],
 *   draw: (canvas: HTMLCanvasElement, width: number) => void, hit: (x: number, y: number) => any,
 *   describe: (row: number, column: number) => string, move: (row: number, column: number) => void,
 *   open?: (row: number, column: number) => void, key?: (event: KeyboardEvent, row: number, column: number) => boolean,
 *   hover?: (text: string) => void, resized: () => void, first?: number,
 * }} view
 */
export function makeGrid(host, view) {
  const canvas = h("canvas", { "aria-hidden": "true" });
  const cell = h("div", { role: "gridcell", id: `${host.id}-cell` });
  const line = h("div", { role: "row" }, cell);
  host.replaceChildren(canvas, h("div", { class: "unseen", role: "rowgroup" }, line));
  host.setAttribute("role", "grid");
  host.tabIndex = 0;
  host.setAttribute("aria-activedescendant", cell.id);
  const start = view.first ?? 0;

  let told = false; // whether the caption has said anything yet
  let over = /** @type {[number, number]|null} */ (null); // the cell under the mouse

  /** What the caption says now: of the cell under the mouse, else of the selected one. */
  function caption() {
    if (!view.hover || !told) return;
    const [rows, columns] = view.size();
    const [row, column] = over && over[0] < rows + start && over[1] < columns ? over : view.at();
    view.hover(view.describe(row, column));
  }

  function announce() {
    const [row, column] = view.at();
    const [rows, columns] = view.size();
    host.setAttribute("aria-label", view.label());
    host.setAttribute("aria-rowcount", String(rows));
    host.setAttribute("aria-colcount", String(columns));
    line.setAttribute("aria-rowindex", String(row - start + 1));
    cell.setAttribute("aria-colindex", String(column + 1));
    const text = view.describe(row, column);
    if (cell.textContent !== text) cell.textContent = text;
    host.dataset.row = String(row);
    host.dataset.column = String(column);
    return text;
  }

  function move(row, column) {
    const [rows, columns] = view.size();
    view.move(
      Math.max(start, Math.min(row, rows - 1 + start)),
      Math.max(0, Math.min(column, columns - 1)),
    );
    const text = announce();
    if (document.activeElement === host) say(spoken);
    tell(text);
  }

  function tell(text) {
    told = true;
    view.hover?.(text);
  }

  const spoken = () => (document.activeElement === host ? announce() : "");

  host.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const [row, column] = view.at();
    const [rows, columns] = view.size();
    if (view.key?.(event, row, column)) {
      event.preventDefault();
      event.stopPropagation();
      return;
    }
    const steps = {
      ArrowUp: [row - 1, column],
      ArrowDown: [row + 1, column],
      ArrowLeft: [row, column - 1],
      ArrowRight: [row, column + 1],
      Home: [row, 0],
      End: [row, columns - 1],
      PageUp: [start, column],
      PageDown: [rows - 1 + start, column],
    };
    if (steps[event.key]) move(...steps[event.key]);
    else if (event.key === "Enter" && view.open) view.open(row, column);
    else return;
    event.preventDefault();
    event.stopPropagation();
  });

  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return view.hit(event.clientX - box.left, event.clientY - box.top);
  };
  canvas.addEventListener("click", (event) => {
    const at = place(event);
    if (!at) return;
    host.focus({ preventScroll: true });
    move(at[0], at[1]);
  });
  canvas.addEventListener("dblclick", (event) => {
    const at = place(event);
    if (at) view.open?.(at[0], at[1]);
  });
  canvas.addEventListener("pointermove", (event) => {
    const at = event.pointerType === "mouse" ? place(event) : null;
    canvas.style.cursor = at ? "pointer" : "default";
    over = at && [at[0], at[1]];
    if (at) tell(view.describe(at[0], at[1]));
  });
  canvas.addEventListener("pointerleave", () => {
    over = null;
    caption();
  });
  host.addEventListener("focus", () => say(spoken));

  let width = 0;
  new ResizeObserver(() => {
    const now = host.parentElement.clientWidth; // its own width follows from the picture
    if (now !== width && width) view.resized();
    width = now;
  }).observe(host.parentElement);

  return {
    draw() {
      view.draw(canvas, host.clientWidth);
      announce();
      caption();
    },
    canvas,
  };
}

let timer = 0;
let said = /** @type {string|(() => string)} */ ("");
let about = "";

/**
 * Tell a screen reader, after the hand has come to rest.
 * @param {string|(() => string)} text a function where the text holds numbers: it is asked again when they change
 */
export function say(text) {
  clearTimeout(timer);
  timer = setTimeout(() => {
    said = text;
    speak();
  }, 120);
}

function speak() {
  const region = document.getElementById("live");
  const text = typeof said === "string" ? said : said();
  if (region && region.textContent !== text) region.textContent = text;
}

/** What was said goes when what it was said of has changed: `now` names that. */
export function renew(now) {
  if (now === about) return;
  about = now;
  if (typeof said === "string") said = "";
  speak();
}
