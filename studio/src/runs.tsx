import { useEffect, useMemo, useState } from "preact/hooks";
import { Parts, Reward } from "./agents";
import { api, type Detail, type Json, type Row, type Sample } from "./api";
import { Chart, type Line } from "./chart";
import { address, Choice, duration, go, number, PALETTE, Panel, Problem, Scroll, useAnswer } from "./common";

const SHOWN = 100; // rows of the table before "show all"

// The table with the rows that came since; new runs first.
function latest(table: Row[], fresh: { [run: string]: Row }, gone: string[]): Row[] {
  const known = new Set(table.map((row) => row.id));
  const rows = [...Object.values(fresh).filter((row) => !known.has(row.id)), ...table.map((row) => fresh[row.id] ?? row)];
  return gone.length ? rows.filter((row) => !gone.includes(row.id)) : rows;
}

export function Runs(props: { control: boolean }) {
  const [version, setVersion] = useState(0);
  const [missed, setMissed] = useState(0);
  const [changes, setChanges] = useState<{ [run: string]: number }>({});
  const [table, error] = useAnswer(api.runs, [version, missed]);
  const [news, setNews] = useState<{ rows: { [run: string]: Row }; gone: string[] }>({ rows: {}, gone: [] });
  const rows = useMemo(() => table && latest(table, news.rows, news.gone), [table, news]);
  const [search, setSearch] = useState("");
  const [all, setAll] = useState(false);
  const parts = address().parts;
  const chosen = parts.getAll("run");
  const metric = parts.get("metric") ?? "";
  const x = parts.get("x") ?? "step";

  useEffect(() => { const timer = setInterval(() => setVersion((before) => before + 1), 30_000); return () => clearInterval(timer); }, []); // a run may have stopped
  useEffect(() => setNews({ rows: {}, gone: [] }), [table]);
  useEffect(() => api.live((runs, fresh, gone) => {
    setNews((before) => ({ rows: { ...before.rows, ...Object.fromEntries(fresh.map((row) => [row.id, row])) }, gone: [...before.gone.filter((run) => !fresh.some((row) => row.id === run)), ...gone] }));
    setChanges((before) => ({ ...before, ...Object.fromEntries(runs.map((run) => [run, (before[run] ?? 0) + 1])) }));
  }, () => setMissed((before) => before + 1)), []);

  const choose = (runs: string[], name = metric) => go("runs", { run: runs, metric: name, x: x === "step" ? undefined : x });
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  const matching = (rows ?? []).filter((row) => {
    const text = `${row.name} ${row.algorithm} ${row.env} ${row.preset ?? ""} ${row.state}`.toLowerCase();
    return words.every((word) => text.includes(word));
  });
  const shown = all ? matching : matching.slice(0, SHOWN);
  const selected = chosen.length ? chosen : rows?.length ? [rows[0].id] : [];
  const state = new Map(rows?.map((row) => [row.id, row.state]));
  const versions = selected.map((run) => `${missed} ${changes[run] ?? 0} ${state.get(run)}`); // a killed run changes no file

  return (
    <>
      <h1>Runs</h1>
      <Problem text={error} />
      {rows && rows.length === 0 && (
        <p>No runs here yet. Make one in a few seconds: <code>foresight train ppo --preset CartPole-v1</code>. It appears on this page as it trains.
          Meanwhile, see <a href="#/grid">a grid world solved step by step</a> or <a href="#/search">play Connect Four</a>.</p>
      )}
      {selected.length > 0 && rows && (
        <Curves runs={selected} rows={rows} metric={metric} x={x} version={versions.join()}
          set={(name, axis) => go("runs", { run: chosen, metric: name, x: axis === "step" ? undefined : axis }, true)} />
      )}
      {rows && rows.length > 0 && (
        <Panel title={`${matching.length} ${matching.length === 1 ? "run" : "runs"}`} extra={
          <input type="search" size={30} placeholder="algorithm, environment, name" aria-label="Search runs" value={search}
            onInput={(event) => setSearch((event.target as HTMLInputElement).value)} />}>
          <Scroll>
            <table>
              <thead><tr><th><span class="small">show</span></th><th>run</th><th>algorithm</th><th>environment</th><th>state</th><th class="n">steps</th><th class="n">now</th><th class="n">result</th><th class="n">before</th><th class="n">time</th><th>saved</th></tr></thead>
              <tbody>
                {shown.map((row) => (
                  <tr key={row.id} aria-selected={selected.includes(row.id)}>
                    <td><input type="checkbox" aria-label={`Show ${row.name}`} checked={selected.includes(row.id)}
                      onChange={() => choose(selected.includes(row.id) ? selected.filter((one) => one !== row.id) : [...selected, row.id])} /></td>
                    <td><a href={`#/runs?run=${row.id}`}>{row.name}</a></td>
                    <td>{row.algorithm}</td><td>{row.env}</td>
                    <td><span class={`state ${row.state}`}>{row.state}</span>{row.unhealthy.length > 0 && <> <a class="warn" href={`#/runs?run=${row.id}`} title={row.unhealthy.join("\n")}>{many(row.unhealthy.length, "warning")}</a></>}</td>
                    <td class="n">{row.state === "finished" || !row.steps ? number(row.step) : <><progress max={row.steps} value={row.step} aria-label="progress" /> {number(row.step)}</>}</td>
                    <td class="n">{row.metric ? `${row.metric} ${number(row.value)}` : ""}</td>
                    <td class="n">{number(row.evaluation?.mean)}</td><td class="n">{number(row.baseline?.mean)}</td>
                    <td class="n">{duration(row.seconds)}</td>
                    <td class="small dim">{saved(row)}</td>
                  </tr>
                ))}
              </tbody>
            </table>
          </Scroll>
          {matching.length > shown.length && <button onClick={() => setAll(true)}>Show all {matching.length}</button>}
        </Panel>
      )}
      {selected.length > 1 && <Differences runs={selected} rows={rows ?? []} />}
      {selected.length === 1 && <One key={selected[0]} run={selected[0]} control={props.control} version={versions[0]} />}
    </>
  );
}

function many(count: number, what: string): string {
  return `${count} ${what}${count === 1 ? "" : "s"}`;
}

function saved(row: Row): string {
  const counts: [number, string][] = [[row.checkpoints, "checkpoint"], [row.pictures, "picture"], [row.videos, "video"]];
  return counts.filter(([count]) => count).map(([count, what]) => many(count, what)).join(", ");
}

function Curves(props: { runs: string[]; rows: Row[]; metric: string; x: string; version: string; set: (metric: string, x: string) => void }) {
  const [detail] = useAnswer(() => api.detail(props.runs[0]), [props.runs[0], props.version]);
  const row = props.rows.find((one) => one.id === props.runs[0]);
  const metrics = detail?.metrics ?? [];
  const metric = (detail ? metrics.includes(props.metric) : props.metric) ? props.metric : (row?.metric ?? metrics[0] ?? "");
  const [found, error] = useAnswer(
    () => (metric ? api.curves(props.runs, metric, props.x) : Promise.resolve({ curves: [], missing: [], bands: [] })),
    [props.runs, metric, props.x, props.version],
  );
  const lines = useMemo(() => {
    const drawn: Line[] = [];
    found?.curves.forEach((curve, i) => {
      const name = props.rows.find((one) => one.id === curve.run)?.name ?? curve.run;
      const spread = curve.rows > curve.x.length;
      drawn.push({ label: name, x: curve.x, y: curve.last, color: PALETTE[i % PALETTE.length], ...(spread ? { low: curve.low, high: curve.high } : {}) });
    });
    found?.bands.forEach((band) => drawn.push({ label: `IQM of ${band.runs}: ${band.label}`, x: band.steps, y: band.middle, low: band.low, high: band.high, color: "#888888", dash: true }));
    return drawn;
  }, [found, props.rows.length]);
  const download = () => {
    const text = ["run,x,low,high,last", ...(found?.curves ?? []).flatMap((curve) => curve.x.map((at, i) => [curve.run, at, curve.low[i], curve.high[i], curve.last[i]].join()))].join("\n");
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
    link.download = `${metric}.csv`;
    link.click();
    URL.revokeObjectURL(link.href);
  };
  return (
    <Panel title={metric || "metrics"} extra={
      <div class="bar">
        {metrics.length > 0 && <Choice label="metric" value={metric} options={metrics} set={(name) => props.set(name, props.x)} />}
        <Choice label="x axis" value={props.x} options={["step", "seconds"]} set={(axis) => props.set(metric, axis)} />
        <button onClick={download} disabled={!lines.length}>CSV</button>
      </div>}>
      <Problem text={error} />
      {lines.length ? <Chart lines={lines} x={props.x === "step" ? (row?.unit ?? "step") : "seconds"} y={metric} /> : <p class="dim">No values of this metric yet.</p>}
      {!!found?.missing.length && <p class="dim small">Without this metric: {found.missing.length} of {props.runs.length} runs.</p>}
    </Panel>
  );
}

function Differences(props: { runs: string[]; rows: Row[] }) {
  const [found, error] = useAnswer(() => api.differences(props.runs), props.runs);
  const name = (run: string) => props.rows.find((row) => row.id === run)?.name ?? run;
  return (
    <Panel title="Settings that differ">
      <Problem text={error} />
      {found && found.length === 0 ? <p class="dim">None.</p> : (
        <Scroll><table>
          <thead><tr><th>setting</th>{props.runs.slice(0, 20).map((run) => <th key={run}>{name(run)}</th>)}</tr></thead>
          <tbody>{found?.map((one) => <tr key={one.name}><th scope="row">{one.name}</th>{one.values.map((value, i) => <td key={i}>{plain(value)}</td>)}</tr>)}</tbody>
        </table></Scroll>
      )}
    </Panel>
  );
}

function plain(value: Json): string {
  return value === null || value === undefined ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value);
}

function One(props: { run: string; control: boolean; version: string }) {
  const [detail, error] = useAnswer(() => api.detail(props.run), [props.run, props.version]);
  const [said, setSaid] = useState("");
  if (!detail || error) return <Problem text={error} />; // a run may be deleted while it is shown
  const command = (act: () => Promise<object>, done: string) => act().then(() => setSaid(done), (problem: Error) => setSaid(problem.message));
  return (
    <>
      {detail.warnings.length > 0 && <Panel title={many(detail.warnings.length, "warning")}>{detail.warnings.map((text) => <p class="warning" key={text}>{text}</p>)}</Panel>}
      <div class="columns">
        <div>
          {detail.samples && <Completions run={props.run} version={props.version} />}
          {detail.media.length > 0 && <Panel title="Pictures and videos"><div class="media">
            {detail.media.map((name) => <figure key={name}><figcaption class="small dim">{name}</figcaption>
              {/\.(mp4|webm)$/.test(name) ? <video controls muted loop src={api.file(props.run, name)} /> : <img loading="lazy" alt={name} src={api.file(props.run, name)} />}</figure>)}
          </div></Panel>}
          {!detail.samples && !detail.media.length && <Facts detail={detail} />}
        </div>
        <div>
          {(detail.samples || detail.media.length > 0) && <Facts detail={detail} />}
          <Panel title="Checkpoints">
            {detail.saved.length ? <ul class="plain">{detail.saved.map((name) => <li key={name}>step {number(Number(name.replace("step-", "")))}{Number(name.replace("step-", "")) === detail.best && <span class="dim"> the best evaluation</span>}</li>)}</ul> : <p class="dim">None yet.</p>}
            <p class="small" style="overflow-wrap: anywhere">Continue with <code>{detail.resume}</code></p>
            {props.control && <div class="bar">
              <button disabled={detail.state !== "running"} onClick={() => command(() => api.stop(props.run), "It saves a checkpoint and stops.")}>Stop</button>
              <button disabled={detail.state !== "stopped"} onClick={() => command(() => api.resume(props.run), "It loads its checkpoint and continues.")}>Resume</button>
              <span role="status">{said}</span>
            </div>}
          </Panel>
          <Panel title="Settings"><Tree value={detail.config} /></Panel>
        </div>
      </div>
    </>
  );
}

function Facts(props: { detail: Detail }) {
  const { detail } = props;
  const rows: [string, string][] = [
    ["state", detail.state], ["steps", `${number(detail.step)} of ${detail.steps ? number(detail.steps) : "?"} ${detail.unit}`],
    ["time", duration(detail.seconds)], ["logged rows", number(detail.rows)],
  ];
  for (const [name, found] of [["result", detail.evaluation], ["before training", detail.baseline]] as const) {
    if (found) rows.push([name, `${found.metric} ${number(found.mean)} ± ${number(found.std, 2)} (n = ${found.n})`]);
  }
  if (typeof detail.summary.command === "string") rows.push(["command", detail.summary.command]);
  return (
    <Panel title={detail.name}>
      <table class="facts"><tbody>{rows.map(([name, value]) => <tr key={name}><th scope="row">{name}</th><td>{value}</td></tr>)}</tbody></table>
    </Panel>
  );
}

function Tree(props: { value: Json; depth?: number }) {
  const { value, depth = 0 } = props;
  if (value === null || typeof value !== "object") return <span>{plain(value)}</span>;
  const pairs: [string, Json][] = Array.isArray(value) ? value.map((one, i) => [String(i), one]) : Object.entries(value);
  if (!pairs.length) return <span class="dim">none</span>;
  return (
    <table class="small facts"><tbody>
      {pairs.map(([name, one]) => <tr key={name}><th scope="row">{name}</th><td>
        {one !== null && typeof one === "object" ? <details open={depth < 1}><summary>{Array.isArray(one) ? `${one.length} values` : `${Object.keys(one).length} fields`}</summary><Tree value={one} depth={depth + 1} /></details> : plain(one)}
      </td></tr>)}
    </tbody></table>
  );
}

// One of `options`; the first unless the address names another.
function choice<T extends string>(given: string | null, options: readonly T[]): T {
  return options.find((one) => one === given) ?? options[0];
}

const HIDDEN = ["step", "prompt", "completion", "reward", "parts", "transcript", "index", "held_out", "members"];

function Completions(props: { run: string; version: string }) {
  const parts = address().parts;
  const search = parts.get("text") ?? "";
  const sort = choice(parts.get("order"), ["step", "best", "worst"] as const);
  const which = choice(parts.get("questions"), ["all", "held out", "training"] as const);
  const step = parts.has("step") ? Number(parts.get("step")) : undefined;
  const start = Number(parts.get("start") ?? 0);
  const compare = parts.get("compare") === "yes";
  const set = (change: { [name: string]: string | number | undefined }) => {
    const kept = Object.fromEntries([...address().parts.entries()].filter(([name]) => name !== "run" && name !== "start"));
    go("runs", { run: props.run, ...kept, ...change }, true);
  };
  const held_out = which === "all" ? undefined : which === "held out";
  const [found, error] = useAnswer(() => api.samples(props.run, { search, sort, step, held_out, start }), [props.run, search, sort, step, which, start, props.version]);
  const steps = found?.steps ?? [];
  const held = found?.held_out_steps ?? [];
  const ends = held.length > 1 ? held : steps; // the same questions are asked at every evaluation
  return (
    <Panel title={`${found?.total ?? ""} completions`} extra={
      <div class="bar">
        <input type="search" placeholder="search in texts" aria-label="Search completions" value={search} onInput={(event) => set({ text: (event.target as HTMLInputElement).value })} />
        {held.length > 0 && <Choice label="questions" value={which} options={["all", "held out", "training"]} set={(one) => set({ questions: one === "all" ? undefined : one })} />}
        {!compare && <Choice label="order" value={sort} options={["step", "best", "worst"]} names={{ step: "newest", best: "highest reward", worst: "lowest reward" }} set={(one) => set({ order: one === "step" ? undefined : one })} />}
        <button aria-pressed={compare} onClick={() => set({ compare: compare ? undefined : "yes" })} disabled={ends.length < 2}>Before and after</button>
      </div>}>
      <Problem text={error} />
      {steps.length > 1 && !compare && (
        <label class="slider"><span>step <output>{step ?? "all"}</output></span>
          <input type="range" aria-label="step" min={-1} max={steps.length - 1} value={step === undefined ? -1 : steps.indexOf(step)}
            onInput={(event) => { const i = Number((event.target as HTMLInputElement).value); set({ step: i < 0 ? undefined : steps[i] }); }} /></label>
      )}
      {compare ? <Compare run={props.run} first={ends[0]} last={ends[ends.length - 1]} held_out={held.length > 1 ? true : undefined} /> : found?.rows.map((row) => <One_ row={row} run={props.run} key={row.index} />)}
      {!compare && found && found.total > 50 && <div class="bar">
        <button disabled={start === 0} onClick={() => set({ start: Math.max(0, start - 50) || undefined })}>Newer</button>
        <span class="dim small">{start + 1} to {Math.min(start + 50, found.total)} of {found.total}</span>
        <button disabled={start + 50 >= found.total} onClick={() => set({ start: start + 50 })}>Older</button>
      </div>}
    </Panel>
  );
}

function One_(props: { row: Sample; run: string }) {
  const { row } = props;
  const rest = Object.entries(row).filter(([name]) => !HIDDEN.includes(name));
  return (
    <div class="sample">
      <div class="small dim">step {row.step}{row.held_out && ", held out"}{row.reward !== undefined && <> · reward <Reward x={row.reward} /></>}{rest.map(([name, value]) => ` · ${name} ${plain(value ?? null)}`)}
        {row.transcript !== undefined && <> · <a href={`#/agents?run=${props.run}&row=${row.index}`}>{row.transcript} messages</a></>}</div>
      {row.prompt !== undefined && <pre class="dim">{String(row.prompt)}</pre>}
      {row.completion !== undefined && <pre>{String(row.completion)}</pre>}
      <Parts parts={row.parts} />
    </div>
  );
}

// The first and the last logged answer to the same prompt, with the words that changed.
function Compare(props: { run: string; first: number; last: number; held_out: boolean | undefined }) {
  const { run, first, last, held_out } = props;
  const [before] = useAnswer(() => api.samples(run, { step: first, sort: "step", held_out }), [run, first, held_out]);
  const [after] = useAnswer(() => api.samples(run, { step: last, sort: "step", held_out }), [run, last, held_out]);
  if (!before || !after) return null;
  const old = new Map(before.rows.map((row) => [row.prompt, row]));
  const pairs = after.rows.filter((row) => old.has(row.prompt)).map((row) => [old.get(row.prompt)!, row] as const);
  const shown = pairs.length ? pairs : after.rows.slice(0, before.rows.length).map((row, i) => [before.rows[i], row] as const);
  // An answer that could not be scored has the text "NaN", or nothing: it is in no mean, as in evaluations.
  const mean = (rows: readonly Sample[]) => {
    const scores = rows.map((row) => row.reward as unknown).filter((x): x is number => typeof x === "number");
    return scores.length ? number(scores.reduce((sum, x) => sum + x, 0) / scores.length, 3) : "–";
  };
  return (
    <>
      {!pairs.length && <p class="dim small">No prompt was logged at both steps: answers to different prompts, side by side.</p>}
      {pairs.length > 0 && <p class="small">The same {pairs.length} questions: mean reward {mean(pairs.map(([one]) => one))} at step {first}, {mean(pairs.map(([, other]) => other))} at step {last}.</p>}
      {shown.map(([one, other], i) => (
        <div class="sample" key={i}>
          <pre class="dim">{String(other.prompt ?? "")}</pre>
          <div class="small dim">step {one.step}, reward <Reward x={one.reward} /> → step {other.step}, reward <Reward x={other.reward} /></div>
          <pre>{words(String(one.completion ?? ""), String(other.completion ?? "")).map(([kind, text], j) => kind === "+" ? <ins key={j}>{text}</ins> : kind === "-" ? <del key={j}>{text}</del> : <span key={j}>{text}</span>)}</pre>
        </div>
      ))}
    </>
  );
}

// A word diff by the longest common subsequence; texts are short, and long ones are cut.
export function words(a: string, b: string): [string, string][] {
  const left = a.split(/(\s+)/).slice(0, 800);
  const right = b.split(/(\s+)/).slice(0, 800);
  const length = Array.from({ length: left.length + 1 }, () => new Uint16Array(right.length + 1));
  for (let i = left.length - 1; i >= 0; i--)
    for (let j = right.length - 1; j >= 0; j--)
      length[i][j] = left[i] === right[j] ? length[i + 1][j + 1] + 1 : Math.max(length[i + 1][j], length[i][j + 1]);
  const found: [string, string][] = [];
  let i = 0, j = 0;
  while (i < left.length || j < right.length) {
    if (i < left.length && j < right.length && left[i] === right[j]) { found.push(["=", left[i++]]); j++; }
    else if (j >= right.length || (i < left.length && length[i + 1][j] >= length[i][j + 1])) found.push(["-", left[i++]]);
    else found.push(["+", right[j++]]);
  }
  return found;
}
