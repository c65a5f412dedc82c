import { useEffect, useState } from "preact/hooks";
import { api, exported, type Loop } from "./api";
import { Chart, type Line } from "./chart";
import { address, Choice, go, number, PALETTE, Panel, Problem, Slider, Static, useAnswer } from "./common";

export function Imagination(_: { control: boolean }) {
  const [models, trouble] = useAnswer(api.models, "models");
  const parts = address().parts;
  const run = parts.get("run") ?? models?.[0]?.id ?? "";
  const [horizon, setHorizon] = useState(15);
  if (!models) return <Problem text={trouble} />;
  if (!models.length)
    return (
      <>
        <h1>Imagination</h1>
        <p>No run here has learned a world model. Train one: <code>foresight train storm --preset CartPole-v1</code>, or from pixels <code>foresight train dreamer --preset KeyDoor-v0</code>.</p>
      </>
    );
  return (
    <>
      <h1>Imagination</h1>
      <div class="bar">
        <Choice label="run" value={run} options={models.map((one) => one.id)} names={Object.fromEntries(models.map((one) => [one.id, `${one.name}: ${one.algorithm} on ${one.env}`]))} set={(name) => go("imagination", { run: name })} />
        {!exported && <Slider label="imagined steps" value={horizon} min={1} max={60} step={1} set={setHorizon} />}
      </div>
      <OpenLoop run={run} horizon={horizon} />
      {exported ? <Static>This is a page without a server: it holds predictions over 15 steps. To play inside the model, run <code>foresight studio</code>.</Static> : <Inside run={run} key={run} />}
    </>
  );
}

function OpenLoop(props: { run: string; horizon: number }) {
  const [asked, setAsked] = useState(props.horizon);
  useEffect(() => { const timer = setTimeout(() => setAsked(props.horizon), 300); return () => clearTimeout(timer); }, [props.horizon]);
  const [loop, error] = useAnswer(() => api.loop(props.run, asked), [props.run, asked]);
  return (
    <Panel title="Prediction without seeing" extra={<span class="small dim">{loop ? `checkpoint at step ${number(loop.step)}; the first ${loop.context} steps are observed, then only actions` : "measuring"}</span>}>
      <Problem text={error} />
      {loop?.images && loop.truth && <Frames loop={loop} />}
      {loop && !loop.images && loop.truth && <Vectors loop={loop} />}
      {loop && <Chart height={220} x="imagined steps" y="error" lines={Object.entries(loop.errors).map(([name, values], i): Line => ({ label: `error of the ${name}`, x: values.map((_, k) => k), y: values, color: PALETTE[i] }))} />}
    </Panel>
  );
}

function Frames(props: { loop: Loop }) {
  const { loop } = props;
  const [sequence, setSequence] = useState(0);
  const rows = ["truth", "prediction", "error"] as const;
  const count = loop.truth!.length;
  return (
    <>
      {count > 1 && <Slider label="sequence" value={sequence} min={0} max={count - 1} step={1} set={setSequence} show={(x) => `${x + 1} of ${count}`} />}
      {rows.map((name) => (
        <div key={name}><div class="small dim">{name}</div>
          <div class="frames">{((loop[name] as string[][])[Math.min(sequence, count - 1)] ?? []).map((source, t) => (
            <figure key={t}><img src={source} alt={`${name}, ${t < loop.context ? "observed" : "imagined"} step ${t}`} class={t < loop.context ? "" : "imagined"} />{t}</figure>
          ))}</div>
        </div>
      ))}
    </>
  );
}

function Vectors(props: { loop: Loop }) {
  const { loop } = props;
  const truth = (loop.truth as number[][][])[0], prediction = (loop.prediction as number[][][])[0];
  const lines: Line[] = [];
  for (let d = 0; d < Math.min(4, truth[0].length); d++) {
    const x = truth.map((_, t) => t);
    lines.push({ label: `${d}: truth`, x, y: truth.map((row) => row[d]), color: PALETTE[d] });
    lines.push({ label: `${d}: prediction`, x, y: prediction.map((row) => row[d]), color: PALETTE[d], dash: true });
  }
  return <Chart height={240} x="step" y="observation" lines={lines} />;
}

function Inside(props: { run: string }) {
  const [seed, setSeed] = useState(0);
  const [keys, setKeys] = useState<(number | "agent")[]>([]);
  const [dream, error] = useAnswer(() => api.dream({ run: props.run, seed, keys }), [props.run, seed, keys]);
  const press = (key: number | "agent") => { if (dream && !dream.over) setKeys((before) => [...before, key]); }; // faster than answers come: none is lost
  useEffect(() => {
    const typed = (event: KeyboardEvent) => {
      if ((event.target as HTMLElement).closest("input, select, button, a") || event.ctrlKey || event.metaKey || event.altKey) return;
      const arrows = ["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown"].indexOf(event.key);
      const wanted = arrows >= 0 ? arrows : /^[0-9]$/.test(event.key) ? Number(event.key) : -1;
      if (event.key === " ") press("agent");
      else if (wanted >= 0 && dream && wanted < dream.actions.length) press(wanted);
      else return;
      event.preventDefault();
    };
    window.addEventListener("keydown", typed);
    return () => window.removeEventListener("keydown", typed);
  });
  const total = dream?.rewards.reduce((sum, reward) => sum + reward, 0) ?? 0;
  return (
    <Panel title="Play inside the model" extra={<span class="small dim">digits and arrows are actions, Space is the agent's own</span>}>
      <Problem text={error} />
      {dream && <div class="dream">
        {dream.image && <img src={dream.image} alt="what the model predicts now" />}
        {dream.vector && <pre>{dream.vector.map((x) => x.toFixed(3)).join("  ")}</pre>}
        <p role="status">step {dream.length}, reward {number(dream.rewards[dream.rewards.length - 1] ?? 0, 3)}, return {number(total, 4)}{dream.value !== null && `, value ${number(dream.value, 3)}`}{dream.over && ` – the episode is over: ${dream.over}`}</p>
        <div class="bar">
          {dream.actions.map((label, i) => <button key={i} disabled={!!dream.over} onClick={() => press(i)}>{label}</button>)}
          <button disabled={!!dream.over} onClick={() => press("agent")}>agent</button>
          <button disabled={!keys.length} onClick={() => setKeys(keys.slice(0, Math.max(0, (dream.over ? dream.length : keys.length) - 1)))}>undo</button>
          <button onClick={() => { setSeed(seed + 1); setKeys([]); }}>new episode</button>
        </div>
      </div>}
    </Panel>
  );
}
