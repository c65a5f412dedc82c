// Chapter 6: PPO's clipped objective of one action. `foresight.clip` computes minus `ops.policy.clipped_surrogate`, and
// its slope; tests compare them.
globalThis.foresight = globalThis.foresight || {};

(() => {
  const clip = (ratio, epsilon) => Math.min(Math.max(ratio, 1 - epsilon), 1 + epsilon);
  const objective = (ratio, advantage, epsilon) => Math.min(ratio * advantage, clip(ratio, epsilon) * advantage);
  const clipped = (ratio, advantage, epsilon) => (advantage > 0 ? ratio > 1 + epsilon : advantage < 0 && ratio < 1 - epsilon);
  const slope = (ratio, advantage, epsilon) => (clipped(ratio, advantage, epsilon) ? 0 : advantage);

  foresight.clip = { objective, slope };
  if (typeof document === "undefined") return;

  foresight.figures.clip = (box) => {
    const { element, number, slider, chart, fit } = foresight.page;
    const options = { ratio: 1.3, advantage: 1, epsilon: 0.2 };
    const place = element("div"), status = element("p", { class: "figure-status", "aria-live": "polite" });
    let width = 300;
    const draw = () => {
      const { ratio, advantage, epsilon } = options;
      const low = 1 - epsilon, high = 1 + epsilon;
      const found = objective(ratio, advantage, epsilon);
      place.replaceChildren(chart({
        width: Math.min(width, 560), height: 280, x: [0, 2], y: advantage >= 0 ? [-0.5, 4] : [-4, 0.5], xTicks: [0, 0.5, 1, 1.5, 2],
        yTicks: advantage >= 0 ? [0, 1, 2, 3, 4] : [-4, -3, -2, -1, 0], xLabel: "ratio ρ", yLabel: "objective", label: "The clipped objective over the ratio",
        bands: [[low, high]],
        lines: [
          { class: "figure-true", points: [[0, 0], [2, 2 * advantage]] },
          { class: "figure-one", points: [0, low, high, 2].map((x) => [x, objective(x, advantage, epsilon)]) },
        ],
        marks: [{ class: "figure-one", at: [ratio, found] }],
      }));
      const gradient = slope(ratio, advantage, epsilon);
      status.textContent = `ρA = ${number(ratio * advantage)}, clip(ρ)A = ${number(clip(ratio, epsilon) * advantage)}; the minimum is ${number(found)}, its slope ${number(gradient)}: ${
        advantage === 0 ? "an action that is as good as expected changes nothing." :
        gradient === 0 ? "the clip holds, and this action has no gradient." :
        ratio > high || ratio < low ? "the ratio moved in the wrong direction, and the way back is open." : "the ratio is in the range, as without a clip."}`;
    };
    const change = (name) => (x) => { options[name] = x; draw(); };
    const key = (name, text) => element("span", { class: `figure-key ${name}` }, text);
    box.append(
      element("div", { class: "figure-sliders" },
        slider("advantage A", options.advantage, [-2, 2, 0.1], change("advantage")), slider("clip range ε", options.epsilon, [0, 0.5, 0.01], change("epsilon")),
        slider("ratio ρ", options.ratio, [0, 2, 0.01], change("ratio"))),
      element("p", { class: "figure-keys" }, key("figure-one", "clipped objective"), key("figure-true", "ρA"), key("figure-range", "1 − ε to 1 + ε")),
      place, status);
    fit(place, (room) => { width = room; draw(); });
  };
})();
