import { useEffect, useMemo, useState } from "preact/hooks";
import { api, exported, type Analysis, type Board, type Decision, type Player, type TreeNode } from "./api";
import { address, Choice, go, number, Panel, Problem, Scroll, Slider, Static, useAnswer } from "./common";

const CELL = 46;

export function Search(_: { control: boolean }) {
  const [players, trouble] = useAnswer(api.players, "players");
  const parts = address().parts;
  const player = parts.get("player") ?? (exported ? players?.[0]?.id : undefined) ?? "connect_four";
  const one = players?.find((found) => found.id === player);
  const names = Object.fromEntries((players ?? []).map((it) => [it.id, it.name.includes(it.game) ? it.name : `${it.name}, ${it.game}`]));
  const choose = <Choice label="agent" value={player} options={players?.map((it) => it.id) ?? [player]} names={names} set={(name) => go("search", { player: name })} />;
  return (
    <>
      <h1>Search</h1>
      <Problem text={trouble} />
      {exported ? (one && <Kept key={player} one={one} choose={choose} />) : one?.episode ? <Episode key={player} one={one} choose={choose} /> : <Game key={player} player={player} one={one} choose={choose} />}
    </>
  );
}

// A game against an agent.
function Game(props: { player: string; one: Player | undefined; choose: preact.JSX.Element }) {
  const { player, one } = props;
  const parts = address().parts;
  const moves = (parts.get("moves") ?? "").split(".").filter(Boolean).map(Number);
  const simulations = Number(parts.get("simulations") ?? one?.simulations ?? 64);
  const side = (parts.get("side") ?? "first") as "first" | "second" | "both";
  const set = (changes: { moves?: number[]; simulations?: number; side?: string }, replace = false) => {
    const now = { moves, simulations: parts.get("simulations") ?? undefined, side, ...changes };
    go("search", { player: player === "connect_four" ? undefined : player, moves: now.moves.join("."), simulations: now.simulations, side: now.side === "first" ? undefined : now.side }, replace);
  };
  const [board, error] = useAnswer(() => api.board({ player, moves, simulations }), [player, moves, simulations]);
  const human = !board || board.over ? false : side === "both" || (board.mover === 0) === (side === "first");
  const fresh = board && board.moves.join() === moves.join();
  const play = (action: number) => set({ moves: [...moves, action] });
  return (
    <>
      <Problem text={error} />
      <div class="bar">
        {props.choose}
        <Choice label="you play" value={side} options={["first", "second", "both"]} set={(name) => set({ side: name })} />
        <button onClick={() => set({ moves: [] })} disabled={!moves.length}>New game</button>
        <button onClick={() => set({ moves: moves.slice(0, side === "both" ? -1 : -2) })} disabled={!moves.length}>Take back</button>
        {board && fresh && !board.over && !human && board.analysis && <button class="next" onClick={() => play(board.analysis!.action)}>Agent plays {board.analysis.moves[0]?.name}</button>}
      </div>
      <div class="columns">
        <Panel title={board ? board.game : "Board"} extra={<span role="status">{board && (outcome(board) || (human ? `Your move${mover(board)}` : `The agent is to move${mover(board)}`))}</span>}>
          {board && <Position board={board} play={human && fresh ? play : null} />}
        </Panel>
        <Panel title="The agent's search" extra={<Value of={board?.analysis} game />}>
          <Slider label="simulations" value={simulations} min={0} max={one?.most ?? 400} step={one?.stride ?? 1} set={(count) => set({ simulations: Math.max(count, one?.least ?? 0) }, true)} />
          <Moves of={board?.analysis} what="move" />
        </Panel>
      </div>
      <Grown of={board?.analysis} />
    </>
  );
}

// The searches of an agent in an environment, along an episode that it plays.
function Episode(props: { one: Player; choose: preact.JSX.Element }) {
  const { one } = props;
  const parts = address().parts;
  const step = Number(parts.get("step") ?? 0), seed = Number(parts.get("seed") ?? 0);
  const simulations = Number(parts.get("simulations") ?? one.simulations);
  const set = (changes: { step?: number; seed?: number; simulations?: number }) => {
    const now = { step, seed, simulations: parts.get("simulations") ?? undefined, ...changes };
    go("search", { player: one.id, step: now.step || undefined, seed: now.seed || undefined, simulations: now.simulations }, true);
  };
  const [seen, error] = useAnswer(() => api.decision({ player: one.id, seed, step, simulations }), [one.id, seed, step, simulations]);
  const [end, setEnd] = useState<{ seed: number; step: number } | null>(null);
  useEffect(() => { if (seen?.over) setEnd({ seed, step: seen.step }); }, [seen]);
  return (
    <>
      <Problem text={error} />
      <div class="bar">
        {props.choose}
        <Slider label="step" value={step} min={0} max={end?.seed === seed ? end.step : (seen?.longest ?? 200)} step={1} set={(x) => set({ step: x })} />
        <Slider label="seed of the episode" value={seed} min={0} max={20} step={1} set={(x) => set({ seed: x, step: 0 })} />
      </div>
      {!seen && !error && <p class="dim" role="status">Loading the agent …</p>}
      {seen && <Decided seen={seen}><Slider label="simulations" value={simulations} min={one.least} max={one.most} step={one.stride} set={(x) => set({ simulations: x })} /></Decided>}
    </>
  );
}

function Decided(props: { seen: Decision; children: preact.ComponentChildren }) {
  const { seen } = props;
  return (
    <>
      <div class="columns">
        <Panel title={seen.game} extra={<span role="status">step {seen.step}, return {number(seen.total, 4)}{seen.over && ` – the episode is over: ${seen.over}`}</span>}>
          {seen.picture && <img class="seen" src={seen.picture} alt={`the environment at step ${seen.step}`} />}
          {seen.vector && <pre>{seen.vector.map((x) => x.toFixed(3)).join("  ")}</pre>}
        </Panel>
        <Panel title="The agent's search" extra={<Value of={seen.analysis ?? undefined} />}>
          {props.children}
          <Moves of={seen.analysis ?? undefined} what="action" />
        </Panel>
      </div>
      <Grown of={seen.analysis ?? undefined} />
    </>
  );
}

// In an exported page: searches of a game that the agent plays against itself, or of its episode.
function Kept(props: { one: Player; choose: preact.JSX.Element }) {
  const { one } = props;
  const [found, error] = useAnswer(() => api.searches(one.id), one.id);
  const parts = address().parts;
  const at = Math.min(Number(parts.get("step") ?? 0), (found?.positions.length ?? 1) - 1);
  const size = Math.min(Number(parts.get("size") ?? (found?.counts.length ?? 1) - 1), (found?.counts.length ?? 1) - 1);
  const set = (step: number, count: number) => go("search", { player: one.id, step: step || undefined, size: count === (found?.counts.length ?? 1) - 1 ? undefined : count }, true);
  if (!found) return <Problem text={error} />;
  const here = found.positions[at], analysis = here.analyses[found.counts[size]];
  const scrub = <Slider label="simulations" value={size} min={0} max={found.counts.length - 1} step={1} set={(x) => set(at, x)} show={(x) => number(found.counts[x])} />;
  return (
    <>
      <Static>This is a page without a server: it holds {one.episode ? "the first steps of an episode" : "the first moves of a game that the agent plays against itself"}, each with searches of {found.counts.join(", ")} simulations. To {one.episode ? "go on" : "play against it"}, run <code>foresight studio</code>.</Static>
      <div class="bar">
        {props.choose}
        <Slider label={one.episode ? "step" : "moves made"} value={at} min={0} max={found.positions.length - 1} step={1} set={(x) => set(x, size)} />
        <button disabled={at === 0} onClick={() => set(at - 1, size)}>◀ Back</button>
        <button disabled={at + 1 >= found.positions.length} onClick={() => set(at + 1, size)}>{one.episode ? "Step" : "Move"} ▶</button>
      </div>
      {"cells" in here ? (
        <>
          <div class="columns">
            <Panel title={here.game} extra={<span role="status">{outcome(here) || `move ${here.moves.length + 1}${mover(here)}`}</span>}><Position board={{ ...here, analysis }} play={null} /></Panel>
            <Panel title="The agent's search" extra={<Value of={analysis} game />}>{scrub}<Moves of={analysis} what="move" /></Panel>
          </div>
          <Grown of={analysis} />
        </>
      ) : <Decided seen={{ ...(here as Decision), analysis: analysis ?? null }}>{scrub}</Decided>}
    </>
  );
}

function outcome(board: Board): string {
  if (!board.over) return "";
  const winner = board.first_score === 1 ? 0 : 1;
  return board.first_score === 0.5 ? "A draw." : `${board.colors[winner] || (winner ? "The second player" : "The first player")} wins.`;
}

function mover(board: Board): string {
  return board.mover !== null && board.colors[board.mover] ? ` (${board.colors[board.mover]})` : "";
}

function Value(props: { of: Analysis | undefined; game?: boolean }) {
  const value = props.of?.value;
  if (value === null || value === undefined) return null;
  const score = Math.round(50 * (1 + Math.max(-1, Math.min(1, value))));
  return <span class="small">{props.game ? `value for the player to move ${number(value, 3)}, expected score ${score}%` : `value ${number(value, 3)}`}</span>;
}

function Moves(props: { of: Analysis | undefined; what: string }) {
  if (!props.of) return null;
  const { moves, action } = props.of;
  const most = Math.max(1, ...moves.map((row) => row.visits ?? 0));
  return (
    <Scroll><table>
      <thead><tr><th>{props.what}</th><th class="n">visits</th><th class="n">prior</th><th class="n">value</th><th /></tr></thead>
      <tbody>{moves.slice(0, 12).map((row) => (
        <tr key={row.action} aria-selected={row.action === action}><td>{row.name}</td><td class="n">{row.visits ?? ""}</td><td class="n">{row.prior === null ? "" : `${(100 * row.prior).toFixed(1)}%`}</td><td class="n">{row.value === null ? "" : row.value.toFixed(3)}</td>
          <td class="bars"><i class="now" style={`width: ${(100 * (row.visits ?? 0)) / most}%`} /></td></tr>
      ))}</tbody>
    </table></Scroll>
  );
}

function Grown(props: { of: Analysis | undefined }) {
  if (!props.of?.tree) return null;
  return <Panel title={`Tree after ${props.of.simulations} simulations`} extra={<span class="small dim">The most visited branches. Click a node to open or close it. N visits, Q value for who moved there, P prior.</span>}><Tree root={props.of.tree} /></Panel>;
}

function Position(props: { board: Board; play: ((action: number) => void) | null }) {
  const { board, play } = props;
  if (!board.cells)
    return <><pre>{board.board}</pre>{play && <div class="bar">{board.legal.map((move) => <button key={move.action} onClick={() => play(move.action)}>{move.name}</button>)}</div>}</>;
  const rows = board.cells.rows, width = rows[0].length, slant = board.cells.slant;
  const best = board.analysis?.action;
  const pass = board.legal.find((move) => move.name === "pass");
  return (
    <>
      <svg viewBox={`0 0 ${(width + (slant * (rows.length - 1)) / 2) * CELL} ${rows.length * CELL}`} style="width: 100%; max-height: 460px" role="group" aria-label={`${board.game} board`}>
        {rows.flatMap((row, r) => row.map((cell, c) => {
          const x = (c + (slant * r) / 2) * CELL, y = r * CELL;
          const open = play !== null && cell.action !== undefined && cell.action !== null;
          const act = () => open && play!(cell.action!);
          const name = `row ${r + 1}, column ${c + 1}: ${cell.stone === null ? "empty" : cell.stone === 0 ? "first player" : "second player"}`;
          return (
            <g key={`${r}-${c}`} class={open ? "cell" : ""} role={open ? "button" : "img"} tabindex={open ? 0 : -1} aria-label={name} onClick={act} onKeyDown={(event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); act(); } }}>
              <rect x={x + 1} y={y + 1} width={CELL - 2} height={CELL - 2} rx="4" fill="var(--soft)" stroke="var(--rule)" />
              {cell.stone !== null && <circle cx={x + CELL / 2} cy={y + CELL / 2} r={CELL * 0.36} fill={cell.stone === 0 ? "var(--bad)" : "var(--accent)"} />}
              {cell.stone === null && cell.action === best && best !== undefined && !(board.cells!.columns && rows[r + 1] && rows[r + 1][c].stone === null) && <circle cx={x + CELL / 2} cy={y + CELL / 2} r={CELL * 0.12} fill="var(--path)" />}
            </g>
          );
        }))}
      </svg>
      {play && pass && <button onClick={() => play(pass.action)}>pass</button>}
      <p class="small dim"><span style="color: var(--bad)">●</span> first player, <span style="color: var(--accent)">●</span> second player, small dot: the agent's choice</p>
    </>
  );
}

interface Placed { node: TreeNode; x: number; y: number; parent: Placed | null; path: string; open: boolean }

function Tree(props: { root: TreeNode }) {
  const [toggled, setToggled] = useState<{ [path: string]: boolean }>({});
  const width = 148, height = 46;
  const placed = useMemo(() => {
    const found: Placed[] = [];
    let leaf = 0;
    const put = (node: TreeNode, depth: number, parent: Placed | null, path: string): Placed => {
      const open = toggled[path] ?? depth < 3;
      const here: Placed = { node, x: depth * width, y: 0, parent, path, open };
      found.push(here);
      const children = open ? node.children.map((child, i) => put(child, depth + 1, here, `${path}.${i}`)) : [];
      here.y = children.length ? (children[0].y + children[children.length - 1].y) / 2 : leaf++ * height;
      return here;
    };
    put(props.root, 0, null, "0");
    return { found, leaves: leaf };
  }, [props.root, toggled]);
  const deepest = Math.max(...placed.found.map((one) => one.x));
  const most = Math.max(props.root.visits, 1);
  return (
    <Scroll>
      <svg width={deepest + width} height={Math.max(placed.leaves, 1) * height + 8} role="group" aria-label="Search tree">
        {placed.found.map((one) => one.parent && <path key={`e${one.path}`} d={`M ${one.parent.x + width - 22} ${one.parent.y + 20} C ${one.x - 6} ${one.parent.y + 20}, ${one.parent.x + width - 6} ${one.y + 20}, ${one.x + 2} ${one.y + 20}`} fill="none" stroke="var(--dim)" stroke-width={0.6 + (5 * one.node.visits) / most} opacity="0.6" />)}
        {placed.found.map((one) => {
          const { node } = one;
          const more = node.children.length > 0;
          const toggle = () => more && setToggled({ ...toggled, [one.path]: !one.open });
          return (
            <g key={one.path} class={more ? "cell" : ""} role="button" tabindex={0} onClick={toggle} onKeyDown={(event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); toggle(); } }}
              aria-label={`${node.action ?? "root"}: ${node.visits} visits, value ${(node.q ?? node.value).toFixed(3)}`} aria-expanded={more ? one.open : undefined}>
              <rect x={one.x + 2} y={one.y + 3} width={width - 24} height={height - 10} rx="5" fill="var(--soft)" stroke={node.terminal ? "var(--path)" : "var(--rule)"} />
              <text x={one.x + 8} y={one.y + 17} font-size="12" font-weight="700" fill="var(--ink)">{node.action ?? "root"}{more && !one.open ? ` +${node.children.length}` : ""}{node.hidden && one.open ? ` (${node.hidden} hidden)` : ""}</text>
              <text x={one.x + 8} y={one.y + 32} font-size="11" fill="var(--dim)">N {node.visits}  {node.q === undefined ? `V ${node.value.toFixed(2)}` : `Q ${node.q.toFixed(2)}  P ${(node.prior ?? 0).toFixed(2)}`}</text>
            </g>
          );
        })}
      </svg>
    </Scroll>
  );
}
