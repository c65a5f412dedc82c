// Chapter 3: the random walk of five states, TD(0) beside constant-α Monte Carlo (Sutton & Barto 2018, example 6.2).
// The episodes are those of algorithms/tabular/td_prediction.py (docs/figures.py); tests compare the errors with its.
globalThis.foresight = globalThis.foresight || {};

(() => {
  const TRUE = [1, 2, 3, 4, 5].map((s) => s / 6);

  // The moves of a run, four to a hexadecimal digit (1: right), as episodes: states 1 to 5, ending in 0 or 6.
  function episodes(run) {
    const found = [];
    let path = [3];
    for (const digit of run)
      for (let bit = 3; bit >= 0; bit--) {
        const next = path[path.length - 1] + ((parseInt(digit, 16) >> bit) & 1 ? 1 : -1);
        path.push(next);
        if (next === 0 || next === 6) { found.push(path); path = [3]; }
      }
    return found;
  }

  // v(s) ← v(s) + α [target − v(s)] at each step: with r + v(s'), or after the episode with the return. γ is 1.
  function td(v, path, alpha) {
    for (let t = 0; t + 1 < path.length; t++) {
      const next = path[t + 1];
      v[path[t]] += alpha * ((next === 6 ? 1 : 0) + (next === 0 || next === 6 ? 0 : v[next]) - v[path[t]]);
    }
  }
  function monteCarlo(v, path, alpha) {
    const last = path[path.length - 1] === 6 ? 1 : 0;
    for (let t = 0; t + 1 < path.length; t++) v[path[t]] += alpha * (last - v[path[t]]);
  }

  // The values after 0, 1, 2, ... episodes, from 1/2 on.
  function learn(update, paths, alpha) {
    const v = Array(7).fill(0.5), found = [v.slice(1, 6)];
    for (const path of paths) { update(v, path, alpha); found.push(v.slice(1, 6)); }
    return found;
  }
  const error = (v) => Math.sqrt(v.reduce((sum, x, s) => sum + (x - TRUE[s]) ** 2, 0) / v.length);

  // The error after each episode, averaged over the runs.
  function errors(update, runs, alpha) {
    const sums = Array(runs[0].length + 1).fill(0);
    for (const paths of runs) learn(update, paths, alpha).forEach((v, k) => { sums[k] += error(v) / runs.length; });
    return sums;
  }

  foresight.walk = { episodes, td, monteCarlo, learn, error, errors };
  if (typeof document === "undefined") return;

  foresight.figures.walk = (box) => {
    const { element, number, slider, chart, fit } = foresight.page;
    const runs = foresight.data.walk.map(episodes);
    const options = { td: 0.1, mc: 0.02, count: 100, run: 1 };
    const curves = element("div"), estimates = element("div"), status = element("p", { class: "figure-status", "aria-live": "polite" });
    let width = 300;
    const draw = () => {
      const found = { td: errors(td, runs, options.td), mc: errors(monteCarlo, runs, options.mc) };
      const paths = runs[options.run - 1];
      const v = { td: learn(td, paths, options.td)[options.count], mc: learn(monteCarlo, paths, options.mc)[options.count] };
      const half = width > 560 ? Math.floor((width - 16) / 2) : width;
      curves.replaceChildren(chart({
        width: half, height: 250, x: [0, 100], y: [0, 0.26], xTicks: [0, 25, 50, 75, 100], yTicks: [0, 0.1, 0.2], xLabel: "episodes", yLabel: "RMS error",
        label: `Error of TD and Monte Carlo over the episodes, averaged over ${runs.length} runs`,
        lines: [{ class: "figure-one", points: found.td.map((x, k) => [k, x]) }, { class: "figure-two", points: found.mc.map((x, k) => [k, x]) }],
        marks: [{ class: "figure-one", at: [options.count, found.td[options.count]] }, { class: "figure-two", at: [options.count, found.mc[options.count]] }],
      }));
      const line = (values) => values.map((x, s) => [s + 1, x]);
      estimates.replaceChildren(chart({
        width: half, height: 250, x: [0.7, 5.3], y: [0, 1], xTicks: [1, 2, 3, 4, 5], yTicks: [0, 0.5, 1], xLabel: "state", yLabel: "value",
        label: "Estimated and true values of the five states",
        lines: [{ class: "figure-true", points: line(TRUE) }, { class: "figure-one", points: line(v.td) }, { class: "figure-two", points: line(v.mc) }],
        marks: [...line(v.td).map((at) => ({ class: "figure-one", at })), ...line(v.mc).map((at) => ({ class: "figure-two", at }))],
      }));
      status.textContent = `After ${options.count} episodes the error is ${number(found.td[options.count], 3)} with TD(0) and ${number(found.mc[options.count], 3)} with Monte Carlo, averaged over ${runs.length} runs; in run ${options.run} it is ${number(error(v.td), 3)} and ${number(error(v.mc), 3)}.`;
    };
    const whole = (x) => String(x);
    const change = (name) => (x) => { options[name] = x; draw(); };
    const key = (name, text) => element("span", { class: `figure-key ${name}` }, text);
    const charts = element("div", { class: "figure-charts" }, curves, estimates);
    box.append(
      element("div", { class: "figure-sliders" },
        slider("α of TD(0)", options.td, [0.01, 0.5, 0.01], change("td")), slider("α of Monte Carlo", options.mc, [0.01, 0.5, 0.01], change("mc")),
        slider("episodes", options.count, [0, 100, 1], change("count"), whole), slider("run, on the right", options.run, [1, runs.length, 1], change("run"), whole)),
      element("p", { class: "figure-keys" }, key("figure-one", "TD(0)"), key("figure-two", "Monte Carlo"), key("figure-true", "true values")),
      charts, status);
    fit(charts, (room) => { width = room; draw(); });
  };
})();
