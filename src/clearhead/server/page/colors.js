/**
 * Two scales that colour-blind readers can tell apart: blue for shares of one, blue and orange around zero.
 *
 * Each colour is made from the theme's ground, so that nothing is paler than the page or darker than its ink.
 */

const LIGHT = { ground: [241, 246, 252], full: [28, 96, 166], minus: [176, 78, 8], zero: [247, 248, 250] };
const DARK = { ground: [27, 36, 49], full: [122, 184, 245], minus: [240, 158, 84], zero: [27, 33, 42] };

/** What the canvas needs to know about the theme; system colours where the reader asked for them. */
export function palette(dark, forced) {
  const style = getComputedStyle(document.documentElement);
  const css = (name) => style.getPropertyValue(name).trim();
  return {
    dark,
    forced,
    scale: dark ? DARK : LIGHT,
    ink: forced ? "CanvasText" : css("--ink"),
    soft: forced ? "CanvasText" : css("--soft"),
    line: forced ? "CanvasText" : css("--line"),
    paper: forced ? "Canvas" : css("--panel"),
    accent: forced ? "Highlight" : css("--accent"),
    plus: forced ? "Highlight" : css("--plus"),
    minus: forced ? "LinkText" : css("--minus"),
  };
}

const mix = (a, b, t) => a.map((x, i) => Math.round(x + (b[i] - x) * t));
const rgb = (c) => `rgb(${c[0]},${c[1]},${c[2]})`;

/** Share of one, 0..1, as three numbers. */
export const sequential = (theme, p) => mix(theme.scale.ground, theme.scale.full, clamp(p));

/** A signed value in units of `limit`, as three numbers. */
export function diverging(theme, x, limit) {
  const t = limit > 0 ? clamp(Math.abs(x) / limit) : 0;
  return mix(theme.scale.zero, x < 0 ? theme.scale.minus : theme.scale.full, t);
}

export const css = rgb;
const clamp = (x) => Math.min(1, Math.max(0, Number.isFinite(x) ? x : 0));

/** Relative luminance of WCAG 2. */
export function luminance([r, g, b]) {
  const part = (x) => (x / 255 <= 0.04045 ? x / 255 / 12.92 : ((x / 255 + 0.055) / 1.055) ** 2.4);
  return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
}

export const contrast = (a, b) => {
  const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
  return (high + 0.05) / (low + 0.05);
};

/** Black or white ink on a colour, whichever reads better: never below 4.58:1. */
export function inkOn(color) {
  const key = (color[0] << 16) | (color[1] << 8) | color[2];
  if (!inks.has(key)) inks.set(key, contrast(color, [0, 0, 0]) >= contrast(color, [255, 255, 255]) ? "#000" : "#fff");
  return inks.get(key);
}
const inks = new Map();
