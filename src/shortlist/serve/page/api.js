// Requests to the server. A failure is an Error whose message is shown to the user.

import { signIn } from "./sign_in.js";

const NO_ANSWER = "The server does not answer. Is it still running?";

export async function get(path, parameters = {}, signal = undefined) {
  const entries = Object.entries(parameters).filter(([, value]) => value !== null && value !== "");
  const response = await fetch(`${path}?${new URLSearchParams(entries)}`, { signal }).catch((error) => {
    throw error.name === "AbortError" ? error : new Error(NO_ANSWER);
  });
  const answer = await response.json().catch((error) => {
    if (error.name === "AbortError") throw error; // aborted while the body was read
    return {};
  });
  if (response.status === 401) return signIn().then(() => get(path, parameters, signal));
  if (!response.ok) throw new Error(answer.detail || NO_ANSWER);
  return answer;
}

// Search with an image. `onProgress` is called with the share that is uploaded, 0 to 1, which fetch does not report.
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
      else if (request.status === 401) resolve(signIn().then(() => upload(file, parameters, onProgress, signal)));
      else reject(new Error(request.response?.detail || NO_ANSWER));
    };
    request.onerror = () => reject(new Error(NO_ANSWER));
    request.onabort = () => reject(new DOMException("another search was started", "AbortError"));
    signal.addEventListener("abort", () => request.abort());
    request.open("POST", "/api/search");
    request.send(form);
  });
}
