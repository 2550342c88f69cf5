// An image is chosen, dropped anywhere on the page, or pasted.

import { fail } from "./said.js";

const part = (id) => document.getElementById(id);
let searchWith = () => {};

export function onImage(search) {
  searchWith = search;
}

const choose = () => part("file").click();
part("choose").addEventListener("click", choose);
part("drop").addEventListener("click", choose);
part("file").addEventListener("change", ({ target }) => {
  const [file] = target.files;
  target.value = ""; // the same file again is a change, too
  if (file) searchWith(file);
});

const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
let over = 0; // elements that are dragged over, one inside the other
addEventListener("dragenter", (event) => {
  over += 1;
  part("curtain").hidden = !hasFiles(event);
});
addEventListener("dragleave", () => {
  over = Math.max(0, over - 1);
  if (!over) part("curtain").hidden = true;
});
addEventListener("dragover", (event) => event.preventDefault()); // or the browser would open the file
addEventListener("drop", (event) => {
  event.preventDefault();
  over = 0;
  part("curtain").hidden = true;
  const [file] = event.dataTransfer.files;
  if (file) searchWith(file);
  else fail("What was dropped is not a file. Save the image first, or copy and paste it.");
});
addEventListener("paste", (event) => {
  const [file] = event.clipboardData.files;
  if (file) {
    event.preventDefault();
    searchWith(file);
  } else if (event.target !== part("label")) fail("There is no image in the clipboard.");
});
