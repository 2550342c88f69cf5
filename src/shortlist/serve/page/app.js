// The page: what is shown follows from the address (?item, ?upload, ?k, ?label), so that Back works.

import { get, upload } from "./api.js";
import * as cards from "./cards.js";
import { onImage } from "./given.js";
import { busy, empty, fail, say, sent, status } from "./said.js";

const PAGE = 60; // items of the gallery at a time
const MOST = 100; // results that are asked for at once: fewer are shown by hiding, without asking again
const part = (id) => document.getElementById(id);
const count = (number, what) => `${number.toLocaleString("en")} ${what}${number === 1 ? "" : "s"}`;

let gallery = null;
let early = null; // an image that was given before the gallery was known
let labels = new Map(); // label -> number of images
let work = new AbortController(); // of what is under way; a new search ends it
let browsed = { label: null, items: [], more: true }; // what of the gallery is loaded
const uploads = new Map(); // key -> {file, url}: images that were searched with since the page was loaded
const found = new Map(); // question -> answer

history.scrollRestoration = "manual";

// ---------------------------------------------------------------- the address

function asked() {
  const address = new URLSearchParams(location.search);
  const number = (name) => (/^\d+$/.test(address.get(name) ?? "") ? Number(address.get(name)) : null);
  const k = Math.min(MOST, Math.max(1, number("k") ?? 20));
  return { item: number("item"), upload: number("upload"), k, label: address.get("label") || null };
}

function address(change) {
  const { item, upload: key, k, label } = { ...asked(), ...change };
  const given = Object.entries({ item, upload: key, k: k === 20 ? null : k, label });
  const query = new URLSearchParams(given.filter(([, value]) => value !== null)).toString();
  return query ? `/?${query}` : "/";
}

function go(change, { replace = false } = {}) {
  history.replaceState({ ...history.state, scroll: scrollY }, "");
  const depth = (history.state?.depth ?? 0) + (replace ? 0 : 1);
  history[replace ? "replaceState" : "pushState"]({ depth, scroll: replace ? scrollY : 0 }, "", address(change));
  return render();
}

function back() {
  if (history.state?.depth) history.back();
  else go({ item: null, upload: null });
}

// ---------------------------------------------------------------- what is shown

async function render({ focus = true } = {}) {
  if (!gallery) return; // as soon as it is known, the address is shown
  const question = asked();
  work.abort();
  work = new AbortController();
  const { signal } = work;
  say("");
  showControls(question);
  try {
    const shown = await (question.item !== null || question.upload !== null ? results : browse)(question, signal);
    if (shown && focus && isSearch(question)) cards.focusFirst();
    scrollTo(0, history.state?.scroll ?? 0);
  } catch (error) {
    if (error.name !== "AbortError") fail(error.message);
  } finally {
    if (work.signal === signal) busy(false);
  }
}

const isSearch = ({ item, upload: key }) => item !== null || key !== null;

async function results(question, signal) {
  if (question.upload !== null && !uploads.has(question.upload)) {
    await go({ upload: null }, { replace: true });
    fail("That image is not here any more, as uploads are not stored. Please give it again.");
    return false;
  }
  busy("Searching …");
  const answer = await ask(question, signal);
  const query = answer.query;
  const hits = answer.results.slice(0, question.k);
  const marked = query?.label != null && hits.every((hit) => hit.label !== null) ? query.label : null;
  showQuery(question, query);
  showVerdict(hits, marked);
  const links = hits.map((hit, index) =>
    cards.card(hit, { href: address({ item: hit.id, upload: null }), rank: index + 1, known: marked }));
  cards.show(links);
  part("more").hidden = true;
  part("heading").textContent = "Most similar";
  empty(hits.length ? "" : "Nothing was found.");
  status(`${count(hits.length, "result")}${question.label === null ? "" : ` with the label ${question.label}`}`);
  document.title = `${query?.label ?? query?.file ?? uploads.get(question.upload).file.name} · shortlist`;
  return true;
}

// Of an item by its id; of an upload, which is sent again only when the label is another.
async function ask({ item, upload: key, label }, signal) {
  const question = JSON.stringify([item, key, label]);
  if (!found.has(question)) {
    const k = Math.min(MOST, gallery.limits.results);
    const answer = item !== null
      ? await get(`/api/items/${item}/similar`, { k, label }, signal)
      : await upload(uploads.get(key).file, { k, label }, sent, signal);
    if (found.size >= 50) found.delete(found.keys().next().value);
    found.set(question, answer);
  }
  return found.get(question);
}

async function browse({ label }, signal) {
  part("query").hidden = true;
  part("welcome").hidden = false;
  part("heading").textContent = label === null ? "All images" : label;
  document.title = `${gallery.name} · shortlist`;
  if (browsed.label !== label || !browsed.items.length) browsed = { label, items: [], more: true };
  cards.show(browsed.items.map(browseCard));
  if (!browsed.items.length) await loadMore(signal);
  else afterBrowsing();
  return true;
}

const browseCard = (item) => cards.card(item, { href: address({ item: item.id, upload: null }) });

async function loadMore(signal = work.signal) {
  const into = browsed;
  if (!into.more || into.loading) return;
  into.loading = true;
  try {
    if (!into.items.length) busy("Loading …");
    const answer = await get("/api/items", { label: into.label, offset: into.items.length, limit: PAGE }, signal);
    into.items.push(...answer.items);
    into.more = answer.more;
    if (into === browsed && !isSearch(asked())) cards.show(answer.items.map(browseCard), { append: true });
  } finally {
    into.loading = false;
  }
  if (into === browsed && !isSearch(asked())) afterBrowsing();
}

function afterBrowsing() {
  part("more").hidden = !browsed.more;
  empty(browsed.items.length ? "" : "There are no images here.");
  const all = browsed.label === null ? gallery.images : labels.get(browsed.label) ?? browsed.items.length;
  status(browsed.more ? `${browsed.items.length.toLocaleString("en")} of ${count(all, "image")}` : count(all, "image"));
}

function showQuery({ upload: key }, query) {
  const image = part("query-image");
  const sent = uploads.get(key);
  part("query").hidden = false;
  part("welcome").hidden = true;
  part("query-kind").textContent = query ? "An image of the gallery" : "Your image";
  part("query-name").textContent = query ? query.file : sent.file.name || "Pasted image";
  part("query-label").hidden = query?.label == null;
  part("query-label").textContent = query?.label ?? "";
  for (const each of [part("query-name"), part("query-label")]) each.title = each.textContent; // long ones are cut
  part("query-link").href = query ? `/api/items/${query.id}/image` : sent.url;
  image.alt = query ? `${query.label ?? ""} ${query.file}` : "Your image";
  image.src = query ? `/api/items/${query.id}/image` : sent.url;
  part("close").href = address({ item: null, upload: null });
}

function showVerdict(hits, known) {
  const same = hits.filter((hit) => hit.label === known).length;
  part("verdict").hidden = known === null || !hits.length;
  part("verdict").replaceChildren(
    Object.assign(document.createElement("b"), { textContent: `✓ ${same} of ${hits.length}` }), " have the same label");
}

function showControls({ k, label, item, upload: key }) {
  part("k-field").hidden = !isSearch({ item, upload: key });
  part("k").value = k;
  part("k-shown").textContent = k;
  part("label").value = label ?? "";
  part("label").removeAttribute("aria-invalid");
  part("clear-label").hidden = label === null;
}

// ---------------------------------------------------------------- an image is given

async function searchWith(file) {
  if (!gallery) {
    early = file;
    return undefined;
  }
  const name = file.name || "The pasted file";
  const kind = file.type.split("/")[0];
  if (kind && kind !== "image") return fail(`${name} is not an image. Give a JPEG, PNG or WebP, for example.`);
  if (file.size > gallery.limits.bytes) {
    return fail(`${name} is too large: at most ${Math.floor(gallery.limits.bytes / 2 ** 20)} MB.`);
  }
  work.abort();
  work = new AbortController();
  const { signal } = work;
  const key = uploads.size + 1;
  const question = { item: null, upload: key, label: asked().label };
  uploads.set(key, { file, url: URL.createObjectURL(file) });
  say("");
  busy("Sending …");
  scrollTo({ top: 0 });
  try {
    await ask(question, signal);
    await go({ item: null, upload: key });
  } catch (error) {
    if (error.name !== "AbortError") fail(`${name}: ${error.message}`);
  } finally {
    if (work.signal === signal) busy(false);
  }
  return undefined;
}

onImage(searchWith);

// ---------------------------------------------------------------- clicks, keys, controls

addEventListener("click", (event) => {
  const link = event.target.closest("a.card, #home, #close");
  if (!link || event.button || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
  event.preventDefault();
  if (link.id === "home") go({ item: null, upload: null, label: null });
  else if (link.id === "close") go({ item: null, upload: null });
  else go({ item: Number(link.dataset.id), upload: null });
});

addEventListener("popstate", () => render());

addEventListener("keydown", (event) => {
  if (event.metaKey || event.ctrlKey || event.altKey || event.isComposing) return;
  const typing = event.target.matches("input");
  if (event.key === "Escape") {
    if (typing) {
      showControls(asked()); // what was half typed is forgotten
      event.target.blur();
    }
    else if (isSearch(asked())) back();
  } else if (event.key === "/" && !typing && !part("label-field").hidden) {
    event.preventDefault();
    part("label").select();
    part("label").focus();
  } else if (!typing && cards.move(event.key)) event.preventDefault();
});

part("k").addEventListener("input", ({ target }) => {
  part("k-shown").textContent = target.value;
});
part("k").addEventListener("change", ({ target }) => {
  history.replaceState(history.state, "", address({ k: Number(target.value) }));
  render({ focus: false });
});

function suggest() {
  const near = containing(part("label").value.trim()).slice(0, 50);
  part("labels").replaceChildren(...near.map((label) => {
    const option = new Option(label, label);
    option.label = `${label} (${labels.get(label)})`;
    return option;
  }));
}

const containing = (typed) => [...labels.keys()].filter((label) => label.toLowerCase().includes(typed.toLowerCase()));

// What is typed is a label, or is in only one.
function chooseLabel() {
  const typed = part("label").value.trim();
  const near = containing(typed);
  const meant = labels.has(part("label").value) ? part("label").value : !typed ? null
    : near.find((label) => label.toLowerCase() === typed.toLowerCase()) ?? (near.length === 1 ? near[0] : undefined);
  if (meant === undefined) {
    part("label").setAttribute("aria-invalid", "true");
    fail(near.length ? `${near.length} labels contain “${typed}”: choose one of them.`
      : `No image of the gallery has the label “${typed}”.`);
  } else if (meant !== asked().label) go({ label: meant });
  else showControls(asked());
}

part("label").addEventListener("input", () => {
  suggest();
  if (labels.has(part("label").value)) chooseLabel(); // picked from the list, or typed to the end
});
part("label").addEventListener("focus", suggest);
part("label").addEventListener("change", chooseLabel);
part("clear-label").addEventListener("click", () => go({ label: null }));
part("controls").addEventListener("submit", (event) => {
  event.preventDefault();
  chooseLabel();
});
part("more").addEventListener("click", () => loadMore().catch((error) => {
  if (error.name !== "AbortError") fail(error.message);
}));
new IntersectionObserver(([entry]) => {
  if (entry.isIntersecting) part("more").click();
}, { rootMargin: "600px" }).observe(part("more"));

// ---------------------------------------------------------------- begin

function describe({ kind, dim, recall }) {
  const measured = recall === null ? "" : `, recall@${recall.at} ${(100 * recall.recall).toFixed(1)} %`;
  const found = kind === "flat" ? "exact search" : `${kind} index${measured}`;
  part("facts").textContent = `${found}, ${dim} dimensions ·`;
}

try {
  gallery = await get("/api/gallery");
  labels = new Map(gallery.labels.map(({ label, images }) => [label, images]));
  part("label-field").hidden = !labels.size;
  part("gallery-name").textContent = `${gallery.name} · ${count(gallery.images, "image")}`;
  describe(gallery.index);
  render({ focus: false });
  if (early) searchWith(early);
} catch (error) {
  fail(error.message);
}
