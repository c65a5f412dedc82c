import { createHash } from "node:crypto";
import { readdirSync, readFileSync } from "node:fs";
import { defineConfig } from "vite";

// A test compares this hash with the sources, so that a page that was not rebuilt is noticed without Node.
function sourceHash(): string {
  const files = ["index.html", "package.json", "vite.config.ts", ...readdirSync("src").map((name) => `src/${name}`)].sort();
  const hash = createHash("sha256");
  for (const file of files) hash.update(`${file}\n`).update(readFileSync(file));
  return hash.digest("hex");
}

// The built page is committed and ships with the package: names without hashes, so that a rebuild changes few files.
export default defineConfig({
  base: "./",
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
  server: { proxy: { "/api": "http://127.0.0.1:8765" } },
  plugins: [{
    name: "source-hash",
    generateBundle() { this.emitFile({ type: "asset", fileName: "source.txt", source: sourceHash() + "\n" }); },
  }],
  build: {
    outDir: "../foresight/studio/page",
    emptyOutDir: true,
    assetsInlineLimit: 0,
    modulePreload: false,
    rollupOptions: {
      // One file that is no module, and holds the styles: a browser loads no module for a page of a folder.
      output: { format: "iife", entryFileNames: "app.js", chunkFileNames: "[name].js", assetFileNames: "app[extname]" },
    },
  },
});
