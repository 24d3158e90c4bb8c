// What a box of the graph is: everything that the plan says of it.
import { html } from "./h.js";
import { bytes, factors, number, opName, percent, seconds, shape } from "./units.js";

export function Details({ plan, item, fold, isUnfolded, isOpen, known, onToggle, onFold, onShow }) {
  if (!item) return html`<aside class="details"><${Summary} plan=${plan} onShow=${onShow} /></aside>`;
  const isModule = item.kind === "module" || item.kind === "run";
  return html`<aside class="details" aria-live="polite">
    <h2>${item.kind === "op" || item.kind === "parameter" ? item.data.name : item.label}</h2>
    ${isModule && html`<p>
      <button onClick=${() => onToggle(item)}>${isOpen ? "close" : "open"}</button>
      ${fold && html`<button onClick=${() => onFold(fold)}>${isUnfolded ? "fold equal blocks" : `unfold ${fold.members.length} equal blocks`}</button>`}
    </p>`}
    ${item.kind === "op" && html`<${Op} plan=${plan} op=${item.data} known=${known} onShow=${onShow} />`}
    ${item.kind === "parameter" && html`<${Parameter} plan=${plan} p=${item.data} />`}
    ${item.kind === "input" && html`<p>input of the model: ${plan.batch[item.data.name]}</p>`}
    ${isModule && html`<${Rows} rows=${[
      ["ops", item.total.ops],
      ["parameters", `${bytes(item.total.num_bytes)} a rank`],
      ["computation", `${seconds(item.total.time_s)} a step`],
      ["communication", `${seconds(item.total.comm_s)} a step, hidden or not`],
    ]} />`}
  </aside>`;
}

function Rows({ rows }) {
  return html`<dl>${rows.filter(([, value]) => value !== "" && value != null).map(([name, value]) => html`<dt>${name}</dt><dd>${value}</dd>`)}</dl>`;
}

function Op({ plan, op, known, onShow }) {
  const local = op.layout.map((symbol, axis) => `${plan.mesh.names[axis]}: ${symbol}`).join(", ");
  return html`
    <${Rows} rows=${[
      ["computes", op.op],
      ["module", op.module],
      ["line", op.line && html`<code>${op.line}</code>`],
      ["result", shape(op.shape)],
      ["rule", op.rule && html`<code>${op.rule}</code>`],
      ["split on", op.choices.map((choice, axis) => `${plan.mesh.names[axis]}: ${choice}`).join(", ")],
      ["lies as", local],
      ["on a rank", shape(localShape(op.shape, op.layout, plan.mesh.sizes))],
      ["stage", plan.pipeline.stages > 1 ? op.stage : ""],
      ["computed again", op.recompute],
      ["time", op.time_s ? `${seconds(op.time_s)} a step, with what is fused to it` : "with the op that it is fused to"],
      ["reads", html`${op.inputs.map((name) => (known(name) ? html`<button class="link" onClick=${() => onShow(name)}>${name}</button> ` : html`${name} <small>(a constant, whole on every rank)</small> `))}`],
    ]} />
    <${Collectives} list=${op.collectives} /><${Why} plan=${plan} text=${op.why} name=${op.name} />`;
}

// What a rank has of a result: dims that are sharded are divided by the axes that shard them.
export function localShape(sizes, layout, axes) {
  const local = [...sizes];
  layout.forEach((symbol, axis) => symbol.startsWith("S") && (local[parseInt(symbol.slice(1))] /= axes[axis]));
  return local;
}

function Parameter({ plan, p }) {
  return html`
    <${Rows} rows=${[
      ["shape", shape(p.shape)],
      ["factors", factors(p.factors)],
      ["held", p.held.map((symbol, axis) => `${plan.mesh.names[axis]}: ${symbol}`).join(", ")],
      ["on a rank", `${shape(p.local_shape)}, ${bytes(p.num_bytes)}`],
      ["stages", plan.pipeline.stages > 1 ? p.stages.join(", ") : ""],
      ["also called", p.aliases.join(", ")],
    ]} />
    <${Collectives} list=${p.collectives} /><${Why} plan=${plan} text=${p.why} name=${p.name} />`;
}

function Collectives({ list }) {
  if (!list?.length) return null;
  return html`<h3>collectives of its value</h3>
    <table><thead><tr><th>kind</th><th>axis</th><th>phase</th><th class="n">each</th><th class="n">time</th><th class="n">a step</th></tr></thead>
    <tbody>${list.map((c) => html`<tr><td>${c.kind.replaceAll("_", "-")}</td><td>${c.axis}</td><td>${c.phase}</td><td class="n">${bytes(c.num_bytes)}</td><td class="n">${seconds(c.time_s)}</td><td class="n">×${+c.count.toFixed(2)}</td></tr>`)}</tbody></table>`;
}

// What it costs as a formula, and what else it could be: all else as it is, and, where that was asked for, all else solved again.
function Why({ plan, text, name }) {
  const reason = plan.reasons?.reasons[plan.reasons.of[name]];
  return html`${reason && html`<h3>price</h3><pre>${reason.formula.split("\n").slice(1).map((line) => line.trim()).join("\n")}</pre>`}
    <h3>why this?</h3>
    ${reason && !text && html`<table><thead><tr><th>layout on (${plan.mesh.names.join(", ")})</th><th class="n">step</th></tr></thead>
      <tbody><tr class="sum"><td>${reason.chosen}</td><td class="n">as planned</td></tr>
      ${reason.alternatives.map(([layout, ratio]) => html`<tr><td>${layout}</td><td class="n">× ${ratio.toFixed(3)}</td></tr>`)}</tbody></table>
      <p class="hint">${reason.alternatives.length + reason.num_impossible === 0 ? "There is no other layout of it." : "All else as it is, and memory aside; solved again, each takes at most that."}${reason.num_impossible > 0 && ` ${reason.num_impossible} more need something else to change too.`}</p>`}
    ${text && html`<pre>${text}</pre>`}
    ${!text && html`<p class="hint"><code>plan.explain("${name}")</code> solves the rest again around each; <code>plan.to_html(path, explain=["${name}"])</code>, or <code>explain="all"</code>, puts that here.${
      plan.reasons ? "" : " A loaded plan is bound to its model first: autopar.plan(model, cluster, batch, plan=plan)."}</p>`}`;
}

// Where the time goes: ops of equal blocks that take the same time are one row, the largest sums first.
export function slowest(ops, most = 6) {
  const found = new Map();
  for (const op of ops) {
    const key = `${opName(op.op)}|${op.module.replace(/(?<=^|\.)\d+(?=\.|$)/g, "*")}|${op.time_s.toPrecision(4)}`;
    const row = found.get(key) ?? { op, count: 0, time_s: 0 };
    found.set(key, { ...row, count: row.count + 1, time_s: row.time_s + op.time_s });
  }
  return [...found.values()].sort((a, b) => b.time_s - a.time_s).slice(0, most);
}

function Slowest({ plan, onShow }) {
  return html`<h3>where computation goes</h3>
    <table><tbody>${slowest(plan.ops).map(({ op, count, time_s }) => html`<tr><td class="n">${seconds(time_s)}</td><td>
      <button class="link" onClick=${() => onShow(op.name)}>${op.module || opName(op.op)}</button> ${op.module ? opName(op.op) : ""}${count > 1 ? ` and ${count - 1} equal` : ""}</td></tr>`)}</tbody></table>
    <p class="hint">Forward and backward of a step${plan.pipeline.stages > 1 ? ", of all micro-batches and stages" : ""}; what is hidden of communication, and what is waited for, is in the timeline.</p>`;
}

// What else was tried: grids, stages, micro-batches and schedules, the best first.
function Tried({ plan }) {
  const rows = plan.alternatives ?? [];
  if (rows.length < 2) return null;
  return html`<h3>shapes tried</h3><table><thead><tr><th>shape</th><th class="n">step</th><th class="n">bubble</th><th class="n">memory</th></tr></thead>
    <tbody>${rows.map((row) => html`<tr title=${row.reason}><td>${row.shape}</td><td class="n">${row.reason ? "–" : seconds(row.step_time_s)}</td><td class="n">${percent(row.bubble_fraction)}</td><td class="n">${bytes(row.peak_memory_bytes)}</td></tr>`)}</tbody></table>`;
}

function Summary({ plan, onShow }) {
  const p = plan.prediction;
  return html`<h2>${plan.model}</h2>
    <${Rows} rows=${[
      ["mesh", plan.gridText],
      ["machine", plan.machine],
      ["configuration", plan.config || "automatic"],
      ["precision", plan.precision || `${plan.dtypes.join(" and ")}, as the model does by itself${plan.dtypes.includes("float32") ? "; precision='bf16' would compute in bf16" : ""}`],
      ["batch", Object.entries(plan.batch).map(([name, text]) => html`<div>${name} ${text}</div>`)],
      ["step", `${seconds(p.step_time_s)}, of which ${seconds(p.exposed_comm_s)} exposed communication`],
      ["solved", `${number(plan.stats.num_variables, "variable")} in ${seconds(plan.stats.solve_time_s)}, within ${(100 * plan.stats.gap).toPrecision(2)}% of the optimum`],
    ]} />
    <${Slowest} plan=${plan} onShow=${onShow} />
    <${Tried} plan=${plan} />
    ${plan.notes.length > 0 && html`<h3>notes</h3><ul>${plan.notes.map((note) => html`<li>${note}</li>`)}</ul>`}`;
}
