// What the figures of the course share: elements, sliders, charts. Each figure replaces its still picture.
// `foresight.figures[NAME](box)` draws <div class="figure" data-figure="NAME">. The files also load in Node, for tests.
globalThis.foresight = globalThis.foresight || {};

(() => {
  const SVG = new Set(["svg", "g", "rect", "circle", "line", "path", "polyline", "text", "title"]);

  // An element of HTML or SVG. Attributes that are functions are listeners; children are elements or text.
  function element(tag, attributes = {}, ...children) {
    const made = SVG.has(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (typeof value === "function") made.addEventListener(name, value);
      else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
    }
    made.append(...children.filter((child) => child !== null));
    return made;
  }

  // 0.5 as "0.50", with a true minus sign.
  function number(x, digits = 2) {
    const text = x.toFixed(digits);
    return (Number(text) === 0 ? (0).toFixed(digits) : text).replace("-", "−");
  }

  // A labeled slider: `changed` gets its value; `shown` turns it into text. Returns the element, with `set`.
  function slider(label, value, [min, max, step], changed, shown = (x) => number(x)) {
    const output = element("output", {}, shown(value));
    const input = element("input", {
      type: "range", min, max, step, value,
      input: () => { output.textContent = shown(Number(input.value)); changed(Number(input.value)); },
    });
    const made = element("label", { class: "figure-slider" }, element("span", {}, `${label} `, output), input);
    made.set = (x) => { input.value = x; output.textContent = shown(x); };
    return made;
  }

  function choice(label, options, changed) {
    const list = Object.entries(options).map(([value, name]) => element("option", { value }, name));
    const select = element("select", { change: () => changed(select.value) }, ...list);
    return element("label", { class: "figure-slider" }, element("span", {}, label), select);
  }

  const button = (label, click, attributes = {}) => element("button", { type: "button", click, ...attributes }, label);

  // A chart with axes in pixels of the page. `lines`: {points: [[x, y], ...], class}; `marks`: {at: [x, y], class, text}.
  function chart({ width, height, x, y, xTicks, yTicks, xLabel, yLabel, label, lines = [], marks = [], bands = [] }) {
    const left = 44, right = 12, top = 12, bottom = 38;
    const px = (value) => left + ((value - x[0]) / (x[1] - x[0])) * (width - left - right);
    const py = (value) => height - bottom - ((value - y[0]) / (y[1] - y[0])) * (height - top - bottom);
    const made = element("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label });
    for (const band of bands)
      made.append(element("rect", { class: "figure-band", x: px(band[0]), y: top, width: px(band[1]) - px(band[0]), height: height - top - bottom }));
    for (const tick of xTicks)
      made.append(
        element("line", { class: "figure-rule", x1: px(tick), x2: px(tick), y1: top, y2: height - bottom }),
        element("text", { x: px(tick), y: height - bottom + 15, "text-anchor": "middle" }, number(tick, tick % 1 ? 1 : 0)),
      );
    for (const tick of yTicks)
      made.append(
        element("line", { class: "figure-rule", x1: left, x2: width - right, y1: py(tick), y2: py(tick) }),
        element("text", { x: left - 6, y: py(tick) + 4, "text-anchor": "end" }, number(tick, tick % 1 ? (tick * 10) % 1 ? 2 : 1 : 0)),
      );
    made.append(element("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, xLabel));
    made.append(element("text", { transform: `translate(11 ${(top + height - bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, yLabel));
    for (const line of lines)
      made.append(element("polyline", { class: `figure-line ${line.class}`, points: line.points.map(([a, b]) => `${px(a)},${py(b)}`).join(" ") }));
    for (const mark of marks)
      made.append(
        element("circle", { class: `figure-mark ${mark.class}`, cx: px(mark.at[0]), cy: py(mark.at[1]), r: 4 }),
        mark.text ? element("text", { class: mark.class, x: px(mark.at[0]) + (mark.dx || 7), y: py(mark.at[1]) - 7, "text-anchor": mark.dx < 0 ? "end" : "start" }, mark.text) : "",
      );
    made.place = { px, py };
    return made;
  }

  // Calls `draw(width)` now and when the room changes.
  function fit(box, draw) {
    let last = 0;
    const now = () => {
      const width = Math.floor(box.clientWidth);
      if (width && width !== last) { last = width; draw(width); }
    };
    new ResizeObserver(now).observe(box);
    now();
  }

  // Runs `tick` until it returns false, at once if the reader prefers less motion. Returns what stops it.
  function play(tick, milliseconds, ended) {
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) {
      for (let i = 0; i < 10_000 && tick(); i++);
      ended();
      return () => {};
    }
    const timer = setInterval(() => { if (!tick()) { clearInterval(timer); ended(); } }, milliseconds);
    return () => { clearInterval(timer); ended(); };
  }

  foresight.page = { element, number, slider, choice, button, chart, fit, play };
  foresight.figures = {};
  if (typeof document !== "undefined")
    document.addEventListener("DOMContentLoaded", () => {
      for (const box of document.querySelectorAll("[data-figure]")) {
        const draw = foresight.figures[box.dataset.figure];
        if (draw) { box.replaceChildren(); draw(box); }
      }
    });
})();
