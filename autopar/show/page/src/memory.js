// Memory of a rank over the step, by kind, against the limit.
import { useState } from "preact/hooks";

import { KINDS } from "./colours.js";
import { html } from "./h.js";
import { bytes, percent, seconds, ticks } from "./units.js";

const [WIDTH, HEIGHT, LEFT, BOTTOM, TOP] = [1000, 340, 80, 26, 14];
const ORDER = ["parameters", "optimizer", "gradients", "gathered", "activations"];

// For each rank: what lies there all the step by kind, and activations over time.
export function layersOf(plan, rank) {
  const own = plan.stages.filter((_, stage) => stage % plan.timeline.ranks === rank);
  const still = Object.fromEntries(ORDER.slice(0, -1).map((kind) => [kind, own.reduce((sum, stage) => sum + stage.memory_bytes[kind], 0)]));
  const total = Object.values(still).reduce((a, b) => a + b, 0);
  const moving = plan.timeline.memory[rank].map(([time, all]) => [time, Math.max(0, all - total)]);
  return { still, total, moving };
}

// The rank of the pipeline with the largest peak: what fits is decided there.
export const fullest = (peaks) => peaks.indexOf(Math.max(...peaks));

export function MemoryView({ plan }) {
  const peaks = plan.prediction.peak_memory_bytes;
  const [rank, setRank] = useState(fullest(peaks));
  const limit = plan.memory_limit_bytes;
  return html`<section class="page">
    <div class="cards">
      ${peaks.map((peak, i) => html`<button class=${`card ${i === rank ? "on" : ""}`} onClick=${() => setRank(i)} aria-pressed=${i === rank}>
        <b>${peaks.length > 1 ? `pipeline rank ${i}` : "every rank"}</b><span>${bytes(peak)}${limit ? ` (${percent(peak / limit)})` : ""}</span>
        <span class="meter"><i style=${`width:${Math.min(100, (100 * peak) / Math.max(limit, ...peaks))}%`}></i></span></button>`)}
    </div>
    <${Chart} plan=${plan} rank=${rank} />
    <${Table} plan=${plan} rank=${rank} />
    <p class="hint">Activations follow the micro-batches in flight; everything else is drawn as it is at the peak of the stage, all the step long.</p>
  </section>`;
}

function Chart({ plan, rank }) {
  const { still, total, moving } = layersOf(plan, rank);
  const step = plan.timeline.step_s;
  const peak = total + Math.max(...moving.map(([, value]) => value));
  const limit = plan.memory_limit_bytes;
  const showsLimit = limit && limit < 4 * peak;
  const most = 1.06 * (showsLimit ? Math.max(limit, peak) : peak);
  const x = (time) => LEFT + (time / step) * (WIDTH - LEFT - 8);
  const y = (value) => TOP + (1 - value / most) * (HEIGHT - TOP - BOTTOM);
  let base = 0;
  const bands = Object.entries(still).map(([kind, value]) => {
    const from = base;
    base += value;
    return html`<rect x=${x(0)} width=${x(step) - x(0)} y=${y(base)} height=${y(from) - y(base)} fill=${KINDS[kind]}><title>${kind}: ${bytes(value)}</title></rect>`;
  });
  const ends = [...moving.slice(1).map(([time]) => time), step];
  const line = moving.map(([time, value], i) => `L${x(time)},${y(base + value)}L${x(ends[i])},${y(base + value)}`).join("");
  return html`<svg class="chart" viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label=${`memory of pipeline rank ${rank}, peak ${bytes(peak)}`}>
    ${ticks(most, true).map((t) => html`<line class="grid" x1=${LEFT} x2=${WIDTH - 8} y1=${y(t)} y2=${y(t)} /><text x=${LEFT - 6} y=${y(t) + 4} text-anchor="end">${bytes(t)}</text>`)}
    ${ticks(step).map((t) => html`<text x=${x(t)} y=${HEIGHT - 8} text-anchor=${x(t) > WIDTH - 40 ? "end" : "middle"}>${seconds(t)}</text>`)}
    ${bands}
    <path d=${`M${x(0)},${y(base)}${line}L${x(step)},${y(base)}Z`} fill=${KINDS.activations}><title>activations</title></path>
    ${showsLimit && html`<line class="limit" x1=${LEFT} x2=${WIDTH - 8} y1=${y(limit)} y2=${y(limit)} /><text class="limit" x=${WIDTH - 12} y=${y(limit) - 5} text-anchor="end">limit ${bytes(limit)}</text>`}
    ${limit && !showsLimit && html`<text class="muted" x=${WIDTH - 12} y=${TOP + 4} text-anchor="end">limit ${bytes(limit)}, above this picture</text>`}
  </svg>`;
}

function Table({ plan, rank }) {
  const own = plan.stages.map((stage, number) => ({ ...stage, number })).filter(({ number }) => number % plan.timeline.ranks === rank);
  return html`<table><thead><tr><th>stage</th><th>begins at</th>${ORDER.map((kind) => html`<th class="n"><i class="dot" style=${`background:${KINDS[kind]}`}></i>${kind}</th>`)}<th class="n">in flight</th><th>recompute</th></tr></thead>
    <tbody>${own.map((stage) => html`<tr><td>${stage.number}</td><td>${stage.begins || "–"}</td>${ORDER.map((kind) => html`<td class="n">${bytes(stage.memory_bytes[kind])}</td>`)}<td class="n">${stage.live}</td><td>${stage.recompute}</td></tr>`)}</tbody></table>`;
}
