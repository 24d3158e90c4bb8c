// Plans side by side: the rows of autopar.compare, and their time against their memory. A row opens its plan.
import { html } from "./h.js";
import { bytes, count, percent, seconds, ticks } from "./units.js";

const [WIDTH, HEIGHT, LEFT, BOTTOM, TOP] = [760, 360, 80, 40, 16];

export function CompareView({ rows, current, onOpen }) {
  const best = Math.min(...rows.filter((row) => row.fits).map((row) => row.step_time_s));
  return html`<section class="page">
    <table class="rows"><thead><tr><th>plan</th><th class="n">step</th><th class="n">to best</th><th class="n">${rows.find((row) => row.unit)?.unit ?? "tokens"}/s</th><th class="n">MFU</th><th class="n">bubble</th><th class="n">exposed</th><th class="n">peak memory</th><th>layout</th></tr></thead>
    <tbody>${rows.map((row) => html`<tr class=${`${row.plan === current ? "on" : ""} ${row.fits ? "" : "unfit"}`}>
      <td>${row.plan === null ? row.name : html`<button class="link" onClick=${() => onOpen(row.plan)}>${row.name}</button>`}</td>
      ${row.step_time_s === null ? html`<td colspan="8">${row.reason}</td>` : html`
        <td class="n">${row.fits ? seconds(row.step_time_s) : `(${seconds(row.step_time_s)})`}</td><td class="n">${row.fits ? (row.step_time_s / best).toFixed(2) : "–"}</td>
        <td class="n">${count(row.tokens_per_s)}</td><td class="n">${row.mfu ? percent(row.mfu) : "–"}</td><td class="n">${percent(row.bubble_fraction)}</td>
        <td class="n">${seconds(row.exposed_comm_s)}</td><td class="n">${bytes(row.peak_memory_bytes)}</td><td>${row.fits ? row.layout : html`does not fit: ${row.reason}`}</td>`}
    </tr>`)}</tbody></table>
    <${Scatter} rows=${rows.filter((row) => row.step_time_s !== null)} current=${current} onOpen=${onOpen} />
  </section>`;
}

function Scatter({ rows, current, onOpen }) {
  if (rows.length < 2) return null;
  const most = { time: 1.08 * Math.max(...rows.map((row) => row.step_time_s)), memory: 1.08 * Math.max(...rows.map((row) => row.peak_memory_bytes)) };
  const x = (value) => LEFT + (value / most.time) * (WIDTH - LEFT - 20);
  const y = (value) => TOP + (1 - value / most.memory) * (HEIGHT - TOP - BOTTOM);
  const labels = labelPlaces(rows.map((row) => [x(row.step_time_s), y(row.peak_memory_bytes)]));
  return html`<h2>Time against memory</h2><svg class="chart scatter" viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label="step time against peak memory of all plans">
    ${ticks(most.memory, true).map((t) => html`<line class="grid" x1=${LEFT} x2=${WIDTH - 20} y1=${y(t)} y2=${y(t)} /><text x=${LEFT - 6} y=${y(t) + 4} text-anchor="end">${bytes(t)}</text>`)}
    ${ticks(most.time).map((t) => html`<line class="grid" y1=${TOP} y2=${HEIGHT - BOTTOM} x1=${x(t)} x2=${x(t)} /><text x=${x(t)} y=${HEIGHT - BOTTOM + 16} text-anchor="middle">${seconds(t)}</text>`)}
    <text x=${LEFT + 4} y=${TOP - 4}>peak memory of a rank</text>
    <text x=${(WIDTH + LEFT) / 2} y=${HEIGHT - 4} text-anchor="middle">step time; down and to the left is better</text>
    ${rows.map((row, i) => html`<g class=${`point ${row.fits ? "" : "unfit"} ${row.plan === current ? "on" : ""}`} onClick=${() => row.plan !== null && onOpen(row.plan)}>
      <circle cx=${x(row.step_time_s)} cy=${y(row.peak_memory_bytes)} r="6"><title>${row.name}</title></circle>
      <text x=${x(row.step_time_s) + (x(row.step_time_s) > WIDTH - 120 ? -10 : 10)} y=${labels[i]} text-anchor=${x(row.step_time_s) > WIDTH - 120 ? "end" : "start"}>${row.name}${row.fits ? "" : " (does not fit)"}</text></g>`)}
  </svg>`;
}

// Heights of names beside their points, moved down where they would lie over another.
export function labelPlaces(points) {
  const places = [];
  const order = points.map((point, i) => [...point, i]).sort((a, b) => a[1] - b[1]);
  for (const [x, y, i] of order) {
    places[i] = y + 4;
    for (const [otherX, , j] of order) if (j !== i && places[j] !== undefined && Math.abs(otherX - x) < 120 && places[i] - places[j] < 13 && places[i] >= places[j] - 13) places[i] = places[j] + 13;
  }
  return places;
}
