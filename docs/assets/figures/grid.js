// Chapter 2: dynamic programming on a grid world. The functions of `foresight.grid` compute what
// planning/dynamic/bellman.py computes; tests/docs/test_figures.py compares them on random grids.
globalThis.foresight = globalThis.foresight || {};

(() => {
  const MOVES = [[-1, 0], [0, 1], [1, 0], [0, -1]]; // up, right, down, left: as in envs/tabular/grid.py
  const NAMES = ["up", "right", "down", "left"], SIGNS = ["↑", "→", "↓", "←"];
  const ENDS = "GT";

  // The outcomes of each action in each cell: [probability, next cell, reward, 1 or 0 at the end of the episode].
  // Cells are in row order; walls and ends have no actions.
  function model(picture, slip, stepReward, goalReward = 1, trapReward = -1) {
    const width = picture[0].length, cells = picture.join("");
    const drifts = slip ? [[0, 1 - slip], [1, slip / 2], [-1, slip / 2]] : [[0, 1]];
    return [...cells].map((sign, cell) => {
      if (sign === "#" || ENDS.includes(sign)) return null;
      return MOVES.map((_, action) => drifts.map(([turn, p]) => {
        const [down, right] = MOVES[(action + turn + 4) % 4];
        const row = Math.floor(cell / width) + down, column = (cell % width) + right;
        const inside = row >= 0 && row < picture.length && column >= 0 && column < width;
        const there = inside && cells[row * width + column] !== "#" ? row * width + column : cell;
        const reward = stepReward + (cells[there] === "G" ? goalReward : cells[there] === "T" ? trapReward : 0);
        return [p, there, reward, ENDS.includes(cells[there]) ? 0 : 1];
      }));
    });
  }

  // q(s, a) = Σ p (r + γ v(s')), with value 0 after the end (Sutton & Barto 2018, equation 4.6).
  const backup = (outcomes, v, gamma) => outcomes.reduce((sum, [p, next, r, going]) => sum + p * (r + gamma * going * v[next]), 0);
  const values = (actions, v, gamma) => actions.map((outcomes) => backup(outcomes, v, gamma));

  // A sweep of evaluation: v(s) ← q(s, π(s)) (4.5). A policy of null takes all actions equally often.
  function evaluate(made, v, policy, gamma) {
    return made.map((actions, s) => {
      if (!actions) return 0;
      const q = values(actions, v, gamma);
      return policy ? q[policy[s]] : q.reduce((a, b) => a + b) / q.length;
    });
  }

  // π(s) ← argmax q(s, ·) (4.9). Equally good actions are kept: otherwise they might alternate forever.
  function improve(made, v, policy, gamma) {
    const slack = 1e-9 * (1 + Math.max(...v.map(Math.abs)));
    return made.map((actions, s) => {
      if (!actions) return 0;
      const q = values(actions, v, gamma), best = Math.max(...q);
      return policy && q[policy[s]] >= best - slack ? policy[s] : q.indexOf(best);
    });
  }

  // A sweep of value iteration: v(s) ← max q(s, ·) (4.10).
  const optimal = (made, v, gamma) => made.map((actions) => (actions ? Math.max(...values(actions, v, gamma)) : 0));

  foresight.grid = { model, backup, values, evaluate, improve, optimal };
  if (typeof document === "undefined") return;

  const START = [".....", ".##T.", "..#..", ".T...", "...#G"]; // as in docs/figures.py
  const KINDS = { G: "goal", T: "trap", "#": "wall", ".": "free" };
  const KEYS = { g: "G", t: "T", w: "#", " ": "." };
  const SETTLED = 1e-4;

  foresight.figures.grid = (box) => {
    const { element, number, slider, button, fit, play } = foresight.page;
    const options = { gamma: 0.9, slip: 0.2, step: -0.04 };
    let state, past = [], focused = 0, shown = null, brush = null, stop = null, held = null;
    const reset = () => { state = { picture: START, v: Array(25).fill(0), policy: null, sweeps: 0, improvements: 0, change: Infinity, note: "All values are 0, and all actions are equally likely." }; past = []; };
    reset();
    const made = () => model(state.picture, options.slip, options.step);
    const remember = (next) => { past = [...past.slice(-999), state]; state = { ...state, ...next }; };

    const sweep = (found, note) => {
      const change = Math.max(...found.map((x, s) => Math.abs(x - state.v[s])));
      remember({ v: found, sweeps: state.sweeps + 1, change, note: `${note} Largest change: ${number(change, 4)}.` });
      return change;
    };
    const actions = {
      evaluate: () => sweep(evaluate(made(), state.v, state.policy, options.gamma), "A sweep of evaluation: v(s) ← q(s, π(s))."),
      improve: () => {
        const found = improve(made(), state.v, state.policy, options.gamma);
        const free = made().map((one, s) => (one ? s : -1)).filter((s) => s >= 0);
        const switched = free.filter((s) => !state.policy || found[s] !== state.policy[s]).length;
        remember({ policy: found, improvements: state.improvements + 1, change: Infinity, note: switched ? `An improvement: ${switched} of ${free.length} cells change their action.` : "An improvement changes nothing: the policy is greedy for its values." });
        return switched;
      },
      optimal: () => {
        const found = made(), policy = improve(found, state.v, null, options.gamma);
        const change = sweep(optimal(found, state.v, options.gamma), "A sweep of value iteration: v(s) ← max q(s, ·).");
        state.policy = policy;
        return change;
      },
    };
    const runs = {
      policy: () => (state.change >= SETTLED ? actions.evaluate() + 1 : actions.improve()) > 0,
      value: () => actions.optimal() >= SETTLED,
    };
    const run = (name, pressed) => {
      if (stop) { stop(); return; }
      if (name === "policy") state.change = Infinity;
      const others = controls.filter((one) => one !== pressed);
      const label = pressed.textContent;
      pressed.textContent = "Stop";
      others.forEach((one) => { one.disabled = true; });
      stop = play(() => { const going = runs[name](); draw(); return going; }, 120, () => {
        stop = null; pressed.textContent = label;
        others.forEach((one) => { one.disabled = false; });
        draw();
      });
    };
    const step = (name) => button({ evaluate: "Evaluate", improve: "Improve", optimal: "Sweep" }[name], () => { actions[name](); draw(); });
    const runPolicy = button("Run", () => run("policy", runPolicy), { "aria-label": "Run policy iteration" });
    const runValue = button("Run", () => run("value", runValue), { "aria-label": "Run value iteration" });
    const undo = button("Undo", () => { if (past.length) { state = past.pop(); draw(); } });
    const controls = [step("evaluate"), step("improve"), runPolicy, step("optimal"), runValue, undo, button("Reset", () => { reset(); draw(); })];
    const bar = (label, ...parts) => element("div", { class: "figure-bar", role: "group", "aria-label": label }, element("span", {}, label), ...parts);

    const place = (picture) => remember({
      picture, v: state.v.map((x, s) => (".S".includes(picture.join("")[s]) ? x : 0)), change: Infinity, note: "The grid has changed; the values are those from before.",
    });
    const painted = (picture, cell, sign) => picture.map((row, r) => [...row].map((old, c) => (r * 5 + c === cell ? sign : old)).join(""));
    const paint = (cell, sign) => { if (state.picture.join("")[cell] !== sign) { place(painted(state.picture, cell, sign)); draw(); } };

    const brushes = Object.entries(KINDS).map(([sign, name]) => button(name, () => {
      brush = brush === sign ? null : sign;
      brushes.forEach((one, i) => one.setAttribute("aria-pressed", Object.keys(KINDS)[i] === brush));
    }, { "aria-pressed": false }));
    const svg = element("svg", {
      role: "group", "aria-label": "Grid world of five rows and five columns",
      pointerdown: (event) => {
        const cell = at(event);
        if (cell === null || stop) return;
        look(cell);
        if (brush) paint(cell, brush);
        else if (state.picture.join("")[cell] !== ".") { held = cell; svg.setPointerCapture(event.pointerId); event.preventDefault(); }
      },
      pointermove: (event) => {
        const cell = at(event);
        if (cell === null) return;
        if (held === null || cell === held) { look(cell); return; }
        const cells = state.picture.join("");
        if (cells[cell] !== ".") return;
        place(painted(painted(state.picture, held, "."), cell, cells[held]));
        held = cell;
        look(cell, true);
      },
      pointerup: () => { held = null; },
      pointercancel: () => { held = null; },
    });
    const status = element("p", { class: "figure-status", "aria-live": "polite" });
    const numbers = element("div", { class: "figure-numbers" });
    const board = element("div", { class: "figure-board" }, svg);
    box.append(
      bar("Policy iteration", ...controls.slice(0, 3)), bar("Value iteration", ...controls.slice(3, 5)), bar("", ...controls.slice(5)),
      element("div", { class: "figure-columns" },
        element("div", {}, board, bar("Drag a piece, or draw:", ...brushes)),
        element("div", {},
          slider("discount γ", options.gamma, [0, 0.99, 0.01], (x) => { options.gamma = x; state.change = Infinity; draw(); }),
          slider("probability of slipping", options.slip, [0, 0.5, 0.01], (x) => { options.slip = x; state.change = Infinity; draw(); }),
          slider("reward of a step", options.step, [-1, 0, 0.01], (x) => { options.step = x; state.change = Infinity; draw(); }),
          numbers)),
      status,
    );

    const at = (event) => {
      const area = svg.getBoundingClientRect();
      const column = Math.floor(((event.clientX - area.left) / area.width) * 5), row = Math.floor(((event.clientY - area.top) / area.height) * 5);
      return row >= 0 && row < 5 && column >= 0 && column < 5 ? row * 5 + column : null;
    };
    const look = (cell, always = false) => { if (cell !== shown || always) { shown = cell; draw(); } };
    const key = (event) => {
      const steps = { ArrowUp: focused > 4 ? -5 : 0, ArrowDown: focused < 20 ? 5 : 0, ArrowLeft: focused % 5 ? -1 : 0, ArrowRight: focused % 5 < 4 ? 1 : 0 };
      if (event.key in steps) svg.querySelector(`[data-cell="${focused + steps[event.key]}"]`).focus();
      else if (event.key.toLowerCase() in KEYS && !stop) paint(focused, KEYS[event.key.toLowerCase()]);
      else return;
      event.preventDefault();
    };

    let side = 300;
    function draw() {
      const found = made(), cells = state.picture.join(""), size = side / 5;
      const most = Math.max(1e-9, ...state.v.map(Math.abs));
      const inside = svg.contains(document.activeElement);
      svg.setAttribute("viewBox", `0 0 ${side} ${side}`);
      svg.setAttribute("width", side);
      svg.replaceChildren(...[...cells].map((sign, cell) => {
        const x = (cell % 5) * size, y = Math.floor(cell / 5) * size, v = state.v[cell];
        const free = sign === ".", mx = x + size / 2, my = y + size * 0.38, arm = size * 0.22;
        const share = Math.round(55 * Math.abs(v) / most);
        const fill = free ? `color-mix(in srgb, var(${v >= 0 ? "--figure-good" : "--figure-bad"}) ${share}%, var(--figure-paper))` : sign === "#" ? "var(--figure-wall)" : "var(--figure-soft)";
        const action = free && state.policy ? state.policy[cell] : null;
        const name = `row ${Math.floor(cell / 5) + 1}, column ${(cell % 5) + 1}: ${KINDS[sign]}${free ? `, value ${number(v)}` : ""}${action === null ? "" : `, ${NAMES[action]}`}`;
        const parts = [element("rect", { x: x + 0.5, y: y + 0.5, width: size - 1, height: size - 1, style: `fill: ${fill}` })];
        if (free) parts.push(element("text", { x: mx, y: y + size - 8, "text-anchor": "middle" }, number(v)));
        if (action !== null) {
          const [dy, dx] = MOVES[action];
          parts.push(element("path", { class: "figure-arrow", d: `M ${mx - dx * arm} ${my - dy * arm} L ${mx + dx * arm} ${my + dy * arm} m ${-dx * 6 - dy * 5} ${-dy * 6 - dx * 5} l ${dx * 6 + dy * 5} ${dy * 6 + dx * 5} l ${-dx * 6 + dy * 5} ${-dy * 6 + dx * 5}` }));
        }
        if (sign === "G" || sign === "T") parts.push(element("text", { class: `figure-piece figure-${KINDS[sign]}`, x: mx, y: y + size / 2 + 8, "text-anchor": "middle" }, sign === "G" ? "★" : "✖"));
        return element("g", {
          class: free ? "figure-cell" : "figure-cell figure-held", "data-cell": cell, tabindex: cell === focused ? 0 : -1, role: "button", "aria-label": name,
          focus: () => { if (focused !== cell || shown !== cell) { focused = cell; look(cell); } }, keydown: key,
        }, ...parts);
      }));
      if (inside) svg.querySelector(`[data-cell="${focused}"]`).focus();
      if (shown !== null) {
        const x = (shown % 5) * size, y = Math.floor(shown / 5) * size;
        svg.append(element("rect", { class: "figure-chosen", x: x + 1.5, y: y + 1.5, width: size - 3, height: size - 3 }));
      }
      undo.disabled = Boolean(stop) || past.length === 0;
      status.textContent = `${state.sweeps} sweeps, ${state.improvements} improvements. ${state.note}`;
      write(found, cells);
    }

    // The backups of the cell in numbers.
    function write(found, cells) {
      if (shown === null) { numbers.replaceChildren(element("p", {}, "Point at a cell to see its backup, or reach it with Tab and the arrow keys. There the keys g, t, w and Space set a goal, a trap, a wall or nothing.")); return; }
      const title = element("strong", {}, `Row ${Math.floor(shown / 5) + 1}, column ${(shown % 5) + 1}`);
      if (!found[shown]) { numbers.replaceChildren(title, element("p", {}, cells[shown] === "#" ? "A wall: a move into it stays where it was." : "The episode ends here, so the value is 0. The reward is paid on entering.")); return; }
      const q = values(found[shown], state.v, options.gamma), best = q.indexOf(Math.max(...q));
      const factor = (x) => (x < 0 ? `(${number(x)})` : number(x));
      const term = ([p, next, r, going]) => `${p === 1 ? "" : `${number(p)}·`}(${number(r)}${going ? ` + ${number(options.gamma)}·${factor(state.v[next])}` : ""})`;
      const rows = found[shown].map((outcomes, action) => element("p", { class: "figure-sum" },
        element("b", {}, SIGNS[action]), ` ${outcomes.map(term).join(" + ")} = `, element("b", {}, number(q[action], 3)),
        action === best ? " best" : "", state.policy && state.policy[shown] === action ? " π" : ""));
      const own = state.policy ? q[state.policy[shown]] : q.reduce((a, b) => a + b) / 4;
      numbers.replaceChildren(title, ...rows, element("p", {}, `Evaluate sets v to ${state.policy ? "q(s, π(s))" : "the mean"} = ${number(own, 3)}, value iteration to the best, ${number(q[best], 3)}.`));
    }

    fit(board, (width) => { side = Math.min(width, 420); draw(); });
    draw();
  };
})();
