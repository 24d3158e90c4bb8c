// Numbers as people read them; the same words as autopar.units.

const BYTES = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const COUNTS = ["", "k", "M", "G", "T"];

const digits = (value) => (value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2));

export function bytes(value) {
  let unit = 0;
  while (Math.abs(value) >= 1024 && unit < BYTES.length - 1) [value, unit] = [value / 1024, unit + 1];
  return unit === 0 ? `${Math.round(value)} B` : `${digits(value)} ${BYTES[unit]}`;
}

export function seconds(value) {
  if (value === 0) return "0 s";
  if (value < 1e-3) return `${digits(value * 1e6)} µs`;
  if (value < 1) return `${digits(value * 1e3)} ms`;
  return `${digits(value)} s`;
}

export function count(value) {
  let unit = 0;
  while (value >= 1000 && unit < COUNTS.length - 1) [value, unit] = [value / 1000, unit + 1];
  return unit === 0 && Number.isInteger(value) ? String(value) : `${digits(value)}${COUNTS[unit]}`;
}

export const number = (count, one, many = `${one}s`) => `${count} ${count === 1 ? one : many}`;
export const percent = (value) => `${(100 * value).toFixed(1)}%`;
export const shape = (sizes) => (sizes.length ? sizes.join("×") : "scalar");
export const factors = (dims) => dims.map((atoms) => (atoms.length === 1 ? atoms[0] : atoms.map((a) => `(${a})`).join(""))).join(" × ") || "scalar";
export const opName = (op) => op.split(".")[1] ?? op;

// Round numbers from 0 to an end, about five of them; bytes go in powers of two.
export function ticks(end, isBytes = false) {
  const rough = end / 5;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = isBytes ? 2 ** Math.ceil(Math.log2(rough)) : [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * (1 - 1e-9));
  return Array.from({ length: Math.floor(end / step + 1e-9) + 1 }, (_, i) => i * step);
}
