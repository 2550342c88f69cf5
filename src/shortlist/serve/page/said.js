// What the page says: progress, status, and what went wrong.

const part = (id) => document.getElementById(id);
let settled = ""; // what the status says of what is shown

export function busy(what) {
  const bar = part("progress");
  bar.hidden = !what;
  part("list").classList.toggle("stale", Boolean(what));
  part("list").setAttribute("aria-busy", String(Boolean(what)));
  bar.removeAttribute("value");
  part("status").textContent = what || settled;
}

export function sent(share) {
  const bar = part("progress");
  if (share < 1) bar.value = 100 * share;
  else bar.removeAttribute("value");
  part("status").textContent = (share < 1 ? `Sending … ${Math.round(100 * share)} %` : "Searching …");
}

// What stays when nothing is under way.
export function status(what) {
  settled = what;
  part("status").textContent = what;
}

export function say(what) {
  part("notice").textContent = what;
  part("notice").hidden = !what;
}

export function fail(sentence) {
  busy(false);
  say(sentence);
  part("notice").scrollIntoView({ block: "nearest" });
}

export function empty(what) {
  part("empty").textContent = what;
  part("empty").hidden = !what;
}
