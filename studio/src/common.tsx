import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

export const PALETTE = ["#3366cc", "#d9480f", "#2b8a3e", "#9c36b5", "#c2255c", "#0b7285", "#7f6000", "#5f3dc4"];

export function number(x: unknown, digits = 4): string {
  if (typeof x === "string") return x;
  if (typeof x !== "number") return "";
  if (!Number.isFinite(x)) return String(x);
  if (Number.isInteger(x)) return x.toLocaleString("en-US");
  const size = Math.abs(x);
  return size >= 1e6 || (size < 1e-3 && size > 0) ? x.toExponential(2) : String(Number(x.toPrecision(digits)));
}

export function signed(x: number, digits = 3): string {
  return (x < 0 ? "−" : "") + Math.abs(x).toFixed(digits);
}

export function duration(seconds: number): string {
  if (!(seconds > 0)) return "";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

// Asks again whenever `key` changes, one question at a time: of the keys that came while one was open, only the newest is
// asked, and an answer to an older key is not shown. An answer stays until the next is there.
export function useAnswer<T>(ask: () => Promise<T>, key: unknown): [T | undefined, string] {
  const [found, setFound] = useState<T>();
  const [error, setError] = useState("");
  const next = useRef<(() => Promise<T>) | null>(null);
  const open = useRef(false);
  useEffect(() => {
    next.current = ask;
    if (!open.current) void answerAll();
  }, [JSON.stringify(key)]);
  useEffect(() => () => { next.current = null; }, []);
  async function answerAll() {
    open.current = true;
    while (next.current) {
      const asked = next.current;
      next.current = null;
      try {
        const value = await asked();
        if (!next.current) { setFound(() => value); setError(""); }
      } catch (problem) {
        if (!next.current) setError((problem as Error).message);
      }
    }
    open.current = false;
  }
  return [found, error];
}

// The width of an element, followed as the window changes.
export function useWidth(box: { current: HTMLElement | null }): number {
  const [width, setWidth] = useState(0);
  useEffect(() => {
    if (!box.current) return;
    const watch = new ResizeObserver((seen) => setWidth(seen[0].contentRect.width));
    watch.observe(box.current);
    return () => watch.disconnect();
  }, []);
  return width || 800;
}

// Wide content that scrolls; it takes the focus only where there is something to scroll.
export function Scroll(props: { children: ComponentChildren; class?: string; style?: string }) {
  const box = useRef<HTMLDivElement>(null);
  const width = useWidth(box);
  const [over, setOver] = useState(false);
  useEffect(() => { const it = box.current; if (it) setOver(it.scrollWidth > it.clientWidth + 1 || it.scrollHeight > it.clientHeight + 1); }, [width, props.children]);
  return <div ref={box} class={`scroll ${props.class ?? ""}`} style={props.style} {...(over ? { tabindex: 0 } : {})}>{props.children}</div>;
}

export function Problem(props: { text: string }) {
  return props.text ? <p class="problem" role="alert">{props.text}</p> : null;
}

export function Slider(props: {
  label: string; value: number; min: number; max: number; step: number; set: (x: number) => void; show?: (x: number) => string;
}) {
  return (
    <label class="slider">
      <span>{props.label} <output>{props.show ? props.show(props.value) : number(props.value)}</output></span>
      <input type="range" min={props.min} max={props.max} step={props.step} value={props.value} aria-label={props.label}
        onInput={(event) => props.set(Number((event.target as HTMLInputElement).value))} />
    </label>
  );
}

export function Choice<T extends string>(props: {
  label: string; value: T; options: readonly T[]; set: (x: T) => void; names?: { [key: string]: string };
}) {
  return (
    <label class="choice">
      <span>{props.label}</span>
      <select value={props.value} aria-label={props.label}
        onChange={(event) => props.set((event.target as HTMLSelectElement).value as T)}>
        {props.options.map((one) => <option key={one} value={one}>{props.names?.[one] ?? one}</option>)}
      </select>
    </label>
  );
}

export function Panel(props: { title: string; children: ComponentChildren; extra?: ComponentChildren }) {
  return (
    <section class="panel">
      <header><h2>{props.title}</h2>{props.extra}</header>
      {props.children}
    </section>
  );
}

// What an exported page cannot do, in one sentence.
export function Static(props: { children: ComponentChildren }) {
  return <p class="static small" role="note">{props.children}</p>;
}

// The part of the address behind #: a view, and its state, so that every view can be sent as a link.
export interface Address { view: string; parts: URLSearchParams }

export function address(): Address {
  const [view, question] = location.hash.replace(/^#\/?/, "").split("?");
  return { view: view || "", parts: new URLSearchParams(question ?? "") };
}

export function go(view: string, parts: { [name: string]: string | number | string[] | undefined }, replace = false): void {
  const pairs = new URLSearchParams();
  for (const [name, value] of Object.entries(parts)) {
    if (Array.isArray(value)) for (const one of value) pairs.append(name, one);
    else if (value !== undefined && value !== "") pairs.set(name, String(value));
  }
  const question = pairs.toString();
  const hash = `#/${view}${question ? "?" + question : ""}`;
  if (hash === location.hash) return;
  if (replace) history.replaceState(null, "", hash);
  else history.pushState(null, "", hash);
  window.dispatchEvent(new Event("hashchange"));
}
