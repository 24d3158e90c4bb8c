// The tree of a plan, what is seen of it, and the arithmetic of the other views; `npm test`, with no browser.
import assert from "node:assert/strict";
import { test } from "node:test";

import { coordinate, levelsOf, rangesOf, shardOf, trafficOf } from "../src/cluster.js";
import { labelPlaces } from "../src/compare.js";
import { layoutColours, OTHERS, REPLICATED } from "../src/colours.js";
import { localShape, slowest } from "../src/details.js";
import { layOut } from "../src/layout.js";
import { fullest, layersOf } from "../src/memory.js";
import { communicationOf, find, rowsOf, tail } from "../src/gantt.js";
import { buildTree, findIn, firstOpen, leavesOf, nameOf, visible, wayTo } from "../src/tree.js";
import { bytes, count, number, seconds, ticks } from "../src/units.js";

const BLOCKS = 6;

const op = (name, module, inputs, layout = ["S0", "R"], stage = 0) => ({
  name, op: "aten.mm", module, line: "", shape: [8, 4], rule: "", choices: ["m", "R"], layout, time_s: 1e-3, inputs, stage, recompute: "",
});
const parameter = (name, stages = [0]) => ({
  name, aliases: [], shape: [4, 4], factors: [[4], [4]], held: ["Z3", "R"], local_shape: [2, 4], num_bytes: 32, stages,
});

// wte, then equal blocks of a product and a sum, then a head; `odd` is a block that lies otherwise.
function plan({ odd = null, stages = 1 } = {}) {
  const stageOf = (i) => Math.floor((i * stages) / BLOCKS);
  const ops = [op("embed", "wte", ["ids", "wte.weight"])];
  const parameters = [parameter("wte.weight")];
  let before = "embed";
  for (let i = 0; i < BLOCKS; i++) {
    parameters.push(parameter(`h.${i}.fc.weight`, [stageOf(i)]));
    ops.push(op(`mm_${i}`, `h.${i}.fc`, [before, `h.${i}.fc.weight`, "mask"], i === odd ? ["R", "S1"] : ["S0", "R"], stageOf(i)));
    ops.push(op(`add_${i}`, `h.${i}`, [`mm_${i}`, before], ["S0", "R"], stageOf(i)));
    before = `add_${i}`;
  }
  ops.push(op("head", "head", [before], ["S0", "R"], stages - 1));
  return { parameters, ops, pipeline: { stages, degree: stages, position: 0 }, mesh: { names: ["dp", "tp"], sizes: [2, 2] }, batch: { ids: "int64[8, 4]" } };
}

const ids = (seen) => seen.nodes.map(({ id }) => id);
const arrows = (seen) => seen.edges.map(({ from, to }) => `${from} ${to}`).sort();

test("equal blocks are one run, and totals add up", () => {
  const tree = buildTree(plan());
  const run = tree.byId.get("/h").children[0];
  assert.equal(run.kind, "run");
  assert.equal(run.label, "h.0 … 5");
  assert.equal(run.total.ops, 2 * BLOCKS);
  assert.equal(tree.root.total.num_bytes, 32 * (BLOCKS + 1));
  assert.equal(leavesOf(tree.root).length, (BLOCKS + 1) + (2 * BLOCKS + 2) + 1);
});

test("a block that lies otherwise ends a run", () => {
  const tree = buildTree(plan({ odd: 2 }));
  assert.deepEqual(tree.byId.get("/h").children.map(({ label }) => label), ["h.0 … 1", "h.2", "h.3 … 5"]);
});

test("so does one that moves something else", () => {
  const given = plan();
  given.ops.find(({ name }) => name === "mm_0").collectives = [{ kind: "all_gather", axis: "tp", phase: "forward", num_bytes: 128, count: 1, time_s: 1e-3 }];
  assert.deepEqual(buildTree(given).byId.get("/h").children.map(({ label }) => label), ["h.0", "h.1 … 5"]);
});

test("equal stages are one run", () => {
  const tree = buildTree(plan({ stages: 6 }));
  assert.deepEqual(tree.root.children.map(({ label }) => label), ["stage 0", "stage 1 … 4", "stage 5", "ids"]);
});

test("runs do not cross stages", () => {
  const tree = buildTree(plan({ stages: 2 }));
  assert.deepEqual(tree.byId.get("#1/h").children.map(({ label }) => label), ["h.3 … 5"]);
});

test("closed boxes join what goes in and out of them", () => {
  const seen = visible(buildTree(plan()), new Set(), new Set());
  assert.deepEqual(ids(seen).sort(), ["/h", "/head", "/wte", "input:ids"]);
  assert.deepEqual(arrows(seen), ["/h /head", "/wte /h", "input:ids /wte"]);
});

test("an open run shows its first member for all of them", () => {
  const tree = buildTree(plan());
  const seen = visible(tree, new Set(["/h", tree.byId.get("/h").children[0].id]), new Set());
  assert.deepEqual(arrows(seen), ["/h/0/fc op:add_0", "/wte /h/0/fc", "/wte op:add_0", "input:ids /wte", "op:add_0 /head"]);
});

test("an unfolded run shows every member", () => {
  const tree = buildTree(plan());
  const run = tree.byId.get("/h").children[0];
  const seen = visible(tree, new Set(["/h", run.id]), new Set([run.id]));
  assert.equal(ids(seen).filter((id) => /^\/h\/\d$/.test(id)).length, BLOCKS);
  assert.ok(arrows(seen).includes("/h/4 /h/5"));
});

test("the way to an op of a later block goes through its run", () => {
  const tree = buildTree(plan());
  assert.deepEqual(wayTo(tree.leaves.get("mm_3")), { open: ["/h/3/fc", "/h/3", "/h/0…", "/h"], unfold: ["/h/0…"] });
  assert.deepEqual(wayTo(tree.leaves.get("mm_0")), { open: ["/h/0/fc", "/h/0", "/h/0…", "/h"], unfold: [] });
  for (const id of ["/h/0", "/h/3"]) assert.deepEqual(wayTo(tree.byId.get(id)), { open: ["/h/0…", "/h"], unfold: ["/h/0…"] });
});

test("what is found by a name is a module, or an op, parameter or input", () => {
  const tree = buildTree(plan({ stages: 2 }));
  const names = (text) => findIn(tree, text).map((item) => (item.data ? item.data.name : nameOf(item)));
  assert.deepEqual(names("h.3"), ["h.3, stage 1", "h.3.fc.weight", "mm_3", "add_3"]);
  assert.deepEqual(names("FC h.5"), ["h.5.fc.weight", "mm_5"]);
  assert.deepEqual(names("h fc").slice(0, 2), ["h.0.fc, stage 0", "h.1.fc, stage 0"]);
  assert.deepEqual(names("stage 1")[0], "stage 1");
  assert.deepEqual(names("ids"), ["ids"]);
  assert.deepEqual([names(" "), names("nothing")], [[], []]);
});

test("ranks that store the same are told in few words", () => {
  assert.equal(rangesOf([3]), "rank 3");
  assert.equal(rangesOf([1, 2, 3, 8]), "ranks 1 to 3, 8");
  assert.equal(rangesOf([4, 12, 20, 28]), "ranks 4 to 28 in steps of 8");
  assert.equal(rangesOf([0, 1, 10, 11, 30, 31]), "ranks 0, 1, 10, 11 and others");
});

test("at first no more is open than is asked for, and every edge ends at what is seen", () => {
  const tree = buildTree(plan({ odd: 3, stages: 2 }));
  for (const most of [1, 8, 12, 40, 400]) {
    const open = firstOpen(tree, most);
    const seen = visible(tree, open, new Set());
    const shown = new Set(ids(seen));
    assert.ok(seen.edges.every(({ from, to }) => shown.has(from) && shown.has(to)));
    const laid = layOut(seen);
    assert.equal(laid.nodes.length, seen.nodes.length);
    assert.ok(laid.nodes.every(({ x, y }) => Number.isFinite(x) && Number.isFinite(y)));
    for (const frame of laid.frames) {
      const within = laid.nodes.filter(({ item }) => leavesOf(frame.item).includes(leavesOf(item)[0]));
      assert.ok(within.every((node) => node.y - node.height / 2 >= frame.y - frame.height / 2), "boxes stand below the name of their frame");
    }
  }
});

test("ranks, coordinates and parts of a parameter", () => {
  const grid = { names: ["pp", "dp", "tp"], sizes: [2, 4, 2] };
  const piped = { grid, mesh: { names: ["dp", "tp"], sizes: [4, 2] }, pipeline: { degree: 2, position: 0 } };
  assert.deepEqual(coordinate(13, grid.sizes), [1, 2, 1]);
  const p = { held: ["Z1", "S0"], stages: [1] };
  assert.equal(shardOf(piped, p, 5), null);
  assert.deepEqual([8, 9, 10, 15].map((rank) => shardOf(piped, p, rank)), [0, 1, 2, 7]);
  assert.deepEqual([8, 9, 10, 15].map((rank) => shardOf(piped, { ...p, held: ["R", "S0"] }, rank)), [0, 1, 0, 1]);
});

test("traffic and memory", () => {
  const traffic = trafficOf({ collectives: [{ axis: "dp", kind: "all_gather", num_bytes: 10, count: 3, time_s: 2 }, { axis: "dp", kind: "all_gather", num_bytes: 1, count: 1, time_s: 1 }] });
  assert.deepEqual(traffic, [{ axis: "dp", kind: "all_gather", count: 4, num_bytes: 31, time_s: 7 }]);
  const sent = [["between nodes", "send", 5], ["between nodes", "all_reduce", 2], ["inside a node", "send", 1]].map(([level, kind, num_bytes]) => ({ level, kind, num_bytes }));
  assert.deepEqual(levelsOf({ levels: sent }).map((row) => [row.level, row.num_bytes, row.kinds.length]), [["between nodes", 7, 2], ["inside a node", 1, 1]]);
  const layers = layersOf({ timeline: { ranks: 1, memory: [[[0, 4, 2, 0, 1, 9, 3], [1, 4, 2, 3, 0, 5, 0]]] } }, 0);
  assert.deepEqual(layers.map(({ kind }) => kind), ["parameters", "optimizer", "gradients", "gathered", "activations", "buffers"]);
  assert.deepEqual(layers[0].spans, [[0, 0, 4], [1, 0, 4]]);
  assert.deepEqual(layers[2].spans, [[0, 6, 6], [1, 6, 9]]);
  assert.deepEqual(layers[4].spans, [[0, 7, 16], [1, 9, 14]]);
  assert.deepEqual(layers[5].spans, [[0, 16, 19], [1, 14, 14]]);
});

// One stage on each of two ranks; the forward of the first computes, waits for one collective, and has another beside it.
function stepped(measured = null) {
  const pieces = [["compute", "-", "h.0.mlp", 1, 0, 6, 0], ["all_reduce", "tp", "mm_0", 1, 64, 2, 0], ["all_gather", "dp", "h.0.fc.weight", 1, 32, 0, 1], ["compute", "-", "h.1.mlp", 1, 0, 2, 0]];
  const parts = { F: [[0, "compute", 0, 5e5], [1, "wait", 5e5, 7.5e5], [1, "tp", 5e5, 7.5e5], [3, "compute", 7.5e5, 1e6], [2, "dp", 0, 1.25e5]] };
  const events = [[0, 0, "F", 0, 0, 0, 10], [0, 0, "F", 0, 1, 10, 20], [1, 3, "RECV_F", 1, 0, 10, 11], [1, 0, "F", 1, 0, 11, 15]];
  const timeline = { ranks: 2, streams: ["compute", "collective", "send", "receive"], events, step_s: 20, inside: [{ pieces, parts }, { pieces: [], parts: {} }] };
  return { mesh: { names: ["dp", "tp"], sizes: [2, 2] }, timeline, measured };
}

test("rows of the timeline: computation, axes, messages, and measured ranks below their position", () => {
  const lanes = (plan) => rowsOf(plan).rows.map(({ rank, lane, measured }) => [rank, lane, measured]);
  assert.deepEqual(lanes(stepped()), [[0, "compute", undefined], [0, "dp", undefined], [0, "tp", undefined], [1, "compute", undefined], [1, "receive", undefined]]);
  const each = { rank: 6, position: 1, step: [0, 9], spans: [], events: [[1, 2, 0, 0, 0, 1, 2, 3, 4, 8, 0, 0]], names: ["dp", "all_reduce", "reduce", "w", ""] };
  assert.deepEqual(lanes(stepped({ ranks: [each] })).slice(5), [[1, "compute", 0], [1, "dp", 0]]);
});

test("what lies under the pointer is an action, one of its parts when it is wide, or what was measured", () => {
  const each = { rank: 1, position: 0, step: [0, 9], spans: [[0, 4, 0, 0, 0, 1]], events: [[1, 2, 0, 0, 2, 1, 1, 1, 1, 8, 0, 0]], names: ["forward", "h.0", "dp"] };
  const plan = stepped({ ranks: [each] });
  const [compute, dp, tp, seen, gathered] = rowsOf(plan).rows;
  assert.equal(find(plan, compute, 7, 1).kind, "action");
  assert.deepEqual(find(plan, compute, 7, 100).piece.slice(0, 3), ["all_reduce", "tp", "mm_0"]);
  assert.equal(find(plan, compute, 7, 100).part.isWait, true);
  assert.equal(find(plan, tp, 17, 100).event[4], 1);
  assert.equal(find(plan, dp, 5, 100), null);
  assert.equal(find(plan, seen, 3, 1).kind, "span");
  assert.equal(find(plan, seen, 5, 1), null);
  assert.equal(find(plan, gathered, 1.5, 1).kind, "seen");
});

test("communication of a step is what its actions have inside", () => {
  assert.deepEqual(communicationOf(stepped(), 0), [
    { phase: "forward", kind: "all_reduce", axis: "tp", count: 2, num_bytes: 128, time_s: 5, waited_s: 5 },
    { phase: "forward", kind: "all_gather", axis: "dp", count: 2, num_bytes: 64, time_s: 2.5, waited_s: 0 },
  ]);
  assert.deepEqual(communicationOf(stepped(), 1), []);
  const given = stepped();
  given.timeline.events.push([0, 1, "OUTPUT", 1, -1, 15, 20], [1, 1, "OUTPUT", 1, -1, 15, 20]);
  given.timeline.inside[1] = { pieces: [["broadcast", "pp", "mul", 1, 512, 5, 0]], parts: { OUTPUT: [[0, "wait", 0, 1e6], [0, "pp", 0, 1e6]] } };
  assert.deepEqual(communicationOf(given, 1), [{ phase: "outputs", kind: "broadcast", axis: "pp", count: 1, num_bytes: 512, time_s: 5, waited_s: null }]);
  assert.deepEqual(rowsOf(given).rows.map(({ rank, lane }) => `${rank} ${lane}`), ["0 compute", "0 dp", "0 tp", "0 pp", "1 compute", "1 pp", "1 receive"]);
});

test("names of modules are told from the block on", () => {
  assert.deepEqual(["transformer.h.11.mlp", "lm_head", "", "h.0 again", "model.layers.3"].map(tail), ["h.11.mlp", "lm_head", "top", "h.0 again", "layers.3"]);
});

test("names of points that lie together stand below each other, and ticks are round", () => {
  assert.deepEqual(labelPlaces([[10, 50], [12, 45], [300, 50]]), [62, 49, 54]);
  assert.deepEqual(ticks(0.9).map((t) => +t.toFixed(6)), [0, 0.2, 0.4, 0.6, 0.8]);
  assert.deepEqual([1, 2].map((n) => number(n, "rank")), ["1 rank", "2 ranks"]);
  assert.deepEqual(ticks(15 * 2 ** 30, true).map(bytes), ["0 B", "4.00 GiB", "8.00 GiB", "12.0 GiB"]);
});

test("numbers", () => {
  assert.deepEqual(localShape([8, 6, 4], ["S0", "S2.1", "R"], [2, 4, 8]), [4, 6, 1]);
  assert.deepEqual([0, 1023, 1536, 3 * 2 ** 30].map(bytes), ["0 B", "1023 B", "1.50 KiB", "3.00 GiB"]);
  assert.deepEqual([0, 2.5e-5, 0.0123, 12.3].map(seconds), ["0 s", "25.0 µs", "12.3 ms", "12.3 s"]);
  assert.deepEqual([7, 1500, 2.5e9].map(count), ["7", "1.50k", "2.50G"]);
});

test("ops of equal blocks are one row of where computation goes, the largest sum first", () => {
  const { ops } = plan();
  const head = { ...ops.at(-1), time_s: 4e-3 };
  const rows = slowest([...ops.slice(0, -1), head]);
  assert.deepEqual(rows.slice(0, 2).map(({ op, count }) => [op.module, count]), [["h.0.fc", BLOCKS], ["h.0", BLOCKS]]);
  assert.deepEqual([rows[2].op.name, rows[2].count], ["head", 1]);
  assert.ok(Math.abs(rows[0].time_s - BLOCKS * 1e-3) < 1e-12);
});

test("memory opens at the fullest rank", () => assert.equal(fullest([45, 43, 73.5, 69]), 2));

test("no two layouts share a colour but the rare and the replicated", () => {
  const layouts = [...Array.from({ length: 9 }, (_, i) => [`S${i}`, "R"]), ["R", "R"], ["R", "R*"]];
  const found = layoutColours({ ops: layouts.map((layout) => ({ layout })), parameters: [] });
  const own = [...found.values()].filter((colour) => colour !== OTHERS && colour !== REPLICATED);
  assert.equal(new Set(own).size, own.length);
  assert.deepEqual([own.length, found.get("R R"), found.get("S8 R")], [7, REPLICATED, OTHERS]);
});
