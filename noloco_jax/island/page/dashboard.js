// Page of a run's islands: asks the dashboard for its JSON and draws it. Texts come from other machines, so that they
// are only ever set as text, never as HTML.

const SVG = "http://www.w3.org/2000/svg";
const PALETTE = [
  "#1f6fc4",
  "#e07b1e",
  "#1f9d6b",
  "#c2418f",
  "#7a5bd0",
  "#b8860b",
  "#0f9aa8",
  "#d1495b",
  "#6b8e23",
  "#8a5a44",
];
const OUTCOMES = {
  met: "exchanged",
  late: "exchanged late",
  alone: "alone, not exchanged",
  quarantine: "alone, partner left out",
  none: "no partner, or not known yet",
  healed: "caught up from a donor",
  start: "started again",
};
const WINDOW = 16; // messages of the running participation
const $ = (id) => document.getElementById(id);

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function drawn(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const titled = (text) => drawn("title", {}, text);
const colorOf = (index) => PALETTE[index % PALETTE.length];
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (count >= 1000 && unit < units.length - 1) {
    count /= 1000;
    unit += 1;
  }
  return `${unit && count < 100 ? count.toFixed(1) : Math.round(count)} ${units[unit]}`;
}

function large(value) {
  if (value >= 1e6) return `${(value / 1e6).toFixed(2)} M`;
  return value >= 1e4 ? `${(value / 1e3).toFixed(0)} k` : `${Math.round(value)}`;
}

const percent = (share) => `${Math.round(100 * share)} %`;
const clock = (time) => new Date(1000 * time).toLocaleTimeString([], { hour12: false });

function ago(seconds) {
  if (seconds < 100) return `${Math.round(seconds)} s ago`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min ago` : `${Math.round(seconds / 3600)} h ago`;
}

// What the events of an island say: the outcome of each round, curves, catch-ups.
function read(island, index) {
  const rounds = new Map();
  const healings = [],
    starts = [],
    curve = [],
    share = [],
    figures = {};
  let pending = false,
    first = true;
  const events = [...island.events].sort((a, b) => a.time - b.time);
  for (const event of events) {
    if (event.event === "start") {
      pending = !first;
      first = false;
    } else if (event.event === "round") {
      const known = rounds.get(event.round);
      rounds.set(event.round, known ?? { outcome: "none", partner: "", reason: "" });
      if (pending) starts.push(event.round);
      pending = false;
    } else if (event.event === "exchange") {
      let outcome = event.outcome;
      if (outcome === "alone")
        outcome = !event.partner ? "none" : /quarantine|nothing is taken/.test(event.reason) ? "quarantine" : "alone";
      if (outcome === "healed") healings.push({ round: event.round, donor: event.partner, time: event.time });
      rounds.set(event.round, { ...event, outcome });
    } else if (event.event === "figures") {
      Object.assign(figures, event);
      if (isNumber(event.loss)) curve.push([event.step, event.loss]);
    }
  }
  const due = [...rounds]
    .filter(([, one]) => ["met", "late", "alone", "quarantine"].includes(one.outcome))
    .sort((a, b) => a[0] - b[0]);
  for (let i = 3; i < due.length; i += 1) {
    const last = due.slice(Math.max(0, i - WINDOW + 1), i + 1);
    share.push([
      due[i][0] + 1,
      last.filter(([, one]) => one.outcome === "met" || one.outcome === "late").length / last.length,
    ]);
  }
  const status = island.status;
  let state = "away";
  if (!island.member) state = "removed";
  else if (status && (status.finished || !island.away))
    state = status.finished ? "finished" : status.training ? "training" : status.starting ? "starting" : "leaving";
  return { ...island, index, color: colorOf(index), rounds, healings, starts, curve, share, figures, state };
}

function mark(kind, x, y, text) {
  const attributes = { class: `mark ${kind}`, "data-outcome": kind };
  if (kind === "met" || kind === "late") return drawn("circle", { ...attributes, cx: x, cy: y, r: 4 }, titled(text));
  if (kind === "none") return drawn("circle", { ...attributes, cx: x, cy: y, r: 2 }, titled(text));
  if (kind === "healed")
    return drawn(
      "path",
      { ...attributes, d: `M${x} ${y - 7}L${x + 7} ${y}L${x} ${y + 7}L${x - 7} ${y}Z` },
      titled(text),
    );
  if (kind === "start") return drawn("path", { ...attributes, d: `M${x - 4} ${y - 16}h8l-4 7z` }, titled(text));
  if (kind === "quarantine") {
    return drawn("path", { ...attributes, d: `M${x - 4} ${y - 4}l8 8m0 -8l-8 8` }, titled(text));
  }
  return drawn("circle", { ...attributes, class: `mark hollow ${kind}`, cx: x, cy: y, r: 4 }, titled(text));
}

function drawLegend() {
  for (const [kind, text] of Object.entries(OUTCOMES)) {
    const y = kind === "start" ? 20 : 8;
    const icon = drawn("svg", { viewBox: "0 0 16 16", style: "width:16px;height:16px" }, mark(kind, 8, y, text));
    $("legend").append(element("li", {}, icon, text));
  }
}

function drawTimeline(islands) {
  const span = Number($("span").value);
  const last = Math.max(0, ...islands.flatMap((one) => [...one.rounds.keys()]));
  const first = Math.max(0, last - span + 1);
  const left = 110,
    right = 30,
    top = 22,
    height = 52,
    width = 1400;
  const step = (width - left - right) / Math.max(span - 1, 1);
  const x = (round) => left + (round - first) * step;
  const rows = new Map(islands.map((one, row) => [one.name, top + 24 + row * height]));
  const bottom = top + islands.length * height;
  const svg = drawn("svg", {
    viewBox: `0 0 ${width} ${bottom + 34}`,
    role: "img",
    "aria-label": "Exchanges between islands by round",
  });
  svg.append(
    drawn(
      "defs",
      {},
      drawn(
        "marker",
        { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 6, markerHeight: 6, orient: "auto" },
        drawn("path", { class: "head", d: "M0 0L8 4L0 8Z" }),
      ),
    ),
  );
  const every = [1, 2, 5, 10, 20, 50].find((n) => span / n <= 16) ?? 100;
  for (let round = first; round <= first + span - 1; round += 1) {
    if ((round + 1) % every) continue;
    svg.append(drawn("line", { class: "axis", x1: x(round), x2: x(round), y1: top, y2: bottom }));
    svg.append(drawn("text", { x: x(round), y: bottom + 14, "text-anchor": "middle" }, String(round + 1)));
  }
  svg.append(drawn("text", { x: width - right, y: bottom + 30, "text-anchor": "end" }, "round"));
  const links = new Map();
  for (const one of islands) {
    const y = rows.get(one.name);
    svg.append(drawn("text", { class: "name", x: left - 16, y: y + 4, "text-anchor": "end" }, one.name));
    const known = [...one.rounds.keys()].filter((round) => round >= first).sort((a, b) => a - b);
    for (let i = 0; i < known.length;) {
      // the row breaks where an island was not there
      let end = i;
      while (end + 1 < known.length && known[end + 1] === known[end] + 1) end += 1;
      svg.append(drawn("line", { class: "row", x1: x(known[i]) - 0.01, x2: x(known[end]), y1: y, y2: y }));
      i = end + 1;
    }
    for (const round of known) {
      const { outcome, partner } = one.rounds.get(round);
      if ((outcome === "met" || outcome === "late") && rows.has(partner)) {
        const key = [round, ...[one.name, partner].sort()].join(" ");
        links.set(key, { round, from: y, to: rows.get(partner), late: outcome === "late" || links.get(key)?.late });
      }
    }
  }
  for (const { round, from, to, late } of links.values()) {
    const bulge = Math.min(step * 0.85, 6 + Math.abs(to - from) / 8);
    const path = `M${x(round)} ${from}Q${x(round) + bulge} ${(from + to) / 2} ${x(round)} ${to}`;
    svg.append(drawn("path", { class: `link ${late ? "late" : "met"}`, "data-link": round + 1, d: path }));
  }
  for (const one of islands) {
    const y = rows.get(one.name);
    for (const { round, donor } of one.healings) {
      if (round < first || !rows.has(donor)) continue;
      const from = rows.get(donor),
        sign = Math.sign(y - from);
      svg.append(
        drawn(
          "path",
          {
            class: "link healed",
            "data-donor": donor,
            "marker-end": "url(#arrow)",
            d: `M${x(round) - step * 0.6} ${from}Q${x(round) - step} ${(from + y) / 2} ${x(round) - 5} ${y - 8 * sign}`,
          },
          titled(`${one.name} caught up from ${donor} after round ${round + 1}`),
        ),
      );
    }
    for (const [round, { outcome, partner, reason, lag }] of one.rounds) {
      if (round < first) continue;
      const whom = partner ? `, ${partner}` : "";
      const why = `${reason ? ` (${reason})` : ""}${lag ? `, by ${lag} rounds` : ""}`;
      const text = `${one.name}, round ${round + 1}: ${OUTCOMES[outcome]}${whom}${why}`;
      svg.append(mark(outcome, x(round), y, text));
    }
    for (const round of one.starts)
      if (round >= first) svg.append(mark("start", x(round), y, `${one.name} started again`));
  }
  $("timeline").replaceChildren(svg);
}

function ticks(low, high, count) {
  const raw = (high - low) / count || 1,
    power = 10 ** Math.floor(Math.log10(raw));
  const size = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= raw);
  const found = [];
  for (let value = Math.ceil(low / size) * size; value <= high + size * 1e-6; value += size)
    found.push(Number(value.toPrecision(12)));
  return found;
}

function drawChart(id, islands, pointsOf, name, format, range) {
  const curves = islands.map((one) => [one, pointsOf(one)]).filter(([, points]) => points.length > 1);
  if (!curves.length) {
    $(id).replaceChildren(element("p", { class: "empty" }, "No figures yet."));
    return;
  }
  const all = curves.flatMap(([, points]) => points);
  const [x0, x1] = [Math.min(...all.map((p) => p[0])), Math.max(...all.map((p) => p[0]))];
  const [low, high] = range ?? [Math.min(...all.map((p) => p[1])), Math.max(...all.map((p) => p[1]))];
  const pad = range ? 0 : (high - low) * 0.05 || 0.1;
  const [y0, y1] = [low - pad, high + pad];
  const width = 680,
    height = 260,
    left = 48,
    right = 84,
    top = 10,
    bottom = 34;
  const x = (value) => left + ((value - x0) / (x1 - x0 || 1)) * (width - left - right);
  const y = (value) => height - bottom - ((value - y0) / (y1 - y0)) * (height - top - bottom);
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": name });
  for (const value of ticks(y0, y1, 7)) {
    svg.append(drawn("line", { class: "axis", x1: left, x2: width - right, y1: y(value), y2: y(value) }));
    svg.append(drawn("text", { x: left - 7, y: y(value) + 4, "text-anchor": "end" }, format(value)));
  }
  for (const value of ticks(x0, x1, 6))
    svg.append(drawn("text", { x: x(value), y: height - bottom + 16, "text-anchor": "middle" }, large(value)));
  svg.append(drawn("text", { x: width - right, y: height - 4, "text-anchor": "end" }, name));
  const labels = [];
  for (const [one, points] of curves) {
    const path = points.map(([a, b], i) => `${i ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("");
    svg.append(drawn("path", { class: "curve", "data-curve": one.name, stroke: one.color, d: path }, titled(one.name)));
    labels.push({ one, at: y(points.at(-1)[1]) });
  }
  labels.sort((a, b) => a.at - b.at); // the names beside the curves' ends, moved apart
  labels.forEach((label, i) => {
    if (i) label.at = Math.max(label.at, labels[i - 1].at + 13);
  });
  const over = Math.max(0, (labels.at(-1)?.at ?? 0) - (height - bottom));
  for (const { one, at } of labels) {
    svg.append(
      drawn("text", { x: width - right + 8, y: at - over + 4, style: `fill:${one.color};font-weight:600` }, one.name),
    );
  }
  $(id).replaceChildren(svg);
}

function drawIslands(islands) {
  const columns = [
    ["island", "", "left"],
    ["state", "", "left"],
    ["round", ""],
    ["inner step", ""],
    ["loss", "nats a token"],
    ["perplexity", "validation"],
    ["participation", "since the start"],
    ["lag", "rounds"],
    ["sent", ""],
    ["throughput", "tokens/s"],
    ["starts", ""],
    ["caught up", "last from", "left"],
    ["partner", "of the last round", "left"],
  ];
  const head = element(
    "tr",
    {},
    ...columns.map(([name, unit, side]) =>
      element("th", { class: side ?? "" }, name, element("small", {}, unit || "\u00a0")),
    ),
  );
  const rows = islands.map((one) => {
    const { status, figures } = one,
      totals = status?.totals ?? {},
      last = one.healings.at(-1);
    const share = status?.due ? status.committed / status.due : null;
    const bar = element("span", { class: "bar" }, element("i", { style: `width:${100 * (share ?? 0)}%` }));
    const steps = status?.num_steps ? ` of ${large(status.num_steps)}` : "";
    const cells = [
      ["left", element("span", { class: "swatch", style: `background:${one.color}` }), one.name],
      ["left", element("span", { class: `chip ${one.state}` }, one.state)],
      ["", status ? String(status.round + 1) : "–"],
      ["", isNumber(figures.step) ? `${large(figures.step)}${steps}` : "–"],
      ["", isNumber(figures.loss) ? figures.loss.toFixed(3) : "–"],
      ["", isNumber(figures.perplexity) ? figures.perplexity.toFixed(2) : "–"],
      ["", ...(share === null ? ["none due yet"] : [bar, percent(share)])],
      ["", status ? status.lag.toFixed(2) : "–"],
      ["", isNumber(totals.sent) ? bytes(totals.sent) : "–"],
      ["", isNumber(figures.tokens_per_second) ? large(figures.tokens_per_second) : "–"],
      ["", isNumber(totals.starts) ? String(totals.starts) : "–"],
      ["left", last ? `${last.donor}, round ${last.round + 1}` : "–"],
      ["left", status ? status.partner || "nobody" : "–"],
    ];
    return element(
      "tr",
      { "data-island": one.name, "data-state": one.state },
      ...cells.map(([side, ...content]) => element("td", { class: side }, ...content)),
    );
  });
  $("islands").replaceChildren(element("thead", {}, head), element("tbody", {}, ...rows));
}

function drawTrouble(islands, now) {
  const items = [];
  const add = (kind, who, what, why) =>
    items.push(
      element("li", { class: kind, "data-trouble": who }, element("b", {}, who), ` ${what} `, element("span", {}, why)),
    );
  for (const one of islands) {
    if (one.state === "away")
      add(
        "alone",
        one.name,
        one.answered ? `has been away since ${ago(now - one.answered)}:` : "has not answered yet:",
        one.away,
      );
    const leftOut = [],
      refused = [];
    for (const other of islands.filter((other) => other.status && !other.away)) {
      const peer = other.status.peers.find((peer) => peer.name === one.name);
      if (peer?.quarantined_until || peer?.left_out) leftOut.push([other.name, peer]);
      if (peer?.refuses) refused.push([other.name, peer]);
    }
    if (leftOut.length) {
      const until = (peer) => (peer.quarantined_until ? ` until round ${peer.quarantined_until + 1}` : "");
      const who = leftOut.map(([name, peer]) => `${name}${until(peer)}`).join(", ");
      add("quarantine", one.name, `is left out by ${who}:`, `it ${leftOut[0][1].fault || "was before the last restart"}`);
    }
    if (refused.length)
      add(
        "late",
        one.name,
        `and ${refused.map(([name]) => name).join(", ")} refuse each other:`,
        refused[0][1].refuses,
      );
  }
  $("trouble").replaceChildren(...items);
  $("trouble-section").hidden = items.length === 0;
}

function drawLog(islands, changes) {
  const lines = islands.flatMap((one) => [
    ...one.events.filter((event) => event.event === "notice").map((event) => [event.time, one.name, event.line]),
    ...one.healings.map((healing) => [
      healing.time,
      one.name,
      `caught up from ${healing.donor}, after round ${healing.round + 1}`,
    ]),
  ]);
  lines.sort((a, b) => b[0] - a[0]);
  const rows = lines
    .slice(0, 30)
    .map(([time, name, line]) =>
      element("tr", {}, element("td", {}, clock(time)), element("td", {}, name), element("td", {}, line)),
    );
  const members = changes.map((line) =>
    element("tr", {}, element("td", {}, ""), element("td", {}, "members"), element("td", {}, line)),
  );
  $("log").replaceChildren(...members, ...rows);
}

function drawTiles(islands) {
  const members = islands.filter((one) => one.member),
    known = members.filter((one) => one.status);
  const training = members.filter((one) => one.state === "training").length;
  const last = islands.flatMap((one) => one.share.slice(-1)).map((point) => point[1]);
  const losses = members
    .filter((one) => one.state !== "away" && isNumber(one.figures.loss))
    .map((one) => one.figures.loss);
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  const total = (name) => known.reduce((sum, one) => sum + (one.status.totals[name] ?? 0), 0);
  const speeds = members
    .filter((one) => one.state === "training" && isNumber(one.figures.tokens_per_second))
    .map((one) => one.figures.tokens_per_second);
  const tiles = [
    [`${training} of ${members.length}`, "islands train"],
    [known.length ? String(Math.max(...known.map((one) => one.status.round)) + 1) : "–", "rounds ended"],
    [last.length ? percent(mean(last)) : "–", "participation, last 16 messages"],
    [losses.length ? mean(losses).toFixed(3) : "–", "mean loss, nats a token"],
    [speeds.length ? large(speeds.reduce((a, b) => a + b, 0)) : "–", "tokens/s together"],
    [bytes(total("sent")), "sent in messages"],
    [String(total("healed")), "times caught up"],
  ];
  $("tiles").replaceChildren(
    ...tiles.map(([value, name]) =>
      element("div", { class: "tile" }, element("b", {}, value), element("span", {}, name)),
    ),
  );
}

let shown = null;

function draw() {
  if (!shown) return;
  const islands = shown.islands.map(read);
  document.title = `${shown.run}: islands`;
  $("run").textContent = shown.run;
  drawTiles(islands);
  drawTimeline(islands);
  drawIslands(islands);
  drawTrouble(islands, shown.time);
  drawChart(
    "loss",
    islands,
    (one) => one.curve,
    "inner step",
    (value) => value.toFixed(2),
  );
  drawChart("participation", islands, (one) => one.share, "round", percent, [0, 1]);
  drawLog(islands, shown.changes);
  document.body.dataset.drawn = "true";
}

async function poll() {
  let wait = 2;
  try {
    const answer = await fetch("data.json");
    shown = await answer.json();
    wait = shown.every;
    $("updated").className = "";
    $("updated").textContent = shown.polled
      ? `${shown.islands.length} islands, asked at ${clock(shown.polled)}, every ${shown.every} s`
      : "Waiting for the first answers …";
    draw();
  } catch (error) {
    $("updated").className = "stale";
    $("updated").textContent = "The dashboard does not answer: start `island dashboard` again. What follows is old.";
    console.error(error);
  }
  setTimeout(poll, 1000 * wait);
}

drawLegend();
$("span").addEventListener("change", draw);
poll();
