// Reads /data at intervals and draws it. Plots share one time axis; versions are marked on all.
"use strict";

const INTERVAL_MS = 2000;
const MOST_POINTS = 4096; // kept here before everything is fetched again, thinned by the server
const HEIGHT = 220;
const POSITIONS = [1, 2, 4, 8];
const COLOURS = ["#2563eb", "#9ca3af", "#059669", "#d97706"];
const dark = matchMedia("(prefers-color-scheme: dark)");

let points = [];
let timeline = [];

const number = (value, digits = 0) =>
  value === null || value === undefined
    ? "–"
    : value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const percent = (value) => (value === null || value === undefined ? "–" : `${number(100 * value, 1)} %`);
const clock = (seconds, parts = 3) =>
  new Date(1000 * seconds).toLocaleTimeString("en-GB").split(":").slice(0, parts).join(":");
const shares = (values) =>
  Object.entries(values).sort((a, b) => b[1] - a[1]).map(([name, v]) => `${name}: ${percent(v)}`).join(", ") || "–";

// name of the element → lines: [label, value of a point]
const PLOTS = {
  committed: [["now", (p) => p.committed_per_pass], ["base, in all", (p) => p.base]],
  speed: [["committed", (p) => p.tokens_per_s], ["plain decoding, estimated", (p) => p.plain_tokens_per_s]],
  accepted: POSITIONS.map((n) => [`draft ${n}`, (p) => p.acceptance[n - 1] ?? null]),
  length: [["tokens verified", (p) => p.verify_length]],
  feedback: [["sent", (p) => p.sent], ["dropped", (p) => p.dropped]],
  learning: [["seconds", (p) => p.learning_seconds]],
};

function markVersions(plot) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = dark.matches ? "#6b7280" : "#9ca3af";
  ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
  ctx.textAlign = "left";
  for (const change of timeline) {
    const x = plot.valToPos(change.time, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.setLineDash(change.restarted ? [2, 3] : [6, 4]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.fillText(`v${change.version}`, x + 3, bbox.top + 11 * devicePixelRatio);
  }
  ctx.restore();
}

const tickNames = (_, ticks) => ticks.map((t) => clock(t, ticks.length > 1 && ticks[1] - ticks[0] < 60 ? 3 : 2));

function makePlot(name) {
  const place = document.getElementById(name);
  const ink = dark.matches ? "#9ca3af" : "#6b7280";
  const grid = { stroke: dark.matches ? "#2d333b" : "#e5e7eb", width: 1 };
  const options = {
    width: place.clientWidth,
    height: HEIGHT,
    cursor: { sync: { key: "time" } },
    scales: { y: { range: (_, low, high) => [Math.min(0, low ?? 0), high > 0 ? 1.08 * high : 1] } },
    axes: [{ stroke: ink, grid, ticks: grid, values: tickNames }, { stroke: ink, grid, ticks: grid, size: 56 }],
    series: [
      { value: (_, time) => (time === null ? "–" : clock(time)) },
      ...PLOTS[name].map(([label], i) => ({ label, stroke: COLOURS[i], width: 2, points: { show: false }, value: (_, v) => number(v, 2) })),
    ],
    hooks: { draw: [markVersions] },
  };
  return new uPlot(options, columns(name), place);
}

const columns = (name) => [points.map((p) => p.time), ...PLOTS[name].map(([, value]) => points.map((p) => value(p) ?? null))];

let plots = {};
function remake() {
  for (const plot of Object.values(plots)) plot.destroy();
  plots = Object.fromEntries(Object.keys(PLOTS).map((name) => [name, makePlot(name)]));
}
dark.addEventListener("change", remake);

const resized = new ResizeObserver((changes) => {
  for (const { target } of changes) plots[target.id]?.setSize({ width: target.clientWidth, height: HEIGHT });
});
for (const name of Object.keys(PLOTS)) resized.observe(document.getElementById(name));

function fill(id, tag, rows) {
  const parts = rows.map((row) => {
    const element = document.createElement(tag);
    if (!Array.isArray(row)) element.textContent = row;
    else for (const [kind, text] of row) element.appendChild(document.createElement(kind)).textContent = text;
    return element;
  });
  document.getElementById(id).replaceChildren(...parts);
}

function learnerState(learner) {
  const words = ["paused", "resting"].filter((state) => learner[state]);
  if ((learner.pinned ?? -1) >= 0) words.push(`version ${learner.pinned} pinned`);
  return words.join(", ") || "learning";
}

function showReport(report) {
  const known = report.figures;
  document.getElementById("server").textContent = report.url;
  const problem = document.getElementById("problem");
  problem.hidden = !report.problem;
  problem.textContent = known ? `The figures are ${number(report.stale_s)} s old: ${report.problem}` : report.problem;
  fill("warnings", "li", report.warnings);
  timeline = report.timeline;
  fill("timeline", "li", timeline.slice(-12).reverse().map((c) => `${clock(c.time)} ${c.restarted ? "restart, " : ""}version ${c.version}`));
  const decisions = report.decisions.slice().reverse().map((d) => [
    ["td", clock(d.time)], ["td", d.action ?? "told"], ["td", `${d.reason}; version ${d.live} live`],
  ]);
  fill("decisions", "tr", decisions.length ? decisions : [[["td", "In the version store of the learner's machine."]]]);
  if (!known) return;
  const over = known.seconds === null ? "since the start" : `over ${number(known.seconds)} s`;
  document.getElementById("head").textContent =
    `Version ${known.live_version} is live; ${known.running} running, ${known.queued} waiting; figures ${over}.`;
  const tile = (value, text) => [["b", value], ["span", text]];
  const gain = known.committed_per_pass && known.base ? known.committed_per_pass / known.base - 1 : null;
  const speedup = known.tokens_per_s && known.plain_tokens_per_s ? known.tokens_per_s / known.plain_tokens_per_s : null;
  fill("tiles", "div", [
    tile(number(known.committed_per_pass, 2), `committed tokens per pass; base ${number(known.base, 2)}`),
    tile(gain === null ? "–" : `${gain >= 0 ? "+" : ""}${percent(gain)}`, "over the base's passes in all"),
    tile(known.best ? number(known.best.committed_per_pass, 2) : "–", known.best ? `best: version ${known.best.version}` : "best version"),
    tile(number(known.tokens_per_s), `tokens/s; plain about ${number(known.plain_tokens_per_s)}`),
    tile(speedup === null ? "–" : `${number(speedup, 2)} ×`, "plain decoding, estimated"),
    tile(number(known.learner.learning_seconds), "seconds spent on learning"),
  ]);
  const heads = ["version", "passes", "committed/pass", "gain over base"].map((h) => ["th", h]);
  const versions = known.versions.slice(-10).reverse().map((v) => [
    ["td", `${v.version}${v.version === known.live_version ? " live" : ""}`],
    ["td", number(v.passes)],
    ["td", number(v.committed_per_pass, 2)],
    ["td", v.gain === null ? "–" : `${percent(v.gain)} ± ${percent(v.gain_error ?? 0)}`],
  ]);
  fill("versions", "tr", [heads, ...versions]);
  const learner = known.learner;
  const heard = Object.keys(learner).length > 0;
  const row = (name, value) => [["td", name], ["td", value]];
  fill("loop", "tr", [
    row("learner", heard ? `${learnerState(learner)}; ${number(learner.steps)} steps` : "not heard of"),
    row("loss, accuracy", heard ? `${number(learner.loss, 3)}, ${number(learner.accuracy, 3)}` : "–"),
    row("gate", Object.entries(known.verdicts).map(([a, n]) => `${a}: ${n}`).join(", ") || "–"),
    row("last replay", Object.entries(known.judged).map(([a, v]) => `${a} ${number(v, 2)}`).join(", ") || "–"),
    row("swaps", `${known.swaps} in, ${known.rollbacks} back, ${known.refused} refused`),
    row("dropped", Object.entries(known.dropped).map(([a, n]) => `${a}: ${n}`).join(", ") || "none"),
    row("verify length", shares(known.verify_lengths)),
    row("decided by", shares(known.decided_by)),
  ]);
}

async function update() {
  try {
    if (points.length > MOST_POINTS) points = [];
    const after = points.length ? points[points.length - 1].time : 0;
    const reply = await fetch(`data?after=${after}`, { cache: "no-store" });
    if (!reply.ok) throw new Error(`HTTP ${reply.status}`);
    const state = await reply.json();
    points = points.concat(state.points);
    showReport(state.report);
    if (!Object.keys(plots).length) remake();
    else for (const [name, plot] of Object.entries(plots)) plot.setData(columns(name));
  } catch (error) {
    const problem = document.getElementById("problem");
    problem.hidden = false;
    problem.textContent = `The monitor does not answer (${error.message}); what is below is from ${
      points.length ? clock(points[points.length - 1].time) : "never"}.`;
  }
  setTimeout(update, INTERVAL_MS);
}

update();
