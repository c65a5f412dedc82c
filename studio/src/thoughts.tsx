import { useMemo, useState } from "preact/hooks";
import { api, type Thought, type ThoughtResult, type Thinking } from "./api";
import { Chart, type Line } from "./chart";
import { address, Choice, go, number, PALETTE, Panel, Problem, Scroll, useAnswer } from "./common";

const WIDTH = 176, HEIGHT = 46, GAP = 34; // of a drawn thought
const FEW = 8; // children of a thought that are shown at first

export function Thoughts(_: { control: boolean }) {
  const [reports, trouble] = useAnswer(api.reports, "reports");
  const parts = address().parts;
  const name = parts.get("report") ?? reports?.[0]?.id ?? "";
  const [report, error] = useAnswer(() => (name ? api.report(name) : Promise.resolve(undefined)), name);
  if (!reports) return <><h1>Thoughts</h1><Problem text={trouble} /></>;
  if (!reports.length)
    return (
      <>
        <h1>Thoughts</h1>
        <p>No report here yet. Let a model think longer, and compare the ways: <code>foresight train pretrain --preset countdown-steps --out runs/countdown</code>, then{" "}
          <code>foresight think self_consistency tree_of_thoughts puct --model runs/countdown --task countdown --env-options traces=steps --verifier exact --max-new-tokens 16</code>.</p>
      </>
    );
  const question = Math.min(Number(parts.get("question") ?? 0), (report?.examples.length || 1) - 1);
  const results = report?.examples[question]?.results ?? [];
  const best = results.filter((one) => one.method !== "greedy").reduce<(typeof results)[number] | undefined>((a, b) => (!a || b.budget >= a.budget ? b : a), undefined);
  const method = parts.get("method") ?? best?.method ?? "greedy";
  const budget = Number(parts.get("budget") ?? best?.budget ?? 0);
  const set = (changes: { [name: string]: string | number }) => go("thoughts", { report: name, question, method, budget, ...changes }, true);
  return (
    <>
      <h1>Thoughts</h1>
      <Problem text={error} />
      <div class="bar">
        <Choice label="report" value={name} options={reports.map((one) => one.id)} names={Object.fromEntries(reports.map((one) => [one.id, `${one.name}: ${one.task}`]))} set={(one) => go("thoughts", { report: one })} />
      </div>
      {report && <Compared report={report} />}
      {report && !report.examples.length && <p class="dim">This report holds no single questions: it was written by an older version.</p>}
      {report && report.examples.length > 0 && (
        <Panel title={`Question ${question + 1} of ${report.examples.length}`} extra={<div class="bar">
          <button disabled={question === 0} onClick={() => set({ question: question - 1 })}>Previous</button>
          <button disabled={question + 1 >= report.examples.length} onClick={() => set({ question: question + 1 })}>Next</button></div>}>
          <pre>{report.examples[question].question}</pre>
          <p class="small dim">answer: {report.examples[question].answer}</p>
          <Answered results={results} method={method} budget={budget} set={(one, most) => set({ method: one, budget: most })} />
        </Panel>
      )}
      {results.some((one) => one.method === method && one.budget === budget) && <One report={name} question={question} method={method} budget={budget} />}
    </>
  );
}

function Compared(props: { report: Thinking }) {
  const { report } = props;
  const lines = useMemo(() => {
    const names = [...new Set(report.rows.map((row) => row.method))];
    const tokens = report.rows.filter((row) => row.method !== "greedy").map((row) => row.sampled_tokens);
    return names.map((name, i): Line => {
      const rows = report.rows.filter((row) => row.method === name).sort((a, b) => a.sampled_tokens - b.sampled_tokens);
      const flat = name === "greedy" && tokens.length > 0; // one budget: drawn across as what the others must beat
      const x = flat ? [Math.max(1, Math.min(rows[0].sampled_tokens, ...tokens)), Math.max(...tokens)] : rows.map((row) => row.sampled_tokens);
      const of = (f: (row: (typeof rows)[number]) => number) => (flat ? [f(rows[0]), f(rows[0])] : rows.map(f));
      return { label: name, x, y: of((row) => row.accuracy), ...(flat ? {} : { low: of((row) => row.accuracy - row.standard_error), high: of((row) => row.accuracy + row.standard_error) }), color: flat ? "#888888" : PALETTE[i % PALETTE.length], dash: flat };
    });
  }, [report]);
  return (
    <Panel title={`${report.metric} against tokens`} extra={<span class="small dim">{report.questions} questions of {report.task}, {report.model}{report.verifier ? `, verifier ${report.verifier}` : ""}; bands are ± one standard error</span>}>
      <Chart lines={lines} x="sampled tokens of a question" y={report.metric} height={260} log />
      <details><summary>All figures</summary><Scroll><table class="small">
        <thead><tr><th>method</th><th class="n">budget</th><th class="n">{report.metric}</th><th class="n">any right</th><th class="n">share right</th><th class="n">tokens</th><th class="n">prompt tokens</th><th class="n">verifier calls</th><th class="n">seconds</th></tr></thead>
        <tbody>{report.rows.map((row, i) => <tr key={i}><td>{row.method}</td><td class="n">{number(row.budget)}</td><td class="n">{row.accuracy.toFixed(3)} ± {row.standard_error.toFixed(3)}</td><td class="n">{row.any?.toFixed(3) ?? ""}</td><td class="n">{row.mean?.toFixed(3) ?? ""}</td>
          <td class="n">{number(Math.round(row.sampled_tokens))}</td><td class="n">{number(Math.round(row.prompt_tokens))}</td><td class="n">{number(Math.round(row.verifier_calls))}</td><td class="n">{row.seconds.toFixed(2)}</td></tr>)}</tbody>
      </table></Scroll></details>
    </Panel>
  );
}

// Methods down, budgets across: right or wrong.
function Answered(props: { results: Thinking["examples"][number]["results"]; method: string; budget: number; set: (method: string, budget: number) => void }) {
  const budgets = [...new Set(props.results.map((one) => one.budget))].sort((a, b) => a - b);
  const methods = [...new Set(props.results.map((one) => one.method))];
  return (
    <Scroll><table class="small" style="width: auto">
      <thead><tr><th>method</th>{budgets.map((one) => <th key={one} class="n">{number(one)} tokens</th>)}</tr></thead>
      <tbody>{methods.map((method) => <tr key={method}><th scope="row">{method}</th>{budgets.map((budget) => {
        const found = props.results.find((one) => one.method === method && one.budget === budget);
        if (!found) return <td key={budget} />;
        const right = found.reward >= 1;
        return <td key={budget} class="n"><button class={`mark ${right ? "right" : "wrong"}`} aria-pressed={props.method === method && props.budget === budget} aria-label={`${method} with ${budget} tokens: ${right ? "right" : `reward ${number(found.reward)}`}`} onClick={() => props.set(method, budget)}>{right ? "✓" : found.reward > 0 ? number(found.reward, 2) : "✗"}</button></td>;
      })}</tr>)}</tbody>
    </table></Scroll>
  );
}

function One(props: { report: string; question: number; method: string; budget: number }) {
  const [found, error] = useAnswer(() => api.thought(props.report, props.question, props.method, props.budget), [props.report, props.question, props.method, props.budget]);
  if (!found) return <Problem text={error} />;
  const most = Math.max(1e-9, ...found.votes.map((vote) => Math.abs(vote.score)));
  const costs = Object.entries(found.charge).map(([name, value]) => `${number(name === "seconds" ? Number(value.toFixed(2)) : value)} ${name.replace(/_/g, " ")}`);
  return (
    <>
      <Problem text={error} />
      <div class="columns">
        <Panel title={`${found.tree.nodes.length + found.hidden} thoughts`} extra={<span class="small dim">green: the way to the answer; dashed: not kept; the bar is the score{found.hidden ? `; ${found.hidden} are left out` : ""}</span>}>
          <Tree key={`${props.report}-${props.question}-${props.method}-${props.budget}`} found={found} />
        </Panel>
        <div>
          <Panel title={`Answer of ${found.method}`} extra={<span class={`mark ${found.reward >= 1 ? "right" : "wrong"}`}>{found.reward >= 1 ? "✓ right" : "✗ wrong"}</span>}>
            <pre>{found.text}</pre>
            <p class="small dim">{costs.join(", ")}</p>
          </Panel>
          <Panel title={found.method.includes("consistency") ? "Votes" : "Candidates, by score"}>
            <Scroll><table class="small"><tbody>{found.votes.slice(0, 16).map((vote, i) => (
              <tr key={i} title={vote.text}><td><code>{vote.key || "(no answer)"}</code></td><td class="n">{number(vote.score, 3)}</td><td class="bars"><i class="now" style={`width: ${(100 * Math.max(vote.score, 0)) / most}%`} /></td><td><span class={`mark ${vote.reward >= 1 ? "right" : "wrong"}`}>{vote.reward >= 1 ? "✓" : "✗"}</span></td></tr>
            ))}</tbody></table></Scroll>
            {found.votes.length > 16 && <p class="small dim">and {found.votes.length - 16} more</p>}
          </Panel>
        </div>
      </div>
    </>
  );
}

interface Placed { index: number; x: number; y: number; more: number }

function Tree(props: { found: ThoughtResult }) {
  const nodes = props.found.tree.nodes;
  const [open, setOpen] = useState<{ [index: number]: boolean }>({});
  const [focus, setFocus] = useState(() => nodes.reduce((last, node, i) => (node.chosen ? i : last), 0));
  const placed = useMemo(() => place(nodes, open), [nodes, open]);
  const at = new Map(placed.map((one) => [one.index, one]));
  const width = Math.max(...placed.map((one) => one.x)) + WIDTH, height = Math.max(...placed.map((one) => one.y)) + HEIGHT;
  const scores = nodes.map((node) => node.score).filter((score): score is number => typeof score === "number");
  const low = Math.min(0, ...scores), high = Math.max(1e-9, ...scores);
  const chosen = nodes[focus] ?? nodes[0];
  return (
    <>
      <Scroll style="max-height: 560px; overflow-y: auto">
        <svg width={width + 4} height={height + 4} role="group" aria-label="Tree of thoughts">
          {placed.flatMap(({ index, x, y }) => nodes[index].parents.map((parent) => {
            const from = at.get(parent);
            if (!from) return null;
            const way = nodes[index].chosen && nodes[parent].chosen;
            return <path key={`${parent}-${index}`} d={`M${from.x + WIDTH - 6} ${from.y + 18}C${x - 8} ${from.y + 18} ${from.x + WIDTH + 8} ${y + 18} ${x + 2} ${y + 18}`} fill="none" stroke={way ? "var(--good)" : "var(--dim)"} stroke-width={way ? 2.6 : 1} opacity={way ? 1 : 0.5} />;
          }))}
          {placed.map(({ index, x, y, more }) => {
            const node = nodes[index];
            const act = () => { setFocus(index); if (more || open[index]) setOpen({ ...open, [index]: !open[index] }); };
            return (
              <g key={index} class="cell" role="button" tabindex={0} aria-label={`${node.kind} ${index}${node.score === null ? "" : `, score ${number(node.score, 3)}`}${node.chosen ? ", on the way to the answer" : ""}: ${node.text}`} aria-expanded={more || open[index] ? !!open[index] : undefined} onClick={act}
                onKeyDown={(event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); act(); } }}>
                <rect x={x + 2} y={y + 2} width={WIDTH - 8} height={HEIGHT - 10} rx="5" fill="var(--soft)" stroke={index === focus ? "var(--accent)" : node.chosen ? "var(--good)" : "var(--rule)"} stroke-width={index === focus || node.chosen ? 2 : 1} stroke-dasharray={node.kept ? undefined : "4 3"} />
                {typeof node.score === "number" && <rect x={x + 6} y={y + HEIGHT - 14} width={((WIDTH - 18) * (node.score - low)) / (high - low)} height="3" rx="1.5" fill="var(--accent)" pointer-events="none" />}
                <text x={x + 9} y={y + 17} font-size="12" fill={node.kept ? "var(--ink)" : "var(--dim)"}>{short(node.text, 24)}</text>
                <text x={x + 9} y={y + 29} font-size="10" fill="var(--dim)">{node.kind}{node.score === null ? "" : ` ${number(node.score, 3)}`}{more ? `, ${more} more below` : ""}</text>
              </g>
            );
          })}
        </svg>
      </Scroll>
      <p class="small dim">{chosen.kind} {focus}{chosen.score === null ? "" : `, score ${number(chosen.score, 4)}`}{chosen.kept ? "" : ", not kept"}</p>
      <pre>{chosen.text || "(empty)"}</pre>
    </>
  );
}

function short(text: string, most: number): string {
  const line = text.trim().replace(/\s+/g, " ");
  return line.length > most ? line.slice(0, most - 1) + "…" : line || "(empty)";
}

// Columns by depth; children below their first parent, at first only the chosen and the best.
function place(nodes: Thought[], open: { [index: number]: boolean }): Placed[] {
  const below = new Map<number, number[]>();
  const depth: number[] = [];
  nodes.forEach((node, i) => {
    depth.push(node.parents.length ? 1 + Math.max(...node.parents.map((parent) => depth[parent] ?? 0)) : 0);
    if (node.parents.length) below.set(node.parents[0], [...(below.get(node.parents[0]) ?? []), i]);
  });
  const found: Placed[] = [];
  let leaf = 0;
  const put = (index: number): Placed => {
    const all = below.get(index) ?? [];
    const best = [...all].sort((a, b) => Number(nodes[b].chosen) - Number(nodes[a].chosen) || (nodes[b].score ?? 0) - (nodes[a].score ?? 0)).slice(0, FEW);
    const shown = open[index] ? all : all.filter((child) => best.includes(child));
    const here: Placed = { index, x: depth[index] * (WIDTH + GAP - 20), y: 0, more: all.length - shown.length };
    found.push(here);
    const children = shown.map(put);
    here.y = children.length ? (children[0].y + children[children.length - 1].y) / 2 : leaf++ * HEIGHT;
    return here;
  };
  put(0);
  return found;
}
