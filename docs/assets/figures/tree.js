// Chapter 8: a tree search by PUCT, one simulation at a time. `foresight.puct` does what planning/search/mcts.py does with
// PUCT(c_init=c, c_base=inf, normalize="none", first_play="zero"); tests compare their trees. The rules of the game are
// those of the library, as a table of positions (docs/figures.py).
globalThis.foresight = globalThis.foresight || {};

(() => {
  // The prior of the legal moves: all equal, or the corners preferred 20 to 1 (a difference of 3 in the logits).
  const CORNERS = new Set([0, 2, 6, 8]);
  function prior(moves, corners) {
    const weight = moves.map(([action]) => (corners && CORNERS.has(action) ? 1 : Math.exp(corners ? -3 : 0)));
    const sum = weight.reduce((a, b) => a + b, 0);
    return weight.map((x) => Math.fround(x / sum));
  }

  // Q + c P √N / (1 + n), with Q 0 for an untried move.
  function scores(tree, node, c) {
    return node.moves.map(([action, , reward, discount], i) => {
      const child = node.children[i] === undefined ? null : tree[node.children[i]];
      const q = child ? reward + discount * child.value : 0, visits = child ? child.visits : 0;
      const bonus = (Math.sqrt(node.visits) * c * node.prior[i]) / (1 + visits);
      return { action, visits, prior: node.prior[i], q, bonus, score: q + bonus };
    });
  }

  // The tree after some simulations, and the path of each: nodes from the root to the leaf.
  function search(game, corners, c, simulations) {
    const grow = (position, parent, edge) => {
      const moves = game.moves[position];
      return { position, parent, edge, moves, prior: prior(moves, corners), children: [], visits: 1, value: 0 };
    };
    const tree = [grow(0, -1, null)], paths = [];
    for (let n = 0; n < simulations; n++) {
      let at = 0, found = 0;
      const path = [0];
      for (;;) { // down: the move with the highest score, the first of equals
        const node = tree[at], all = scores(tree, node, c).map((one) => one.score);
        const best = all.indexOf(Math.max(...all));
        const over = node.moves[best][3] === 0;
        const fresh = node.children[best] === undefined;
        if (fresh) {
          node.children[best] = tree.length;
          tree.push(grow(node.moves[best][1], at, node.moves[best]));
        } else if (over) tree[node.children[best]].visits += 1;
        at = node.children[best];
        path.push(at);
        if (over || fresh) break;
      }
      for (let node = tree[at]; node.parent >= 0; node = tree[node.parent]) { // up: the mean of the values
        const [, , reward, discount] = node.edge, above = tree[node.parent];
        found = reward + discount * found;
        above.value = Math.fround((above.value * above.visits + found) / (above.visits + 1));
        above.visits += 1;
      }
      paths.push(path);
    }
    return { tree, paths };
  }

  foresight.puct = { search, scores };
  if (typeof document === "undefined") return;

  const MOST = 200, ROW = 30;
  const moveName = (action) => "abc"[action % 3] + (1 + Math.floor(action / 3));

  foresight.figures.tree = (box) => {
    const { element, number, slider, choice, button, fit, play } = foresight.page;
    const options = { game: "win", corners: false, c: 1.25, count: 20 };
    let selected = 0, stop = null, width = 300;
    const svg = element("svg", { role: "group", "aria-label": "Search tree: each box is a move, its width the share of visits" });
    const status = element("p", { class: "figure-status", "aria-live": "polite" });
    const table = element("div", { class: "figure-table" });
    const counter = slider("simulations", options.count, [0, MOST, 1], (x) => { set(x); }, String);
    const set = (x) => { options.count = Math.min(Math.max(x, 0), MOST); counter.set(options.count); draw(); };
    const halt = () => { if (stop) stop(); };
    const run = button("Play", () => {
      if (stop) { stop(); return; }
      if (options.count === MOST) set(0);
      run.textContent = "Stop";
      stop = play(() => { set(options.count + 1); return options.count < MOST; }, 160, () => { stop = null; run.textContent = "Play"; });
    });
    const games = Object.fromEntries(Object.entries(foresight.data.games).map(([name, game]) => [name, game.title]));
    const tray = element("div", { class: "figure-tree" }, svg);
    box.append(
      element("div", { class: "figure-sliders" },
        choice("position", games, (name) => { options.game = name; selected = 0; draw(); }),
        choice("prior", { equal: "all moves equal", corners: "corners 20 to 1" }, (name) => { options.corners = name === "corners"; selected = 0; draw(); }),
        slider("c", options.c, [0, 5, 0.05], (x) => { options.c = x; draw(); }), counter),
      element("div", { class: "figure-bar", role: "group", "aria-label": "Simulations" },
        button("Back", () => { halt(); set(options.count - 1); }), button("Next", () => { halt(); set(options.count + 1); }), run,
        button("Root", () => { selected = 0; draw(); })),
      tray, status, table);

    // The position of a node as a small board; `last` is the move that led to it.
    const board = (cells, last) => element("svg", { class: "figure-board3", viewBox: "0 0 66 66", width: 66, height: 66, role: "img", "aria-label": `Board: ${[0, 3, 6].map((r) => cells.slice(r, r + 3)).join(", ")}` },
      ...[...cells].flatMap((sign, i) => [
        element("rect", { x: (i % 3) * 22 + 0.5, y: Math.floor(i / 3) * 22 + 0.5, width: 21, height: 21, class: i === last ? "figure-last" : "" }),
        sign === "." ? null : element("text", { x: (i % 3) * 22 + 11, y: Math.floor(i / 3) * 22 + 16, "text-anchor": "middle" }, sign),
      ]).filter((one) => one !== null));

    function draw() {
      const game = foresight.data.games[options.game];
      const { tree, paths } = search(game, options.corners, options.c, options.count);
      const latest = new Set(paths.length ? paths[paths.length - 1] : []);
      if (selected >= tree.length) selected = 0;
      const inside = svg.contains(document.activeElement);
      let deepest = 0;
      const boxes = [], children = (node) => Object.values(node.children).filter((one) => one !== undefined);
      const lay = (index, x, room, depth) => {
        const node = tree[index];
        deepest = Math.max(deepest, depth);
        boxes.push({ index, x, room, depth });
        let left = x;
        for (const child of children(node).sort((a, b) => tree[a].edge[0] - tree[b].edge[0])) {
          const share = (room * tree[child].visits) / node.visits;
          lay(child, left, share, depth + 1);
          left += share;
        }
      };
      lay(0, 0, width, 0);
      const shown = boxes.filter((one) => one.room >= 2 || one.index === selected);
      svg.setAttribute("viewBox", `0 0 ${width} ${(deepest + 1) * ROW}`);
      svg.setAttribute("width", width);
      svg.setAttribute("height", (deepest + 1) * ROW);
      svg.replaceChildren(...shown.map(({ index, x, room, depth }) => {
        const node = tree[index];
        const q = node.edge ? node.edge[2] + node.edge[3] * node.value : node.value;
        const label = node.edge ? moveName(node.edge[0]) : `root, ${node.visits} visits`;
        const name = node.edge ? `${label}, depth ${depth}: ${node.visits} visits, value ${number(q)}` : `${label}, value ${number(q)}`;
        const long = `${label} ${node.visits}`, text = depth === 0 ? label : room > 8 * long.length + 4 ? long : room > 20 ? label : "";
        const fill = `color-mix(in srgb, var(${q >= 0 ? "--figure-good" : "--figure-bad"}) ${Math.round(55 * Math.abs(q))}%, var(--figure-paper))`;
        return element("g", {
          class: `figure-cell${latest.has(index) ? " figure-latest" : ""}${index === selected ? " figure-selected" : ""}`, "data-node": index, tabindex: index === selected ? 0 : -1, role: "button", "aria-label": name, "aria-pressed": index === selected,
          click: () => { selected = index; draw(); svg.querySelector(`[data-node="${index}"]`).focus(); }, keydown: (event) => key(event, tree, index, shown),
        },
        element("rect", { x: x + 0.5, y: depth * ROW + 0.5, width: Math.max(room - 1, 1), height: ROW - 3, style: `fill: ${fill}` }),
        element("title", {}, name),
        text ? element("text", { x: x + room / 2, y: depth * ROW + 18, "text-anchor": "middle" }, text) : null);
      }));
      if (inside) svg.querySelector(`[data-node="${selected}"]`).focus();
      if (!paths.length) status.textContent = "Before the first simulation the tree is its root.";
      else {
        const path = paths[paths.length - 1], leaf = tree[path[path.length - 1]];
        const over = leaf.edge[3] === 0;
        status.textContent = `Simulation ${options.count}: ${path.slice(1).map((one) => moveName(tree[one].edge[0])).join(" → ")}, ${over ? (leaf.edge[2] ? "which wins" : "a draw") : "a new leaf of value 0"}.`;
      }
      write(game, tree);
    }

    function key(event, tree, index, shown) {
      const own = shown.find((one) => one.index === index);
      const row = shown.filter((one) => one.depth === own.depth).sort((a, b) => a.x - b.x).map((one) => one.index);
      const below = shown.filter((one) => tree[one.index].parent === index).sort((a, b) => tree[b.index].visits - tree[a.index].visits);
      const next = { ArrowLeft: row[row.indexOf(index) - 1], ArrowRight: row[row.indexOf(index) + 1], ArrowUp: tree[index].parent, ArrowDown: below.length ? below[0].index : undefined }[event.key];
      if (event.key.startsWith("Arrow")) event.preventDefault();
      if (next === undefined || next < 0) return;
      selected = next;
      draw();
    }

    // The moves of the selected node.
    function write(game, tree) {
      const node = tree[selected], cells = game.cells[node.position];
      const path = [];
      for (let at = selected; tree[at].parent >= 0; at = tree[at].parent) path.unshift(moveName(tree[at].edge[0]));
      const title = element("p", {}, element("strong", {}, path.length ? `After ${path.join(", ")}` : "At the root"), node.moves.length ? "" : ": the game is over.");
      const found = scores(tree, node, options.c), best = found.reduce((a, b, i) => (b.score > found[a].score ? i : a), 0);
      const head = ["move", "visits N", "prior P", "value Q", "bonus", "score"];
      const rows = found.map((one, i) => element("tr", { class: i === best ? "figure-best" : "" },
        element("th", { scope: "row" }, moveName(one.action) + (i === best ? " next" : "")),
        ...[String(one.visits), number(one.prior), one.visits ? number(one.q) : "–", number(one.bonus), number(one.score)].map((text) => element("td", {}, text))));
      table.replaceChildren(board(cells, node.edge ? node.edge[0] : -1), element("div", {}, title, node.moves.length ? element("div", { class: "figure-scroll", tabindex: 0, role: "region", "aria-label": "Moves of this position" },
        element("table", {}, element("thead", {}, element("tr", {}, ...head.map((text) => element("th", { scope: "col" }, text)))), element("tbody", {}, ...rows))) : ""));
    }

    fit(tray, (room) => { width = room; draw(); });
  };
})();
