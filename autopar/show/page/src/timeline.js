// The simulated step: for each rank of the pipeline its streams, time to the right. Drawn on a canvas, for there may be thousands of boxes.
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";

import { microBatch } from "./colours.js";
import { html } from "./h.js";
import { percent, seconds } from "./units.js";

const WORDS = {
  F: "forward", B: "backward", I: "backward of inputs", W: "backward of weights", SEND_F: "send activations", RECV_F: "receive activations",
  SEND_B: "send gradients", RECV_B: "receive gradients", GATHER: "gather parameters", REDUCE: "reduce gradients", U: "update",
};
const LEFT = 74;
const TOP = 22;
const COMPUTE = 20;
const OTHER = 7;
const GAP = 9;
const THIN = 5;
const THIN_COLOURS = { F: "#56b4e9", B: "#0072b2", I: "#0072b2", W: "#009e73" };

// Rows of the picture: each rank has one of computation, and one of each other stream that it uses.
export function rowsOf(timeline) {
  const rows = [];
  let y = TOP;
  for (let rank = 0; rank < timeline.ranks; rank++) {
    for (let stream = 0; stream < timeline.streams.length; stream++) {
      if (stream > 0 && !timeline.events.some((event) => event[0] === rank && event[1] === stream)) continue;
      const height = stream === 0 ? COMPUTE : OTHER;
      rows.push({ rank, stream, y, height });
      y += height + 1;
    }
    y += GAP;
  }
  return { rows, height: y };
}

export function TimelineView({ plan }) {
  const { timeline } = plan;
  const canvas = useRef(null);
  const [range, setRange] = useState([0, timeline.step_s]);
  const [hit, setHit] = useState(null);
  const [width, setWidth] = useState(0);
  const drag = useRef(null);
  const { rows, height } = useMemo(() => rowsOf(timeline), [timeline]);

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
    const span = Math.min(timeline.step_s, Math.max(timeline.step_s / 5000, to - from));
    const start = Math.max(0, Math.min(from, timeline.step_s - span));
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

  function find(event) {
    const box = canvas.current.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const row = rows.find((r) => y >= r.y && y < r.y + r.height);
    const time = range[0] + (x - LEFT) / scale;
    const found = row && timeline.events.find((e) => e[0] === row.rank && e[1] === row.stream && e[5] <= time && time <= e[6]);
    setHit(found ? { event: found, x, y } : null);
  }

  const pan = {
    onPointerDown: (event) => (drag.current = event.clientX),
    onPointerMove: (event) => {
      if (drag.current === null || !event.buttons) return find(event);
      const moved = (drag.current - event.clientX) / scale;
      drag.current = event.clientX;
      limit(range[0] + moved, range[1] + moved);
    },
    onPointerUp: () => (drag.current = null),
    onPointerLeave: () => setHit(null),
  };
  const keys = { "+": () => zoom(1.4), "=": () => zoom(1.4), "-": () => zoom(1 / 1.4), 0: () => setRange([0, timeline.step_s]),
    ArrowLeft: () => limit(range[0] - 60 / scale, range[1] - 60 / scale), ArrowRight: () => limit(range[0] + 60 / scale, range[1] + 60 / scale) };
  const p = plan.prediction;
  return html`<section class="page">
    <div class="bar">
      <button onClick=${keys["+"]} title="zoom in (+)">+</button><button onClick=${keys["-"]} title="zoom out (−)">−</button><button onClick=${keys[0]} title="whole step (0)">whole step</button>
      <span>${seconds(p.step_time_s)} a step: ${percent(p.bubble_fraction)} bubble, ${seconds(p.exposed_comm_s)} exposed communication, ${seconds(p.update_s)} update</span>
      <span class="hint">drag to move, Ctrl+wheel to zoom</span>
    </div>
    <div class="canvas" style=${`height:${height}px`}>
      <canvas ref=${canvas} tabindex="0" role="img" aria-label=${`timeline of ${timeline.ranks} ranks`} ...${pan}
        onKeyDown=${(e) => e.key in keys && (e.preventDefault(), keys[e.key]())} />
      ${hit && html`<${Tip} plan=${plan} hit=${hit} width=${width} />`}
    </div>
    <div class="legend">
      <span class="key"><i class="light"></i>forward</span><span class="key"><i class="dark"></i>backward</span><span class="key"><i class="pale"></i>backward of weights alone</span>
      <span class="key"><i class="hatch"></i>communication that computation waits for</span><span class="key"><i class="grey"></i>bubble</span>
      <span class="key"><i class="comm"></i>thin rows: collectives, messages</span>
      <span>colours tell micro-batches apart; from afar, all forwards are light blue and all backwards dark</span>
    </div>
    <p class="hint">One row for each rank of the pipeline; ranks of a stage do the same. It is the schedule as the simulator plays it, with predicted times.${" "}
      ${Math.abs(timeline.step_s / p.step_time_s - 1) > 0.001 && html`Without stages the step is predicted op by op (${seconds(p.step_time_s)}), and played here in one piece (${seconds(timeline.step_s)}).`}</p>
  </section>`;
}

function Tip({ plan, hit, width }) {
  const [rank, stream, kind, stage, batch, start, end] = hit.event;
  const own = plan.stages[stage];
  const comm = kind === "F" ? own.forward_comm_s : kind === "B" ? own.backward_comm_s : 0;
  return html`<div class="tip" style=${`left:${Math.min(hit.x + 12, width - 270)}px;top:${hit.y + 14}px`}>
    <b>${WORDS[kind]}</b>${batch >= 0 ? ` of micro-batch ${batch}` : ""}${kind === "U" ? "" : `, stage ${stage}`}<br />
    rank ${rank}, ${plan.timeline.streams[stream]}<br />${seconds(start)} to ${seconds(end)}: ${seconds(end - start)}
    ${comm > 0 && html`<br />${seconds(comm)} of it waits for communication`}
  </div>`;
}

function draw(canvas, plan, rows, width, height, toX, range) {
  const ratio = devicePixelRatio || 1;
  [canvas.width, canvas.height] = [width * ratio, height * ratio];
  [canvas.style.width, canvas.style.height] = [`${width}px`, `${height}px`];
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const { timeline } = plan;
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  drawAxis(context, colour, toX, range, width, height);
  const place = new Map(rows.map((row) => [`${row.rank},${row.stream}`, row]));
  context.save();
  context.beginPath();
  context.rect(LEFT, 0, width - LEFT - 9, height);
  context.clip();
  for (const row of rows.filter(({ stream }) => stream === 0)) {
    context.fillStyle = colour("--bubble");
    context.fillRect(toX(0), row.y, toX(timeline.step_s) - toX(0), row.height);
  }
  for (const event of timeline.events) {
    const [rank, stream, kind, stage, batch, start, end] = event;
    if (end < range[0] || start > range[1] || end <= start) continue;
    const row = place.get(`${rank},${stream}`);
    const [x, w] = [toX(start), Math.max(0.7, toX(end) - toX(start))];
    context.globalAlpha = w < THIN ? 1 : kind === "F" ? 0.62 : kind === "W" ? 0.4 : 1;
    const isThin = w < THIN; // then colours of micro-batches would be noise
    context.fillStyle = kind === "U" ? colour("--update") : stream > 0 ? colour("--comm") : isThin ? THIN_COLOURS[kind] : microBatch(batch);
    context.fillRect(x, row.y, w > 3 ? w - 0.7 : w, row.height);
    context.globalAlpha = 1;
    if (stream > 0) continue;
    const own = plan.stages[stage];
    const comm = kind === "F" ? own.forward_comm_s / own.forward_s : kind === "B" ? own.backward_comm_s / own.backward_s : 0;
    if (comm > 0 && w > 3) hatch(context, x + w * (1 - comm), row.y + row.height * 0.72, w * comm - 0.7, row.height * 0.28, colour("--hatch"));
    if (w > 22) {
      const label = kind === "U" ? "update" : `${plan.stages.length > timeline.ranks ? stage : ""}${kind}${batch}`;
      if (context.measureText(label).width < w - 3) {
        context.fillStyle = kind === "U" ? colour("--page") : "#10202c";
        context.fillText(label, x + 3, row.y + row.height * 0.42);
      }
    }
  }
  context.restore();
  context.fillStyle = colour("--ink");
  for (const row of rows.filter(({ stream }) => stream === 0)) context.fillText(timeline.ranks > 1 ? `position ${row.rank}` : "every rank", 6, row.y + row.height / 2);
}

function drawAxis(context, colour, toX, range, width, height) {
  const rough = (range[1] - range[0]) / 8;
  const power = 10 ** Math.floor(Math.log10(rough));
  const tick = [1, 2, 5, 10].map((m) => m * power).find((step) => step >= rough);
  for (let time = Math.ceil(range[0] / tick) * tick; time <= range[1]; time += tick) {
    const x = toX(time);
    context.fillStyle = colour("--grid");
    context.fillRect(x, TOP - 6, 1, height);
    context.fillStyle = colour("--muted");
    if (x < width - 60) context.fillText(seconds(Math.abs(time) < tick / 1e6 ? 0 : time), x + 3, 8);
  }
}

function hatch(context, x, y, width, height, colour) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.strokeStyle = colour;
  context.lineWidth = 1;
  context.beginPath();
  for (let at = x - height; at < x + width; at += 4) {
    context.moveTo(at, y + height);
    context.lineTo(at + height, y);
  }
  context.stroke();
  context.restore();
}
