// Equations are marked by pymdownx.arithmatex as \(...\) and \[...\]; KaTeX, beside this file, draws them.
document.addEventListener("DOMContentLoaded", () => {
  for (const element of document.querySelectorAll(".arithmatex")) {
    const text = element.textContent.trim();
    katex.render(text.slice(2, -2), element, { displayMode: text.startsWith("\\["), throwOnError: false });
  }
});
