// Builds elements. Strings become text nodes, never markup, whatever a model writes.

export function element(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

export const byId = (id) => document.getElementById(id);
export const sum = (values) => values.reduce((total, value) => total + value, 0);

const COUNT = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
export const count = (value) => COUNT.format(value);

// Three digits, and the unit that keeps them readable.
export function duration(ms) {
  if (ms >= 1000) return `${(ms / 1000).toPrecision(3)} s`;
  if (ms >= 100) return `${Math.round(ms)} ms`;
  return `${ms >= 1 ? ms.toPrecision(3) : ms.toFixed(2)} ms`;
}
