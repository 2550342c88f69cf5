// Image input: a file that is chosen, dropped anywhere on the page, or pasted.

import { showError } from "./messages.js";

const byId = (id) => document.getElementById(id);
let searchWith = () => {};

export function onImage(search) {
  searchWith = search;
}

const choose = () => byId("file").click();
byId("choose").addEventListener("click", choose);
byId("drop").addEventListener("click", choose);
byId("file").addEventListener("change", ({ target }) => {
  const [file] = target.files;
  target.value = ""; // so that choosing the same file again is a change
  if (file) searchWith(file);
});

const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
let depth = 0; // number of nested elements under the dragged file
addEventListener("dragenter", (event) => {
  depth += 1;
  byId("curtain").hidden = !hasFiles(event);
});
addEventListener("dragleave", () => {
  depth = Math.max(0, depth - 1);
  if (!depth) byId("curtain").hidden = true;
});
addEventListener("dragover", (event) => event.preventDefault()); // otherwise the browser opens the file
addEventListener("drop", (event) => {
  event.preventDefault();
  depth = 0;
  byId("curtain").hidden = true;
  const [file] = event.dataTransfer.files;
  if (file) searchWith(file);
  else showError("This is not a file. Save the image first, or copy and paste it.");
});
addEventListener("paste", (event) => {
  const [file] = event.clipboardData.files;
  if (file) {
    event.preventDefault();
    searchWith(file);
  } else if (!event.target.matches("input")) showError("The clipboard contains no image.");
});
