"use strict";
(function () {
  const data = JSON.parse(document.getElementById("data").textContent);
  const plot = document.getElementById("plot");
  const find = (role) => data.data.map((t, i) => i).filter((i) => data.data[i].meta.role === role);
  const bars = find("bars"), arrows = find("arrows"), layers = data.layers;
  const select = document.getElementById("layer"), events = document.getElementById("events");
  const CHAR_PX = 7.4, PAD_PX = 6, MOST_HEADS = 160, STEPS = [1, 2, 5, 10, 20, 50, 100];
  let shown = "";

  function view() {
    const axis = plot._fullLayout.xaxis, [low, high] = axis.range;
    return { low, high, px: axis._length / (high - low) };
  }

  // Labels exist only where they fit: text is what makes many bars slow.
  function barTexts(trace, { low, high, px }) {
    const { base, x, meta } = data.data[trace];
    return meta.labels.map((options, i) => {
      if (base[i] > high || base[i] + x[i] < low) return "";
      const room = x[i] * px - PAD_PX;
      return options.find((o) => o.length * CHAR_PX <= room) || "";
    });
  }

  // "layer 7" where it fits; else numbers, every second, fifth ... one if they come too close.
  function layerLabels({ low, high, px }) {
    const narrowest = px * Math.min(...layers.map(([, start, end]) => end - start));
    const last = Math.max(...layers.map(([layer]) => layer));
    const isLong = narrowest >= ("layer " + last).length * CHAR_PX + PAD_PX;
    const needed = String(last).length * CHAR_PX + PAD_PX;
    const step = STEPS.find((s) => s * narrowest >= needed) || STEPS[STEPS.length - 1];
    const found = [];
    for (const [layer, start, end] of layers) {
      const left = Math.max(start, low), right = Math.min(end, high);
      const text = isLong ? "layer " + layer : String(layer);
      if ((!isLong && layer % step) || (right - left) * px < Math.min(narrowest, 24)) continue;
      found.push({ x: (left + right) / 2, y: 1, xref: "x", yref: "paper", yanchor: "top",
        text: text, showarrow: false, font: { size: 12, color: "#374151" } });
    }
    return found;
  }

  // Heads of many arrows are slow to draw and too close to each other to be seen.
  function arrowMode(trace, { low, high }) {
    const visible = data.data[trace].meta.at.filter(([from, to]) => to >= low && from <= high);
    return visible.length > MOST_HEADS ? "lines" : "lines+markers";
  }

  function labelled(now) {
    return {
      text: bars.map((b) => barTexts(b, now)),
      mode: arrows.map((a) => arrowMode(a, now)),
      annotations: layerLabels(now),
    };
  }

  function relabel() {
    const now = view(), wanted = labelled(now), key = JSON.stringify(wanted);
    const middle = (now.low + now.high) / 2;
    const current = layers.findIndex(([, , end]) => middle < end);
    select.value = now.high - now.low > 0.9 * data.end ? "" : String(current);
    if (key === shown) return;
    shown = key;
    const nothing = (list) => list.map(() => undefined);
    Plotly.update(
      plot,
      { text: [...wanted.text, ...nothing(arrows)], mode: [...nothing(bars), ...wanted.mode] },
      { annotations: wanted.annotations },
      [...bars, ...arrows]
    );
  }

  const goTo = (low, high) => Plotly.relayout(plot, { "xaxis.range": [low, high] });
  const chosen = () => (select.value === "" ? -1 : Number(select.value));
  function goToLayer(i) {
    if (layers.length === 0) return;
    const [, start, end] = layers[Math.min(Math.max(i, 0), layers.length - 1)];
    const margin = 0.12 * (end - start);
    goTo(start - margin, end + margin);
  }

  function showInside(number) {
    const [name, stream, start, end, table] = data.items[number];
    const box = document.getElementById("inside"), rows = data.tables[table];
    const known = rows.length ? "" : ": no nodes known; compile a model to see them";
    box.querySelector("h2").textContent =
      name + " on " + stream + ", " + start + " to " + end + " " + data.unit + known;
    box.querySelector("table").hidden = rows.length === 0;
    box.querySelector("tbody").replaceChildren(
      ...rows.map((cells) => {
        const row = document.createElement("tr");
        const cell = (text) => Object.assign(document.createElement("td"), { textContent: text });
        row.append(...cells.map(cell));
        return row;
      })
    );
    box.hidden = false;
  }

  select.append(new Option("go to layer", ""));
  const seen = new Map();
  layers.forEach(([layer], i) => {
    const count = (seen.get(layer) || 0) + 1;
    seen.set(layer, count);
    select.append(new Option("layer " + layer + (count > 1 ? " (" + count + ")" : ""), String(i)));
  });
  select.onchange = () => (chosen() < 0 ? goTo(0, data.end) : goToLayer(chosen()));
  document.getElementById("all").onclick = () => goTo(0, data.end);
  document.getElementById("next").onclick = () => goToLayer(chosen() + 1);
  document.getElementById("previous").onclick = () => goToLayer(chosen() - 1);
  events.onchange = () => Plotly.restyle(plot, { visible: events.checked }, arrows);
  events.parentElement.hidden = arrows.length === 0;

  // The first drawing has its labels already, so that nothing is drawn twice.
  const { l, r } = data.layout.margin;
  const first = labelled({
    low: 0, high: data.end, px: (plot.clientWidth - l - r) / (data.end || 1),
  });
  bars.forEach((b, i) => { data.data[b].text = first.text[i]; });
  arrows.forEach((a, i) => { data.data[a].mode = first.mode[i]; });
  data.layout.annotations = first.annotations;
  shown = JSON.stringify(first);
  const config = {
    scrollZoom: true, displaylogo: false, responsive: true, doubleClick: "reset",
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
    toImageButtonOptions: { filename: "timeline", scale: 2 },
  };
  Plotly.newPlot(plot, data.data, data.layout, config).then(() => {
    plot.on("plotly_relayout", relabel);
    plot.on("plotly_click", (event) => {
      const point = event.points.find((p) => p.data.meta.role === "bars");
      if (point) showInside(point.customdata);
    });
    document.body.dataset.readyMs = String(Math.round(performance.now()));
  });
})();
