// Messages of the page: progress, status and errors.

const byId = (id) => document.getElementById(id);
let idleStatus = ""; // shown when nothing is in progress

// Show that work is in progress; an empty text or false ends it.
export function busy(text) {
  const bar = byId("progress");
  bar.hidden = !text;
  byId("list").classList.toggle("stale", Boolean(text));
  byId("list").setAttribute("aria-busy", String(Boolean(text)));
  bar.removeAttribute("value");
  byId("status").textContent = text || idleStatus;
}

// Show the progress of an upload, a share between 0 and 1.
export function showUpload(share) {
  const bar = byId("progress");
  if (share < 1) bar.value = 100 * share;
  else bar.removeAttribute("value");
  byId("status").textContent = share < 1 ? `Uploading … ${Math.round(100 * share)} %` : "Searching …";
}

// Set the status that is shown when nothing is in progress.
export function setStatus(text) {
  idleStatus = text;
  byId("status").textContent = text;
}

export function showNotice(text) {
  byId("notice").textContent = text;
  byId("notice").hidden = !text;
}

export function showError(text) {
  busy(false);
  showNotice(text);
  byId("notice").scrollIntoView({ block: "nearest" });
}

// Show a text in place of the images; an empty text hides it.
export function showEmpty(text) {
  byId("empty").textContent = text;
  byId("empty").hidden = !text;
}
