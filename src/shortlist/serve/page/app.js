// The search page. Its state is in the URL (?item, ?upload, ?k, ?label, ?min_score), so that the Back button works.

import { get, upload } from "./api.js";
import * as cards from "./cards.js";
import { onImage } from "./image_input.js";
import { busy, setStatus, showEmpty, showError, showNotice, showUpload } from "./messages.js";

const PAGE_SIZE = 60; // items of the gallery per request
const MAX_RESULTS = 100; // results per request; showing fewer of them needs no other request
const byId = (id) => document.getElementById(id);
const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

let gallery = null;
let early = null; // an image that was dropped before the gallery was known
let labels = new Map(); // label -> number of images
let work = new AbortController(); // of the current request; a new search aborts it
let browsed = { label: null, items: [], more: true }; // the part of the gallery that is loaded
const uploads = new Map(); // key -> {file, url} of the uploads since the page was loaded
const cache = new Map(); // query -> response

history.scrollRestoration = "manual";

// ---------------------------------------------------------------- URL

function currentState() {
  const parameters = new URLSearchParams(location.search);
  const number = (name) => (/^\d+$/.test(parameters.get(name) ?? "") ? Number(parameters.get(name)) : null);
  const k = Math.min(MAX_RESULTS, Math.max(1, number("k") ?? 20));
  const minScore = parameters.has("min_score") ? Number(parameters.get("min_score")) || 0 : null;
  return { item: number("item"), upload: number("upload"), k, label: parameters.get("label") || null, minScore };
}

function urlWith(change) {
  const { item, upload: key, k, label, minScore } = { ...currentState(), ...change };
  const entries = Object.entries({ item, upload: key, k: k === 20 ? null : k, label, min_score: minScore });
  const query = new URLSearchParams(entries.filter(([, value]) => value !== null)).toString();
  return query ? `/?${query}` : "/";
}

function navigate(change, { replace = false } = {}) {
  history.replaceState({ ...history.state, scroll: scrollY }, "");
  const depth = (history.state?.depth ?? 0) + (replace ? 0 : 1);
  history[replace ? "replaceState" : "pushState"]({ depth, scroll: replace ? scrollY : 0 }, "", urlWith(change));
  return render();
}

function back() {
  if (history.state?.depth) history.back();
  else navigate({ item: null, upload: null });
}

// ---------------------------------------------------------------- rendering

async function render({ focus = true } = {}) {
  if (!gallery) return; // rendered once the gallery is known
  const state = currentState();
  work.abort();
  work = new AbortController();
  const { signal } = work;
  showNotice("");
  showControls(state);
  try {
    const shown = await (isSearch(state) ? showResults : browse)(state, signal);
    if (shown && focus && isSearch(state)) cards.focusFirst();
    scrollTo(0, history.state?.scroll ?? 0);
  } catch (error) {
    if (error.name !== "AbortError") showError(error.message);
  } finally {
    if (work.signal === signal) busy(false);
  }
}

// The minimum score of a result; -1: none.
const lowestScore = ({ minScore }) => minScore ?? gallery?.min_score ?? -1;

const isSearch = ({ item, upload: key }) => item !== null || key !== null;

async function showResults(state, signal) {
  if (state.upload !== null && !uploads.has(state.upload)) {
    await navigate({ upload: null }, { replace: true });
    showError("Uploads are not stored, so this image is no longer available. Please upload it again.");
    return false;
  }
  busy("Searching …");
  const response = await request(state, signal);
  const query = response.query;
  const hits = response.results.slice(0, state.k);
  const queryLabels = hits.every((hit) => hit.labels.length) ? query?.labels ?? [] : [];
  showQuery(state, query);
  const strong = hits.filter((hit) => hit.score >= lowestScore(state)).length; // hits are sorted by their scores
  showAgreement(hits.slice(0, strong), queryLabels);
  const links = hits.map((hit, index) =>
    cards.card(hit, { href: urlWith({ item: hit.id, upload: null }), rank: index + 1, queryLabels, weak: index >= strong }));
  cards.show(links);
  byId("more").hidden = true;
  byId("heading").textContent = strong || !hits.length ? "Most similar" : "Nothing similar enough";
  showEmpty(hits.length ? "" : "No images found.");
  const weak = strong < hits.length ? `, ${hits.length - strong} below the minimum score ${lowestScore(state)}` : "";
  setStatus(`${count(hits.length, "result")}${state.label === null ? "" : ` with the label ${state.label}`}${weak}`);
  document.title = `${query?.label ?? query?.file ?? uploads.get(state.upload).file.name} · shortlist`;
  return true;
}

// Search with an item or an upload. An upload is sent again only if the label changes.
async function request({ item, upload: key, label }, signal) {
  const query = JSON.stringify([item, key, label]);
  if (!cache.has(query)) {
    const k = Math.min(MAX_RESULTS, gallery.limits.results);
    const response = item !== null
      ? await get(`/api/items/${item}/similar`, { k, label, min_score: -1 }, signal)
      : await upload(uploads.get(key).file, { k, label, min_score: -1 }, showUpload, signal);
    if (cache.size >= 50) cache.delete(cache.keys().next().value);
    cache.set(query, response);
  }
  return cache.get(query);
}

async function browse({ label }, signal) {
  byId("query").hidden = true;
  byId("welcome").hidden = false;
  byId("heading").textContent = label === null ? "All images" : label;
  document.title = `${gallery.name} · shortlist`;
  if (browsed.label !== label || !browsed.items.length) browsed = { label, items: [], more: true };
  cards.show(browsed.items.map(browseCard));
  if (!browsed.items.length) await loadMore(signal);
  else afterBrowsing();
  return true;
}

const browseCard = (item) => cards.card(item, { href: urlWith({ item: item.id, upload: null }) });

async function loadMore(signal = work.signal) {
  const into = browsed;
  if (!into.more || into.loading) return;
  into.loading = true;
  try {
    if (!into.items.length) busy("Loading …");
    const response = await get("/api/items", { label: into.label, offset: into.items.length, limit: PAGE_SIZE }, signal);
    into.items.push(...response.items);
    into.more = response.more;
    if (into === browsed && !isSearch(currentState())) cards.show(response.items.map(browseCard), { append: true });
  } finally {
    into.loading = false;
  }
  if (into === browsed && !isSearch(currentState())) afterBrowsing();
}

function afterBrowsing() {
  byId("more").hidden = !browsed.more;
  showEmpty(browsed.items.length ? "" : "No images.");
  const all = browsed.label === null ? gallery.images : labels.get(browsed.label) ?? browsed.items.length;
  setStatus(browsed.more ? `${browsed.items.length.toLocaleString("en")} of ${count(all, "image")}` : count(all, "image"));
}

function showQuery({ upload: key }, query) {
  const image = byId("query-image");
  const uploaded = uploads.get(key);
  byId("query").hidden = false;
  byId("welcome").hidden = true;
  byId("query-kind").textContent = query ? "Image of the gallery" : "Your image";
  byId("query-name").textContent = query ? query.file : uploaded.file.name || "Pasted image";
  byId("query-label").hidden = query?.label == null;
  byId("query-label").textContent = query?.label ?? "";
  byId("query-fields").textContent = query ? cards.fieldTexts(query).join(" · ") : "";
  for (const each of [byId("query-name"), byId("query-label")]) each.title = each.textContent; // long texts are truncated
  byId("query-link").href = query ? `/api/items/${query.id}/image` : uploaded.url;
  image.alt = query ? `${query.label ?? ""} ${query.file}` : "Your image";
  image.src = query ? `/api/items/${query.id}/image` : uploaded.url;
  byId("close").href = urlWith({ item: null, upload: null });
}

function showAgreement(hits, queryLabels) {
  const same = hits.filter((hit) => cards.shareLabel(hit.labels, queryLabels)).length;
  byId("verdict").hidden = !queryLabels.length || !hits.length;
  byId("verdict").replaceChildren(
    Object.assign(document.createElement("b"), { textContent: `✓ ${same} of ${hits.length}` }), queryLabels.length > 1 ? " share a label" : " have the same label");
}

function showControls({ k, label, item, upload: key, minScore }) {
  byId("min-score-field").hidden = !isSearch({ item, upload: key });
  byId("min-score").value = lowestScore({ minScore }) === -1 ? "" : lowestScore({ minScore });
  byId("k-field").hidden = !isSearch({ item, upload: key });
  byId("k").value = k;
  byId("k-shown").textContent = k;
  byId("label").value = label ?? "";
  byId("label").removeAttribute("aria-invalid");
  byId("clear-label").hidden = label === null;
}

// ---------------------------------------------------------------- uploads

async function searchWith(file) {
  if (!gallery) {
    early = file;
    return undefined;
  }
  const name = file.name || "The pasted file";
  const kind = file.type.split("/")[0];
  if (kind && kind !== "image") return showError(`${name} is not an image. Use a JPEG, PNG or WebP file, for example.`);
  if (file.size > gallery.limits.bytes) {
    return showError(`${name} is too large: at most ${Math.floor(gallery.limits.bytes / 2 ** 20)} MB are allowed.`);
  }
  work.abort();
  work = new AbortController();
  const { signal } = work;
  const key = uploads.size + 1;
  const state = { item: null, upload: key, label: currentState().label };
  uploads.set(key, { file, url: URL.createObjectURL(file) });
  showNotice("");
  busy("Uploading …");
  scrollTo({ top: 0 });
  try {
    await request(state, signal);
    await navigate({ item: null, upload: key });
  } catch (error) {
    if (error.name !== "AbortError") showError(`${name}: ${error.message}`);
  } finally {
    if (work.signal === signal) busy(false);
  }
  return undefined;
}

onImage(searchWith);

// ---------------------------------------------------------------- clicks, keys and controls

addEventListener("click", (event) => {
  const link = event.target.closest("a.card, #home, #close");
  if (!link || event.button || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
  event.preventDefault();
  if (link.id === "home") navigate({ item: null, upload: null, label: null });
  else if (link.id === "close") navigate({ item: null, upload: null });
  else navigate({ item: Number(link.dataset.id), upload: null });
});

addEventListener("popstate", () => render());

addEventListener("keydown", (event) => {
  if (event.metaKey || event.ctrlKey || event.altKey || event.isComposing) return;
  const typing = event.target.matches("input");
  if (event.key === "Escape") {
    if (typing) {
      showControls(currentState()); // discards the typed text
      event.target.blur();
    }
    else if (isSearch(currentState())) back();
  } else if (event.key === "/" && !typing && !byId("label-field").hidden) {
    event.preventDefault();
    byId("label").select();
    byId("label").focus();
  } else if (!typing && cards.move(event.key)) event.preventDefault();
});

byId("k").addEventListener("input", ({ target }) => {
  byId("k-shown").textContent = target.value;
});
byId("k").addEventListener("change", ({ target }) => {
  history.replaceState(history.state, "", urlWith({ k: Number(target.value) }));
  render({ focus: false });
});

byId("min-score").addEventListener("change", ({ target }) => {
  const minScore = target.value === "" ? -1 : Math.min(1, Math.max(-1, Number(target.value)));
  history.replaceState(history.state, "", urlWith({ minScore }));
  render({ focus: false });
});

function suggest() {
  const matches = containing(byId("label").value.trim()).slice(0, 50);
  byId("labels").replaceChildren(...matches.map((label) => {
    const option = new Option(label, label);
    option.label = `${label} (${labels.get(label)})`;
    return option;
  }));
}

const containing = (typed) => [...labels.keys()].filter((label) => label.toLowerCase().includes(typed.toLowerCase()));

// Choose the label that was typed, or the only label that contains it.
function chooseLabel() {
  const typed = byId("label").value.trim();
  const matches = containing(typed);
  const chosen = labels.has(byId("label").value) ? byId("label").value : !typed ? null
    : matches.find((label) => label.toLowerCase() === typed.toLowerCase()) ?? (matches.length === 1 ? matches[0] : undefined);
  if (chosen === undefined) {
    byId("label").setAttribute("aria-invalid", "true");
    showError(matches.length ? `${matches.length} labels contain “${typed}”: choose one of them.`
      : `No image of the gallery has the label “${typed}”.`);
  } else if (chosen !== currentState().label) navigate({ label: chosen });
  else showControls(currentState());
}

byId("label").addEventListener("input", () => {
  suggest();
  if (labels.has(byId("label").value)) chooseLabel(); // chosen from the list, or typed completely
});
byId("label").addEventListener("focus", suggest);
byId("label").addEventListener("change", chooseLabel);
byId("clear-label").addEventListener("click", () => navigate({ label: null }));
byId("controls").addEventListener("submit", (event) => {
  event.preventDefault();
  chooseLabel();
});
byId("more").addEventListener("click", () => loadMore().catch((error) => {
  if (error.name !== "AbortError") showError(error.message);
}));
new IntersectionObserver(([entry]) => {
  if (entry.isIntersecting) byId("more").click();
}, { rootMargin: "600px" }).observe(byId("more"));

// ---------------------------------------------------------------- start

function showIndex({ kind, dim, recall }) {
  const quality = recall === null ? "" : `, recall@${recall.at} ${(100 * recall.recall).toFixed(1)} %`;
  const search = kind === "flat" ? "exact search" : `${kind} index${quality}`;
  byId("facts").textContent = `${search}, ${dim} dimensions ·`;
}

try {
  gallery = await get("/api/gallery");
  labels = new Map(gallery.labels.map(({ label, images }) => [label, images]));
  byId("label-field").hidden = !labels.size;
  byId("gallery-name").textContent = `${gallery.name} · ${count(gallery.images, "image")}`;
  showIndex(gallery.index);
  render({ focus: false });
  if (early) searchWith(early);
} catch (error) {
  showError(error.message);
}
