// The grid of images: cards, and moving among them by keyboard.

const grid = document.getElementById("list");
const template = document.getElementById("card");

export const thumbnail = (item) => `/api/items/${item.id}/thumbnail`;

// `known`: items of this label are marked as the same; null marks none. `first`: the rank of the first, or null.
export function card(item, { href, rank = null, known = null }) {
  const element = template.content.firstElementChild.cloneNode(true);
  const link = element.querySelector("a");
  const part = (name) => link.querySelector(`.${name}`);
  const same = known !== null && item.label === known;
  link.href = href;
  link.dataset.id = item.id;
  link.title = `${item.file}${item.label === null ? "" : `\n${item.label}`}`;
  const image = link.querySelector("img");
  image.addEventListener("error", () => part("frame").classList.add("gone"));
  image.src = thumbnail(item);
  part("label").textContent = item.label ?? "";
  part("file").textContent = item.file.split("/").pop();
  const said = [item.label, item.file];
  if (rank !== null) {
    part("rank").textContent = rank;
    part("score").textContent = item.score.toFixed(3);
    part("line").hidden = false;
    part("meter").firstElementChild.style.width = `${100 * Math.max(0, Math.min(1, item.score))}%`;
    said.push(`similarity ${item.score.toFixed(3)}`);
  }
  if (same) {
    link.classList.add("same");
    part("mark").hidden = false;
    part("mark").textContent = "✓";
    said.push("same label");
  }
  link.setAttribute("aria-label", `${rank === null ? "" : `${rank}: `}${said.filter(Boolean).join(", ")}`);
  return element;
}

export function show(elements, { append = false } = {}) {
  if (append) grid.append(...elements);
  else grid.replaceChildren(...elements);
  const links = cards();
  if (!links.some((link) => link.tabIndex === 0) && links.length) links[0].tabIndex = 0;
}

export function focusFirst() {
  cards()[0]?.focus({ preventScroll: true });
}

const cards = () => [...grid.querySelectorAll(".card")];
const columns = () => getComputedStyle(grid).gridTemplateColumns.split(" ").length;

// Arrow keys, Home and End. True: the key was for the grid.
export function move(key) {
  const links = cards();
  const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns(), ArrowDown: columns() };
  if (!links.length || !(key in steps || key === "Home" || key === "End")) return false;
  const at = links.indexOf(document.activeElement);
  if (at < 0 && (key === "Home" || key === "End" || document.activeElement !== document.body)) return false;
  let next = at + steps[key];
  if (at < 0 || key === "Home") next = 0;
  if (key === "End") next = links.length - 1;
  if (!(next in links)) return true;
  focus(links[next]);
  return true;
}

function focus(link) {
  link.focus({ preventScroll: true });
  link.scrollIntoView({ block: "nearest" });
}

grid.addEventListener("focusin", ({ target }) => {
  for (const link of cards()) link.tabIndex = link === target ? 0 : -1; // Tab enters the grid once, where one was
});
