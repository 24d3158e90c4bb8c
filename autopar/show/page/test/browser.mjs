// Opens pages in headless Chromium, as a reader would: every view, opening, folding, searching, keys, both themes; no error on the console.
//
//     node test/browser.mjs FOLDER [--shots FOLDER]      (FOLDER has the pages of tests/show/write_pages.py)
import assert from "node:assert/strict";
import { mkdir, readdir, stat } from "node:fs/promises";
import { join, resolve } from "node:path";

import { chromium } from "playwright-core";

const CHROMIUM = process.env.CHROMIUM ?? "/usr/bin/chromium";
const QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"];
const MOST_MS = 10_000;

const folder = process.argv[2];
const shots = process.argv.includes("--shots") ? process.argv.at(-1) : null;
if (shots) await mkdir(shots, { recursive: true });

const browser = await chromium.launch({ executablePath: CHROMIUM, args: QUIET });
for (const file of (await readdir(folder)).filter((name) => name.endsWith(".html")).sort()) {
  const path = resolve(folder, file);
  const name = file.replace(".html", "");
  const context = await browser.newContext({ viewport: { width: 1280, height: 800 }, colorScheme: "light", offline: true });
  const page = await context.newPage();
  await page.addInitScript(() => {
    window.moved = 0; // Cumulative Layout Shift, web.dev/articles/cls
    const add = (list) => list.getEntries().forEach((entry) => (window.moved += entry.value));
    new PerformanceObserver(add).observe({ type: "layout-shift", buffered: true });
  });
  const complaints = [];
  page.on("console", (message) => ["error", "warning"].includes(message.type()) && complaints.push(message.text()));
  page.on("pageerror", (error) => complaints.push(String(error)));
  page.on("request", (request) => request.url().startsWith("file:") || request.url().startsWith("data:") || complaints.push(`asks for ${request.url()}`));
  const began = performance.now();
  await page.goto(`file://${path}#graph/0`);
  await page.waitForSelector(".graph .box");
  const loaded = performance.now() - began;
  assert.ok(loaded < MOST_MS, `${name} takes ${loaded.toFixed(0)} ms to load`);
  assert.equal(await settled(page), 0, `what ${name} shows first stays where it is`);
  await graph(page, name);
  for (const view of await page.$$eval("nav [role=tab]", (tabs) => tabs.map((tab) => tab.textContent))) await look(page, name, view);
  if (await page.$("nav [role=tab]:nth-of-type(5)")) await compare(page);
  assert.deepEqual(complaints, [], name);
  console.log(`${name}: ${((await stat(path)).size / 2 ** 10).toFixed(0)} KiB, loaded in ${loaded.toFixed(0)} ms`);
  await context.close();
}
await browser.close();

async function shoot(page, name) {
  if (shots) await page.screenshot({ path: join(shots, `${name}.png`) });
}

async function graph(page, name) {
  const boxes = () => page.$$eval(".graph .box", (found) => found.length);
  const before = await boxes();
  const module = page.locator(".graph .box.module, .graph .box.run").first();
  await module.focus();
  await page.keyboard.press("Enter");
  await page.waitForFunction((count) => document.querySelectorAll(".graph .box").length !== count, before);
  assert.notEqual(await page.textContent(".details h2"), "", "what is opened is told on the right");
  await page.waitForFunction(() => document.activeElement?.matches("svg.graph .frame"));
  for (let i = 0; i < 12; i++) {
    await page.keyboard.press("Tab");
    await page.waitForFunction(() => {
      if (!document.activeElement?.closest("svg.graph g")) return true;
      const [box, frame] = [document.activeElement, document.querySelector("svg.graph")].map((element) => element.getBoundingClientRect());
      return box.right > frame.left && box.left < frame.right && box.bottom > frame.top && box.top < frame.bottom; // what has the focus is in sight
    });
  }
  await page.keyboard.press("/");
  await page.keyboard.type("no such op");
  await page.waitForSelector(".search [role=status]");
  await page.keyboard.press("Escape");
  const own = await page.evaluate(() => document.querySelector(".graph .box.module text")?.textContent);
  if (own) {
    await page.keyboard.type(own.split(" ")[0]);
    await page.waitForSelector(".search li");
    await page.keyboard.press("Enter");
    await page.waitForSelector(".graph .selected.module");
  }
  await page.keyboard.type("mm");
  await page.waitForSelector(".search li");
  await page.keyboard.press("Enter");
  await page.waitForSelector(".graph .box.op.selected");
  const text = await page.textContent(".details");
  for (const word of ["module", "rule", "lies as", "why this?", ...(name.includes("auto") ? ["price", "as planned"] : [])]) assert.ok(text.includes(word), `details of an op tell ${word}`);
  await page.waitForFunction(() => {
    const [box, frame] = [".graph .box.op.selected", "svg.graph"].map((which) => document.querySelector(which).getBoundingClientRect());
    return box.left >= frame.left && box.top >= frame.top && box.right <= frame.right && box.bottom <= frame.bottom; // what is found is in sight
  });
  if (name.includes("auto")) await page.evaluate(() => document.querySelector(".details").scrollTo(0, 340));
  await shoot(page, `${name}_graph`);
  await page.locator("svg.graph").focus();
  await page.keyboard.press("0");
  await page.keyboard.press("Escape");
  await page.waitForFunction(() => !document.querySelector(".selected"));
}

// How far things have moved by themselves, when two frames more are drawn.
async function settled(page) {
  await page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))));
  return page.evaluate(() => window.moved);
}

async function look(page, name, view) {
  const tabs = () => page.$$eval("nav [role=tab]", (found) => found.map((tab) => tab.getBoundingClientRect().left));
  const before = await tabs();
  await page.click(`nav [role=tab]:has-text("${view}")`);
  await page.waitForSelector(`nav [role=tab][aria-selected=true]:has-text("${view}")`);
  assert.deepEqual(await tabs(), before, "tabs stay where they are");
  const wide = await page.evaluate(() => document.documentElement.scrollWidth > innerWidth);
  assert.ok(!wide, `${view} of ${name} fits 1280 pixels`);
  if (view === "Timeline") {
    const canvas = page.locator("canvas");
    await page.waitForFunction(() => document.querySelector("canvas").width > 600);
    const painted = await canvas.evaluate((c) => new Set(c.getContext("2d").getImageData(0, 0, c.width, Math.min(c.height, 400)).data).size);
    assert.ok(painted > 20, "something is drawn");
    const place = await canvas.boundingBox();
    await page.mouse.move(place.x + 120, place.y + 30);
    await page.waitForFunction(() => document.querySelector(".tip")?.textContent.includes("forward"));
    if (name.startsWith("measured")) await measured(page, place);
    await page.mouse.move(0, 0);
  }
  if (view === "Memory") assert.ok((await page.$$("svg.chart rect, svg.chart path")).length >= 3);
  if (view === "Cluster") assert.ok((await page.$$("svg.devices rect")).length >= 4);
  if (view !== "Graph") await shoot(page, `${name}_${view.toLowerCase()}`);
  if (view === "Cluster") {
    await page.fill("#rank", "3");
    assert.match(await page.textContent("svg.devices .chosen title"), /^rank 3 /);
  }
  await page.click(".theme");
  await page.waitForFunction(() => document.documentElement.dataset.theme === "dark");
  if (view === "Timeline") await shoot(page, `${name}_timeline_dark`);
  if (view === "Timeline") await zoomed(page, name);
  await page.click(".theme");
  await page.waitForFunction(() => document.documentElement.dataset.theme === "light");
}

// Steps of real ranks stand below the predicted one, and what was surprising in tables.
async function measured(page, place) {
  const heads = await page.$$eval("table.compared th:first-child", (found) => found.map((head) => head.textContent));
  assert.equal(heads[0], "phase");
  const phases = await page.$$eval("table.compared:first-of-type tr td:first-child", (found) => found.map((cell) => cell.textContent));
  for (const phase of ["forward", "backward", "exposed communication", "update", "step"]) assert.ok(phases.includes(phase), `${phase} is compared`);
  // Real ranks are idle at times of their own, so all of the time is looked through, not one moment.
  for (let part = 1; part < 40; part++)
    for (let y = 60; y < place.height; y += 6) {
      await page.mouse.move(place.x + (place.width * part) / 40, place.y + y);
      if (await page.evaluate(() => /rank \d, /.test(document.querySelector(".tip")?.textContent ?? ""))) return;
    }
  assert.fail("a measured span tells of itself");
}

// Keys zoom in until actions show what they are made of.
async function zoomed(page, name) {
  await page.locator("canvas").focus();
  for (let i = 0; i < (name.startsWith("gpt3") ? 16 : 6); i++) await page.keyboard.press("+");
  const place = await page.locator("canvas").boundingBox();
  const told = new Set();
  const isInside = () => [...told].some((text) => /h\.\d+|waits for/.test(text));
  // A measured step may be longer than the predicted one by far: then what is predicted lies further left.
  for (let moved = 0; moved < 40 && !isInside(); moved++) {
    if (moved) await page.keyboard.press("ArrowLeft");
    for (let x = 130; x < place.width - 20 && !isInside(); x += 9) {
      await page.mouse.move(place.x + x, place.y + 40);
      told.add(await page.evaluate(() => document.querySelector(".tip b")?.textContent ?? ""));
    }
  }
  assert.ok(isInside(), `actions of ${name} tell what is inside: ${[...told].join("; ")}`);
  await page.mouse.move(0, 0);
  await shoot(page, `${name}_timeline_zoomed`);
  await page.keyboard.press("0");
}

async function compare(page) {
  await page.click('nav [role=tab]:has-text("Compare")');
  await page.waitForSelector(".rows button.link");
  const names = await page.$$eval(".rows button.link", (links) => links.map((link) => link.textContent));
  assert.ok(names.length >= 2);
  await page.click(`.rows button.link:has-text("${names[1]}")`);
  await page.waitForSelector(".graph .box");
  assert.match(page.url(), /#graph\/1$/);
  await page.waitForFunction((name) => document.querySelector("nav select").selectedOptions[0].textContent === name, names[1]);
}
