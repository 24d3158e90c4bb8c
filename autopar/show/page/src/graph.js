// The graph view: boxes that open and close, what each is on the right.
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";

import { OTHERS, REPLICATED } from "./colours.js";
import { Details } from "./details.js";
import { html } from "./h.js";
import { layOut, path } from "./layout.js";
import { findIn, firstOpen, nameOf, visible, wayTo } from "./tree.js";

const STEP = 60;
const LEGIBLE = 0.65;
const MOST_FOUND = 12;

export function GraphView({ plan, tree, colours }) {
  const [open, setOpen] = useState(() => firstOpen(tree));
  const [unfolded, setUnfolded] = useState(() => new Set());
  const [selected, setSelected] = useState(null);
  const [view, setView] = useState(null);
  const svg = useRef(null);
  const anchor = useRef(null);
  const refocus = useRef(null);
  const drag = useRef(null);

  const seen = useMemo(() => visible(tree, open, unfolded), [tree, open, unfolded]);
  const laid = useMemo(() => layOut(seen), [seen]);

  function fit() {
    const box = svg.current.getBoundingClientRect();
    const k = Math.max(LEGIBLE, Math.min(1, box.width / laid.width));
    const isWide = laid.width * k > box.width;
    const first = isWide && laid.nodes.reduce((a, b) => (a.y - a.height / 2 <= b.y - b.height / 2 ? a : b)); // where the data come in
    setView({ k, x: box.width / 2 - (isWide ? first.x : laid.width / 2) * k, y: laid.height * k < box.height ? (box.height - laid.height * k) / 2 : 8 });
  }

  useLayoutEffect(() => {
    if (!view) return fit();
    const held = anchor.current && [...laid.frames, ...laid.nodes].find(({ id }) => id === anchor.current.id);
    if (held) {
      const { left, top, isCentred } = anchor.current;
      const [x, y] = [held.x - held.width / 2, held.y - held.height / 2];
      const box = svg.current.getBoundingClientRect();
      const [toX, toY] = isCentred ? [(box.width - held.width * view.k) / 2, box.height / 3] : [left, top];
      setView({ ...view, x: toX - x * view.k, y: toY - y * view.k });
    }
    anchor.current = null;
    if (refocus.current) svg.current.querySelector(`[data-id="${CSS.escape(refocus.current)}"]`)?.focus({ preventScroll: true }); // a box is now a frame
    refocus.current = null;
  }, [laid]);

  // Whoever goes through the boxes by keys sees the one that has the focus.
  function reveal({ currentTarget }) {
    if (!currentTarget.matches(":focus-visible")) return;
    const [box, frame] = [currentTarget.getBoundingClientRect(), svg.current.getBoundingClientRect()];
    const into = (low, high, from, to) => (low < from ? from - low + 8 : high > to ? Math.max(to - high - 8, from - low + 8) : 0);
    const [dx, dy] = [into(box.left, box.right, frame.left, frame.right), into(box.top, box.bottom, frame.top, frame.bottom)];
    if (dx || dy) setView((old) => ({ ...old, x: old.x + dx, y: old.y + dy }));
  }

  // Where a box is on the screen, so that it stays there when all is laid out anew.
  function hold(id, isCentred = false) {
    const place = [...laid.frames, ...laid.nodes].find((other) => other.id === id);
    const at = place ? { left: (place.x - place.width / 2) * view.k + view.x, top: (place.y - place.height / 2) * view.k + view.y } : {};
    anchor.current = { id, isCentred: isCentred || !place, ...at };
  }

  function toggle(item) {
    hold(item.id);
    if (svg.current.contains(document.activeElement)) refocus.current = item.id;
    const next = new Set(open);
    if (!next.delete(item.id)) next.add(item.id);
    setOpen(next);
  }

  function toggleFold(item) {
    const next = new Set(unfolded);
    if (!next.delete(item.id)) next.add(item.id);
    hold(next.has(item.id) ? item.members[0].id : item.id, true);
    setUnfolded(next);
  }

  function show(item) {
    const way = wayTo(item);
    hold(item.id, true);
    setUnfolded(new Set([...unfolded, ...way.unfold]));
    setOpen(new Set([...open, ...way.open]));
    setSelected(item);
  }

  function zoom(factor, x, y) {
    const box = svg.current.getBoundingClientRect();
    [x, y] = [x ?? box.width / 2, y ?? box.height / 2];
    setView((old) => {
      const k = Math.min(3, Math.max(0.1, old.k * factor));
      return { k, x: x - ((x - old.x) * k) / old.k, y: y - ((y - old.y) * k) / old.k };
    });
  }

  useEffect(() => {
    const element = svg.current;
    const wheel = (event) => {
      event.preventDefault();
      const box = element.getBoundingClientRect();
      if (event.ctrlKey || event.metaKey) zoom(Math.exp(-event.deltaY / 200), event.clientX - box.left, event.clientY - box.top);
      else setView((old) => ({ ...old, x: old.x - event.deltaX, y: old.y - event.deltaY }));
    };
    element.addEventListener("wheel", wheel, { passive: false });
    return () => element.removeEventListener("wheel", wheel);
  }, []);

  const moves = { ArrowLeft: [STEP, 0], ArrowRight: [-STEP, 0], ArrowUp: [0, STEP], ArrowDown: [0, -STEP] };
  function key(event) {
    if (event.key in moves) setView((old) => ({ ...old, x: old.x + moves[event.key][0], y: old.y + moves[event.key][1] }));
    else if (event.key === "+" || event.key === "=") zoom(1.25);
    else if (event.key === "-") zoom(0.8);
    else if (event.key === "0") fit();
    else if (event.key === "Escape") setSelected(null);
    else return;
    event.preventDefault();
  }

  const pan = {
    onPointerDown: (event) => (drag.current = { x: event.clientX, y: event.clientY }),
    onPointerMove: (event) => {
      if (!drag.current || !event.buttons) return;
      const [dx, dy] = [event.clientX - drag.current.x, event.clientY - drag.current.y];
      drag.current = { x: event.clientX, y: event.clientY };
      setView((old) => ({ ...old, x: old.x + dx, y: old.y + dy }));
    },
    onPointerUp: () => (drag.current = null),
  };

  const canFold = selected?.kind === "run" ? selected : selected?.parent?.kind === "run" ? selected.parent : null;
  return html`<div class="split">
    <section class="stage" onKeyDown=${key}>
      <div class="bar">
        <${Search} tree=${tree} onFound=${show} />
        <button onClick=${() => zoom(1.25)} title="zoom in (+)">+</button>
        <button onClick=${() => zoom(0.8)} title="zoom out (−)">−</button>
        <button onClick=${fit} title="fit (0)">fit</button>
        <span class="hint">click a box for details; double-click or Enter opens it; drag or wheel to move, Ctrl+wheel to zoom</span>
      </div>
      <svg ref=${svg} class="graph" tabindex="0" role="group" aria-label=${`graph of ${plan.model}`} ...${pan}>
        <defs>
          <marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0,1L7,4L0,7" /></marker>
        </defs>
        ${view && html`<g transform=${`translate(${view.x},${view.y}) scale(${view.k})`}>
          ${laid.frames.map((frame) => html`<${Frame} key=${frame.id} box=${frame} selected=${selected} onSelect=${setSelected} onToggle=${toggle} onFocus=${reveal} />`)}
          ${laid.edges.map((edge) => html`<${Edge} key=${`${edge.from}>${edge.to}`} edge=${edge} />`)}
          ${laid.nodes.map((node) => html`<${Box} key=${node.id} box=${node} colours=${colours} selected=${selected} onSelect=${setSelected} onToggle=${toggle} onFocus=${reveal} />`)}
        </g>`}
      </svg>
      <${Legend} plan=${plan} colours=${colours} />
    </section>
    <${Details} plan=${plan} item=${selected} fold=${canFold} isUnfolded=${canFold && unfolded.has(canFold.id)}
      isOpen=${selected && open.has(selected.id)} known=${(name) => tree.leaves.has(name)} onToggle=${toggle} onFold=${toggleFold} onShow=${(name) => show(tree.leaves.get(name))} />
  </div>`;
}

function Edge({ edge }) {
  return html`<g class="edge">
    <path d=${path(edge.points)} marker-end="url(#arrow)" />
    ${edge.label && html`<text x=${edge.x} y=${edge.y + 3} text-anchor="middle">${edge.label}</text>`}
  </g>`;
}

const handlers = (item, onSelect, onToggle, onFocus) => ({
  onFocus,
  onClick: (event) => (event.stopPropagation(), onSelect(item)),
  onDblClick: (event) => (event.stopPropagation(), "total" in item && (item.members || item.children) && onToggle(item)),
  onKeyDown: (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    event.stopPropagation();
    onSelect(item);
    if (event.key === "Enter" && (item.members || item.children)) onToggle(item);
  },
});

function Frame({ box, selected, onSelect, onToggle, onFocus }) {
  const [x, y] = [box.x - box.width / 2, box.y - box.height / 2];
  const label = box.item.label + (box.item.kind === "run" ? ` ×${box.item.members.length}` : "");
  const isStage = box.item.id.startsWith("#") && !box.item.id.includes("/");
  return html`<g class=${`frame ${box.item.kind} ${isStage ? "lane" : ""} ${selected === box.item ? "selected" : ""}`} tabindex="0" role="button"
    aria-label=${`${label}, open`} data-id=${box.item.id} ...${handlers(box.item, onSelect, onToggle, onFocus)}>
    <rect x=${x} y=${y} width=${box.width} height=${box.height} rx="6" />
    <text x=${x + 8} y=${y + 14}>▾ ${label}</text>
  </g>`;
}

function Box({ box, colours, selected, onSelect, onToggle, onFocus }) {
  const { item, lines } = box;
  const [x, y] = [box.x - box.width / 2, box.y - box.height / 2];
  const layout = item.kind === "op" ? item.data.layout.join(" ") : item.kind === "parameter" ? item.data.held.join(" ") : "";
  return html`<g class=${`box ${item.kind} ${selected === item ? "selected" : ""}`} tabindex="0" role="button" aria-label=${lines.join(", ")}
    data-id=${item.id} ...${handlers(item, onSelect, onToggle, onFocus)}>
    <rect x=${x} y=${y} width=${box.width} height=${box.height} rx=${item.kind === "op" ? 12 : 3} />
    ${layout && html`<rect class="layout" x=${x} y=${y} width="7" height=${box.height} rx="2" style=${`fill:${colours.get(layout)}`} />`}
    ${item.kind === "run" && html`<path class="stack" d=${`M${x + 5},${y - 3}H${x + box.width + 3}V${y + box.height - 5}`} />`}
    ${lines.map((line, i) => html`<text class=${line.startsWith("⇄") ? "comm" : i ? "small" : ""} x=${box.x + (layout ? 3 : 0)} y=${y + 17 + 15 * i} text-anchor="middle">${line}</text>`)}
  </g>`;
}

function Legend({ plan, colours }) {
  const own = [...colours].filter(([, colour]) => colour !== OTHERS && colour !== REPLICATED);
  const whole = [...colours].filter(([, colour]) => colour === REPLICATED).map(([layout]) => `[${layout}]`);
  const others = colours.size - own.length - whole.length;
  return html`<div class="legend">
    <span>layouts on (${plan.mesh.names.join(", ")}):</span>
    ${own.map(([layout, colour]) => html`<span class="key"><i style=${`background:${colour}`}></i>[${layout}]</span>`)}
    ${whole.length > 0 && html`<span class="key"><i style=${`background:${REPLICATED}`}></i>${whole.join(", ")}</span>`}
    ${others > 0 && html`<span class="key"><i style=${`background:${OTHERS}`}></i>${others} others</span>`}
    <span class="key"><b class="commtext">⇄</b> communication</span><span class="key">↻ computed again</span>
  </div>`;
}

function Search({ tree, onFound }) {
  const [text, setText] = useState("");
  const found = useMemo(() => findIn(tree, text), [text, tree]);
  const choose = (item) => (setText(""), onFound(item));
  return html`<div class="search">
    <input id="search" type="search" placeholder="search ( / )" value=${text} onInput=${(e) => setText(e.target.value)}
      onKeyDown=${(e) => (e.stopPropagation(), e.key === "Enter" && found.length && choose(found[0]), e.key === "Escape" && (text ? setText("") : e.target.blur()))} aria-label="search modules, ops and parameters" />
    ${found.length > 0 && html`<ul role="listbox">
      ${found.slice(0, MOST_FOUND).map((item) => html`<li role="option"><button onClick=${() => choose(item)}>${item.data ? item.data.name : nameOf(item)} <small>${item.data?.module ?? item.kind}</small></button></li>`)}
      ${found.length > MOST_FOUND && html`<li><small>and more: go on typing</small></li>`}
    </ul>`}
    ${text.trim() && !found.length && html`<ul role="status"><li><small>no module, op, parameter or input has this in its name</small></li></ul>`}
  </div>`;
}
