import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import { Agents } from "./agents";
import { api, exported } from "./api";
import { Attention } from "./attention";
import { address, Problem, useAnswer } from "./common";
import { Grid } from "./grid";
import { Imagination } from "./imagination";
import { Runs } from "./runs";
import { Search } from "./search";
import { Thoughts } from "./thoughts";
import "./style.css";

const VIEWS: { [name: string]: { title: string; view: (props: { control: boolean }) => preact.JSX.Element } } = {
  runs: { title: "Runs", view: Runs },
  grid: { title: "Grid", view: Grid },
  search: { title: "Search", view: Search },
  imagination: { title: "Imagination", view: Imagination },
  attention: { title: "Attention", view: Attention },
  thoughts: { title: "Thoughts", view: Thoughts },
  agents: { title: "Agents", view: Agents },
};

function App() {
  const [about, error] = useAnswer(api.about, "about");
  const [here, setHere] = useState(address());
  useEffect(() => {
    const changed = () => setHere(address());
    window.addEventListener("hashchange", changed);
    window.addEventListener("popstate", changed);
    return () => { window.removeEventListener("hashchange", changed); window.removeEventListener("popstate", changed); };
  }, []);
  const views = about?.views ?? (exported ? ["runs"] : Object.keys(VIEWS)); // drawn before the server answers
  const name = views.includes(here.view) ? here.view : views[0];
  const View = VIEWS[name].view;
  return (
    <>
      <a class="skip" href={`#/${name}`} onClick={(event) => { event.preventDefault(); document.querySelector("main")?.focus(); }}>To the content</a>
      <nav aria-label="Views">
        <strong>foresight</strong>
        {views.map((one) => <a key={one} href={`#/${one}`} aria-current={one === name ? "page" : undefined}>{VIEWS[one].title}</a>)}
        <small>{about?.version}</small>
      </nav>
      <main tabIndex={-1}><Problem text={error} /><View key={name} control={about?.control ?? false} /></main>
    </>
  );
}

render(<App />, document.getElementById("app")!);
