// Draws the page's charts and table from the JSON in #data. Text from the data goes into the page as text, never as markup.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const get = (id) => document.getElementById(id);
  const style = () => getComputedStyle(document.documentElement);
  const ink = (name) => style().getPropertyValue(`--${name}`).trim();
  const narrow = () => window.innerWidth <= 640;
  const coarse = () => window.matchMedia("(pointer: coarse)").matches || (narrow() && navigator.maxTouchPoints > 0);
  const font = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif";

  // ---- numbers as text -------------------------------------------------------------------------------------------
  // Written out, because loading the browser's own number formats takes longer than drawing the table.
  const count = (number) => String(Math.round(number)).replace(/\B(?=(\d{3})+$)/g, ",");
  const digits = (value) => (Math.abs(value) >= 100 || value === 0 ? count(value) : value.toPrecision(3));
  const byteUnits = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];
  const timeUnits = [["s", 1e9], ["ms", 1e6], ["µs", 1e3]];
  const scaleOf = (units, most, least) => units.find(([, size]) => most >= size) || [least, 1];
  const bytes = (amount) => {
    const [unit, size] = scaleOf(byteUnits, Math.abs(amount), "B");
    return size === 1 ? `${amount} B` : `${(amount / size).toFixed(2)} ${unit}`;
  };
  const time = (ns) => {
    const [unit, size] = scaleOf(timeUnits, Math.abs(ns), "ns");
    return `${digits(ns / size)} ${unit}`;
  };
  const percent = (share) => (share !== 0 && Math.abs(share) < 0.0005 ? "below 0.1%" : `${(share * 100).toFixed(1)}%`);
  const printed = { text: String, count, bytes, time, share: percent };
  // Plotly reads some markup in labels; a name is only a name.
  const plain = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const shorten = (text, most) => (text.length <= most ? text : `${text.slice(0, Math.ceil(most / 2) - 1)}…${text.slice(-Math.floor(most / 2))}`);

  // ---- small pieces of page --------------------------------------------------------------------------------------
  const make = (tag, className, ...children) => {
    const node = document.createElement(tag);
    if (className) node.className = className;
    node.append(...children);
    return node;
  };
  const swatch = (color, kind = "") => {
    const node = make("span", `swatch ${kind}`);
    node.style.setProperty("--swatch", color);
    node.setAttribute("aria-hidden", "true");
    return node;
  };
  const legend = (id, entries) => {
    get(id).replaceChildren(...entries.map(([color, text, kind, apart]) => make("li", apart ? "apart" : "", swatch(color, kind), text)));
  };
  const tipRow = (color, what, size) => make("div", "row", swatch(color), make("span", "what", what), make("span", "size", size));
  const named = (name, module) => (module ? `${name} in ${module}` : name);

  const placeTip = (tip, frame, x, y) => {
    tip.hidden = false;
    if (narrow()) return;
    const left = x + 18 + tip.offsetWidth <= frame.clientWidth ? x + 18 : Math.max(0, x - 18 - tip.offsetWidth);
    tip.style.left = `${left}px`;
    tip.style.top = `${Math.max(0, Math.min(y, frame.clientHeight - tip.offsetHeight))}px`;
  };

  // ---- what all charts share -------------------------------------------------------------------------------------
  const config = () => ({
    displaylogo: false, responsive: true, displayModeBar: false, scrollZoom: false, doubleClick: "reset", showTips: false,
  });
  const axis = (more) => ({
    gridcolor: ink("line"), zeroline: false, linecolor: ink("line"), tickfont: { color: ink("muted"), size: narrow() ? 10.5 : 12 },
    title: { font: { color: ink("muted"), size: 12 } }, ...more,
  });
  const sheet = (more) => ({
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, font: { family: font, color: ink("ink"), size: 12.5 },
    dragmode: coarse() ? false : "zoom", hovermode: false, autosize: true, ...more,
  });
  const draw = (node, traces, layout) => Plotly.react(node, traces, layout, config());

  // ---- memory over time ------------------------------------------------------------------------------------------
  const steps = data.steps;
  const totals = steps.map((step) => step.start.map((_, row) => step.bytes.reduce((sum, [, line]) => sum + line[row], 0)));
  const peaks = totals.map((line) => line.reduce((most, value) => Math.max(most, value), 0));
  const longest = steps.reduce((most, step) => Math.max(most, step.end), 1);
  const timed = scaleOf(timeUnits, longest, "ns");
  const yAxis = (number) => (number ? `y${2 * number + 1}` : "y");
  const stripAxis = (number) => `y${2 * number + 2}`;
  const layoutName = (name) => name.replace("y", "yaxis");

  const drawMemory = () => {
    const tall = narrow() ? 170 : 230, strip = 9, apart = 5, gap = 46, top = 34, bottom = 46;
    const plotted = steps.length * (tall + apart + strip) + (steps.length - 1) * gap;
    const largest = Math.max(...peaks, data.budget || 1);
    const [unit, size] = scaleOf(byteUnits, largest, "B");
    const most = (largest / size) * 1.06;
    const layout = sheet({
      height: plotted + top + bottom, margin: { l: narrow() ? 44 : 58, r: 8, t: top, b: bottom }, shapes: [], annotations: [],
      xaxis: axis({ range: [0, longest / timed[1]], title: { text: `time (${timed[0]})`, font: { color: ink("muted"), size: 12 }, standoff: 8 },
        anchor: stripAxis(steps.length - 1), showgrid: false, minallowed: 0, maxallowed: longest / timed[1] }),
    });
    const traces = [];
    steps.forEach((step, number) => {
      const above = number * (tall + apart + strip + gap);
      const domain = (from, height) => [1 - (from + height) / plotted, 1 - from / plotted].map((edge) => Math.min(1, Math.max(0, edge)));
      layout[layoutName(yAxis(number))] = axis({
        domain: domain(above, tall), range: [0, most], fixedrange: true, nticks: 5, anchor: "x",
        title: { text: unit, font: { color: ink("muted"), size: 12 }, standoff: 6 },
      });
      layout[layoutName(stripAxis(number))] = { domain: domain(above + tall + apart, strip), range: [0, 1], fixedrange: true, visible: false, anchor: "x" };
      const across = [...step.start, step.end].map((moment) => moment / timed[1]);
      const closed = (line) => [...line, line[line.length - 1] || 0].map((value) => value / size);
      step.bytes.forEach(([kind, line]) => traces.push({
        type: "scatter", mode: "lines", x: across, y: closed(line), yaxis: yAxis(number), stackgroup: `step${number}`, hoverinfo: "skip",
        line: { shape: "hv", width: 0.7, color: ink("paper") }, fillcolor: ink(`class-${data.classes[kind].slug}`),
      }));
      if (number) traces.push({
        type: "scatter", mode: "lines", x: [...steps[0].start, steps[0].end].map((moment) => moment / timed[1]), hoverinfo: "skip",
        y: [...totals[0], totals[0][totals[0].length - 1] || 0].map((value) => value / size), yaxis: yAxis(number),
        line: { shape: "hv", width: 1.4, color: ink("ghost"), dash: "dot" },
      });
      addStrip(traces, step, number);
      label(layout, step, number, { size, above, plotted });
    });
    return draw(get("memory-chart"), traces, layout);
  };

  const addStrip = (traces, step, number) => data.phases.forEach((phase, place) => {
    const x = [], y = [];
    step.runs.filter(([kind]) => kind === place).forEach(([, from, to]) => {
      const [left, right] = [from / timed[1], to / timed[1]];
      x.push(left, right, right, left, left, null);
      y.push(0, 0, 1, 1, 0, null);
    });
    if (x.length) traces.push({
      type: "scatter", mode: "lines", x, y, yaxis: stripAxis(number), fill: "toself", hoverinfo: "skip",
      fillcolor: ink(`phase-${phase.slug}`), line: { width: phase.name === "recompute" ? 1 : 0, color: ink(`phase-${phase.slug}`) },
    });
  });

  const label = (layout, step, number, { size, above, plotted }) => {
    const put = (more) => layout.annotations.push({ showarrow: false, font: { size: 13, color: ink("ink") }, ...more });
    const kind = step.measured ? "measured" : "predicted";
    put({ xref: "paper", yref: "paper", x: 0, y: 1 - above / plotted, xanchor: "left", yanchor: "bottom", yshift: 8,
      text: `<b>${plain(step.title)}</b>  peak ${bytes(peaks[number])}, ${time(step.end)}${narrow() ? "" : ` · ${kind}`}` });
    if (step.peak >= 0) layout.shapes.push({
      type: "circle", xref: "x", yref: yAxis(number), xsizemode: "pixel", ysizemode: "pixel", x0: -4, x1: 4, y0: -4, y1: 4,
      xanchor: step.start[step.peak] / timed[1], yanchor: peaks[number] / size, fillcolor: ink("ink"), line: { width: 1.5, color: ink("paper") },
    });
    if (!data.budget) return;
    layout.shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, yref: yAxis(number), y0: data.budget / size, y1: data.budget / size,
      line: { color: ink("limit"), width: 1.5, dash: "dash" } });
    put({ xref: "paper", x: 1, xanchor: "right", yref: yAxis(number), y: data.budget / size, yanchor: "bottom", yshift: 3, bgcolor: `${ink("paper")}c8`, borderpad: 1,
      text: `budget ${bytes(data.budget)}`, font: { size: 11.5, color: ink("limit") } });
  };

  const memoryLegend = () => {
    const present = new Set(steps.flatMap((step) => step.bytes.map(([kind]) => kind)));
    const ran = new Set(steps.flatMap((step) => step.runs.map(([phase]) => phase)));
    legend("memory-legend", [
      ...data.classes.map((kind, number) => [number, kind]).filter(([number]) => present.has(number)).reverse()
        .map(([, kind]) => [`var(--class-${kind.slug})`, kind.name, ""]),
      ...data.phases.map((phase, number) => [number, phase]).filter(([number]) => ran.has(number))
        .map(([, phase], place) => [`var(--phase-${phase.slug})`, phase.name, "strip", place === 0]),
      ...(steps.length > 1 ? [["var(--ghost)", steps[0].title, "dash", true]] : []),
    ]);
  };

  // ---- what is in memory at one moment -----------------------------------------------------------------------------
  const memoryFrame = get("memory-frame"), memoryTip = get("memory-tip");
  const cursor = memoryFrame && memoryFrame.querySelector(".cursor");
  const at = { step: 0, row: -1 };
  const area = (number) => get("memory-chart").querySelector(`.nsewdrag[data-subplot="x${yAxis(number)}"]`)?.getBoundingClientRect();
  const range = () => get("memory-chart").layout.xaxis.range;

  const rowAt = (step, moment) => {
    let low = 0, high = step.start.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (step.start[middle] <= moment) low = middle; else high = middle - 1;
    }
    return high < 0 ? -1 : low;
  };

  const describeMoment = (step, row) => {
    const phase = data.phases[step.phase[row]].name;
    const title = make("b", "", data.strings[step.target[row]]);
    const where = [data.strings[step.module[row]], phase, time(step.time[row])].filter(Boolean).join(" · ");
    const moment = `${step.title}, at ${time(step.start[row])}, operator ${count(step.position[row] + 1)} of ${count(step.count)}`;
    const nodes = [title, make("div", "where", where), make("div", "where", moment)];
    if (row === step.peak) title.after(), nodes.splice(1, 0, make("span", "badge", "peak"));
    nodes.push(make("div", "total", "In memory", make("span", "", bytes(totals[steps.indexOf(step)][row]))));
    [...step.bytes].reverse().filter(([, line]) => line[row]).forEach(([kind, line]) =>
      nodes.push(tipRow(`var(--class-${data.classes[kind].slug})`, data.classes[kind].name, bytes(line[row]))));
    nodes.push(make("h3", "", "Largest tensors in memory"));
    step.largest[row].forEach((place) => {
      const [name, module, size, kind] = step.storages[place];
      nodes.push(tipRow(`var(--class-${data.classes[kind].slug})`, named(data.strings[name], data.strings[module]), bytes(size)));
    });
    return nodes;
  };

  const showMoment = (number, row, pointer) => {
    const step = steps[number], box = area(number);
    if (!step || row < 0 || !box) return;
    at.step = number; at.row = row;
    const frame = memoryFrame.getBoundingClientRect(), [from, to] = range();
    const end = row + 1 < step.start.length ? step.start[row + 1] : step.end;
    const middle = (step.start[row] + end) / 2 / timed[1];
    const x = pointer ? pointer.x - frame.left : box.left - frame.left + ((middle - from) / (to - from)) * box.width;
    cursor.hidden = false;
    Object.assign(cursor.style, { left: `${x}px`, top: `${box.top - frame.top}px`, height: `${box.height}px`, bottom: "auto" });
    memoryTip.setAttribute("aria-live", pointer ? "off" : "polite");
    memoryTip.replaceChildren(...describeMoment(step, row));
    placeTip(memoryTip, memoryFrame, x, box.top - frame.top + 4);
  };
  const hideMoment = () => { cursor.hidden = true; memoryTip.hidden = true; at.row = -1; };

  const pointAt = (event) => {
    if (event.buttons && event.pointerType === "mouse") { hideMoment(); return; }
    for (let number = 0; number < steps.length; number += 1) {
      const box = area(number);
      if (!box || event.clientX < box.left || event.clientX > box.right || event.clientY < box.top || event.clientY > box.bottom + 16) continue;
      const [from, to] = range();
      const moment = (from + ((event.clientX - box.left) / box.width) * (to - from)) * timed[1];
      if (moment <= steps[number].end) { showMoment(number, rowAt(steps[number], moment), { x: event.clientX }); return; }
    }
    if (event.pointerType === "mouse") hideMoment();
  };

  const moveByKey = (event) => {
    const step = steps[at.step], last = step.start.length - 1, stride = event.shiftKey ? 20 : 1;
    const other = (number) => { at.step = number; return rowAt(steps[number], at.row < 0 ? 0 : step.start[at.row]); };
    const moves = {
      ArrowRight: () => Math.min(last, at.row + stride), ArrowLeft: () => Math.max(0, at.row - stride), Home: () => 0, End: () => last,
      p: () => step.peak, P: () => step.peak,
      ArrowUp: () => other(Math.max(0, at.step - 1)), ArrowDown: () => other(Math.min(steps.length - 1, at.step + 1)),
    };
    if (event.key === "Escape") { hideMoment(); return; }
    if (!moves[event.key]) return;
    event.preventDefault();
    const row = moves[event.key]();
    showMoment(at.step, row, null);
  };

  const watchMemory = () => {
    memoryFrame.addEventListener("pointermove", pointAt, true);
    memoryFrame.addEventListener("pointerdown", (event) => { if (event.pointerType !== "mouse") pointAt(event); }, true);
    memoryFrame.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hideMoment(); });
    memoryFrame.addEventListener("keydown", moveByKey);
    memoryFrame.addEventListener("blur", hideMoment);
  };

  // ---- lifetimes ---------------------------------------------------------------------------------------------------
  const lane = { before: { offset: -0.4, width: 0.26 }, after: { offset: -0.08, width: 0.46 }, single: { offset: -0.32, width: 0.64 } };

  const segments = (panel, which, wanted) => panel.rows.flatMap((row, place) => row[which].flatMap(([start, idle, used, end, again]) => {
    const pieces = wanted === "idle" ? [[idle, used]] : [[start, idle], [used, end]];
    const right = wanted === "idle" || Boolean(again) === (wanted === "again");
    return right ? pieces.filter(([from, to]) => to > from).map(([from, to]) => ({ place, from, to, row })) : [];
  }));

  const bars = (found, color, at, hatched) => ({
    type: "bar", orientation: "h", hoverinfo: "none", y: found.map((bar) => bar.place), base: found.map((bar) => bar.from / timed[1]),
    x: found.map((bar) => (bar.to - bar.from) / timed[1]), offset: at.offset, width: at.width, customdata: found.map((bar) => bar.place),
    marker: hatched
      ? { color: found.map((bar) => color(bar.row)), opacity: 0.8, line: { width: 0 }, pattern: { shape: "/", fillmode: "replace", solidity: 0.3, size: 5, fgcolor: found.map((bar) => color(bar.row)) } }
      : { color: found.map((bar) => color(bar.row)), line: { width: 1, color: found.map((bar) => color(bar.row)) } },
  });

  const drawPanel = (panel, node) => {
    const known = ink("ghost"), pale = ink("pale"), again = ink("phase-recompute");
    const byClass = (row) => ink(`class-${data.classes[row.kind].slug}`);
    const after = panel.paired ? "after" : "before", where = panel.paired ? lane.after : lane.single;
    const traces = [
      ...(panel.paired ? [bars(segments(panel, "before", "used"), () => known, lane.before), bars(segments(panel, "before", "idle"), () => pale, lane.before)] : []),
      bars(segments(panel, after, "used"), byClass, where),
      bars(segments(panel, after, "idle"), byClass, where, true),
      bars(segments(panel, after, "again"), () => again, where),
    ].filter((trace) => trace.x.length);
    const [moduleMost, nameMost, high] = narrow() ? [10, 11, 19] : [24, 20, 21];
    // Where there is little room the beginning of a module's name tells most: it has the layer's number.
    const module = (row) => (narrow() && row.module.length > moduleMost ? `${row.module.slice(0, moduleMost - 1).replace(/[.]+$/, "")}…` : shorten(row.module, moduleMost));
    const name = (row) => `${module(row)} ${row.name.length > nameMost ? `${row.name.slice(0, nameMost - 1)}…` : row.name}`;
    const text = panel.rows.map((row) => `${plain(name(row))}${narrow() ? "" : `  <span style="color:${ink("faint")}">${bytes(row.size)}</span>`}`);
    return draw(node, traces, sheet({
      height: panel.rows.length * high + 62, barmode: "overlay", hovermode: "closest", hoverdistance: 20,
      margin: { l: narrow() ? 130 : 330, r: 8, t: 8, b: 46 },
      xaxis: axis({ range: [0, longest / timed[1]], title: { text: `time (${timed[0]})`, font: { color: ink("muted"), size: 12 }, standoff: 8 }, fixedrange: coarse() }),
      yaxis: axis({ range: [panel.rows.length - 0.4, -0.6], tickvals: panel.rows.map((_, place) => place), ticktext: text, fixedrange: true, showgrid: false,
        tickfont: { color: ink("muted"), size: narrow() ? 9.5 : 11.5 } }),
    }));
  };

  const describeValue = (panel, row) => {
    const lives = panel.paired ? row.after : row.before;
    const idle = row.before.reduce((sum, [, from, to]) => sum + to - from, 0);
    const held = (list) => list.reduce((sum, [start, , , end]) => sum + end - start, 0);
    const nodes = [make("b", "", row.name), make("div", "where", [row.module, data.classes[row.kind].name].filter(Boolean).join(" · "))];
    nodes.push(make("div", "total", "Size", make("span", "", bytes(row.size))));
    const fact = (what, amount) => nodes.push(make("div", "row", make("span", "what", what), make("span", "size", amount)));
    fact(panel.paired ? "In memory, plain" : "In memory", time(held(row.before)));
    if (panel.paired) fact("In memory, with Remat", time(held(lives)));
    if (idle) fact(panel.paired ? "of that waiting, plain" : "of that waiting", time(idle));
    if (row.again) fact("Computing it takes", time(row.again));
    const runs = lives.filter((life) => life[4]).length;
    if (panel.paired) fact("Computed again", runs ? `${runs}×` : "no, kept");
    return nodes;
  };

  const drawLifetimes = () => Promise.all(data.lifetimes.map((panel, number) => drawPanel(panel, get(`lifetimes-${number}`))));

  const buildLifetimes = () => {
    const paired = data.lifetimes.some((panel) => panel.paired);
    const kinds = [...new Set(data.lifetimes.flatMap((panel) => panel.rows.map((row) => row.kind)))].sort((a, b) => a - b);
    legend("lifetimes-legend", [
      ...kinds.map((kind) => [`var(--class-${data.classes[kind].slug})`, `${data.classes[kind].name}, in use`]),
      ["var(--class-activations)", "waiting for backward", "hatched"],
      ...(paired ? [["var(--phase-recompute)", "computed again"], ["var(--ghost)", "the plain step", "thin", true]] : []),
    ]);
    get("lifetimes-panels").replaceChildren(...data.lifetimes.map((panel, number) => {
      const plot = make("div", "plot"), tip = make("div", "tip");
      plot.id = `lifetimes-${number}`;
      plot.setAttribute("role", "img");
      plot.setAttribute("aria-label", `${panel.title || "Lifetimes"}: the ${panel.rows.length} largest of ${panel.made} values; the same numbers are in the table below`);
      tip.hidden = true;
      tip.setAttribute("role", "status");
      const frame = make("div", "chart", ...(panel.title ? [make("h3", "", panel.title)] : []), plot, tip);
      return make("div", "", frame, make("p", "quiet", `The ${panel.rows.length} largest of ${count(panel.made)} values that the step makes.`), valueTable(panel));
    }));
  };

  const cell = (text, className) => make("td", className, text);
  const valueTable = (panel) => {
    const heads = ["Value", "Size", panel.paired ? "In memory, plain" : "In memory", ...(panel.paired ? ["With Remat", "Computed again"] : ["Waiting"])];
    const held = (list) => time(list.reduce((sum, [start, , , end]) => sum + end - start, 0));
    const rows = panel.rows.map((row) => make("tr", "", cell(named(row.name, row.module)), cell(bytes(row.size), "number"), cell(held(row.before), "number"),
      ...(panel.paired
        ? [cell(held(row.after), "number"), cell(String(row.after.filter((life) => life[4]).length), "number")]
        : [cell(time(row.before.reduce((sum, [, from, to]) => sum + to - from, 0)), "number")])));
    const head = make("tr", "", ...heads.map((text, place) => { const node = make("th", place ? "number" : "", text); node.scope = "col"; return node; }));
    return make("details", "numbers", make("summary", "", "The numbers"), make("div", "scroll", make("table", "", make("thead", "", head), make("tbody", "", ...rows))));
  };

  const watchPlot = (node, tip, describe) => {
    const frame = node.parentElement;
    const show = (event) => {
      const found = event.points[0], box = frame.getBoundingClientRect();
      const nodes = describe(found);
      if (!nodes || !event.event) return;
      tip.replaceChildren(...nodes);
      placeTip(tip, frame, event.event.clientX - box.left, event.event.clientY - box.top - 30);
    };
    node.on("plotly_hover", show);
    node.on("plotly_click", show);
    node.on("plotly_unhover", () => { if (!coarse()) tip.hidden = true; });
  };

  // ---- time against memory -------------------------------------------------------------------------------------------
  const marks = ["circle", "square", "triangle-up", "triangle-down", "pentagon", "hexagon", "cross", "x", "triangle-left", "triangle-right"];

  const drawCurve = () => {
    const curve = data.pareto, all = [...curve.points, ...curve.baselines];
    const widest = Math.max(curve.plain, ...all.map((point) => Math.max(point.budget, point.peak)));
    const [unit, size] = scaleOf(byteUnits, widest, "B"), accent = ink("accent");
    const from = Math.max(0, (Math.min(curve.floor, ...all.map((point) => point.peak)) / size) * 0.9), to = (widest / size) * 1.04;
    const x = curve.points.map((point) => point.budget / size), last = x.length ? [to] : [];
    const top = Math.max(0.02, ...all.map((point) => point.overhead), ...all.map((point) => point.measured ?? 0), curve.plan ? curve.plan.overhead : 0) * 100;
    const bound = curve.points.map((point) => Math.max(0, point.bound * 100)), ours = curve.points.map((point) => point.overhead * 100);
    const shade = `${ink("faint")}3d`;
    const traces = [];
    if (x.length) {
      // Between two budgets the bound of the larger holds, and the schedule of the smaller fits.
      traces.push({ type: "scatter", mode: "lines", hoverinfo: "skip", fill: "tozeroy", fillcolor: shade, x, y: bound, line: { width: 0, shape: "vh" } });
      traces.push({ type: "scatter", mode: "lines", hoverinfo: "skip", x: [...x, ...last], y: [...ours, ours[ours.length - 1]], line: { color: accent, width: 2.5, shape: "hv" } });
      traces.push(points(curve.points.map((point) => ({ ...point, x: point.budget, y: point.overhead })), size, { color: accent, size: 9, symbol: "circle" }));
    }
    const names = [...new Set(curve.baselines.map((point) => point.solver))];
    const labels = new Map();
    names.forEach((name, number) => {
      const own = curve.baselines.filter((point) => point.solver === name).map((point) => ({ ...point, x: point.peak, y: point.overhead }));
      // A point that another of the same strategy betters says nothing.
      const found = own.filter((point, place) => !own.some((other, there) => there !== place && other.x <= point.x && other.y <= point.y
        && (other.x < point.x || other.y < point.y || there < place)));
      traces.push(points(found, size, { color: ink("muted"), size: 9, symbol: marks[(number + 1) % marks.length] }));
      // A strategy with many points is named once, at its cheapest; strategies in one place share a label.
      const best = found.reduce((least, point) => (point.y < least.y ? point : least));
      const place = [Math.round((12 * best.x) / size / (to - from)), Math.round((20 * best.y * 100) / top)].join();
      labels.set(place, [...(labels.get(place) || []), { name, best }]);
    });
    const written = [...labels.values()].map((group) => {
      const { x: across, y: upward } = group[0].best, along = (across / size - from) / (to - from);
      const text = group.slice(0, 2).map(({ name }) => name).join(", ") + (group.length > 2 ? ` +${group.length - 2}` : "");
      return { x: across / size, y: upward * 100, xanchor: along > 0.85 ? "right" : along < 0.15 ? "left" : "center", xshift: along > 0.85 ? 6 : along < 0.15 ? -6 : 0,
        yanchor: "bottom", yshift: 7, showarrow: false, text: plain(text), font: { size: 11.5, color: ink("muted") } };
    });
    const measured = all.filter((point) => point.measured !== null && point.measuredPeak !== null).map((point) => ({ ...point, x: point.measuredPeak, y: point.measured, real: true }));
    if (measured.length) traces.push(points(measured, size, { color: ink("class-gradients"), size: 10, symbol: "diamond-open", line: { width: 2, color: ink("class-gradients") } }));
    if (curve.plan) traces.push(points([{ ...curve.plan, x: curve.plan.peak, y: curve.plan.overhead, solver: "this plan" }], size, { color: ink("phase-recompute"), size: 13, symbol: "star" }));
    const wall = { type: "rect", xref: "x", yref: "paper", x0: from, x1: curve.floor / size, y0: 0, y1: 1, fillcolor: shade, line: { width: 0 }, layer: "below" };
    return draw(get("curve-chart"), traces, sheet({
      height: narrow() ? 320 : 420, hovermode: "closest", hoverdistance: 25, margin: { l: narrow() ? 44 : 58, r: 10, t: 16, b: 48 }, shapes: [wall],
      annotations: [...written, ...(curve.floor / size > from ? [{ xref: "x", yref: "paper", x: curve.floor / size, y: 0.06, xanchor: "left", yanchor: "bottom", showarrow: false, text: "← nothing fits", font: { size: 11, color: ink("muted") } }] : [])],
      xaxis: axis({ range: [from, to], title: { text: `memory (${unit})`, font: { color: ink("muted"), size: 12 }, standoff: 8 }, showgrid: false, fixedrange: coarse() }),
      yaxis: axis({ range: [-0.03 * top, top * 1.14], ticksuffix: "%", title: { text: narrow() ? "" : "extra time", font: { color: ink("muted"), size: 12 }, standoff: 6 }, rangemode: "tozero", fixedrange: coarse() }),
    }));
  };
  const points = (found, size, marker) => ({
    type: "scatter", mode: "markers", hoverinfo: "none", x: found.map((point) => point.x / size), y: found.map((point) => point.y * 100), customdata: found, marker, cliponaxis: false,
  });

  const describePoint = (found) => {
    const point = found.customdata;
    if (!point) return null;
    const nodes = [make("b", "", point.solver), make("div", "where", point.real ? "measured on a real step" : "predicted")];
    const fact = (what, amount) => nodes.push(make("div", "row", make("span", "what", what), make("span", "size", amount)));
    if (point.budget !== undefined) fact("Budget", bytes(point.budget));
    fact("Peak", bytes(point.peak));
    fact("Extra time", percent(point.overhead));
    if (point.bound !== undefined) fact("No schedule below", percent(Math.max(0, point.bound)));
    if (point.measuredPeak != null) fact("Measured peak", bytes(point.measuredPeak));
    if (point.measured != null) fact("Measured extra time", percent(point.measured));
    return nodes;
  };

  const buildCurve = () => {
    const curve = data.pareto, everything = [...curve.points, ...curve.baselines];
    const dash = (value, print) => (value == null ? "–" : print(value));
    legend("curve-legend", [
      ["var(--accent)", "fastest known schedule", "round"],
      ["color-mix(in srgb, var(--faint) 30%, var(--paper))", "proven impossible"],
      ...(curve.baselines.length ? [["var(--muted)", "other strategies"]] : []),
      ...(everything.some((point) => point.measured !== null) ? [["var(--class-gradients)", "measured", "diamond"]] : []),
      ...(curve.plan ? [["var(--phase-recompute)", "this plan", "round"]] : []),
    ]);
    get("curve-table").tBodies[0].replaceChildren(...everything.map((point) => make("tr", "", cell(point.solver), cell(bytes(point.budget), "number"),
      cell(bytes(point.peak), "number"), cell(percent(point.overhead), "number"), cell(percent(Math.max(0, point.bound)), "number"),
      cell(dash(point.measuredPeak, bytes), "number"), cell(dash(point.measured, percent), "number"))));
  };

  // ---- the table -----------------------------------------------------------------------------------------------------
  const shownAtFirst = 15;
  const state = { level: data.table && data.table.blocks.length ? "blocks" : "modules", column: -1, falling: true, all: false };

  const tableRow = (row, units, most) => {
    const cells = row.cells.map((value, place) => {
      if (place === 0) return make("td", "", row.detail ? make("details", "", make("summary", "", value), make("p", "", row.detail)) : value);
      const { title, minor } = data.table.columns[place];
      const node = cell(printed[units[place]](value), `number${value ? "" : " none"}${minor ? " minor" : ""}`);
      if (["Kept after", "At the peak", "Extra time", "Time"].includes(title) && most[place]) {
        const bar = make("i"), meter = make("span", `meter${title === "Extra time" ? " again" : ""}`, bar);
        bar.style.width = `${(100 * value) / (title === "Kept after" ? Math.max(row.cells[1], value, 1) : most[place])}%`;
        meter.setAttribute("aria-hidden", "true");
        node.append(meter);
      }
      return node;
    });
    return make("tr", "", ...cells);
  };

  const fillTable = () => {
    const rows = data.table[state.level], units = data.table.columns.map((column) => column.unit);
    const words = get("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const fits = (row) => words.every((word) => row.cells[0].toLowerCase().includes(word) || row.detail.toLowerCase().includes(word));
    const found = rows.filter(fits);
    const { column, falling } = state;
    if (column >= 0) found.sort((a, b) => {
      const [left, right] = [a.cells[column], b.cells[column]];
      const order = typeof left === "string" ? left.localeCompare(right, "en", { numeric: true }) : left - right;
      return falling ? -order : order;
    });
    const most = units.map((_, place) => rows.reduce((top, row) => Math.max(top, place ? row.cells[place] : 0), 0));
    const shown = state.all ? found : found.slice(0, shownAtFirst);
    get("table").tBodies[0].replaceChildren(...shown.map((row) => tableRow(row, units, most)));
    get("count").textContent = found.length === rows.length ? `${rows.length} rows` : `${found.length} of ${rows.length} rows`;
    const more = get("more");
    more.hidden = shown.length === found.length;
    more.textContent = `Show all ${found.length} rows`;
    [...get("table").tHead.rows[0].cells].forEach((head, place) => {
      if (place === column) head.setAttribute("aria-sort", falling ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
  };

  const buildTable = () => {
    get("search").addEventListener("input", fillTable);
    get("more").addEventListener("click", () => { state.all = true; fillTable(); });
    document.querySelectorAll('input[name="level"]').forEach((choice) => choice.addEventListener("change", () => {
      state.level = choice.value; state.all = false; fillTable();
    }));
    [...get("table").tHead.rows[0].cells].forEach((head, place) => head.querySelector("button").addEventListener("click", () => {
      // Numbers start with the largest, names with the first.
      state.falling = state.column === place ? !state.falling : place > 0;
      state.column = place;
      fillTable();
    }));
    fillTable();
  };

  // ---- light and dark --------------------------------------------------------------------------------------------------
  const wanted = window.matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.dataset.theme || (wanted.matches ? "dark" : "light")) === "dark";
  const remember = (theme) => { try { localStorage.setItem("remat-theme", theme); } catch { /* A file may have no storage. */ } };
  const recall = () => { try { return localStorage.getItem("remat-theme"); } catch { return null; } };
  const markTheme = () => {
    get("theme").firstElementChild.textContent = isDark() ? "☀" : "☾";
    get("theme").setAttribute("aria-pressed", String(isDark()));
  };
  const nextFrame = () => new Promise((done) => { requestAnimationFrame(() => setTimeout(done)); });
  const drawAll = async () => {
    if (steps.length) await drawMemory();
    if (!document.documentElement.dataset.drawn) document.documentElement.dataset.drawn = String(Math.round(performance.now()));
    // The first chart is on the screen before the ones below it are drawn.
    await nextFrame();
    if (data.lifetimes.length) await drawLifetimes();
    if (data.pareto) await drawCurve();
  };
  let started = Promise.resolve();
  const repaint = () => { markTheme(); started.then(drawAll); };
  get("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    remember(document.documentElement.dataset.theme);
    repaint();
  });
  wanted.addEventListener("change", repaint);

  // ---- begin -------------------------------------------------------------------------------------------------------------
  const start = async () => {
    const theme = recall();
    if (theme === "dark" || theme === "light") document.documentElement.dataset.theme = theme;
    markTheme();
    if (data.table) buildTable();
    if (steps.length) { memoryLegend(); buildLifetimes(); }
    if (data.pareto) buildCurve();
    // The chart library stands below this script: words and tables are there while it is still being read.
    await new Promise((done) => { document.addEventListener("DOMContentLoaded", done); });
    await drawAll();
    if (steps.length) watchMemory();
    data.lifetimes.forEach((panel, number) => {
      const node = get(`lifetimes-${number}`);
      watchPlot(node, node.parentElement.querySelector(".tip"), (found) => describeValue(panel, panel.rows[found.customdata]));
    });
    if (data.pareto) watchPlot(get("curve-chart"), get("curve-tip"), describePoint);
    // Charts choose their margins by the width of the window; a new width may want others.
    let width = window.innerWidth;
    window.addEventListener("resize", () => { if (window.innerWidth !== width) { width = window.innerWidth; drawAll(); } });
    document.documentElement.dataset.complete = String(Math.round(performance.now()));
  };
  started = start();
})();
