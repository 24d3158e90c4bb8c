// A plan as a tree of modules with ops, parameters and inputs for leaves. Equal neighbours among numbered modules are one *run*.
//
// What is seen of it depends on what is open: a closed module or run is one box; an open run shows its first member for all of them;
// an unfolded run shows each member.

import { opName } from "./units.js";

const NUMBERED = /^stage \d+$|\.\d+$|^\d+$/;

export function buildTree(plan) {
  const root = container("", "", null);
  const byId = new Map([["", root]]);
  const leaves = new Map();
  const isStaged = plan.pipeline.stages > 1;

  function home(stage, module) {
    const parts = module ? module.split(".") : [];
    let at = root;
    if (isStaged) at = child(at, `stage ${stage}`, `#${stage}`);
    for (let i = 0; i < parts.length; i++) {
      const label = /^\d+$/.test(parts[i]) && i > 0 ? `${parts[i - 1]}.${parts[i]}` : parts[i];
      at = child(at, label, `${at.id}/${parts[i]}`);
    }
    return at;
  }

  function child(parent, label, id) {
    if (!byId.has(id)) {
      const made = container(id, label, parent);
      byId.set(id, made);
      parent.children.push(made);
    }
    return byId.get(id);
  }

  function leaf(kind, name, data, parent, label, key) {
    const made = { kind, id: `${kind}:${name}`, label, data, parent, key };
    leaves.set(name, made);
    byId.set(made.id, made);
    parent.children.push(made);
  }

  for (const p of plan.parameters) {
    const parts = p.name.split(".");
    const own = parts.pop();
    leaf("parameter", p.name, p, home(p.stages[0], parts.join(".")), own, `p|${own}|${p.held}|${p.factors.join("|")}|${moves(p)}`);
  }
  for (const op of plan.ops) {
    const key = `o|${op.op}|${op.choices}|${op.layout}|${op.shape}|${op.recompute}|${moves(op)}`;
    leaf("op", op.name, op, home(op.stage, op.module), opName(op.op), key);
  }
  for (const name in plan.batch) leaf("input", name, { name }, root, name, `i|${name}`);
  sum(root);
  foldRuns(root, byId);
  return { root, byId, leaves };
}

const moves = ({ collectives }) => (collectives ?? []).map((c) => `${c.kind} ${c.axis} ${c.phase} ${c.num_bytes} ${c.count}`).sort();

function container(id, label, parent) {
  return { kind: "module", id, label, parent, children: [] };
}

// Totals of what is inside, and a key that equal modules share.
function sum(node) {
  if (node.kind !== "module") {
    const { data } = node;
    const moved = (data.collectives ?? []).reduce((total, c) => total + c.time_s * c.count, 0);
    node.total = { ops: +(node.kind === "op"), time_s: data.time_s ?? 0, num_bytes: data.num_bytes ?? 0, comm_s: moved };
    return node.key;
  }
  const keys = node.children.map(sum);
  node.total = { ops: 0, time_s: 0, num_bytes: 0, comm_s: 0 };
  for (const child of node.children) for (const name in node.total) node.total[name] += child.total[name];
  const own = NUMBERED.test(node.label) ? "*" : node.label;
  node.key = `${own}{${keys.join(";")}}`;
  return node.key;
}

function foldRuns(node, byId) {
  if (node.kind !== "module") return;
  node.children.forEach((child) => foldRuns(child, byId));
  const folded = [];
  for (let i = 0; i < node.children.length; ) {
    let end = i + 1;
    const first = node.children[i];
    const isNumbered = first.kind === "module" && NUMBERED.test(first.label);
    while (isNumbered && end < node.children.length && node.children[end].key === first.key) end++;
    const members = node.children.slice(i, end);
    folded.push(members.length > 1 ? run(members, node, byId) : first);
    i = end;
  }
  node.children = folded;
}

function run(members, parent, byId) {
  const [first, last] = [members[0], members.at(-1)];
  const total = Object.fromEntries(Object.keys(first.total).map((name) => [name, members.reduce((sum, m) => sum + m.total[name], 0)]));
  const made = { kind: "run", id: `${first.id}…`, label: `${first.label} … ${last.label.split(/[. ]/).at(-1)}`, members, parent, total };
  for (const member of members) member.parent = made;
  byId.set(made.id, made);
  return made;
}

export function leavesOf(node) {
  if (node.kind === "module") return node.children.flatMap(leavesOf);
  if (node.kind === "run") return node.members.flatMap(leavesOf);
  return [node];
}

// Opens modules from the top, level by level, while no more than `most` boxes are seen; one of ops alone stays closed.
export function firstOpen(tree, most = 40) {
  const open = new Set();
  let level = [tree.root];
  let shown = tree.root.children.length;
  while (level.length) {
    const next = [];
    for (const node of level) {
      const inside = node.kind === "run" ? node.members[0].children : node.children;
      if (node !== tree.root) {
        if (shown - 1 + inside.length > most || !inside.some((child) => child.kind === "module" || child.kind === "run")) continue;
        shown += inside.length - 1;
        open.add(node.id);
      }
      next.push(...inside.filter((child) => child.kind === "module" || child.kind === "run"));
    }
    level = next;
  }
  return open;
}

// The boxes and arrows that are seen: nodes with the frame that they lie in, frames, and edges between nodes.
export function visible(tree, open, unfolded) {
  const nodes = [];
  const frames = [];
  const shownAs = new Map();
  const copies = new Map(); // of leaves in open runs: which member of which run

  function walk(node, frame) {
    if (node.kind === "run" && unfolded.has(node.id)) {
      node.members.forEach((member) => walk(member, frame));
    } else if ((node.kind === "module" || node.kind === "run") && (node === tree.root || open.has(node.id))) {
      const inside = node.kind === "run" ? node.members[0].children : node.children;
      if (node !== tree.root) frames.push({ id: node.id, item: node, frame });
      inside.forEach((child) => walk(child, node === tree.root ? null : node.id));
      if (node.kind === "run") mirror(node);
    } else {
      nodes.push({ id: node.id, item: node, frame });
      for (const leaf of leavesOf(node)) shownAs.set(leaf.id, node.id);
    }
  }

  function mirror(run) {
    const first = leavesOf(run.members[0]);
    run.members.forEach((member, number) => {
      leavesOf(member).forEach((leaf, i) => {
        shownAs.set(leaf.id, shownAs.get(first[i].id));
        copies.set(leaf.id, [...(copies.get(leaf.id) ?? []), [run.id, number]]);
      });
    });
  }

  walk(tree.root, null);
  const edges = new Map();
  for (const leaf of tree.leaves.values()) {
    if (leaf.kind !== "op" || (copies.get(leaf.id) ?? []).some(([, member]) => member > 0)) continue;
    for (const name of leaf.data.inputs) {
      const source = tree.leaves.get(name);
      if (!source) continue; // a constant, or made of inputs alone: every rank has it whole
      const [from, to] = [shownAs.get(source.id), shownAs.get(leaf.id)];
      if (from === to) continue;
      const key = `${from}>${to}`;
      if (!edges.has(key)) edges.set(key, { from, to, shapes: new Set() });
      if (source.kind === "op") edges.get(key).shapes.add(source.data.shape.join("×"));
    }
  }
  const used = new Set([...edges.values()].flatMap(({ from, to }) => [from, to]));
  return { nodes: nodes.filter(({ id, item }) => item.kind !== "input" || used.has(id)), frames, edges: [...edges.values()] };
}

// Modules and leaves that have all the words in their names; modules first, of which the last word is in their own part of the name.
export function findIn(tree, text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return [];
  const has = (name) => words.every((word) => name.toLowerCase().includes(word));
  const last = words.at(-1).split(".").at(-1);
  const modules = [...tree.byId.values()].filter((node) => node.kind === "module" && node.id && node.label.toLowerCase().includes(last) && has(nameOf(node)));
  const isWhole = ({ label }) => label.toLowerCase() === text.trim().toLowerCase();
  modules.sort((a, b) => isWhole(b) - isWhole(a));
  const leaves = [...tree.leaves.values()].filter(({ data }) => has(`${data.name} ${data.module ?? ""} ${data.op ?? ""}`));
  return [...modules, ...leaves];
}

// What a module is called in the model, and on which stage this part of it is.
export function nameOf(module) {
  const [stage, ...parts] = module.id.split("/");
  return [parts.join("."), stage && `stage ${stage.slice(1)}`].filter(Boolean).join(", ");
}

// What must be open and unfolded for a module or leaf to be seen as a box of its own.
export function wayTo(item) {
  const way = { open: [], unfold: [] };
  for (let [inner, at] = [item, item.parent]; at && at.id; [inner, at] = [at, at.parent]) {
    way.open.push(at.id);
    if (at.kind === "run" && (inner === item || inner !== at.members[0])) way.unfold.push(at.id);
  }
  return way;
}
