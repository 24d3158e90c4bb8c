// The timeline as rows of boxes on a canvas: predicted actions with what they are made of, and what real ranks did.
import { COLLECTIVES, microBatch } from "./colours.js";
import { seconds } from "./units.js";

export const LEFT = 116;
export const TOP = 22;
const COMPUTE = 28;
const LANE = 10;
const GAP = 10;
const THIN = 5;
const INSIDE = 48; // an action that is as wide shows its parts
const THIN_COLOURS = { F: "#56b4e9", B: "#0072b2", I: "#0072b2", W: "#009e73" };
const STREAMS = ["compute", "collective", "send", "receive"];
const SHORT = { collective: "once", send: "send", receive: "recv" };
const PHASES = { forward: "F", backward: "B" };

export const collectiveColour = (kind, colour) => COLLECTIVES[kind] ?? colour("--message");

// Parts of an action: what stands on the row of computation, and what on the lane of each axis; times are shares of the action.
export function partsOf(plan, stage, kind) {
  const inside = plan.timeline.inside?.[stage];
  const parts = inside?.parts[kind];
  if (!parts) return null;
  inside.sorted ??= {};
  return (inside.sorted[kind] ??= sort(parts));
}

function sort(parts) {
  const found = { main: [], axes: {} };
  for (const [piece, lane, start, end] of parts) {
    const part = { piece, isWait: lane === "wait", start: start / 1e6, end: end / 1e6 };
    if (lane === "compute" || lane === "wait") found.main.push(part);
    else (found.axes[lane] ??= []).push(part);
  }
  for (const list of [found.main, ...Object.values(found.axes)]) list.sort((a, b) => a.start - b.start);
  found.waited = found.main.filter((part) => part.isWait).reduce((sum, part) => sum + part.end - part.start, 0);
  return found;
}

// Rows from above: for each rank of the pipeline computation, the lanes of axes and of messages; below it, what ranks of it were seen to do.
export function rowsOf(plan) {
  const { timeline, measured } = plan;
  const rows = [];
  let y = TOP;
  const add = (row, height) => (rows.push({ ...row, y, height }), (y += height + 1));
  const order = [...plan.mesh.names, "host"];
  const sorted = (axes) => [...axes].sort((a, b) => (order.indexOf(a) + 99) % 99 - ((order.indexOf(b) + 99) % 99) || (a < b ? -1 : 1));
  for (let rank = 0; rank < timeline.ranks; rank++) {
    const own = timeline.events.filter((event) => event[0] === rank);
    const axes = new Set();
    const seen = new Set();
    for (const [, stream, kind, stage] of own) {
      if (seen.has(`${stream},${kind},${stage}`)) continue;
      seen.add(`${stream},${kind},${stage}`);
      Object.keys(partsOf(plan, stage, kind)?.axes ?? {}).forEach((axis) => axes.add(axis));
    }
    add({ rank, lane: "compute", label: timeline.ranks > 1 ? `pipeline rank ${rank}` : measured ? "predicted" : "every rank" }, COMPUTE);
    for (const axis of sorted(axes)) add({ rank, lane: axis, isAxis: true, label: axis }, LANE);
    for (let stream = 1; stream < STREAMS.length; stream++) {
      if (own.some((event) => event[1] === stream && !(stream === 1 && partsOf(plan, event[3], event[2])))) {
        add({ rank, lane: STREAMS[stream], stream, label: SHORT[STREAMS[stream]] }, LANE);
      }
    }
    measured?.ranks.forEach((each, number) => {
      if (each.position !== rank) return;
      y += 3;
      add({ rank, measured: number, lane: "compute", label: `rank ${each.rank}, measured` }, COMPUTE - 8);
      for (const axis of sorted(new Set(each.events.map((event) => each.names[event[4]])))) {
        add({ rank, measured: number, lane: axis, isAxis: true, label: axis }, LANE);
      }
    });
    y += GAP;
  }
  return { rows, height: y };
}

// Communication inside of the actions of a rank of the pipeline, by what it is for: how often, bytes, time, and how long is waited for it.
export function communicationOf(plan, rank) {
  const found = new Map();
  const words = { F: "forward", GATHER: "gather parameters", REDUCE: "reduce gradients", OUTPUT: "outputs" };
  for (const [owner, , kind, stage, , start, end] of plan.timeline.events) {
    const parts = owner === rank && kind !== "U" && partsOf(plan, stage, kind);
    if (!parts) continue;
    const { pieces } = plan.timeline.inside[stage];
    const row = (piece) => {
      const [what, axis] = pieces[piece];
      const key = `${words[kind] ?? "backward"}|${what}|${axis}`;
      if (!found.has(key)) found.set(key, { phase: words[kind] ?? "backward", kind: what, axis, count: 0, num_bytes: 0, time_s: 0, waited_s: kind in words && kind !== "F" ? null : 0 });
      return found.get(key);
    };
    const counted = new Set();
    for (const part of Object.values(parts.axes).flat()) {
      const own = row(part.piece);
      own.time_s += (part.end - part.start) * (end - start);
      if (counted.has(part.piece)) continue;
      counted.add(part.piece);
      [own.count, own.num_bytes] = [own.count + 1, own.num_bytes + pieces[part.piece][4]];
    }
    for (const part of parts.main) if (part.isWait && row(part.piece).waited_s !== null) row(part.piece).waited_s += (part.end - part.start) * (end - start);
  }
  return [...found.values()].sort((a, b) => b.time_s - a.time_s);
}

// What lies under the pointer: an action or one of its parts, or a span or collective that was measured.
export function find(plan, row, time, scale) {
  if (row.measured !== undefined) {
    const each = plan.measured.ranks[row.measured];
    const within = (entry) => entry[0] <= time && time <= entry[1];
    if (!row.isAxis) return wrap("span", each.spans.find(within), each);
    return wrap("seen", each.events.find((event) => each.names[event[4]] === row.lane && within(event)), each);
  }
  const { events } = plan.timeline;
  const around = (event) => event[0] === row.rank && event[5] <= time && time <= event[6];
  if (row.stream !== undefined) return wrap("action", events.find((event) => event[1] === row.stream && around(event)));
  for (const event of events) {
    if (!around(event) || event[1] > 1 || (!row.isAxis && event[1] === 1)) continue;
    const parts = partsOf(plan, event[3], event[2]);
    const isWide = (event[6] - event[5]) * scale > INSIDE || event[1] === 1;
    const at = (time - event[5]) / (event[6] - event[5]);
    const part = isWide && (row.isAxis ? parts?.axes[row.lane] : parts?.main)?.find(({ start, end }) => start <= at && at <= end);
    if (part) return { kind: "part", event, part, piece: plan.timeline.inside[event[3]].pieces[part.piece] };
    if (!row.isAxis) return { kind: "action", event };
  }
  return null;
}

const wrap = (kind, event, each) => (event ? { kind, event, each } : null);

export function draw(canvas, plan, rows, width, height, toX, range) {
  const ratio = devicePixelRatio || 1;
  [canvas.width, canvas.height] = [width * ratio, height * ratio];
  [canvas.style.width, canvas.style.height] = [`${width}px`, `${height}px`];
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  const style = getComputedStyle(document.documentElement);
  const known = {};
  const colour = (name) => (known[name] ??= style.getPropertyValue(name).trim());
  const picture = { context, plan, toX, range, colour };
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  drawAxis(picture, width, height);
  context.save();
  context.beginPath();
  context.rect(LEFT, 0, width - LEFT - 9, height);
  context.clip();
  for (const row of rows) {
    const end = row.measured === undefined ? plan.timeline.step_s : plan.measured.ranks[row.measured].step[1];
    const begin = row.measured === undefined ? 0 : plan.measured.ranks[row.measured].step[0];
    context.fillStyle = colour(row.lane === "compute" ? "--bubble" : "--grid");
    context.fillRect(toX(begin), row.y, toX(end) - toX(begin), row.height);
  }
  drawPredicted(picture, rows);
  for (const row of rows.filter(({ measured }) => measured !== undefined)) drawMeasured(picture, row);
  if (plan.measured) drawEnd(picture, plan.timeline.step_s, height);
  context.restore();
  for (const row of rows) {
    context.font = `${row.lane === "compute" ? 11 : 9.5}px system-ui, sans-serif`;
    context.fillStyle = colour(row.lane === "compute" ? "--ink" : "--muted");
    context.fillText(row.label, row.lane === "compute" ? 6 : 18, row.y + row.height / 2 + 0.5, LEFT - 22);
  }
}

function drawPredicted({ context, plan, toX, range, colour }, rows) {
  const place = new Map(rows.filter(({ measured }) => measured === undefined).map((row) => [`${row.rank},${row.lane}`, row]));
  for (const [rank, stream, kind, stage, batch, start, end] of plan.timeline.events) {
    if (end < range[0] || start > range[1] || end <= start) continue;
    const picture = { context, toX, range, colour, start, length: end - start };
    const parts = kind === "U" ? null : partsOf(plan, stage, kind);
    const pieces = parts && plan.timeline.inside[stage].pieces;
    const [x, w] = [toX(start), Math.max(0.7, toX(end) - toX(start))];
    const isWide = w > INSIDE;
    for (const [axis, list] of Object.entries(parts?.axes ?? {})) {
      const row = place.get(`${rank},${axis}`);
      if (isWide || stream === 1) drawLane(picture, row, list, (part) => collectiveColour(pieces[part.piece][0], colour));
      else shade(context, x, w, row, list, collectiveColour(pieces[list.reduce((a, b) => (b.end - b.start > a.end - a.start ? b : a)).piece][0], colour));
    }
    if (stream === 1 && parts) continue;
    const row = place.get(`${rank},${STREAMS[stream]}`);
    context.fillStyle = kind === "U" ? colour("--update") : stream > 0 ? colour("--message") : w < THIN ? THIN_COLOURS[kind] : microBatch(batch);
    const alpha = w < THIN ? 1 : kind === "F" ? 0.62 : kind === "W" ? 0.4 : 1; // thin ones in colours of micro-batches would be noise
    const ink = kind === "U" ? colour("--page") : inkOn(microBatch(batch), alpha, colour("--page"));
    context.globalAlpha = alpha;
    context.fillRect(x, row.y, w > 3 ? w - 0.7 : w, row.height);
    context.globalAlpha = 1;
    if (stream > 0) continue;
    if (isWide && parts) drawParts({ ...picture, ink }, row, parts.main, pieces);
    else if (parts?.waited > 0 && w > 3) waits(picture, x + w * (1 - parts.waited), row.y + row.height * 0.7, w * parts.waited - 0.7, row.height * 0.3);
    const name = kind === "U" ? "update" : `${plan.stages.length > plan.timeline.ranks ? stage : ""}${kind}${batch}`;
    const shown = isWide && parts ? labelAt(parts.main, x, w) : Math.max(x, LEFT);
    if (x + w - shown > 22) write(context, name, shown + 3, row.y + 8, x + w - shown - 5, ink, true);
  }
}

// Where the name of an action stands: on its first computation in sight, or the next that has room for it if that is near.
function labelAt(parts, x, width) {
  const seen = parts.filter((part) => !part.isWait && x + part.end * width > LEFT + 8).map((part) => [Math.max(LEFT, x + part.start * width), x + part.end * width]);
  const [begin] = seen[0] ?? [Math.max(x, LEFT)];
  return (seen.find(([start, end]) => start < begin + 60 && end - start > 34) ?? [begin])[0];
}

// Computation by module, and where it stands still.
function drawParts({ context, toX, colour, ink, start, length }, row, parts, pieces) {
  let reached = -1;
  for (const part of parts) {
    const [x, end] = [toX(start + part.start * length), toX(start + part.end * length)];
    if (end < LEFT || x > context.canvas.width || end < reached + 0.6) continue;
    reached = end;
    if (part.isWait) {
      waits({ context, colour }, x, row.y, Math.max(0.8, end - x), row.height);
    } else if (end - x > 2) {
      context.fillStyle = colour("--page");
      context.fillRect(end - 0.6, row.y + row.height / 2, 0.6, row.height / 2);
      write(context, tail(pieces[part.piece][2]), Math.max(x, LEFT) + 3, row.y + row.height - 8, end - Math.max(x, LEFT) - 5, ink, false);
    }
  }
}

// Words on a colour that lies with some opacity on the page: dark or light, whichever tells apart better.
function inkOn(paint, alpha, page) {
  const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16) / 255);
  const under = channels(page);
  const [r, g, b] = channels(paint).map((value, i) => (value * alpha + under[i] * (1 - alpha)) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.22 ? "#10202c" : "#ffffff";
}

export const tail = (name) => (name === "" ? "top" : name.replace(/^.*?(?=[^.]+\.\d+(\.|$| ))/, ""));

function drawLane({ context, toX, start, length }, row, parts, paint) {
  let reached = -1;
  for (const part of parts) {
    const [x, end] = [toX(start + part.start * length), toX(start + part.end * length)];
    if (end < LEFT || x > context.canvas.width || end < reached + 0.5) continue;
    reached = Math.max(end, x + 0.8);
    context.fillStyle = paint(part);
    context.fillRect(x, row.y, Math.max(0.8, end - x - 0.4), row.height);
  }
}

// From afar: how much of an action a lane is in use.
function shade(context, x, width, row, parts, paint) {
  context.fillStyle = paint;
  context.globalAlpha = Math.min(1, parts.reduce((sum, { start, end }) => sum + end - start, 0));
  context.fillRect(x, row.y, width, row.height);
  context.globalAlpha = 1;
}

function drawMeasured({ context, plan, toX, range, colour }, row) {
  const each = plan.measured.ranks[row.measured];
  if (row.isAxis) {
    for (const event of each.events) {
      if (each.names[event[4]] !== row.lane || event[1] < range[0] || event[0] > range[1]) continue;
      context.fillStyle = collectiveColour(each.names[event[5]], colour);
      context.fillRect(toX(event[0]), row.y, Math.max(0.8, toX(event[1]) - toX(event[0])), row.height);
    }
    return;
  }
  for (const [start, end, , batch, phaseNumber, name] of each.spans) {
    if (end < range[0] || start > range[1]) continue;
    const phase = each.names[phaseNumber];
    const [x, w] = [toX(start), Math.max(0.6, toX(end) - toX(start))];
    if (phase === "idle") continue;
    context.globalAlpha = phase === "forward" ? 0.62 : 1;
    context.fillStyle = PHASES[phase] ? microBatch(batch) : colour("--update");
    if (phase !== "wait") context.fillRect(x, row.y, w, row.height);
    context.globalAlpha = 1;
    if (phase === "wait") waits({ context, colour }, x, row.y, w, row.height);
    else write(context, tail(each.names[name]), Math.max(x, LEFT) + 3, row.y + row.height / 2, x + w - Math.max(x, LEFT) - 5, PHASES[phase] ? inkOn(microBatch(batch), phase === "forward" ? 0.62 : 1, colour("--page")) : colour("--page"), false);
  }
}

// Where the predicted step is over, for what was measured to be held against.
function drawEnd({ context, toX, colour }, time, height) {
  context.strokeStyle = colour("--ink");
  context.setLineDash([4, 3]);
  context.beginPath();
  context.moveTo(toX(time), TOP - 6);
  context.lineTo(toX(time), height);
  context.stroke();
  context.setLineDash([]);
}

function write(context, text, x, y, room, paint, isBold) {
  if (room < 8) return;
  context.font = `${isBold ? "600 " : ""}11px system-ui, sans-serif`;
  if (context.measureText(text).width > room) return;
  context.fillStyle = paint;
  context.fillText(text, x, y);
}

function drawAxis({ context, toX, range, colour }, width, height) {
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

// Computation stands still: hatched.
function waits({ context, colour }, x, y, width, height) {
  context.fillStyle = colour("--page");
  context.fillRect(x, y, width, height);
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.strokeStyle = colour("--hatch");
  context.lineWidth = 1;
  context.beginPath();
  const first = Math.max(x, LEFT - height);
  for (let at = first - height - ((first - x) % 4); at < Math.min(x + width, 8000); at += 4) {
    context.moveTo(at, y + height);
    context.lineTo(at + height, y);
  }
  context.stroke();
  context.restore();
}
