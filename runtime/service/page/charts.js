// Charts as SVG, as wide as their place. Texts are outside: they would be stretched.

const SVG = "http://www.w3.org/2000/svg";

function shape(tag, attributes, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function picture(width, label, shapes) {
  const frame = { viewBox: `0 0 ${width} 100`, preserveAspectRatio: "none", role: "img" };
  return shape("svg", { ...frame, "aria-label": label }, ...shapes);
}

// Returns bars from the bottom, with room for at least `least`. Each layer is a class and a value
// for each bar; `marks` are lines at a value; what is larger than `top` is cut there.
export function bars(layers, { top, label, marks = [], least = 1 }) {
  const width = Math.max(least, ...Object.values(layers).map((values) => values.length));
  const height = (value) => (100 * Math.min(value, top)) / (top || 1);
  const gap = width > 120 ? 0 : 0.15;
  const paths = Object.entries(layers).map(([name, values]) => {
    const path = values.map((value, index) => {
      const bar = height(value).toFixed(1);
      return value > 0 ? `M${index + gap} 100v-${bar}h${1 - 2 * gap}v${bar}z` : "";
    });
    return shape("path", { class: name, d: path.join("") });
  });
  const lines = marks.map((value) => {
    const y = 100 - height(value);
    return shape("line", { class: "mark", x1: 0, x2: width, y1: y, y2: y });
  });
  return picture(width, label, [...paths, ...lines]);
}

// Returns one bar of values side by side.
export function stacked(values, label) {
  const total = values.reduce((sum, value) => sum + value, 0) || 1;
  let x = 0;
  const parts = values.map((value, index) => {
    const width = (100 * value) / total;
    x += width;
    return shape("rect", { class: `part-${index}`, x: x - width, width, height: 100 });
  });
  const chart = picture(100, label, parts);
  chart.classList.add("stacked");
  return chart;
}
