import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { api, exported, type Attention as Pass, type Effect } from "./api";
import { address, Choice, go, number, Panel, Problem, Scroll, Slider, Static, useAnswer, useWidth } from "./common";

const TEXT = "When Mary and John went to the store, John gave a drink to";
const BINS = 7; // of the weights of faint links: one path each

export function Attention(_: { control: boolean }) {
  const [readers, trouble] = useAnswer(api.readers, "readers");
  const parts = address().parts;
  const source = parts.get("source") ?? readers?.[0]?.id ?? "";
  const reader = readers?.find((one) => one.id === source);
  const text = parts.get("text") ?? TEXT;
  const view = parts.get("view") ?? "mean";
  const first = reader?.text ? parts.get("first") === "in" : parts.get("first") !== "out"; // see "attention sinks"
  const steps = Number(parts.get("steps") ?? 20), seed = Number(parts.get("seed") ?? 0);
  const images = parts.get("images") === "yes";
  const cuts = exported ? [] : parts.getAll("cut");
  const asked = { source, ...(reader?.text ? { text } : { steps, seed, images }) };
  const [pass, error] = useAnswer(
    () => (reader ? api.attention({ ...asked, view, without_first: !first }) : Promise.resolve(undefined)),
    [asked, view, first, !reader],
  );
  const queries = pass?.queries ?? 0;
  const query = Math.min(Number(parts.get("query") ?? queries - 1), queries - 1);
  const set = (changes: { [name: string]: string | number | string[] | undefined }, replace = false) =>
    go("attention", { source, text: reader?.text ? text : undefined, view: view === "mean" ? undefined : view, first: parts.get("first") ?? undefined, low: parts.get("low") ?? undefined, high: parts.get("high") ?? undefined,
      steps: reader?.text ? undefined : steps, seed: reader?.text ? undefined : seed, images: images ? "yes" : undefined, cut: cuts,
      query: parts.get("query") ?? undefined, ...changes }, replace);
  const toggle = (cut: string) => set({ cut: cuts.includes(cut) ? cuts.filter((one) => one !== cut) : [...cuts, cut] }, true);
  const [effect, failed] = useAnswer(
    () => (reader && pass && cuts.length ? api.change({ ...asked, cuts, query }) : Promise.resolve(undefined)),
    [asked, cuts, query, !pass],
  );
  if (!readers) return <><h1>Attention</h1><Problem text={trouble} /></>;
  const layers = pass?.layers?.length ?? 0;
  const high = Math.min(Number(parts.get("high") ?? layers - 1), layers - 1), low = Math.min(Number(parts.get("low") ?? 0), Math.max(high, 0));
  const heads = pass ? Math.min(...pass.heads) : 0;
  const names = [...(pass?.views ?? ["mean"]), ...Array.from({ length: heads }, (_, i) => String(i))];
  const head = /^\d+$/.test(view) ? `.${view}` : "";
  const linked = !exported && (view === "mean" || view === "max" || head !== ""); // a link of these views is a link of the network
  return (
    <>
      <h1>Attention</h1>
      <div class="bar">
        <Choice label="network" value={source} options={readers.map((one) => one.id)} names={Object.fromEntries(readers.map((one) => [one.id, one.name]))}
          set={(name) => go("attention", { source: name })} />
        <Choice label="heads" value={view} options={names.includes(view) ? names : [...names, view]} set={(name) => set({ view: name === "mean" ? undefined : name })}
          names={Object.fromEntries(names.map((one) => [one, { mean: "mean of all", max: "maximum of all", rollout: "rollout", received: "received" }[one] ?? `head ${one}`]))} />
        <label class="check"><input type="checkbox" checked={first} onChange={() => set({ first: first ? "out" : "in" })} /> with the first token</label>
        {!reader?.text && !exported && <Slider label="steps acted" value={steps} min={1} max={100} step={1} set={(x) => set({ steps: x }, true)} />}
        {!reader?.text && !exported && <Slider label="seed" value={seed} min={0} max={50} step={1} set={(x) => set({ seed: x }, true)} />}
        {reader?.images && !exported && <label class="check"><input type="checkbox" checked={images} onChange={() => set({ images: images ? undefined : "yes", cut: [] })} /> over the image</label>}
      </div>
      {exported && <Static>This is a page without a server: it holds {reader?.read ? <>one text, “{reader.read}”</> : "one episode"}, in every view. To type another text, and to remove heads and links, run <code>foresight studio</code>.</Static>}
      {reader?.text && !exported && <Text text={text} set={(words) => set({ text: words, query: undefined, cut: [] })} />}
      <Problem text={error || failed} />
      {!pass && !error && <p class="dim" role="status">Loading the network and reading …</p>}
      {pass && (
        <>
          <div class="columns">
            <div>
              {pass.heats ? <Heats pass={pass} /> : (
                <>
                  <Panel title={view === "received" ? "What each token receives" : "Tokens across, layers up"} extra={
                    <span class="small dim">{view === "rollout" ? "how much each token is made of each input" : view === "received" ? "the mean weight from the tokens that see it" : linked ? "click a token to see its links, a link to remove it" : "click a token to see its links"}</span>}>
                    {layers > 4 && <div class="bar">
                      <Slider label="from layer" value={low} min={0} max={layers - 1} step={1} set={(x) => set({ low: x || undefined, high: Math.max(x, high) === layers - 1 ? undefined : Math.max(x, high) }, true)} />
                      <Slider label="to layer" value={high} min={0} max={layers - 1} step={1} set={(x) => set({ high: x === layers - 1 ? undefined : x, low: Math.min(x, low) || undefined }, true)} />
                    </div>}
                    <Links pass={pass} query={query} choose={(i) => set({ query: i }, true)} cuts={cuts} head={head} toggle={linked ? toggle : null} low={low} high={high} />
                  </Panel>
                  {view !== "received" && <Panel title={`Where “${shown(pass.tokens[pass.tokens.length - queries + query] ?? "")}” looks`} extra={<span class="small dim">{linked ? "click a cell to remove the link" : ""}</span>}>
                    <Cells pass={pass} query={query} cuts={cuts} head={head} toggle={linked ? toggle : null} low={low} high={high} />
                    {(linked || exported) && view !== "rollout" && <details><summary>The strongest links as a table</summary><Strongest pass={pass} query={query} head={head} cuts={cuts} toggle={linked ? toggle : null} /></details>}
                  </Panel>}
                </>
              )}
            </div>
            <div>
              <Panel title={cuts.length ? "The output without these links" : `After “${shown(pass.tokens[pass.tokens.length - queries + query] ?? "")}”`}
                extra={cuts.length > 0 && <button onClick={() => set({ cut: [] }, true)}>Put all back</button>}>
                <Removed pass={pass} query={query} cuts={cuts} effect={cuts.length ? effect : undefined} toggle={toggle} />
              </Panel>
              {!exported && <Panel title="Heads" extra={<span class="small dim">click a head to remove it</span>}>
                <Heads key={JSON.stringify([asked, query])} pass={pass} ask={(layer) => api.heads({ ...asked, layer, query })} cuts={cuts} toggle={toggle} />
              </Panel>}
            </div>
          </div>
        </>
      )}
    </>
  );
}

// Spaces and line ends are visible, and an empty token has a sign.
export function shown(token: string): string {
  return token.trim() || (token.includes("\n") ? "⏎" : token ? "␣" : "∅");
}

function Text(props: { text: string; set: (text: string) => void }) {
  const [text, setText] = useState(props.text);
  useEffect(() => setText(props.text), [props.text]);
  useEffect(() => {
    if (text === props.text || !text) return;
    const timer = setTimeout(() => props.set(text), 700);
    return () => clearTimeout(timer);
  }, [text]);
  return (
    <form class="bar" onSubmit={(event) => { event.preventDefault(); if (text) props.set(text); }}>
      <label class="wide"><span class="small dim">text that it reads</span>
        <input type="text" aria-label="Text" value={text} onInput={(event) => setText((event.target as HTMLInputElement).value)} /></label>
    </form>
  );
}

function Links(props: {
  pass: Pass; query: number; choose: (query: number) => void; cuts: string[]; head: string; toggle: ((cut: string) => void) | null;
  low: number; high: number;
}) {
  const { pass, query, head, toggle, low } = props;
  const box = useRef<HTMLDivElement>(null);
  const width = useWidth(box);
  const layers = useMemo(() => pass.layers!.slice(low, props.high + 1), [pass, low, props.high]);
  const S = pass.tokens.length, T = pass.queries, F = S - T, L = layers.length;
  const received = pass.view === "received";
  const left = 34, top = 8, label = 78;
  const column = Math.max(15, Math.min(64, (width - left - 12) / S));
  const row = Math.max(15, Math.min(64, 460 / L));
  const x = (token: number) => left + (token + 0.5) * column;
  const y = (level: number) => top + (L - level) * row + 6;
  const height = y(0) + label;
  const strongest = useMemo(() => layers.reduce((most, layer) => layer.reduce((a, b) => Math.max(a, b), most), 1), [layers]);
  const faint = useMemo(() => {
    const paths: string[][] = Array.from({ length: BINS }, () => []);
    if (!received) layers.forEach((layer, l) => layer.forEach((weight, i) => {
      const share = weight / strongest;
      if (share < 0.06) return;
      const q = Math.floor(i / S), k = i % S;
      paths[Math.min(BINS - 1, Math.floor(share * BINS))].push(`M${x(k).toFixed(1)} ${y(l).toFixed(1)}L${x(F + q).toFixed(1)} ${y(l + 1).toFixed(1)}`);
    }));
    return paths.map((path) => path.join(""));
  }, [layers, column, row, strongest]);
  const own: { l: number; k: number; weight: number }[] = [];
  if (!received) layers.forEach((layer, l) => { for (let k = 0; k < S; k++) { const weight = layer[query * S + k]; if (weight / strongest > 0.015) own.push({ l, k, weight }); } });
  return (
    <div class="scroll" ref={box}>
      <svg width={left + S * column + 12} height={height} role="group" aria-label="Attention: tokens across, layers up">
        {layers.map((_, l) => (l % Math.ceil(18 / row) === 0 || l === L - 1) && <text key={l} x={left - 8} y={y(l + 0.5) + 4} text-anchor="end" font-size="11" fill="var(--dim)">{low + l}</text>)}
        {faint.map((path, i) => path && <path key={i} d={path} fill="none" stroke="var(--dim)" stroke-width={1 + (1.5 * i) / BINS} opacity={0.1 + (0.55 * i) / BINS} />)}
        {Array.from({ length: L + 1 }, (_, level) => pass.tokens.map((_, k) => <circle key={`${level}-${k}`} cx={x(k)} cy={y(level)} r={received && level ? 1 + Math.sqrt(layers[level - 1][k] / strongest) * Math.min(row, column) * 0.45 : 1.8} fill={received && level ? "var(--accent)" : "var(--dim)"} opacity={received && level ? 0.75 : 0.6} />))}
        {own.map(({ l, k, weight }) => {
          const cut = `${low + l}${head}:${query},${k}`, gone = props.cuts.includes(cut);
          const share = weight / strongest;
          return (
            <g key={cut} class={toggle ? "cell" : ""} onClick={() => toggle?.(cut)}>
              <line x1={x(k)} y1={y(l)} x2={x(F + query)} y2={y(l + 1)} stroke={gone ? "var(--bad)" : "var(--accent)"} stroke-width={gone ? 2 : 0.8 + 5 * share} stroke-dasharray={gone ? "3 4" : undefined} opacity={gone ? 1 : 0.25 + 0.75 * share} stroke-linecap="round" />
              <line x1={x(k)} y1={y(l)} x2={x(F + query)} y2={y(l + 1)} stroke="transparent" stroke-width="8"><title>{`layer ${low + l}: ${shown(pass.tokens[F + query])} looks at ${shown(pass.tokens[k])} with ${number(weight / pass.units)}`}</title></line>
            </g>
          );
        })}
        {pass.tokens.map((token, k) => {
          const q = k - F, chosen = q === query, can = q >= 0;
          const pick = (i: number) => can && props.choose(Math.max(0, Math.min(T - 1, i)));
          return (
            <g key={k} class={can ? "cell" : ""} role="button" tabindex={chosen ? 0 : -1} aria-pressed={chosen} aria-label={`token ${k}: ${shown(token)}`} data-token={k} onClick={() => pick(q)}
              onKeyDown={(event) => {
                const step = event.key === "ArrowLeft" ? -1 : event.key === "ArrowRight" ? 1 : 0;
                if (!step && event.key !== "Enter" && event.key !== " ") return;
                event.preventDefault();
                pick(query + step);
                (event.currentTarget.parentElement?.querySelector(`[data-token="${Math.max(F, Math.min(S - 1, F + query + step))}"]`) as SVGElement | null)?.focus();
              }}>
              <rect x={x(k) - column / 2} y={y(0) + 3} width={column} height={label - 6} fill="transparent" rx="3" />
              <text transform={`translate(${x(k) + 4} ${y(0) + 14}) rotate(-52)`} text-anchor="end" font-size="12" font-weight={chosen ? 700 : 400} fill={chosen ? "var(--accent)" : "var(--ink)"}>{clip(shown(token), 11)}</text>
            </g>
          );
        })}
      </svg>
    </div>
  );
}

function clip(text: string, most: number): string {
  return text.length > most ? text.slice(0, most - 1) + "…" : text;
}

function Removed(props: { pass: Pass; query: number; cuts: string[]; effect: Effect | undefined; toggle: (cut: string) => void }) {
  const { pass, effect } = props;
  const before = effect?.before ?? pass.outputs[props.query] ?? [];
  const all = [...before, ...(effect?.after ?? [])];
  const names = [...new Set(all.map(([name]) => name))];
  const place = (pairs: [string, number][] | undefined, name: string) => pairs?.find(([one]) => one === name)?.[1];
  return (
    <>
      {props.cuts.length > 0 && <p>{props.cuts.map((cut) => <button key={cut} class="chip" aria-label={`Put back ${cut}`} onClick={() => props.toggle(cut)}>{cut} ×</button>)}</p>}
      {effect && <p role="status">The output changes by <strong>{number(effect.change)}</strong> {pass.unit}{pass.unit === "nats" ? " (KL divergence)" : ""}
        {effect.loss_before !== undefined && <>; loss of the text {number(effect.loss_before, 3)} → {number(effect.loss_after, 3)} nats</>}.</p>}
      {names.length > 0 && (
        <table class="small">
          <thead><tr><th>next</th><th class="n">{effect ? "before" : "probability"}</th>{effect && <th class="n">after</th>}<th /></tr></thead>
          <tbody>{names.map((name) => {
            const old = place(before, name), now = effect ? place(effect.after, name) : undefined;
            return (
              <tr key={name}><td><code>{JSON.stringify(name)}</code></td><td class="n">{old === undefined ? "" : old.toFixed(3)}</td>{effect && <td class="n">{now === undefined ? "" : now.toFixed(3)}</td>}
                <td class="bars"><i style={`width: ${100 * (old ?? 0)}%`} />{effect && <i class="now" style={`width: ${100 * (now ?? 0)}%`} />}</td></tr>
            );
          })}</tbody>
        </table>
      )}
      {!names.length && !effect && !exported && <p class="dim">Remove a head or a link to see how much the output depends on it.</p>}
    </>
  );
}

function Heads(props: { pass: Pass; ask: (layer: number) => Promise<number[]>; cuts: string[]; toggle: (cut: string) => void }) {
  const { pass } = props;
  const [found, setFound] = useState<{ [layer: number]: number[] }>({});
  const [running, setRunning] = useState(false);
  const [error, setError] = useState("");
  const alive = useRef(true);
  useEffect(() => () => { alive.current = false; }, []);
  const measure = async () => {
    setRunning(true);
    try {
      for (let layer = 0; layer < pass.heads.length && alive.current; layer++) {
        const changes = await props.ask(layer);
        if (alive.current) setFound((before) => ({ ...before, [layer]: changes }));
      }
    } catch (problem) { if (alive.current) setError((problem as Error).message); }
    if (alive.current) setRunning(false);
  };
  const L = pass.heads.length, H = Math.max(...pass.heads);
  const cell = Math.max(14, Math.min(30, 360 / H)), row = Math.max(13, Math.min(26, 420 / L));
  const most = Math.max(1e-9, ...Object.values(found).flat());
  const done = Object.keys(found).length;
  return (
    <>
      <Problem text={error} />
      <Scroll>
        <svg width={34 + H * cell + 4} height={L * row + 26} role="group" aria-label="Heads by layer">
          {pass.heads.map((count, l) => (
            <g key={l}>
              {(l % Math.ceil(14 / row) === 0) && <text x={26} y={(L - l - 0.5) * row + 8} text-anchor="end" font-size="11" fill="var(--dim)">{l}</text>}
              {Array.from({ length: count }, (_, h) => {
                const cut = `${l}.${h}`, gone = props.cuts.includes(cut), change = found[l]?.[h];
                const act = () => props.toggle(cut);
                return (
                  <g key={h} class="cell" role="button" tabindex={0} aria-pressed={gone} aria-label={`layer ${l}, head ${h}${change === undefined ? "" : `: changes the output by ${number(change)} ${pass.unit}`}`} onClick={act}
                    onKeyDown={(event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); act(); } }}>
                    <rect x={34 + h * cell + 1} y={(L - l - 1) * row + 3} width={cell - 2} height={row - 2} rx="2" fill="var(--soft)" stroke={gone ? "var(--bad)" : "var(--rule)"} />
                    {change !== undefined && <rect x={34 + h * cell + 1} y={(L - l - 1) * row + 3} width={cell - 2} height={row - 2} rx="2" fill="var(--accent)" opacity={Math.sqrt(change / most)} pointer-events="none" />}
                    {gone && <path d={`M${34 + h * cell + 3} ${(L - l - 1) * row + 5}l${cell - 6} ${row - 6}m0 ${6 - row}l${6 - cell} ${row - 6}`} stroke="var(--bad)" stroke-width="2" fill="none" />}
                    <title>{`layer ${l}, head ${h}${change === undefined ? "" : `: ${number(change)} ${pass.unit}`}`}</title>
                  </g>
                );
              })}
            </g>
          ))}
          {Array.from({ length: H }, (_, h) => (h % Math.ceil(16 / cell) === 0) && <text key={h} x={34 + (h + 0.5) * cell} y={L * row + 18} text-anchor="middle" font-size="11" fill="var(--dim)">{h}</text>)}
        </svg>
      </Scroll>
      <div class="bar">
        <button disabled={running || done === L} onClick={measure}>Measure each head</button>
        <span class="small dim" role="status">{running ? `layer ${done} of ${L}` : done === L ? `most: ${number(most)} ${pass.unit}` : "how much the output changes without it"}</span>
      </div>
    </>
  );
}

function Strongest(props: { pass: Pass; query: number; head: string; cuts: string[]; toggle: ((cut: string) => void) | null }) {
  const { pass, query } = props;
  const S = pass.tokens.length;
  const links = pass.layers!.flatMap((layer, l) => pass.tokens.map((token, k) => ({ l, k, token, weight: layer[query * S + k] })))
    .filter((one) => one.weight > 0).sort((a, b) => b.weight - a.weight).slice(0, 12);
  return (
      <Scroll><table class="small">
        <thead><tr><th class="n">layer</th><th>looks at</th><th class="n">weight</th><th /></tr></thead>
        <tbody>{links.map(({ l, k, token, weight }) => {
          const cut = `${l}${props.head}:${query},${k}`, gone = props.cuts.includes(cut);
          return <tr key={cut}><td class="n">{l}</td><td>{shown(token)} <span class="dim">({k})</span></td><td class="n">{(weight / pass.units).toFixed(4)}</td>
            <td>{props.toggle && <button aria-pressed={gone} aria-label={`${gone ? "Put back" : "Remove"} the link of layer ${l} to token ${k}`} onClick={() => props.toggle!(cut)}>{gone ? "put back" : "remove"}</button>}</td></tr>;
        })}</tbody>
      </table></Scroll>
  );
}

// The weights of one token: layers up, tokens across.
function Cells(props: { pass: Pass; query: number; cuts: string[]; head: string; toggle: ((cut: string) => void) | null; low: number; high: number }) {
  const { pass, query, head, toggle, low, high } = props;
  const box = useRef<HTMLDivElement>(null);
  const width = useWidth(box);
  const S = pass.tokens.length, L = high - low + 1;
  const column = Math.max(9, Math.min(64, (width - 46) / S)), row = Math.max(8, Math.min(26, 340 / L));
  const most = Math.max(1, ...pass.layers!.slice(low, high + 1).flatMap((layer) => layer.slice(query * S, query * S + S)));
  return (
    <div class="scroll" ref={box} tabindex={0}>
      <svg width={34 + S * column + 12} height={L * row + 18} role="img" aria-label="Weights of the chosen token by layer and token">
        {Array.from({ length: L }, (_, i) => {
          const l = low + i, y = (L - i - 1) * row + 2;
          return (
            <g key={l}>
              {(i % Math.ceil(14 / row) === 0) && <text x={26} y={y + row / 2 + 4} text-anchor="end" font-size="11" fill="var(--dim)">{l}</text>}
              {pass.tokens.map((token, k) => {
                const weight = pass.layers![l][query * S + k], cut = `${l}${head}:${query},${k}`, gone = props.cuts.includes(cut);
                return <rect key={k} class={toggle && weight ? "cell" : ""} x={34 + k * column} y={y} width={column - 1} height={row - 1} fill={gone ? "var(--bad)" : weight ? "var(--accent)" : "var(--rule)"} fill-opacity={gone ? 1 : weight ? 0.05 + (0.95 * weight) / most : 0.25} onClick={() => weight && toggle?.(cut)}><title>{`layer ${l}, ${shown(token)}: ${number(weight / pass.units)}`}</title></rect>;
              })}
            </g>
          );
        })}
        {column > 22 && pass.tokens.map((token, k) => <text key={k} x={34 + (k + 0.5) * column} y={L * row + 14} text-anchor="middle" font-size="10" fill="var(--dim)">{clip(shown(token), Math.floor(column / 6))}</text>)}
      </svg>
    </div>
  );
}

function Heats(props: { pass: Pass }) {
  const { pass } = props;
  return (
    <Panel title="Where the network looks, layer by layer">
      <div class="heats">
        <figure><img src={pass.image!} alt="the image" /><figcaption>image</figcaption></figure>
        {pass.heats!.map((heat, l) => {
          const rows = heat.cells.length / heat.columns, most = Math.max(1, ...heat.cells);
          return (
            <figure key={l}>
              <div class="over"><img src={pass.image!} alt="" />
                <svg viewBox={`0 0 ${heat.columns} ${rows}`} preserveAspectRatio="none" role="img" aria-label={`layer ${l}`}>
                  {heat.cells.map((weight, i) => <rect key={i} x={i % heat.columns} y={Math.floor(i / heat.columns)} width="1" height="1" fill="#ffb000" opacity={(0.85 * weight) / most}><title>{number(weight / pass.units)}</title></rect>)}
                </svg></div>
              <figcaption>layer {l}</figcaption>
            </figure>
          );
        })}
      </div>
    </Panel>
  );
}
