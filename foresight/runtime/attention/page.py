"""Attention as one self-contained page, which needs no network and no server."""

from __future__ import annotations

import html as escape
import json
from typing import Any

from foresight.errors import UserError
from foresight.runtime.attention.maps import Maps

UNITS = 1000  # weights are written in thousandths


def html(maps: Maps, view: str | int, query: int, without_first: bool, more: dict[str, Any]) -> str:
    """The page: choose heads, layers and a token; see its links, its weights and what knock-outs changed."""
    keys, queries = len(maps.tokens), maps.weights[0].shape[-2]
    if any(layer.shape[-2:] != (queries, keys) for layer in maps.weights):
        raise UserError("The layers are over different tokens, as in a Swin Transformer. Write a .png or a .json.")
    try:
        rollout = [_thousandths(layer) for layer in maps.view("rollout")]
    except UserError:
        rollout = None
    data = {
        "title": maps.title,
        "tokens": list(maps.tokens),
        "queries": queries,
        "weights": [[_thousandths(head) for head in layer] for layer in maps.weights],
        "rollout": rollout,
        "seen": [(layer.mean(0) > 0).sum(0).tolist() for layer in maps.weights],  # queries with a link to each key
        "view": view,
        "query": range(queries)[query] if -queries <= query < queries else queries - 1,
        "without_first": without_first,
        "output": maps.likeliest(maps.output[-1]) if maps.probabilities else [],
        **more,
    }
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")
    return PAGE.replace("@TITLE@", escape.escape(maps.title)).replace("@DATA@", text)


def _thousandths(weights: Any) -> list[int]:
    found: list[int] = (weights * UNITS).round().int().flatten().tolist()
    return found


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>@TITLE@</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root { color-scheme: light dark; --ink: #222; --paper: #fff; --all: 68,119,170; --chosen: 204,85,0; --faint: #8888 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ddd; --paper: #16181c; --all: 120,170,220; --chosen: 255,150,60 }
}
body { font: 14px/1.45 system-ui, sans-serif; margin: 1.2rem; color: var(--ink); background: var(--paper) }
h1 { font-size: 1.1rem } h2 { font-size: 1rem; margin: 1.2rem 0 .3rem }
label { margin-right: 1.1rem; white-space: nowrap } canvas { max-width: 100%; display: block; cursor: pointer }
table { border-collapse: collapse } td, th { padding: .1rem .7rem .1rem 0; text-align: left; font-weight: normal }
#tip { min-height: 1.4em; color: var(--ink); opacity: .75 }
</style></head><body>
<h1 id="title"></h1>
<p><label>heads <select id="view"></select></label>
<label>from layer <input id="low" type="number" min="0" style="width:4em"></label>
<label>to <input id="high" type="number" min="0" style="width:4em"></label>
<label>weights above <input id="least" type="range" min="0" max="300" value="30"></label>
<label><input id="first" type="checkbox"> without the first token</label>
<label><input id="only" type="checkbox"> links of the chosen token only</label></p>
<p>Click a token to choose it. Left and right arrow: its neighbors.</p>
<canvas id="links"></canvas><p id="tip"></p>
<h2 id="where"></h2><canvas id="cells"></canvas>
<div id="more"></div>
<script type="application/json" id="data">@DATA@</script>
<script>
"use strict";
const D = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id), L = D.weights.length, S = D.tokens.length, T = D.queries, F = S - T;
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
let query = D.query;
$("title").textContent = D.title;
const heads = Math.min(...D.weights.map(x => x.length));
const numbers = Array.from({length: heads}, (_, i) => String(i));
const names = ["mean", "max", ...(D.rollout ? ["rollout"] : []), "received", ...numbers];
for (const name of names) $("view").add(new Option(isNaN(name) ? name : "head " + name, name));
$("view").value = String(D.view); $("low").value = 0; $("high").value = L - 1; $("first").checked = D.without_first;
$("low").max = $("high").max = L - 1;
function layer(l) {
  const view = $("view").value, W = D.weights[l];
  let A;
  if (view === "rollout") A = D.rollout[l].slice();
  else if (!isNaN(view)) A = W[Number(view)].slice();
  else {
    A = new Array(T * S).fill(0);
    for (const h of W) for (let i = 0; i < A.length; i++)
      A[i] = view === "max" ? Math.max(A[i], h[i]) : A[i] + h[i] / W.length;
  }
  if ($("first").checked) for (let q = 0; q < T; q++) {
    let sum = 0; for (let k = 1; k < S; k++) sum += A[q * S + k];
    A[q * S] = 0; for (let k = 1; k < S; k++) A[q * S + k] = sum > 0 ? A[q * S + k] * 1000 / sum : 0;
  }
  return A;
}
function received(A, l) {
  return Array.from({length: S}, (_, k) => {
    let sum = 0; for (let q = 0; q < T; q++) sum += A[q * S + k];
    return sum / Math.max(1, D.seen[l][k]);
  });
}
function surface(canvas, width, height) {
  const r = window.devicePixelRatio || 1;
  canvas.width = width * r; canvas.height = height * r;
  canvas.style.width = width + "px"; canvas.style.height = height + "px";
  const c = canvas.getContext("2d"); c.setTransform(r, 0, 0, r, 0, 0); c.clearRect(0, 0, width, height);
  c.font = "12px system-ui, sans-serif"; return c;
}
const label = t => t.replace(/\\n/g, "⏎").replace(/^ /, "·") || "∅";
function draw() {
  const low = Math.max(0, +$("low").value), high = Math.min(L - 1, +$("high").value), n = Math.max(1, high - low + 1);
  const view = $("view").value, mean = [];
  const left = 44, step = Math.max(26, Math.min(64, (window.innerWidth - 110) / S));
  const row = Math.max(22, Math.min(70, 620 / n)), foot = 84, wide = left + step * S + 20, tall = row * n + foot + 14;
  const c = surface($("links"), wide, tall), x = k => left + step * (k + .5), y = l => 10 + row * (n - (l - low));
  const least = +$("least").value;
  for (let l = low; l <= high; l++) {
    const A = layer(l); mean.push(A);
    for (let q = 0; q < T; q++) {
      if ($("only").checked && q !== query) continue;
      for (let k = 0; k < S; k++) {
        const w = A[q * S + k]; if (w <= least) continue;
        c.strokeStyle = `rgba(${css(q === query ? "--chosen" : "--all")},${w / 1000 * (q === query ? 1 : .6)})`;
        c.lineWidth = q === query ? 2.2 : 1.3;
        c.beginPath(); c.moveTo(x(k), y(l)); c.lineTo(x(F + q), y(l + 1)); c.stroke();
      }
    }
  }
  c.fillStyle = css("--ink");
  for (let l = low; l <= high + 1; l++) {
    for (let k = 0; k < S; k++) { c.beginPath(); c.arc(x(k), y(l), 2, 0, 7); c.fill(); }
    if (l <= high && (n < 16 || (l - low) % 5 === 0)) c.fillText("layer " + l, 0, y(l) - row / 2 + 4);
  }
  tokens(c, x, y(low) + 14);
  const h = Math.max(10, Math.min(20, 420 / n)), cells = surface($("cells"), wide, h * n + foot);
  mean.forEach((A, i) => {
    const r = view === "received" ? received(A, low + i) : A.slice(query * S, query * S + S);
    r.forEach((w, k) => { cells.fillStyle = `rgba(${css("--chosen")},${Math.min(1, w / 1000)})`;
      cells.fillRect(left + step * k, h * (n - 1 - i), step - 1, h - 1); });
    cells.fillStyle = css("--ink"); if (n < 16 || i % 5 === 0) cells.fillText(String(low + i), 20, h * (n - i) - 3);
  });
  tokens(cells, x, h * n + 14);
  $("where").textContent = view === "received" ? "What each token receives on average, by layer"
    : `Where “${D.tokens[F + query]}” looks, by layer`;
  $("links").onclick = $("cells").onclick = e => choose(Math.floor((e.offsetX - left) / step) - F);
  $("links").onmousemove = e => {
    const k = Math.floor((e.offsetX - left) / step), l = high - Math.floor((e.offsetY - 10) / row);
    if (k < 0 || k >= S || l < low || l > high) return;
    const w = (mean[l - low][query * S + k] / 1000).toFixed(3);
    $("tip").textContent = `layer ${l}: “${D.tokens[F + query]}” gives “${D.tokens[k]}” ${w}`;
  };
}
function tokens(c, x, y) {
  for (let k = 0; k < S; k++) {
    c.save(); c.translate(x(k) + 4, y); c.rotate(-Math.PI / 3); c.textAlign = "right";
    c.fillStyle = k === F + query ? `rgb(${css("--chosen")})` : css("--ink");
    c.fillText(label(D.tokens[k]).slice(0, 14), 0, 0); c.restore();
  }
}
function choose(q) { if (q >= 0 && q < T) { query = q; draw(); } }
onkeydown = e => { if (e.target.tagName !== "INPUT" && e.target.tagName !== "SELECT")
  choose(query + (e.key === "ArrowRight") - (e.key === "ArrowLeft")); };
for (const id of ["view", "low", "high", "least", "first", "only"]) $(id).oninput = draw;
function section(title, rows) {
  const h = document.createElement("h2"), t = document.createElement("table"); h.textContent = title;
  for (const cells of rows) { const r = t.insertRow(); for (const cell of cells) r.insertCell().textContent = cell; }
  $("more").append(h, t);
}
const p = list => list.map(([name, x]) => `${label(name)} ${x.toFixed(3)}`).join(",  ");
if (D.output.length) section("Likeliest next", [[p(D.output)]]);
for (const k of D.knock_outs || []) {
  const loss = k.loss_before === undefined ? [] : [["loss in nats", `${k.loss_before} → ${k.loss_after}`]];
  section(`Without ${k.links}`, [["change of the output", k.change.toFixed(4)],
    ...(k.before ? [["before", p(k.before)], ["after", p(k.after)]] : []), ...loss]);
}
if (D.each_head) section("Change of the output without each head (rows: layers, from the last; columns: heads)",
  D.each_head.map((row, l) => ["layer " + l, ...row.map(v => v.toFixed(3))]).reverse());
onresize = draw; draw();
</script></body></html>
"""
