import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { api, exported, type GridChoices, type GridRequest, type GridState, type GridUpdate, type Outcome } from "./api";
import { Choice, go, address, number, Panel, Problem, signed, Slider, Static, useAnswer } from "./common";

const SIZE = 60; // of a cell
const KINDS = [["G", "goal"], ["T", "trap"], ["#", "wall"], ["S", "start"], [".", "free"]] as const;
const ARROWS: { [name: string]: [number, number] } = { up: [0, -1], right: [1, 0], down: [0, 1], left: [-1, 0] };
const ACTION_SIGN: { [name: string]: string } = { up: "↑", right: "→", down: "↓", left: "←" };
const SAMPLED = (method: string) => !method.endsWith("iteration");

export function Grid(_: { control: boolean }) {
  const [choices, error] = useAnswer(api.grids, "grids");
  if (!choices) return <Problem text={error} />;
  return <World choices={choices} />;
}

function initial(choices: GridChoices): GridRequest {
  const request: { [name: string]: unknown } = { ...choices.request };
  for (const [name, value] of address().parts) {
    if (exported && name !== "method" && name !== "step") continue; // nothing else is recorded
    if (name === "picture") request.picture = value.split("/");
    else if (name in request) request[name] = typeof request[name] === "number" ? Number(value) : value;
  }
  return request as unknown as GridRequest;
}

function World(props: { choices: GridChoices }) {
  const { choices } = props;
  const [request, setRequest] = useState(() => initial(choices));
  const [playing, setPlaying] = useState(false);
  const [brush, setBrush] = useState<string>("");
  const [hover, setHover] = useState<number | null>(null);
  const [state, error] = useAnswer(() => api.grid(request), request);
  const past = useRef<{ request: GridRequest; mark: string; at: number }[]>([]); // what Undo brings back
  const gesture = useRef(0);
  // A drag is one change, and so is a slider that moves: those with the same mark, of a slider if soon after another.
  const change = (parts: Partial<GridRequest> | ((before: GridRequest) => Partial<GridRequest>), mark = "") => setRequest((before) => {
    const found = typeof parts === "function" ? parts(before) : parts;
    if (mark) {
      const last = past.current[past.current.length - 1];
      if (last?.mark === mark && (mark.includes(" ") || Date.now() - last.at < 1_000)) last.at = Date.now();
      else past.current = [...past.current.slice(-99), { request: before, mark, at: Date.now() }];
    }
    return { ...before, ...found };
  });
  const undo = () => {
    const last = past.current.pop();
    if (last) setRequest((now) => ({ ...last.request, step: SAMPLED(now.method) === SAMPLED(last.request.method) ? now.step : last.request.step }));
  };
  useEffect(() => {
    const typed = (event: KeyboardEvent) => {
      if (!(event.ctrlKey || event.metaKey) || event.shiftKey || event.key.toLowerCase() !== "z") return;
      if ((event.target as HTMLElement).closest("input[type=text], input[type=search]")) return;
      event.preventDefault();
      undo();
    };
    window.addEventListener("keydown", typed);
    return () => window.removeEventListener("keydown", typed);
  });

  useEffect(() => {
    const { picture, ...rest } = request;
    const parts: { [name: string]: string | number } = { picture: picture.join("/") };
    for (const [name, value] of Object.entries(rest)) if (value !== (choices.request as unknown as { [name: string]: unknown })[name]) parts[name] = value;
    if (picture.join() === choices.request.picture.join()) delete parts.picture;
    go("grid", parts, true);
  }, [request]);

  const paint = (cell: number, kind: string, stroke = false) => change((before) => ({ picture: painted(before.picture, cell, kind) }), stroke ? `stroke ${gesture.current}` : `paint ${cell} ${kind}`);
  const move = (from: number, to: number) => change((before) => {
    const width = before.picture[0].length;
    const kind = before.picture[Math.floor(from / width)][from % width];
    const there = before.picture[Math.floor(to / width)][to % width];
    return from === to ? {} : { picture: painted(painted(before.picture, from, there === kind ? "." : there), to, kind) };
  }, `drag ${gesture.current}`);
  const unit = SAMPLED(request.method) ? "episode" : "sweep";
  // An exported page holds some steps: the next of them in the direction asked for.
  const kept = choices.recorded?.[request.method], now = state?.step ?? request.step;
  const forth = (step: number) => (kept ? (kept.find((one) => one >= step) ?? kept[kept.length - 1]) : step);
  const back = (step: number) => (kept ? kept.reduce((a, b) => (b <= step ? Math.max(a, b) : a), 0) : step);
  const ended = state?.done || (kept !== undefined && now === kept[kept.length - 1]);
  const set = (step: number) => { setPlaying(false); change({ step: Math.min(Math.max(step, 0), choices.most_steps) }); };

  useEffect(() => {
    if (!playing) return;
    if (ended || request.step >= choices.most_steps) { setPlaying(false); return; }
    const timer = setTimeout(() => change({ step: forth(now + 1) }), 260);
    return () => clearTimeout(timer);
  }, [playing, state]);

  return (
    <>
      <h1>Grid world</h1>
      {exported && <Static>This is a page without a server: it holds the first layout with its usual settings, step by step. To drag the goal and move the sliders, run <code>foresight studio</code>.</Static>}
      <div class="columns">
        <Panel title={`${request.method.replaceAll("_", " ")}, ${unit} ${state?.step ?? 0}${state?.done ? ", converged" : ""}`} extra={
          <span class="dim small">{state && Object.entries(state.metrics).map(([name, x]) => `${name.replaceAll("_", " ")} ${number(x, 3)}`).join(", ")}</span>}>
          <div class="bar" role="group" aria-label="Steps">
            <button onClick={() => set(0)} disabled={request.step === 0}>Reset</button>
            <button onClick={() => set(back(now - 1))} disabled={request.step === 0}>◀ Back</button>
            <button onClick={() => set(forth((kept ? now : request.step) + 1))} disabled={ended}>Step ▶</button>
            {SAMPLED(request.method) && !kept && <button onClick={() => set(request.step + 100)}>+100</button>}
            <button aria-pressed={playing} onClick={() => setPlaying(!playing)} disabled={ended}>{playing ? "Pause" : "Play"}</button>
            <button onClick={() => set(forth(SAMPLED(request.method) ? 5_000 : choices.most_steps))} disabled={ended}>{SAMPLED(request.method) ? `${number(kept ? kept[kept.length - 1] : 5_000)} episodes` : "To the end"}</button>
          </div>
          <Problem text={error} />
          {state && <Board request={request} state={state} brush={brush} hover={hover} setHover={setHover} paint={paint} move={move} begin={() => { gesture.current++; }} />}
          {!exported && <div class="bar" role="group" aria-label="Draw">
            <span class="small dim">Drag a piece, or draw:</span>
            {KINDS.map(([sign, name]) => <button key={sign} aria-pressed={brush === sign} onClick={() => setBrush(brush === sign ? "" : sign)}>{name}</button>)}
            <button onClick={undo} disabled={!past.current.length}>Undo</button>
            <span class="small dim">On a cell, the keys g, t, w, s and Space do the same; Ctrl+Z takes back.</span>
          </div>}
        </Panel>
        <div>
          <Panel title="Algorithm">
            <div class="bar">
              <Choice label="method" value={request.method} options={choices.methods.map((one) => one.name)} names={Object.fromEntries(choices.methods.map((one) => [one.name, one.name.replaceAll("_", " ")]))}
                set={(method) => { setPlaying(false); change({ method, step: SAMPLED(method) === SAMPLED(request.method) ? request.step : 0 }, `method ${method}`); }} />
              {!exported && <Choice label="layout" value="" options={["", ...Object.keys(choices.layouts)]} names={{ "": "load one" }}
                set={(name) => { if (name) { const { picture, ...options } = choices.layouts[name]; change({ slip: 0, step_reward: 0, goal_reward: 1, trap_reward: -1, ...(options as Partial<GridRequest>), picture, step: 0 }, `layout ${name}`); } }} />}
            </div>
            <fieldset disabled={exported}>
            <Slider label="discount γ" value={request.gamma} min={0} max={1} step={0.01} set={(gamma) => change({ gamma }, "gamma")} />
            <Slider label="slip" value={request.slip} min={0} max={1} step={0.01} set={(slip) => change({ slip }, "slip")} />
            <Slider label="reward of a step" value={request.step_reward} min={-1} max={0.2} step={0.01} set={(step_reward) => change({ step_reward }, "step_reward")} />
            {request.method === "truncated_policy_iteration" && <Slider label="evaluation sweeps m" value={request.evaluation_sweeps} min={0} max={30} step={1} set={(evaluation_sweeps) => change({ evaluation_sweeps }, "evaluation_sweeps")} />}
            {request.method === "policy_iteration" && <Choice label="evaluation" value={request.evaluation} options={["sweeps", "exact"]} names={{ exact: "exact (linear solve)" }} set={(evaluation) => change({ evaluation }, "evaluation")} />}
            {SAMPLED(request.method) && <>
              <Slider label="step size α" value={request.alpha} min={0.01} max={1} step={0.01} set={(alpha) => change({ alpha }, "alpha")} />
              <Slider label="exploration ε" value={request.epsilon} min={0} max={1} step={0.01} set={(epsilon) => change({ epsilon }, "epsilon")} />
              <Slider label="seed" value={request.seed} min={0} max={20} step={1} set={(seed) => change({ seed }, "seed")} />
            </>}
            </fieldset>
          </Panel>
          <Panel title="The backup in numbers">{state && <Backup request={request} state={state} cell={hover} />}</Panel>
        </div>
      </div>
    </>
  );
}

export function painted(picture: string[], cell: number, kind: string): string[] {
  const width = picture[0].length;
  return picture.map((row, r) => [...row].map((old, c) => (r * width + c === cell ? kind : kind === "S" && old === "S" ? "." : old)).join(""));
}

function Board(props: {
  request: GridRequest; state: GridState; brush: string; hover: number | null;
  setHover: (cell: number | null) => void; paint: (cell: number, kind: string, stroke?: boolean) => void; move: (from: number, to: number) => void; begin: () => void;
}) {
  const { request, state } = props;
  const svg = useRef<SVGSVGElement>(null);
  const [held, setHeld] = useState<number | null>(null);
  const [target, setTarget] = useState<number | null>(null);
  const picture = request.picture;
  const rows = picture.length, columns = picture[0].length;
  const matches = state.rows === rows && state.columns === columns;
  const scale = useMemo(() => {
    const found = state.values.filter((x): x is number => x !== null && Number.isFinite(x));
    return Math.max(1e-9, ...found.map(Math.abs));
  }, [state]);
  const at = (event: PointerEvent): number | null => {
    const box = svg.current!.getBoundingClientRect();
    const c = Math.floor(((event.clientX - box.left) / box.width) * columns), r = Math.floor(((event.clientY - box.top) / box.height) * rows);
    return r >= 0 && r < rows && c >= 0 && c < columns ? r * columns + c : null;
  };
  const kind = (cell: number) => picture[Math.floor(cell / columns)][cell % columns];
  const down = (event: PointerEvent) => {
    const cell = at(event);
    if (cell === null || exported) return;
    svg.current!.setPointerCapture(event.pointerId);
    props.begin();
    if (props.brush) { props.paint(cell, props.brush, true); setHeld(-1); }
    else if (kind(cell) !== ".") { setHeld(cell); setTarget(cell); }
  };
  const over = (event: PointerEvent) => {
    const cell = at(event);
    if (cell !== props.hover) props.setHover(cell);
    if (cell === null || held === null) return;
    if (held === -1) { if (kind(cell) !== props.brush) props.paint(cell, props.brush, true); }
    else if (cell !== target) { setTarget(cell); props.move(held, cell); setHeld(cell); }
  };
  const up = () => { setHeld(null); setTarget(null); };
  const key = (event: KeyboardEvent, cell: number) => {
    const steps: { [name: string]: number } = { ArrowUp: -columns, ArrowDown: columns, ArrowLeft: -1, ArrowRight: 1 };
    const signs: { [name: string]: string } = { g: "G", t: "T", w: "#", s: "S", " ": "." };
    if (event.key in steps) {
      const next = cell + steps[event.key];
      if (next >= 0 && next < rows * columns) (svg.current!.querySelector(`[data-cell="${next}"]`) as SVGElement | null)?.focus();
    } else if (!exported && event.key.toLowerCase() in signs) props.paint(cell, signs[event.key.toLowerCase()]);
    else return;
    event.preventDefault();
  };
  const path = state.path.map((cell) => `${(cell % columns) * SIZE + SIZE / 2},${Math.floor(cell / columns) * SIZE + SIZE / 2}`).join(" ");
  return (
    <svg ref={svg} viewBox={`0 0 ${columns * SIZE} ${rows * SIZE}`} style="width: 100%; touch-action: none; display: block" role="group" aria-label="Grid world"
      onPointerDown={down} onPointerMove={over} onPointerUp={up} onPointerLeave={() => held === null && props.setHover(null)}>
      {picture.flatMap((row, r) => [...row].map((sign, c) => {
        const cell = r * columns + c;
        const value = matches ? state.values[cell] : null;
        const share = value === null ? 0 : Math.min(1, Math.abs(value) / scale);
        const color = value === null || sign === "#" ? "var(--soft)" : `color-mix(in srgb, var(${value >= 0 ? "--good" : "--bad"}) ${Math.round(share * 55)}%, var(--paper))`;
        const x = c * SIZE, y = r * SIZE;
        const ends = sign === "G" || sign === "T";
        const name = KINDS.find(([one]) => one === sign)![1];
        const best = matches ? state.policy[cell] : null;
        return (
          <g key={cell} class="cell" data-cell={cell} tabindex={cell === 0 ? 0 : -1} role="button" onKeyDown={(event) => key(event, cell)}
            onFocus={() => props.setHover(cell)} aria-label={`row ${r + 1}, column ${c + 1}: ${name}${value !== null && !ends && sign !== "#" ? `, value ${value.toFixed(3)}` : ""}`}>
            <rect class="value" x={x} y={y} width={SIZE} height={SIZE} fill={sign === "#" ? "var(--wall)" : color} stroke={props.hover === cell ? "var(--accent)" : "var(--rule)"} stroke-width={props.hover === cell ? 2 : 1} />
            {sign !== "." && sign !== "#" && <text class="piece" x={x + 5} y={y + 15} font-size="13" font-weight="700" fill={`var(--${name})`}>{sign}</text>}
            {value !== null && !ends && sign !== "#" && <>
              <text x={x + SIZE / 2} y={y + SIZE - 7} font-size="12" text-anchor="middle" fill="var(--ink)">{signed(value, 2)}</text>
              {(best ?? []).map((action) => {
                const [dx, dy] = ARROWS[state.actions[action]] ?? [0, 0];
                const mx = x + SIZE / 2, my = y + SIZE / 2 - 5;
                return <path key={action} d={`M ${mx} ${my} l ${dx * 15} ${dy * 15} m ${-dx * 5 - dy * 4} ${-dy * 5 - dx * 4} l ${dx * 5 + dy * 4} ${dy * 5 + dx * 4} l ${-dx * 5 + dy * 4} ${-dy * 5 + dx * 4}`} stroke="var(--ink)" stroke-width="1.6" fill="none" />;
              })}
            </>}
            {ends && <text x={x + SIZE / 2} y={y + SIZE / 2 + 8} font-size="22" text-anchor="middle" fill={`var(--${name})`}>{sign === "G" ? "★" : "✖"}</text>}
          </g>
        );
      }))}
      {path && <polyline points={path} fill="none" stroke="var(--path)" stroke-width="2.5" stroke-linejoin="round" opacity="0.8" pointer-events="none" />}
    </svg>
  );
}

function place(cell: number, columns: number): string {
  return `(${Math.floor(cell / columns) + 1}, ${(cell % columns) + 1})`;
}

// One action's backup: every number is the server's; only the sum is written out.
export function equation(outcomes: Outcome[], before: (number | null)[], gamma: number, columns: number): string {
  return outcomes.map(([p, next, reward, going]) =>
    going ? `${number(p, 3)}·(${signed(reward, 2)} + ${number(gamma, 3)}·v${place(next, columns)} ${signed(before[next] ?? 0)})` : `${number(p, 3)}·(${signed(reward, 2)}, ends)`,
  ).join("\n      + ");
}

// The target of an update, written out. What follows the reward is what the method takes for the value of s′.
function aim(one: GridUpdate, state: GridState, gamma: number): string {
  if (one.reward === undefined) return `G ${signed(one.target, 4)}`;
  if (!one.discount) return `${signed(one.reward, 2)}, ends`;
  const next = one.next === null || one.next === undefined ? "s′" : place(one.next, state.columns);
  const what: { [name: string]: string } = {
    q_learning: `max q(${next}, ·)`, expected_sarsa: `Σ π q(${next}, ·)`,
    sarsa: `q(${next}, ${one.next_action === undefined || one.next_action < 0 ? "a′" : ACTION_SIGN[state.actions[one.next_action]]})`,
  };
  return `${signed(one.reward, 2)} + ${number(gamma, 3)}·${what[state.method]} ${signed((one.target - one.reward) / one.discount, 4)}`;
}

function bracket(x: number): string {
  return x < 0 ? `(${signed(x, 4)})` : signed(x, 4);
}

function Backup(props: { request: GridRequest; state: GridState; cell: number | null }) {
  const { request, state, cell } = props;
  if (cell === null) return <div class="backup dim">Point at a cell, or focus it with Tab and the arrow keys. Numbers are values; arrows are the best actions one step ahead.</div>;
  const model = state.model[cell], q = state.q[cell], value = state.values[cell];
  const sign = request.picture.join("")[cell];
  if (!model || !q || value === null || sign === "G" || sign === "T")
    return <div class="backup">{place(cell, state.columns)}: {sign === "#" ? "a wall" : "the end of an episode: value 0"}</div>;
  const planned = !SAMPLED(state.method);
  const chosen = state.followed[cell];
  const lines: string[] = [`s = ${place(cell, state.columns)} (row, column)`];
  if (planned) {
    const rule = state.sweep === "evaluation" ? `v(s) = q(s, π(s))${chosen !== null ? `, π(s) = ${ACTION_SIGN[state.actions[chosen]]}` : ""}` : "v(s) = max over the actions";
    lines.push(state.step === 0 ? "v(s) = 0 before the first sweep. The next sweep compares:" : `${rule} = ${signed(value, 4)}`);
    q.forEach((x, action) => lines.push("", `q(s, ${ACTION_SIGN[state.actions[action]]}) = ${signed(x, 4)}`, `      = ${equation(model[action], state.before, request.gamma, state.columns)}`));
  } else {
    lines.push(`v(s) = max q(s, ·) = ${signed(value, 4)}`);
    q.forEach((x, action) => lines.push(`q(s, ${ACTION_SIGN[state.actions[action]]}) = ${signed(x, 4)}`));
    const rule: { [name: string]: string } = {
      q_learning: "r + γ max q(s′, ·)", sarsa: "r + γ q(s′, a′)", expected_sarsa: "r + γ Σ π(a|s′) q(s′, a)", mc_epsilon_greedy: "the return G",
    };
    const made = state.updates[cell] ?? [], count = made.length ? made[made.length - 1].turn : 0;
    lines.push("", `q(s, a) ← q(s, a) + α [target − q(s, a)], target: ${rule[state.method]}`);
    if (state.step > 0) lines.push(count ? `The last episode, ${count === 1 ? "one update" : `${count} updates`} here${count > made.length ? `, of which the last ${made.length}` : ""}:` : "The last episode changed nothing here.");
    made.forEach((one) => lines.push(`  q(s, ${ACTION_SIGN[state.actions[one.action]]}) ← ${signed(one.before, 4)} + ${number(request.alpha, 3)}·(${aim(one, state, request.gamma)} − ${bracket(one.before)}) = ${signed(one.after, 4)}`));
  }
  return <div class="backup">{lines.join("\n")}</div>;
}
