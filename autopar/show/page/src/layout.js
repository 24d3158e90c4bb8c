// Places for boxes and arrows, by dagre: layered, top to bottom, modules as frames around what is in them.
import dagre from "@dagrejs/dagre";

import { bytes, seconds, shape } from "./units.js";

const LINE = 15;
const TITLE = 12;
const width = (lines) => Math.max(72, ...lines.map((line, i) => line.length * (i === 0 ? 7.4 : 6.3) + 22));

// The lines of text of a box.
export function linesOf(item) {
  const { kind, data, total } = item;
  if (kind === "input") return [item.label];
  if (kind === "parameter") return [item.label, `[${data.held.join(" ")}] ${shape(data.local_shape)}`];
  const comm = total.comm_s > 0 ? [`⇄ ${seconds(total.comm_s)}`] : [];
  if (kind === "op") {
    const time = data.time_s ? ` ${seconds(data.time_s)}` : "";
    return [item.label + (data.recompute ? " ↻" : ""), `[${data.layout.join(" ")}]${time}`, ...comm];
  }
  const count = kind === "run" ? ` ×${item.members.length}` : "";
  const state = [total.num_bytes ? bytes(total.num_bytes) : "", total.time_s ? seconds(total.time_s) : ""].filter(Boolean).join(", ");
  return [item.label + count, `${total.ops} ${total.ops === 1 ? "op" : "ops"}${state ? `, ${state}` : ""}`, ...comm];
}

export function layOut(seen) {
  const graph = new dagre.graphlib.Graph({ compound: true });
  graph.setGraph({ rankdir: "TB", nodesep: 14, ranksep: 34, edgesep: 8, marginx: 20, marginy: 20 });
  graph.setDefaultEdgeLabel(() => ({}));
  for (const frame of seen.frames) graph.setNode(frame.id, {});
  for (const frame of seen.frames) if (frame.frame) graph.setParent(frame.id, frame.frame);
  for (const node of seen.nodes) {
    const lines = linesOf(node.item);
    graph.setNode(node.id, { width: width(lines), height: LINE * lines.length + 14, lines });
    if (node.frame) graph.setParent(node.id, node.frame);
  }
  for (const { from, to, shapes } of seen.edges) {
    const label = shapes.size === 1 ? [...shapes][0] : shapes.size > 1 ? `${shapes.size} shapes` : "";
    graph.setEdge(from, to, { label, width: label ? label.length * 5.4 + 4 : 0, height: label ? 12 : 0, labelpos: "r" });
  }
  dagre.layout(graph);
  seen.frames.toReversed().forEach(({ id, frame }) => raise(graph, id, frame));
  const placed = (list) => list.map(({ id, item }) => ({ id, item, ...graph.node(id) }));
  const { width: w = 0, height: h = 0 } = graph.graph();
  return {
    nodes: placed(seen.nodes),
    frames: placed(seen.frames),
    edges: seen.edges.map(({ from, to }) => ({ from, to, ...graph.edge(from, to) })),
    width: w,
    height: h,
  };
}

// Room for the name of a frame above what is in it, which dagre leaves none for; inner frames come first.
function raise(graph, id, parent) {
  const box = graph.node(id);
  const raised = TITLE + (box.raised ?? 0);
  Object.assign(box, { y: box.y - raised / 2, height: box.height + raised });
  if (parent) graph.node(parent).raised = Math.max(graph.node(parent).raised ?? 0, box.y - box.height / 2 < top(graph, parent) + 4 ? raised : 0);
}

const top = (graph, id) => graph.node(id).y - graph.node(id).height / 2;

// A smooth line through points.
export function path(points) {
  const [first, ...rest] = points;
  let text = `M${first.x},${first.y}`;
  for (let i = 0; i < rest.length - 1; i++) {
    const middle = { x: (rest[i].x + rest[i + 1].x) / 2, y: (rest[i].y + rest[i + 1].y) / 2 };
    text += `Q${rest[i].x},${rest[i].y} ${middle.x},${middle.y}`;
  }
  const last = rest.at(-1);
  return `${text}L${last.x},${last.y}`;
}
