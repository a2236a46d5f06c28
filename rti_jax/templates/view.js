"use strict";
const $ = (id) => document.getElementById(id);
const rows = [...document.querySelectorAll(".row")];
const texts = new Map(rows.map((row) => [row, row.querySelector("summary").textContent.toLowerCase()]));

function filter() {
  const outcome = $("outcome").value, rti = $("rti").value, find = $("find").value.trim().toLowerCase();
  let shown = 0;
  for (const row of rows) {
    const episodes = [...row.querySelectorAll("[data-status]")];
    for (const episode of episodes) episode.hidden = outcome !== "" && episode.dataset.status !== outcome;
    const fits = (!rti || row.dataset.rti.split(" ").includes(rti)) && texts.get(row).includes(find);
    row.hidden = !fits || episodes.every((episode) => episode.hidden);
    shown += !row.hidden;
  }
  $("count").textContent = `${shown} of ${rows.length} shown`;
  $("empty").hidden = shown > 0;
}

function toggle() {
  const open = rows.some((row) => !row.hidden && !row.open);
  for (const row of rows) if (!row.hidden) row.open = open;
}

function label() {
  $("toggle").textContent = rows.some((row) => !row.hidden && !row.open) ? "open all" : "close all";
}

// A finger cannot point: a tap on a marked token shows what its title says.
function tip(event) {
  const token = event.target.closest("b[title]");
  $("tip").hidden = !token;
  $("tip").textContent = token ? `${JSON.stringify(token.textContent)}  ${token.title}` : "";
}

for (const id of ["outcome", "rti", "find"]) $(id).addEventListener("input", () => { filter(); label(); });
$("toggle").addEventListener("click", toggle);
$("wide").addEventListener("change", () => document.body.classList.toggle("wide", $("wide").checked));
document.addEventListener("click", tip);
document.addEventListener("toggle", label, true);
filter();
label();
