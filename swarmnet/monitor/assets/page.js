// The dashboard: asks for data.json again and again and draws it. What it shows of strangers are text nodes, made by
// preact; nothing here makes HTML of a text.
import { Component, h, render } from "./preact.js";
import htm from "./htm.js";

const html = htm.bind(h);
const EVERY_MS = 2000;
const OLD_S = 15; // a look that is older says so
const WIDE = 720; // pixels from which on the map lies along the page
const MOST_NODES = 12; // of a stage, on the map; half as many on a narrow page
const MOST_ROWS = 30; // of the membership; longer tables scroll

// ---------------------------------------------------------------- words and numbers

const short = (peer) => `…${peer.slice(-8)}`;
// A nickname is its peer's own word and may be another's, too: a title or the text beside it has the id.
function called(data, peer, letters = 12) {
  const name = data.peers[peer]?.nickname || short(peer);
  return name.length > letters ? `${name.slice(0, letters - 1)}…` : name;
}
const runName = (data) => data.name || data.run.slice(0, 12);
const number = (value, digits = 0) =>
  value == null ? "–" : value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const rate = (value) => (value ? `${value >= 10 ? number(value) : value.toPrecision(2)}/s` : "–");
const percent = (share) => (share == null ? "–" : `${(100 * share).toFixed(1)} %`);
const clock = (time) => new Date(1000 * time).toLocaleTimeString("en-GB");
const count = (many, noun) => `${number(many)} ${noun}${many === 1 ? "" : noun.endsWith("ch") ? "es" : "s"}`;

function duration(seconds) {
  if (seconds == null) return "–";
  const whole = Math.round(seconds);
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const two = (value) => String(value).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

const HOW = {
  waited_for: "the step waits for it",
  unreached: "cannot be connected to",
  sits_out: "is not waited for",
  left_out: "a step went on without it",
  convicted: "is proven to lie",
};
const MARKS = { joined: ["▲", "joined"], left: ["▼", "left"], gone: ["✕", "gone without a word"], restarted: ["↻", "killed or crashed, and started again"], went_back: ["◀", "run went back"] };

// ---------------------------------------------------------------- choices

// What a person may choose of the curves; the first of each is what the page begins with.
const CHOICES = { axis: ["step", "tokens", "time"], smooth: [0, 5, 20, 100, 500], log: [false, true] };
const KEPT_AS = "swarmnet-curves";

// The browser may keep nothing for us, or something else.
function kept() {
  try {
    return JSON.parse(localStorage.getItem(KEPT_AS)) ?? {};
  } catch {
    return {};
  }
}

function choose(name, value) {
  shown.choices = { ...shown.choices, [name]: value };
  try {
    localStorage.setItem(KEPT_AS, JSON.stringify(shown.choices));
  } catch (error) {
    console.info("swarmnet dashboard: choices are not kept:", error.message);
  }
  draw();
}

function Choices({ choices }) {
  const pick = (name, words) => html`<select value=${choices[name]} onChange=${(event) => choose(name, CHOICES[name][event.target.selectedIndex])}>
    ${CHOICES[name].map((value) => html`<option value=${value} selected=${value === choices[name]}>${words(value)}</option>`)}
  </select>`;
  return html`<div class="choices" role="group" aria-label="How the curves are drawn">
    <label>axis ${pick("axis", (value) => (value === "step" ? "steps" : value))}</label>
    <label>smoothing ${pick("smooth", (value) => (value ? `${value} steps` : "none"))}</label>
    <label><input type="checkbox" checked=${choices.log} onChange=${(event) => choose("log", event.target.checked)} /> log scale</label>
  </div>`;
}

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// ---------------------------------------------------------------- frame

// Tells its children how wide they may be.
class Sized extends Component {
  componentDidMount() {
    this.observer = new ResizeObserver(([entry]) => this.setState({ width: Math.floor(entry.contentRect.width) }));
    this.observer.observe(this.element);
  }
  componentWillUnmount() {
    this.observer.disconnect();
  }
  render({ children, label }, { width }) {
    const draw = [].concat(children)[0];
    return html`<div class="scroll" tabindex=${label ? 0 : null} role=${label ? "group" : null} aria-label=${label} ref=${(element) => (this.element = element)}>
      ${width && draw(width)}
    </div>`;
  }
}

function App({ data, age, lost, hash, choices }) {
  if (!data?.run) return html`<main><h1>swarmnet</h1><p role="status">${lost ? LOST : "Looking for the run."}</p></main>`;
  const peer = hash.startsWith("#peer/") ? hash.slice(6) : null;
  const old = lost ? LOST : age > OLD_S ? `No look for ${duration(age)}: the run's DHT does not answer.` : "";
  return html`<main>
    <${Head} data=${data} old=${old} />
    ${peer ? html`<${PeerPage} data=${data} peer=${peer} />` : html`<${RunSections} data=${data} choices=${choices} />`}
    <footer>Losses are what most of the members asked say; the rest is each peer's own word, as in swarmnet status.
      Last look ${clock(data.time)}; looking since ${clock(data.since)}.</footer>
  </main>`;
}

const LOST = "The dashboard has ended, or cannot be reached: what is shown is old.";

function Head({ data, old }) {
  const [mood, words] = !data.seen
    ? ["bad", "nobody announces it"]
    : data.finished
      ? ["good", "finished"]
      : data.still_s
        ? ["bad", `no step for ${duration(data.still_s)}`]
        : ["good", "training"];
  const problems = [...(old ? [{ severity: "error", text: old }] : []), ...data.problems];
  if (data.disputed != null)
    problems.push({ severity: "warning", text: `members say different things of step ${data.disputed}, and none can be believed: it is left out` });
  const notes = problems.filter((each) => each.severity === "note");
  const loud = problems.filter((each) => each.severity !== "note");
  const list = (some) => html`<ul class="problems">
    ${some.map((each) => html`<li class=${each.severity}><b>${each.severity}</b>: ${each.text}</li>`)}
  </ul>`;
  return html`<header>
      <h1><a href="#"><bdi>${runName(data)}</bdi></a></h1>
      <span class="soft">swarmnet run <code>${data.run.slice(0, 12)}</code></span>
      <span class="state ${mood}" role="status">${words}</span>
      ${data.admission && html`<span class="soft">${data.admission.policy === "open" ? "open to all" : "by invitation"}</span>`}
    </header>
    <div aria-live="polite">${loud.length > 0 && list(loud)}</div>
    ${notes.length > 0 && html`<details class="card"><summary>${count(notes.length, "note")}</summary>${list(notes)}</details>`}`;
}

function RunSections({ data, choices }) {
  return html`<${Tiles} data=${data} />
    <section class="card"><h2>Loss, nats per token</h2><${Choices} choices=${choices} />
      <${Chart} kind="loss" data=${data} choices=${choices} /><${MarkLegend} /></section>
    <section class="card"><h2>Tokens per second</h2><${Chart} kind="pace" data=${data} choices=${choices} /></section>
    <section class="card"><h2>Stages and replicas</h2>
      <${Sized} label="Stages and replicas">${(width) => html`<${SwarmMap} data=${data} width=${width} />`}<//>
      <p class="legend">Lines move as fast, and are as thick, as a replica executes microbatches; gradients come back the
        same way. Bar: microbatches that it holds, of those that it takes at once. A dashed box is joining, leaving or paused, a red
        one has its mates' complaints.</p>
    </section>
    ${data.waterfall && html`<section class="card"><h2>Step ${number(data.waterfall.step)}, replica by replica</h2>
      <${Sized} label="One step">${(width) => html`<${Waterfall} data=${data} step=${data.waterfall} width=${width} />`}<//>
      <p class="legend">A bar lasts from a phase's first moment to its last; the seconds are those in which it was under
        way. By each replica's own clock and word.</p>
    </section>`}
    <section class="card"><h2>Membership</h2>
      <${Sized} label="Membership">${(width) => html`<${Timeline} data=${data} width=${width} />`}<//>
      ${data.num_stays > MOST_ROWS && html`<p class="soft">The last ${MOST_ROWS} who came or went.</p>`}
      <ul class="legend"><li><b class="joined">▬</b>here</li><li><b class="left">▬</b>was here, and left in good order</li>
        <li><b class="gone">✕</b>gone without a word (noticed within 30 s)</li></ul>
    </section>
    <${Contributors} data=${data} />
    <${Replicas} data=${data} />`;
}

function Tiles({ data }) {
  const tile = (name, value, more) => html`<div><dt>${name}</dt><dd>${value}<small>${more}</small></dd></div>`;
  const held = data.held_out;
  return html`<dl class="tiles">
    ${tile("step", number(data.version), data.steps ? `of ${number(data.steps)}` : null)}
    ${tile("loss", data.loss == null ? "–" : data.loss.toFixed(4), "nats/token")}
    ${tile("held-out loss", held ? held.loss.toFixed(4) : "–", held ? `version ${held.version}` : null)}
    ${tile("tokens/s", number(data.tokens_per_second), "of the whole run")}
    ${tile("time left", data.finished ? "0:00" : duration(data.eta_s), data.eta_s >= 3600 ? "h:min:s" : "min:s")}
    ${tile("learning rate", data.learning_rate == null ? "–" : data.learning_rate.toPrecision(3))}
    ${tile("gradient norm", data.grad_norm == null ? "–" : data.grad_norm.toPrecision(3))}
    ${data.stages.length <= 4
      ? tile("replicas", data.stages.map((each) => each.synced).join("/") || "–", "synced, by stage")
      : tile("replicas", number(data.stages.reduce((sum, each) => sum + each.synced, 0)), `synced, in ${data.stages.length} stages`)}
  </dl>`;
}

// ---------------------------------------------------------------- curves

const DURATIONS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400, 604800];
const ROUND = Array.from({ length: 24 }, (_, power) => [1, 2, 5].map((first) => first * 10 ** (power - 9))).flat();
const WHOLE = ROUND.filter((value) => value >= 1);
const compact = (value) => value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 4 });

const AXES = {
  step: { label: () => "step", of: (curve) => curve.x, words: number, incrs: WHOLE },
  tokens: { label: () => "tokens", of: (curve) => curve.tokens, words: compact, incrs: WHOLE },
  time: {
    label: (curve) => `time since step ${number(curve.x[0])} (min:s or h:min:s)`,
    of: (curve) => curve.time.map((time) => time - curve.time[0]),
    words: duration,
    incrs: DURATIONS,
  },
};

// Each has a function that makes its values of the curve; two where one is drawn faintly behind its mean.
function plotted(kind, { smooth, log }) {
  if (kind === "pace") return [{ label: "tokens/s", color: color("pace"), digits: 0, of: (curve) => curve.tokens_per_second }];
  // There is no place for 0 on a log scale.
  const drawn = (values) => (log ? values.map((value) => (value > 0 ? value : null)) : values);
  const loss = { label: "loss", color: color("loss"), digits: 4, of: (curve) => drawn(curve.loss) };
  const mean = { ...loss, label: `loss, mean of about ${smooth} steps`, of: (curve) => drawn(smoothed(curve.x, curve.loss, smooth)) };
  const held = { label: "held-out loss", color: color("held"), digits: 4, points: true, of: (curve) => drawn(curve.held_out) };
  return smooth ? [{ ...loss, color: `${loss.color}80`, width: 1 }, mean, held] : [loss, held];
}

// An exponential mean over about so many steps, however far apart the values are; the first ones do not weigh more.
function smoothed(x, values, steps) {
  let [sum, weight, last] = [0, 0, null];
  return values.map((value, index) => {
    if (value == null) return null;
    const stays = Math.exp(-(last == null ? 1 : x[index] - last) / steps);
    [sum, weight, last] = [sum * stays + value * (1 - stays), weight * stays + 1 - stays, x[index]];
    return sum / weight;
  });
}

// 1, 2 and 5 of each power of ten; where few of them are in view, numbers at one distance.
function logTicks(low, high) {
  const found = ROUND.filter((value) => value >= low && value <= high);
  if (found.length > 2) return found;
  const every = ROUND.find((value) => (high - low) / value <= 5);
  const first = Math.ceil(low / every);
  return Array.from({ length: Math.floor(high / every) - first + 1 }, (_, index) => (first + index) * every);
}

class Chart extends Component {
  componentDidMount() {
    this.draw();
    this.observer = new ResizeObserver(() => this.plot.setSize(this.size()));
    this.observer.observe(this.element);
    this.theme = matchMedia("(prefers-color-scheme: dark)");
    this.redraw = () => (this.plot.destroy(), this.draw());
    this.theme.addEventListener("change", this.redraw);
  }
  componentDidUpdate(before) {
    // A part that somebody has drawn larger stays as it is, on the same axis.
    const [x, { min, max }] = [this.plot.data[0], this.plot.scales.x];
    const whole = !x.length || min == null || (min <= x[0] && max >= x[x.length - 1]);
    if (before.choices !== this.props.choices) {
      this.redraw();
      if (!whole && before.choices.axis === this.props.choices.axis) this.plot.setScale("x", { min, max });
      return;
    }
    this.plot.setData(this.columns(), whole);
    if (!whole) this.plot.redraw();
  }
  componentWillUnmount() {
    this.observer.disconnect();
    this.theme.removeEventListener("change", this.redraw);
    this.plot.destroy();
  }
  size() {
    return { width: Math.max(this.element.clientWidth, 200), height: this.props.kind === "loss" ? 280 : 160 };
  }
  get log() {
    return this.props.kind === "loss" && this.props.choices.log;
  }
  columns() {
    const { curve } = this.props.data;
    return [AXES[this.props.choices.axis].of(curve), ...plotted(this.props.kind, this.props.choices).map((each) => each.of(curve))];
  }
  draw() {
    const { kind, choices, data } = this.props;
    const axis = { stroke: color("soft"), grid: { stroke: color("line"), width: 1 }, ticks: { stroke: color("line") }, font: "12px system-ui" };
    const along = AXES[choices.axis];
    const series = plotted(kind, choices).map((each) => ({
      label: each.label,
      stroke: each.color,
      width: each.width ?? 2,
      spanGaps: true,
      dash: each.points ? [6, 4] : undefined,
      points: each.points ? { show: true, size: 6, fill: each.color } : { show: false },
      value: (_, value) => number(value, each.digits),
    }));
    const step = (index) => (index == null ? "–" : number(this.props.data.curve.x[index]));
    const x = {
      label: choices.axis === "step" ? "step" : `step, ${choices.axis}`,
      value: (_, value, __, index) => (choices.axis === "step" || value == null ? step(index) : `${step(index)}, ${along.words(value)}`),
    };
    const logarithmic = this.log && { splits: (_, __, low, high) => logTicks(low, high), filter: (_, splits) => splits };
    this.plot = new uPlot(
      {
        ...this.size(),
        cursor: { sync: { key: "step" }, y: false },
        scales: { x: { time: false }, y: { distr: this.log ? 3 : 1, range: (_, low, high) => this.range(low, high) } },
        axes: [
          { ...axis, label: along.label(data.curve), labelSize: 18, labelFont: "12px system-ui", size: 34, incrs: along.incrs, space: 64, values: (_, values) => values.map((value) => along.words(value)) },
          { ...axis, size: 62, ...logarithmic, values: (_, values) => values.map((value) => value.toLocaleString("en", { maximumSignificantDigits: 6 })) },
        ],
        series: [x, ...series],
        hooks: { draw: [(plot) => kind === "loss" && this.marks(plot)] },
      },
      this.columns(),
      this.element,
    );
  }
  range(low, high) {
    if (low == null) return this.log ? [0.1, 10] : [0, 1];
    if (this.props.kind === "pace") return [0, high * 1.1 || 1];
    if (this.log) {
      const room = Math.max((high / low) ** 0.08, 1.001);
      return [low / room, high * room ** 2];
    }
    const room = Math.max((high - low) * 0.08, 1e-3);
    return [Math.max(low - room, 0), high + 2 * room];
  }
  marks(plot) {
    const { ctx, bbox } = plot;
    const { curve, marks } = this.props.data;
    const pixels = devicePixelRatio || 1;
    ctx.save();
    ctx.textAlign = "center";
    ctx.font = `bold ${13 * pixels}px system-ui`;
    for (const mark of marks) {
      const index = curve.x.findIndex((step) => step >= mark.step);
      const at = plot.valToPos(plot.data[0].at(index), "x", true);
      if (!(at >= bbox.left && at <= bbox.left + bbox.width)) continue;
      ctx.strokeStyle = ctx.fillStyle = color({ joined: "good", left: "soft", gone: "bad", restarted: "bad", went_back: "warn" }[mark.kind]);
      ctx.lineWidth = 1.5 * pixels;
      ctx.setLineDash(mark.kind === "gone" ? [] : [4 * pixels, 3 * pixels]);
      ctx.beginPath();
      ctx.moveTo(at, bbox.top + 14 * pixels);
      ctx.lineTo(at, bbox.top + bbox.height);
      ctx.stroke();
      ctx.fillText(MARKS[mark.kind][0], at, bbox.top + 11 * pixels);
    }
    ctx.restore();
  }
  render({ kind, data, choices }) {
    const last = data.loss == null ? "" : `; now ${kind === "loss" ? data.loss.toFixed(4) : number(data.tokens_per_second)}`;
    return html`<div class="chart ${kind}" role="img" aria-label="${kind === "loss" ? "Loss" : "Tokens per second"} by ${choices.axis}${last}"
      ref=${(element) => (this.element = element)}></div>`;
  }
  shouldComponentUpdate(next) {
    return next.data !== this.props.data || next.choices !== this.props.choices;
  }
}

function MarkLegend() {
  return html`<ul class="legend">${Object.entries(MARKS).map(([kind, [sign, words]]) => html`<li><b class=${kind}>${sign}</b>${words}</li>`)}
    <li>drag to look closer, double-click for all</li></ul>`;
}

// ---------------------------------------------------------------- the map

const NODE = { width: 144, height: 48 };

function SwarmMap({ data, width }) {
  const along = width >= WIDE;
  const some = along ? MOST_NODES : MOST_NODES / 2;
  const stages = data.stages.map((each) => ({
    title: `stage ${each.stage}`,
    more: each.replicas - Math.min(each.peers.length, some),
    under: `${each.synced} of ${each.replicas} synced`,
    nodes: each.peers.slice(0, some).map((peer) => ({ peer, line: data.peers[peer].stages.find((line) => line.stage === each.stage) })),
  }));
  const trainers = data.trainers.slice(0, some).map((peer) => ({ peer }));
  const columns = [
    { title: "trainers", under: count(data.num_trainers, "trainer"), more: data.num_trainers - trainers.length, nodes: trainers },
    ...stages,
  ];
  const sizes = columns.map((each) => each.nodes.length + (each.more > 0));
  const most = Math.max(...sizes, 1);
  // Along: stages from left to right, one replica above the other. Else from top to bottom, as many side by side as the
  // page has room for, the others in lines below them.
  const step = Math.max((width - NODE.width - 4) / Math.max(columns.length - 1, 1), NODE.width + 60);
  const [beside, below] = [NODE.width + 10, NODE.height + 14];
  const across = Math.min(most, Math.max(Math.floor((width + 6) / beside), 1));
  const tops = [40];
  for (const size of sizes) tops.push(tops.at(-1) + Math.max(Math.ceil(size / across), 1) * below + 74);
  const place = (column, row, rows) => {
    if (along) return [column * step + 2, (row + (most - rows) / 2) * below + 44];
    const line = Math.floor(row / across);
    const inLine = Math.min(rows - line * across, across);
    return [((row % across) + (across - inLine) / 2) * beside + 2, tops[column] + line * below];
  };
  const [wide, high] = along ? [(columns.length - 1) * step + NODE.width + 4, most * below + 48] : [Math.max(across * beside - 6, 200), tops.at(-1) - 80];
  const placed = columns.map((column, c) => column.nodes.map((node, r) => ({ ...node, at: place(c, r, sizes[c]) })));
  const fastest = Math.max(...stages.flatMap((each) => each.nodes.map((node) => node.line.per_second)), 1e-9);
  const paths = [];
  for (let c = 0; c + 1 < columns.length; c++) {
    const knot = along ? [c * step + (NODE.width + step) / 2, 44 + (most * below - 14) / 2] : [(across * beside - 6) / 2, tops[c + 1] - 56];
    for (const node of placed[c]) paths.push(flow(end(node.at, along, true), knot, node.line, fastest, along));
    for (const node of placed[c + 1]) paths.push(flow(knot, end(node.at, along, false), node.line, fastest, along));
  }
  return html`<svg width=${wide} height=${high} role="group" aria-label="Map of the run">
    ${paths}
    ${columns.map((column, c) => {
      const [x, y] = along ? [c * step + 2, 14] : [2, c ? tops[c] - 52 : 14];
      return html`<text class="over" x=${x} y=${y}>${column.title}</text>
        <text class="soft over" x=${along ? x : Math.min(wide, width) - 2} y=${along ? y + 16 : y} text-anchor=${along ? "start" : "end"}>${column.under}</text>`;
    })}
    ${placed.map((column) => column.map((node) => html`<${MapNode} ...${node} data=${data} />`))}
    ${columns.map((column, c) => {
      if (column.more <= 0) return null;
      const [x, y] = place(c, column.nodes.length, sizes[c]);
      return html`<text class="soft over" x=${x + 8} y=${y + 28}>and ${number(column.more)} more</text>`;
    })}
  </svg>`;
}

const end = ([x, y], along, out) => (along ? [x + (out ? NODE.width : 0), y + NODE.height / 2] : [x + NODE.width / 2, y + (out ? NODE.height : 0)]);

function flow([x, y], [toX, toY], line, fastest, along) {
  const bend = along ? `${(x + toX) / 2},${y} ${(x + toX) / 2},${toY}` : `${x},${(y + toY) / 2} ${toX},${(y + toY) / 2}`;
  const path = `M${x},${y} C${bend} ${toX},${toY}`;
  // A trainer does not say how fast it feeds.
  if (line && line.state !== "synced") return null;
  if (!line?.per_second) return html`<path class="still" d=${path} />`;
  const part = line.per_second / fastest;
  return html`<path class="still" d=${path} /><path class="flow" d=${path} stroke-width=${1.5 + 3 * part} style=${{ animationDuration: `${0.35 + 0.65 / part}s` }} />`;
}

function MapNode({ peer, line, at: [x, y], data }) {
  const words = line ? (line.state === "synced" ? `version ${line.version}` : line.state) : "feeds";
  const accused = data.peers[peer]?.complaints.some((each) => each.about === peer);
  const kind = `node ${line ? line.state.split(" ")[0] : "synced"}${accused ? " accused" : ""}`;
  const full = NODE.width - 16;
  const part = line?.slots ? Math.min(line.held / line.slots, 1) : 0;
  const inside = html`<g class=${kind} transform="translate(${x},${y})">
    <title>${called(data, peer, 99)} ${peer}</title>
    <rect class="box" width=${NODE.width} height=${NODE.height} rx="6" />
    <text x="8" y="17" class="mono">${called(data, peer, 15)}</text>
    <text x="8" y="32" class="soft">${words}${line?.per_second ? ` · ${rate(line.per_second)}` : ""}</text>
    ${line && html`<rect class="load" x="8" y="38" width=${full} height="4" rx="2" /><rect class="held" x="8" y="38" width=${full * part} height="4" rx="2" />`}
  </g>`;
  return line ? html`<a href="#peer/${peer}" aria-label="replica ${called(data, peer, 99)}, stage ${line.stage}, ${words}">${inside}</a>` : inside;
}

// ---------------------------------------------------------------- one step

const PHASES = ["forward", "backward", "averaging", "barrier", "update"];
const LANE = 17;
const LETTER = 6.6; // pixels, of a phase's name at the most

// The phases of a replica's step as bars with their names on them, or beside those that are too short for it; in as few
// lanes as show all of that, but `least`: so that rows do not grow and shrink with each step. from, to: pixels; text: at
// `at`.
function labelled(bar, x, right, least) {
  const bars = PHASES.filter((name) => bar.phases[name].ended_s > bar.phases[name].began_s).map((name) => {
    const phase = bar.phases[name];
    const from = x(bar.began_s + phase.began_s);
    const to = Math.max(x(bar.began_s + phase.ended_s), from + 2);
    const wide = (text) => text.length * LETTER + 6;
    const inside = [`${name} ${phase.busy_s.toFixed(2)} s`, name].find((text) => wide(text) <= to - from);
    if (inside) return { name, phase, from, to, text: inside, at: from + 4, begins: from, ends: to };
    if (to + wide(name) <= right) return { name, phase, from, to, text: name, at: to + 4, begins: from, ends: to + wide(name) };
    return { name, phase, from, to, text: name, at: from - wide(name) + 2, begins: from - wide(name), ends: to };
  });
  const ends = [];
  for (const each of bars.sort((a, b) => a.begins - b.begins)) {
    const free = ends.findIndex((end) => end <= each.begins);
    each.lane = free < 0 ? ends.length : free;
    ends[each.lane] = each.ends;
  }
  return { bars, lanes: Math.max(ends.length, least) };
}

function Waterfall({ data, step, width }) {
  const narrow = width < WIDE; // a replica's name then stands above its bars, not beside them
  const [left, right] = narrow ? [0, width] : [142, width - 80];
  const x = (seconds) => left + (seconds / Math.max(step.seconds, 1e-9)) * (right - left);
  let high = 0;
  const rows = step.bars.map((bar) => {
    const row = { bar, top: high + (narrow ? 18 : 0), ...labelled(bar, x, right, narrow ? 3 : 2) };
    high = row.top + row.lanes * LANE + 8;
    return row;
  });
  const marks = (narrow ? [0, 0.5, 1] : [0, 0.25, 0.5, 0.75, 1]).map((part) => part * step.seconds);
  return html`<svg width=${width} height=${high + 20} role="img" aria-label="Step ${step.step}: ${count(rows.length, "replica")}, ${step.seconds.toFixed(2)} seconds">
    ${marks.map((at) => html`<line class="axis" x1=${x(at)} x2=${x(at)} y1="0" y2=${high} />
      <text class="soft" x=${x(at)} y=${high + 14} text-anchor=${at === step.seconds ? "end" : at || !narrow ? "middle" : "start"}>${at.toFixed(2)} s</text>`)}
    ${rows.map(({ bar, top, bars, lanes }) => html`<g transform="translate(0,${top})">
      <text x="0" y=${narrow ? -5 : (lanes * LANE) / 2 + 4}><tspan class="soft">stage ${bar.stage}</tspan> <tspan class="mono">${called(data, bar.peer)}</tspan></text>
      <rect class="whole" x=${x(bar.began_s)} y="0" width=${Math.max(x(bar.began_s + bar.seconds) - x(bar.began_s), 1)} height=${lanes * LANE} rx="2" />
      ${bars.map(({ name, phase, from, to, text, at, lane }) => html`<rect class="phase ${name}" x=${from} y=${lane * LANE + 1} height=${LANE - 2} width=${to - from} rx="2">
          <title>${bar.peer}: ${name} ${phase.busy_s.toFixed(3)} s, between ${phase.began_s.toFixed(3)} and ${phase.ended_s.toFixed(3)} s</title></rect>
        <text class="phase" x=${at} y=${lane * LANE + 12.5}>${text}</text>`)}
      <text class="soft" x=${width} y=${narrow ? -5 : (lanes * LANE) / 2 + 4} text-anchor="end">idle ${percent(bar.idle_s / (bar.seconds || 1))}</text>
    </g>`)}
  </svg>`;
}

// ---------------------------------------------------------------- who came and went

function ticks(from, to, width) {
  const every = DURATIONS.find((step) => (to - from) / step <= width / 90) ?? 864000;
  const found = [];
  for (let at = Math.ceil(from / every) * every; at <= to; at += every) found.push(at);
  return found;
}

function Timeline({ data, width }) {
  const rows = new Map(); // who comes back to its stage goes on in its row
  for (const stay of [...data.stays].sort((a, b) => a.stage - b.stage || (a.began ?? 0) - (b.began ?? 0))) {
    const name = `${stay.stage} ${stay.peer}`;
    rows.set(name, [...(rows.get(name) ?? []), stay]);
  }
  const last = (stays) => Math.max(...stays.map((stay) => stay.ended ?? stay.began ?? 0));
  const news = [...rows.keys()].sort((a, b) => last(rows.get(b)) - last(rows.get(a)));
  for (const name of news.slice(MOST_ROWS)) rows.delete(name);
  const left = 142;
  const [from, to] = [data.since, Math.max(data.time, data.since + 10)];
  const x = (time) => left + ((time - from) / (to - from)) * (width - left - 16);
  const high = rows.size * 20 + 24;
  return html`<svg width=${width} height=${high} role="img" aria-label="Who was here when, since ${clock(from)}">
    ${ticks(from, to, width - left).map(
      (at) => html`<line class="axis" x1=${x(at)} x2=${x(at)} y1="0" y2=${high - 20} /><text class="soft" x=${x(at) > width - 44 ? width : x(at)} y=${high - 6} text-anchor=${x(at) > width - 44 ? "end" : "middle"}>${clock(at)}</text>`,
    )}
    ${[...rows.values()].map(
      (stays, row) => html`<g transform="translate(0,${row * 20})">
        <text x="0" y="13"><tspan class="soft">${stays[0].stage < 0 ? "trainer" : `stage ${stays[0].stage}`}</tspan> <tspan class="mono">${called(data, stays[0].peer)}</tspan></text>
        ${stays.map((stay) => bar(stay, x(stay.began ?? from), x(stay.ended ?? to)))}
        ${stays.map((stay) => stay.how === "gone" && html`<text class="lost over" x=${x(stay.ended)} y="14" text-anchor="middle">✕</text>`)}
      </g>`,
    )}
  </svg>`;
}

const stayed = (stay) =>
  `${stay.began ? `joined at ${clock(stay.began)}` : "here before the first look"}${stay.how ? `, ${MARKS[stay.how][1]} at ${clock(stay.ended)}` : ""}`;

function bar(stay, began, ended) {
  const kind = stay.how ? "was" : "here";
  return html`<g class="stay ${stay.how}"><title>${stay.peer}: ${stayed(stay)}</title>
    <rect class=${kind} x=${began} y="4" width=${Math.max(ended - began, 2)} height="11" rx="2" />
    ${stay.began && html`<rect class=${kind} x=${began} y="1" width="2" height="17" />`}
  </g>`;
}

// ---------------------------------------------------------------- peers

function link(data, peer, nickname = data.peers[peer]?.nickname) {
  const id = html`<span class="mono">${short(peer)}</span>`;
  return html`<a href="#peer/${peer}" title=${peer}>${nickname || id}</a>${nickname && html` ${id}`}`;
}

// columns: [name, class]; rows: a key, then cells. On a narrow page each row is a list of its cells with their columns' names.
function Table({ label, note, columns, rows }) {
  return html`<div class="scroll ${rows.length > MOST_ROWS ? "tall" : ""}" tabindex="0" role="group" aria-label=${label}><table>
    ${note && html`<caption>${note}</caption>`}
    <thead><tr>${columns.map(([name, kind]) => html`<th scope="col" class=${kind}>${name}</th>`)}</tr></thead>
    <tbody>${rows.map(([key, ...cells]) => html`<tr key=${key}>${cells.map((cell, at) => html`<td class=${columns[at][1]} data-name=${columns[at][0]}><span>${cell}</span></td>`)}</tr>`)}</tbody>
  </table></div>`;
}

function Contributors({ data }) {
  return html`<section class="card"><h2>Contributors</h2><${Table} label="Contributors"
    note="Microbatches accepted since each peer's process began; at most 100 peers, those with the most."
    columns=${[["contributor", "wide"], ["stage", "number"], ["accepted microbatches", "number"], ["share of the run", "number"]]}
    rows=${data.contributors.map((each) => [each.peer, link(data, each.peer, each.nickname), each.stages.join(", "), number(each.accepted), percent(each.share)])} /></section>`;
}

function Replicas({ data }) {
  const lines = Object.entries(data.peers).flatMap(([peer, { stages, device, region }]) => stages.map((line) => ({ peer, device, region, ...line })));
  const total = data.stages.reduce((sum, each) => sum + each.replicas, 0);
  lines.sort((a, b) => a.stage - b.stage || b.counted - a.counted);
  return html`<section class="card"><h2>Replicas</h2><${Table} label="Replicas"
    note=${lines.length < total && `${number(lines.length)} of ${number(total)}`}
    columns=${[["stage"], ["peer", "wide"], ["state"], ["version", "number"], ["held", "number"], ["microbatches", "number"], ["accepted", "number"], ["of its stage", "number"], ["device", "wide"], ["region"]]}
    rows=${lines.map((line) => [`${line.stage} ${line.peer}`, line.stage, link(data, line.peer), line.state, number(line.version), `${line.held}/${line.slots}`, rate(line.per_second),
      number(line.counted), percent(line.share), line.device || "–", line.region || "–"])} /></section>`;
}

function PeerPage({ data, peer }) {
  const found = Object.hasOwn(data.peers, peer) ? data.peers[peer] : null;
  const stays = data.stays.filter((stay) => stay.peer === peer);
  const facts = (rows) => html`<dl class="facts">${rows.map(([name, value]) => html`<dt>${name}</dt><dd>${value}</dd>`)}</dl>`;
  return html`<section class="card"><h2>Peer ${found?.nickname} <code>${peer}</code></h2>
      <p><a href="#">Back to the run</a></p>
      ${!found && html`<p>It is not here now.</p>`}
      ${facts(stays.map((stay) => [stay.stage < 0 ? "as a trainer" : `stage ${stay.stage}`, stayed(stay)]))}
    </section>
    ${found?.stages.map((line) => html`<section class="card"><h2>Contribution to stage ${line.stage}</h2>
      ${facts([
        ["state", `${line.state}, version ${number(line.version)}${line.still_s ? `, no step for ${duration(line.still_s)}` : ""}`],
        ["accepted", `${count(line.counted, "microbatch")}${line.share == null ? "" : `, ${percent(line.share)} of those of its stage's processes`}`],
        ["executed", `${count(line.executions, "forward")}, ${rate(line.per_second)} now`],
        ["speed", line.speed ? `${rate(line.speed)}, as far as its mates bear it out` : "unknown"],
        ["holds", `${line.held} of ${count(line.slots, "microbatch")} at once`],
        ["on disk", line.disk.length ? `versions ${line.disk.join(", ")}` : "nothing"],
        ["chain", html`<code>${line.chain}</code>`],
      ])}</section>`)}
    ${found && html`<section class="card"><h2>Standing</h2>
      ${facts(found.stages.map((line) => [`weights of stage ${line.stage}`,
        line.drift == null ? "not yet compared with its mates'" : `${line.stray ? "not those of its mates" : "those of its mates"} at version ${number(line.drift)}`]))}
      ${found.complaints.length === 0 ? html`<p>No complaints, of it or by it.</p>` : html`<${Table} label="Complaints"
        columns=${[["stage"], ["by"], ["about"], ["what"], ["why", "wide"]]}
        rows=${found.complaints.map((each, at) => [at, each.stage, ...[each.by, each.about].map((one) => (one === peer ? "itself" : link(data, one))),
          `${HOW[each.how]}${each.seconds ? ` (${each.seconds} s)` : ""}`, each.reason])} />`}</section>
      <section class="card"><h2>Lines</h2>
      ${facts([
        ["reached", found.addresses.length === 0 ? "by nobody" : found.addresses.every((each) => each.includes("/p2p-circuit/")) ? "through relays" : "directly"],
        ...found.addresses.map((each) => ["address", html`<code>${each}</code>`]),
        ["device", found.device || "unknown"],
        ["region", found.region || "not said"],
        ["software", found.software || "unknown"],
        ["numerics", found.numerics || "unknown"],
        ["run went back", found.restart ? count(found.restart, "time") : "never"],
      ])}</section>`}`;
}

// ---------------------------------------------------------------- asking

const before = kept();
const choices = Object.fromEntries(Object.entries(CHOICES).map(([name, all]) => [name, all.includes(before[name]) ? before[name] : all[0]]));
const shown = { data: null, age: 0, lost: false, hash: location.hash, choices };
let tag = "";

function draw() {
  if (shown.data?.run) document.title = `${runName(shown.data)} · swarmnet`;
  render(html`<${App} ...${shown} />`, document.getElementById("page"));
}

async function ask() {
  try {
    // By this header the server tells its own page from one of another site (telemetry/web.py).
    const headers = { "X-Requested-With": "swarmnet", ...(tag && { "If-None-Match": tag }) };
    const answer = await fetch("data.json", { headers, cache: "no-store", signal: AbortSignal.timeout(10000) });
    if (answer.status === 200) {
      shown.data = await answer.json();
      tag = answer.headers.get("ETag");
    } else if (answer.status !== 304) throw new Error(answer.statusText);
    [shown.age, shown.lost] = [Number(answer.headers.get("Age")), false];
  } catch (error) {
    console.info("swarmnet dashboard:", error.message);
    shown.lost = true;
  }
  draw();
  setTimeout(ask, EVERY_MS);
}

addEventListener("hashchange", () => {
  shown.hash = location.hash;
  draw();
  scrollTo(0, 0);
});
draw();
ask();
