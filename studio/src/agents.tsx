import { useEffect, useState } from "preact/hooks";
import { api, type Conversation as Talk, type Json, type Member, type Turn } from "./api";
import { address, Choice, go, number, Panel, Problem, Scroll, useAnswer } from "./common";

const PAGE = 50;
const COUNTS = ["turns", "calls", "tokens", "members", "malformed"]; // parts that count, and are no share of a reward

export function Agents(_: { control: boolean }) {
  const [found, trouble] = useAnswer(() => Promise.all([api.agents(), api.traces()]), "agents");
  const parts = address().parts;
  if (!found) return <><h1>Agents</h1><Problem text={trouble} /></>;
  const [runs, traces] = found;
  const named = parts.get("run") ?? parts.get("trace");
  const chosen = named ?? runs[0]?.id ?? traces[0]?.id ?? "";
  const names = Object.fromEntries([...runs.map((one) => [one.id, `${one.name}: ${one.algorithm} on ${one.env}`]), ...traces.map((one) => [one.id, `team: ${clip(one.goal)}`])]);
  const isTrace = parts.has("trace") || (named === null && !runs.length);
  if (!chosen)
    return (
      <>
        <h1>Agents</h1>
        <p>No run here has logged a conversation with tools. Make one: <code>foresight data demonstrations --task calculator --prompts 240 --out runs/data/calculator.jsonl</code>,
          then <code>foresight train sft --preset smollm2-calculator</code>. A manager with sub-agents: <code>foresight train pretrain --preset delegation</code>,
          or <code>foresight team smollm2 "Compare the reports." --documents a.txt b.txt</code>.</p>
      </>
    );
  const choose = <Choice label="run or team" value={chosen} options={[...runs, ...traces].map((one) => one.id)} names={names} set={(name) => go("agents", traces.some((one) => one.id === name) ? { trace: name } : { run: name })} />;
  return (
    <>
      <h1>Agents</h1>
      {isTrace ? <Traced key={chosen} name={chosen} choose={choose} /> : <Talks key={chosen} run={chosen} choose={choose} />}
    </>
  );
}

// One trace of `foresight team`.
function Traced(props: { name: string; choose: preact.JSX.Element }) {
  const [found, error] = useAnswer(() => api.trace(props.name), props.name);
  const parts = address().parts;
  const open = (member: string) => go("agents", { trace: props.name, member }, true);
  const posts = found && Array.isArray(found.board) ? found.board : [];
  return (
    <>
      <div class="bar">{props.choose}</div>
      <Problem text={error} />
      {found && <Team root={found.root} chosen={parts.get("member") ?? ""} open={open}
        about={<p class="small">{found.model ? plain(found.model) : "The model"} sampled {number(found.tokens)} of {number(found.budget)} tokens{found.canceled === true && ", and was canceled"}. Delegation is allowed to depth {number(found.depth)}.</p>} />}
      {posts.length > 0 && <Panel title="The board">{posts.map((post, i) => {
        const { by, text } = (post ?? {}) as { by?: Json; text?: Json };
        return <p class="small" key={i}><strong>{Array.isArray(by) ? by.join(".") : ""}</strong> {plain(text ?? "")}</p>;
      })}</Panel>}
    </>
  );
}

// A team: the tree of delegations, and the conversation that is chosen in it by its path.
function Team(props: { root: Member; chosen: string; open: (path: string) => void; about?: preact.JSX.Element }) {
  const all = flat(props.root);
  const node = all.find((one) => one.path.join(".") === props.chosen) ?? props.root;
  return (
    <div class={props.about ? "columns talk" : ""}>
      <Panel title={`A team of ${all.length}`}>
        {props.about}
        <ul class="team"><Delegated node={props.root} chosen={node} open={props.open} most={Math.max(1, ...all.map((one) => one.tokens ?? 0))} /></ul>
      </Panel>
      <div>
        <Panel title={node === props.root ? "Manager" : `Sub-agent ${node.path.join(".")}`} extra={<span class="small dim">{facts(node)}</span>}>
          <pre>{node.goal || "(no goal)"}</pre>
          <p class="small">{node.answer !== undefined ? <>Answer: <code>{node.answer}</code></> : node.ended === false ? "No answer: a limit ended it." : ""}</p>
          <Parts parts={node.parts} />
        </Panel>
        <Panel title={`${node.turns.length} messages`}>{node.turns.map((turn, i) => <Said key={i} turn={turn} />)}</Panel>
      </div>
    </div>
  );
}

function facts(node: Member): string {
  const of = node.budget === undefined ? "" : ` of ${number(node.budget)}`;
  return [node.tokens === undefined ? "" : `${number(node.tokens)}${of} tokens sampled`, (node.read ?? 0) > 0 ? `${number(node.read)} read` : "",
    node.version ? `version ${node.version}` : "", node.tools?.length ? `tools: ${node.tools.join(", ")}` : "", node.documents?.length ? `documents: ${node.documents.join(", ")}` : ""].filter(Boolean).join(" · ");
}

function flat(node: Member): Member[] {
  return [node, ...node.members.flatMap(flat)];
}

function Delegated(props: { node: Member; chosen: Member; open: (path: string) => void; most: number }) {
  const { node } = props;
  const name = node.path.length > 1 ? node.path.join(".") : "manager";
  return (
    <li>
      <button aria-pressed={node === props.chosen} aria-label={`${name}: ${clip(node.goal)}`} onClick={() => props.open(node.path.join("."))}>
        <span class="small dim"><strong>{name}</strong> {number(node.tokens)} tokens{node.ended === false ? ", cut" : ""} {outcome(node)}</span>
        <span>{clip(node.goal)}</span>
        <span class="bars"><i class="now" style={`width: ${(100 * (node.tokens ?? 0)) / props.most}%`} /></span>
      </button>
      {node.members.length > 0 && <ul>{node.members.map((one) => <Delegated key={one.path.join(".")} {...props} node={one} />)}</ul>}
    </li>
  );
}

function outcome(node: Member): preact.JSX.Element | null {
  const value = node.parts?.outcome;
  return typeof value === "number" ? <Reward x={value} /> : null;
}

function Talks(props: { run: string; choose: preact.JSX.Element }) {
  const { run } = props;
  const parts = address().parts;
  const [version, setVersion] = useState(0);
  useEffect(() => {
    const again = () => setVersion((before) => before + 1);
    return api.live((changed) => { if (changed.includes(run)) again(); }, again);
  }, [run]);
  const [search, setSearch] = useState("");
  const [sort, setSort] = useState<"step" | "best" | "worst" | "team">("step");
  const [which, setWhich] = useState<"all" | "held out" | "training">("all");
  const [start, setStart] = useState(0);
  const held_out = which === "all" ? undefined : which === "held out";
  const [found, error] = useAnswer(
    () => (run ? api.samples(run, { search, sort, held_out, start }) : Promise.resolve(undefined)), [run, search, sort, which, start, version],
  );
  const rows = (found?.rows ?? []).filter((row) => row.transcript !== undefined);
  const asked = parts.get("row");
  const index = asked !== null ? Number(asked) : rows[0]?.index;
  const open = (row: number | undefined) => go("agents", { run, row }, true);
  return (
    <>
      <div class="bar">
        {props.choose}
        <Choice label="questions" value={which} options={["all", "held out", "training"]} set={(one) => { setWhich(one); setStart(0); }} />
        <Choice label="order" value={sort} options={["step", "best", "worst", "team"]} names={{ step: "newest", best: "highest reward", worst: "lowest reward", team: "largest team" }} set={(one) => { setSort(one); setStart(0); }} />
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
                <td style="white-space: normal; overflow-wrap: anywhere"><a href={`#/agents?run=${run}&row=${row.index}`} onClick={(event) => { event.preventDefault(); open(row.index); }}>{clip(String(row.prompt ?? ""))}</a>{!!row.members && <span class="dim"> {row.members} {row.members === 1 ? "sub-agent" : "sub-agents"}</span>}{row.held_out === true && <span class="dim"> held out</span>}</td>
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
  const team = found.members.length > 0;
  return (
    <div>
      <Problem text={error} />
      <Panel title={`Step ${number(found.step)}, ${found.held_out ? "held-out question, greedy" : "sampled in training"}`} extra={<span class="small">reward <Reward x={found.reward} /></span>}>
        {versions.length > 1 && <p class="small">The same question by version of the model: {versions.map((one) => (
          <button key={one.index} class="mark" aria-pressed={one.index === props.index} aria-label={`step ${one.step}, reward ${number(one.reward)}`} onClick={() => props.open(one.index)}>{number(one.step)} <Reward x={one.reward} /></button>
        ))}</p>}
        {!team && <Parts parts={found.parts} />}
      </Panel>
      {team ? <Team root={manager(found)} chosen={address().parts.get("member") ?? ""} open={(member) => go("agents", { run: props.run, row: props.index, member }, true)} /> : (
        <Panel title={`${found.turns.length} messages`}>
          {found.turns.map((turn, i) => <Said key={i} turn={turn} />)}
        </Panel>
      )}
    </div>
  );
}

// A conversation of a run as the first of its team.
function manager(row: Talk): Member {
  const tokens = row.turns.reduce((sum, turn) => sum + (turn.tokens ?? 0), 0);
  return { path: [0], goal: String(row.prompt ?? ""), tokens, parts: row.parts as Member["parts"], turns: row.turns, members: row.members };
}

// The parts of a reward, and what was counted.
export function Parts(props: { parts: Json | undefined }) {
  const { parts } = props;
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
  const cost = turn.tokens ? `${turn.tokens} tokens${turn.logprob === undefined ? "" : `, mean log-probability ${number(turn.logprob / turn.tokens, 3)}`}` : "";
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
