(() => {
  "use strict";
  const table = document.getElementById("rows");
  const heads = [...table.tHead.rows[0].cells];
  const original = [...table.tBodies];

  function keyOf(body, column, numeric) {
    const key = body.rows[0].cells[column].dataset.sort;
    return key === undefined ? null : numeric ? Number(key) : key;
  }

  function order(a, b) {
    if (typeof a === "number") return a - b || 0;
    return a.localeCompare(b, "en", { numeric: true });
  }

  function sortBy(column) {
    const head = heads[column];
    const numeric = "numeric" in head.dataset;
    const down = head.getAttribute("aria-sort") === "ascending";
    const keyed = original.map((body) => [keyOf(body, column, numeric), body]);
    keyed.sort(([a], [b]) => {
      if (a === null || b === null) return (a === null) - (b === null);
      return down ? order(b, a) : order(a, b);
    });
    for (const other of heads) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    table.append(...keyed.map(([, body]) => body));
  }

  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    button.addEventListener("click", () => sortBy(column));
    head.append(button);
  });

  const form = document.getElementById("filters");
  const shown = document.getElementById("shown");

  function filter() {
    const { workload, contender, status } = form.elements;
    const part = workload.value.trim().toLowerCase();
    let count = 0;
    for (const body of original) {
      const of = body.dataset;
      const fits =
        of.workload.toLowerCase().includes(part) &&
        (!contender.value || of.contender === contender.value) &&
        (!status.value || of.status === status.value);
      body.hidden = !fits;
      count += fits;
    }
    shown.textContent = `${count} of ${original.length} rows`;
  }

  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.hidden = false;
  filter();

  function openTarget() {
    const target = document.getElementById(location.hash.slice(1));
    if (target instanceof HTMLDetailsElement) {
      target.open = true;
      target.scrollIntoView();
    }
  }
  addEventListener("hashchange", openTarget);
  openTarget();

  let closed = [];
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details:not([open])")];
    for (const each of closed) each.open = true;
  });
  addEventListener("afterprint", () => {
    for (const each of closed) each.open = false;
  });
})();
