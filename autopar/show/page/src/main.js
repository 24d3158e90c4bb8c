// The page: what is looked at stands above, the view below. Data come from the script element "data", as autopar.show.page writes them.
import { render } from "preact";
import { useEffect, useMemo, useState } from "preact/hooks";

import { ClusterView } from "./cluster.js";
import { layoutColours } from "./colours.js";
import { CompareView } from "./compare.js";
import { GraphView } from "./graph.js";
import { html } from "./h.js";
import { MemoryView } from "./memory.js";
import { TimelineView } from "./timeline.js";
import { buildTree } from "./tree.js";
import { bytes, count, percent, seconds } from "./units.js";

const data = await read(document.getElementById("data").textContent);
const VIEWS = ["Graph", "Timeline", "Memory", "Cluster", ...(data.rows ? ["Compare"] : [])];

async function read(text) {
  const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

function fromHash() {
  const [view, number] = location.hash.slice(1).split("/");
  const found = VIEWS.find((name) => name.toLowerCase() === view);
  return { view: found ?? (data.rows ? "Compare" : "Graph"), current: Math.max(0, Math.min(data.plans.length - 1, Math.trunc(Number(number)) || 0)) };
}

function App() {
  const [{ view, current }, setPlace] = useState(fromHash);
  const plan = data.plans[current];
  const tree = useMemo(() => buildTree(plan), [plan]);
  const colours = useMemo(() => layoutColours(plan), [plan]);
  const go = (name, number = current) => (location.hash = `${name.toLowerCase()}/${number}`);

  useEffect(() => {
    const changed = () => setPlace(fromHash());
    const key = (event) => {
      if (event.target instanceof HTMLInputElement || event.target instanceof HTMLSelectElement || event.ctrlKey || event.metaKey || event.altKey) return;
      const view = VIEWS[Number(event.key) - 1];
      if (view) go(view, fromHash().current);
      else if (event.key === "/" && document.getElementById("search")) (event.preventDefault(), document.getElementById("search").focus());
    };
    addEventListener("hashchange", changed);
    addEventListener("keydown", key);
    return () => (removeEventListener("hashchange", changed), removeEventListener("keydown", key));
  }, []);

  return html`
    <header>
      <div class="title"><h1>${plan.model}</h1><span>${plan.gridText} · ${plan.config || "automatic"}${plan.precision ? ` · ${plan.precision}` : ""}</span></div>
      <${Figures} plan=${plan} />
      <${Theme} />
    </header>
    <nav role="tablist">
      ${VIEWS.map((name, i) => html`<button role="tab" data-name=${name} aria-selected=${name === view} onClick=${() => go(name)} title=${`${name} (${i + 1})`}>${name}</button>`)}
      ${data.plans.length > 1 && html`<label>plan <select value=${current} onChange=${(e) => go(view, e.target.value)}>${data.plans.map((other, i) => html`<option value=${i}>${other.name}</option>`)}</select></label>`}
    </nav>
    <main>
      ${view === "Graph" && html`<${GraphView} key=${current} plan=${plan} tree=${tree} colours=${colours} />`}
      ${view === "Timeline" && html`<${TimelineView} key=${current} plan=${plan} />`}
      ${view === "Memory" && html`<${MemoryView} key=${current} plan=${plan} />`}
      ${view === "Cluster" && html`<${ClusterView} key=${current} plan=${plan} />`}
      ${view === "Compare" && html`<${CompareView} rows=${data.rows} current=${current} onOpen=${(number) => go("Graph", number)} />`}
    </main>`;
}

function Figures({ plan }) {
  const p = plan.prediction;
  const peak = Math.max(...p.peak_memory_bytes);
  const rows = [
    ["step", seconds(p.step_time_s)],
    [`${p.unit}/s`, count(p.tokens_per_s)],
    ["MFU", p.mfu ? percent(p.mfu) : "–"],
    ["exposed comm.", percent(p.exposed_comm_s / p.step_time_s)],
    ["bubble", percent(p.bubble_fraction)],
    ["peak memory", plan.memory_limit_bytes ? `${bytes(peak)} of ${bytes(plan.memory_limit_bytes)}` : bytes(peak)],
  ];
  return html`<dl class="figures">${rows.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}

const THEME = "autopar-theme";

// What was chosen before in this browser, where pages that lie on a disk may keep something.
function chosenTheme() {
  try {
    return localStorage.getItem(THEME);
  } catch {
    return null;
  }
}

function keepTheme(name) {
  try {
    localStorage.setItem(THEME, name);
  } catch {
    // it is chosen for this visit
  }
}

function Theme() {
  const [isDark, setDark] = useState(() => (chosenTheme() ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark");
  useEffect(() => {
    document.documentElement.dataset.theme = isDark ? "dark" : "light";
    dispatchEvent(new Event("autopar-theme"));
  }, [isDark]);
  const toggle = () => (keepTheme(isDark ? "light" : "dark"), setDark(!isDark));
  return html`<button class="theme" onClick=${toggle} title="light or dark">${isDark ? "☀" : "☾"}</button>`;
}

render(html`<${App} />`, document.getElementById("app"));
