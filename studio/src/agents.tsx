import { useEffect, useState } from "preact/hooks";
import { api, type Json, type Sample, type Turn } from "./api";
import { address, Choice, go, number, Panel, Problem, Scroll, useAnswer } from "./common";

const PAGE = 50;
const COUNTS = ["turns", "calls"]; // parts that count, and are no share of a reward

export function Agents(_: { control: boolean }) {
  const [runs, trouble] = useAnswer(api.agents, "agents");
  const parts = address().parts;
  const run = parts.get("run") ?? runs?.[0]?.id ?? "";
  const [version, setVersion] = useState(0);
  useEffect(() => api.live((changed) => { if (changed.includes(run)) setVersion((before) => before + 1); }), [run]);
  const [search, setSearch] = useState("");
  const [sort, setSort] = useState<"step" | "best" | "worst">("step");
  const [which, setWhich] = useState<"all" | "held out" | "training">("all");
  const [start, setStart] = useState(0);
  const held_out = which === "all" ? undefined : which === "held out";
  const [found, error] = useAnswer(
    () => (run ? api.samples(run, { search, sort, held_out, start }) : Promise.resolve(undefined)), [run, search, sort, which, start, version],
  );
  if (!runs) return <><h1>Agents</h1><Problem text={trouble} /></>;
  if (!runs.length)
    return (
      <>
        <h1>Agents</h1>
        <p>No run here has logged a conversation with tools. Make one: <code>foresight data demonstrations --task calculator --prompts 240 --out runs/data/calculator.jsonl</code>,
          then <code>foresight train sft --preset smollm2-calculator</code>.</p>
      </>
    );
  const rows = (found?.rows ?? []).filter((row) => row.transcript !== undefined);
  const asked = parts.get("row");
  const index = asked !== null ? Number(asked) : rows[0]?.index;
  const open = (row: number | undefined) => go("agents", { run, row }, true);
  return (
    <>
      <h1>Agents</h1>
      <div class="bar">
        <Choice label="run" value={run} options={runs.map((one) => one.id)} names={Object.fromEntries(runs.map((one) => [one.id, `${one.name}: ${one.algorithm} on ${one.env}`]))} set={(name) => { setStart(0); go("agents", { run: name }); }} />
        <Choice label="questions" value={which} options={["all", "held out", "training"]} set={(one) => { setWhich(one); setStart(0); }} />
        <Choice label="order" value={sort} options={["step", "best", "worst"]} names={{ step: "newest", best: "highest reward", worst: "lowest reward" }} set={(one) => { setSort(one); setStart(0); }} />
        <label class="wide"><span class="small dim">text in any turn</span><input type="search" aria-label="Search conversations" value={search} onInput={(event) => { setSearch((event.target as HTMLInputElement).value); setStart(0); }} /></label>
      </div>
      <Problem text={error} />
      <div class="columns talk">
        <Panel title={`${found?.total ?? ""} conversations`}>
          <Scroll class="tall"><table class="small">
            <thead><tr><th class="n">step</th><th class="n">reward</th><th>question</th></tr></thead>
            <tbody>{rows.map((row) => (
              <tr key={row.index} aria-selected={row.index === index}>
                <td class="n">{number(row.step)}</td><td class="n"><Reward x={row.reward} /></td>
                <td style="white-space: normal"><a href={`#/agents?run=${run}&row=${row.index}`} onClick={(event) => { event.preventDefault(); open(row.index); }}>{clip(String(row.prompt ?? ""))}</a>{row.held_out === true && <span class="dim"> held out</span>}</td>
              </tr>
            ))}</tbody>
          </table></Scroll>
          {found && found.total > PAGE && <div class="bar">
            <button disabled={start === 0} onClick={() => setStart(Math.max(0, start - PAGE))}>Back</button>
            <span class="dim small">{start + 1} to {Math.min(start + PAGE, found.total)} of {found.total}</span>
            <button disabled={start + PAGE >= found.total} onClick={() => setStart(start + PAGE)}>On</button>
          </div>}
        </Panel>
        {index !== undefined && <Conversation run={run} index={index} open={open} version={version} />}
      </div>
    </>
  );
}

function clip(text: string): string {
  return text.length > 90 ? text.slice(0, 89) + "…" : text || "(empty)";
}

export function Reward(props: { x: unknown }) {
  const x = typeof props.x === "number" ? props.x : NaN;
  return <span class={`mark ${x >= 1 ? "right" : x > 0 ? "" : "wrong"}`}>{number(props.x, 3)}</span>;
}

function Conversation(props: { run: string; index: number; open: (row: number) => void; version: number }) {
  const [found, error] = useAnswer(() => api.conversation(props.run, props.index), [props.run, props.index, props.version]);
  if (!found) return <Problem text={error} />;
  const versions = found.versions.filter((one) => one.held_out === found.held_out);
  return (
    <div>
      <Problem text={error} />
      <Panel title={`Step ${number(found.step)}, ${found.held_out ? "held-out question, greedy" : "sampled in training"}`} extra={<span class="small">reward <Reward x={found.reward} /></span>}>
        {versions.length > 1 && <p class="small">The same question by version of the model: {versions.map((one) => (
          <button key={one.index} class="mark" aria-pressed={one.index === props.index} aria-label={`step ${one.step}, reward ${number(one.reward)}`} onClick={() => props.open(one.index)}>{number(one.step)} <Reward x={one.reward} /></button>
        ))}</p>}
        <Parts row={found} />
      </Panel>
      <Panel title={`${found.turns.length} messages`}>
        {found.turns.map((turn, i) => <Said key={i} turn={turn} />)}
      </Panel>
    </div>
  );
}

// The parts of a reward, and what was counted.
export function Parts(props: { row: Sample }) {
  const parts = props.row.parts;
  if (!parts || typeof parts !== "object" || Array.isArray(parts)) return null;
  const pairs = Object.entries(parts);
  const isCount = (name: string) => COUNTS.some((one) => name.endsWith(one));
  const shares = pairs.filter(([name]) => !isCount(name)), counts = pairs.filter(([name]) => isCount(name));
  return (
    <>
      {shares.length > 0 && <table class="small" style="width: auto"><tbody>{shares.map(([name, value]) => (
        <tr key={name}><th scope="row">{name}</th><td class="n">{number(value, 3)}</td><td class="bars"><i class="now" style={`width: ${100 * Math.max(0, Math.min(1, Number(value) || 0))}%`} /></td></tr>
      ))}</tbody></table>}
      {counts.length > 0 && <p class="small dim">{counts.map(([name, value]) => `${number(value)} ${name.replace(/_/g, " ")}`).join(", ")}</p>}
    </>
  );
}

const NAMES: { [role: string]: string } = { system: "system", user: "user", assistant: "model", tool: "tools" };

function Said(props: { turn: Turn }) {
  const { turn } = props;
  const cost = turn.tokens ? `${turn.tokens} tokens, mean log-probability ${number((turn.logprob ?? 0) / turn.tokens, 3)}` : "";
  const text = turn.text && <pre>{turn.text}</pre>;
  return (
    <div class={`turn ${turn.role}`}>
      <div class="small dim"><strong>{NAMES[turn.role] ?? turn.role}</strong> {cost}</div>
      {turn.role === "system" ? <details><summary class="small">instructions and tools</summary>{text}</details> : text}
      {turn.calls.map((call, i) => (
        <div class="call" key={i}>
          <div><span class="dim small">calls</span> <code>{call.name || "?"}</code></div>
          {call.problem ? <p class="problem small">{call.problem}</p> : <table class="small" style="width: auto"><tbody>{Object.entries(call.arguments).map(([name, value]) => <tr key={name}><th scope="row">{name}</th><td style="white-space: pre-wrap">{plain(value)}</td></tr>)}</tbody></table>}
        </div>
      ))}
      {turn.results.map((result, i) => <div class={`call ${result.failed ? "failed" : ""}`} key={i}><span class="dim small">{result.failed ? "an error" : "result"}</span><pre>{result.text}</pre></div>)}
      {!turn.text && !turn.calls.length && !turn.results.length && <p class="dim small">(empty)</p>}
    </div>
  );
}

function plain(value: Json): string {
  return typeof value === "string" ? value : JSON.stringify(value);
}
