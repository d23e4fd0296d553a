// The curves are rows of tables over m, interpolated between two values of sigma or rho. null stands for infinity.
const tables = JSON.parse(document.getElementById("tables").textContent);
const { means, sigmas, radii } = tables;
const find = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

const mix = (a, b, t) => (t === 0 ? a : a === null || b === null ? null : a + t * (b - a));
const place = (axis, x) => {
  let i = 0;
  while (i < axis.length - 2 && axis[i + 1] <= x) i += 1;
  return [i, (x - axis[i]) / (axis[i + 1] - axis[i])];
};
const row = (table, axis, x) => {
  const [i, t] = place(axis, x);
  return table[i].map((value, k) => mix(value, table[i + 1][k], t));
};
const at = (values, m) => {
  const [i, t] = place(means, m);
  return mix(values[i], values[i + 1], t);
};
const logSigmas = sigmas.map(Math.log);

// The local minima of a curve, the lowest first. Each is that of the parabola through three points of the grid.
const minimisers = (values) => {
  const found = [];
  for (let i = 1; i < values.length - 1; i += 1) {
    const [a, b, c] = [values[i - 1], values[i], values[i + 1]];
    if (a === null || b === null || c === null || !(b < a && b <= c)) continue;
    found.push([means[i] + ((means[1] - means[0]) * (a - c)) / (2 * (a - 2 * b + c)), b]);
  }
  return found.sort((one, other) => one[1] - other[1]);
};

const make = (parent, name, attributes, text) => {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
};

const plot = (svg, curves, { top, bottom, mean, dots = [], band }) => {
  const width = svg.clientWidth || 800;
  const height = Math.round(Math.min(Math.max(0.45 * width, 200), 380));
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const [left, right, upper, lower] = [46, width - 8, 8, height - 30];
  const x = (m) => left + ((right - left) * (m - means[0])) / (means[means.length - 1] - means[0]);
  const y = (v) => lower - ((lower - upper) * (Math.min(Math.max(v, bottom), top) - bottom)) / (top - bottom);
  const points = (values) => values.map((v, i) => (v === null ? null : `${x(means[i]).toFixed(1)} ${y(v).toFixed(1)}`));
  const path = (values) => {
    let pen = "M";
    return points(values).map((p) => { const part = p === null ? "" : pen + p; pen = p === null ? "M" : "L"; return part; }).join("");
  };
  svg.replaceChildren();
  make(svg, "rect", { class: "frame", x: left, y: upper, width: right - left, height: lower - upper });
  for (let m = -4; m <= 4; m += 2) make(svg, "text", { x: x(m), y: height - 8, "text-anchor": "middle" }, m < 0 ? `−${-m}` : m);
  for (let v = Math.ceil(bottom); v <= top; v += 2) make(svg, "text", { x: left - 8, y: y(v) + 5, "text-anchor": "end" }, v);
  if (band) {
    const [above, below] = band.map(points);
    if (!above.includes(null)) make(svg, "path", { class: "band", d: `M${above.join("L")}L${below.reverse().join("L")}Z` });
  }
  make(svg, "line", { class: "here", x1: x(mean), x2: x(mean), y1: upper, y2: lower });
  for (const [name, values] of curves) make(svg, "path", { class: name, d: path(values) });
  for (const [name, m, v, r] of dots) make(svg, "circle", { class: name, cx: x(m), cy: y(v), r });
};

const write = (number, decimals = 3) => {
  if (number === null) return "infinite";
  const text = number.toFixed(decimals);
  return Number(text) === 0 ? (0).toFixed(decimals) : text.replace("-", "−");
};

const draw = () => {
  const loss = tables.losses[find("loss").selectedIndex];
  const span = logSigmas[logSigmas.length - 1] - logSigmas[0];
  const logSigma = logSigmas[0] + (span * find("sigma").valueAsNumber) / find("sigma").max;
  const [rho, delta, mean] = ["rho", "delta", "mean"].map((id) => find(id).valueAsNumber);
  const values = {
    loss: loss.loss,
    expected: row(loss.expected, logSigmas, logSigma),
    ball: row(loss.ball, radii, rho),
    relaxed: row(loss.relaxed, logSigmas, logSigma),
    biconjugate: row(loss.biconjugate, logSigmas, logSigma),
  };
  const regularised = (curve) => curve.map((v, i) => (v === null ? null : v + (delta / 2) * means[i] ** 2));
  const objectives = ["loss", "expected", "ball", "relaxed"].map((name) => [name, regularised(values[name])]);
  const dots = [];
  for (const [name, curve] of objectives.slice(1)) {
    const minima = minimisers(curve);
    find(`${name}-minimiser`).value = minima.length ? write(minima[0][0], 2) : "none";
    minima.forEach(([m, v], i) => dots.push([name, m, v, i === 0 ? 7 : 4]));
  }
  plot(find("objectives"), objectives, { top: 8, bottom: 0, mean, dots });
  const envelopes = ["loss", "expected", "biconjugate"].map((name) => [name, values[name]]);
  plot(find("envelope"), envelopes, { top: 7, bottom: 0, mean, band: [values.biconjugate, values.expected] });
  for (const [name, curve] of Object.entries(values)) find(`${name}-at`).value = write(at(curve, mean));
  find("sigma-value").value = write(Math.exp(logSigma), 2);
  find("rho-value").value = write(rho, 2);
  find("delta-value").value = write(delta, 2);
  find("mean-value").value = write(mean, 2);
  find("sigma").setAttribute("aria-valuetext", write(Math.exp(logSigma), 2));
  find("about").innerHTML = loss.about;
};

for (const id of ["loss", "sigma", "rho", "delta", "mean"]) find(id).addEventListener("input", draw);

// A press or a drag on a plot, with a mouse or a finger, moves m.
for (const id of ["objectives", "envelope"]) {
  const svg = find(id);
  const move = (event) => {
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    const share = (point.x - 46) / (svg.viewBox.baseVal.width - 54);
    find("mean").value = means[0] + share * (means[means.length - 1] - means[0]);
    draw();
  };
  svg.addEventListener("pointerdown", (event) => { svg.setPointerCapture(event.pointerId); move(event); });
  svg.addEventListener("pointermove", (event) => { if (svg.hasPointerCapture(event.pointerId)) move(event); });
}
// In a frame, the page around it has the heading. It is told the height, because a page that is opened as a file may not look it up.
if (window.parent !== window) {
  const root = document.documentElement;
  root.classList.add("framed");
  new ResizeObserver(() => window.parent.postMessage({ height: root.getBoundingClientRect().height }, "*")).observe(root);
}
new ResizeObserver(draw).observe(find("objectives"));
draw();
