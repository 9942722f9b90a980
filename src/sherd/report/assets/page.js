"use strict";
(() => {
  const plots = JSON.parse(document.getElementById("plots").textContent);
  const root = document.documentElement;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const stored = "sherd-report-theme";
  const element = (number) => document.getElementById("plot" + number);
  let axis = "steps";

  // A page that was opened as a file may have no storage.
  const remember = (theme) => { try { localStorage.setItem(stored, theme); } catch { /* the page works without */ } };
  const remembered = () => { try { return localStorage.getItem(stored); } catch { return null; } };

  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const themed = () => {
    const line = { gridcolor: colour("--grid"), linecolor: colour("--line"), tickcolor: colour("--line") };
    return {
      text: colour("--soft"), line,
      hover: { bgcolor: colour("--card"), bordercolor: colour("--line"), font: { color: colour("--ink"), size: 12 } },
    };
  };

  // From the first to the last point: plotly would leave room for the markers of some plots and not of others.
  const extent = (lists) => {
    const ends = lists.flatMap((list) => [list[0], list.at(-1)]);
    const [low, high] = [Math.min(...ends), Math.max(...ends)];
    return low < high ? [low, high] : [low - 0.5, high + 0.5];
  };

  // Plots of all runs have the same range, so that a look down the page compares the same steps.
  const shared = plots.filter((plot) => plot.timed && !plot.own);
  const rangeOf = (plot, x) => extent((plot.own ? [plot] : shared).flatMap((each) => each.data.map(x)));

  const layoutOf = (plot) => {
    const theme = themed();
    const family = getComputedStyle(document.body).fontFamily;
    const tick = { color: theme.text, size: 11.5 };
    const axisOf = (given) => ({ ...theme.line, tickfont: tick, ...given, title: { ...given.title, font: tick } });
    return {
      margin: { l: 8, r: 14, t: 10, b: 8 }, showlegend: false,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family, color: theme.text, size: 12 },
      hoverlabel: theme.hover,
      ...plot.layout,
      xaxis: { ...axisOf(plot.layout.xaxis), ...(plot.timed ? { range: rangeOf(plot, (trace) => trace.x) } : {}) },
      yaxis: axisOf(plot.layout.yaxis),
    };
  };

  const units = [[7200, 3600, "hours"], [180, 60, "minutes"], [0, 1, "seconds"]];
  const longest = Math.max(0, ...plots.flatMap((plot) => plot.data.map((trace) => (trace.meta?.time ?? [0]).at(-1))));
  const [, second, unit] = units.find(([from]) => longest >= from);

  const choose = (wanted) => {
    axis = wanted;
    plots.forEach((plot, number) => {
      if (!plot.timed) return;
      const xOf = (trace) => (axis === "time" ? trace.meta.time.map((each) => each / second) : trace.x);
      const x = plot.data.map(xOf);
      const title = axis === "time" ? unit + " since the start" : "step";
      Plotly.update(element(number), { x }, { "xaxis.title.text": title, "xaxis.range": rangeOf(plot, xOf) });
    });
    for (const button of document.querySelectorAll("[data-axis]")) {
      button.setAttribute("aria-pressed", String(button.dataset.axis === axis));
    }
  };

  const paint = (theme) => {
    root.dataset.theme = theme;
    const { text, line, hover } = themed();
    plots.forEach((_, number) => {
      if (!element(number).data) return;
      const change = { "font.color": text, hoverlabel: hover };
      for (const name of ["xaxis", "yaxis"]) {
        for (const [key, value] of Object.entries(line)) change[`${name}.${key}`] = value;
        change[`${name}.tickfont.color`] = change[`${name}.title.font.color`] = text;
      }
      Plotly.relayout(element(number), change);
    });
  };

  const toggleLog = (button) => {
    const on = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(on));
    const { tickmode: ticks, range } = plots[button.dataset.plot].layout.yaxis;
    const change = { "yaxis.type": on ? "log" : "linear", "yaxis.autorange": on || !range };
    if (range && !on) change["yaxis.range"] = [...range];
    // Ticks that were chosen for a linear axis are of no use on the other.
    if (ticks) change["yaxis.tickmode"] = on ? "auto" : ticks;
    Plotly.relayout(element(button.dataset.plot), change);
  };

  // Names of curves above a plot, as buttons that hide and show them. A curve and its smoothed one share a name.
  const addLegend = (plot, number) => {
    const names = [...new Set(plot.data.map((trace) => trace.name).filter(Boolean))];
    if (names.length < 2) return;
    for (const name of names) {
      const traces = plot.data.map((trace, index) => (trace.name === name ? index : -1)).filter((index) => index >= 0);
      const { line, marker, fillcolor } = plot.data[traces[0]];
      const button = document.createElement("button");
      const mark = document.createElement("i");
      const dashed = line?.dash && line.dash !== "solid";
      mark.className = fillcolor || !line ? "block" : dashed ? "dashed" : "line";
      mark.style.color = fillcolor ?? line?.color ?? marker.color;
      button.append(mark, name);
      button.setAttribute("aria-pressed", "true");
      button.addEventListener("click", () => {
        const shown = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", String(shown));
        Plotly.restyle(element(number), { visible: shown }, traces);
      });
      document.getElementById("legend" + number).append(button);
    }
  };

  paint(remembered() ?? (dark.matches ? "dark" : "light"));
  dark.addEventListener("change", () => { if (!remembered()) paint(dark.matches ? "dark" : "light"); });
  document.getElementById("theme").addEventListener("click", () => {
    const theme = root.dataset.theme === "dark" ? "light" : "dark";
    remember(theme);
    paint(theme);
  });
  for (const button of document.querySelectorAll("[data-axis]")) {
    button.addEventListener("click", () => choose(button.dataset.axis));
  }
  for (const button of document.querySelectorAll(".log")) button.addEventListener("click", () => toggleLog(button));

  plots.forEach(addLegend);
  const config = { responsive: true, displaylogo: false, displayModeBar: false, doubleClickDelay: 400 };
  // A copy of the traces: plotly may write into what it is given, and the axis is chosen again from ours.
  const drawn = plots.map((plot, number) =>
    Plotly.newPlot(element(number), plot.data.map((trace) => ({ ...trace })), layoutOf(plot), config));
  Promise.all(drawn).then(() => { root.dataset.drawn = String(drawn.length); });
})();
