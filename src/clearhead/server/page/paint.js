/**
 * One set of strokes for two surfaces: the canvas that is looked at, and the SVG that is taken away.
 */

const FONT = 'ui-sans-serif, system-ui, "Segoe UI", "Noto Sans", "Noto Sans CJK SC", sans-serif';
const widths = new Map();
const measure = document.createElement("canvas").getContext("2d");

/** The text, or as much of its beginning as fits. */
export function fit(text, font, width) {
  const key = `${font}|${Math.round(width)}|${text}`;
  const there = widths.get(key);
  if (there !== undefined) return there;
  measure.font = font;
  let out = text;
  if (measure.measureText(out).width > width) {
    const letters = [...text];
    const end = width < 18 ? "" : "…"; // where there is hardly room, letters say more
    while (letters.length && measure.measureText(letters.join("") + end).width > width) letters.pop();
    out = letters.length ? letters.join("") + end : "";
  }
  if (widths.size > 20000) widths.clear();
  widths.set(key, out);
  return out;
}

/** @typedef {{fill?: string, stroke?: string, strokeWidth?: number, radius?: number}} Look */

const fontOf = ({ size = 13, weight = 400 }) => `${weight} ${size}px ${FONT}`;

/** Strokes on a canvas, sharp on every screen. */
export class CanvasPaint {
  constructor(canvas, width, height) {
    const ratio = Math.min(window.devicePixelRatio || 1, 3);
    const [w, h] = [Math.max(1, Math.round(width * ratio)), Math.max(1, Math.round(height * ratio))];
    if (canvas.width !== w) canvas.width = w;
    if (canvas.height !== h) canvas.height = h;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    this.context = canvas.getContext("2d");
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.context.clearRect(0, 0, width, height);
  }

  rect(x, y, w, h, /** @type {Look} */ { fill, stroke, strokeWidth = 1, radius = 0 }) {
    const c = this.context;
    if (!radius && !stroke) { // the quick way: most cells of a large map
      c.fillStyle = fill;
      return c.fillRect(x, y, w, h);
    }
    c.beginPath();
    if (radius) c.roundRect(x, y, w, h, radius);
    else c.rect(x, y, w, h);
    if (fill) {
      c.fillStyle = fill;
      c.fill();
    }
    if (stroke) {
      c.strokeStyle = stroke;
      c.lineWidth = strokeWidth;
      c.stroke();
    }
  }

  text(text, x, y, options) {
    const c = this.context;
    c.font = fontOf(options);
    c.fillStyle = options.fill;
    c.textAlign = options.anchor ?? "center";
    c.textBaseline = "alphabetic";
    c.fillText(options.width ? fit(text, c.font, options.width) : text, x, y);
  }

  curve(x0, y0, x1, y1, width, color, alpha) {
    const c = this.context;
    const middle = (y0 + y1) / 2;
    c.beginPath();
    c.moveTo(x0, y0);
    c.bezierCurveTo(x0, middle + 4, x1, middle - 4, x1, y1);
    c.strokeStyle = color;
    c.globalAlpha = alpha;
    c.lineWidth = width;
    c.stroke();
    c.globalAlpha = 1;
  }

  /** Hatching: nothing is here, and that is meant. */
  hatch(x, y, w, h, color) {
    const c = this.context;
    c.save();
    c.beginPath();
    c.rect(x, y, w, h);
    c.clip();
    c.strokeStyle = color;
    c.lineWidth = 0.7;
    c.beginPath();
    for (let d = -h; d < w; d += 5) {
      c.moveTo(x + d, y + h);
      c.lineTo(x + d + h, y);
    }
    c.stroke();
    c.restore();
  }
}

const xml = (text) => String(text).replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]/g, "\ufffd").replace(/[<>&"]/g, (c) => ({ "<": "&lt;", ">": "&gt;", "&": "&amp;", '"': "&quot;" })[c]);
const number = (x) => Math.round(x * 100) / 100;

/** The same strokes as SVG text. */
export class SvgPaint {
  constructor(width, height, ground) {
    this.size = [width, height];
    this.parts = [`<rect width="100%" height="100%" fill="${ground}"/>`];
    this.clips = 0;
  }

  rect(x, y, w, h, /** @type {Look} */ { fill, stroke, strokeWidth = 1, radius = 0 }) {
    const line = stroke ? ` stroke="${stroke}" stroke-width="${strokeWidth}"` : "";
    const box = `x="${number(x)}" y="${number(y)}" width="${number(w)}" height="${number(h)}"`;
    this.parts.push(`<rect ${box} rx="${radius}" fill="${fill ?? "none"}"${line}/>`);
  }

  text(text, x, y, options) {
    const shown = options.width ? fit(text, fontOf(options), options.width) : text;
    const anchor = { left: "start", right: "end", center: "middle" }[options.anchor ?? "center"];
    const font = `font-size="${options.size ?? 13}" font-weight="${options.weight ?? 400}"`;
    this.parts.push(
      `<text x="${number(x)}" y="${number(y)}" ${font} fill="${options.fill}" text-anchor="${anchor}">${xml(shown)}</text>`,
    );
  }

  curve(x0, y0, x1, y1, width, color, alpha) {
    const middle = (y0 + y1) / 2;
    const path = [x0, y0, x0, middle + 4, x1, middle - 4, x1, y1].map(number);
    const d = `M${path[0]} ${path[1]}C${path.slice(2).join(" ")}`;
    this.parts.push(`<path d="${d}" fill="none" stroke="${color}" stroke-opacity="${number(alpha)}" stroke-width="${number(width)}"/>`);
  }

  hatch(x, y, w, h, color) {
    this.rect(x, y, w, h, { stroke: color });
    this.parts.push(`<path d="M${number(x)} ${number(y + h)}L${number(x + w)} ${number(y)}" stroke="${color}"/>`);
  }

  toString() {
    const [w, h] = this.size;
    return `<svg xmlns="http://www.w3.org/2000/svg" width="${w}" height="${h}" viewBox="0 0 ${w} ${h}" font-family="${xml(FONT)}">${this.parts.join("\n")}</svg>\n`;
  }
}

/** A matrix as an image of one pixel per cell, to be drawn large without smoothing. */
export function pixels(width, height, colorOf) {
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  for (let i = 0; i < width * height; i += 1) {
    const color = colorOf(Math.floor(i / width), i % width);
    if (!color) continue;
    image.data.set([color[0], color[1], color[2], 255], 4 * i);
  }
  context.putImageData(image, 0, 0);
  return canvas;
}
