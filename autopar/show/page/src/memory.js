// Memory of a rank over the step, by kind, against the limit.
import { useState } from "preact/hooks";

import { KINDS } from "./colours.js";
import { html } from "./h.js";
import { bytes, percent, seconds, ticks } from "./units.js";

const [WIDTH, HEIGHT, LEFT, BOTTOM, TOP] = [1000, 340, 80, 26, 14];
// As the data has them, `memory_by_kind` in Python.
const ORDER = ["parameters", "optimizer", "gradients", "gathered", "activations", "buffers"];

// For each kind [time, from, to] in bytes of a rank, each kind upon the one before.
export function layersOf(plan, rank) {
  const rows = plan.timeline.memory[rank];
  const tops = rows.map(([, ...held]) => held.map((_, kind) => held.slice(0, kind + 1).reduce((a, b) => a + b, 0)));
  return ORDER.map((kind, i) => ({ kind, spans: rows.map(([time], at) => [time, i ? tops[at][i - 1] : 0, tops[at][i]]) }));
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
    <p class="hint">Activations, and copies of ZeRO-2 that each of several micro-batches has of its own, follow the micro-batches in flight, module by
      module; gradients come one by one in the first backward; copies of ZeRO-3 are there about their use. Buffers are the batch, whole gradients
      until they are reduced, outputs of the model, and what the optimizer takes for itself. The table has the peak of each stage.</p>
  </section>`;
}

function Chart({ plan, rank }) {
  const layers = layersOf(plan, rank);
  const step = plan.timeline.step_s;
  const peak = Math.max(...layers.at(-1).spans.map(([, , to]) => to));
  const limit = plan.memory_limit_bytes;
  const showsLimit = limit && limit < 4 * peak;
  const most = 1.06 * (showsLimit ? Math.max(limit, peak) : peak);
  const x = (time) => LEFT + (time / step) * (WIDTH - LEFT - 8);
  const y = (value) => TOP + (1 - value / most) * (HEIGHT - TOP - BOTTOM);
  const bands = layers.map(({ kind, spans }) => {
    const ends = [...spans.slice(1).map(([time]) => time), step];
    const edge = (side) => spans.map((span, i) => [[span[0], span[side]], [ends[i], span[side]]]).flat();
    const line = [...edge(2), ...edge(1).reverse()].map(([time, value]) => `${x(time)},${y(value)}`).join("L");
    const sizes = spans.map(([, from, to]) => to - from);
    const [least, most] = [Math.min(...sizes), Math.max(...sizes)];
    return html`<path d=${`M${line}Z`} fill=${KINDS[kind]}><title>${kind}: ${least < most ? `${bytes(least)} to ` : ""}${bytes(most)}</title></path>`;
  });
  return html`<svg class="chart" viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label=${`memory of pipeline rank ${rank}, peak ${bytes(peak)}`}>
    ${ticks(most, true).map((t) => html`<line class="grid" x1=${LEFT} x2=${WIDTH - 8} y1=${y(t)} y2=${y(t)} /><text x=${LEFT - 6} y=${y(t) + 4} text-anchor="end">${bytes(t)}</text>`)}
    ${ticks(step).map((t) => html`<text x=${x(t)} y=${HEIGHT - 8} text-anchor=${x(t) > WIDTH - 40 ? "end" : "middle"}>${seconds(t)}</text>`)}
    ${bands}
    ${showsLimit && html`<line class="limit" x1=${LEFT} x2=${WIDTH - 8} y1=${y(limit)} y2=${y(limit)} /><text class="limit" x=${WIDTH - 12} y=${y(limit) - 5} text-anchor="end">limit ${bytes(limit)}</text>`}
    ${limit && !showsLimit && html`<text class="muted" x=${WIDTH - 12} y=${TOP + 4} text-anchor="end">limit ${bytes(limit)}, above this picture</text>`}
  </svg>`;
}

function Table({ plan, rank }) {
  const own = plan.stages.map((stage, number) => ({ ...stage, number })).filter(({ number }) => number % plan.timeline.ranks === rank);
  return html`<table><thead><tr><th>stage</th><th>begins at</th>${ORDER.map((kind) => html`<th class="n"><i class="dot" style=${`background:${KINDS[kind]}`}></i>${kind}</th>`)}<th class="n">in flight</th><th>recompute</th></tr></thead>
    <tbody>${own.map((stage) => html`<tr><td>${stage.number}</td><td>${stage.begins || "–"}</td>${ORDER.map((kind) => html`<td class="n">${bytes(stage.memory_bytes[kind])}</td>`)}<td class="n">${stage.live}</td><td>${stage.recompute}</td></tr>`)}</tbody></table>`;
}
