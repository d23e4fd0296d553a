// A click on the head of a column, or Enter or Space, sorts its table; a row is a tbody. Empty cells stay last.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    head.setAttribute("aria-sort", "none");
    button.addEventListener("click", () => {
      const first = head.dataset.first ?? "ascending";
      const second = first === "ascending" ? "descending" : "ascending";
      const order = head.getAttribute("aria-sort") === first ? second : first;
      heads.forEach((other) => other.setAttribute("aria-sort", other === head ? order : "none"));
      const value = (body) => {
        const text = body.rows[0].cells[column].dataset.value;
        return text === undefined ? NaN : Number(text);
      };
      const sign = order === "ascending" ? 1 : -1;
      const rows = [...table.tBodies].sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y);
        return sign * (x - y);
      });
      table.append(...rows);
    });
  });
}
