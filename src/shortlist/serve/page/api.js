// Questions to the server. A failure is an Error whose message is a sentence for people.

const SILENT = "The server does not answer. Is it still running?";

export async function get(path, parameters = {}, signal = undefined) {
  const given = Object.entries(parameters).filter(([, value]) => value !== null && value !== "");
  const response = await fetch(`${path}?${new URLSearchParams(given)}`, { signal }).catch((error) => {
    throw error.name === "AbortError" ? error : new Error(SILENT);
  });
  const answer = await response.json().catch((error) => {
    if (error.name === "AbortError") throw error; // while it was read
    return {};
  });
  if (!response.ok) throw new Error(answer.detail || SILENT);
  return answer;
}

// An image and what to find. `onProgress` gets the part that is sent, 0 to 1. XMLHttpRequest, as fetch cannot tell.
export function upload(file, parameters, onProgress, signal) {
  const form = new FormData();
  for (const [name, value] of Object.entries(parameters)) if (value) form.append(name, value);
  form.append("image", file, file.name || "pasted");
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.responseType = "json";
    request.upload.onprogress = (event) => onProgress(event.lengthComputable ? event.loaded / event.total : 0);
    request.upload.onload = () => onProgress(1);
    request.onload = () => {
      if (request.status === 200) resolve(request.response);
      else reject(new Error(request.response?.detail || SILENT));
    };
    request.onerror = () => reject(new Error(SILENT));
    request.onabort = () => reject(new DOMException("another search began", "AbortError"));
    signal.addEventListener("abort", () => request.abort());
    request.open("POST", "/api/search");
    request.send(form);
  });
}
