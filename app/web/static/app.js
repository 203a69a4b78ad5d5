// What is nicer with JavaScript; every page works without it.
"use strict";

for (const button of document.querySelectorAll("button.copy")) {
  button.hidden = false;
  button.addEventListener("click", async () => {
    const text = document.getElementById(button.dataset.copy).textContent;
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(document.getElementById(button.dataset.copy));
      button.textContent = "Press Ctrl+C";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
}

for (const form of document.querySelectorAll("form[data-fragment]")) {
  const target = document.getElementById(form.dataset.target);
  let asked = 0;
  const update = async () => {
    const query = new URLSearchParams(new FormData(form));
    const mine = ++asked;
    target.setAttribute("aria-busy", "true");
    try {
      const answer = await fetch(`${form.dataset.fragment}?${query}`);
      const text = await answer.text();
      if (mine !== asked) return;
      if (answer.ok) {
        target.innerHTML = text;
        history.replaceState(null, "", `?${query}#what-if`);
      } else {
        form.submit();
      }
    } catch {
      form.submit();
    }
    target.removeAttribute("aria-busy");
  };
  form.addEventListener("change", update);
  form.addEventListener("submit", (event) => { event.preventDefault(); update(); });
}

for (const area of document.querySelectorAll(".drop")) {
  const input = area.querySelector("input[type=file]");
  area.addEventListener("dragover", (event) => { event.preventDefault(); area.classList.add("over"); });
  area.addEventListener("dragleave", () => area.classList.remove("over"));
  area.addEventListener("drop", (event) => {
    event.preventDefault();
    area.classList.remove("over");
    if (event.dataTransfer.files.length) input.files = event.dataTransfer.files;
  });
}

for (const form of document.querySelectorAll("form[data-progress]")) {
  form.addEventListener("submit", (event) => {
    const bar = form.querySelector("progress");
    if (!form.querySelector("input[type=file]").files.length) return;
    event.preventDefault();
    const request = new XMLHttpRequest();
    bar.hidden = false;
    request.upload.addEventListener("progress", (step) => {
      if (step.lengthComputable) bar.value = 100 * step.loaded / step.total;
    });
    request.addEventListener("load", () => {
      document.open();
      document.write(request.responseText);
      document.close();
    });
    request.addEventListener("error", () => form.submit());
    request.open("POST", form.action);
    request.send(new FormData(form));
  });
}
