import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";

export interface Line { label: string; x: number[]; y: (number | null)[]; low?: (number | null)[]; high?: (number | null)[]; color: string; dash?: boolean }

const WHOLE = Array.from({ length: 12 }, (_, i) => [1, 2, 5].map((x) => x * 10 ** i)).flat();

// uPlot wants one x axis: the union of all, with gaps where a line has no value.
function align(lines: Line[]): uPlot.AlignedData {
  const all = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  const place = new Map(all.map((x, i) => [x, i]));
  const columns: (number | null | undefined)[][] = [];
  for (const line of lines) {
    for (const values of [line.y, line.low, line.high]) {
      if (!values) continue;
      const column: (number | null | undefined)[] = new Array(all.length).fill(undefined);
      line.x.forEach((x, i) => { column[place.get(x)!] = values[i]; });
      columns.push(column);
    }
  }
  return [all, ...columns] as uPlot.AlignedData;
}

export function Chart(props: { lines: Line[]; x: string; y: string; height?: number; log?: boolean }) {
  const box = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const shape = props.lines.map((line) => `${line.label}|${line.color}|${!!line.low}`).join(";") + props.x + props.y;
  useEffect(() => {
    const target = box.current;
    if (!target || props.lines.length === 0) return;
    const style = getComputedStyle(document.documentElement);
    const ink = style.getPropertyValue("--dim").trim();
    const rule = style.getPropertyValue("--rule").trim();
    const series: uPlot.Series[] = [{ label: props.x }];
    const bands: uPlot.Band[] = [];
    for (const line of props.lines) {
      series.push({ label: line.label, stroke: line.color, width: 1.6, spanGaps: true, points: { show: line.x.length < 40, size: 4 }, dash: line.dash ? [5, 4] : undefined });
      if (line.low && line.high) {
        const first = series.length;
        for (const name of ["low", "high"]) series.push({ label: `${line.label} ${name}`, stroke: "transparent", width: 0, spanGaps: true, points: { show: false } });
        bands.push({ series: [first + 1, first], fill: line.color + "30" });
      }
    }
    const whole = !props.log && props.lines.every((line) => line.x.every(Number.isInteger)); // no tick at 1.5 updates
    const axis = { stroke: ink, grid: { stroke: rule, width: 1 }, ticks: { stroke: rule, width: 1 } };
    const made = new uPlot(
      {
        width: Math.max(target.clientWidth, 200), height: props.height ?? 300, series, bands, scales: { x: { time: false, distr: props.log ? 3 : 1 } },
        axes: [{ ...axis, label: props.x, labelSize: 22, ...(whole ? { incrs: WHOLE } : {}) }, { ...axis, size: 64 }],
        legend: { live: true }, cursor: { drag: { x: true, y: false } },
      },
      align(props.lines), target,
    );
    plot.current = made;
    const watch = new ResizeObserver(() => made.setSize({ width: Math.max(target.clientWidth, 200), height: props.height ?? 300 }));
    watch.observe(target);
    return () => { watch.disconnect(); made.destroy(); plot.current = null; };
  }, [shape]);
  useEffect(() => { if (plot.current && props.lines.length) plot.current.setData(align(props.lines)); }, [props.lines]);
  return <div ref={box} class="chart" role="img" aria-label={`${props.y} by ${props.x}: ${props.lines.map((line) => line.label).join(", ")}`} />;
}
