// The simulated step: for each rank of the pipeline its streams, time to the right. Drawn on a canvas, for there may be thousands of boxes.
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";

import { COLLECTIVES } from "./colours.js";
import { communicationOf, draw, find, LEFT, rowsOf } from "./gantt.js";
import { html } from "./h.js";
import { MeasuredTables } from "./measured.js";
import { bytes, count, number, percent, seconds } from "./units.js";

const WORDS = {
  F: "forward", B: "backward", I: "backward of inputs", W: "backward of weights", SEND_F: "send activations", RECV_F: "receive activations",
  SEND_B: "send gradients", RECV_B: "receive gradients", GATHER: "gather parameters", REDUCE: "reduce gradients", OUTPUT: "broadcast outputs",
  U: "update",
};
export function TimelineView({ plan }) {
  const { timeline, measured } = plan;
  const whole = Math.max(timeline.step_s, measured?.end_s ?? 0);
  const canvas = useRef(null);
  const [range, setRange] = useState([0, whole]);
  const [hit, setHit] = useState(null);
  const [width, setWidth] = useState(0);
  const drag = useRef(null);
  const { rows, height } = useMemo(() => rowsOf(plan), [plan]);

  useLayoutEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(entry.contentRect.width));
    observer.observe(canvas.current.parentElement);
    return () => observer.disconnect();
  }, []);

  const scale = (width - LEFT - 10) / (range[1] - range[0]);
  const toX = (time) => LEFT + (time - range[0]) * scale;

  useEffect(() => {
    if (width > 0) draw(canvas.current, plan, rows, width, height, toX, range);
  }, [plan, width, range, rows]);

  useEffect(() => {
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    const redraw = () => setRange((old) => [...old]);
    scheme.addEventListener("change", redraw);
    addEventListener("autopar-theme", redraw);
    return () => (scheme.removeEventListener("change", redraw), removeEventListener("autopar-theme", redraw));
  }, []);

  function limit(from, to) {
    const span = Math.min(whole, Math.max(whole / 20000, to - from));
    const start = Math.max(0, Math.min(from, whole - span));
    setRange([start, start + span]);
  }

  function zoom(factor, at = (range[0] + range[1]) / 2) {
    limit(at - (at - range[0]) / factor, at + (range[1] - at) / factor);
  }

  useEffect(() => {
    const element = canvas.current;
    const wheel = (event) => {
      if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return;
      event.preventDefault();
      const x = event.clientX - element.getBoundingClientRect().left;
      if (event.shiftKey) limit(range[0] + (event.deltaX || event.deltaY) / scale, range[1] + (event.deltaX || event.deltaY) / scale);
      else zoom(Math.exp(-event.deltaY / 200), range[0] + (x - LEFT) / scale);
    };
    element.addEventListener("wheel", wheel, { passive: false });
    return () => element.removeEventListener("wheel", wheel);
  }, [range, width]);

  function point(event) {
    const box = canvas.current.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const row = rows.find((r) => y >= r.y && y < r.y + r.height);
    const found = row && x >= LEFT ? find(plan, row, range[0] + (x - LEFT) / scale, scale) : null;
    setHit(found ? { ...found, x, y } : null);
  }

  const pan = {
    onPointerDown: (event) => (drag.current = event.clientX),
    onPointerMove: (event) => {
      if (drag.current === null || !event.buttons) return point(event);
      const moved = (drag.current - event.clientX) / scale;
      drag.current = event.clientX;
      limit(range[0] + moved, range[1] + moved);
    },
    onPointerUp: () => (drag.current = null),
    onPointerLeave: () => setHit(null),
  };
  const keys = { "+": () => zoom(1.4), "=": () => zoom(1.4), "-": () => zoom(1 / 1.4), 0: () => setRange([0, whole]),
    ArrowLeft: () => limit(range[0] - 60 / scale, range[1] - 60 / scale), ArrowRight: () => limit(range[0] + 60 / scale, range[1] + 60 / scale) };
  const p = plan.prediction;
  return html`<section class="page">
    <div class="bar">
      <button onClick=${keys["+"]} title="zoom in (+)">+</button><button onClick=${keys["-"]} title="zoom out (−)">−</button><button onClick=${keys[0]} title="whole step (0)">whole step</button>
      <span>${measured ? "predicted: " : ""}${seconds(p.step_time_s)} a step, ${percent(p.bubble_fraction)} bubble, ${seconds(p.exposed_comm_s)} exposed communication, ${seconds(p.update_s)} update</span>
      <span class="hint">drag to move, Ctrl+wheel to zoom</span>
    </div>
    <div class="canvas" style=${`height:${height}px`}>
      <canvas ref=${canvas} tabindex="0" role="img" aria-label=${`timeline of ${number(timeline.ranks, "rank")}`} ...${pan}
        onKeyDown=${(e) => e.key in keys && (e.preventDefault(), keys[e.key]())} />
      ${hit && html`<${Tip} plan=${plan} hit=${hit} width=${width} />`}
    </div>
    <${Legend} plan=${plan} />
    <p class="hint">One group of rows for each rank of the pipeline; ranks of a stage do the same. It is the schedule as the simulator plays it, with predicted times.${" "}
      What may lie beside computation follows each other as soon as it can, and no later than it must to be done in the end, as it is priced.</p>
    ${measured && html`<${MeasuredTables} measured=${measured} />`}
    <${Communication} plan=${plan} />
  </section>`;
}

function Communication({ plan }) {
  const [rank, setRank] = useState(0);
  const rows = useMemo(() => communicationOf(plan, rank), [plan, rank]);
  if (!rows.length && plan.timeline.ranks === 1) return null;
  return html`<div class="bar"><h2>Predicted communication of a step</h2>
      ${plan.timeline.ranks > 1 && html`<label>pipeline rank <select value=${rank} onChange=${(e) => setRank(Number(e.target.value))}>${Array.from({ length: plan.timeline.ranks }, (_, i) => html`<option value=${i}>${i}</option>`)}</select></label>`}</div>
    <p class="hint">Inside of actions, by the size of whole buffers. What is done once a step lies where the timeline shows it.</p>
    ${rows.length === 0 ? html`<p>none</p>` : html`<table><thead><tr><th>for</th><th>collective</th><th>axis</th><th class="n">count</th><th class="n">bytes</th><th class="n">time</th><th class="n">waited for</th></tr></thead>
    <tbody>${rows.map((row) => html`<tr><td>${row.phase}</td><td><i class="dot" style=${`background:${COLLECTIVES[row.kind] ?? "var(--message)"}`}></i>${row.kind.replaceAll("_", "-")}</td><td>${row.axis}</td>
      <td class="n">${count(row.count)}</td><td class="n">${bytes(row.num_bytes)}</td><td class="n">${seconds(row.time_s)}</td><td class="n">${row.waited_s === null ? "–" : seconds(row.waited_s)}</td></tr>`)}</tbody></table>`}`;
}

function Legend({ plan }) {
  const used = new Set((plan.timeline.inside ?? []).flatMap(({ pieces }) => pieces.map(([kind]) => kind)));
  plan.measured?.ranks.forEach((each) => each.events.forEach((event) => used.add(each.names[event[5]])));
  const kinds = Object.keys(COLLECTIVES).filter((kind) => used.has(kind));
  const hasMessages = plan.timeline.events.some((event) => event[1] > 1) || [...used].some((kind) => kind !== "compute" && !COLLECTIVES[kind]);
  return html`<div class="legend">
      <span class="key"><i class="light"></i>forward</span><span class="key"><i class="dark"></i>backward</span>
      ${plan.timeline.events.some((event) => event[2] === "W") && html`<span class="key"><i class="pale"></i>backward of weights alone</span>`}
      <span class="key"><i class="hatch"></i>computation waits for communication</span><span class="key"><i class="grey"></i>${plan.pipeline.stages > 1 ? "bubble" : "idle"}</span>
      <span class="key"><i class="update"></i>update of the optimizer</span>
      ${kinds.map((kind) => html`<span class="key"><i style=${`background:${COLLECTIVES[kind]}`}></i>${kind.replaceAll("_", "-")}</span>`)}
      ${hasMessages && html`<span class="key"><i class="message"></i>messages, other communication</span>`}
      <span>zoom in for what is inside of an action${plan.pipeline.microbatches > 1 ? "; colours tell micro-batches apart, from afar all forwards are light blue and all backwards dark" : ""}</span>
      ${plan.measured && html`<span>the dashed line is the end of the predicted step</span>`}
    </div>`;
}

function Tip({ plan, hit, width }) {
  const style = `left:${Math.min(hit.x + 12, width - 330)}px;top:${hit.y + 14}px`;
  const text = { action: ActionTip, part: PartTip, span: SpanTip, seen: SeenTip }[hit.kind];
  return html`<div class="tip" style=${style}><${text} plan=${plan} hit=${hit} /></div>`;
}

const span = (start, end) => `${seconds(start)} to ${seconds(end)}: ${seconds(end - start)}`;
const action = ([, , kind, stage, batch], stages) => `${WORDS[kind]}${batch >= 0 ? ` of micro-batch ${batch}` : ""}${kind === "U" || stages === 1 ? "" : `, stage ${stage}`}`;

function ActionTip({ plan, hit }) {
  const [rank, stream, kind, stage, , start, end] = hit.event;
  const own = plan.stages[stage];
  const comm = kind === "F" ? own.forward_comm_s : kind === "B" ? own.backward_comm_s : 0;
  return html`<b>${action(hit.event, plan.stages.length)}</b><br />pipeline rank ${rank}, ${plan.timeline.streams[stream]}<br />${span(start, end)}
    ${comm > 0 && html`<br />${seconds(comm)} of it waits for communication`}`;
}

// An op is told by its module, for its name says little.
const valueName = (plan, name) => {
  const op = plan.ops.find((other) => other.name === name);
  return op ? `${op.module} ${op.op.split(".")[1] ?? op.op}`.trim() : name;
};

function PartTip({ plan, hit }) {
  const [kind, axis, of, count, numBytes, waited, hidden] = hit.piece;
  const [, , , , , start, end] = hit.event;
  const at = (share) => start + share * (end - start);
  const times = span(at(hit.part.start), at(hit.part.end));
  if (kind === "compute") return html`<b>${of || "top of the model"}</b><br />${action(hit.event, plan.stages.length)}<br />${times}`;
  return html`<b>${hit.part.isWait ? "waits for " : ""}${kind.replaceAll("_", "-")} on ${axis}</b><br />of ${valueName(plan, of)}${count > 1 ? ` and ${count - 1} more` : ""}, ${bytes(numBytes)}<br />
    ${action(hit.event, plan.stages.length)}<br />${times}<br />price ${seconds(waited + hidden)}: ${seconds(hidden)} may lie beside computation, ${seconds(waited)} may not`;
}

function SpanTip({ hit }) {
  const [start, end, , batch, phase, name] = hit.event;
  const [phaseName, of] = [hit.each.names[phase], hit.each.names[name]];
  return html`<b>${phaseName === "wait" ? "waits for " : ""}${of || phaseName}</b><br />rank ${hit.each.rank}, ${phaseName}, micro-batch ${batch}<br />${span(start, end)}`;
}

function SeenTip({ hit }) {
  const [start, end, , batch, axis, kind, phase, of, beside, numBytes, wait, hidden] = hit.event;
  const name = (number) => hit.each.names[number];
  return html`<b>${name(kind).replaceAll("_", "-")}, ${name(axis)}</b>, for ${name(phase)}<br />of ${name(of)}, ${bytes(numBytes)}<br />rank ${hit.each.rank}, micro-batch ${batch}<br />${span(start, end)}<br />
    the rank waited ${seconds(wait)} for it, and computed ${seconds(hidden)} beside it${name(beside) ? `, mostly ${name(beside)}` : ""}`;
}
