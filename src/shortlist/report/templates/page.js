"use strict";
// Pictures: each is stored in the page once.
const pictures = JSON.parse(document.getElementById("pictures").textContent);
for (const image of document.querySelectorAll("img[data-picture]")) {
  image.src = "data:image/webp;base64," + pictures[image.dataset.picture];
}

// Plots: show the value nearest to the pointer, or move with the arrow keys.
for (const plot of document.querySelectorAll(".plot svg")) {
  const points = JSON.parse(plot.dataset.points);
  const output = plot.parentElement.querySelector("output");
  const pointer = document.createElementNS("http://www.w3.org/2000/svg", "circle");
  pointer.setAttribute("r", 4.5);
  pointer.setAttribute("class", "pointer");
  let at = points.length;
  const show = (index) => {
    at = Math.max(0, Math.min(points.length - 1, index));
    const [x, y, text] = points[at];
    pointer.setAttribute("cx", x);
    pointer.setAttribute("cy", y);
    plot.append(pointer);
    output.textContent = text;
  };
  const nearest = (event) => {
    const box = plot.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * plot.viewBox.baseVal.width;
    let best = 0;
    points.forEach((point, index) => {
      if (Math.abs(point[0] - x) < Math.abs(points[best][0] - x)) best = index;
    });
    show(best);
  };
  const leave = () => {
    pointer.remove();
    output.textContent = "";
    at = points.length;
  };
  plot.addEventListener("pointermove", nearest);
  plot.addEventListener("pointerdown", nearest);
  plot.addEventListener("pointerleave", leave);
  plot.addEventListener("blur", leave);
  plot.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -points.length, End: points.length }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    show(at === points.length && step < 0 ? points.length + step : at === points.length ? 0 : at + step);
  });
}

// Queries: show a group of them, or all of a class.
for (const chooser of document.querySelectorAll(".chooser")) {
  const cards = [...chooser.parentElement.querySelectorAll(".card")];
  const buttons = [...chooser.querySelectorAll("button")];
  const field = chooser.querySelector("input");
  const output = chooser.querySelector("output");
  let group = buttons[0].dataset.group;
  const update = () => {
    const wanted = field ? field.value.trim().toLowerCase() : "";
    const names = new Set(cards.map((card) => card.dataset.class.toLowerCase()));
    const fits = (card) => {
      const name = card.dataset.class.toLowerCase();
      if (wanted) return names.has(wanted) ? name === wanted : name.includes(wanted);
      return JSON.parse(card.dataset.groups).includes(group);
    };
    let shown = 0;
    for (const card of cards) {
      card.hidden = !fits(card);
      shown += !card.hidden;
    }
    for (const button of buttons) button.setAttribute("aria-pressed", String(!wanted && button.dataset.group === group));
    output.textContent = shown ? `${shown} of ${cards.length} queries` : `None of the ${cards.length} queries shown here is of this class.`;
  };
  for (const button of buttons) {
    button.addEventListener("click", () => {
      group = button.dataset.group;
      if (field) field.value = "";
      update();
    });
  }
  if (field) field.addEventListener("input", update);
  chooser.hidden = false;
  update();
}
