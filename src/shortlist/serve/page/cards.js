// The grid of images: cards and keyboard navigation.

const grid = document.getElementById("list");
const template = document.getElementById("card");

export const thumbnail = (item) => `/api/items/${item.id}/thumbnail`;

export const shareLabel = (labels, others) => labels.some((label) => others.includes(label));

// The other columns of the table that listed an item, as texts.
export const fieldTexts = ({ fields }) =>
  Object.entries(fields).filter(([, value]) => value !== null && value !== "").map(([name, value]) => `${name}: ${value}`);

// `rank`: position among the results, or null. `queryLabels`: items that share one of these labels are marked.
// `weak`: whether the score is below the minimum.
export function card(item, { href, rank = null, queryLabels = [], weak = false }) {
  const element = template.content.firstElementChild.cloneNode(true);
  const link = element.querySelector("a");
  const part = (name) => link.querySelector(`.${name}`);
  link.classList.toggle("weak", weak);
  const same = !weak && shareLabel(item.labels, queryLabels);
  link.href = href;
  link.dataset.id = item.id;
  const fields = fieldTexts(item);
  link.title = [item.file, item.label, ...fields].filter(Boolean).join("\n");
  const image = link.querySelector("img");
  image.addEventListener("error", () => part("frame").classList.add("gone"));
  image.src = thumbnail(item);
  part("label").textContent = item.label ?? "";
  part("fields").textContent = fields.join("\n");
  part("file").textContent = item.file.split("/").pop();
  const description = [item.label, item.file, ...fields];
  if (rank !== null) {
    part("rank").textContent = rank;
    part("score").textContent = item.score.toFixed(3);
    part("line").hidden = false;
    part("meter").firstElementChild.style.width = `${100 * Math.max(0, Math.min(1, item.score))}%`;
    description.push(`similarity ${item.score.toFixed(3)}`);
  }
  if (same) {
    link.classList.add("same");
    part("mark").hidden = false;
    part("mark").textContent = "✓";
    description.push("same label");
  }
  if (weak) description.push("not similar enough");
  link.setAttribute("aria-label", `${rank === null ? "" : `${rank}: `}${description.filter(Boolean).join(", ")}`);
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

// Handle arrow keys, Home and End. Returns whether the key was handled.
export function move(key) {
  const links = cards();
  const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns(), ArrowDown: columns() };
  if (!links.length || !(key in steps || key === "Home" || key === "End")) return false;
  const current = links.indexOf(document.activeElement);
  if (current < 0 && (key === "Home" || key === "End" || document.activeElement !== document.body)) return false;
  let next = current + steps[key];
  if (current < 0 || key === "Home") next = 0;
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
  for (const link of cards()) link.tabIndex = link === target ? 0 : -1; // Tab enters the grid at the card that was focused last
});
