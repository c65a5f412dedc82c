// What the server answers. In an exported page the same documents lie beside it as files.

export type Json = null | boolean | number | string | Json[] | { [key: string]: Json };
export interface About { version: string; control: boolean; folders: string[]; views: string[]; exported?: boolean }
export interface Measured { metric: string; mean: number; std: number; n: number }
export interface Row {
  id: string; name: string; algorithm: string; kind: string; env: string; preset: string | null; seed: number;
  step: number; steps: number | null; unit: string; seconds: number; metric: string | null; value: number | string | null;
  evaluation: Measured | null; baseline: Measured | null; state: string; changed: number;
  unhealthy: string[]; checkpoints: number; pictures: number; videos: number;
}
export interface Detail extends Row {
  config: { [key: string]: Json }; summary: { [key: string]: Json }; metrics: string[]; rows: number;
  warnings: string[]; media: string[]; samples: boolean; saved: string[]; best: number | null; resume: string;
}
export interface Curve { run: string; metric: string; rows: number; x: number[]; low: number[]; high: number[]; last: number[] }
export interface Band { label: string; runs: number; steps: number[]; middle: number[]; low: number[]; high: number[] }
export interface Curves { curves: Curve[]; missing: string[]; bands: Band[] }
export interface Sample { step: number; index: number; held_out?: boolean; transcript?: number; members?: number; prompt?: string; completion?: string; reward?: number; [key: string]: Json | undefined }
export interface Samples { total: number; steps: number[]; held_out_steps: number[]; rows: Sample[] }
export interface GridRequest {
  picture: string[]; method: string; step: number; gamma: number; slip: number; step_reward: number; goal_reward: number;
  trap_reward: number; evaluation: string; evaluation_sweeps: number; alpha: number; epsilon: number; seed: number;
}
export type Outcome = [number, number, number, number];
export interface GridUpdate {
  action: number; turn: number; before: number; after: number; target: number; reward?: number; discount?: number; next?: number | null; next_action?: number;
}
export interface GridState {
  method: string; rows: number; columns: number; actions: string[]; unit: string; step: number; done: boolean; sweep: string;
  values: (number | null)[]; before: (number | null)[]; q: (number[] | null)[]; policy: (number[] | null)[];
  followed: (number | null)[]; model: (Outcome[][] | null)[]; metrics: { [name: string]: number }; path: number[]; updates: (GridUpdate[] | null)[];
}
export interface GridChoices {
  request: GridRequest; methods: { name: string; unit: string }[]; most_steps: number;
  layouts: { [name: string]: { picture: string[]; [option: string]: Json } };
  recorded?: { [method: string]: number[] }; // steps that an exported page holds
}
export interface Player { id: string; name: string; game: string; simulations: number; least: number; most: number; stride: number; episode?: boolean }
export interface TreeNode {
  action?: string; prior?: number; visits: number; value: number; q?: number; terminal?: boolean; hidden: number;
  children: TreeNode[];
}
export interface MoveRow { action: number; name: string; visits: number | null; prior: number | null; value: number | null }
export interface Board {
  game: string; moves: number[]; board: string; legal: { action: number; name: string }[]; mover: number | null;
  cells: { rows: { stone: number | null; action?: number | null }[][]; slant: number; columns: boolean } | null;
  colors: string[]; over: boolean; first_score: number | null; analysis?: Analysis;
}
export interface Analysis { action: number; simulations: number; value: number | null; moves: MoveRow[]; tree: TreeNode | null }
export interface Decision {
  game: string; step: number; longest: number; over: string | null; picture: string | null; vector: number[] | null; total: number;
  analysis: Analysis | null;
}
export interface Recorded { counts: number[]; positions: ((Board | Decision) & { analyses: { [count: string]: Analysis } })[] }
export interface Model { id: string; name: string; algorithm: string; env: string; state: string }
export interface Loop {
  run: string; step: number; context: number; images: boolean; errors: { [name: string]: (number | null)[] };
  truth?: string[][] | number[][][]; prediction?: string[][] | number[][][]; error?: string[][];
  series: { [name: string]: number[][] };
}
export interface Dream {
  run: string; actions: string[]; image: string | null; vector: number[] | null; rewards: number[]; value: number | null;
  over: string | null; length: number;
}

export interface Reader { id: string; name: string; text: boolean; images: boolean; read?: string } // what an exported page has read
export interface Attention {
  title: string; tokens: string[]; queries: number; heads: number[]; views: string[]; view: string; units: number; unit: string;
  outputs: [string, number][][]; layers?: number[][]; image?: string; heats?: { columns: number; cells: number[] }[];
}
export interface Effect {
  change: number; before?: [string, number][]; after?: [string, number][]; loss_before?: number; loss_after?: number;
}
export interface Report { id: string; name: string; task: string; model: string; methods: string[] }
export interface ThinkRow {
  method: string; budget: number; accuracy: number; standard_error: number; any?: number; mean?: number; sampled_tokens: number;
  prompt_tokens: number; verifier_calls: number; seconds: number; options?: { [name: string]: Json };
}
export interface Thinking {
  task: string; model: string; verifier: string; questions: number; metric: string; rows: ThinkRow[];
  examples: { question: string; answer: string; results: { method: string; budget: number; reward: number }[] }[];
}
export interface Thought { text: string; parents: number[]; kind: string; score: number | null; kept: boolean; chosen: boolean }
export interface ThoughtResult {
  method: string; budget: number; text: string; reward: number; hidden: number;
  votes: { text: string; key: string; score: number; reward: number }[];
  charge: { [name: string]: number }; tree: { question: string; nodes: Thought[] };
}
export interface Turn {
  role: string; text: string; tokens?: number; logprob?: number; results: { text: string; failed: boolean }[];
  calls: { name: string; arguments: { [name: string]: Json }; problem: string }[];
}
export interface Member {
  path: number[]; goal: string; tokens?: number; read?: number; budget?: number; ended?: boolean; answer?: string; version?: string;
  parts?: { [name: string]: Json }; tools?: string[]; documents?: string[]; turns: Turn[]; members: Member[];
}
export interface TraceName { id: string; name: string; goal: string; model: string }
export interface Trace {
  goal: Json; model: Json; depth: Json; budget: Json; tokens: Json; canceled: Json; board: Json; root: Member;
}
export type Conversation = Sample & {
  turns: Turn[]; members: Member[]; versions: { index: number; step: number; reward: number; held_out: boolean | null }[];
};

export const exported = document.documentElement.dataset.exported === "yes";

async function answer<T>(response: Response): Promise<T> {
  const body = await response.json().catch(() => ({ error: `The server answered ${response.status}.` }));
  if (!response.ok) throw new Error(body.error ?? `The server answered ${response.status}.`);
  return body as T;
}

function query(parts: { [name: string]: string | number | boolean | string[] | undefined }): string {
  const pairs = new URLSearchParams();
  for (const [name, value] of Object.entries(parts)) {
    if (Array.isArray(value)) for (const one of value) pairs.append(name, one);
    else if (value !== undefined && value !== "") pairs.append(name, String(value));
  }
  return pairs.toString();
}

// In an exported page each document is a script that calls `foresight`: a page of a folder may load no JSON.
const documents: { [path: string]: unknown } = {};
const loading: { [path: string]: Promise<unknown> } = {};
if (exported) Object.assign(window, { foresight: (path: string, document: unknown) => { documents[path] = document; } });

function stored(path: string): Promise<unknown> {
  return (loading[path] ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = `data/${path}.js`;
    script.onload = () => resolve(documents[path]);
    script.onerror = () => reject(new Error("This is not in the exported page."));
    document.head.append(script);
  }));
}

async function get<T>(path: string, parts = {}): Promise<T> {
  if (exported) return (await stored(path)) as T;
  const question = query(parts);
  return answer<T>(await fetch(`api/${path}${question ? "?" + question : ""}`));
}

async function post<T>(path: string, document: object): Promise<T> {
  const headers = { "Content-Type": "application/json" };
  return answer<T>(await fetch(`api/${path}`, { method: "POST", headers, body: JSON.stringify(document) }));
}

export const api = {
  about: () => get<About>("about"),
  runs: () => get<Row[]>("runs"),
  detail: (run: string) => get<Detail>(`runs/${run}`),
  curves: async (runs: string[], metric: string, x: string): Promise<Curves> => {
    if (!exported) return get<Curves>("curves", { run: runs, metric, x });
    const curves: Curve[] = [];
    const missing: string[] = [];
    for (const run of runs) {
      const all = await get<{ [key: string]: Curve }>(`curves/${run}`);
      const one = all[`${metric}/${x}`];
      if (one) curves.push(one);
      else missing.push(run);
    }
    const all = await get<{ runs: string[]; metrics: { [name: string]: Band } }[]>("bands");
    const whole = all.filter((one) => x === "step" && one.metrics[metric] && one.runs.every((run) => runs.includes(run)));
    return { curves, missing, bands: whole.map((one) => one.metrics[metric]) };
  },
  samples: async (run: string, parts: { search?: string; sort?: string; step?: number; held_out?: boolean; start?: number }): Promise<Samples> => {
    if (!exported) return get<Samples>(`runs/${run}/samples`, parts);
    const all = await get<Samples>(`samples/${run}`);
    let rows = all.rows;
    if (parts.step !== undefined) rows = rows.filter((row) => row.step === parts.step);
    if (parts.held_out !== undefined) rows = rows.filter((row) => !!row.held_out === parts.held_out);
    const search = parts.search?.toLowerCase();
    if (search) rows = rows.filter((row) => JSON.stringify(row).toLowerCase().includes(search));
    const sign = parts.sort === "best" ? -1 : 1;
    if (parts.sort === "team") rows = [...rows].sort((a, b) => (b.members ?? 0) - (a.members ?? 0));
    else if (parts.sort !== "step") {
      // Unscored answers, whose reward is the text "NaN" or nothing, are the last in both orders, as on the server.
      const score = (row: Sample) => (typeof (row.reward as unknown) === "number" ? sign * row.reward! : Infinity);
      rows = [...rows].sort((a, b) => (score(a) === score(b) ? 0 : score(a) - score(b)));
    }
    return { ...all, total: rows.length, rows: rows.slice(parts.start ?? 0, (parts.start ?? 0) + 50) };
  },
  file: (run: string, name: string) =>
    (exported ? `data/files/${run}/` : `api/runs/${run}/file/`) + name.split("/").map(encodeURIComponent).join("/"),
  differences: async (runs: string[]): Promise<{ name: string; values: Json[] }[]> => {
    if (!exported) return get("differences", { run: runs });
    const all = await get<{ [run: string]: { [name: string]: Json } }>("settings");
    const rows = [...new Set(runs.flatMap((run) => Object.keys(all[run])))].map((name) => ({ name, values: runs.map((run) => all[run][name] ?? null) }));
    return rows.filter((row) => row.values.some((value) => JSON.stringify(value) !== JSON.stringify(row.values[0])));
  },
  stop: (run: string) => post<object>(`runs/${run}/stop`, {}),
  resume: (run: string) => post<object>(`runs/${run}/resume`, {}),
  grids: () => get<GridChoices>("grids"),
  grid: async (request: GridRequest): Promise<GridState> => {
    if (!exported) return post<GridState>("grid", request);
    const { model, steps } = await get<{ model: GridState["model"]; steps: { [step: string]: GridState } }>(`grid/${request.method}`);
    const last = Object.keys(steps).map(Number).reduce((a, b) => (b <= request.step ? Math.max(a, b) : a), 0);
    return { ...steps[last], model };
  },
  players: () => get<Player[]>("players"),
  board: (document: object) => post<Board>("board", document),
  decision: (document: object) => post<Decision>("decision", document),
  searches: (player: string) => get<Recorded>(`search/${player}`), // of an exported page
  models: () => get<Model[]>("models"),
  loop: (run: string, horizon: number) => get<Loop>(`models/${run}`, { horizon }),
  dream: (document: object) => post<Dream>("dream", document),
  readers: () => get<Reader[]>("readers"),
  attention: async (document: { source: string; view: string; without_first: boolean }): Promise<Attention> => {
    if (!exported) return post<Attention>("attention", document);
    const all = await get<{ pass: Attention; views: { [name: string]: Partial<Attention> } }>(`attention/${document.source}`);
    return { ...all.pass, ...all.views[`${document.view}/${Number(document.without_first)}`] };
  },
  change: (document: object) => post<Effect>("attention/change", document),
  heads: (document: object) => post<number[]>("attention/heads", document),
  reports: () => get<Report[]>("thoughts"),
  report: (name: string) => get<Thinking>(`thoughts/${name}`),
  thought: async (name: string, question: number, method: string, budget: number): Promise<ThoughtResult> => {
    if (!exported) return get<ThoughtResult>(`thoughts/${name}/${question}`, { method, budget });
    const all = await get<ThoughtResult[][]>(`thoughts/${name}.results`);
    return all[question].find((one) => one.method === method && one.budget === budget)!;
  },
  agents: () => get<Model[]>("agents"),
  traces: () => get<TraceName[]>("traces"),
  trace: (name: string) => get<Trace>(`traces/${name}`),
  conversation: async (run: string, index: number): Promise<Conversation> => {
    if (!exported) return get<Conversation>(`runs/${run}/conversation/${index}`);
    return (await get<{ [index: string]: Conversation }>(`conversations/${run}`))[String(index)];
  },
  // Calls `changed` with the ids of runs that changed or are gone, and the new rows of the table; and `missed` whenever a
  // connection begins, also the first: what was asked for before may have changed since. A hidden page holds no
  // connection: browsers open six to a server.
  live: (changed: (runs: string[], rows: Row[], gone: string[]) => void, missed: () => void): (() => void) => {
    if (exported) return () => undefined;
    let source: EventSource | undefined;
    const follow = () => {
      source?.close();
      if (document.hidden) return;
      source = new EventSource("api/live");
      source.addEventListener("ready", missed);
      source.addEventListener("changed", (event) => {
        const news = JSON.parse((event as MessageEvent).data);
        changed([...news.changed, ...news.gone], news.rows, news.gone);
      });
    };
    follow();
    document.addEventListener("visibilitychange", follow);
    return () => { document.removeEventListener("visibilitychange", follow); source?.close(); };
  },
};
