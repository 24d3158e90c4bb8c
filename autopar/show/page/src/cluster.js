// The grid of devices: who stores which part of a parameter, and what travels on which axis.
import { useMemo, useState } from "preact/hooks";

import { COLLECTIVES, PALETTE, REPLICATED, inkOn } from "./colours.js";
import { html } from "./h.js";
import { bytes, count, factors, number, seconds } from "./units.js";

const MOST_DRAWN = 4096;

export function ClusterView({ plan }) {
  const largest = useMemo(() => [...plan.parameters].sort((a, b) => product(b.shape) - product(a.shape)), [plan]);
  const [name, setName] = useState(largest[0]?.name);
  const p = plan.parameters.find((other) => other.name === name);
  return html`<section class="page">
    <h2>Traffic of a step by axis</h2><${Traffic} plan=${plan} />
    ${plan.levels.length > 0 && html`<h2>Traffic of a step by link level</h2><${Levels} plan=${plan} />`}
    <h2>Who stores what</h2>
    ${p && html`<div class="bar"><label>parameter <select value=${name} onChange=${(e) => setName(e.target.value)}>
      ${largest.map((other) => html`<option value=${other.name}>${other.name}</option>`)}</select></label>
      <span>${factors(p.factors)}, [${p.held.join(" ")}] on (${plan.mesh.names.join(", ")}): ${bytes(p.num_bytes)} a rank</span></div>
      <${Grid} plan=${plan} p=${p} />`}
  </section>`;
}

const product = (sizes) => sizes.reduce((a, b) => a * b, 1);

// Coordinate of a rank on the grid, the last axis fastest.
export function coordinate(rank, sizes) {
  const found = [];
  for (let axis = sizes.length - 1; axis >= 0; axis--) [found[axis], rank] = [rank % sizes[axis], Math.floor(rank / sizes[axis])];
  return found;
}

// Which shard of a parameter a rank stores: a number, or null where it has none of it.
export function shardOf(plan, p, rank) {
  const { names, sizes } = plan.grid;
  const at = coordinate(rank, sizes);
  const isPiped = plan.pipeline.degree > 1;
  if (isPiped && !p.stages.some((stage) => stage % plan.pipeline.degree === at[plan.pipeline.position])) return null;
  let shard = 0;
  plan.mesh.names.forEach((axis, i) => {
    const held = p.held[i];
    if (held === "R" || held === "R*") return;
    const position = names.indexOf(axis);
    shard = shard * sizes[position] + at[position];
  });
  return shard;
}

function Grid({ plan, p }) {
  const [asked, setChosen] = useState(0);
  const { names, sizes } = plan.grid;
  const total = product(sizes);
  const chosen = Math.min(asked, total - 1);
  const shown = Math.min(total, MOST_DRAWN);
  const inner = sizes.at(-1);
  const within = names.length > 1 ? total / sizes[0] : total;
  const perRow = within <= 64 ? within : inner * Math.max(1, Math.floor(64 / inner));
  const cell = shown <= 64 ? 46 : shown <= 512 ? 24 : 13;
  const cells = useMemo(() => Array.from({ length: shown }, (_, rank) => shardOf(plan, p, rank)), [plan, p]);
  const distinct = new Set(cells.filter((shard) => shard !== null));
  const colour = (shard) => (shard === null ? "none" : distinct.size === 1 ? REPLICATED : PALETTE[shard % PALETTE.length]);
  const gap = (i) => Math.floor(i / inner) * 4;
  const label = names.length > 1 && within % perRow === 0 ? 7 * `${names[0]} ${sizes[0]}`.length + 8 : 0;
  const width = label + Math.min(shown, perRow) * cell + gap(Math.min(shown, perRow) - 1) + 4;
  const height = Math.ceil(shown / perRow) * (cell + 3) + 4;
  const partOf = (shard) => (shard === null ? "none of it" : distinct.size === 1 ? "all of it" : `part ${shard} of ${distinct.size}`);
  const placeOf = (rank) => coordinate(rank, sizes).map((i, axis) => `${names[axis]} ${i}`).join(", ");
  const own = shardOf(plan, p, chosen);
  const alike = [...cells.keys()].filter((rank) => cells[rank] === own && rank !== chosen);
  return html`<div class="bar"><label>rank <input id="rank" type="number" min="0" max=${total - 1} value=${chosen}
    onInput=${({ target }) => target.value !== "" && target.validity.valid && setChosen(+target.value)} /></label>
    <span aria-live="polite">(${placeOf(chosen)}) stores ${partOf(own)}${own !== null && alike.length > 0 ? `, as ${rangesOf(alike)} ${alike.length === 1 ? "does" : "do"}${total > shown ? " of those that are drawn" : ""}` : ""}</span></div>
  <div class="scroll"><svg class="devices" width=${width} height=${height} role="img" aria-label=${number(total, "device")}>
    ${cells.map((shard, rank) => {
      const [x, y] = [label + 2 + (rank % perRow) * cell + gap(rank % perRow), 2 + Math.floor(rank / perRow) * (cell + 3)];
      return html`<g>${label > 0 && rank % within === 0 && html`<text class="name" x="2" y=${y + cell / 2 + 3}>${names[0]} ${rank / within}</text>`}<rect class=${`device ${rank === chosen ? "chosen" : ""}`} onClick=${() => setChosen(rank)} x=${x} y=${y} width=${cell - 2} height=${cell - 2} rx="2" fill=${colour(shard)}><title>rank ${rank} (${placeOf(rank)}): ${partOf(shard)}</title></rect>
        ${cell >= 24 && html`<text x=${x + (cell - 2) / 2} y=${y + cell / 2 + 3} text-anchor="middle" class=${shard === null ? "muted" : ""} style=${shard === null ? "" : `fill:${inkOn(colour(shard))}`}>${cell >= 46 ? (shard === null ? "–" : shard) : shard ?? ""}</text>`}</g>`;
    })}
  </svg></div>
  <p class="hint">Ranks in order, ${perRow} a row, in groups of the ${inner} that differ on axis ${names.at(-1)} alone; numbers and colours are parts of the parameter, ${
    distinct.size} in all${distinct.size > PALETTE.length ? `, ${PALETTE.length} colours in turn` : ""}. ${total > shown ? `The first ${count(shown)} of ${count(total)} ranks are drawn; the others repeat them.` : ""}</p>`;
}

// Ranks in few words: neighbours and equal steps as ranges, the first of them where there are many.
export function rangesOf(ranks, most = 4) {
  const runs = [];
  for (let i = 0; i < ranks.length; ) {
    let end = i + 1;
    const step = ranks[end] - ranks[i];
    while (end < ranks.length && ranks[end] - ranks[end - 1] === step) end++;
    const isRun = end - i > 2;
    runs.push(isRun ? `${ranks[i]} to ${ranks[end - 1]}${step > 1 ? ` in steps of ${step}` : ""}` : `${ranks[i]}`);
    i = isRun ? end : i + 1;
  }
  const shown = runs.slice(0, most).join(", ");
  return `${ranks.length === 1 ? "rank" : "ranks"} ${shown}${runs.length > most ? " and others" : ""}`;
}

// Bytes and seconds by axis and kind, for a rank and step.
export function trafficOf(plan) {
  const found = new Map();
  for (const c of plan.collectives) {
    const key = `${c.axis}|${c.kind}`;
    const row = found.get(key) ?? { axis: c.axis, kind: c.kind, count: 0, num_bytes: 0, time_s: 0 };
    found.set(key, { ...row, count: row.count + c.count, num_bytes: row.num_bytes + c.num_bytes * c.count, time_s: row.time_s + c.time_s * c.count });
  }
  return [...found.values()].sort((a, b) => b.time_s - a.time_s);
}

// Levels of links with what a rank sends over each, in all and by kind.
export function levelsOf(plan) {
  const found = new Map();
  for (const { level, kind, num_bytes } of plan.levels) {
    const row = found.get(level) ?? { level, num_bytes: 0, kinds: [] };
    found.set(level, { ...row, num_bytes: row.num_bytes + num_bytes, kinds: [...row.kinds, { kind, num_bytes }] });
  }
  return [...found.values()];
}

const kindName = (kind) => (kind === "send" ? "messages between stages" : kind.replaceAll("_", "-"));

function Levels({ plan }) {
  const levels = levelsOf(plan);
  const most = Math.max(...levels.map((row) => row.num_bytes));
  return html`<table class="levels"><thead><tr><th>links</th><th class="n">bytes</th><th></th><th>of</th></tr></thead>
    <tbody>${levels.map((row) => html`<tr><td>${row.level}</td><td class="n">${bytes(row.num_bytes)}</td>
      <td class="wide"><span class="meter">${row.kinds.map(({ kind, num_bytes }) => html`<i style=${`width:${(100 * num_bytes) / most}%;background:${COLLECTIVES[kind] ?? "var(--message)"}`}></i>`)}</span></td>
      <td>${row.kinds.map(({ kind, num_bytes }) => html`<span class="key"><i style=${`background:${COLLECTIVES[kind] ?? "var(--message)"}`}></i>${kindName(kind)} ${bytes(num_bytes)}</span> `)}</td></tr>`)}</tbody></table>
    <p class="hint">What a rank sends, in the mean of all ranks, hidden or not: collectives by rings, of which the ends of a node send to another, all-to-all to each rank of the group.</p>`;
}

function Traffic({ plan }) {
  const rows = trafficOf(plan);
  const { names, sizes } = plan.grid;
  if (!rows.length) return html`<p>no collectives</p>`;
  const most = Math.max(...rows.map((row) => row.time_s));
  return html`<table><thead><tr><th>axis</th><th>collective</th><th class="n">count</th><th class="n">bytes</th><th class="n">time, hidden or not</th><th></th></tr></thead>
    <tbody>${rows.map((row) => html`<tr><td>${row.axis} (${number(sizes[names.indexOf(row.axis)], "rank")})</td><td>${row.kind.replaceAll("_", "-")}</td><td class="n">${count(row.count)}</td>
      <td class="n">${bytes(row.num_bytes)}</td><td class="n">${seconds(row.time_s)}</td><td class="wide"><span class="meter"><i style=${`width:${(100 * row.time_s) / most}%;background:${COLLECTIVES[row.kind] ?? "#888"}`}></i></span></td></tr>`)}</tbody></table>
    <p class="hint">Bytes of the whole buffers${plan.pipeline.stages > 1 ? ", of all stages together" : ""}. Axes stand from the outermost (slowest links) to the innermost: ${names.map((n, i) => `${n} ${sizes[i]}`).join(", ")}.</p>`;
}
