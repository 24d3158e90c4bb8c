// Colours that colour-blind readers tell apart (Okabe and Ito, 2008); layouts get theirs in order of appearance.

export const PALETTE = ["#56b4e9", "#e69f00", "#009e73", "#f0e442", "#cc79a7", "#0072b2", "#d55e00"];
export const REPLICATED = "#b8b8b8";
export const OTHERS = "#757575";

export const KINDS = {
  parameters: "#0072b2", gradients: "#e69f00", optimizer: "#009e73", gathered: "#cc79a7", activations: "#56b4e9", buffers: "#d55e00",
};
export const COLLECTIVES = { all_reduce: "#d55e00", all_gather: "#e69f00", reduce_scatter: "#cc79a7", all_to_all: "#009e73" };

// A colour of its own for each of the most frequent layouts; what is replicated on all axes is light grey, and what is rare is dark grey.
export function layoutColours(plan) {
  const weight = new Map();
  for (const op of plan.ops) weight.set(op.layout.join(" "), (weight.get(op.layout.join(" ")) ?? 0) + 1);
  for (const p of plan.parameters) weight.set(p.held.join(" "), (weight.get(p.held.join(" ")) ?? 0) + 1);
  const found = new Map();
  const sharded = [...weight].sort((a, b) => b[1] - a[1]).map(([layout]) => layout);
  let next = 0;
  for (const layout of sharded) {
    const whole = layout.split(" ").every((symbol) => symbol === "R" || symbol === "R*");
    found.set(layout, whole ? REPLICATED : PALETTE[next++] ?? OTHERS);
  }
  return found;
}

// Black or white, whichever stands out more (WCAG 2.2, relative luminance).
export function inkOn(colour) {
  const [r, g, b] = [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16) / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000" : "#fff";
}

// Micro-batches take turns through the palette; backwards are darker than forwards.
export const microBatch = (number) => PALETTE[number % PALETTE.length];
