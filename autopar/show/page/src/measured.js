// What was predicted beside what was measured on a rank, as tables, the largest surprises first.
import { useState } from "preact/hooks";

import { html } from "./h.js";
import { seconds } from "./units.js";

export function MeasuredTables({ measured }) {
  const [number, setNumber] = useState(0);
  const each = measured.ranks[number];
  const first = each.collectives.slice(0, 12);
  return html`<div class="bar"><h2>Predicted and measured</h2>
      <label>rank <select value=${number} onChange=${(e) => setNumber(Number(e.target.value))}>${measured.ranks.map((other, i) => html`<option value=${i}>${other.rank}</option>`)}</select></label>
      <span class="hint">seconds of a step, the median of ${measured.steps}; above is step ${measured.step}, the one of median length${measured.recorded > measured.ranks.length ? `, on ${measured.ranks.length} of ${measured.recorded} ranks` : ""}</span></div>
    <div class="beside"><${Compared} what="phase" rows=${each.phases} hasFooter=${true} />
      ${first.length > 0 && html`<${Compared} what="collectives that are priced, hidden or not" rows=${first} />`}</div>`;
}

const signed = (value) => `${value < 0 ? "−" : "+"}${seconds(Math.abs(value))}`;

function Compared({ what, rows, hasFooter }) {
  const body = hasFooter ? rows.slice(0, -1) : rows;
  const most = Math.max(...body.map(([, predicted, seen]) => Math.abs(seen - predicted)), 1e-12);
  return html`<table class="compared"><thead><tr><th>${what}</th><th class="n">predicted</th><th class="n">measured</th><th class="n">difference</th><th class="n">ratio</th><th></th></tr></thead>
    <tbody>${rows.map(([name, predicted, seen], i) => html`<tr class=${hasFooter && i === rows.length - 1 ? "sum" : ""}><td>${name}</td><td class="n">${seconds(predicted)}</td><td class="n">${seconds(seen)}</td>
      <td class="n">${signed(seen - predicted)}</td><td class="n">${predicted ? (seen / predicted).toFixed(2) : "–"}</td><td><${Bar} share=${hasFooter && i === rows.length - 1 ? 0 : (seen - predicted) / most} /></td></tr>`)}</tbody></table>`;
}

// To the right: longer than predicted; to the left: shorter.
function Bar({ share }) {
  const half = 40;
  return html`<svg width=${2 * half} height="10" aria-hidden="true"><line x1=${half} x2=${half} y1="0" y2="10" class="grid" />
    <rect x=${share < 0 ? half * (1 + share) : half} y="2" width=${half * Math.abs(share)} height="6" class=${share < 0 ? "less" : "more"} /></svg>`;
}
